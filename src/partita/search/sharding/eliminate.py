"""Exact variable elimination: minimise over one op after another.

    T(choices of its neighbours) = min over x of  the sum of all tables that the op is in

The tables of an op are added up into two, A and B, and contracted like a matrix product with min
for sum and + for product, so that their joint table is never in memory:

    T[b, i, j] = min over x of A[b, i, x] + B[b, x, j]        b: dims of both, i of A, j of B

Where the same tables were contracted in the same way before, the result is taken from there:
repeated blocks of a model are eliminated once. There are no back-pointers; on the way back each op
looks up the tables it was in. O(cells joined) time at 1 to 4 cells per nanosecond; memory as the
order says.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from partita.compiled import compiled
from partita.problems.sharding import Floats, Ints
from partita.search.sharding.network import SMALL, Ask, Pairwise, SearchStopped, ShardingNetwork
from partita.search.sharding.order import Scope, Step

SUMMED_CELLS = 10_000_000  # of A and of B in memory at a time: 80 MB each
BLOCK_CELLS = 20_000_000  # contracted between two looks at the clock, about 10 ms
TILE = 1024  # columns of B worked on at a time, so that they stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class CostTable:
    """Costs over the choices of some ops; equal names mean equal cells."""

    scope: Scope
    cells: Floats
    name: int


@dataclass(slots=True, eq=False)
class Elimination:
    """The tables of a network while ops are eliminated from it."""

    network: ShardingNetwork
    stopped: Ask
    waiting: dict[int, list[CostTable]] = field(default_factory=dict)  # by op: the tables it is in
    trail: list[tuple[Step, tuple[CostTable, ...]]] = field(default_factory=list)
    known: dict[object, tuple[Floats, int]] = field(default_factory=dict)
    constant: float = 0.0
    num_contracted: int = 0

    def __post_init__(self) -> None:
        network = self.network
        for op, count in enumerate(network.num_choices.tolist()):
            cells = network.costs[network.first[op] :][:count]
            if count == 1:
                self.constant += float(cells[0])
            else:
                self.waiting[op] = [CostTable((op,), cells, self._name(("op", cells.tobytes())))]
        written: dict[object, Floats] = {}
        for edge, key in enumerate(network.table_keys()):
            if key not in written:
                written[key] = network.table(edge)
            scope = int(network.op_at[2 * edge]), int(network.op_at[2 * edge + 1])
            self._add(CostTable(scope, written[key], self._name(("edge", key))))

    def run(self, steps: Sequence[Step]) -> None:
        """Eliminate these ops. Raises `SearchStopped` when asked to."""
        for op, scope in steps:
            tables = tuple(self.waiting.pop(op))
            for table in tables:
                for other in table.scope:
                    if other != op:
                        self.waiting[other].remove(table)
            self.trail.append(((op, scope), tables))
            axes = (*scope, op)
            parts = sorted(
                (table.name, tuple(axes.index(other) for other in table.scope)) for table in tables
            )
            key = tuple(parts)
            if key not in self.known:
                self.num_contracted += 1
                self.known[key] = self._contracted(tables, axes), len(self.known)
            cells, name = self.known[key]
            if scope:
                self._add(CostTable(scope, cells, name))
            else:
                self.constant += float(cells.item())

    def labels(self, core: dict[int, int] | None = None) -> Ints:
        """The best choice of every eliminated op, given those of the ops that are left."""
        chosen = np.zeros(self.network.num_ops, np.int64)
        for op, choice in (core or {}).items():
            chosen[op] = choice
        for (op, _), tables in reversed(self.trail):
            total = np.zeros(self.network.num_choices[op])
            for table in tables:
                at = tuple(slice(None) if other == op else chosen[other] for other in table.scope)
                total += table.cells[at]
            chosen[op] = int(np.argmin(total))
        return chosen

    def rest(self) -> tuple[Pairwise, tuple[int, ...]]:
        """The costs that are left, and which ops they are about; the tables must be edges."""
        ops = tuple(sorted(self.waiting))
        place = {op: index for index, op in enumerate(ops)}
        costs = [np.zeros(self.network.num_choices[op]) for op in ops]
        edges: list[tuple[int, int]] = []
        names: dict[int, int] = {}
        matrix_of: list[int] = []
        matrices: list[Floats] = []
        for op in ops:
            for table in self.waiting[op]:
                if len(table.scope) == 1:
                    costs[place[op]] += table.cells
                elif table.scope[0] == op:
                    src, dst = table.scope
                    edges.append((place[src], place[dst]))
                    matrix_of.append(names.setdefault(table.name, len(names)))
                    if len(names) > len(matrices):
                        matrices.append(table.cells)
        return Pairwise(costs, edges, matrix_of, matrices), ops

    def _name(self, key: object) -> int:
        """The number of a table that did not come from an elimination."""
        return self.known.setdefault(key, (np.empty(0), len(self.known)))[1]

    def _add(self, table: CostTable) -> None:
        for op in table.scope:
            self.waiting[op].append(table)

    def _contracted(self, tables: Sequence[CostTable], axes: Scope) -> Floats:
        """The sum of the tables, minimised over the last axis; some of its choices at a time."""
        scope, op = axes[:-1], axes[-1]
        lengths = {axis: int(self.network.num_choices[axis]) for axis in axes}
        one, two = _two_groups(tables, lengths)
        in_one, in_two = ({axis for table in group for axis in table.scope} for group in (one, two))
        both = tuple(axis for axis in scope if axis in in_one and axis in in_two)
        only_one = tuple(axis for axis in scope if axis not in in_two)
        only_two = tuple(axis for axis in scope if axis not in in_one)
        sizes = [math.prod(lengths[axis] for axis in group) for group in (both, only_one, only_two)]
        out = np.full(sizes, math.inf)
        width = max(1, SUMMED_CELLS // (sizes[0] * max(sizes[1], sizes[2])))
        for begin in range(0, lengths[op], width):
            part = slice(begin, min(begin + width, lengths[op]))
            count = part.stop - part.start
            a = _sum(one, (*both, *only_one, op), lengths, op, part)
            if two:
                b = _sum(two, (*both, op, *only_two), lengths, op, part)
                a, b = a.reshape(*sizes[:2], count), b.reshape(sizes[0], count, sizes[2])
                self._min_plus(a, b, out)
            else:
                np.minimum(out, a.reshape(*sizes, count).min(axis=-1), out=out)
        order = (*both, *only_one, *only_two)
        whole = out.reshape([lengths[axis] for axis in order])
        return np.ascontiguousarray(whole.transpose([order.index(axis) for axis in scope]))

    def _min_plus(self, a: Floats, b: Floats, out: Floats) -> None:
        """Lower `out` to the contraction of a and b, with a look at the clock now and then."""
        rows = out.shape[0] * out.shape[1]
        at_once = max(1, BLOCK_CELLS // (a.shape[2] * out.shape[2]))
        for begin in range(0, rows, at_once):
            if self.stopped():
                raise SearchStopped
            _min_plus(a, b, out, begin, min(begin + at_once, rows), TILE)


def _two_groups(
    tables: Sequence[CostTable], lengths: dict[int, int]
) -> tuple[list[CostTable], list[CostTable]]:
    """Which tables make A and which B: each, largest first, goes where it adds fewer cells.

    B is empty where it would add no axis to A.
    """
    groups: tuple[list[CostTable], list[CostTable]] = ([], [])
    axes: tuple[set[int], set[int]] = (set(), set())
    for table in sorted(tables, key=lambda table: (-table.cells.size, table.scope)):
        added = [_size(have.union(table.scope), lengths) - _size(have, lengths) for have in axes]
        side = 0 if not groups[0] or added[0] <= added[1] else 1
        groups[side].append(table)
        axes[side].update(table.scope)
    if axes[1] <= axes[0]:
        return [*groups[0], *groups[1]], []
    return groups


def _size(axes: set[int], lengths: dict[int, int]) -> int:
    return math.prod(lengths[axis] for axis in axes) if axes else 0


def _sum(
    tables: Sequence[CostTable], axes: Scope, lengths: dict[int, int], op: int, part: slice
) -> Floats:
    """The sum of the tables over these axes, in their order, for some of the choices of an op."""
    lengths = lengths | {op: part.stop - part.start}
    total = np.zeros([lengths[axis] for axis in axes])
    for table in tables:
        cells = table.cells[tuple(part if axis == op else slice(None) for axis in table.scope)]
        dims = sorted(range(len(table.scope)), key=lambda dim: axes.index(table.scope[dim]))
        shape = [lengths[axis] if axis in table.scope else 1 for axis in axes]
        total += cells.transpose(dims).reshape(shape)
    return total


def _min_plus_in_numpy(a: Floats, b: Floats, out: Floats, begin: int, end: int, _: int) -> None:
    rows = a.shape[1]
    for row in range(begin, end):
        least = out[row // rows, row % rows]
        sums = a[row // rows, row % rows][:, None] + b[row // rows]
        np.minimum(least, sums.min(axis=0, initial=np.inf), out=least)


@compiled(small=SMALL, plain=_min_plus_in_numpy, fastmath={"nnan", "nsz"})
def _min_plus(a: Floats, b: Floats, out: Floats, begin: int, end: int, tile: int) -> None:
    """out[i, r, c] = min(that, a[i, r, x] + b[i, x, c]) for all x; rows `begin` to `end` of all."""
    rows = a.shape[1]
    while begin < end:
        batch = begin // rows
        until = min(end, (batch + 1) * rows)
        for left in range(0, b.shape[2], tile):
            right = min(left + tile, b.shape[2])
            for row in range(begin - batch * rows, until - batch * rows):
                least = out[batch, row, left:right]
                for x in range(a.shape[2]):
                    given = a[batch, row, x]
                    if given < np.inf:
                        costs = b[batch, x, left:right]
                        for column in range(right - left):
                            least[column] = min(least[column], given + costs[column])
        begin = until
