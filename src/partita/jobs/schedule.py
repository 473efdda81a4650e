"""Schedule the micro-batches of a placement: the best order found, proven bounds, a timeline.

    result = schedule(placement, memory=4, microbatches=8)
    result.makespan, result.period, result.bubble_rates, result.peak_memory
    result.timeline()        # for gantt, timeline_svg, chrome_trace

What a search claims is checked against the problem, then turned into a program and verified as any
other program before anyone sees it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from partita.errors import InputError
from partita.problems import schedule as problems
from partita.problems.schedule import ScheduleProblem, ScheduleSolution, work_per_device
from partita.program import Program
from partita.schedules.placement import Placement, asked
from partita.schedules.programs import program_of, start_column
from partita.search import searches
from partita.search.base import TOLERANCE, UNTIL_DONE, Result, Search, Status, Stop
from partita.search.schedule.periodic import Periodic
from partita.showing import plot_of, repr_html, table_of
from partita.suggest import suggest
from partita.timeline import Timeline
from partita.verify import check_timeline

_QUICK = 0.1  # effort for a period that no one asked for, in the solver's count

ScheduleSearch = Search[ScheduleProblem, ScheduleSolution]


@dataclass(frozen=True)
class ScheduleResult:
    """A schedule of a placement, as far as one was found, and how good it is.

    `outcome` is what the search returned. `period` is the time per micro-batch that a schedule that
    repeats for ever reaches; with a number of micro-batches given, the schedule here need not be
    one that repeats.
    """

    problem: ScheduleProblem
    outcome: Result[ScheduleSolution]
    period: float | None
    time_unit: str = ""

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def status(self) -> Status:
        """How the search ended: optimal, feasible, infeasible or stopped."""
        return self.outcome.status

    @property
    def why(self) -> str:
        """Why it ended so, in a sentence; of an infeasible cap the least that works."""
        return self.outcome.why

    @property
    def objective(self) -> float | None:
        """The makespan where a number of micro-batches is given, else the period."""
        return self.outcome.objective

    @property
    def lower_bound(self) -> float | None:
        """What the objective cannot be below, proven."""
        return self.outcome.lower_bound

    @property
    def gap(self) -> float | None:
        """How far from optimal the objective is at most, as a fraction of it."""
        return self.outcome.gap

    @property
    def makespan(self) -> float | None:
        """The time from 0 to the end of the last block listed in `starts`."""
        return None if self.outcome.solution is None else self.outcome.solution.makespan

    @property
    def starts(self) -> tuple[tuple[int, int, float], ...]:
        """(micro-batch, block, start) of everything that runs."""
        return () if self.outcome.solution is None else self.outcome.solution.starts

    @property
    def num_microbatches(self) -> int:
        """How many are listed: those asked for, or enough to show how the schedule repeats."""
        return len(self.starts) // len(self.problem.blocks)

    @property
    def bubble_rates(self) -> tuple[float, ...]:
        """The share of the makespan that each device is idle."""
        return tuple(1 - share for share in self.timeline().utilisation().tolist())

    @property
    def bubble_rate(self) -> float:
        """The same for all devices together."""
        return sum(self.bubble_rates) / self.problem.num_devices

    @property
    def steady_bubble_rates(self) -> tuple[float, ...] | None:
        """The share of the period that each device is idle; None where no period is known."""
        if self.period is None:
            return None
        return tuple(1 - work / self.period for work in work_per_device(self.problem))

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each device holds."""
        return tuple(int(p) if p == int(p) else p for p in self.timeline().peaks().tolist())

    def program(self) -> Program:
        """The schedule as a program: every lane runs its tasks in the order found."""
        return self.timeline().program

    def timeline(self) -> Timeline:
        """The schedule as a timeline, verified."""
        return self._timeline

    def unroll(self, microbatches: int) -> "ScheduleResult":
        """A schedule that repeats, for any number of micro-batches; costs next to nothing."""
        if self.problem.num_microbatches is not None:
            raise InputError(
                f"the schedule is for {self.problem.num_microbatches} micro-batches",
                fix="schedule without a number of micro-batches, then unroll",
                field="microbatches",
            )
        self._solution()
        problem = asked(self.problem, microbatches=microbatches)
        assert problem.num_microbatches is not None
        solution = problems.unroll(self.problem, self._solution(), problem.num_microbatches)
        bound = problems.lower_bound(problem)
        tight = math.isclose(bound, solution.makespan, rel_tol=TOLERANCE)
        result = replace(
            self.outcome,
            status=Status.OPTIMAL if tight else Status.FEASIBLE,
            solution=solution,
            objective=solution.makespan,
            lower_bound=bound,
            why="a schedule that repeats, continued",
            history=(),
        )
        return _checked(ScheduleResult(problem, result, self.period, self.time_unit))

    def to_json(self) -> dict[str, Any]:
        """The result as a file of format `partita/result@1`."""
        result, there = self.outcome, self.outcome.solution is not None
        return {
            "format": "partita/result@1",
            "problem": self.problem.name,
            "kind": "schedule",
            **result.figures(),
            "period": self.period,
            "makespan": self.makespan,
            "bubble_rates": list(self.bubble_rates) if there else None,
            "peak_memory": list(self.peak_memory) if there else None,
            "solution": None if result.solution is None else result.solution.to_json(),
        }

    def __str__(self) -> str:
        if self.outcome.solution is None:
            return f"no schedule ({self.status}): {self.why}"
        away = "" if self.gap is None else f", at most {self.gap:.1%} from optimal"
        return (
            f"{self.num_microbatches} micro-batches in {self.makespan}, period {self.period}, "
            f"{self.bubble_rate:.1%} idle{away}"
        )

    @cached_property
    def _timeline(self) -> Timeline:
        solution = self._solution()
        count, start = start_column(self.problem, solution.starts)
        order = np.lexsort((np.arange(len(start)), start)).astype(np.int32)
        program = program_of(self.problem, count, order, self.time_unit)
        timeline = Timeline(program, start, start + program.duration)
        check_timeline(program, timeline)
        return timeline

    def _solution(self) -> ScheduleSolution:
        if self.outcome.solution is None:
            raise InputError(
                f"there is no schedule: {self.why}", fix="change the caps or give it more time"
            )
        return self.outcome.solution


