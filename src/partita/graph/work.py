"""The work of an op, per phase and split: its floating-point operations and the bytes it moves.

Operations, `FLOPS[kind]`; a multiply-add counts as two. Contractions: 2 * points of the loop nest,
once forward and once for each gradient. Attention: two contractions forward; five backward when
fused (the scores are computed again). A causal mask halves the pairs, a window caps them.
Everything else: a few operations per element. Adding a bias is not counted; its gradient, on its
own, is one operation per element it sums.

Bytes between memory and the execution units, `TRAFFIC[kind]` where not each tensor once.
By default each tensor of the op once: what it reads plus what it writes, a device's share of each.
Views move nothing, a lookup only the rows it takes, a recurrent layer its state's weights at every
position, an optimizer its states both ways.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from partita.graph.loops import ADDED_FROM, loop_nest
from partita.graph.record import Call, Graph, Op, dtype_bytes
from partita.graph.shapes import attention_heads, per_space
from partita.graph.splits import Factors, share

# Operations per output element; transcendental functions as GPUs execute them, roughly.
ELEMENTWISE_FLOPS = {
    "identity": 0, "cast": 0, "dropout": 2, "add": 1, "sub": 1, "mul": 1, "div": 1, "neg": 1,
    "relu": 1, "relu6": 2, "leaky_relu": 2, "abs": 1, "max": 1, "min": 1, "where": 1, "pow": 8,
    "sqrt": 4, "rsqrt": 4, "exp": 4, "log": 4, "sin": 8, "cos": 8, "sigmoid": 6, "tanh": 8,
    "gelu": 12, "silu": 7, "swiglu": 8, "erf": 10, "hardswish": 4, "hardsigmoid": 3, "elu": 5,
    "softplus": 8, "clip": 2, "rope": 6, "mask": 1, "scale": 1, "square": 1, "reciprocal": 2,
    "compare": 1, "lrn": 12, "gelu_tanh": 12, "quick_gelu": 8, "relu2": 2, "softcap": 10,
    "temperature": 1, "clamped_swiglu": 12, "marked": 2,
}  # fmt: skip
OPTIMIZER_FLOPS = {
    "sgd": 2,
    "momentum": 5,
    "adagrad": 8,
    "rmsprop": 9,
    "adam": 14,
    "adamw": 16,
    "lion": 9,
}
VIEWS = frozenset({"reshape", "split", "slice", "expand"})


@functools.lru_cache(maxsize=65536)
def flops(call: Call) -> float:
    """Operations of one execution; moving data and unknown kinds count none."""
    rule = FLOPS.get(call.kind)
    return float(rule(call)) if rule is not None else 0.0


def _contraction(call: Call) -> float:
    return _contractions(call, 2.0 * loop_nest(_forward(call)).points())


def _contractions(call: Call, once: float) -> float:
    """The forward's contraction once, or once per gradient that is one; a bias gradient is not."""
    if not call.wrt:
        return once
    biases = ADDED_FROM.get(call.kind, len(call.inputs))
    num_contractions = sum(1 for i in call.wrt if i < biases)
    return once * num_contractions or float(math.prod(call.outputs[0]))


def _forward(call: Call) -> Call:
    return (
        call if call.phase == "forward" else Call(call.kind, call.attrs, call.inputs, call.outputs)
    )


def _conv(call: Call) -> float:
    x, w = call.inputs[:2]
    out = call.outputs[0]
    # Transposed convolutions scatter from the input, plain ones gather at the output.
    positions = math.prod((x if call.flag("transposed") else out)[2:])
    per_position = 2.0 * math.prod(w)  # every weight is used once per position and batch item
    return _contractions(call, x[0] * positions * per_position)


def attended_pairs(positions: int, keys: int, causal: bool, window: int, chunk: int = 0) -> float:
    """Query-key pairs that are computed; a window or chunk of 0 is none.

    Causal queries are the last of the keys: one at position p sees p + 1 keys, or as many of the
    nearest as the window has, or those of its own chunk. Others see every key, or a window's worth.
    """
    if chunk and chunk < keys:
        whole, rest = divmod(keys, chunk)
        return min(positions / keys, 1.0) * (whole * chunk * (chunk + 1) + rest * (rest + 1)) / 2
    width = min(window or keys, keys)
    if not causal:
        return float(positions * width)

    def seen(num_queries: int) -> int:
        """Pairs of the first queries of all: sum over p < num_queries of min(p + 1, width)."""
        growing = min(max(0, num_queries), width)
        return growing * (growing + 1) // 2 + (max(0, num_queries) - growing) * width

    return float(seen(keys) - seen(keys - positions))


