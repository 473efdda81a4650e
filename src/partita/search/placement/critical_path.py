"""CPOP: the longest path on its fastest device, the rest by rank.

One placement, at once; Topcuoglu, Hariri and Wu, 2002.
"""

from dataclasses import dataclass

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import UNTIL_DONE, Result, Stop
from partita.search.placement.attempt import Attempt
from partita.search.placement.lists import critical_path


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The longest path on its fastest device, the rest by rank where it ends first."""

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Nothing is random; keeps one valid placement to fall back on."""
        with Attempt(problem, stop, "critical-path", seed) as attempt:
            net = attempt.net
            if attempt.goes_on():
                built = critical_path(net)
                if built is not None:
                    attempt.score(built[None, :])
            return attempt.result()
