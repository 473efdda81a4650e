"""A lower bound of the largest device time that knows about communication.

Let v be a node and S the nodes on its device. That device takes at least

    work(S) + sum over nets cut by S of the cheapest price of its pins

so the least of this over all S that hold v is a bound, and a minimum cut gives it: v is the
source, every node flows to the sink with its work, and every net ties its nodes together with
its price (two extra vertices per net of three nodes and more; Lawler 1973). It beats the longest
node where a node cannot shed its neighbours for free, and any node may be the one: where links are
slow, often one between large tensors. A set with v in it bounds what its other nodes can give, so
that few nodes are looked at. Dinic's algorithm on some 3 (nodes + nets) arcs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from partita.compiled import compiled
from partita.problems.partition import PartitionProblem, lower_bound
from partita.search.partition.network import F64, I64, PartitionNetwork, network

_ROUNDING = 1 - 1e-12  # a bound must not exceed the optimum by rounding


class CutNet(NamedTuple):
    """A producer, its consumers, and what a set of nodes pays that holds only some of them."""

    src: int
    pins: tuple[int, ...]
    ms: float

    @property
    def members(self) -> tuple[int, ...]:
        """Producer and consumers."""
        return (self.src, *self.pins)


def cut_nets(net: PartitionNetwork, per_byte_ms: float, latency_ms: float) -> Iterator[CutNet]:
    """Nets with one price each: the largest of some prices is a sum of steps up to it."""
    for each, src in enumerate(net.net_src.tolist()):
        pins = slice(int(net.pin_start[each]), int(net.pin_start[each + 1]))
        nodes = net.pin_node[pins].tolist()
        prices: dict[tuple[int, ...], float] = {}
        for way, sizes in enumerate((net.pin_fwd[pins].tolist(), net.pin_bwd[pins].tolist())):
            before = 0.0
            for size in sorted({size for size in sizes if size > 0}):
                needing = tuple(n for n, own in zip(nodes, sizes, strict=True) if own >= size)
                more = (size - before) * per_byte_ms
                if before == 0.0:
                    more += float(net.net_messages[each, way]) * latency_ms
                prices[needing] = prices.get(needing, 0.0) + more
                before = size
        for needing, ms in prices.items():
            if ms > 0:
                yield CutNet(src, needing, ms)


def communication_bound(problem: PartitionProblem, net: PartitionNetwork | None = None) -> float:
    """The best of the plain bound and the least device time of any node."""
    plain = lower_bound(problem)
    net = network(problem) if net is None else net
    if net.num_devices == 1:
        return plain
    return max(plain, largest_device_time_bound_ms(net) * _ROUNDING)


def largest_device_time_bound_ms(net: PartitionNetwork) -> float:
    """Some device takes at least so long: that of the node with the largest bound."""
    flow = _FlowNetwork(net)
    work = net.work_ms.min(axis=1)
    alone = work.copy()  # a device with this node only: no node's bound is above it
    for each in flow.nets:
        for member in each.members:
            alone[member] += each.ms
    best = 0.0
    for node in np.argsort(-work, kind="stable").tolist():
        if alone[node] <= best:
            continue
        time_ms, held = flow.least(node)
        best = max(best, time_ms)
        alone[held] = np.minimum(alone[held], time_ms)
    return best


def device_time_bound_ms(net: PartitionNetwork, node: int) -> float:
    """No device that holds this node takes less, whatever else it holds."""
    return _FlowNetwork(net).least(node)[0]


class _FlowNetwork:
    """Arcs in pairs (an arc, then its reverse), grouped by tail."""

    def __init__(self, net: PartitionNetwork) -> None:
        off = ~np.eye(net.num_devices, dtype=bool)
        self.num_nodes = net.num_nodes
        self.nets: list[CutNet] = []
        if net.num_devices > 1:  # one device alone sends nothing
            cheapest = float(net.per_byte_ms[off].min()), float(net.latency_ms[off].min())
            self.nets = list(cut_nets(net, *cheapest))
        tails: list[int] = []
        heads: list[int] = []
        capacities: list[float] = []

        def arc(tail: int, head: int, there: float, back: float = 0.0) -> None:
            tails.extend((tail, head))
            heads.extend((head, tail))
            capacities.extend((there, back))

        wide = [each for each in self.nets if len(each.pins) > 1]
        self.sink = net.num_nodes + 2 * len(wide)
        for index, work in enumerate(net.work_ms.min(axis=1).tolist()):
            arc(index, self.sink, work)
        for each in self.nets:
            if len(each.pins) == 1:
                arc(each.src, each.pins[0], each.ms, each.ms)
        for index, each in enumerate(wide):
            inlet = net.num_nodes + 2 * index
            arc(inlet, inlet + 1, each.ms)
            for member in each.members:
                arc(member, inlet, np.inf)
                arc(inlet + 1, member, np.inf)
        self.arcs = np.argsort(np.array(tails), kind="stable")
        self.starts = np.zeros(self.sink + 2, np.int64)
        self.starts[1:] = np.bincount(tails, minlength=self.sink + 1).cumsum()
        self.heads, self.capacities = np.array(heads), np.array(capacities)

    def least(self, node: int) -> tuple[float, I64]:
        """The least time of a device that holds this node, and what else it holds then."""
        reached = np.zeros(self.sink + 1, np.int64)
        time_ms = float(
            _max_flow(
                self.heads,
                self.capacities.copy(),
                self.starts,
                self.arcs,
                node,
                self.sink,
                reached,
            )
        )
        return time_ms, np.flatnonzero(reached[: self.num_nodes])


@compiled()
def _max_flow(
    heads: I64,
    capacities: F64,
    starts: I64,
    arcs: I64,
    source: int,
    sink: int,
    reached: I64,
) -> float:
    """Dinic: augment along shortest paths, level by level; `reached` is the source's side."""
    count = len(starts) - 1
    level = np.zeros(count, np.int64)
    queue = np.zeros(count, np.int64)
    at = np.zeros(count, np.int64)
    path = np.zeros(count, np.int64)
    flow = 0.0
    tiny = 1e-13 * max(1e-300, capacities[np.isfinite(capacities)].max())
    while True:
        level[:] = -1
        level[source] = 0
        queue[0] = source
        begin, end = 0, 1
        while begin < end:
            vertex = queue[begin]
            begin += 1
            for index in range(starts[vertex], starts[vertex + 1]):
                arc = arcs[index]
                if capacities[arc] > tiny and level[heads[arc]] < 0:
                    level[heads[arc]] = level[vertex] + 1
                    queue[end] = heads[arc]
                    end += 1
        if level[sink] < 0:
            for vertex in range(count):
                reached[vertex] = 1 if level[vertex] >= 0 else 0
            return flow
        for vertex in range(count):  # `at[:] = starts[:-1]` takes seconds more to compile
            at[vertex] = starts[vertex]
        vertex, depth = source, 0
        while True:
            if vertex == sink:
                least = np.inf
                for index in range(depth):
                    least = min(least, capacities[path[index]])
                flow += least
                for index in range(depth):
                    capacities[path[index]] -= least
                    capacities[path[index] ^ 1] += least
                vertex, depth = source, 0
                continue
            moved = False
            while at[vertex] < starts[vertex + 1]:
                arc = arcs[at[vertex]]
                if capacities[arc] > tiny and level[heads[arc]] == level[vertex] + 1:
                    path[depth] = arc
                    depth += 1
                    vertex = heads[arc]
                    moved = True
                    break
                at[vertex] += 1
            if moved:
                continue
            if depth == 0:
                break
            depth -= 1
            vertex = heads[path[depth] ^ 1]
            at[vertex] += 1
