"""Partition: from a graph and devices to a problem whose nodes are layers of forward ops.

A node is an op with all that only reshapes, norms or activates its output (`placement_model`).
Its times are the roofline's, or a profile's: forward, and data and weight gradients with a part of
the update as backward. What it holds are its parameters with gradients and optimizer states, and
what its backward reads of what it made. A tied parameter is held by every node that reads it; if
those end up on two devices, each has a copy and the gradients are added.

Links are the cluster's routes: latency + bytes / bandwidth for every pair of devices.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partita.cluster import Cluster
from partita.costs.memory import workspace_bytes
from partita.costs.placement import PlacementModel, placement_model, segments
from partita.costs.profiles import ModelProfile
from partita.errors import ClusterError, InputError
from partita.graph.record import FLOATS, Graph
from partita.graph.work import traffic_bytes
from partita.problems.dag import sorted_or_cycle
from partita.problems.partition import (
    PartitionEdge,
    PartitionLinks,
    PartitionNode,
    PartitionProblem,
)


@dataclass(frozen=True)
class PartitionModel:
    """The layers of a graph, the problem whose node `i` is layer `i`, and tied parameters."""

    graph: Graph
    layers: tuple[tuple[str, ...], ...]  # names of forward ops, in topological order
    problem: PartitionProblem
    tied: tuple[tuple[str, tuple[int, ...]], ...]  # parameter, the layers that read it
    placement: PlacementModel  # what every op takes on every device


@dataclass(frozen=True, slots=True)
class PartitionConstraints:
    """What the problem is to keep to."""

    memory_bytes: float | None = None  # at most so much of every device
    recompute: bool = False
    in_flight: int = 1
    num_stages: int | None = None
    straight: bool = False
    in_order: tuple[str, ...] = ()  # ops that run one after the other: those that draw numbers


def partition_model(
    graph: Graph,
    cluster: Cluster,
    num_devices: int | None = None,
    constraints: PartitionConstraints | None = None,
    *,
    updates_every: int = 1,
    profile: ModelProfile | None = None,
    layers: Sequence[Sequence[str]] | None = None,
) -> PartitionModel:
    """The problem of cutting a (training) graph for the first `num_devices` of a cluster.

    The graph is that of one micro-batch; `updates_every` so many of them there is an update.
    `layers` are what is never cut, ranges of the graph's order; else an op with all that only
    reshapes, norms or activates its output.
    """
    count = cluster.num_devices if num_devices is None else num_devices
    if not 1 <= count <= cluster.num_devices:
        fix = f"{cluster.name} has {cluster.num_devices}"
        raise ClusterError(f"{count} devices are asked for", fix=fix, field="devices")
    asked = constraints or PartitionConstraints()
    model, edges = _layers(graph, cluster, asked.in_order, layers)
    if whole := _kept_whole(graph):
        model, edges = _layers(graph, cluster, asked.in_order, _joined(graph, model, whole))
    tied = _tied(graph, model)
    times = (
        _profiled(model, profile, cluster) if profile else _modelled(model, count, updates_every)
    )
    alike = len({cluster.devices[device].kind for device in range(count)}) == 1
    held = _held_bytes(graph, model, tied)
    nodes = tuple(
        PartitionNode(
            index,
            graph.op(names[0]).kind,
            *times[index][0],
            scope=names[0],
            param_bytes=held[index][0],
            activation_bytes=held[index][1],
            times_ms=() if alike else tuple(times[index]),
        )
        for index, names in enumerate(model.layers)
    )
    caps = []
    for device in range(count):
        kind = cluster.kind_of(device)
        room = kind.memory_bytes - workspace_bytes(kind)
        caps.append(min(room, asked.memory_bytes or room))
    problem = PartitionProblem(
        nodes,
        edges,
        count,
        name=graph.name,
        memory_bytes=tuple(caps),
        links=_links(cluster, count),
        recompute=asked.recompute,
        in_flight=asked.in_flight,
        num_stages=asked.num_stages,
        straight=asked.straight,
    )
    return PartitionModel(graph, model.layers, problem, tied, model)


def _modelled(
    model: PlacementModel, count: int, updates_every: int
) -> list[list[tuple[float, float]]]:
    """Forward and backward ms of every layer on every device, by the roofline."""
    seconds = model.phase_seconds
    forward = seconds["forward"][:, :count] * 1e3
    update = seconds["update"] / updates_every
    backward = (seconds["dgrad"] + seconds["wgrad"] + update)[:, :count] * 1e3
    return [
        list(zip(fwd, bwd, strict=True))
        for fwd, bwd in zip(forward.tolist(), backward.tolist(), strict=True)
    ]


def _profiled(
    model: PlacementModel, profile: ModelProfile, cluster: Cluster
) -> list[list[tuple[float, float]]]:
    """The same for every device alike, as measured."""
    if not cluster.is_homogeneous:
        raise InputError(
            f"is of one device, and {cluster.name} has several kinds",
            fix="leave the profile out, or name a cluster of one kind",
            field="profile",
        )
    known = {op.op: op for op in profile.ops}
    rows = []
    for names in model.layers:
        for name in names:
            if name not in known:
                raise InputError(
                    f"has no time for the op {name!r}", fix="profile this model", field="profile"
                )
        ops = [known[name] for name in names]
        forward, backward = sum(op.forward_s for op in ops), sum(op.backward_s for op in ops)
        rows.append([(forward * 1e3, backward * 1e3)] * cluster.num_devices)
    return rows


def _tied(graph: Graph, model: PlacementModel) -> tuple[tuple[str, tuple[int, ...]], ...]:
    tied = []
    for parameter in graph.parameters:
        readers = {
            model.layer_of[op.name]
            for op in graph.consumers(parameter.name)
            if op.phase == "forward"
        }
        if len(readers) > 1:
            tied.append((parameter.name, tuple(sorted(readers))))
    return tuple(tied)


def _kept_whole(graph: Graph) -> list[tuple[int, int]]:
    """First and last of the forward ops that read a parameter, where only some give a gradient.

    Stages that hold a parameter update it by the sum of their gradients, so that one without any
    would keep an old copy. Such a read is one whose result nothing trained depends on.
    """
    place = {op.name: n for n, op in enumerate(op for op in graph.ops if op.phase == "forward")}
    giving = {
        (op.forward, graph.op(op.forward).inputs[i])
        for op in graph.ops
        if op.phase != "forward" and op.forward
        for i in graph.call(op).wrt
    }
    ranges = []
    for parameter in graph.parameters if giving else ():
        readers = [op.name for op in graph.consumers(parameter.name) if op.phase == "forward"]
        num_giving = sum((name, parameter.name) in giving for name in readers)
        if 0 < num_giving < len(readers):
            places = [place[name] for name in readers]
            ranges.append((min(places), max(places)))
    return ranges


def _joined(
    graph: Graph, model: PlacementModel, whole: Sequence[tuple[int, int]]
) -> list[list[str]]:
    """Ranges of the graph's order: of one layer each, and none of these ranges cut."""
    ops = [op.name for op in graph.ops if op.phase == "forward"]
    joined: list[list[str]] = []
    for number, name in enumerate(ops):
        within = any(first < number <= last for first, last in whole)
        same = number > 0 and model.layer_of[ops[number - 1]] == model.layer_of[name]
        if within or same:
            joined[-1].append(name)
        else:
            joined.append([name])
    return joined


