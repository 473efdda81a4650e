"""HEFT: genes by falling rank, each where it ends first.

The rank is the mean time to the end of the network. One placement, at once; Topcuoglu, Hariri and
Wu, 2002.
"""

from dataclasses import dataclass

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import UNTIL_DONE, Result, Stop
from partita.search.placement.attempt import Attempt
from partita.search.placement.lists import by_rank, earliest_end


@dataclass(frozen=True, slots=True)
class Heft:
    """Genes by falling rank (time to the end of the network), each where it ends first."""

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Nothing is random; keeps one valid placement to fall back on."""
        with Attempt(problem, stop, "heft", seed) as attempt:
            net = attempt.net
            if attempt.goes_on():
                built = by_rank(net, earliest_end)
                if built is not None:
                    attempt.score(built[None, :])
            return attempt.result()
