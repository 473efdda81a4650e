"""Counting a forward graph the way papers do: multiply-adds of contractions, two operations each.

Papers and model cards leave out norms, activations, softmax and pooling; `flops` (`graph/work.py`)
counts them. Comparing with a published figure needs this count; planning needs the other.
"""

import math
from collections.abc import Callable

from partita.graph.record import Call, Graph
from partita.graph.shapes import attention_heads
from partita.graph.work import attended_pairs, flops


def forward_flops(graph: Graph) -> float:
    """All operations of the forward pass."""
    return sum(flops(graph.call(op)) for op in graph.ops if op.phase == "forward")


def contraction_flops(graph: Graph) -> float:
    """Operations of the forward pass in convolutions, matrix products, attention and cells."""
    return sum(
        CONTRACTIONS[op.kind](graph.call(op))
        for op in graph.ops
        if op.phase == "forward" and op.kind in CONTRACTIONS
    )


def _attention(call: Call) -> float:
    q, k, v = call.inputs[:3]
    heads, groups = attention_heads(call)
    at = 2 if len(q) == 4 else 1
    size, value = (q[3], v[3]) if len(q) == 4 else (q[2] // heads, v[2] // groups)
    window, chunk = call.whole("window", 0), call.whole("chunk", 0)
    pairs = attended_pairs(q[at], k[at], call.flag("causal"), window, chunk)
    return q[0] * heads * pairs * 2.0 * (size + value)


def _recurrent(call: Call) -> float:
    x, w_in, w_rec = call.inputs[:3]
    return 2.0 * x[0] * x[1] * (math.prod(w_in) + math.prod(w_rec))


def _cell(call: Call) -> float:
    states = len(call.outputs)
    w_in, w_rec = call.inputs[1 + states : 3 + states]
    return 2.0 * call.inputs[0][0] * (math.prod(w_in) + math.prod(w_rec))


def _router(call: Call) -> float:
    x, w = call.inputs
    return 2.0 * math.prod(x[:-1]) * math.prod(w)


CONTRACTIONS: dict[str, Callable[[Call], float]] = {
    "linear": flops,
    "matmul": flops,
    "einsum": flops,
    "expert_linear": flops,
    "conv": flops,
    "attention": _attention,
    "lstm": _recurrent,
    "gru": _recurrent,
    "lstm_cell": _cell,
    "gru_cell": _cell,
    "moe_router": _router,
}
