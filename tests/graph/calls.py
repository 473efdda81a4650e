"""Random calls of every kind, small enough to run, for Hypothesis."""

import math
from typing import Any

from hypothesis import strategies as st

from partita.graph.record import Call, Shape
from partita.graph.shapes import SHAPES, output_shapes

SIZES = st.sampled_from([1, 2, 3, 4, 6])
Draw = Any  # Hypothesis' draw function


def make_call(kind: str, inputs: list[Shape], **attrs: Any) -> Call:
    """A forward call with the outputs its kind gives."""
    fixed = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in attrs.items()))
    call = Call(kind, fixed, tuple(inputs), ())
    return Call(kind, fixed, tuple(inputs), output_shapes(call))


def _shape(draw: Draw, least: int = 0, most: int = 4) -> Shape:
    return tuple(draw(st.lists(SIZES, min_size=least, max_size=most)))


def _linear(draw: Draw) -> Call:
    lead, n, k = _shape(draw, 0, 3), draw(SIZES), draw(SIZES)
    bias = [(n,)] if draw(st.booleans()) else []
    return make_call("linear", [(*lead, k), (n, k), *bias])


def _matmul(draw: Draw) -> Call:
    lead, m, n, k = _shape(draw, 0, 3), draw(SIZES), draw(SIZES), draw(SIZES)
    ta, tb = draw(st.booleans()), draw(st.booleans())

    def operand(own: Shape) -> Shape:
        cut = draw(st.integers(0, len(lead)))
        return (*(draw(st.sampled_from([1, size])) for size in lead[cut:]), *own)

    a = operand((k, m) if ta else (m, k))
    b = operand((n, k) if tb else (k, n))
    return make_call("matmul", [a, b], transpose_a=ta, transpose_b=tb)


def _einsum(draw: Draw) -> Call:
    letters = st.lists(st.sampled_from("abcd"), max_size=3, unique=True)
    terms = draw(st.lists(letters, min_size=1, max_size=3))
    used = sorted({letter for term in terms for letter in term})
    right = draw(st.lists(st.sampled_from(used), unique=True)) if used else []
    size = {letter: draw(SIZES) for letter in "abcd"}
    equation = f"{','.join(map(''.join, terms))}->{''.join(right)}"
    return make_call("einsum", [tuple(size[x] for x in t) for t in terms], equation=equation)


def _conv(draw: Draw) -> Call:
    rank, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    transposed = draw(st.booleans())
    own_in, own_out = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    stride = [draw(st.integers(1, 3)) for _ in range(rank)]
    dilation = [draw(st.integers(1, 2)) for _ in range(rank)]
    padding = [draw(st.integers(0, 2)) for _ in range(rank)]
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    more = 8 if rank < 3 else 4
    least = [max(r, 2 * p + 1) for r, p in zip(reach, padding, strict=True)]
    space = tuple(size + draw(st.integers(0, more)) for size in least)
    attrs: dict[str, Any] = {
        "stride": stride, "padding": padding, "dilation": dilation, "groups": groups,
    }  # fmt: skip
    weight = (groups * own_out, own_in, *kernel)
    if transposed:
        weight = (groups * own_in, own_out, *kernel)
        extra = [draw(st.integers(0, max(pair) - 1)) for pair in zip(stride, dilation, strict=True)]
        attrs |= {"transposed": True, "output_padding": extra}
    bias = [(groups * own_out,)] if draw(st.booleans()) else []
    x = (draw(SIZES), groups * own_in, *space)
    return make_call("conv", [x, weight, *bias], **attrs)


def _pool(draw: Draw) -> Call:
    rank = draw(st.integers(1, 3))
    lead = (draw(SIZES), draw(SIZES))
    mode = draw(st.sampled_from(["max", "avg"]))
    if draw(st.booleans()):
        space = tuple(draw(st.integers(1, 8)) for _ in range(rank))
        output = [draw(st.integers(1, size)) for size in space]
        return make_call("pool", [(*lead, *space)], output=output, mode=mode)
    kernel = [draw(st.integers(1, 3)) for _ in range(rank)]
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    space = tuple(k + draw(st.integers(0, 6)) for k in kernel)
    attrs: dict[str, Any] = {"kernel": kernel, "padding": padding, "mode": mode}
    if draw(st.booleans()):
        attrs["stride"] = [draw(st.integers(1, 3)) for _ in range(rank)]
    return make_call("pool", [(*lead, *space)], ceil=draw(st.booleans()), **attrs)


def _channel_norm(kind: str) -> Any:
    def build(draw: Draw) -> Call:
        groups = draw(st.sampled_from([1, 2, 3])) if kind == "group_norm" else 1
        channels = groups * draw(st.sampled_from([1, 2, 4]))
        x = (draw(st.sampled_from([2, 3, 4])), channels, *_shape(draw, 0, 3))
        weights = [(channels,)] * draw(st.sampled_from([0, 2]))
        attrs: dict[str, Any] = {"groups": groups} if kind == "group_norm" else {}
        if kind == "batch_norm":
            attrs["training"] = draw(st.booleans())
        return make_call(kind, [x, *weights], **attrs)

    return build


