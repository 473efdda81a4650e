"""The pipelines people build by hand, by name: what a search must not lose to.

    gpipe        stages of equal work on every divisor of the devices, data parallel inside,
                 all forwards then all backwards, recomputed as GPipe does
    1f1b         the same stages, one forward one backward, nothing recomputed
    interleaved  the same with two stages on every group of devices
    megatron     tensor parallel inside a node, the pipeline as deep as memory asks for, data
                 parallel over the rest, one sample per share of a micro-batch, 1F1B

Each name stands for a few plans (depths, with and without recompute); the best that fits counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from partita.cluster import Cluster
from partita.graph.chain import Chain
from partita.graph.rebatch import rebatch
from partita.graph.record import Graph
from partita.graph.work import flops
from partita.jobs.simulate import data_splits
from partita.jobs.strategies import feature_splits
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage
from partita.search.joint.groupings import divisors

Planned = tuple[tuple[Stage, ...], Schedule]


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """Which pipelines are built by hand."""

    depths: tuple[int, ...] = (2, 4, 8, 16, 32)  # numbers of groups of devices
    per_stage: int = 4  # micro-batches for every stage
    most_tensor: int = 8  # devices of a node that Megatron splits layers over


USUAL = PipelineSettings()


class Plans(Protocol):
    """Makes the plans of a named pipeline."""

    def __call__(
        self, graph: Graph, chain: Chain, cluster: Cluster, batch: int,
        settings: PipelineSettings = USUAL,
    ) -> list[Planned]:  # fmt: skip
        """Stages and schedule for every depth it knows."""
        ...


@dataclass(frozen=True)
class PipelineStrategy:
    """A named way; `plans` gives its stages and schedule for every depth it knows."""

    name: str
    summary: str
    plans: Plans


def _line(name: str, *, recompute: bool, chunks: int = 1) -> Plans:
    def plans(
        graph: Graph, chain: Chain, cluster: Cluster, batch: int, settings: PipelineSettings = USUAL
    ) -> list[Planned]:
        plans = []
        for depth in _depths(chain, cluster, chunks, settings):
            width = cluster.num_devices // depth
            count = _count(batch, width, depth, settings, whole=chunks > 1)
            if count is None or (recompute and not graph.is_training):
                continue
            splits = data_splits(graph, _mesh((width,), 0))
            stages = _stages(chain, depth * chunks, splits, (width,), depth, recompute)
            plans.append((stages, Schedule(name, count)))
        return plans

    return plans


def _megatron(
    graph: Graph, chain: Chain, cluster: Cluster, batch: int, settings: PipelineSettings = USUAL
) -> list[Planned]:
    inner = max(len(group) for group in cluster.levels()[0].groups)
    reshapes = any(op.kind == "reshape" for op in graph.ops)
    plans = []
    most = min(settings.most_tensor, inner)
    for tensor in (n for n in divisors(cluster.num_devices) if 1 < n <= most):
        splits_of: dict[tuple[int, ...], tuple[OpSplit, ...]] = {}
        for depth in (1, *_depths(chain, cluster, 1, settings)):
            width, rest = divmod(cluster.num_devices, depth * tensor)
            if rest or batch % width:
                continue
            count = batch // width
            shape = (width, tensor) if width > 1 else (tensor,)
            names = ("data", "tensor")[-len(shape) :]
            if shape not in splits_of:
                # How a reshape can be split depends on the batch it sees.
                micro = rebatch(graph, width) if reshapes else graph
                splits_of[shape] = feature_splits(micro, _mesh(shape, 0, names))
            for recompute in (False, True) if graph.is_training else (False,):
                stages = _stages(chain, depth, splits_of[shape], shape, depth, recompute, names)
                plans.append((stages, Schedule("1f1b", count)))
    return plans


PIPELINES: dict[str, PipelineStrategy] = {
    "gpipe": PipelineStrategy(
        "gpipe", "pipeline, forwards first, recomputed", _line("gpipe", recompute=True)
    ),
    "1f1b": PipelineStrategy(
        "1f1b", "pipeline, one forward one backward", _line("1f1b", recompute=False)
    ),
    "interleaved": PipelineStrategy(
        "interleaved", "two stages per group", _line("interleaved", recompute=False, chunks=2)
    ),
    "megatron": PipelineStrategy("megatron", "tensor x pipeline x data", _megatron),
}


def _depths(chain: Chain, cluster: Cluster, chunks: int, settings: PipelineSettings) -> list[int]:
    return [
        depth
        for depth in settings.depths
        if cluster.num_devices % depth == 0 and depth * chunks <= chain.num_segments
    ]


def _count(
    batch: int, width: int, depth: int, settings: PipelineSettings, *, whole: bool
) -> int | None:
    """About four micro-batches a stage, with whole samples for every device of a stage."""
    good = [
        count
        for count in divisors(batch)
        if batch // count % width == 0 and not (whole and count % depth)
    ]
    return min(good, key=lambda c: (abs(c - settings.per_stage * depth), c), default=None)


def _mesh(shape: tuple[int, ...], first: int, names: Sequence[str] = ("data",)) -> Mesh:
    axes = tuple(Axis(name, size) for name, size in zip(names, shape, strict=True))
    size = shape[0] * (shape[1] if len(shape) == 2 else 1)
    return Mesh(axes, tuple(range(first, first + size)))


def _stages(
    chain: Chain, count: int, splits: Sequence[OpSplit], shape: tuple[int, ...], groups: int,
    recompute: bool, names: Sequence[str] = ("data",),
) -> tuple[Stage, ...]:  # fmt: skip
    """Stages of about equal work, one after the other on groups of devices."""
    of = {split.op: replace(split, zero=0) for split in splits}
    ends = equal_work(chain, count)
    size = shape[0] * (shape[1] if len(shape) == 2 else 1)
    stages = []
    for number, (a, b) in enumerate(zip((0, *ends), (*ends, chain.num_segments), strict=True)):
        segments = chain.segments[a:b]
        mine = tuple(of[op] for segment in segments for op in segment.ops)
        kept = tuple(segment.ops[0] for segment in segments[1:]) if recompute else ()
        mesh = _mesh(shape, number % groups * size, names)
        stages.append(Stage(f"stage{number}", mesh, mine, "full" if recompute else "none", kept))
    return tuple(stages)


def equal_work(chain: Chain, count: int) -> tuple[int, ...]:
    """Cuts (segments before which a stage begins) that give every stage about equal FLOPs."""
    graph = chain.graph
    work = [sum(flops(graph.call(graph.op(n))) for n in s.ops) for s in chain.segments]
    total, done = sum(work), 0.0
    cuts: list[int] = []
    for i, own in enumerate(work):
        left = count - 1 - len(cuts)
        # A stage begins where the next share is reached, or where only one segment each is left.
        reached = total and done + own / 2 >= total * (len(cuts) + 1) / count
        if i > (cuts[-1] if cuts else 0) and left and (reached or len(work) - i <= left):
            cuts.append(i)
        done += own
    return tuple(cuts)