def _attention_flops(call: Call) -> float:
    q, k, v = call.inputs[:3]
    heads, groups = attention_heads(call)
    if len(q) == 4:
        positions, keys, size, value = q[2], k[2], q[3], v[3]
    else:
        positions, keys, size, value = q[1], k[1], q[2] // heads, v[2] // groups
    pairs = attended_pairs(
        positions, keys, call.flag("causal"), call.whole("window", 0), call.whole("chunk", 0)
    )
    if call.phase == "wgrad":  # of the sinks: one number per query, known from the data gradient
        return 4.0 * q[0] * heads * positions
    per_pair = 2.0 * (size + value) + 6.0  # scores, values, softmax
    if call.phase != "forward":
        per_pair = 2.0 * (3 * size + 2 * value) + 12.0
    return q[0] * heads * pairs * per_pair


def _elementwise_flops(call: Call) -> float:
    per_element = ELEMENTWISE_FLOPS.get(call.text("fn", "add"), 4)
    if call.text("fn") == "add" and call.phase != "forward" and call.wrt:
        per_element = 0  # the gradient of a sum is the gradient itself, or a reduction of it
    total = math.prod(call.outputs[0]) * max(1, len(call.inputs) - 1)
    return float(per_element * total * (1 if call.phase == "forward" else max(1, len(call.wrt))))


def _per_element(forward: float, backward: float) -> Callable[[Call], float]:
    def rule(call: Call) -> float:
        each = forward if call.phase == "forward" else backward
        return each * math.prod(call.inputs[0])

    return rule


def _norm(call: Call) -> float:
    elements = math.prod(call.inputs[0])
    return elements * {"forward": 8.0, "dgrad": 10.0, "wgrad": 4.0}.get(call.phase, 8.0)


def _pool(call: Call) -> float:
    x, out = call.inputs[0], call.outputs[0]
    if call.attr("output") is not None:
        return float(math.prod(x))
    return float(math.prod(out) * math.prod(per_space(call, "kernel", len(x) - 2, 1)))


def _resize(call: Call) -> float:
    return 4.0 * math.prod(call.outputs[0])


def _recurrent_flops(call: Call) -> float:
    x, w_in, w_rec = call.inputs[:3]
    steps = x[0] * x[1]
    # Weights that are computed are differentiated together with the data, at twice the cost.
    both = 2 if 0 in call.wrt and (1 in call.wrt or 2 in call.wrt) else 1
    # Without a data gradient the weight gradient goes back through the steps by itself.
    back = 2.0 * math.prod(w_rec) if call.alone else 0.0
    return steps * (both * (2.0 * (math.prod(w_in) + math.prod(w_rec)) + 8.0 * w_in[0]) + back)


def _state_space(call: Call) -> float:
    """Chunk by chunk: scores and values within one, states from one to the next (Dao, Gu 2024)."""
    x, b = call.inputs[0], call.inputs[3]
    heads, groups = call.whole("heads", 1), call.whole("groups", 1)
    size, state = x[2] // heads, b[2] // groups
    if call.phase == "wgrad":  # of decay, skip and bias: known from the data gradient
        return 4.0 * x[0] * x[1] * x[2]
    pairs = (min(call.whole("chunk", 256), x[1]) + 1) / 2
    within = pairs * (groups * 2.0 * state + heads * (2.0 * size + 6.0))
    between = heads * (4.0 * size * state + 20.0)
    return x[0] * x[1] * (within + between) * (1.0 if call.phase == "forward" else 2.5)


def _cell(call: Call) -> float:
    states = len(call.outputs)
    batch = call.inputs[0][0]
    weights = call.inputs[1 + states : 3 + states]
    return batch * (2.0 * sum(map(math.prod, weights)) + 8.0 * weights[0][0])


