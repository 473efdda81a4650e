"""One op on one rank's shards as a line of PyTorch: its forward, and its gradients.

Written are ops whose share is the same op on shards: a split dim that needs neither borders nor
the place of the shard in the whole. Norms over the last dim and softmaxes may have it in parts:
their lines exchange sums and maxima of rows. Everything else is refused with the op. A term that is
only added (a bias) is added by the first rank of a split reduction, and means divide by the number
of elements of the whole: partial sums add up to the op's result.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partita.emit.text import Bracket, Expr
from partita.errors import PlanError
from partita.graph.build import EPSILON
from partita.graph.loops import ADDED_FROM, loop_nest
from partita.graph.record import Call

Shape = tuple[int, ...]

UNARY = {
    "relu": "F.relu({0})",
    "gelu": "F.gelu({0})",
    "gelu_tanh": 'F.gelu({0}, approximate="tanh")',
    "silu": "F.silu({0})",
    "tanh": "torch.tanh({0})",
    "sigmoid": "torch.sigmoid({0})",
}
BINARY = {
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "max": "torch.maximum({0}, {1})",
    "swiglu": "F.silu({0}) * {1}",
    "geglu": "F.gelu({0}) * {1}",
}
FROM_OUTPUT = {
    "relu": "{g} * ({o} > 0)",
    "sigmoid": "{g} * {o} * (1 - {o})",
    "tanh": "{g} * (1 - {o} * {o})",
}  # gradients of functions whose backward reads the output
HELPERS = {
    "attention": '''def attention(q, k, v, heads, kv_heads, causal, scale=None):
    """Attention of [batch, sequence, width] tensors, head by head."""
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = (x.unflatten(-1, (kv_heads, -1)).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=heads != kv_heads, scale=scale
    )
    return out.transpose(1, 2).flatten(2)
''',
    "attention_from": '''def attention_from(
    first, q, k, v, heads, kv_heads, causal, scale=None, window=0, chunk=0, mask=None
):
    """Attention of a part of the queries, those from place `first` of the keys on."""
    query = torch.arange(first, first + q.shape[1], device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = (x.unflatten(-1, (kv_heads, -1)).transpose(1, 2) for x in (k, v))
    if causal:
        seen = key <= query
        if window:
            seen = seen & (key > query - window)
        if chunk:
            seen = seen & (key // chunk == query // chunk)
        hidden = torch.zeros((), dtype=q.dtype, device=q.device).where(seen, -torch.inf)
        mask = hidden if mask is None else hidden + mask
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=heads != kv_heads, scale=scale
    )
    return out.transpose(1, 2).flatten(2)
''',
    "vocab_embedding": '''def vocab_embedding(ids, table, first):
    """The rows that this rank has, from row `first` on; zeros for the others."""
    own = (ids >= first) & (ids < first + table.shape[0])
    return F.embedding((ids - first) * own, table) * own[..., None]
''',
    "rope": '''def rope(x, heads, theta=10000.0, first=0):
    """Pairs of values of each head turned by angles that grow with the position."""
    size, length = x.shape[-1] // heads, x.shape[-2]
    speed = theta ** (-2 * torch.arange(size // 2, device=x.device) / size)
    angle = torch.arange(first, first + length, device=x.device)[:, None] * speed
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
    a, b = x.unflatten(-1, (heads, size)).chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
''',
    "centred": '''def centred(x, size, group):
    """Rows of so many numbers, which the group has in parts, less their means."""
    return x - all_reduce(x.sum(-1, keepdim=True), group) / size
''',
    "scaled": '''def scaled(x, size, eps, group):
    """Rows that the group has in parts with a mean square of 1, and what they were scaled by."""
    scale = (all_reduce(x.square().sum(-1, keepdim=True), group) / size + eps).rsqrt()
    return x * scale, scale
''',
    "scaled_gradient": '''def scaled_gradient(grad, x, size, eps, group):
    """The gradient of rows, from that of the same rows scaled."""
    x, scale = scaled(x, size, eps, group)
    return (grad - x * all_reduce((grad * x).sum(-1, keepdim=True), group) / size) * scale
''',
    "weight_gradient": '''def weight_gradient(grad, x, size, eps, group):
    """The gradient of what such rows are multiplied with."""
    return (grad * scaled(x, size, eps, group)[0]).flatten(0, -2).sum(0)
''',
    "shared_softmax": '''def shared_softmax(x, dim, group):
    """A softmax along a dim that the group has in parts."""
    top = x.amax(dim, keepdim=True)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    x = (x - top).exp()
    return x / all_reduce(x.sum(dim, keepdim=True), group)
''',
    "softmax_gradient": '''def softmax_gradient(grad, out, dim, group):
    """The gradient of what such a softmax was of."""
    return out * (grad - all_reduce((grad * out).sum(dim, keepdim=True), group))
''',
    "gradients": '''def gradients(function, inputs, grad):
    """The gradients of all inputs, from that of the output."""
    return torch.func.vjp(function, *inputs)[1](grad)
''',
}  # by the name that a line calls
CALLS = {
    "centred": ("all_reduce",),
    "scaled": ("all_reduce",),
    "scaled_gradient": ("all_reduce", "scaled"),
    "weight_gradient": ("all_reduce", "scaled"),
    "shared_softmax": ("all_reduce",),
    "softmax_gradient": ("all_reduce",),
}  # what helpers call themselves


@dataclass(frozen=True, slots=True)
class RankOp:
    """An op on a rank: how it is split here, and the shapes of the rank's shards.

    `ways` are (loop dim, size of the axis, place on it) of the axes that split it.
    """

    name: str
    call: Call
    ways: tuple[tuple[str, int, int], ...]
    inputs: tuple[Shape, ...]  # of the forward op
    outputs: tuple[Shape, ...]
    training: bool = True
    groups: tuple[str, ...] = ()  # what the group along each of the ways is called

    def refused(self, why: str) -> PlanError:
        """This op cannot be written."""
        return PlanError(
            f"op {self.name!r} ({self.call.kind}) {why}",
            fix="ops are written for a rank that are the same on shards; emit without --rank",
            field="emit",
        )

    def share(self, dim: str) -> int:
        """Into how many parts a loop dim is split."""
        return math.prod(size for name, size, _ in self.ways if name == dim)

    def first(self, dim: str) -> int:
        """Where this rank's share of a loop dim begins."""
        call = Call(self.call.kind, self.call.attrs, self.call.inputs, self.call.outputs)
        start, extent = 0, loop_nest(call).extent(dim)
        for name, size, place in self.ways:
            if name == dim:
                extent //= size
                start += extent * place
        return start

    def group_of_rows(self) -> str | None:
        """The one group that has rows in parts which this op can exchange sums of."""
        if self.call.kind not in SHARED or self.call.whole("dims", 1) > 1:
            return None
        nest = loop_nest(Call(self.call.kind, self.call.attrs, self.call.inputs, self.call.outputs))
        stats = {stat.dim for stat in nest.stats}
        pairs = zip(self.ways, self.groups, strict=True)
        groups = [group for (dim, _, _), group in pairs if dim in stats]
        return groups[0] if len(groups) == 1 else None

    def check(self) -> None:
        """Refuse splits under which a share is not the same op on shards."""
        nest = loop_nest(Call(self.call.kind, self.call.attrs, self.call.inputs, self.call.outputs))
        stats = {stat.dim for stat in nest.stats}
        for dim, _, _ in self.ways:
            if dim in stats and self.group_of_rows() is None:
                raise self.refused(f"exchanges statistics where {dim} is split")
            if self.call.kind == "attention" and dim not in ("b", "h", "s"):
                raise self.refused(f"is split along {dim}")


