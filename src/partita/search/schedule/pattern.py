"""A repetition: K micro-batches that start again every `length`.

The starts fix an order: for two starts u, v on a device how many repetitions apart they are,
k_uv = floor((S_v - S_u) / length). The same order at its best pace is the solution of

    S_v - S_u >= lag                      for every dependency u -> v,
    S_v - S_u >= span_u + k_uv * length   for neighbours u, v in the order of a device,

whose smallest `length` is the largest ratio (sum of lags and spans) / -(sum of k) of a cycle. It is
found by Newton's method: follow the longest paths at some length; a cycle that gains shows that its
own ratio is a better guess. Memory depends on the order alone, and stays as it was.

A ratio p / q of whole spans is a fraction where q > 1. Then q repetitions are taken as one of
length p, every start rounded down, which keeps all differences that are whole numbers.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from partita.problems.schedule import (
    ScheduleProblem,
    ScheduleSolution,
    blocks_per_device,
    is_whole,
    lags,
    periodic,
)
from partita.search.schedule.grid import as_fraction, plain

_Edge = tuple[int, int, Fraction, int]  # from, to, time, repetitions later
_MOST_COPIES = 64  # of a repetition that was multiplied to have whole starts
_MOST_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Pattern:
    """`starts[copy][block]` of the micro-batches of one repetition; all again every `length`."""

    starts: tuple[tuple[float, ...], ...]
    length: float

    @property
    def period(self) -> Fraction:
        """Time per micro-batch."""
        return as_fraction(self.length) / len(self.starts)

    def solution(self, problem: ScheduleProblem) -> ScheduleSolution:
        """As the answer to a problem without a number of micro-batches."""
        return periodic(problem, self.starts, self.length)

    def unrolled(self, count: int) -> list[list[float]]:
        """Starts of the first `count` micro-batches."""
        copies = len(self.starts)
        return [
            [start + (m // copies) * self.length for start in self.starts[m % copies]]
            for m in range(count)
        ]


def fastest(
    problem: ScheduleProblem, starts: Sequence[Sequence[int]], length: int
) -> Pattern | None:
    """The order of these starts at its best pace; None if it has none (rounding hid a conflict).

    `starts` and `length` are in steps of a grid, and may be off by its rounding.
    """
    size = len(problem.blocks)
    edges = _edges(problem, [start for row in starts for start in row], length)
    best = _largest_ratio(edges, size * len(starts))
    if best is None:
        return None
    if is_whole(problem) and best.denominator * len(starts) > _MOST_COPIES:
        best = Fraction(math.ceil(best))
    fractions = _earliest(edges, size * len(starts), best)
    assert isinstance(fractions, list)
    rows = [fractions[copy * size : (copy + 1) * size] for copy in range(len(starts))]
    return _whole(rows, best) if is_whole(problem) else _rounded(rows, best)


def _edges(problem: ScheduleProblem, starts: Sequence[int], length: int) -> list[_Edge]:
    size, spans = len(problem.blocks), [as_fraction(block.span) for block in problem.blocks]
    between = [as_fraction(lag) for lag in lags(problem)]
    edges = [
        (at + first, at + second, lag, 0)
        for at in range(0, len(starts), size)
        for (first, second), lag in zip(problem.deps, between, strict=True)
    ]
    for here in blocks_per_device(problem):
        turns = sorted(
            (starts[at + block] % length, starts[at + block] // length, at + block)
            for at in range(0, len(starts), size)
            for block in here
        )
        for (_, turn, one), (_, other_turn, other) in itertools.pairwise(turns):
            edges.append((one, other, spans[one % size], turn - other_turn))
        if turns:
            (_, turn, one), (_, other_turn, other) = turns[-1], turns[0]
            edges.append((one, other, spans[one % size], turn - other_turn + 1))
    return edges


def _largest_ratio(edges: Sequence[_Edge], count: int) -> Fraction | None:
    """The smallest length at which no cycle gains; None if some cycle gains at any."""
    length = max((time for one, other, time, later in edges if one == other), default=Fraction(0))
    for _ in range(_MOST_ROUNDS):
        fractions = _earliest(edges, count, length)
        if isinstance(fractions, list):
            return length
        if fractions is None:
            return None
        length = fractions
    return None


def _earliest(
    edges: Sequence[_Edge], count: int, length: Fraction
) -> list[Fraction] | Fraction | None:
    """Earliest starts at this length, or the ratio of a cycle that gains, or None if it has none.

    Edges have S_to >= S_from + time - later * length. Times are whole multiples of one fraction, so
    that the work is done in whole numbers.
    """
    scale = math.lcm(length.denominator, *(time.denominator for _, _, time, _ in edges))
    step = int(length * scale)
    gains = [(one, other, int(time * scale) - later * step) for one, other, time, later in edges]
    starts, through = [0] * count, [-1] * count
    for round_ in range(count + 1):
        changed = False
        for index, (one, other, gain) in enumerate(gains):
            if starts[one] + gain > starts[other]:
                starts[other], through[other] = starts[one] + gain, index
                changed = True
        if not changed:
            return [Fraction(start, scale) for start in starts]
        if round_ % 4 == 3 or round_ == count:
            cycle = _cycle(edges, through)
            if cycle:
                later = sum(edges[index][3] for index in cycle)
                time = sum((edges[index][2] for index in cycle), start=Fraction(0))
                return time / later if later > 0 else None
    raise AssertionError("longest paths either settle or close a cycle")


def _cycle(edges: Sequence[_Edge], through: Sequence[int]) -> list[int]:
    """Edges of a cycle among those that lead to each node last; empty if there is none."""
    seen = [0] * len(through)
    for root in range(len(through)):
        node, path = root, []
        while through[node] >= 0 and not seen[node]:
            seen[node] = root + 1
            path.append(through[node])
            node = edges[through[node]][0]
        if through[node] >= 0 and seen[node] == root + 1:
            closing = next(i for i, index in enumerate(path) if edges[index][1] == node)
            return path[closing:]
    return []


def _whole(rows: Sequence[Sequence[Fraction]], length: Fraction) -> Pattern:
    """Whole starts, as many repetitions in one as that takes."""
    times = length.denominator
    copies = [
        tuple(math.floor(start + again * length) for start in row)
        for again in range(times)
        for row in rows
    ]
    first = min(map(min, copies))
    shifted = tuple(tuple(start - first for start in row) for row in copies)
    return Pattern(shifted, int(length * times))


def _rounded(rows: Sequence[Sequence[Fraction]], length: Fraction) -> Pattern:
    first = min(map(min, rows))
    starts = tuple(tuple(plain(start - first) for start in row) for row in rows)
    return Pattern(starts, plain(length))
