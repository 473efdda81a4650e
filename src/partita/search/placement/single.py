"""The best device for all layers, then the best cuts between devices: a baseline.

All layers on one device need no route and no transfer, so this always has an answer. Then runs of
neighbouring layers are moved: starting from the best device, each device in turn is offered every
run of layers [begin, end) with ends a step apart, and the best placement is kept. One round costs
O(devices * cuts ** 2) simulations.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from partita.problems.placement import (
    PlacementProblem,
    PlacementSolution,
    check,
    evaluate,
    lower_bound,
)
from partita.search.base import UNTIL_DONE, Result, Run, Stop


@dataclass(frozen=True, slots=True)
class Single:
    """Puts all layers on the best device, then moves runs of layers to others where that helps."""

    cuts: int = 12  # places between layers at which a run may begin or end

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Stops when no run of layers is better elsewhere; nothing is random."""
        run: Run[PlacementSolution] = Run(stop, "single", seed)
        run.bound(lower_bound(problem))
        for device in range(len(problem.devices)):
            if run.done():
                return run.result()
            _try(problem, run, (device,) * len(problem.layers))
        better = True
        while better:
            better = False
            for placement in self._moved(problem, run):
                if run.done():
                    return run.result()
                better = _try(problem, run, placement) or better
        return run.result()

    def _moved(
        self, problem: PlacementProblem, run: Run[PlacementSolution]
    ) -> Iterator[tuple[int, ...]]:
        """The best placement with one run of layers on one device, for all runs and devices."""
        size = len(problem.layers)
        places = sorted({round(cut * size / self.cuts) for cut in range(self.cuts + 1)})
        for device in range(len(problem.devices)):
            for begin in places:
                for end in places:
                    if begin < end and run.solution is not None:
                        best = run.solution.placement
                        moved = best[:begin] + (device,) * (end - begin) + best[end:]
                        if moved != best:
                            yield moved


def _try(
    problem: PlacementProblem, run: Run[PlacementSolution], placement: tuple[int, ...]
) -> bool:
    """Offer the placement if there are routes for it; True if it is the best so far."""
    solution = PlacementSolution(placement)
    if check(problem, solution):
        return False
    run.evaluations += 1
    return run.offer(solution, evaluate(problem, solution))
