"""Ready to call: a plan captured as one CUDA graph with its inputs and outputs in fixed places.

A call copies the inputs in, replays the graph and hands out copies of the outputs, so that a
result stays as it is when the next call overwrites the buffers.
"""

from collections.abc import Callable, Mapping

from partita.gpu.buffers import copies
from partita.gpu.flow.steps import T
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.launch import launch_all
from partita.gpu.streams.order import LaunchPlan
from partita.gpu.streams.ways import Way


class Replay:
    """A launch plan as a graph; on a CPU the steps run in the plan's order."""

    def __init__(self, bound: Bound, plan: LaunchPlan, ways: Mapping[str, Way]) -> None:
        self.bound = bound
        self.plan = plan
        self.ways = dict(ways)
        self.replay: Callable[[], object] = self.launch
        if bound.device.type == "cuda":
            self.graph = bound.captured(self.launch)
            self.replay = self.graph.replay
        else:
            self.launch()
        self.results = bound.outputs()  # where this graph leaves them
        self.held = dict(bound.values)  # operators of PyTorch made them: they must stay

    @property
    def inputs(self) -> tuple[T, ...]:
        """Where the graph reads its inputs: what is written there is not copied."""
        return self.bound.inputs()

    def launch(self) -> None:
        """All launches of the plan, once."""
        launch_all(self.bound, self.plan, self.ways)

    def __call__(self, *inputs: T) -> tuple[T, ...]:
        """The model's outputs for these inputs."""
        self.bound.set_inputs(inputs)
        self.replay()
        if self.bound.device.type != "cuda":
            self.results = self.bound.outputs()
        return copies(self.results)
