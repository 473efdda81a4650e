"""Which kind of op a PyTorch operation is: `RULES[operation](site)`.

A rule reads the node's arguments and says the op, or the ops, that it becomes. Where a use of the
operation is beyond the kind (a dilated pooling), the rule gives up and the node is carried as is.
"""

import string
from collections.abc import Callable
from typing import Any

import torch

from partita.capture.torch_program import Ref, TensorSpec, TorchNode
from partita.capture.translate import TorchSite, TorchUnfit
from partita.graph.build import EPSILON

Rule = Callable[[TorchSite], None]


def rule_by_tag(node: TorchNode) -> Rule | None:
    """PyTorch marks operations that work element by element; their names are what they do."""
    tags = getattr(node.target, "tags", ())
    return _elementwise if torch.Tag.pointwise in tags else None


def _each(value: Any, rank: int) -> tuple[int, ...]:
    numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
    return numbers * rank if len(numbers) == 1 else numbers


def _elementwise(site: TorchSite) -> None:
    name = site.operation
    inputs = site.all_tensors()
    fn = FUNCTIONS.get(name, name)
    if fn == "mul" and len(inputs) == 1 and len(site.node.reads) == 1:
        fn = "scale"
        if site.node.args[0] == site.node.args[1]:
            fn = "square"
    site.give("elementwise", inputs, fn=fn)


def _div(site: TorchSite) -> None:
    inputs = site.all_tensors()
    site.give("elementwise", inputs, fn="scale" if len(inputs) == 1 else "div")


def _pow(site: TorchSite) -> None:
    squared = site.has("exponent") and site["exponent"] == 2
    site.give("elementwise", site.all_tensors(), fn="square" if squared else "pow")


def _max(site: TorchSite) -> None:
    """`max` has three meanings: of two tensors, of all elements, along a dim with the indices."""
    if site.has("other"):
        site.give("elementwise", site.all_tensors(), fn=site.operation)
    else:
        _reduce(site)


def _cast(site: TorchSite) -> None:
    (source,) = site.all_tensors()[:1]
    read, made = _first(site), site.values[0]
    unchanged = made.dtype == read.dtype and made.storage == read.storage
    site.give("elementwise", [source], fn="identity" if unchanged else "cast")


def _first(site: TorchSite) -> TensorSpec:
    """What is known of the first tensor that is read."""
    spec = site.spec_of(site.node.reads[0])
    if not isinstance(spec, TensorSpec):
        raise TorchUnfit
    return spec


def _detach(site: TorchSite) -> None:
    site.give("elementwise", site.all_tensors(), fn="identity", detach=True)


def _dropout(site: TorchSite) -> None:
    active = site["train"] is not False and site["p"] > 0
    inputs = site.tensors("input")
    site.give("elementwise", inputs, outputs=1, fn="dropout" if active else "identity")


def _linear(site: TorchSite) -> None:
    site.give("linear", site.tensors("input", "weight", "bias"))


def _matmul(site: TorchSite) -> None:
    a, b = site.all_tensors() if len(site.all_tensors()) == 2 else site.all_tensors() * 2
    x, y = len(site.shape_of(a)), len(site.shape_of(b))
    if x >= 2 and y >= 2:
        site.give("matmul", [a, b])
        return
    lead = string.ascii_lowercase[: max(x, y) - 2]
    left = "k" if x == 1 else f"{lead}mk"
    right = "k" if y == 1 else f"{lead}kn"
    out = ("" if x == 1 else "m") + ("" if y == 1 else "n")
    site.give("einsum", [a, b], equation=f"{left},{right}->{lead}{out}")


def _outer(site: TorchSite) -> None:
    site.give("einsum", site.all_tensors(), equation="m,n->mn")


def _product_and_sum(first: str, second: str) -> Rule:
    """`addmm` and its kin: a product, to which a tensor is added."""

    def rule(site: TorchSite) -> None:
        a, b = site.tensor(site[first]), site.tensor(site[second])
        product = site.part("product", "matmul", [a, b])
        site.give("elementwise", [product, *site.tensors("self", "input")[:1]], fn="add")

    return rule


