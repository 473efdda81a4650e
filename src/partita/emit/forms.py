"""The table of forms: how a person would write each operator.

A form gives the expression, or None where the arguments are not the usual ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.emit.arguments import Written
from partita.emit.constants import tensor_literal
from partita.emit.size import Size
from partita.emit.steps import EmittedValue
from partita.emit.text import Expr, call, literal

MAX_INDEX = 2**63 - 1

Form = Callable[[Written], Expr | None]


def _infix(sign: str) -> Form:
    def form(it: Written) -> Expr | None:
        first, second = it.schema[0].name, it.schema[1].name
        left, right = it.raw(first), it.raw(second)
        extra = {argument.name for argument in it.schema[2:]} & it.given.keys()
        if extra or isinstance(right, bool) or not isinstance(left, EmittedValue):
            return None
        if isinstance(right, float) and right != right:
            return None
        return f"{it.text(first)} {sign} {it.text(second)}"

    return form


def _power(it: Written) -> Expr | None:
    base, exponent = it.raw("self"), it.raw("exponent")
    if not isinstance(base, EmittedValue) or isinstance(exponent, bool | EmittedValue):
        return None
    name = it.text("self")
    space = "" if name.replace(".", "").replace("_", "").isalnum() else " "
    return f"{name}{space}**{space}{it.text('exponent')}"


def _reversed_minus(it: Written) -> Expr | None:
    if it.raw("alpha") != 1 or isinstance(it.raw("other"), EmittedValue):
        return None
    return f"{it.text('other')} - {it.text('self')}"


def method(it: Written) -> Expr:
    """`x.name(...)`."""
    args, kwargs = it.rest(it.schema[0].name)
    return call(f"{it(it.schema[0].name)}.{it.packet}", args, kwargs)


def _spread(list_name: str) -> Form:
    """`x.view(2, 3)`: a method whose list of sizes is written out."""

    def form(it: Written) -> Expr | None:
        sizes = it.raw(list_name)
        others = {a.name for a in it.schema[1:] if a.name != list_name} & it.given.keys()
        if others or not isinstance(sizes, list | tuple):
            return method(it)
        return call(f"{it('self')}.{it.packet}", [it.expr(size) for size in sizes])

    return form


def _reshaped(list_name: str) -> Form:
    """`x.view(2, 3)` by the sizes that matter: features that stay what they are have no number.

    `x.flatten(0, -2)` and `x.view(batch, length, -1)`, so that layers of other sizes read alike.
    """
    plain = _spread(list_name)

    def form(it: Written) -> Expr | None:
        sizes, x = it.raw(list_name), it.raw("self")
        written = plain(it)
        if not isinstance(sizes, list | tuple) or not isinstance(x, EmittedValue):
            return written
        own = x.meta.shape
        if len(sizes) < 2 or not own or type(sizes[-1]) is not int or sizes[-1] != own[-1]:
            return written
        if list(sizes[:-1]) == [-1] and len(own) > 2:
            return call(f"{it('self')}.flatten", [literal(0), literal(-2)])
        if all(isinstance(size, Size) for size in sizes[:-1]):
            others = [it.expr(size) for size in sizes[:-1]]
            return call(f"{it('self')}.{it.packet}", [*others, literal(-1)])
        return written

    return form


def _functional(*names: str, name: str = "") -> Form:
    """`F.name(...)` with the operator's arguments in this order, those left out at the end."""

    known = {*names, "cudnn_enable", "cudnn_enabled"}

    def form(it: Written) -> Expr | None:
        others = [a for a in it.schema if a.name in it.given and a.name not in known]
        if not all(it.is_default(argument) for argument in others):
            return None
        args, kwargs = _ordered(it, names)
        return call(f"F.{name or it.packet}", args, kwargs)

    return form


def _ordered(it: Written, names: Sequence[str]) -> tuple[list[Expr], dict[str, Expr]]:
    """Needed arguments and tensors by position, settings by name, defaults not at all."""
    args: list[Expr] = []
    kwargs: dict[str, Expr] = {}
    in_order = True
    for name in names:
        argument = next(a for a in it.schema if a.name == name)
        if name not in it.given or it.is_default(argument):
            in_order = False
        elif in_order and (
            not argument.has_default_value() or isinstance(it.raw(name), EmittedValue)
        ):
            args.append(it(name))
        else:
            in_order = False
            kwargs[name] = it(name)
    return args, kwargs


def _conv(it: Written) -> Expr | None:
    return call(f"F.{it.packet}", *_ordered(it, [a.name for a in it.schema]))


