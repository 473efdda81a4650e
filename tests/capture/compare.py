"""Running a module and what became of it side by side."""

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Ran = tuple[list[torch.Tensor], dict[str, torch.Tensor | None], dict[str, torch.Tensor]]


def ran(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
    """Outputs, gradients of the parameters, and buffers after one step, from one seed."""
    torch.manual_seed(1)
    out = [value for value in pytree.tree_leaves(module(*args, **kwargs)) if torch.is_tensor(value)]
    weights = [torch.linspace(1, 2, value.numel()).view(value.shape) for value in out]
    total = sum((v.double() * w).sum() for v, w in zip(out, weights, strict=True))
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return out, gradients, {name: b.clone() for name, b in module.named_buffers()}


def same(a: torch.Tensor | None, b: torch.Tensor | None, exactly: bool = True) -> bool:
    """Bit for bit, or up to rounding, when zeros may be missing; no tensor is like no tensor.

    Rounding is of the largest number: where large ones cancel, what is left may differ by more.
    """
    if a is None or b is None:
        zeros = not exactly and not any(t is not None and t.any() for t in (a, b))
        return a is b or zeros
    if exactly:
        return torch.equal(a, b)
    finite = b[b.isfinite()].double().abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 + 1e-6 * largest)


def differences(ran: Ran, wanted: Ran, exact_gradients: bool = True) -> list[str]:
    """What is not the same, by name: bit for bit, gradients up to rounding if so asked."""
    pairs = enumerate(zip(ran[0], wanted[0], strict=True))
    bad = [f"output {i}" for i, (a, b) in pairs if not same(a, b)]
    for what, ours, theirs, exactly in (
        ("gradient", ran[1], wanted[1], exact_gradients),
        ("buffer", ran[2], wanted[2], True),
    ):
        bad += [f"{what} {n}" for n, v in theirs.items() if not same(ours.get(n), v, exactly)]
    return bad
