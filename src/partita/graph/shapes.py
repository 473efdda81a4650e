"""Output shapes per kind of op: `SHAPES[kind](call) -> shapes`, checking the inputs on the way.

Conventions: `linear` weights are [out, in]; images are [batch, channel, *space]; `attention` takes
either [batch, heads, positions, size] or [batch, positions, heads * size] with the attribute
`heads` (and `kv_heads`); recurrent layers take [batch, positions, features].
"""

import math
from collections.abc import Callable

from partita.errors import GraphError
from partita.graph.record import Call, Graph, Shape

Shapes = tuple[Shape, ...]


def output_shapes(call: Call) -> Shapes:
    """Shapes an op of a known kind gives; an unknown kind has none that we could know."""
    rule = SHAPES.get(call.kind)
    if rule is None:
        raise GraphError(
            f"the output shape of the unknown kind {call.kind!r} cannot be inferred",
            fix="give the shapes of its outputs",
        )
    try:
        output_shapes = rule(call)
    except (IndexError, ValueError, ZeroDivisionError, OverflowError):
        raise GraphError(
            f"{call.kind} cannot take inputs of shapes {_shown(call.inputs)}",
            fix="check the shapes and attributes",
        ) from None
    if any(size < 1 for shape in output_shapes for size in shape):
        raise GraphError(
            f"{call.kind} of {_shown(call.inputs)} would give {_shown(output_shapes)}",
            fix="the input is too small for these attributes",
        )
    return output_shapes


def unknown_kinds(graph: Graph) -> tuple[str, ...]:
    """Kinds of ops that no table knows, sorted: carried, not split, costed by bytes."""
    known = SHAPES.keys() | CARRIED
    return tuple(sorted({op.kind for op in graph.ops if op.kind not in known}))


