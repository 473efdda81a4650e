"""The baseline: PyTorch's own operators in the order of the model, as one CUDA graph."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from partita.gpu.buffers import copies, put
from partita.gpu.flow import eager
from partita.gpu.flow.steps import Flow, T
from partita.gpu.graphs import capture

Function = Callable[..., tuple[T, ...]]
Compile = Callable[[Flow, Sequence[T], Mapping[str, T]], Function]


class SequentialGraph:
    """A flow's operators in order, ready to call; `compile` may make one function of them."""

    def __init__(self, flow: Flow, inputs: tuple[T, ...], compile: Compile | None = None) -> None:
        self.flow = flow
        self.inputs = tuple(each.clone() for each in inputs)
        self.constants = {
            name: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
            for name, value in flow.constants.items()
        }
        self.results: tuple[T, ...] = ()
        self.compiled: Function | None = None
        if compile is not None:
            self.compiled = compile(flow, self.inputs, self.constants)
        self.replay: Callable[[], object] = self.launch
        self.capture()

    def capture(self) -> None:
        """As one graph; without a GPU nothing is captured."""
        if self.inputs[0].is_cuda:
            self.graph = capture(self.launch, warm_up=2)
            self.replay = self.graph.replay

    def launch(self) -> None:
        """Every step, once."""
        if self.compiled is not None:
            self.results = self.compiled(*self.inputs)
            return
        values: dict[str, Any] = dict(zip(self.flow.inputs, self.inputs, strict=True))
        for step in self.flow.steps:
            values[step.name] = eager.compute(step, values, self.constants)
        self.results = tuple(values[name] for name in self.flow.outputs)

    def __call__(self, *inputs: T) -> tuple[T, ...]:
        """The model's outputs for these inputs."""
        put(self.inputs, inputs)
        self.replay()
        return copies(self.results)
