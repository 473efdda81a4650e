"""Ops split along a dim over which they need statistics: each rank goes on with its own shard.

A norm needs a mean and a variance of all of a row, a softmax its maximum and a sum, a loss over a
vocabulary in parts those of its logits and the target's. Each rank computes these numbers of its
shard, the line exchanges them (what the plan has as an exchange), and the rank computes its share
of the result with those of the whole row; backward the same with sums of the gradient.

    norms           sums of x and x^2 in one sum, in f64, of each shard's own mean and variance, so
                    that rows far from 0 lose nothing; backward the means of dy w and of dy w x^
    softmax, loss   maxima and sums of exponentials of all ranks side by side, then joined:
                    s = sum of s_k exp(m_k - m); backward of a softmax the sum of dy y

Numbers of f16 and bf16 are computed with in f32, as PyTorch's kernels do. What an op is called with
(eps, the dims that are normalised, momentum) is read off the node that was exported, or off the
rule of its kind where that is what runs; a call with anything else has no rule here, and its shards
are gathered (`shares.py`). Backward is written out: data and weight gradients may come apart, and
only the former exchanges anything.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita.capture.torch_program import Ref, TorchNode
from partita.graph.build import EPSILON
from partita.graph.record import Call
from partita.run.distributed.comm import Communicator, Line
from partita.run.local.shards import Shape

T = torch.Tensor
Given = Mapping[str, T]  # what the op reads, by its role
MEAN_OF_LOSSES = 1  # PyTorch's number for this reduction
NO_CLASS = -100  # the target that PyTorch's losses leave out, unless they say otherwise


@dataclass(frozen=True)
class NormRule:
    """A norm: over which dims (those at the end, of all of a channel, of groups), and how."""

    over: str  # "last", "batch" or "groups"
    number: int  # of last dims, of groups (0: each channel is one)
    eps: float
    is_centred: bool = True
    shift: float = 0.0  # of the scale
    momentum: float = 0.0  # of running statistics

    def seen(self, x: T) -> T:
        """The tensor with the channels of each group in a dim of their own."""
        if self.over != "groups":
            return x
        groups = self.number or x.shape[1]
        return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])

    def dims(self, rank: int) -> tuple[int, ...]:
        """The dims of what is seen that statistics are over."""
        if self.over == "last":
            return tuple(range(rank - self.number, rank))
        return (0, *range(2, rank)) if self.over == "batch" else tuple(range(2, rank))

    def rows(self, rank: int) -> tuple[int, ...]:
        """The dims of what is seen that a weight does not have."""
        if self.over == "last":
            return tuple(range(rank - self.number))
        return (0, *range(2 if self.over == "batch" else 3, rank))

    def count(self, shape: Shape) -> int:
        """Of how many numbers of a tensor of this shape one statistic is."""
        if self.over == "last":
            return math.prod(shape[len(shape) - self.number :])
        if self.over == "batch":
            return shape[0] * math.prod(shape[2:])
        return math.prod(shape[1:]) // (self.number or shape[1])

    def beside(self, weight: T, like: T) -> T:
        """A weight or bias as it stands beside what is seen."""
        rows = self.rows(like.ndim)
        sizes = [1 if i in rows else size for i, size in enumerate(like.shape)]
        return weight.reshape(sizes).to(like.dtype)

    def scale(self, weight: T, like: T) -> T:
        """What normal numbers are multiplied with."""
        own = self.beside(weight, like)
        return own + self.shift if self.shift else own


@dataclass(frozen=True)
class SoftmaxRule:
    """A softmax or its logarithm along a dim, in the type that it asks for."""

    axis: int
    is_log: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class ClassLossRule:
    """The mean of the cross entropies of rows, without those that have no class."""

    ignored: int = NO_CLASS


Settings = NormRule | SoftmaxRule | ClassLossRule


@dataclass(frozen=True)
class StatisticRule:
    """How an op is computed with exchanged statistics, and which argument has which role.

    Arguments are counted through what the op reads and what only its node reads, as they come.
    """

    settings: Settings
    places: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class StatisticSite:
    """The share of a rank: of how many numbers statistics are, where its classes begin."""

    count: int
    start: int
    classes: int
    scale: float  # of a mean over a part of the rows


class StatisticExchange:
    """Numbers that cross ranks, along one line of ranks after the other."""

    def __init__(self, comm: Communicator, lines: Sequence[Line]) -> None:
        self.comm, self.lines = comm, lines

    def begin_sum(self, own: T) -> Callable[[], T]:
        """Start to add up; the result is what the returned function gives."""
        if not self.lines:
            return lambda: own
        first = self.comm.all_reduce(own, self.lines[0])

        def finish() -> T:
            total: T = first.wait()
            for line in self.lines[1:]:
                total = self.comm.all_reduce(total, line).wait()
            return total

        return finish

    def merged(self, own: T, merge: Callable[[T], T]) -> T:
        """What `merge` makes of the numbers of all, which come stacked."""
        for line in self.lines:
            sizes = [own.numel()] * len(line)
            parts = self.comm.all_gather(own, sizes, line).wait()
            own = merge(torch.stack([part.view(own.shape) for part in parts]))
        return own


# Which ops have a rule.


def rule_of(
    call: Call, node: TorchNode | None, names: Sequence[str], name_of: Callable[[str], Any]
) -> StatisticRule | None:
    """The rule of a forward op; None where there is none.

    Without a node, or with one that is no operator, the rule of the kind is what runs. `names` are
    the tensors that it reads, `name_of` says which tensor an argument of the node is.
    """
    if len(set(names)) < len(names):
        return None  # one tensor in two roles
    if node is None or not node.is_operator:
        known = OF_CALL.get(call.kind)
        if known is None:
            return None
        settings, roles = known(call), ROLES[call.kind]
        return StatisticRule(settings, tuple(zip(roles, range(len(call.inputs)), strict=False)))
    reader = OF_NODE.get(node.operation)
    read = None if reader is None else reader(call, node.arguments)
    if read is None:
        return None
    own, tensors = read
    places = []
    for role, value in tensors.items():
        if value is None:
            continue
        name = name_of(value.name) if isinstance(value, Ref) else None
        if name is None or name not in names:
            return None
        places.append((role, list(names).index(name)))
    if len(places) < len(names):
        return None  # it reads something else as well
    return StatisticRule(own, tuple(places))


RuleTensors = tuple[Settings, dict[str, Any]] | None
Arguments = Mapping[str, Any]
ROLES = {
    "layer_norm": ("x", "weight", "bias"),
    "rms_norm": ("x", "weight"),
    "batch_norm": ("x", "weight", "bias"),
    "group_norm": ("x", "weight", "bias"),
    "softmax": ("x",),
    "cross_entropy": ("x", "targets"),
}


def _norm_tensors(arguments: Arguments) -> dict[str, Any]:
    return {"x": arguments["input"], "weight": arguments["weight"], "bias": arguments.get("bias")}


def _layer_norm(call: Call, arguments: Arguments) -> RuleTensors:
    dims = len(arguments["normalized_shape"])
    return NormRule("last", dims, float(arguments["eps"])), _norm_tensors(arguments)


def _rms_norm(call: Call, arguments: Arguments) -> RuleTensors:
    eps = call.number("eps", EPSILON) if arguments["eps"] is None else arguments["eps"]
    dims = len(arguments["normalized_shape"])
    return NormRule("last", dims, float(eps), is_centred=False), _norm_tensors(arguments)


def _batch_norm(call: Call, arguments: Arguments) -> RuleTensors:
    if not arguments["training"]:
        return None
    running = {name: arguments[name] for name in ("running_mean", "running_var")}
    settings = NormRule("batch", 0, float(arguments["eps"]), momentum=float(arguments["momentum"]))
    return settings, _norm_tensors(arguments) | running


def _group_norm(call: Call, arguments: Arguments) -> RuleTensors:
    settings = NormRule("groups", int(arguments["num_groups"]), float(arguments["eps"]))
    return settings, _norm_tensors(arguments)


def _instance_norm(call: Call, arguments: Arguments) -> RuleTensors:
    if not arguments["use_input_stats"] or arguments["running_mean"] is not None:
        return None
    return NormRule("groups", 0, float(arguments["eps"])), _norm_tensors(arguments)


def _softmax(is_log: bool) -> Callable[[Call, Arguments], RuleTensors]:
    def rule(call: Call, arguments: Arguments) -> RuleTensors:
        axis = int(arguments["dim"]) % len(call.inputs[0])
        return SoftmaxRule(axis, is_log, arguments["dtype"]), {"x": arguments["self"]}

    return rule


def _class_loss(call: Call, arguments: Arguments) -> RuleTensors:
    is_plain = arguments["weight"] is None and not arguments["label_smoothing"]
    if not is_plain or arguments["reduction"] != MEAN_OF_LOSSES or len(call.inputs[0]) > 2:
        return None
    if call.inputs[1] != call.inputs[0][:-1]:
        return None  # targets that are probabilities
    tensors = {"x": arguments["self"], "targets": arguments["target"]}
    return ClassLossRule(int(arguments["ignore_index"])), tensors


OF_NODE: dict[str, Callable[[Call, Arguments], RuleTensors]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "softmax": _softmax(is_log=False),
    "log_softmax": _softmax(is_log=True),
    "cross_entropy_loss": _class_loss,
}  # by what the node calls
OF_CALL: dict[str, Callable[[Call], Settings]] = {
    "layer_norm": lambda call: NormRule("last", call.whole("dims", 1), call.number("eps", EPSILON)),
    "rms_norm": lambda call: NormRule(
        "last", call.whole("dims", 1), call.number("eps", EPSILON), False, call.number("shift", 0)
    ),
    "batch_norm": lambda call: NormRule("batch", 0, EPSILON),
    "group_norm": lambda call: NormRule("groups", call.whole("groups", 1), EPSILON),
    "softmax": lambda call: SoftmaxRule(call.whole("axis", -1) % len(call.inputs[0])),
    "cross_entropy": lambda call: ClassLossRule(),
}  # by kind, as `capture/eager.py` computes it


# What a rank computes.


def forward(
    rule: StatisticRule, site: StatisticSite, values: Sequence[T], exchange: StatisticExchange
) -> tuple[T, tuple[T, ...]]:
    """A rank's share of the result, and what the backward needs of it."""
    given = {role: values[place] for role, place in rule.places}
    with torch.no_grad():
        return FORWARD[type(rule.settings)](rule.settings, site, given, exchange)


