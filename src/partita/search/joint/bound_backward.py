"""What a segment's backward waits for at the least, and what its gradient all-reduces take.

A device runs its gradient ops in the order of the graph, weight gradients right after the data
gradients of their op (or, taken apart, much later). Between the data gradients of an op and those
of the op before it nothing else runs, so that

    wait >= statistics, conversion of the gradient between the two, halos
            - the weight gradients in between

Conversions of one device follow each other on its network lane, so waits add up. Where several ops
read a tensor, their gradients are added first, in the layout in which one of them lies: a share if
any lies sharded, partial sums only if all are. Such a sum is a node of its own beside the ops: its
choices are layouts, each with the reader that has it ("witness"), and pairs that cannot be are
forbidden. It takes its own time, and what it makes is waited for in full.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.cluster import DeviceKind
from partita.costs.layouts import Layout
from partita.costs.roofline import op_cost
from partita.costs.sharding import ShardingModel, SplitChoice, ways_of
from partita.graph.loops import loop_nest
from partita.graph.record import Graph, Op
from partita.graph.splits import PARTIAL, TensorPlacement, placements

Floats = npt.NDArray[np.float64]
Exchanged = Callable[[Op, bool], Floats]  # per choice: halos of an op, or its statistics
Near = tuple[bool, ...]  # see Backward.take
Convert = Callable[[float, list[Layout], list[Layout]], Floats]

BACKWARD = ("dgrad", "wgrad")
ALL = -1  # the witness of partial sums: every reader


@dataclass(frozen=True, eq=False)
class Sum:
    """A sum of gradients inside a segment: seconds of every choice, and edges from other ops.

    An edge is (op, seconds waited, seconds on the network); rows are the op's choices.
    """

    segment: int
    seconds: Floats
    edges: tuple[tuple[int, Floats, Floats], ...]


class Backward:
    """Reads waits and sums off the order of a graph's gradient ops."""

    def __init__(
        self, graph: Graph, model: ShardingModel, kind: DeviceKind,
        segment_of: npt.NDArray[np.int64],
        convert: Convert, exchanged: Exchanged,
    ) -> None:  # fmt: skip
        self.graph, self.model, self.kind, self.convert = graph, model, kind, convert
        self.segment_of, self.exchanged = segment_of, exchanged
        self.taken: set[tuple[str, bool]] = set()  # gradient ops whose exchanges are counted
        self.axes = model.mesh.axes
        self.ops = [op for op in graph.ops if op.phase in BACKWARD]
        self.place = {op.name: i for i, op in enumerate(self.ops)}
        self.number = {name: i for i, name in enumerate(model.ops)}
        self.known: dict[tuple[object, ...], tuple[Floats, tuple[tuple[Floats, Floats], ...]]] = {}

    def take(self, giver: Op, taker: Op) -> Near:
        """Is a conversion waited for, with the giver's statistics, with the taker's halos?

        Empty where it is not; exchanges are for the first edge that asks.
        """
        if not self.is_near(giver, taker):
            return ()
        sides = (giver.name, False), (taker.name, True)
        first = tuple(side not in self.taken for side in sides)
        self.taken.update(sides)
        return first

    def waits(self, giver: Op, taker: Op, conversion: Floats, near: Near) -> Floats:
        """What of a conversion is waited for; choices of the taker's op by those of the giver's."""
        if not near:
            return np.zeros_like(conversion)
        after, before = near
        own = self._own(giver, taker, after)
        maximum: Floats = np.maximum(0.0, conversion + own[None, :])
        if before:
            maximum = np.maximum(
                0.0, conversion + own[None, :] + self.exchanged(taker, True)[:, None]
            )
        return maximum

    def is_near(self, giver: Op, taker: Op) -> bool:
        """Does a taker run right after its giver but for the giver's other gradients?

        Weight gradients are no takers: they may be put off.
        """
        return taker.phase == "dgrad" and all(
            op.forward == giver.forward or self._seconds(op, ("",) * len(self.axes)) == 0
            for op in self._between(giver, taker)
        )

    def _between(self, giver: Op, taker: Op) -> list[Op]:
        return self.ops[self.place[giver.name] + 1 : self.place[taker.name]]

    def _own(self, giver: Op, taker: Op, exchanges: bool) -> Floats:
        """A giver's statistics less the seconds of its other gradients, for each choice."""
        choices = self.model.choices[self.number[giver.forward]]
        total = np.zeros(len(choices))
        if exchanges:
            total += self.exchanged(giver, False)
        for op in self._between(giver, taker):
            if op.forward == giver.forward:
                total -= [self._seconds(op, choice.dims) for choice in choices]
        return total

    def _seconds(self, op: Op, dims: tuple[str, ...]) -> float:
        split = tuple(sorted(ways_of(dims, self.axes).items()))
        return op_cost(self.graph, op, self.kind, split).seconds

    # Sums.

    def sums(self, look: Callable[[int], int]) -> list[Sum]:
        """The sums whose parts all come from one segment; `look` is equal for ops that are."""
        totals = []
        for op in self.ops:
            if op.forward or op.phase != "dgrad":
                continue
            givers = [self.graph.producer(name) for name in op.inputs]
            readers = [self.number[giver.forward] for giver in givers if giver is not None]
            segments = {int(self.segment_of[j]) for j in readers}
            if len(readers) == len(op.inputs) and len(segments) == 1:
                totals.append(self._sum(op, readers, segments.pop(), look))
        return totals

    def _sum(self, op: Op, readers: list[int], segment: int, look: Callable[[int], int]) -> Sum:
        taker = self._taker(op)
        maker = -1 if taker is None else self.number[taker.forward]
        if maker < 0 or self.segment_of[maker] != segment:
            taker, maker = None, -1
        others = [maker] if taker else []
        near = [self._near(name, op) if taker else () for name in op.inputs]
        halos = taker is not None and (taker.name, True) not in self.taken
        if taker is not None:
            self.taken.add((taker.name, True))
        looks = map(look, (*readers, *others))
        key = (self.graph.call(op), *looks, bool(taker), *near, halos)
        if key not in self.known:
            self.known[key] = self._costs(op, readers, taker, near, halos)
        seconds, matrices = self.known[key]
        ends = (*readers, *others)
        edges = tuple((j, *pair) for j, pair in zip(ends, matrices, strict=True))
        return Sum(segment, seconds, edges)

    def _near(self, part: str, op: Op) -> Near:
        giver = self.graph.producer(part)
        assert giver is not None, "a part is given by an op"
        return self.take(giver, op)

    def _taker(self, op: Op) -> Op | None:
        """The data gradients that read a sum as soon as it is there."""
        after = self.place[op.name] + 1
        if after >= len(self.ops):
            return None
        taker = self.ops[after]
        reads = taker.phase == "dgrad" and taker.forward and op.outputs[0] in taker.inputs
        return taker if reads else None

    def _costs(
        self, op: Op, readers: list[int], taker: Op | None, near: list[Near], halos: bool
    ) -> tuple[Floats, tuple[tuple[Floats, Floats], ...]]:
        """Seconds of every choice of a sum, and (waited, on the network) for each edge."""
        size = float(self.graph.tensor(op.outputs[0]).size_bytes)
        parts = [self._given(name, j) for name, j in zip(op.inputs, readers, strict=True)]
        per_axis = self._choices(parts)
        layouts = [tuple(p for p, _ in choice) for choice in itertools.product(*per_axis)]
        access = loop_nest(self.graph.call(op)).outputs[0]
        seconds = []
        for layout in layouts:
            dims = tuple(
                access.dims[p.dim][0] if p.kind == "shard" and access.dims[p.dim] else ""
                for p in layout
            )
            seconds.append(self._seconds(op, dims))
        matrices = []
        for k, (name, part) in enumerate(zip(op.inputs, parts, strict=True)):
            moved = self.convert(size, part, layouts)
            giver = self.graph.producer(name)
            assert giver is not None, "a part is given by an op"
            waited = np.zeros_like(moved)
            if near[k]:
                waited = np.maximum(0.0, moved + self._own(giver, op, near[k][0])[:, None])
            waited[~_allowed(k, part, per_axis)] = math.inf
            matrices.append((waited, moved))
        if taker is not None:
            moved = self.convert(size, layouts, self._needed(taker, op.outputs[0])).T
            waited = moved + (self.exchanged(taker, True)[:, None] if halos else 0.0)
            matrices.append((waited, moved))
        return np.array(seconds), tuple(matrices)

    def _given(self, name: str, reader: int) -> list[Layout]:
        giver = self.graph.producer(name)
        assert giver is not None, "a part is given by an op"
        at = giver.outputs.index(name)
        return [self._sides(giver, choice)[1][at] for choice in self.model.choices[reader]]

    def _needed(self, taker: Op, name: str) -> list[Layout]:
        at = taker.inputs.index(name)
        choices = self.model.choices[self.number[taker.forward]]
        return [self._sides(taker, choice)[0][at] for choice in choices]

    def _sides(self, op: Op, choice: SplitChoice) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        return placements(self.graph.call(op), choice.dims)

    def _choices(self, parts: list[list[Layout]]) -> list[list[tuple[TensorPlacement, int]]]:
        """Per axis every placement of a sum, with the reader that has it."""
        per_axis = []
        for axis in range(len(self.axes)):
            places: dict[tuple[TensorPlacement, int], None] = {}
            for k, part in enumerate(parts):
                for place in {layout[axis]: None for layout in part}:
                    places[place, ALL if place == PARTIAL else k] = None
            per_axis.append(list(places))
        return per_axis


def _allowed(
    reader: int, part: list[Layout], per_axis: list[list[tuple[TensorPlacement, int]]]
) -> npt.NDArray[np.bool_]:
    """Which layouts of a reader's part go with which choices of the sum: all axes must."""
    known: dict[Layout, npt.NDArray[np.bool_]] = {}
    for own in part:
        if own not in known:
            axes = (
                np.array([_may_be(reader, place, *option) for option in options])
                for place, options in zip(own, per_axis, strict=True)
            )
            known[own] = functools.reduce(np.logical_and.outer, axes).ravel()
    return np.array([known[own] for own in part])


def _may_be(reader: int, own: TensorPlacement, common: TensorPlacement, witness: int) -> bool:
    """May a part lie so along an axis, where the sum is made in such a placement?"""
    if witness == reader and own != common:
        return False
    if common == PARTIAL and own != PARTIAL:
        return False
    return own.kind != "shard" or common.kind == "shard"