def forward_line(op: RankOp, names: Sequence[str]) -> Expr:
    """What computes a rank's share of a forward op."""
    op.check()
    if op.call.kind not in _FORWARD:
        raise op.refused("has no line yet")
    group = op.group_of_rows()
    if group is not None:
        return SHARED[op.call.kind](op, list(names), group)
    return _FORWARD[op.call.kind](op, list(names))


def backward_lines(op: RankOp, reads: dict[str, str]) -> list[Expr]:
    """What computes a rank's share of the gradients `call.wrt`: one for each, or one for all.

    `reads` are variables by code: `g0`, `i1`, `o0`.
    """
    op.check()
    kind, wrt = op.call.kind, op.call.wrt
    group = op.group_of_rows()
    if group is not None:
        return [_shared_gradient(op, reads, i, group) for i in wrt]
    if kind == "linear":
        g, x, w = reads["g0"], reads.get("i0", ""), reads.get("i1", "")
        lines = {
            0: f"{g} @ {w}",
            1: f"{g}.flatten(0, -2).mT @ {x}.flatten(0, -2)",
            2: f"{g}.flatten(0, -2).sum(0)",
        }
        return [lines[i] for i in wrt]
    if kind == "elementwise" and op.call.text("fn") in FROM_OUTPUT and "o0" in reads:
        return [FROM_OUTPUT[op.call.text("fn")].format(g=reads["g0"], o=reads["o0"])]
    if kind == "elementwise" and op.call.text("fn") == "add":
        return [
            reads["g0"] if op.inputs[i] == op.outputs[0]
            else f"{reads['g0']}.sum_to_size({list(op.inputs[i])})"
            for i in wrt
        ]  # fmt: skip
    if kind == "softmax":
        g, o, axis = reads["g0"], reads["o0"], op.call.whole("axis", -1)
        return [f"{o} * ({g} - ({o} * {g}).sum({axis}, keepdim=True))"]
    if kind == "reshape":
        return [f"{reads['g0']}.reshape({list(op.inputs[0])})"]
    return [_by_vjp(op, reads)]


