"""The contract of every search: `(problem, stop, seed) -> Result`.

A search is any callable of that shape; its settings are its fields. It keeps the best answer it
has, reports each improvement to its `Run`, asks the run whether to go on, and returns a `Result`
with a proven lower bound, weak or strong. Stopping early is not an error: the result says why.

    run = Run(stop, "hill", seed)
    for candidate in ...:
        if run.done():
            break
        run.offer(candidate, cost)
    return run.result()
"""

import gc
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from partita.compiled import work_clock
from partita.errors import VerificationError
from partita.showing import plot_of, repr_html, table_of

P = TypeVar("P", contravariant=True)
PROVEN_GAP = 1e-9  # so near, an answer is called optimal
TOLERANCE = 1e-9  # relative; sums in another order round differently
ROUNDING = 1e-11  # so near, bound and objective are the same number
S = TypeVar("S")
RECORDS_MADE = (1_000_000, 10, 10)  # between two looks for garbage, while a search goes on


class _Collecting:
    """Searches that go on in this process, and what Python's collector did before the first."""

    lock = threading.Lock()
    searches = 0
    thresholds = (0, 0, 0)


@contextmanager
def fewer_collections() -> Iterator[None]:
    """While a search goes on, look for cyclic garbage more seldom: also as a decorator.

    Searches make millions of records that have no cycles, and walking all of them every few
    hundred is a seventh of the time of a large plan. Nothing is freed later but cycles.
    """
    with _Collecting.lock:
        if not _Collecting.searches:
            _Collecting.thresholds = gc.get_threshold()
            if _Collecting.thresholds[0]:  # else somebody has turned it off
                gc.set_threshold(*map(max, _Collecting.thresholds, RECORDS_MADE))
        _Collecting.searches += 1
    try:
        yield
    finally:
        with _Collecting.lock:
            _Collecting.searches -= 1
            if not _Collecting.searches:
                gc.set_threshold(*_Collecting.thresholds)


class Status(StrEnum):
    """How a search ended."""

    OPTIMAL = "optimal"  # proven: objective = lower bound within rounding
    FEASIBLE = "feasible"  # a valid answer from a method that does not prove more
    INFEASIBLE = "infeasible"  # proven: there is no valid answer
    STOPPED = "stopped"  # cut short by a stop rule; best so far, if any


@dataclass(frozen=True, slots=True)
class Improvement:
    """One step of the search's history: a better answer, or a better bound."""

    seconds: float
    objective: float | None
    lower_bound: float | None
    evaluations: int


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Stop:
    """When to stop: whichever rule comes first. `None` means no such rule.

    `gap` is relative: (objective - lower bound) / objective. `interrupted` is asked between
    steps; the command line passes one that Ctrl-C sets. `progress` is told every improvement.
    """

    time_s: float | None = None
    gap: float = 0.0
    target: float | None = None
    evaluations: int | None = None
    interrupted: Callable[[], bool] = _never
    progress: Callable[[Improvement], None] | None = None


@dataclass(frozen=True, slots=True)
class Result(Generic[S]):
    """What every search returns. `objective` and `solution` are None where there is no answer."""

    method: str
    status: Status
    solution: S | None
    objective: float | None
    lower_bound: float | None
    why: str
    seconds: float
    seed: int
    evaluations: int = 0
    history: tuple[Improvement, ...] = ()

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def gap(self) -> float | None:
        """How far from optimal at most, as a fraction of the objective."""
        return relative_gap(self.objective, self.lower_bound)

    def figures(self) -> dict[str, Any]:
        """What a file of format `partita/result@1` says of the search itself."""
        return {
            "method": self.method,
            "status": str(self.status),
            "objective": self.objective,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "seconds": self.seconds,
            "seed": self.seed,
            "why": self.why,
            "evaluations": self.evaluations,
        }

    def check_claims(self, violations: Sequence[str], evaluate: Callable[[], float]) -> None:
        """Refuse a solution that breaks rules, or an objective or bound that it does not have."""
        said = list(violations)
        if not said:
            objective, bound = evaluate(), self.lower_bound
            claimed = math.nan if self.objective is None else self.objective
            if not math.isclose(claimed, objective, rel_tol=TOLERANCE):
                said.append(f"the objective is {objective}, and {self.objective} is claimed")
            if bound is not None and bound > objective + TOLERANCE * abs(objective):
                said.append(f"the lower bound {bound} is above the objective {objective}")
        if said:
            raise VerificationError(tuple(said))


