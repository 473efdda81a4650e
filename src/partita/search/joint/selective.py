"""Which ops selective checkpointing runs again: those that cost next to nothing for what they free.

A tensor that a gradient reads need not wait for it where it can be made again from what waits
anyway: a GELU's output from its input, a norm's from the residual. An op may run again if

    it has no product loop (`CHEAP_KINDS`), so that its time is that of reading and writing,
    its split exchanges nothing, and what it reads need not be converted once more (parameters that
    are kept sharded are gathered once more: those of such ops are small),
    freed bytes - bytes kept instead > 0, at no more than `worth` times the time to move them.

What was kept as a copy in another layout, such as the gathered input of a split layer, is converted
once more in the backward. That may run beside the data gradient of the layer that reads it, and has
to be shorter.

In the order of the forward each tensor is looked at once, with all cheap ops that it takes to make
it from what is kept: greedy, O(reads). What is made again by an earlier op is free to a later one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from partita.cluster import DeviceKind
from partita.costs.collectives import Collectives, Groups
from partita.costs.layouts import Layout, conversion, conversion_seconds, num_shards
from partita.costs.memory import Dims, SavedReads
from partita.costs.roofline import op_cost
from partita.costs.sharding import SplitChoice, ways_of
from partita.graph.backward import CHEAP_KINDS
from partita.graph.record import Op
from partita.graph.splits import communication, placements
from partita.plans import Axis

Held = tuple[str, Layout]


@dataclass(frozen=True)
class Again:
    """The ops that run again, and seconds of conversions by the op whose gradient needs them."""

    ops: frozenset[str] = frozenset()
    sent_s: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Selective:
    """Chooses for one way to split a folded training graph; `seconds` are of its forward ops."""

    saved: SavedReads
    kind: DeviceKind
    axes: tuple[Axis, ...]
    groups: Sequence[Groups]
    collectives: Collectives
    choice_of: Mapping[str, SplitChoice]
    seconds: Mapping[str, float]
    worth: float = 8.0  # times the seconds to read what is freed: a norm after another op is below

    def __post_init__(self) -> None:
        self.sizes = [axis.ways() for axis in self.axes]
        self.dims_of: dict[str, Dims] = {op: c.dims for op, c in self.choice_of.items()}
        self.kept: set[Held] = set()
        self.views: dict[str, set[str]] = {}  # kept tensor -> views of it that gradients read
        self.copies: dict[str, dict[Layout, str]] = {}  # tensor -> copies kept, each for which op
        self.cheap: dict[str, bool] = {}

    def chosen(self) -> Again:
        """The ops that are worth to be run again."""
        self._look()
        again: set[str] = set()
        sent: dict[str, float] = {}
        place = {name: i for i, name in enumerate(self.saved.maker)}
        for name in sorted(self.views, key=place.__getitem__):
            closure = self._closure(name, again)
            if closure is None:
                continue
            new, kept = closure
            freed = [one for one in self._held_of(name, new) if one in self.kept]
            gain = sum(self._bytes(*one) for one in freed) - sum(self._bytes(*one) for one in kept)
            moved = self._moved(new)
            spent = sum(self.seconds[op] for op in new)
            if (
                moved is not None
                and gain > 0
                and spent * self.kind.memory_bytes_per_s <= self.worth * gain
            ):
                again |= new
                self.kept = (self.kept | kept) - set(freed)
                for op, seconds in moved.items():
                    sent[op] = sent.get(op, 0.0) + seconds
        return Again(frozenset(again), sent)

    def _look(self) -> None:
        """What is kept for gradients, as it was made or as a copy."""
        saved = self.saved
        for read in saved.reads:
            needed = placements(read.call, self.dims_of[read.origin])[0]
            for k, name in read.tensors:
                held, layout = saved.held(name, needed[k], self.dims_of, self.sizes)
                if held not in saved.maker:
                    continue
                self.kept.add((held, layout))
                views = self.views.setdefault(held, set())
                if layout != saved.made(held, self.dims_of):
                    self.copies.setdefault(held, {}).setdefault(layout, read.origin)
                    continue
                while name != held:
                    views.add(name)
                    name = saved.looks_at[name]

    def _closure(self, name: str, again: set[str]) -> tuple[set[str], set[Held]] | None:
        """The ops that it takes to make a tensor again, and what is kept for them."""
        saved = self.saved
        new: set[str] = set()
        kept: set[Held] = set()
        mine = (name, *sorted(self.views[name]))
        left = [saved.maker[made] for made in mine]
        if not all(map(self._may, left)):
            return None
        while left:
            op = left.pop()
            if op.name in new or op.name in again:
                continue
            new.add(op.name)
            needed = placements(saved.graph.call(op), self.dims_of[op.name])[0]
            for read, need in zip(op.inputs, needed, strict=True):
                if read not in saved.maker:
                    continue
                maker = saved.maker[read]
                if read in mine or maker.name in again or maker.name in new:
                    if self._sends(read, need):
                        return None
                    continue
                held = saved.held(read, need, self.dims_of, self.sizes)
                if held in self.kept or held[0] not in saved.maker:
                    continue
                if self._may(maker) and not self._sends(read, need):
                    left.append(maker)
                else:
                    kept.add(held)
        return new, kept

    def _held_of(self, name: str, ops: set[str]) -> list[Held]:
        """What need not be kept any more when some ops run again to make a tensor."""
        held = [(name, self.saved.made(name, self.dims_of))]
        for op in sorted(ops):
            for made in self.saved.graph.op(op).outputs:
                held.extend((made, layout) for layout in self.copies.get(made, ()))
        return held

    def _moved(self, ops: set[str]) -> dict[str, float] | None:
        """Seconds of conversions that are made once more; None where they take too long."""
        moved: dict[str, float] = {}
        for op in sorted(ops):
            for name in self.saved.graph.op(op).outputs:
                for layout, reader in self.copies.get(name, {}).items():
                    moved[reader] = moved.get(reader, 0.0) + conversion_seconds(
                        self.saved.graph.tensor(name).size_bytes, self.sizes, self.groups,
                        self.collectives, self.saved.made(name, self.dims_of), layout,
                    )  # fmt: skip
        if any(seconds > self._beside(reader) for reader, seconds in moved.items()):
            return None
        return moved

    def _beside(self, reader: str) -> float:
        """Seconds of an op's data gradient."""
        split = tuple(sorted(ways_of(self.dims_of[reader], self.axes).items()))
        graph = self.saved.graph
        return sum(
            op_cost(graph, op, self.kind, split).seconds
            for op in self.saved.gradients.get(reader, ())
            if op.phase == "dgrad"
        )

    def _sends(self, name: str, need: Layout) -> bool:
        """Does a tensor have to be converted by more than a slice?"""
        made = self.saved.made(name, self.dims_of)
        return any(step.collective for step in conversion(1.0, self.sizes, made, need))

    def _may(self, op: Op) -> bool:
        """Is an op cheap, and does each device run it by itself?"""
        if op.name not in self.cheap:
            self.cheap[op.name] = self._is_cheap(op)
        return self.cheap[op.name]

    def _is_cheap(self, op: Op) -> bool:
        graph, choice = self.saved.graph, self.choice_of[op.name]
        if op.kind not in CHEAP_KINDS or not set(graph.outputs).isdisjoint(op.outputs):
            return False
        return not communication(graph.call(op), ways_of(choice.dims, self.axes))

    def _bytes(self, name: str, layout: Layout) -> float:
        return self.saved.graph.tensor(name).size_bytes / num_shards(layout, self.sizes)
