"""Executes one op on all ranks of a mesh, each from the shards that it holds.

A rank puts its shards into tensors of the full size, filled with neutral numbers elsewhere, runs
the whole op and cuts its share out of the result. Masks, positions, lookups and dropout are then
those of the share's place in the whole op, and sums over a split dim come out as partial sums.
A term that is only added (a bias) is added by the first rank of a split reduction.

Some splits need an exchange: statistics, or borders of neighbours. Along the axes where the
program has it (`exchanged`) the shards of a line of ranks are joined before the op runs, so that
its result is exact. Where it is needed and missing, a rank knows its own shard only and the
result is wrong, as it would be on devices. A partial sum of joined inputs is held by the first
rank of a line; the others hold zeros.

What the forward exchanged is kept for the backward: along an axis where only the forward needs an
exchange, what the backward reads of the forward is joined, gradients are not.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from partita.errors import ProgramError
from partita.graph.loops import ADDED_FROM, Access, Nest, loop_nest
from partita.graph.record import Call, Graph, Op
from partita.graph.splits import placements
from partita.plans import Axis
from partita.run.local.compute import Site, compute, constant, routing_groups
from partita.run.local.gradients import gradients
from partita.run.local.shards import (
    Index,
    Layout,
    Shape,
    input_gates,
    places,
    shard_index,
)

T = torch.Tensor
Axes = tuple[Axis, ...]
Shards = Sequence[Sequence[T]]  # per rank, the tensors that it holds

WINDOWED = frozenset({"conv", "pool", "resize"})
# Kinds whose weight gradient follows from gradients that the data gradient has exchanged already;
# without a data gradient the nest of the weight gradient has that exchange.
KEEP_GRADIENTS = frozenset({"lstm", "gru", "moe_router"})


def forward(
    graph: Graph,
    op: Op,
    dims: tuple[str, ...],
    axes: Axes,
    inputs: Shards,
    exchanged: Collection[int] = (),
    *,
    microbatch: int = 0,
    seed: int = 0,
) -> list[tuple[T, ...]]:
    """What each rank gives of the outputs of a forward op, or of a sum of gradients.

    `dims` names a loop dim per axis, '' for none. `inputs[rank]` are the shards of the op's
    inputs in the layouts that `placements(call, dims)` asks for; the results lie as it says.
    `exchanged` are the axes (by number) along which the program exchanges what the op needs.
    """
    if op.phase in ("dgrad", "wgrad") and not op.forward:
        return [(functools.reduce(torch.add, values),) for values in inputs]
    call = graph.call(op)
    work = _work(call, dims, axes, frozenset(exchanged))
    _check_shards(op, work, inputs)
    site = Site(op.name, graph.is_training, microbatch, seed, routing_groups(call, dims, axes))
    known: dict[object, tuple[T, ...]] = {}  # ranks that see the same compute the same
    results = []
    for rank in range(len(inputs)):
        key = (work.adds[rank], *(view.sources[rank] for view in work.views))
        if key not in known:
            known[key] = _run(graph, op, work, inputs, rank, site)
        results.append(work.cut(known[key], rank))
    return results


def backward(
    graph: Graph,
    op: Op,
    dims: tuple[str, ...],
    axes: Axes,
    inputs: Shards,
    exchanged: Collection[int] = (),
    *,
    microbatch: int = 0,
    seed: int = 0,
) -> list[tuple[T, ...]]:
    """What each rank gives of the gradients of a dgrad or wgrad op; see `forward`."""
    if not op.forward:
        return forward(graph, op, dims, axes, inputs, exchanged)
    call = graph.call(op)
    work = _work(call, dims, axes, frozenset(exchanged))
    _check_shards(op, work, inputs)
    groups = routing_groups(call, dims, axes)
    site = Site(op.forward, graph.is_training, microbatch, seed, groups)
    names = graph.op(op.forward).inputs
    own = {*call.wrt, *(int(code[1:]) for code in call.reads if code[0] == "i")}
    ties = tuple(i if i in own else names.index(name) for i, name in enumerate(names))
    known: dict[object, list[T]] = {}
    results = []
    for rank in range(len(inputs)):
        key = tuple(view.sources[rank] for view in work.views)
        if key not in known:
            full = [view.full(inputs, i, rank) for i, view in enumerate(work.views)]
            reads = dict(zip(call.reads, full, strict=True))
            known[key] = gradients(call, reads, ties, site)
        results.append(work.cut(known[key], rank))
    return results


def needs_exchange(call: Call, dim: str) -> bool:
    """Does splitting this dim need statistics or borders of other ranks?"""
    nest = loop_nest(call)
    return any(stat.dim == dim for stat in nest.stats) or _has_border(nest, dim)


@dataclass(frozen=True, slots=True, eq=False)
class ShardView:
    """A tensor that an op reads, as the ranks see it at its full size."""

    shape: Shape
    is_sharded: bool
    fill: float
    index: tuple[Index, ...]  # per rank: where its shard lies
    shard_shapes: tuple[Shape, ...]
    sources: tuple[tuple[int, ...], ...]  # per rank: the ranks whose shards it sees

    def full(self, shards: Shards, position: int, rank: int) -> T:
        """The full-size tensor, filled where the rank sees nothing."""
        if not self.is_sharded:
            return shards[rank][position]
        tensor = shards[rank][position].new_full(self.shape, self.fill)
        for source in self.sources[rank]:
            tensor[self.index[source]] = shards[source][position]
        return tensor


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What the ranks hold of a tensor that an op gives."""

    index: tuple[Index, ...]
    holds: tuple[bool, ...]  # False where the first rank of a line holds all of the sum


