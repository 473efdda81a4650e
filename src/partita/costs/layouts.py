"""How a tensor lies on a mesh, and what turns one layout into another, gathers it or sends it on.

A layout is one placement per mesh axis. Axis by axis, with `held` the bytes a device has after:

    S(i) -> R   all-gather of held           P -> R      all-reduce of held
    S(i) -> S(j) all-to-all of held          P -> S(i)   reduce-scatter of what it had before
    R -> S(i)   a slice, free

Partial sums go first: what is gathered later is then smaller. Where two axes shard one dim, the
first cuts it and the second cuts its parts, so that a change along the first needs the dim whole
along the second: it is gathered there before, and cut again after.

Tokens are routed to experts in groups (`token_groups`). A device that has a share of the tokens
routes that share by itself: its tokens compete for its share of every expert's places, in its
order. So the groups are the shares of the tokens, and a dispatch and its combine must have the same
ones, over whichever axes (`graph/splits.py`).

Sharded parameters are gathered in bundles (`stage_bundles`). A gather has a start, a seconds, and
brings b bytes a second. Before a phase computes, its first bundle must be there; the others arrive
beside computing. With S bytes to gather in all,

    exposed = B / b        starts = a S / B        least together at B = sqrt(a b S)

Two bundles are held at a time, so that none is larger than a part of a device's memory. Frameworks
bundle by layers (FSDP's wrapping), which is the same thing where a layer has about that size.

Between the devices of two stages a tensor is sent (`transfer_seconds`). Each target device needs
its share as the first op there wants it. It comes from the source device at the same place of the
order; all messages are on their way at once, and what crosses one link adds up there. Where targets
need copies, each may fetch a part only and the copies exchange their parts over their own, often
faster, links: the quicker of the two is taken.

Between meshes that have some devices in common a device keeps what it has, and takes the rest from
whoever has it.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from partita.cluster import Cluster
from partita.costs.collectives import Collectives, Groups
from partita.graph.chain import longest_repeat
from partita.graph.loops import loop_nest
from partita.graph.record import Call, Graph
from partita.graph.splits import PARTIAL, REPLICATE, TensorPlacement, placements
from partita.plans import Axis, Mesh, Stage

Floats = npt.NDArray[np.float64]
Layout = tuple[TensorPlacement, ...]
PROBE_BYTES = 25 * 1024 * 1024  # a gather by which starts are told from bandwidth
MEMORY_SHARE = 1 / 32  # of a device, for one bundle
Extent = tuple[tuple[float, float], ...]  # of each dim that is cut, from where to where


@dataclass(frozen=True, slots=True)
class ConversionStep:
    """One step of a conversion along one axis; `collective` is empty for a free slice."""

    axis: int
    collective: str
    size_bytes: float
    held_bytes: float
    layout: Layout


def num_shards(layout: Layout, sizes: Sequence[float]) -> float:
    """Into how many shares a tensor is cut."""
    shards = 1.0
    for placement, size in zip(layout, sizes, strict=True):
        if placement.kind == "shard":
            shards *= size
    return shards


def copied_axes(layout: Layout, axes: Sequence[Axis]) -> tuple[int, ...]:
    """The axes along which devices hold copies of a tensor."""
    return tuple(i for i, p in enumerate(layout) if p == REPLICATE and axes[i].size > 1)


def zero_axes(layout: Layout, axes: Sequence[Axis]) -> tuple[int, ...]:
    """The axes along which ZeRO shards a parameter: those with copies, but not with replicas."""
    return tuple(axis for axis in copied_axes(layout, axes) if not axes[axis].replicates)


def zero_parts(layout: Layout, axes: Sequence[Axis]) -> int:
    """Into how many parts ZeRO cuts what devices would hold copies of."""
    return math.prod(axes[axis].size for axis in zero_axes(layout, axes))


def summed_layout(layout: Layout) -> Layout:
    """How a gradient lies when its partial sums are added up."""
    return tuple(REPLICATE if p == PARTIAL else p for p in layout)


@dataclass(frozen=True, slots=True)
class Reduction:
    """One collective that adds up a gradient: along an axis, of a part of what a device holds.

    Replicas of shard groups add up once a step; within the groups it depends on the ZeRO stage.
    """

    axis: int
    collective: str
    part: float
    across: bool  # replicas of shard groups


def gradient_reductions(layout: Layout, axes: Sequence[Axis], level: int) -> tuple[Reduction, ...]:
    """How a gradient in partial sums is reduced at a ZeRO stage, within shard groups first."""
    partial = [i for i, p in enumerate(layout) if p == PARTIAL and axes[i].size > 1]
    if level == 0:
        return tuple(Reduction(axis, "all_reduce", 1.0, False) for axis in partial)
    part = 1 / zero_parts(summed_layout(layout), axes)
    inner = [Reduction(i, "reduce_scatter", 1.0, False) for i in partial if not axes[i].replicates]
    across = [Reduction(i, "all_reduce", part, True) for i in partial if axes[i].replicates]
    return (*inner, *across)


class Reductions:
    """Reductions of gradients on one mesh, those of each layout and ZeRO stage worked out once."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = axes
        self._known: dict[tuple[Layout, int], tuple[Reduction, ...]] = {}

    def __call__(self, layout: Layout, level: int) -> tuple[Reduction, ...]:
        """What `gradient_reductions` says."""
        steps = self._known.get((layout, level))
        if steps is None:
            steps = self._known[layout, level] = gradient_reductions(layout, self.axes, level)
        return steps


