"""How a tensor lies on a mesh, and the collectives that turn one layout into another.

A layout is one placement per mesh axis. Axis by axis, with `held` the bytes a device has after:

    S(i) -> R   all-gather of held           P -> R      all-reduce of held
    S(i) -> S(j) all-to-all of held          P -> S(i)   reduce-scatter of what it had before
    R -> S(i)   a slice, free

Partial sums go first: what is gathered later is then smaller. Where two axes shard one dim, the
first cuts it and the second cuts its parts, so that a change along the first needs the dim whole
along the second: it is gathered there before, and cut again after.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from partita.costs.collectives import Collectives, Groups
from partita.graph.splits import PARTIAL, REPLICATE, TensorPlacement
from partita.plans import Axis

Floats = npt.NDArray[np.float64]
Layout = tuple[TensorPlacement, ...]


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
