"""PaSE's dynamic programming: eliminate one op after another, exactly.

V. Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021. Written anew
with numpy tables and back-pointers.

    order   GENERATESEQ: repeatedly take the op with the fewest neighbours (the first of equals) and
            make its neighbours, its dependent set D(i), neighbours of each other
    table   R(i, choices of D(i)) = min over c of  cost(v_i, c) + edges from v_i into D(i)
                                    + the tables R(j) of earlier ops whose D(j) comes to v_i first
    answer  the tables with an empty D(i); back-pointers give the choices in reverse order

Time and memory are O(|V| K^(M+1)) and O(|V| K^M) for K choices and M = max |D(i)|: quick on paths
and on ResNet-like graphs, impossible on densely connected ones. The order is found before any table
is made, and given up at the first table of more than `max_cells`.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.errors import ProblemError
from partita.problems.sharding import (
    Floats,
    ShardingProblem,
    ShardingSolution,
    check,
    evaluate,
    lower_bound,
    own_costs,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop

MOST_CELLS = 2**40  # with at least two choices each, 40 dims: what numpy can index
BLOCK_CELLS = 1 << 20  # how much of a table is in memory at a time: 8 MB, which caches like

Scope = tuple[int, ...]
Step = tuple[int, Scope]  # an op and its dependent set


@dataclass(frozen=True, slots=True)
class Pase:
    """PaSE's exact dynamic programming over a min-degree order of the ops."""

    max_cells: int = 200_000_000

    def __post_init__(self) -> None:
        if not 1 <= self.max_cells <= MOST_CELLS:
            fix = f"1 to {MOST_CELLS:,} cells are possible"
            raise ProblemError(f"is {self.max_cells}", fix=fix, field="max_cells")

    def __call__(
        self, problem: ShardingProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[ShardingSolution]:
        """Search until the optimum is proven or a table would be too large."""
        run: Run[ShardingSolution] = Run(stop, "pase", seed)
        bound = lower_bound(problem)
        if bound == math.inf:
            return run.result(Status.INFEASIBLE, "an op is left with forbidden choices only")
        run.bound(bound)
        _offer_cheapest(run, problem)
        if run.done():
            return run.result()
        order, obstacle = self._plan(run, problem)
        if obstacle:
            return run.result(Status.STOPPED, obstacle + _what_remains(run))
        try:
            assignment = _eliminate(run, problem, order)
        except MemoryError:
            why = "the tables do not fit in memory" + _what_remains(run)
            return run.result(Status.STOPPED, why)
        if assignment is None:
            return run.result()
        if not assignment:
            return run.result(Status.INFEASIBLE, "every combination is forbidden, by elimination")
        run.evaluations += 1
        solution = ShardingSolution(assignment)
        run.offer(solution, evaluate(problem, solution))
        return run.result(Status.OPTIMAL, _proof(problem, order))

    def _plan(
        self, run: Run[ShardingSolution], problem: ShardingProblem
    ) -> tuple[tuple[Step, ...], str]:
        """The order in which to eliminate, or why there is none that fits."""
        order: list[Step] = []
        kept = 0
        for op, scope in generate_sequence(problem):
            order.append((op, scope))
            cells = cells_of(problem, (*scope, op))
            kept += cells_of(problem, scope)
            if cells > self.max_cells:
                return (), (
                    f"the table of {problem.name(op)} would have {_count(cells)} cells "
                    f"({len(scope)} other ops depend on its choice), more than max_cells = "
                    f"{_count(self.max_cells)}"
                )
            if kept > self.max_cells:
                return (), (
                    f"the back-pointers up to {problem.name(op)} would have {_count(kept)} cells, "
                    f"more than max_cells = {_count(self.max_cells)}"
                )
            if run.done():
                return (), run.reason() or ""
        return tuple(order), ""


def generate_sequence(problem: ShardingProblem) -> Iterator[Step]:
    """The min-degree order, each op with its dependent set (sorted), one step at a time.

    On an op with a single choice nothing depends: its edges are left out.
    """
    neighbours: list[set[int]] = [set() for _ in problem.costs]
    for src, dst in problem.edges:
        if len(problem.costs[src]) > 1 and len(problem.costs[dst]) > 1:
            neighbours[src].add(dst)
            neighbours[dst].add(src)
    queue = [(len(near), op) for op, near in enumerate(neighbours)]
    heapq.heapify(queue)
    taken = [False] * len(neighbours)
    while queue:
        degree, op = heapq.heappop(queue)
        if taken[op] or degree != len(neighbours[op]):
            continue  # an entry from before its neighbourhood changed
        taken[op] = True
        scope = tuple(sorted(neighbours[op]))
        yield op, scope
        for near in scope:
            before = len(neighbours[near])
            neighbours[near].update(scope)
            neighbours[near] -= {near, op}
            if len(neighbours[near]) != before:
                heapq.heappush(queue, (len(neighbours[near]), near))


def _eliminate(
    run: Run[ShardingSolution], problem: ShardingProblem, order: Sequence[Step]
) -> tuple[int, ...] | None:
    """The best choice of every op; () if all are forbidden, None if stopped."""
    position = {op: index for index, (op, _) in enumerate(order)}
    waiting: list[list[tuple[Scope, Floats]]] = [
        [] for _ in order
    ]  # by op: tables that wait for it
    for op, cost in enumerate(problem.costs):
        waiting[op].append(((op,), cost))
    for edge, index in zip(problem.edges, problem.matrix_of, strict=True):
        over, table = _without_single(edge, problem.matrices[index])
        waiting[min(over or edge, key=position.__getitem__)].append((over, table))
    pointers: list[npt.NDArray[np.unsignedinteger]] = []
    for op, scope in order:
        axes = (*scope, op)
        shape = tuple(len(problem.costs[axis]) for axis in axes)
        factors = [_aligned(table, over, axes) for over, table in waiting[op]]
        waiting[op] = []  # free the tables as soon as they are used up
        reduced = _minimise(run, factors, shape)
        if reduced is None:
            return None
        table, pointer = reduced
        pointers.append(pointer)
        if scope:
            waiting[min(scope, key=position.__getitem__)].append((scope, table))
        elif table == math.inf:
            return ()
    chosen = [0] * len(order)
    for (op, scope), pointer in zip(reversed(order), reversed(pointers), strict=True):
        chosen[op] = int(pointer[tuple(chosen[other] for other in scope)])
    return tuple(chosen)


def _without_single(edge: Scope, matrix: Floats) -> tuple[Scope, Floats]:
    """The matrix without the dims of ops that have nothing to choose."""
    over = tuple(op for op, count in zip(edge, matrix.shape, strict=True) if count > 1)
    return over, matrix.reshape([count for count in matrix.shape if count > 1])


def _aligned(table: Floats, over: Scope, axes: Scope) -> Floats:
    """The table with one dim per axis: in their order, of length 1 where it has none."""
    by_axis = sorted(range(len(over)), key=lambda dim: axes.index(over[dim]))
    lengths = dict(zip(over, table.shape, strict=True))
    return table.transpose(by_axis).reshape([lengths.get(axis, 1) for axis in axes])


def _minimise(
    run: Run[ShardingSolution], factors: Sequence[Floats], shape: tuple[int, ...]
) -> tuple[Floats, npt.NDArray[np.unsignedinteger]] | None:
    """Sum of the factors, minimised over the last axis: values and first arguments.

    Works through the last axis in blocks, so that the whole sum is never in memory.
    """
    width = max(1, BLOCK_CELLS // math.prod(shape[:-1]))
    small = np.min_scalar_type(shape[-1])
    best: Floats = np.full(shape[:-1], math.inf)
    pointer = np.zeros(shape[:-1], dtype=small)
    for begin in range(0, shape[-1], width):
        if run.done():
            return None
        end = min(begin + width, shape[-1])
        total = np.zeros((*shape[:-1], end - begin))
        for factor in factors:
            total += factor[..., begin:end]
        least = total.min(axis=-1)
        where = (total.argmin(axis=-1) + begin).astype(small)
        pointer = np.where(least < best, where, pointer)
        best = np.minimum(least, best)
    return best, pointer


def _offer_cheapest(run: Run[ShardingSolution], problem: ShardingProblem) -> None:
    """A first answer, should there be no second: what each op would choose by itself."""
    if run.done():
        return
    solution = ShardingSolution(tuple(int(cost.argmin()) for cost in own_costs(problem)))
    run.evaluations += 1
    if not check(problem, solution):
        run.offer(solution, evaluate(problem, solution))


def _what_remains(run: Run[ShardingSolution]) -> str:
    if run.solution is None:
        return "; there is no answer, only a lower bound"
    return "; the answer is only what each op would choose by itself"


def _proof(problem: ShardingProblem, order: Sequence[Step]) -> str:
    largest = max(cells_of(problem, (*scope, op)) for op, scope in order)
    width = max(len(scope) + 1 for _, scope in order)
    return (
        f"all {len(order):,} ops were eliminated exactly; the largest table had "
        f"{_count(largest)} cells, and none spans more than {width} ops"
    )


def cells_of(problem: ShardingProblem, scope: Scope) -> int:
    """How many combinations of choices these ops have."""
    return math.prod(len(problem.costs[op]) for op in scope)


def _count(cells: int) -> str:
    return f"{cells:,}" if cells < 10**12 else f"{cells:.2e}"
