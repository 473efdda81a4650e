"""Convolutions, windows and sums over images as tile ops."""

from typing import Any

import torch

from partita.gpu.flow.place import EIGHT
from partita.gpu.flow.steps import Step, Window
from partita.gpu.rtasks.drafts import Draft, Weight
from partita.gpu.rtasks.lower_chain import UnfitError
from partita.gpu.rtasks.reading import Reading, source_of
from partita.gpu.rtasks.tileops import MOST_TERMS

T = torch.Tensor
MOST_GROUPS = 8  # of a convolution that is cut into its groups
MOST_TAPS, MOST_WIDTH = 1024, 32  # of a window: rows are a loop, columns are written out
MOST_DENSE = 1 << 20  # elements of a grouped convolution's weight, spelled out with its zeros


def _conv(r: Reading, step: Step) -> list[Draft]:
    _windowed(r, step)
    weight = r.flow.constants[step.weight]
    if step.groups > 1:
        return _grouped(r, step, weight)
    ordered = weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1, weight.shape[1])
    return [_conv_draft(r, step, step.name, step.inputs[0], step.residual, ordered)]


def _conv_draft(
    r: Reading, step: Step, name: str, x: str, residual: str, weight: T,
    rows: slice = slice(None), cols: slice = slice(None),
) -> Draft:  # fmt: skip
    bias, scale, shift = map(r.constant, (step.bias, step.pre_scale, step.pre_shift))
    wide = tuple(
        None if value is None else value[some]
        for value, some in ((bias, rows), (scale, cols), (shift, cols))
    )
    tf32 = r.rounds(step)
    return Draft(
        name, "conv", (x, residual) if residual else (x,), (step.name,),
        {**_window_attrs(r, step), "pre": step.pre, "tf32": tf32},
        weights=(Weight(weight[rows], tf32),), wide=wide,
    )  # fmt: skip


def _grouped(r: Reading, step: Step, weight: T) -> list[Draft]:
    """Wide groups as convolutions of their own, side by side; narrow ones with zeros between."""
    cout, width, kh, kw = weight.shape
    each = cout // step.groups
    ordered = weight.permute(0, 2, 3, 1).reshape(cout, kh * kw, width)
    if width % EIGHT == 0 and each % EIGHT == 0 and step.groups <= MOST_GROUPS:
        return _apart(r, step, ordered, each)
    if weight.numel() * step.groups > MOST_DENSE:
        raise UnfitError(f"a convolution of {step.groups} narrow groups has no tile form")
    dense = ordered.new_zeros(cout, kh * kw, width * step.groups)
    for group in range(step.groups):
        rows, cols = _slice(group, each), _slice(group, width)
        dense[rows, :, cols] = ordered[rows]
    return [_conv_draft(r, step, step.name, step.inputs[0], step.residual, dense)]


def _apart(r: Reading, step: Step, weight: T, each: int) -> list[Draft]:
    width = weight.shape[2]
    items: list[Draft] = []
    names: list[str] = []
    for group in range(step.groups):
        rows, cols = _slice(group, each), _slice(group, width)
        x = _part(r, step, step.inputs[0], group, width, items)
        residual = _part(r, step, step.residual, group, each, items) if step.residual else ""
        name = f"{step.name}.group{group}"
        r.values.add(name, step.name, each)
        items.append(_conv_draft(r, step, name, x, residual, weight, rows, cols))
        names.append(name)
    items.append(Draft(step.name, "cat", tuple(names), (step.name,)))
    return items


def _part(r: Reading, step: Step, source: str, group: int, width: int, items: list[Draft]) -> str:
    name = f"{step.name}.{source}.{group}"
    r.values.add(name, source, width)
    items.append(Draft(name, "part", (source,), (), begin=group * width))
    return name


def _slice(group: int, width: int) -> slice:
    return slice(group * width, (group + 1) * width)


def _windowed(r: Reading, step: Step) -> None:
    for name in (*step.uses, step.name):
        r.need(name, image=True)


def _window_attrs(r: Reading, step: Step) -> dict[str, Any]:
    window, shapes = step.window or Window((1, 1)), r.values.shapes
    return {
        "act": "relu" if step.relu else "",
        "image": shapes[step.inputs[0]][2:],
        "out": shapes[step.name][2:],
        "kernel": window.kernel,
        "stride": window.stride,
        "padding": window.padding,
        "dilation": window.dilation,
    }


def _window(r: Reading, step: Step) -> list[Draft]:
    _windowed(r, step)
    weights: tuple[Weight, ...] = ()
    if step.kind == "depthwise":
        weight = r.flow.constants[step.weight]
        weights = (Weight(weight.reshape(len(weight), -1).t()),)
    if step.pre not in ("", "relu"):
        raise UnfitError("a norm before a pool has no tile form")
    if step.window is not None:
        _check_taps(*step.window.kernel)
    attrs = {
        **_window_attrs(r, step), "pre": step.pre, "mode": step.kind, "factor": step.factor,
        "include_pad": step.include_pad,
    }  # fmt: skip
    wide = (r.constant(step.bias),)
    return [Draft(step.name, "window", step.uses, (step.name,), attrs, weights, wide)]


def _check_taps(height: int, width: int) -> None:
    if height * width > MOST_TAPS or width > MOST_WIDTH:
        raise UnfitError(f"a window of {height} x {width} has no tile form")


def _combine(r: Reading, step: Step) -> list[Draft]:
    known = [r.values.images[name] for name in step.inputs if name in r.values.images]
    image = bool(step.scale) or not known or known[0]
    for name in (*step.inputs, step.name):
        r.need(name, image=image)
    if len(step.inputs) > MOST_TERMS or step.residual:
        raise UnfitError(f"a sum of {len(step.uses)} terms has no tile form")
    attrs = {"act": "relu" if step.relu else "", "factors": step.factors}
    wide = (r.constant(step.scale), r.constant(step.shift))
    return [Draft(step.name, "combine", step.inputs, (step.name,), attrs, wide=wide)]


def _mean(r: Reading, step: Step) -> list[Draft]:
    """The average of all pixels."""
    source = source_of(step)
    dims = step.arguments[1] if len(step.arguments) > 1 else None
    shape = r.values.shapes.get(source, ())
    if step.target == "aten.adaptive_avg_pool2d.default" and tuple(dims or ()) == shape[2:]:
        r.need(source, image=True)
        r.need(step.name, image=True)
        return [Draft(step.name, "part", (source,), (step.name,))]  # nothing to average
    if step.target == "aten.adaptive_avg_pool2d.default":
        fits = len(shape) == 4 and list(dims or ()) == [1, 1]
    else:
        fits = len(shape) == 4 and sorted(dim % 4 for dim in dims or ()) == [2, 3]
    if not fits:
        raise UnfitError("a mean over anything but all pixels has no tile form")
    _check_taps(shape[2], shape[3])
    r.need(source, image=True)
    r.need(step.name, image=len(r.values.shapes[step.name]) == 4)
    attrs = {
        "act": "", "pre": "", "image": shape[2:], "out": (1, 1), "kernel": shape[2:],
        "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "mode": "avgpool", "factor": 1.0,
        "include_pad": True,
    }  # fmt: skip
    return [Draft(step.name, "window", (source,), (step.name,), attrs, wide=(None,))]


RULES = {
    "conv": _conv,
    "depthwise": _window,
    "maxpool": _window,
    "avgpool": _window,
    "combine": _combine,
}
CALLS = {"aten.adaptive_avg_pool2d.default": _mean, "aten.mean.dim": _mean}
