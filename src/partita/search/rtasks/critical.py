"""`list`: the fastest tile of every operator, placed by how urgent it is, without barriers."""

from collections.abc import Callable
from dataclasses import dataclass

from partita.problems.rtasks import (
    ROperator,
    RtasksProblem,
    RtasksSolution,
    Tiling,
    evaluate,
    lower_bound,
    programs_per_unit,
)
from partita.search.base import UNTIL_DONE, Result, Run, Stop
from partita.search.rtasks.lists import RTaskArrays, list_schedule, urgency


def fastest(problem: RtasksProblem) -> tuple[int, ...]:
    """For every operator the tiling whose whole grid is done first by itself."""
    return tuple(
        best(problem, op, lambda tiling: alone_us(problem, tiling)) for op in problem.operators
    )


def best(problem: RtasksProblem, operator: ROperator, cost: Callable[[Tiling], float]) -> int:
    """The cheapest tiling that can be resident; the first of equal ones."""
    fitting = (i for i, t in enumerate(operator.tilings) if programs_per_unit(problem.device, [t]))
    return min(fitting, key=lambda i: (cost(operator.tilings[i]), i))


def alone_us(problem: RtasksProblem, tiling: Tiling) -> float:
    """How long all tiles take on the whole device."""
    places = problem.device.num_units * programs_per_unit(problem.device, [tiling])
    return -(tiling.num_tiles // -places) * tiling.tile_us


@dataclass(frozen=True)
class CriticalPathList:
    """One pass of list scheduling, the most urgent tile first."""

    def __call__(
        self, problem: RtasksProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[RtasksSolution]:
        """Place every tile once."""
        run: Run[RtasksSolution] = Run(stop, "list", seed)
        run.bound(lower_bound(problem))
        if not run.done():
            run.evaluations += 1
            tilings = fastest(problem)
            _, solution = list_schedule(
                problem, RTaskArrays.of(problem), tilings, urgency(problem, tilings)
            )
            run.offer(solution, evaluate(problem, solution))
        return run.result()
