"""What each kind of op computes, in PyTorch: `RULES[kind](module, call, *inputs)`.

The module is asked for one thing only: whether it is in training, where dropout and batch
statistics depend on it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from partita.errors import GraphError
from partita.graph.build import EPSILON
from partita.graph.record import Call, Op
from partita.graph.shapes import per_space

T = torch.Tensor

DROPOUT = 0.1
CLIP = 20.0


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
    size = x.shape[x.ndim - call.whole("dims", 1) :]
    return F.layer_norm(x, size, w, b, call.number("eps", EPSILON))


def _rms_norm(module: nn.Module, call: Call, x: T, w: T | None = None) -> T:
    shift = call.number("shift", 0)  # Gemma stores by how much a scale differs from 1
    w = w + shift if w is not None and shift else w
    return F.rms_norm(x, x.shape[x.ndim - call.whole("dims", 1) :], w, call.number("eps", EPSILON))


def _attention(module: nn.Module, call: Call, q: T, k: T, v: T, *more: T) -> T:
    sinks = more[-1] if call.flag("sinks") else None
    mask = more[0] if len(more) > (sinks is not None) else None
    flat = q.ndim == 3
    if flat:
        heads = call.whole("heads", 1)
        groups = call.whole("kv_heads", heads)
        q = q.reshape(*q.shape[:2], heads, -1).transpose(1, 2)
        k, v = (x.reshape(*x.shape[:2], groups, -1).transpose(1, 2) for x in (k, v))
    causal, window, chunk = call.flag("causal"), call.whole("window", 0), call.whole("chunk", 0)
    softcap = call.number("softcap", 0)
    special = bool(softcap) or sinks is not None
    plain = mask is None and not window and not chunk and not special and q.shape[2] == k.shape[2]
    if causal and not plain:
        seen = _seen(q.shape[2], k.shape[2], window, q, chunk)
        mask = seen if mask is None else seen + mask
    scale = call.number("scale", q.shape[-1] ** -0.5)
    if special:
        out = _spelled_attention(q * scale, k, v, mask, softcap, sinks)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and plain, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
    return out.transpose(1, 2).flatten(2) if flat else out


def _spelled_attention(q: T, k: T, v: T, mask: T | None, softcap: float, sinks: T | None) -> T:
    """With scores that are capped, or sinks: a score per head that takes weight and gives none."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores if mask is None else scores + mask
    if sinks is None:
        return torch.softmax(scores, -1) @ v
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1] @ v


