"""Fit one micro-batch into a given period, each block at the first moment that is free.

A block that starts at S starts again at S + P, S + 2P, ... In the table of one period it occupies
[S mod P, S mod P + span) on its devices. Blocks are placed in a given order, each at the earliest
time its dependencies allow at which the table is free; O(blocks of a device) tries for each. This
is modulo scheduling (Rau 1981) without backtracking: it may miss a period that exists.
"""

from collections.abc import Sequence

from partita.problems.schedule import ScheduleProblem, is_whole, predecessors


def fit(problem: ScheduleProblem, order: Sequence[int], period: float) -> list[float] | None:
    """A start for each block, all repeating every `period`; None if one finds no place."""
    before = predecessors(problem)
    rounding = 0 if is_whole(problem) and isinstance(period, int) else 1e-12 * period
    tables: list[list[tuple[float, float]]] = [[] for _ in range(problem.num_devices)]
    starts: list[float] = [0] * len(problem.blocks)
    for index in order:
        block = problem.blocks[index]
        ready = max((starts[first] + lag for first, lag in before[index]), default=0)
        taken = [entry for device in block.devices for entry in tables[device]]
        start = _first_free(taken, ready, block.span, period, rounding)
        if start is None:
            return None
        starts[index] = start
        for device in block.devices:
            tables[device].append((start, block.span))
    return starts


def _first_free(
    taken: Sequence[tuple[float, float]], ready: float, span: float, period: float, rounding: float
) -> float | None:
    """The first moment from `ready` on at which `span` fits between what is taken."""
    start = ready
    while start < ready + period:
        for other, other_span in taken:
            ahead = (other - start) % period  # its next run begins this much later
            if ahead < span - rounding and ahead < period - rounding:
                start += ahead + other_span
                break
            if ahead + other_span > period + rounding:  # its run before has not ended
                start += ahead + other_span - period
                break
        else:
            return start if span <= period + rounding else None
    return None
