"""Every placement there is, for tiny problems: devices ** layers simulations."""

import itertools
from dataclasses import dataclass

from partita.problems.placement import (
    PlacementProblem,
    PlacementSolution,
    check,
    evaluate,
    lower_bound,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop


@dataclass(frozen=True, slots=True)
class BrutePlacement:
    """Tries every placement; for a handful of layers."""

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Optimal when it ends; nothing is random."""
        run: Run[PlacementSolution] = Run(stop, "brute", seed)
        run.bound(lower_bound(problem))
        devices = range(len(problem.devices))
        for placement in itertools.product(devices, repeat=len(problem.layers)):
            if run.done():
                return run.result()
            solution = PlacementSolution(placement)
            if not check(problem, solution):
                run.evaluations += 1
                run.offer(solution, evaluate(problem, solution))
        if run.solution is None:
            return run.result(Status.INFEASIBLE, "every placement was tried, and none is valid")
        return run.result(Status.OPTIMAL, "every placement was tried")
