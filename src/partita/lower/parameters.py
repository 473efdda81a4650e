"""The parameters of a stage: how they are kept, how gradients are reduced, the optimizer.

A parameter is replicated, replicated with sharded states (ZeRO 1), also with sharded gradients
(ZeRO 2), or sharded itself (ZeRO 3). Sharded parameters are gathered ahead of their use, those of
some consecutive ops together.
Gradients are reduced in buckets while the backward goes on, then one fused optimizer step runs for
each bucket. Both can wait until the network has nothing to do that is waited for.

A rank's part of a shard is found axis by axis in ascending order: the part along the first axis
along which there are replicas, of that the part along the second, and so on. So gradients reach
their parts in that order, and parameters are gathered in the opposite one.

Along an axis that replicates (HSDP) ZeRO shards nothing: gradients are reduce-scattered within the
shard group, and the parts all-reduced across its replicas, once a step.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from partita.costs.kernels import UPDATE_S
from partita.costs.layouts import gradient_reductions, num_shards, summed_layout
from partita.costs.memory import workspace_bytes
from partita.costs.roofline import op_cost, part_s, rates_of
from partita.graph.record import Op
from partita.graph.splits import PARTIAL, REPLICATE
from partita.graph.work import cached_inputs
from partita.lower.context import Context
from partita.lower.writer import Buffer, Made, Writer, after
from partita.meaning import Layout, Phase, Purpose, Work
from partita.program import Kind
from partita.search.overlap import Deferred, Ready

SHARDED_GRADIENTS = (2, 3)  # ZeRO stages at which gradients are sharded

# Sharded parameters.


Needs = tuple[Op, tuple[Layout, ...]]  # an op, and how it reads its inputs


def bundles(w: Writer, ops: Iterable[Needs]) -> list[list[Needs]]:
    """Consecutive ops whose sharded parameters are gathered together.

    A layer that runs once more and then backward is gathered once for both.
    """
    context = w.context
    together: list[list[Needs]] = []
    last: int | None = None
    for op, needed in ops:
        forward = op.forward or op.name
        bundle = context.bundle_of.get(context.original.get(forward, forward))
        if bundle is None or bundle != last:
            together.append([])
        together[-1].append((op, needed))
        last = bundle
    return together


def ask_for(w: Writer, bundle: Sequence[Needs]) -> None:
    """Gather the sharded parameters of some ops, those that lie alike together."""
    context = w.context
    together: dict[tuple[int, ...], dict[tuple[str, bool], Buffer]] = {}
    for op, needed in bundle:
        forward = op.phase == "forward"
        for name, layout in zip(op.inputs, needed, strict=True):
            if context.levels.get(name) != 3:
                continue
            if name not in w.buffers:  # laid out as its first reader wants it
                value = w.value(name, layout, "parameter", flat=context.zero_axes(layout))
                w.buffers[name] = Buffer(name, layout, context.held_bytes(name, layout), value)
            key = (name, forward)
            axes = context.zero_axes(w.buffers[name].layout)
            if not axes:  # one shard is all there is
                w.gathered[key] = w.buffers[name]
            elif key not in w.gathered and not any(key in gather.makes for gather in w.gathers):
                together.setdefault(axes, {})[key] = w.buffers[name]
    last = w.last_sharded
    ready: Ready = {device: [last[device]] if last else [] for device in context.devices}
    for axes, own in together.items():
        size = sum(buffer.size_bytes for buffer in dict.fromkeys(own.values()))
        seconds = sum(
            context.collectives.seconds("all_gather", size, context.groups[axis]) for axis in axes
        )
        write = functools.partial(_gather, w, own, axes, ready)
        w.gathers.append(Deferred(-1, ready, seconds, write, tuple(own), next(iter(own))[0]))


def _gather(
    w: Writer, own: Mapping[tuple[str, bool], Buffer], axes: Sequence[int], ready: Ready
) -> None:
    buffers = list(dict.fromkeys(own.values()))
    size = sum(buffer.size_bytes for buffer in buffers)
    made: Made = {}
    held = [buffer.value for buffer in buffers]
    for axis in reversed(axes):
        whole = [_less_flat(w, value, axis) for value in held]
        work = Work(
            Purpose.PARAMETER_GATHER, w.phase, stage=w.context.number, collective="all_gather",
            axis=axis, size_bytes=size, reads=tuple(held), writes=tuple(whole),
        )  # fmt: skip
        made = w.beside(work, ready)
        ready, held = after(made), whole
    for buffer, value in zip(buffers, held, strict=True):
        whole_buffer = Buffer(buffer.name, buffer.layout, buffer.size_bytes, value, made)
        w.take(whole_buffer, made)
        w.gathered |= {key: whole_buffer for key in own if key[0] == buffer.name}


def _less_flat(w: Writer, value: int, axis: int) -> int:
    """A value that is whole along one more axis."""
    known = w.values[value]
    flat = tuple(a for a in known.flat if a != axis)
    return w.value(known.tensor, known.layout, flat=flat)


def gathered(w: Writer, name: str, user: Op) -> Buffer:
    """A sharded parameter, whole again for the forward or the backward."""
    key = (name, user.phase == "forward")
    w.order.before_use(w, key)
    return w.gathered[key]


# Gradients.


def collect(w: Writer, gradient: Buffer) -> None:
    """A gradient that is reduced in this step: it has memory of its own, and joins a bucket."""
    if gradient.root is None:
        w.take(gradient, gradient.made_by)
    join_bucket(w, gradient)


def join_bucket(w: Writer, gradient: Buffer) -> None:
    """Gradients that are reduced alike wait for each other until they are worth it."""
    context = w.context
    level = context.levels[context.update_of[gradient.name].inputs[0]]
    sums = tuple(p if p == PARTIAL else REPLICATE for p in gradient.layout)
    key = (level, sums)
    bucket = w.buckets.setdefault(key, [])
    bucket.append(gradient)
    if sum(item.size_bytes for item in bucket) >= context.stage.bucket_bytes:
        _flush(w, key)


def owe_reductions(w: Writer, made: Sequence[int]) -> None:
    """Gradients that are about to be made are reduced beside computing, which pays for it.

    By bandwidth, since gradients share buckets. What makes a gradient may pay for it already.
    """
    context = w.context
    share = context.collectives.interference
    if not share:
        return
    for value in (w.values[number] for number in made):
        if value.tensor not in context.update_of:
            continue
        level = context.levels[context.update_of[value.tensor].inputs[0]]
        if level not in SHARDED_GRADIENTS and not w.reduces_now:
            continue
        size = context.held_bytes(value.tensor, value.layout)
        seconds = sum(
            context.collectives.by_bandwidth(
                own.collective, own.part * size, context.groups[own.axis]
            )
            for own in gradient_reductions(value.layout, context.axes, level)
            if w.reduces_now or not own.across
        )
        for device in context.devices:
            w.owe(device, share * seconds)


def flush_all(w: Writer) -> None:
    """Reduce all gradients that are left."""
    for key in list(w.buckets):
        _flush(w, key)
    w.drain()


def _flush(w: Writer, key: tuple[int, Layout]) -> None:
    """Reduce the gradients collected so far; each ends as its parameter lies."""
    bucket = w.buckets.pop(key)
    level, sums = key
    context = w.context
    steps = gradient_reductions(sums, context.axes, level)
    inner = [step.axis for step in steps if step.collective == "reduce_scatter"]
    # Replicas of shard groups add up what the micro-batches of a step have given.
    across = [s.axis for s in steps if s.axis not in inner and (w.reduces_now or not s.across)]
    size = sum(gradient.size_bytes for gradient in bucket)
    parts = size if level == 0 else _parts_bytes(context, bucket)
    seconds = sum(
        context.collectives.seconds(name, own, context.groups[axis])
        for name, own, some in (("reduce_scatter", size, inner), ("all_reduce", parts, across))
        for axis in some
    )
    write = functools.partial(_reduce, w, bucket, level, inner, across)
    w.num_reductions += 1
    what = f"gradients of {context.update_of[bucket[0].name].inputs[0]} and its bucket"
    w.put_off(Deferred(w.num_reductions - 1, w.ready(bucket), seconds, write, what=what))


def _parts_bytes(context: Context, bucket: Sequence[Buffer]) -> float:
    """Bytes of the parts of gradients that ZeRO keeps on a device."""
    return sum(g.size_bytes / context.zero_parts(summed_layout(g.layout)) for g in bucket)


def _reduce(
    w: Writer, bucket: list[Buffer], level: int, inner: Sequence[int], across: Sequence[int]
) -> None:
    """Reduce-scatter along the `inner` axes, then all-reduce what is left along those `across`."""
    context = w.context
    each_micro_batch = level in SHARDED_GRADIENTS
    ready = w.ready(bucket)
    now = [gradient.value for gradient in bucket]
    size = sum(gradient.size_bytes for gradient in bucket)
    own = [context.zero_axes(summed_layout(g.layout)) if level else () for g in bucket]
    # Parts along all axes that ZeRO shards, in ascending order.
    for axis in sorted({*inner, *(axis for axes in own for axis in axes)}):
        sends = axis in inner
        before = now
        now = [
            _summed(w, value, axis, part=axis in axes, sends=sends)
            for value, axes in zip(before, own, strict=True)
        ]
        if sends:
            phase = w.phase if each_micro_batch else Phase.REDUCE
            ready = _reduced(w, "reduce_scatter", phase, axis, size, before, now, ready)
    if each_micro_batch:
        pairs = zip(now, bucket, strict=True)
        now = [_micro_batch_sum(w, value, gradient) for value, gradient in pairs]
    for axis in across:
        before = now
        now = [_summed(w, value, axis, part=False, sends=True) for value in before]
        parts = size if level == 0 else _parts_bytes(context, bucket)
        ready = _reduced(w, "all_reduce", Phase.REDUCE, axis, parts, before, now, ready)
    if each_micro_batch:
        shards = _kept_parts(w, bucket, now, ready)
    else:
        shards = bucket
        for gradient, value in zip(bucket, now, strict=True):
            gradient.value = value
    w.reduced.append((shards, ready))


def _reduced(
    w: Writer, collective: str, phase: Phase, axis: int, size: float, reads: Sequence[int],
    writes: Sequence[int], ready: Ready,
) -> Ready:  # fmt: skip
    """One collective of a bucket along one axis."""
    work = Work(
        Purpose.GRADIENT_REDUCTION, phase, stage=w.context.number, collective=collective,
        axis=axis, size_bytes=size, reads=tuple(reads), writes=tuple(writes),
    )  # fmt: skip
    return after(w.collective(work, ready))


def _kept_parts(w: Writer, bucket: list[Buffer], values: list[int], ready: Ready) -> list[Buffer]:
    """The parts of gradients that stay when their micro-batch has ended."""
    context = w.context
    last = {device: max(tasks) for device, tasks in ready.items()}
    shards = []
    for gradient, value in zip(bucket, values, strict=True):
        parts = context.zero_parts(summed_layout(gradient.layout))
        shard = Buffer(
            gradient.name, gradient.layout, gradient.size_bytes / parts, value, dict(last)
        )
        w.use([gradient], last)
        w.buffers[gradient.name] = shard
        shards.append(shard)
        if w.keeps_gradients:
            w.take(shard, last)
    return shards


def _summed(w: Writer, value: int, axis: int, *, part: bool, sends: bool) -> int:
    """A gradient after its reduction along one axis, or the part that a rank keeps of it."""
    known = w.values[value]
    if not sends and not part:
        return value
    layout = (*known.layout[:axis], REPLICATE, *known.layout[axis + 1 :])
    flat = (*known.flat, axis) if part else known.flat
    return w.value(known.tensor, layout, of=-1 if sends else value, flat=flat)


def _micro_batch_sum(w: Writer, value: int, gradient: Buffer) -> int:
    """What ZeRO keeps of a gradient, to which the micro-batches of a step add."""
    known = w.values[value]
    if value == gradient.value or known.of >= 0:
        return w.value(known.tensor, known.layout, "gradient", of=value, flat=known.flat)
    w.values[value] = replace(known, source="gradient")
    return value


# The optimizer.


def update_all(w: Writer) -> None:
    """One fused optimizer step for each bucket that was reduced."""
    w.phase = Phase.UPDATE
    if w.context.execution != "graph":
        for device in w.context.devices:
            w.host(device, UPDATE_S * rates_of(w.context.kinds[device].name).host)
    for gradients, ready in w.reduced:
        _update(w, gradients, ready)


def _update(w: Writer, gradients: list[Buffer], ready: Ready) -> None:
    context = w.context
    ops = [context.update_of[gradient.name] for gradient in gradients]
    stored = [w.buffers[op.inputs[0]] for op in ops]
    updated = [_updated(w, op, buffer) for op, buffer in zip(ops, stored, strict=True)]
    pairs = zip(stored, gradients, strict=True)
    work = Work(
        Purpose.UPDATE, Phase.UPDATE, stage=context.number,
        reads=tuple(value for own, gradient in pairs for value in (own.value, gradient.value)),
        writes=tuple(updated),
    )  # fmt: skip
    made: Made = {}
    for device in context.devices:
        kind = context.kinds[device]
        seconds = kind.launch_s + part_s(kind) * len(ops)
        for op, buffer in zip(ops, stored, strict=True):
            whole = op_cost(context.graph, op, kind, (), context.execution)
            cost = whole.scaled(_share(context, op, buffer.layout))
            w.note(op, device, (), cost)
            w.host(device, cost.host_s)
            seconds += cost.seconds
        made[device] = w.task(work, (context.index[device],), seconds, ready[device], Kind.UPDATE)
    w.use([w.buffers[gradient.name] for gradient in gradients], made)
    _gather_updated(w, updated, stored, made)


def _updated(w: Writer, op: Op, stored: Buffer) -> int:
    """What a rank has of a parameter right after its update."""
    level = w.context.levels[op.inputs[0]]
    flat = () if level == 0 else w.context.zero_axes(stored.layout)
    return w.value(op.outputs[0], stored.layout, flat=flat)


def _gather_updated(w: Writer, updated: list[int], stored: list[Buffer], made: Made) -> None:
    """Parameters whose states are sharded are whole again before the next step."""
    context = w.context
    ready = after(made)
    now = list(updated)
    for axis in reversed(range(len(context.axes))):
        chosen = [
            i
            for i, buffer in enumerate(stored)
            if context.levels[buffer.name] in (1, 2) and axis in w.values[now[i]].flat
        ]
        if not chosen:
            continue
        reads = tuple(now[i] for i in chosen)
        for i in chosen:
            now[i] = _less_flat(w, now[i], axis)
        work = Work(
            Purpose.PARAMETER_GATHER, Phase.UPDATE, stage=context.number,
            collective="all_gather", axis=axis,
            size_bytes=sum(stored[i].size_bytes for i in chosen),
            reads=reads, writes=tuple(now[i] for i in chosen),
        )  # fmt: skip
        arrived = after(w.collective(work, ready))
        ready = {device: [*ready[device], *arrived[device]] for device in ready}


def _share(context: Context, op: Op, layout: Layout) -> float:
    """The part of a parameter that one device updates."""
    share = 1 / num_shards(layout, context.ways)
    return share if context.levels[op.inputs[0]] == 0 else share / context.zero_parts(layout)


# Memory that is always held.


def resident_bytes(w: Writer, device: int) -> float:
    """Parameters, states and workspace of a device."""
    context = w.context
    total = workspace_bytes(context.kinds[device])
    if context.execution != "graph":  # what is fed stays where it is
        total += sum(buffer.size_bytes for buffer in w.fed.values())
    else:
        total += cache_bytes(w)
    updates = {op.inputs[0]: op for op in context.update_of.values()}
    for tensor in context.graph.parameters:
        buffer = w.buffers.get(tensor.name)
        layout = buffer.layout if buffer else (REPLICATE,) * len(context.axes)
        level = context.levels.get(tensor.name, 0)
        shards, copies = num_shards(layout, context.ways), context.zero_parts(layout)
        total += tensor.size_bytes / shards / (copies if level == 3 else 1)
        op = updates.get(tensor.name)
        states = [context.graph.tensor(name) for name in op.inputs[2:]] if op else []
        split = 1 if level == 0 else copies
        total += sum(state.size_bytes for state in states) / shards / split
    return total


def cache_bytes(w: Writer) -> float:
    """What is fed and stays for the next tokens: keys and values of those read before."""
    kept = cached_inputs(w.context.graph)
    return sum(buffer.size_bytes for (name, _), buffer in w.fed.items() if name in kept)


def gradient_bytes(w: Writer) -> float:
    """The gradient all-reduces that a device holds over the micro-batches of a step."""
    context = w.context
    total = 0.0
    for op in context.update_of.values():
        layout = w.buffers[op.inputs[0]].layout
        level = context.levels[op.inputs[0]]
        size = context.graph.tensor(op.inputs[1]).size_bytes / num_shards(layout, context.ways)
        total += size / (context.zero_parts(layout) if level in SHARDED_GRADIENTS else 1)
    return total