@dataclass(frozen=True, slots=True, eq=False)
class OpWork:
    """How an op with a split runs on a mesh: worked out once."""

    views: tuple[ShardView, ...]
    shares: tuple[Share, ...]
    adds: tuple[bool, ...]  # per rank: does it add the terms that are only added?

    def cut(self, values: Sequence[T], rank: int) -> tuple[T, ...]:
        """A rank's shares of full-size results."""
        parts = []
        for value, share in zip(values, self.shares, strict=True):
            own = value[share.index[rank]]
            parts.append(own.clone() if share.holds[rank] else torch.zeros_like(own))
        return tuple(parts)


@functools.lru_cache(maxsize=16384)
def _work(call: Call, dims: tuple[str, ...], axes: Axes, exchanged: frozenset[int]) -> OpWork:
    read_layouts, write_layouts = placements(call, dims)
    joined = _joined(call, dims, axes, exchanged)
    views = tuple(
        _view(call, code, layout, axes, joined[code[0]])
        for code, layout in zip(_codes(call), read_layouts, strict=True)
    )
    sums = _natural_sums(call, read_layouts, joined)
    written = call.wrt or range(len(call.outputs))
    shares = tuple(
        _share(call, i, layout, axes, sums)
        for i, layout in zip(written, write_layouts, strict=True)
    )
    nest = loop_nest(call)
    reductions = [i for i, dim in enumerate(dims) if dim and nest.is_reduction(dim)]
    adds = tuple(all(place[i] == 0 for i in reductions) for place in places(axes))
    return OpWork(views, shares, adds)


def _codes(call: Call) -> tuple[str, ...]:
    return call.reads if call.wrt else tuple(f"i{i}" for i in range(len(call.inputs)))


def _joined(
    call: Call, dims: tuple[str, ...], axes: Axes, exchanged: frozenset[int]
) -> dict[str, frozenset[int]]:
    """The axes along which shards are joined: of inputs (i), outputs (o) and gradients (g)."""
    values, given = set(), set()
    origin = Call(call.kind, call.attrs, call.inputs, call.outputs)
    for i, dim in enumerate(dims):
        if not dim or axes[i].size == 1:
            continue
        needed = needs_exchange(call, dim)
        if (needed and i in exchanged) or _only_drifts(origin, dim):
            values.add(i)
            given.add(i)
        elif not needed and any(stat.dim == dim for stat in loop_nest(origin).stats):
            values.add(i)
            if call.kind in KEEP_GRADIENTS and call.phase == "wgrad":
                given.add(i)
    return {"i": frozenset(values), "o": frozenset(values), "g": frozenset(given)}


def _has_border(nest: Nest, dim: str) -> bool:
    def border(access: Access) -> int:
        position = access.position(dim)
        return 0 if position is None else access.halo[position]

    return any(border(access) for access in (*nest.inputs, *nest.outputs))


def _only_drifts(call: Call, dim: str) -> bool:
    """Shares that are counted as aligned, and are not to the last element.

    Windows without overlap over sizes that do not divide, and rotary positions without the number
    of heads, whose shares are taken to end between heads.
    """
    nest = loop_nest(call)
    if call.kind in WINDOWED:
        position = nest.outputs[0].position(dim)
        return position is not None and position > 1 and not _has_border(nest, dim)
    if call.kind == "elementwise" and call.text("fn", "add") == "rope":
        return (
            call.attr("heads") is None and nest.outputs[0].position(dim) == len(call.inputs[0]) - 1
        )
    return False


