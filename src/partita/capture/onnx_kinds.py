"""Which kind of op an ONNX operator is: `RULES[op_type](site)`.

A rule reads the node's attributes and known inputs and builds the op or ops it becomes. Where a use
is beyond the kind, the rule gives up and the node is carried as it is.
"""

import math
from collections.abc import Callable
from typing import Any

from partita.capture.onnx_contrib import QUANTIZED, rotary
from partita.capture.onnx_site import OnnxSite, OnnxUnfit
from partita.errors import FileError
from partita.graph.build import EPSILON
from partita.graph.record import Tensor

Rule = Callable[[OnnxSite], None]


def _elementwise(fn: str) -> Rule:
    def rule(site: OnnxSite) -> None:
        inputs = site.tensors()
        name = "scale" if fn in ("mul", "div") and len(inputs) == 1 else fn
        site.give("elementwise", *inputs, fn=name, dtype=site.out_dtype())

    return rule


def _identity(site: OnnxSite) -> None:
    site.same(site.tensor(0))


def _cast(site: OnnxSite) -> None:
    dtype = site.reader.element_type(site.attr("to"), site.node.output[0])
    site.give("elementwise", site.tensor(0), fn="cast", dtype=dtype)


def _dropout(site: OnnxSite) -> None:
    training = site.has(2) and bool(site.reader.value(site.inputs[2]))
    site.give("elementwise", site.tensor(0), fn="dropout" if training else "identity")


