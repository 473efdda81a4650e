"""The default: the best of everything here within the time limit.

Chains cut from several orders come first; small problems are then settled by `exact`'s trees.
Others get many short cycles of annealing (`walk`), which fill a pool of good labellings and make it
better (`pool`). The bound is the best of mean, longest node with what it must communicate, and what
devices can hold at most if cuts are paid for (`covers`). Where stages are asked for, they are
annealed in order, and a straight pipeline's compute is proven.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from partita.problems.partition import PartitionProblem, PartitionSolution
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.partition.covers import CoverBound, prove_by_covers
from partita.search.partition.ending import answered, ending
from partita.search.partition.exact import TRIED, branch
from partita.search.partition.pool import LabelPool, PooledCycles
from partita.search.partition.stage_walk import InOrder, anneal_in_order
from partita.search.partition.straight import prove_straight
from partita.search.partition.walk import AnnealingSchedule, LabelWalk, offer_chains, proven


@dataclass(frozen=True, slots=True)
class AutoPartition:
    """The best of chains over several orders and annealing from coarse to fine, with a bound."""

    num_orders: int = 6
    max_cuts: int = 700
    num_cycles: int = 100
    num_slow: int = 12
    slow_steps_per_node: int = 30_000
    pool: LabelPool = field(default_factory=LabelPool)
    most_tree_nodes: int = 6_000_000
    most_first_tree: int = 300_000
    covers: CoverBound = field(default_factory=CoverBound)
    covers_share: float = 0.2  # of the time that is left when it begins; so the next ones
    trees_share: float = 0.1
    cycles_share: float = 0.6
    covers_again: float = 0.9
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
        pool = PooledCycles(walk, self.pool, seed)
        little = walk.net.num_nodes <= 16 * walk.net.num_devices

        def cycles(seed: int, done: Callable[[], bool]) -> None:
            if little:
                self._slow_cycles(walk, seed, done)
            else:
                pool.run(self.num_cycles, done)

        cycles(seed, walk.done_after(self.cycles_share))
        if run.stop.time_s is not None and not run.done():  # time is left: prove with the best
            prove_by_covers(walk, self.covers, self.covers_again)
            if branch(walk, self.most_tree_nodes, self.most_first_tree):
                return run.result(Status.OPTIMAL, TRIED)
            cycles(seed + 1, run.done)
        return ending(walk)

    def _in_order(self, walk: LabelWalk, seed: int) -> Result[PartitionSolution]:
        """Prove what is proven quickly, anneal stages in order, prove again, anneal again."""
        prove_straight(walk, self.effort / 10)
        anneal_in_order(walk, InOrder(restarts=1), seed)
        if not proven(walk.run):
            prove_straight(walk, self.effort)
        anneal_in_order(walk, InOrder(restarts=6), seed + 1)
        return ending(walk)

    def _slow_cycles(self, walk: LabelWalk, seed: int, done: Callable[[], bool]) -> None:
        """There is little to coarsen: cool slowly, each time from scratch."""
        steps = self.slow_steps_per_node * walk.net.num_nodes
        slow = AnnealingSchedule(steps, 1e-2, cold=2e-4)
        for index in range(self.num_slow):
            if not done() and not proven(walk.run):
                walk.cycle(None, slow, seed + 7919 * index)
