"""One op on one rank's shards as a line of PyTorch: its forward, and its gradients.

Written are ops whose share is the same op on shards: a split dim that needs neither borders nor
the place of the shard in the whole. Norms over the last dim, softmaxes, losses over classes and
norms of channels may have what they sum over in parts: their lines exchange sums and maxima of rows
and channels. Everything else is refused with the op. A term that is
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
from partita.graph.loops import ADDED_FROM, Nest, loop_nest
from partita.graph.record import Call
from partita.graph.shapes import per_space

Shape = tuple[int, ...]

WINDOWS = frozenset({"conv", "pool"})
UNARY = {
    "relu": "F.relu({0})",
    "gelu": "F.gelu({0})",
    "gelu_tanh": 'F.gelu({0}, approximate="tanh")',
    "silu": "F.silu({0})",
    "tanh": "torch.tanh({0})",
    "sigmoid": "torch.sigmoid({0})",
    "exp": "torch.exp({0})",
    "quick_gelu": "{0} * torch.sigmoid(1.702 * {0})",
    "relu2": "F.relu({0}).square()",
    "lrn": "F.local_response_norm({0}, 5)",
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
    "drawn": '''def drawn(like, whole, seed):
    """What drops one in ten numbers of the whole, and makes up for it: alike on all ranks."""
    generator = torch.Generator(like.device).manual_seed(seed)
    kept = torch.rand(whole, generator=generator, device=like.device) >= 0.1
    return kept.to(like.dtype) / 0.9
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
    "shared_cross_entropy": '''def shared_cross_entropy(
    x, targets, first, count, group, ignored=-100
):
    """The sum of losses over `count`; the group has the classes in parts, here from `first` on."""
    kept = targets.flatten() != ignored
    x, targets = x.flatten(0, -2), targets.flatten() - first
    own = (targets >= 0) & (targets < x.shape[1])
    top = x.amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    total = all_reduce((x - top[:, None]).exp().sum(-1), group)
    picked = all_reduce(x.gather(1, (targets * own)[:, None])[:, 0] * own, group)
    return ((top + total.log() - picked) * kept).sum() / count
''',
    "cross_entropy_gradient": '''def cross_entropy_gradient(
    grad, x, targets, first, count, group, ignored=-100
):
    """The gradient of this rank's classes: their probabilities, less 1 for the target."""
    kept = (targets.flatten() != ignored)[:, None]
    rows, targets = x.flatten(0, -2), targets.flatten() - first
    own = (targets >= 0) & (targets < rows.shape[1])
    probabilities = shared_softmax(rows, -1, group)
    probabilities.scatter_add_(1, (targets * own)[:, None], -own[:, None].to(x.dtype))
    return (probabilities * kept * (grad / count)).reshape(x.shape)
''',
    "channels": '''def channels(x, size, group):
    """Channels with a mean of 0 and a variance of 1, and what they were scaled by.

    The group has the `size` numbers of each channel in parts.
    """
    dims = [0, *range(2, x.ndim)]
    x = x - all_reduce(x.sum(dims, keepdim=True), group) / size
    scale = (all_reduce(x.square().sum(dims, keepdim=True), group) / size + 1e-5).rsqrt()
    return x * scale, scale
