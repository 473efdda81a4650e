"""Is an output right? Compared with the model in float64, beside PyTorch's own run of the model.

In that run numbers that a model makes in a type of its own (a state of zeros, a norm in float32)
are float64 as well. The yardstick is how far PyTorch itself is off: the model as it was given, and
its operators in order with norms folded (the sequential graph). An output may be twice as far from
the reference, or off by the rounding of its last values, where PyTorch happens to be exact. The
sequential graph itself may be as far off as rounding explains: u sqrt(depth) with the unit roundoff
u of the factors of products and `depth` operators one after the other, if their errors are
independent; or twice that.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from partita.errors import VerificationError
from partita.gpu.flow.export import evaluating
from partita.gpu.flow.steps import T

# Unit roundoff; sums of float32 in another order count, not one product.
ROUNDOFF = {
    torch.float64: 2.0**-46, torch.float32: 2.0**-21, torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}  # fmt: skip
TF32_ROUNDOFF = 2.0**-11
NARROWING = (T.float, T.half, T.bfloat16)
MOST = 2.0  # times PyTorch's own error, or what rounding explains


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """Exact outputs, and how far PyTorch is from them."""

    outputs: tuple[T, ...]
    errors: tuple[float, ...]
    floor: float  # what is allowed in any case
    exact: bool = True  # did the model run in float64? if not, these are its own outputs

    def error(self, outputs: tuple[T, ...]) -> float:
        """The largest relative error of some outputs."""
        return max(map(relative, outputs, self.outputs))

    def beside(self, outputs: tuple[T, ...]) -> "ReferenceOutput":
        """With these outputs of PyTorch's operators as a yardstick as well; and no more than it.

        Where the model does not run in float64, how far it is off is not known, and rounding over
        its depth is what is allowed.
        """
        errors = tuple(map(max, self.errors, map(relative, outputs, self.outputs)))
        if not self.exact:
            return replace(self, errors=errors)
        return replace(self, errors=errors, floor=MOST * ROUNDOFF.get(outputs[0].dtype, 0.0))

    def holds(self, outputs: tuple[T, ...]) -> bool:
        """Are they as right as the model itself, up to rounding of its kind?"""
        return all(
            relative(mine, exact) <= max(MOST * given, self.floor)
            for mine, exact, given in zip(outputs, self.outputs, self.errors, strict=True)
        )


def relative(new_t: T, exact: T) -> float:
    """The norm of the difference over the norm; infinite if anything is not a number."""
    if new_t.shape != exact.shape:
        return float("inf")
    if not new_t.is_floating_point():
        return 0.0 if torch.equal(new_t, exact.to(new_t.dtype)) else float("inf")
    error = (new_t.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-300)
    value = float(error)
    return value if value == value else float("inf")


def reference_output(
    module: nn.Module, inputs: tuple[T, ...], depth: int = 1, seed: int = 0
) -> ReferenceOutput:
    """The module in float64, or as it is where that does not run; `depth` operators deep."""
    with evaluating(module), torch.no_grad():
        torch.manual_seed(seed)
        given = as_tuple(module(*inputs))
        try:
            wide = copy.deepcopy(module).double()
            torch.manual_seed(seed)
            with any_kernel(), _AllWide():
                exact = as_tuple(wide(*(_wide(each) for each in inputs)))
            known = True
        except (RuntimeError, TypeError, MemoryError):
            exact, known = tuple(each.clone() for each in given), False
    dtype = given[0].dtype
    roundoff = ROUNDOFF.get(dtype, 0.0)
    if dtype == torch.float32 and given[0].is_cuda and torch.backends.cudnn.allow_tf32:
        roundoff = TF32_ROUNDOFF
    floor = MOST * roundoff * math.sqrt(depth)
    errors = tuple(map(relative, given, exact))
    if any(error == float("inf") for error in errors):
        raise VerificationError(
            ("the model's own output is not a number: nothing can be checked against it",)
        )
    return ReferenceOutput(exact, errors, floor, known)


class _AllWide(TorchFunctionMode):
    """Whatever floating type a model asks for, it gets float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in NARROWING:
            return args[0].double()
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None  # of an exported program: what it asserts are the types it had
        named = {name: _wide_type(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide_type, args), **named)


def _wide_type(value: Any) -> Any:
    """A number type no longer than float32 becomes float64."""
    narrow = isinstance(value, torch.dtype) and value in ROUNDOFF
    return torch.float64 if narrow else value


@contextmanager
def any_kernel() -> Iterator[None]:
    """Without cuDNN's search for the fastest one: seconds, for a run that is not timed."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _wide(value: T) -> T:
    return value.double() if value.is_floating_point() else value


def as_tuple(outputs: object) -> tuple[T, ...]:
    """The tensors of an output, whatever it is nested in; one alone is a tuple of one."""
    leaves = tree_flatten(outputs)[0]
    for leaf in leaves:
        if not isinstance(leaf, T):
            raise VerificationError(
                (f"an output of type {type(leaf).__name__} cannot be compared",)
            )
    return tuple(leaves)
