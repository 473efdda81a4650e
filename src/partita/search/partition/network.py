"""The partition problem as arrays: nodes with times, and nets that say what a producer sends where.

A net is one producer and its consumers. A device other than the producer's that holds consumers of
a net costs both devices a message with the largest fwd of those consumers, and one back with the
largest bwd. Every labelling of nodes by devices is valid with some staging, so nodes may be merged
without regard to cycles: `contract` gives the network of clusters, with exactly the same costs for
labellings that keep clusters whole. Of devices that are alike, never more than there are nodes
are used.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.problems.partition import PartitionProblem, PartitionSolution, stages_from_devices

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


class PartitionNetwork(NamedTuple):
    """Nodes in topological order (clusters: by their first node) and nets between them."""

    num_devices: int
    alike_devices: bool
    uniform: bool  # do all links cost the same, without latency?
    work_ms: F64  # per node and device
    held_bytes: F64  # per node
    net_src: I64
    net_messages: F64  # per net: how many messages it stands for, there and back
    pin_start: I64  # the pins of net e are pin_start[e] to pin_start[e + 1]
    pin_node: I64
    pin_fwd: F64  # bytes
    pin_bwd: F64
    alike: npt.NDArray[np.bool_]  # per net: do all its pins cost the same?
    made_start: I64  # the nets a node is the producer of
    made_net: I64
    used_start: I64  # the nets a node consumes
    used_net: I64
    per_byte_ms: F64  # from device to device
    latency_ms: F64
    caps_bytes: F64  # per device; inf: none
    kept_received: float  # how often what a device receives is held there

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return len(self.held_bytes)

    @property
    def mean_ms(self) -> F64:
        """Per node: its time on an average device."""
        mean: F64 = self.work_ms.mean(axis=1)
        return mean

    @property
    def pin_ms(self) -> F64:
        """Per pin: what it costs over the cheapest link, latency left out."""
        cheapest = 0.0
        if self.num_devices > 1:
            cheapest = float(self.per_byte_ms[~np.eye(self.num_devices, dtype=bool)].min())
        price: F64 = (self.pin_fwd + self.pin_bwd) * cheapest
        return price


Price = tuple[float, float]  # fwd and bwd bytes
Nets = dict[tuple[int, int], dict[int, Price]]  # (producer, key): pins
Messages = dict[tuple[int, int], Price]  # (producer, key): how many there and back


def network(problem: PartitionProblem) -> PartitionNetwork:
    """The nodes that need a device, in the problem's order."""
    placed = problem.placed
    place = {node.id: index for index, node in enumerate(placed)}
    nets: Nets = {}
    for edge in problem.inner_edges:
        src, dst = place[edge.src], place[edge.dst]
        pins = nets.setdefault((src, src), {})
        fwd, bwd = pins.get(dst, (0.0, 0.0))
        pins[dst] = max(fwd, float(edge.fwd_bytes)), max(bwd, float(edge.bwd_bytes))
    count = problem.num_devices
    if problem.alike:
        count = min(count, len(placed))
        work = np.repeat([[problem.node_ms(node, 0)] for node in placed], count, axis=1)
    else:
        work = np.array([[problem.node_ms(node, d) for d in range(count)] for node in placed])
    per_byte, latency = _links(problem, count)
    caps = np.array(problem.memory_bytes[:count] or [np.inf] * count, np.float64)
    return _from_nets(
        work,
        np.array([problem.node_bytes(node) for node in placed], np.float64),
        nets,
        dict.fromkeys(nets, (1.0, 1.0)),
        (count, problem.alike, per_byte, latency, caps),
        float(problem.in_flight if problem.recompute else 0),
    )


def _links(problem: PartitionProblem, count: int) -> tuple[F64, F64]:
    if problem.links is None:
        per_byte = np.full((count, count), 1e3 / problem.bandwidth_bytes_per_s)
        return per_byte, np.zeros((count, count))
    bandwidth = np.array(problem.links.bandwidth, np.float64)
    np.fill_diagonal(bandwidth, np.inf)
    latency = np.zeros((count, count))
    if problem.links.latency_s:
        latency = np.array(problem.links.latency_s, np.float64) * 1e3
        np.fill_diagonal(latency, 0.0)
    return 1e3 / bandwidth[:count, :count], latency[:count, :count]