def common_layout(layouts: Sequence[Layout]) -> Layout:
    """One layout for tensors that are added: equal ones stay, shards win, else replicas."""
    return tuple(
        column[0]
        if len(set(column)) == 1
        else next((p for p in column if p.kind == "shard"), REPLICATE)
        for column in zip(*layouts, strict=True)
    )


def gradient_target(layout: Layout, stored: Layout) -> Layout:
    """How a gradient lies before it is reduced: as its parameter, partial sums where replicated."""
    return tuple(
        PARTIAL if have == PARTIAL and keep == REPLICATE else keep
        for have, keep in zip(layout, stored, strict=True)
    )


def conversion(
    whole_bytes: float, sizes: Sequence[float], have: Layout, need: Layout
) -> tuple[ConversionStep, ...]:
    """The steps from one layout to another, for a tensor of `whole_bytes` in all."""
    return tuple(
        ConversionStep(
            axis, name, whole_bytes / sent if name else 0.0, whole_bytes / held, layout
        )
        for axis, name, sent, held, layout in _conversion_shape(tuple(sizes), have, need)
    )  # fmt: skip


@functools.lru_cache(maxsize=65536)
def _conversion_shape(
    sizes: tuple[float, ...], have: Layout, need: Layout
) -> tuple[tuple[int, str, float, float, Layout], ...]:
    """Axis, collective, parts of the tensor that it counts and that lie there after, layout."""
    steps: list[tuple[int, str, float, float, Layout]] = []
    left = [i for i in range(len(need)) if have[i] != need[i]]
    while left:
        axis = min(left, key=lambda i: (have[i] != PARTIAL, i))
        before, after = have[axis], need[axis]
        inner = [
            i
            for i in range(axis + 1, len(need))
            if have[i] in (before, after) and have[i].kind == "shard"
        ]
        if inner:
            axis, after = inner[-1], REPLICATE
            before = have[axis]
        shards_before = num_shards(have, sizes)
        have = (*have[:axis], after, *have[axis + 1 :])
        shards = num_shards(have, sizes)
        if before == REPLICATE:
            steps.append((axis, "", shards, shards, have))
        elif before == PARTIAL:
            name, sent = (
                ("all_reduce", shards) if after == REPLICATE else ("reduce_scatter", shards_before)
            )
            steps.append((axis, name, sent, shards, have))
        else:
            name = "all_gather" if after == REPLICATE else "all_to_all"
            steps.append((axis, name, shards, shards, have))
        left = [i for i in range(len(need)) if have[i] != need[i]]
    return tuple(steps)


def conversion_seconds(
    whole_bytes: float,
    sizes: Sequence[float],
    groups: Sequence[Groups],
    collectives: Collectives,
    have: Layout,
    need: Layout,
) -> float:
    """Time of a conversion on a mesh: ways of each axis, and its lines of devices."""
    return sum(
        collectives.seconds(name, whole_bytes / sent, groups[axis])
        for axis, name, sent, _, _ in _conversion_shape(tuple(sizes), have, need)
        if name
    )


