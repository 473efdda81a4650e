"""What PyTorch starts for an op when nothing is compiled: kernels, their bytes, the host's time.

The roofline knows what an op must compute and move. A framework that runs op by op starts one or
several kernels for it, some of which read and write more than they must, or reach a smaller part of
the bandwidth, and its host pays for each op: Python and dispatch going forward, the engine of
automatic differentiation going back. `KERNELS[kind](call, dtype)` says that per kind and phase.

The numbers are measured (NVIDIA H200, PyTorch 2.11, benchmarks/device_kind.py): shares are of what
a plain copying kernel reaches, host times those of that host (`HOST_S` per kernel on average);
kinds of devices whose sets give another `host_s` have them scaled.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from partita.graph.loops import ADDED_FROM
from partita.graph.record import Call, dtype_bytes
from partita.graph.shapes import attention_heads, per_space
from partita.graph.work import VIEWS, passes_through

HOST_S = 40e-6  # per kernel, on the host that the table was measured on
HALF = frozenset({"f16", "bf16"})
MICRO = 1e-6
UPDATE_S = 350e-6  # of the host, before an optimizer's first kernel


@dataclass(frozen=True, slots=True)
class Kernels:
    """What an op starts: how many kernels, how well they use memory, what else they move.

    `share` is of the plain bandwidth, for the bytes that the op has to move. `more_bytes` are moved
    in addition, at the plain bandwidth; `more_s` passes where neither matters. `unfused` attention
    is computed by products of plain f32 arithmetic.
    """

    count: float = 1.0
    host_s: float = 0.0
    share: float = 1.0
    more_bytes: float = 0.0
    more_s: float = 0.0
    unfused: bool = False
    compute: float = 1.0  # times as long as the roofline says
    of_peak: float = 0.0  # the part of the peak that its arithmetic reaches, where that is known


NONE = Kernels(0.0)
# Functions whose kernels compute for longer than they wait for memory: forward, backward.
SLOW_FUNCTIONS = {"gelu": (0.74, 0.84), "dropout": (0.60, 0.95), "silu": (0.95, 1.0),
                  "tanh": (0.95, 1.0), "sigmoid": (0.95, 1.0)}  # fmt: skip
# Several kernels for what the graph has as one function: (kernels, share) forward and backward.
SEVERAL = {
    "swiglu": ((2, 0.60), (3, 0.55)),
    "geglu": ((2, 0.55), (3, 0.50)),
    "rope": ((7, 0.085), (9, 0.085)),  # halves, times sines and cosines, put together again
}


def kernels(call: Call, dtype: str, training: bool) -> Kernels:
    """What one execution of an op starts in eager mode."""
    rule = KERNELS.get(call.kind)
    if rule is not None:
        return rule(call, dtype, training)
    return Kernels(1.0, (20 if call.phase == "forward" else 30) * MICRO)


def _host(call: Call, forward: float, backward: float) -> float:
    return (forward if call.phase == "forward" else backward) * MICRO


def _elementwise(call: Call, dtype: str, training: bool) -> Kernels:
    function = call.text("fn", "add")
    if passes_through(call):
        return Kernels(0.0, _host(call, 5, 10))
    if call.phase != "forward" and not call.wrt:  # gradients of several readers, added up
        count = max(1, len(call.inputs) - 1)
        return Kernels(count, 10 * MICRO * count, share=(count + 1) / (3 * count) if count else 1)
    if function in SEVERAL:
        count, share = SEVERAL[function][call.phase != "forward"]
        return Kernels(count, _host(call, 19 if training else 15, 28) * count, share)
    share = SLOW_FUNCTIONS.get(function, (1.0, 1.0))[call.phase != "forward"]
    share = share if dtype in HALF else min(1.0, share * 1.3)
    count = max(1, len(call.inputs) - 1) if call.phase == "forward" else 1
    return Kernels(count, _host(call, 20 if training else 15, 30) * count, share)


def _rows(call: Call) -> tuple[int, int]:
    """Rows of a norm, and how long they are."""
    shape = call.inputs[0]
    columns = math.prod(shape[len(shape) - call.whole("dims", 1) :])
    return math.prod(shape) // max(1, columns), columns


def _norm(call: Call, dtype: str, training: bool) -> Kernels:
    rows, columns = _rows(call)
    wide = columns / 1024
    if call.phase == "wgrad":  # one block of threads per few columns, unless rows are very many
        parallel = rows > 65536 and columns < 2048
        return Kernels(1.5, 0.0, 0.8 if parallel else min(0.8, 0.21 * wide))
    if call.phase == "dgrad":
        return Kernels(1.0, 85 * MICRO, 0.7)
    base, power = (0.66, 0.2) if call.kind == "rms_norm" else (0.36, 0.35)
    share = base * math.pow(wide, power)
    share *= 1.0 if dtype in HALF else 1.4
    return Kernels(1.0, (48 if training else 40) * MICRO, min(0.9, share))


def _batch_norm(call: Call, dtype: str, training: bool) -> Kernels:
    if call.phase == "wgrad":
        return Kernels(2.0, 0.0, 0.50)
    if call.phase == "dgrad":
        return Kernels(1.0, 55 * MICRO, 0.54)
    if not (training and call.flag("training", True)):
        return Kernels(3.0, 57 * MICRO, 0.5)
    return Kernels(5.0, 75 * MICRO, 0.19)


def _bias_elements(call: Call) -> float:
    """Elements of what a bias is added to; 0 without one."""
    added_from = ADDED_FROM.get(call.kind, len(call.inputs))
    return float(math.prod(call.outputs[0])) if len(call.inputs) > added_from else 0.0


def _conv(call: Call, dtype: str, training: bool) -> Kernels:
    size = _bias_elements(call) * dtype_bytes(dtype)
    speed = Kernels(compute=_conv_stretch(call), of_peak=_grouped_share(call))
    if call.phase == "forward":  # cuDNN leaves the bias to a kernel of its own
        host_s = (70 if training else 58) * MICRO
        return replace(speed, count=1.2 + (size > 0), host_s=host_s, more_bytes=2 * size / 0.45)
    if call.phase == "dgrad":
        return replace(speed, count=1.3, host_s=60 * MICRO)
    biased = 2 in call.wrt
    host_s = (50 + 20 * biased) * MICRO
    return replace(speed, count=2.0 + biased, host_s=host_s, more_bytes=biased * size / 0.4)


def _conv_stretch(call: Call) -> float:
    """One by one is a plain product; gradients of strided windows are put together from parts."""
    window = math.prod(call.inputs[1][2:])
    strided = any(step > 1 for step in call.ints("stride"))
    if window == 1 and not strided:
        return 0.87
    return 1.45 if strided and window > 1 and call.phase == "dgrad" else 1.0


def _grouped_share(call: Call) -> float:
    """The part of the peak that a grouped convolution reaches: tiles are padded to 64 channels."""
    groups = call.whole("groups", 1)
    if groups == 1:
        return 0.0
    share = 0.28 * min(1.0, call.inputs[1][1] / 64)
    slow = call.phase == "wgrad" and call.inputs[0][0] < 128
    return share / 8 if slow else share


def _linear(call: Call, dtype: str, training: bool) -> Kernels:
    size = _bias_elements(call) * dtype_bytes(dtype)
    if call.phase == "forward":
        return Kernels(1.0, (45 if training else 39) * MICRO)
    if call.phase == "dgrad":
        return Kernels(1.0, 52 * MICRO)
    biased = 2 in call.wrt
    return Kernels(1.5 + biased, (50 + 35 * biased) * MICRO, more_bytes=biased * size / 0.4)


def _matmul(call: Call, dtype: str, training: bool) -> Kernels:
    count = max(1, len(call.wrt))
    return Kernels(count, _host(call, 18, 25 * count))


def attention_scores(call: Call) -> float:
    """Pairs of queries and keys over all heads: elements of the scores."""
    heads, _ = attention_heads(call)
    q, k = call.inputs[:2]
    return float(q[0] * heads * q[-2] * k[-2])


def is_unfused(call: Call) -> bool:
    """Does PyTorch compute this attention step by step? With an added bias it does, in f32."""
    return call.kind == "attention" and len(call.inputs) > 3


def _attention(call: Call, dtype: str, training: bool) -> Kernels:
    if is_unfused(call):
        size = 4 * attention_scores(call)
        if call.phase == "forward":
            host_s = (420 if training else 350) * MICRO
            return Kernels(22.0, host_s, more_bytes=16 * size, unfused=True)
        return Kernels(30.0, 500 * MICRO, more_bytes=8 * size, unfused=True)
    if call.phase == "forward":
        return Kernels(1.0, (110 if training else 65) * MICRO)
    return Kernels(4.0, 190 * MICRO)


def _softmax(call: Call, dtype: str, training: bool) -> Kernels:
    half = dtype in HALF
    if call.phase == "forward":
        return Kernels(1.0, 12 * MICRO, 0.55 if half else 0.85)
    return Kernels(1.0, 30 * MICRO, 0.42 if half else 0.5)


def _loss(call: Call, dtype: str, training: bool) -> Kernels:
    """The logarithm of the softmax is written and read again; then the target's is picked."""
    rows = math.prod(call.inputs[0][:-1])
    if call.phase == "forward":
        return Kernels(2.0, 40 * MICRO, 0.36, more_s=0.6e-9 * rows)
    return Kernels(3.0, 200 * MICRO, 0.48)