def _held_bytes(
    graph: Graph, model: PlacementModel, tied: tuple[tuple[str, tuple[int, ...]], ...]
) -> list[tuple[int, int]]:
    """For parameters, and of activations for one micro-batch, by layer."""
    copies = [0] * len(model.layers)
    for parameter, readers in tied:
        size = graph.tensor(parameter).size_bytes * (2 if graph.is_training else 1)
        for layer in readers:
            copies[layer] += size if layer != model.home[parameter] else 0
    held_bytes = []
    for layer, names in enumerate(model.layers):
        kept = 0
        for op in map(graph.op, names):
            if traffic_bytes(graph, op) == 0:
                continue  # a view keeps nothing of its own
            for name in op.outputs:
                if any(user.phase in ("dgrad", "wgrad") for user in graph.consumers(name)):
                    kept += graph.tensor(name).size_bytes
        held_bytes.append((int(sum(model.parameter_bytes(layer))) + copies[layer], kept))
    return held_bytes


def _layers(
    graph: Graph,
    cluster: Cluster,
    in_order: Sequence[str],
    layers: Sequence[Sequence[str]] | None,
) -> tuple[PlacementModel, tuple[PartitionEdge, ...]]:
    """Layers with their edges; an edge without bytes leads from each op in order to the next.

    Where layers of several such ops would then wait for each other, each of these ops is a layer of
    its own: the ops follow one another in the graph, so that there is no circle among them.
    """
    model = placement_model(graph, cluster, layers=layers)
    edges = _edges(graph, model, in_order)
    if layers is not None:
        return model, edges
    consumers: list[list[int]] = [[] for _ in model.layers]
    for edge in edges:
        consumers[edge.src].append(edge.dst)
    if sorted_or_cycle(consumers)[1]:
        apart = {name: number for number, name in enumerate(in_order)}
        model = placement_model(graph, cluster, apart)
        edges = _edges(graph, model, in_order)
    return model, edges


def _edges(
    graph: Graph, model: PlacementModel, in_order: Sequence[str]
) -> tuple[PartitionEdge, ...]:
    """What layers send each other; gradients come back where the consumer gives one."""
    giving = {op.forward for op in graph.ops if op.phase == "dgrad"}
    sent: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
    for producer, consumer, tensor in graph.edges():
        if producer.phase != "forward" or consumer.phase != "forward":
            continue
        ends = model.layer_of[producer.name], model.layer_of[consumer.name]
        if ends[0] == ends[1]:
            continue
        returns = consumer.name in giving and tensor.dtype in FLOATS
        pair = tensor.size_bytes, tensor.size_bytes if returns else 0
        known = sent.setdefault(ends, {}).get(tensor.name, (0, 0))
        sent[ends][tensor.name] = max(known, pair)
    for before, after in itertools.pairwise(model.layer_of[name] for name in in_order):
        if before != after:
            sent.setdefault((before, after), {"": (0, 0)})
    return tuple(
        PartitionEdge(*ends, *map(sum, zip(*sizes.values(), strict=True)))
        for ends, sizes in sorted(sent.items())
    )


def _links(cluster: Cluster, count: int) -> PartitionLinks | None:
    """Bandwidth and latency of every route; None for a single device."""
    if count == 1:
        return None
    known: Mapping[tuple[int, int], tuple[float, float]] = {
        (a, b): _route(cluster, a, b) for a in range(count) for b in range(count) if a != b
    }
    rows = range(count)
    return PartitionLinks(
        tuple(tuple(known[a, b][0] if a != b else 1.0 for b in rows) for a in rows),
        tuple(tuple(known[a, b][1] if a != b else 0.0 for b in rows) for a in rows),
    )


def _route(cluster: Cluster, a: int, b: int) -> tuple[float, float]:
    pieces = segments(cluster, a, b)
    bandwidth = 1 / sum(1 / piece.bytes_per_s for piece in pieces)
    return bandwidth, sum(piece.latency_s for piece in pieces)
