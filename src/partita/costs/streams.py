"""A graph as a streams problem, without a GPU: a roofline in which ops share the processors.

Norms and elementwise ops with one input go into what makes that input, if nobody else reads it;
shapes, splits and concatenations cost nothing. What remains is launched, one kernel each. A kernel
of b thread blocks uses u = min(1, b / units) of the GPU and is busy

    max(flops / (peak EFFICIENCY u), bytes / (bandwidth min(1, 2 u)))

so a small one leaves room for others: the problem's own formula (`problems/streams.py`), with the
figures of a device kind. The ops are cut into parts at articulation points (`blocks.py`).
"""

import json
import math
from dataclasses import dataclass

from partita.cluster import DeviceKind
from partita.costs.blocks import blocks
from partita.graph.record import Graph, Op
from partita.graph.work import flops, traffic_bytes
from partita.problems.streams import (
    BYTES_PER_VALUE,
    INPUT,
    Conv,
    StreamsConstants,
    StreamsOp,
    StreamsProblem,
)

EFFICIENCY = 0.55  # of the peak, while a kernel has all the processors it can use
SYNC_US = 1.5  # an edge between streams of a CUDA graph
ALPHA = 0.02  # what each further kernel costs the others
TILE = 64  # pixels and channels of a block of a matrix product
ELEMENTS = 1024  # of a block of anything else
VIEWS = frozenset({"concat", "reshape", "split", "slice", "constant", "transpose"})
PRODUCTS = frozenset({"conv", "linear", "matmul", "einsum"})
MOST_PART_OPS = 24  # longer parts are cut


@dataclass(frozen=True)
class StreamsModel:
    """The problem, and the ops of the graph behind each of its ops (the first is the input)."""

    problem: StreamsProblem
    names: tuple[tuple[str, ...], ...]


def streams_model(
    graph: Graph, device: DeviceKind, *, r: int | None = 3, s: int | None = 8
) -> StreamsModel:
    """The streams problem of a forward graph on one device."""
    groups = _groups(graph)
    constants = _constants(graph, device)
    number = {name: at for at, names in enumerate(groups, 1) for name in names}
    makers = _makers(graph, number)
    ops = [StreamsOp(INPUT, (), 0.0, 0.0, "input")]
    ops += [_streams_op(graph, each, number[each[0]], makers, constants) for each in groups]
    parts = _parts(graph, groups, [op.preds for op in ops])
    problem = StreamsProblem(tuple(ops), parts, constants, r, s, graph.name)
    return StreamsModel(problem, (("input",), *map(tuple, groups)))


