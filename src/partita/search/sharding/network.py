"""A sharding problem as flat arrays, for compiled loops.

    cost of x = sum over ops of costs[x_v] + sum over edges of table[class of x_src, class of x_dst]

Choices that cost the same along an edge, whatever the other end chooses, are one class, with one
row (or column) in its table: what it costs to move a tensor depends on its layouts only, and many
splits of an op give the same layout. Between two ops there is one edge at most, its source is the
op with the lower number, and ops with a single choice have none. Equal edges share a table.

What is said twice in a problem is found (`compact`): equal rows and columns of matrices, equal
choices of an op. Rows are hashed and compared with the first row of the same hash, so that equal
ones are found in one reading and unequal ones never taken for equal. O(cells).

A network is made smaller once choices were ruled out (`restricted`). Edges whose ends both keep
several choices get the rows and columns of those; equal tables stay one table. An op with one
choice left loses its edges: the row of its choice joins the costs of the other end. What was lent
along the edges that remain stays as it is. O(edges + cells that remain).

From a problem to a network (`network_of`) the optimum stays what it is:

    edges     those between the same two ops are one, with their matrices added
    tables    are without repeated rows and columns
    choices   are without forbidden ones, and without those that are of the same class at all their
              edges as another of their op that costs no more
    ops       with one choice have no edges: the row joins the costs of the other end

O(cells of the different matrices).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled
from partita.problems.sharding import Floats, Ints

Flags = npt.NDArray[np.bool_]
Ask = Callable[[], bool]  # should we stop?

SMALL = 200_000  # numbers in a problem that is soon solved without compiling
Hashes = npt.NDArray[np.uint64]
SPREAD = 0x9E3779B97F4A7C15  # an odd number of 64 bits, half of them ones
COPIED_CELLS = 20_000_000  # of new tables; rather than more, old ones are kept with unused rows
GROUP_CELLS, GROUP_TABLES = 20_000_000, 2000  # worked on between two looks at the clock
Key = tuple[tuple[int, bool], ...]  # matrices of a problem that are added, each turned over or not


class SearchStopped(Exception):  # noqa: N818  nothing is wrong: the caller asked for it
    """The caller asked to stop in the middle of a step that has no half result."""


class Pairwise(NamedTuple):
    """Costs as a `ShardingProblem` has them, which may also be what is left of one."""

    costs: Sequence[Floats]
    edges: Sequence[tuple[int, int]]
    matrix_of: Sequence[int]
    matrices: Sequence[Floats]


class EdgeTables(NamedTuple):
    """What the edges cost. End 2e of edge e is at its source, end 2e + 1 at its target."""

    cells: Floats  # row after row, table after table
    cells_at: Ints  # per edge: where its table begins
    num_classes: Ints  # per end: the rows, or the columns, of its table
    class_of: Ints  # per choice; for each end a list
    class_at: Ints  # per end: where its list begins


class ShardingNetwork(NamedTuple):
    """Ops with choices and edges; a NamedTuple, because compiled code can take it apart.

    The choices of op v are those from `first[v]` to `first[v + 1]`.
    """

    first: Ints
    costs: Floats
    choices: Ints  # which choice of the problem each one is
    op_at: Ints  # per end of an edge
    tables: EdgeTables
    near: Ints  # per op the ends of its edges
    near_at: Ints
    sent_at: Ints  # per end of an edge: where its messages begin, one per choice

    @property
    def num_ops(self) -> int:
        """How many ops there are, those with one choice included."""
        return len(self.first) - 1

    @property
    def num_choices(self) -> Ints:
        """How many choices each op has."""
        return np.diff(self.first)

    def table_keys(self) -> list[tuple[int, int, int]]:
        """Per edge what names its table: edges with equal keys have equal costs."""
        at = self.tables.class_at
        columns = self.tables.cells_at, at[::2], at[1::2]
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def written_cells(self) -> int:
        """Cells of all different tables with a row and a column for every choice."""
        num_choices = self.num_choices
        rows, columns = num_choices[self.op_at[::2]], num_choices[self.op_at[1::2]]
        cells = (rows * columns).tolist()
        return sum(dict(zip(self.table_keys(), cells, strict=True)).values())

    def table(self, edge: int) -> Floats:
        """The costs of an edge: a row per choice of its source, a column per one of its target."""
        tables = self.tables
        rows, columns = tables.num_classes[2 * edge : 2 * edge + 2].tolist()
        cells = tables.cells[tables.cells_at[edge] :][: rows * columns].reshape(rows, columns)
        written: Floats = cells[np.ix_(self._classes(2 * edge), self._classes(2 * edge + 1))]
        return written

    def _classes(self, end: int) -> Ints:
        op, begin = self.op_at[end], self.tables.class_at[end]
        return self.tables.class_of[begin : begin + self.first[op + 1] - self.first[op]]

    def assignment(self, labels: Ints) -> tuple[int, ...]:
        """The problem's choice of every op, from one of the network's."""
        return tuple(self.choices[self.first[:-1] + labels].tolist())


def network(
    first: Ints, costs: Floats, choices: Ints, op_at: Ints, tables: EdgeTables
) -> ShardingNetwork:
    """A network with the lists that follow from the rest."""
    num_choices = np.diff(first)
    return ShardingNetwork(
        first, costs, choices, op_at, tables,
        near=np.argsort(op_at, kind="stable"),
        near_at=offsets(np.bincount(op_at, minlength=len(num_choices))),
        sent_at=offsets(num_choices[op_at]),
    )  # fmt: skip


def offsets(lengths: Ints) -> Ints:
    """Where each of some lists begins when they follow each other, and the end of the last."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def lists(begins: Ints, lengths: Ints) -> Ints:
    """begin, begin + 1, ... for each of some lists, one list after the other."""
    at = offsets(lengths)
    return np.repeat(begins - at[:-1], lengths) + np.arange(at[-1])


