"""What population methods do to placements, many rows at a time.

Rows hold a device per gene, so colocated layers stay together; devices are drawn from those that
a gene may be on, so pins and forbidden devices are kept; `within_limit` keeps to the number of
devices that may be used. Only missing routes are left to the evaluation, which refuses them.
"""

import numpy as np

from partita.search.placement.fastsim import MAKESPAN, OVER
from partita.search.placement.tables import F64, I64, PlacementArrays


def genes_of_layers(net: PlacementArrays, placements: I64) -> I64:
    """Devices per gene from devices per layer."""
    genes: I64 = placements[:, net.gene_layer[net.gene_start[:-1]]]
    return genes


def layers_of_genes(net: PlacementArrays, genes: I64) -> I64:
    """Devices per layer from devices per gene."""
    layers: I64 = genes[:, net.gene_of]
    return layers


def draw_devices(net: PlacementArrays, count: int, generator: np.random.Generator) -> I64:
    """A device at random for every gene of `count` rows, among those it may be on."""
    num_allowed = np.diff(net.allowed_start)
    drawn = (generator.random((count, len(num_allowed))) * num_allowed).astype(np.int64)
    devices: I64 = net.allowed[net.allowed_start[:-1] + drawn]
    return devices


def mutate(net: PlacementArrays, genes: I64, rate: float, generator: np.random.Generator) -> I64:
    """Other devices for a gene now and then, and at least for one of every row."""
    count, num_genes = genes.shape
    hit = generator.random(genes.shape) < rate
    hit[np.arange(count), generator.integers(0, num_genes, count)] = True
    return np.where(hit, draw_devices(net, count, generator), genes)


def mutate_zones(
    net: PlacementArrays, line: I64, genes: I64, generator: np.random.Generator
) -> I64:
    """A run of the line of every row goes to one device, where its genes may be there."""
    count, num_genes = genes.shape
    begin = generator.integers(0, num_genes, (count,))
    length = np.exp(generator.random(count) * np.log(num_genes + 1)).astype(np.int64)
    device = generator.integers(0, len(net.limit_bytes), (count,))
    place = np.empty(num_genes, np.int64)  # of each gene along the line
    place[line] = np.arange(num_genes)
    after = begin + length
    inside = (place >= begin[:, None]) & (place < after[:, None])
    allowed = net.may[:, device].T
    return np.where(inside & allowed, device[:, None], genes)


def cross(line: I64, one: I64, other: I64, generator: np.random.Generator) -> I64:
    """A run of the line from one parent, the rest from the other."""
    count, num_genes = one.shape
    ends = np.sort(generator.integers(0, num_genes + 1, (count, 2)), axis=1)
    place = np.empty(num_genes, np.int64)
    place[line] = np.arange(num_genes)
    inside = (place >= ends[:, :1]) & (place < ends[:, 1:])
    return np.where(inside, one, other)


def within_limit(net: PlacementArrays, genes: I64) -> I64:
    """Genes on devices beyond those that may be used go to the most used ones."""
    num_devices = len(net.limit_bytes)
    if net.max_devices >= num_devices:
        return genes
    counts = (genes[:, :, None] == np.arange(num_devices)).sum(axis=1)
    rank = np.argsort(np.argsort(-counts, axis=1, kind="stable"), axis=1, kind="stable")
    kept = rank < net.max_devices
    value = np.where(net.may[None], np.where(kept, num_devices - rank, 0)[:, None, :], -1)
    stays = np.take_along_axis(kept, genes, axis=1)
    return np.where(stays, genes, value.argmax(axis=2))


def costs(array: F64, price: float) -> F64:
    """What a population is ranked by: makespan and a price for memory; infinite if invalid."""
    over = array[:, OVER]
    cost = array[:, MAKESPAN] + price * np.where(np.isfinite(over), over, 0.0)
    return np.where(np.isfinite(over), cost, np.inf)