def backward(
    rule: StatisticRule, site: StatisticSite, values: Sequence[T], saved: tuple[T, ...],
    gradient: T, wanted: Collection[int], exchange: StatisticExchange,
) -> dict[int, T]:  # fmt: skip
    """The gradients of some arguments, by their places."""
    given = {role: values[place] for role, place in rule.places if place < len(values)}
    roles = {role: place for role, place in rule.places if place in wanted}
    with torch.no_grad():
        results = BACKWARD[type(rule.settings)](
            rule.settings, site, given, saved, gradient, roles, exchange
        )
    return {roles[role]: own.to(given[role].dtype) for role, own in results.items()}


def _wide(x: T) -> T:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _norm_forward(
    norm: NormRule, site: StatisticSite, given: Given, exchange: StatisticExchange
) -> tuple[T, tuple[T, ...]]:
    x = given["x"]
    seen = _wide(norm.seen(x))
    dims = norm.dims(seen.ndim)
    if norm.is_centred:
        mean, var = _moments(seen, dims, site.count, exchange)
    else:
        square = exchange.begin_sum((seen * seen).sum(dims, keepdim=True))
        mean, var = None, square() / site.count
    if "running_mean" in given and mean is not None:
        unbiased = var * (site.count / max(site.count - 1, 1))
        for role, new in (("running_mean", mean), ("running_var", unbiased)):
            old = given[role]
            old.lerp_(new.reshape(old.shape).to(old.dtype), norm.momentum)
    scale = (var + norm.eps).rsqrt()
    saved = (scale,) if mean is None else (scale, mean)
    out = _normal(seen, saved)
    weight, bias = given.get("weight"), given.get("bias")
    if weight is not None:
        out.mul_(norm.scale(weight, out))
    if bias is not None:
        out.add_(norm.beside(bias, out))
    return out.reshape(x.shape).to(x.dtype), saved


