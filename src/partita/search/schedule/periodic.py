"""The least period, proven as far as it goes; then complete schedules around it.

Repetitions of 1, 2, ... `max_unroll` micro-batches are searched for the shortest (see
`period_search`). Several per repetition are faster where memory is tight. With a number of micro-
batches given, what is found is unrolled, and the way into the repetition and out of it arranged
anew (see `assemble`); the objective is then the makespan.

Without a time limit the questions of one micro-batch may take `effort` in all, those of several
`unroll_effort`, the ends `ends_effort`, in the solver's own count (a unit is a second or two). With
a time limit and no number of micro-batches, questions are asked until they are answered.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from partita.problems.schedule import ScheduleProblem, ScheduleSolution, check, solution_of
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.schedule.assemble import Ends, left_shifted
from partita.search.schedule.at_once import AtOnce, is_small
from partita.search.schedule.bounds import objective_bound
from partita.search.schedule.cyclic import Repetition
from partita.search.schedule.greedy import offer, repetitions
from partita.search.schedule.grid import memory_on_grid, plain
from partita.search.schedule.lightest import Lightest, lightest_order, why_infeasible
from partita.search.schedule.pattern import Pattern, fastest
from partita.search.schedule.period_search import FIRST_EFFORT, PeriodSearch
from partita.search.schedule.solver import Allowance

STUCK = "no order that was tried fits the caps, which proves nothing; exact-makespan tries all"
_ENDLESS = 1e6  # questions that are still open then stay so
_MANY = 8  # micro-batches for which a repetition of many can matter


@dataclass(frozen=True, slots=True)
class Periodic:
    """Proves the shortest repetition of up to `max_unroll` micro-batches."""

    max_unroll: int = 4
    effort: float = 30.0
    unroll_effort: float = 1.5
    ends_effort: float = 3.0
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
        most, one = settings.max_unroll, settings.effort
        if problem.num_microbatches is not None:
            most, one = min(most, problem.num_microbatches), min(one, settings.ends_effort)
        self.search = PeriodSearch(problem, run, most, self._found)
        limited = run.stop.time_s is None or problem.num_microbatches is not None
        self.for_one = Allowance(one if limited else math.inf)
        self.for_several = Allowance(settings.unroll_effort if limited else math.inf)
        self.for_ends = Allowance(settings.ends_effort if limited else math.inf)
        self.arranged: Pattern | None = None  # whose ends
        self.ends_are_best = False
        self.all: AtOnce | None = None

    def through(self) -> Iterator[None]:
        """Do it step by step; the effort of each is four times that of the one before."""
        self._begin()
        yield
        effort = FIRST_EFFORT
        while not self.run.done() and effort < _ENDLESS:
            self.search.go_on(1, effort, self.for_one)
            if effort == FIRST_EFFORT and not self.search.done() and self._has_steady_state():
                self.search.try_steady_states()
            for copies in list(self.search.ruled_out)[1:]:
                self.search.go_on(copies, effort, self.for_several)
            self._arrange_ends(effort)
            yield
            if not self._is_open():
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

    def _has_steady_state(self) -> bool:
        count = self.problem.num_microbatches
        return count is None or count >= _MANY

    def _is_open(self) -> bool:
        """Is there something to find out, and effort left for it?"""
        search, (one, *several) = self.search, self.search.ruled_out
        if self.problem.num_microbatches is not None and search.best is not None:
            ends = not (self.ends_are_best or self.for_ends.empty)
        else:
            ends = False
        if ends or search.done():
            return ends
        if not (self.for_one.empty or search.settled(one)):
            return True
        return not (self.for_several.empty or all(map(search.settled, several)))

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
        if self.arranged is pattern and self.ends_are_best:
            return
        self.arranged, self.ends_are_best = pattern, True
        for candidate in (pattern, self._shorter(pattern, effort)):
            if candidate is None or self.run.done():
                continue
            ends = Ends(self.problem, self.search.grid, memory_on_grid(self.problem), candidate)
            table = ends.arranged(self.run, effort, self.for_ends)
            if table is not None:
                self._complete(table, candidate)
                self.ends_are_best &= ends.proven
            else:
                table = candidate.unrolled(self.problem.num_microbatches)
                self._complete(left_shifted(self.problem, table), candidate)
                self._arrange_all(effort)

    def _arrange_all(self, effort: float) -> None:
        """There are too few micro-batches for a repetition between the ends."""
        if is_small(self.problem):
            if self.all is None:
                self.all = AtOnce(self.problem, self.run)
            self.all.go_on(effort, self.for_ends)
            self.ends_are_best &= self.all.proven

    def _shorter(self, pattern: Pattern, effort: float) -> Pattern | None:
        """A repetition as fast, whose micro-batches take less time from start to end."""
        search = self.search
        if not search.grid.exact:
            return None
        length = int(search.grid.steps(pattern.length))
        copies = len(pattern.starts)
        asked = Repetition(search.problem, search.grid, search.memory, copies, length)
        answer = asked.shorten(self.run, effort, self.for_ends)
        if answer.values is None:
            return None
        size = len(self.problem.blocks)
        rows = [answer.values[at : at + size] for at in range(0, len(answer.values), size)]
        new_pattern = fastest(search.problem, rows, asked.length)
        if new_pattern is None or check(search.problem, new_pattern.solution(search.problem)):
            return None
        return new_pattern


def name_period(steps: PeriodSteps, run: Run[ScheduleSolution]) -> None:
    """Say what the time per micro-batch of the best schedule would be if it went on for ever."""
    best = steps.search.period
    if run.solution is not None and best is not None:
        run.solution = replace(run.solution, period=plain(best))
