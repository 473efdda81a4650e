"""The arguments of one operator, by the names of its schema, as source."""

from typing import Any, Protocol

import torch

from partita.emit.size import Size
from partita.emit.steps import EmittedValue, OpStep, values_in
from partita.emit.text import Bracket, Expr, literal

_PER_SPACE = ("kernel_size", "stride", "padding", "dilation", "output_padding", "output_size")


class Env(Protocol):
    """What an expression needs to know of the function it stands in."""

    training: bool | None  # of the module when it was captured; None: flags are written out

    def name(self, value: EmittedValue) -> str:
        """The variable or attribute that holds a value."""

    def tensor(self) -> str | None:
        """Some tensor at hand, to ask for its device."""

    def size(self, size: Size) -> str:
        """A size that follows the batch or the length."""


class Written:
    """One step being written: its arguments by the names of the operator's schema."""

    def __init__(self, step: OpStep, env: Env) -> None:
        self.step = step
        self.env = env
        self.schema = step.target._schema.arguments
        self.packet: str = step.target.overloadpacket.__name__
        self.given: dict[str, Any] = {}
        for argument, value in zip(self.schema, step.args, strict=False):
            self.given[argument.name] = value
        self.given.update(step.kwargs)

    def raw(self, name: str, default: Any = None) -> Any:
        """An argument as it was captured; the schema's default where it was left out."""
        if name in self.given:
            return self.given[name]
        for argument in self.schema:
            if argument.name == name and argument.has_default_value():
                return argument.default_value
        return default

    def expr(self, value: Any) -> Expr:
        """An argument as source."""
        if isinstance(value, EmittedValue):
            return self.env.name(value)
        if isinstance(value, torch.device):
            return self.device(value)
        if isinstance(value, Size):
            return self.env.size(value)
        sizes = isinstance(value, list | tuple) and any(isinstance(v, Size) for v in value)
        if isinstance(value, list | tuple) and (sizes or any(values_in(value))):
            return Bracket("[", tuple(self.expr(item) for item in value), "]", display=True)
        return literal(value)

    def __call__(self, name: str) -> Expr:
        """An argument as source, by its name."""
        value = self.raw(name)
        if name in _PER_SPACE and isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # 3 for [3, 3]
        elif name == "dim" and isinstance(value, list) and len(value) == 1:
            value = value[0]
        return self.expr(value)

    def text(self, name: str) -> str:
        """An argument as plain text, for operators and subscripts."""
        text = str(self(name))
        return f"({text})" if isinstance(self.raw(name), Size) and " " in text else text

    def device(self, device: torch.device) -> Expr:
        """The device of a tensor at hand, so that a stage can be moved."""
        source = self.env.tensor()
        return literal(device) if source is None else f"{source}.device"

    def rest(self, *skipped: str) -> tuple[list[Expr], dict[str, Expr]]:
        """All arguments but some: positional as far as they stand in order, then by name."""
        args: list[Expr] = []
        kwargs: dict[str, Expr] = {}
        in_order = True
        for argument in self.schema:
            if argument.name in skipped:
                continue
            if argument.name not in self.given or self.is_default(argument):
                in_order = False
            elif argument.name == "train":
                in_order = False
                kwargs["train"] = self.flag("train")
            elif in_order and not argument.kwarg_only and not self._is_flag(argument):
                args.append(self(argument.name))
            else:
                in_order = False
                kwargs[argument.name] = self(argument.name)
        return args, kwargs

    def _is_flag(self, argument: Any) -> bool:
        return isinstance(self.given[argument.name], bool)  # `keepdim=True` reads better

    def is_default(self, argument: Any) -> bool:
        """True if an argument need not be written."""
        value = self.given[argument.name]
        if argument.name == "pin_memory" and not value:
            return True
        if argument.name == "device" and self.env.tensor() is None:
            return True  # nothing says where: the default device, as the caller sets it
        if not argument.has_default_value() or isinstance(value, EmittedValue):
            return False
        return bool(value == argument.default_value) and type(value) is type(argument.default_value)

    def flag(self, name: str) -> str:
        """`self.training` where a flag is what the mode of the module was."""
        value = bool(self.raw(name))
        return "self.training" if value == self.env.training else repr(value)