def both_ends(edges: Ints) -> Ints:
    """The ends of some edges: 2e, 2e + 1, for each."""
    return np.stack((2 * edges, 2 * edges + 1), axis=1).ravel()


def _add_costs_in_numpy(network: ShardingNetwork, end: int, label: int, costs: Floats) -> None:
    tables, edge, other = network.tables, end >> 1, end ^ 1
    columns = tables.num_classes[2 * edge + 1]
    step, other_step = (1, columns) if end & 1 else (columns, 1)
    begin = tables.cells_at[edge] + tables.class_of[tables.class_at[other] + label] * other_step
    places = tables.class_of[tables.class_at[end] :][: len(costs)]
    costs += tables.cells[begin + places * step]


# Loops where numpy has one expression: numba takes seconds to compile `a[:] = b` and `a += b`, most
# of them for the message about shapes that do not fit.
def _copy_costs_in_numpy(network: ShardingNetwork, op: int, costs: Floats) -> None:
    costs[:] = network.costs[network.first[op] :][: len(costs)]


@compiled(plain=_copy_costs_in_numpy)
def copy_costs(network: ShardingNetwork, op: int, costs: Floats) -> None:
    """What each choice of an op costs by itself."""
    for x in range(len(costs)):
        costs[x] = network.costs[network.first[op] + x]


@compiled(plain=_add_costs_in_numpy)
def add_costs(network: ShardingNetwork, end: int, label: int, costs: Floats) -> None:
    """Add what each choice at this end of an edge costs with one choice at the other end."""
    tables, edge, other = network.tables, end >> 1, end ^ 1
    columns = tables.num_classes[2 * edge + 1]
    step, other_step = (1, columns) if end & 1 else (columns, 1)
    begin = tables.cells_at[edge] + tables.class_of[tables.class_at[other] + label] * other_step
    for x in range(len(costs)):
        costs[x] += tables.cells[begin + tables.class_of[tables.class_at[end] + x] * step]