def _router(call: Call) -> float:
    x, w = call.inputs[:2]
    tokens = math.prod(x[:-1])
    return _contractions(call, 2.0 * tokens * math.prod(w)) + 8.0 * tokens * w[0]


def _combine(call: Call) -> float:
    return 2.0 * math.prod(call.inputs[0])


def _grouped(call: Call) -> float:
    """Rows [t, k], each times the matrix of its group, of [e, k, n]."""
    rows, matrices = call.inputs[:2]
    return _contractions(call, 2.0 * math.prod(rows) * matrices[2])


def _embedding(call: Call) -> float:
    return float(math.prod(call.outputs[0])) if call.phase == "wgrad" else 0.0


def _optimizer_flops(call: Call) -> float:
    return float(OPTIMIZER_FLOPS.get(call.text("rule", "adamw"), 16) * math.prod(call.inputs[0]))


FLOPS: dict[str, Callable[[Call], float]] = {
    "linear": _contraction,
    "matmul": _contraction,
    "einsum": _contraction,
    "expert_linear": _contraction,
    "grouped_mm": _grouped,
    "conv": _conv,
    "attention": _attention_flops,
    "pool": _pool,
    "batch_norm": _norm,
    "group_norm": _norm,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "softmax": _per_element(6, 4),
    "elementwise": _elementwise_flops,
    "reduce": _per_element(1, 1),
    "resize": _resize,
    "embedding": _embedding,
    "state_space": _state_space,
    "lstm": _recurrent_flops,
    "gru": _recurrent_flops,
    "lstm_cell": _cell,
    "gru_cell": _cell,
    "moe_router": _router,
    "moe_combine": _combine,
    "cross_entropy": _per_element(8, 4),
    "mse_loss": _per_element(3, 2),
    "optimizer": _optimizer_flops,
}


@dataclass(frozen=True, slots=True)
class Element:
    """What traffic needs to know of a tensor: shape, bytes per element, given or computed."""

    shape: tuple[int, ...]
    element_bytes: int
    given: bool = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of weights and states, which come from memory, and of activations, which may not."""

    given: float
    computed: float

    @property
    def total(self) -> float:
        """All bytes moved."""
        return self.given + self.computed


Elements = tuple[Element, ...]
NOTHING = Traffic(0.0, 0.0)


def elements(graph: Graph, op: Op) -> tuple[Elements, Elements]:
    """The tensors an op reads and writes, as traffic sees them."""
    key = ("elements", op.name)
    if key not in graph.memo:
        reads = tuple(_element(graph, name) for name in op.inputs)
        graph.memo[key] = reads, tuple(_element(graph, name) for name in op.outputs)
    elements: tuple[Elements, Elements] = graph.memo[key]
    return elements


def cached_inputs(graph: Graph) -> dict[str, int]:
    """Inputs that are kept from call to call, with the positions they hold; 0 for a state."""
    key = ("cached inputs", "")
    if key not in graph.memo:
        graph.memo[key] = {
            name: graph.tensor(name).shape[1] if positions else 0
            for op in graph.ops
            for name, positions in _kept(op)
        }
    cached: dict[str, int] = graph.memo[key]
    return cached


def positions_read_before(graph: Graph) -> int:
    """Positions of an encoder whose keys and values are kept; 0 where there is none."""
    read = (op for op in graph.ops if op.kind == "attention" and op.attr("remembered"))
    return max((graph.tensor(op.inputs[1]).shape[1] for op in read), default=0)


def appended_positions(graph: Graph) -> int:
    """Positions of a decoder's own text that are kept."""
    grown = (op for op in graph.ops if op.kind == "concat" and op.attr("appended"))
    return max((graph.tensor(op.inputs[0]).shape[1] for op in grown), default=0)


def _kept(op: Op) -> list[tuple[str, bool]]:
    """What an op reads of earlier calls, and whether that has positions."""
    if op.kind == "concat" and op.attr("appended"):
        return [(op.inputs[0], True)]
    if op.kind == "attention" and op.attr("remembered"):
        return [(name, True) for name in op.inputs[1:3]]
    if op.kind == "state_space":
        return [(name, False) for name in op.inputs[7:]]
    return []


