"""What people do by hand, by name, and no search may lose to: splits, pipelines, unequal stages.

Splits, on one stage:

    data      every op by its batch
    zero1     the same, optimizer states sharded
    fsdp      the same, parameters sharded
    tensor    Megatron's: matrices by columns then rows, attention by heads, vocabulary and experts
              sharded along the inner mesh axis, the batch along the other
    one-weird-trick  Krizhevsky's one weird trick: convolutions by batch, dense layers by features
    spatial   images by rows, everything else by batch

`tensor` and `one-weird-trick` know no model: they follow how tensors lie from op to op, and split a
matrix by its rows where its input comes in shards of features, by its columns elsewhere.

Pipelines:

    gpipe        stages of equal work on every divisor of the devices, data parallel inside,
                 all forwards then all backwards, recomputed as GPipe does
    1f1b         the same stages, one forward one backward, nothing recomputed
    interleaved  the same with two stages on every group of devices
    megatron     tensor parallel inside a node, the pipeline as deep as memory asks for, data
                 parallel over the rest, one sample per share of a micro-batch, 1F1B

Each name of a pipeline stands for a few plans (depths, with and without recompute); the best that
fits counts.

What planners for heterogeneous devices do:

    by-kind   each kind of devices forms stages of its own, as wide as it has devices, with as much
              of the model as it is fast (Metis, Sailor); data parallel inside, any order of kinds
    unequal   one stage of all devices, each with samples in proportion to its speed (as in
              HexiScale), parameters replicated or sharded

Speed is that of the model's forward on one such device, op by op. Nothing here knows transformers.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from partita.cluster import Cluster
from partita.costs.layouts import token_groups
from partita.costs.roofline import op_cost
from partita.costs.sharding import dims_of
from partita.graph.chain import Chain
from partita.graph.loops import Access, loop_nest
from partita.graph.rebatch import rebatch
from partita.graph.record import Graph, Op
from partita.graph.splits import REPLICATE, TensorPlacement, output_placement, routed_pairs
from partita.graph.work import flops
from partita.jobs.simulate import data_splits
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage
from partita.search.joint.cells import divisors

MATRICES = frozenset({"linear", "expert_linear"})
MOST_INNER = 64
SEQUENCE = "s"  # the loop over positions
OPENS = {"moe_dispatch": "e", "embedding": "v"}  # ops that may start a split of their own
Planned = tuple[tuple[Stage, ...], Schedule]
T = TypeVar("T")
MixedPlan = tuple[tuple[Stage, ...], Schedule]


@dataclass(frozen=True)
class NamedStrategy:
    """A named way; `stages` gives it on every mesh it knows for so many devices."""

    name: str
    summary: str
    stages: Callable[[Graph, int], tuple[Stage, ...]]


def _line(name: str, size: int) -> Mesh:
    return Mesh((Axis(name, size),), tuple(range(size)))


def _data(zero: int) -> Callable[[Graph, int], tuple[Stage, ...]]:
    def stages(graph: Graph, size: int) -> tuple[Stage, ...]:
        mesh = _line("data", size)
        return (Stage("model", mesh, data_splits(graph, mesh, zero)),)

    return stages


def _tensor(graph: Graph, size: int) -> tuple[Stage, ...]:
    """Every inner axis that divides the devices, with and without sharded states."""
    stages: list[Stage] = []
    levels = (0, 1) if graph.is_training else (0,)
    for inner in (n for n in range(2, size + 1) if size % n == 0 and n <= MOST_INNER):
        axes: tuple[Axis, ...] = (Axis("tensor", inner),)
        if inner < size:
            axes = (Axis("data", size // inner), *axes)
        mesh = Mesh(axes, tuple(range(size)))
        splits = feature_splits(graph, mesh)
        for level in levels:
            kept = tuple(replace(split, zero=level) for split in splits)
            stages.append(Stage("model", mesh, kept))
    return tuple(stages)


def _one_weird_trick(graph: Graph, size: int) -> tuple[Stage, ...]:
    mesh = _line("x", size)
    return (Stage("model", mesh, feature_splits(graph, mesh, batch_first=True)),)


def _spatial(graph: Graph, size: int) -> tuple[Stage, ...]:
    mesh = _line("x", size)
    splits = []
    for op in graph.ops:
        if op.phase == "forward":
            legal = dims_of(graph.call(op), mesh.axes)
            order = [("h",), ("b",), ("",)]
            splits.append(OpSplit(op.name, next(dims for dims in order if dims in legal)))
    return (Stage("model", mesh, tuple(splits)),)


STRATEGIES: dict[str, NamedStrategy] = {
    "data": NamedStrategy("data", "data parallel", _data(0)),
    "zero1": NamedStrategy("zero1", "data parallel, states sharded", _data(1)),
    "fsdp": NamedStrategy("fsdp", "fully sharded data parallel", _data(3)),
    "tensor": NamedStrategy("tensor", "Megatron-style tensor parallel", _tensor),
    "one-weird-trick": NamedStrategy(
        "one-weird-trick", "batch for convolutions, features for dense layers", _one_weird_trick
    ),
    "spatial": NamedStrategy("spatial", "images by rows", _spatial),
}


def feature_splits(
    graph: Graph, mesh: Mesh, *, batch_first: bool = False, sequence: bool = False
) -> tuple[OpSplit, ...]:
    """Splits along the last axis that follow features from op to op; the batch along the others.

    With `batch_first`, ops that no dense layer comes before are split by batch there too. With
    `sequence`, what would be replicated along the last axis is split by its sequence (Megatron's
    sequence parallelism): norms, residuals, and tables that the axis does not divide.
    """
    lies: dict[str, TensorPlacement] = {}  # how each tensor lies on the last axis
    splits: list[OpSplit] = []
    for op in graph.ops:
        if op.phase != "forward":
            continue
        legal = _routed_alike(graph, op, dims_of(graph.call(op), mesh.axes), mesh, splits)
        inner = _follow(graph, op, lies, mesh.axes[-1].parts, sequence)
        if not inner and batch_first and _all_replicated(graph, op, lies):
            inner = "b"
        dims = _with_batch(legal, inner)
        splits.append(OpSplit(op.name, dims))
        nest = loop_nest(graph.call(op))
        for name, access in zip(op.outputs, nest.outputs, strict=True):
            placement = output_placement(nest, access, dims[-1])
            if placement.kind != "shard":  # a partial sum is reduced, or reduce-scattered
                placement = _along_sequence(access) if sequence else REPLICATE
            lies[name] = placement
    return tuple(splits)


def _along_sequence(access: Access) -> TensorPlacement:
    """A tensor sharded along its sequence; whole where it has none."""
    for index, names in enumerate(access.dims):
        if names == (SEQUENCE,):
            return TensorPlacement("shard", index)
    return REPLICATE


def _follow(
    graph: Graph, op: Op, lies: dict[str, TensorPlacement], parts: int, sequence: bool = False
) -> str:
    """The loop dim that keeps the shares an op's inputs come in; for matrices, that makes some."""
    nest = loop_nest(graph.call(op))
    extents = {dim.name: dim.extent for dim in nest.dims if not dim.whole}
    wanted = set()
    for name, access in zip(op.inputs, nest.inputs, strict=True):
        place = lies.get(name, REPLICATE)
        if place.kind == "shard" and place.dim < len(access.dims) and access.dims[place.dim]:
            wanted.add(access.dims[place.dim][0])
    if sequence and len(wanted) > 1:  # shares of features or experts come first
        wanted.discard(SEQUENCE)
    free = not wanted or (sequence and wanted == {SEQUENCE})
    last = [SEQUENCE] if sequence else []
    if op.kind in MATRICES and (free or wanted == {"b"}):
        candidates = ["n", *last]
    elif op.kind in OPENS and free:
        candidates = [OPENS[op.kind], *last]
    elif len(wanted) == 1:
        candidates = sorted(wanted)
    else:
        return ""
    return next((d for d in candidates if d in extents and extents[d] % parts == 0), "")


