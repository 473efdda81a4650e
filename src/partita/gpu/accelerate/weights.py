"""Have the weights changed since? What was compiled has copies of some of them, folded in."""

from collections.abc import Callable
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import nn

T = torch.Tensor
Marks = tuple[list[int], list[int], list[int]]
version: Callable[[T], int] = attrgetter("_version")


class WeightWatch:
    """Notices weights and buffers that are written in place, given new memory, or replaced."""

    def __init__(self, module: nn.Module) -> None:
        slots: list[tuple[dict[str, Any], str]] = [
            (held, name)
            for each in module.modules()
            for held in (each._parameters, each._buffers)
            for name, value in held.items()
            if value is not None
        ]
        self._held = [held for held, _ in slots]
        self._names = [name for _, name in slots]
        self.tensors: list[T] = list(map(getitem, self._held, self._names))
        self._first = self._marks()

    def _marks(self) -> Marks:
        """Which tensors there are, how often each was written, where it lies."""
        now = list(map(getitem, self._held, self._names))
        return list(map(id, now)), list(map(version, now)), list(map(T.data_ptr, now))

    def changed(self) -> bool:
        """Is any of them not what it was?"""
        try:
            return self._marks() != self._first
        except KeyError:  # a weight was taken away
            return True
