"""Cut a chain into rounds of p stages such that the rounds' longest stages add up to least.

Groups of devices with virtual stages in a loop work on the same round at the same time, each for a
micro-batch of its own, and none begins the next round before its neighbour has passed on this one.
With t_r(i, j) the seconds of segments i to j on the r-th group,

    least over cuts of the sum over rounds of max_r t_r, and a little of its square

First the least bottleneck b(i, j) of every layer range as one round of p stages, for all starts and
lengths at once; then the rounds by dynamic programming over their ends; then, inside each round,
the cuts of the least sum of squares that stay below its bottleneck. With n segments, stages of at
most l of them and v rounds O(p^2 n l^2 + v p n l), in numpy.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def round_ends(
    tables: Sequence[Floats], num_rounds: int, longest: int, evenness: float = 0.05
) -> list[int] | None:
    """Where stages begin and, last, where the chain ends; None where there are no such cuts.

    `tables[r][i, j]` is the time of a stage on the r-th group; `longest` the most segments of one;
    `evenness` how much the square of a round's bottleneck counts.
    """
    p, size = len(tables), len(tables[0]) - 1
    steps = [_by_length(table, longest) for table in tables]
    worst = _bottlenecks(steps, size)
    # Rounds of one length go well together: a forward of one runs beside a backward of another.
    average = max(float(np.min([t[0, -1] for t in tables])) / (p * num_rounds), 1e-30)
    weighted = worst * (1 + evenness * worst / average)
    most = worst.shape[1] - 1
    before = np.full(size + 1, np.inf)
    before[0] = 0.0
    came: list[Ints] = []
    for _ in range(num_rounds):
        after, source = np.full(size + 1, np.inf), np.zeros(size + 1, np.int64)
        for length in range(p, min(most, size) + 1):
            total = before[: size + 1 - length] + weighted[: size + 1 - length, length]
            better = total < after[length:]
            after[length:] = np.where(better, total, after[length:])
            source[length:] = np.where(better, np.arange(size + 1 - length), source[length:])
        came.append(source)
        before = after
    if not np.isfinite(before[size]):
        return None
    bounds = [size]
    for source in reversed(came):
        bounds.append(int(source[bounds[-1]]))
    bounds.reverse()
    ends: list[int] = []
    for a, b in itertools.pairwise(bounds):
        ends += _inside(tables, a, b, float(worst[a, b - a]))
    return [*ends, size]


def _by_length(table: Floats, longest: int) -> Floats:
    """Times by start and length, infinite beyond the chain's end."""
    size = len(table) - 1
    full = np.full((size + 1, longest + 1), np.inf)
    for length in range(1, longest + 1):
        full[: size + 1 - length, length] = np.diagonal(table, length)
    return full


def _bottlenecks(steps: Sequence[Floats], size: int) -> Floats:
    """The least bottleneck of each start and length as one stage on every group in turn."""
    longest = steps[0].shape[1] - 1
    bottlenecks = steps[0]
    for step in steps[1:]:
        count = bottlenecks.shape[1]
        reached = np.minimum(np.arange(size + 1)[:, None] + np.arange(count), size)
        wider = np.full((size + 1, min(size, count - 1 + longest) + 1), np.inf)
        for own in range(1, longest + 1):  # segments of this group's stage
            value = np.maximum(bottlenecks, step[reached, own])
            width = min(count, wider.shape[1] - own)
            part = wider[:, own : own + width]
            np.minimum(part, value[:, :width], out=part)
        bottlenecks = wider
    return bottlenecks


def _inside(tables: Sequence[Floats], a: int, b: int, limit: float) -> list[int]:
    """Where the stages of one round begin: the least sum of squares below the bottleneck."""
    width = b - a + 1
    before = np.full(width, np.inf)
    before[0] = 0.0
    came: list[Ints] = []
    for table in tables:
        own = table[a : b + 1, a : b + 1]
        allowed = np.where(own <= limit * (1 + 1e-12), own * own, np.inf)
        total = before[:, None] + allowed
        came.append(total.argmin(axis=0))
        before = np.take_along_axis(total, came[-1][None], 0)[0]
    ends, end = [], width - 1
    for source in reversed(came):
        end = int(source[end])
        ends.append(a + end)
    return ends[::-1]
