"""ETF: of all genes that are ready the one that can start first, there.

One placement, at once; Hwang, Chow, Anger and Lee, 1989.
"""

from dataclasses import dataclass

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import UNTIL_DONE, Result, Stop
from partita.search.placement.attempt import Attempt
from partita.search.placement.lists import earliest_start


@dataclass(frozen=True, slots=True)
class Etf:
    """Of all genes that are ready the one that can start first, there."""

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Nothing is random; keeps one valid placement to fall back on."""
        with Attempt(problem, stop, "etf", seed) as attempt:
            net = attempt.net
            if attempt.goes_on():
                built = earliest_start(net)
                if built is not None:
                    attempt.score(built[None, :])
            return attempt.result()
