"""Tries every solution of a joint problem: the oracle of the other methods.

Every cell, every schedule that is there for it, all cuts, and on each layer range every strategy
with every checkpointing. evaluations: cells x schedules x cuts x options ^ stages.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from partita.problems.joint import (
    Cell,
    FlightKey,
    JointProblem,
    JointSolution,
    StageChoice,
    check,
    evaluate,
    lower_bound,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop


@dataclass(frozen=True, slots=True)
class Brute:
    """Tries every solution; for tiny problems and as an oracle."""

    def __call__(
        self, problem: JointProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[JointSolution]:
        """Search until every solution was tried."""
        run: Run[JointSolution] = Run(stop, "brute", seed)
        for solution in solutions(problem):
            if run.done():
                run.bound(lower_bound(problem))  # not earlier: an oracle trusts no bound
                return run.result()
            run.evaluations += 1
            if not check(problem, solution):
                run.offer(solution, evaluate(problem, solution))
        if run.solution is None:
            why = f"none of {run.evaluations:,} solutions keeps to the memory budgets"
            return run.result(Status.INFEASIBLE, why)
        return run.result(Status.OPTIMAL, f"all {run.evaluations:,} solutions were tried")


def solutions(problem: JointProblem) -> Iterator[JointSolution]:
    """Every solution, whether it fits or not."""
    for cell, schedule in _orders(problem):
        p = problem.groupings[cell.grouping].num_groups
        known = problem.schedules[schedule]
        count = p * known.virtual_stages
        groups = [known.group_of(k, p) for k in range(count)]
        options = [_options(problem, cell, group) for group in range(p)]
        for inner in itertools.combinations(range(1, problem.num_segments), count - 1):
            ends = (0, *inner, problem.num_segments)
            for chosen in itertools.product(*(options[group] for group in groups)):
                yield JointSolution(
                    cell,
                    schedule,
                    tuple(
                        StageChoice(a, b, *option)
                        for (a, b), option in zip(itertools.pairwise(ends), chosen, strict=True)
                    ),
                )


def num_solutions(problem: JointProblem) -> float:
    """How many solutions there are, whether they fit or not."""
    total = 0.0
    for cell, schedule in _orders(problem):
        p = problem.groupings[cell.grouping].num_groups
        chunks = problem.schedules[schedule].virtual_stages
        ways = math.prod(len(_options(problem, cell, group)) ** chunks for group in range(p))
        total += math.comb(problem.num_segments - 1, p * chunks - 1) * ways
    return total


def _orders(problem: JointProblem) -> Iterator[tuple[Cell, int]]:
    """Cells with the schedules that are there for them and find enough segments."""
    for cell in problem.cells:
        p = problem.groupings[cell.grouping].num_groups
        for schedule, known in enumerate(problem.schedules):
            short = p * known.virtual_stages > problem.num_segments
            if not short and problem.in_flight.get(FlightKey(schedule, p, cell.num_microbatches)):
                yield cell, schedule


def _options(problem: JointProblem, cell: Cell, group: int) -> list[tuple[int, int, str]]:
    return [
        (number, index, checkpointing)
        for number, mesh in enumerate(problem.meshes_of(cell, group))
        for index, strategy in enumerate(problem.strategies[problem.key(cell, group, mesh)])
        for checkpointing in problem.options(strategy)
    ]