def _dropout(it: Written) -> Expr | None:
    args = [it("input"), it("p")]
    return call(f"F.{it.packet}", args, {"training": it.flag("train")})


def _batch_norm(it: Written) -> Expr | None:
    args = [it("input"), it("running_mean"), it("running_var"), it("weight"), it("bias")]
    training = it.flag("training") if it.raw("running_mean") is not None else literal(True)
    kwargs = {"training": training, "momentum": it("momentum"), "eps": it("eps")}
    return call("F.batch_norm", args, kwargs)


def _embedding(it: Written) -> Expr | None:
    if it.raw("scale_grad_by_freq") or it.raw("sparse"):
        return None
    padding = it.raw("padding_idx")
    kwargs: dict[str, Expr] = {} if padding == -1 else {"padding_idx": literal(padding)}
    return call("F.embedding", [it("indices"), it("weight")], kwargs)


_REDUCTIONS = ("none", "mean", "sum")


def _loss(name: str, *names: str) -> Form:
    """Losses: the number of the reduction is written as its word."""

    def form(it: Written) -> Expr | None:
        args, kwargs = _ordered(it, ["self", "target", *names])
        if it.raw("reduction") != 1:
            kwargs["reduction"] = literal(_REDUCTIONS[it.raw("reduction")])
        return call(f"F.{name}", args, kwargs)

    return form


def _attention(it: Written) -> Expr | None:
    args, kwargs = it.rest("dropout_p")
    drop = it.raw("dropout_p")
    if drop:
        shown = f"{drop!r} if self.training else 0.0" if it.env.training else literal(drop)
        kwargs = {"dropout_p": shown, **kwargs}
    return call("F.scaled_dot_product_attention", args, kwargs)


def _subscript(dim: int, index: str, rank: int) -> str | None:
    if dim < 0:
        dim += rank
    if not 0 <= dim < rank:
        return None
    if dim == rank - 1 and dim > 1:
        return f"..., {index}"
    return ":, " * dim + index


def _rank(value: Any) -> int:
    return len(value.meta.shape)


def _slice(it: Written) -> Expr | None:
    low, high = _bound(it, "start", 0), _bound(it, "end", MAX_INDEX)
    hop = "" if it.raw("step") == 1 else f":{it('step')}"
    place = _subscript(it.raw("dim"), f"{low}:{high}{hop}", _rank(it.raw("self")))
    return None if place is None else f"{it('self')}[{place}]"


def _bound(it: Written, name: str, left_out: int) -> str:
    """An end of a slice; one that follows a size is written even if it happens to be 0."""
    value = it.raw(name)
    is_left_out = value is None or (value == left_out and not isinstance(value, Size))
    return "" if is_left_out else str(it(name))


def _select(it: Written) -> Expr | None:
    place = _subscript(it.raw("dim"), it.text("index"), _rank(it.raw("self")))
    return None if place is None else f"{it('self')}[{place}]"


def _index(it: Written) -> Expr | None:
    places = [":" if i is None else str(it.expr(i)) for i in it.raw("indices")]
    return f"{it('self')}[{', '.join(places)}]"


def _split(it: Written) -> Expr | None:
    sizes = "split_size" if "split_size" in it.given else "split_sizes"
    if sizes not in it.given:
        return None
    kwargs: dict[str, Expr] = {} if it.raw("dim") == 0 else {"dim": it("dim")}
    return call(f"{it('self')}.split", [it(sizes)], kwargs)


def _broadcast(it: Written) -> Expr | None:
    return call("torch.broadcast_tensors", [it.expr(value) for value in it.raw("tensors")])


def _einsum(it: Written) -> Expr | None:
    if it.raw("path") is not None:
        return None
    return call("torch.einsum", [it("equation"), *(it.expr(v) for v in it.raw("tensors"))])


def _to(it: Written) -> Expr | None:
    """`x.to(torch.float32)`; the device it is on is not repeated."""
    overload = it.step.target._overloadname
    if overload == "dtype":
        args, kwargs = it.rest("self")
        return call(f"{it('self')}.to", args, kwargs)
    if overload == "other":
        return method(it)
    if overload == "device":
        args, kwargs = it.rest("self")
        return call(f"{it('self')}.to", args, kwargs)
    if overload == "dtype_layout" and it.raw("dtype") is not None:
        device, own = it.raw("device"), it.raw("self").meta.device
        if device in (None, own) and it.raw("layout") in (None, torch.strided):
            kwargs = {"copy": literal(True)} if it.raw("copy") else {}
            if it.raw("memory_format") is not None:  # random numbers are drawn in that order
                kwargs["memory_format"] = it("memory_format")
            return call(f"{it('self')}.to", [it("dtype")], kwargs)
    return None


