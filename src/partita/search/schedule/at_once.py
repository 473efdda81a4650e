"""All blocks of all micro-batches arranged at once, for the least makespan.

One `TaskSegment` (see `makespan`) with a head and a tail for every block of every micro-batch (see
`bounds`), and a schedule to begin with. What the solver finds is shifted to the left in true times
and offered; its bounds are bounds of the problem, as the grid rounds down. Good for some hundreds
of blocks in all.
"""

import math
from collections.abc import Sequence

from partita.problems.schedule import ScheduleProblem, ScheduleSolution, check, solution_of
from partita.search.base import Run
from partita.search.schedule.assemble import in_order, left_shifted
from partita.search.schedule.bounds import heads_and_tails
from partita.search.schedule.grid import Grid, GridMemory, memory_on_grid, on_grid
from partita.search.schedule.makespan import Task, TaskSegment
from partita.search.schedule.solver import LARGE, Allowance, SolverAnswer, SolverOutcome

MOST_TASKS = 3000  # more take the solver longer to read than it has to search


class AtOnce:
    """The whole problem as one question, asked with growing effort."""

    def __init__(self, problem: ScheduleProblem, run: Run[ScheduleSolution]) -> None:
        assert problem.num_microbatches is not None
        self.problem, self.run = problem, run
        self.grid: Grid = on_grid(problem)
        self.memory: list[GridMemory] = memory_on_grid(problem)
        first, after = heads_and_tails(problem, problem.num_microbatches)
        self.segment = TaskSegment(
            problem, self.grid, self.memory, self._in_steps(first), self._in_steps(after)
        )
        self.outcome = SolverOutcome.UNKNOWN  # SOLVED and INFEASIBLE are proofs
        self.turn = 0

    @property
    def proven(self) -> bool:
        """Is there nothing left to find out?"""
        return self.outcome in (SolverOutcome.SOLVED, SolverOutcome.INFEASIBLE)

    def go_on(self, effort: float, allowance: Allowance) -> None:
        """Improve on the best of the run, or prove that nothing does.

        Without an answer to begin with, the horizon is all blocks one after the other.
        """
        if self.proven or self.run.done():
            return
        self.turn += 1
        answer = self._ask(effort, allowance)
        self.outcome = answer.outcome
        if answer.outcome is SolverOutcome.SOLVED and answer.values is not None:
            ends = zip(answer.values, self.segment.tail.values(), strict=True)
            self._bound(max(start + tail for start, tail in ends))

    def _ask(self, effort: float, allowance: Allowance) -> SolverAnswer:
        known = self._known()
        return self.segment.least(
            self.run,
            known=known,
            horizon=self._longest() if known is None else None,
            effort=effort,
            allowance=allowance,
            linear=self._linear(),
            on_solution=self._offer,
            on_bound=self._bound,
        )

    def _linear(self) -> int:
        """Every other time with a linear relaxation, which is slow where numbers are large."""
        return 0 if self.turn % 2 or self._longest() > LARGE else 1

    def _known(self) -> dict[Task, int] | None:
        if self.run.solution is None:
            return None
        table: list[list[float]] = [[] for _ in range(self.problem.num_microbatches or 0)]
        for microbatch, _, start in sorted(self.run.solution.starts):
            table[microbatch].append(start)
        return self._in_steps(in_order(table))

    def _longest(self) -> int:
        """Some schedule is as short as this, if there is one at all."""
        count = self.problem.num_microbatches or 0
        alone = sum(self.grid.spans) + sum(self.grid.lags)
        return count * alone

    def _in_steps(self, table: Sequence[Sequence[float]]) -> dict[Task, int]:
        return {
            (m, block): self.grid.whole_steps(time)
            for m, row in enumerate(table)
            for block, time in enumerate(row)
        }

    def _offer(self, starts: dict[Task, int]) -> None:
        count, size = self.problem.num_microbatches or 0, len(self.problem.blocks)
        table = [[starts[m, block] for block in range(size)] for m in range(count)]
        solution = solution_of(self.problem, left_shifted(self.problem, table))
        if self.run.objective is not None and solution.makespan >= self.run.objective:
            return
        if not check(self.problem, solution):  # what the grid rounded off may be missing
            self.run.offer(solution, solution.makespan)

    def _bound(self, steps: float) -> None:
        self.run.bound(time_bound(self.grid, steps))


def time_bound(grid: Grid, steps: float) -> float:
    """A bound in steps as a time, less what sums of real numbers are rounded by."""
    time = grid.time(math.ceil(steps - 1e-6))
    return time if isinstance(time, int) else time * (1 - 1e-12)


def is_small(problem: ScheduleProblem, most: int = MOST_TASKS) -> bool:
    """Can all blocks of all micro-batches be arranged at once?"""
    count = problem.num_microbatches
    return count is not None and count * len(problem.blocks) <= most
