"""Run CP-SAT under a search's stop rules.

The solver works in a thread of its own, one worker, a fixed seed: the same model gives the same
answers in the same order. This thread waits, hands over every solution and every bound as it comes
(in order, so that what a search reports does not depend on timing), asks the stop rules in between
and stops the solver when one of them holds. `effort` limits the solver's work in its own count
(`max_deterministic_time`, a unit is a second or two), which cuts at the same point every time. An
`Allowance` is what several questions may spend together.
"""

import math
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from partita.search.base import Run

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

LARGE = 2**16  # times from here on are too large for linear relaxations: slow, and not counted
_POLL_S = 0.02
_EFFORTLESS = 1e-3
_CONFLICTS = 20_000  # of the solver are a unit of effort as well: its own count misses cheap ones
_FEWEST = 200
_TO_BEGIN = 2e-3  # what a question costs before the solver counts, in the same unit


class SolverOutcome(Enum):
    """What the solver found out."""

    SOLVED = "solved"  # with an objective: proven optimal
    FEASIBLE = "feasible"  # a solution, not proven optimal
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SolverAnswer:
    """The outcome, and the value of each variable asked for in the last solution handed over."""

    outcome: SolverOutcome
    values: tuple[int, ...] | None = None


@dataclass(slots=True)
class Allowance:
    """What is left to be spent, in the solver's own count of its work."""

    left: float = math.inf

    @property
    def empty(self) -> bool:
        """Is there nothing left?"""
        return self.left <= 0

    def spend(self, effort: float) -> None:
        """Take this off."""
        self.left -= effort


def solve(
    model: "cp_model.CpModel",
    variables: Sequence["cp_model.IntVar"],
    run: Run[Any],
    *,
    effort: float | None = None,
    allowance: Allowance | None = None,
    linear: int = 1,
    on_solution: Callable[[tuple[int, ...]], None] | None = None,
    on_bound: Callable[[float], None] | None = None,
) -> SolverAnswer:
    """Solve, and count it as one evaluation; UNKNOWN at once if run or allowance are done."""
    from ortools.sat.python import cp_model

    if run.done() or (allowance is not None and allowance.empty):
        return SolverAnswer(SolverOutcome.UNKNOWN)
    run.evaluations += 1
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = run.seed % 2**31
    solver.parameters.linearization_level = linear
    solver.parameters.catch_sigint_signal = False
    most = min(math.inf if effort is None else effort, allowance.left if allowance else math.inf)
    if most < math.inf:
        solver.parameters.max_deterministic_time = max(most, _EFFORTLESS)
        solver.parameters.max_number_of_conflicts = max(_FEWEST, int(most * _CONFLICTS))
    if run.stop.time_s is not None:
        solver.parameters.max_time_in_seconds = max(run.stop.time_s - run.seconds, 0.0)
    events: queue.SimpleQueue[tuple[int, ...] | float | None] = queue.SimpleQueue()
    solver.best_bound_callback = events.put
    listener = _listener(variables, events)
    ended: list[Any] = []

    def work() -> None:
        try:
            ended.append(solver.solve(model, listener))
        finally:
            events.put(None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        last, stopped = _listen(events, run, on_solution, on_bound)
    finally:
        while thread.is_alive():  # a stop before the solver has begun is lost
            solver.stop_search()
            thread.join(_POLL_S)
    if allowance is not None:
        spent = max(solver.deterministic_time, solver.num_conflicts / _CONFLICTS) if ended else 0.0
        allowance.spend(_TO_BEGIN + spent)
    return SolverAnswer(_outcome(ended[0] if ended else None, last, stopped), last)


def _listen(
    events: "queue.SimpleQueue[tuple[int, ...] | float | None]",
    run: Run[Any],
    on_solution: Callable[[tuple[int, ...]], None] | None,
    on_bound: Callable[[float], None] | None,
) -> tuple[tuple[int, ...] | None, bool]:
    """Hand over what comes until the solver ends or is to be stopped: the last solution, which."""
    last: tuple[int, ...] | None = None
    while True:
        try:
            event = events.get(timeout=_POLL_S)
        except queue.Empty:
            if _must_stop(run):
                return last, True
            continue
        if event is None:
            return last, False
        if isinstance(event, tuple):
            last = event
            if on_solution is not None:
                on_solution(event)
        elif on_bound is not None:
            on_bound(event)
        if _must_stop(run):
            return last, True


def _must_stop(run: Run[Any]) -> bool:
    """Do the stop rules say so? Evaluations only count between solves."""
    stop = run.stop
    if stop.interrupted() or (stop.time_s is not None and run.seconds >= stop.time_s):
        return True
    if run.objective is None:
        return False
    if stop.target is not None and run.objective <= stop.target:
        return True
    bound = run.lower_bound
    return bound is not None and run.objective - bound <= stop.gap * abs(run.objective)


def _listener(
    variables: Sequence["cp_model.IntVar"],
    events: "queue.SimpleQueue[tuple[int, ...] | float | None]",
) -> "cp_model.CpSolverSolutionCallback":
    from ortools.sat.python import cp_model

    class Listener(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            events.put(tuple(self.value(variable) for variable in variables))

    return Listener()


def _outcome(status: Any, last: tuple[int, ...] | None, stopped: bool) -> SolverOutcome:
    from ortools.sat.python import cp_model

    if status == cp_model.OPTIMAL and not stopped:
        return SolverOutcome.SOLVED
    if status == cp_model.INFEASIBLE:
        return SolverOutcome.INFEASIBLE
    return SolverOutcome.FEASIBLE if last is not None else SolverOutcome.UNKNOWN
