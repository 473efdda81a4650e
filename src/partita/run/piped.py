"""A module run by its stages, with the module's own tensors.

What is piped *is* the module as far as its tensors go: the stages use the very Parameters and
buffers of the original, under the original names. An optimizer made before or after works on both,
and so do `state_dict`, `load_state_dict`, `zero_grad`, `train`, `eval` and `to`.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from partita.jobs.partition import Partitioned
from partita.plans import Plan, Prediction
from partita.run.sequential import SequentialStages, held_tensors, link


class Piped(nn.Module):
    """A module run by its stages: called as the module is, it gives what the module gives."""

    def __init__(self, run: SequentialStages, partitioned: Partitioned) -> None:
        super().__init__()
        self._run = run
        self.partitioned = partitioned
        original = run.captured.module
        # The tensors are the original's, so their tables are, too.
        self._parameters = original._parameters
        self._buffers = original._buffers
        self._modules = original._modules
        self.training = original.training

    @property
    def original(self) -> nn.Module:
        """The module that was piped."""
        return self._run.captured.module

    @property
    def stages(self) -> list[nn.Module]:
        """One module per stage, in the order in which they run."""
        return self._run.stages

    @property
    def source(self) -> str:
        """The emitted code of the stages."""
        return self._run.emitted.source

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
        return self._run(*args, **kwargs)

    def train(self, mode: bool = True) -> "Piped":
        """Set the mode of the stages and of the original."""
        self.training = mode
        self.original.train(mode)
        for stage in self.stages:
            stage.train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Piped":
        """Move or cast the tensors of the original, and let the stages use what they became."""
        self.original._apply(fn, recurse)
        constants = self._run.captured.program.constants
        constants.update({name: fn(value) for name, value in constants.items()})
        link(self.stages, held_tensors(self._run.captured))
        return self

    def extra_repr(self) -> str:
        """How many stages there are."""
        return f"{len(self.stages)} stages"
