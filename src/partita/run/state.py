"""What a captured program was made of, besides the arguments: is the module still that?

A program does in every call what the module did when it was followed. Between two calls whoever
owns the module may change it: a rate of dropout that a schedule sets, a flag, an entry of its
configuration, a hook, a module that is replaced, another type of its parameters. So before a
program runs, everything that the module was asked for while it was followed is looked at again:

    modules       which there are, in which mode, with which hooks
    tensors       type, shape and whether gradients are recorded, of parameters and buffers
    attributes    those that were looked up, with what collections and objects among them hold
    arguments     type, order in memory and whether gradients are recorded
    grad mode     if the model asks for it

Which tensor a parameter is does not matter: the stages are given another (`sequential.py`).
"""

from collections import deque
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from partita.capture.exported import Captured
from partita.capture.repeats import DEEPEST, HELD, MOST, PLAIN

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
METHODS = ("forward",)  # that somebody may replace in one module
SIMPLE = (int, float, str, bool, type(None))
ABSENT = "not there"


class CapturedState:
    """What a program, or several of one module, were captured from."""

    def __init__(self, captured: Captured, arguments: Any) -> None:
        self.root = captured.module
        self.asks_grad = captured.asked.gradients
        self.asked: dict[nn.Module, set[str]] = {}
        self.arguments = kinds_of(arguments)
        self.grad = torch.is_grad_enabled()
        self.look(captured)

    def look(self, captured: Captured) -> None:
        """See what there is now; what this program was made of counts, too."""
        self.asks_grad = self.asks_grad or captured.asked.gradients
        for module, name in captured.asked.attributes:
            if _may_differ(module, name):
                self.asked.setdefault(module, set()).add(name)
        self.held: list[Any] = []  # so that no id is used twice
        self.picture = self._seen(self.held)

    def holds(self, arguments: Any) -> bool:
        """Is everything as it was?"""
        return (
            self.arguments == kinds_of(arguments)
            and (not self.asks_grad or self.grad == torch.is_grad_enabled())
            and self.picture == self._seen([])
        )

    def _seen(self, held: list[Any]) -> list[Any]:
        seen: list[Any] = []
        for module in self.root.modules():
            own = vars(module)
            seen += (id(module), own["training"])
            held.append(module)
            for table in ("_parameters", "_buffers"):
                for name, tensor in own[table].items():
                    seen += (name, _tensor_kind(tensor))
            for table in HOOKS:
                if own[table]:
                    hooks = list(own[table].values())
                    held += hooks
                    seen.append([id(hook) for hook in hooks])
        known: dict[int, Any] = {}
        for module, names in self.asked.items():
            own = vars(module)
            for name in names:
                value = own.get(name, ABSENT)
                if value is ABSENT and name not in METHODS:
                    value = _of_class(module, name)
                plain = type(value) in SIMPLE
                seen += (
                    type(value),
                    value if plain else _pictured(value, known, held, DEEPEST),
                )
        return seen


def kinds_of(arguments: Any) -> tuple[Any, ...]:
    """Types of arguments, the order of their dims in memory, and whether gradients are recorded."""
    return tuple(
        (leaf.dtype, leaf.requires_grad, _order(leaf))
        for leaf in pytree.tree_leaves(arguments)
        if isinstance(leaf, torch.Tensor)
    )


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dims from the outermost in memory to the innermost, if that is not their own order."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    return (-1, *sorted(dims, key=lambda dim: (-strides[dim], dim)))


def _tensor_kind(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    if nn.parameter.is_lazy(tensor):
        return "without a shape"
    return tensor.dtype, tensor.shape, tensor.requires_grad


def _may_differ(module: nn.Module, name: str) -> bool:
    """Is this an attribute whose value somebody may set, not a method or one of the tables?"""
    own = vars(module)
    if name.startswith("__") or any(name in own[table] for table in HELD):
        return False
    return name in own or name in METHODS or _is_value(module, name)


def _is_value(module: nn.Module, name: str) -> bool:
    """Is it of the class, and no function; or nowhere?"""
    value = _of_class(module, name)
    return value is ABSENT or isinstance(value, (*PLAIN, list, tuple, dict))


def _of_class(module: nn.Module, name: str) -> Any:
    return next((vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls)), ABSENT)


def _pictured(value: Any, known: dict[int, Any], held: list[Any], depth: int) -> Any:
    """What a value is, down to numbers and texts; anything else by which it is."""
    if isinstance(value, PLAIN):
        return type(value), value
    number = id(value)
    if number in known:
        return known[number]
    held.append(value)
    known[number] = number
    inner: Any = None
    if depth and isinstance(value, dict):
        inner = [(key if isinstance(key, PLAIN) else id(key), each) for key, each in value.items()]
    elif depth and isinstance(value, list | tuple | set | frozenset | deque):
        inner = list(enumerate(value))
    elif depth and _is_record(value):
        inner = list(vars(value).items())
    if inner is not None and len(inner) <= MOST:
        pictured = [(key, _pictured(each, known, held, depth - 1)) for key, each in inner]
        known[number] = (type(value), pictured)
    return known[number]


def _is_record(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | torch.Tensor | type)
        and not callable(value)
    )
