"""A model as steps: what the streams executor launches, one kernel or view each.

A step makes one value, named like the step, from other values and constants. Images lie with their
channels last. What stands around a convolution is part of it:

    conv, depthwise   y = relu(conv(pre(x)) + bias + residual)
    maxpool, avgpool  y = relu(factor pool(pre(x)) + bias + residual)
    combine           y = relu((w0 x0 + w1 x1 + ...) * scale + shift)
    cat, part         channels side by side, some of the channels: views, where memory allows
    call              any other operator of PyTorch
    piece, made       several steps as one launch (pieces.py), and one of the values it makes

`pre` is nothing, a ReLU, or a scale and shift per channel with or without one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from partita.capture.torch_program import Ref
from partita.graph.record import dependencies_first

T = torch.Tensor
Pair = tuple[int, int]

CONVS = ("conv", "depthwise")
POOLS = ("maxpool", "avgpool")
WINDOWS = (*CONVS, *POOLS)
VIEWS = ("cat", "part", "made")


@dataclass(frozen=True, slots=True)
class Window:
    """What slides over an image: height and width of everything."""

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    @property
    def is_pixel(self) -> bool:
        """Does every output pixel see exactly the input pixel at its place?"""
        return self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """One launch, or one view that costs nothing."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    window: Window | None = None
    groups: int = 1
    weight: str = ""  # names of constants here and below
    bias: str = ""
    pre: str = ""  # "", "relu", "affine", "affine_relu": of the first input
    pre_scale: str = ""
    pre_shift: str = ""
    residual: str = ""  # a value of the output's shape, added before the ReLU
    relu: bool = False
    relu_from: int = 0  # channels from here to `relu_to` have the ReLU; -1: to the end
    relu_to: int = -1
    factors: tuple[float, ...] = ()  # of a combine, per input
    scale: str = ""  # of a combine, per channel
    shift: str = ""
    factor: float = 1.0  # of a pool
    include_pad: bool = True
    ceil: bool = False  # of a pool: a last window may stick out
    begin: int = 0  # channels of a part
    end: int = 0
    target: str = ""  # of a call: "aten.linear.default"
    arguments: tuple[Any, ...] = ()  # with Ref for values
    keywords: tuple[tuple[str, Any], ...] = ()
    members: tuple["Step", ...] = ()  # of a piece
    makes: tuple[str, ...] = ()  # values of a piece that are read outside of it

    @property
    def uses(self) -> tuple[str, ...]:
        """The values this step reads."""
        return (*self.inputs, self.residual) if self.residual else self.inputs

    @property
    def is_view(self) -> bool:
        """Does it launch nothing?"""
        return self.kind in VIEWS

    def renamed(self, old: str, new: str) -> "Step":
        """The same, reading `new` where it read `old`."""
        inputs = tuple(new if name == old else name for name in self.inputs)
        residual = new if self.residual == old else self.residual
        arguments = _renamed(self.arguments, old, new)
        return replace(self, inputs=inputs, residual=residual, arguments=arguments)


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, Ref):
        return Ref(new) if value.name == old else value
    if isinstance(value, tuple | list):
        return type(value)(_renamed(each, old, new) for each in value)
    return value


@dataclass(frozen=True, slots=True)
class Flow:
    """Steps in the order of the model, what they read and what is wanted of them."""

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]  # of every value
    dtypes: dict[str, torch.dtype]
    constants: dict[str, T] = field(repr=False)
    random_ops: tuple[str, ...] = ()  # operators that draw numbers

    def with_steps(self, steps: Iterable[Step], **constants: T) -> "Flow":
        """The same with other steps, and with more constants."""
        return replace(self, steps=tuple(steps), constants={**self.constants, **constants})

    def users(self) -> dict[str, list[Step]]:
        """Who reads each value; the caller of the model is not among them."""
        names = (*self.inputs, *(step.name for step in self.steps))
        users: dict[str, list[Step]] = {name: [] for name in names}
        for step in self.steps:
            for name in dict.fromkeys(step.uses):
                users[name].append(step)
        return users

    def maker(self) -> dict[str, Step]:
        """The step that makes each value."""
        return {step.name: step for step in self.steps}


def sorted_steps(steps: Iterable[Step]) -> tuple[Step, ...]:
    """The steps so that each comes after what it reads; otherwise in the order given."""
    by_name = {step.name: step for step in steps}
    names = dependencies_first(
        by_name, lambda name: (each for each in by_name[name].uses if each in by_name)
    )
    return tuple(by_name[name] for name in names)


def used_steps(flow: Flow) -> Flow:
    """Without the steps nobody needs."""
    needed = set(flow.outputs)
    kept = []
    for step in reversed(flow.steps):
        if step.name in needed:
            needed |= set(step.uses)
            kept.append(step)
    return flow.with_steps(reversed(kept))
