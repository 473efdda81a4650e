"""How many bytes of sharded parameters one gather brings.

A gather has a start, a seconds, and brings b bytes a second. Before a phase computes, its first
bundle must be there; the others arrive beside computing. With S bytes to gather in all,

    exposed = B / b        starts = a S / B        least together at B = sqrt(a b S)

Two bundles are held at a time, so that none is larger than a part of a device's memory. Frameworks
bundle by layers (FSDP's wrapping), which is the same thing where a layer has about that size.
"""

import math

from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.costs.layouts import num_shards, zero_axes
from partita.graph.chain import longest_repeat
from partita.graph.record import Graph
from partita.graph.splits import placements
from partita.plans import Mesh, Stage

PROBE_BYTES = 25 * 1024 * 1024  # a gather by which starts are told from bandwidth
MEMORY_SHARE = 1 / 32  # of a device, for one bundle


def gather_start(
    collectives: Collectives, mesh: Mesh, axes: tuple[int, ...]
) -> tuple[float, float]:  # fmt: skip
    """Seconds before a gather along some axes brings anything, and of each byte of its result."""
    start = each = 0.0
    for axis in axes:
        groups = mesh.groups(axis)
        moving = collectives.by_bandwidth("all_gather", PROBE_BYTES, groups)
        start += max(0.0, collectives.seconds("all_gather", PROBE_BYTES, groups) - moving)
        each += moving / PROBE_BYTES
    return start, each


def best_bundle(
    total_bytes: float, start_s: float, byte_s: float, memory_bytes: float
) -> int:  # fmt: skip
    """Bytes of one gather, of so many in all."""
    if not byte_s:
        return 0
    return int(min(math.sqrt(total_bytes * start_s / byte_s), MEMORY_SHARE * memory_bytes))


def stage_bundles(
    stage: Stage, graph: Graph, cluster: Cluster, collectives: Collectives
) -> tuple[str, ...]:
    """The forward ops of a stage with which a bundle of its sharded parameters begins.

    A bundle ends when it is large enough, and with its layer (what repeats in the model), so that
    equal layers are gathered alike. None where no parameter is sharded.
    """
    sizes, per_op = _gathered_bytes(stage, graph)
    if not sizes:
        return ()
    largest = max(sizes, key=lambda axes: (sizes[axes], axes))
    memory = min(cluster.kind_of(device).memory_bytes for device in stage.mesh.devices)
    start, each = gather_start(collectives, stage.mesh, largest)
    bundle = best_bundle(sizes[largest], start, each, float(memory))
    layer_of = _layers(stage, graph)
    firsts: list[str] = []
    size, layer = 0.0, -1
    for name, own in per_op.items():
        if not firsts or size >= bundle or layer_of[name] != layer:
            firsts.append(name)
            size = 0.0
        size, layer = size + own, layer_of[name]
    return tuple(firsts)


def _gathered_bytes(
    stage: Stage, graph: Graph
) -> tuple[dict[tuple[int, ...], float], dict[str, float]]:
    """Bytes of sharded parameters once they are whole: by the axes of their gather, and by op."""
    sizes: dict[tuple[int, ...], float] = {}
    per_op: dict[str, float] = {}
    seen: set[str] = set()
    ways = tuple(axis.ways() for axis in stage.mesh.axes)
    for split in stage.splits:
        if split.zero != 3:
            continue
        op = graph.op(split.op)
        needed = placements(graph.call(op), split.dims)[0]
        for name, layout in zip(op.inputs, needed, strict=True):
            tensor = graph.tensor(name)
            axes = zero_axes(layout, stage.mesh.axes)
            if tensor.role == "parameter" and axes and name not in seen:
                seen.add(name)
                size = tensor.size_bytes / num_shards(layout, ways)
                sizes[axes] = sizes.get(axes, 0.0) + size
                per_op[op.name] = per_op.get(op.name, 0.0) + size
    return sizes, per_op


def _layers(stage: Stage, graph: Graph) -> dict[str, int]:
    """The layer of every op of a stage: what repeats, one after the other, and the rest."""
    ops = [graph.op(split.op) for split in stage.splits]
    key = ("layers of bundles", f"{ops[0].name} {ops[-1].name} {len(ops)}")
    if key not in graph.memo:
        repeat = longest_repeat(graph, ops)
        layers = {op.name: 0 for op in ops}
        if repeat is not None:
            for place, op in enumerate(ops[repeat.first :]):
                layers[op.name] = 1 + min(place // repeat.length, repeat.times)
        graph.memo[key] = layers
    known: dict[str, int] = graph.memo[key]
    return known