def compact(cells: Floats, sides: Ints, class_of: Ints, num_classes: Ints) -> int:
    """Take repeated rows and columns out of tables that follow each other, in place.

    `sides` are the rows and columns of each table; those that are left go to `num_classes`, and
    `class_of` says which one each row and column became. Returns how many cells are left.
    """
    weights = np.arange(1, 2 * sides.max(), 2, dtype=np.uint64) * np.uint64(SPREAD)
    count: int = _compact(cells.view(np.uint64), sides, weights, class_of, num_classes)
    return count


@compiled(small=20 * SMALL)
def _compact(bits: Hashes, sides: Ints, weights: Hashes, class_of: Ints, num_classes: Ints) -> int:
    read = end = place = 0
    for table in range(len(sides) // 2):
        rows, columns = sides[2 * table], sides[2 * table + 1]
        before = bits[read : read + rows * columns].reshape(rows, columns)
        row_class, column_class = class_of[place : place + rows], class_of[place + rows :]
        rows_kept = _different_rows(before, weights, row_class)
        columns_kept = _different_columns(before, rows_kept, weights, column_class)
        read += rows * columns
        place += rows + columns
        num_classes[2 * table], num_classes[2 * table + 1] = len(rows_kept), len(columns_kept)
        for row in rows_kept:  # never writes ahead of where it reads
            for column in columns_kept:
                bits[end] = before[row, column]
                end += 1
    return end


def _different_rows_in_numpy(bits: Hashes, weights: Hashes, number: Ints) -> Ints:
    hashes = (_mixed(bits) * weights[: bits.shape[1]]).sum(axis=1, dtype=np.uint64)  # type: ignore[arg-type]
    first = _first_with_hash(hashes)
    differs = (bits != bits[first]).any(axis=1)
    first[differs] = np.flatnonzero(differs)
    return _numbered(first, number)


@compiled(plain=_different_rows_in_numpy)
def _different_rows(bits: Hashes, weights: Hashes, number: Ints) -> Ints:
    """Number the different rows; where each is first."""
    hashes = np.zeros(bits.shape[0], np.uint64)
    for row in range(bits.shape[0]):
        total = np.uint64(0)
        for column in range(bits.shape[1]):
            total += _mixed(bits[row, column]) * weights[column]
        hashes[row] = total
    first = _first_with_hash(hashes)
    for row in range(len(first)):
        for column in range(bits.shape[1]):
            if bits[row, column] != bits[first[row], column]:
                first[row] = row  # two rows of one hash: both are kept
                break
    return _numbered(first, number)


def _different_columns_in_numpy(bits: Hashes, rows: Ints, weights: Hashes, number: Ints) -> Ints:
    some = bits[rows]
    hashes = (_mixed(some) * weights[rows][:, None]).sum(axis=0, dtype=np.uint64)  # type: ignore[arg-type]
    first = _first_with_hash(hashes)
    differs = (some != some[:, first]).any(axis=0)
    first[differs] = np.flatnonzero(differs)
    return _numbered(first, number)


@compiled(plain=_different_columns_in_numpy)
def _different_columns(bits: Hashes, rows: Ints, weights: Hashes, number: Ints) -> Ints:
    """Number the columns that differ in these rows; where each is first."""
    hashes = np.zeros(bits.shape[1], np.uint64)
    for row in rows:
        for column in range(bits.shape[1]):
            hashes[column] += _mixed(bits[row, column]) * weights[row]
    first = _first_with_hash(hashes)
    for row in rows:
        for column in range(bits.shape[1]):
            if bits[row, column] != bits[row, first[column]]:
                first[column] = column
    return _numbered(first, number)


@compiled()
def _mixed(bits: np.uint64) -> np.uint64:
    """Round numbers have zeros in their lower bits; bring the upper ones down."""
    return bits ^ (bits >> np.uint64(32))


def _first_with_hash_in_python(hashes: Hashes) -> Ints:
    seen: dict[int, int] = {}
    return np.array(
        [seen.setdefault(each, at) for at, each in enumerate(hashes.tolist())], np.int64
    )


@compiled(plain=_first_with_hash_in_python)
def _first_with_hash(hashes: Hashes) -> Ints:
    """For each entry the first one with the same hash, by open addressing."""
    size = 2
    while size < 2 * len(hashes):
        size *= 2
    slots = np.full(size, -1, np.int64)
    first = np.empty(len(hashes), np.int64)
    for index in range(len(hashes)):
        slot = np.int64((_mixed(hashes[index]) * np.uint64(SPREAD)) >> np.uint64(32)) % size
        while slots[slot] >= 0 and hashes[slots[slot]] != hashes[index]:
            slot = (slot + 1) % size
        if slots[slot] < 0:
            slots[slot] = index
        first[index] = slots[slot]
    return first


@compiled()
def _numbered(first: Ints, number: Ints) -> Ints:
    """Number the entries that are first themselves, and give the others their first one's."""
    kept = np.empty(len(first), np.int64)
    count = 0
    for index in range(len(first)):
        if first[index] == index:
            kept[count] = index
            number[index] = count
            count += 1
        else:
            number[index] = number[first[index]]
    return kept[:count].copy()


def _hashes_of_choices_in_numpy(class_of: Ints, class_at: Ints, count: int) -> Hashes:
    hashes = np.zeros(count, np.uint64)
    for at in class_at:
        hashes = (_mixed(hashes) + class_of[at : at + count].astype(np.uint64)) * np.uint64(SPREAD)  # type: ignore[arg-type]
    return hashes


@compiled(plain=_hashes_of_choices_in_numpy)
def _hashes_of_choices(class_of: Ints, class_at: Ints, count: int) -> Hashes:
    """Of the classes that each choice of an op belongs to, edge by edge."""
    hashes = np.zeros(count, np.uint64)
    for at in class_at:
        for x in range(count):
            hashes[x] = (_mixed(hashes[x]) + np.uint64(class_of[at + x])) * np.uint64(SPREAD)
    return hashes


@compiled(small=SMALL)
def rule_out_equal_choices(network: ShardingNetwork, alive: Flags) -> None:
    """Of choices that are of the same classes, only the first of the cheapest lives on."""
    class_of = network.tables.class_of
    for op in range(len(network.first) - 1):
        costs = network.costs[network.first[op] : network.first[op + 1]]
        lives = alive[network.first[op] : network.first[op + 1]]
        near = network.near[network.near_at[op] : network.near_at[op + 1]]
        class_at = network.tables.class_at[near]
        first = _first_with_hash(_hashes_of_choices(class_of, class_at, len(costs)))
        cheapest = np.arange(len(costs))  # of the choices so far, per first one
        for x in range(len(costs)):
            other = cheapest[first[x]]
            same = other != x
            for at in class_at:
                same = same and class_of[at + x] == class_of[at + other]
            if same and costs[x] < costs[other]:
                cheapest[first[x]] = x
                lives[other] = False
            elif same:
                lives[x] = False


def alive_choices(network: ShardingNetwork, alive: Flags) -> Ints:
    """How many choices of each op live."""
    counts: Ints = np.add.reduceat(alive, network.first[:-1], dtype=np.int64)
    return counts


def restricted(
    whole: ShardingNetwork, alive: Flags, sent: Floats
) -> tuple[ShardingNetwork, Floats]:
    """The network with the living choices only, and the messages among them.

    Every op must have a living choice.
    """
    counts = alive_choices(whole, alive)
    first = offsets(counts)
    single = counts[whole.op_at].reshape(-1, 2) == 1
    loose = single.any(axis=1)
    if alive.all() and not loose.any():
        return whole, sent
    costs = whole.costs.copy()
    only = np.flatnonzero(alive)[first[:-1]] - whole.first[:-1]  # or the first of several
    _absorb(whole, np.flatnonzero(loose) * 2 + single[loose, 0], only, costs)
    kept = ~np.repeat(loose, 2)  # per end
    carried = alive[lists(whole.first[whole.op_at], np.diff(whole.sent_at))]
    carried &= np.repeat(kept, np.diff(whole.sent_at))
    smaller = network(
        first, costs[alive], whole.choices[alive], whole.op_at[kept],
        _subtables(whole, alive, counts, np.flatnonzero(~loose)),
    )  # fmt: skip
    return smaller, sent[carried]


def _subtables(whole: ShardingNetwork, alive: Flags, counts: Ints, edges: Ints) -> EdgeTables:
    """The tables of some edges for living choices only, equal ones once."""
    old = whole.tables
    table_of, like = _shared(whole, alive, edges)
    ends = both_ends(like)
    ops = whole.op_at[ends]
    lives = alive[lists(whole.first[ops], whole.num_choices[ops])]
    class_of = old.class_of[lists(old.class_at[ends], whole.num_choices[ops])][lives]
    class_at = offsets(counts[ops])
    num_classes, cells, cells_at = old.num_classes[ends], old.cells, old.cells_at[like]
    most = np.minimum(num_classes, counts[ops])
    if (most[::2] * most[1::2]).sum() <= max(COPIED_CELLS, len(cells)):
        columns = num_classes[1::2]
        num_classes, used = _renumber(class_of, class_at, num_classes.max(initial=0))
        copied_at = offsets(num_classes[::2] * num_classes[1::2])
        cells = _copied(cells, cells_at, columns, used, class_at, num_classes, copied_at[-1])
        cells_at = copied_at[:-1]
    both = both_ends(table_of)
    return EdgeTables(cells, cells_at[table_of], num_classes[both], class_of, class_at[both])


def _shared(whole: ShardingNetwork, alive: Flags, edges: Ints) -> tuple[Ints, Ints]:
    """The new table of each of these edges, and for every new table one edge that has it."""
    patterns: dict[bytes, int] = {}
    begins = whole.first.tolist()
    pattern_of = [
        patterns.setdefault(alive[begin:end].tobytes(), len(patterns))
        for begin, end in itertools.pairwise(begins)
    ]
    op_at, keys = whole.op_at.tolist(), whole.table_keys()
    known: dict[object, int] = {}
    table_of: list[int] = []
    like: list[int] = []
    for edge in edges.tolist():
        key = keys[edge], pattern_of[op_at[2 * edge]], pattern_of[op_at[2 * edge + 1]]
        table_of.append(known.setdefault(key, len(known)))
        if len(known) > len(like):
            like.append(edge)
    return np.array(table_of, np.int64), np.array(like, np.int64)


@compiled(small=SMALL)
def _absorb(whole: ShardingNetwork, ends: Ints, only: Ints, costs: Floats) -> None:
    """Add what edges cost with the only choice at the other end to the costs at these ends."""
    for end in ends:
        op = whole.op_at[end]
        label = only[whole.op_at[end ^ 1]]
        add_costs(whole, end, label, costs[whole.first[op] : whole.first[op + 1]])


@compiled(small=SMALL)
def _renumber(class_of: Ints, class_at: Ints, most: int) -> tuple[Ints, Ints]:
    """Number the classes in use in each list, in place; how many these are, and which they were."""
    count, used = np.zeros(len(class_at) - 1, np.int64), np.empty(len(class_of), np.int64)
    number = np.empty(most, np.int64)
    for end in range(len(count)):
        begin = class_at[end]
        number[:] = -1
        for place in range(begin, class_at[end + 1]):
            before = class_of[place]
            if number[before] < 0:
                number[before] = count[end]
                used[begin + count[end]] = before
                count[end] += 1
            class_of[place] = number[before]
    return count, used


def _copied_in_numpy(
    cells: Floats, cells_at: Ints, columns: Ints, used: Ints, used_at: Ints, num_used: Ints,
    size: int,
) -> Floats:  # fmt: skip
    parts = [np.empty(0)]
    for table in range(len(cells_at)):
        rows = used[used_at[2 * table] :][: num_used[2 * table]]
        chosen = used[used_at[2 * table + 1] :][: num_used[2 * table + 1]]
        at = cells_at[table] + rows[:, None] * columns[table] + chosen
        parts.append(cells[at].ravel())
    return np.concatenate(parts)


@compiled(small=SMALL, plain=_copied_in_numpy)
def _copied(
    cells: Floats, cells_at: Ints, columns: Ints, used: Ints, used_at: Ints, num_used: Ints,
    size: int,
) -> Floats:  # fmt: skip
    """The cells of the classes in use, table after table."""
    copied = np.empty(size)
    end = 0
    for table in range(len(cells_at)):
        rows_at, columns_at = used_at[2 * table], used_at[2 * table + 1]
        for row in used[rows_at : rows_at + num_used[2 * table]]:
            begin = cells_at[table] + row * columns[table]
            for column in used[columns_at : columns_at + num_used[2 * table + 1]]:
                copied[end] = cells[begin + column]
                end += 1
    return copied


def network_of(problem: Pairwise, stopped: Ask) -> ShardingNetwork | None:
    """The problem as a network; None where an op has forbidden choices only.

    Raises `SearchStopped` when asked to.
    """
    counts = np.array([len(cost) for cost in problem.costs])
    pairs, table_of, keys = _merged(problem)
    tables = _tables(problem, keys, stopped)
    index = np.array(table_of, np.int64)
    ends = both_ends(index)  # as if every table was an edge
    whole = network(
        first=offsets(counts),
        costs=np.concatenate(problem.costs),
        choices=np.concatenate([np.arange(count) for count in counts]),
        op_at=np.array(pairs, np.int64).reshape(-1),
        tables=tables._replace(
            cells_at=tables.cells_at[index],
            num_classes=tables.num_classes[ends],
            class_at=tables.class_at[ends],
        ),
    )
    alive = np.isfinite(whole.costs)
    rule_out_equal_choices(whole, alive)
    if alive_choices(whole, alive).min() == 0:
        return None
    return restricted(whole, alive, np.zeros(whole.sent_at[-1]))[0]


def _merged(problem: Pairwise) -> tuple[list[tuple[int, int]], list[int], list[Key]]:
    """Pairs of ops that share a cost, the table of each, and what every table is made of."""
    parts: dict[tuple[int, int], list[tuple[int, bool]]] = {}
    for (src, dst), index in zip(problem.edges, problem.matrix_of, strict=True):
        if src < dst:
            parts.setdefault((src, dst), []).append((index, False))
        else:
            parts.setdefault((dst, src), []).append((index, True))
    pairs = sorted(parts)
    known: dict[Key, int] = {}
    table_of = [known.setdefault(tuple(sorted(parts[pair])), len(known)) for pair in pairs]
    return pairs, table_of, list(known)


def _tables(problem: Pairwise, keys: Sequence[Key], stopped: Ask) -> EdgeTables:
    """The tables that the keys mean, as if there was one edge for each."""
    shapes = [_matrix(problem, key[0]).shape for key in keys]
    sides = np.array(shapes, np.int64).reshape(-1)
    cells = np.empty(int((sides[::2] * sides[1::2]).sum()))  # the part not written takes no memory
    class_at = offsets(sides)
    class_of = np.empty(class_at[-1], np.int64)
    num_classes = np.empty_like(sides)
    written = done = 0
    while done < len(keys):
        if stopped():
            raise SearchStopped
        begin, end = done, written
        while done < len(keys) and done - begin < GROUP_TABLES and end - written < GROUP_CELLS:
            table = cells[end : end + math.prod(shapes[done])].reshape(shapes[done])
            table[:] = sum(_matrix(problem, part) for part in keys[done])
            done, end = done + 1, end + table.size
        group = slice(2 * begin, 2 * done)
        classes = class_of[class_at[2 * begin] : class_at[2 * done]]
        written += compact(cells[written:end], sides[group], classes, num_classes[group])
    cells_at = offsets(num_classes[::2] * num_classes[1::2])[:-1]
    return EdgeTables(cells[:written], cells_at, num_classes, class_of, class_at[:-1])


def _matrix(problem: Pairwise, part: tuple[int, bool]) -> Floats:
    index, turned = part
    return problem.matrices[index].T if turned else problem.matrices[index]
