"""Complete schedules for any number of micro-batches.

A schedule is its order: of what runs on each device. `left_shifted` runs an order as early as it
can; nothing gets later, and memory, which depends on the order alone, stays as it is. O(n log n).

How a schedule gets into its repetition and out of it need not follow the repetition. All starts
before some time t0, or from some t1 on, are free to be arranged anew if those in between stay as
they are: each is a `TaskSegment` of its own, as large as the micro-batches under way at once, not
as all of them. So thousands of micro-batches cost no more than a few.
"""

import math
from collections.abc import Sequence
from typing import Any

from partita.problems.schedule import (
    ScheduleProblem,
    predecessors,
    tails,
    topological_order,
)
from partita.search.base import Run
from partita.search.schedule.grid import Grid, GridMemory
from partita.search.schedule.makespan import Task, TaskSegment
from partita.search.schedule.pattern import Pattern
from partita.search.schedule.solver import Allowance, SolverOutcome

Table = list[list[float]]  # [microbatch][block]


def left_shifted(problem: ScheduleProblem, table: Sequence[Sequence[float]]) -> Table:
    """The same order on every device, each start as early as that allows."""
    before = predecessors(problem)
    rank = {block: place for place, block in enumerate(topological_order(problem))}
    order = sorted(
        (start, rank[block], m, block)
        for m, row in enumerate(table)
        for block, start in enumerate(row)
    )
    spans, devices = [b.span for b in problem.blocks], [b.devices for b in problem.blocks]
    free_at: list[float] = [0] * problem.num_devices
    left_shifted: Table = [[0] * len(spans) for _ in table]
    for _, _, m, block in order:
        row, start = left_shifted[m], max([free_at[device] for device in devices[block]])
        for first, lag in before[block]:
            start = max(start, row[first] + lag)
        row[block] = start
        for device in devices[block]:
            free_at[device] = start + spans[block]
    return left_shifted


def in_order(table: Sequence[Sequence[float]]) -> Table:
    """The same starts, the i-th of each block given to micro-batch i; all rules still hold."""
    columns = [sorted(column) for column in zip(*table, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


class Ends:
    """The way into a repetition and out of it, arranged anew."""

    def __init__(
        self, problem: ScheduleProblem, grid: Grid, memory: Sequence[GridMemory], pattern: Pattern
    ) -> None:
        assert problem.num_microbatches is not None
        self.problem, self.grid, self.memory = problem, grid, memory
        self.steps = [  # rounded down, which keeps all rules that are rounded down
            [grid.whole_steps(start) for start in row]
            for row in pattern.unrolled(problem.num_microbatches)
        ]
        length = grid.steps(pattern.length)
        latest = max(grid.whole_steps(start) for row in pattern.starts for start in row)
        repetitions = problem.num_microbatches // len(pattern.starts)
        first = math.floor(latest / length) + 1  # repetitions until all blocks have begun
        self.proven = False  # are both ends as short as can be?
        self.into = math.floor((first + 1) * length)
        self.out_of = math.floor((repetitions - 1) * length)

    @property
    def overlap(self) -> bool:
        """Are there too few micro-batches for a repetition in between?"""
        return self.into > self.out_of

    def arranged(self, run: Run[Any], effort: float, allowance: Allowance) -> Table | None:
        """The whole schedule with better ends; None where there is no room for them."""
        if self.overlap:
            return None
        way_in = self._way_in()
        into, first = self._solved(way_in, 0, run, effort, allowance)
        begins = max((into[task] + tail for task, tail in way_in.tail.items()), default=self.into)
        out_of, last = self._solved(self._way_out(), self.out_of, run, effort, allowance)
        self.proven = first and last
        table: list[list[int]] = [
            [start - self.into + begins for start in row] for row in self.steps
        ]
        for (microbatch, block), start in into.items():
            table[microbatch][block] = start
        for (microbatch, block), start in out_of.items():
            table[microbatch][block] = start + self.out_of - self.into + begins
        return left_shifted(self.problem, table)

    def _solved(
        self, segment: TaskSegment, origin: int, run: Run[Any], effort: float, allowance: Allowance
    ) -> tuple[dict[Task, int], bool]:
        """The starts, and whether none are better."""
        known = {(m, block): self.steps[m][block] - origin for m, block in segment.release}
        if not known:
            return {}, True
        answer = segment.least(run, known=known, effort=effort, allowance=allowance)
        if answer.values is None:
            return known, False
        starts = dict(zip(segment.release, answer.values, strict=True))
        return starts, answer.outcome is SolverOutcome.SOLVED

    def _way_in(self) -> TaskSegment:
        """Everything before t0; tails reach to t0, as what comes later stays as it is."""
        into = self.into
        tasks = [task for task in self._tasks() if self._start(task) < into]
        first_after = [self.out_of] * self.problem.num_devices
        for m, block in self._tasks():
            start = self.steps[m][block]
            for device in self.problem.blocks[block].devices:
                if into <= start < first_after[device]:
                    first_after[device] = start
        tail: dict[Task, int] = {}
        for m, block in sorted(tasks, key=self._start, reverse=True):
            span, devices = self.grid.spans[block], self.problem.blocks[block].devices
            least = max(span - first_after[device] + into for device in devices)
            for (one, other), lag in zip(self.problem.deps, self.grid.lags, strict=True):
                if one == block:
                    after = tail.get((m, other), into - self.steps[m][other])
                    least = max(least, lag + after)
            tail[m, block] = least
        return TaskSegment(
            self.problem,
            self.grid,
            self.memory,
            dict.fromkeys(tasks, 0),
            {task: tail[task] for task in tasks},
        )

    def _way_out(self) -> TaskSegment:
        """Everything from t1 on, counted from there."""
        tasks = [task for task in self._tasks() if self._start(task) >= self.out_of]
        earlier = [task for task in self._tasks() if self._start(task) < self.out_of]
        free_at = [0] * self.problem.num_devices
        for m, block in earlier:
            end = self.steps[m][block] + self.grid.spans[block] - self.out_of
            for device in self.problem.blocks[block].devices:
                free_at[device] = max(free_at[device], end)
        release = {}
        for m, block in tasks:
            release[m, block] = max(free_at[d] for d in self.problem.blocks[block].devices)
        for (first, second), lag in zip(self.problem.deps, self.grid.lags, strict=True):
            for m, block in tasks:
                if block == second and (m, first) not in release:
                    ready = self.steps[m][first] + lag - self.out_of
                    release[m, block] = max(release[m, block], ready)
        open_ones = {m for m, _ in tasks}
        after = tails(self.problem)
        return TaskSegment(
            self.problem,
            self.grid,
            self.memory,
            release,
            {(m, block): self.grid.whole_steps(after[block]) for m, block in tasks},
            frozenset((m, block) for m, block in earlier if m in open_ones),
        )

    def _tasks(self) -> list[Task]:
        return [(m, block) for m, row in enumerate(self.steps) for block in range(len(row))]

    def _start(self, task: Task) -> int:
        return self.steps[task[0]][task[1]]