def _by_vjp(op: RankOp, reads: dict[str, str]) -> Expr:
    """The forward's line differentiated; what the gradient does not depend on is zero."""
    names = [f"x{i}" for i in range(len(op.inputs))]
    line = str(forward_line(op, names))
    at = []
    for i, shape in enumerate(op.inputs):
        at.append(reads.get(f"i{i}") or f"{reads['g0']}.new_zeros({list(shape)})")
    wrt = list(op.call.wrt)
    moved = [names[i] for i in wrt]
    # Inputs that are not differentiated stand as they are; ids have no gradient at all.
    for i, name in enumerate(names):
        if i not in wrt:
            line = _replaced(line, name, at[i])
    values = Bracket("(", tuple(at[i] for i in wrt), display=True)
    function = f"lambda {', '.join(moved)}: {line}"
    one = ("[0]",) if len(wrt) == 1 else ()
    return Bracket("gradients(", (function, values, reads["g0"]), f"){''.join(one)}")


def _replaced(line: str, name: str, value: str) -> str:
    return re.sub(rf"\b{name}\b", value, line)


def _linear(op: RankOp, names: list[str]) -> Expr:
    if len(names) > ADDED_FROM["linear"]:
        nest = loop_nest(Call("linear", op.call.attrs, op.call.inputs, op.call.outputs))
        if any(place and nest.is_reduction(dim) for dim, _, place in op.ways):
            names = names[:2]  # the first rank of the reduction adds the bias
    return Bracket("F.linear(", tuple(names))


def _matmul(op: RankOp, names: list[str]) -> str:
    a, b = names
    a = f"{a}.mT" if op.call.flag("transpose_a") else a
    return f"{a} @ {b}.mT" if op.call.flag("transpose_b") else f"{a} @ {b}"


