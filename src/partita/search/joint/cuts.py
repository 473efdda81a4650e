"""Cut a chain of segments into stages: the least time of m micro-batches, under a memory cap.

A stage is a stretch of segments run in one of several ways (mesh shape, splits, recompute); its way
is the quickest that fits its memory, with as many micro-batches' activations as its place in the
pipeline has to hold. With seconds t_s per micro-batch and x_s to send what crosses its first cut,

    step = (m - 1) max t_s + sum (t_s + 2 x_s)

First the least bottleneck, by dynamic programming over (stage, cut); then, for that bottleneck and
a few above it, the least sum of stretches that stay below it. Exact for each bottleneck tried.
O(stages x ways x segments^2), in numpy.

What a stage does once, at the end of a step, counts as so much more of every micro-batch. Groups of
devices that take turns with several stages are another matter: see `turns`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
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

    def within(self, in_flight: float, room: float, tail_share: float) -> tuple[Floats, Ints]:
        """The least seconds of each stretch that fits `room` bytes, and the way it is run."""
        held = in_flight * self.saved
        held += self.static
        held += self.transient
        seconds = tail_share * self.tail
        seconds += self.seconds
        seconds[held > room] = np.inf
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
    if len(parts) == 1:
        return parts[0]
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
    in_flight: Sequence[float],
    room: Sequence[float],
    sends: Floats,
    num_microbatches: int,
) -> Cuts | None:
    """The best cuts for stages in a row, each with its ways; None where nothing fits.

    `sends[i]` is the seconds to send what crosses the cut before segment i.
    """
    tables = _tables(stages, in_flight, room, 1 / num_microbatches)
    tried = cuts_with_slack(tables, sends, num_microbatches)
    return min(tried, key=lambda cuts: cuts.step_s, default=None)


def cuts_with_slack(
    tables: Sequence[tuple[Floats, Ints]], sends: Floats, num_microbatches: int
) -> list[Cuts]:
    """The cuts of the least sum for the least bottleneck, and for a few above it."""
    least = _least_bottleneck([seconds for seconds, _ in tables])
    if not np.isfinite(least):
        return []
    found = dict.fromkeys(
        _least_sum(tables, sends, least * slack, num_microbatches) for slack in SLACKS
    )
    return [cuts for cuts in found if cuts is not None]


def _tables(
    stages: Sequence[Stretches], in_flight: Sequence[float], room: Sequence[float], share: float
) -> list[tuple[Floats, Ints]]:
    known: dict[tuple[int, float, float], tuple[Floats, Ints]] = {}
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
