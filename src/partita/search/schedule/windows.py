"""Improve a schedule piece by piece: a window of time is arranged anew, all else keeps its order.

Blocks before the window stay where they are, those after it follow in the order they had, as early
as they can. So a window is a `TaskSegment` (see `makespan`): it begins when the devices are done
with what is before, and the tail of each block is the longest path through what comes after. Memory
before and after the window is as it was, as the same blocks have run. A window is asked to end the
whole schedule earlier than it does now; if it can, the gain is kept (large neighbourhood search).
"""

from collections.abc import Sequence

from partita.problems.schedule import ScheduleProblem, ScheduleSolution, check, solution_of
from partita.search.base import Run
from partita.search.schedule.assemble import in_order, left_shifted
from partita.search.schedule.grid import Grid, memory_on_grid, on_grid
from partita.search.schedule.makespan import Task, TaskSegment
from partita.search.schedule.solver import Allowance, SolverOutcome


class Windows:
    """Windows over the best schedule of a run, sweep after sweep."""

    def __init__(self, problem: ScheduleProblem, run: Run[ScheduleSolution]) -> None:
        assert problem.num_microbatches is not None
        self.problem, self.run = problem, run
        self.grid: Grid = on_grid(problem)
        self.memory = memory_on_grid(problem)
        self.behind: list[list[tuple[int, int]]] = [[] for _ in problem.blocks]
        self.before: list[list[tuple[int, int]]] = [[] for _ in problem.blocks]
        for (first, second), lag in zip(problem.deps, self.grid.lags, strict=True):
            self.behind[first].append((second, lag))
            self.before[second].append((first, lag))

    def sweep(self, size: int, effort: float, allowance: Allowance) -> bool:
        """All windows of this many blocks, half of each new; True if something was gained."""
        gained = False
        at = 0
        while not (self.run.done() or allowance.empty):
            steps = self._steps()
            order = sorted(steps, key=lambda task: (steps[task], task))
            if at >= len(order):
                return gained
            window = order[at : at + size]
            gained |= self._improve(
                steps, order[:at], window, order[at + size :], effort, allowance
            )
            at += size if at + size >= len(order) else size // 2
        return gained

    def _improve(
        self,
        steps: dict[Task, int],
        earlier: Sequence[Task],
        window: Sequence[Task],
        later: Sequence[Task],
        effort: float,
        allowance: Allowance,
    ) -> bool:
        tail = self._tails(window, later)
        segment = TaskSegment(
            self.problem,
            self.grid,
            self.memory,
            self._release(steps, earlier, window),
            {task: tail[task] for task in window},
            frozenset(earlier),
        )
        now = max(steps[task] + self.grid.spans[task[1]] for task in steps)
        if max(segment.release[task] + tail[task] for task in window) >= now:
            return False
        answer = segment.least(
            self.run,
            known={task: steps[task] for task in window},
            below=now,
            effort=effort,
            allowance=allowance,
        )
        if answer.values is None or answer.outcome is SolverOutcome.INFEASIBLE:
            return False
        best_steps = dict(steps)
        best_steps.update(zip(window, answer.values, strict=True))
        shift = now  # what is later keeps its order, after everything else
        best_steps.update((task, steps[task] + shift) for task in later)
        return self._offer(best_steps)

    def _offer(self, steps: dict[Task, int]) -> bool:
        count, size = self.problem.num_microbatches or 0, len(self.problem.blocks)
        table = [[steps[m, block] for block in range(size)] for m in range(count)]
        solution = solution_of(self.problem, left_shifted(self.problem, table))
        if self.run.objective is not None and solution.makespan >= self.run.objective:
            return False
        return not check(self.problem, solution) and self.run.offer(solution, solution.makespan)

    def _steps(self) -> dict[Task, int]:
        """The best schedule, in steps, the i-th start of a block in micro-batch i."""
        assert self.run.solution is not None
        table: list[list[float]] = [[] for _ in range(self.problem.num_microbatches or 0)]
        for microbatch, _, start in sorted(self.run.solution.starts):
            table[microbatch].append(start)
        return {
            (m, block): self.grid.whole_steps(start)
            for m, row in enumerate(left_shifted(self.problem, in_order(table)))
            for block, start in enumerate(row)
        }

    def _release(
        self, steps: dict[Task, int], earlier: Sequence[Task], window: Sequence[Task]
    ) -> dict[Task, int]:
        free_at = [0] * self.problem.num_devices
        for task in earlier:
            for device in self.problem.blocks[task[1]].devices:
                free_at[device] = max(free_at[device], steps[task] + self.grid.spans[task[1]])
        inside = set(window)
        release = {}
        for m, block in window:
            first = max(free_at[device] for device in self.problem.blocks[block].devices)
            for other, lag in self.before[block]:
                if (m, other) not in inside:
                    first = max(first, steps[m, other] + lag)
            release[m, block] = first
        return release

    def _tails(self, window: Sequence[Task], later: Sequence[Task]) -> dict[Task, int]:
        """From the start of each to the end of all, in the order that later blocks have."""
        tail: dict[Task, int] = {}
        on_device = [0] * self.problem.num_devices  # the tail of what is next there
        for tasks, in_turn in ((later, True), (window, False)):
            for m, block in reversed(tasks):
                devices = self.problem.blocks[block].devices
                least = self.grid.spans[block] + max(on_device[device] for device in devices)
                for other, lag in self.behind[block]:
                    least = max(least, lag + tail[m, other])
                tail[m, block] = least
                if in_turn:
                    for device in devices:
                        on_device[device] = least
        return tail
