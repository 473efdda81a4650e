"""From a PyTorch module or an ONNX file to a Graph.

`capture(module, args, kwargs)` is what users call, also as `partita.capture(...)`: this package is
itself callable, because the function and the package share their name.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partita.capture.exported import Captured
    from partita.graph.record import Graph


def capture(
    module: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    name: str | None = None,
    checkpointing: str = "refuse",
) -> "Graph":
    """The graph of one call of a PyTorch module with these arguments; nothing is computed."""
    return export_module(module, args, kwargs, name=name, checkpointing=checkpointing).graph


def export_module(
    module: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    name: str | None = None,
    checkpointing: str = "refuse",
) -> "Captured":
    """A module with its exported program and the graph of it; `exported.py` says how."""
    from partita.capture.installed import need_torch

    need_torch()
    from partita.capture.exported import export

    return export(module, args, kwargs or {}, name=name, checkpointing=checkpointing)


class _Callable(ModuleType):
    """A module that is called like the function of its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> "Graph":
        return capture(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
