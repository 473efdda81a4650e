"""Long parts window by window: the stages of a few neighbours are replaced by the shortest ones.

The ops of consecutive stages may be scheduled anew by themselves: what comes before and after them
stays where it is. Windows overlap; passes go on until one changes nothing. No proof of optimality
comes out of it, but no answer gets worse, and every window is exact.
"""

from collections.abc import Callable

from partita.problems.streams import StreamsProblem, StreamStage, stage_us
from partita.search.streams.piece import SweepPiece, build
from partita.search.streams.sweep import rules, solve

WINDOW_OPS = 28
WINDOW_ENTRIES = 2**14
PASSES = 8


def shorter(
    problem: StreamsProblem, stages: tuple[StreamStage, ...], stopped: Callable[[], bool]
) -> tuple[StreamStage, ...]:
    """A schedule of the same ops that takes no longer; what there is so far if stopped."""
    now = list(stages)
    settled: set[frozenset[int]] = set()  # ops of windows that are at their best
    for _ in range(PASSES):
        changed, begin = False, 0
        while begin < len(now):
            if stopped():
                return tuple(now)
            size = _size(now, begin)
            new = _shortest(problem, now[begin : begin + size], settled, stopped)
            if new is not None:
                now[begin : begin + size] = new
                changed, size = True, len(new)
            begin += max(1, size // 2)
        if not changed:
            break
    return tuple(now)


def chunks(problem: StreamsProblem, ops: tuple[int, ...]) -> list[SweepPiece]:
    """Ops, ids ascending, in consecutive pieces that are each swept in a few ms."""
    pieces, begin = [], 0
    while begin < len(ops):
        size = WINDOW_OPS
        piece = build(problem, ops[begin : begin + size])
        while piece is None or piece.entries > WINDOW_ENTRIES:
            size //= 2
            piece = build(problem, ops[begin : begin + size])
        pieces.append(piece)
        begin += size
    return pieces


def _size(stages: list[StreamStage], begin: int) -> int:
    """How many stages from here on have few enough ops; one at least."""
    ops, size = 0, 0
    for stage in stages[begin:]:
        ops += len(stage.ops)
        if ops > WINDOW_OPS:
            break
        size += 1
    return max(1, size)


def _shortest(
    problem: StreamsProblem,
    window: list[StreamStage],
    settled: set[frozenset[int]],
    stopped: Callable[[], bool],
) -> list[StreamStage] | None:
    """Better stages for those of a window, if there are any; for fewer where all are too many."""
    for end in range(len(window), 0, -1):
        ops = tuple(sorted(op for stage in window[:end] for op in stage.ops))
        if frozenset(ops) in settled:
            return None
        piece = build(problem, ops)
        if piece is None or piece.entries > WINDOW_ENTRIES:
            continue
        answer = solve(piece, rules(problem.constants, problem.r, problem.s), stopped)
        if answer is None:
            return None
        settled.add(frozenset(ops))
        time_us = sum(stage_us(problem, stage) for stage in window[:end])
        if answer.time_us < time_us * (1 - 1e-12):
            return [*named(answer.stages, ops), *window[end:]]
        return None
    return None


def named(stages: tuple[StreamStage, ...], ops: tuple[int, ...]) -> tuple[StreamStage, ...]:
    """Stages of positions in `ops` as stages of ops."""
    return tuple(
        StreamStage(
            tuple(tuple(ops[at] for at in group) for group in stage.groups),
            tuple(ops[at] for at in stage.merge),
        )
        for stage in stages
    )
