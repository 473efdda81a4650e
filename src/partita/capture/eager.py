"""What each kind of op computes, in PyTorch: `RULES[kind](module, call, *inputs)`.

The module is asked for one thing only: whether it is in training, where dropout and batch
statistics depend on it.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from partita.errors import GraphError
from partita.graph.record import Call
from partita.graph.shapes import per_space

T = torch.Tensor

DROPOUT = 0.1
CLIP = 20.0
EPSILON = 1e-5


def _matmul(module: nn.Module, call: Call, a: T, b: T) -> T:
    a = a.mT if call.flag("transpose_a") else a
    return torch.matmul(a, b.mT if call.flag("transpose_b") else b)


def _conv(module: nn.Module, call: Call, x: T, w: T, bias: T | None = None) -> T:
    rank = x.ndim - 2
    settings: dict[str, Any] = {
        "stride": per_space(call, "stride", rank, 1),
        "padding": per_space(call, "padding", rank, 0, least=0),
        "dilation": per_space(call, "dilation", rank, 1),
        "groups": call.whole("groups", 1),
    }
    if call.flag("transposed"):
        settings["output_padding"] = per_space(call, "output_padding", rank, 0, least=0)
        return cast(T, getattr(F, f"conv_transpose{rank}d")(x, w, bias, **settings))
    return cast(T, getattr(F, f"conv{rank}d")(x, w, bias, **settings))


def _pool(module: nn.Module, call: Call, x: T) -> T:
    rank, mode = x.ndim - 2, call.text("mode")
    if call.attr("output") is not None:
        size = per_space(call, "output", rank, 1)
        return cast(T, getattr(F, f"adaptive_{mode}_pool{rank}d")(x, size))
    return cast(
        T,
        getattr(F, f"{mode}_pool{rank}d")(
            x,
            per_space(call, "kernel", rank, 1),
            stride=call.ints("stride") or None,
            padding=per_space(call, "padding", rank, 0, least=0),
            ceil_mode=call.flag("ceil"),
        ),
    )


def _batch_norm(module: nn.Module, call: Call, x: T, w: T | None = None, b: T | None = None) -> T:
    if module.training:
        return F.batch_norm(x, None, None, w, b, training=True)
    return F.batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]), w, b)


def _layer_norm(module: nn.Module, call: Call, x: T, w: T | None = None, b: T | None = None) -> T:
    return F.layer_norm(x, x.shape[x.ndim - call.whole("dims", 1) :], w, b)


def _rms_norm(module: nn.Module, call: Call, x: T, w: T | None = None) -> T:
    return F.rms_norm(x, x.shape[x.ndim - call.whole("dims", 1) :], w, EPSILON)


def _attention(module: nn.Module, call: Call, q: T, k: T, v: T, mask: T | None = None) -> T:
    flat = q.ndim == 3
    if flat:
        heads = call.whole("heads", 1)
        groups = call.whole("kv_heads", heads)
        q = q.reshape(*q.shape[:2], heads, -1).transpose(1, 2)
        k, v = (x.reshape(*x.shape[:2], groups, -1).transpose(1, 2) for x in (k, v))
    causal, window = call.flag("causal"), call.whole("window", 0)
    plain = mask is None and not window and q.shape[2] == k.shape[2]
    if causal and not plain:
        seen = _seen(q.shape[2], k.shape[2], window, q)
        mask = seen if mask is None else seen + mask
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and plain, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(2) if flat else out


def _seen(queries: int, keys: int, window: int, like: T) -> T:
    """0 where a query may look, -inf elsewhere; the queries are the last of the keys."""
    query = torch.arange(keys - queries, keys, device=like.device)[:, None]
    key = torch.arange(keys, device=like.device)[None, :]
    allowed = key <= query
    if window:
        allowed = allowed & (key > query - window)
    return torch.zeros((), dtype=like.dtype, device=like.device).where(allowed, -math.inf)


def _rope(x: T, heads: int) -> T:
    """Pairs of values turned by an angle that grows with the position (Su et al. 2021)."""
    size, length = x.shape[-1] // heads, x.shape[-2]
    half = torch.arange(size // 2, dtype=torch.float32, device=x.device)
    place = torch.arange(length, dtype=torch.float32, device=x.device)
    angle = place[:, None] * 10000.0 ** (-2 * half / size)
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
    a, b = x.reshape(*x.shape[:-1], heads, size).chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


UNARY: dict[str, Callable[[T], T]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "clip": lambda x: torch.clamp(x, 0.0, CLIP),
    "scale": lambda x: x * x.shape[-1] ** -0.5,
    "mask": lambda x: x + _seen(x.shape[-2], x.shape[-1], 0, x),
    "lrn": lambda x: F.local_response_norm(x, 5),
}
FOLDED: dict[str, Callable[[T, T], T]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": torch.maximum,
    "swiglu": lambda gate, value: F.silu(gate) * value,
    "geglu": lambda gate, value: F.gelu(gate) * value,
}


def _elementwise(module: nn.Module, call: Call, *inputs: T) -> T:
    fn = call.text("fn")
    if fn == "dropout":
        return F.dropout(inputs[0], DROPOUT, module.training)
    if fn == "rope":
        return _rope(inputs[0], call.whole("heads", 1))
    if len(inputs) == 1 and fn in UNARY:
        return UNARY[fn](inputs[0])
    if len(inputs) > 1 and fn in FOLDED:
        out = inputs[0]
        for other in inputs[1:]:
            out = FOLDED[fn](out, other)
        return out
    raise GraphError(
        f"no reference of the elementwise function {fn!r} of {len(inputs)} inputs",
        fix=f"use one of {', '.join(sorted((*UNARY, *FOLDED, 'dropout', 'rope')))}",
    )


def _reduce(module: nn.Module, call: Call, x: T) -> T:
    if x.ndim == 0:
        return x
    axes = call.ints("axes", tuple(range(x.ndim)))
    fold: dict[str, Callable[..., T]] = {
        "sum": torch.sum,
        "mean": torch.mean,
        "max": torch.amax,
        "min": torch.amin,
    }
    return fold[call.text("fn", "sum")](x, dim=axes, keepdim=call.flag("keepdim"))


def _slice(module: nn.Module, call: Call, x: T) -> T:
    axis = call.whole("axis") % x.ndim
    part = slice(call.whole("start", 0), call.whole("stop", x.shape[axis]), call.whole("step", 1))
    return x[(slice(None),) * axis + (part,)]


def _pad(module: nn.Module, call: Call, x: T) -> T:
    pairs = zip(reversed(call.ints("before")), reversed(call.ints("after")), strict=True)
    return F.pad(x, [side for pair in pairs for side in pair])


def _resize(module: nn.Module, call: Call, x: T) -> T:
    mode = {3: "linear", 4: "bilinear", 5: "trilinear"}[x.ndim]
    return F.interpolate(x, per_space(call, "output", x.ndim - 2, 1), mode=mode)


def _recurrent(module: nn.Module, call: Call, x: T, w_in: T, w_rec: T, *biases: T) -> T:
    both, hidden = call.flag("bidirectional"), w_rec.shape[1]
    directions = 2 if both else 1
    parts = [w.chunk(directions) for w in (w_in, w_rec, *biases)]
    weights = [part[i] for i in range(directions) for part in parts]
    states = [x.new_zeros(directions, x.shape[0], hidden) for _ in range(2)]
    settings = (weights, bool(biases), 1, 0.0, False, both, True)
    if call.kind == "lstm":
        return torch.lstm(x, states, *settings)[0]
    return torch.gru(x, states[0], *settings)[0]


def _lstm_cell(module: nn.Module, call: Call, x: T, h: T, c: T, *weights: T) -> tuple[T, ...]:
    return cast("tuple[T, ...]", torch.lstm_cell(x, (h, c), *weights))


def _gru_cell(module: nn.Module, call: Call, x: T, h: T, *weights: T) -> T:
    return torch.gru_cell(x, h, *weights)


def _dispatch(module: nn.Module, call: Call, x: T, gates: T) -> T:
    """Each expert takes the tokens that want it most, as many as it has room for."""
    places = gates.flatten(0, -2).topk(call.outputs[0][1], dim=0).indices.T
    return x.flatten(0, -2)[places]


def _combine(module: nn.Module, call: Call, y: T, gates: T) -> T:
    """Each token gets back what the experts that took it made, weighted by its gates."""
    flat = gates.flatten(0, -2)
    weights, places = flat.topk(y.shape[1], dim=0)
    tokens = y.new_zeros(flat.shape[0], y.shape[2])
    tokens = tokens.index_add(0, places.T.flatten(), (y * weights.T[..., None]).flatten(0, 1))
    return tokens.reshape(*gates.shape[:-1], -1)


def _expert_linear(module: nn.Module, call: Call, x: T, w: T, bias: T | None = None) -> T:
    out = torch.bmm(x, w.mT)
    return out if bias is None else out + bias[:, None, :]


def _cross_entropy(module: nn.Module, call: Call, logits: T, targets: T) -> T:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


RULES: dict[str, Callable[..., Any]] = {
    "linear": lambda module, call, x, w, b=None: F.linear(x, w, b),
    "matmul": _matmul,
    "einsum": lambda module, call, *inputs: torch.einsum(call.text("equation"), *inputs),
    "conv": _conv,
    "pool": _pool,
    "batch_norm": _batch_norm,
    "group_norm": lambda module, call, x, *wb: F.group_norm(x, call.whole("groups", 1), *wb),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": lambda module, call, x: torch.softmax(x, call.whole("axis", -1)),
    "attention": _attention,
    "embedding": lambda module, call, ids, table: F.embedding(ids, table),
    "elementwise": _elementwise,
    "reduce": _reduce,
    "concat": lambda module, call, *parts: torch.cat(parts, call.whole("axis")),
    "split": lambda module, call, x: torch.split(x, list(call.ints("sizes")), call.whole("axis")),
    "slice": _slice,
    "reshape": lambda module, call, x: x.reshape(call.ints("shape")),
    "transpose": lambda module, call, x: x.permute(call.ints("perm")),
    "pad": _pad,
    "resize": _resize,
    "expand": lambda module, call, x: x.expand(call.ints("shape")),
    "lstm": _recurrent,
    "gru": _recurrent,
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
    "moe_router": lambda module, call, x, w: torch.softmax(F.linear(x, w), -1),
    "moe_dispatch": _dispatch,
    "moe_combine": _combine,
    "expert_linear": _expert_linear,
    "cross_entropy": _cross_entropy,
    "mse_loss": lambda module, call, a, b: F.mse_loss(a, b),
}
