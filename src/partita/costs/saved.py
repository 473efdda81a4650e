"""Bytes that a device keeps of a micro-batch between forward and backward, segment by segment.

What a gradient reads is kept as it lies where the forward left it: as it was made, or, where the
forward had to bring it into the layout that the gradient needs as well, as that copy. So a tensor
that is gathered for a layer is kept gathered for the layer's weight gradient. Views keep what they
look at. Each counts to the segment whose gradient reads it first. What ops make that run again is
not kept; what they read is.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.costs.layouts import Layout, conversion, num_shards
from partita.graph.record import Call, Graph, Op
from partita.graph.splits import placements
from partita.graph.work import VIEWS, passes_through

Floats = npt.NDArray[np.float64]
Dims = tuple[str, ...]


@dataclass(frozen=True)
class Read:
    """What one gradient op of a forward op reads: (input, tensor) of every activation."""

    origin: str
    call: Call
    tensors: tuple[tuple[int, str], ...]


class SavedReads:
    """Reads of all gradients of a folded training graph, worked out once for all its splits."""

    def __init__(self, graph: Graph, segment_of: Mapping[str, int], count: int) -> None:
        self.graph, self.segment_of, self.count = graph, segment_of, count
        self.maker: dict[str, Op] = {}
        self.looks_at: dict[str, str] = {}  # a view, what it is a view of
        self.reads: list[Read] = []
        self.gradients: dict[str, list[Op]] = {}  # of each forward op
        self.users: dict[str, list[tuple[str, Call, int]]] = {}  # forward: (op, call, input)
        for op in graph.ops:
            if op.phase == "forward":
                self._forward(op)
        for op in graph.ops:
            if op.phase in ("dgrad", "wgrad") and op.forward:
                self.gradients.setdefault(op.forward, []).append(op)
                reads = [(k, name) for k, name in enumerate(op.inputs) if name in self.maker]
                if reads:
                    self.reads.append(Read(op.forward, graph.call(op), tuple(reads)))

    def _forward(self, op: Op) -> None:
        call = self.graph.call(op)
        for name in op.outputs:
            self.maker[name] = op
            if is_view(call):
                self.looks_at[name] = op.inputs[0]
        for k, name in enumerate(op.inputs):
            if name in self.maker:
                self.users.setdefault(name, []).append((op.name, call, k))

    def bytes_of(
        self, dims_of: Mapping[str, Dims], sizes: Sequence[float], again: Set[str] = frozenset()
    ) -> Floats:
        """Bytes per segment, with every forward op split by `dims_of` on axes of these sizes.

        The ops of `again` run again for the gradients that read what they make.
        """
        array: Floats = np.zeros(self.count)
        seen: set[tuple[str, Layout]] = set()
        for read in (*self.reads, *self._second_reads(again)):
            dims = dims_of[read.origin]
            needed = placements(read.call, dims)[0]
            for k, name in read.tensors:
                if self.maker[name].name in again:
                    continue
                held, layout = self.held(name, needed[k], dims_of, sizes)
                if held in self.maker and (held, layout) not in seen:
                    seen.add((held, layout))
                    size = self.graph.tensor(held).size_bytes / num_shards(layout, sizes)
                    array[self.segment_of[read.origin]] += size
        return array

    def _second_reads(self, again: Set[str]) -> list[Read]:
        """What ops read that run again."""
        new_reads = []
        for name in sorted(again):
            op = self.graph.op(name)
            reads = [(k, tensor) for k, tensor in enumerate(op.inputs) if tensor in self.maker]
            new_reads.append(Read(name, self.graph.call(op), tuple(reads)))
        return new_reads

    def held(
        self, name: str, need: Layout, dims_of: Mapping[str, Dims], sizes: Sequence[float]
    ) -> tuple[str, Layout]:
        """Which tensor is kept, and how it lies, for a gradient that reads `name` as `need`."""
        made = self.made(name, dims_of)
        if made != need and self._is_copied(name, made, need, dims_of, sizes):
            return name, need
        while name in self.looks_at:
            name = self.looks_at[name]
        return name, self.made(name, dims_of) if name in self.maker else made

    def made(self, name: str, dims_of: Mapping[str, Dims]) -> Layout:
        """How a tensor comes to lie."""
        op = self.maker[name]
        return placements(self.graph.call(op), dims_of[op.name])[1][op.outputs.index(name)]

    def _is_copied(
        self, name: str, made: Layout, need: Layout, dims_of: Mapping[str, Dims],
        sizes: Sequence[float],
    ) -> bool:  # fmt: skip
        """Does the forward itself bring the tensor into this layout, by more than a slice?"""
        if not any(step.collective for step in conversion(1.0, sizes, made, need)):
            return False
        return any(
            placements(call, dims_of[user])[0][k] == need
            for user, call, k in self.users.get(name, ())
        )


def is_view(call: Call) -> bool:
    """Are the outputs of a forward op its first input, seen otherwise?"""
    return call.kind in VIEWS or (call.kind == "elementwise" and passes_through(call))