UNTIL_DONE = Stop()  # no limit: the search ends when it has nothing left to do


class Search(Protocol[P, S]):
    """Any callable of this shape is a search."""

    def __call__(self, problem: P, stop: Stop = UNTIL_DONE, seed: int = 0) -> Result[S]:
        """Search until done or stopped; deterministic for a seed."""
        ...


def relative_gap(objective: float | None, lower_bound: float | None) -> float | None:
    """(objective - bound) / |objective|; None where one is missing, 0 where they agree."""
    if objective is None or lower_bound is None:
        return None
    if objective <= lower_bound:
        return 0.0
    return (objective - lower_bound) / abs(objective) if objective else math.inf


class Run(Generic[S]):
    """The state of one running search: clock, best answer, best bound, history."""

    def __init__(self, stop: Stop, method: str, seed: int) -> None:
        self.stop = stop
        self.method = method
        self.seed = seed
        self.started = work_clock()
        self.solution: S | None = None
        self.objective: float | None = None
        self.lower_bound: float | None = None
        self.evaluations = 0
        self.history: list[Improvement] = []

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return work_clock() - self.started

    def offer(self, solution: S, objective: float) -> bool:
        """Keep `solution` if it is strictly better than what we have; True if kept."""
        if self.objective is not None and objective >= self.objective:
            return False
        self.solution, self.objective = solution, objective
        self._record()
        return True

    def bound(self, lower_bound: float) -> None:
        """Raise the proven lower bound; a weaker one than known changes nothing."""
        if self.lower_bound is None or lower_bound > self.lower_bound:
            self.lower_bound = lower_bound
            self._record()

    def done(self) -> bool:
        """Should the search stop now?"""
        return self.reason() is not None

    def reason(self) -> str | None:
        """Which stop rule holds now, in words; None while the search may go on."""
        stop = self.stop
        if stop.interrupted():
            return "interrupted"
        if stop.time_s is not None and self.seconds >= stop.time_s:
            return f"the time limit of {stop.time_s:g} s is used up"
        if stop.evaluations is not None and self.evaluations >= stop.evaluations:
            return f"{stop.evaluations:,} evaluations are used up"
        if self.objective is not None:
            if stop.target is not None and self.objective <= stop.target:
                return f"the target of {stop.target:g} is reached"
            gap = relative_gap(self.objective, self.lower_bound)
            if gap is not None and gap <= ROUNDING:
                return "the lower bound is reached"
            if gap is not None and gap <= stop.gap:
                return f"within the asked gap of {stop.gap:.2%}"
        return None

    def result(self, status: Status | None = None, why: str = "") -> Result[S]:
        """Close the run. Without a status: optimal if bound and objective meet, else stopped."""
        reason = self.reason()
        if status is None:
            gap = relative_gap(self.objective, self.lower_bound)
            if gap is not None and gap <= PROVEN_GAP:
                status = Status.OPTIMAL
            else:
                status = Status.STOPPED if reason else Status.FEASIBLE
        return Result(
            method=self.method,
            status=status,
            solution=self.solution,
            objective=self.objective,
            lower_bound=self.objective if status is Status.OPTIMAL else self.lower_bound,
            why=why or reason or "the method ran to its end",
            seconds=self.seconds,
            seed=self.seed,
            evaluations=self.evaluations,
            history=tuple(self.history),
        )

    def _record(self) -> None:
        step = Improvement(self.seconds, self.objective, self.lower_bound, self.evaluations)
        self.history.append(step)
        if self.stop.progress is not None:
            self.stop.progress(step)
