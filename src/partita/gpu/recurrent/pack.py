"""Weights of recurrent layers in the order of PyTorch, as the kernel takes them.

PyTorch lists per layer, and per direction in it: w_ih, w_hh and, with bias, b_ih, b_hh; matrices
hold gate after gate. The kernel takes the matrices of a launch stacked, columns rounded up with
zeros; biases as f32 in slots: both added, but of a GRU's candidate the two stay apart, since the
reset gate stands between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from partita.errors import ProblemError
from partita.gpu.recurrent.spec import Recurrent, Shape, fed_before, input_width, power

T = torch.Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """The layers first..last-1 for one launch; `w_pre`, if any, feeds the first before it."""

    first: int
    last: int
    inputs: int
    w_pre: T | None
    w_x: T
    w_h: T
    bias: T


def check_weights(spec: Recurrent, weights: Sequence[T]) -> None:
    """Refuse a list that is not that of these layers."""
    each = 4 if spec.bias else 2
    wanted = spec.num_layers * spec.directions * each
    if len(weights) != wanted:
        raise ProblemError(
            f"{len(weights)} weights, but {spec} has {wanted}",
            fix="give w_ih, w_hh (and b_ih, b_hh) per layer and direction",
        )
    rows = spec.gates * spec.hidden_size
    for layer in range(spec.num_layers):
        inputs = spec.input_size if layer == 0 else spec.directions * spec.hidden_size
        for direction in range(spec.directions):
            begin = (layer * spec.directions + direction) * each
            shapes = [(rows, inputs), (rows, spec.hidden_size), (rows,), (rows,)][:each]
            for weight, shape in zip(weights[begin : begin + each], shapes, strict=True):
                if tuple(weight.shape) != shape or weight.dtype != spec.dtype:
                    raise ProblemError(
                        f"a weight of layer {layer} is {tuple(weight.shape)} {weight.dtype}",
                        fix=f"it must be {shape} {spec.dtype}",
                    )


def pack(spec: Recurrent, weights: Sequence[T], shape: Shape, device: torch.device) -> list[Packed]:
    """What each launch takes, in order."""
    check_weights(spec, weights)
    return [
        _launch(spec, weights, shape, device, first, min(first + shape.layers, spec.num_layers))
        for first in range(0, spec.num_layers, shape.layers)
    ]


def _launch(
    spec: Recurrent,
    weights: Sequence[T],
    shape: Shape,
    device: torch.device,
    first: int,
    last: int,
) -> Packed:
    each = 4 if spec.bias else 2
    groups = [
        [weight.detach() for weight in weights[at * each : (at + 1) * each]]
        for at in range(first * spec.directions, last * spec.directions)
    ]
    inputs = groups[0][0].shape[1]
    before = fed_before(spec, shape, inputs)
    width = input_width(spec, shape)
    blank = torch.zeros(spec.gates * spec.hidden_size, width, dtype=spec.dtype)
    if width == 1:
        w_x = [blank[:1]]
    else:
        w_x = [
            blank if before and at == 0 else padded(group[0], width)
            for at, group in enumerate(groups)
        ]
    w_pre = None
    if before:
        fed = groups if spec.bidirectional else groups[:1]
        w_pre = torch.cat([group[0] for group in fed]).contiguous().to(device)
    return Packed(
        first,
        last,
        inputs,
        w_pre,
        torch.stack([weight.to(device) for weight in w_x]).contiguous(),
        torch.stack([padded(group[1], power(spec.hidden_size)) for group in groups]).to(device),
        torch.stack([biases(spec, group[2:]) for group in groups]).to(device),
    )


def padded(weight: T, width: int) -> T:
    """With columns of zeros up to a width."""
    padded = weight.new_zeros(weight.shape[0], width)
    padded[:, : weight.shape[1]] = weight
    return padded


def biases(spec: Recurrent, pair: Sequence[T]) -> T:
    """The biases of a layer as [slots, hidden] in f32."""
    size = spec.hidden_size
    if not pair:
        return torch.zeros(spec.slots, size)
    given, past = (bias.float().cpu().reshape(spec.gates, size) for bias in pair)
    if spec.cell == "gru":
        return torch.cat([given[:2] + past[:2], given[2:], past[2:]])
    return given + past