def contract(net: PartitionNetwork, cluster: I64) -> PartitionNetwork:
    """The network of clusters; `cluster` numbers them 0, 1, ... by their first nodes."""
    count = int(cluster.max()) + 1
    work = np.zeros((count, net.num_devices))
    np.add.at(work, cluster, net.work_ms)
    nets: Nets = {}
    messages: Messages = {}
    starts, nodes = net.pin_start.tolist(), cluster[net.pin_node].tolist()
    fwd_bytes, bwd_bytes = net.pin_fwd.tolist(), net.pin_bwd.tolist()
    for key, src in enumerate(cluster[net.net_src].tolist()):
        pins: dict[int, Price] = {}
        for at in range(starts[key], starts[key + 1]):
            node = nodes[at]
            if node != src:
                fwd, bwd = pins.get(node, (0.0, 0.0))
                pins[node] = max(fwd, fwd_bytes[at]), max(bwd, bwd_bytes[at])
        if pins:
            nets[src, key] = pins
            messages[src, key] = (float(net.net_messages[key, 0]), float(net.net_messages[key, 1]))
    devices = min(net.num_devices, count) if net.alike_devices else net.num_devices
    nets, messages = _merged(nets, messages)
    return _from_nets(
        work[:, :devices],
        np.bincount(cluster, weights=net.held_bytes).astype(np.float64),
        nets,
        messages,
        (
            devices,
            net.alike_devices,
            net.per_byte_ms[:devices, :devices],
            net.latency_ms[:devices, :devices],
            net.caps_bytes[:devices],
        ),
        net.kept_received,
    )


def staged(problem: PartitionProblem, labels: Sequence[int]) -> PartitionSolution:
    """The solution of a device for every node, in the problem's order."""
    ids = (node.id for node in problem.placed)
    return stages_from_devices(problem, dict(zip(ids, labels, strict=True)))


def _merged(nets: Nets, messages: Messages) -> tuple[Nets, Messages]:
    """Nets of one producer to the same clusters at one price each, as one net: prices add up."""
    merged: Nets = {}
    known: dict[tuple[int, tuple[int, ...], bool, bool], tuple[int, int]] = {}
    counts: Messages = {}
    for (src, key), pins in nets.items():
        counts[src, key] = messages[src, key]
        if len(set(pins.values())) > 1:
            merged[src, key] = pins
            continue
        more = next(iter(pins.values()))
        kind = (src, tuple(sorted(pins)), more[0] > 0, more[1] > 0)
        first = known.setdefault(kind, (src, key))
        if first == (src, key):
            merged[first] = pins
            continue
        merged[first] = {
            node: (fwd + more[0], bwd + more[1]) for node, (fwd, bwd) in merged[first].items()
        }
        there, back = counts[first]
        counts[first] = there + messages[src, key][0], back + messages[src, key][1]
    return merged, counts


def _from_nets(
    work: F64,
    held: F64,
    nets: Nets,
    messages: Messages,
    machine: tuple[int, bool, F64, F64, F64],
    kept_received: float,
) -> PartitionNetwork:
    sources = [src for src, _ in nets]
    pins = list(nets.values())
    prices = [price for each in pins for price in each.values()]
    pin_node = [node for each in pins for node in each]
    net_of_pin = [index for index, each in enumerate(pins) for _ in each]
    made_start, made_net = _grouped(sources, range(len(pins)), len(work))
    used_start, used_net = _grouped(pin_node, net_of_pin, len(work))
    num_devices, alike, per_byte_ms, latency_ms, caps_bytes = machine
    return PartitionNetwork(
        num_devices,
        alike,
        _uniform(per_byte_ms, latency_ms),
        np.ascontiguousarray(work, np.float64),
        held,
        np.array(sources, np.int64),
        np.array([messages[key] for key in nets], np.float64).reshape(-1, 2),
        np.concatenate(([0], np.cumsum([len(each) for each in pins]))).astype(np.int64),
        np.array(pin_node, np.int64),
        np.array([fwd for fwd, _ in prices], np.float64),
        np.array([bwd for _, bwd in prices], np.float64),
        np.array([len(set(each.values())) == 1 for each in pins], np.bool_),
        made_start,
        made_net,
        used_start,
        used_net,
        np.ascontiguousarray(per_byte_ms),
        np.ascontiguousarray(latency_ms),
        np.ascontiguousarray(caps_bytes),
        kept_received,
    )


def _uniform(per_byte_ms: F64, latency_ms: F64) -> bool:
    """Do all links cost the same, without latency?"""
    off = ~np.eye(len(per_byte_ms), dtype=bool)
    return len(set(per_byte_ms[off].tolist())) <= 1 and not latency_ms[off].any()


def _grouped(keys: Sequence[int], values: Sequence[int], count: int) -> tuple[I64, I64]:
    """The values of every key, one key after the other: where each begins, and all of them."""
    where = np.array(keys, np.int64)
    order = np.argsort(where, kind="stable")
    start = np.concatenate(([0], np.cumsum(np.bincount(where, minlength=count))))
    return start.astype(np.int64), np.array(values, np.int64)[order]