def schedule(
    placement: Placement | ScheduleProblem,
    *,
    memory: float | Sequence[float] | None = None,
    microbatches: int | None = None,
    method: str | None = None,
    stop: Stop = UNTIL_DONE,
    seed: int = 0,
) -> ScheduleResult:
    """Find the best order of the micro-batches of a placement under a memory cap.

    `memory` is a cap for all devices or one for each; without one there is no limit. Without
    `microbatches` the schedule repeats for ever, and its period is what is made small.
    """
    if isinstance(placement, Placement):
        problem, unit = placement.problem(memory, microbatches), placement.time_unit
    else:
        problem, unit = asked(placement, memory, microbatches), ""
    result = search_named(method)(problem, stop, seed)
    _check_claims(problem, result)
    period = None if result.solution is None else result.solution.period
    if result.solution is not None and period is None:
        period = _quick_period(problem, stop, seed)
    return _checked(ScheduleResult(problem, result, period, unit))


def search_named(method: str | None) -> ScheduleSearch:
    """The search of this name for schedule problems, or the default one."""
    known = searches("schedule")
    if method is None:
        return next(iter(known.values()))
    if method not in known:
        hint = suggest(method, list(known))
        also = "" if hint.startswith("known") else f" (there is {', '.join(known)})"
        raise InputError(f"found {method!r}", fix=hint + also, field="method")
    return known[method]


def _quick_period(problem: ScheduleProblem, stop: Stop, seed: int) -> float | None:
    """A time per micro-batch that can be kept up for ever, where the search has not looked for one.

    Found with little effort, so it may not be the best; None where there is none.
    """
    if any(problems.memory_per_microbatch(problem)):
        return None  # what a micro-batch leaves behind cannot repeat for ever
    quick = Periodic(effort=_QUICK, unroll_effort=_QUICK)
    forever = replace(problem, num_microbatches=None)
    result = quick(forever, Stop(interrupted=stop.interrupted), seed)
    _check_claims(forever, result)
    return result.objective


def _check_claims(problem: ScheduleProblem, result: Result[ScheduleSolution]) -> None:
    """Refuse an answer that is not one, or that claims more than it is."""
    if result.solution is None:
        return
    solution = result.solution
    violations = problems.check(problem, solution)
    result.check_claims(violations, lambda: problems.evaluate(problem, solution))


def _checked(result: ScheduleResult) -> ScheduleResult:
    """The result, once its program is verified."""
    if result.outcome.solution is not None:
        result.timeline()
    return result
