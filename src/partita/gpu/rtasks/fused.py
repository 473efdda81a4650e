"""Something to call like the model it was made from, and what came of fusing it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from partita.errors import InputError
from partita.gpu.flow.export import evaluating
from partita.gpu.measure import compare_us
from partita.gpu.reference_output import as_tuple
from partita.gpu.rtasks.outcome import Outcome
from partita.gpu.rtasks.planned import PlannedRegion
from partita.jobs.rtasks import timeline_of
from partita.problems.rprogram import RProgram
from partita.showing import plot_of, repr_html, table_of
from partita.timeline import Timeline

T = torch.Tensor


class FusedCall(Protocol):
    """What runs a model: all inputs in, all outputs out."""

    @property
    def inputs(self) -> tuple[T, ...]:
        """Where the inputs are read."""
        ...

    @property
    def replay(self) -> Callable[[], object]:
        """Once more, without copies."""
        ...

    def __call__(self, *inputs: T) -> tuple[T, ...]:
        """The outputs, as copies."""
        ...


class FusedModel:
    """Models with their regions fused; call it with the inputs of all."""

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    def __init__(
        self,
        modules: Sequence[nn.Module],
        examples: Sequence[tuple[T, ...]],
        call: FusedCall,
        plans: Sequence[PlannedRegion | None],
        outcome: Outcome,
    ) -> None:
        self.modules, self.examples = tuple(modules), tuple(examples)
        self.call, self.outcome = call, outcome
        self.plans = tuple(plan for plan in plans if plan is not None)
        self._shapes = [_shape_of_output(*each) for each in zip(modules, examples, strict=True)]

    @property
    def programs(self) -> tuple[RProgram, ...]:
        """The program of every planned region; `print` shows run, wait and signal per unit."""
        return tuple(plan.program for plan in self.plans)

    def timeline(self, region: int = 0) -> Timeline:
        """When every tile of a planned region runs by the costs, a lane per program; checked."""
        if not 0 <= region < len(self.plans):
            raise InputError(f"there is no region {region}", fix=f"there are {len(self.plans)}")
        plan = self.plans[region]
        assert plan.result.solution is not None
        return timeline_of(plan.problem, plan.result.solution)

    @property
    def inputs(self) -> tuple[T, ...]:
        """The tensors that are read where they lie: write into them and call with them."""
        return self.call.inputs

    @property
    def inputs_given(self) -> tuple[T, ...]:
        """The inputs of the example, of all models."""
        return tuple(each for example in self.examples for each in example)

    def report(self) -> Outcome:
        """What was fused, what was not and why, predicted and measured times."""
        return self.outcome

    @property
    def replay(self) -> Callable[[], object]:
        """Run once more on the inputs of the last call, without copies: to measure."""
        return self.call.replay

    def __call__(self, *inputs: T) -> Any:
        """What the module gives for these inputs; a tuple of it for several modules."""
        wanted = self.inputs_given
        if len(inputs) != len(wanted):
            raise InputError(f"{len(inputs)} inputs", fix=f"give {len(wanted)}")
        for mine, given in zip(wanted, inputs, strict=True):
            if given.shape != mine.shape or given.dtype != mine.dtype:
                raise InputError(
                    f"an input of {list(given.shape)} {given.dtype}",
                    fix=f"give {list(mine.shape)} {mine.dtype}, or fuse for this shape",
                )
        with torch.no_grad():
            outputs = list(self.call(*inputs))
        results = []
        for shape in self._shapes:
            results.append(tree_unflatten(outputs[: shape.num_leaves], shape))
            outputs = outputs[shape.num_leaves :]
        return results[0] if len(results) == 1 else tuple(results)

    def beside(self, alone: Sequence["FusedModel"]) -> "FusedModel":
        """The same, with the times of its models one by one in the report."""
        outcome = self.outcome
        if outcome.kept == "interpreted":
            times = [each.outcome.planned_us for each in alone]
            self.outcome = replace(outcome, alone_us=tuple(times))
            return self
        mine, *others = compare_us(
            [partial(each.call, *each.inputs_given) for each in (self, *alone)]
        )
        if outcome.kept == "sequential":
            outcome = replace(outcome, sequential_us=mine)
        else:
            outcome = replace(outcome, fused_us=mine)
        self.outcome = replace(outcome, alone_us=tuple(others))
        return self


def _shape_of_output(module: nn.Module, inputs: tuple[T, ...]) -> Any:
    with evaluating(module), torch.no_grad():
        outputs = module(*inputs)
    as_tuple(outputs)  # refuses what is no tensor
    return tree_flatten(outputs)[1]
