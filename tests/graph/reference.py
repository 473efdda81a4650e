"""What each kind of op computes, in PyTorch: `run(call, inputs) -> outputs`.

On the meta device it gives shapes, on the CPU in float64 numbers to compare splits with.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from partita.graph.record import Call
from partita.graph.shapes import attention_heads, per_space

torch.set_num_threads(1)  # the tensors are tiny
T = torch.Tensor
WHOLE_INPUTS = {"embedding": 0, "cross_entropy": 1}  # which input holds ids


def make_inputs(call: Call, seed: int = 0, device: str = "cpu") -> list[T]:
    """Random inputs of the call's shapes; ids where it takes ids."""
    made = []
    for i, shape in enumerate(call.inputs):
        if WHOLE_INPUTS.get(call.kind) == i:
            most = call.inputs[1][0] if call.kind == "embedding" else call.inputs[0][-1]
            ids = torch.randint(most, shape, generator=torch.Generator().manual_seed(seed + i))
            made.append(ids.to(device))
        else:
            values = torch.randn(
                shape, generator=torch.Generator().manual_seed(seed + i), dtype=torch.float64
            )
            if call.kind == "attention" and i == 3:
                values = values * 2
            made.append(values.to(device))
    return made


def run(call: Call, inputs: Sequence[T]) -> tuple[T, ...]:
    """The outputs of one execution."""
    made = RULES[call.kind](call, *inputs)
    return made if isinstance(made, tuple) else (made,)


def _matmul(call: Call, a: T, b: T) -> T:
    a = a.mT if call.flag("transpose_a") else a
    return torch.matmul(a, b.mT if call.flag("transpose_b") else b)


def _conv(call: Call, x: T, w: T, bias: T | None = None) -> T:
    rank = x.ndim - 2
    settings: dict[str, Any] = {
        "stride": per_space(call, "stride", rank, 1),
        "padding": per_space(call, "padding", rank, 0, least=0),
        "dilation": per_space(call, "dilation", rank, 1),
        "groups": call.whole("groups", 1),
    }
    if call.flag("transposed"):
        settings["output_padding"] = per_space(call, "output_padding", rank, 0, least=0)
        return getattr(F, f"conv_transpose{rank}d")(x, w, bias, **settings)
    return getattr(F, f"conv{rank}d")(x, w, bias, **settings)


def _pool(call: Call, x: T) -> T:
    rank, mode = x.ndim - 2, call.text("mode")
    if call.attr("output") is not None:
        size = per_space(call, "output", rank, 1)
        return getattr(F, f"adaptive_{mode}_pool{rank}d")(x, size)
    kernel = per_space(call, "kernel", rank, 1)
    return getattr(F, f"{mode}_pool{rank}d")(
        x,
        kernel,
        stride=call.ints("stride") or None,
        padding=per_space(call, "padding", rank, 0, least=0),
        ceil_mode=call.flag("ceil"),
    )


def _batch_norm(call: Call, x: T, w: T | None = None, b: T | None = None) -> T:
    if call.flag("training", True):
        return F.batch_norm(x, None, None, w, b, training=True)
    mean, var = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return F.batch_norm(x, mean, var, w, b)


def _group_norm(call: Call, x: T, w: T | None = None, b: T | None = None) -> T:
    return torch.group_norm(x, call.whole("groups", 1), w, b, 1e-5, False)  # F checks the batch


def _layer_norm(call: Call, x: T, w: T | None = None, b: T | None = None) -> T:
    return F.layer_norm(x, x.shape[x.ndim - call.whole("dims", 1) :], w, b)


def _rms_norm(call: Call, x: T, w: T | None = None) -> T:
    return F.rms_norm(x, x.shape[x.ndim - call.whole("dims", 1) :], w, eps=1e-6)


