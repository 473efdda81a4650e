"""Element by element: operators of PyTorch as short expressions over matrices.

An expression is a list of (function, operand, operand); an operand is `r0` (what the op reads),
`s0` (the result of an earlier line), `w0` (a constant per column) or a number. Operands of one row
or one column stand for all of them, as PyTorch broadcasts.
"""

from collections.abc import Callable
from typing import Any

import torch

from partita.capture.torch_program import Ref
from partita.gpu.flow.read import Held
from partita.gpu.flow.steps import Flow, Step
from partita.gpu.rtasks.drafts import Draft, Values

T = torch.Tensor
Operand = str | float
MOST_READS, MOST_WIDE = 6, 3  # columns of a region's table
MOST_CONSTANT = 1 << 22  # elements of a constant that is spelled out
UNARY = {
    "neg": "neg", "abs": "abs", "exp": "exp", "log": "log", "sqrt": "sqrt", "rsqrt": "rsqrt",
    "square": "square", "reciprocal": "reciprocal", "relu": "relu", "sigmoid": "sigmoid",
    "tanh": "tanh", "silu": "silu",
}  # fmt: skip
BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "maximum": "maximum",
    "minimum": "minimum",
}  # fmt: skip


class UnfitError(Exception):
    """Why a step has no tile form; becomes the reason of a fallback."""


class Expression:
    """The lines of one operator, as they are written."""

    def __init__(self, flow: Flow, values: Values, step: Step) -> None:
        self.flow, self.values, self.step = flow, values, step
        self.reads: list[str] = []
        self.wide: list[T] = []
        self.constants: list[tuple[str, T]] = []
        self.lines: list[tuple[Any, ...]] = []
        _settle_layout(values, step)
        self.out = values.matrix(step.name)

    def line(self, fn: str, *operands: Operand) -> str:
        """One more line; the name of its result."""
        self.lines.append((fn, *operands))
        return f"s{len(self.lines) - 1}"

    def operand(self, value: Any) -> Operand:
        """An argument of the operator as an operand."""
        if isinstance(value, bool):
            raise UnfitError("a truth value among its arguments has no tile form")
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, Ref):
            return self.read(value.name)
        if isinstance(value, Held):
            return self.constant(self.flow.constants[value])
        raise UnfitError(f"an argument {value!r} has no tile form")

    def read(self, name: str) -> str:
        """A value as an operand; its rows and columns must be the output's, or one."""
        if name in self.reads:
            return f"r{self.reads.index(name)}"
        matrix, out = self.values.matrix(name), self.out
        if matrix.rows not in (1, out.rows) or matrix.cols not in (1, out.cols):
            raise UnfitError(
                f"{name} has {matrix.rows} x {matrix.cols} elements beside {out.rows} x {out.cols}"
            )
        self.reads.append(name)
        return f"r{len(self.reads) - 1}"

    def constant(self, value: T) -> Operand:
        """A number, a vector over the columns, or a whole matrix."""
        if not value.is_floating_point():
            raise UnfitError(f"a constant of {value.dtype} has no tile form")
        if value.numel() == 1:
            return float(value)
        shape = self.values.shapes[self.step.name]
        at = 1 if self.values.is_image(self.step.name) else len(shape) - 1
        full = value.reshape((1,) * (len(shape) - value.dim()) + tuple(value.shape))
        if all(size == 1 for dim, size in enumerate(full.shape) if dim != at):
            self.wide.append(full.reshape(-1).float())
            return f"w{len(self.wide) - 1}"
        if self.out.rows * self.out.cols > MOST_CONSTANT:
            raise UnfitError(f"a constant of {list(value.shape)} is too large to spell out")
        matrix = full.expand(shape).movedim(at, -1).reshape(self.out.rows, self.out.cols)
        name = f"{self.step.name}.constant{len(self.constants)}"
        self.values.shapes[name] = tuple(matrix.shape)
        self.values.dtypes[name] = self.values.dtype
        self.constants.append((name, matrix.to(self.values.dtype).contiguous()))
        self.reads.append(name)
        return f"r{len(self.reads) - 1}"

    def draft(self) -> Draft:
        """The operator as a chain."""
        if len(self.reads) > MOST_READS or len(self.wide) > MOST_WIDE:
            raise UnfitError(f"{len(self.reads)} operands are more than a tile reads")
        if not self.reads:
            raise UnfitError("it reads nothing")
        return Draft(
            self.step.name, "chain", tuple(self.reads), (self.step.name,),
            {"steps": tuple(self.lines)}, wide=tuple(self.wide), constants=tuple(self.constants),
        )  # fmt: skip


