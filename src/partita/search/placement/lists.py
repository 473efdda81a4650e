"""List scheduling on heterogeneous devices: layers one by one, each where it suits best by an
estimate.

The estimate follows the forward pass and the backward pass together: a layer takes its forward plus
backward time, an edge between devices its transfers both ways, and a device or channel is free when
the last thing given to it ends. Gaps are not filled. A gene goes where its layers' last end is
earliest (or by another rule), among the devices it may be on, with routes to the neighbours already
placed, enough memory if any has it, and no more devices than may be used. Where no such device
is left the list fails, and says so by None.

O(edges * devices) per list.
"""

import heapq
from collections.abc import Callable

import numpy as np

from partita.search.placement.bounds import there_and_back_ms
from partita.search.placement.feasible import joined
from partita.search.placement.tables import F64, I64, PlacementArrays


class ListScheduler:
    """What is placed so far, and what placing the next gene somewhere would give."""

    def __init__(self, net: PlacementArrays) -> None:
        num_layers, num_devices = len(net.output_bytes), len(net.limit_bytes)
        self.net = net
        self.both_ms = net.job_ms[:num_layers] + net.job_ms[num_layers:]
        self.near = joined(net)
        self.placement = np.full(num_layers, -1, np.int64)
        self.end_ms = np.zeros(num_layers)
        self.free_ms = np.zeros(num_devices)
        self.channel_free_ms = np.zeros(max(1, net.transfer_ms.shape[1]))
        self.held_bytes = np.zeros(num_devices)
        self.ways_ms = there_and_back_ms(net)

    def arrival(self, layer: int) -> F64:
        """Per device: when the layer's inputs are there; infinite where a route is missing."""
        net, when = self.net, np.zeros(len(self.free_ms))
        for parent in net.parent[net.parent_start[layer] : net.parent_start[layer + 1]].tolist():
            source = int(self.placement[parent])
            if source < 0:
                continue  # it is in the same gene and comes later in the list
            there = self.end_ms[parent] + self.ways_ms[parent, source]
            channels = net.route[source]
            waits = np.where(channels >= 0, self.channel_free_ms[channels], 0.0)
            there = np.maximum(there, waits + self.ways_ms[parent, source])
            there[source] = self.end_ms[parent]
            when = np.maximum(when, np.where(self.near[source], there, np.inf))
        for child in net.child[net.child_start[layer] : net.child_start[layer + 1]].tolist():
            target = int(self.placement[child])
            if target >= 0:
                when = np.where(self.near[target], when, np.inf)
        return when

    def starts(self, gene: int) -> tuple[F64, F64]:
        """Per device: when the gene could start there, and end; infinite where it may not be."""
        net = self.net
        layers = net.gene_layer[net.gene_start[gene] : net.gene_start[gene + 1]]
        when = np.max([self.arrival(layer) for layer in layers.tolist()], axis=0)
        begin = np.maximum(when, self.free_ms)
        allowed = net.may[gene]
        used = np.unique(self.placement[self.placement >= 0])
        if len(used) >= net.max_devices:
            allowed = allowed & np.isin(np.arange(len(self.free_ms)), used)
        begin = np.where(allowed, begin, np.inf)
        fits = self.held_bytes + self._bytes(layers) <= net.limit_bytes
        if (fits & np.isfinite(begin)).any():
            begin = np.where(fits, begin, np.inf)
        return begin, begin + self.both_ms[layers].sum(axis=0)

    def put(self, gene: int, device: int, begin_ms: float) -> None:
        """Place a gene."""
        net, now = self.net, begin_ms
        layers = net.gene_layer[net.gene_start[gene] : net.gene_start[gene + 1]]
        for layer in layers.tolist():
            for parent in net.parent[net.parent_start[layer] : net.parent_start[layer + 1]]:
                source = self.placement[parent]
                if source >= 0 and source != device:
                    channel = net.route[source, device]
                    sent = max(self.end_ms[parent], self.channel_free_ms[channel])
                    self.channel_free_ms[channel] = sent + self.ways_ms[parent, source, device]
            now += self.both_ms[layer, device]
            self.placement[layer], self.end_ms[layer] = device, now
        self.free_ms[device] = now
        self.held_bytes[device] += self._bytes(layers)[device]

    def _bytes(self, layers: I64) -> F64:
        """Per device: weights, outputs, and copies of inputs that come from elsewhere."""
        net = self.net
        own = net.weight_bytes[layers].sum() + net.output_bytes[layers].sum()
        full = np.full(len(self.free_ms), own)
        for layer in layers.tolist():
            for parent in net.parent[net.parent_start[layer] : net.parent_start[layer + 1]]:
                source = self.placement[parent]
                if source >= 0:
                    full += net.output_bytes[parent]
                    full[source] -= net.output_bytes[parent]
        return full