def attention_mask(call: Call, device: str = "cpu") -> T | None:
    """The causal and windowed mask of a call, [s, t]; queries are the last of the keys."""
    if not call.flag("causal"):
        return None
    s, t = call.inputs[0][-2], call.inputs[1][-2]
    query = torch.arange(t - s, t, device=device)[:, None]
    key = torch.arange(t, device=device)[None, :]
    seen = key <= query
    window = call.whole("window", 0)
    if window:
        seen &= key > query - window
    return torch.where(seen, 0.0, -torch.inf).double()


def to_heads(call: Call, q: T, k: T, v: T) -> tuple[T, T, T]:
    """[b, h, s, d] from either layout."""
    if q.ndim == 4:
        return q, k, v
    heads, groups = attention_heads(call)
    q = q.unflatten(2, (heads, -1)).transpose(1, 2)
    k, v = (x.unflatten(2, (groups, -1)).transpose(1, 2) for x in (k, v))
    return q, k, v


def _attention(call: Call, q: T, k: T, v: T, mask: T | None = None) -> T:
    flat = q.ndim == 3
    bias = attention_mask(call, q.device.type)
    if mask is not None:
        bias = mask if bias is None else bias + mask
    q, k, v = to_heads(call, q, k, v)
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    out = torch.softmax(scores if bias is None else scores + bias, -1) @ v
    return out.transpose(1, 2).flatten(2) if flat else out


