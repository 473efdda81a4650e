"""What PyTorch holds beside the tensors of the graph: for the backward, and while an op runs.

The graph says what a gradient has to read. A framework that runs op by op keeps more of some ops
(positions of a pooling's largest values, both factors of a gated unit, the scores of attention
that it does not fuse), and some kernels need room that is free again when they end. A compiler
fuses the loss, and pads weights whose rows do not lie on 16 bytes for as long as it multiplies.
With `graph` execution there is nothing but what the model needs.
"""

import math

from partita.costs.kernels import attention_scores, is_unfused
from partita.graph.record import Call, dtype_bytes


def kept_bytes(call: Call, dtype: str, execution: str) -> float:
    """Bytes that a forward op keeps for its gradients beyond what they read in the graph."""
    if execution == "graph" or call.phase != "forward":
        return 0.0
    size = dtype_bytes(dtype)
    if is_unfused(call):
        return 5.2 * attention_scores(call)  # softmax in f32, and which scores count
    if call.kind in ("lstm", "gru"):
        steps = math.prod(call.inputs[0][:2])
        return 1.5 * size * steps * call.inputs[1][0]  # gates, and the cell's states
    if call.kind in ("lstm_cell", "gru_cell"):
        states = len(call.outputs)
        return float(size * call.inputs[0][0] * call.inputs[1 + states][0])  # its gates
    if execution != "eager":
        return 0.0
    if call.kind == "pool" and call.text("mode") == "max" and call.attr("output") is None:
        return 8.0 * math.prod(call.outputs[0])
    if call.kind == "elementwise" and call.text("fn") in ("swiglu", "geglu"):
        return float(size * math.prod(call.outputs[0]))
    return 0.0


def temporary_bytes(call: Call, dtype: str, execution: str) -> float:
    """Bytes that an op needs only while it runs."""
    if execution == "graph":
        return 0.0
    size = dtype_bytes(dtype)
    eager = execution == "eager"
    if call.kind == "cross_entropy" and eager:  # the logarithm of the softmax, and its gradient
        return float(size * math.prod(call.inputs[0]))
    if is_unfused(call):
        return (5.0 if eager and call.phase == "forward" else 2.0) * attention_scores(call)
    if call.kind == "linear" and not eager and call.phase == "forward":
        unaligned = any(extent % 8 for extent in call.inputs[1])
        return float(size * math.prod(call.inputs[1])) if unaligned else 0.0
    return 0.0
