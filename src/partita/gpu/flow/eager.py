"""What each step computes, in PyTorch's own operators: the meaning, and one way to run it.

On a GPU a convolution with bias and ReLU (and a residual) is cuDNN's one fused call where it takes
the arguments; everywhere else each operator is launched by itself.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as nnf

from partita.capture.torch_program import Ref
from partita.gpu.flow.read import Held
from partita.gpu.flow.steps import Step, T

Constants = Mapping[str, T]


def compute(step: Step, values: Mapping[str, Any], constants: Constants) -> Any:
    """The value of a step from the values it reads."""
    return RULES[step.kind](step, values, constants)


def _conv(step: Step, values: Mapping[str, T], constants: Constants) -> T:
    assert step.window is not None
    x = pre(step, values[step.inputs[0]], constants)
    window, weight = step.window, constants[step.weight]
    bias = constants[step.bias] if step.bias else None
    shape = (window.stride, window.padding, window.dilation, step.groups)
    whole = step.relu and step.relu_from == 0 and step.relu_to == -1
    if x.is_cuda and bias is not None and whole and x.dtype != torch.float64:
        if not step.residual:
            return torch.cudnn_convolution_relu(x, weight, bias, *shape)
        return torch.cudnn_convolution_add_relu(x, weight, values[step.residual], 1.0, bias, *shape)
    return _finish(step, nnf.conv2d(x, weight, bias, *shape), values)


def _pool(step: Step, values: Mapping[str, T], constants: Constants) -> T:
    assert step.window is not None
    x = pre(step, values[step.inputs[0]], constants)
    window = step.window
    if step.kind == "maxpool":
        y = nnf.max_pool2d(
            x, window.kernel, window.stride, window.padding, window.dilation, ceil_mode=step.ceil
        )
    else:
        y = nnf.avg_pool2d(
            x, window.kernel, window.stride, window.padding, count_include_pad=step.include_pad
        )
    if step.factor != 1.0:
        y = y * step.factor
    if step.bias:
        y = y + constants[step.bias].view(1, -1, 1, 1)
    return _finish(step, y, values)


def _combine(step: Step, values: Mapping[str, T], constants: Constants) -> T:
    total: T | None = None
    for name, factor in zip(step.inputs, step.factors, strict=True):
        term = values[name] if factor == 1.0 else values[name] * factor
        total = term if total is None else total + term
    assert total is not None
    if step.scale:
        total = _affine(total, constants[step.scale], constants[step.shift])
    return _finish(step, total, values)


def _finish(step: Step, y: T, values: Mapping[str, T]) -> T:
    if step.residual:
        y = y + values[step.residual]
    if not step.relu:
        return y
    begin, end = step.relu_from, step.relu_to if step.relu_to >= 0 else y.shape[1]
    if (begin, end) == (0, y.shape[1]):
        return nnf.relu(y)
    return torch.cat([y[:, :begin], nnf.relu(y[:, begin:end]), y[:, end:]], 1)


def pre(step: Step, x: T, constants: Constants) -> T:
    """The input as the convolution or pool sees it."""
    if step.pre.startswith("affine"):
        x = _affine(x, constants[step.pre_scale], constants[step.pre_shift])
    return nnf.relu(x) if step.pre.endswith("relu") else x


def _affine(x: T, scale: T, shift: T) -> T:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)).to(x.dtype)


def _cat(step: Step, values: Mapping[str, T], constants: Constants) -> T:
    return torch.cat([values[name] for name in step.inputs], 1)


def _part(step: Step, values: Mapping[str, T], constants: Constants) -> T:
    return values[step.inputs[0]][:, step.begin : step.end]


def _call(step: Step, values: Mapping[str, T], constants: Constants) -> Any:
    arguments = _filled(step.arguments, values, constants)
    keywords = {key: _filled(value, values, constants) for key, value in step.keywords}
    return operator_of(step.target)(*arguments, **keywords)


def _filled(value: Any, values: Mapping[str, Any], constants: Constants) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, Held):
        return constants[value]
    if isinstance(value, tuple | list):
        return type(value)(_filled(each, values, constants) for each in value)
    return value


def operator_of(target: str) -> Callable[..., Any]:
    """The operator of a name like `aten.linear.default`."""
    if target == "getitem":
        return operator.getitem
    if target in ("aten.view.default", "aten._unsafe_view.default"):
        return torch.ops.aten.reshape.default  # channels lie last
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)  # type: ignore[no-any-return]


RULES: dict[str, Callable[[Step, Mapping[str, Any], Constants], Any]] = {
    "conv": _conv,
    "depthwise": _conv,
    "maxpool": _pool,
    "avgpool": _pool,
    "combine": _combine,
    "cat": _cat,
    "part": _part,
    "call": _call,
}
