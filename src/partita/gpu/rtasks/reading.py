"""A flow as it is lowered: its values' layout, its constants, and why a step does not fit."""

from typing import Any

import torch

from partita.capture.torch_program import Ref
from partita.gpu.flow.precision import needs_exact
from partita.gpu.flow.read import Held
from partita.gpu.flow.steps import Flow, Step
from partita.gpu.rtasks.drafts import Values
from partita.gpu.rtasks.lower_chain import UnfitError

T = torch.Tensor


class Reading:
    """A flow, the layout of its values, and which results of an operator have which name."""

    def __init__(self, flow: Flow, device: torch.device) -> None:
        self.flow, self.device = flow, device
        self.values = Values(flow)
        self.maker = flow.maker()
        self.items: dict[str, dict[int, str]] = {}
        for step in flow.steps:
            if step.target == "getitem" and isinstance(step.arguments[1], int):
                self.items.setdefault(step.inputs[0], {})[step.arguments[1]] = step.name
        gpu = device.type == "cuda"  # there as PyTorch does it, elsewhere without rounding
        half = self.values.dtype != torch.float32  # 16 bits fit into TF32 as they are
        self.tf32_conv = half or (gpu and bool(torch.backends.cudnn.allow_tf32))
        self.tf32_product = half or (gpu and bool(torch.backends.cuda.matmul.allow_tf32))

    def held(self, value: Any) -> T | None:
        """A constant among the arguments of a call, if it is one."""
        return self.flow.constants[value] if isinstance(value, Held) else None

    def constant(self, name: str) -> T | None:
        """A constant of a step, in f32; None where the step has none."""
        return self.flow.constants[name].float() if name else None

    def rounds(self, step: Step) -> bool:
        """May the factors of this convolution be TF32: allowed, and as exact as PyTorch's own?"""
        return self.tf32_conv and not needs_exact(self.flow, step, self.device)

    def need(self, name: str, *, image: bool = False) -> None:
        """Read or make a value in this layout, or say why not."""
        if name not in self.values.shapes:
            raise UnfitError(f"{name} is several values")
        if not self.values.is_tensor(name):
            raise UnfitError(
                f"{name} is {list(self.values.shapes[name])} of {self.values.dtypes[name]}"
            )
        if not self.values.take(name, image=image):
            raise UnfitError(f"{name} lies otherwise in memory")


def source_of(step: Step) -> str:
    """The value that an operator takes first."""
    value = step.arguments[0]
    if not isinstance(value, Ref):
        raise UnfitError("its first argument is no value")
    return value.name


def first_item(r: Reading, step: Step) -> tuple[str, tuple[str, ...]]:
    """The only result of several that is read, and the step that takes it."""
    items = r.items.get(step.name)
    if step.name in r.values.shapes or items is None:
        return step.name, ()
    if set(items) != {0}:
        raise UnfitError("more of its results than the first are read")
    return items[0], (items[0],)
