"""Stages and a schedule on torch's own pipeline runtime.

torch.distributed.pipelining runs any order of forwards and backwards over stages that are a chain:
stage s reads what stage s - 1 gives, on any map from stages to ranks. Where the stages of a plan
are such a chain, they run there as they are emitted, in the plan's order:

    chain = chain_of(stages, emitted.inputs, emitted.outputs)
    pipeline = torch_pipeline(chain, schedule, rank=dist.get_rank())
    losses = pipeline.step({"x": x, "target": y})       # gradients are in chain[s].stage

What torch has no words for is refused before anything starts: values that skip a stage, branches,
results in the middle, tied weights on two ranks, stages on several devices, unequal micro-batches.
The names used of torch begin with an underscore: they may change with its next version.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from partita.emit.plans import emit_plan
from partita.errors import InputError, PlanError, VerificationError
from partita.jobs.torch_schedule import schedule_of_plan
from partita.plans import Plan
from partita.run.sequential import load_source
from partita.schedules.torch_csv import TorchSchedule
from partita.verify.torch_schedules import torch_refusals

_KEYWORD = (
    "input_"  # before the names of inputs: `step` of torch has arguments called target, losses
)

Loss = Callable[..., torch.Tensor]


class ChainStage(nn.Module):
    """An emitted stage as torch calls it: values of the stage before by place, inputs by name.

    `wires` are the values that come by place, of the first stage its inputs; `sends` are those that
    the next stage reads, of the last stage the model's results.
    """

    def __init__(
        self, stage: nn.Module, wires: tuple[str, ...], inputs: tuple[str, ...],
        sends: tuple[str, ...], *, last: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stage = stage
        self.wires = wires
        self.inputs = inputs
        self.sends = sends
        self.last = last

    def forward(self, *args: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """What the next stage reads; inputs that this stage does not read are passed over."""
        known = dict(zip(self.wires, args, strict=True))
        known |= {name: inputs[_KEYWORD + name] for name in self.inputs}
        made = self.stage(*(known[name] for name in taken(self.stage)))
        names = given(self.stage)
        values = dict(zip(names, (made,) if len(names) == 1 else made, strict=True))
        sent = tuple(values[name] for name in self.sends)
        for name, value in zip(self.sends, sent, strict=True):
            if not self.last and not value.is_floating_point():
                raise _refused(f"{name} passes between stages as {value.dtype}", "gradients")
        return sent[0] if len(sent) == 1 else sent


def chain_of(
    stages: Sequence[nn.Module],
    inputs: Sequence[str | None],
    outputs: Sequence[str | tuple[Any]],
) -> tuple[ChainStage, ...]:
    """The stages as a chain, inputs and outputs of the model as `Emitted` names them.

    A `PlanError` names the value that makes them something else.
    """
    made_by = {name: number for number, stage in enumerate(stages) for name in given(stage)}
    results = tuple(name for name in outputs if isinstance(name, str))
    last = len(stages) - 1
    for name in results:
        if made_by.get(name, last) != last:
            raise _refused(f"result {name} is made in stage {made_by[name]}", "the last stage")
    wires: list[tuple[str, ...]] = []
    for number, stage in enumerate(stages):
        read = [name for name in taken(stage) if name in made_by]
        for name in read:
            if made_by[name] != number - 1:
                what = f"{name} passes from stage {made_by[name]} to stage {number}"
                raise _refused(what, "neighbours alone: no skips and no branches")
        if number and not read:
            raise _refused(f"stage {number} reads nothing of stage {number - 1}", "a chain")
        wires.append(tuple(dict.fromkeys(read)) if number else tuple(taken(stage)))
    known = {name for name in inputs if name is not None}
    chain = []
    for number, stage in enumerate(stages):
        named = tuple(name for name in taken(stage) if name in known) if number else ()
        sends = wires[number + 1] if number < last else results
        chain.append(ChainStage(stage, wires[number], named, sends, last=number == last))
    return tuple(chain)


def chain_of_plan(plan: Plan, state_dict: Mapping[str, torch.Tensor]) -> tuple[ChainStage, ...]:
    """The emitted stages of a plan, holding the tensors of a state dict, as a chain."""
    for stage in plan.stages:
        if len(stage.mesh.devices) > 1:
            what = f"stage {stage.name!r} is on {len(stage.mesh.devices)} devices"
            raise _refused(what, "one device for each stage")
    emitted = emit_plan(plan)
    stages = load_source(emitted.source).build_stages(state_dict)
    return chain_of(list(stages), emitted.inputs, emitted.outputs)


@dataclass(frozen=True)
class TorchPipeline:
    """One rank's stages on torch's runtime."""

    runtime: Any
    chain: tuple[ChainStage, ...]
    local: tuple[int, ...]  # stages of this rank

    def step(
        self, inputs: Mapping[str, torch.Tensor], target: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Run one step on the whole batch; gradients are added up in the stages of this rank.

        Losses of the micro-batches come back on the rank of the last stage, nothing elsewhere.
        Gradients are those of the mean over micro-batches.
        """
        count = self.runtime._n_microbatches
        for name, value in inputs.items():
            if value.shape[0] % count:
                raise InputError(
                    f"{value.shape[0]} samples in {count} micro-batches",
                    fix="torch splits evenly: give a multiple", field=f"input {name}",
                )  # fmt: skip
        first = self.chain[0].wires if 0 in self.local else ()
        named = {
            _KEYWORD + name: inputs[name]
            for number in self.local
            for name in self.chain[number].inputs
        }
        losses: list[torch.Tensor] = []
        if target is None:  # torch hands one on with every micro-batch
            target = torch.zeros(count)
        args = [inputs[name] for name in first]
        self.runtime.step(*args, target=target, losses=losses, return_outputs=False, **named)
        return losses


