"""The least period, proven as far as it goes; then complete schedules around it.

Repetitions of 1, 2, ... `max_unroll` micro-batches are searched for the shortest (see
`period_search`). Several per repetition are faster where memory is tight. With a number of micro-
batches given, what is found is unrolled, and the way into the repetition and out of it arranged
anew (see `assemble`); the objective is then the makespan.

Without a time limit each question of one micro-batch gets `effort`, of several `unroll_effort`, in
the solver's own count (roughly seconds); with one, questions are asked until they are answered.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from partita.problems.schedule import ScheduleProblem, ScheduleSolution, check, solution_of
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.schedule.assemble import Ends, left_shifted
from partita.search.schedule.bounds import objective_bound
from partita.search.schedule.cyclic import Repetition
from partita.search.schedule.greedy import offer, repetitions
from partita.search.schedule.grid import memory_on_grid, plain
from partita.search.schedule.lightest import Lightest, lightest_order, why_infeasible
from partita.search.schedule.pattern import Pattern, fastest
from partita.search.schedule.period_search import FIRST_EFFORT, PeriodSearch

STUCK = "no order that was tried fits the caps, which proves nothing; exact-makespan tries all"


@dataclass(frozen=True, slots=True)
class Periodic:
    """Proves the shortest repetition of up to `max_unroll` micro-batches."""

    max_unroll: int = 4
    effort: float = 60.0
    unroll_effort: float = 0.5
    periods: int = 200  # first tries without a solver

    def __call__(
        self, problem: ScheduleProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[ScheduleSolution]:
        """The period is proven for each number of micro-batches per repetition by itself."""
        run: Run[ScheduleSolution] = Run(stop, "periodic", seed)
        run.bound(objective_bound(problem))
        if run.done():
            return run.result()
        lightest = lightest_order(problem)
        why = why_infeasible(problem, lightest)
        if why is not None:
            return run.result(Status.INFEASIBLE, why)
        steps = PeriodSteps(problem, lightest, run, self)
        for _ in steps.through():
            pass
        if run.solution is None and run.reason() is None:
            return run.result(Status.STOPPED, STUCK)
        return run.result(why=steps.why())


class PeriodSteps:
    """The search as steps of growing effort, so that others can take turns with it."""

    def __init__(
        self,
        problem: ScheduleProblem,
        lightest: Lightest,
        run: Run[ScheduleSolution],
        settings: Periodic,
    ) -> None:
        self.problem, self.lightest, self.run, self.settings = problem, lightest, run, settings
        most = settings.max_unroll
        if problem.num_microbatches is not None:
            most = min(most, problem.num_microbatches)
        self.search = PeriodSearch(problem, run, most, self._found)
        self.arranged: tuple[Pattern, float] | None = None  # whose ends, and with which effort

    def through(self) -> Iterator[None]:
        """Do it step by step; the effort of each is four times that of the one before."""
        self._begin()
        yield
        effort = FIRST_EFFORT
        while not self.run.done():
            for copies in self.search.ruled_out:
                self.search.go_on(copies, min(effort, self._most(copies)))
            self._arrange_ends(min(effort, self._most(1)))
            yield
            if effort >= self._most(1) or (self.search.done() and self._ends_are_best()):
                return
            effort *= 4

    def why(self) -> str:
        """What is proven, in a sentence; empty where a stop rule says it better."""
        search = self.search
        if self.problem.num_microbatches is not None or self.run.reason() is not None:
            return ""
        if search.best is None or search.meets_bound():
            return ""
        settled = [copies for copies in search.ruled_out if search.settled(copies)]
        many = ", ".join(map(str, settled))
        if not settled:
            return "no question of a shorter repetition was answered with the effort allowed"
        return f"no repetition of {many} micro-batches is faster; others might be"

    def _begin(self) -> None:
        """What can be had at once."""
        self.search.try_first_fit()
        if self.search.best is not None:
            return
        tries = repetitions(self.problem, self.lightest.order, self.settings.periods, self.run)
        for pattern in tries:
            if self.search.adopt(pattern):
                return

    def _most(self, copies: int) -> float:
        """The most effort for one question."""
        if self.run.stop.time_s is not None:
            return math.inf
        most = self.settings.effort if copies == 1 else self.settings.unroll_effort
        return most if self.problem.num_microbatches is None else min(most, _EFFORT_OF_MAKESPAN)

    def _found(self, pattern: Pattern) -> None:
        """A faster repetition; with a number of micro-batches it is completed."""
        if not offer(self.problem, pattern, self.run):
            return
        if self.problem.num_microbatches is not None:
            table = left_shifted(self.problem, pattern.unrolled(self.problem.num_microbatches))
            self._complete(table, pattern)

    def _complete(self, table: list[list[float]], pattern: Pattern) -> None:
        solution = solution_of(self.problem, table, period=plain(pattern.period))
        if self.run.objective is not None and solution.makespan >= self.run.objective:
            return
        if not check(self.problem, solution):
            self.run.offer(solution, solution.makespan)

    # --- the way in and out ---

    def _arrange_ends(self, effort: float) -> None:
        pattern = self.search.best
        if self.problem.num_microbatches is None or pattern is None or self.run.done():
            return
        done = self.arranged
        if done is not None and done[0] is pattern and done[1] >= effort:
            return
        self.arranged = (pattern, effort)
        for candidate in (pattern, self._shorter(pattern, effort)):
            if candidate is None or self.run.done():
                continue
            grid, memory = self.search.grid, memory_on_grid(self.problem)
            ends = Ends(self.problem, grid, memory, candidate)
            table = ends.arranged(self.run, effort)
            if table is None:
                table = left_shifted(
                    self.problem, candidate.unrolled(self.problem.num_microbatches)
                )
            self._complete(table, candidate)

    def _shorter(self, pattern: Pattern, effort: float) -> Pattern | None:
        """A repetition as fast, whose micro-batches take less time from start to end."""
        search = self.search
        if not search.grid.exact:
            return None
        length = search.grid.steps(pattern.length)
        asked = Repetition(
            search.problem, search.grid, search.memory, len(pattern.starts), int(length)
        )
        answer = asked.shorten(self.run, effort)
        if answer.values is None:
            return None
        size = len(self.problem.blocks)
        rows = [answer.values[at : at + size] for at in range(0, len(answer.values), size)]
        found = fastest(search.problem, rows, asked.length)
        if found is None or check(search.problem, found.solution(search.problem)):
            return None
        return found

    def _ends_are_best(self) -> bool:
        if self.problem.num_microbatches is None:
            return True
        return self.arranged is not None and self.arranged[1] >= _EFFORT_OF_MAKESPAN


_EFFORT_OF_MAKESPAN = 4.0