def _embedding(call: Call, dtype: str, training: bool) -> Kernels:
    if call.phase == "forward":
        return Kernels(1.0, 22 * MICRO)
    table = float(math.prod(call.inputs[1]) * dtype_bytes(dtype))
    return Kernels(9.0, 150 * MICRO, 0.25, more_bytes=table, more_s=60e-6)


def _pool(call: Call, dtype: str, training: bool) -> Kernels:
    if call.attr("output") is not None:
        return Kernels(1.0, _host(call, 15, 25), 0.5)
    host_s = _host(call, 20, 30)
    window = math.prod(per_space(call, "kernel", len(call.inputs[0]) - 2, 1))
    forward = call.phase == "forward"
    if call.text("mode") == "avg":
        return Kernels(1.0, host_s, (0.3 if forward else 0.2) / window)
    # Positions of the largest are written and read, eight bytes each.
    return Kernels(1.0, host_s, min(1.0, 0.38 / math.sqrt(window) if forward else 0.9 / window))


def _recurrent(call: Call, dtype: str, training: bool) -> Kernels:
    steps = call.inputs[0][1]
    if call.phase == "wgrad":
        return Kernels(8.0, 100 * MICRO)
    each = 2.0 if call.phase == "forward" else 3.0
    each *= 2 if call.flag("bidirectional") else 1
    return Kernels(each * steps, (9 if call.phase == "forward" else 11) * MICRO * each * steps)


