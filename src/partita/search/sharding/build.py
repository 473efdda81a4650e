"""From a problem to a network. The optimum stays what it is:

    edges     those between the same two ops are one, with their matrices added
    tables    are without repeated rows and columns
    choices   are without forbidden ones, and without those that are of the same class at all their
              edges as another of their op that costs no more
    ops       with one choice have no edges: the row joins the costs of the other end

O(cells of the different matrices).
"""

import math
from collections.abc import Sequence

import numpy as np

from partita.problems.sharding import Floats
from partita.search.sharding.network import (
    Ask,
    EdgeTables,
    Pairwise,
    SearchStopped,
    ShardingNetwork,
    both_ends,
    network,
    offsets,
)
from partita.search.sharding.repeats import compact, rule_out_equal_choices
from partita.search.sharding.restrict import alive_choices, restricted

GROUP_CELLS, GROUP_TABLES = 20_000_000, 2000  # worked on between two looks at the clock

Key = tuple[tuple[int, bool], ...]  # matrices of a problem that are added, each turned over or not


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
