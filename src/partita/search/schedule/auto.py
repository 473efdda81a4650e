"""The default: an answer at once, then better ones and better bounds until it is proven.

With a number of micro-batches, in turn and each with more effort than before:

    published schedules where the problem is a pipeline, and list schedules (instant),
    windows of the best schedule arranged anew (see `windows`),
    the shortest repetition with its ends (see `periodic`),
    all blocks at once, which proves what it finds (see `at_once`);

windows and all at once where blocks times micro-batches are not too many. Without a number, the
shortest repetition. Without a time limit, the solver may spend `effort` in its own count on windows
and as much on all at once (a unit is a second or two), half as much on each part of `periodic`; of
too many micro-batches what `period` allows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from partita.problems.schedule import ScheduleProblem, ScheduleSolution
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.schedule.at_once import AtOnce, is_small
from partita.search.schedule.bounds import objective_bound
from partita.search.schedule.exact_makespan import closed
from partita.search.schedule.greedy import list_schedules
from partita.search.schedule.lightest import Lightest, lightest_order, why_infeasible
from partita.search.schedule.periodic import STUCK, Periodic, PeriodSteps, name_period
from partita.search.schedule.published import offer_published
from partita.search.schedule.solver import Allowance, SolverOutcome
from partita.search.schedule.windows import Windows

_SIZES = (32, 48, 64, 96)  # blocks in a window
_FIRST_EFFORT = 0.05
_ENDLESS = 1e6


@dataclass(frozen=True, slots=True)
class AutoSchedule:
    """Greedy at once, then shorter repetitions, windows and proofs until nothing is left open."""

    effort: float = 1.0
    period: Periodic = field(default_factory=Periodic)

    def __call__(
        self, problem: ScheduleProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[ScheduleSolution]:
        """Optimal where bound and answer meet; the gap is in the result otherwise."""
        run: Run[ScheduleSolution] = Run(stop, "auto", seed)
        run.bound(objective_bound(problem))
        if run.done():
            return run.result()
        lightest = lightest_order(problem)
        why = why_infeasible(problem, lightest)
        if why is not None:
            return run.result(Status.INFEASIBLE, why)
        if problem.num_microbatches is not None:
            return self._makespan(problem, problem.num_microbatches, lightest, run)
        steps = PeriodSteps(problem, lightest, run, self.period)
        for _ in steps.through():
            pass
        if run.solution is None and run.reason() is None:
            return run.result(Status.STOPPED, STUCK)
        return run.result(why=steps.why())

    def _makespan(
        self,
        problem: ScheduleProblem,
        count: int,
        lightest: Lightest,
        run: Run[ScheduleSolution],
    ) -> Result[ScheduleSolution]:
        offer_published(problem, run)
        list_schedules(problem, count, lightest.order, run)
        if run.done():
            return run.result()
        half, settings = self.effort / 2, self.period
        if is_small(problem):
            settings = replace(settings, effort=half, unroll_effort=half, ends_effort=half)
        repetitions = PeriodSteps(problem, lightest, run, settings)
        turns = repetitions.through()
        outcome = SolverOutcome.UNKNOWN
        if is_small(problem):
            outcome = self._in_turn(problem, run, turns)
        else:
            for _ in turns:
                pass
        name_period(repetitions, run)
        return closed(run, outcome)

    def _in_turn(
        self, problem: ScheduleProblem, run: Run[ScheduleSolution], repetitions: Iterator[None]
    ) -> SolverOutcome:
        """Everything with more effort each time."""
        windows, question = Windows(problem, run), AtOnce(problem, run)
        limited = run.stop.time_s is None
        for_windows = Allowance(self.effort if limited else math.inf)
        for_all = Allowance(self.effort if limited else math.inf)
        next(repetitions, None)  # the quick ones
        effort = _FIRST_EFFORT
        while not (question.proven or run.done()) and effort < _ENDLESS:
            if run.solution is not None:
                for size in _SIZES:
                    while windows.sweep(size, effort, for_windows):
                        pass
            next(repetitions, None)
            question.go_on(4 * effort, for_all)
            effort *= 4
            if for_all.empty and for_windows.empty:
                for _ in repetitions:
                    pass
                break
        return question.outcome
