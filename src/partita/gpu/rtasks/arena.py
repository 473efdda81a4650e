"""Memory for a flow's pieces: a place for every value and weight, and the tile ops over them.

All regions of a model share one arena: what one region writes, the next reads where it is. Which
values lie inside others (members of concatenations, parts, other shapes of the same matrix) is
settled by `streams/place.py`, given matrices for images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from partita.errors import ProblemError
from partita.gpu.flow.place import BufferPlacement, place
from partita.gpu.flow.steps import Flow, Step
from partita.gpu.rtasks.drafts import Draft, Values, Weight
from partita.gpu.rtasks.pieces import Piece, Pieces
from partita.gpu.rtasks.tileops import NOWHERE, Place, ReadsFrom, TileOp

T = torch.Tensor
ALIGN = 64  # elements: a begin of a value or weight
MOST_ELEMENTS = 1 << 33  # what a region's table can point to


@dataclass(frozen=True, slots=True, eq=False)
class RegionOps:
    """The tile ops of one piece, and the ops that made what each of them reads, read by read."""

    ops: tuple[TileOp, ...]
    reads_from: ReadsFrom

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Which needs which: (before, after) by index."""
        pairs = {
            (before, after)
            for after, reads in enumerate(self.reads_from)
            for some in reads
            for before in some
        }
        return tuple(sorted(pairs))


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """Two tensors that hold everything, and where each value is."""

    data: T
    wide: T
    places: dict[str, Place]
    values: Values

    def view(self, name: str) -> T:
        """A value as the model knows it."""
        at, shape = self.places[name], self.values.shapes[name]
        image = self.values.is_image(name)
        order = (0, 2, 3, 1) if image else tuple(range(len(shape)))
        strides = [0] * len(shape)
        step = at.stride
        strides[order[-1]] = 1
        for dim in reversed(order[:-1]):
            strides[dim] = step
            step *= shape[dim]
        return self.data.as_strided(shape, strides, at.at)

    def matrix(self, where: Place) -> T:
        """A place as a matrix."""
        return self.data.as_strided((where.rows, where.cols), (where.stride, 1), where.at)


@dataclass(frozen=True, slots=True, eq=False)
class LoweredModel:
    """A flow as pieces in memory: `regions` has an entry for every piece, None for fallbacks."""

    flow: Flow
    pieces: tuple[Piece, ...]
    regions: tuple[RegionOps | None, ...]
    arena: Arena


def lower(flow_pieces: Pieces, device: torch.device) -> LoweredModel:
    """Give every value and weight its place, and fill in what is constant."""
    placement, pieces = _placed(flow_pieces)
    builder = _Builder(flow_pieces.values, placement)
    regions = [builder.region(piece.drafts) if piece.fused else None for piece in pieces]
    arena = builder.arena(device)
    return LoweredModel(flow_pieces.flow, pieces, tuple(regions), arena)


def _placed(flow_pieces: Pieces) -> tuple[BufferPlacement, tuple[Piece, ...]]:
    """Where values lie; pieces with the copies that this takes."""
    inside = [draft for piece in flow_pieces.pieces if piece.fused for draft in piece.drafts]
    made = {name for draft in inside for name in draft.makes}
    reads = dict.fromkeys(name for draft in inside for name in draft.reads if name not in made)
    steps = [step for draft in inside for step in _as_steps(draft, flow_pieces.values)]
    shapes = {name: _shape(flow_pieces.values, name) for name in (*reads, *made)}
    dtypes = dict.fromkeys(shapes, flow_pieces.values.dtype)
    flow = Flow(tuple(steps), tuple(reads), (), shapes, dtypes, {})
    settled, placement = place(flow)
    cats = {step.name: step.inputs for step in settled.steps if step.kind == "cat"}
    for name in placement.places:
        if name not in flow_pieces.values.shapes:  # a copy that was added
            source = settled.maker()[name].inputs[0]
            flow_pieces.values.add(name, source, flow_pieces.values.matrix(source).cols)
    pieces = []
    for piece in flow_pieces.pieces:
        drafts: list[Draft] = []
        for draft in piece.drafts:
            if piece.fused and draft.kind == "cat":
                drafts += _copies(draft, cats[draft.name], flow_pieces.values)
                draft = replace(draft, reads=cats[draft.name])
            drafts.append(draft)
        pieces.append(replace(piece, drafts=tuple(drafts)))
    return placement, tuple(pieces)


def _shape(values: Values, name: str) -> tuple[int, ...]:
    matrix = values.matrix(name)
    return matrix.rows, matrix.cols, 1, 1


