"""The cells of a space: how devices are grouped, which are looked at first, what bounds them all.

Groupings. Equal devices: every number of stages that divides them, each stage as many neighbours in
the cluster's order (which follows its hierarchy). Heterogeneous devices: each kind is cut by
itself, so that a stage has one kind and gets as many segments as that kind is fast; kinds may come
in either order, and slow kinds may be left out. A mesh is a line, or a rectangle with a short inner
axis.

Likely cells are looked at first (`LikelyCells`).

The lower bound of a whole space is the least bound of its cells (`SpaceBound`). An evaluator bounds
a cell at several levels, cheap ones first. All cells have a bound at the cheapest level; the cell
with the least is raised to its next level until the least is one that cannot be raised. So every
number of stages and micro-batches of the space is covered, and only those that matter cost time.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from partita.cluster import Cluster
from partita.plans import Axis, Mesh
from partita.problems.joint import Cell, JointProblem

AXIS_NAMES = ("x", "y", "z")
Groups = tuple[tuple[int, ...], ...]
CountsOf = Mapping[int, Sequence[int]]  # of every grouping, the numbers of micro-batches there are


@dataclass(frozen=True, slots=True)
class GroupingSettings:
    """Which groups of devices and meshes of a group are in the space."""

    least_inner: int = 8  # inner axes of up to so many devices are tried, however small the nodes
    most_inner: int = 64  # and none of more, however large
    most_groupings: int = 48  # of heterogeneous devices, those of most devices and fewest groups
    largest_weight: int = 12  # of a device's share of the batch, in whole numbers
    most_weighted: int = 3  # meshes of unequal shares


USUAL_GROUPS = GroupingSettings()


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def device_groupings(
    cluster: Cluster, most_groups: int, settings: GroupingSettings = USUAL_GROUPS
) -> list[Groups]:
    """Ways to give the devices to the groups of a pipeline, few groups first."""
    everything = tuple(range(cluster.num_devices))
    alike = [
        _equal(everything, count) for count in divisors(len(everything)) if count <= most_groups
    ]
    if cluster.is_homogeneous:
        return alike
    by_kind: dict[str, list[int]] = {}
    for device in everything:
        by_kind.setdefault(cluster.devices[device].kind, []).append(device)
    distinct = dict.fromkeys(alike[:1])
    kinds = list(by_kind.values())
    for count in range(1, len(kinds) + 1):
        for order in itertools.permutations(kinds, count):
            for cuts in itertools.product(*(divisors(len(members)) for members in order)):
                if sum(cuts) <= most_groups:
                    groups = tuple(
                        group
                        for members, cut in zip(order, cuts, strict=True)
                        for group in _equal(tuple(members), cut)
                    )
                    distinct.setdefault(groups)
    ranked = sorted(distinct, key=lambda groups: (-sum(map(len, groups)), len(groups), groups))
    return ranked[: settings.most_groupings]


def _equal(devices: tuple[int, ...], count: int) -> Groups:
    size = len(devices) // count
    return tuple(devices[i * size : (i + 1) * size] for i in range(count))


def mesh_shapes(
    size: int, inner_size: int, settings: GroupingSettings = USUAL_GROUPS
) -> list[tuple[int, ...]]:
    """A line, and every rectangle whose inner axis is at most a node or a few devices long."""
    most = min(settings.most_inner, max(settings.least_inner, inner_size))
    inner = [b for b in divisors(size) if 2 <= b < size and b <= most]
    return [(size,), *((size // b, b) for b in inner)]


def shard_group_shapes(
    size: int, inner_size: int, shards: int, settings: GroupingSettings = USUAL_GROUPS
) -> list[tuple[tuple[int, ...], bool]]:
    """Meshes whose replicas come in groups of `shards`: sizes, and whether there are several.

    Groups lie outside of what shares a layer, replicas of them outside of both.
    """
    shapes = []
    for _, *inner in mesh_shapes(size, inner_size, settings):
        groups, rest = divmod(size // math.prod(inner), shards)
        if groups and not rest:
            replicas = (groups,) if groups > 1 else ()
            shapes.append(((*replicas, shards, *inner), groups > 1))
    return shapes


def mesh_of(shape: tuple[int, ...], devices: Sequence[int], *, replicates: bool = False) -> Mesh:
    """A mesh of these devices, row by row; one that `replicates` does so along its first axis."""
    named = zip(AXIS_NAMES, shape, strict=False)
    axes = tuple(
        Axis(name, size, (), replicates and not place) for place, (name, size) in enumerate(named)
    )
    return Mesh(axes, tuple(devices))


def weighted_meshes(
    cluster: Cluster, speed_of: dict[str, float], batch: int,
    settings: GroupingSettings = USUAL_GROUPS,
) -> list[Mesh]:  # fmt: skip
    """Lines over all devices in which shares of the batch follow speed, the best ones first.

    Weights are small whole numbers, one per kind, whose sum over all devices divides the batch:
    other shares would not be whole samples.
    """
    counts: dict[str, int] = {}
    for device in cluster.devices:
        counts[device.kind] = counts.get(device.kind, 0) + 1
    kinds = list(counts)
    if len(kinds) < 2:
        return []
    balances: list[tuple[float, tuple[int, ...]]] = []
    for weights in itertools.product(range(1, settings.largest_weight + 1), repeat=len(kinds)):
        parts = sum(w * counts[kind] for w, kind in zip(weights, kinds, strict=True))
        if math.gcd(*weights) == 1 and len(set(weights)) > 1 and batch % parts == 0:
            slowest = max(w / speed_of[kind] for w, kind in zip(weights, kinds, strict=True))
            balances.append((slowest / parts, weights))
    chosen = [dict(zip(kinds, weights, strict=True)) for _, weights in sorted(balances)]
    chosen = chosen[: settings.most_weighted]
    everything = tuple(range(cluster.num_devices))
    return [
        Mesh(
            (Axis("x", len(everything), tuple(of[device.kind] for device in cluster.devices)),),
            everything,
        )
        for of in chosen
    ]


@dataclass(frozen=True, slots=True)
class LikelyCells:
    """Which numbers of micro-batches are looked at, for a number of groups p."""

    per_stage: int = 4  # micro-batches a group to begin with: small bubbles, shares not yet tiny
    samples: tuple[int, ...] = (1, 2, 4, 8)  # per data-parallel share of a micro-batch
    most_counts: int = 3  # numbers for each p; one less on a large cluster
    large: int = 128  # devices of a large cluster
    deepest: int = 64  # micro-batches a group at most
    few: int = 8  # micro-batches of one group: so many and less are looked at, whole shares or not
    far: float = 2.0  # doublings from the likely number of groups: beyond, one number will do

    def wanted(self, num_groups: int) -> int:
        """Micro-batches to begin with. A single stage has no bubble: more only for memory."""
        return 1 if num_groups == 1 else self.per_stage * num_groups

    def counts(
        self, problem: JointProblem, grouping: int, counts_of: CountsOf, *, everything: bool
    ) -> list[int]:
        """Numbers of micro-batches to look at: shares of one, two, ... samples on some mesh."""
        mine = sorted(counts_of[grouping])
        p = problem.groupings[grouping].num_groups
        wanted = self.wanted(p)

        def likely_first(count: int) -> tuple[float, int]:
            return abs(math.log2(count / wanted)), count

        if everything:
            return sorted(mine, key=likely_first)
        whole = set(self._whole_shares(problem, grouping))
        if p == 1 or not whole:
            whole |= {count for count in mine if count <= self.few}
        last = max(whole, default=0)
        good = [
            count
            for count in mine
            if count in whole
            and count <= self.deepest * p
            and (count >= p or p == 1 or count == last)
        ]
        size = sum(map(len, problem.groupings[grouping].devices))
        most = self.most_counts - (size > self.large)
        ranked = sorted(good or mine, key=likely_first)[:most]  # of a large batch none is so small
        if self._is_far(problem, p, counts_of):
            del ranked[1:]
        weighted = [
            count
            for count in mine
            if count not in ranked
            and any(mesh.weights for mesh in problem.meshes_of(Cell(grouping, count), 0))
        ]
        return [*ranked, *weighted]

    def _whole_shares(self, problem: JointProblem, grouping: int) -> Iterator[int]:
        """Numbers of micro-batches with whole samples for every data-parallel share."""
        patterns = set(problem.groupings[grouping].patterns)
        shapes = {
            mesh.sizes
            for (pattern, _), meshes in problem.meshes.items()
            if pattern in patterns
            for mesh in meshes
        }
        for shape in sorted(shapes):
            for ways in (shape[0], math.prod(shape)):
                for samples in self.samples:
                    count, rest = divmod(problem.batch, ways * samples)
                    if not rest and count:
                        yield count

    def _is_far(self, problem: JointProblem, num_groups: int, counts_of: CountsOf) -> bool:
        """Is the number of groups so unlikely that one number of micro-batches will do?"""
        known = {problem.groupings[grouping].num_groups for grouping in counts_of}
        if not problem.homogeneous or len(known) == 1:
            return False
        return abs(math.log2(num_groups / problem.likely_stages)) > self.far


USUAL_CELLS = LikelyCells()


def likely_groupings(problem: JointProblem, counts_of: CountsOf) -> list[int]:
    """One group first: nothing waits there. On heterogeneous devices, few groups first."""
    likely = problem.likely_stages

    def likely_first(grouping: int) -> tuple[float, ...]:
        p = problem.groupings[grouping].num_groups
        if not problem.homogeneous:
            return (p, grouping)
        return (p > 1, abs(math.log2(p / likely)), p, grouping)

    return sorted(counts_of, key=likely_first)


class CellBounds(Protocol):
    """Bounds of cells at `num_levels` levels; each holds for every plan of the cell."""

    @property
    def num_levels(self) -> int:
        """How many levels there are."""
        ...

    def bound(self, cell: Cell, level: int, enough: float) -> float:
        """The bound at a level; more than `enough` need not be proven. Infinite: nothing fits."""
        ...


@dataclass
class SpaceBound:
    """What is known of every cell's bound."""

    cells: Sequence[Cell]
    bounds: CellBounds
    far_enough: float = 1.003  # times the bound of the next cell: more is not proven at once
    dear_levels: int = 2  # the last so many, which are asked for that only
    _known: dict[Cell, tuple[float, int]] = field(default_factory=dict)  # bound, level

    def rules_out(
        self, cell: Cell, objective: float, most_levels: int, hardly: float = 0.0
    ) -> bool:
        """Is nothing of a cell below an objective, by its first levels?

        Where the second leaves less than the part `hardly` of it, dearer ones are not asked.
        """
        return self.up_to(cell, most_levels - 1, objective, hardly * objective) >= objective

    def up_to(self, cell: Cell, last: int, enough: float, hardly: float = 0.0) -> float:
        """The bound of a cell at the first level that is enough, or at the last one asked for."""
        value = 0.0
        for level in range(min(last + 1, self.bounds.num_levels)):
            value = self.at(cell, level, enough)
            if value >= enough or (level == 1 and value < hardly):
                break
        return value

    def at(self, cell: Cell, level: int, enough: float = math.inf) -> float:
        """The best bound of a cell, at least at a level."""
        value, known = self._known.get(cell, (0.0, -1))
        if known < level:
            value = max(value, self.bounds.bound(cell, level, enough))
            self._known[cell] = value, level  # what is enough never grows: objectives only fall
        return value

    def lowest(
        self, cells: Sequence[Cell], most: int, last: int, below: float, late: Callable[[], bool]
    ) -> list[Cell]:
        """The few cells with the least bounds at a level, where these are below a value.

        The least bound is raised first. Once so many cells are at the level, a bound above theirs
        need not be proven further: it is no more than a cell's at the level before.
        """
        last = min(last, self.bounds.num_levels - 1)
        heap: list[tuple[float, int, int]] = []
        for number, cell in enumerate(cells):
            if late():
                return []
            heap.append((self.at(cell, 0, below), number, 0))
        heapq.heapify(heap)
        lowest: list[tuple[float, int]] = []
        while heap and not late():
            value, number, level = heapq.heappop(heap)
            enough = below
            if len(lowest) == most:
                enough, last_number = lowest[-1]
                if number < last_number:  # of equal bounds the first cell counts
                    enough = math.nextafter(enough, math.inf)
            if value >= enough:
                break
            if level < last:
                value = self._towards(cells[number], level + 1, enough)
            if level + 1 < last:
                heapq.heappush(heap, (value, number, level + 1))
            elif value < enough:
                bisect.insort(lowest, (value, number))
                del lowest[most:]
        return [cells[number] for _, number in lowest]

    def _towards(self, cell: Cell, level: int, enough: float) -> float:
        """The bound of a cell at a level, or as much of it as is enough."""
        value, known = self._known.get(cell, (0.0, -1))
        if known < level:
            value = max(value, self.bounds.bound(cell, level, enough))
            self._known[cell] = value, level if value < enough else max(known, level - 1)
        return value

    def settle(self, cell: Cell, value: float) -> None:
        """The best of a cell is known."""
        self._known[cell] = value, self.bounds.num_levels

    def least(self, best: float, late: Callable[[], bool], most_levels: int | None = None) -> float:
        """No plan of the space, and not the best known, is below; valid whenever time runs out.

        Without time for all cells there is no such bound: 0.
        """
        last = self.bounds.num_levels - 1
        if most_levels is not None:
            last = min(last, most_levels - 1)
        heap = []
        for number, cell in enumerate(self.cells):
            if cell not in self._known and late():
                return 0.0
            heap.append((self.at(cell, 0, best), number))
        heapq.heapify(heap)
        while heap:
            value, number = heap[0]
            cell = self.cells[number]
            level = self._known[cell][1]
            if value >= best:
                return best
            if level >= last or late():
                return value
            next_value = min((other for other, _ in heap[1:3]), default=best)
            heapq.heapreplace(heap, (self._raised(cell, best, next_value), number))
        return best

    def _raised(self, cell: Cell, best: float, next_value: float) -> float:
        """The bound of a cell at its next level.

        The dear levels need not prove much more than the bound of the next cell, which would be the
        least then. If it comes to be the least again, it goes on from there.
        """
        value, level = self._known[cell]
        if level + 1 < self.bounds.num_levels - self.dear_levels:
            return self.at(cell, level + 1, best)
        enough = min(best, max(value, next_value) * self.far_enough)
        value = max(value, self.bounds.bound(cell, level + 1, enough))
        self._known[cell] = value, level if enough <= value < best else level + 1
        return value