def _clone(it: Written) -> Expr | None:
    return call(f"{it('self')}.clone", *it.rest("self"))


def _unary(sign: str) -> Form:
    return lambda it: f"{sign}{it('self')}"


def _where(it: Written) -> Expr | None:
    if it.step.target._overloadname != "self":
        return None
    return call("torch.where", [it("condition"), it("self"), it("other")])


def _constant(it: Written) -> Expr | None:
    data = it.raw("self")
    if isinstance(data, EmittedValue):
        return call(f"{it('self')}.clone")
    return tensor_literal(data, it.env.tensor())


def _pad(it: Written) -> Expr | None:
    kwargs: dict[str, Expr] = {}
    if it.raw("mode") != "constant":
        kwargs["mode"] = it("mode")
    if it.raw("value") not in (None, 0):
        kwargs["value"] = it("value")
    sizes = it.raw("pad")
    follows = any(isinstance(size, Size) for size in sizes)
    return call("F.pad", [it("self"), it("pad") if follows else literal(tuple(sizes))], kwargs)


def _method_form(it: Written) -> Expr | None:
    return method(it)


_METHODS = (
    "transpose", "unsqueeze", "squeeze", "contiguous", "flatten", "masked_fill", "chunk", "unbind",
    "sum", "mean", "t", "detach", "unflatten", "repeat_interleave", "amax", "amin", "narrow",
    "diagonal", "movedim", "swapaxes", "unfold", "item",
)  # fmt: skip

FORMS: dict[str, Form] = {
    **dict.fromkeys(_METHODS, _method_form),
    "expand": _spread("size"),
    "view": _reshaped("size"),
    "reshape": _reshaped("shape"),
    "permute": _spread("dims"),
    "repeat": _spread("repeats"),
    "add": _infix("+"), "sub": _infix("-"), "mul": _infix("*"), "div": _infix("/"),
    "matmul": _infix("@"), "eq": _infix("=="), "ne": _infix("!="), "lt": _infix("<"),
    "le": _infix("<="), "gt": _infix(">"), "ge": _infix(">="), "bitwise_and": _infix("&"),
    "bitwise_or": _infix("|"), "__and__": _infix("&"), "__or__": _infix("|"),
    "rsub": _reversed_minus, "pow": _power,
    "numpy_T": lambda it: f"{it('self')}.T", "neg": _unary("-"), "bitwise_not": _unary("~"),
    "slice": _slice, "select": _select, "index": _index, "split": _split,
    "split_with_sizes": _split, "einsum": _einsum, "broadcast_tensors": _broadcast, "to": _to,
    "clone": _clone, "where": _where,
    "linear": _functional("input", "weight", "bias"),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        _conv,
    ),
    "relu": _functional("self"), "gelu": _functional("self", "approximate"),
    "silu": _functional("self"), "leaky_relu": _functional("self", "negative_slope"),
    "elu": _functional("self", "alpha"), "hardtanh": _functional("self", "min_val", "max_val"),
    "mish": _functional("self"), "hardswish": _functional("self"),
    "softplus": _functional("self", "beta", "threshold"),
    "log_sigmoid": _functional("self", name="logsigmoid"),
    "layer_norm": _functional("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": _functional("input", "normalized_shape", "weight", "eps"),
    "group_norm": _functional("input", "num_groups", "weight", "bias", "eps"),
    "batch_norm": _batch_norm,
    "embedding": _embedding,
    **dict.fromkeys(("dropout", "alpha_dropout", "feature_alpha_dropout"), _dropout),
    "cross_entropy_loss": _loss("cross_entropy", "weight", "ignore_index", "label_smoothing"),
    "nll_loss_nd": _loss("nll_loss", "weight", "ignore_index"),
    "mse_loss": _loss("mse_loss"), "l1_loss": _loss("l1_loss"),
    "binary_cross_entropy": _loss("binary_cross_entropy", "weight"),
    "binary_cross_entropy_with_logits": _loss(
        "binary_cross_entropy_with_logits", "weight", "pos_weight"
    ),
    "scaled_dot_product_attention": _attention,
    "pad": _pad,
    "lift_fresh_copy": _constant,
    **{
        name: _functional("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
        for name in ("max_pool1d", "max_pool2d", "max_pool3d")
    },
    **{
        name: _functional(
            "self", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"
        )
        for name in ("avg_pool1d", "avg_pool2d", "avg_pool3d")
    },
    **{
        name: _functional("self", "output_size")
        for name in ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
    },
}  # fmt: skip
