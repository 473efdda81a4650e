"""Ops that cost next to nothing: what they make need not be kept from forward to backward.

They have no product loop, so that their time is that of reading and writing. What such an op makes
can be made again where all it reads is kept anyway, or can be made again itself.
"""

from collections.abc import Set

from partita.graph.record import Graph
from partita.graph.traffic import VIEWS

KINDS = VIEWS | {
    "elementwise", "layer_norm", "rms_norm", "group_norm", "batch_norm", "softmax", "transpose",
    "pool", "pad", "concat", "resize", "reduce",
}  # fmt: skip


def recomputable(graph: Graph, saved: Set[str]) -> frozenset[str]:
    """The forward ops whose outputs can be made again from `saved`, what gradients read."""
    maker: dict[str, str] = {}
    names: set[str] = set()
    for op in graph.ops:
        if op.phase != "forward":
            continue
        there = all(name in saved or maker[name] in names for name in op.inputs if name in maker)
        if op.kind in KINDS and there and set(graph.outputs).isdisjoint(op.outputs):
            names.add(op.name)
        maker.update(dict.fromkeys(op.outputs, op.name))
    return frozenset(names)