def _elementwise(op: RankOp, names: list[str]) -> str:
    fn = op.call.text("fn")
    if fn in UNARY and len(names) == 1:
        return UNARY[fn].format(*names)
    if fn == "add":
        return " + ".join(names)
    if fn in BINARY and len(names) == 2:
        return BINARY[fn].format(*names)
    if fn == "scale":
        if op.call.attr("factor") is not None:
            return f"{names[0]} * {op.call.number('factor')!r}"
        return f"{names[0]} * {op.call.inputs[0][-1]} ** -0.5"
    if fn == "dropout" and not op.training:
        return names[0]
    if fn == "dropout":
        raise op.refused("draws a mask that ranks would have to share")
    if fn == "rope":
        return _rope(op, names)
    raise op.refused(f"computes {fn!r} of {len(names)} inputs, which has no line yet")


def _rope(op: RankOp, names: list[str]) -> str:
    """Heads may be shared out, and positions: a rank's begin where its share does."""
    whole, local = op.call.inputs[0], op.inputs[0]
    heads = op.call.whole("heads", 1)
    share = whole[-1] // local[-1]
    if heads % share:
        raise op.refused("turns heads that are split")
    if op.call.flag("interleaved") or any(
        op.call.attr(name) is not None for name in ("frequencies", "factor", "size")
    ):
        raise op.refused("turns by stretched positions, neighbours or a part of a head")
    given = [names[0], str(heads // share)]
    nest = loop_nest(Call("elementwise", op.call.attrs, op.call.inputs, op.call.outputs))
    (places,) = nest.inputs[0].dims[len(whole) - 2]
    theta, first = op.call.attr("theta"), op.call.whole("start", 0) + op.first(places)
    given += [repr(theta)] if theta is not None else []
    given += [f"first={first}"] if first else []
    return f"rope({', '.join(given)})"


def _embedding(op: RankOp, names: list[str]) -> str:
    if op.inputs[1][0] == op.call.inputs[1][0]:
        return f"F.embedding({', '.join(names)})"
    first = op.first("v")
    return f"vocab_embedding({', '.join(names)}, {first})"


def _layer_norm(op: RankOp, names: list[str]) -> str:
    dims = op.call.whole("dims", 1)
    shape = list(op.inputs[0][len(op.inputs[0]) - dims :])
    given = [*names[1:], *["None"] * (3 - len(names))]
    eps = op.call.number("eps", EPSILON)
    more = given if eps != EPSILON else names[1:]
    text = ", ".join((names[0], str(shape), *more))
    return f"F.layer_norm({text}, {eps!r})" if eps != EPSILON else f"F.layer_norm({text})"


def _rms_norm(op: RankOp, names: list[str]) -> str:
    dims = op.call.whole("dims", 1)
    shape = list(op.inputs[0][len(op.inputs[0]) - dims :])
    weight = names[1] if len(names) > 1 else None
    if weight is not None and op.call.number("shift", 0):
        weight = f"{weight} + {op.call.number('shift')!r}"
    return f"F.rms_norm({names[0]}, {shape}, {weight}, {op.call.number('eps', EPSILON)!r})"


def _attention(op: RankOp, names: list[str]) -> Expr:
    """By heads as a whole; of a part of the queries, or where not all is seen, by places."""
    call = op.call
    q, k = call.inputs[0], call.inputs[1]
    if len(q) != 3 or call.flag("sinks") or call.number("softcap", 0):
        raise op.refused("caps its scores, has sinks, or takes heads as a dim of their own")
    heads = call.whole("heads", 1)
    groups = call.whole("kv_heads", heads)
    share = op.share("h")
    if heads % share or groups % share:
        raise op.refused(f"has {groups} heads for {share} ranks")
    causal, scale = call.flag("causal"), call.attr("scale")
    given = [*names[:3], str(heads // share), str(groups // share), str(causal)]
    if scale is not None:
        given.append(repr(scale))
    window, chunk = call.whole("window", 0), call.whole("chunk", 0)
    is_part = op.share("s") > 1 or q[1] != k[1]
    sees_all = not causal or not (is_part or window or chunk)
    if sees_all and len(names) == 3:
        return f"attention({', '.join(given)})"
    first = k[1] - q[1] if causal else 0  # whole queries are the last of the keys
    given += [f"{what}={size}" for what, size in (("window", window), ("chunk", chunk)) if size]
    given += [f"mask={names[3]}"] if len(names) > 3 else []
    return Bracket("attention_from(", (str(first + op.first("s")), *given))


def _cross_entropy(op: RankOp, names: list[str]) -> str:
    count = math.prod(op.call.inputs[1])
    return (
        f"F.cross_entropy({names[0]}.flatten(0, -2), {names[1]}.flatten(), "
        f'reduction="sum") / {count}'
    )


def _mse(op: RankOp, names: list[str]) -> str:
    count = math.prod(op.call.inputs[0])
    return f'F.mse_loss({names[0]}, {names[1]}, reduction="sum") / {count}'


# Ops whose rows a group has in parts.


def _normal(op: RankOp, x: str, group: str) -> str:
    """Rows as they are before they are scaled, without brackets around."""
    size = op.call.inputs[0][-1]
    return f"centred({x}, {size}, {group})" if op.call.kind == "layer_norm" else x


def _scaled_rows(op: RankOp, x: str, group: str) -> str:
    size, eps = op.call.inputs[0][-1], op.call.number("eps", EPSILON)
    return f"scaled({_normal(op, x, group)}, {size}, {eps!r}, {group})[0]"


def _weight(op: RankOp, weight: str) -> str:
    shift = op.call.number("shift", 0)
    return f"({weight} + {shift!r})" if shift else weight


def _shared_norm(op: RankOp, names: list[str], group: str) -> str:
    line = _scaled_rows(op, names[0], group)
    line += f" * {_weight(op, names[1])}" if len(names) > 1 else ""
    return f"{line} + {names[2]}" if len(names) > 2 else line


def _shared_softmax(op: RankOp, names: list[str], group: str) -> str:
    return f"shared_softmax({names[0]}, {op.call.whole('axis', -1)}, {group})"


def _shared_gradient(op: RankOp, reads: dict[str, str], wrt: int, group: str) -> Expr:
    """The gradient of one input: exchanged again is what the forward has exchanged."""
    g, x = reads["g0"], reads.get("i0", "")
    if op.call.kind == "softmax":
        o, axis = reads["o0"], op.call.whole("axis", -1)
        return Bracket("softmax_gradient(", (g, o, str(axis), group))
    if wrt == 2:
        return f"{g}.flatten(0, -2).sum(0)"
    size, eps = op.call.inputs[0][-1], op.call.number("eps", EPSILON)
    if wrt == 1:
        given = (g, _normal(op, x, group), str(size), repr(eps), group)
        return Bracket("weight_gradient(", given)
    scaled = f"{g} * {_weight(op, reads['i1'])}" if len(op.inputs) > 1 else g
    line = Bracket("scaled_gradient(", (scaled, _normal(op, x, group), str(size), repr(eps), group))
    if op.call.kind == "layer_norm":
        return Bracket("centred(", (line, str(size), group))
    return line


SHARED: dict[str, Callable[[RankOp, list[str], str], Expr]] = {
    "layer_norm": _shared_norm,
    "rms_norm": _shared_norm,
    "softmax": _shared_softmax,
}
_FORWARD: dict[str, Callable[[RankOp, list[str]], Expr]] = {
    "linear": _linear,
    "matmul": _matmul,
    "elementwise": _elementwise,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": lambda op, names: f"torch.softmax({names[0]}, {op.call.whole('axis', -1)})",
    "embedding": _embedding,
    "attention": _attention,
    "reshape": lambda op, names: f"{names[0]}.reshape({list(op.outputs[0])})",
    "transpose": lambda op, names: f"{names[0]}.permute({list(op.call.ints('perm'))})",
    "cross_entropy": _cross_entropy,
    "mse_loss": _mse,
}
