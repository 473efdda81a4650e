"""Products with weights, softmax and norms of rows, recurrent cells as tile ops."""

from collections.abc import Sequence
from typing import Any

import torch

from partita.capture.torch_program import Ref
from partita.gpu.flow.steps import Step
from partita.gpu.rtasks.drafts import Draft, Weight
from partita.gpu.rtasks.lower_chain import UnfitError
from partita.gpu.rtasks.reading import Reading, first_item, source_of
from partita.gpu.rtasks.tileops import MOST_ROWS

T = torch.Tensor
MOST_ROW = 16384  # columns of a softmax or norm
FLATTENING = ("aten.view.default", "aten.reshape.default", "aten.flatten.using_ints")


def _linear(r: Reading, step: Step) -> list[Draft]:
    x, weight, bias = (*step.arguments, None)[:3]
    return _product(r, step, x, r.held(weight), bias)


def _addmm(r: Reading, step: Step) -> list[Draft]:
    bias, x, weight = step.arguments[:3]
    if step.keywords:
        raise UnfitError("a product with factors has no tile form")
    held = r.held(weight)
    return _product(r, step, x, None if held is None else held.t(), bias)


def _mm(r: Reading, step: Step) -> list[Draft]:
    x, weight = step.arguments[:2]
    held = r.held(weight)
    if held is not None and held.dim() != 2:
        held = None
    return _product(r, step, x, None if held is None else held.t(), None)


def _product(r: Reading, step: Step, x: Any, weight: T | None, bias: Any) -> list[Draft]:
    if not isinstance(x, Ref) or weight is None:
        raise UnfitError("a product of two values that are both computed has no tile form")
    vector = r.held(bias)
    if bias is not None and (vector is None or vector.dim() != 1 or len(vector) != len(weight)):
        raise UnfitError("a bias that is computed, or not a vector, has no tile form")
    if weight.dtype != r.values.dtype:
        raise UnfitError(f"a weight of {weight.dtype} beside values of {r.values.dtype}")
    r.need(step.name)
    wide = None if vector is None else vector.float()
    flattened = r.maker.get(x.name)
    if flattened is not None and _is_flat_image(r, flattened):
        return [_over_image(r, step, flattened, weight, wide)]
    r.need(x.name)
    rows = r.values.matrix(x.name).rows
    if rows <= MOST_ROWS:
        attrs: dict[str, Any] = {"act": ""}
        return [
            Draft(step.name, "gemv", (x.name,), (step.name,), attrs, (Weight(weight),), (wide,))
        ]
    attrs = {
        "act": "", "pre": "", "image": (rows, 1), "out": (rows, 1), "kernel": (1, 1),
        "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "tf32": r.tf32_product,
    }  # fmt: skip
    taps = (Weight(weight.unsqueeze(1), r.tf32_product),)
    return [
        Draft(step.name, "conv", (x.name,), (step.name,), attrs, taps, (wide, None, None))
    ]  # fmt: skip


def _is_flat_image(r: Reading, step: Step) -> bool:
    """Has an image of several pixels become a row of numbers?"""
    if step.target not in FLATTENING or len(r.values.shapes.get(step.inputs[0], ())) != 4:
        return False
    batch, channels, height, width = r.values.shapes[step.inputs[0]]
    size = channels * height * width
    return height * width > 1 and r.values.shapes[step.name] == (batch, size)


def _over_image(r: Reading, step: Step, flattened: Step, weight: T, wide: T | None) -> Draft:
    """A product with a flattened image is a convolution with a window as large as the image."""
    source = flattened.inputs[0]
    r.need(source, image=True)
    _, channels, height, width = r.values.shapes[source]
    taps = weight.reshape(len(weight), channels, height * width).transpose(1, 2)
    attrs = {
        "act": "", "pre": "", "image": (height, width), "out": (1, 1), "kernel": (height, width),
        "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "tf32": r.tf32_product,
    }  # fmt: skip
    weights, steps = (Weight(taps, r.tf32_product),), (flattened.name, step.name)
    return Draft(step.name, "conv", (source,), steps, attrs, weights, (wide, None, None))


def _softmax(r: Reading, step: Step) -> list[Draft]:
    source, shape = source_of(step), r.values.shapes[step.name]
    dim = step.arguments[1] % len(shape)
    image = len(shape) == 4 and dim == 1
    if dim != len(shape) - 1 and not image:
        raise UnfitError("a softmax over another dim than the columns has no tile form")
    return [_rows(r, step, step.name, source, "softmax", 0.0, (None, None), image=image)]


def _rows(
    r: Reading, step: Step, name: str, source: str, fn: str, eps: float,
    wide: tuple[T | None, T | None], *, image: bool = False, steps: tuple[str, ...] = (),
) -> Draft:  # fmt: skip
    r.need(source, image=image)
    r.need(name, image=image)
    if r.values.matrix(source).cols > MOST_ROW:
        raise UnfitError(f"rows of more than {MOST_ROW} elements have no tile form")
    attrs = {"fn": fn, "eps": eps}
    return Draft(name, "rows", (source,), (step.name, *steps), attrs, wide=wide)


