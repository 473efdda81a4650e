"""Placement: from a graph and a cluster to layers, their times on every device, and a problem.

Layers. A layer is what moves as one: an op with all that only reshapes, norms or activates its
output. An op joins the layer of its producer where that is the only layer it reads computed
tensors from, it is cheap (a view, elementwise, a norm), and nobody else reads what it reads: to
cut there would send as many bytes as to cut behind it. Joining along the only edge into an op
makes no cycle, and layers in the order of their first ops are in topological order.

Two semantics, two records from the same layers:

exprimo   what Exprimo counts: the data gradient alone, parameters and activations in memory, the
          two directions of a cable as one channel, bytes / bandwidth without latency.
partita   data and weight gradients and a part of the update in `bwd_ms`; parameters, gradients,
          optimizer states and what is saved inside the layer in `weight_bytes`; a channel per
          direction; latency + bytes / bandwidth. It guides the search; what is found is simulated
          op by op (`jobs/place_program.py`) before anyone sees it.

A record knows one channel per pair of devices: that of the narrowest link on the route (the first
of equals, so that what leaves a device waits for its own link). Where a route passes through
devices, its segments' times add up.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from partita.cluster import Cluster
from partita.costs.memory import workspace_bytes
from partita.costs.roofline import op_cost
from partita.graph.record import Graph, Op
from partita.graph.work import flops, traffic_bytes
from partita.problems.placement import (
    Channel,
    PlacementDevice,
    PlacementLayer,
    PlacementProblem,
    RecordConstraints,
)

Semantics = Literal["partita", "exprimo"]
SEMANTICS: tuple[Semantics, ...] = ("partita", "exprimo")
F64 = npt.NDArray[np.float64]

# Kinds that join the op whose output they alone read.
JOINING = frozenset(
    {"elementwise", "batch_norm", "group_norm", "layer_norm", "rms_norm", "softmax", "pad"}
)
BOUND_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class RouteSegment:
    """A piece of a route from one device to the next: links that carry a message at once."""

    links: tuple[int, ...]
    latency_s: float
    bytes_per_s: float  # of the narrowest link


class PlacedOp(NamedTuple):
    """An op as lowering sees it."""

    name: str
    phase: str
    layer: int
    seconds: tuple[float, ...]  # per device
    reads: tuple[str, ...]  # computed tensors, each once
    makes: tuple[tuple[str, float], ...]  # tensors and their bytes
    free: bool  # what it makes is a view of what it reads


@dataclass(frozen=True)
class PlacementModel:
    """Layers of a graph, and what each op costs on each device of a cluster."""

    graph: Graph
    cluster: Cluster
    layers: tuple[tuple[str, ...], ...]  # names of forward ops, in topological order
    layer_of: Mapping[str, int]  # of every op of the graph, backward and updates included
    parents: tuple[tuple[int, ...], ...]
    children: tuple[tuple[int, ...], ...]
    sent_bytes: tuple[float, ...]  # of a layer to the layers that read it
    saved_bytes: tuple[float, ...]  # inside a layer, from its forward to its backward
    home: Mapping[str, int]  # parameter -> the layer that updates it

    @cached_property
    def seconds(self) -> F64:
        """[op, device]: seconds of every op of the graph; updates of a layer are one kernel."""
        kinds = {kind.name: kind for kind in self.cluster.kinds}
        columns = {}
        for name in {device.kind for device in self.cluster.devices}:
            kind, fused, column = kinds[name], set[int](), []
            for op in self.graph.ops:
                cost = op_cost(self.graph, op, kind)
                if op.phase == "update":
                    layer = self.layer_of[op.name]
                    launch = 0.0 if layer in fused else kind.launch_s
                    fused.add(layer)
                    column.append(launch + cost.scaled(1.0).seconds)
                else:
                    column.append(cost.seconds)
            columns[name] = column
        return np.array([columns[device.kind] for device in self.cluster.devices]).T.reshape(
            len(self.graph.ops), self.cluster.num_devices
        )

    @cached_property
    def phase_seconds(self) -> dict[str, F64]:
        """[layer, device] seconds by phase: forward, dgrad, wgrad, update."""
        phases = ("forward", "dgrad", "wgrad", "update")
        shape = (len(self.layers), self.cluster.num_devices)
        phase_seconds = {phase: np.zeros(shape) for phase in phases}
        for op, row in zip(self.graph.ops, self.seconds, strict=True):
            phase_seconds[op.phase][self.layer_of[op.name]] += row
        return phase_seconds

    @cached_property
    def free(self) -> frozenset[str]:
        """Ops that neither compute nor move anything: their outputs are views of their inputs."""
        return frozenset(
            op.name
            for op in self.graph.ops
            if traffic_bytes(self.graph, op) == 0 and flops(self.graph.call(op)) == 0
        )

    @cached_property
    def steps(self) -> tuple[PlacedOp, ...]:
        """What is run for every batch: all ops but the updates, with what lowering asks of each."""
        tensor = self.graph.tensor
        return tuple(
            PlacedOp(
                op.name,
                op.phase,
                self.layer_of[op.name],
                tuple(row.tolist()),
                tuple(name for name in dict.fromkeys(op.inputs) if not tensor(name).is_given),
                tuple((name, float(tensor(name).size_bytes)) for name in op.outputs),
                op.name in self.free,
            )
            for op, row in zip(self.graph.ops, self.seconds, strict=True)
            if op.phase != "update"
        )

    def parameter_bytes(self, layer: int) -> tuple[float, float, float]:
        """(parameters, gradients, optimizer states) that a layer holds at its home."""
        return self._parameter_bytes[layer]

    @cached_property
    def _parameter_bytes(self) -> tuple[tuple[float, float, float], ...]:
        totals = [[0.0, 0.0, 0.0] for _ in self.layers]
        for tensor in self.graph.parameters:
            if tensor.name in self.home:
                totals[self.home[tensor.name]][0] += tensor.size_bytes
        for op in self.graph.ops:
            if op.phase == "update":
                total = totals[self.layer_of[op.name]]
                total[1] += self.graph.tensor(op.inputs[1]).size_bytes
                total[2] += sum(self.graph.tensor(name).size_bytes for name in op.inputs[2:])
        return tuple((a, b, c) for a, b, c in totals)

    def segments(self, source: int, target: int) -> tuple[RouteSegment, ...]:
        """The route between two devices, cut at the devices it passes through."""
        if (source, target) not in self._segments:
            self._segments[source, target] = segments(self.cluster, source, target)
        return self._segments[source, target]

    @cached_property
    def _segments(self) -> dict[tuple[int, int], tuple[RouteSegment, ...]]:
        return {}

    def capacity_bytes(self, device: int) -> float:
        """Memory of a device for tensors of ours."""
        kind = self.cluster.kind_of(device)
        return kind.memory_bytes - workspace_bytes(kind)

    def problem(
        self,
        semantics: Semantics = "partita",
        *,
        batches: int = 1,
        in_flight: int = 1,
        constraints: RecordConstraints = RecordConstraints(),  # noqa: B008 - frozen
        communication: float = 1.0,
    ) -> PlacementProblem:
        """The record that searches see; `communication` scales every transfer."""
        own = semantics == "partita"
        channels, route, rates = _channels(self.cluster, own)
        # Without a backward pass nothing comes back, but the record sends it: half each way.
        weight = communication if self.graph.is_training or not own else communication / 2
        return PlacementProblem(
            name=f"{self.graph.name} on {self.cluster.name}",
            devices=tuple(
                PlacementDevice(
                    self.capacity_bytes(index) if own else self.cluster.kind_of(index).memory_bytes,
                    device.kind,
                    self.cluster.kind_of(index).type,
                )
                for index, device in enumerate(self.cluster.devices)
            ),
            channels=channels,
            route=route,
            layers=tuple(
                self._layer(index, own, rates, weight, batches, min(batches, in_flight))
                for index in range(len(self.layers))
            ),
            batches=batches,
            pipeline_batches=in_flight,
            constraints=constraints,
        )

    def _layer(
        self, index: int, own: bool, rates: Sequence[tuple[float, float]], weight: float,
        batches: int, in_flight: int,
    ) -> PlacementLayer:  # fmt: skip
        phases = self.phase_seconds
        backward = phases["dgrad"][index].copy()
        held, gradients, states = self.parameter_bytes(index)
        if own:
            backward += phases["wgrad"][index] + phases["update"][index] / batches
            held += gradients + states + in_flight * self.saved_bytes[index]
        sent = self.sent_bytes[index]
        names = self.layers[index]
        return PlacementLayer(
            name=names[0],
            parents=self.parents[index],
            children=self.children[index],
            output_bytes=sent,
            weight_bytes=held,
            fwd_ms=tuple((phases["forward"][index] * 1e3).tolist()),
            bwd_ms=tuple((backward * 1e3).tolist()),
            transfer_ms=tuple(
                weight * 1e3 * (latency_s + sent * s_per_byte) for latency_s, s_per_byte in rates
            ),
            type=self.graph.op(names[0]).kind,
        )

    def bound_s(
        self, constraints: RecordConstraints, batches: int = 1, in_flight: int = 1
    ) -> float:
        """No placement takes less by our own simulation; in seconds.

        A longest path, each op on the device where it is fastest, is one bound; batches that may
        not overlap follow one another. Another is work: for any weights w of the devices that add
        up to 1, a step T has  T >= sum of w_d T >= sum over ops of min over d of w_d seconds[op, d]
        since no device works longer than T. The weights are moved towards the devices that this
        minimum loads most. With at most k devices, T >= sum of fastest seconds / k as well.
        """
        allowed = self._allowed(constraints)
        times = np.where(allowed, self.phase_total(batches), math.inf)
        if not np.isfinite(times.min(axis=1)).all():
            return 0.0  # the constraints exclude each other, which the search says
        most = min(constraints.max_devices or self.cluster.num_devices, self.cluster.num_devices)
        work = max(_balanced(times), float(times.min(axis=1).sum()) / most)
        row = math.ceil(batches / max(1, in_flight))
        return max(self._longest(allowed, row), work) * (1 - 1e-9)

    def phase_total(self, batches: int) -> F64:
        """[layer, device] seconds of a whole step of so many batches."""
        phases = self.phase_seconds
        total: F64 = batches * (phases["forward"] + phases["dgrad"] + phases["wgrad"])
        return total + phases["update"]

    def _longest(self, allowed: npt.NDArray[np.bool_], consecutive_batches: int) -> float:
        """The longest path of a batch, so many times, and the last update behind it."""
        ends: dict[str, float] = {}
        once = last = 0.0
        for index, op in enumerate(self.graph.ops):
            layer = self.layer_of[op.name]
            fastest = float(self.seconds[index][allowed[layer]].min())
            before = max((ends.get(name, 0.0) for name in op.inputs), default=0.0)
            for name in op.outputs:
                ends[name] = before + fastest
            if op.phase == "update":
                last = max(last, before + fastest)
            else:
                once = max(once, before + fastest)
        return (consecutive_batches - 1) * once + max(once, last)

    def _allowed(self, constraints: RecordConstraints) -> npt.NDArray[np.bool_]:
        allowed = np.ones((len(self.layers), self.cluster.num_devices), np.bool_)
        for layer, device in constraints.forbidden:
            allowed[layer, device] = False
        for layer, device in constraints.pinned:
            allowed[layer, np.arange(self.cluster.num_devices) != device] = False
        for group in constraints.colocated:
            allowed[list(group)] = allowed[list(group)].all(axis=0)
        return allowed


def placement_model(
    graph: Graph,
    cluster: Cluster,
    apart: Mapping[str, object] | None = None,
    layers: Sequence[Sequence[str]] | None = None,
) -> PlacementModel:
    """The layers of a graph with their costs; ops with unlike values in `apart` never join.

    Layers may be given instead: names of forward ops, in topological order.
    """
    forward = [op for op in graph.ops if op.phase == "forward"]
    if layers is None:
        layers, layer_of = _join(graph, forward, apart or {})
    else:
        layer_of = {name: index for index, names in enumerate(layers) for name in names}
    parents = [dict[int, None]() for _ in layers]
    children = [dict[int, None]() for _ in layers]
    sent: list[dict[str, float]] = [{} for _ in layers]
    for producer, consumer, tensor in graph.edges():
        if consumer.phase == "forward":
            a, b = layer_of[producer.name], layer_of[consumer.name]
            if a != b:
                parents[b][a] = children[a][b] = None
                sent[a][tensor.name] = float(tensor.size_bytes)
    home = _homes(graph, forward, layer_of)
    every = dict(layer_of)
    for op in graph.ops:
        if op.phase != "forward":
            every[op.name] = _owner(graph, op, layer_of, home)
    return PlacementModel(
        graph,
        cluster,
        tuple(map(tuple, layers)),
        every,
        tuple(map(tuple, parents)),
        tuple(map(tuple, children)),
        tuple(sum(sizes.values()) for sizes in sent),
        tuple(_saved(graph, layers, sent)),
        home,
    )


def segments(cluster: Cluster, source: int, target: int) -> tuple[RouteSegment, ...]:
    """The route between two devices, cut at the devices it passes through."""
    devices = {device.name for device in cluster.devices}
    route_segments, piece = [], list[int]()
    for link in cluster.route(source, target):
        piece.append(link)
        if cluster.links[link].target in devices:
            route_segments.append(_segment(cluster, tuple(piece)))
            piece = []
    return tuple(route_segments)


def _segment(cluster: Cluster, links: tuple[int, ...]) -> RouteSegment:
    chosen = [cluster.links[link] for link in links]
    latency_s = sum(link.latency_s for link in chosen)
    return RouteSegment(links, latency_s, min(link.bytes_per_s for link in chosen))


def _join(
    graph: Graph, forward: Sequence[Op], apart: Mapping[str, object]
) -> tuple[list[list[str]], dict[str, int]]:
    layers: list[list[str]] = []
    layer_of: dict[str, int] = {}
    for op in forward:
        producers = {layer_of[before.name] for before in graph.predecessors(op)}
        joins = len(producers) == 1 and _may_join(graph, op)
        if joins:
            founder = layers[next(iter(producers))][0]
            joins = apart.get(founder) == apart.get(op.name)
        if joins:
            layer_of[op.name] = producers.pop()
            layers[layer_of[op.name]].append(op.name)
        else:
            layer_of[op.name] = len(layers)
            layers.append([op.name])
    return layers, layer_of


def _may_join(graph: Graph, op: Op) -> bool:
    """A view always; a cheap op where it is the only reader of what it reads."""
    if traffic_bytes(graph, op) == 0 and flops(graph.call(op)) == 0:
        return True
    if op.kind not in JOINING:
        return False
    computed = [name for name in op.inputs if graph.producer(name) is not None]
    return all(_forward_readers(graph, name) == 1 for name in computed)


def _forward_readers(graph: Graph, tensor: str) -> int:
    return sum(user.phase == "forward" for user in graph.consumers(tensor))


def _homes(graph: Graph, forward: Sequence[Op], layer_of: Mapping[str, int]) -> dict[str, int]:
    homes: dict[str, int] = {}
    for op in forward:
        for name in op.inputs:
            if graph.tensor(name).role == "parameter":
                homes.setdefault(name, layer_of[op.name])
    return homes


def _owner(graph: Graph, op: Op, layer_of: Mapping[str, int], home: Mapping[str, int]) -> int:
    """The layer whose device runs an op of the backward or an update."""
    if op.forward:
        return layer_of[op.forward]
    if op.phase == "update":
        return home[op.inputs[0]]
    for user in graph.consumers(op.outputs[0]):  # a sum of gradients runs where it is needed
        if user.forward:
            return layer_of[user.forward]
        if user.phase == "update":
            return home[user.inputs[0]]
    source = graph.producer(op.inputs[0])
    return layer_of[source.forward] if source is not None and source.forward else 0


def _saved(
    graph: Graph, layers: Sequence[Sequence[str]], sent: Sequence[Mapping[str, float]]
) -> list[float]:
    """Bytes made inside each layer that its backward reads and no other layer does."""
    saved = []
    for names, outside in zip(layers, sent, strict=True):
        total = 0.0
        for op in map(graph.op, names):
            if traffic_bytes(graph, op) == 0:
                continue
            for name in op.outputs:
                read = any(user.phase in ("dgrad", "wgrad") for user in graph.consumers(name))
                if read and name not in outside:
                    total += graph.tensor(name).size_bytes
        saved.append(total)
    return saved


def _channels(
    cluster: Cluster, directed: bool
) -> tuple[tuple[Channel, ...], tuple[tuple[int, ...], ...], list[tuple[float, float]]]:
    """Channels, the route table, and (latency, seconds per byte) of every channel."""
    known: dict[tuple[object, float], int] = {}
    rates: list[tuple[float, float]] = []
    names: list[str] = []
    table = []
    for source in range(cluster.num_devices):
        row = []
        for target in range(cluster.num_devices):
            if source == target:
                row.append(-1)
                continue
            pieces = segments(cluster, source, target)
            links = [link for piece in pieces for link in piece.links]
            narrow = min(links, key=lambda link: cluster.links[link].bytes_per_s)
            s_per_byte = sum(1 / piece.bytes_per_s for piece in pieces)
            latency_s = sum(piece.latency_s for piece in pieces) if directed else 0.0
            key = (_medium(cluster, narrow, directed), s_per_byte)
            if key not in known:
                known[key] = len(rates)
                rates.append((latency_s, s_per_byte))
                ends = cluster.links[narrow]
                names.append(f"{ends.source} {'→' if directed else '–'} {ends.target}")
            channel = known[key]
            rates[channel] = (max(rates[channel][0], latency_s), s_per_byte)
            row.append(channel)
        table.append(tuple(row))
    channels = tuple(
        Channel(8e-9 / s_per_byte, name) for name, (_, s_per_byte) in zip(names, rates, strict=True)
    )
    return channels, tuple(table), rates


def _medium(cluster: Cluster, link: int, directed: bool) -> object:
    """What links that share a channel have in common."""
    medium = cluster.links[link]
    if medium.lane:
        return medium.lane
    return link if directed else frozenset((medium.source, medium.target))


def _balanced(times: F64) -> float:
    """The best found of  sum over rows of min over columns of w * times  with w adding up to 1."""
    num_devices = times.shape[1]
    weights = np.full(num_devices, 1 / num_devices)
    best = 0.0
    for turn in range(BOUND_ROUNDS):
        scaled = times * weights
        chosen = scaled.argmin(axis=1)
        best = max(best, float(scaled.min(axis=1).sum()))
        taken = times[np.arange(len(times)), chosen]
        load = np.bincount(chosen, weights=taken, minlength=num_devices)
        if not load.max() > 0:
            break
        weights = weights * np.exp(load / load.max() / (1 + turn / 4))
        weights /= weights.sum()
    return best
