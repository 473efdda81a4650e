"""A placement problem as flat arrays, for compiled loops.

Neighbours are in CSR form, in the order in which they are served. A *job* is a layer's forward
(row `layer` of `job_ms`) or backward (row `num_layers + layer`). A *gene* is what moves as one: a
layer, or a group of layers that must share a device; genes are in the order of their first layers.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.problems.placement import PlacementProblem

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]
B1 = npt.NDArray[np.bool_]


class PlacementArrays(NamedTuple):
    """What compiled code reads of a problem."""

    child_start: I64
    child: I64
    parent_start: I64
    parent: I64
    edge_start: I64  # both in one: row `layer` has its children, row `num_layers + layer` parents
    edge: I64
    needed: I64  # per job: how many inputs it waits for
    inputs: I64  # the layers without parents
    one_sink: bool  # only one layer has no children
    job_ms: F64  # [direction * layer, device]
    transfer_ms: F64  # [layer, channel]
    output_bytes: F64
    weight_bytes: F64
    limit_bytes: F64  # per device
    route: I64  # [source, target] -> channel, -1 for none
    batches: int
    in_flight: int  # batches at once
    penalty: float  # ms per byte over a limit
    gene_start: I64  # CSR of the layers of each gene
    gene_layer: I64
    gene_of: I64  # per layer
    allowed_start: I64  # CSR of the devices that each gene may be on
    allowed: I64
    may: B1  # [gene, device]: the same as a table
    max_devices: int
    cut: I64  # layers that no edge jumps over: blocks of the network lie between them


def tables(problem: PlacementProblem) -> PlacementArrays:
    """The problem as arrays."""
    layers, devices = problem.layers, problem.devices
    num_devices, num_channels = len(devices), len(problem.channels)
    child_start, child = csr([layer.children for layer in layers])
    parent_start, parent = csr([layer.parents for layer in layers])
    genes = genes_of(problem)
    gene_start, gene_layer = csr(genes)
    gene_of = np.empty(len(layers), np.int64)
    for gene, members in enumerate(genes):
        gene_of[list(members)] = gene
    may = _may(problem, genes)
    allowed_start, allowed = csr([tuple(np.flatnonzero(row).tolist()) for row in may])
    forward = [layer.fwd_ms for layer in layers]
    backward = [layer.bwd_ms for layer in layers]
    transfer = [layer.transfer_ms for layer in layers]
    most = problem.constraints.max_devices
    return PlacementArrays(
        child_start=child_start,
        child=child,
        parent_start=parent_start,
        parent=parent,
        edge_start=np.concatenate((child_start, child_start[-1] + parent_start[1:])),
        edge=np.concatenate((child, parent)),
        needed=np.concatenate((np.diff(parent_start), np.diff(child_start))),
        inputs=np.array([i for i, layer in enumerate(layers) if not layer.parents], np.int64),
        one_sink=sum(not layer.children for layer in layers) == 1,
        job_ms=np.array(forward + backward, np.float64).reshape(-1, num_devices),
        transfer_ms=np.array(transfer, np.float64).reshape(len(layers), num_channels),
        output_bytes=np.array([layer.output_bytes for layer in layers], np.float64),
        weight_bytes=np.array([layer.weight_bytes for layer in layers], np.float64),
        limit_bytes=np.array([device.memory_limit_bytes for device in devices], np.float64),
        route=np.array(problem.route, np.int64).reshape(num_devices, num_devices),
        batches=problem.batches,
        in_flight=min(problem.batches, problem.pipeline_batches),
        penalty=float(problem.memory_penalization_ms_per_byte),
        gene_start=gene_start,
        gene_layer=gene_layer,
        gene_of=gene_of,
        allowed_start=allowed_start,
        allowed=allowed,
        may=may,
        max_devices=num_devices if most is None else min(most, num_devices),
        cut=_cuts(problem),
    )


def _cuts(problem: PlacementProblem) -> I64:
    """The layers that no edge jumps over."""
    jumps = np.zeros(len(problem.layers) + 1, np.int64)
    for index, layer in enumerate(problem.layers):
        for parent in layer.parents:
            jumps[parent + 1] += 1
            jumps[index] -= 1
    return np.flatnonzero(np.cumsum(jumps)[:-1] == 0)


def genes_of(problem: PlacementProblem) -> list[tuple[int, ...]]:
    """The layers that move as one; colocated groups that share a layer are one gene."""
    first = list(range(len(problem.layers)))  # per layer: the first layer of its gene, after `find`

    def find(layer: int) -> int:
        while first[layer] != layer:
            layer = first[layer]
        return layer

    for group in problem.constraints.colocated:
        roots = [find(layer) for layer in group]
        for root in roots:
            first[root] = min(roots)
    members: dict[int, list[int]] = {}
    for layer in range(len(problem.layers)):
        members.setdefault(find(layer), []).append(layer)
    return [tuple(members[root]) for root in sorted(members)]


def csr(rows: list[tuple[int, ...]]) -> tuple[I64, I64]:
    """Rows of unlike length as (starts, values)."""
    start = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.array([value for row in rows for value in row], np.int64)


def _may(problem: PlacementProblem, genes: list[tuple[int, ...]]) -> B1:
    """Which gene may be on which device."""
    layer_may = np.ones((len(problem.layers), len(problem.devices)), np.bool_)
    for layer, device in problem.constraints.forbidden:
        layer_may[layer, device] = False
    for layer, device in problem.constraints.pinned:
        others = np.arange(len(problem.devices)) != device
        layer_may[layer, others] = False
    return np.array([layer_may[list(members)].all(axis=0) for members in genes])
