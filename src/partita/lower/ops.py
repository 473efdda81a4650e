"""Ops of a stage as tasks: every rank computes its share, collectives between.

An op becomes one task per representative rank; where a tensor does not lie as the op needs it, a
collective per line of a mesh axis moves it: partial sums are added (all-reduce, reduce-scatter),
shards gathered or exchanged. Borders are fetched before an op, statistics exchanged after it.
What the model returns is settled: partial sums of outputs are added up, too.

A stage that runs once is lowered here in whole (`lower_stage`): the model, op by op, as one step.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.costs.fusion import is_written
from partita.costs.layouts import ConversionStep, common_layout, conversion, gradient_target
from partita.costs.memory import kept_bytes, temporary_bytes
from partita.costs.roofline import OpCost, Split, apart_s, op_by_op_s, op_cost
from partita.costs.sharding import ways_of
from partita.graph.loops import loop_nest
from partita.graph.record import Call, Graph, Op, dtype_bytes
from partita.graph.splits import PARTIAL, REPLICATE, communication, placements
from partita.graph.work import VIEWS, passes_through
from partita.lower.context import MAX_REPRESENTATIVES, context_of, representative_devices
from partita.lower.parameters import (
    ask_for,
    bundles,
    collect,
    flush_all,
    gathered,
    owe_reductions,
    resident_bytes,
    update_all,
)
from partita.lower.pieces import homes, piece
from partita.lower.writer import Buffer, Made, NetworkOrder, Recorded, Writer, after, last_of
from partita.meaning import Layout, Phase, Purpose, Work
from partita.plans import Stage
from partita.program import Kind, Program
from partita.search.overlap import Deferred, FillGaps, Ready

STAT_BYTES = 4
PHASE_KINDS = {
    "forward": Kind.FORWARD,
    "dgrad": Kind.DGRAD,
    "wgrad": Kind.WGRAD,
    "update": Kind.UPDATE,
}
Collect = Callable[[Writer, Buffer], None]
Received = dict[str, Layout]  # tensors that other stages send; a layout where it is given


def run_ops(
    w: Writer, ops: Sequence[Op], received: Received, accumulate: Collect = collect
) -> None:
    """Ops in their order; sharded parameters are gathered for some of them at a time."""
    sharded = [op for op in ops if _reads_sharded(w, op)]
    together = bundles(w, ((op, _needs(w, op)) for op in sharded))
    bundle_of = [number for number, bundle in enumerate(together) for _ in bundle]
    stage = w.context.stage
    asked, running = 0, 0
    for op in ops:
        if running < len(sharded) and op is sharded[running]:
            until = bundle_of[min(running + stage.prefetch, len(sharded)) - 1]
            if stage.bundles:  # while one bundle is used, the next is on its way
                until = max(until, bundle_of[running] + 1)
            for bundle in together[asked : until + 1]:
                ask_for(w, bundle)
            asked, running = max(asked, until + 1), running + 1
        _run_op(w, op, received, accumulate)


def settle(w: Writer, names: Iterable[str]) -> dict[str, Layout]:
    """What leaves a stage is replicated or sharded: partial sums are added first."""
    layouts: dict[str, Layout] = {}
    for name in names:
        buffer = w.buffers[name]
        layout = settled(buffer.layout)
        if layout != buffer.layout:
            w.converted[buffer.value, layout] = _convert(w, buffer, layout)
        layouts[name] = layout
    return layouts


def settle_outputs(w: Writer, names: Iterable[str]) -> None:
    """What the model returns is added up when the network has time for it: no op waits for it."""
    for name in names:
        buffer = w.buffers.get(name)
        if buffer is None:  # an output that the model was given
            continue
        w.kept.append(buffer.owner())
        layout = settled(buffer.layout)
        if layout == buffer.layout or (buffer.value, layout) in w.converted:
            continue
        steps = conversion(
            w.context.graph.tensor(name).size_bytes, w.context.ways, buffer.layout, layout
        )
        seconds = sum(
            w.context.collectives.seconds(s.collective, s.size_bytes, w.context.groups[s.axis])
            for s in steps
        )
        write = functools.partial(_settle_output, w, buffer, layout, steps)
        w.num_reductions += 1
        w.put_off(Deferred(w.num_reductions - 1, w.ready([buffer]), seconds, write, what=name))


def settled(layout: Layout) -> Layout:
    """The layout once partial sums are added up."""
    return tuple(REPLICATE if p == PARTIAL else p for p in layout)


def _settle_output(
    w: Writer, buffer: Buffer, layout: Layout, steps: tuple[ConversionStep, ...]
) -> None:
    source = buffer
    for step in steps:
        buffer = _converted(w, buffer, step, w.collective)
    w.kept = [buffer if kept is source.owner() else kept for kept in w.kept]
    w.converted[source.value, layout] = buffer


# One op on every rank.


def _reads_sharded(w: Writer, op: Op) -> bool:
    levels = w.context.levels
    return any(levels.get(name) == 3 for name in op.inputs)


def _needs(w: Writer, op: Op) -> tuple[Layout, ...]:
    context = w.context
    return placements(context.graph.call(op), context.dims[op.forward or op.name])[0]


def _run_op(w: Writer, op: Op, received: Received, accumulate: Collect) -> None:
    context = w.context
    if op.phase != "forward" and not op.forward:
        _add_gradients(w, op, received, accumulate)
        return
    dims = context.dims[op.forward or op.name]
    factors = ways_of(dims, context.axes)
    needed, given = placements(context.graph.call(op), dims)
    buffers = [
        _obtain(w, name, layout, op, received)
        for name, layout in zip(op.inputs, needed, strict=True)
    ]
    purpose = Purpose.RECOMPUTE if op.name in context.recomputed else Purpose.COMPUTE
    reads = tuple(buffer.value for buffer in buffers)
    shared = _has_statistics(w, op, dims, factors)
    outputs = [
        _new(w, name, layout, complete=not shared)
        for name, layout in zip(op.outputs, given, strict=True)
    ]
    writes = tuple(buffer.value for buffer in outputs)
    work = Work(purpose, w.phase, _name(w, op), dims, context.number, reads=reads, writes=writes)
    ready = _exchange(w, op, work, factors, w.ready(buffers), halos=True)
    made = _compute(w, op, work, ready, buffers)
    made = last_of(_exchange(w, op, work, factors, after(made), halos=False))
    for buffer in outputs:
        _produce(w, op, buffer, made, buffers, accumulate)


def _name(w: Writer, op: Op) -> str:
    """What an op is called in the model: a second run is that of the first."""
    return w.context.original.get(op.name, op.name)


def _add_gradients(w: Writer, op: Op, received: Received, accumulate: Collect) -> None:
    """A sum of gradients: of equal layouts as they are, partial sums included; else made equal."""
    for name in op.inputs:
        if name in received and name not in w.buffers:  # arrives as the activation lies here
            layout = settled(received[name])
            value = w.value(name, layout, "received")
            w.buffers[name] = Buffer(name, layout, w.context.held_bytes(name, layout), value)
    layouts = [w.buffers[name].layout for name in op.inputs]
    layout = common_layout(layouts)
    buffers = [_obtain(w, name, layout, op, received) for name in op.inputs]
    access = loop_nest(w.context.graph.call(op)).outputs[0]
    dims = tuple(
        access.dims[p.dim][0] if p.kind == "shard" and access.dims[p.dim] else "" for p in layout
    )
    total = _new(w, op.outputs[0], layout)
    reads = tuple(buffer.value for buffer in buffers)
    work = Work(
        Purpose.COMPUTE, w.phase, op.name, dims, w.context.number, reads=reads,
        writes=(total.value,),
    )  # fmt: skip
    made = _compute(w, op, work, w.ready(buffers), buffers)
    _produce(w, op, total, made, buffers, accumulate)


def _compute(w: Writer, op: Op, work: Work, ready: Ready, buffers: list[Buffer]) -> Made:
    context = w.context
    made = {}
    kind = PHASE_KINDS[op.phase]
    owe_reductions(w, work.writes)
    for device in context.devices:
        split = tuple(sorted(ways_of(work.dims, context.axes, context.places[device]).items()))
        cost = op_cost(context.graph, op, context.kinds[device], split, context.execution)
        w.note(op, device, split, cost)
        w.host(device, cost.host_s)
        more_s = w.issued.pop(device, 0.0)
        more_s += op_by_op_s(context.kinds[device], op.phase) if context.op_by_op else 0.0
        is_apart = w.phase is Phase.WEIGHT and op.phase == "wgrad"
        more_s += apart_s(context.kinds[device]) if is_apart else 0.0
        seconds = w.slowed(device, cost.seconds + more_s)
        made[device] = w.task(work, (context.index[device],), seconds, ready[device], kind)
    w.use(buffers, made)
    if context.execution != "graph":
        _hold_more(w, op, work, made)
    if _reads_sharded(w, op):
        w.last_sharded = made
    return made


def _hold_more(w: Writer, op: Op, work: Work, made: Made) -> None:
    """What the framework holds for an op beside the tensors of the graph."""
    context = w.context
    call, dtype = context.graph.call(op), context.graph.dtype(op)
    share = 1 / math.prod(ways_of(work.dims, context.axes).values())
    temporary = temporary_bytes(call, dtype, context.execution)
    if temporary:
        w.temporary(temporary * share, made)
    kept = kept_bytes(call, dtype, context.execution)
    if kept:
        extra = Buffer(work.op, (), kept * share, -1)
        w.take(extra, made)
        w.extras[work.op] = extra  # what runs again keeps its own
    origin = context.original.get(op.forward, op.forward)
    if op.forward and origin in w.extras:
        w.use([w.extras[origin]], made)


def _has_statistics(w: Writer, op: Op, dims: tuple[str, ...], factors: dict[str, float]) -> bool:
    """Is what an op makes complete only after an exchange?"""
    call = w.context.graph.call(op)
    exchanges = (e for dim in dims if dim for e in communication(call, factors, along=dim))
    return any(e.tensor < 0 and e.collective != "halo" for e in exchanges)


def _new(w: Writer, name: str, layout: Layout, *, complete: bool = True) -> Buffer:
    """What an op is about to make."""
    context = w.context
    source = "task"
    # Micro-batches add to it, unless it is reduced first or statistics complete it.
    if complete and name in context.update_of:
        level = context.levels[context.update_of[name].inputs[0]]
        source = "gradient" if level in (0, 1) and _lies_as_stored(w, name, layout) else "task"
    return Buffer(name, layout, context.held_bytes(name, layout), w.value(name, layout, source))


def _lies_as_stored(w: Writer, gradient: str, layout: Layout) -> bool:
    stored = w.buffers[w.context.update_of[gradient].inputs[0]].layout
    return gradient_target(layout, stored) == layout


def _taken(w: Writer, op: Op, buffer: Buffer) -> float:
    """The part of its size that a tensor takes.

    None where it stays inside a fused kernel. Summands of a gradient are added up as they come, so
    that at any time there are the sum so far and one of them.
    """
    execution = w.context.execution
    if execution == "graph":
        return 1.0
    if execution == "compiled" and not is_written(w.context.graph, op, buffer.name):
        return 0.0
    readers = w.context.graph.consumers(buffer.name)
    if len(readers) != 1 or readers[0].forward or readers[0].phase not in ("dgrad", "wgrad"):
        return 1.0
    return min(1.0, 2 / len(readers[0].inputs))


def _produce(
    w: Writer, op: Op, buffer: Buffer, made: Made, inputs: list[Buffer], accumulate: Collect
) -> None:
    buffer.made_by = dict(made)
    buffer.size_bytes *= _taken(w, op, buffer)
    w.buffers[buffer.name] = buffer
    if buffer.name in w.context.update_of:
        accumulate(w, _as_stored(w, buffer, made))
    elif inputs and _is_view(w.context.graph.call(op)):
        buffer.root = inputs[0]
    else:
        w.take(buffer, made)


def _as_stored(w: Writer, gradient: Buffer, made: Made) -> Buffer:
    """A gradient as its parameter lies; only parameters with several readers differ."""
    stored = w.buffers[w.context.update_of[gradient.name].inputs[0]].layout
    target = gradient_target(gradient.layout, stored)
    level = w.context.levels[w.context.update_of[gradient.name].inputs[0]]
    is_added_to = w.values[gradient.value].source == "gradient"
    if target == gradient.layout and (is_added_to or level not in (0, 1)):
        return gradient
    w.take(gradient, made)
    moved = _convert(w, gradient, target)
    if level in (0, 1):
        value = w.value(moved.name, target, "gradient", of=moved.value)
        moved = Buffer(moved.name, target, moved.size_bytes, value, moved.made_by, moved)
    w.buffers[moved.name] = moved
    return moved


# Tensors in the layout that is needed.


def _obtain(w: Writer, name: str, need: Layout, user: Op, received: Received) -> Buffer:
    context = w.context
    tensor = context.graph.tensor(name)
    if tensor.role == "input" and name not in received:
        return _fed(w, name, need)
    if name not in w.buffers and tensor.is_given:
        # Parameters, and what is received, lie from the start as their first reader needs them.
        source = "received" if name in received else "parameter"
        value = w.value(name, need, source)
        w.buffers[name] = Buffer(name, need, context.held_bytes(name, need), value)
    have = w.buffers[name]
    if context.levels.get(name) == 3:
        have = gathered(w, name, user)
    if have.layout == need:
        return have
    key = (have.value, need)
    if key not in w.converted:
        w.converted[key] = _convert(w, have, need)
    return w.converted[key]


def _fed(w: Writer, name: str, need: Layout) -> Buffer:
    """What the model is fed with comes in any layout."""
    if (name, need) not in w.fed:
        value = w.value(name, need, "input")
        w.fed[name, need] = Buffer(name, need, w.context.held_bytes(name, need), value)
    return w.fed[name, need]


def _convert(w: Writer, buffer: Buffer, need: Layout) -> Buffer:
    whole = w.context.graph.tensor(buffer.name).size_bytes
    for step in conversion(whole, w.context.ways, buffer.layout, need):
        buffer = _converted(w, buffer, step, w.blocking)
    return buffer


def _converted(
    w: Writer, buffer: Buffer, step: ConversionStep, send: Callable[[Work, Ready], Made]
) -> Buffer:
    """A tensor after one step of a conversion."""
    if not step.collective:  # each rank takes its shard of what it holds
        value = w.value(buffer.name, step.layout, of=buffer.value)
        made = dict(buffer.made_by)
        return Buffer(buffer.name, step.layout, step.held_bytes, value, made, buffer)
    value = w.value(buffer.name, step.layout)
    work = Work(
        Purpose.CONVERSION, w.phase, stage=w.context.number, collective=step.collective,
        axis=step.axis, size_bytes=step.size_bytes, reads=(buffer.value,), writes=(value,),
    )  # fmt: skip
    made = send(work, w.ready([buffer]))
    w.use([buffer], made)
    moved = Buffer(buffer.name, step.layout, step.held_bytes, value, made)
    w.take(moved, made)
    return moved


def _exchange(
    w: Writer, op: Op, work: Work, factors: dict[str, float], ready: Ready, *, halos: bool
) -> Ready:
    """Halos before an op, statistics after it."""
    context = w.context
    call = context.graph.call(op)
    size_of = dtype_bytes(context.graph.dtype(op)) if halos else STAT_BYTES
    for axis, dim in enumerate(work.dims):
        exchanges = communication(call, factors, along=dim) if dim else ()
        for part, exchange in enumerate(exchanges):
            if exchange.tensor >= 0 or (exchange.collective == "halo") != halos:
                continue
            own = Work(
                Purpose.EXCHANGE, work.phase, work.op, work.dims, work.stage,
                collective=exchange.collective, axis=axis, size_bytes=exchange.elements * size_of,
                reads=work.reads if halos else work.writes, writes=() if halos else work.writes,
                part=part,
            )  # fmt: skip
            made = w.blocking(own, ready)
            arrived = after(made)
            ready = {d: [*ready[d], *arrived[d]] for d in ready} if halos else arrived
    return ready


def _is_view(call: Call) -> bool:
    """Are the outputs of an op its first input, seen otherwise?"""
    if call.kind == "elementwise":
        return passes_through(call)
    if call.kind == "reshape":
        return call.phase in ("forward", "dgrad")
    if call.kind == "concat":
        return call.flag("appended") and call.phase == "forward"
    return call.kind in VIEWS and call.phase == "forward"


@dataclass(frozen=True)
class LoweredStage:
    """A stage's program, and what each op costs on the first device under its split.

    The graph is the one that was lowered: with recompute, some ops stand there twice. `order` is
    that of the collectives, in the words of a plan.
    """

    graph: Graph
    program: Program
    splits: dict[str, Split]
    costs: dict[str, OpCost]
    order: str


def network_order(stage: Stage, recorded: str | None, num_devices: int) -> NetworkOrder:
    """The order of collectives that a plan lists; where it lists none, one is decided."""
    if recorded is None:
        return FillGaps(num_devices)
    return Recorded(recorded, stage.name)


def lower_stage(
    stage: Stage,
    graph: Graph,
    cluster: Cluster,
    most_devices: int = MAX_REPRESENTATIVES,
    collectives: Collectives | None = None,
    execution: str = "graph",
) -> LoweredStage:
    """The program of a stage that holds the whole model and runs it once."""
    devices = representative_devices(stage, cluster, most_devices)
    times = collectives or Collectives(cluster)
    part = None
    local, num_forward = stage, sum(op.phase == "forward" for op in graph.ops)
    if stage.checkpointing != "none" and graph.is_training:
        part = piece(graph, stage, 0, homes(graph, [stage]))
        local, graph = part.local(stage), part.graph
    context = context_of(local, graph, cluster, devices, times, 0, part, execution)
    recorded = None if stage.overlap is None else stage.overlap.order
    writer = Writer(context, network_order(stage, recorded, len(devices)))
    _write_step(writer, num_forward)
    program = writer.build({d: resident_bytes(writer, d) for d in devices})
    return LoweredStage(graph, program, writer.splits, writer.costs, writer.order.ended())


def _write_step(w: Writer, num_forward: int) -> None:
    """All ops in the graph's order, then the updates."""
    graph = w.context.graph
    ops = [op for op in graph.ops if op.phase != "update"]
    run_ops(w, ops[:num_forward], {})
    settle_outputs(w, graph.outputs)
    w.gathered.clear()  # what is gathered for the forward is not kept for the backward
    w.phase, w.reduces_now = Phase.BACKWARD, True
    run_ops(w, ops[num_forward:], {})
    flush_all(w)
    update_all(w)