def traffic(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    """Bytes one device moves for its share of an op."""
    return TRAFFIC.get(call.kind, _all)(call, reads, writes, factors)


def traffic_bytes(graph: Graph, op: Op) -> float:
    """Bytes read and written by one execution of an op."""
    return traffic(graph.call(op), *elements(graph, op), {}).total


def _element(graph: Graph, name: str) -> Element:
    tensor = graph.tensor(name)
    given = tensor.role in ("parameter", "state")
    return Element(tensor.shape, dtype_bytes(tensor.dtype), given)


def _all(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    nest = loop_nest(call)
    given = computed = 0.0
    for items, accesses in ((reads, nest.inputs), (writes, nest.outputs)):
        for item, access in zip(items, accesses, strict=True):
            held = share(nest, access, item.shape, factors) if factors else math.prod(item.shape)
            if item.given:
                given += held * item.element_bytes
            else:
                computed += held * item.element_bytes
    return Traffic(given, computed)


def _view(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    """A view is free forward; its gradient is one too, except where pieces are put together."""
    if call.phase == "forward" or call.kind == "reshape":
        return NOTHING
    return _all(call, reads, writes, factors)


def _lookup(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    """Rows taken and written, or added to the table, and the ids."""
    rows = math.prod(call.outputs[0]) / math.prod(factors.values())
    moves = 2 if call.phase == "forward" else 3
    return Traffic(moves * rows * writes[0].element_bytes, 8.0 * rows / call.outputs[0][-1])


def _elementwise_traffic(
    call: Call, reads: Elements, writes: Elements, factors: Factors
) -> Traffic:
    return NOTHING if passes_through(call) else _all(call, reads, writes, factors)


def passes_through(call: Call) -> bool:
    """Does an elementwise op hand on its input as it is, as a sum does with its gradient?"""
    fn = call.text("fn")
    if fn == "identity" or not call.wrt:  # a sum of gradients is no gradient of a sum
        return fn == "identity"
    return fn == "add" and all(call.inputs[i] == call.outputs[0] for i in call.wrt)


def _recurrent_traffic(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    once = _all(call, reads, writes, factors)
    if call.phase == "wgrad":  # one product over all positions
        return once
    # Inputs of all positions are multiplied at once, the state at every position by itself.
    weights = [math.prod(shape) for shape in call.inputs[1:]]
    again = math.prod(call.inputs[2]) / sum(weights) * (call.inputs[0][1] - 1)
    return Traffic(once.given * (1 + again), once.computed)


def _concat(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    """Where the first part stays in its place, only the others are moved: a cache that grows."""
    if not call.flag("appended") or call.phase != "forward":
        return _all(call, reads, writes, factors)
    share = math.prod(factors.values())
    moved = sum(math.prod(part.shape) * part.element_bytes for part in reads[1:])
    return Traffic(0.0, 2.0 * moved / share)


def _attention_traffic(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    """Values that are the first part of the keys come with them."""
    if not call.flag("values_in_keys") or call.phase != "forward":
        return _all(call, reads, writes, factors)
    free = tuple(replace(e, element_bytes=0) if i == 2 else e for i, e in enumerate(reads))
    return _all(call, free, writes, factors)


def _scan(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    """A state to begin with is written again."""
    twice = (replace(each, element_bytes=2 * each.element_bytes) for each in reads[7:])
    if call.phase != "forward":
        return _all(call, reads, writes, factors)
    return _all(call, (*reads[:7], *twice), writes, factors)


def _optimizer_traffic(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    once = _all(call, reads, writes, factors)
    return Traffic(2 * once.given, once.computed)


def _nothing(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    return NOTHING


TRAFFIC: dict[str, Callable[[Call, Elements, Elements, Factors], Traffic]] = {
    **dict.fromkeys(sorted(VIEWS), _view),
    "attention": _attention_traffic,
    "concat": _concat,
    "embedding": _lookup,
    "elementwise": _elementwise_traffic,
    "lstm": _recurrent_traffic,
    "gru": _recurrent_traffic,
    "optimizer": _optimizer_traffic,
    "state_space": _scan,
    "constant": _nothing,
}