@dataclass(frozen=True, eq=False)
class Conversions:
    """Times of conversions on one mesh, each pair of layouts and size worked out once."""

    sizes: Sequence[float]
    groups: Sequence[Groups]
    collectives: Collectives
    _number: dict[Layout, int] = field(default_factory=dict, repr=False)  # quicker to hash
    _layouts: list[Layout] = field(default_factory=list, repr=False)
    _known: dict[float, Floats] = field(default_factory=dict, repr=False)  # by size; nan: not yet

    def table(self, size: float, have: Sequence[Layout], need: Sequence[Layout]) -> Floats:
        """Seconds from each layout to each; many of them may be equal."""
        rows, columns = self._numbers(have), self._numbers(need)
        known = self._known_of(size)
        own, its = sorted(set(rows)), sorted(set(columns))
        for i, j in np.argwhere(np.isnan(known[np.ix_(own, its)])).tolist():
            known[own[i], its[j]] = self._seconds(size, own[i], its[j])
        table: Floats = known[np.ix_(rows, columns)]
        return table

    def seconds(self, size: float, have: Layout, need: Layout) -> float:
        """Seconds from one layout to another."""
        (i,), (j,) = self._numbers([have]), self._numbers([need])
        known = self._known_of(size)
        if np.isnan(known[i, j]):
            known[i, j] = self._seconds(size, i, j)
        return float(known[i, j])

    def _numbers(self, layouts: Sequence[Layout]) -> list[int]:
        numbers = []
        for layout in layouts:
            number = self._number.setdefault(layout, len(self._layouts))
            if number == len(self._layouts):
                self._layouts.append(layout)
            numbers.append(number)
        return numbers

    def _known_of(self, size: float) -> Floats:
        """What is known for a size, with room for every layout."""
        known, count = self._known.get(size), len(self._layouts)
        if known is None or len(known) < count:
            wider = np.full((2 * count, 2 * count), np.nan)
            if known is not None:
                wider[: len(known), : len(known)] = known
            known = self._known[size] = wider
        return known

    def _seconds(self, size: float, i: int, j: int) -> float:
        if i == j:
            return 0.0
        have, need = self._layouts[i], self._layouts[j]
        return conversion_seconds(size, self.sizes, self.groups, self.collectives, have, need)


@functools.lru_cache(maxsize=4096)
def token_groups(call: Call, dims: tuple[str, ...], axes: tuple[Axis, ...]) -> tuple[Fraction, ...]:
    """Where the groups of tokens end, as parts of all tokens; (1,) if all are one group."""
    gates = loop_nest(call).inputs[1]
    tokens = {name for names in gates.dims[:-1] for name in names}
    shares = [Fraction(1)]
    for dim, axis in zip(dims, axes, strict=True):
        if dim in tokens:  # a later axis cuts the shares of an earlier one
            own = [Fraction(weight, axis.parts) for weight in axis.weights or (1,) * axis.size]
            shares = [share * part for share in shares for part in own]
    ends, end = [], Fraction(0)
    for share in shares:
        end += share
        ends.append(end)
    return tuple(ends)


def gather_start(
    collectives: Collectives, mesh: Mesh, axes: tuple[int, ...]
) -> tuple[float, float]:  # fmt: skip
    """Seconds before a gather along some axes brings anything, and of each byte of its result."""
    start = each = 0.0
    for axis in axes:
        groups = mesh.groups(axis)
        moving = collectives.by_bandwidth("all_gather", PROBE_BYTES, groups)
        start += max(0.0, collectives.seconds("all_gather", PROBE_BYTES, groups) - moving)
        each += moving / PROBE_BYTES
    return start, each


def best_bundle(
    total_bytes: float, start_s: float, byte_s: float, memory_bytes: float
) -> int:  # fmt: skip
    """Bytes of one gather, of so many in all."""
    if not byte_s:
        return 0
    return int(min(math.sqrt(total_bytes * start_s / byte_s), MEMORY_SHARE * memory_bytes))


def stage_bundles(
    stage: Stage, graph: Graph, cluster: Cluster, collectives: Collectives
) -> tuple[str, ...]:
    """The forward ops of a stage with which a bundle of its sharded parameters begins.

    A bundle ends when it is large enough, and with its layer (what repeats in the model), so that
    equal layers are gathered alike. None where no parameter is sharded.
    """
    sizes, per_op = _gathered_bytes(stage, graph)
    if not sizes:
        return ()
    largest = max(sizes, key=lambda axes: (sizes[axes], axes))
    memory = min(cluster.kind_of(device).memory_bytes for device in stage.mesh.devices)
    start, each = gather_start(collectives, stage.mesh, largest)
    bundle = best_bundle(sizes[largest], start, each, float(memory))
    layer_of = _layers(stage, graph)
    firsts: list[str] = []
    size, layer = 0.0, -1
    for name, own in per_op.items():
        if not firsts or size >= bundle or layer_of[name] != layer:
            firsts.append(name)
            size = 0.0
        size, layer = size + own, layer_of[name]
    return tuple(firsts)


def _gathered_bytes(
    stage: Stage, graph: Graph
) -> tuple[dict[tuple[int, ...], float], dict[str, float]]:
    """Bytes of sharded parameters once they are whole: by the axes of their gather, and by op."""
    sizes: dict[tuple[int, ...], float] = {}
    per_op: dict[str, float] = {}
    seen: set[str] = set()
    ways = tuple(axis.ways() for axis in stage.mesh.axes)
    for split in stage.splits:
        if split.zero != 3:
            continue
        op = graph.op(split.op)
        needed = placements(graph.call(op), split.dims)[0]
        for name, layout in zip(op.inputs, needed, strict=True):
            tensor = graph.tensor(name)
            axes = zero_axes(layout, stage.mesh.axes)
            if tensor.role == "parameter" and axes and name not in seen:
                seen.add(name)
                size = tensor.size_bytes / num_shards(layout, ways)
                sizes[axes] = sizes.get(axes, 0.0) + size
                per_op[op.name] = per_op.get(op.name, 0.0) + size
    return sizes, per_op


