"""`brute`: every tiling, every assignment, every order; the oracle for problems of a few tiles.

A schedule is built tile by tile: any tile whose needs have been placed goes to the end of any queue
(of several empty ones, the first). Every valid set of queues is the end of such a walk, since the
order in which its tiles start is one.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from partita.problems.rtasks import (
    RtasksProblem,
    RtasksSolution,
    evaluate,
    lower_bound,
    needed_tiles,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop


@dataclass(frozen=True)
class BruteRTasks:
    """Tries everything; for at most a handful of tiles."""

    def __call__(
        self, problem: RtasksProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[RtasksSolution]:
        """The best of all schedules."""
        run: Run[RtasksSolution] = Run(stop, "brute", seed)
        run.bound(lower_bound(problem))
        for solution in _all(problem):
            if run.done():
                return run.result()
            run.evaluations += 1
            run.offer(solution, evaluate(problem, solution))
        return run.result(Status.OPTIMAL, "every schedule was tried")


def _all(problem: RtasksProblem) -> Iterator[RtasksSolution]:
    for tilings in itertools.product(*(range(len(op.tilings)) for op in problem.operators)):
        veus = problem.num_veus(tilings)
        if veus:
            counts = [
                op.tilings[i].num_tiles for op, i in zip(problem.operators, tilings, strict=True)
            ]
            queues: list[list[tuple[int, int]]] = [[] for _ in range(min(veus, sum(counts)))]
            for filled in _fill(problem, counts, queues, set()):
                yield RtasksSolution(tilings, filled)


def _fill(
    problem: RtasksProblem,
    counts: list[int],
    queues: list[list[tuple[int, int]]],
    placed: set[tuple[int, int]],
) -> Iterator[tuple[tuple[tuple[int, int], ...], ...]]:
    if len(placed) == sum(counts):
        yield tuple(tuple(queue) for queue in queues if queue)
        return
    for task in _ready(problem, counts, placed):
        for index, queue in enumerate(queues):
            if index and not queue and not queues[index - 1]:
                break  # empty queues are alike
            queue.append(task)
            placed.add(task)
            yield from _fill(problem, counts, queues, placed)
            placed.discard(task)
            queue.pop()


def _ready(
    problem: RtasksProblem, counts: list[int], placed: set[tuple[int, int]]
) -> list[tuple[int, int]]:
    return [
        (operator, tile)
        for operator, count in enumerate(counts)
        for tile in range(count)
        if (operator, tile) not in placed
        and all(
            (edge.src, need) in placed
            for edge in problem.before[operator]
            for need in needed_tiles(edge, counts[edge.src], count, tile)
        )
    ]
