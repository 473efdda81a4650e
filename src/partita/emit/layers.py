"""Which calls of PyTorch's own layers stay calls: those that did just what the layer does.

A layer's call is trusted when it was a single operator reading the layer's own tensors and one
input (the counter of a batch norm aside). Recurrent layers are captured layer by layer and are put
together again. Anything else, such as a layer under autocast, is written out.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from partita.emit.calls import Item, ModuleCall, is_own
from partita.emit.modules import constructor
from partita.emit.steps import EmittedValue, OpStep
from partita.emit.text import Bracket, Expr

_LOSSES = (nn.CrossEntropyLoss, nn.MSELoss, nn.L1Loss, nn.NLLLoss)
_RECURRENT = {"lstm": 3, "gru": 2, "rnn_tanh": 2, "rnn_relu": 2}


def layer(call: ModuleCall, module: nn.Module) -> Bracket | None:
    """The constructor of a layer whose call may stay a call."""
    if isinstance(module, nn.RNNBase):
        return constructor(module) if recurrent(call) is not None else None
    steps = [step for step in call.steps() if not _counts(step, call.path)]
    if len(steps) != 1 or len(call.gives) > 1 or not _reads_all(steps[0], call.path, module):
        return None
    needed, optional = _arity(module)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        own = steps[0].args[5] if len(steps[0].args) > 5 else [0] * len(module.output_padding)
        plain = list(own) == list(module.output_padding)
        return constructor(module) if plain and len(call.takes) == 1 else None
    if optional or needed != len(call.takes):
        return None
    if needed != 1 and not isinstance(module, _LOSSES):
        return None
    return constructor(module)


def _counts(step: OpStep, path: str) -> bool:
    """A batch norm counting its batches."""
    return step.operator == "add_" and all(is_own(value, path) for value in step.reads())


def _reads_all(step: OpStep, path: str, module: nn.Module) -> bool:
    """True if the operator reads every tensor of the layer itself, not a cast or copy of it."""
    own = {name for value in step.reads() for name in value.names}
    held = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return all(f"{path}.{name}" in own for name in held)


def _arity(module: nn.Module) -> tuple[int, int]:
    """How many arguments `forward` needs, and how many more it takes."""
    given = inspect.signature(type(module).forward).parameters.values()
    needed = [p for p in given if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(needed) - 1, len(given) - len(needed)


@dataclass(frozen=True)
class RecurrentCall:
    """A recurrent layer's call: `outputs, (h, c) = layer(x, (h0, c0))`."""

    given: EmittedValue
    states: tuple[EmittedValue, ...]  # those it starts from; none for zeros
    outputs: EmittedValue | None
    last: tuple[EmittedValue | None, ...]


def recurrent(call: ModuleCall) -> RecurrentCall | None:
    """The parts of a recurrent layer's call; None where it did anything unusual."""
    steps = list(call.steps())
    runs = [step for step in steps if step.operator in _RECURRENT]
    others = [step for step in steps if step not in runs]
    if not runs or any(s.operator not in ("zeros", "slice", "cat", "dropout") for s in others):
        return None
    if len({id(step.target) for step in runs}) != 1:
        return None
    starts = _starts(steps, runs[0])
    if starts is None:
        return None
    count = _RECURRENT[runs[0].operator] - 1
    last = tuple(_last(steps, runs, place) for place in range(1, count + 1))
    recurrent_call = RecurrentCall(runs[0].args[0], starts, runs[-1].outs[0], last)
    takes = [recurrent_call.given, *starts]
    gives = {value for value in (recurrent_call.outputs, *last) if value is not None}
    whole = set(call.takes) == set(takes) and set(call.gives) <= gives
    return recurrent_call if whole and len(set(takes)) == len(takes) else None


def _starts(steps: list[OpStep], run: OpStep) -> tuple[EmittedValue, ...] | None:
    """What the first layer starts from, before it was cut out of the states of all layers."""
    given = run.args[1] if isinstance(run.args[1], list | tuple) else [run.args[1]]
    maker = {out: step for step in steps for out in step.outs}
    states: list[Any] = []
    for value in given:
        step = maker.get(value)
        while step is not None and step.operator == "slice":
            value = step.args[0]
            step = maker.get(value)
        states.append(None if step is not None and step.operator == "zeros" else value)
    if all(value is None for value in states):
        return ()
    return None if None in states else tuple(states)


def _last(steps: list[OpStep], runs: list[OpStep], place: int) -> EmittedValue | None:
    """The last state of all layers: of the only one, or joined."""
    own = [run.outs[place] for run in runs]
    if len(own) == 1:
        return own[0]
    for step in steps:
        if step.operator == "cat" and list(step.args[0]) == own:
            return step.outs[0]
    return None


def sequence(call: ModuleCall, module: nn.Module, made: dict[str, Expr]) -> Bracket | None:
    """`nn.Sequential(...)` where the call ran its children one after the other and no more."""
    if type(module) is not nn.Sequential or len(call.takes) != 1 or len(call.gives) != 1:
        return None
    names = list(module._modules)
    if names != [str(i) for i in range(len(names))] or not _is_chain(call, call.items):
        return None
    ran = [item.path for item in call.items if isinstance(item, ModuleCall)]
    paths = [f"{call.path}.{name}" for name in names]
    idle = [isinstance(child, nn.Identity) for child in module]
    if ran != [path for path, is_idle in zip(paths, idle, strict=True) if not is_idle]:
        return None
    parts = [made.get(path, "nn.Identity()") for path in paths]
    return Bracket("nn.Sequential(", tuple(parts))


def _is_chain(call: ModuleCall, items: list[Item]) -> bool:
    value = call.takes[0]
    for item in items:
        if not isinstance(item, ModuleCall) or item.takes != [value] or len(item.gives) != 1:
            return False
        value = item.gives[0]
    return [value] == call.gives
