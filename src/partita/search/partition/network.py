"""The partition problem as arrays: nodes with times, and nets that say what a producer sends where.

A net is one producer and its consumers. A device other than the producer's that holds consumers of
a net costs both devices `largest fwd + largest bwd` of those consumers, in ms. Every labelling of
nodes by devices is valid with some staging, so nodes may be merged without regard to cycles:
`contract` gives the network of clusters, with exactly the same costs for labellings that keep
clusters whole. Devices are alike, so never more than there are nodes are used.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.problems.partition import PartitionProblem, PartitionSolution, stages_from_devices

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


class Network(NamedTuple):
    """Nodes in topological order (clusters: by their first node) and nets between them."""

    num_devices: int
    work_ms: F64
    net_src: I64
    pin_start: I64  # the pins of net e are pin_start[e] to pin_start[e + 1]
    pin_node: I64
    pin_fwd_ms: F64
    pin_bwd_ms: F64
    alike: npt.NDArray[np.bool_]  # per net: do all its pins cost the same?
    made_start: I64  # the nets a node is the producer of
    made_net: I64
    used_start: I64  # the nets a node consumes
    used_net: I64

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return len(self.work_ms)


Nets = dict[tuple[int, int], dict[int, tuple[float, float]]]  # (producer, key): pins, fwd and bwd


def network(problem: PartitionProblem) -> Network:
    """The nodes that need a device, in the problem's order."""
    placed = problem.placed
    place = {node.id: index for index, node in enumerate(placed)}
    ms_per_byte = 1e3 / problem.bandwidth_bytes_per_s
    nets: Nets = {}
    for edge in problem.inner_edges:
        src, dst = place[edge.src], place[edge.dst]
        pins = nets.setdefault((src, src), {})
        fwd, bwd = pins.get(dst, (0.0, 0.0))
        pins[dst] = (
            max(fwd, edge.fwd_bytes * ms_per_byte),
            max(bwd, edge.bwd_bytes * ms_per_byte),
        )
    work = np.array([node.fwd_ms + node.bwd_ms for node in placed])
    return _from_nets(min(problem.num_devices, len(placed)), work, nets)


def contract(net: Network, cluster: I64) -> Network:
    """The network of clusters; `cluster` numbers them 0, 1, ... by their first nodes."""
    work = np.bincount(cluster, weights=net.work_ms).astype(np.float64)
    nets: Nets = {}
    starts, nodes = net.pin_start.tolist(), cluster[net.pin_node].tolist()
    fwd_ms, bwd_ms = net.pin_fwd_ms.tolist(), net.pin_bwd_ms.tolist()
    for key, src in enumerate(cluster[net.net_src].tolist()):
        pins: dict[int, tuple[float, float]] = {}
        for at in range(starts[key], starts[key + 1]):
            node = nodes[at]
            if node != src:
                fwd, bwd = pins.get(node, (0.0, 0.0))
                pins[node] = max(fwd, fwd_ms[at]), max(bwd, bwd_ms[at])
        if pins:
            nets[src, key] = pins
    return _from_nets(min(net.num_devices, len(work)), work, _merged(nets))


def staged(problem: PartitionProblem, labels: Sequence[int]) -> PartitionSolution:
    """The solution of a device for every node, in the problem's order."""
    ids = (node.id for node in problem.placed)
    return stages_from_devices(problem, dict(zip(ids, labels, strict=True)))


def _merged(nets: Nets) -> Nets:
    """Nets of one producer to the same clusters at one price each, as one net: prices add up."""
    merged: Nets = {}
    known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
    for (src, key), pins in nets.items():
        if len(set(pins.values())) > 1:
            merged[src, key] = pins
            continue
        first = known.setdefault((src, tuple(sorted(pins))), (src, key))
        if first == (src, key):
            merged[first] = pins
        else:
            more = next(iter(pins.values()))
            merged[first] = {
                node: (fwd + more[0], bwd + more[1]) for node, (fwd, bwd) in merged[first].items()
            }
    return merged


def _from_nets(num_devices: int, work: F64, nets: Nets) -> Network:
    sources = [src for src, _ in nets]
    pins = list(nets.values())
    prices = [price for each in pins for price in each.values()]
    pin_node = [node for each in pins for node in each]
    net_of_pin = [index for index, each in enumerate(pins) for _ in each]
    made_start, made_net = _grouped(sources, range(len(pins)), len(work))
    used_start, used_net = _grouped(pin_node, net_of_pin, len(work))
    return Network(
        num_devices,
        work,
        np.array(sources, np.int64),
        np.concatenate(([0], np.cumsum([len(each) for each in pins]))).astype(np.int64),
        np.array(pin_node, np.int64),
        np.array([fwd for fwd, _ in prices], np.float64),
        np.array([bwd for _, bwd in prices], np.float64),
        np.array([len(set(each.values())) == 1 for each in pins], np.bool_),
        made_start,
        made_net,
        used_start,
        used_net,
    )


def _grouped(keys: Sequence[int], values: Sequence[int], count: int) -> tuple[I64, I64]:
    """The values of every key, one key after the other: where each begins, and all of them."""
    where = np.array(keys, np.int64)
    order = np.argsort(where, kind="stable")
    start = np.concatenate(([0], np.cumsum(np.bincount(where, minlength=count))))
    return start.astype(np.int64), np.array(values, np.int64)[order]