''',
    "channels_gradient": '''def channels_gradient(grad, x, size, group):
    """The gradient of channels, from that of the same channels scaled."""
    dims = [0, *range(2, x.ndim)]
    x, scale = channels(x, size, group)
    along = all_reduce((grad * x).sum(dims, keepdim=True), group)
    mean = all_reduce(grad.sum(dims, keepdim=True), group)
    return (grad - (x * along + mean) / size) * scale
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
    "shared_cross_entropy": ("all_reduce",),
    "cross_entropy_gradient": ("all_reduce", "shared_softmax"),
    "channels": ("all_reduce",),
    "channels_gradient": ("all_reduce", "channels"),
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
    place: int = 0  # among the ops that draw
    ignored: int | None = None  # the target that a captured loss leaves out of its mean

    def refused(self, why: str) -> PlanError:
        """This op cannot be written."""
        return PlanError(
            f"op {self.name!r} ({self.call.kind}) {why}",
            fix="ops are written for a rank that are the same on shards; emit without --rank",
            field="emit",
        )

    @property
    def nest(self) -> Nest:
        """The loops of the forward op."""
        return loop_nest(Call(self.call.kind, self.call.attrs, self.call.inputs, self.call.outputs))

    def share(self, dim: str) -> int:
        """Into how many parts a loop dim is split."""
        return math.prod(size for name, size, _ in self.ways if name == dim)

    def first(self, dim: str) -> int:
        """Where this rank's share of a loop dim begins."""
        start, extent = 0, self.nest.extent(dim)
        for name, size, place in self.ways:
            if name == dim:
                extent //= size
                start += extent * place
        return start

    def group_of_rows(self) -> str | None:
        """The one group that has rows in parts which this op can exchange sums of."""
        if self.call.kind not in SHARED or self.call.whole("dims", 1) > 1:
            return None
        nest = self.nest
        stats = {stat.dim for stat in nest.stats}
        pairs = zip(self.ways, self.groups, strict=True)
        groups = [group for (dim, _, _), group in pairs if dim in stats]
        return groups[0] if len(groups) == 1 else None

    def check(self) -> None:
        """Refuse splits under which a share is not the same op on shards."""
        nest, kind = self.nest, self.call.kind
        stats = {stat.dim for stat in nest.stats}
        for dim, _, _ in self.ways:
            if dim in stats and self.group_of_rows() is None:
                raise self.refused(f"exchanges statistics where {dim} is split")
            if kind == "attention" and dim not in ("b", "h", "s"):
                raise self.refused(f"is split along {dim}")
            if kind in WINDOWS and not self._keeps_windows(nest, dim):
                raise self.refused(f"is split along {dim}, where windows overlap or channels mix")
            is_lrn = kind == "elementwise" and self.call.text("fn") == "lrn"
            if is_lrn and nest.inputs[0].position(dim) == 1:
                raise self.refused("mixes channels that are split")

    def _keeps_windows(self, nest: Nest, dim: str) -> bool:
        """Samples, and channels; of a convolution those that go in or come out of it."""
        made, read = nest.outputs[0].position(dim), nest.inputs[0].position(dim)
        if self.call.kind == "conv" and made != 0:
            whole = self.call.whole("groups", 1) == 1 and not self.call.flag("transposed")
            return whole and (made == 1 or read == 1)
        return made in (0, 1)


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
    if kind == "split":
        axis = op.call.whole("axis", -1) % len(op.inputs[0])
        given = (
            reads.get(f"g{i}", f"{reads['g0']}.new_zeros({list(shape)})")
            for i, shape in enumerate(op.outputs)
        )
        return [Bracket("torch.cat(", (f"({', '.join(given)})", str(axis)))]
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


def _added(op: RankOp, names: list[str]) -> list[str]:
    """The inputs without a bias, unless this is the first rank of a reduction: that adds it."""
    is_later = any(place and op.nest.is_reduction(dim) for dim, _, place in op.ways)
    return names[: ADDED_FROM[op.call.kind]] if is_later else names


def _linear(op: RankOp, names: list[str]) -> Expr:
    return Bracket("F.linear(", tuple(_added(op, names)))


def _conv(op: RankOp, names: list[str]) -> Expr:
    call, rank = op.call, len(op.inputs[0]) - 2
    given = _added(op, names)
    usual = {"stride": 1, "padding": 0, "dilation": 1}
    usual |= {"output_padding": 0} if call.flag("transposed") else {}
    for name, value in usual.items():
        each = per_space(call, name, rank, value, least=min(value, 1))
        given += [f"{name}={_one_or_all(each)}"] if set(each) != {value} else []
    groups = call.whole("groups", 1)
    given += [f"groups={groups}"] if groups > 1 else []
    name = f"conv_transpose{rank}d" if call.flag("transposed") else f"conv{rank}d"
    return Bracket(f"F.{name}(", tuple(given))


def _one_or_all(each: tuple[int, ...]) -> str:
    return str(each[0] if len(set(each)) == 1 else each)


