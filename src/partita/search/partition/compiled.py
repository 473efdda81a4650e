"""Compiles everything the walks call, on a model of three nodes.

The first use after installing takes some 15 s, later ones load what was compiled in a moment. It is
done before a search's clock starts, so that a time limit is spent on searching.
"""

import functools

import numpy as np

from partita.problems.partition import PartitionEdge, PartitionNode, PartitionProblem
from partita.search.partition.anneal import anneal, start
from partita.search.partition.bounds import device_time_bound_ms
from partita.search.partition.covers import CoverBound, CoverProof
from partita.search.partition.exact import Tree
from partita.search.partition.network import network
from partita.search.partition.stage_anneal import anneal_stages, stages


@functools.cache
def compile_all() -> None:
    """Call every compiled function once."""
    nodes = tuple(PartitionNode(id, "OP", 1.0, 1.0) for id in range(3))
    edges = (PartitionEdge(0, 1, 8, 8), PartitionEdge(1, 2, 8, 8))
    net = network(PartitionProblem(nodes, edges, 2))
    device_time_bound_ms(net, 0)
    labels = np.zeros(3, np.int64)
    state = start(net, labels, 0)
    anneal(net, state, 0, 1, 1, 1e-3, 1e-5)
    Tree(net, 1.0).step(1)
    CoverProof(net, CoverBound(price_steps=1), 1.0).excludes(1.0, lambda: False)
    staged = stages(labels, np.zeros(1, np.int64))
    anneal_stages(net, start(net, labels, 0), staged, False, False, 0, 1, 1, 1e-3, 1e-5)
