"""Walkers side by side: each makes its episode, all on different cores.

How many walkers there are does not depend on the machine, and they meet only between chunks of
evaluations, so a seed gives the same walk on any number of cores.
"""

from collections.abc import Sequence

import numpy as np

from partita.search.placement.attempt import Attempt
from partita.search.placement.tables import F64, I64, PlacementArrays
from partita.search.placement.walk import Walker, advance, best_of, steps_left


def make_episodes(attempt: Attempt, line: I64, walkers: Sequence[Walker]) -> None:
    """Let all walkers make their episodes to the end, or until the attempt is over."""
    while attempt.goes_on():
        active = [walk for walk in walkers if steps_left(walk) > 0]
        if not active:
            return
        left, counts = attempt.left, []
        for _ in active:
            counts.append(min(attempt.chunk, left))
            left -= counts[-1]
        done = [0] * len(active)

        def walk(
            number: int,
            done: list[int] = done,
            active: list[Walker] = active,
            counts: list[int] = counts,
        ) -> None:
            done[number] = advance(attempt.net, line, active[number], counts[number])

        attempt.pool.each(walk, len(active))
        attempt.run.evaluations += sum(done)
        for walker in active:
            attempt.offer(*best_of(walker))


def memory_multiplier(net: PlacementArrays, makespan_ms: float) -> float:
    """Milliseconds per byte over the limits to begin a walk with.

    Ten times the makespan for holding nothing at all is enough to be felt, and little enough to
    cross places where a few bytes are missing; the walk adjusts it.
    """
    total = net.weight_bytes.sum() + net.output_bytes.sum()
    scarce = net.limit_bytes[net.limit_bytes < total].sum()
    if scarce <= 0 or makespan_ms <= 0:
        return net.penalty
    return float(min(net.penalty, 10 * makespan_ms / scarce))


def cheapest(placements: I64, cost: F64, count: int) -> I64:
    """The `count` cheapest placements of finite cost, each once."""
    order = np.argsort(cost, kind="stable")
    order = order[np.isfinite(cost[order])]
    _, first = np.unique(placements[order], axis=0, return_index=True)
    return placements[order][np.sort(first)[:count]]
