"""Cut a chain of segments into stages: the least time of m micro-batches, under a memory cap.

A stage is a stretch of segments run in one of several ways (mesh shape, splits, recompute); its way
is the quickest that fits its memory, with as many micro-batches' activations as its place in the
pipeline has to hold. With seconds t_s per micro-batch and x_s to send what crosses its first cut,

    step = (m - 1) max t_s + sum (t_s + 2 x_s)

First the least bottleneck, by dynamic programming over (stage, cut); then, for that bottleneck and
a few above it, the least sum of stretches that stay below it. Exact for each bottleneck tried.
O(stages x ways x segments^2), in numpy.

What a stage does once, at the end of a step, counts as so much more of every micro-batch. Where a
group of devices takes turns with several stages, segments are then moved from stages of the busiest
group to stages of others, all stages between moving along, while that makes the busiest less busy.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MOVED = (1, 2)  # segments at a time: blocks are often two of them
PACE = 0.1  # how much the longest of a group's stages counts beside all of them
NOTHING = 1e-9  # differences by rounding
SLACKS = (1.0, 1.02, 1.06, 1.15, 1.4)


@dataclass(frozen=True, eq=False)
class Stretches:
    """Ways to run every stretch [i, j) of segments: arrays of ways x starts x ends.

    Bytes of a stage: static + micro-batches in flight * saved + transient. `tail` is what it takes
    once, beyond the last micro-batch.
    """

    seconds: Floats
    static: Floats
    saved: Floats
    transient: Floats
    tail: Floats

    def within(self, in_flight: int, room: float, tail_share: float) -> tuple[Floats, Ints]:
        """The least seconds of each stretch that fits `room` bytes, and the way it is run."""
        held = self.static + in_flight * self.saved + self.transient
        seconds = np.where(held <= room, self.seconds + tail_share * self.tail, np.inf)
        way = seconds.argmin(axis=0)
        return np.take_along_axis(seconds, way[None], 0)[0], way


@dataclass(frozen=True)
class Cuts:
    """Stages as (first segment, end, way), with the estimate of the step."""

    stages: tuple[tuple[int, int, int], ...]
    step_s: float
    bottleneck_s: float


def joined(parts: Sequence[Stretches]) -> Stretches:
    """All ways of several tables in one, in this order."""
    return Stretches(
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.static for part in parts]),
        np.concatenate([part.saved for part in parts]),
        np.concatenate([part.transient for part in parts]),
        np.concatenate([part.tail for part in parts]),
    )


def stretch_sums(values: Floats) -> Floats:
    """Sums over every stretch [i, j); infinite where there is none (j <= i)."""
    total = np.concatenate(([0.0], np.cumsum(values)))
    sums: Floats = total[None, :] - total[:, None]
    sums += _nowhere(len(total))
    return sums


@functools.lru_cache(maxsize=8)
def _nowhere(size: int) -> Floats:
    """Infinite where there is no stretch, else 0."""
    found: Floats = np.where(np.tri(size, dtype=bool), np.inf, 0.0)
    return found


def stretch_peaks(values: Floats) -> Floats:
    """The largest value of every stretch [i, j); 0 where there is none."""
    count = len(values)
    peaks = np.zeros((count + 1, count + 1))
    for i in range(count):
        peaks[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return peaks


def best_cuts(
    stages: Sequence[Stretches],
    in_flight: Sequence[int],
    room: Sequence[float],
    sends: Floats,
    num_microbatches: int,
    group_of: Sequence[int] = (),
) -> Cuts | None:
    """The best cuts for stages in a row, each with its ways; None where nothing fits.

    `sends[i]` is the seconds to send what crosses the cut before segment i. `group_of` names the
    group of each stage where groups have several; `bottleneck_s` is then a stage's part of the
    busiest group's time.
    """
    chunks = len(stages) // (len(set(group_of)) or len(stages))
    tables = _tables(stages, in_flight, room, 1 / (num_microbatches * chunks))
    least = _least_bottleneck([seconds for seconds, _ in tables])
    if not np.isfinite(least):
        return None
    found = dict.fromkeys(
        _least_sum(tables, sends, least * slack, num_microbatches) for slack in SLACKS
    )
    tried = [cuts for cuts in found if cuts is not None]
    if chunks > 1 and tried:
        evened = [_evened(tables, cuts, sends, group_of, num_microbatches) for cuts in tried]
        return min(evened, key=lambda pair: pair[0])[1]
    return min(tried, key=lambda cuts: cuts.step_s, default=None)


def _tables(
    stages: Sequence[Stretches], in_flight: Sequence[int], room: Sequence[float], share: float
) -> list[tuple[Floats, Ints]]:
    known: dict[tuple[int, int, float], tuple[Floats, Ints]] = {}
    found = []
    for stretches, count, cap in zip(stages, in_flight, room, strict=True):
        key = (id(stretches), count, cap)
        if key not in known:
            known[key] = stretches.within(count, cap, share)
        found.append(known[key])
    return found


def _least_bottleneck(tables: Sequence[Floats]) -> float:
    size = len(tables[0])
    reach = np.full(size, np.inf)  # the least bottleneck with the first so many segments done
    reach[0] = 0.0
    for seconds in tables:
        reach = np.maximum(reach[:, None], seconds).min(axis=0)
    return float(reach[-1])


def _least_sum(
    tables: Sequence[tuple[Floats, Ints]], sends: Floats, limit: float, num_microbatches: int
) -> Cuts | None:
    size = len(tables[0][0])
    before = np.full(size, np.inf)
    before[0] = 0.0
    moved = 2 * np.concatenate((sends, [0.0]))
    came: list[Ints] = []
    for seconds, _ in tables:
        allowed = np.where(seconds <= limit * (1 + 1e-12), seconds, np.inf)
        total = (before + moved)[:, None] + allowed
        came.append(total.argmin(axis=0))
        before = np.take_along_axis(total, came[-1][None], 0)[0]
    if not np.isfinite(before[-1]):
        return None
    stages: list[tuple[int, int, int]] = []
    end, bottleneck = size - 1, 0.0
    for (seconds, way), sources in zip(reversed(tables), reversed(came), strict=True):
        start = int(sources[end])
        stages.append((start, end, int(way[start, end])))
        bottleneck = max(bottleneck, float(seconds[start, end]))
        end = start
    step = (num_microbatches - 1) * bottleneck + float(before[-1])
    return Cuts(tuple(reversed(stages)), step, bottleneck)


def _evened(
    tables: Sequence[tuple[Floats, Ints]],
    cuts: Cuts,
    sends: Floats,
    group_of: Sequence[int],
    num_microbatches: int,
) -> tuple[float, Cuts]:
    """Segments moved, one or two at a time, from the busiest group to others while that helps.

    With how good the cuts are: less is better.
    """
    ends = [0, *(end for _, end, _ in cuts.stages)]
    count = len(tables)
    members = np.zeros((max(group_of) + 1, count))
    members[list(group_of), range(count)] = 1.0
    seconds = np.stack([table for table, _ in tables])
    stage = np.arange(count)

    def times(ends: Sequence[int]) -> Floats:
        at = np.array(ends)
        found: Floats = seconds[stage, at[:-1], at[1:]]
        return found

    def score(own: Floats) -> tuple[float, float]:
        """The busiest group; in part also the longest stage, at whose pace orders go."""
        if not np.isfinite(own).all():  # a stage that does not fit
            return math.inf, math.inf
        busy, turns = members @ own, count / len(members)
        longest = turns * float(own.max())
        value = (1 - PACE) * float(busy.max()) + PACE * longest
        return value, float(busy @ busy) + float(own @ own)

    own = times(ends)
    while True:
        busiest = int((members @ own).argmax())
        best, moved = score(own), ends
        for i, j, size in itertools.product(range(count), range(count), MOVED):
            if group_of[i] != busiest or group_of[j] == busiest:
                continue
            step = size if j < i else -size  # the cuts between the two stages go this way
            low, high = min(i, j) + 1, max(i, j) + 1
            other = [end + step * (low <= k < high) for k, end in enumerate(ends)]
            found = score(times(other)) if other[i] < other[i + 1] else best
            less = found[0] < best[0] * (1 - NOTHING)
            if less or (found[0] <= best[0] and found[1] < best[1] * (1 - NOTHING)):
                best, moved = found, other
        if moved is ends:
            break
        ends, own = moved, times(moved)
    ways = [int(tables[s][1][a, b]) for s, (a, b) in enumerate(itertools.pairwise(ends))]
    fill = float(own.sum()) + 2 * float(sum(sends[a] for a in ends[:-1]))
    bottleneck = float((members @ own).max()) * len(members) / count
    stages = tuple((a, b, way) for (a, b), way in zip(itertools.pairwise(ends), ways, strict=True))
    step_s = (num_microbatches - 1) * bottleneck + fill
    return score(own)[0], Cuts(stages, step_s, bottleneck)
