"""What every placement search does besides searching: open, count, evaluate, keep, close.

    with Attempt(problem, stop, "random", seed) as attempt:
        while attempt.goes_on():
            attempt.score(placements)       # evaluates the rows, keeps the best
    return attempt.result()

An attempt begins with one valid placement, if there is one; without one it is over at once. It
never makes more evaluations than the stop rule allows, looks at the rules about fifty times a
second, and evaluates on all cores. How many evaluations go between two looks depends on the size
of the problem only, so that a seed always gives the same history.
"""

from types import TracebackType

import numpy as np

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import PROVEN_GAP, Result, Run, Status, Stop, relative_gap
from partita.search.placement.bounds import lower_bound
from partita.search.placement.fastsim import MAKESPAN, PEAKS, SCORE, Pool
from partita.search.placement.feasible import joined, valid_placement
from partita.search.placement.tables import F64, I64, tables

_EVENT_S = 4e-8  # about what one simulated event takes
_EVENTS_PER_JOB = 2.5
_LOOK_S = 0.02
EFFORT_S = 10.0  # without a limit: about so long on one core
FEW_CHOICES = 64  # layers times devices of a problem that is worth no compiling


def usual_evaluations(
    num_layers: int, num_devices: int, batches: int, effort_s: float = EFFORT_S
) -> int:
    """How many evaluations a problem is worth where nobody sets a limit: by its size alone."""
    choices = num_layers * num_devices
    most = (100 if choices <= FEW_CHOICES else 2000) * choices
    return max(1, min(int(effort_s / _evaluation_s(num_layers, batches)), most))


def _evaluation_s(num_layers: int, batches: int) -> float:
    return 2 * num_layers * batches * _EVENTS_PER_JOB * _EVENT_S


class Attempt:
    """One search on one problem, from its opening to its result.

    It ends where nothing can be better, unless others than the best are wanted, too (`archives`).
    """

    def __init__(
        self, problem: PlacementProblem, stop: Stop, method: str, seed: int, archives: bool = False
    ) -> None:
        self.problem, self.archives = problem, archives
        self.run: Run[PlacementSolution] = Run(stop, method, seed)
        self.net = tables(problem)
        self.pool = Pool(self.net)
        self.opening = valid_placement(problem, self.net)
        self.run.bound(lower_bound(problem, self.net))
        self.makespan_ms, self.peaks_bytes = 0.0, np.zeros(len(problem.devices))
        self.ended = ""  # why the method itself came to an end
        self.evaluation_s = _evaluation_s(len(problem.layers), problem.batches)
        self.chunk = max(1, min(2000, int(_LOOK_S / self.evaluation_s)))
        if self.opening.placement is not None and self.goes_on():
            self.score(self.opening.placement[None, :])

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.pool.__exit__(kind, error, _)

    def goes_on(self) -> bool:
        """May the search go on?"""
        is_done = self.run.done() or (self.is_proven and not self.archives)
        return self.opening.placement is not None and not is_done

    @property
    def is_proven(self) -> bool:
        """Is nothing better but by rounding? Bounds are a little below what they are made of."""
        gap = relative_gap(self.run.objective, self.run.lower_bound)
        return gap is not None and gap <= PROVEN_GAP

    @property
    def left(self) -> int:
        """How many evaluations the stop rule still allows."""
        most = self.run.stop.evaluations
        return 2**62 if most is None else max(0, most - self.run.evaluations)

    def score(self, placements: I64) -> F64:
        """The score of every row; infinite where it is invalid, or was not looked at in time."""
        return self.details(placements)[:, SCORE]

    def details(self, placements: I64) -> F64:
        """Rows as `fastsim.Pool.details` gives them; infinite where not looked at in time."""
        details = np.full((len(placements), PEAKS + len(self.net.limit_bytes)), np.inf)
        begin, step = 0, self.chunk * self.pool.num_threads
        while begin < len(placements) and self.goes_on():
            end = min(begin + step, len(placements), begin + self.left)
            details[begin:end] = self.pool.details(placements[begin:end])
            self.run.evaluations += end - begin
            self._keep_best(placements[begin:end], details[begin:end])
            begin = end
        return details

    def _keep_best(self, placements: I64, array: F64) -> None:
        best = int(array[:, SCORE].argmin())
        if np.isfinite(array[best, SCORE]):
            self._offer(placements[best], array[best])

    def offer(self, placement: I64, score: float) -> None:
        """Keep what a walk found, if it is the best; its evaluation has been counted."""
        if self.run.objective is None or score < self.run.objective:
            self._offer(placement, self.pool.details(placement[None, :])[0])

    def _offer(self, placement: I64, row: F64) -> None:
        if self.run.offer(PlacementSolution(tuple(placement.tolist())), float(row[SCORE])):
            self.makespan_ms, self.peaks_bytes = float(row[MAKESPAN]), row[PEAKS:].copy()

    @property
    def best(self) -> I64:
        """The best placement so far."""
        assert self.run.solution is not None
        return np.array(self.run.solution.placement, np.int64)

    @property
    def best_score(self) -> float:
        """The score of the best placement so far."""
        return np.inf if self.run.objective is None else self.run.objective

    def result(self, status: Status | None = None, why: str = "") -> Result[PlacementSolution]:
        """Close the attempt; the sentence says what memory or missing routes stand against."""
        if self.opening.placement is None:
            status = Status.INFEASIBLE if self.opening.proven else Status.STOPPED
            return self.run.result(status, self.opening.why)
        if self.is_proven and not why:
            why = "the lower bound is reached"
        result = self.run.result(status, why)
        notes = [result.why, *self._alone(), *self._over()]
        return self.run.result(result.status, "; ".join(notes)) if len(notes) > 1 else result

    def _alone(self) -> list[str]:
        """Devices that can share no layers with any other."""
        near = joined(self.net)
        alone = np.flatnonzero(near.sum(axis=1) == 1).tolist() if len(near) > 1 else []
        return [f"device {device} has no route to any other and back" for device in alone]

    def _over(self) -> list[str]:
        """The device whose limit is exceeded most."""
        over = self.peaks_bytes - self.net.limit_bytes
        if self.run.solution is None or not (over > 0).any():
            return []
        worst = int(over.argmax())
        return [
            f"memory does not suffice: device {worst} holds {self.peaks_bytes[worst] / 1e9:.3g} "
            f"GB, its limit is {self.net.limit_bytes[worst] / 1e9:.3g} GB"
        ]
