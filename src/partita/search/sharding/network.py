"""A sharding problem as flat arrays, for compiled loops.

    cost of x = sum over ops of costs[x_v] + sum over edges of table[class of x_src, class of x_dst]

Choices that cost the same along an edge, whatever the other end chooses, are one class, with one
row (or column) in its table: what it costs to move a tensor depends on its layouts only, and many
splits of an op give the same layout. Between two ops there is one edge at most, its source is the
op with the lower number, and ops with a single choice have none. Equal edges share a table.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled
from partita.problems.sharding import Floats, Ints

Flags = npt.NDArray[np.bool_]
Ask = Callable[[], bool]  # should we stop?

SMALL = 100_000  # numbers in a problem that is soon solved without compiling


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