def _normal(seen: T, saved: tuple[T, ...]) -> T:
    scale, *mean = saved
    return (seen - mean[0]).mul_(scale) if mean else seen * scale


def _moments(
    seen: T, dims: tuple[int, ...], count: int, exchange: StatisticExchange
) -> tuple[T, T]:
    """Mean and variance of all ranks' numbers, from those of each."""
    own = math.prod(seen.shape[dim] for dim in dims)
    total = seen.sum(dims, keepdim=True)
    apart = seen - total / max(own, 1)
    spread = apart.mul_(apart).sum(dims, keepdim=True)
    both = torch.stack((total, spread)).double()
    both[1].addcmul_(both[0], both[0], value=1 / max(own, 1))
    both = exchange.begin_sum(both)().div_(count)
    both[1].addcmul_(both[0], both[0], value=-1).clamp_(min=0)
    mean, var = both.to(seen.dtype)
    return mean, var


def _norm_backward(
    norm: NormRule, site: StatisticSite, given: Given, saved: tuple[T, ...], gradient: T,
    wanted: Collection[str], exchange: StatisticExchange,
) -> dict[str, T]:  # fmt: skip
    x, weight = given["x"], given.get("weight")
    grad = _wide(norm.seen(gradient))
    results: dict[str, T] = {}
    seen = _wide(norm.seen(x))
    normal, dims, rows = _normal(seen, saved), norm.dims(grad.ndim), norm.rows(grad.ndim)
    sums, own = None, grad
    if "x" in wanted:
        if weight is not None:
            own = grad * norm.scale(weight, grad)
        parts = [(own * normal).sum(dims, keepdim=True)]
        if norm.is_centred:
            parts.append(own.sum(dims, keepdim=True))
        sums = exchange.begin_sum(torch.stack(parts))
    if weight is not None and "weight" in wanted:  # while the sums are on their way
        results["weight"] = _summed(grad * normal, rows).reshape(weight.shape)
    if "bias" in wanted:
        results["bias"] = _summed(grad, rows).reshape(given["bias"].shape)
    if sums is not None:
        along, *middle = sums().div_(-site.count)
        moved = torch.addcmul(own, normal, along)
        moved = moved.add_(middle[0]) if middle else moved
        results["x"] = moved.mul_(saved[0]).reshape(x.shape)
    return results