def _routed_alike(
    graph: Graph, op: Op, legal: tuple[tuple[str, ...], ...], mesh: Mesh, splits: list[OpSplit]
) -> tuple[tuple[str, ...], ...]:
    """Of a combine's splits those that route the groups of tokens that its dispatch does.

    Dispatches that one combine joins route alike, too.
    """
    pairs = routed_pairs(graph) if op.kind in ("moe_dispatch", "moe_combine") else ()
    combines = {combine.name for pair in pairs for combine in pair[1:] if op in pair}
    related = {dispatch.name for dispatch, combine in pairs if combine.name in combines}
    for split in splits if related else ():
        if split.op in related:
            groups = token_groups(graph.call(graph.op(split.op)), split.dims, mesh.axes)
            legal = tuple(d for d in legal if token_groups(graph.call(op), d, mesh.axes) == groups)
    return legal


def _all_replicated(graph: Graph, op: Op, lies: dict[str, TensorPlacement]) -> bool:
    """True where no input has been cut along features so far."""
    made = [lies[name] for name in op.inputs if name in lies]
    return op.kind not in MATRICES and all(
        p in (REPLICATE, TensorPlacement("shard", 0)) for p in made
    )


@functools.lru_cache(maxsize=4096)  # a deep model asks the same of every layer
def _with_batch(legal: tuple[tuple[str, ...], ...], inner: str) -> tuple[str, ...]:
    """The inner dim if it is legal, and the batch along as many other axes as can be."""

    def score(dims: tuple[str, ...]) -> tuple[bool, int, int]:
        others = dims[:-1]
        strange = sum(1 for dim in others if dim not in ("", "b"))
        return dims[-1] == inner, -strange, others.count("b") - (dims[-1] not in (inner, ""))

    return max(legal, key=score)


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """Which pipelines are built by hand."""

    depths: tuple[int, ...] = (2, 4, 8, 16, 32)  # numbers of groups of devices
    per_stage: int = 4  # micro-batches for every stage
    most_tensor: int = 8  # devices of a node that Megatron splits layers over