def _state_space(call: Call, dtype: str, training: bool) -> Kernels:
    """Five kernels of its own library: sums of decays, scores, states, their passing, outputs."""
    count = 5.0 if call.phase == "forward" else 2.0 if call.phase == "wgrad" else 12.0
    return Kernels(count, _host(call, 90, 200))


def _cell(call: Call, dtype: str, training: bool) -> Kernels:
    if call.phase == "forward":
        return Kernels(3.0, (84 if training else 75) * MICRO)
    if call.phase == "dgrad":
        return Kernels(4.0, 140 * MICRO)
    return Kernels(6.0, 120 * MICRO)


def _view(call: Call, dtype: str, training: bool) -> Kernels:
    host_s = _host(call, 6, 18)
    if call.phase == "forward" or call.kind in ("reshape", "expand"):
        return Kernels(0.0, host_s)
    return Kernels(2.0, host_s, 0.12)


def _concat(call: Call, dtype: str, training: bool) -> Kernels:
    """Pieces lie in strides; gradients are views that the next op reads in strides."""
    return Kernels(1.0, _host(call, 20, 25), 0.4 if call.phase == "forward" else 0.12)


def _optimizer(call: Call, dtype: str, training: bool) -> Kernels:
    """One fused kernel for many tensors; each of them costs the host."""
    return Kernels(1 / 24, 7 * MICRO, 0.68 if dtype in HALF else 0.85, more_s=0.6 * MICRO)


def _plain(forward: float, backward: float, share: float = 1.0) -> "Rule":
    def rule(call: Call, dtype: str, training: bool) -> Kernels:
        return Kernels(1.0, _host(call, forward, backward), share)

    return rule


def _nothing(call: Call, dtype: str, training: bool) -> Kernels:
    return NONE


Rule = Callable[[Call, str, bool], Kernels]
KERNELS: dict[str, Rule] = {
    "elementwise": _elementwise,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "batch_norm": _batch_norm,
    "conv": _conv,
    "linear": _linear,
    "matmul": _matmul,
    "einsum": _matmul,
    "attention": _attention,
    "softmax": _softmax,
    "cross_entropy": _loss,
    "embedding": _embedding,
    "pool": _pool,
    "state_space": _state_space,
    "lstm": _recurrent,
    "gru": _recurrent,
    "lstm_cell": _cell,
    "gru_cell": _cell,
    "concat": _concat,
    "transpose": _plain(8, 20, 0.3),
    "mse_loss": _plain(20, 30),
    "optimizer": _optimizer,
    "constant": _nothing,
    **dict.fromkeys(sorted(VIEWS), _view),
}
