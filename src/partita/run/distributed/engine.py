"""What users hold: a plan that runs. See `partita.execute`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from partita.cluster import Cluster, resolve
from partita.engine import run as simulate
from partita.errors import PlanError, VerificationError
from partita.graph import training_graph
from partita.graph.rebatch import batch_dims, rebatch
from partita.lower import lower_plan
from partita.plans import Plan
from partita.run.distributed.comm import Communicator, Lines
from partita.run.distributed.feed import Feed
from partita.run.distributed.held import MakeOptimizer, joined, shapes_of
from partita.run.distributed.model import RunModel
from partita.run.distributed.opwise import RankContext
from partita.run.distributed.walk import RankWalk, Recorder, lines_of
from partita.run.local.shards import places
from partita.verify import verify_meaning, verify_program

T = torch.Tensor


class Engine:
    """A plan on this rank: every rank makes one, and calls `step` with every batch."""

    def __init__(
        self, plan: Plan, module: torch.nn.Module, optimizer: MakeOptimizer | None,
        device: torch.device, *, cluster: Cluster | None = None, seed: int = 0,
        timeout_s: float = 300.0, recorder: Recorder | None = None, keep_gradients: bool = False,
    ) -> None:  # fmt: skip
        self.plan, self.module, self.optimizer, self.device = plan, module, optimizer, device
        self.cluster = cluster
        self.seed, self.timeout_s, self.recorder = seed, timeout_s, recorder
        self.keep_gradients = keep_gradients
        self.devices = tuple(sorted({d for s in plan.stages for d in s.mesh.devices}))
        self.rank_of = {device: rank for rank, device in enumerate(self.devices)}
        self.steps = 0
        self.walk: RankWalk | None = None
        self.model: RunModel | None = None
        self.feed: Feed | None = None

    # Before the first step.

    def prepare(self, *args: Any, **kwargs: Any) -> "Engine":
        """Export, check, lower and verify with the arguments of one call of the whole batch."""
        model = RunModel(self.module, tuple(args), kwargs, self.device)
        plan = self.plan
        graph = model.graph
        if plan.model.training:
            graph = training_graph(graph, plan.model.optimizer)
        if graph.fingerprint() != plan.model.fingerprint:
            raise PlanError(
                f"the plan is for another model, or another size of it (fingerprint "
                f"{plan.model.fingerprint}, this one has {graph.fingerprint()})",
                fix=f"run the module that was planned ({plan.model.spec}, batch "
                f"{plan.model.batch}), or plan this one",
                field="model",
            )
        cluster = self.cluster or resolve(plan.cluster.spec)
        lowered = lower_plan(plan.stages, plan.schedule, graph, cluster, simulate)
        wrong = (
            *verify_program(lowered.program),
            *verify_meaning(lowered.program, graph, lowered.stages, plan.schedule),
        )
        if wrong:
            raise VerificationError(wrong)
        count = plan.schedule.num_microbatches
        small = rebatch(graph, plan.model.batch // count)
        shapes = shapes_of(small, lowered.program)
        lines = tuple(sorted(line for line in lines_of(lowered, self.rank_of) if len(line) > 1))
        links = tuple(
            (a, b) for a in range(len(self.devices)) for b in range(len(self.devices)) if a != b
        )  # noqa: E501
        comm = Communicator(Lines(lines, lines, links), self.device, self.timeout_s)
        self.feed = Feed(small, count, plan.model.batch, self.device)
        context = RankContext(
            small, model, comm, self.device, batch_dims(small), plan.model.batch // count,
            self.feed, self.keep_gradients,
        )  # fmt: skip
        rank = dist.get_rank()
        self.walk = RankWalk(
            lowered, context, self.devices[rank], self.rank_of, shapes, self.recorder
        )
        self.walk.hold(dict(model.held), self.optimizer)
        self.model = model
        return self

    # Steps.

    def step(self, *args: Any, local: bool = False, **kwargs: Any) -> float:
        """One step on the global batch (or this rank's part of it); the loss, on every rank."""
        if self.walk is None:
            if local:
                raise PlanError(
                    "the first step has only this rank's part of the batch",
                    fix="call engine.prepare(*args) with one whole batch before",
                    field="step",
                )
            self.prepare(*args, **kwargs)
        assert self.walk is not None
        assert self.model is not None
        assert self.feed is not None
        self.feed.take(self.model.arguments(args, kwargs), local=local)
        self.model.moment = (self.seed, self.steps, 0)
        state = torch.get_rng_state() if self.model.is_random else None
        losses = self.walk.step()
        if state is not None:
            torch.set_rng_state(state)
        self.steps += 1
        return self._shared_loss(losses)

    def _shared_loss(self, losses: list[T]) -> float:
        assert self.walk is not None
        home = [
            stage for stage in self.walk.stages
            if any(self.walk.run.small.outputs[0] in op_outputs for op_outputs in (
                self.walk.run.ops[split.op].outputs for split in stage.splits
            ))
        ]  # fmt: skip
        speaker = self.rank_of[home[-1].mesh.devices[0]] if home else 0
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        if dist.get_rank() == speaker and losses:
            total += sum(float(loss.double().mean()) for loss in losses) / len(losses)
        dist.all_reduce(total)
        return float(total)

    # State.

    def full_state_dict(self) -> dict[str, T] | None:
        """The state dict of the plain module, on rank 0; None on others."""
        whole = self._gathered(lambda state: {
            name: (stored.value, stored.tensor) for name, stored in state.stored.items()
        })  # fmt: skip
        return None if whole is None else self._named(whole)

    def full_gradients(self) -> dict[str, T] | None:
        """The gradients of the last step by parameter, on rank 0 (with keep_gradients=True)."""
        return self._gathered(lambda state: dict(state.last_gradients))

    def _named(self, whole: dict[str, T]) -> dict[str, T]:
        """By the names of the module: a tied parameter stands under all of its names."""
        assert self.model is not None
        places = self.model.captured.places
        named = {
            each.target: str(places[each.name])
            for each in self.model.captured.record.inputs
            if each.kind in ("parameter", "buffer")
        }
        result = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            result[name] = whole.get(named.get(name, name), tensor.detach()).cpu()
        return result

    def _gathered(self, part: Callable[[Any], dict[str, Any]]) -> dict[str, T] | None:
        """Whole tensors from what all ranks hold, on rank 0."""
        assert self.walk is not None, "there was a step"
        own = {
            number: {
                name: (value, tensor.detach().cpu())
                for name, (value, tensor) in part(state).items()
            }  # noqa: E501
            for number, state in self.walk.states.items()
        }
        gathered: list[Any] | None = [None] * len(self.devices) if dist.get_rank() == 0 else None
        dist.gather_object(own, gathered)
        if gathered is None:
            return None
        whole: dict[str, T] = {}
        for number, stage in enumerate(self.walk.stages):
            holders = {
                stage.mesh.place(d): gathered[self.rank_of[d]][number] for d in stage.mesh.devices
            }  # noqa: E501
            first = next(iter(holders.values()))
            for name, (value, _) in first.items():
                if name in whole:
                    continue
                parts = {place: held[name][1] for place, held in holders.items()}
                whole[name] = joined(
                    parts, value, self.walk.shapes.shape(name), stage.mesh.axes,
                    self.walk.shapes.num_gates(name),
                )  # fmt: skip
        assert set(places(())) == {()}, "a mesh of one device has one place"
        return whole