def _last_norm(kind: str) -> Any:
    def build(draw: Draw) -> Call:
        x = _shape(draw, 1, 4)
        rank = draw(st.integers(1, len(x)))
        count = draw(st.sampled_from([0, 1] if kind == "rms_norm" else [0, 1, 2]))
        return make_call(kind, [x, *[x[len(x) - rank :]] * count], dims=rank)

    return build


def _softmax(draw: Draw) -> Call:
    x = _shape(draw, 1, 4)
    return make_call("softmax", [x], axis=draw(st.integers(-len(x), len(x) - 1)))


def _attention(draw: Draw) -> Call:
    b, groups, repeat = draw(SIZES), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    s, t, d, e = draw(SIZES), draw(SIZES), draw(st.sampled_from([2, 3])), draw(SIZES)
    heads = groups * repeat
    attrs: dict[str, Any] = {"causal": draw(st.booleans()) and s <= t}
    if draw(st.booleans()):
        inputs: list[Shape] = [(b, heads, s, d), (b, groups, t, d), (b, groups, t, e)]
    else:
        inputs = [(b, s, heads * d), (b, t, groups * d), (b, t, groups * e)]
        attrs |= {"heads": heads, "kv_heads": groups}
    if draw(st.booleans()):
        full = [b, heads, s, t][draw(st.integers(0, 3)) :]
        inputs.append(tuple(draw(st.sampled_from([1, size])) for size in full))
    elif attrs["causal"] and draw(st.booleans()):
        attrs["window"] = draw(st.integers(1, 5))
    return make_call("attention", inputs, **attrs)


def _embedding(draw: Draw) -> Call:
    return make_call("embedding", [_shape(draw, 0, 3), (draw(SIZES), draw(SIZES))])


def _elementwise(draw: Draw) -> Call:
    fn = draw(st.sampled_from(["add", "mul", "max", "relu", "gelu", "tanh", "rope", "lrn"]))
    full = _shape(draw, 3 if fn == "lrn" else 0, 5)
    if fn == "rope":
        heads, size = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([2, 4]))
        return make_call("elementwise", [(*full[:3], heads * size)], fn=fn, heads=heads)
    if fn not in ("add", "mul", "max"):
        return make_call("elementwise", [full], fn=fn)

    def operand() -> Shape:
        cut = draw(st.integers(0, len(full)))
        return tuple(draw(st.sampled_from([1, size])) for size in full[cut:])

    return make_call("elementwise", [operand() for _ in range(draw(st.integers(2, 3)))], fn=fn)


def _reduce(draw: Draw) -> Call:
    x = _shape(draw, 0, 4)
    attrs: dict[str, Any] = {"fn": draw(st.sampled_from(["sum", "mean", "max", "min"]))}
    if x and draw(st.booleans()):
        axes = draw(st.sets(st.integers(0, len(x) - 1), min_size=1))
        attrs["axes"] = [axis - draw(st.sampled_from([0, len(x)])) for axis in sorted(axes)]
    return make_call("reduce", [x], keepdim=draw(st.booleans()), **attrs)


def _concat(draw: Draw) -> Call:
    x = _shape(draw, 1, 4)
    axis = draw(st.integers(-len(x), len(x) - 1))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        part = list(x)
        part[axis] = draw(SIZES)
        parts.append(tuple(part))
    return make_call("concat", parts, axis=axis)


def _split(draw: Draw) -> Call:
    x, sizes = list(_shape(draw, 1, 4)), draw(st.lists(SIZES, min_size=1, max_size=3))
    axis = draw(st.integers(-len(x), len(x) - 1))
    x[axis] = sum(sizes)
    return make_call("split", [tuple(x)], axis=axis, sizes=sizes)


def _slice(draw: Draw) -> Call:
    x = _shape(draw, 1, 4)
    axis = draw(st.integers(-len(x), len(x) - 1))
    start = draw(st.integers(0, x[axis] - 1))
    stop, step = draw(st.integers(start + 1, x[axis])), draw(st.integers(1, 2))
    return make_call("slice", [x], axis=axis, start=start, stop=stop, step=step)


def _factors(draw: Draw, number: int) -> list[int]:
    """A shape of that many elements."""
    shape = []
    while number > 1:
        factor = draw(st.sampled_from([f for f in range(2, number + 1) if number % f == 0]))
        shape.append(factor)
        number //= factor
    for _ in range(draw(st.integers(0, 2))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return shape


def _reshape(draw: Draw) -> Call:
    number = draw(st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24, 30, 36, 48, 72]))
    x, y = _factors(draw, number), _factors(draw, number)
    if y and draw(st.booleans()):
        y[draw(st.integers(0, len(y) - 1))] = -1
    return make_call("reshape", [tuple(x)], shape=y)


