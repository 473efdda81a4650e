"""The least makespan of a given number of micro-batches, proven.

All blocks of all micro-batches are one question (see `at_once`), asked with growing effort until it
is answered, from the best schedule that list scheduling and a few windows find. Where there are too
many blocks for that, a repetition with its ends (see `periodic`) is the answer, and the bound says
how far from optimal it can be. Without a time limit the solver may spend `effort` in its own count
(a unit is a second or two).
"""

import math
from dataclasses import dataclass, field, replace

from partita.problems.schedule import ScheduleProblem, ScheduleSolution
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.schedule.at_once import AtOnce, is_small
from partita.search.schedule.bounds import objective_bound
from partita.search.schedule.greedy import list_schedules
from partita.search.schedule.lightest import lightest_order, why_infeasible
from partita.search.schedule.periodic import Periodic, PeriodSteps, name_period
from partita.search.schedule.published import offer_published
from partita.search.schedule.solver import Allowance, SolverOutcome
from partita.search.schedule.windows import Windows

NO_ORDER = "no order of the blocks fits the caps"
UNDECIDED = "no order that was tried fits the caps, and the effort allowed did not decide"
_FIRST_EFFORT = 0.5
_ENDLESS = 1e6
_WINDOW = 48


@dataclass(frozen=True, slots=True)
class ExactMakespan:
    """Proves the least makespan of a number of micro-batches; for some hundreds of blocks."""

    effort: float = 15.0
    most_tasks: int = 3000  # blocks times micro-batches that are one question
    otherwise: Periodic = field(default_factory=Periodic)

    def __call__(
        self, problem: ScheduleProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[ScheduleSolution]:
        """Without a number of micro-batches: what `periodic` finds."""
        if problem.num_microbatches is None:
            return replace(self.otherwise(problem, stop, seed), method="exact-makespan")
        run: Run[ScheduleSolution] = Run(stop, "exact-makespan", seed)
        run.bound(objective_bound(problem))
        if run.done():
            return run.result()
        lightest = lightest_order(problem)
        why = why_infeasible(problem, lightest)
        if why is not None:
            return run.result(Status.INFEASIBLE, why)
        list_schedules(problem, problem.num_microbatches, lightest.order, run)
        offer_published(problem, run)
        steps = PeriodSteps(problem, lightest, run, self.otherwise)
        turns = steps.through()
        if is_small(problem, self.most_tasks):
            next(turns)  # a first repetition
            return self._at_once(problem, run)
        for _ in turns:
            pass
        name_period(steps, run)
        return run.result()

    def _at_once(
        self, problem: ScheduleProblem, run: Run[ScheduleSolution]
    ) -> Result[ScheduleSolution]:
        if run.done():
            return run.result()
        question = AtOnce(problem, run)
        allowance = Allowance(self.effort if run.stop.time_s is None else math.inf)
        effort = _FIRST_EFFORT
        if run.solution is not None:
            Windows(problem, run).sweep(_WINDOW, effort / 4, allowance)
        while not (question.proven or run.done() or allowance.empty) and effort < _ENDLESS:
            question.go_on(effort, allowance)
            effort *= 4
        return closed(run, question.outcome)


def closed(run: Run[ScheduleSolution], outcome: SolverOutcome) -> Result[ScheduleSolution]:
    """The run's result, given how the question of all blocks at once ended."""
    if run.solution is None and outcome is SolverOutcome.INFEASIBLE:
        return run.result(Status.INFEASIBLE, NO_ORDER)
    if run.solution is None and run.reason() is None:
        return run.result(Status.STOPPED, UNDECIDED)
    if outcome is SolverOutcome.SOLVED:
        return run.result(why="nothing is shorter: all orders are ruled out")
    return run.result()
