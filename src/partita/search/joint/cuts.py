"""Cut a chain of segments into stages: the least time of m micro-batches, within memory budgets.

A stage is a layer range run with one of several options (strategy, checkpointing); its option is
the quickest that fits its budget, with as many micro-batches' activations as its place in the
pipeline has to hold. With seconds t_s per micro-batch and x_s to send what crosses its first cut,

    step = (m - 1) max t_s + sum (t_s + 2 x_s)

First the least bottleneck, by dynamic programming over (stage, cut); then, for that bottleneck and
a few above it, the least sum of ranges that stay below it. Exact for each bottleneck tried.
O(stages x options x segments^2), in numpy.

What a stage does once, at the end of a step, counts as so much more of every micro-batch. Groups of
devices with several virtual stages are another matter: see `interleaved`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partita.search.joint.ranges import Floats, Ints, LayerRanges

SLACKS = (1.0, 1.02, 1.06, 1.15, 1.4)  # times the least bottleneck: what is tried


@dataclass(frozen=True)
class Cuts:
    """Stages as (first segment, end, option), with the estimate of the step."""

    stages: tuple[tuple[int, int, int], ...]
    step_s: float
    bottleneck_s: float


def best_cuts(
    stages: Sequence[LayerRanges],
    in_flight: Sequence[float],
    budgets: Sequence[float],
    sends: Floats,
    num_microbatches: int,
    slacks: Sequence[float] = SLACKS,
) -> Cuts | None:
    """The best cuts for stages in a row, each with its options; None where nothing fits.

    `sends[i]` is the seconds to send what crosses the cut before segment i.
    """
    tables = _tables(stages, in_flight, budgets, 1 / num_microbatches)
    tried = cuts_with_slack(tables, sends, num_microbatches, slacks)
    return min(tried, key=lambda cuts: cuts.step_s, default=None)


def cuts_with_slack(
    tables: Sequence[tuple[Floats, Ints]],
    sends: Floats,
    num_microbatches: int,
    slacks: Sequence[float] = SLACKS,
) -> list[Cuts]:
    """The cuts of the least sum for the least bottleneck, and for a few above it."""
    least = _smallest_bottleneck([seconds for seconds, _ in tables])
    if not np.isfinite(least):
        return []
    distinct = dict.fromkeys(
        _smallest_sum(tables, sends, least * slack, num_microbatches) for slack in slacks
    )
    return [cuts for cuts in distinct if cuts is not None]


def _tables(
    stages: Sequence[LayerRanges],
    in_flight: Sequence[float],
    budgets: Sequence[float],
    share: float,
) -> list[tuple[Floats, Ints]]:
    known: dict[tuple[int, float, float], tuple[Floats, Ints]] = {}
    tables = []
    for ranges, count, cap in zip(stages, in_flight, budgets, strict=True):
        key = (id(ranges), count, cap)
        if key not in known:
            known[key] = ranges.within(count, cap, share)
        tables.append(known[key])
    return tables


def _smallest_bottleneck(tables: Sequence[Floats]) -> float:
    size = len(tables[0])
    reach = np.full(size, np.inf)  # the least bottleneck with the first so many segments done
    reach[0] = 0.0
    for seconds in tables:
        reach = np.maximum(reach[:, None], seconds).min(axis=0)
    return float(reach[-1])


def _smallest_sum(
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
    for (seconds, option), sources in zip(reversed(tables), reversed(came), strict=True):
        start = int(sources[end])
        stages.append((start, end, int(option[start, end])))
        bottleneck = max(bottleneck, float(seconds[start, end]))
        end = start
    step = (num_microbatches - 1) * bottleneck + float(before[-1])
    return Cuts(tuple(reversed(stages)), step, bottleneck)
