"""Make a network smaller once choices were ruled out.

Edges whose ends both keep several choices get the rows and columns of those; equal tables stay one
table. An op with one choice left loses its edges: the row of its choice joins the costs of the
other end. What was lent along the edges that remain stays as it is. O(edges + cells that remain).
"""

import itertools

import numpy as np

from partita.compiled import compiled
from partita.problems.sharding import Floats, Ints
from partita.search.sharding.network import (
    SMALL,
    EdgeTables,
    Flags,
    ShardingNetwork,
    add_costs,
    both_ends,
    lists,
    network,
    offsets,
)

COPIED_CELLS = 20_000_000  # of new tables; rather than more, old ones are kept with unused rows


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