def _pads(
    site: OnnxSite, x: Tensor, kernel: tuple[int, ...], stride: list[int], dilation: list[int]
) -> tuple[Tensor, tuple[int, ...]]:
    """The input, padded where the two sides differ, and the padding that is left to the op."""
    rank = len(kernel)
    mode = site.attr("auto_pad", "NOTSET")
    pads = list(site.attr("pads", [0] * 2 * rank))
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        before, after = [], []
        for i in range(rank):
            size = x.shape[2 + i]
            steps = -(-size // stride[i])
            total = max(0, (steps - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1 - size)
            small, large = total // 2, total - total // 2
            before.append(small if mode == "SAME_UPPER" else large)
            after.append(large if mode == "SAME_UPPER" else small)
        pads = [*before, *after]
    elif mode == "VALID":
        pads = [0] * 2 * rank
    before, after = pads[:rank], pads[rank:]
    if before == after:
        return x, tuple(before)
    return site.part("padded", "pad", x, before=(0, 0, *before), after=(0, 0, *after)), (0,) * rank


def _conv(site: OnnxSite) -> None:
    x, w = site.tensor(0), site.tensor(1)
    kernel = w.shape[2:]
    if x.shape[1] != w.shape[1] * site.attr("group", 1):
        raise FileError(
            f"reads {x.shape[1]} channels, and its weights are for "
            f"{w.shape[1] * site.attr('group', 1)}",
            fix="give the sizes that the file leaves open by their names: "
            "model.onnx@num_channels=3,height=224,width=224",
        )
    stride = list(site.attr("strides", [1] * len(kernel)))
    dilation = list(site.attr("dilations", [1] * len(kernel)))
    x, padding = _pads(site, x, kernel, stride, dilation)
    bias = [site.tensor(2)] if site.has(2) else []
    site.give(
        "conv", x, w, *bias, stride=tuple(stride), padding=padding, dilation=tuple(dilation),
        groups=site.attr("group", 1),
    )  # fmt: skip


def _conv_transpose(site: OnnxSite) -> None:
    x, w = site.tensor(0), site.tensor(1)
    rank = len(w.shape) - 2
    pads = list(site.attr("pads", [0] * 2 * rank))
    if pads[:rank] != pads[rank:] or site.attr("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise OnnxUnfit
    bias = [site.tensor(2)] if site.has(2) else []
    site.give(
        "conv", x, w, *bias, transposed=True, groups=site.attr("group", 1),
        stride=tuple(site.attr("strides", [1] * rank)), padding=tuple(pads[:rank]),
        dilation=tuple(site.attr("dilations", [1] * rank)),
        output_padding=tuple(site.attr("output_padding", [0] * rank)),
    )  # fmt: skip


def _gemm(site: OnnxSite) -> None:
    a, b = site.tensor(0), site.tensor(1)
    flip_a, flip_b = bool(site.attr("transA", 0)), bool(site.attr("transB", 0))
    added = [site.tensor(2)] if site.has(2) else []
    if flip_b and not flip_a and all(t.shape == (b.shape[0],) for t in added):
        site.give("linear", a, b, *added)
        return
    product = {"transpose_a": flip_a, "transpose_b": flip_b}
    if not added:
        site.give("matmul", a, b, **product)
        return
    made = site.part("product", "matmul", a, b, **product)
    site.give("elementwise", made, *added, fn="add")


def _matmul(site: OnnxSite) -> None:
    a, b = site.tensor(0), site.tensor(1)
    if len(a.shape) >= 2 and len(b.shape) >= 2:
        site.give("matmul", a, b)
        return
    lead = "abcdefgh"[: max(len(a.shape), len(b.shape)) - 2]
    left = "k" if len(a.shape) == 1 else f"{lead}mk"
    right = "k" if len(b.shape) == 1 else f"{lead}kn"
    out = ("" if len(a.shape) == 1 else "m") + ("" if len(b.shape) == 1 else "n")
    site.give("einsum", a, b, equation=f"{left},{right}->{lead}{out}")


def _einsum(site: OnnxSite) -> None:
    site.give("einsum", *site.tensors(), equation=site.attr("equation").replace(" ", ""))


def _batch_norm(site: OnnxSite) -> None:
    x, scale, shift = (site.tensor(i) for i in range(3))
    site.give("batch_norm", x, scale, shift, training=bool(site.attr("training_mode", 0)))


def _instance_norm(site: OnnxSite) -> None:
    x, scale, shift = (site.tensor(i) for i in range(3))
    site.give("group_norm", x, scale, shift, groups=x.shape[1])


def _group_norm(site: OnnxSite) -> None:
    x, scale, shift = (site.tensor(i) for i in range(3))
    site.give("group_norm", x, scale, shift, groups=site.attr("num_groups"))


def _last_norm(kind: str) -> Rule:
    def rule(site: OnnxSite) -> None:
        x = site.tensor(0)
        axis = site.attr("axis", -1) % len(x.shape)
        weights = [site.tensor(i) for i in (1, 2) if site.has(i)]
        eps = site.attr("epsilon", EPSILON)
        more = {} if math.isclose(eps, EPSILON, rel_tol=1e-6) else {"eps": eps}  # a float32 there
        site.give(kind, x, *weights, dims=len(x.shape) - axis, **more)

    return rule


def _pool(mode: str) -> Rule:
    def rule(site: OnnxSite) -> None:
        kernel = tuple(site.attr("kernel_shape"))
        rank = len(kernel)
        stride = list(site.attr("strides", [1] * rank))
        dilation = list(site.attr("dilations", [1] * rank))
        if set(dilation) != {1}:
            raise OnnxUnfit
        x, padding = _pads(site, site.tensor(0), kernel, stride, dilation)
        site.give(
            "pool", x, kernel=kernel, stride=tuple(stride), padding=padding, mode=mode,
            ceil=bool(site.attr("ceil_mode", 0)),
        )  # fmt: skip

    return rule


def _global_pool(mode: str) -> Rule:
    def rule(site: OnnxSite) -> None:
        x = site.tensor(0)
        site.give("pool", x, output=(1,) * (len(x.shape) - 2), mode=mode)

    return rule


def _softmax(site: OnnxSite) -> None:
    default = -1 if site.opset >= 13 else 1
    log: dict[str, Any] = {"log": True} if site.kind == "LogSoftmax" else {}
    site.give("softmax", site.tensor(0), axis=site.attr("axis", default), **log)


def _concat(site: OnnxSite) -> None:
    parts = [site.tensor(i) for i in range(len(site.inputs)) if site.holds(i)]
    if len(parts) == 1:
        site.same(parts[0])
        return
    site.give("concat", *parts, axis=site.attr("axis"))


def _split(site: OnnxSite) -> None:
    x = site.tensor(0)
    axis = site.attr("axis", 0) % len(x.shape)
    sizes = site.numbers(1, "split")
    if sizes is None:
        count = len(site.node.output)
        each = -(-x.shape[axis] // count)
        sizes = [each] * (count - 1) + [x.shape[axis] - each * (count - 1)]
    site.give("split", x, axis=axis, sizes=tuple(sizes))


def _slice(site: OnnxSite) -> None:
    x = site.tensor(0)
    starts, ends = site.numbers(1, "starts"), site.numbers(2, "ends")
    axes = site.numbers(3, "axes")
    steps = site.numbers(4)
    if starts is None or ends is None:
        raise OnnxUnfit
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    pieces = list(zip(starts, ends, axes, steps, strict=True))
    for number, (start, end, axis, step) in enumerate(pieces):
        axis %= len(x.shape)
        if step < 0:
            raise OnnxUnfit
        first, last, _ = slice(start, end, step).indices(x.shape[axis])
        bounds = {"axis": axis, "start": first, "stop": last, "step": step}
        if number < len(pieces) - 1:
            x = site.part(f"axis{axis}", "slice", x, **bounds)
        else:
            site.give("slice", x, **bounds)


def _gather(site: OnnxSite) -> None:
    """Rows of a table are a lookup; one known index is a slice."""
    x = site.tensor(0)
    axis = site.attr("axis", 0) % len(x.shape)
    known = site.reader.value(site.inputs[1])
    if known is not None and known.size == 1:
        index = int(known.reshape(-1)[0]) % x.shape[axis]
        row = site.part("row", "slice", x, axis=axis, start=index, stop=index + 1)
        shape = (*x.shape[:axis], *known.shape, *x.shape[axis + 1 :])
        site.give("reshape", row, shape=shape)
    elif axis == 0 and len(x.shape) == 2:
        site.give("embedding", site.tensor(1), x, dtype=x.dtype)
    else:
        raise OnnxUnfit


def _reshape(site: OnnxSite) -> None:
    x = site.tensor(0)
    sizes = site.numbers(1, "shape")
    if sizes is None:
        raise OnnxUnfit
    if not site.attr("allowzero", 0):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    site.give("reshape", x, shape=tuple(sizes))


def _flatten(site: OnnxSite) -> None:
    x = site.tensor(0)
    axis = site.attr("axis", 1)
    axis = axis + len(x.shape) if axis < 0 else axis
    first = 1
    for size in x.shape[:axis]:
        first *= size
    site.give("reshape", x, shape=(first, -1))


def _squeeze(site: OnnxSite) -> None:
    x = site.tensor(0)
    axes = site.numbers(1, "axes")
    rank = len(x.shape)
    gone = (
        {i for i, s in enumerate(x.shape) if s == 1} if axes is None else {a % rank for a in axes}
    )
    site.give("reshape", x, shape=tuple(s for i, s in enumerate(x.shape) if i not in gone))


def _unsqueeze(site: OnnxSite) -> None:
    x = site.tensor(0)
    axes = site.numbers(1, "axes")
    if axes is None:
        raise OnnxUnfit
    rank = len(x.shape) + len(axes)
    new = {axis % rank for axis in axes}
    old = iter(x.shape)
    site.give("reshape", x, shape=tuple(1 if i in new else next(old) for i in range(rank)))


def _transpose(site: OnnxSite) -> None:
    x = site.tensor(0)
    site.give("transpose", x, perm=tuple(site.attr("perm", range(len(x.shape))[::-1])))


def _expand(site: OnnxSite) -> None:
    x = site.tensor(0)
    sizes = site.numbers(1)
    if sizes is None:
        raise OnnxUnfit
    rank = max(len(sizes), len(x.shape))
    own = (1,) * (rank - len(x.shape)) + x.shape
    asked = (1,) * (rank - len(sizes)) + tuple(sizes)
    site.give("expand", x, shape=tuple(max(a, b) for a, b in zip(own, asked, strict=True)))


def _pad(site: OnnxSite) -> None:
    x = site.tensor(0)
    pads = site.numbers(1, "pads")
    axes = site.numbers(3)
    if pads is None or min(pads) < 0:
        raise OnnxUnfit
    rank = len(x.shape)
    axes = list(range(rank)) if axes is None else [axis % rank for axis in axes]
    before, after = [0] * rank, [0] * rank
    for number, axis in enumerate(axes):
        before[axis], after[axis] = pads[number], pads[len(axes) + number]
    site.give("pad", x, before=tuple(before), after=tuple(after))


def _resize(site: OnnxSite) -> None:
    site.give(
        "resize", site.tensor(0), output=site.out_shape()[2:], mode=site.attr("mode", "nearest")
    )


def _reduce(fn: str) -> Rule:
    def rule(site: OnnxSite) -> None:
        x = site.tensor(0)
        axes = site.numbers(1, "axes")
        if axes is None and site.attr("noop_with_empty_axes", 0):
            site.same(x)
            return
        every = range(len(x.shape)) if axes is None else (axis % len(x.shape) for axis in axes)
        site.give("reduce", x, axes=tuple(every), keepdim=bool(site.attr("keepdims", 1)), fn=fn)

    return rule


def _arg(site: OnnxSite) -> None:
    axis, keep = site.attr("axis", 0), bool(site.attr("keepdims", 1))
    x = site.tensor(0)
    axes = (axis % len(x.shape),)
    site.give("reduce", x, axes=axes, keepdim=keep, fn=site.kind.lower(), dtype="i64")


def _where(site: OnnxSite) -> None:
    site.give("elementwise", *site.tensors(), fn="where", dtype=site.out_dtype())


def _constant(site: OnnxSite) -> None:
    site.give("constant", shape=site.out_shape(), dtype=site.out_dtype())


def _attention(site: OnnxSite) -> None:
    q, k, v = (site.tensor(i) for i in range(3))
    mask = [site.tensor(3)] if site.has(3) else []
    settings: dict[str, Any] = {"causal": bool(site.attr("is_causal", 0))}
    for name in ("scale", "softcap"):
        if site.attr(name, 0.0):
            settings[name] = site.attr(name)
    if site.holds(4):  # keys and values of earlier calls
        if len(q.shape) == 3:
            raise OnnxUnfit
        k = site.part("k.all", "concat", site.tensor(4), k, axis=2)
        v = site.part("v.all", "concat", site.tensor(5), v, axis=2)
    if len(q.shape) == 3:
        settings |= {"heads": site.attr("q_num_heads"), "kv_heads": site.attr("kv_num_heads")}
    site.give("attention", q, k, v, *mask, **settings)
    if len(q.shape) == 4:
        site.also(1, k)
        site.also(2, v)


def _recurrent(site: OnnxSite) -> None:
    recurrent_layer(site, site.kind.lower(), *(site.tensor(i) for i in range(3)))


def recurrent_layer(site: OnnxSite, kind: str, x: Tensor, w: Tensor, r: Tensor) -> None:
    """x [t, b, i], w [directions, gates * h, i], r; input 3 is b [directions, 2 * gates * h]."""
    if site.attr("layout", 0):
        raise OnnxUnfit
    directions, rows, _ = w.shape
    both = directions == 2
    given = [i for i in (5, 6) if site.has(i)]
    states = [site.tensor(i) for i in given if site.reader.value(site.inputs[i]) is None]
    if states:
        x = site.opaque("start", f"{kind}_start", (x, *states), x.shape)
    x = site.part("first", "transpose", x, perm=(1, 0, 2))
    weights = [
        site.part(part, "reshape", t, shape=(directions * rows, t.shape[2]))
        for part, t in (("weight_ih", w), ("weight_hh", r))
    ]
    if site.has(3):
        b = site.tensor(3)
        for number, part in enumerate(("ih", "hh")):
            start = number * rows
            half = site.part(f"half_{part}", "slice", b, axis=1, start=start, stop=start + rows)
            flat = site.part(f"bias_{part}", "reshape", half, shape=(directions * rows,))
            weights.append(flat)
    layer = site.part("layer", kind, x, *weights, bidirectional=both)
    batch, steps, width = layer.shape
    apart = site.part(
        "apart", "reshape", layer, shape=(batch, steps, directions, width // directions)
    )
    site.give("transpose", apart, perm=(1, 2, 0, 3))


def _class_loss(site: OnnxSite) -> None:
    logits, targets = site.tensor(0), site.tensor(1)
    if len(logits.shape) > 2:
        perm = (0, *range(2, len(logits.shape)), 1)
        logits = site.part("last", "transpose", logits, perm=perm)
    site.give("cross_entropy", logits, targets)


FUNCTIONS = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Neg": "neg", "Sum": "add",
    "Relu": "relu", "LeakyRelu": "leaky_relu", "Elu": "elu", "Gelu": "gelu", "Sigmoid": "sigmoid",
    "Tanh": "tanh", "HardSwish": "hardswish", "HardSigmoid": "hardsigmoid", "Softplus": "softplus",
    "Swish": "silu", "Mish": "mish", "Selu": "selu", "Exp": "exp", "Log": "log", "Sqrt": "sqrt",
    "Reciprocal": "reciprocal", "Sin": "sin", "Cos": "cos", "Erf": "erf", "Abs": "abs",
    "Pow": "pow", "Max": "max", "Min": "min", "Clip": "clip", "Floor": "floor", "Ceil": "ceil",
    "Round": "round", "Sign": "sign", "Mod": "mod", "PRelu": "leaky_relu", "Trilu": "mask",
    **dict.fromkeys(
        ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "Not",
         "IsNaN", "IsInf"),
        "compare",
    ),
}  # fmt: skip
RULES: dict[str, Rule] = {
    **{name: _elementwise(fn) for name, fn in FUNCTIONS.items()},
    **{f"Reduce{name}": _reduce(name.lower()) for name in ("Sum", "Mean", "Max", "Min", "Prod")},
    "ReduceL2": _reduce("norm"),
    "ReduceLogSumExp": _reduce("logsumexp"),
    "ArgMax": _arg,
    "ArgMin": _arg,
    "Identity": _identity,
    "Cast": _cast,
    "Dropout": _dropout,
    "Where": _where,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Einsum": _einsum,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "LayerNormalization": _last_norm("layer_norm"),
    "RMSNormalization": _last_norm("rms_norm"),
    "SimplifiedLayerNormalization": _last_norm("rms_norm"),
    "MaxPool": _pool("max"),
    "AveragePool": _pool("avg"),
    "GlobalMaxPool": _global_pool("max"),
    "GlobalAveragePool": _global_pool("avg"),
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Expand": _expand,
    "Pad": _pad,
    "Resize": _resize,
    "Upsample": _resize,
    "ConstantOfShape": _constant,
    "Range": _constant,
    "Attention": _attention,
    "RotaryEmbedding": rotary,
    **QUANTIZED,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "SoftmaxCrossEntropyLoss": _class_loss,
}
