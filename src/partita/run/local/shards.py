"""What each rank of a mesh holds of a tensor, and the whole tensor from what the ranks hold.

A rank has one coordinate per mesh axis; ranks are numbered row by row, the last axis fastest. A
layout is one placement per axis: S(i) gives a rank its share of dim i, R all of it, P a summand.
If several axes shard one dim, the first of them cuts first. Along an axis with p parts (its size,
or the sum of its weights) a dim of n elements is cut at 0, n/p, 2n/p, ... (rounded down), and a
place takes as many parts as its weight says.

The rows of recurrent weights are (gates x hidden units). They are shared out gate by gate, so that
a rank has the rows of its units in every gate: its share is an index set and no interval.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from partita.errors import ProgramError
from partita.graph.record import Call, Graph
from partita.graph.shapes import gates
from partita.graph.splits import TensorPlacement
from partita.plans import Axis

T = torch.Tensor
Shape = tuple[int, ...]
Place = tuple[int, ...]  # the coordinates of a rank
Layout = tuple[TensorPlacement, ...]
Index = tuple[slice | T, ...]

RECURRENT = frozenset({"lstm", "gru", "lstm_cell", "gru_cell"})


@functools.lru_cache(maxsize=256)
def places(axes: tuple[Axis, ...]) -> tuple[Place, ...]:
    """The coordinates of every rank, in order."""
    return tuple(itertools.product(*(range(axis.size) for axis in axes)))


def interval(size: int, cuts: Sequence[tuple[Axis, int]]) -> tuple[int, int]:
    """Start and stop of a share of a dim that is cut along axes, outermost first."""
    start, stop = 0, size
    for axis, place in cuts:
        weights = axis.weights or (1,) * axis.size
        before, length = sum(weights[:place]), stop - start
        start, stop = (
            start + length * before // axis.parts,
            start + length * (before + weights[place]) // axis.parts,
        )
    return start, stop


@functools.lru_cache(maxsize=65536)
def shard_index(
    shape: Shape, layout: Layout, axes: tuple[Axis, ...], place: Place, num_gates: int = 1
) -> Index:
    """Which elements of a tensor a rank holds: per dim an interval, or rows of every gate."""
    index: list[slice | T] = []
    for dim, size in enumerate(shape):
        cuts = [
            (axes[i], place[i])
            for i, placement in enumerate(layout)
            if placement.kind == "shard" and placement.dim == dim
        ]
        if dim == 0 and num_gates > 1 and cuts:
            units = size // num_gates
            start, stop = interval(units, cuts)
            rows = [range(gate * units + start, gate * units + stop) for gate in range(num_gates)]
            index.append(torch.tensor(list(itertools.chain(*rows)), dtype=torch.int64))
        else:
            index.append(slice(*interval(size, cuts)))
    return tuple(index)


def holds_sum(layout: Layout, place: Place) -> bool:
    """Is this the rank that holds all of a sum where the others hold zeros?"""
    pairs = zip(layout, place, strict=True)
    return all(placement.kind != "partial" or coordinate == 0 for placement, coordinate in pairs)


def shard(whole: T, layout: Layout, axes: tuple[Axis, ...], place: Place, num_gates: int = 1) -> T:
    """What a rank holds of a tensor; of partial sums the first rank gets all, the others zeros."""
    own = whole[shard_index(tuple(whole.shape), layout, axes, place, num_gates)].clone()
    return own if holds_sum(layout, place) else torch.zeros_like(own)


def whole(
    shards: Sequence[T], shape: Shape, layout: Layout, axes: tuple[Axis, ...], num_gates: int = 1
) -> T:
    """The tensor that the ranks hold: shares put together, partial sums added, first replicas."""
    full = shards[0].new_zeros(shape)
    for own, place in zip(shards, places(axes), strict=True):
        if any(c for c, p in zip(place, layout, strict=True) if p.kind == "replicate"):
            continue
        full[shard_index(shape, layout, axes, place, num_gates)] += own
    return full


def convert(
    shards: Sequence[T],
    shape: Shape,
    have: Layout,
    need: Layout,
    axes: tuple[Axis, ...],
    num_gates: int = 1,
) -> list[T]:
    """The shards after a collective (or a slice) along one axis: the layouts differ there only.

    A rank takes from the ranks of its line along that axis and from no others. They do not have
    what it needs if a later axis shards the same dim: that one must be converted first.
    """
    changed = [i for i, (a, b) in enumerate(zip(have, need, strict=True)) if a != b]
    if not changed:
        return list(shards)
    if len(changed) > 1:
        raise ProgramError(
            f"a step from {_shown(have)} to {_shown(need)} changes {len(changed)} axes",
            fix="convert one axis after the other",
        )
    (axis,) = changed
    lines: dict[Place, tuple[T, T]] = {}
    results = []
    for rank, place in enumerate(places(axes)):
        is_copy = have[axis].kind == "replicate"
        line = place if is_copy else (*place[:axis], 0, *place[axis + 1 :])
        if line not in lines:
            lines[line] = _line(shards, shape, have, axes, axis, place, num_gates)
        full, known = lines[line]
        index = shard_index(shape, need, axes, place, num_gates)
        if not bool(known[index].all()):
            raise ProgramError(
                f"a step from {_shown(have)} to {_shown(need)}: rank {rank} needs elements that no "
                f"rank of its line along axis {axes[axis].name!r} holds",
                fix="convert the later axes that shard the same dim first",
            )
        own = full[index].clone()
        dropped = need[axis].kind == "partial" and place[axis] > 0
        results.append(torch.zeros_like(own) if dropped else own)
    return results


def _line(
    shards: Sequence[T],
    shape: Shape,
    layout: Layout,
    axes: tuple[Axis, ...],
    axis: int,
    place: Place,
    num_gates: int,
) -> tuple[T, T]:
    """What the ranks of a line hold together (of copies, the rank alone), and where that lies."""
    full, known = shards[0].new_zeros(shape), torch.zeros(shape, dtype=torch.bool)
    is_copy = layout[axis].kind == "replicate"
    for rank, other in enumerate(places(axes)):
        if any(a != b for i, (a, b) in enumerate(zip(place, other, strict=True)) if i != axis):
            continue
        if is_copy and other != place:
            continue
        index = shard_index(shape, layout, axes, other, num_gates)
        full[index] += shards[rank]
        known[index] = True
    return full, known


def _shown(layout: Layout) -> str:
    return " ".join(map(str, layout))


def replica_error(shards: Sequence[T], layout: Layout, axes: tuple[Axis, ...]) -> float:
    """The largest difference between replicas of a tensor, relative to its largest element."""
    first: dict[Place, T] = {}
    error, scale = 0.0, 1e-300
    for own, place in zip(shards, places(axes), strict=True):
        pairs = zip(place, layout, strict=True)
        line = tuple(0 if p.kind == "replicate" else coordinate for coordinate, p in pairs)
        other = first.setdefault(line, own)
        if other is own:
            continue
        if other.shape != own.shape:
            return math.inf
        if own.numel():
            error = max(error, difference(own, other))
            scale = max(scale, float(other.double().abs().nan_to_num(posinf=0.0).max()))
    return error / scale if error else 0.0


def difference(a: T, b: T) -> float:
    """The largest difference of two tensors of one shape; equal infinities do not differ."""
    if not a.numel():
        return 0.0
    apart = torch.where(a == b, 0.0, (a.double() - b.double()).abs())
    return math.inf if bool(apart.isnan().any()) else float(apart.max())


def flat_part(own: T, index: int, count: int) -> T:
    """Part `index` of `count` nearly equal parts of a rank's shard, flattened (ZeRO)."""
    flat = own.reshape(-1)
    size = flat.numel()
    return flat[size * index // count : size * (index + 1) // count].clone()


def join_flat(parts: Sequence[T], shape: Shape) -> T:
    """A rank's shard from its flat parts in order."""
    return torch.cat([part.reshape(-1) for part in parts]).reshape(shape)


@functools.lru_cache(maxsize=4096)
def input_gates(call: Call) -> tuple[int, ...]:
    """Per input of a forward call: by how many gates its rows are shared out, else 1."""
    if call.kind not in RECURRENT:
        return (1,) * len(call.inputs)
    # Rows of both directions are (directions x gates x hidden); only whole directions are split.
    count = 1 if call.flag("bidirectional") else gates(call.kind)
    is_cell = call.kind.endswith("_cell")
    first_weight = 1 + len(call.outputs) if is_cell else 1
    return tuple(count if i >= first_weight else 1 for i in range(len(call.inputs)))


def gate_rows(graph: Graph) -> dict[str, int]:
    """The tensors whose rows are shared out gate by gate, and by how many gates.

    These are the weights and biases of recurrent ops, their gradients and optimizer states.
    """
    gate_rows: dict[str, int] = {}
    for op in graph.ops:
        if op.forward:
            counts = input_gates(_forward_call(graph.call(op)))
            named = [
                (name, counts[i]) for name, i in zip(op.outputs, graph.call(op).wrt, strict=True)
            ]
        elif op.phase == "forward":
            named = list(zip(op.inputs, input_gates(graph.call(op)), strict=True))
        else:  # a sum of gradients or an update: all its tensors lie alike
            count = max((gate_rows.get(name, 1) for name in op.inputs), default=1)
            named = [(name, count) for name in (*op.inputs, *op.outputs)]
        gate_rows.update((name, count) for name, count in named if count > 1)
    return gate_rows


def _forward_call(call: Call) -> Call:
    return Call(call.kind, call.attrs, call.inputs, call.outputs)
