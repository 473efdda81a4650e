"""Ready to call: a plan captured as one CUDA graph with its inputs and outputs in fixed places.

A call copies the inputs in, replays the graph and hands out copies of the outputs, so that a
result stays as it is when the next call overwrites the buffers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from partita.run.streams import eager
from partita.run.streams.bound import Bound
from partita.run.streams.compiled import Compiler
from partita.run.streams.graphs import capture, launch_all
from partita.run.streams.order import LaunchPlan
from partita.run.streams.steps import Flow, T
from partita.run.streams.ways import Way


class Replay:
    """A launch plan as a graph; on a CPU the steps run in the plan's order."""

    def __init__(self, bound: Bound, plan: LaunchPlan, ways: Mapping[str, Way]) -> None:
        self.bound = bound
        self.plan = plan
        self.ways = dict(ways)
        self.replay: Callable[[], object] = self.launch
        if bound.device.type == "cuda":
            self.graph = capture(self.launch)
            self.replay = self.graph.replay
        else:
            self.launch()
        self.results = bound.outputs()  # where this graph leaves them
        self.held = dict(bound.values)  # operators of PyTorch made them: they must stay

    def launch(self) -> None:
        """All launches of the plan, once."""
        launch_all(self.bound, self.plan, self.ways)

    def __call__(self, *inputs: T) -> tuple[T, ...]:
        """The model's outputs for these inputs."""
        self.bound.set_inputs(inputs)
        self.replay()
        if self.bound.device.type != "cuda":
            self.results = self.bound.outputs()
        return tuple(each.clone() for each in self.results)


class Plain:
    """PyTorch's own operators in the order of the model, as one graph: the baseline.

    With a compiler, what that makes of them.
    """

    def __init__(self, flow: Flow, inputs: tuple[T, ...], compiler: Compiler | None = None) -> None:
        self.flow = flow
        self.inputs = tuple(each.clone() for each in inputs)
        self.constants = {
            name: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
            for name, value in flow.constants.items()
        }
        self.results: tuple[T, ...] = ()
        self.compiled = None
        if compiler is not None:
            self.compiled = compiler.whole(flow, self.inputs, self.constants)
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
        for place, value in zip(self.inputs, inputs, strict=True):
            place.copy_(value)
        self.replay()
        return tuple(each.clone() for each in self.results)
