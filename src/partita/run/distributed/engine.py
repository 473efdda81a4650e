"""What users hold: a plan that runs on this rank and all others.

    engine = partita.execute(plan, module, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3))
    for batch in data:
        loss = engine.step(*batch)

The module is exported, checked against the plan, lowered and verified with the arguments of the
first step (or of `prepare`); nothing runs before that has passed on every rank.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from partita.capture.reference_module import ReferenceModule
from partita.cluster import Cluster
from partita.engine import run as simulate
from partita.errors import PartitaError, PlanError, RunError, VerificationError
from partita.graph import Graph, training_graph
from partita.graph.rebatch import batch_dims, rebatch
from partita.graph.record import multiplied_in
from partita.jobs.workload import load_cluster
from partita.lower import lower_plan
from partita.lower.pipeline import Lowered
from partita.plans import Plan, read_plan
from partita.run.distributed import checkpoints
from partita.run.distributed.comm import Communicator, Lines
from partita.run.distributed.faults import FaultBoard
from partita.run.distributed.feed import Feed
from partita.run.distributed.held import MakeOptimizer, gradients_of, joined, shapes_of
from partita.run.distributed.launch import meet, open_world
from partita.run.distributed.loss import WithLoss
from partita.run.distributed.model import RunModel
from partita.run.distributed.opwise import RankContext
from partita.run.distributed.preflight import agree, check_alike, check_model, check_training
from partita.run.distributed.walk import RankWalk, Recorder, lines_of
from partita.run.draws import first_place
from partita.verify import verify_meaning, verify_program

T = torch.Tensor
TIMEOUT_S = 300.0


def execute(
    plan: Plan | str | Path,
    module: torch.nn.Module,
    *,
    optimizer: MakeOptimizer | None = None,
    loss: Callable[[Any, Any], T] | None = None,
    device: str | torch.device | None = None,
    example: tuple[Any, ...] | None = None,
    cluster: Cluster | None = None,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
    recorder: Recorder | None = None,
    keep_gradients: bool = False,
    matmul_dtype: str | None = None,
    backend: str | None = None,
) -> "Engine":
    """A plan that runs: called by every rank of torchrun, with the same plan and module.

    The module returns its loss; or `loss` is given, and each step's last argument goes to it. The
    optimizer is made of this rank's parameters. `recorder` is told when each task starts and ends.
    With `example`, the arguments of one whole batch, everything is checked at once, else in the
    first step. A run multiplies in the type of its module: a plan with products in fp8 is refused
    unless `matmul_dtype` says that this is wanted. `backend` is torch.distributed's: gloo on CPUs
    and NCCL on GPUs, unless several ranks share a GPU, which only gloo does.
    """
    known = plan if isinstance(plan, Plan) else read_plan(plan)
    if known.model.matmul_dtype and matmul_dtype != known.model.dtype:
        raise PlanError(
            f"the linear layers of the plan multiply in {known.model.matmul_dtype}, and a run "
            f"multiplies in the model's {known.model.dtype}",
            fix=f"run it with --matmul-dtype {known.model.dtype} (in Python "
            f'matmul_dtype="{known.model.dtype}"), or plan without matmul-dtype',
            field="matmul-dtype",
        )
    own = _own_device(device)
    engine = Engine(
        known, module if loss is None else WithLoss(module, loss), optimizer, own,
        cluster=cluster, seed=seed, timeout_s=timeout_s, recorder=recorder,
        keep_gradients=keep_gradients, backend=backend,
    )  # fmt: skip
    if example is not None:
        engine.prepare(*example)
    return engine


def _own_device(device: str | torch.device | None) -> torch.device:
    """This rank's device: `cuda` is the GPU of its number on this machine."""
    asked = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if asked.type != "cuda" or asked.index is not None:
        return asked
    if not torch.cuda.is_available():
        raise PlanError("there is no GPU here", fix="run it on the cpu", field="device")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


