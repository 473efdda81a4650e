"""A lower bound of the largest device time that knows about communication.

Let v be a node and S the nodes on its device. That device takes at least

    work(S) + sum over nets cut by S of the cheapest price of its pins

so the least of this over all S that hold v is a bound, and a minimum cut gives it: v is the
source, every node flows to the sink with its work, and every net ties its nodes together with
its price (two extra vertices per net; Lawler 1973). It beats the longest node where that
node cannot shed its neighbours for free. Dinic's algorithm on some 3 (nodes + nets) arcs.
"""

import numpy as np

from partita.compiled import compiled
from partita.problems.partition import PartitionProblem, lower_bound
from partita.search.partition.network import F64, I64, PartitionNetwork, network

_ROUNDING = 1 - 1e-12  # a bound must not exceed the optimum by rounding


def communication_bound(problem: PartitionProblem, net: PartitionNetwork | None = None) -> float:
    """The best of the plain bound and the least device time of the longest node."""
    plain = lower_bound(problem)
    net = network(problem) if net is None else net
    if net.num_devices == 1:
        return plain
    return max(plain, device_time_bound_ms(net, int(net.work_ms.min(axis=1).argmax())) * _ROUNDING)


def device_time_bound_ms(net: PartitionNetwork, node: int) -> float:
    """No device that holds this node takes less, whatever else it holds."""
    heads, capacities, starts, arcs, sink = _flow_network(net)
    return float(_max_flow(heads, capacities, starts, arcs, node, sink))


def _flow_network(net: PartitionNetwork) -> tuple[I64, F64, I64, I64, int]:
    """Arcs in pairs (an arc, then its reverse), grouped by tail."""
    num_nodes, num_nets = net.num_nodes, len(net.net_src)
    sink = num_nodes + 2 * num_nets
    tails: list[int] = []
    heads: list[int] = []
    capacities: list[float] = []

    def arc(tail: int, head: int, capacity: float) -> None:
        tails.extend((tail, head))
        heads.extend((head, tail))
        capacities.extend((capacity, 0.0))

    for index, work in enumerate(net.work_ms.min(axis=1).tolist()):
        arc(index, sink, work)
    prices = net.pin_ms
    for each, src in enumerate(net.net_src.tolist()):
        first, last = net.pin_start[each], net.pin_start[each + 1]
        inlet, outlet = num_nodes + 2 * each, num_nodes + 2 * each + 1
        arc(inlet, outlet, float(prices[first:last].min()))
        for member in (src, *net.pin_node[first:last].tolist()):
            arc(member, inlet, np.inf)
            arc(outlet, member, np.inf)
    order = np.argsort(np.array(tails), kind="stable")
    starts = np.zeros(sink + 2, np.int64)
    starts[1:] = np.bincount(tails, minlength=sink + 1).cumsum()
    return np.array(heads), np.array(capacities), starts, order, sink


@compiled()
def _max_flow(heads: I64, capacities: F64, starts: I64, arcs: I64, source: int, sink: int) -> float:
    """Dinic: augment along shortest paths, level by level."""
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