def _summed(x: T, dims: tuple[int, ...]) -> T:
    return x.sum(dims) if dims else x


def _merged_tops(parts: T) -> T:
    """Maxima, sums of exponentials below them and sums of what else there is, of all ranks."""
    top = parts[:, 0].amax(0)
    total = (parts[:, 1] * (parts[:, 0] - top).exp_()).sum(0)
    return torch.stack([top, total, *parts[:, 2:].sum(0)])


def _exponentials(x: T, axis: int) -> tuple[T, T]:
    """The maxima along a dim, and the exponentials of what is below them."""
    sizes = [1 if dim == axis % x.ndim else size for dim, size in enumerate(x.shape)]
    top = x.amax(axis, keepdim=True) if x.shape[axis] else x.new_full(sizes, -math.inf)
    return top, (x - top.masked_fill(top == -math.inf, 0.0)).exp_()


def _softmax_forward(
    softmax: SoftmaxRule, site: StatisticSite, given: Given, exchange: StatisticExchange
) -> tuple[T, tuple[T, ...]]:
    x = given["x"] if softmax.dtype is None else given["x"].to(softmax.dtype)
    seen, axis = _wide(x), softmax.axis
    top, own = _exponentials(seen, axis)
    both = torch.stack([top, own.sum(axis, keepdim=True)])
    most, total = exchange.merged(both, _merged_tops)
    if softmax.is_log:
        out = seen - (most + total.log())
    else:
        out = own.mul_((top - most).exp_().div_(total))
    out = out.to(x.dtype)
    return out, (out,)


