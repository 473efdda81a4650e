"""Repetitions that list scheduling falls into by itself.

Under a cap a list schedule of many micro-batches soon repeats: after a while every K micro-batches
start as the K before them, some time later. The K that it picks is often one that tight memory
asks for, and more than a solver would try. O(micro-batches * blocks * most copies).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from partita.problems.schedule import ScheduleProblem, tails
from partita.search.base import Run
from partita.search.schedule.greedy import Listing
from partita.search.schedule.grid import Grid
from partita.search.schedule.pattern import Pattern, fastest

COUNT = 64  # micro-batches that are scheduled
MOST_COPIES = 12
_WINDOWS = (COUNT, 12, 8, 6, 4, 3, 2)  # how many may be under way


def steady_states(problem: ScheduleProblem, grid: Grid, run: Run[Any]) -> Iterator[Pattern]:
    """The repetitions of a few list schedules, each at its best pace."""
    forever = replace(problem, num_microbatches=None)
    after = tails(problem)
    seen = set()
    for priority in (after, [-tail for tail in after]):
        for window in _WINDOWS:
            if run.done():
                return
            run.evaluations += 1
            listing = Listing(problem, COUNT, window, priority)
            if not listing.finish(run):
                continue
            steps = [[round(grid.steps(start)) for start in row] for row in listing.table()]
            repeated = repetition(steps)
            if repeated is None or repeated in seen:
                continue
            seen.add(repeated)
            pattern = fastest(forever, repeated[0], repeated[1])
            if pattern is not None:
                yield pattern


def repetition(
    table: Sequence[Sequence[int]],
) -> tuple[tuple[tuple[int, ...], ...], int] | None:
    """(starts, length) of what the middle of the table repeats; None if it does not."""
    begin, end = len(table) // 3, 2 * len(table) // 3
    for copies in range(1, min(MOST_COPIES, (end - begin) // 2) + 1):
        length = table[begin + copies][0] - table[begin][0]
        if all(
            after - before == length
            for m in range(begin, end - copies)
            for before, after in zip(table[m], table[m + copies], strict=True)
        ):
            rows = table[begin : begin + copies]
            first = min(map(min, rows))
            return tuple(tuple(start - first for start in row) for row in rows), length
    return None
