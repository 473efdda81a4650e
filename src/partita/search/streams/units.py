"""Parts as they are searched: cut where that loses nothing, each with the best stages so far.

Where all later ops follow from all earlier ones, a stage across the cut is a single group: any
other group would hold the same later ops. A single group takes max(sum t, sum w). If no op has more
work than solo time (w <= t), that is sum t, no less than its ops one by one, so the part may be cut
there. Articulation points are such cuts: one right before and one right after the op.

In topological order such a cut is at k exactly if every op before k that feeds nothing before k
feeds every op from k on that nothing from k on feeds.
"""

from dataclasses import dataclass, replace

from partita.problems.streams import (
    StreamsProblem,
    StreamsSolution,
    StreamStage,
    part_bound,
    stage_us,
)
from partita.search.streams.greedy import by_level
from partita.search.streams.piece import SweepPiece, build
from partita.search.streams.sequential import one_by_one

SMALL_OPS = 64  # of a part that is looked at whole first
WORTH_CUTTING = 2**16  # entries of a table; smaller ones are swept in a few ms
MAX_OPS = 1024  # of a unit that is swept: its chains may take the cube of it
MAX_PAIRS = 256  # looked at for one cut


@dataclass(frozen=True, slots=True)
class OpUnit:
    """Ops of one part that are scheduled by themselves."""

    part: int
    ops: tuple[int, ...]
    piece: SweepPiece | None  # None where the ops are too many or too independent to be numbered
    stages: tuple[StreamStage, ...]
    costs_us: tuple[float, ...]
    bound_us: float

    def better(self, problem: StreamsProblem, stages: tuple[StreamStage, ...]) -> "OpUnit":
        """With these stages, if they take less time."""
        costs = tuple(stage_us(problem, stage) for stage in stages)
        return replace(self, stages=stages, costs_us=costs) if sum(costs) < self.time_us else self

    @property
    def time_us(self) -> float:
        """The time of its stages."""
        return sum(self.costs_us)


def units(problem: StreamsProblem) -> list[OpUnit]:
    """All parts in order, cut where they are large and it loses nothing."""
    units = []
    for number, part in enumerate(problem.parts):
        units += _of_part(problem, number, tuple(sorted(part)))
    return units


def whole(problem: StreamsProblem, units: list[OpUnit]) -> tuple[StreamsSolution, float]:
    """The stages of all units by part, and their time, summed as the problem sums it."""
    parts: list[list[StreamStage]] = [[] for _ in problem.parts]
    for unit in units:
        parts[unit.part] += unit.stages
    total = sum(cost for unit in units for cost in unit.costs_us)
    return StreamsSolution(tuple(map(tuple, parts))), total


def _of_part(problem: StreamsProblem, number: int, ops: tuple[int, ...]) -> list[OpUnit]:
    piece = build(problem, ops) if len(ops) <= SMALL_OPS else None
    if piece is not None and piece.entries <= WORTH_CUTTING:
        return [_unit(problem, number, ops, piece)]
    if any(problem.ops[op].w_us > problem.ops[op].t_us for op in ops):
        places = []
    else:
        places = cuts(problem, ops)
    pairs = zip([0, *places], [*places, len(ops)], strict=True)
    segments = [ops[begin:end] for begin, end in pairs]
    return [
        _unit(problem, number, each, build(problem, each) if len(each) <= MAX_OPS else None)
        for each in segments
    ]


def cuts(problem: StreamsProblem, ops: tuple[int, ...]) -> list[int]:
    """All k for which all of `ops[k:]` follow from all of `ops[:k]`; ids ascending."""
    place = {op: at for at, op in enumerate(ops)}
    preds = [{place[pred] for pred in problem.ops[op].preds if pred in place} for op in ops]
    fed_at: dict[int, list[int]] = {}  # ops by the first k before which all their producers are
    for op, producers in enumerate(preds):
        fed_at.setdefault(max(producers, default=-1) + 1, []).append(op)
    last: set[int] = set()  # before k, feeding nothing before k
    ready = set(fed_at.get(0, ()))  # from k on, fed by nothing from k on
    cuts = []
    for k in range(1, len(ops)):
        last = (last - preds[k - 1]) | {k - 1}
        ready = (ready - {k - 1}) | set(fed_at.get(k, ()))
        if len(last) * len(ready) <= MAX_PAIRS and all(last <= preds[op] for op in ready):
            cuts.append(k)
    return cuts


def _unit(
    problem: StreamsProblem, number: int, ops: tuple[int, ...], piece: SweepPiece | None
) -> OpUnit:
    first = one_by_one(ops)
    costs = tuple(stage_us(problem, stage) for stage in first)
    unit = OpUnit(number, ops, piece, first, costs, part_bound(problem, ops))
    return unit.better(problem, by_level(problem, ops))
