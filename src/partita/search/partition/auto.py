"""The default: the best of everything here within the time limit.

Chains cut from several orders come first; tiny problems are then settled by `exact`'s tree. Others
get many short cycles of annealing (`walk`), most of them from the best so far with little heat, the
hottest from scratch: many short cycles beat few long ones, because each merges other nodes. The
bound is the better of mean and longest node with what the longest node must communicate.
"""

from dataclasses import dataclass

from partita.problems.partition import PartitionProblem, PartitionSolution
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.partition.bounds import communication_bound
from partita.search.partition.exact import TRIED, branch
from partita.search.partition.walk import Schedule, Walk, offer_chains, proven

_HOT = (5e-4, 1e-3, 5e-4, 5e-3, 5e-4, 1e-3, 5e-4, 2e-2)  # per cycle, in turn


@dataclass(frozen=True, slots=True)
class Auto:
    """The best of chains over several orders and annealing from coarse to fine, with a bound."""

    num_orders: int = 6
    max_cuts: int = 700
    num_cycles: int = 100
    num_slow: int = 12
    slow_steps_per_node: int = 30_000
    steps_per_node: int = 200
    least_steps: int = 30_000
    most_steps: int = 400_000
    most_tree_nodes: int = 1_000_000

    def __call__(
        self, problem: PartitionProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PartitionSolution]:
        """Search until all cycles are done."""
        run: Run[PartitionSolution] = Run(stop, "auto", seed)
        walk = Walk(problem, run)
        run.bound(communication_bound(problem, walk.net))
        offer_chains(walk, self.num_orders, self.max_cuts, seed)
        if branch(walk, self.most_tree_nodes):
            return run.result(Status.OPTIMAL, TRIED)
        small = walk.net.num_nodes <= 16 * walk.net.num_devices  # little to coarsen: cool slowly
        steps = max(self.least_steps, self.steps_per_node * walk.net.num_nodes)
        steps = min(self.most_steps, steps)
        for index in range(self.num_slow if small else self.num_cycles):
            if run.done() or proven(run):
                break
            hot = _HOT[index % len(_HOT)]
            fresh = small or hot == max(_HOT)
            schedule = Schedule(steps, hot, cold=2e-5)
            if small:
                schedule = Schedule(self.slow_steps_per_node * walk.net.num_nodes, 1e-2, cold=2e-4)
            walk.cycle(None if fresh else walk.labels, schedule, seed + 7919 * index)
        return run.result()
