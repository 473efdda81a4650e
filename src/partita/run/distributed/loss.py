"""A module together with its loss, as one module that returns the loss."""

from collections.abc import Callable
from typing import Any

import torch


class WithLoss(torch.nn.Module):
    """Calls `module` with all arguments but the last, and `loss` with what it gives and the last.

    Parameters have the names that they have in `module`, behind `module.`.
    """

    def __init__(self, module: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, *args: Any) -> torch.Tensor:
        """The loss of one batch."""
        return self.loss(self.module(*args[:-1]), args[-1])


def with_loss(module: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> torch.nn.Module:
    """A module that returns the loss: `loss(module(*args[:-1]), args[-1])`."""
    return WithLoss(module, loss)