def _pool(op: RankOp, names: list[str]) -> Expr:
    call, rank = op.call, len(op.inputs[0]) - 2
    mode = call.text("mode")
    if call.attr("output") is not None:
        size = _one_or_all(per_space(call, "output", rank, 1))
        return Bracket(f"F.adaptive_{mode}_pool{rank}d(", (*names, size))
    given = [*names, _one_or_all(per_space(call, "kernel", rank, 1))]
    if call.ints("stride"):
        given.append(_one_or_all(per_space(call, "stride", rank, 1)))
    padding = per_space(call, "padding", rank, 0, least=0)
    given += [f"padding={_one_or_all(padding)}"] if any(padding) else []
    given += ["ceil_mode=True"] if call.flag("ceil") else []
    return Bracket(f"F.{mode}_pool{rank}d(", tuple(given))


def _batch_norm(op: RankOp, names: list[str]) -> Expr:
    x, *scales = names
    scales += ["None"] * (2 - len(scales))
    if op.call.flag("training", True):
        return Bracket("F.batch_norm(", (x, "None", "None", *scales, "training=True"))
    size = op.inputs[0][1]
    return Bracket("F.batch_norm(", (x, f"{x}.new_zeros({size})", f"{x}.new_ones({size})", *scales))


def _group_norm(op: RankOp, names: list[str]) -> Expr:
    groups = op.call.whole("groups", 1) // op.share("g")
    return Bracket("F.group_norm(", (names[0], str(groups), *names[1:]))


def _reduced(op: RankOp, names: list[str]) -> str:
    """A sum or mean over dims; a mean divides by how many numbers the whole has."""
    call, fn = op.call, op.call.text("fn", "sum")
    axes = call.ints("axes", tuple(range(len(call.inputs[0]))))
    is_part = any(op.nest.is_reduction(dim) for dim, _, _ in op.ways)
    if fn not in ("sum", "mean") and is_part:
        raise op.refused(f"takes the {fn} over a dim that is split")
    keep = ", keepdim=True" if call.flag("keepdim") else ""
    if fn == "mean" and is_part:
        count = math.prod(call.inputs[0][axis] for axis in axes)
        return f"{names[0]}.sum({list(axes)}{keep}) / {count}"
    return f"{names[0]}.{ {'max': 'amax', 'min': 'amin'}.get(fn, fn) }({list(axes)}{keep})"


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
        return _dropout(op, names)
    if fn == "rope":
        return _rope(op, names)
    raise op.refused(f"computes {fn!r} of {len(names)} inputs, which has no line yet")


def _dropout(op: RankOp, names: list[str]) -> str:
    """All ranks draw the mask of the whole, and each takes its part of it."""
    whole, access = op.call.inputs[0], op.nest.outputs[0]
    parts = []
    for i, (size, own) in enumerate(zip(whole, op.outputs[0], strict=True)):
        first = op.first(access.dims[i][0]) if own != size else 0
        parts.append(":" if own == size else f"{first}:{first + own}")
    cut = f"[{', '.join(parts)}]" if set(parts) - {":"} else ""
    return f"{names[0]} * drawn({names[0]}, {list(whole)}, seed + {op.place}){cut}"


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
    (places,) = op.nest.inputs[0].dims[len(whole) - 2]
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
    if len(q) == 4 and not call.flag("sinks") and not call.number("softcap", 0):
        return _attention_of_heads(op, names)
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


def _sliced(op: RankOp, names: list[str]) -> str:
    call, whole = op.call, op.call.inputs[0]
    axis = call.whole("axis") % len(whole)
    start, stop = call.whole("start", 0), call.whole("stop", whole[axis])
    step = f":{step}" if (step := call.whole("step", 1)) != 1 else ""
    return f"{names[0]}[{':, ' * axis}{start}:{stop}{step}]"


def _split(op: RankOp, names: list[str]) -> str:
    axis = op.call.whole("axis", -1) % len(op.inputs[0])
    return f"{names[0]}.split({[shape[axis] for shape in op.outputs]}, {axis})"


def _pad(op: RankOp, names: list[str]) -> Expr:
    before, after = op.call.ints("before"), op.call.ints("after")
    pairs = zip(reversed(before), reversed(after), strict=True)
    return Bracket("F.pad(", (names[0], str([side for pair in pairs for side in pair])))


def _concat(op: RankOp, names: list[str]) -> Expr:
    return Bracket("torch.cat(", (f"({', '.join(names)})", str(op.call.whole("axis", -1))))


