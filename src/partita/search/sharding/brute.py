"""Tries every combination of choices: the oracle of the other searches, for tiny problems.

evaluations: the product of the numbers of choices
"""

import itertools
import math
from dataclasses import dataclass

from partita.problems.sharding import (
    ShardingProblem,
    ShardingSolution,
    check,
    evaluate,
    lower_bound,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop


@dataclass(frozen=True, slots=True)
class BruteSharding:
    """Tries every combination of choices; for tiny problems and as oracle."""

    def __call__(
        self, problem: ShardingProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[ShardingSolution]:
        """Search until every combination was tried."""
        run: Run[ShardingSolution] = Run(stop, "brute", seed)
        for choices in itertools.product(*map(range, problem.num_choices)):
            if run.done():
                return _stopped(run, problem)
            solution = ShardingSolution(choices)
            run.evaluations += 1
            if not check(problem, solution):
                run.offer(solution, evaluate(problem, solution))
        tried = f"all {run.evaluations:,} combinations were tried"
        if run.solution is None:
            return run.result(Status.INFEASIBLE, f"{tried}, and each is forbidden")
        return run.result(Status.OPTIMAL, tried)


def _stopped(run: Run[ShardingSolution], problem: ShardingProblem) -> Result[ShardingSolution]:
    """The best so far, with a bound that is asked for only now: an oracle trusts none."""
    bound = lower_bound(problem)
    if bound == math.inf:
        return run.result(Status.INFEASIBLE, "an op is left with forbidden choices only")
    run.bound(bound)
    return run.result()
