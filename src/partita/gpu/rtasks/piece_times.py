"""Which regions stay fused: each is timed against its own steps run by PyTorch, both in a graph."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita.gpu.buffers import copies
from partita.gpu.flow.steps import Step
from partita.gpu.graphs import capture
from partita.gpu.measure import compare_us, run_us
from partita.gpu.rtasks.arena import LoweredModel
from partita.gpu.rtasks.execute import Launch, RegionPipeline, StepKernel
from partita.gpu.rtasks.lower_rules import VIEW_TARGETS

T = torch.Tensor
COPIES = 5  # of a piece in the graph that is timed
Times = Callable[[Sequence[Callable[[], object]]], list[float]]


@dataclass(frozen=True, slots=True)
class PieceTimes:
    """One region, fused and not."""

    fused_us: float
    unfused_us: float

    @property
    def is_faster(self) -> bool:
        """Does fusing pay?"""
        return self.fused_us < self.unfused_us


def piece_times(
    lowered: LoweredModel,
    launches: Sequence[Launch | None],
    inputs: Sequence[T],
    kernels: dict[str, StepKernel],
    times: Times = compare_us,
) -> dict[int, PieceTimes]:
    """By piece: the region as it is launched against PyTorch's operators for the same steps."""
    fused = RegionPipeline(lowered, launches, kernels)
    plain = RegionPipeline(lowered, [None] * len(lowered.pieces), kernels)
    fused.set_inputs(inputs)
    plain.set_inputs(inputs)
    ours: dict[str, Any] = dict(fused.given)
    theirs: dict[str, Any] = dict(plain.given)
    piece_times = {}
    for index in range(len(lowered.pieces)):
        regions = lowered.regions[index]
        if launches[index] is not None and regions is not None and regions.ops:
            runs = [_graph(fused, index, ours), _graph(plain, index, theirs)]
            piece_times[index] = PieceTimes(*(each / COPIES for each in times(runs)))
        fused.run_piece(index, ours)
        plain.run_piece(index, theirs)
    return piece_times


def kernel_times(
    lowered: LoweredModel,
    launches: Sequence[Launch | None],
    inputs: Sequence[T],
    kernels: dict[str, StepKernel],
) -> dict[str, PieceTimes]:
    """Steps that have a kernel of their own: with it and by PyTorch, each by itself in a graph."""
    plain = RegionPipeline(lowered, launches)
    plain.set_inputs(inputs)
    values: dict[str, Any] = dict(plain.given)
    for each in range(len(lowered.pieces)):
        plain.run_piece(each, values)
    steps = lowered.flow.maker()
    piece_times = {}
    for name, kernel in kernels.items():
        held: list[Any] = []
        ways = (
            lambda kernel=kernel, held=held: held.append(kernel(values)),
            lambda name=name, held=held: held.append(plain.computed(steps[name], values)),
        )
        piece_times[name] = PieceTimes(
            *compare_us([capture(way, warm_up=2).replay for way in ways])
        )
    return piece_times


def op_times(lowered: LoweredModel, index: int, inputs: Sequence[T]) -> list[float]:
    """What PyTorch takes for each tile op of a piece, in a graph; shared steps count in part.

    A step that is run over and over finds its weights in the cache; so the times are scaled to add
    up to that of the piece as a whole.
    """
    plain = RegionPipeline(lowered, [None] * len(lowered.pieces))
    plain.set_inputs(inputs)
    values: dict[str, Any] = dict(plain.given)
    for each in range(len(lowered.pieces)):
        plain.run_piece(each, values)
    steps = lowered.flow.maker()
    tiled = [draft for draft in lowered.pieces[index].drafts if draft.is_tiled]
    shares = Counter(name for draft in tiled for name in draft.steps)
    known: dict[str, float] = {}
    for name in shares:
        nothing = steps[name].is_view or steps[name].target in VIEW_TARGETS
        known[name] = 0.0 if nothing else _step_us(plain, steps[name], values)
    scale = run_us(lambda: plain.run_piece(index, dict(values))) / max(sum(known.values()), 1e-9)
    return [scale * sum(known[name] / shares[name] for name in draft.steps) for draft in tiled]


def _step_us(plain: RegionPipeline, step: Step, values: dict[str, Any]) -> float:
    held: list[Any] = []
    return run_us(lambda: held.append(plain.computed(step, values)))


def _graph(pipeline: RegionPipeline, index: int, values: dict[str, Any]) -> Callable[[], object]:
    """A piece some times over, as one graph."""
    held: list[dict[str, Any]] = []

    def run() -> None:
        for _ in range(COPIES):
            here = dict(values)
            pipeline.run_piece(index, here)
            held.append(here)  # what a graph writes must stay

    graph = capture(run, warm_up=2)

    def replay() -> None:
        assert held
        graph.replay()

    return replay


class PipelineGraph:
    """A pipeline as one CUDA graph; without a GPU it is run again at every call."""

    def __init__(self, pipeline: RegionPipeline, inputs: Sequence[T]) -> None:
        self.pipeline = pipeline
        pipeline.set_inputs(inputs)
        self.graph = capture(pipeline.launch, warm_up=2)
        self.replay: Callable[[], object] = self.graph.replay
        if not pipeline.results:
            self.replay()
        self.results = pipeline.results

    @property
    def inputs(self) -> tuple[T, ...]:
        """Where the graph reads its inputs: what is written there is not copied."""
        return self.pipeline.inputs

    def __call__(self, *inputs: T) -> tuple[T, ...]:
        """The outputs for these inputs, as copies."""
        with torch.no_grad():
            self.pipeline.set_inputs(inputs)
            self.replay()
            if not self.pipeline.lowered.arena.data.is_cuda:
                self.results = self.pipeline.results
            return copies(self.results)
