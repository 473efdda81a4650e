"""What a line of stages takes at the least, over all places where the chain can be cut.

With one stage on each group of devices, stage r runs the layer range [i, j) and no other group has
it. Whatever the order, and with weight gradients at any time after their data gradients,

    start + m total                          it waits for its first forward
    turn + m gradients                       no backward begins before a micro-batch went through
    start + m (forward + backward) + drain   the gradient of the last goes back to the first stage

are below every step. `start`, `turn` and `drain` are longest paths of one micro-batch through the
segments, which depend on the range alone, not on the other cuts. So the least over all cuts of the
most over the groups is found exactly, by dynamic programming over ranges in O(p n^2):

    f_r(j) = min over i < j of max(f_(r-1)(i), cost_r(i, j))

It knows that the chain can be cut between segments only. Inference has no backward: a range waits
for its first forward, and the last output goes on through what reads from it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Sources = tuple[tuple[int, ...], ...]  # of every segment, those that made what it reads


@dataclass(frozen=True, eq=False)
class SegmentSeconds:
    """Seconds of one micro-batch, per segment of the chain; each the least by itself."""

    total: Floats
    forward: Floats
    backward: Floats  # of data gradients alone
    gradients: Floats  # of data and weight gradients
    weights: Floats  # of weight gradients alone


@dataclass(frozen=True, eq=False)
class Paths:
    """Longest paths of one micro-batch, at [i, j] for the layer range from i to before j."""

    start: Floats  # until the range can begin
    turn: Floats  # until its backward can
    drain: Floats  # after its last data gradient (inference: after its last forward)


def paths_of(
    seconds: SegmentSeconds, sources: Sources, back_sources: Sources, *, training: bool
) -> Paths:
    """The longest paths of all layer ranges.

    `back_sources` are the sources to which gradients go back. A stage begins when all it reads is
    there, and its backward when all gradients are.
    """
    n = len(sources)
    ends = np.zeros(n)
    for k, own in enumerate(sources):
        ends[k] = seconds.forward[k] + max((ends[q] for q in own), default=0.0)
    start, turn, drain = (np.zeros((n + 1, n + 1)) for _ in range(3))
    for k, own in enumerate(sources):
        for q in own:  # ranges that have k and not q
            _raise(start[q + 1 : k + 1, k + 1 :], ends[q])
    if not training:
        after = seconds.forward.copy()
        for k in reversed(range(n)):
            for q in sources[k]:
                after[q] = max(after[q], seconds.forward[q] + after[k])
                _raise(drain[: q + 1, q + 1 : k + 1], after[k])
        return Paths(start, turn, drain)
    tail, after = np.zeros(n), ends.copy()
    for k, own in enumerate(back_sources):
        tail[k] = seconds.backward[k] + max((tail[q] for q in own), default=0.0)
        for q in own:
            _raise(drain[q + 1 : k + 1, k + 1 :], tail[q])
    for k in reversed(range(n)):
        _raise(turn[: k + 1, k + 1 :], ends[k])
        after[k] += seconds.backward[k]
        for q in back_sources[k]:  # ranges that have q and not k
            after[q] = max(after[q], after[k])
            _raise(turn[: q + 1, q + 1 : k + 1], after[k])
    return Paths(start, turn, drain)


def _raise(ranges: Floats, value: float) -> None:
    np.maximum(ranges, value, out=ranges)


def range_sums(values: Floats) -> Floats:
    """At [i, j] the sum of the values from i to before j."""
    before = np.concatenate(([0.0], np.cumsum(values)))
    sums: Floats = before[None, :] - before[:, None]
    return sums


def range_costs(paths: Paths, seconds: SegmentSeconds, count: int, *, training: bool) -> Floats:
    """What a step takes at the least if one group has a layer range, by computing alone."""
    own = count * range_sums(seconds.total)
    if not training:
        inference: Floats = paths.start + own + paths.drain
        return inference
    back = paths.turn + count * range_sums(seconds.gradients)
    through = count * range_sums(seconds.forward + seconds.backward) + paths.drain
    costs: Floats = np.maximum(paths.start + np.maximum(own, through), back)
    return costs


def least_cuts_s(costs: Sequence[Floats]) -> float:
    """The least over all cuts into ranges, one for each rank, of the most over the ranks."""
    num_segments = len(costs[0]) - 1
    empty = np.tri(num_segments + 1, dtype=bool)
    masked: dict[int, Floats] = {}
    for cost in costs:
        if id(cost) not in masked:
            masked[id(cost)] = np.where(empty, math.inf, cost)
    least = masked[id(costs[0])][0]
    for cost in costs[1:]:
        least = np.maximum(least[:, None], masked[id(cost)]).min(axis=0)
    return float(least[num_segments])
