"""The types of what functions of emitted code take and give."""

from collections.abc import Sequence

import torch

from partita.capture.torch_program import TensorSpec
from partita.emit.steps import EmittedValue

MOST_SPELLED = 4  # results whose types are written one by one


def annotation(gives: Sequence[EmittedValue]) -> str:
    """The type of a function's result."""
    kinds = [type_of(value) for value in gives]
    if len(kinds) < 2:
        return kinds[0] if kinds else "None"
    if len(kinds) > MOST_SPELLED:
        return f"tuple[{' | '.join(dict.fromkeys(kinds))}, ...]"
    return f"tuple[{', '.join(kinds)}]"


def type_of(value: EmittedValue) -> str:
    """Tensors are passed around, and rarely a number that was read off one."""
    if isinstance(value.meta, TensorSpec):
        return "Tensor"
    return "int" if isinstance(value.meta, int | torch.SymInt) else "float"
