"""`wavefront`: Rammer's policy (OSDI 2020, algorithm 1).

Operators run in waves, the levels of a breadth-first walk. In a wave each operator takes its
fastest tiling; if the tiles of the wave are more than there are places, each takes instead the one
with the least time times places it uses, so that they disturb each other less. The tiles of a wave
are dealt to the vEUs that are free first.
"""

import heapq
from dataclasses import dataclass

from partita.problems.rtasks import RtasksProblem, RtasksSolution, evaluate, lower_bound
from partita.search.base import UNTIL_DONE, Result, Run, Stop
from partita.search.rtasks.critical import best, fastest


@dataclass(frozen=True)
class Wavefront:
    """Wave by wave, with tilings chosen again under contention."""

    def __call__(
        self, problem: RtasksProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[RtasksSolution]:
        """Place every wave once."""
        run: Run[RtasksSolution] = Run(stop, "wavefront", seed)
        run.bound(lower_bound(problem))
        if not run.done():
            run.evaluations += 1
            solution = in_waves(problem)
            run.offer(solution, evaluate(problem, solution))
        return run.result()


def waves(problem: RtasksProblem) -> list[list[int]]:
    """The operators level by level: each one after everything it needs."""
    level: list[int] = []
    for before in problem.before:
        level.append(1 + max((level[edge.src] for edge in before), default=-1))
    waves: list[list[int]] = [[] for _ in range(max(level) + 1)]
    for operator, its in enumerate(level):
        waves[its].append(operator)
    return waves


def selected(problem: RtasksProblem) -> tuple[int, ...]:
    """The tiling of every operator: the fastest, or under contention the thriftiest."""
    chosen = list(fastest(problem))
    for wave in waves(problem):
        tiles = sum(problem.operators[i].tilings[chosen[i]].num_tiles for i in wave)
        if len(wave) > 1 and tiles > problem.num_veus(tuple(chosen)):
            for i in wave:
                operator = problem.operators[i]
                chosen[i] = best(problem, operator, lambda t: t.tile_us * t.num_tiles)
    return tuple(chosen)


def in_waves(problem: RtasksProblem, tilings: tuple[int, ...] | None = None) -> RtasksSolution:
    """The tiles of one wave after the other, each on the vEU that is free first."""
    chosen = tilings or selected(problem)
    tiles = [op.tilings[i] for op, i in zip(problem.operators, chosen, strict=True)]
    count = min(problem.num_veus(chosen), sum(tile.num_tiles for tile in tiles))
    queues: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    clock = 0.0
    for wave in waves(problem):
        free = [(clock, veu) for veu in range(count)]
        for operator in wave:
            for tile in range(tiles[operator].num_tiles):
                at, veu = heapq.heappop(free)
                queues[veu].append((operator, tile))
                heapq.heappush(free, (at + tiles[operator].tile_us, veu))
        clock = max(at for at, _ in free)
    return RtasksSolution(chosen, tuple(tuple(queue) for queue in queues if queue))
