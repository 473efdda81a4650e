"""Runs an op split along one dim on pretended devices, and counts what crosses between them.

Each device gets its share of the inputs as `input_placement` says and runs the op on it; outputs
are put together as `output_placement` says. Where the nest has a statistic, the exchange that it
stands for is carried out here, so that its size and its sufficiency are both tested.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable

import torch

from partita.graph.loops import ADDED_FROM, Access, Nest, loop_nest
from partita.graph.record import Call
from partita.graph.shapes import gates
from partita.graph.splits import (
    PARTIAL,
    REPLICATE,
    TensorPlacement,
    input_placement,
    output_placement,
)
from tests.graph import reference

T = torch.Tensor
SPACE = ("d", "h", "w")


class Devices:
    """Devices along a mesh axis; `crossed` counts elements per device and collective."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.crossed: Counter[str] = Counter()

    def all_reduce(self, values: list[T], largest: bool = False) -> T:
        self.crossed["all_reduce"] += values[0].numel()
        stacked = torch.stack(values)
        return stacked.amax(0) if largest else stacked.sum(0)

    def all_gather(self, values: list[T], dim: int) -> T:
        whole = torch.cat(values, dim)
        self.crossed["all_gather"] += whole.numel()
        return whole


@dataclasses.dataclass(frozen=True)
class Split:
    """A dim of a call over a number of devices."""

    call: Call
    dim: str
    factor: int

    @property
    def nest(self) -> Nest:
        return loop_nest(self.call)

    def shares(self, inputs: list[T]) -> list[list[T]]:
        """What each device holds of the inputs."""
        places = [input_placement(access, self.dim) for access in self.nest.inputs]
        both = list(zip(inputs, places, strict=True))
        return [[cut(*pair, rank, self.factor) for pair in both] for rank in range(self.factor)]

    def local(self, share: list[T]) -> Call:
        """The call that a device runs on its share."""
        outputs = tuple(
            self._part(s, a) for s, a in zip(self.call.outputs, self.nest.outputs, strict=True)
        )
        attrs = {**dict(self.call.attrs), **self._attrs(outputs)}
        inputs = tuple(tuple(value.shape) for value in share)
        return Call(self.call.kind, tuple(sorted(attrs.items())), inputs, outputs)

    def _part(self, shape: tuple[int, ...], access: Access) -> tuple[int, ...]:
        at = access.position(self.dim)
        return tuple(s // self.factor if i == at else s for i, s in enumerate(shape))

    def _attrs(self, outputs: tuple[tuple[int, ...], ...]) -> dict[str, object]:
        kind, dim, call = self.call.kind, self.dim, self.call
        if kind in ("reshape", "expand", "constant"):
            return {"shape": outputs[0]}
        if kind in ("conv", "group_norm") and dim == "g":
            return {"groups": call.whole("groups") // self.factor}
        if kind == "attention" and dim in ("h", "g") and call.attr("heads") is not None:
            share = {"heads": call.whole("heads") // self.factor}
            return share | (
                {"kv_heads": call.whole("kv_heads") // self.factor} if dim == "h" else {}
            )
        if kind == "state_space" and dim in ("g", "r"):
            share = {"heads": call.whole("heads") // self.factor}
            return share | ({"groups": call.whole("groups") // self.factor} if dim == "g" else {})
        if kind == "elementwise" and call.text("fn") == "rope" and dim == "h":
            return {"heads": call.whole("heads") // self.factor}
        if kind == "pool" and call.attr("output") is not None:
            return {"output": outputs[0][2:]}
        return {}


def cut(value: T, place: TensorPlacement, rank: int, factor: int) -> T:
    """A device's share of a tensor."""
    return value if place == REPLICATE else value.chunk(factor, place.dim)[rank]


def run_split(call: Call, inputs: list[T], dim: str, factor: int) -> tuple[list[T], Counter[str]]:
    """The op's outputs, computed on `factor` devices, and what crossed between them."""
    split, devices = Split(call, dim, factor), Devices(factor)
    shares = split.shares(inputs)
    if any(stat.dim == dim for stat in split.nest.stats):
        results = STATISTICS[call.kind](split, shares, devices)
    elif call.kind in ("lstm_cell", "gru_cell") and dim == "h":
        results = [_own_units(split, inputs, rank) for rank in range(factor)]
    else:
        results = [
            run_share(split, _with_biases_once(split, share, rank), rank)
            for rank, share in enumerate(shares)
        ]
    outputs = []
    for i, access in enumerate(split.nest.outputs):
        parts = [result[i] for result in results]
        outputs.append(join(parts, output_placement(split.nest, access, dim), devices))
    return outputs, devices.crossed


def join(parts: list[T], place: TensorPlacement, devices: Devices) -> T:
    """A tensor from what the devices hold of it."""
    if place == PARTIAL:
        return devices.all_reduce(parts)
    if place == REPLICATE:
        for part in parts:
            torch.testing.assert_close(part, parts[0])
        return parts[0]
    return torch.cat(parts, place.dim)


def run_gradient(
    call: Call, inputs: list[T], gradients: list[T], dim: str, factor: int
) -> tuple[list[T], Counter[str]]:
    """Gradients of a call's floating inputs, computed on `factor` devices, and what crossed.

    `call` is the backward call; each device differentiates its share of the forward.
    """
    forward = Call(call.kind, call.attrs, call.inputs, call.outputs)
    split, devices = Split(forward, dim, factor), Devices(factor)
    nest = loop_nest(call)
    results = []
    for rank, share in enumerate(split.shares(inputs)):
        leaves = [value.detach().clone() for value in share]
        for i in call.wrt:
            leaves[i].requires_grad_()
        outputs = run_share(split, leaves, rank)
        places = [input_placement(access, dim) for access in split.nest.outputs]
        own = [cut(g, p, rank, factor) for g, p in zip(gradients, places, strict=True)]
        wanted = [leaves[i] for i in call.wrt]
        results.append(torch.autograd.grad(outputs, wanted, own, materialize_grads=True))
    joined = []
    for i, access in enumerate(nest.outputs):
        parts = [result[i] for result in results]
        joined.append(join(parts, output_placement(nest, access, dim), devices))
    return joined, devices.crossed


def _with_biases_once(split: Split, share: list[T], rank: int) -> list[T]:
    """What is only added to a split sum is added by the first device."""
    first = ADDED_FROM.get(split.call.kind, len(share))
    if not rank or not split.nest.is_reduction(split.dim):
        return share
    return [*share[:first], *(torch.zeros_like(bias) for bias in share[first:])]


def run_share(split: Split, share: list[T], rank: int) -> tuple[T, ...]:
    """What one device computes without hearing from the others."""
    call, dim = split.call, split.dim
    if call.kind == "embedding" and dim == "v":
        return (_masked_lookup(share[0], share[1], rank),)
    if call.kind in ("lstm", "gru") and dim == "z":
        return _one_direction(split, share, rank)
    at = split.nest.outputs[0].position(dim)
    if call.kind == "pool" and at is not None and split.nest.inputs[0].position(dim) is None:
        whole = reference.run(call, share)  # windows that shares do not hold: read whole
        return tuple(out.chunk(split.factor, at)[rank] for out in whole)
    results = reference.run(split.local(share), share)
    is_mean = call.kind in ("cross_entropy", "mse_loss") or call.attr("fn") == "mean"
    if is_mean and split.nest.is_reduction(dim):
        return tuple(result / split.factor for result in results)
    return results


def _masked_lookup(ids: T, table: T, rank: int) -> T:
    own = ids - rank * len(table)
    mine = (own >= 0) & (own < len(table))
    return reference.F.embedding(own.clamp(0, len(table) - 1), table) * mine[..., None]


def _softmax(split: Split, shares: list[list[T]], devices: Devices) -> list[tuple[T, ...]]:
    axis = split.call.whole("axis", -1)
    return [(part,) for part in _soft([share[0] for share in shares], axis, devices)]


def _soft(parts: list[T], axis: int, devices: Devices) -> list[T]:
    peak = devices.all_reduce([part.amax(axis, keepdim=True) for part in parts], largest=True)
    total = devices.all_reduce([(p - peak).exp().sum(axis, keepdim=True) for p in parts])
    return [(part - peak).exp() / total for part in parts]


def _router(split: Split, shares: list[list[T]], devices: Devices) -> list[tuple[T, ...]]:
    logits = [reference.F.linear(x, w) for x, w in shares]
    if split.dim == "k":
        return [(torch.softmax(devices.all_reduce(logits), -1),)] * devices.count
    return [(part,) for part in _soft(logits, -1, devices)]


def _norm(split: Split, shares: list[list[T]], devices: Devices) -> list[tuple[T, ...]]:
    """Mean and mean square over all devices, then each normalises its share."""
    call, x = split.call, split.call.inputs[0]
    last, channels = call.whole("dims", 1), call.whole("groups", 1)
    parts = [share[0] for share in shares]
    if call.kind == "group_norm":
        parts = [part.unflatten(1, (channels, -1)) for part in parts]
        axes, count = tuple(range(2, parts[0].ndim)), math.prod(x[1:]) // channels
    elif call.kind == "batch_norm":
        axes = (0, *range(2, len(x)))
        count = math.prod(x) // x[1]
    else:
        axes, count = tuple(range(len(x) - last, len(x))), math.prod(x[len(x) - last :])
    square = devices.all_reduce([(p * p).sum(axes, keepdim=True) for p in parts]) / count
    if call.kind == "rms_norm":
        normal = [part / (square + 1e-6).sqrt() for part in parts]
    else:
        mean = devices.all_reduce([part.sum(axes, keepdim=True) for part in parts]) / count
        normal = [(part - mean) / (square - mean * mean + 1e-5).sqrt() for part in parts]
    return [(_scaled(call, n, share),) for n, share in zip(normal, shares, strict=True)]


def _scaled(call: Call, normal: T, share: list[T]) -> T:
    normal = normal.reshape(share[0].shape)
    for i, weight in enumerate(share[1:]):
        if call.kind in ("batch_norm", "group_norm"):
            weight = weight.reshape(-1, *[1] * (normal.ndim - 2))
        normal = normal + weight if i else normal * weight
    return normal


def _attention(split: Split, shares: list[list[T]], devices: Devices) -> list[tuple[T, ...]]:
    """Each device attends to its keys; outputs are merged by maxima and sums."""
    scores, values = [], []
    for share in shares:
        q, k, v = reference.to_heads(split.call, *share[:3])
        repeat = q.shape[1] // k.shape[1]
        logits = q @ k.repeat_interleave(repeat, 1).mT / math.sqrt(q.shape[-1])
        scores.append(logits + share[3] if share[3:] else logits)
        values.append(v.repeat_interleave(repeat, 1))
    peak = devices.all_reduce([s.amax(-1, keepdim=True) for s in scores], largest=True)
    weights = [(s - peak).exp() for s in scores]
    total = devices.all_reduce([w.sum(-1, keepdim=True) for w in weights])
    out = devices.all_reduce([w @ v for w, v in zip(weights, values, strict=True)]) / total
    out = out.transpose(1, 2).flatten(2) if shares[0][0].ndim == 3 else out
    return [(out,)] * devices.count


def _cross_entropy(split: Split, shares: list[list[T]], devices: Devices) -> list[tuple[T, ...]]:
    """Vocabulary-parallel: maximum, sum of exponentials and the target's logit per position."""
    logits = [share[0] for share in shares]
    width, targets = logits[0].shape[-1], shares[0][1]
    peak = devices.all_reduce([part.amax(-1) for part in logits], largest=True)
    total = devices.all_reduce([(part - peak[..., None]).exp().sum(-1) for part in logits])
    losses = []
    for rank, part in enumerate(logits):
        own = targets - rank * width
        mine = (own >= 0) & (own < width)
        picked = part.gather(-1, own.clamp(0, width - 1)[..., None])[..., 0]
        losses.append(picked * mine)
    loss = (total.log() + peak - devices.all_reduce(losses)).mean()
    return [(loss,)] * devices.count


def _reduce(split: Split, shares: list[list[T]], devices: Devices) -> list[tuple[T, ...]]:
    parts = [reference.run(split.local(share), share)[0] for share in shares]
    sign = -1 if split.call.text("fn") == "min" else 1
    return [(sign * devices.all_reduce([sign * p for p in parts], largest=True),)] * devices.count


def _one_direction(split: Split, share: list[T], rank: int) -> tuple[T, ...]:
    """A device of a bidirectional layer runs one direction of it."""
    x, *weights = share
    attrs = tuple((k, False if k == "bidirectional" else v) for k, v in split.call.attrs)
    x = x.flip(1) if rank else x
    call = Call(split.call.kind, attrs, tuple(tuple(v.shape) for v in share), ())
    (out,) = reference.run(call, [x, *weights])
    return (out.flip(1) if rank else out,)


def _own_rows(weight: T, kind: str, rank: int, factor: int) -> T:
    """A device's rows of every gate."""
    by_gate = weight.unflatten(0, (gates(kind), -1))
    return by_gate.chunk(factor, 1)[rank].flatten(0, 1)


def _step(kind: str, given: T, kept: T, state: T, cell: T) -> tuple[T, T]:
    """One position: gates from the input and from the state, [b, gates * h] each."""
    if kind.startswith("lstm"):
        i, f, g, o = (given + kept).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell
    r1, z1, n1 = given.chunk(3, 1)
    r2, z2, n2 = kept.chunk(3, 1)
    update = (z1 + z2).sigmoid()
    new = (n1 + (r1 + r2).sigmoid() * n2).tanh()
    return (1 - update) * new + update * state, cell


def _recurrent(split: Split, shares: list[list[T]], devices: Devices) -> list[tuple[T, ...]]:
    call = split.call
    if split.dim == "h":
        return _hidden_split(split, shares, devices)
    rank_bias = [share[3] if share[3:] else share[1].new_zeros(len(share[1])) for share in shares]
    parts = [reference.F.linear(share[0], share[1]) for share in shares]
    given = devices.all_reduce(parts) + rank_bias[0]
    w_rec = shares[0][2]
    bias = shares[0][4] if shares[0][4:] else w_rec.new_zeros(len(w_rec))
    outs = []
    directions = 2 if call.flag("bidirectional") else 1
    for turn, (g, w, b) in enumerate(
        zip(
            given.chunk(directions, 2), w_rec.chunk(directions), bias.chunk(directions), strict=True
        )
    ):
        g = g.flip(1) if turn else g
        state = cell = g.new_zeros(g.shape[0], w.shape[1])
        steps = []
        for t in range(g.shape[1]):
            state, cell = _step(call.kind, g[:, t], reference.F.linear(state, w, b), state, cell)
            steps.append(state)
        out = torch.stack(steps, 1)
        outs.append(out.flip(1) if turn else out)
    return [(torch.cat(outs, 2),)] * devices.count


def _hidden_split(split: Split, shares: list[list[T]], devices: Devices) -> list[tuple[T, ...]]:
    """Each device has its units; at every position the whole state is gathered."""
    kind, count = split.call.kind, split.factor
    x = shares[0][0]
    weights = [[torch.cat([s[i] for s in shares]) for i in range(1, len(shares[0]))]] * count
    own = [[_own_rows(w, kind, r, count) for w in ws] for r, ws in enumerate(weights)]
    hidden = split.call.outputs[0][2]
    whole = x.new_zeros(x.shape[0], hidden)
    states = list(whole.chunk(count, 1))
    cells = list(whole.chunk(count, 1))
    steps: list[list[T]] = [[] for _ in range(count)]
    for t in range(x.shape[1]):
        for r, ws in enumerate(own):
            biases = ws[2:] or [None, None]
            given = reference.F.linear(x[:, t], ws[0], biases[0])
            kept = reference.F.linear(whole, ws[1], biases[1])
            states[r], cells[r] = _step(kind, given, kept, states[r], cells[r])
            steps[r].append(states[r])
        whole = devices.all_gather(states, 1)
    return [(torch.stack(step, 1),) for step in steps]


def _own_units(split: Split, inputs: list[T], rank: int) -> tuple[T, ...]:
    """A device computes its units of a cell from the whole input and state."""
    kind, first = split.call.kind, 1 + len(split.call.outputs)
    w_in, w_rec, *biases = (_own_rows(w, kind, rank, split.factor) for w in inputs[first:])
    b_in, b_rec = biases or (None, None)
    given, kept = (
        reference.F.linear(inputs[0], w_in, b_in),
        reference.F.linear(inputs[1], w_rec, b_rec),
    )
    states = [value.chunk(split.factor, 1)[rank] for value in inputs[1:first]]
    return _step(kind, given, kept, states[0], states[-1])[: len(states)]


def _cell(split: Split, shares: list[list[T]], devices: Devices) -> list[tuple[T, ...]]:
    """Products along a split dim of inputs or state are summed before the gates."""
    kind = split.call.kind
    first = 1 + len(split.call.outputs)
    x_parts = [reference.F.linear(share[0], share[first]) for share in shares]
    h_parts = [reference.F.linear(share[1], share[first + 1]) for share in shares]
    given = devices.all_reduce(x_parts) if split.dim == "i" else x_parts[0]
    kept = devices.all_reduce(h_parts) if split.dim == "k" else h_parts[0]
    biases = shares[0][first + 2 :]
    given, kept = (given + biases[0], kept + biases[1]) if biases else (given, kept)
    cell = shares[0][2] if kind == "lstm_cell" else kept
    state, cell = _step(kind, given, kept, shares[0][1], cell)
    return [(state, cell)[: len(split.call.outputs)]] * devices.count


STATISTICS: dict[str, Callable[[Split, list[list[T]], Devices], list[tuple[T, ...]]]] = {
    "softmax": _softmax,
    "moe_router": _router,
    "batch_norm": _norm,
    "group_norm": _norm,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "reduce": _reduce,
    "lstm": _recurrent,
    "gru": _recurrent,
    "lstm_cell": _cell,
    "gru_cell": _cell,
}
