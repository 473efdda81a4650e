"""One search's walk over labellings: what the annealing methods of this folder share.

`LabelWalk.cycle` coarsens the network, anneals the coarsest one, and anneals again after each step
back to finer ones. From a given labelling only nodes of one device are merged, so that it survives
coarsening; without one, the coarsest network starts at random. A step of annealing counts as one
evaluation, so that runs repeat exactly unless a time limit cuts them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from partita.problems.partition import (
    PartitionProblem,
    PartitionSolution,
    check,
    device_times_ms,
    infeasible,
)
from partita.search.base import Run, relative_gap
from partita.search.partition.anneal import anneal, start
from partita.search.partition.bounds import communication_bound
from partita.search.partition.chain import ChainPartition
from partita.search.partition.coarsen import labels_of_clusters, levels
from partita.search.partition.network import I64, PartitionNetwork, network, staged
from partita.search.partition.orders import reordered

if TYPE_CHECKING:
    from partita.search.partition.covers import CoverProof

_CHUNK_STEPS = 20_000  # between two looks at the clock: some 50 ms
_PROVEN = 1e-9  # bound and objective agree up to rounding
_EQUAL = 1 - 1e-12  # sums in another order round differently


@dataclass(frozen=True, slots=True)
class AnnealingSchedule:
    """How a cycle anneals: steps over all levels, and temperatures as fractions of the time."""

    steps: int
    hot_coarse: float
    hot_fine: float = 2e-4
    cold: float = 1e-5
    per_device: int = 12  # clusters on the coarsest level
    largest: float = 0.25  # of a device's share of the work: no cluster is larger


class LabelWalk:
    """The labellings of one problem, and the run that keeps the best of them."""

    def __init__(self, problem: PartitionProblem, run: Run[PartitionSolution]) -> None:
        from partita.search.partition.compiled import compile_all  # it imports what uses walks

        begun = run.seconds
        compile_all()
        run.started += run.seconds - begun  # compiling is not searching
        self.problem = problem
        self.run = run
        self.net: PartitionNetwork = network(problem)
        self.labels: I64 | None = None  # of the best solution
        self.proof: CoverProof | None = None  # what it knows is kept
        self.hopeless = infeasible(problem)  # why there is no answer, if that is plain
        run.bound(communication_bound(problem, self.net))

    @property
    def in_order(self) -> bool:
        """Are stages asked for that a labelling alone does not give?"""
        return self.problem.straight or self.problem.num_stages is not None

    def done_after(self, share: float) -> Callable[[], bool]:
        """Is the run done, or that share of the time used that is left now?"""
        run, limit = self.run, self.run.stop.time_s
        until = None if limit is None else run.seconds + share * (limit - run.seconds)
        return lambda: run.done() or (until is not None and run.seconds >= until)

    def offer(self, labels: Sequence[int] | I64) -> None:
        """Evaluate a labelling by the problem's own rules and keep it if it is the best."""
        self.offer_solution(staged(self.problem, np.asarray(labels, np.int64).tolist()))

    def offer_solution(self, solution: PartitionSolution) -> None:
        """The same for a solution; one that is not valid is passed over."""
        if check(self.problem, solution):
            return
        devices = dict(solution.device_of)
        device_of = {node: devices[stage] for node, stage in solution.stage_of}
        if self.run.offer(solution, max(device_times_ms(self.problem, device_of))):
            self.labels = np.array([device_of[node.id] for node in self.problem.placed], np.int64)

    def count_and_offer(self, labels: Sequence[int] | I64) -> None:
        """The same, as one evaluation; nothing happens once the run is done."""
        if not self.run.done():
            self.run.evaluations += 1
            self.offer(labels)

    def cycle(
        self,
        labels: I64 | None,
        schedule: AnnealingSchedule,
        seed: int,
        other: I64 | None = None,
    ) -> I64 | None:
        """Anneal from coarse to fine; the best labelling of this cycle, None if cut short.

        With `other`, only nodes are merged that are together in both labellings.
        """
        net = self.net
        smallest = schedule.per_device * net.num_devices
        most_ms = schedule.largest * float(net.mean_ms.sum()) / net.num_devices
        together = labels if other is None or labels is None else labels * net.num_devices + other
        ladder = levels(net, smallest, most_ms, seed, together)[::-1]
        coarsest, cluster_of = ladder[0]
        if labels is None:
            random = np.random.default_rng(seed).integers(
                0, coarsest.num_devices, coarsest.num_nodes
            )
            labels = random[cluster_of]
        for index, (level, cluster_of) in enumerate(ladder):
            share = index / (len(ladder) - 1) if len(ladder) > 1 else 0.0
            hot = schedule.hot_coarse ** (1 - share) * schedule.hot_fine**share
            steps = max(1, schedule.steps // len(ladder))
            anneal = self.anneal(
                level,
                cluster_of,
                labels,
                AnnealingSchedule(steps, hot, hot, schedule.cold),
                seed + 1000 * index,
            )
            if anneal is None:
                return None
            labels = anneal
        return labels

    def anneal(
        self,
        level: PartitionNetwork,
        cluster_of: I64,
        labels: I64,
        schedule: AnnealingSchedule,
        seed: int,
    ) -> I64 | None:
        """Anneal one level; the best labelling of the nodes, None if cut short."""
        state = start(level, labels_of_clusters(cluster_of, labels), seed)
        done = 0
        while done < schedule.steps:
            if self.run.done():
                return None
            chunk = min(_CHUNK_STEPS, schedule.steps - done)
            if self.run.stop.evaluations is not None:
                chunk = min(chunk, self.run.stop.evaluations - self.run.evaluations)
            anneal(
                level, state, done, done + chunk, schedule.steps, schedule.hot_coarse, schedule.cold
            )
            done += chunk
            self.run.evaluations += chunk
            best = self.run.objective
            if state.best_ms[0] < (np.inf if best is None else best * _EQUAL):
                self.offer(state.best_device[cluster_of])
        array = state.best_device if state.best_ms[0] < np.inf else state.device
        return array[cluster_of]


def offer_chains(walk: LabelWalk, num_orders: int, max_cuts: int, seed: int) -> None:
    """Offer the best cut of the problem's own order and of random ones."""
    for index in range(num_orders):
        if walk.run.done() or proven(walk.run):
            return
        problem = walk.problem if index == 0 else reordered(walk.problem, seed + index)
        walk.run.evaluations += 1
        solution = ChainPartition(max_cuts, rescue=False)(problem).solution
        if solution is not None:
            walk.offer_solution(solution)


def proven(run: Run[PartitionSolution]) -> bool:
    """Do bound and objective agree?"""
    gap = relative_gap(run.objective, run.lower_bound)
    return gap is not None and gap <= _PROVEN
