"""Tessel's construction: a repetend of one micro-batch's blocks, a way in, a way out.

As published (Lin et al., HPCA 2024): a repetend runs every block once, for micro-batches that may
differ: block b is of micro-batch k + i_b in the k-th repetend. Indices do not grow along a
dependency and are at most n different ones. For n = 1, 2, ... up to `most_microbatches` the
repetend with the shortest period P is looked for; n stops growing when P is the work of the busiest
device. With starts s inside a repetend, windows of a device that begin at w, and cap on memory:

    s_b + (i_a - i_b) P >= s_a + lag              for every dependency a -> b,
    w_d <= s_b <= w_d + P - span_b, no overlap    on every device d,
    sum of memory_b i_b before the first start,   then start by start.

What comes before the first repetend (micro-batches below i_b) and after the last is each arranged
in the least time by itself, and the three follow each other with a barrier in between: no block of
one part starts before all of the part before have ended. So the makespan is not the best there is;
`periodic` and `auto` do not have barriers, and repeat several micro-batches where that is faster.

Tessel lists all assignments of indices and solves each with Z3; here the indices are variables of
one CP-SAT model for each n, which finds a repetend as short in less time. Assignments whose way in
or out does not fit the caps are excluded and the next best is asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partita.problems.schedule import (
    ScheduleProblem,
    ScheduleSolution,
    blocks_per_device,
    check,
    solution_of,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.schedule.assemble import left_shifted
from partita.search.schedule.bounds import objective_bound, period_bound
from partita.search.schedule.greedy import offer
from partita.search.schedule.grid import Grid, GridMemory, balanced, memory_on_grid, on_grid
from partita.search.schedule.lightest import lightest_order, why_infeasible
from partita.search.schedule.makespan import Task, TaskSegment
from partita.search.schedule.pattern import Pattern, fastest
from partita.search.schedule.solver import LARGE, Allowance, SolverOutcome, solve

NONE_FOUND = "no repetend of so few micro-batches was found whose ends fit the caps"
_MOST_REFUSED = 8  # assignments of indices that are given up for their ends


@dataclass(frozen=True, slots=True)
class Repetend:
    """A start and a micro-batch index for each block, in steps; all again every `length`."""

    starts: tuple[int, ...]
    indices: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Tessel:
    """The published repetend construction: one micro-batch per repetend, ends behind barriers."""

    most_microbatches: int = 6
    effort: float = 10.0  # in all, without a time limit; a unit is a second or two

    def __call__(
        self, problem: ScheduleProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[ScheduleSolution]:
        """Nothing is random; without a number of micro-batches the repetend for ever."""
        run: Run[ScheduleSolution] = Run(stop, "tessel", seed)
        run.bound(objective_bound(problem))
        if run.done():
            return run.result()
        why = why_infeasible(problem, lightest_order(problem))
        if why is not None:
            return run.result(Status.INFEASIBLE, why)
        composer = _Composer(problem, run, self)
        composer.compose()
        if run.solution is None and run.reason() is None:
            return run.result(Status.STOPPED, NONE_FOUND)
        return run.result()


class _Composer:
    """Repetends with more and more micro-batches, and schedules around the best of them."""

    def __init__(
        self, problem: ScheduleProblem, run: Run[ScheduleSolution], settings: Tessel
    ) -> None:
        self.problem, self.run = problem, run
        self.grid, self.memory = on_grid(problem), memory_on_grid(problem)
        self.most = settings.most_microbatches
        if problem.num_microbatches is not None:
            self.most = min(self.most, problem.num_microbatches)
        self.allowance = Allowance(settings.effort if run.stop.time_s is None else math.inf)
        work = [sum(self.grid.spans[b] for b in here) for here in blocks_per_device(problem)]
        self.least = max(*work, 1)
        bound = self.grid.steps(period_bound(problem))
        self.bound = max(self.least, math.ceil(bound * (1 - 1e-9)))

    def compose(self) -> None:
        """The shortest repetend, the fewest micro-batches first."""
        longest: int | None = None
        for count in range(1, self.most + 1):
            refused: list[tuple[int, ...]] = []
            while not (self.run.done() or self.allowance.empty):
                repetend = self._repetend(count, longest, refused)
                if repetend is None:
                    break
                if self._complete(repetend):
                    longest = repetend.length
                    break
                refused.append(repetend.indices)
                if len(refused) > _MOST_REFUSED:
                    break
            if longest is not None and longest <= self.least:
                return

    def _repetend(
        self, count: int, longest: int | None, refused: Sequence[tuple[int, ...]]
    ) -> Repetend | None:
        """The shortest with at most `count` indices, shorter than `longest`."""
        limits = self.memory
        if self.problem.num_microbatches is None:
            limits = balanced(self.problem, self.memory)
        model = _RepetendModel(self.problem, self.grid, limits, count, self.bound)
        if longest is not None:
            model.cp.add(model.length < longest)
        for indices in refused:
            model.exclude(indices)
        asked = [*model.starts, *model.indices, model.length]
        linear = 1 if self.bound < LARGE else 0
        answer = solve(model.cp, asked, self.run, allowance=self.allowance, linear=linear)
        if answer.values is None:
            return None
        size = len(self.problem.blocks)
        starts, indices = answer.values[:size], answer.values[size : 2 * size]
        first = min(starts)
        return Repetend(tuple(s - first for s in starts), indices, answer.values[-1])

    def _complete(self, repetend: Repetend) -> bool:
        """Offer the schedule around a repetend; False if there is none."""
        if self.problem.num_microbatches is None:
            return self._for_ever(repetend)
        table = self._with_ends(repetend, self.problem.num_microbatches)
        if table is None:
            return False
        if self.grid.exact:
            times = [[self.grid.time(start) for start in row] for row in table]
            solution = solution_of(self.problem, times, period=self.grid.time(repetend.length))
        else:  # true times in the same order
            solution = solution_of(self.problem, left_shifted(self.problem, table))
        if check(self.problem, solution):
            return False
        self.run.offer(solution, solution.makespan)
        return True

    def _for_ever(self, repetend: Repetend) -> bool:
        behind = zip(repetend.starts, repetend.indices, strict=True)
        most = max(repetend.indices)
        row = tuple(start + (most - index) * repetend.length for start, index in behind)
        if self.grid.exact:
            times = tuple(self.grid.time(start) for start in row)
            return offer(self.problem, Pattern((times,), self.grid.time(repetend.length)), self.run)
        pattern = fastest(self.problem, [row], repetend.length)
        return pattern is not None and offer(self.problem, pattern, self.run)

    # --- the way in, the repetends, the way out ---

    def _with_ends(self, repetend: Repetend, count: int) -> list[list[int]] | None:
        size = len(self.problem.blocks)
        again = count - max(repetend.indices)  # repetends
        before = [(m, b) for b in range(size) for m in range(repetend.indices[b])]
        after = [(m, b) for b in range(size) for m in range(repetend.indices[b] + again, count)]
        way_in = self._least(before, frozenset())
        way_out = self._least(
            after,
            frozenset((m, b) for b in range(size) for m in range(repetend.indices[b] + again)),
        )
        if way_in is None or way_out is None:
            return None
        spans = self.grid.spans
        table = [[0] * size for _ in range(count)]
        for (m, b), start in way_in.items():
            table[m][b] = start
        begin = max((start + spans[b] for (_, b), start in way_in.items()), default=0)
        for b in range(size):
            for k in range(again):
                table[repetend.indices[b] + k][b] = begin + repetend.starts[b] + k * repetend.length
        took = max(start + span for start, span in zip(repetend.starts, spans, strict=True))
        begin += (again - 1) * repetend.length + took
        for (m, b), start in way_out.items():
            table[m][b] = begin + start
        return table

    def _least(self, tasks: list[Task], earlier: frozenset[Task]) -> dict[Task, int] | None:
        """These in the least time, by themselves; None if no order of them fits the caps."""
        if not tasks:
            return {}
        spans = self.grid.spans
        segment = TaskSegment(
            self.problem,
            self.grid,
            self.memory,
            dict.fromkeys(tasks, 0),
            {task: spans[task[1]] for task in tasks},
            earlier,
        )
        alone = sum(spans[b] for _, b in tasks)
        lags = sum(self.grid.lags) * (1 + max(m for m, _ in tasks))
        answer = segment.least(
            self.run, known=None, horizon=alone + lags, allowance=self.allowance, effort=2.0
        )
        if answer.values is None or answer.outcome is SolverOutcome.INFEASIBLE:
            return None
        return dict(zip(tasks, answer.values, strict=True))


class _RepetendModel:
    """Starts, indices and length of a repetend as variables."""

    def __init__(
        self,
        problem: ScheduleProblem,
        grid: Grid,
        memory: Sequence[GridMemory],
        count: int,
        least: int,
    ) -> None:
        from ortools.sat.python import cp_model

        self.problem, self.grid, self.count = problem, grid, count
        self.cp = cp_model.CpModel()
        alone = sum(grid.spans) + sum(grid.lags)
        self.reach = 2 * alone
        blocks = range(len(problem.blocks))
        self.starts = [self.cp.new_int_var(0, self.reach, "") for _ in blocks]
        self.indices = [self.cp.new_int_var(0, count - 1, "") for _ in blocks]
        self.length = self.cp.new_int_var(least, max(alone, least), "")
        self._dependencies()
        self._one_at_a_time()
        for limit in memory:
            self._within_cap(limit)
        self._count_from_zero()
        self.cp.minimize(self.length)

    def exclude(self, indices: Sequence[int]) -> None:
        """Not this assignment of indices again."""
        differs = []
        for variable, index in zip(self.indices, indices, strict=True):
            other = self.cp.new_bool_var("")
            self.cp.add(variable != index).only_enforce_if(other)
            differs.append(other)
        self.cp.add_bool_or(differs)

    def _dependencies(self) -> None:
        for (first, second), lag in zip(self.problem.deps, self.grid.lags, strict=True):
            ahead = self.indices[first] - self.indices[second]
            literals = []
            for turns in range(self.count):
                here = self.cp.new_bool_var("")
                self.cp.add(ahead == turns).only_enforce_if(here)
                later = self.starts[second] + turns * self.length
                self.cp.add(later >= self.starts[first] + lag).only_enforce_if(here)
                literals.append(here)
            self.cp.add_exactly_one(literals)

    def _one_at_a_time(self) -> None:
        runs = [
            self.cp.new_fixed_size_interval_var(start, span, "")
            for start, span in zip(self.starts, self.grid.spans, strict=True)
        ]
        for here in blocks_per_device(self.problem):
            if not here:
                continue
            self.cp.add_no_overlap([runs[block] for block in here])
            window = self.cp.new_int_var(0, self.reach, "")
            for block in here:
                self.cp.add(self.starts[block] >= window)
                end = self.starts[block] + self.grid.spans[block]
                self.cp.add(end <= window + self.length)

    def _within_cap(self, memory: GridMemory) -> None:
        """Held when the repetend begins, and then after each of its starts."""
        blocks = list(memory.amounts)
        held: Any = sum(memory.amounts[b] * self.indices[b] for b in blocks)
        first: dict[tuple[int, int], Any] = {}
        for place, one in enumerate(blocks):
            for other in blocks[place + 1 :]:
                before = self.cp.new_bool_var("")
                distance = self.starts[other] - self.starts[one]
                self.cp.add(distance >= self.grid.spans[one]).only_enforce_if(before)
                back = -distance >= self.grid.spans[other]
                self.cp.add(back).only_enforce_if(before.negated())
                first[one, other], first[other, one] = before, 1 - before
        for at in blocks:
            if memory.amounts[at] > 0:
                begun = sum(memory.amounts[b] * first[b, at] for b in blocks if b != at)
                self.cp.add(held + begun + memory.amounts[at] <= memory.cap)

    def _count_from_zero(self) -> None:
        """Some block is of the first micro-batch, else there is nothing to start with."""
        zero = []
        for index in self.indices:
            here = self.cp.new_bool_var("")
            self.cp.add(index == 0).only_enforce_if(here)
            zero.append(here)
        self.cp.add_bool_or(zero)