def _view(call: Call, code: str, layout: Layout, axes: Axes, joined: frozenset[int]) -> ShardView:
    side, position = code[0], int(code[1:])
    shape = call.inputs[position] if side == "i" else call.outputs[position]
    num_gates = _gates(call)[position] if side == "i" else 1
    index = tuple(shard_index(shape, layout, axes, place, num_gates) for place in places(axes))
    # Ones keep quotients and logarithms finite; a gradient is zero where nothing is known of it.
    fill = 1.0 if call.kind == "elementwise" and side != "g" else 0.0
    return ShardView(
        shape,
        any(placement.kind == "shard" for placement in layout),
        fill,
        index,
        tuple(_shape_of(shape, own) for own in index),
        _sources(layout, axes, joined),
    )


def _gates(call: Call) -> tuple[int, ...]:
    return input_gates(Call(call.kind, call.attrs, call.inputs, call.outputs))


def _shape_of(shape: Shape, index: Index) -> Shape:
    sizes = []
    for size, own in zip(shape, index, strict=True):
        sizes.append(len(range(size)[own]) if isinstance(own, slice) else len(own))
    return tuple(sizes)


def _sources(layout: Layout, axes: Axes, joined: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """Per rank the ranks that it sees: those that differ along joined axes that shard."""
    free = {i for i in joined if layout[i].kind == "shard"}
    lines: dict[tuple[int, ...], list[int]] = {}
    keys = []
    for rank, place in enumerate(places(axes)):
        keys.append(tuple(-1 if i in free else c for i, c in enumerate(place)))
        lines.setdefault(keys[-1], []).append(rank)
    return tuple(tuple(lines[key]) for key in keys)


def _natural_sums(
    call: Call, layouts: tuple[Layout, ...], joined: Mapping[str, frozenset[int]]
) -> frozenset[int]:
    """The axes along which ranks that compute from their shards get partial sums by themselves.

    A gradient is linear in the gradients that are given: if these are shares, so filled with
    zeros elsewhere, the results are partial sums. Else some other input must be a share.
    """
    natural_sums = set()
    codes = _codes(call)
    for axis in range(len(layouts[0]) if layouts else 0):
        shares = [c[0] for c, lay in zip(codes, layouts, strict=True) if lay[axis].kind == "shard"]
        sides = ["g"] if "g" in shares else shares
        if any(axis not in joined[side] for side in sides):
            natural_sums.add(axis)
    return frozenset(natural_sums)


def _share(call: Call, position: int, layout: Layout, axes: Axes, sums: frozenset[int]) -> Share:
    shape = call.inputs[position] if call.wrt else call.outputs[position]
    num_gates = _gates(call)[position] if call.wrt else 1
    alone = [i for i, p in enumerate(layout) if p.kind == "partial" and i not in sums]
    return Share(
        tuple(shard_index(shape, layout, axes, place, num_gates) for place in places(axes)),
        tuple(all(place[i] == 0 for i in alone) for place in places(axes)),
    )


def _check_shards(op: Op, work: OpWork, inputs: Shards) -> None:
    for rank, shards in enumerate(inputs):
        for i, (view, own) in enumerate(zip(work.views, shards, strict=True)):
            if tuple(own.shape) != view.shard_shapes[rank]:
                raise ProgramError(
                    f"rank {rank} reads {op.inputs[i]!r} as a shard of {list(own.shape)}, and the "
                    f"split of the op asks for {list(view.shard_shapes[rank])}",
                    fix="convert the tensor to the layout that the op reads",
                    field=f"op {op.name!r}",
                )


def _run(
    graph: Graph, op: Op, work: OpWork, inputs: Shards, rank: int, site: Site
) -> tuple[T, ...]:
    """The op at its full size, as one rank sees it."""
    call = graph.call(op)
    if call.kind == "constant":
        return (constant(graph, op),)
    full = [view.full(inputs, i, rank) for i, view in enumerate(work.views)]
    if not work.adds[rank] and call.kind in ADDED_FROM:
        first = ADDED_FROM[call.kind]
        full[first:] = [torch.zeros_like(term) for term in full[first:]]
    if call.kind == "cross_entropy":
        return (_class_loss(work.views[1], full[0], full[1], rank),)
    return compute(call, full, site)


def _class_loss(view: ShardView, logits: T, targets: T, rank: int) -> T:
    """The mean over all rows, of which only those that the rank has are added up."""
    rows = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none"
    )
    mine = rows.new_zeros(view.shape)
    for source in view.sources[rank]:
        mine[view.index[source]] = 1.0
    return (rows * mine.reshape(-1)).sum() / rows.numel()
