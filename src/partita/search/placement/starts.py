"""Placements to begin with: built, not searched for.

*Stages* cut the line of genes into runs, one device each. A device takes genes until its share of
the work or its memory is full; the share is bisected so that the last device just takes the rest.
Devices come in several orders: by speed, by memory, and at random. *Random stages* have random
cuts. Costs O(genes) per attempt to fill.
"""

import numpy as np

from partita.search.placement.tables import F64, I64, PlacementArrays

_BISECTIONS = 30


def single_devices(net: PlacementArrays) -> I64:
    """All genes on one device, for every device that may have them all."""
    devices = np.flatnonzero(net.may.all(axis=0))
    return np.repeat(devices[:, None], len(net.output_bytes), axis=1)


def stages(net: PlacementArrays, line: I64, seed: int) -> I64:
    """Stages filled by work and by memory, on one device up to all, in several orders."""
    both = net.job_ms[: len(net.output_bytes)] + net.job_ms[len(net.output_bytes) :]
    held = net.weight_bytes + net.output_bytes
    work_ms = _per_gene(net, both)[line]
    held_bytes = _per_gene(net, held[:, None])[line, 0]
    rows = [
        _filled(work_ms, held_bytes, order[:count], limits)
        for order in _orders(net, work_ms, seed)
        for count in range(1, min(len(order), net.max_devices) + 1)
        for limits in (np.full(len(order), np.inf), net.limit_bytes)
    ]
    by_line = np.unique(np.array(rows, np.int64), axis=0)
    return _on_layers(net, line, by_line)


def random_stages(
    net: PlacementArrays, line: I64, count: int, generator: np.random.Generator
) -> I64:
    """Runs of the line on random devices, with random cuts between them."""
    num_genes, num_devices = len(line), len(net.limit_bytes)
    by_line = np.empty((count, num_genes), np.int64)
    for row in by_line:
        num_stages = int(generator.integers(1, min(net.max_devices, num_genes) + 1))
        cuts = np.sort(generator.integers(0, num_genes + 1, num_stages - 1))
        devices = generator.permutation(num_devices)[:num_stages]
        row[:] = devices[np.searchsorted(cuts, np.arange(num_genes), side="right")]
    return _on_layers(net, line, by_line)


def random_placements(net: PlacementArrays, count: int, generator: np.random.Generator) -> I64:
    """Every gene on any device it may be on, within as many devices as may be used."""
    num_genes, num_devices = len(net.may), len(net.limit_bytes)
    priority = generator.random((count, 1, num_devices))
    if net.max_devices < num_devices:  # the same few devices are preferred by all genes of a row
        first = np.argsort(np.argsort(priority, axis=2), axis=2) < net.max_devices
        priority = generator.random((count, num_genes, num_devices)) + first
    else:
        priority = generator.random((count, num_genes, num_devices))
    chosen: I64 = np.where(net.may[None], priority, -1.0).argmax(axis=2)
    return chosen[:, net.gene_of]


def _orders(net: PlacementArrays, work_ms: F64, seed: int) -> list[I64]:
    """Orders of the devices: fast first, slow first, roomy first, and a few at random."""
    speed = np.argsort(work_ms.sum(axis=0), kind="stable")
    room = np.lexsort((work_ms.sum(axis=0), -net.limit_bytes))
    generator = np.random.default_rng((seed, 1))
    shuffled = [generator.permutation(len(speed)) for _ in range(4)]
    return [speed, speed[::-1], room, *shuffled]


def _filled(work_ms: F64, held_bytes: F64, order: I64, limit_bytes: F64) -> I64:
    """Stages on these devices with the least share of work for which all genes find room."""
    work = np.cumsum(work_ms[:, order], axis=0)
    held = np.cumsum(held_bytes)
    low, high = 0.0, float(work[-1].max())
    filled = _fill(work, held, order, limit_bytes, high)
    for _ in range(_BISECTIONS):
        share = (low + high) / 2
        tried = _fill(work, held, order, limit_bytes, share)
        if tried is None:
            low = share
        else:
            filled, high = tried, share
    if filled is None:  # memory runs out before the genes: the last device takes the rest
        filled = _fill(work, held, order, np.full(len(limit_bytes), np.inf), high)
    assert filled is not None
    return filled


def _fill(work: F64, held: F64, order: I64, limit_bytes: F64, share: float) -> I64 | None:
    """Give each device genes up to its share and its memory; None if genes are left."""
    begin, by_line = 0, np.empty(len(held), np.int64)
    for column, device in enumerate(order.tolist()):
        done = work[begin - 1, column] if begin else 0.0
        kept = held[begin - 1] if begin else 0.0
        by_work = np.searchsorted(work[:, column], (done + share) * (1 + 1e-12), side="right")
        by_memory = np.searchsorted(held, kept + limit_bytes[device], side="right")
        end = max(begin, min(int(by_work), int(by_memory)))
        by_line[begin:end] = device
        begin = end
        if begin == len(held):
            return by_line
    return None


def _per_gene(net: PlacementArrays, of_layers: F64) -> F64:
    """Sums over the layers of each gene."""
    sums = np.zeros((len(net.may), of_layers.shape[1]))
    np.add.at(sums, net.gene_of, of_layers)
    return sums


def _on_layers(net: PlacementArrays, line: I64, by_line: I64) -> I64:
    """Placements of the layers; a gene that may not be there goes to the first device it may."""
    genes = np.empty_like(by_line)
    genes[:, line] = by_line
    allowed = net.may[np.arange(len(net.may))[None, :], genes]
    genes = np.where(allowed, genes, net.may.argmax(axis=1)[None, :])
    return genes[:, net.gene_of]
