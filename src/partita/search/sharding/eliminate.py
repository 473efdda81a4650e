"""Exact variable elimination: minimise over one op after another.

    T(choices of its neighbours) = min over x of  the sum of all tables that the op is in

The tables of an op are added up into two, A and B, and contracted like a matrix product with min
for sum and + for product, so that their joint table is never in memory:

    T[b, i, j] = min over x of A[b, i, x] + B[b, x, j]        b: dims of both, i of A, j of B

Where the same tables were contracted in the same way before, the result is taken from there:
repeated blocks of a model are eliminated once. There are no back-pointers; on the way back each op
looks up the tables it was in. O(cells joined) time at 1 to 4 cells per nanosecond; memory as the
order says.

The order is greedy, by what each elimination costs. Eliminating an op joins the costs of all its
neighbours into one table and makes them neighbours of each other. The order decides how large the
tables get; the best order is NP-hard to find, so two rules are tried, each taking next the op for
which it is least:

    weight   the cells to compute, i.e. the choices of the op times those of its neighbours
    fill     the cells of new edges between its neighbours

O(ops x width^2) for the first, a factor width more for the second. Ops whose tables would be too
large are put off; those left over at the end are the core.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from partita.compiled import compiled
from partita.problems.sharding import Floats, Ints
from partita.search.sharding.network import SMALL, Ask, Pairwise, SearchStopped, ShardingNetwork

Scope = tuple[int, ...]
Step = tuple[int, Scope]  # an op, and the ops that depend on its choice in the order of their turn
Graph = dict[int, set[int]]

MOST_DIMS = 62  # of a table, besides the op itself; numpy's limit is 64
Rule = Callable[[int, Graph, list[int]], float]
SUMMED_CELLS = 10_000_000  # of A and of B in memory at a time: 80 MB each
BLOCK_CELLS = 20_000_000  # contracted between two looks at the clock, about 10 ms
TILE = 1024  # columns of B worked on at a time, so that they stay in the cache


@dataclass(frozen=True, slots=True)
class Order:
    """Ops in the order of elimination; `core` are those left over when tables get too large."""

    steps: tuple[Step, ...]
    core: tuple[int, ...]
    joined_cells: int  # to compute, all tables together
    largest_cells: int  # to compute for one table

    @property
    def width(self) -> int:
        """The most ops a table spans, the eliminated one included."""
        return max((len(scope) + 1 for _, scope in self.steps), default=0)


def best_order(network: ShardingNetwork, max_joined: int, max_stored: int, stopped: Ask) -> Order:
    """The cheaper of the two rules' orders, or the one with the smaller core."""
    by_weight = _greedy(network, _weight, max_joined, max_stored, stopped)
    by_fill = _greedy(network, _fill, max_joined, max_stored, stopped)
    return min(by_weight, by_fill, key=lambda order: (len(order.core), order.joined_cells))


def quick_order(network: ShardingNetwork, max_joined: int, max_stored: int, stopped: Ask) -> Order:
    """The order by weight."""
    return _greedy(network, _weight, max_joined, max_stored, stopped)


def narrow_order(network: ShardingNetwork, max_joined: int, max_stored: int, stopped: Ask) -> Order:
    """Only ops with at most two neighbours, so that what is left has edges, not larger tables."""
    return _greedy(network, _weight, max_joined, max_stored, stopped, most_neighbours=2)


def _weight(op: int, near: Graph, counts: list[int]) -> float:
    if len(near[op]) > MOST_DIMS:
        return math.inf
    return math.prod((counts[other] for other in near[op]), start=counts[op])


def _fill(op: int, near: Graph, counts: list[int]) -> float:
    if len(near[op]) > MOST_DIMS:
        return math.inf
    pairs = itertools.combinations(near[op], 2)
    return sum(counts[one] * counts[two] for one, two in pairs if two not in near[one])


def _greedy(
    network: ShardingNetwork,
    rule: Rule,
    max_joined: int,
    max_stored: int,
    stopped: Ask,
    most_neighbours: int = MOST_DIMS,
) -> Order:
    """Take the op for which the rule is least while tables are small enough.

    Of equals the one with the least joined into it, so that equal parts of a model are treated
    alike. Raises `SearchStopped` when asked to.
    """
    counts = network.num_choices.tolist()
    near = _neighbours(network, counts)
    far = rule is _fill  # whose figures change with edges two steps away
    depth = dict.fromkeys(near, 0)  # how many eliminations in a row led to the tables of an op
    rank = {op: (rule(op, near, counts), 0) for op in near}
    queue = [(*key, op) for op, key in rank.items()]
    heapq.heapify(queue)
    steps: list[tuple[int, set[int]]] = []
    joined, stored, largest = 0, network.written_cells(), 0
    while queue:
        if stopped():
            raise SearchStopped
        *key, op = heapq.heappop(queue)
        if op not in near or tuple(key) != rank[op] or key[0] == math.inf:
            continue  # gone, from before its neighbourhood changed, or hopeless
        scope = near[op]
        kept = math.prod(counts[other] for other in scope)
        fits = joined + kept * counts[op] <= max_joined and stored + kept <= max_stored
        if not fits or len(scope) > most_neighbours:
            rank[op] = (math.inf, 0)  # put off until its neighbourhood changes
            continue
        joined += kept * counts[op]
        stored += kept
        largest = max(largest, kept * counts[op])
        steps.append((op, scope))
        for other in scope:
            depth[other] = max(depth[other], depth[op] + 1)
        for other in _eliminate(op, near, far):
            new = rule(other, near, counts), depth[other]
            if new != rank[other]:
                rank[other] = new
                heapq.heappush(queue, (*new, other))
    return Order(_in_turn(steps), tuple(sorted(near)), joined, largest)


def _neighbours(network: ShardingNetwork, counts: list[int]) -> Graph:
    """Who shares an edge with whom; ops with one choice are left out."""
    near: Graph = {op: set() for op, count in enumerate(counts) if count > 1}
    for src, dst in network.op_at.reshape(-1, 2).tolist():
        near[src].add(dst)
        near[dst].add(src)
    return near


def _eliminate(op: int, near: Graph, far: bool) -> list[int]:
    """Join the neighbours of an op and drop it; the ops whose figures may have changed."""
    scope = near.pop(op)
    for other in scope:
        near[other] |= scope
        near[other] -= {op, other}
    if not far:
        return sorted(scope)
    return sorted(scope.union(*(near[other] for other in scope)))


def _in_turn(steps: list[tuple[int, set[int]]]) -> tuple[Step, ...]:
    """Scopes in the order in which their ops are eliminated, so that equal parts look equal."""
    turn = {op: index for index, (op, _) in enumerate(steps)}
    last = len(steps)
    return tuple(
        (op, tuple(sorted(scope, key=lambda other: (turn.get(other, last), other))))
        for op, scope in steps
    )


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
