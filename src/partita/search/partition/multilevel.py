"""Coarsening by matching and annealing while uncoarsening, again and again from scratch.

After every cycle from scratch a second one starts from its answer with little heat: it merges only
nodes that are together, so that whole groups can move once more (iterated multilevel partitioning;
Walshaw 2004). Acyclicity needs no care while merging: the stages are made from the devices.
"""

from dataclasses import dataclass

from partita.problems.partition import PartitionProblem, PartitionSolution
from partita.search.base import UNTIL_DONE, Result, Run, Stop
from partita.search.partition.ending import answered, ending
from partita.search.partition.stage_walk import InOrder, anneal_in_order
from partita.search.partition.walk import AnnealingSchedule, LabelWalk, proven


@dataclass(frozen=True, slots=True)
class Multilevel:
    """Coarsens, anneals and refines; several restarts."""

    restarts: int = 4
    steps_per_node: int = 500
    most_steps: int = 1_000_000

    def __call__(
        self, problem: PartitionProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PartitionSolution]:
        """Search until all restarts are done."""
        run: Run[PartitionSolution] = Run(stop, "multilevel", seed)
        walk = LabelWalk(problem, run)
        if not answered(walk):
            return ending(walk)
        if walk.in_order:
            anneal_in_order(walk, InOrder(restarts=2), seed)
            return ending(walk)
        walk.count_and_offer([0] * walk.net.num_nodes)
        steps = min(self.most_steps, self.steps_per_node * walk.net.num_nodes)
        for index in range(self.restarts):
            if run.done() or proven(run):
                break
            cycle = walk.cycle(None, AnnealingSchedule(steps, 2e-2), seed + 7919 * index)
            if cycle is not None:
                walk.cycle(cycle, AnnealingSchedule(steps, 1e-3), seed + 7919 * index + 1)
        return ending(walk)
