"""Two branches of a model that meet: two towers, an image and a text encoder.

What comes before all else and costs next to nothing (a mask, positions, a cast of the input) may be
read by both. All other ops, in their order, are joined to what feeds them. Ops that would join two
parts which each have a good deal of the arithmetic are where branches meet; these, and all that
reads of them, are behind the branches. Of more than two branches the largest go first, each to the
side that has less.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from partita.graph.record import Graph, Op
from partita.graph.work import flops

LEAST = 0.1  # of the model's arithmetic, in each branch
NOTHING = 0.01  # of it, with all that comes before: an op that both may read


@dataclass(frozen=True, slots=True)
class Branches:
    """Forward ops of two branches and of what follows where they meet, each as they can run.

    What both branches read is the beginning of the first: nothing of the second is read by it.
    """

    sides: tuple[tuple[str, ...], tuple[str, ...]]
    meeting: tuple[str, ...]


def branches(graph: Graph) -> Branches | None:
    """The branches of a model, if it has two that meet."""
    ops = [op for op in graph.ops if op.phase == "forward"]
    work = {op.name: float(flops(graph.call(op))) for op in ops}
    parts = _BranchParts(work, max(sum(work.values()), 1.0))
    maker = {tensor: op.name for op in ops for tensor in op.outputs}
    for op in ops:
        parts.add(op.name, [maker[tensor] for tensor in op.inputs if tensor in maker])
    sides = parts.sides()
    if not parts.meeting or set(sides.values()) != {0, 1}:
        return None
    place = {name: sides.get(parts.root(name)) for name in work if name not in parts.meeting}
    _settle(ops, place, maker)
    begin = [*parts.light, *(op.name for op in ops if op.name not in parts.light)]
    left, right = (tuple(name for name in begin if place.get(name) == k) for k in (0, 1))
    return Branches((left, right), tuple(op.name for op in ops if place.get(op.name) is None))


@dataclass
class _BranchParts:
    """Ops that hang together, as far as branches do not meet."""

    own: Mapping[str, float]  # the arithmetic of each op
    total: float
    meeting: set[str] = field(default_factory=set)
    light: dict[str, frozenset[str]] = field(default_factory=dict)  # and all that comes before

    def __post_init__(self) -> None:
        self.above = {name: name for name in self.own}
        self.work = dict(self.own)  # of a part, under the name of its root

    def root(self, name: str) -> str:
        """Whom a part is named after."""
        while self.above[name] != name:
            self.above[name] = self.above[self.above[name]]
            name = self.above[name]
        return name

    def add(self, name: str, feeding: list[str]) -> None:
        """Join an op to what feeds it, unless branches meet there or before."""
        if all(before in self.light for before in feeding):
            cone = frozenset({name}.union(*(self.light[before] for before in feeding)))
            if sum(self.own[each] for each in cone) < NOTHING * self.total:
                self.light[name] = cone
                return
        roots = dict.fromkeys(self.root(before) for before in feeding if before not in self.light)
        meets = sum(self.work[root] >= LEAST * self.total for root in roots) > 1
        if meets or any(root in self.meeting for root in roots):
            self.meeting.add(name)
            return
        for root in roots:
            self.work[name] += self.work[root]
            self.above[root] = name

    def sides(self) -> dict[str, int]:
        """Roots of branches, each with the side that it goes to."""
        roots = (name for name, above in self.above.items() if name == above)
        heavy = [
            (-self.work[root], root)
            for root in roots
            if root not in self.meeting and self.work[root] >= LEAST * self.total
        ]
        side: dict[str, int] = {}
        filled = [0.0, 0.0]
        for negative, root in sorted(heavy):
            side[root] = filled.index(min(filled))
            filled[side[root]] -= negative
        return side


def _settle(ops: list[Op], place: dict[str, int | None], maker: Mapping[str, str]) -> None:
    """Put what is in no branch to who reads it: to the first branch where both do."""
    reading: dict[str, set[int]] = {op.name: set() for op in ops}
    for op in reversed(ops):
        if place.get(op.name) is None:
            sides = reading[op.name]
            if op.name in place:
                place[op.name] = min(sides, default=None)
        else:
            sides = {place[op.name] or 0}
        for tensor in op.inputs:
            if tensor in maker:
                reading[maker[tensor]] |= sides
