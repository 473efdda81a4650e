"""Linear layers that multiply in a narrower type than the model is in.

As libraries for fp8 training do it: the operands of a linear layer (of experts too) are cast right
before each of its three products, sums and results stay in the model's type. Attention, routers,
norms and everything else stay as they are.
"""

from dataclasses import replace

from partita.graph.record import Call, Graph, Op

ATTRIBUTE = "math"  # of an op: the type that its products are in
NARROWED = frozenset({"linear", "expert_linear", "grouped_mm"})


def multiplied_in(graph: Graph, dtype: str) -> Graph:
    """The forward graph with all linear layers multiplying in a type."""
    ops = tuple(_narrowed(op, dtype) if op.kind in NARROWED else op for op in graph.ops)
    return replace(graph, ops=ops)


def product_dtype(call: Call, dtype: str) -> str:
    """The type that an op computing in `dtype` multiplies in."""
    narrowed = call.attr(ATTRIBUTE)
    return narrowed if isinstance(narrowed, str) else dtype


def _narrowed(op: Op, dtype: str) -> Op:
    attrs = [pair for pair in op.attrs if pair[0] != ATTRIBUTE]
    return replace(op, attrs=tuple(sorted((*attrs, (ATTRIBUTE, dtype)))))
