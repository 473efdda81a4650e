"""Bytes an op moves between memory and the execution units, per phase.

By default each tensor of the op once: what it reads plus what it writes. Views move nothing, a
lookup moves only the rows it takes, a pooling or norm gradient also reads what was saved.
"""

import math
from collections.abc import Callable

from partita.graph.dtypes import dtype_bytes
from partita.graph.record import Graph, Op

VIEWS = frozenset({"reshape", "split", "slice", "expand"})


def traffic_bytes(graph: Graph, op: Op) -> int:
    """Bytes read and written by one execution of an op."""
    kind = graph.op(op.forward).kind if op.forward else op.kind
    return TRAFFIC.get(kind, _all)(graph, op)


def _all(graph: Graph, op: Op) -> int:
    return sum(graph.tensor(name).size_bytes for name in (*op.inputs, *op.outputs))


def _view(graph: Graph, op: Op) -> int:
    """A view is free forward; its gradient is a view too, except where pieces are put together."""
    if op.phase == "forward" or op.kind == "reshape":
        return 0
    return _all(graph, op)


def _lookup(graph: Graph, op: Op) -> int:
    """Rows taken and written (or, for the gradient, added to the table), and the ids."""
    origin = graph.op(op.forward) if op.forward else op
    ids = graph.tensor(origin.inputs[0])
    table = graph.tensor(origin.inputs[1])
    rows = math.prod(ids.shape) * table.shape[1] * dtype_bytes(table.dtype)
    moves = 2 if op.phase == "forward" else 3
    return ids.size_bytes + moves * rows


def _transpose(graph: Graph, op: Op) -> int:
    return 0 if op.attr("view", False) else _all(graph, op)


def _elementwise(graph: Graph, op: Op) -> int:
    return 0 if op.attr("fn") == "identity" else _all(graph, op)


def _optimizer(graph: Graph, op: Op) -> int:
    """Gradient and weights read, states read and written, weights written."""
    states = sum(graph.tensor(name).size_bytes for name in op.inputs[2:])
    return _all(graph, op) + states


TRAFFIC: dict[str, Callable[[Graph, Op], int]] = {
    **dict.fromkeys(VIEWS, _view),
    "embedding": _lookup,
    "transpose": _transpose,
    "elementwise": _elementwise,
    "optimizer": _optimizer,
    "constant": lambda graph, op: 0,
}