def _settle_layout(values: Values, step: Step) -> None:
    """All operands of four dims lie alike."""
    names = [name for name in (*step.inputs, step.name) if len(values.shapes.get(name, ())) == 4]
    known = [values.images[name] for name in names if name in values.images]
    image = known[0] if known else True
    for name in step.inputs:
        if not values.is_tensor(name):
            raise UnfitError(f"{name} is {values.dtypes.get(name, 'several values')}")
        if names and image and name not in names:
            raise UnfitError(f"{name} is no image beside an image")
    for name in (*step.inputs, step.name):
        if not values.take(name, image=image and name in names):
            raise UnfitError(f"{name} lies otherwise in memory, or is not {values.dtype}")


Rule = Callable[[Expression, tuple[Any, ...], dict[str, Any]], None]


def chain_rule(target: str) -> Rule | None:
    """How an operator is written as lines; None if it is not element by element."""
    name = target.removeprefix("aten.").partition(".")[0].removesuffix("_")
    if name in UNARY:
        return lambda e, args, kwargs: _unary(e, UNARY[name], args)
    if name in BINARY:
        return lambda e, args, kwargs: _binary(e, BINARY[name], args, kwargs)
    return RULES.get(name)


def _unary(e: Expression, fn: str, args: tuple[Any, ...]) -> None:
    e.line(fn, e.operand(args[0]))


def _binary(e: Expression, fn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("rounding_mode"):
        raise UnfitError("a division that rounds has no tile form")
    a, b = e.operand(args[0]), e.operand(args[1])
    alpha = float(kwargs.get("alpha", args[2] if len(args) > 2 else 1))
    if alpha != 1.0:
        b = e.line("mul", b, alpha)
    e.line(fn, a, b)


def _rsub(e: Expression, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _binary(e, "sub", (args[1], args[0]), kwargs)


def _gelu(e: Expression, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tanh = kwargs.get("approximate", args[1] if len(args) > 1 else "none") == "tanh"
    _unary(e, "gelu_tanh" if tanh else "gelu", args)


def _clamp(e: Expression, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    low = args[1] if len(args) > 1 else kwargs.get("min")
    high = args[2] if len(args) > 2 else kwargs.get("max")
    _between(e, e.operand(args[0]), low, high)


def _between(e: Expression, x: Operand, low: Any, high: Any) -> Operand:
    if low is not None:
        x = e.line("maximum", x, float(low))
    if high is not None:
        x = e.line("minimum", x, float(high))
    return x


def _hardtanh(e: Expression, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    low = args[1] if len(args) > 1 else -1.0
    high = args[2] if len(args) > 2 else 1.0
    if (low, high) == (-1.0, 1.0):
        _unary(e, "hardtanh", args)
    else:
        _between(e, e.operand(args[0]), low, high)


def _relu6(e: Expression, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _between(e, e.operand(args[0]), 0.0, 6.0)


def _hard(e: Expression, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    shifted = e.line("add", e.operand(args[0]), 3.0)
    return e.line("mul", _between(e, shifted, 0.0, 6.0), 1.0 / 6.0)


def _hardsigmoid(e: Expression, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _hard(e, args, kwargs)


def _hardswish(e: Expression, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    e.line("mul", e.operand(args[0]), _hard(e, args, kwargs))


def _leaky_relu(e: Expression, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    slope = float(args[1]) if len(args) > 1 else 0.01
    if slope > 1.0:
        raise UnfitError(f"a slope of {slope} below zero has no tile form")
    x = e.operand(args[0])
    e.line("maximum", x, e.line("mul", x, slope))


def _pow(e: Expression, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    fn = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}.get(_exponent(args[1]))
    if fn is None:
        raise UnfitError(f"a power of {args[1]} has no tile form")
    _unary(e, fn, args)


def _exponent(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


RULES: dict[str, Rule] = {
    "clamp": _clamp,
    "gelu": _gelu,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "hardtanh": _hardtanh,
    "leaky_relu": _leaky_relu,
    "pow": _pow,
    "relu6": _relu6,
    "rsub": _rsub,
}
