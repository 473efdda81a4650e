"""The default: the best of everything here within the time limit.

Chains cut from several orders come first; small problems are then settled by `exact`'s trees.
Others get many short cycles of annealing (`walk`), most of them from the best so far with little
heat, the hottest from scratch: many short cycles beat few long ones, because each merges other
nodes. The bound is the best of mean, longest node with what it must communicate, and what
devices can hold at most if cuts are paid for (`covers`). Where stages are asked for, they are
annealed in order, and a straight pipeline's compute is proven.
"""

import math
from dataclasses import dataclass, field

from partita.problems.partition import PartitionProblem, PartitionSolution
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.partition.anneal import start
from partita.search.partition.covers import CoverBound, prove_by_covers
from partita.search.partition.ending import answered, ending
from partita.search.partition.exact import TRIED, branch
from partita.search.partition.stage_walk import InOrder, anneal_in_order
from partita.search.partition.straight import prove_straight
from partita.search.partition.walk import AnnealingSchedule, LabelWalk, offer_chains, proven

_HOT = (5e-4, 1e-3, 5e-4, 5e-3)  # per cycle, in turn


@dataclass(frozen=True, slots=True)
class AutoPartition:
    """The best of chains over several orders and annealing from coarse to fine, with a bound."""

    num_orders: int = 6
    max_cuts: int = 700
    num_cycles: int = 100
    patience: int = 6  # cycles without gain before another line is begun
    num_slow: int = 12
    slow_steps_per_node: int = 30_000
    steps_per_node: int = 200
    least_steps: int = 30_000
    most_steps: int = 400_000
    most_tree_nodes: int = 6_000_000
    most_first_tree: int = 300_000
    covers: CoverBound = field(default_factory=CoverBound)
    covers_share: float = 0.3  # of the time that is left when it begins; so the next
    trees_share: float = 0.2
    effort: float = 20.0  # of CP-SAT for a straight pipeline, in its own count

    def __call__(
        self, problem: PartitionProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PartitionSolution]:
        """Search until all cycles are done."""
        run: Run[PartitionSolution] = Run(stop, "auto", seed)
        walk = LabelWalk(problem, run)
        if walk.hopeless:
            return ending(walk)
        offer_chains(walk, self.num_orders, self.max_cuts, seed)
        if not answered(walk):
            return ending(walk)
        if walk.in_order:
            return self._in_order(walk, seed)
        if not proven(run):
            prove_by_covers(walk, self.covers, self.covers_share)
        if branch(walk, self.most_tree_nodes, self.most_first_tree, self.trees_share):
            return run.result(Status.OPTIMAL, TRIED)
        self._cycles(walk, seed)
        if run.stop.time_s is not None and not run.done():  # time is left: prove with all of it
            prove_by_covers(walk, self.covers, 0.5)
            if branch(walk, self.most_tree_nodes):
                return run.result(Status.OPTIMAL, TRIED)
        return ending(walk)

    def _in_order(self, walk: LabelWalk, seed: int) -> Result[PartitionSolution]:
        """Prove what is proven quickly, anneal stages in order, prove again, anneal again."""
        prove_straight(walk, self.effort / 10)
        anneal_in_order(walk, InOrder(restarts=1), seed)
        if not proven(walk.run):
            prove_straight(walk, self.effort)
        anneal_in_order(walk, InOrder(restarts=6), seed + 1)
        return ending(walk)

    def _cycles(self, walk: LabelWalk, seed: int) -> None:
        """Cycles from the best of a line, which begins with the best of all or from scratch."""
        run, num_nodes = walk.run, walk.net.num_nodes
        if num_nodes <= 16 * walk.net.num_devices:  # little to coarsen: cool slowly
            slow = AnnealingSchedule(self.slow_steps_per_node * num_nodes, 1e-2, cold=2e-4)
            for index in range(self.num_slow):
                if not run.done() and not proven(run):
                    walk.cycle(None, slow, seed + 7919 * index)
            return
        steps = min(self.most_steps, max(self.least_steps, self.steps_per_node * num_nodes))
        line, line_ms, idle, from_scratch = walk.labels, math.inf, 0, False
        for index in range(self.num_cycles):
            if run.done() or proven(run):
                return
            if idle == self.patience:
                from_scratch = not from_scratch
                line, line_ms, idle = None if from_scratch else walk.labels, math.inf, 0
            hot = 2e-2 if line is None else _HOT[index % len(_HOT)]
            cycle = walk.cycle(line, AnnealingSchedule(steps, hot, cold=2e-5), seed + 7919 * index)
            if cycle is None:
                return
            found_ms = float(start(walk.net, cycle, 0).best_ms[0])
            idle = idle + 1 if found_ms >= line_ms else 0
            if found_ms < line_ms or line is None:
                line, line_ms = cycle, found_ms