def _transpose(draw: Draw) -> Call:
    x = _shape(draw, 0, 5)
    return make_call("transpose", [x], perm=draw(st.permutations(range(len(x)))))


def _pad(draw: Draw) -> Call:
    x = _shape(draw, 1, 4)
    before, after = ([draw(st.sampled_from([0, 0, 1, 2])) for _ in x] for _ in range(2))
    return make_call("pad", [x], before=before, after=after)


def _resize(draw: Draw) -> Call:
    space = [draw(SIZES) for _ in range(draw(st.integers(1, 3)))]
    output = [size * draw(st.sampled_from([1, 2])) for size in space]
    return make_call("resize", [(draw(SIZES), draw(SIZES), *space)], output=output)


def _expand(draw: Draw) -> Call:
    full = _shape(draw, 0, 5)
    x = tuple(draw(st.sampled_from([1, s])) for s in full[draw(st.integers(0, len(full))) :])
    return make_call("expand", [x], shape=full)


def _constant(draw: Draw) -> Call:
    return make_call("constant", [], shape=_shape(draw))


def _recurrent(kind: str) -> Any:
    def build(draw: Draw) -> Call:
        b, t, i, h = draw(SIZES), draw(st.integers(1, 3)), draw(SIZES), draw(SIZES)
        both = draw(st.booleans())
        rows = (2 if both else 1) * (4 if kind == "lstm" else 3) * h
        biases = [(rows,)] * draw(st.sampled_from([0, 2]))
        return make_call(kind, [(b, t, i), (rows, i), (rows, h), *biases], bidirectional=both)

    return build


def _cell(kind: str) -> Any:
    def build(draw: Draw) -> Call:
        b, i, h = draw(SIZES), draw(SIZES), draw(SIZES)
        states, rows = (2, 4 * h) if kind == "lstm_cell" else (1, 3 * h)
        biases = [(rows,)] * draw(st.sampled_from([0, 2]))
        return make_call(kind, [(b, i), *[(b, h)] * states, (rows, i), (rows, h), *biases])

    return build


def _router(draw: Draw) -> Call:
    return make_call("moe_router", [(*_shape(draw, 0, 2), k := draw(SIZES)), (draw(SIZES), k)])


def _dispatch(draw: Draw) -> Call:
    lead, k, e = _shape(draw, 0, 2), draw(SIZES), draw(SIZES)
    return make_call("moe_dispatch", [(*lead, k), (*lead, e)], top_k=draw(st.integers(1, e)))


def _combine(draw: Draw) -> Call:
    lead, k, e = _shape(draw, 0, 2), draw(SIZES), draw(SIZES)
    return make_call("moe_combine", [(e, math.prod(lead), k), (*lead, e)])


def _expert_linear(draw: Draw) -> Call:
    e, c, n, k = (draw(SIZES) for _ in range(4))
    bias = [(e, n)] if draw(st.booleans()) else []
    return make_call("expert_linear", [(e, c, k), (e, n, k), *bias])


def _class_loss(draw: Draw) -> Call:
    lead = _shape(draw, 0, 3)
    return make_call("cross_entropy", [(*lead, draw(SIZES)), lead])


def _pair_loss(draw: Draw) -> Call:
    return make_call("mse_loss", [_shape(draw)] * 2)


def _optimizer(draw: Draw) -> Call:
    return make_call("optimizer", [_shape(draw)] * draw(st.integers(2, 4)), rule="adamw")


def _state_space(draw: Draw) -> Call:
    b, t, groups, each = (draw(SIZES) for _ in range(4))
    size, state, heads = draw(SIZES), draw(SIZES), groups * each
    read, own = (b, t, groups * state), (heads,)
    inputs = [(b, t, heads * size), (b, t, heads), own, read, read, own, own]
    inputs += [(b, heads, size, state)] * draw(st.integers(0, 1))
    chunk = draw(st.sampled_from([1, 2, 4, 64]))
    return make_call("state_space", inputs, heads=heads, groups=groups, chunk=chunk)


_CALLS = {
    "linear": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "conv": _conv,
    "pool": _pool,
    "batch_norm": _channel_norm("batch_norm"),
    "group_norm": _channel_norm("group_norm"),
    "layer_norm": _last_norm("layer_norm"),
    "rms_norm": _last_norm("rms_norm"),
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
    "lstm": _recurrent("lstm"),
    "gru": _recurrent("gru"),
    "lstm_cell": _cell("lstm_cell"),
    "gru_cell": _cell("gru_cell"),
    "state_space": _state_space,
    "moe_router": _router,
    "moe_dispatch": _dispatch,
    "moe_combine": _combine,
    "expert_linear": _expert_linear,
    "cross_entropy": _class_loss,
    "mse_loss": _pair_loss,
    "optimizer": _optimizer,
}
KINDS = tuple(SHAPES)


def calls(kind: str) -> st.SearchStrategy[Call]:
    """Forward calls of one kind, small enough to run."""
    return st.composite(lambda draw: _CALLS[kind](draw))()