def broadcast(*shapes: Shape) -> Shape:
    """The common shape of elementwise inputs, aligned at the last dim."""
    rank = max(map(len, shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for position, size in enumerate(shape, rank - len(shape)):
            if size != 1 and result[position] not in (1, size):
                raise GraphError(
                    f"shapes {_shown(shapes)} do not broadcast",
                    fix="sizes must be equal or 1, aligned at the last dim",
                )
            result[position] = max(result[position], size)
    return tuple(result)


def per_space(
    call: Call, name: str, rank: int, default: int | tuple[int, ...], least: int = 1
) -> tuple[int, ...]:
    """A window attribute as one number per spatial dim; one number stands for all."""
    values = call.ints(name, (default,) if isinstance(default, int) else default)
    if len(values) not in (1, rank) or min(values) < least:
        raise GraphError(
            f"attribute {name} is {list(values)}",
            fix=f"one number or {rank}, each at least {least}, are needed",
        )
    return values * rank if len(values) == 1 else values


def axis_of(call: Call, rank: int, name: str = "axis", default: int = -1) -> int:
    """An axis attribute, counted from the front."""
    axis = call.whole(name, default)
    if not -rank <= axis < rank:
        raise GraphError(f"{name} {axis} of a tensor with {rank} dims", fix="choose one it has")
    return axis % rank


def _needs(condition: bool, call: Call, rule: str) -> None:
    if not condition:
        raise GraphError(f"{call.kind} of shapes {_shown(call.inputs)}", fix=f"it needs {rule}")


def _linear(call: Call) -> Shapes:
    x, w, *bias = call.inputs
    _needs(len(x) >= 1 and len(w) == 2 and x[-1] == w[1], call, "[..., k] and [n, k]")
    _needs(bias in ([], [(w[0],)]), call, "at most a bias of [n]")
    return ((*x[:-1], w[0]),)


def _matmul(call: Call) -> Shapes:
    a, b = call.inputs
    _needs(len(a) >= 2 and len(b) >= 2, call, "at least two dims each")
    m, k = (a[-1], a[-2]) if call.flag("transpose_a") else (a[-2], a[-1])
    k2, n = (b[-1], b[-2]) if call.flag("transpose_b") else (b[-2], b[-1])
    _needs(k == k2, call, "[..., m, k] and [..., k, n] with the same k")
    return ((*broadcast(a[:-2], b[:-2]), m, n),)


def einsum_terms(call: Call) -> tuple[tuple[str, ...], str]:
    """Input terms and output term of an einsum equation."""
    left, arrow, right = call.text("equation").replace(" ", "").partition("->")
    terms = tuple(left.split(","))
    _needs(bool(arrow) and len(terms) == len(call.inputs), call, "an equation like 'bik,bkj->bij'")
    _needs(
        all(len(t) == len(s) for t, s in zip(terms, call.inputs, strict=True))
        and all(letter.isalpha() for letter in "".join(terms) + right)
        and set(right) <= set("".join(terms))
        and len(set(right)) == len(right),
        call,
        f"an equation that fits, not {call.text('equation')!r}",
    )
    return terms, right


def _einsum(call: Call) -> Shapes:
    terms, right = einsum_terms(call)
    size: dict[str, int] = {}
    for term, shape in zip(terms, call.inputs, strict=True):
        for letter, extent in zip(term, shape, strict=True):
            _needs(size.setdefault(letter, extent) == extent, call, f"one size for {letter!r}")
    return (tuple(size[letter] for letter in right),)


def _conv(call: Call) -> Shapes:
    x, w, *bias = call.inputs
    rank = len(x) - 2
    _needs(1 <= rank <= 3 and len(w) == rank + 2, call, "[b, c, *space] and [n, c/groups, *kernel]")
    groups = call.whole("groups", 1)
    transposed = call.flag("transposed")
    channels = x[1] if transposed else w[1] * groups
    _needs(groups >= 1 and x[1] % groups == 0, call, f"channels divisible by {groups} groups")
    _needs(x[1] == channels and (not transposed or w[0] == x[1]), call, "matching channels")
    n = w[1] * groups if transposed else w[0]
    _needs(n % groups == 0 and bias in ([], [(n,)]), call, f"at most a bias of [{n}]")
    stride = per_space(call, "stride", rank, 1)
    padding = per_space(call, "padding", rank, 0, least=0)
    dilation = per_space(call, "dilation", rank, 1)
    extra = per_space(call, "output_padding", rank, 0, least=0)
    space = []
    for i in range(rank):
        reach = dilation[i] * (w[2 + i] - 1)
        if transposed:
            space.append((x[2 + i] - 1) * stride[i] - 2 * padding[i] + reach + extra[i] + 1)
        else:
            space.append((x[2 + i] + 2 * padding[i] - reach - 1) // stride[i] + 1)
    return ((x[0], n, *space),)


def _pool(call: Call) -> Shapes:
    (x,) = call.inputs
    rank = len(x) - 2
    _needs(1 <= rank <= 3, call, "[b, c, *space] with one to three spatial dims")
    if call.attr("output") is not None:
        return ((*x[:2], *per_space(call, "output", rank, 1)),)
    kernel = per_space(call, "kernel", rank, 1)
    stride = per_space(call, "stride", rank, kernel)
    padding = per_space(call, "padding", rank, 0, least=0)
    up = [s - 1 if call.flag("ceil") else 0 for s in stride]
    space = []
    for i in range(rank):
        size = (x[2 + i] + 2 * padding[i] - kernel[i] + up[i]) // stride[i] + 1
        if call.flag("ceil") and (size - 1) * stride[i] >= x[2 + i] + padding[i]:
            size -= 1  # a window must start inside the input or its left padding
        space.append(size)
    return ((*x[:2], *space),)


def _softmax(call: Call) -> Shapes:
    (x,) = call.inputs
    axis_of(call, len(x))
    return (x,)


def _optimizer(call: Call) -> Shapes:
    weights, gradient, *states = call.inputs
    call.text("rule", "adamw")
    _needs(
        all(other == weights for other in (gradient, *states)),
        call,
        "weights, gradient and states of one shape",
    )
    return (weights,)


def _channel_norm(call: Call) -> Shapes:
    x, *weights = call.inputs
    _needs(len(x) >= 2 and all(w == (x[1],) for w in weights), call, "[b, c, ...] and [c] weights")
    if call.kind == "group_norm":
        groups = call.whole("groups", 1)
        _needs(groups >= 1 and x[1] % groups == 0, call, f"channels divisible by {groups} groups")
    else:
        call.flag("training", True)
    return (x,)


def _last_norm(call: Call) -> Shapes:
    x, *weights = call.inputs
    rank = call.whole("dims", 1)
    _needs(1 <= rank <= len(x), call, "at least as many dims as are normalised")
    _needs(all(w == x[len(x) - rank :] for w in weights), call, "weights of the normalised shape")
    return (x,)


def _attention(call: Call) -> Shapes:
    q, k, v, *masks = call.inputs
    for flag in ("causal", "remembered", "values_in_keys"):
        call.flag(flag)
    _needs(call.whole("window", 0) >= 0, call, "a window of at least 0")
    _needs(call.whole("chunk", 0) >= 0, call, "a chunk of at least 0")
    _needs(call.number("softcap", 0) >= 0, call, "a softcap of at least 0")
    call.number("scale", 1)
    shape = _attended(call, q, k, v)
    heads, _ = attention_heads(call)
    if call.flag("sinks"):
        _needs(masks[-1:] == [(heads,)], call, f"one sink for each of {heads} heads at its end")
        masks = masks[:-1]
    full = (q[0], heads, q[-2], k[-2])
    _needs(
        len(masks) <= 1 and all(len(m) <= 4 and broadcast(m, full) == full for m in masks),
        call,
        f"at most one mask, which broadcasts to {list(full)}",
    )
    return (shape,)


def _attended(call: Call, q: Shape, k: Shape, v: Shape) -> Shape:
    if len(q) == 4:
        _needs(
            len(k) == len(v) == 4 and q[0] == k[0] == v[0] and q[3] == k[3] and k[2] == v[2],
            call,
            "[b, h, s, d], [b, g, t, d] and [b, g, t, e]",
        )
        _needs(k[1] == v[1] and q[1] % k[1] == 0, call, "query heads divisible by key heads")
        return (*q[:3], v[3])
    heads, groups = attention_heads(call)
    _needs(len(q) == len(k) == len(v) == 3 and k[:2] == v[:2] and q[0] == k[0], call, "[b, s, h*d]")
    _needs(
        heads >= 1 and groups >= 1 and heads % groups == 0
        and q[2] % heads == 0 and k[2] == q[2] // heads * groups and v[2] % groups == 0,
        call,
        f"sizes that {heads} query heads and {groups} key heads divide",
    )  # fmt: skip
    return (q[0], q[1], v[2] // groups * heads)


def attention_heads(call: Call) -> tuple[int, int]:
    """Query heads and key/value heads."""
    if len(call.inputs[0]) == 4:
        return call.inputs[0][1], call.inputs[1][1]
    heads = call.whole("heads", 1)
    return heads, call.whole("kv_heads", heads)


def _embedding(call: Call) -> Shapes:
    ids, table = call.inputs
    _needs(len(table) == 2, call, "ids and a table [vocabulary, size]")
    return ((*ids, table[1]),)


def _elementwise(call: Call) -> Shapes:
    _needs(len(call.inputs) >= 1, call, "at least one input")
    shape = broadcast(*call.inputs)
    if call.text("fn", "add") == "rope":
        heads = call.whole("heads", 1)
        _needs(
            len(call.inputs) == 1 and heads >= 1 and len(shape) >= 1 and shape[-1] % heads == 0,
            call,
            f"one input whose last size {heads} heads divide",
        )
        _rotated(call, shape[-1] // heads)
    return (shape,)


def _rotated(call: Call, size: int) -> None:
    """How many features of a head turn (`size`), and how fast each pair does."""
    turned = call.whole("size", size - size % 2)
    speeds = call.attr("frequencies", ())
    call.number("theta", 1)
    call.number("factor", 1)
    call.flag("interleaved")
    _needs(
        turned % 2 == 0 and turned <= size and isinstance(speeds, tuple)
        and len(speeds) in (0, turned // 2),
        call,
        f"an even number of the {size} features of a head, and a frequency for each pair",
    )  # fmt: skip


def _reduce(call: Call) -> Shapes:
    (x,) = call.inputs
    named = call.ints("axes", tuple(range(len(x))))
    _needs(all(-len(x) <= axis < len(x) for axis in named), call, f"axes it has, not {list(named)}")
    call.text("fn", "sum")
    axes = {axis % len(x) for axis in named}
    if call.flag("keepdim"):
        return (tuple(1 if i in axes else size for i, size in enumerate(x)),)
    return (tuple(size for i, size in enumerate(x) if i not in axes),)


def _concat(call: Call) -> Shapes:
    first = call.inputs[0]
    axis = axis_of(call, len(first))
    for shape in call.inputs:
        same = len(shape) == len(first) and all(
            a == b for i, (a, b) in enumerate(zip(shape, first, strict=True)) if i != axis
        )
        _needs(same, call, f"equal sizes except along axis {axis}")
    total = sum(shape[axis] for shape in call.inputs)
    return ((*first[:axis], total, *first[axis + 1 :]),)


def _split(call: Call) -> Shapes:
    (x,) = call.inputs
    axis = axis_of(call, len(x))
    sizes = call.ints("sizes")
    _needs(sum(sizes) == x[axis], call, f"sizes that add up to {x[axis]}, not {list(sizes)}")
    return tuple((*x[:axis], size, *x[axis + 1 :]) for size in sizes)


def _slice(call: Call) -> Shapes:
    (x,) = call.inputs
    axis = axis_of(call, len(x))
    span = range(x[axis])[
        call.whole("start", 0) : call.whole("stop", x[axis]) : call.whole("step", 1)
    ]
    return ((*x[:axis], len(span), *x[axis + 1 :]),)


def _reshape(call: Call) -> Shapes:
    (x,) = call.inputs
    shape = list(call.ints("shape"))
    if shape.count(-1) == 1:
        shape[shape.index(-1)] = math.prod(x) // -math.prod(shape)
    _needs(math.prod(shape) == math.prod(x), call, f"as many elements as {list(shape)}")
    return (tuple(shape),)


def _transpose(call: Call) -> Shapes:
    (x,) = call.inputs
    order = call.ints("perm")
    _needs(sorted(order) == list(range(len(x))), call, f"a permutation of {len(x)} dims")
    return (tuple(x[i] for i in order),)


def _pad(call: Call) -> Shapes:
    (x,) = call.inputs
    before, after = call.ints("before"), call.ints("after")
    _needs(len(before) == len(after) == len(x), call, "one padding per dim")
    return (tuple(b + size + a for b, size, a in zip(before, x, after, strict=True)),)


def _resize(call: Call) -> Shapes:
    (x,) = call.inputs
    _needs(3 <= len(x) <= 5, call, "[b, c, *space] with one to three spatial dims")
    return ((*x[:2], *per_space(call, "output", len(x) - 2, 1)),)


def _expand(call: Call) -> Shapes:
    (x,) = call.inputs
    shape = call.ints("shape")
    _needs(broadcast(x, shape) == shape, call, f"something that expands to {list(shape)}")
    return (shape,)


def _constant(call: Call) -> Shapes:
    _needs(not call.inputs, call, "no inputs")
    return (call.ints("shape"),)


def gates(kind: str) -> int:
    """Gates of a recurrent cell: 4 for LSTM, 3 for GRU."""
    return 4 if kind.startswith("lstm") else 3


def _recurrent(call: Call) -> Shapes:
    x, w_in, w_rec, *rest = call.inputs
    directions = 2 if call.flag("bidirectional") else 1
    hidden = w_rec[1]
    rows = directions * gates(call.kind) * hidden
    _needs(
        len(x) == 3 and w_in == (rows, x[2]) and w_rec == (rows, hidden),
        call,
        f"[b, t, i], [{gates(call.kind)}h, i] and [{gates(call.kind)}h, h] weights",
    )
    _needs(all(r == (rows,) for r in rest), call, f"biases of [{rows}]")
    return ((x[0], x[1], directions * hidden),)


def _cell(call: Call) -> Shapes:
    states = 2 if call.kind == "lstm_cell" else 1
    x, *rest = call.inputs
    state, weights = rest[:states], rest[states:]
    rows = gates(call.kind) * state[0][1]
    _needs(
        len(x) == 2 and all(s == (x[0], state[0][1]) for s in state)
        and weights[0] == (rows, x[1]) and weights[1] == (rows, state[0][1])
        and all(b == (rows,) for b in weights[2:]),
        call,
        "[b, i], a [b, h] state and gate weights",
    )  # fmt: skip
    return tuple(state)


def _state_space(call: Call) -> Shapes:
    heads, groups = call.whole("heads", 1), call.whole("groups", 1)
    _needs(call.whole("chunk", 1) >= 1, call, "chunks of at least 1 position")
    _needs(call.number("low", 0) >= 0 and call.number("high", 1) > 0, call, "limits of time steps")
    _needs(
        len(call.inputs) in (7, 8),
        call,
        "seven inputs: x, steps, decay, b, c, skip, step bias; and a state to begin with, if any",
    )
    x, steps, decay, b, c, skip, bias, *state = call.inputs
    _needs(
        len(x) == 3 and steps == (*x[:2], heads) and b == c and len(b) == 3 and b[:2] == x[:2]
        and decay == skip == bias == (heads,),
        call,
        f"[b, t, heads * p], [b, t, {heads}] steps, [b, t, groups * n] twice, and three [{heads}]",
    )  # fmt: skip
    _needs(
        heads % groups == 0 and x[2] % heads == 0 and b[2] % groups == 0,
        call,
        f"{groups} groups that divide {heads} heads, and sizes that they divide",
    )
    whole = (x[0], heads, x[2] // heads, b[2] // groups)
    _needs(all(each == whole for each in state), call, f"a state of {list(whole)}")
    return (x,)


ROUTER_SCORES = ("softmax", "sigmoid")


def _router(call: Call) -> Shapes:
    x, w, *more = call.inputs
    _needs(len(w) == 2 and x[-1] == w[1], call, "[..., k] and [experts, k]")
    _needs(
        len(more) <= 2 and all(each == (w[0],) for each in more), call, "biases of [experts] only"
    )
    score, groups = call.text("score", "softmax"), call.whole("groups", 1)
    _needs(score in ROUTER_SCORES, call, f"a score of {' or '.join(ROUTER_SCORES)}, not {score!r}")
    _needs(
        groups >= 1 and w[0] % groups == 0 and 1 <= call.whole("top_groups", groups) <= groups,
        call,
        f"groups that divide {w[0]} experts, and at most as many of them chosen",
    )
    return ((*x[:-1], w[0]),)


def expert_capacity(call: Call) -> int:
    """Tokens an expert takes: tokens * top_k / experts, rounded up, times the capacity factor."""
    gates_shape = call.inputs[1]
    tokens, experts = math.prod(gates_shape[:-1]), gates_shape[-1]
    top_k, factor = call.whole("top_k", 1), call.number("capacity_factor", 1.0)
    _needs(1 <= top_k <= experts and factor > 0, call, "1 <= top_k <= experts, a positive factor")
    share = tokens * top_k * factor / experts
    return max(1, math.ceil(share))


def _dispatch(call: Call) -> Shapes:
    x, router = call.inputs
    _needs(x[:-1] == router[:-1], call, "[..., k] and gates [..., experts]")
    return ((router[-1], expert_capacity(call), x[-1]),)


def _combine(call: Call) -> Shapes:
    y, router = call.inputs
    _needs(
        len(y) == 3 and y[0] == router[-1], call, "[experts, tokens, k] and gates [..., experts]"
    )
    return ((*router[:-1], y[2]),)


def _expert_linear(call: Call) -> Shapes:
    x, w, *bias = call.inputs
    _needs(len(x) == len(w) == 3 and x[0] == w[0] and x[2] == w[2], call, "[e, c, k] and [e, n, k]")
    _needs(bias in ([], [(w[0], w[1])]), call, "at most a bias of [e, n]")
    return ((x[0], x[1], w[1]),)


def _class_loss(call: Call) -> Shapes:
    logits, targets = call.inputs
    _needs(
        len(logits) >= 1 and logits[:-1] == targets, call, "logits [..., classes] and targets [...]"
    )
    return ((),)


def _pair_loss(call: Call) -> Shapes:
    a, b = call.inputs
    _needs(a == b, call, "two tensors of the same shape")
    return ((),)


def _shown(shapes: Shapes) -> str:
    return ", ".join(str(list(shape)) for shape in shapes) or "nothing"


# Kinds that are carried as they are, never split, but whose work is known (`work.py`).
CARRIED = frozenset({"grouped_mm"})

SHAPES: dict[str, Callable[[Call], Shapes]] = {
    "linear": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "conv": _conv,
    "pool": _pool,
    "batch_norm": _channel_norm,
    "group_norm": _channel_norm,
    "layer_norm": _last_norm,
    "rms_norm": _last_norm,
    "softmax": _softmax,
    "attention": _attention,
    "embedding": _embedding,
    "elementwise": _elementwise,
    "reduce": _reduce,
    "concat": _concat,
    "split": _split,
    "slice": _slice,
    "reshape": _reshape,
    "transpose": _transpose,
    "pad": _pad,
    "resize": _resize,
    "expand": _expand,
    "constant": _constant,
    "lstm": _recurrent,
    "gru": _recurrent,
    "lstm_cell": _cell,
    "gru_cell": _cell,
    "state_space": _state_space,
    "moe_router": _router,
    "moe_dispatch": _dispatch,
    "moe_combine": _combine,
    "expert_linear": _expert_linear,
    "cross_entropy": _class_loss,
    "mse_loss": _pair_loss,
    "optimizer": _optimizer,
}
