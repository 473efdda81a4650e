"""Calls of autograd's engine without the checks around them.

`torch.autograd.grad` and `backward` check shapes and types of every gradient in Python; what comes
here was checked when the program was verified. Op by op those checks are half of a call's time.
"""

from collections.abc import Sequence

import torch

T = torch.Tensor
_engine = torch.autograd.Variable._execution_engine


def differentiate(
    outputs: Sequence[T], inputs: Sequence[T], gradients: Sequence[T], *, retain: bool
) -> Sequence[T | None]:
    """Gradients of inputs; None for one that no output depends on."""
    if not outputs or not inputs:
        return [None] * len(inputs)
    results: tuple[T | None, ...] = _engine.run_backward(
        tuple(outputs), tuple(gradients), retain, False, tuple(inputs), allow_unreachable=True,
        accumulate_grad=False,
    )  # fmt: skip
    return results


def add_gradients(outputs: Sequence[T], gradients: Sequence[T], leaves: Sequence[T] = ()) -> None:
    """Add to the gradients of some leaves, or of all that the outputs depend on, in place."""
    _engine.run_backward(
        tuple(outputs), tuple(gradients), False, False, tuple(leaves), allow_unreachable=True,
        accumulate_grad=True,
    )  # fmt: skip
