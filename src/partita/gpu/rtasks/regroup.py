"""Which ops of a region are worth fusing: runs of them, in order, fused or left to PyTorch.

Every op has a time as tiles, f, and as kernels of its own, u; starting a region costs c:

    best(i, fused)   = f_i + min(best(i-1, fused), best(i-1, unfused) + c)
    best(i, unfused) = u_i + min(best(i-1, fused), best(i-1, unfused))

f is the op alone on the device, scaled so that all of them add up to the time of the whole region:
ops that run beside each other are cheap. A run also ends where its kernel would have more
than `MOST_BRANCHES` kinds of tasks, which Triton takes minutes to compile. The order of the ops is
topological, so any cut of it is a cut of the region.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from partita.gpu.rtasks.arena import LoweredModel, RegionOps
from partita.gpu.rtasks.drafts import Draft
from partita.gpu.rtasks.generate import Source
from partita.gpu.rtasks.pieces import Piece
from partita.gpu.rtasks.planned import PlannedRegion
from partita.gpu.rtasks.tileops import TileOp, tiles

REGION_US = 5.0  # a launch, the first tasks, the last signal
MOST_BRANCHES = 32

Runs = Sequence[tuple[bool, Sequence[int]]]  # fused or not, the ops


def branches(ops: Sequence[TileOp]) -> int:
    """Kinds of tasks that a kernel of these ops has at least."""
    return len(Source(ops, [tiles(op)[0] for op in ops]).branches)


def runs_by_cost(
    fused_us: Sequence[float], unfused_us: Sequence[float]
) -> list[tuple[bool, range]]:
    """The cheapest runs of ops in order."""
    best = {True: REGION_US, False: 0.0}
    choices: list[dict[bool, bool]] = []  # whether the op before is fused, by whether this one is
    for f, u in zip(fused_us, unfused_us, strict=True):
        into_fused = bool(choices) and best[False] + REGION_US < best[True]
        into_plain = bool(choices) and best[True] < best[False]
        choices.append({True: not into_fused, False: into_plain})
        best = {
            True: f + (best[False] + REGION_US if into_fused else best[True]),
            False: u + (best[True] if into_plain else best[False]),
        }
    state = best[True] < best[False]
    states = []
    for choice in reversed(choices):
        states.append(state)
        state = choice[state]
    states.reverse()
    runs, begin = [], 0
    for fused, some in groupby(states):
        length = len(list(some))
        runs.append((fused, range(begin, begin + length)))
        begin += length
    return runs


def split_by_cost(
    plan: PlannedRegion, fused_us: float, unfused_us: Sequence[float]
) -> list[tuple[bool, range]]:
    """The runs of a region, by what it takes as a whole and its ops take unfused."""
    problem = plan.problem
    programs = problem.device.num_units * problem.device.slots_per_unit
    alone = [
        min(-(t.num_tiles // -programs) * t.tile_us for t in operator.tilings)
        for operator in problem.operators
    ]
    scale = fused_us / sum(alone)
    return runs_by_cost([scale * each for each in alone], unfused_us)


def split_by_branches(ops: Sequence[TileOp], most: int = MOST_BRANCHES) -> list[tuple[bool, range]]:
    """All fused, in as few runs as there is code for."""
    runs, begin = [], 0
    for end in range(1, len(ops) + 1):
        if branches(ops[begin:end]) > most:
            runs.append((True, range(begin, end - 1)))
            begin = end - 1
    return [*runs, (True, range(begin, len(ops)))]


def split_piece(lowered: LoweredModel, index: int, runs: Runs) -> LoweredModel:
    """The same in memory, with one piece as several: regions, and runs that PyTorch computes.

    Ops of one step stay together, and the copies of a concatenation with it: a cut that would part
    them is made after them.
    """
    piece, region = lowered.pieces[index], lowered.regions[index]
    assert region is not None
    tiled = [place for place, draft in enumerate(piece.drafts) if draft.is_tiled]
    fused_ops = {op for fused, ops in runs if fused for op in ops}
    pieces: list[Piece] = []
    regions: list[RegionOps | None] = []
    begin = 0
    for op in range(1, len(tiled) + 1):
        if op < len(tiled):
            changes = (op in fused_ops) != (begin in fused_ops) or _starts(runs, op)
            if not changes or not _may_cut(piece.drafts, tiled[op]):
                continue
        first = tiled[begin] if begin else 0
        last = tiled[op] if op < len(tiled) else len(piece.drafts)
        fused = begin in fused_ops
        pieces.append(Piece(fused, piece.drafts[first:last]))
        regions.append(_some(region, range(begin, op)) if fused else None)
        begin = op
    return replace(
        lowered,
        pieces=(*lowered.pieces[:index], *pieces, *lowered.pieces[index + 1 :]),
        regions=(*lowered.regions[:index], *regions, *lowered.regions[index + 1 :]),
    )


def _starts(runs: Runs, op: int) -> bool:
    return any(len(ops) and ops[0] == op for _, ops in runs)


def _may_cut(drafts: Sequence[Draft], place: int) -> bool:
    """Can a piece end before this draft?"""
    before, after = drafts[:place], drafts[place:]
    if before[-1].is_tiled and not before[-1].steps:
        return False  # a copy, and its concatenation follows
    done = {step for draft in before for step in draft.steps}
    return not any(step in done for draft in after for step in draft.steps)


def _some(region: RegionOps, ops: Sequence[int]) -> RegionOps:
    place = {op: number for number, op in enumerate(ops)}
    reads_from = tuple(
        tuple(
            tuple(place[each] for each in some if each in place) for some in region.reads_from[op]
        )
        for op in ops
    )
    return RegionOps(tuple(region.ops[op] for op in ops), reads_from)
