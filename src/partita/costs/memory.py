"""Bytes a device holds: parameters, gradients, optimizer states, activations, workspace.

parameters   n * bytes(dtype)
gradients    n * bytes(dtype), from the weight gradient until the update
states       n * 4 per optimizer state (Adam two, momentum one, SGD none), and 4 more for the
             full-precision copy where parameters are narrower
activations  what the backward reads of the forward, plus what is live at the moment
workspace    what the driver, libraries and communication buffers keep for themselves

What is kept of a micro-batch between forward and backward is counted by segment (`SavedReads`).
What a gradient reads is kept as it lies where the forward left it: as it was made, or, where the
forward had to bring it into the layout that the gradient needs as well, as that copy. So a tensor
that is gathered for a layer is kept gathered for the layer's weight gradient. Views keep what they
look at. Each counts to the segment whose gradient reads it first. What ops make that run again is
not kept; what they read is.

Parameters that several segments read are tied: every stage with one of them holds its own. A
sharding problem counts such a parameter to the op that reads it first. In a pipeline another
reader's stage has a copy of its own, with gradient and states, kept in the manner that the first
reader's choice says. `tied_bytes` is what that adds where the first reader is in an earlier stage.

PyTorch holds more (`kept_bytes`, `temporary_bytes`). The graph says what a gradient has to read. A
framework that runs op by op keeps more of some ops (positions of a pooling's largest values, both
factors of a gated unit, the scores of attention that it does not fuse), and some kernels need room
that is free again when they end. A compiler fuses the loss, and pads weights whose rows do not lie
on 16 bytes for as long as it multiplies. With `graph` execution there is nothing but what the model
needs.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.cluster import DeviceKind
from partita.costs.kernels import attention_scores, is_unfused
from partita.costs.layouts import Layout, conversion, num_shards
from partita.costs.physics import physics_of
from partita.costs.sharding import LEVELS, SplitChoice
from partita.graph.record import Call, Graph, Op, dtype_bytes
from partita.graph.splits import REPLICATE, placements
from partita.graph.work import VIEWS, passes_through
from partita.plans import Axis

GPU_WORKSPACE_BYTES = 1024**3  # context, library workspaces, communication buffers
# The part of the workspace that libraries take from PyTorch's allocator (32 MiB for cuBLAS in each
# thread, of which training has two): what `torch.cuda.max_memory_allocated` counts beside tensors.
LIBRARY_BYTES = 64 * 1024**2
Floats = npt.NDArray[np.float64]
Dims = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a whole model holds, undivided."""

    parameters: int
    gradients: int
    states: int
    saved_activations: int

    @property
    def total(self) -> int:
        """All of it together."""
        return self.parameters + self.gradients + self.states + self.saved_activations


