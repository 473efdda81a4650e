"""A custom `torch.autograd.Function` in a captured program: one operator, with its own backward.

`torch.export` would follow a Function's forward and lose its backward. So a call of one becomes a
call of an operator that is made for it, `partita_functions::Name_1a2b3c4d`: the program holds it as
one node, and whoever runs the node runs `Function.apply`, autograd included. What is no tensor
among the arguments is a part of the operator. Emitted code imports the class where that is
possible and calls it (`source_of`).

An operator lives as long as the process, as all of PyTorch's do; its name is made of the class and
the arguments, so that two captures of one model give the same program.
"""

import contextlib
import functools
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._pytree import tree_leaves

NAMESPACE = "partita_functions"
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class CarriedFunction:
    """A Function with those of its arguments that are no tensors; `None` stands for a tensor."""

    cls: type[torch.autograd.Function]
    fixed: tuple[Any, ...]
    tensors: tuple[int, ...]  # places of tensors among the arguments

    def arguments(self, tensors: Sequence[Any]) -> list[Any]:
        """All arguments, with these as the tensors."""
        arguments = list(self.fixed)
        for place, tensor in zip(self.tensors, tensors, strict=True):
            arguments[place] = tensor
        return arguments


class NotCarried(Exception):  # noqa: N818
    """A call that no operator can stand for, in words."""


_known: dict[str, CarriedFunction] = {}  # by the name of the operator


def carried(cls: type[torch.autograd.Function], args: tuple[Any, ...], apply: Any) -> Any:
    """What a call of the Function gives, by its operator; `apply` is the Function's own."""
    places = tuple(i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor))
    fixed = tuple(None if i in places else arg for i, arg in enumerate(args))
    if any(map(_may_hold_tensors, fixed)):
        raise NotCarried("takes something that may hold tensors")
    if not places:
        raise NotCarried("takes no tensor")
    function = CarriedFunction(cls, fixed, places)
    tensors = [args[place] for place in places]
    name = _name(function, _outputs(apply, args, tensors))
    return getattr(getattr(torch.ops, NAMESPACE), name).default(*tensors)


def _may_hold_tensors(value: Any) -> bool:
    """A collection with tensors in it, a module, a function; settings of any class hold none."""
    leaves = tree_leaves(value)
    kinds = (torch.Tensor, torch.nn.Module)
    return any(isinstance(leaf, kinds) or callable(leaf) for leaf in leaves)


def _outputs(apply: Any, args: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> int:
    """How many tensors it gives, 0 for one that is not in a tuple; nothing is recorded."""
    versions = [tensor._version for tensor in tensors]
    with disable_proxy_modes_tracing(), torch.no_grad(), own_apply():
        given = apply(*args)
    if versions != [tensor._version for tensor in tensors]:
        raise NotCarried("changes its arguments in place")
    if isinstance(given, torch.Tensor):
        return 0
    if not isinstance(given, tuple) or not all(isinstance(out, torch.Tensor) for out in given):
        raise NotCarried("gives something else than tensors")
    return len(given)


def _name(function: CarriedFunction, outputs: int) -> str:
    """The operator's name; it is made where there is none."""
    cls = function.cls
    settings = [arg if isinstance(arg, PLAIN) else type(arg) for arg in function.fixed]
    text = f"{cls.__module__}.{cls.__qualname__} {settings} {function.tensors} {outputs}"
    stem = f"{cls.__name__}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    name, number = stem, 0
    while name in _known and _known[name] != function:  # another class of the same name
        number += 1
        name = f"{stem}_{number}"
    if name not in _known:
        _known[name] = function
        takes = ", ".join(f"Tensor a{i}" for i in range(len(function.tensors)))
        gives = f"({', '.join(['Tensor'] * outputs)})" if outputs else "Tensor"
        _library().define(f"{name}({takes}) -> {gives}")
        _library().impl(name, functools.partial(_run, name), "CompositeImplicitAutograd")
    return name


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "DEF")


def _run(name: str, *tensors: torch.Tensor) -> Any:
    function = _known[name]
    with own_apply():
        return function.cls.apply(*function.arguments(tensors))


_own: ContextVar[bool] = ContextVar("own apply", default=False)


@contextlib.contextmanager
def own_apply() -> Iterator[None]:
    """Within it Functions run by themselves, watched or not."""
    token = _own.set(True)
    try:
        yield
    finally:
        _own.reset(token)


def is_own_apply() -> bool:
    """Is a Function being run by itself?"""
    return _own.get()


def function_of(target: Any) -> CarriedFunction | None:
    """The Function that an operator stands for, if it does for one."""
    if getattr(target, "namespace", "") != NAMESPACE:
        return None
    return _known[target._schema.name.partition("::")[2]]


def source_of(function: CarriedFunction) -> tuple[str, str] | None:
    """Module and name that the class can be imported by; None if a call cannot be written."""
    cls = function.cls
    if not all(isinstance(arg, PLAIN) for arg in function.fixed):
        return None
    module, name = cls.__module__, cls.__qualname__
    if module in ("__main__", "builtins") or not name.isidentifier():
        return None
    alike = {other.cls for other in _known.values() if other.cls.__name__ == name}
    if len(alike) > 1:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None else (module, name)
