"""A pool of good labellings that cycles of annealing make better: many that differ, not one.

Cycles from scratch fill the pool. Then, in turn, the best is annealed with little heat, any other
is, two are combined, and another one is made from scratch. To combine two, only nodes are merged
that are together in both, so that annealing chooses between what they differ in (Sanders and
Schulz, Distributed evolutionary graph partitioning, 2012). What is better than what it was made
from takes its place; else it takes that of the worst, if it is better than that.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partita.search.partition.anneal import start
from partita.search.partition.network import I64
from partita.search.partition.walk import AnnealingSchedule, LabelWalk, proven

_COLD = 2e-5
_SCRATCH = ((2e-2, 2e-4), (2e-2, 2e-4), (0.1, 1e-2), (2e-2, 2e-4))  # hot, coarse and fine
_LADDERS = ((4, 0.6), (12, 0.25), (4, 0.6), (3, 1.0))  # where links are slow, few large clusters
_HOT = (5e-4, 1e-3, 5e-4, 5e-3)
_SAME = 1e-9
_STRIDE = 7919  # between seeds


@dataclass(frozen=True, slots=True)
class LabelPool:
    """How many labellings are kept, how many are made first, how long a cycle is."""

    size: int = 8
    first: int = 16
    steps_per_node: int = 200
    least_steps: int = 30_000
    most_steps: int = 400_000


class PooledCycles:
    """One walk's pool."""

    def __init__(self, walk: LabelWalk, settings: LabelPool, seed: int) -> None:
        self.walk, self.settings, self.seed = walk, settings, seed
        nodes = walk.net.num_nodes
        self.steps = min(
            settings.most_steps, max(settings.least_steps, settings.steps_per_node * nodes)
        )
        self.random = np.random.default_rng((seed, 1))
        self.members: list[tuple[float, I64]] = []
        self.made = 0

    def run(self, cycles: int, done: Callable[[], bool]) -> None:
        """Make so many cycles, or as many as there is time for."""
        if not self.members and self.walk.labels is not None:
            self.keep(self.walk.labels, None)
        for _ in range(cycles):
            if done() or proven(self.walk.run) or not self.next_cycle():
                return

    def next_cycle(self) -> bool:
        """One more labelling; False if it was cut short."""
        turn = self.made % 4
        parent: int | None = None
        other: I64 | None = None
        filling = self.made < self.settings.first
        if filling or turn == 3 or len(self.members) < 2:
            kind = (self.made if filling else self.made // 4) % 4
            heat, ladder, steps = _SCRATCH[kind], _LADDERS[kind], self.steps // 2
        else:
            kind = self.made // 4 % 4
            heat, ladder, steps = (_HOT[kind], 2e-4), _LADDERS[1 - self.made // 16 % 2], self.steps
            best = min(range(len(self.members)), key=lambda each: self.members[each][0])
            parent = best if turn == 0 else int(self.random.integers(len(self.members)))
            if turn == 2:
                mate = int(self.random.integers(len(self.members) - 1))
                other = self.members[mate + (mate >= parent)][1]
        labels = None if parent is None else self.members[parent][1]
        schedule = AnnealingSchedule(steps, *heat, _COLD, *ladder)
        child = self.walk.cycle(labels, schedule, self.seed + _STRIDE * self.made, other)
        self.made += 1
        if child is not None:
            self.keep(child, parent)
        return child is not None

    def keep(self, child: I64, parent: int | None) -> None:
        """Let it take the place of its parent or of the worst, if it is better."""
        ms = float(start(self.walk.net, child, 0).best_ms[0])
        if any(abs(ms - known) <= _SAME * known for known, _ in self.members):
            return
        if len(self.members) < self.settings.size:
            self.members.append((ms, child))
            return
        worst = max(range(len(self.members)), key=lambda each: self.members[each][0])
        place = parent if parent is not None and ms < self.members[parent][0] else worst
        if ms < self.members[place][0]:
            self.members[place] = ms, child
