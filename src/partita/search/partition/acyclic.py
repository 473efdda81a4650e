"""Local search that keeps the stages acyclic: annealing of stages in pipeline order.

Begins with the best cuts of several topological orders, one stage per device, and goes on with
moves that respect every edge, for one and for several stages per device (after Moreira et al.,
Graph partitioning with acyclicity constraints, SEA 2017, who climb; FTPipe's `acyclic` does so).
"""

from dataclasses import dataclass

from partita.problems.partition import PartitionProblem, PartitionSolution
from partita.search.base import UNTIL_DONE, Result, Run, Stop
from partita.search.partition.ending import answered, ending
from partita.search.partition.stage_walk import InOrder, anneal_in_order
from partita.search.partition.walk import LabelWalk, offer_chains


@dataclass(frozen=True, slots=True)
class Acyclic:
    """Anneals stages in pipeline order, one and more per device; several restarts."""

    num_orders: int = 4
    max_cuts: int = 700
    restarts: int = 4

    def __call__(
        self, problem: PartitionProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PartitionSolution]:
        """Search until all restarts are done."""
        walk = LabelWalk(problem, Run(stop, "acyclic", seed))
        if not walk.hopeless:
            offer_chains(walk, self.num_orders, self.max_cuts, seed)
        if answered(walk):
            anneal_in_order(walk, InOrder(self.restarts), seed)
        return ending(walk)