class Engine:
    """A plan on this rank: every rank makes one, and calls `step` with every batch."""

    def __init__(
        self, plan: Plan, module: torch.nn.Module, optimizer: MakeOptimizer | None,
        device: torch.device, *, cluster: Cluster | None = None, seed: int = 0,
        timeout_s: float = TIMEOUT_S, recorder: Recorder | None = None,
        keep_gradients: bool = False, backend: str | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.module, self.optimizer, self.device = plan, module, optimizer, device
        self.cluster = cluster
        self.seed, self.timeout_s, self.recorder = seed, timeout_s, recorder
        self.keep_gradients = keep_gradients
        self.devices = tuple(sorted({d for s in plan.stages for d in s.mesh.devices}))
        self.rank_of = {device: rank for rank, device in enumerate(self.devices)}
        self.steps = 0
        self._walk: RankWalk | None = None
        world = meet(len(self.devices))
        self.rank, self.owns_world = world.rank, not world.is_open
        self.board = FaultBoard(world.store, self.rank, len(self.devices), timeout_s)
        _one_line_errors()
        self.board.start()
        with self.board.guard("meeting the others"):
            open_world(world, len(self.devices), device, timeout_s, backend)

    # Before the first step.

    @property
    def walk(self) -> RankWalk:
        """This rank's tasks and what it holds."""
        if self._walk is None:
            raise PlanError(
                "the engine has not seen the model's arguments yet",
                fix="take a step, or give execute(..., example=args)",
                field="engine",
            )
        return self._walk

    def prepare(self, *args: Any, **kwargs: Any) -> "Engine":
        """Check, lower and verify with the arguments of one call of the whole batch."""
        self.board.start()
        try:
            with self.board.guard("preparing the first step"):
                return self._prepared(args, kwargs)
        except PartitaError:
            self.board.close()
            raise

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Engine":
        model, graph = agree(lambda: self._checked(args, kwargs), self.board.waiting)
        check_alike(self.plan, graph, self.device)
        lowered = agree(lambda: self._verified(graph), self.board.waiting)
        count, batch = self.plan.schedule.num_microbatches, self.plan.model.batch
        small = rebatch(graph, batch // count)
        shapes = shapes_of(small, lowered.program)
        self.feed = Feed(small, count, batch, self.device)
        lines = tuple(sorted(line for line in lines_of(lowered, self.rank_of) if len(line) > 1))
        ranks = range(len(self.devices))
        links = tuple((a, b) for a in ranks for b in ranks if a != b)
        comm = Communicator(Lines(lines, lines, links), self.device, self.timeout_s)
        # Of the whole batch: in a micro-batch of one sample a merged dim does not show the batch.
        context = RankContext(
            small, model, comm, self.device, batch_dims(graph), batch // count, self.feed,
            gradients_of(lowered.program), self.keep_gradients,
        )  # fmt: skip
        walk = RankWalk(
            lowered, context, self.devices[self.rank], self.rank_of, shapes, self.recorder
        )
        walk.note = self.board.note
        if walk.steps is not None:
            walk.steps.attach(walk)
        agree(lambda: walk.hold(dict(model.held), self.optimizer), self.board.waiting)
        self._walk, self.model = walk, model
        self.names = self._module_names()
        maker = context.ops_of[small.outputs[0]]
        home = next(s for s in lowered.stages if any(each.op == maker for each in s.splits))
        self.speaker = self.rank_of[home.mesh.devices[0]]  # the rank that tells the loss
        self.board.waiting = comm.waiting
        return self

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[RunModel, Graph]:
        model = RunModel(self.module, tuple(args), kwargs, self.device)
        check_training(self.plan, model.graph)
        ref = self.plan.model
        own = model.graph
        if ref.matmul_dtype:  # as the plan has it; ops are computed by the module in any case
            own = multiplied_in(own, ref.matmul_dtype)
        graph = training_graph(own, ref.optimizer, grad_dtype=ref.grad_dtype)
        check_model(self.plan, graph)
        return model, graph

    def _verified(self, graph: Graph) -> Lowered:
        """The program of the plan; one that could hang or compute something else is refused."""
        plan = self.plan
        cluster = self.cluster or load_cluster(plan)
        lowered = lower_plan(plan.stages, plan.schedule, graph, cluster, simulate)
        wrong = (
            *verify_program(lowered.program),
            *verify_meaning(lowered.program, graph, lowered.stages, plan.schedule),
        )
        if wrong:
            raise VerificationError(wrong)
        return lowered

    # Steps.

    def step(self, *args: Any, local: bool = False, **kwargs: Any) -> float:
        """One step on the global batch (or this rank's part of it); the loss, on every rank."""
        if self._walk is None:
            if local:
                raise PlanError(
                    "the first step has only this rank's part of the batch",
                    fix="give execute(..., example=args) one whole batch before",
                    field="step",
                )
            self.prepare(*args, **kwargs)
        self.feed.take(self.model.arguments(args, kwargs), local=local)
        self.model.start = first_place(self.seed, self.steps)
        self.board.is_busy = True
        self.board.note("the start of a step")
        state = torch.get_rng_state() if self.model.is_random else None
        try:
            loss = self._shared_loss(self.walk.step())
        except BaseException as error:
            fault = self.board.explain(error)
            self.board.close()
            raise fault from (error if os.environ.get("PARTITA_TRACEBACK") else None)
        finally:
            if state is not None:
                torch.set_rng_state(state)
            self.board.is_busy = False
            self.board.note("between steps")
        self.steps += 1
        return loss

    def _shared_loss(self, losses: list[T]) -> float:
        """The mean over the micro-batches, from the first rank that knows it to all."""
        total = torch.zeros(1, dtype=torch.float64, device=self.walk.run.comm.home)
        if self.rank == self.speaker:
            total += sum(float(loss) for loss in losses) / len(losses)
        self.board.note("sharing the loss")
        self.walk.run.comm.waiting.now = True
        dist.all_reduce(total)
        self.walk.run.comm.waiting.now = False
        return float(total)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """This rank's optimizers, one for each of its stages that has parameters."""
        states = self.walk.states.values()
        return [state.optimizer for state in states if state.optimizer is not None]

    # State.

    def full_state_dict(self) -> dict[str, T] | None:
        """The state dict of the plain module, on rank 0; None on others."""
        whole = self._gathered(
            lambda state: {
                name: (stored.value, stored.tensor) for name, stored in state.stored.items()
            }
        )
        if whole is None:
            return None
        plain = self.module.module if isinstance(self.module, WithLoss) else self.module
        prefix = "module." if isinstance(self.module, WithLoss) else ""
        named = {name: own for own, names in self.names.items() for name in names}
        result = {}
        for name, tensor in plain.state_dict(keep_vars=True).items():
            own = named.get(prefix + name, "")
            result[name] = whole.get(own, tensor.detach()).cpu()
        if isinstance(plain, ReferenceModule):
            plain.pack(whole, result)
        return result

    def full_gradients(self) -> dict[str, T] | None:
        """The gradients of the last step by parameter, on rank 0 (with keep_gradients=True)."""
        return self._gathered(lambda state: dict(state.last_gradients))

    def _module_names(self) -> dict[str, list[str]]:
        """The names in the module's state dict, by those of the graph; tied ones have several."""
        places = self.model.captured.places
        names: dict[str, list[str]] = {}
        for each in self.model.captured.record.inputs:
            if each.kind in ("parameter", "buffer") and each.persistent:
                names.setdefault(str(places[each.name]), []).append(each.target)
        pointers = {t.data_ptr(): names[n] for n, t in self.model.held.items() if n in names}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            known = pointers.get(tensor.data_ptr())
            if known is not None and name not in known and tensor.numel():
                known.append(name)
        return names

    def _gathered(self, part: Callable[[Any], dict[str, Any]]) -> dict[str, T] | None:
        """Whole tensors from what all ranks hold, on rank 0."""
        walk = self.walk
        own = {
            number: {name: (v, tensor.detach().cpu()) for name, (v, tensor) in part(state).items()}
            for number, state in walk.states.items()
        }
        gathered: list[Any] | None = [None] * len(self.devices) if self.rank == 0 else None
        with self.board.guard("gathering the state"):
            dist.gather_object(own, gathered)
        if gathered is None:
            return None
        whole: dict[str, T] = {}
        for number, stage in enumerate(walk.stages):
            mesh = stage.mesh
            holders = {mesh.place(d): gathered[self.rank_of[d]][number] for d in mesh.devices}
            for name, (value, _) in next(iter(holders.values())).items():
                if name not in whole:
                    parts = {place: held[name][1] for place, held in holders.items()}
                    gates = walk.shapes.num_gates(name)
                    whole[name] = joined(parts, value, walk.shapes.shape(name), mesh.axes, gates)
        return whole

    def save(self, path: str | Path) -> None:
        """Write a checkpoint that loads into the plain module and into any plan of the model."""
        with self.board.guard("saving a checkpoint"):
            checkpoints.save(self.walk, self.names, self.steps, Path(path))
        self.board.tell("between steps")

    def load(self, path: str | Path) -> int:
        """Go on from a checkpoint; the number of steps that were taken before it."""
        folder = Path(path)
        with self.board.guard("loading a checkpoint"):
            self.steps = agree(
                lambda: checkpoints.load(self.walk, self.names, folder), self.board.waiting
            )
        return self.steps

    # The end.

    def close(self) -> None:
        """End the run: no more steps. Called by leaving a `with` block, too."""
        if self._walk is not None and not self.board.closed.is_set():
            with self.board.guard("the end"):
                dist.barrier()
        self.board.close()
        if self.owns_world and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        if error is None:
            self.close()
        else:
            self.board.close()


def _one_line_errors() -> None:
    """A fault of a run, or a refusal, that nobody catches is one line, not a traceback per rank.

    What all ranks refuse alike rank 0 says.
    """
    before = sys.excepthook
    if getattr(before, "is_partita", False):
        return

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if isinstance(error, RunError):
            sys.stderr.write(f"partita: {error}\n")
            sys.stderr.flush()
            os._exit(1)  # others may be stuck in a collective with us
        if isinstance(error, PartitaError) and not os.environ.get("PARTITA_TRACEBACK"):
            alone = not dist.is_initialized() or dist.get_rank() == 0 or "rank" in str(error)
            if alone:
                sys.stderr.write(f"partita: {error}\n")
            return
        before(kind, error, tb)

    hook.is_partita = True  # type: ignore[attr-defined]
    sys.excepthook = hook
