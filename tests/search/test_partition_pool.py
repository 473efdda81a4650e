"""A pool keeps labellings that differ, and what is combined keeps what both agree on."""

from itertools import pairwise

import numpy as np

from partita.problems.partition import PartitionEdge, PartitionNode, PartitionProblem
from partita.search.base import Run, Stop
from partita.search.partition.anneal import start
from partita.search.partition.pool import LabelPool, PooledCycles
from partita.search.partition.walk import AnnealingSchedule, LabelWalk


def branches(num_branches: int, length: int, num_devices: int) -> PartitionProblem:
    """Branches of equal work that read one node and are read by one; slow links."""
    count = 2 + num_branches * length
    nodes = tuple(PartitionNode(id, "OP", 1.0, 1.0) for id in range(count))
    edges = []
    for branch in range(num_branches):
        inner = [1 + branch * length + each for each in range(length)]
        path = [0, *inner, count - 1]
        edges += [PartitionEdge(a, b, 4000, 4000) for a, b in pairwise(path)]
    return PartitionProblem(nodes, tuple(edges), num_devices, bandwidth_bytes_per_s=1e6)


def pooled(problem: PartitionProblem, seed: int, cycles: int) -> PooledCycles:
    walk = LabelWalk(problem, Run(Stop(), "pool", seed))
    pool = PooledCycles(walk, LabelPool(size=4, first=4, least_steps=2000), seed)
    pool.run(cycles, walk.run.done)
    return pool


def test_members_differ_and_hold_the_best() -> None:
    pool = pooled(branches(6, 8, 3), seed=0, cycles=24)
    times = sorted(ms for ms, _ in pool.members)
    assert 1 < len(times) <= 4
    assert all(after > before * (1 + 1e-9) for before, after in pairwise(times))
    assert times[0] == pool.walk.run.objective
    for ms, labels in pool.members:
        assert start(pool.walk.net, labels, 0).time_ms.max() == ms


def test_the_same_seed_makes_the_same_pool() -> None:
    one, other = (pooled(branches(4, 6, 3), seed=5, cycles=14) for _ in range(2))
    assert [ms for ms, _ in one.members] == [ms for ms, _ in other.members]
    assert one.walk.run.evaluations == other.walk.run.evaluations


def test_what_two_labellings_agree_on_stays_together_without_heat() -> None:
    """Frozen, a combination is at least as good as the first of the two."""
    problem = branches(6, 8, 3)
    walk = LabelWalk(problem, Run(Stop(), "pool", 0))
    random = np.random.default_rng(1)
    one, other = random.integers(0, 3, (2, walk.net.num_nodes))
    child = walk.cycle(one, AnnealingSchedule(4000, 1e-9, 1e-9, 1e-9), 3, other)
    assert child is not None
    before = start(walk.net, one, 0).best_ms[0]
    assert start(walk.net, child, 0).best_ms[0] < before