def _einsum(site: TorchSite) -> None:
    tensors = [site.tensor(value) for value in site["tensors"]]
    left, arrow, right = site["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    ranks = [len(site.shape_of(name)) for name in tensors]
    free = [c for c in string.ascii_uppercase if c not in left + right]
    dots = max((r - len(t) + 3 for t, r in zip(terms, ranks, strict=True) if "..." in t), default=0)
    spelled = [
        term.replace("...", "".join(free[dots - (rank - len(term) + 3) : dots]))
        for term, rank in zip(terms, ranks, strict=True)
    ]
    if arrow:
        out = right.replace("...", "".join(free[:dots]))
    else:
        once = sorted(c for c in set(left) - set(".,") if left.count(c) == 1)
        out = "".join(free[:dots]) + "".join(once)
    site.give("einsum", tensors, equation=f"{','.join(spelled)}->{out}")


def _conv(site: TorchSite) -> None:
    name = site.operation
    x, weight = site.tensors("input", "weight")
    kernel = site.shape_of(weight)[2:]
    rank = len(kernel)
    transposed = "transpose" in name or (site.has("transposed") and bool(site["transposed"]))
    if len(site.shape_of(x)) != rank + 2:
        raise TorchUnfit
    dilation = _each(site["dilation"], rank)
    padding = site["padding"]
    if padding == "valid":
        padding = 0
    elif padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(r % 2 for r in reach):
            before = (0, 0, *(r // 2 for r in reach))
            after = (0, 0, *(r - r // 2 for r in reach))
            x = site.part("padded", "pad", [x], before=before, after=after)
            reach = [0] * rank
        padding = tuple(r // 2 for r in reach)
    attrs: dict[str, Any] = {
        "stride": _each(site["stride"], rank),
        "padding": _each(padding, rank),
        "dilation": dilation,
        "groups": site["groups"],
    }
    if transposed:
        attrs |= {"transposed": True, "output_padding": _each(site["output_padding"], rank)}
    site.give("conv", [x, weight, *site.tensors("bias")], **attrs)


def _pool(mode: str) -> Rule:
    def rule(site: TorchSite) -> None:
        (x,) = site.tensors("self")
        rank = len(site.shape_of(x)) - 2
        if site.has("dilation") and set(_each(site["dilation"], rank)) != {1}:
            raise TorchUnfit
        kernel = _each(site["kernel_size"], rank)
        stride = _each(site["stride"] or kernel, rank)
        site.give(
            "pool", [x], outputs=1, kernel=kernel, stride=stride,
            padding=_each(site["padding"], rank), mode=mode, ceil=bool(site["ceil_mode"]),
        )  # fmt: skip

    return rule


def _adaptive(mode: str) -> Rule:
    def rule(site: TorchSite) -> None:
        site.give("pool", site.tensors("self"), outputs=1, output=site.shape[2:], mode=mode)

    return rule


def _batch_norm(site: TorchSite) -> None:
    training = site["training"] if site.has("training") else True
    site.give(
        "batch_norm", site.tensors("input", "weight", "bias"), outputs=1, training=bool(training)
    )


def _instance_norm(site: TorchSite) -> None:
    inputs = site.tensors("input", "weight", "bias")
    site.give("group_norm", inputs, groups=site.shape[1])


def _group_norm(site: TorchSite) -> None:
    groups = site["num_groups"] if site.has("num_groups") else site["group"]
    inputs = site.tensors("input", "weight", "bias")
    site.give("group_norm", inputs, outputs=1, groups=groups)


def _last_norm(kind: str) -> Rule:
    def rule(site: TorchSite) -> None:
        inputs = site.tensors("input", "weight", "bias")
        dims = len(site["normalized_shape"])
        site.give(kind, inputs, outputs=1, dims=dims, **_epsilon(site))

    return rule


def _epsilon(site: TorchSite) -> dict[str, Any]:
    """What a norm adds to the variance, if it is not what norms add unless they say otherwise."""
    eps = site["eps"]
    if eps is None:  # that of the numbers themselves
        eps = torch.finfo(site.values[0].dtype).eps
    return {} if eps == EPSILON else {"eps": float(eps)}


def _softmax(site: TorchSite) -> None:
    attrs: dict[str, Any] = {"log": True} if "log" in site.operation else {}
    site.give("softmax", site.tensors("self"), axis=site["dim"], **attrs)


def _attention(site: TorchSite) -> None:
    q, k, v = site.tensors("query", "key", "value")
    mask = site.tensors("attn_mask")
    causal = bool(site["is_causal"])
    rank = len(site.shape_of(q))
    if rank == 4:
        site.give("attention", [q, k, v, *mask], causal=causal)
        return
    if mask or rank < 2:
        raise TorchUnfit
    wide = [
        site.part(part, "reshape", [name], shape=_four(site.shape_of(name)))
        for part, name in (("q", q), ("k", k), ("v", v))
    ]
    mixed = site.part("mixed", "attention", wide, causal=causal)
    site.give("reshape", [mixed], shape=site.shape)


def _four(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[batch, heads, positions, size]: everything before the last three is the batch."""
    batch = 1
    for size in shape[:-3]:
        batch *= size
    return (batch, *((1,) * (3 - len(shape[-3:]))), *shape[-3:])


def _embedding(site: TorchSite) -> None:
    site.give("embedding", [site.tensor(site["indices"]), site.tensor(site["weight"])])


def _index(site: TorchSite) -> None:
    """A table indexed along its rows by one tensor of whole numbers is a lookup."""
    indices = site["indices"]
    table = site.tensor(site["self"])
    first = indices[0]
    whole = isinstance(first, Ref) and site.spec_of(first.name).dtype != torch.bool
    if len(indices) != 1 or len(site.shape_of(table)) != 2 or not whole:
        raise TorchUnfit
    site.give("embedding", [site.tensor(indices[0]), table])


def _index_select(site: TorchSite) -> None:
    if site["dim"] != 0:
        raise TorchUnfit
    site.give("embedding", [site.tensor(site["index"]), site.tensor(site["self"])])


def _reduce(site: TorchSite) -> None:
    (x,) = site.tensors("self", "input")[:1]
    rank = len(site.shape_of(x))
    dims = site["dim"] if site.has("dim") else None
    dims = [dims] if isinstance(dims, int) else dims
    axes = tuple(dim % max(rank, 1) for dim in dims) if dims else tuple(range(rank))
    keep = bool(site["keepdim"]) if site.has("keepdim") else False
    fn = REDUCTIONS.get(site.operation, site.operation)
    site.give("reduce", [x], outputs=1, axes=axes, keepdim=keep, fn=fn)


def _concat(site: TorchSite) -> None:
    parts = [site.tensor(value) for value in site["tensors"]]
    site.give("concat", parts, axis=site["dim"] if site.has("dim") else 0)


def _stack(site: TorchSite) -> None:
    axis = site["dim"] % len(site.shape)
    parts = []
    for i, value in enumerate(site["tensors"]):
        name = site.tensor(value)
        shape = site.shape_of(name)
        wide = (*shape[:axis], 1, *shape[axis:])
        parts.append(site.part(f"part{i}", "reshape", [name], shape=wide))
    site.give("concat", parts, axis=axis)


def _split(site: TorchSite) -> None:
    axis = site["dim"]
    sizes = tuple(int(value.shape[axis]) for value in site.values)
    if len(sizes) == 1:
        site.give_parts(site.tensors("self"))  # nothing is split
        return
    site.give("split", site.tensors("self"), axis=axis, sizes=sizes)


def _unbind(site: TorchSite) -> None:
    (x,) = site.tensors("self")
    axis = site["dim"] % len(site.shape_of(x))
    names = []
    for i in range(len(site.values)):
        piece = site.part(f"piece{i}", "slice", [x], axis=axis, start=i, stop=i + 1)
        names.append(site.part(str(i), "reshape", [piece], shape=site.shape))
    site.give_parts(names)


def _slice(site: TorchSite) -> None:
    (x,) = site.tensors("self")
    axis = site["dim"] % len(site.shape_of(x))
    size = site.shape_of(x)[axis]
    start, stop, step = slice(site["start"], site["end"], site["step"]).indices(size)
    site.give("slice", [x], axis=axis, start=start, stop=stop, step=step)


def _narrow(site: TorchSite) -> None:
    (x,) = site.tensors("self")
    axis, start = site["dim"] % len(site.shape_of(x)), site["start"]
    if not isinstance(start, int):
        raise TorchUnfit
    start %= site.shape_of(x)[axis]
    site.give("slice", [x], axis=axis, start=start, stop=start + site["length"])


def _select(site: TorchSite) -> None:
    (x,) = site.tensors("self")
    axis = site["dim"] % len(site.shape_of(x))
    index = site["index"] % site.shape_of(x)[axis]
    row = site.part("row", "slice", [x], axis=axis, start=index, stop=index + 1)
    site.give("reshape", [row], shape=site.shape)


def _slice_scatter(site: TorchSite) -> None:
    """A whole with some rows replaced is what lies before them, the rows, and what lies after."""
    whole, rows = site.tensor(site["self"]), site.tensor(site["src"])
    axis = site["dim"] % len(site.shape)
    bounds = slice(site["start"], site["end"], site["step"]).indices(site.shape[axis])
    _replace_rows(site, whole, rows, axis, *bounds)


def _select_scatter(site: TorchSite) -> None:
    whole, row = site.tensor(site["self"]), site.tensor(site["src"])
    axis = site["dim"] % len(site.shape)
    index = site["index"] % site.shape[axis]
    shape = site.shape_of(row)
    wide = site.part("row", "reshape", [row], shape=(*shape[:axis], 1, *shape[axis:]))
    _replace_rows(site, whole, wide, axis, index, index + 1, 1)


def _replace_rows(
    site: TorchSite, whole: str, rows: str, axis: int, start: int, stop: int, step: int
) -> None:
    if step != 1:
        raise TorchUnfit
    size = site.shape[axis]
    parts = [rows]
    if start > 0:
        parts.insert(0, site.part("before", "slice", [whole], axis=axis, start=0, stop=start))
    if stop < size:
        parts.append(site.part("after", "slice", [whole], axis=axis, start=stop, stop=size))
    site.give("concat", parts, axis=axis)


def _written(site: TorchSite) -> None:
    site.give("elementwise", [site.tensor(site["src"])], fn="cast")


def _reshape(site: TorchSite) -> None:
    site.give("reshape", site.all_tensors()[:1], shape=site.shape)


def _transpose(site: TorchSite) -> None:
    (x,) = site.all_tensors()
    rank = len(site.shape_of(x))
    marked = torch.empty(tuple(range(2, 2 + rank)), device="meta")  # sizes that tell the dims apart
    args = [marked if isinstance(value, Ref) else value for value in site.node.args]
    moved = site.node.target(*args)
    site.give("transpose", [x], perm=tuple(size - 2 for size in moved.shape))


def _expand(site: TorchSite) -> None:
    site.give("expand", site.all_tensors()[:1], shape=site.shape)


def _broadcast(site: TorchSite) -> None:
    names = []
    for i, value in enumerate(site["tensors"]):
        name = site.tensor(value)
        if site.shape_of(name) != site.shape:
            name = site.part(str(i), "expand", [name], shape=site.shape)
        names.append(name)
    site.give_parts(names)


def _repeat(site: TorchSite) -> None:
    """Repeating what has size 1 is expanding it; other repetitions are carried."""
    (x,) = site.tensors("self")
    times = site["repeats"] if site.has("repeats") else site["dims"]
    shape = (1,) * (len(times) - len(site.shape_of(x))) + site.shape_of(x)
    if any(size > 1 and count > 1 for size, count in zip(shape, times, strict=True)):
        raise TorchUnfit
    wide = site.part("wide", "reshape", [x], shape=shape)
    site.give("expand", [wide], shape=site.shape)


def _pad(site: TorchSite) -> None:
    (x,) = site.tensors("self")
    sizes = list(site["pad"] if site.has("pad") else site["padding"])
    rank = len(site.shape_of(x))
    if min(sizes) < 0:
        raise TorchUnfit
    before, after = sizes[::2][::-1], sizes[1::2][::-1]
    lead = [0] * (rank - len(before))
    site.give("pad", [x], before=(*lead, *before), after=(*lead, *after))


def _resize(site: TorchSite) -> None:
    mode = site.operation.removeprefix("_").removeprefix("upsample_").rstrip("123d")
    inputs = site.tensors("input", "self")
    site.give("resize", inputs, output=site.shape[2:], mode=mode)


def _constant(site: TorchSite) -> None:
    site.give("constant", [], shape=site.shape)


def _mask(site: TorchSite) -> None:
    site.give("elementwise", site.all_tensors(), fn="mask")


def _class_loss(site: TorchSite) -> None:
    logits, targets = site.tensor(site["self"]), site.tensor(site["target"])
    shape = site.shape_of(logits)
    if len(shape) > 2:  # PyTorch has the classes second, a Graph last
        perm = (0, *range(2, len(shape)), 1)
        logits = site.part("last", "transpose", [logits], perm=perm)
    site.give("cross_entropy", [logits, targets])


def _pair_loss(site: TorchSite) -> None:
    site.give("mse_loss", site.tensors("self", "target"))


def _recurrent(site: TorchSite) -> None:
    kind = site.operation
    states = site["hx"] if isinstance(site["hx"], list | tuple) else [site["hx"]]
    x = site.tensor(site["input"])
    if site["num_layers"] != 1 or len(site.shape_of(x)) != 3:
        raise TorchUnfit
    weights = [site.tensor(value) for value in site["params"]]
    each = 4 if site["has_biases"] else 2
    both = bool(site["bidirectional"])
    if len(weights) != each * (2 if both else 1):
        raise TorchUnfit  # a projection
    given = [site.tensor(value) for value in states]
    learned = [name for name in given if not site.is_constant(name)]
    if learned:
        x = site.part("start", f"{kind}_start", [x, *learned], like=_first(site))
    if not site["batch_first"]:
        x = site.part("first", "transpose", [x], perm=(1, 0, 2))
    if both:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[:each]
        weights = [
            site.part(name, "concat", [weights[i], weights[each + i]], axis=0)
            for i, name in enumerate(names)
        ]
    if site["batch_first"]:
        site.give(kind, [x, *weights], outputs=1, bidirectional=both)
    else:
        layer = site.part("layer", kind, [x, *weights], bidirectional=both)
        site.give("transpose", [layer], outputs=1, perm=(1, 0, 2))


def _cell(site: TorchSite) -> None:
    states = site["hx"] if isinstance(site["hx"], list | tuple) else [site["hx"]]
    weights = site.tensors("w_ih", "w_hh", "b_ih", "b_hh")
    inputs = [site.tensor(site["input"]), *(site.tensor(state) for state in states)]
    site.give(site.operation, [*inputs, *weights])


# Elementwise functions whose name differs from PyTorch's.
FUNCTIONS = {
    "maximum": "max", "minimum": "min", "clamp": "clip", "clamp_min": "clip", "clamp_max": "clip",
    "hardtanh": "clip", "rsub": "sub", "log1p": "log", "log2": "log", "log10": "log",
    "expm1": "exp", "exp2": "exp", "softplus": "softplus", "bitwise_not": "compare",
    "logical_not": "compare", "logical_and": "compare", "logical_or": "compare",
    "logical_xor": "compare", "bitwise_and": "compare", "bitwise_or": "compare", "eq": "compare",
    "ne": "compare", "lt": "compare", "le": "compare", "gt": "compare", "ge": "compare",
    "isnan": "compare", "isinf": "compare", "isfinite": "compare", "true_divide": "div",
}  # fmt: skip
REDUCTIONS = {"amax": "max", "amin": "min"}


def _grouped_mm(site: TorchSite) -> None:
    """Rows sorted by group, each times the matrix of its group: what experts compute."""
    inputs = site.all_tensors()
    shapes = [site.shape_of(name) for name in inputs[:2]]
    if len(inputs) != 3 or [len(shape) for shape in shapes] != [2, 3]:
        raise TorchUnfit
    site.give("grouped_mm", inputs, known=False)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("add", "sub", "rsub", "mul", "neg", "relu", "relu6", "leaky_relu", "elu", "gelu", "silu",
         "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh", "softplus", "exp", "log",
         "sqrt", "rsqrt", "reciprocal", "sin", "cos", "erf", "abs", "square", "where", "selu",
         "mish", "log_sigmoid", "clamp", "maximum", "minimum", "floor_divide", "remainder",
         "fmod", *FUNCTIONS),
        _elementwise,
    ),
    **dict.fromkeys(("div", "true_divide"), _div),
    **dict.fromkeys(("masked_fill", "tril", "triu", "fill", "zero"), _mask),
    **dict.fromkeys(
        ("to", "_to_copy", "clone", "contiguous", "type_as", "lift_fresh_copy", "alias", "lift",
         "float", "double", "half", "positive", "resolve_conj", "resolve_neg"),
        _cast,
    ),
    **dict.fromkeys(
        ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout"),
        _dropout,
    ),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "vdot"), _matmul),
    **dict.fromkeys(("_grouped_mm", "transformers.grouped_mm_fallback"), _grouped_mm),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d",
                     "conv_transpose2d", "conv_transpose3d"), _conv),
    **{f"max_pool{n}d": _pool("max") for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": _pool("max") for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _pool("avg") for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _adaptive("avg") for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": _adaptive("max") for n in (1, 2, 3)},
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "prod", "any", "all", "argmax", "argmin", "var", "std",
         "logsumexp", "norm", "linalg_vector_norm", "median", "count_nonzero"),
        _reduce,
    ),
    **dict.fromkeys(("cat", "concat", "concatenate"), _concat),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk",
                     "unsafe_split"), _split),
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "_unsafe_view",
         "view_as", "reshape_as", "ravel"),
        _reshape,
    ),
    **dict.fromkeys(
        ("transpose", "permute", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T",
         "mT", "mH", "adjoint"),
        _transpose,
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(
        ("pad", "constant_pad_nd", *(f"{kind}_pad{n}d" for n in (1, 2, 3)
                                     for kind in ("reflection", "replication"))),
        _pad,
    ),
    **dict.fromkeys(
        ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
         "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
         "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
         "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        _resize,
    ),
    **dict.fromkeys(
        ("zeros", "ones", "full", "empty", "arange", "linspace", "eye", "rand", "randn", "randint",
         "randperm", "scalar_tensor", "zeros_like", "ones_like", "full_like", "empty_like",
         "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_empty",
         "tril_indices", "triu_indices"),
        _constant,
    ),
    "pow": _pow,
    "max": _max,
    "min": _max,
    "detach": _detach,
    "linear": _linear,
    "outer": _outer,
    "addmm": _product_and_sum("mat1", "mat2"),
    "addbmm": _product_and_sum("batch1", "batch2"),
    "baddbmm": _product_and_sum("batch1", "batch2"),
    "einsum": _einsum,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm": _last_norm("layer_norm"),
    "rms_norm": _last_norm("rms_norm"),
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    "index": _index,
    "index_select": _index_select,
    "stack": _stack,
    "broadcast_tensors": _broadcast,
    "unbind": _unbind,
    "slice": _slice,
    "narrow": _narrow,
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "copy_": _written,
    "select": _select,
    "cross_entropy_loss": _class_loss,
    "nll_loss_nd": _class_loss,
    "nll_loss": _class_loss,
    "mse_loss": _pair_loss,
    "lstm": _recurrent,
    "gru": _recurrent,
    "lstm_cell": _cell,
    "gru_cell": _cell,
}  # fmt: skip