def _norm(r: Reading, step: Step) -> list[Draft]:
    """Layer norm and RMS norm over the last dim."""
    source, shape = source_of(step), step.arguments[1]
    rms = "rms" in step.target
    if len(shape) != 1:
        raise UnfitError(f"a norm over {len(shape)} dims has no tile form")
    arguments = (*step.arguments[2:], None, None, None)
    weight, bias, eps = (arguments[0], None, arguments[1]) if rms else arguments[:3]
    if any(isinstance(each, Ref) for each in (weight, bias)):
        raise UnfitError("a norm with computed weights has no tile form")
    if eps is None:
        eps = torch.finfo(r.values.dtype).eps if rms else 1e-5
    wide = tuple(None if value is None else value.float() for value in map(r.held, (weight, bias)))
    name, steps = first_item(r, step)
    fn = "rmsnorm" if rms else "layernorm"
    return [_rows(r, step, name, source, fn, float(eps), (wide[0], wide[1]), steps=steps)]


def _vector_norm(r: Reading, step: Step) -> list[Draft]:
    """A batch norm of vectors: scale and shift per column."""
    source, held = source_of(step), [r.held(each) for each in step.arguments[1:5]]
    weight, bias, mean, var = held
    name, steps = first_item(r, step)
    if len(r.values.shapes.get(source, ())) != 2 or mean is None or var is None:
        raise UnfitError("this norm has no tile form")
    if step.arguments[5] is True:
        raise UnfitError("a norm that learns has no tile form")
    eps = step.arguments[7] if len(step.arguments) > 7 else step.arguments[6]
    scale = (var.double() + eps).rsqrt()
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale
    shift = shift if bias is None else shift + bias.double()
    r.need(source)
    r.need(name)
    lines = (("mul", "r0", "w0"), ("add", "s0", "w1"))
    return [
        Draft(
            name, "chain", (source,), (step.name, *steps), {"steps": lines},
            wide=(scale.float(), shift.float()),
        )
    ]  # fmt: skip


def _lstm_cell(r: Reading, step: Step) -> list[Draft]:
    x, (h, c), *constants = step.arguments
    items = r.items.get(step.name, {})
    names = [items.get(index, f"{step.name}.{index}") for index in (0, 1)]
    held = [r.held(each) for each in constants]
    for name in names:
        r.values.shapes.setdefault(name, (1, _must(held[1]).shape[1]))
        r.values.dtypes.setdefault(name, r.values.dtype)
    reads, states = _cell(r, step, names, (x, h, c), constants)
    added = [each.float() for each in held[2:] if each is not None]
    bias = sum(added[1:], added[0]) if added else None
    weights = (Weight(_must(held[0])), Weight(_must(held[1])))
    steps = (step.name, *items.values())
    return [
        Draft(
            names[0], "lstm_cell", reads, steps, {}, weights, (bias,), constants=states,
            also=names[1],
        )
    ]  # fmt: skip


def _gru_cell(r: Reading, step: Step) -> list[Draft]:
    x, h, *constants = step.arguments
    held = [r.held(each) for each in constants]
    reads, states = _cell(r, step, [step.name], (x, h), constants)
    wide = tuple(None if each is None else each.float() for each in (*held[2:], None, None)[:2])
    weights = (Weight(_must(held[0])), Weight(_must(held[1])))
    return [
        Draft(step.name, "gru_cell", reads, (step.name,), {}, weights, wide, constants=states)
    ]  # fmt: skip


def _cell(
    r: Reading, step: Step, names: list[str], reads: tuple[Any, ...], constants: Sequence[Any]
) -> tuple[tuple[str, ...], tuple[tuple[str, T], ...]]:
    """The values a cell reads, and those of them that are constant: states that begin as zeros."""
    if any(isinstance(each, Ref) for each in constants) or r.held(constants[0]) is None:
        raise UnfitError("a cell with computed weights has no tile form")
    cell: list[str] = []
    states: list[tuple[str, T]] = []
    for index, each in enumerate(reads):
        held = r.held(each)
        if held is None:
            cell.append(each.name)
            continue
        name = f"{step.name}.state{index}"
        r.values.shapes[name], r.values.dtypes[name] = tuple(held.shape), held.dtype
        states.append((name, held.reshape(1, -1)))
        cell.append(name)
    for name in (*cell, *names):
        r.need(name)
        if r.values.matrix(name).rows != 1:
            raise UnfitError(f"a cell with {r.values.matrix(name).rows} rows has no tile form")
    return tuple(cell), tuple(states)


def _must(value: T | None) -> T:
    assert value is not None
    return value


CALLS = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "aten.mm.default": _mm,
    "aten.matmul.default": _mm,
    "aten.softmax.int": _softmax,
    "aten._softmax.default": _softmax,
    "aten.layer_norm.default": _norm,
    "aten.native_layer_norm.default": _norm,
    "aten.rms_norm.default": _norm,
    "aten.batch_norm.default": _vector_norm,
    "aten._native_batch_norm_legit_no_training.default": _vector_norm,
    "aten.lstm_cell.default": _lstm_cell,
    "aten.gru_cell.default": _gru_cell,
}
