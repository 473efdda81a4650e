"""A module run by its stages, with the module's own tensors.

What is piped *is* the module as far as its tensors go: the stages use the very Parameters and
buffers of the original, under the original names. An optimizer made before or after works on both,
and so do `state_dict`, `load_state_dict`, `zero_grad`, `train`, `eval` and `to`.

A module in training and the same in eval mode are two programs: dropout, statistics, branches by
`self.training`, even what is given back may differ. So every combination of modes of the module and
those in it is captured by itself, when it is first called; none runs for another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from partita.jobs.partition import Partitioned
from partita.plans import Plan, Prediction
from partita.run.sequential import SequentialStages, held_tensors, link

Modes = tuple[bool, ...]  # of the module and all in it, as `modules()` has them


@dataclass(frozen=True)
class PipedMode:
    """The module in one mode: its stages, and how they were found."""

    run: SequentialStages
    partitioned: Partitioned


class Piped(nn.Module):
    """A module run by its stages: called as the module is, it gives what the module gives.

    `cut` captures the module in the mode it is in, for some arguments, and cuts it into stages.
    """

    def __init__(
        self, original: nn.Module, cut: Callable[[tuple[Any, ...], dict[str, Any]], PipedMode],
        args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        first = cut(args, kwargs)
        self._cut = cut
        self._known: dict[Modes, PipedMode] = {_modes(original): first}
        self._now = first
        # The tensors are the original's, so their tables are, too.
        self._parameters = original._parameters
        self._buffers = original._buffers
        self._modules = original._modules
        self.training = original.training

    @property
    def original(self) -> nn.Module:
        """The module that was piped."""
        return self._now.run.captured.module

    @property
    def partitioned(self) -> Partitioned:
        """How the stages were found."""
        return self._now.partitioned

    @property
    def stages(self) -> list[nn.Module]:
        """One module per stage, in the order in which they run, of the mode that ran last."""
        return self._now.run.stages

    @property
    def source(self) -> str:
        """The emitted code of the stages."""
        return self._now.run.emitted.source

    @property
    def plan(self) -> Plan:
        """Which op runs in which stage on which device, as a plan that can be saved."""
        assert self.partitioned.plan is not None, "what has no plan is not piped"
        return self.partitioned.plan

    @property
    def prediction(self) -> Prediction:
        """What the simulator says of the plan."""
        return self.plan.prediction

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original gives for these arguments, in the same structure."""
        modes = _modes(self.original)
        if modes not in self._known:
            self._known[modes] = self._captured(args, kwargs)
        self._now = self._known[modes]
        return self._now.run(*args, **kwargs)

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PipedMode:
        """The module in the mode it is in now; no random number is drawn on the way."""
        arranged = self._now.run.arranged(args, kwargs)
        state = torch.get_rng_state()
        try:
            return self._cut(*pytree.tree_map_only(torch.Tensor, _without_history, arranged))
        finally:
            torch.set_rng_state(state)

    def train(self, mode: bool = True) -> "Piped":
        """Set the mode of the original; it is captured in it when it is next called."""
        self.original.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Piped":
        """Move or cast the tensors of the original, and let the stages use what they became."""
        self.original._apply(fn, recurse)
        for known in self._known.values():
            captured = known.run.captured
            constants = captured.program.constants
            constants.update({name: fn(value) for name, value in constants.items()})
            link(known.run.stages, held_tensors(captured))
        return self

    def extra_repr(self) -> str:
        """How many stages there are."""
        return f"{len(self.stages)} stages"


def _modes(module: nn.Module) -> Modes:
    return tuple(each.training for each in module.modules())


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