USUAL_PIPELINES = PipelineSettings()


class Plans(Protocol):
    """Makes the plans of a named pipeline."""

    def __call__(
        self, graph: Graph, chain: Chain, cluster: Cluster, batch: int,
        settings: PipelineSettings = USUAL_PIPELINES,
    ) -> list[Planned]:  # fmt: skip
        """Stages and schedule for every depth it knows."""
        ...


@dataclass(frozen=True)
class PipelineStrategy:
    """A named way; `plans` gives its stages and schedule for every depth it knows."""

    name: str
    summary: str
    plans: Plans


def _chained(name: str, *, recompute: bool, chunks: int = 1) -> Plans:
    def plans(
        graph: Graph,
        chain: Chain,
        cluster: Cluster,
        batch: int,
        settings: PipelineSettings = USUAL_PIPELINES,
    ) -> list[Planned]:
        plans = []
        for depth in _depths(chain, cluster, chunks, settings):
            width = cluster.num_devices // depth
            count = _count(batch, width, depth, settings, whole=chunks > 1)
            if count is None or (recompute and not graph.is_training):
                continue
            splits = data_splits(graph, _mesh((width,), 0))
            stages = _even_stages(chain, depth * chunks, splits, (width,), depth, recompute)
            plans.append((stages, Schedule(name, count)))
        return plans

    return plans


