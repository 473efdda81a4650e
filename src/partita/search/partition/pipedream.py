"""PipeDream's planner over several topological orders: the best contiguous cut of each.

`chain` cuts the model's own order; models with branches have many orders, and another may cut
better. Depth-first orders, see `orders`; PipeDream: Narayanan et al., SOSP 2019.
"""

from dataclasses import dataclass

from partita.problems.partition import PartitionProblem, PartitionSolution
from partita.search.base import UNTIL_DONE, Result, Run, Stop
from partita.search.partition.ending import ending
from partita.search.partition.walk import LabelWalk, offer_chains


@dataclass(frozen=True, slots=True)
class PipeDream:
    """Cuts several topological orders into contiguous blocks, one per device."""

    num_orders: int = 12
    max_cuts: int = 1000

    def __call__(
        self, problem: PartitionProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PartitionSolution]:
        """Search until every order was cut."""
        run: Run[PartitionSolution] = Run(stop, "pipedream", seed)
        walk = LabelWalk(problem, run)
        if not walk.hopeless:
            offer_chains(walk, self.num_orders, self.max_cuts, seed)
        return ending(walk)
