"""What one rank computes of an op: its node on the rank's own shards, wherever that is the share.

Along a mesh axis a split is one of four:

    natural   the node on shards gives the shard of the result, or a summand of it
    statistic the op needs statistics of others, and nothing else: the ranks of the line exchange
              those, and each computes with its own shard (`statistics.py`)
    joined    the op needs statistics or borders of others: the shards of the line are gathered,
              and the rank computes on all of the line
    whole     masks, positions, lookups and what is drawn belong to a place in the whole op: the op
              runs at its full size with neutral numbers outside of the shard, and the share is cut
              out

`run/local/ops.py` says which axes are joined and who holds a partial sum; this is its meaning on
one rank, with messages. Backward is autograd of what the forward ran.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from partita.errors import PlanError
from partita.graph.loops import ADDED_FROM, loop_nest
from partita.graph.record import Call, Op
from partita.graph.splits import REPLICATE, placements
from partita.meaning import Layout
from partita.plans import Axis
from partita.run.distributed import statistics
from partita.run.distributed.autograd import differentiate
from partita.run.distributed.boxes import Box, box, inside, local_shape, shape_of
from partita.run.distributed.model import OpsFunction
from partita.run.distributed.statistics import StatisticExchange, StatisticRule, StatisticSite
from partita.run.local.ops import _joined, _only_drifts, _work, needs_exchange
from partita.run.local.shards import Place, Shape, input_gates, places, shard_index

T = torch.Tensor
Axes = tuple[Axis, ...]
Gather = Callable[[T, Shape, Layout, Layout, int], T]  # along a joined axis, among a line's ranks
Meet = Callable[[frozenset[int]], StatisticExchange]  # with the ranks of the lines along some axes

MEANS = frozenset({"cross_entropy", "mse_loss"})
ANY_DIM = frozenset({
    "linear", "matmul", "einsum", "softmax", "layer_norm", "rms_norm", "concat", "split", "slice",
    "transpose", "reshape", "expand", "pad", "batch_norm", *MEANS,
})  # fmt: skip
WHOLE_FUNCTIONS = frozenset({"rope", "lrn", "mask", "marked", "temperature"})


@functools.lru_cache(maxsize=65536)
def is_natural(call: Call, dim: str) -> bool:
    """Does the node on shards along this dim give the share of the result?"""
    nest = loop_nest(call)
    if needs_exchange(call, dim) or _only_drifts(call, dim):
        return False
    position = nest.outputs[0].position(dim)
    if call.kind in ANY_DIM:
        return True
    if call.kind == "elementwise":
        return call.text("fn", "add") not in WHOLE_FUNCTIONS
    if call.kind == "reduce":
        return position is not None or call.text("fn", "sum") in ("sum", "mean")
    if call.kind == "attention":
        return all(access.position(dim) in (0, 1) for access in nest.inputs[:3])
    if call.kind == "embedding":
        return position is not None
    if call.kind == "conv":
        inner = nest.inputs[0].position(dim) == 1
        return call.whole("groups", 1) == 1 and (position in (0, 1) or inner)
    if call.kind in ("pool", "resize"):
        return position in (0, 1)
    return call.kind in ("lstm", "gru", "group_norm", "state_space") and position == 0


@dataclass(frozen=True, eq=False)
class SharePlan:
    """How one rank runs an op with a split, worked out once."""

    call: Call
    axes: Axes
    place: Place
    joined: frozenset[int]
    is_whole: bool
    layouts: tuple[Layout, ...]  # of the inputs, as they come
    wide: tuple[Layout, ...]  # of the inputs, joined
    out_layouts: tuple[Layout, ...]
    out_wide: tuple[Layout, ...]
    holds: tuple[bool, ...]  # of the outputs: is this rank's summand the sum?
    adds: bool
    gates: tuple[int, ...]
    scale: float  # of a mean over a part
    rule: StatisticRule | None = None  # where statistics are exchanged, and along which axes
    site: StatisticSite | None = None
    met: frozenset[int] = frozenset()

    def out_shape(self, position: int) -> Shape:
        """The shape of an output as this rank computes it."""
        shape = self.call.outputs[position]
        return (
            shape
            if self.is_whole
            else local_shape(shape, self.out_wide[position], self.axes, self.place)
        )

    def in_shape(self, position: int) -> Shape:
        """The shape of an input as this rank computes with it."""
        shape = self.call.inputs[position]
        return (
            shape
            if self.is_whole
            else local_shape(
                shape, self.wide[position], self.axes, self.place, self.gates[position]
            )
        )


def _without(layout: Layout, axes: frozenset[int]) -> Layout:
    return tuple(REPLICATE if i in axes and p.kind == "shard" else p for i, p in enumerate(layout))


@functools.lru_cache(maxsize=65536)
def share_plan(
    call: Call, dims: tuple[str, ...], axes: Axes, place: Place, exchanged: frozenset[int],
    is_random: bool = False, rule: StatisticRule | None = None,
) -> SharePlan:  # fmt: skip
    """How the rank at a place runs a forward call; a random one at its full size.

    With a rule, what is joined for statistics alone is not: they are exchanged.
    """
    layouts, outs = placements(call, dims)
    joins = _joined(call, dims, axes, exchanged)["i"]
    work = _work(call, dims, axes, exchanged)
    rank = places(axes).index(place)
    split = {i: dim for i, dim in enumerate(dims) if dim and axes[i].size > 1}
    others = [dim for i, dim in split.items() if i not in joins]
    gates = input_gates(call)
    is_whole = call.kind == "constant" or not all(is_natural(call, dim) for dim in others)
    is_whole = is_whole or (any(count > 1 for count in gates) and bool(joins & split.keys()))
    is_whole = is_whole or is_random
    nest = loop_nest(call)
    scale = 1.0
    is_mean = call.kind in MEANS or (call.kind == "reduce" and call.text("fn", "sum") == "mean")
    for i, dim in split.items():
        if is_mean and i not in joins and nest.outputs[0].position(dim) is None:
            source = next((k for k, a in enumerate(nest.inputs) if a.position(dim) is not None), -1)
            if source >= 0:
                scale /= axes[i].ways(place[i])
    met: frozenset[int] = frozenset()
    site = None
    stats = {stat.dim for stat in nest.stats}
    for_statistics = not is_whole and all(split[i] in stats for i in joins & split.keys())
    if rule is not None and for_statistics and joins & split.keys():
        site = _site(call, rule, axes, place, layouts[0], joins, scale)
        met, joins = joins & frozenset(split), frozenset()
    return SharePlan(
        call, axes, place, joins & frozenset(split), is_whole, layouts,
        tuple(_without(layout, joins) for layout in layouts), outs,
        tuple(_without(layout, joins) for layout in outs),
        tuple(share.holds[rank] for share in work.shares), work.adds[rank], gates, scale,
        rule if met else None, site, met,
    )  # fmt: skip


def _site(
    call: Call, rule: StatisticRule, axes: Axes, place: Place, layout: Layout,
    met: frozenset[int], scale: float,
) -> StatisticSite:  # fmt: skip
    """What the share of a rank is to the whole op, whose first input is what it normalises."""
    shape = call.inputs[0]
    seen = local_shape(shape, _without(layout, met), axes, place)
    norm = rule.settings
    count = norm.count(seen) if isinstance(norm, statistics.NormRule) else 0
    return StatisticSite(count, box(shape, layout, axes, place)[-1][0], shape[-1], scale)


@dataclass(eq=False)
class Record:
    """What the forward of an op left for its backward."""

    plan: SharePlan
    leaves: list[T]
    outputs: tuple[T, ...]
    left: int  # backward ops that still read it
    saved: tuple[T, ...] = ()  # of an op whose statistics were exchanged
    released: set[int] = field(default_factory=set)  # parameters whose memory was given back


def run_forward(
    plan: SharePlan, function: OpsFunction | None, inputs: Sequence[T], hidden: Sequence[T],
    ties: Sequence[int], wanted: frozenset[int], gather: Gather, order: Sequence[int],
    local: Callable[..., tuple[T, ...]] | None, meet: Meet,
) -> tuple[tuple[T, ...], Record]:  # fmt: skip
    """A rank's share of the outputs; the leaves and outputs that the backward differentiates.

    `order` says which tensor each argument of the function is: an input, or (counted on from
    there) one that only the node reads. `local` replaces the function where sizes stand in it.
    """
    if plan.rule is not None and plan.site is not None:
        given = [*inputs, *hidden]
        out, saved = statistics.forward(plan.rule, plan.site, given, meet(plan.met))
        return (out,), Record(plan, [own.detach() for own in inputs], (out,), 0, saved)
    leaves: list[T] = []
    for i, own in enumerate(inputs):
        if ties[i] != i:
            leaves.append(leaves[ties[i]])
            continue
        leaf = _seen(plan, i, own, gather).detach()
        if i in wanted and leaf.is_floating_point():
            leaf.requires_grad_()
        leaves.append(leaf)
    given = [*leaves, *hidden]
    first = ADDED_FROM.get(plan.call.kind)
    if first is not None and not plan.adds:  # only the first rank of a reduction adds the bias
        for i in range(first, len(leaves)):
            given[i] = leaves[i] - leaves[i].detach()
    run = local or (None if function is None else function.run)
    assert run is not None, "what no rule computes has a function"
    with torch.set_grad_enabled(bool(wanted)):
        outputs = run(*(given[i] for i in order))
        if plan.scale != 1.0:
            outputs = tuple(out * plan.scale for out in outputs)
    shares = tuple(cut_output(plan, i, out.detach()) for i, out in enumerate(outputs))
    return shares, Record(plan, leaves, outputs, 0)


def _seen(plan: SharePlan, position: int, own: T, gather: Gather) -> T:
    """An input as the rank computes with it: joined along some axes, or at its full size."""
    shape, have = plan.call.inputs[position], plan.layouts[position]
    own = _join(own, shape, have, plan.wide[position], gather, plan.gates[position])
    if not plan.is_whole:
        return own
    fill = 1.0 if plan.call.kind == "elementwise" else 0.0
    return _filled(own, shape, plan.wide[position], plan, plan.gates[position], fill)


def _join(own: T, shape: Shape, have: Layout, wide: Layout, gather: Gather, gates: int = 1) -> T:
    for axis in reversed(range(len(have))):
        if have[axis] != wide[axis]:
            after = (*have[:axis], wide[axis], *have[axis + 1 :])
            own = gather(own, shape, have, after, gates)
            have = after
    return own


def _filled(own: T, shape: Shape, layout: Layout, plan: SharePlan, gates: int, fill: float) -> T:
    if tuple(own.shape) == shape:
        return own
    full = own.new_full(shape, fill if own.is_floating_point() else 0)
    full[shard_index(shape, layout, plan.axes, plan.place, gates)] = own
    return full


def cut_output(plan: SharePlan, position: int, out: T) -> T:
    """What the rank gives of an output that it computed."""
    shape = plan.call.outputs[position]
    own = _cut(out, shape, plan.out_layouts[position], plan.out_wide[position], plan, 1)
    return own if plan.holds[position] else torch.zeros_like(own)


def _cut(out: T, shape: Shape, need: Layout, wide: Layout, plan: SharePlan, gates: int) -> T:
    if plan.is_whole:
        return out[shard_index(shape, need, plan.axes, plan.place, gates)]
    if need == wide:
        return out
    needed = box(shape, need, plan.axes, plan.place)
    return out[inside(needed, box(shape, wide, plan.axes, plan.place))]


@dataclass(frozen=True, eq=False)
class BackwardPlan:
    """How a rank differentiates an op, worked out once."""

    call: Call
    joins: frozenset[int]  # axes along which gradients of outputs are joined
    gradients: tuple[tuple[int, int], ...]  # which output each gradient is of, and its value
    inputs: tuple[tuple[int, int], ...]  # the same of inputs that are read
    needs: tuple[Layout, ...]  # of the results
    holds: tuple[bool, ...]


def backward_plan(
    plan: SharePlan, call: Call, dims: tuple[str, ...], exchanged: frozenset[int],
    values: Sequence[int],
) -> BackwardPlan:  # fmt: skip
    """How the rank of a share differentiates its op; `values` are what the program reads."""
    work = _work(call, dims, plan.axes, exchanged)
    rank = places(plan.axes).index(plan.place)
    coded = [(code[0], int(code[1:]), v) for code, v in zip(call.reads, values, strict=True)]
    return BackwardPlan(
        call,
        _joined(call, dims, plan.axes, exchanged)["g"],
        tuple((place, value) for kind, place, value in coded if kind == "g"),
        tuple((place, value) for kind, place, value in coded if kind == "i"),
        tuple(
            tuple(p if p.kind != "partial" else REPLICATE for p in layout)
            for layout in placements(call, dims)[1]
        ),
        tuple(share.holds[rank] for share in work.shares),
    )


def run_backward(
    record: Record, backs: Sequence[BackwardPlan], given: dict[int, T], gather: Gather, *,
    meet: Meet, retain: bool,
) -> list[tuple[T, ...]]:  # fmt: skip
    """The gradients of the inputs that some backward ops are for, all in one call of autograd.

    They read the same gradients of outputs, which are given by position.
    """
    plan = record.plan
    if plan.rule is not None and plan.site is not None:
        wanted = {i for back in backs for i in back.call.wrt}
        met = meet(frozenset().union(*(back.joins for back in backs)))
        by_input = statistics.backward(
            plan.rule, plan.site, record.leaves, record.saved, given[0], wanted, met
        )
        return [tuple(by_input[i] for i in back.call.wrt) for back in backs]
    outputs, gradients = [], []
    for position, own in given.items():
        out = record.outputs[position]
        if out.requires_grad:
            outputs.append(out)
            gradients.append(_gradient_seen(plan, position, own, backs[0].joins, gather))
    wrt = [record.leaves[i] for back in backs for i in back.call.wrt]
    results = iter(differentiate(outputs, wrt, gradients, retain=retain))
    every = []
    for back in backs:
        shares = []
        for need, holds, i in zip(back.needs, back.holds, back.call.wrt, strict=True):
            known = next(results)
            result = torch.zeros_like(record.leaves[i]) if known is None else known
            own = _cut(result, plan.call.inputs[i], need, plan.wide[i], plan, plan.gates[i])
            shares.append(own if holds else torch.zeros_like(own))
        every.append(tuple(shares))
    return every


def _gradient_seen(
    plan: SharePlan, position: int, own: T, joins: frozenset[int], gather: Gather
) -> T:
    """A gradient as large as the output was computed: gathered, or zero where it is unknown."""
    shape, have = plan.call.outputs[position], plan.out_layouts[position]
    have = tuple(p if p.kind != "partial" else REPLICATE for p in have)
    wide = _without(have, joins)
    own = _join(own, shape, have, wide, gather)
    target = plan.out_shape(position)
    if tuple(own.shape) == target:
        return own
    full = own.new_zeros(target)
    if plan.is_whole:
        full[shard_index(shape, wide, plan.axes, plan.place)] = own
    else:
        held: Box = box(shape, wide, plan.axes, plan.place)
        full[inside(held, box(shape, plan.out_wide[position], plan.axes, plan.place))] = own
    assert shape_of(box(shape, wide, plan.axes, plan.place)) == tuple(own.shape), "a shard's size"
    return full


def check_joins(op: Op, layout: Layout, joins: frozenset[int]) -> None:
    """Refuse what no line of ranks can join: a dim cut by a joined axis and by a later one."""
    for axis in joins:
        later = [i for i in range(axis + 1, len(layout)) if i not in joins]
        if layout[axis].kind == "shard" and any(layout[i] == layout[axis] for i in later):
            raise PlanError(
                f"op {op.name!r} exchanges along one axis a dim that a later axis cuts again",
                fix="plan again with the two axes in the other order",
                field="stages",
            )