def workspace_bytes(kind: DeviceKind) -> float:
    """Memory of a device that no tensor of ours can have."""
    if kind.type == "cpu":
        return 0.0
    record = physics_of(kind.name)
    known = record.own and "workspace_bytes" in dict(record.parameters)
    size = record.physics.workspace_bytes if known else GPU_WORKSPACE_BYTES
    return float(min(size, kind.memory_bytes // 8))


def model_memory(training: Graph) -> ModelMemory:
    """Totals of a training graph (of a forward graph: parameters only); added up once."""
    key = ("model memory", "")
    if key not in training.memo:
        training.memo[key] = _totals(training)
    model_memory = training.memo[key]
    assert isinstance(model_memory, ModelMemory)
    return model_memory


def _totals(training: Graph) -> ModelMemory:
    forward = [op for op in training.ops if op.phase == "forward"]
    seen = {name for op in forward for name in (*op.inputs, *op.outputs)}
    saved = {
        name
        for op in training.ops
        if op.phase in ("dgrad", "wgrad")
        for name in op.inputs
        if name in seen and training.tensor(name).role in ("activation", "input")
    }
    updates = [op for op in training.ops if op.phase == "update"]
    return ModelMemory(
        parameters=sum(tensor.size_bytes for tensor in training.parameters),
        gradients=sum(training.tensor(op.inputs[1]).size_bytes for op in updates),
        states=sum(training.tensor(n).size_bytes for op in updates for n in op.inputs[2:]),
        saved_activations=sum(training.tensor(n).size_bytes for n in saved),
    )


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


@dataclass(frozen=True, slots=True)
class Reader:
    """A forward op that reads a parameter after the op it is counted to."""

    op: str
    position: int  # among its inputs
    owner: str
    parameter: str
    alone: bool  # does it read no parameter that is its own?


def later_readers(graph: Graph) -> tuple[Reader, ...]:
    """All readers of parameters but the first of each."""
    owner: dict[str, str] = {}
    later: list[tuple[str, int, str]] = []
    owns: set[str] = set()
    for op in graph.ops:
        if op.phase != "forward":
            continue
        for position, name in enumerate(op.inputs):
            if graph.tensor(name).role != "parameter":
                continue
            if owner.setdefault(name, op.name) == op.name:
                owns.add(op.name)
            else:
                later.append((op.name, position, name))
    return tuple(
        Reader(op, position, owner[name], name, op not in owns) for op, position, name in later
    )


def kept_alike(
    choice_of: dict[str, SplitChoice], readers: Sequence[Reader], levels: Sequence[int] = LEVELS
) -> dict[str, SplitChoice]:
    """The choices with later readers keeping states sharded where the first one does.

    Parameters themselves are not, unless the `levels` that may be leave nothing else: gathering
    them again and again was not counted to the reader.
    """
    least = min((level for level in levels if level > 0), default=1)
    choices = dict(choice_of)
    for reader in readers:
        if reader.alone and choices[reader.owner].zero != 0:
            choices[reader.op] = SplitChoice(choices[reader.op].dims, least)
    return choices


def tied_bytes(
    graph: Graph,
    reader: Reader,
    choice: SplitChoice,
    axes: Sequence[Axis],
    update: Mapping[str, int],
) -> float:
    """What a device holds of a parameter at a later reader; `update` has the bytes of states."""
    layout = placements(graph.call(graph.op(reader.op)), choice.dims)[0][reader.position]
    copies = 1
    for place, axis in zip(layout, axes, strict=True):
        copies *= axis.size if place == REPLICATE and not axis.replicates else 1
    shards = num_shards(layout, [axis.ways() for axis in axes])
    held = graph.tensor(reader.parameter).size_bytes / shards
    total = held
    if reader.parameter in update:
        total += gradient_bytes(graph, reader.parameter) / shards
        states = update[reader.parameter] / shards
        total += states / (1 if choice.zero == 0 else copies)
    return total


def gradient_bytes(graph: Graph, parameter: str) -> int:
    """Bytes of the gradient of a parameter that is updated; 0 of any other."""
    updates = (op for op in graph.consumers(parameter) if op.phase == "update")
    return next((graph.tensor(op.inputs[1]).size_bytes for op in updates), 0)


def parameter_state_bytes(graph: Graph) -> dict[str, int]:
    """Bytes of the optimizer's states of every parameter that is updated."""
    return {
        op.inputs[0]: sum(graph.tensor(name).size_bytes for name in op.inputs[2:])
        for op in graph.ops
        if op.phase == "update"
    }


def kept_bytes(call: Call, dtype: str, execution: str) -> float:
    """Bytes that a forward op keeps for its gradients beyond what they read in the graph."""
    if execution == "graph" or call.phase != "forward":
        return 0.0
    size = dtype_bytes(dtype)
    if is_unfused(call):
        return 5.2 * attention_scores(call)  # softmax in f32, and which scores count
    if call.kind in ("lstm", "gru"):
        steps = math.prod(call.inputs[0][:2])
        return 1.5 * size * steps * call.inputs[1][0]  # gates, and the cell's states
    if call.kind in ("lstm_cell", "gru_cell"):
        states = len(call.outputs)
        return float(size * call.inputs[0][0] * call.inputs[1 + states][0])  # its gates
    if execution != "eager":
        return 0.0
    if call.kind == "pool" and call.text("mode") == "max" and call.attr("output") is None:
        return 8.0 * math.prod(call.outputs[0])
    if call.kind == "elementwise" and call.text("fn") in ("swiglu", "geglu"):
        return float(size * math.prod(call.outputs[0]))
    return 0.0


def temporary_bytes(call: Call, dtype: str, execution: str) -> float:
    """Bytes that an op needs only while it runs."""
    if execution == "graph":
        return 0.0
    size = dtype_bytes(dtype)
    eager = execution == "eager"
    if call.kind == "cross_entropy" and eager:  # the logarithm of the softmax, and its gradient
        return float(size * math.prod(call.inputs[0]))
    if is_unfused(call):
        return (5.0 if eager and call.phase == "forward" else 2.0) * attention_scores(call)
    if call.kind == "linear" and not eager and call.phase == "forward":
        unaligned = any(extent % 8 for extent in call.inputs[1])
        return float(size * math.prod(call.inputs[1])) if unaligned else 0.0
    return 0.0