def _parts(
    graph: Graph, groups: list[list[str]], preds: list[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Articulation points of the graph with its views: a concatenation is one that has many."""
    place = {op.name: at for at, op in enumerate(graph.ops)}
    whole = [sorted({place[p.name] for p in graph.predecessors(op)}) for op in graph.ops]
    of = {at: number for number, block in enumerate(blocks(whole)) for at in block}
    together: dict[int, list[int]] = {}
    for number, names in enumerate(groups, 1):
        together.setdefault(of[place[names[0]]], []).append(number)
    parts: list[tuple[int, ...]] = []
    for block in (sorted(each) for _, each in sorted(together.items())):
        inside = {op: at for at, op in enumerate(block)}
        local = [[inside[p] for p in preds[op] if p in inside] for op in block]
        pieces = (
            blocks(local, MOST_PART_OPS) if len(block) > MOST_PART_OPS else (range(len(block)),)
        )
        parts += [tuple(block[at] for at in piece) for piece in pieces]
    return tuple(parts)


def _constants(graph: Graph, device: DeviceKind) -> StreamsConstants:
    dtype = graph.parameters[0].dtype if graph.parameters else "f32"
    size = (
        graph.parameters[0].size_bytes / max(1, graph.parameters[0].num_elements)
        if (graph.parameters)
        else BYTES_PER_VALUE
    )
    return StreamsConstants(
        num_sms=device.num_units,
        peak_flop_per_us=device.peak(dtype) / 1e6,
        efficiency=EFFICIENCY,
        bytes_per_us=device.memory_bytes_per_s / 1e6 * BYTES_PER_VALUE / size,
        launch_us=device.launch_s * 1e6,
        sync_us=SYNC_US,
        alpha=ALPHA,
    )


def _groups(graph: Graph) -> list[list[str]]:
    """Ops that are launched as one, the first of each with what is fused into it."""
    home: dict[str, list[str]] = {}
    groups: list[list[str]] = []
    for op in graph.ops:
        if op.kind in VIEWS or _is_constant(graph, op):
            continue
        source = _fused_into(graph, op, home)
        if source is not None:
            source.append(op.name)
            home[op.name] = source
            continue
        home[op.name] = [op.name]
        groups.append(home[op.name])
    return groups


def _is_constant(graph: Graph, op: Op) -> bool:
    """Does it depend on parameters alone? Then it is worked out once."""
    names = [name for name in op.inputs if not graph.tensor(name).is_given]
    inputs = {tensor.name for tensor in graph.inputs}
    if any(name in inputs for name in op.inputs):
        return False
    return all(_is_constant(graph, maker) for name in names if (maker := graph.producer(name)))


def _fused_into(graph: Graph, op: Op, home: dict[str, list[str]]) -> list[str] | None:
    if op.kind not in ("batch_norm", "elementwise"):
        return None
    computed = [name for name in op.inputs if not graph.tensor(name).is_given]
    if len(computed) != 1 or len(graph.consumers(computed[0])) != 1:
        return None
    maker = graph.producer(computed[0])
    return home.get(maker.name) if maker is not None else None


def _makers(graph: Graph, number: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The launched ops behind every tensor; views are looked through, inputs are op 0."""
    makers: dict[str, tuple[int, ...]] = {tensor.name: (0,) for tensor in graph.inputs}
    for op in graph.ops:
        if op.name in number:
            made: tuple[int, ...] = (number[op.name],)
        else:
            made = tuple(sorted({m for name in op.inputs for m in makers.get(name, ())}))
        for name in op.outputs:
            makers[name] = made
    return makers


def _streams_op(
    graph: Graph, names: list[str], number: int, makers: dict[str, tuple[int, ...]],
    constants: StreamsConstants,
) -> StreamsOp:  # fmt: skip
    first, last = graph.op(names[0]), graph.op(names[-1])
    inputs = [name for each in names for name in graph.op(each).inputs if name in makers]
    preds = tuple(sorted({m for name in inputs for m in makers[name]} - {number}))
    work_us, used = _busy_us(graph, first, last, constants)
    shape = graph.tensor(first.inputs[0]).shape
    conv = _conv(graph, first) if len(preds) == 1 and len(inputs) == len(names) else None
    fused = [graph.op(each).kind for each in names[1:]]
    key = [first.attr("stride"), first.attr("dilation"), fused] if conv is not None else None
    return StreamsOp(
        first.kind,
        preds,
        constants.launch_us + work_us,
        used * work_us,
        first.name,
        (((preds[0], 0, shape[1]),),) if conv is not None else (),
        json.dumps(key) if conv is not None else None,
        conv,
    )


def _busy_us(graph: Graph, first: Op, last: Op, constants: StreamsConstants) -> tuple[float, float]:
    """How long a kernel is busy, and the part of the GPU it uses."""
    out = graph.tensor(last.outputs[0])
    rows = out.num_elements / max(1, out.shape[1]) if len(out.shape) > 1 else 1
    wide = out.shape[1] if len(out.shape) > 1 else out.num_elements
    groups = first.attr("groups", 1)
    if first.kind in PRODUCTS and groups == 1:
        number = math.ceil(wide / TILE) * math.ceil(rows / TILE)
    else:
        number = math.ceil(out.num_elements / ELEMENTS)
    used = min(1.0, max(1, number) / constants.num_sms)
    computing = flops(graph.call(first)) / (
        constants.peak_flop_per_us * constants.efficiency * used
    )
    size = out.size_bytes / max(1, out.num_elements)
    per_us = constants.bytes_per_us * size / BYTES_PER_VALUE
    moving = traffic_bytes(graph, first) / (per_us * min(1.0, 2 * used))
    return max(computing, moving), used


def _conv(graph: Graph, op: Op) -> Conv | None:
    """The shape of a convolution that could be merged; images of a batch stand below each other."""
    if op.kind != "conv" or op.attr("groups", 1) != 1:
        return None
    x, w = graph.tensor(op.inputs[0]).shape, graph.tensor(op.inputs[1]).shape
    y = graph.tensor(op.outputs[0]).shape
    if len(x) != 4 or len(w) != 4:
        return None
    return Conv(x[1], x[0] * x[2], x[3], y[1], y[0] * y[2], y[3], w[2], w[3])