def _seen(queries: int, keys: int, window: int, like: T, chunk: int = 0) -> T:
    """0 where a query may look, -inf elsewhere; the queries are the last of the keys."""
    query = torch.arange(keys - queries, keys, device=like.device)[:, None]
    key = torch.arange(keys, device=like.device)[None, :]
    allowed = key <= query
    if window:
        allowed = allowed & (key > query - window)
    if chunk:
        allowed = allowed & (key // chunk == query // chunk)
    return torch.zeros((), dtype=like.dtype, device=like.device).where(allowed, -math.inf)


def _rope(call: Call, x: T) -> T:
    """Pairs of values turned by an angle that grows with the position (Su et al. 2021).

    A pair is one value of either half of a head, or (`interleaved`) two neighbours; values beyond
    the first `size` of a head stay. `factor` makes what is turned longer.
    """
    heads = call.whole("heads", 1)
    whole = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
    size = call.whole("size", whole.shape[-1])
    x = whole if size == whole.shape[-1] else whole[..., :size]
    place = _places(call, x.shape[-3], x)
    angle = place[:, None] * _frequencies(call, size, x)
    factor = call.number("factor", 1)
    cos, sin = (
        (f if factor == 1 else f * factor)[:, None].to(x.dtype) for f in (angle.cos(), angle.sin())
    )
    if call.flag("interleaved"):
        a, b = x[..., 0::2], x[..., 1::2]
        x = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = x.chunk(2, -1)
        x = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    x = x if size == whole.shape[-1] else torch.cat((x, whole[..., size:]), -1)
    return x.flatten(-2)


def _places(call: Call, count: int, like: T) -> T:
    """The numbers of positions; the first is `start` where others have been read before."""
    start = call.whole("start", 0)
    return torch.arange(start, start + count, dtype=torch.float32, device=like.device)


def _frequencies(call: Call, size: int, like: T) -> T:
    """How far each pair of a head turns per position: given, or falling from 1 to 1 / theta."""
    given = cast("tuple[float, ...]", call.attr("frequencies", ()))
    if given:
        # Made where its numbers are known also if the model is on no device, and moved.
        return torch.tensor(given, dtype=torch.float32).to(like.device)
    half = torch.arange(size // 2, dtype=torch.float32, device=like.device)
    frequencies: T = call.number("theta", 10000.0) ** (-2 * half / size)
    return frequencies


def _temperature(call: Call, x: T) -> T:
    """Queries [b, s, features] made longer the later they are (Llama 4, layers without rope)."""
    place = _places(call, x.shape[1], x)
    steps = torch.floor((place + 1) / call.number("floor", 1))
    return x * (torch.log1p(steps) * call.number("factor", 0) + 1)[:, None].to(x.dtype)


UNARY: dict[str, Callable[[T], T]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "lrn": lambda x: F.local_response_norm(x, 5),
}
# Functions of one input with attributes.
SET: dict[str, Callable[[Call, T], T]] = {
    "clip": lambda call, x: torch.clamp(x, call.number("low", 0.0), call.number("high", CLIP)),
    "scale": lambda call, x: x * call.number("factor", x.shape[-1] ** -0.5 if x.ndim else 1.0),
    "mask": lambda call, x: (
        x + _seen(x.shape[-2], x.shape[-1], call.whole("window", 0), x, call.whole("chunk", 0))
    ),
    "softcap": lambda call, x: torch.tanh(x / call.number("cap", 1)) * call.number("cap", 1),
    "rope": _rope,
    "temperature": _temperature,
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
    if len(inputs) == 1 and fn in SET:
        return SET[fn](call, inputs[0])
    if fn == "clamped_swiglu" and len(inputs) == 2:
        return _clamped_swiglu(call, *inputs)
    if fn == "marked" and len(inputs) == 2:
        return _marked(call, *inputs)
    if len(inputs) == 1 and fn in UNARY:
        return UNARY[fn](inputs[0])
    if len(inputs) > 1 and fn in FOLDED:
        out = inputs[0]
        for other in inputs[1:]:
            out = FOLDED[fn](out, other)
        return out
    raise GraphError(
        f"no reference of the elementwise function {fn!r} of {len(inputs)} inputs",
        fix=f"use one of {', '.join(sorted((*UNARY, *SET, *FOLDED, 'dropout', 'clamped_swiglu')))}",
    )


def _marked(call: Call, x: T, ids: T) -> T:
    """Rows of x at the first place of the id `value`, or of the largest id; 0 elsewhere."""
    value, ids = call.whole("value", -1), ids.squeeze(-1)
    first = (ids if value < 0 else (ids == value).int()).argmax(-1, keepdim=True)
    here = torch.arange(ids.shape[-1], device=ids.device) == first
    return x.masked_fill(~here[..., None], 0.0)


def _clamped_swiglu(call: Call, gate: T, value: T) -> T:
    """GPT-OSS: both sides within a limit, the gate steeper, and the value shifted by 1."""
    limit, alpha = call.number("limit", 7.0), call.number("alpha", 1.702)
    gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (value + 1)


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


def _state_space(
    module: nn.Module, call: Call, x: T, steps: T, decay: T, b: T, c: T, skip: T, bias: T,
    *before: T,
) -> T:  # fmt: skip
    """The scan of Mamba-2 in chunks (Dao, Gu 2024, section 6), from the state `before` if given.

    h[t] = exp(-exp(decay) step[t]) h[t - 1] + step[t] b[t] x[t],  y[t] = c[t] h[t] + skip x[t]
    """
    heads, groups = call.whole("heads", 1), call.whole("groups", 1)
    length, chunk = x.shape[1], min(call.whole("chunk", 256), x.shape[1])
    x, b, c = (
        x.unflatten(-1, (heads, -1)),
        b.unflatten(-1, (groups, -1)),
        c.unflatten(-1, (groups, -1)),
    )
    b, c = (t.repeat_interleave(heads // groups, 2) for t in (b, c))
    steps = F.softplus(steps + bias)
    low, high = call.number("low", 0), call.number("high", math.inf)
    steps = steps.clamp(low, high) if low > 0 or high < math.inf else steps
    passed = skip[:, None] * x
    fades = steps * -torch.exp(decay)  # logarithms of what is left after a step
    x = x * steps[..., None]
    missing = -length % chunk
    parts = (F.pad(t, (0, 0) * (t.ndim - 2) + (0, missing)) for t in (x, fades, b, c))
    x, fades, b, c = (t.unflatten(1, (-1, chunk)) for t in parts)
    sums = fades.cumsum(2)  # within a chunk: b n l h
    between = sums[:, :, :, None] - sums[:, :, None]
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    left = between.masked_fill(~earlier[:, :, None], -math.inf).exp()
    scores = torch.einsum("bnlhs,bnmhs->bnlmh", c, b)
    y = torch.einsum("bnlmh,bnmhp->bnlhp", scores * left, x)
    ends = (sums[:, :, -1:] - sums).exp()
    made = torch.einsum("bnlhs,bnlhp->bnhps", b * ends[..., None], x)
    state, starts = before[0] if before else torch.zeros_like(made[:, 0]), []
    for number in range(made.shape[1]):
        starts.append(state)
        state = state * sums[:, number, -1, :, None, None].exp() + made[:, number]
    y = y + torch.einsum("bnlhs,bnhps->bnlhp", c * sums.exp()[..., None], torch.stack(starts, 1))
    return (y.flatten(1, 2)[:, :length] + passed).flatten(2)


def _router(module: nn.Module, call: Call, x: T, w: T, *more: T) -> T:
    """Gates: how much of what each expert makes a token gets.

    Without `score` those of all experts, and a dispatch lets experts choose. With it a token
    chooses the `top_k` best, and its other gates are 0: by what a `correction` is added to, among
    the best `top_groups` of the `groups`. What was chosen may be normalised and is scaled.
    """
    correction = more[-1] if call.flag("correction") else None
    bias = more[0] if len(more) > (correction is not None) else None
    logits = F.linear(x, w, bias)
    if call.attr("score") is None:
        return torch.softmax(logits, -1)
    scores = torch.sigmoid(logits) if call.text("score") == "sigmoid" else torch.softmax(logits, -1)
    ranked = (scores if correction is None else scores + correction).detach()
    groups, top_k = call.whole("groups", 1), call.whole("top_k", 1)
    if groups > 1:
        grouped = ranked.unflatten(-1, (groups, -1))
        best = grouped.topk(call.whole("group_top", 1), -1).values.sum(-1)
        fallback = -math.inf if correction is not None else 0.0
        taken = _chosen(best, call.whole("top_groups", groups))
        ranked = grouped.where(taken[..., None], fallback).flatten(-2)
    gates = scores.where(_chosen(ranked, top_k), 0.0)
    if call.flag("normalize"):
        gates = gates / (gates.sum(-1, keepdim=True) + call.number("eps", 0.0))
    return gates * call.number("scale", 1.0)


def _chosen(values: T, count: int) -> T:
    """Where the largest of each row are."""
    best = values.topk(count, -1).indices
    return torch.zeros_like(values, dtype=torch.bool).scatter(-1, best, True)


def _dispatch(module: nn.Module, call: Call, x: T, gates: T) -> T:
    """Each expert takes the tokens that want it most, as many as it has room for."""
    weights, places = gates.flatten(0, -2).topk(call.outputs[0][1], dim=0)
    tokens = x.flatten(0, -2)[places.T]
    return tokens * weights.T[..., None] if call.flag("weighted") else tokens


def _combine(module: nn.Module, call: Call, y: T, gates: T) -> T:
    """Each token gets back what the experts that took it made, weighted by its gates."""
    flat = gates.flatten(0, -2)
    weights, places = flat.topk(y.shape[1], dim=0)
    if not call.flag("weighted", True):  # the dispatch has weighted what went in
        weights = (weights > 0).to(y.dtype)
    tokens = y.new_zeros(flat.shape[0], y.shape[2])
    tokens = tokens.index_add(0, places.T.flatten(), (y * weights.T[..., None]).flatten(0, 1))
    return tokens.reshape(*gates.shape[:-1], -1)


def _expert_linear(module: nn.Module, call: Call, x: T, w: T, bias: T | None = None) -> T:
    out = torch.bmm(x, w.mT)
    return out if bias is None else out + bias[:, None, :]


def _cross_entropy(module: nn.Module, call: Call, logits: T, targets: T) -> T:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def constant_ids(op: Op, shape: Sequence[int], limit: int, device: Any = None) -> T:
    """The ids that a constant op gives: from `start` on, over and over below the limit.

    With `buckets`, a bucket of distances for each query and key (Raffel et al. 2019, section 2.1):
    near ones each by itself, far ones ever more together up to `farthest`.
    """
    buckets, start = op.attr("buckets", 0), op.attr("start", 0)
    assert isinstance(buckets, int)
    assert isinstance(start, int)
    if not buckets:
        count, room = math.prod(shape), max(1, limit - start)
        if count <= room:
            numbers = torch.arange(start, start + count, device=device)
        else:
            numbers = torch.arange(count, device=device) % room + start
        return numbers if len(shape) == 1 else numbers.reshape(tuple(shape))
    key = torch.arange(shape[1], device=device)
    query = torch.arange(start, start + shape[0], device=device)
    ahead = key[None, :] - query[:, None]
    first = torch.zeros_like(ahead)
    if op.attr("both_ways", False):  # keys that come later have buckets of their own
        buckets //= 2
        first, distance = (ahead > 0) * buckets, ahead.abs()
    else:
        distance = (-ahead).clamp(min=0)
    near, farthest = buckets // 2, op.attr("farthest", 128)
    assert isinstance(farthest, int)
    steps = torch.log(distance.float().clamp(min=1) / near) / math.log(farthest / near)
    far = (near + (steps * (buckets - near)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < near, distance, far)


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
    "state_space": _state_space,
    "lstm": _recurrent,
    "gru": _recurrent,
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
    "moe_router": _router,
    "moe_dispatch": _dispatch,
    "moe_combine": _combine,
    "expert_linear": _expert_linear,
    "cross_entropy": _cross_entropy,
    "mse_loss": lambda module, call, a, b: F.mse_loss(a, b),
}