def _rope(x: T, heads: int) -> T:
    size = x.shape[-1] // heads
    a, b = x.unflatten(-1, (heads, size)).split(size // 2, -1)
    angle = torch.arange(1, size // 2 + 1, dtype=x.dtype, device=x.device)
    turned = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
    return torch.cat(turned, -1).flatten(-2)


def _elementwise(call: Call, *inputs: T) -> T:
    fn = call.text("fn")
    if fn == "rope":
        return _rope(inputs[0], call.whole("heads", 1))
    if fn == "lrn":
        return F.local_response_norm(inputs[0], 5)
    if len(inputs) == 1:
        return {"relu": torch.relu, "gelu": F.gelu, "tanh": torch.tanh}[fn](inputs[0])
    fold = {"add": torch.add, "mul": torch.mul, "max": torch.maximum}[fn]
    out = inputs[0]
    for other in inputs[1:]:
        out = fold(out, other)
    return out


def reduced_axes(call: Call) -> tuple[int, ...]:
    """Axes of a reduce, from the front."""
    rank = len(call.inputs[0])
    return tuple(axis % rank for axis in call.ints("axes", tuple(range(rank))))


def _reduce(call: Call, x: T) -> T:
    if x.ndim == 0:
        return x
    fn = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}
    return fn[call.text("fn", "sum")](x, dim=reduced_axes(call), keepdim=call.flag("keepdim"))


def _slice(call: Call, x: T) -> T:
    axis = call.whole("axis") % x.ndim
    part = slice(call.whole("start"), call.whole("stop"), call.whole("step"))
    return x[(slice(None),) * axis + (part,)]


def _pad(call: Call, x: T) -> T:
    pairs = zip(reversed(call.ints("before")), reversed(call.ints("after")), strict=True)
    return F.pad(x, [side for pair in pairs for side in pair])


def _resize(call: Call, x: T) -> T:
    mode = {3: "linear", 4: "bilinear", 5: "trilinear"}[x.ndim]
    return F.interpolate(x, per_space(call, "output", x.ndim - 2, 1), mode=mode)


def _recurrent(call: Call, x: T, w_in: T, w_rec: T, *biases: T) -> T:
    both, hidden = call.flag("bidirectional"), w_rec.shape[1]
    directions = 2 if both else 1
    parts = [w.chunk(directions) for w in (w_in, w_rec, *biases)]
    weights = [part[i] for i in range(directions) for part in parts]
    states = [x.new_zeros(directions, x.shape[0], hidden) for _ in range(2)]
    layer = torch._VF.lstm if call.kind == "lstm" else torch._VF.gru
    start = states if call.kind == "lstm" else states[0]
    return layer(x, start, weights, bool(biases), 1, 0.0, False, both, True)[0]


def _lstm_cell(call: Call, x: T, h: T, c: T, w_in: T, w_rec: T, *biases: T) -> tuple[T, ...]:
    return torch._VF.lstm_cell(x, (h, c), w_in, w_rec, *biases)


def _gru_cell(call: Call, x: T, h: T, w_in: T, w_rec: T, *biases: T) -> T:
    return torch._VF.gru_cell(x, h, w_in, w_rec, *biases)


def _dispatch(call: Call, x: T, gates: T) -> T:
    """Places [experts, capacity, k]: each expert takes the tokens that want it most."""
    capacity = call.outputs[0][1]
    chosen = gates.reshape(-1, gates.shape[-1]).topk(capacity, dim=0).indices.T
    return x.reshape(-1, x.shape[-1])[chosen]


def _combine(call: Call, y: T, gates: T) -> T:
    """Each token's experts weighted by its gates; token i sits at place i of every expert."""
    tokens = torch.einsum("etk,te->tk", y, gates.reshape(-1, gates.shape[-1]))
    return tokens.reshape(*gates.shape[:-1], y.shape[2])


def _expert_linear(call: Call, x: T, w: T, bias: T | None = None) -> T:
    out = torch.bmm(x, w.mT)
    return out if bias is None else out + bias[:, None, :]


def _cross_entropy(call: Call, logits: T, targets: T) -> T:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def _state_space(
    call: Call, x: T, steps: T, decay: T, b: T, c: T, skip: T, bias: T, state: T | float = 0.0
) -> T:
    """Position by position."""
    heads, groups = call.whole("heads"), call.whole("groups")
    x, b, c = (t.unflatten(-1, (n, -1)) for t, n in ((x, heads), (b, groups), (c, groups)))
    each = torch.arange(heads, device=x.device) // (heads // groups)  # the group of each head
    steps = torch.nn.functional.softplus(steps + bias)
    outputs = []
    for t in range(x.shape[1]):
        made = (steps[:, t, :, None] * x[:, t])[..., None] * b[:, t, each][:, :, None]
        state = state * torch.exp(-decay.exp() * steps[:, t])[..., None, None] + made
        outputs.append((state * c[:, t, each][:, :, None]).sum(-1) + skip[:, None] * x[:, t])
    return torch.stack(outputs, 1).flatten(2)


RULES: dict[str, Any] = {
    "linear": lambda call, x, w, b=None: F.linear(x, w, b),
    "matmul": _matmul,
    "einsum": lambda call, *inputs: torch.einsum(call.text("equation"), *inputs),
    "conv": _conv,
    "pool": _pool,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": lambda call, x: torch.softmax(x, call.whole("axis", -1)),
    "attention": _attention,
    "embedding": lambda call, ids, table: F.embedding(ids, table),
    "elementwise": _elementwise,
    "reduce": _reduce,
    "concat": lambda call, *parts: torch.cat(parts, call.whole("axis")),
    "split": lambda call, x: torch.split(x, list(call.ints("sizes")), call.whole("axis")),
    "slice": _slice,
    "reshape": lambda call, x: x.reshape(call.ints("shape")),
    "transpose": lambda call, x: x.permute(call.ints("perm")),
    "pad": _pad,
    "resize": _resize,
    "expand": lambda call, x: x.expand(call.ints("shape")),
    "constant": lambda call: torch.zeros(call.ints("shape"), device="meta"),
    "lstm": _recurrent,
    "gru": _recurrent,
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
    "state_space": _state_space,
    "moe_router": lambda call, x, w: torch.softmax(F.linear(x, w), -1),
    "moe_dispatch": _dispatch,
    "moe_combine": _combine,
    "expert_linear": _expert_linear,
    "cross_entropy": _cross_entropy,
    "mse_loss": lambda call, a, b: F.mse_loss(a, b),
    "optimizer": lambda call, w, g, *states: w - g,
}