def _softmax_backward(
    softmax: SoftmaxRule, site: StatisticSite, given: Given, saved: tuple[T, ...], gradient: T,
    wanted: Collection[str], exchange: StatisticExchange,
) -> dict[str, T]:  # fmt: skip
    if "x" not in wanted:
        return {}
    grad, out = _wide(gradient), _wide(saved[0])
    if softmax.is_log:
        total = exchange.begin_sum(grad.sum(softmax.axis, keepdim=True))()
        return {"x": torch.addcmul(grad, out.exp(), total, value=-1)}
    own = grad * out
    total = exchange.begin_sum(own.sum(softmax.axis, keepdim=True))()
    return {"x": own.sub_(out * total)}


def _loss_forward(
    loss: ClassLossRule, site: StatisticSite, given: Given, exchange: StatisticExchange
) -> tuple[T, tuple[T, ...]]:
    logits, targets = given["x"], given["targets"].reshape(-1)
    rows = _wide(logits.reshape(-1, logits.shape[-1]))
    counts = targets != loss.ignored
    if targets.device.type == "cpu":  # kernels of a GPU say so themselves
        wrong = targets[counts & ((targets < 0) | (targets >= site.classes))]
        if wrong.numel():
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
    own = targets - site.start
    is_mine = counts & (own >= 0) & (own < rows.shape[1])
    own = own.where(is_mine, 0)[:, None]
    top, below = _exponentials(rows, 1)
    picked = rows.gather(1, own) if rows.shape[1] else torch.zeros_like(top)
    picked = picked.where(is_mine[:, None], 0.0)
    parts = torch.stack([top, below.sum(1, keepdim=True), picked])
    most, total, picked = exchange.merged(parts, _merged_tops)
    level = most + total.log()
    number = counts.sum()
    value = (level - picked)[:, 0].where(counts, 0.0).sum() / number * site.scale
    return value.to(logits.dtype), (level, own, is_mine, counts / number)


def _loss_backward(
    loss: ClassLossRule, site: StatisticSite, given: Given, saved: tuple[T, ...], gradient: T,
    wanted: Collection[str], exchange: StatisticExchange,
) -> dict[str, T]:  # fmt: skip
    if "x" not in wanted:
        return {}
    logits = given["x"]
    level, own, is_mine, each = saved
    rows = (_wide(logits.reshape(-1, logits.shape[-1])) - level).exp_()
    if rows.shape[1]:
        rows.scatter_add_(1, own, -is_mine[:, None].to(rows.dtype))
    weight = each.to(rows.dtype) * (gradient.to(rows.dtype) * site.scale)
    return {"x": rows.mul_(weight[:, None]).reshape(logits.shape)}


FORWARD: dict[type, Callable[..., tuple[T, tuple[T, ...]]]] = {
    NormRule: _norm_forward,
    SoftmaxRule: _softmax_forward,
    ClassLossRule: _loss_forward,
}
BACKWARD: dict[type, Callable[..., dict[str, T]]] = {
    NormRule: _norm_backward,
    SoftmaxRule: _softmax_backward,
    ClassLossRule: _loss_backward,
}
