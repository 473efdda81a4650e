"""What can be kept: a way to run the whole model, ready to call; and what may be tried for it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from partita.gpu.flow.export import evaluating
from partita.gpu.flow.fold import fold
from partita.gpu.flow.steps import Flow, T
from partita.gpu.reference_output import as_tuple
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.compiled import BACKEND
from partita.gpu.streams.merge import merge, reorder
from partita.gpu.streams.order import LaunchPlan
from partita.gpu.streams.pieces import Group
from partita.gpu.streams.record import fingerprint
from partita.gpu.streams.tune import Timed
from partita.gpu.streams.ways import Way

Call = Callable[..., tuple[T, ...]]


@dataclass(frozen=True, slots=True)
class Options:
    """What may be tried, and for how long."""

    time_s: float = 60.0
    streams: tuple[int, ...] = (2, 3, 4, 6, 8)
    compile: bool = True  # torch.compile: the whole model, and pieces of it
    stages: bool = True
    improve: bool = True
    seed: int = 0
    backend: str = BACKEND  # of torch.compile, for pieces and the compiled graph


@dataclass(frozen=True, slots=True)
class TunedCandidate:
    """Steps in memory with the times of their ways; some of them may be pieces."""

    variant: str
    bound: Bound
    timed: dict[int, Timed]
    pieces: tuple[Group, ...] = ()

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant} with pieces" if self.pieces else self.variant

    def ways(self) -> dict[str, Way]:
        """The fastest way of every step."""
        steps = self.bound.flow.steps
        return {steps[index].name: each.ways[0] for index, each in self.timed.items()}


@dataclass(slots=True)
class StreamsCandidate:
    """One way to run the whole model."""

    label: str
    form: str
    call: Call
    replay_us: float
    tuned: TunedCandidate | None = None
    plan: LaunchPlan | None = None
    ways: dict[str, Way] = field(default_factory=dict)


def variants(flow: Flow) -> dict[str, Flow]:
    """The same model after different passes."""
    folded = fold(flow)
    merged = merge(reorder(folded))
    flows = {"fold": folded}
    if fingerprint(merged) != fingerprint(folded):
        flows["merge"] = merged
    return flows


def compiled_call(module: nn.Module, backend: str = BACKEND) -> Call:
    """The module through torch.compile; outputs are copied out of its buffers."""
    mode = "reduce-overhead" if backend == "inductor" else None  # others have no modes
    compiled: Any = torch.compile(module, backend=backend, mode=mode, dynamic=False)

    def call(*inputs: T) -> tuple[T, ...]:
        with torch.no_grad(), evaluating(module) if module.training else nullcontext():
            return tuple(each.clone() for each in as_tuple(compiled(*inputs)))

    return call


def depth(flow: Flow) -> int:
    """Operators on the longest way from input to output that may round."""
    deep: dict[str, int] = {}
    for step in flow.steps:
        here = 0 if step.is_view else 1
        deep[step.name] = here + max((deep.get(name, 0) for name in step.uses), default=0)
    return max(deep.values(), default=1)


def different(plans: Sequence[LaunchPlan]) -> list[LaunchPlan]:
    """Without plans that launch the same as an earlier one."""
    return list({plan.launches: plan for plan in reversed(plans)}.values())[::-1]
