"""Constant tensors as source: numbers written out, or the call that makes a well-known pattern."""

from collections.abc import Callable

import torch

from partita.emit.steps import MOST_WRITTEN_OUT
from partita.emit.text import Bracket, Expr, call, literal

FEW = 8  # elements that are written out even where they follow a pattern
_INFERRED = (torch.float32, torch.int64, torch.bool)  # what torch.tensor makes of Python's numbers


def tensor_literal(data: torch.Tensor, beside: str | None = None) -> Expr:
    """`torch.tensor([1.0, 2.0])`, on the device of a tensor at hand."""
    settings: dict[str, Expr] = {}
    if data.dtype not in _INFERRED or data.numel() == 0:
        settings["dtype"] = literal(data.dtype)
    if beside is not None:
        settings["device"] = f"{beside}.device"
    return call("torch.tensor", [literal(data.tolist())], settings)


def tensor_expr(data: torch.Tensor | None) -> Expr | None:
    """Source that makes the tensor; None where only its data would say what it is."""
    if data is None or type(data) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return None
    if data.device.type == "meta" or data.is_complex() or data.is_quantized or data.is_sparse:
        return None
    data = data.detach().cpu()
    patterns = (pattern(data) for pattern in _PATTERNS) if data.numel() > FEW else ()
    tensor_expr = next((expr for expr in patterns if expr is not None), None)
    if tensor_expr is None and data.numel() <= MOST_WRITTEN_OUT:
        return tensor_literal(data)
    return tensor_expr


def _full(data: torch.Tensor) -> Expr | None:
    first = data.flatten()[0].item()
    if first != first or not torch.equal(data, torch.full_like(data, first)):
        return None
    return call("torch.full", [_sizes(data), literal(first)], {"dtype": literal(data.dtype)})


def _count(data: torch.Tensor) -> Expr | None:
    numbers = torch.arange(data.numel(), dtype=data.dtype) if data.dtype != torch.bool else None
    if numbers is None or not torch.equal(data.flatten(), numbers):
        return None
    text = f"torch.arange({data.numel()}, dtype={data.dtype})"
    return text if data.dim() == 1 else call(f"{text}.reshape", [_sizes(data)])


def _triangle(method: str, diagonal: int) -> Callable[[torch.Tensor], Expr | None]:
    def pattern(data: torch.Tensor) -> Expr | None:
        if data.dim() < 2:
            return None
        ones = getattr(torch.ones_like(data), method)(diagonal)
        if not torch.equal(data, ones):
            return None
        made = call("torch.ones", [_sizes(data)], {"dtype": literal(data.dtype)})
        return f"{made}.{method}({diagonal or ''})"

    return pattern


_PATTERNS = (
    _full, _count, _triangle("tril", 0), _triangle("triu", 1), _triangle("triu", 0),
    _triangle("tril", -1),
)  # fmt: skip


def _sizes(data: torch.Tensor) -> Expr:
    return Bracket("(", tuple(literal(int(s)) for s in data.shape), ")", display=True)