def _layers(stage: Stage, graph: Graph) -> dict[str, int]:
    """The layer of every op of a stage: what repeats, one after the other, and the rest."""
    ops = [graph.op(split.op) for split in stage.splits]
    key = ("layers of bundles", f"{ops[0].name} {ops[-1].name} {len(ops)}")
    if key not in graph.memo:
        repeat = longest_repeat(graph, ops)
        layers = {op.name: 0 for op in ops}
        if repeat is not None:
            for place, op in enumerate(ops[repeat.first :]):
                layers[op.name] = 1 + min(place // repeat.length, repeat.times)
        graph.memo[key] = layers
    known: dict[str, int] = graph.memo[key]
    return known


def transfer_seconds(
    size_bytes: float, source: Mesh, have: Layout, target: Mesh, need: Layout, times: Collectives
) -> float:
    """Time of one tensor of `size_bytes` in all, from layout `have` to layout `need`."""
    ways = tuple(axis.ways() for axis in target.axes)
    if source.devices == target.devices:
        if source.axes != target.axes:
            return 0.0
        groups = [source.groups(i) for i in range(len(source.axes))]
        return conversion_seconds(size_bytes, ways, groups, times, have, need)
    if not set(source.devices).isdisjoint(target.devices):
        moved = moved_parts(source, have, target, need)
        largest = max((part for _, _, part in moved), default=0.0)
        return times.exchange(size_bytes * largest, tuple((a, b) for a, b, _ in moved))
    share = size_bytes / num_shards(need, ways)
    copied = copied_axes(need, target.axes)
    pairs = paired(source, target)
    direct = times.exchange(share, pairs)
    if not copied:
        return direct
    part, gather = share, 0.0
    for axis in copied:
        gather += times.seconds("all_gather", part, target.groups(axis))
        part /= target.axes[axis].size
    return min(direct, times.exchange(part, pairs) + gather)


def sent_pairs(
    source: Mesh, have: Layout, target: Mesh, need: Layout
) -> tuple[tuple[int, int], ...]:
    """Who sends to whom when a tensor passes between two meshes."""
    if set(source.devices).isdisjoint(target.devices) or source.devices == target.devices:
        return paired(source, target)
    return tuple((a, b) for a, b, _ in moved_parts(source, have, target, need))


def paired(source: Mesh, target: Mesh) -> tuple[tuple[int, int], ...]:
    """Who sends to whom: each target's share comes from the source at its place."""
    n, m = len(source.devices), len(target.devices)
    return tuple((source.devices[i * n // m], device) for i, device in enumerate(target.devices))


@functools.lru_cache(maxsize=4096)
def moved_parts(
    source: Mesh, have: Layout, target: Mesh, need: Layout
) -> tuple[tuple[int, int, float], ...]:
    """What passes between meshes that have devices in common: from, to, which part of the tensor.

    The shards of a layout tile a tensor, so what a device lacks lies in shards that it has nothing
    of. Of replicas the one at the target's place of the order sends.
    """
    cut = sorted({p.dim for p in (*have, *need) if p.kind == "shard"})
    holders: dict[Extent, list[int]] = {}
    for device in source.devices:
        extent = _extent(have, source.axes, source.place(device), cut)
        holders.setdefault(extent, []).append(device)
    moved = []
    for i, device in enumerate(target.devices):
        needed = _extent(need, target.axes, target.place(device), cut)
        for extent, devices in holders.items():
            part = math.prod(
                max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
                for a, b in zip(extent, needed, strict=True)
            )
            if part > 0 and device not in devices:
                moved.append((devices[i * len(devices) // len(target.devices)], device, part))
    return tuple(moved)


def _extent(
    layout: Layout, axes: tuple[Axis, ...], place: tuple[int, ...], dims: list[int]
) -> Extent:
    """What a device has of each dim that any layout cuts: axes that cut one dim nest."""
    extent = dict.fromkeys(dims, (0.0, 1.0))
    for placement, axis, coordinate in zip(layout, axes, place, strict=True):
        if placement.kind == "shard":
            weights = axis.weights or (1,) * axis.size
            borders = (0, *itertools.accumulate(weights))
            start, stop = extent[placement.dim]
            unit = (stop - start) / borders[-1]
            extent[placement.dim] = (
                start + unit * borders[coordinate], start + unit * borders[coordinate + 1]
            )  # fmt: skip
    return tuple(extent[dim] for dim in dims)