def _attention_of_heads(op: RankOp, names: list[str]) -> Expr:
    """Where heads are a dim of their own."""
    call = op.call
    q, k = op.inputs[0], op.inputs[1]
    is_part = op.share("s") > 1 or (call.flag("causal") and q[2] != k[2])
    if is_part or len(names) > 3 or call.whole("window", 0) or call.whole("chunk", 0):
        raise op.refused("hides scores by place, and takes heads as a dim of their own")
    given = list(names)
    given += ["is_causal=True"] if call.flag("causal") else []
    given += [f"scale={call.attr('scale')!r}"] if call.attr("scale") is not None else []
    given += ["enable_gqa=True"] if q[1] != k[1] else []
    return Bracket("F.scaled_dot_product_attention(", tuple(given))


def _rows_of(op: RankOp) -> int:
    """Into how many parts the rows of a loss are shared out."""
    return math.prod(size for dim, size, _ in op.ways if dim != "v")


def _counted(op: RankOp, targets: str) -> str:
    """By what a sum of losses is divided: all targets, or those of a captured loss that count."""
    if op.ignored is None:
        return str(math.prod(op.call.inputs[1]))
    rows = f" * {rows}" if (rows := _rows_of(op)) > 1 else ""
    return f"({targets} != {op.ignored}).sum(){rows}"


def _ignored(op: RankOp) -> list[str]:
    return [] if op.ignored in (None, -100) else [f"ignored={op.ignored}"]


def _cross_entropy(op: RankOp, names: list[str]) -> str:
    if op.ignored is not None:  # a mean of those that count, and of ranks with equal weight
        given = [f"{names[0]}.flatten(0, -2)", f"{names[1]}.flatten()"]
        given += [f"ignore_index={op.ignored}"] if op.ignored != -100 else []
        rows = f" / {rows}" if (rows := _rows_of(op)) > 1 else ""
        return f"F.cross_entropy({', '.join(given)}){rows}"
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


def _shared_loss(op: RankOp, names: list[str], group: str) -> Expr:
    given = (*names, str(op.first("v")), _counted(op, names[1]), group, *_ignored(op))
    return Bracket("shared_cross_entropy(", given)


def _of_channels(op: RankOp, x: str) -> tuple[str, str]:
    """A scale or offset of channels beside what has them in dim 1; how many numbers one is of."""
    whole = op.call.inputs[0]
    beside = f".reshape({[1, op.inputs[0][1], *[1] * (len(whole) - 2)]})" if x else ""
    return f"{x}{beside}", str(whole[0] * math.prod(whole[2:]))


def _shared_channels(op: RankOp, names: list[str], group: str) -> Expr:
    size = _of_channels(op, "")[1]
    line = f"channels({names[0]}, {size}, {group})[0]"
    for sign, name in zip("*+", names[1:], strict=False):
        line += f" {sign} {_of_channels(op, name)[0]}"
    return line


def _channels_gradient(op: RankOp, reads: dict[str, str], wrt: int, group: str) -> Expr:
    g, x, size = reads["g0"], reads.get("i0", ""), _of_channels(op, "")[1]
    dims = [0, *range(2, len(op.inputs[0]))]
    if wrt == 2:
        return f"{g}.sum({dims})"
    if wrt == 1:
        return f"({g} * channels({x}, {size}, {group})[0]).sum({dims})"
    scaled = f"{g} * {_of_channels(op, reads['i1'])[0]}" if len(op.inputs) > 1 else g
    return Bracket("channels_gradient(", (scaled, x, size, group))


def _shared_gradient(op: RankOp, reads: dict[str, str], wrt: int, group: str) -> Expr:
    """The gradient of one input: exchanged again is what the forward has exchanged."""
    g, x = reads["g0"], reads.get("i0", "")
    if op.call.kind == "cross_entropy":
        ids = reads["i1"]
        about = (str(op.first("v")), _counted(op, ids), group, *_ignored(op))
        return Bracket("cross_entropy_gradient(", (g, x, ids, *about))
    if op.call.kind == "batch_norm":
        return _channels_gradient(op, reads, wrt, group)
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
    "cross_entropy": _shared_loss,
    "batch_norm": _shared_channels,
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
    "conv": _conv,
    "pool": _pool,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "reduce": _reduced,
    "concat": _concat,
    "slice": _sliced,
    "split": _split,
    "pad": _pad,
    "expand": lambda op, names: f"{names[0]}.expand({list(op.outputs[0])})",
}