def _megatron(
    graph: Graph,
    chain: Chain,
    cluster: Cluster,
    batch: int,
    settings: PipelineSettings = USUAL_PIPELINES,
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
                stages = _even_stages(
                    chain, depth, splits_of[shape], shape, depth, recompute, names
                )
                plans.append((stages, Schedule("1f1b", count)))
    return plans


PIPELINES: dict[str, PipelineStrategy] = {
    "gpipe": PipelineStrategy(
        "gpipe", "pipeline, forwards first, recomputed", _chained("gpipe", recompute=True)
    ),
    "1f1b": PipelineStrategy(
        "1f1b", "pipeline, one forward one backward", _chained("1f1b", recompute=False)
    ),
    "interleaved": PipelineStrategy(
        "interleaved", "two stages per group", _chained("interleaved", recompute=False, chunks=2)
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


def _even_stages(
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


@dataclass(frozen=True, slots=True)
class MixedSettings:
    """How many plans there are."""

    stages: tuple[int, ...] = (1, 2, 4)  # of each kind
    per_stage: tuple[int, ...] = (4, 8)  # micro-batches for every stage
    finest_share: int = 12  # samples of the slowest at most, and so many numbers of them
    shares: int = 3
    plans: int = 12


USUAL_MIXED = MixedSettings()


def kinds_of(cluster: Cluster) -> dict[str, list[int]]:
    """The devices of each kind."""
    kinds: dict[str, list[int]] = {}
    for device in range(cluster.num_devices):
        kinds.setdefault(cluster.kind_of(device).name, []).append(device)
    return kinds


def by_kind(
    graph: Graph, chain: Chain, cluster: Cluster, batch: int, settings: MixedSettings = USUAL_MIXED
) -> list[MixedPlan]:
    """Stages of one kind each, in every order of kinds, with work by speed."""
    kinds = kinds_of(cluster)
    if len(kinds) < 2:
        return []
    plans: list[tuple[list[list[int]], str, int]] = []
    checkpointing = ("none", "full") if graph.is_training else ("none",)
    for order in itertools.permutations(sorted(kinds)):
        for counts in itertools.product(settings.stages, repeat=len(order)):
            groups = _groups(kinds, order, counts)
            if groups is None or len(groups) > chain.num_segments:
                continue
            for count in _numbers(batch, groups, settings):
                plans += [(groups, kept, count) for kept in checkpointing]
    speeds = device_speeds(graph, cluster)
    splits_of: dict[int, dict[str, OpSplit]] = {}  # by the number of devices
    return [
        (
            _stages_by_kind(chain, speeds, groups, kept, splits_of),
            Schedule("1f1b", count),
        )
        for groups, kept, count in _evenly(plans, settings.plans)
    ]


def unequal(
    graph: Graph, cluster: Cluster, batch: int, settings: MixedSettings = USUAL_MIXED
) -> list[MixedPlan]:
    """One stage, samples by speed."""
    if len(kinds_of(cluster)) < 2:
        return []
    speeds = device_speeds(graph, cluster)
    plans: list[MixedPlan] = []
    for weights in _shares(speeds, batch, settings):
        mesh = Mesh((Axis("dp", len(weights), weights),), tuple(range(len(weights))))
        for zero in (0, 1, 3) if graph.is_training else (0,):
            stage = Stage("model", mesh, data_splits(graph, mesh, zero))
            plans.append(((stage,), Schedule()))
    return plans[: settings.plans]


def device_speeds(graph: Graph, cluster: Cluster) -> list[float]:
    """Forwards in a second of every device."""
    forward = [op for op in graph.ops if op.phase == "forward"]
    of_kind: dict[str, float] = {}
    for kind in cluster.kinds:
        seconds = sum(op_cost(graph, op, kind, ()).seconds for op in forward)
        of_kind[kind.name] = 1 / seconds if seconds else 1.0
    return [of_kind[device.kind] for device in cluster.devices]


def _groups(
    kinds: dict[str, list[int]], order: Sequence[str], counts: Sequence[int]
) -> list[list[int]] | None:
    """The devices of each stage; None where a kind's devices are not divided by its stages."""
    groups = []
    for name, count in zip(order, counts, strict=True):
        devices = kinds[name]
        if len(devices) % count:
            return None
        width = len(devices) // count
        groups += [devices[i * width : (i + 1) * width] for i in range(count)]
    return groups


def _numbers(batch: int, groups: list[list[int]], settings: MixedSettings) -> Iterator[int]:
    """Numbers of micro-batches whose samples every stage can share out evenly."""
    widths = math.lcm(*(len(group) for group in groups))
    good = [count for count in divisors(batch) if (batch // count) % widths == 0]
    wanted = [each * len(groups) for each in settings.per_stage]
    yield from sorted({min(good, key=lambda c: (abs(c - w), c)) for w in wanted} if good else ())


def _stages_by_kind(
    chain: Chain, speeds: Sequence[float], groups: list[list[int]], checkpointing: str,
    splits_of: dict[int, dict[str, OpSplit]],
) -> tuple[Stage, ...]:  # fmt: skip
    ends = cuts_by_speed(chain, [sum(speeds[device] for device in group) for group in groups])
    stages = []
    bounds = zip((0, *ends), (*ends, chain.num_segments), groups, strict=True)
    for number, (first, last, group) in enumerate(bounds):
        mesh = Mesh((Axis("dp", len(group)),), tuple(group))
        if len(group) not in splits_of:
            splits_of[len(group)] = {each.op: each for each in data_splits(chain.graph, mesh)}
        splits, segments = splits_of[len(group)], chain.segments[first:last]
        mine = tuple(splits[op] for segment in segments for op in segment.ops)
        kept = tuple(segment.ops[0] for segment in segments[1:]) if checkpointing == "full" else ()
        stages.append(Stage(f"stage{number}", mesh, mine, checkpointing, kept))
    return tuple(stages)


def cuts_by_speed(chain: Chain, speeds: Sequence[float]) -> tuple[int, ...]:
    """Segments before which a stage begins, such that work is in proportion to speeds."""
    graph = chain.graph
    work = [sum(flops(graph.call(graph.op(n))) for n in s.ops) for s in chain.segments]
    total, whole, done = sum(work), sum(speeds), 0.0
    cuts: list[int] = []
    wanted = list(itertools.accumulate(speeds))[:-1]
    for index, own in enumerate(work):
        left = len(wanted) - len(cuts)
        reached = left and total and done + own / 2 >= total * wanted[len(cuts)] / whole
        begun = index > (cuts[-1] if cuts else 0)
        if left and begun and (reached or len(work) - index <= left):
            cuts.append(index)
        done += own
    return tuple(cuts)


def _shares(speeds: Sequence[float], batch: int, settings: MixedSettings) -> list[tuple[int, ...]]:
    """Whole numbers of samples by speed whose sum divides the batch, the truest first."""
    slowest, whole = min(speeds), sum(speeds)
    shares: dict[tuple[int, ...], float] = {}
    steps = 4 * settings.finest_share
    for scale in (1 + i / 4 for i in range(steps)):
        weights = tuple(max(1, round(scale * speed / slowest)) for speed in speeds)
        common = math.gcd(*weights)
        weights = tuple(weight // common for weight in weights)
        if batch % sum(weights) == 0:
            pairs = zip(weights, speeds, strict=True)
            shares[weights] = max(w / sum(weights) * whole / speed for w, speed in pairs)
    return sorted(shares, key=lambda weights: (shares[weights], weights))[: settings.shares]


def _evenly(plans: list[T], most: int) -> list[T]:
    if len(plans) <= most:
        return plans
    return [plans[i * len(plans) // most] for i in range(most)]
