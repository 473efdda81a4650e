"""Makes networks smaller by merging nodes that talk much and work little.

Nodes are visited in random order, and each joins the neighbour with the highest

    rating = sum over shared nets of price / consumers, divided by (work + typical work) of both

unless together they exceed `most_ms`, or have different labels. One round about halves the network.
Any merging is allowed: a labelling needs no care for cycles (see `partita.problems.partition`).
"""

from collections.abc import Sequence

import numpy as np

from partita.search.partition.network import I64, PartitionNetwork, contract


def clusters(net: PartitionNetwork, most_ms: float, seed: int, labels: I64 | None = None) -> I64:
    """A cluster for every node, numbered by their first nodes."""
    ratings = _ratings(net)
    work = net.mean_ms.tolist()
    typical = sum(work) / len(work) or 1.0
    label = [0] * len(work) if labels is None else labels.tolist()
    root = [-1] * len(work)
    for node in np.random.default_rng(seed).permutation(len(work)).tolist():
        if root[node] >= 0:
            continue
        best, choice = 0.0, -1
        for other, price in ratings[node].items():
            if label[other] != label[node] or root[other] >= 0:
                continue
            if work[node] + work[other] > most_ms:
                continue
            # In units of the typical node: products of tiny times would be zero.
            rating = price / ((1 + work[node] / typical) * (1 + work[other] / typical))
            if rating > best:
                best, choice = rating, other
        root[node] = node
        if choice >= 0:
            root[choice] = node
    return numbered(root)


def numbered(root: Sequence[int]) -> I64:
    """Names of clusters as 0, 1, ... by their first nodes."""
    number: dict[int, int] = {}
    return np.array([number.setdefault(each, len(number)) for each in root], np.int64)


def _ratings(net: PartitionNetwork) -> list[dict[int, float]]:
    """Per node: its neighbours and what it shares with them."""
    ratings: list[dict[int, float]] = [{} for _ in range(net.num_nodes)]
    starts, pins = net.pin_start.tolist(), net.pin_node.tolist()
    prices = net.pin_ms.tolist()
    for each, src in enumerate(net.net_src.tolist()):
        first, last = starts[each], starts[each + 1]
        for at in range(first, last):
            share = (prices[at] + 1e-12) / (last - first)
            ratings[src][pins[at]] = ratings[src].get(pins[at], 0.0) + share
            ratings[pins[at]][src] = ratings[pins[at]].get(src, 0.0) + share
    return ratings


def levels(
    net: PartitionNetwork, smallest: int, most_ms: float, seed: int, labels: I64 | None = None
) -> list[tuple[PartitionNetwork, I64]]:
    """Ever smaller networks, the given one first, each with the cluster of every original node."""
    levels = [(net, np.arange(net.num_nodes))]
    while levels[-1][0].num_nodes > smallest:
        fine, cluster_of = levels[-1]
        kept = None if labels is None else labels_of_clusters(cluster_of, labels)
        merged = clusters(fine, most_ms, seed + len(levels), kept)
        coarse = contract(fine, merged)
        if coarse.num_nodes > 0.95 * fine.num_nodes:
            break
        levels.append((coarse, merged[cluster_of]))
    return levels


def labels_of_clusters(cluster_of: I64, labels: I64) -> I64:
    """The label of every cluster, whose nodes have one label."""
    array = np.zeros(int(cluster_of.max()) + 1, np.int64)
    array[cluster_of] = labels
    return array
