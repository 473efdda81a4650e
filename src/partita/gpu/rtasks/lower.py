"""From a PyTorch module to fused regions and fallbacks: the passes, in order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from partita.capture.torch_program import Ref
from partita.errors import InputError
from partita.gpu.flow import eager
from partita.gpu.flow.export import flow_of
from partita.gpu.flow.read import Held
from partita.gpu.flow.steps import Flow, Step
from partita.gpu.rtasks.arena import LoweredModel, lower
from partita.gpu.rtasks.patterns import recognised
from partita.gpu.rtasks.pieces import cut

T = torch.Tensor
SHAPED = frozenset(  # operators that only look at the shape of what they are given
    f"aten.{name}.default"
    for name in ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
)


def captured(module: nn.Module, inputs: tuple[T, ...]) -> Flow:
    """The module's steps as they are; refused if they would not compute the same every time."""
    flow = flow_of(module, inputs)
    if flow.random_ops:
        raise InputError(
            f"the model draws random numbers ({', '.join(flow.random_ops)})",
            fix="give a model that computes the same every time",
        )
    return flow


def settled(flow: Flow, device: torch.device) -> Flow:
    """With the values that only depend on a shape (states that begin as zeros) as constants."""
    users, steps = flow.users(), flow.maker()
    constants = dict(flow.constants)
    gone: dict[str, Held] = {}
    for step in flow.steps:
        plain = step.target in SHAPED and step.name not in flow.outputs
        if not plain or any(user.kind != "call" for user in users[step.name]):
            continue
        like = {name: _empty(flow, name, device) for name in step.inputs}
        name = Held(f"{step.name}.constant")
        constants[name] = eager.compute(step, like, constants)
        gone[step.name] = name
        for user in users[step.name]:
            steps[user.name] = _with_constant(steps[user.name], step.name, name)
    kept = [step for name, step in steps.items() if name not in gone]
    return replace(flow, steps=tuple(kept), constants=constants)


def _empty(flow: Flow, name: str, device: torch.device) -> T:
    return torch.zeros(flow.shapes[name], dtype=flow.dtypes[name], device=device)


def _with_constant(step: Step, name: str, constant: Held) -> Step:
    return replace(
        step,
        inputs=tuple(each for each in step.inputs if each != name),
        arguments=_held(step.arguments, name, constant),
        keywords=tuple((key, _held(value, name, constant)) for key, value in step.keywords),
    )


def _held(value: Any, name: str, constant: Held) -> Any:
    if isinstance(value, Ref):
        return constant if value.name == name else value
    if isinstance(value, tuple | list):
        return type(value)(_held(each, name, constant) for each in value)
    return value


def lower_flow(flow: Flow, device: torch.device) -> LoweredModel:
    """Steps as regions and fallbacks in memory."""
    return lower(cut(recognised(settled(flow, device)), device), device)


def side_by_side(flows: Sequence[Flow]) -> Flow:
    """Several independent models as one; values are named `0:linear`, `1:linear`."""
    if len(flows) == 1:
        return flows[0]
    named = [_prefixed(flow, f"{index}:") for index, flow in enumerate(flows)]
    return Flow(
        tuple(step for flow in named for step in flow.steps),
        tuple(name for flow in named for name in flow.inputs),
        tuple(name for flow in named for name in flow.outputs),
        {name: shape for flow in named for name, shape in flow.shapes.items()},
        {name: dtype for flow in named for name, dtype in flow.dtypes.items()},
        {name: value for flow in named for name, value in flow.constants.items()},
    )


def _prefixed(flow: Flow, prefix: str) -> Flow:
    return replace(
        flow,
        steps=tuple(_renamed(step, prefix) for step in flow.steps),
        inputs=tuple(prefix + name for name in flow.inputs),
        outputs=tuple(prefix + name for name in flow.outputs),
        shapes={prefix + name: shape for name, shape in flow.shapes.items()},
        dtypes={prefix + name: dtype for name, dtype in flow.dtypes.items()},
        constants={prefix + name: value for name, value in flow.constants.items()},
    )


CONSTANTS = ("weight", "bias", "pre_scale", "pre_shift", "scale", "shift", "residual")


def _renamed(step: Step, prefix: str) -> Step:
    names: dict[str, Any] = {
        field: prefix + getattr(step, field) for field in CONSTANTS if getattr(step, field)
    }
    return replace(
        step,
        name=prefix + step.name,
        inputs=tuple(prefix + name for name in step.inputs),
        arguments=_deep(step.arguments, prefix),
        keywords=tuple((key, _deep(value, prefix)) for key, value in step.keywords),
        **names,
    )


def _deep(value: Any, prefix: str) -> Any:
    if isinstance(value, Ref):
        return Ref(prefix + value.name)
    if isinstance(value, Held):
        return Held(prefix + value)
    if isinstance(value, tuple | list):
        return type(value)(_deep(each, prefix) for each in value)
    return value