def ranks(net: PlacementArrays) -> F64:
    """Per layer: the mean time from its start to the end of the network, HEFT's upward rank."""
    num_layers = len(net.output_bytes)
    mean = (net.job_ms[:num_layers] + net.job_ms[num_layers:]).mean(axis=1)
    away = ~np.eye(len(net.limit_bytes), dtype=np.bool_)
    ways = there_and_back_ms(net)
    ways = np.where(np.isfinite(ways), ways, 0.0)
    sent = ways[:, away].mean(axis=1) if away.any() else np.zeros(num_layers)
    rank = np.zeros(num_layers)
    for layer in range(num_layers - 1, -1, -1):
        children = net.child[net.child_start[layer] : net.child_start[layer + 1]]
        after = (sent[layer] + rank[children]).max() if len(children) else 0.0
        rank[layer] = mean[layer] + after
    return rank


def by_rank(
    net: PlacementArrays, choose: Callable[[ListScheduler, int], tuple[int, float] | None]
) -> I64 | None:
    """Genes in the order of falling ranks, each as `choose` says: a device and a start, or None."""
    rank = ranks(net)
    of_gene = np.full(len(net.may), -np.inf)
    np.maximum.at(of_gene, net.gene_of, rank)
    scheduler = ListScheduler(net)
    first = net.gene_layer[net.gene_start[:-1]]
    for gene in np.lexsort((first, -of_gene)).tolist():
        choice = choose(scheduler, gene)
        if choice is None:
            return None
        scheduler.put(gene, *choice)
    return scheduler.placement


def earliest_end(scheduler: ListScheduler, gene: int) -> tuple[int, float] | None:
    """HEFT's choice: where the gene ends first."""
    begin, end = scheduler.starts(gene)
    device = int(end.argmin())
    return (device, float(begin[device])) if np.isfinite(end[device]) else None


def earliest_start(net: PlacementArrays) -> I64 | None:
    """ETF: of all genes whose parents are placed the one that can start first; ties by rank.

    The earliest start of a gene only grows while it waits, so a heap of old values with fresh
    looks at the top is enough.
    """
    rank, scheduler = ranks(net), ListScheduler(net)
    members = np.diff(net.gene_start)
    of_gene = np.full(len(net.may), -np.inf)
    np.maximum.at(of_gene, net.gene_of, rank)
    waits = [set[int]() for _ in members]
    feeds = [set[int]() for _ in members]
    for layer in range(len(net.output_bytes)):
        for parent in net.parent[net.parent_start[layer] : net.parent_start[layer + 1]].tolist():
            if net.gene_of[parent] != net.gene_of[layer]:
                waits[net.gene_of[layer]].add(int(net.gene_of[parent]))
                feeds[net.gene_of[parent]].add(int(net.gene_of[layer]))
    ready = [(0.0, -of_gene[gene], gene) for gene in range(len(waits)) if not waits[gene]]
    heapq.heapify(ready)
    placed = 0
    while placed < len(waits):
        if not ready:  # colocated genes that wait for one another: take the one of highest rank
            stuck = [g for g in range(len(waits)) if waits[g]]
            gene = max(stuck, key=lambda g: (of_gene[g], -g))
            waits[gene].clear()
            ready.append((0.0, -of_gene[gene], gene))
        old, key, gene = heapq.heappop(ready)
        begin, _ = scheduler.starts(gene)
        device = int(begin.argmin())
        if not np.isfinite(begin[device]):
            return None
        if begin[device] > old and ready and (begin[device], key, gene) > ready[0]:
            heapq.heappush(ready, (float(begin[device]), key, gene))
            continue
        scheduler.put(gene, device, float(begin[device]))
        placed += 1
        for other in sorted(feeds[gene]):
            if gene in waits[other]:
                waits[other].discard(gene)
                if not waits[other]:
                    heapq.heappush(ready, (0.0, -of_gene[other], other))
    return scheduler.placement


def critical_path(net: PlacementArrays) -> I64 | None:
    """CPOP: the layers of the longest path share the device that is fastest for all of them."""
    rank = ranks(net)
    down = np.zeros(len(rank))
    mean = (net.job_ms[: len(rank)] + net.job_ms[len(rank) :]).mean(axis=1)
    for layer in range(len(rank)):
        parents = net.parent[net.parent_start[layer] : net.parent_start[layer + 1]]
        if len(parents):
            down[layer] = (down[parents] + mean[parents]).max()
    through = rank + down
    on_path = np.zeros(len(net.may), np.bool_)
    layer = int(net.inputs[through[net.inputs].argmax()])
    while layer >= 0:
        on_path[net.gene_of[layer]] = True
        children = net.child[net.child_start[layer] : net.child_start[layer + 1]]
        layer = int(children[rank[children].argmax()]) if len(children) else -1
    path_layers = np.flatnonzero(on_path[net.gene_of])
    both = net.job_ms[: len(rank)] + net.job_ms[len(rank) :]
    favourite = int(both[path_layers].sum(axis=0).argmin())

    def choose(scheduler: ListScheduler, gene: int) -> tuple[int, float] | None:
        begin, _ = scheduler.starts(gene)
        if on_path[gene] and np.isfinite(begin[favourite]):
            return favourite, float(begin[favourite])
        return earliest_end(scheduler, gene)

    return by_rank(net, choose)
