"""Graphs of the zoo, each built once per test run."""

import functools

from partita.graph import training_graph
from partita.graph.record import Graph
from partita.zoo import MODELS, build

# One item of the batch, except where experts take whole tokens: 114 * 64 fill 128 of them evenly.
SMALL_BATCH = {name: 64 if name == "moe" else 1 for name in MODELS}


@functools.cache
def graph_of(name: str, times: int = 1, loss: bool = True, fused_attention: bool = True) -> Graph:
    """The model at its smallest batch, or a multiple of it."""
    options = {} if fused_attention else {"fused_attention": False}
    return build(name, batch=times * SMALL_BATCH[name], loss=loss, **options)


@functools.cache
def training_of(name: str) -> Graph:
    """Its forward, backward and update."""
    return training_graph(graph_of(name))
