"""Pieces one after the other: regions fused or not, fallbacks by PyTorch, values where they lie.

What a fused region reads lies in the arena: inputs of the model are put there by the call itself,
results of fallbacks are copied there as soon as they are made. Fallbacks read the arena in place.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from partita.gpu.buffers import copies, put
from partita.gpu.flow import eager
from partita.gpu.flow.steps import CONVS, Step
from partita.gpu.rtasks.arena import LoweredModel
from partita.gpu.rtasks.drafts import Draft

T = torch.Tensor
Launch = Callable[[], object]
StepKernel = Callable[[dict[str, Any]], Any]


class RegionPipeline:
    """A lowered flow that can be run: `launches` has a call for every piece that is fused."""

    def __init__(
        self,
        lowered: LoweredModel,
        launches: Sequence[Launch | None],
        kernels: dict[str, StepKernel] | None = None,
    ) -> None:
        self.lowered, self.launches = lowered, tuple(launches)
        self.kernels = kernels or {}
        arena, flow = lowered.arena, lowered.flow
        device = arena.data.device
        self.constants = {
            name: _channels_last(value.to(device)) for name, value in flow.constants.items()
        }
        self.wanted = _wanted(lowered, self.launches)
        self.given: dict[str, T] = {}  # where inputs are read
        for name in flow.inputs:
            if name in self.wanted:
                self.given[name] = arena.view(name)
            else:
                empty = torch.zeros(flow.shapes[name], dtype=flow.dtypes[name], device=device)
                self.given[name] = _channels_last(empty)
        self.views = {name: arena.view(name) for name in arena.places}
        self.work = [self._work(index) for index in range(len(lowered.pieces))]
        self.apart: set[str] = set()  # convolutions whose ReLU runs by itself
        self.results: tuple[T, ...] = ()

    def _work(self, index: int) -> tuple[Step, ...]:
        """The steps of a piece that PyTorch runs."""
        if self.launches[index] is not None:
            return ()
        return self.lowered.pieces[index].unfused(self.lowered.flow)

    def set_inputs(self, inputs: Sequence[T]) -> None:
        """Put the model's inputs where they are read."""
        put(self.inputs, inputs)

    @property
    def inputs(self) -> tuple[T, ...]:
        """Where the model's inputs are read: what is written there is not copied."""
        return tuple(self.given[name] for name in self.lowered.flow.inputs)

    def replay(self) -> None:
        """Once more, on the inputs of the last call."""
        with torch.no_grad():
            self.launch()

    def launch(self) -> None:
        """Everything once, on the current stream."""
        values: dict[str, Any] = dict(self.given)
        for index in range(len(self.work)):
            self.run_piece(index, values)
        self.results = tuple(values[name] for name in self.lowered.flow.outputs)

    def run_piece(self, index: int, values: dict[str, Any]) -> None:
        """One piece: what it makes is in `values` afterwards, and in the arena where needed."""
        launch, piece = self.launches[index], self.lowered.pieces[index]
        if launch is not None:
            launch()
            for draft in piece.drafts:
                for name in draft.makes:
                    values[name] = self.views[name]
            return
        for step in self.work[index]:
            if step.name in self.kernels:
                values[step.name] = self.kernels[step.name](values)
            else:
                values[step.name] = self.computed(step, values)
            if step.name in self.wanted:
                self.views[step.name].copy_(values[step.name])

    def computed(self, step: Step, values: dict[str, Any]) -> Any:
        """A step by PyTorch; cuDNN has a ReLU inside for most convolutions, not for all."""
        if step.name not in self.apart:
            try:
                return eager.compute(step, values, self.constants)
            except RuntimeError:
                if step.kind not in CONVS or not step.relu:
                    raise
                self.apart.add(step.name)
        bare = replace(step, relu=False, residual="")
        y = eager.compute(bare, values, self.constants)
        return torch.relu(y + values[step.residual] if step.residual else y)

    def __call__(self, *inputs: T) -> tuple[T, ...]:
        """The outputs for these inputs, as copies."""
        with torch.no_grad():
            self.set_inputs(inputs)
            self.launch()
            return copies(self.results)


def _wanted(lowered: LoweredModel, launches: Sequence[Launch | None]) -> Collection[str]:
    """The values that PyTorch makes and fused regions read: they must be in the arena.

    What no step is called (a group of a convolution, say) is there when what it is a part of is.
    """
    steps = {step.name for step in lowered.flow.steps} | set(lowered.flow.inputs)
    maker: dict[str, tuple[int, Draft]] = {}
    constant: set[str] = set()
    for index, piece in enumerate(lowered.pieces):
        for draft in piece.drafts:
            maker.update(dict.fromkeys(draft.makes, (index, draft)))
            constant |= {name for name, _ in draft.constants}
    wanted: set[str] = set()
    open_names = [
        name
        for index, piece in enumerate(lowered.pieces)
        if launches[index] is not None
        for draft in piece.drafts
        for name in draft.reads
    ]
    while open_names:
        name = open_names.pop()
        if name in wanted or name in constant:
            continue
        if name in maker and launches[maker[name][0]] is not None:
            continue  # a fused region makes it, in its place
        if name in steps:
            wanted.add(name)
        else:
            open_names += maker[name][1].reads
    return wanted


def _channels_last(value: T) -> T:
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
