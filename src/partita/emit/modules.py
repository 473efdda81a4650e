"""Layers of PyTorch written as the constructor calls that make them again.

The arguments are read off the attributes of the same names. Nothing is taken on trust: the call is
made on the meta device, and what it gives must look exactly like the original.
"""

import inspect
from typing import Any

import torch
from torch import nn

from partita.emit.text import Bracket, Expr, call, literal

_RNN = {
    "input_size": inspect.Parameter.empty, "hidden_size": inspect.Parameter.empty,
    "num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False,
}  # fmt: skip
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def constructor(module: nn.Module) -> Bracket | None:
    """`nn.Conv2d(3, 64, 7, stride=2)` for a layer of `torch.nn`; None where it cannot be told."""
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind or any(getattr(module, h) for h in _HOOKS):
        return None
    settings = _settings(module)
    if settings is None:
        return None
    for shorter in (_shortened(settings), settings):
        if _makes(kind, shorter, module):
            return _written(kind.__name__, shorter)
    return None


def argument_names(kind: type[nn.Module]) -> list[str]:
    """The names of a layer's arguments, in order; none where it takes any number of them."""
    return list(_parameters(kind))


def _settings(module: nn.Module) -> dict[str, tuple[Any, Any]] | None:
    """Argument -> (value, default), read off the attributes of a layer."""
    settings: dict[str, tuple[Any, Any]] = {}
    for name, default in _parameters(type(module)).items():
        value = getattr(module, name, inspect.Parameter.empty)
        if isinstance(value, torch.Tensor) or (name == "bias" and value is None):
            value = value is not None  # a flag that became a tensor
        if value is inspect.Parameter.empty:
            if default is inspect.Parameter.empty:
                return None
            continue
        # In place would be seen by other stages, and nothing is gained by it here.
        settings[name] = (False if name == "inplace" else value), default
    return settings


def _parameters(kind: type[nn.Module]) -> dict[str, Any]:
    if issubclass(kind, nn.RNNBase):
        own = {"proj_size": 0} if kind is nn.LSTM else {}
        return _RNN | own | ({"nonlinearity": "tanh"} if kind is nn.RNN else {})
    given = list(inspect.signature(kind.__init__).parameters.values())[1:]
    fixed = [p for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {p.name: p.default for p in fixed if p.name not in ("device", "dtype")}


def _shortened(settings: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """(3, 3) as 3."""
    return {
        name: ((value[0] if _is_repeated(value) else value), default)
        for name, (value, default) in settings.items()
    }


def _is_repeated(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and len(set(value)) == 1


def _arguments(settings: dict[str, tuple[Any, Any]]) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = [], {}
    for name, (value, default) in settings.items():
        if default is inspect.Parameter.empty:
            args.append(value)
        elif value != default or type(value) is not type(default):
            kwargs[name] = value
    return args, kwargs


def _makes(kind: type[nn.Module], settings: dict[str, tuple[Any, Any]], model: nn.Module) -> bool:
    args, kwargs = _arguments(settings)
    try:
        _written(kind.__name__, settings)
        with torch.device("meta"):
            made = kind(*args, **kwargs)
    except Exception:  # whatever a constructor says to arguments that were not its own
        return False
    return _look(made) == _look(model)


def _look(module: nn.Module) -> tuple[Any, ...]:
    """What makes two layers the same, but for their weights."""
    tensors = {**module._parameters, **module._buffers}
    shapes = {n: None if t is None else tuple(t.shape) for n, t in tensors.items()}
    children = {name: _look(child) for name, child in module._modules.items() if child is not None}
    plain = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_") and key != "training" and not callable(value)
    }
    unsaved = sorted(module._non_persistent_buffers_set)
    if "inplace" in plain:
        return type(module), shapes, {**plain, "inplace": False}
    return type(module), module.extra_repr(), shapes, children, plain, unsaved


def _written(name: str, settings: dict[str, tuple[Any, Any]]) -> Bracket:
    args, kwargs = _arguments(settings)
    named: dict[str, Expr] = {key: literal(value) for key, value in kwargs.items()}
    return call(f"nn.{name}", [literal(value) for value in args], named)
