"""The least seconds of device time that a model can take, however it is split, cut or ordered.

Each op is given the best that the roofline of `roofline.py` ever grants: a contraction the largest
tile's part of the peak with all of its k in one piece, everything else the vector units' rate;
weights and states come from memory once, activations from the cache at best. No share of an op and
no micro-batch can be below its part of that. With w_op,k for device kind k, n_k devices of it and
any weights y_k >= 0 that add up to 1,

    step >= sum over ops of min_k (y_k w_op,k / n_k)

because a device computes no longer than a step. For one kind this is all work over all devices.
"""

import math

from partita.cluster import Cluster, DeviceKind
from partita.costs.roofline import (
    CONTRACTIONS,
    TILE_OVERHEAD_K,
    VECTOR_EFFICIENCY,
    as_products,
    measured_scale,
    rates_of,
    scan_rate,
)
from partita.graph.loops import loop_nest
from partita.graph.record import Call, Graph, Op, product_dtype
from partita.graph.work import elements, flops, traffic


def work_bound_s(graph: Graph, cluster: Cluster, execution: str = "graph") -> float:
    """No plan of this graph on this cluster takes less.

    Kernels that a compiler fuses do not move what they make inside: where not every op is a kernel
    of its own, only parameters, states and inputs count as moved.
    """
    fused = execution != "graph"
    counts: dict[str, int] = {}
    for device in cluster.devices:
        counts[device.kind] = counts.get(device.kind, 0) + 1
    kinds = [kind for kind in cluster.kinds if kind.name in counts]
    known: dict[object, list[float]] = {}
    rows: list[list[float]] = []
    for op in graph.ops:
        key = (graph.call(op), graph.dtype(op), *elements(graph, op))
        if key not in known:
            known[key] = [op_lower_bound_s(graph, op, kind, fused=fused) for kind in kinds]
        rows.append(known[key])
    totals = [math.fsum(column) or 1e-30 for column in zip(*rows, strict=True)]
    # The speed of all devices of a kind: with these weights, equal work in proportion to speed.
    speed = [counts[kind.name] / total for kind, total in zip(kinds, totals, strict=True)]
    share = [own / sum(speed) for own in speed]
    return math.fsum(
        min(y * w / counts[kind.name] for y, w, kind in zip(share, row, kinds, strict=True))
        for row in rows
    )


def op_lower_bound_s(graph: Graph, op: Op, kind: DeviceKind, *, fused: bool = False) -> float:
    """Device seconds that an op takes at the very least on devices of a kind."""
    call = graph.call(op)
    compute = _compute(call, graph.dtype(op), kind)
    moved = traffic(call, *elements(graph, op), {})
    bandwidth = kind.memory_bytes_per_s * rates_of(kind.name).memory
    memory = moved.given / bandwidth
    if fused:
        pass
    elif kind.cache_bytes == 0:
        memory += moved.computed / bandwidth
    elif kind.cache_bytes_per_s > 0:
        fastest = max(kind.cache_bytes_per_s, bandwidth)
        memory += moved.computed / fastest
    return max(compute, memory) * measured_scale(kind, call)[0]


def _compute(call: Call, dtype: str, kind: DeviceKind) -> float:
    work = flops(call)
    if not work:
        return 0.0
    rates = rates_of(kind.name)
    if call.kind in CONTRACTIONS:
        products = as_products(call, loop_nest(call), {})
        if products and min(min(p.m, p.n, p.k) for p in products) >= 4:
            multiplied = product_dtype(call, dtype)
            longer = min((p.k + TILE_OVERHEAD_K) / p.k for p in products)
            slow = 1 / rates.conv if call.kind == "conv" else 1.0
            return min(
                work * longer * slow / (kind.peak(multiplied) * rates.of_products(multiplied)),
                work / (kind.peak("f32") * VECTOR_EFFICIENCY),  # shares too small for a product
            )
    if call.kind == "attention":
        nest = loop_nest(call)
        width = next((dim.extent for dim in nest.dims if dim.name == "d"), 128)
        forward = call.phase == "forward"
        best = rates.attention_forward if forward else rates.attention_backward
        narrow = rates.attention_narrow
        if rates.attention_start and not forward:
            narrow /= 2
        best *= min(1.0, math.pow(width / 128, narrow))
        return work / (kind.peak(dtype) * best)
    if call.kind == "state_space":
        return work / (kind.peak(dtype) * scan_rate(call, rates))
    fastest = max(kind.peak(dtype), kind.peak("f32") * VECTOR_EFFICIENCY)
    return (
        work / fastest
        if call.kind in ("lstm", "gru")
        else work / (kind.peak("f32") * VECTOR_EFFICIENCY)
    )