def _as_steps(draft: Draft, values: Values) -> list[Step]:
    if draft.kind == "part":
        end = draft.begin + values.matrix(draft.name).cols
        return [Step(draft.name, "part", draft.reads, begin=draft.begin, end=end)]
    kind = "cat" if draft.kind == "cat" else "combine"  # whatever writes all of a matrix
    return [Step(name, kind, draft.reads) for name in draft.makes]


def _copies(draft: Draft, members: Sequence[str], values: Values) -> list[Draft]:
    attrs = {"act": "", "factors": (1.0,)}
    return [
        Draft(member, "combine", (source,), (), attrs, wide=(None, None))
        for source, member in zip(draft.reads, members, strict=True)
        if source != member
    ]


class _Builder:
    """Deals out the arena: values first, then weights as ops ask for them."""

    def __init__(self, values: Values, placement: BufferPlacement) -> None:
        self.values, self.placement = values, placement
        self.size, self.wide_size = 0, 0
        self.begins = {
            name: self.take(rows * width)
            for name, (rows, width, _, _) in placement.buffers.items()
        }  # fmt: skip
        self.places = {name: self.place(name) for name in placement.places}
        self.weights: dict[tuple[object, ...], Place] = {}
        self.fill: list[tuple[Place, T]] = []
        self.fill_wide: list[tuple[int, T]] = []

    def take(self, size: int) -> int:
        """Room for some elements."""
        begin = self.size
        self.size += -(size // -ALIGN) * ALIGN
        return begin

    def place(self, name: str) -> Place:
        """Where a value is."""
        where, matrix = self.placement.places[name], self.values.matrix(name)
        _, width, _, _ = self.placement.buffers[where.buffer]
        return Place(self.begins[where.buffer] + where.begin, matrix.rows, matrix.cols, width)

    def region(self, drafts: Sequence[Draft]) -> RegionOps:
        """The tile ops of a piece."""
        tiled = [draft for draft in drafts if draft.is_tiled]
        ops = tuple(map(self.op, tiled))
        reads_from = []
        writers: dict[str, list[tuple[int, str]]] = {}  # by buffer
        for after, draft in enumerate(tiled):
            reads_from.append(tuple(self.makers(name, writers) for name in draft.reads))
            for name in draft.makes:
                writers.setdefault(self.placement.places[name].buffer, []).append((after, name))
        return RegionOps(ops, tuple(reads_from))

    def makers(self, name: str, writers: dict[str, list[tuple[int, str]]]) -> tuple[int, ...]:
        """The ops before that wrote some of a value."""
        there = writers.get(self.placement.places[name].buffer, ())
        return tuple(before for before, written in there if self.overlap(written, name))

    def overlap(self, one: str, other: str) -> bool:
        """Do two values of one buffer share memory?"""
        a, b = self.placement.places[one], self.placement.places[other]
        return a.begin < b.begin + b.width and b.begin < a.begin + a.width

    def op(self, draft: Draft) -> TileOp:
        """A draft with its operands in place."""
        for name, value in draft.constants:
            self.fill.append((self.places[name], value))
        return TileOp(
            draft.name,
            draft.kind,
            tuple(self.places[name] for name in draft.reads),
            tuple(self.places[name] for name in draft.makes),
            tuple(map(self.weight, draft.weights)),
            tuple(map(self.vector, draft.wide)),
            draft.tile_attrs(),
        )

    def weight(self, weight: Weight) -> Place:
        """A weight's place; the same memory is kept once."""
        if weight.key not in self.weights:
            packed = weight.packed()
            rows, width = packed.shape
            where = Place(self.take(rows * width), rows, weight.cols, width)
            self.weights[weight.key] = where
            self.fill.append((where, packed[:, : weight.cols]))
        return self.weights[weight.key]

    def vector(self, value: T | None) -> int:
        """Where in the wide arena a vector is."""
        if value is None:
            return NOWHERE
        begin = self.wide_size
        self.wide_size += -(len(value) // -8) * 8
        self.fill_wide.append((begin, value))
        return begin

    def arena(self, device: torch.device) -> Arena:
        """Everything in memory; what is not constant is zero."""
        if self.size > MOST_ELEMENTS:
            raise ProblemError(
                f"values and weights are {self.size:,} elements, but a region's table points to "
                f"{MOST_ELEMENTS:,} at most",
                fix="use partita.streams for a model of this size",
            )
        data = torch.zeros(max(self.size, ALIGN), dtype=self.values.dtype, device=device)
        wide = torch.zeros(max(self.wide_size, 8), dtype=torch.float32, device=device)
        arena = Arena(data, wide, self.places, self.values)
        for where, value in self.fill:
            arena.matrix(where).copy_(value)
        for begin, vector in self.fill_wide:
            wide[begin : begin + len(vector)].copy_(vector)
        return arena