def torch_pipeline(
    chain: Sequence[ChainStage],
    schedule: TorchSchedule,
    *,
    rank: int,
    group: "dist.ProcessGroup | None" = None,
    device: str | torch.device = "cpu",
    loss: Loss | None = None,
) -> TorchPipeline:
    """This rank's part of a chain on torch's runtime, in the order of a schedule.

    `loss(results, target)` is called on the last stage; without it the model's result is the loss.
    Every rank of the group calls this with the same chain and schedule.
    """
    refusals = torch_refusals(schedule)
    if refusals:
        raise VerificationError(tuple(map(str, refusals)))
    rank_of = schedule.rank_of
    if len(rank_of) != len(chain):
        raise PlanError(
            f"the schedule has {len(rank_of)} stages, and there are {len(chain)}",
            fix="schedule the stages that there are", field="schedule",
        )  # fmt: skip
    _refuse_tied(chain, rank_of)
    local = tuple(number for number in range(len(chain)) if rank_of[number] == rank)
    if not local:
        raise PlanError(
            f"rank {rank} has no stage", fix=f"run it on {len(schedule.rows)} ranks", field="rank"
        )
    held = [
        PipelineStage(chain[number], number, len(chain), torch.device(device), group=group)
        for number in local
    ]
    runtime = _PipelineScheduleRuntime(
        held, schedule.num_microbatches, loss_fn=loss or (lambda result, target: result)
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schedule.csv"
        file.write_text(schedule.to_csv())
        runtime._load_csv(str(file), format=schedule.form)
    return TorchPipeline(runtime, tuple(chain), local)


def pipeline_of_plan(
    plan: Plan,
    state_dict: Mapping[str, torch.Tensor],
    *,
    rank: int,
    group: "dist.ProcessGroup | None" = None,
    device: str | torch.device = "cpu",
    loss: Loss | None = None,
) -> TorchPipeline:
    """A plan's stages on torch's runtime in the plan's order, messages included."""
    chain = chain_of_plan(plan, state_dict)
    schedule = schedule_of_plan(plan, comms=True)
    return torch_pipeline(chain, schedule, rank=rank, group=group, device=device, loss=loss)


def taken(stage: nn.Module) -> tuple[str, ...]:
    """The values that an emitted stage reads."""
    names: tuple[str, ...] = stage.takes  # type: ignore[assignment]
    return names


def given(stage: nn.Module) -> tuple[str, ...]:
    """The values that an emitted stage makes for others."""
    names: tuple[str, ...] = stage.gives  # type: ignore[assignment]
    return names


def _refuse_tied(chain: Sequence[ChainStage], rank_of: Mapping[int, int]) -> None:
    """Gradients of a weight in two stages are added up on one rank only."""
    held: dict[int, tuple[int, str]] = {}
    for number, part in enumerate(chain):
        for name, parameter in part.stage.named_parameters():
            first, _ = held.setdefault(id(parameter), (number, name))
            if rank_of[first] != rank_of[number]:
                what = f"{name} is in stages {first} and {number}, on two ranks"
                raise _refused(what, "weights of one rank")


def _refused(what: str, has: str) -> PlanError:
    return PlanError(
        f"torch.distributed.pipelining cannot run it: {what}",
        fix=f"it has {has}; cut elsewhere, or use partita's own runtime",
        field="stages",
    )
