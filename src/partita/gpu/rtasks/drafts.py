"""What a model's steps become before memory is given out: drafts of tile ops, views and fallbacks.

A draft makes one value (an LSTM cell two) and names what it reads. Its kind is that of a tile op
(`tileops.py`), or

    cat, part   columns side by side, some of the columns: places in the arena, nothing runs
    view        an operator of PyTorch that only looks at memory in another way
    fallback    any other operator: PyTorch runs it, and `reason` says why

A value is a matrix: its last dim, or the channels of an image, are the columns, the rest rows.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from partita.gpu.flow.place import padded
from partita.gpu.flow.precision import nearest
from partita.gpu.flow.steps import Flow
from partita.gpu.rtasks.tileops import ATTRS, Attrs

T = torch.Tensor
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OUTSIDE = ("view", "fallback")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows and columns of a value."""

    rows: int
    cols: int


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A constant matrix [rows, cols], or [rows, taps, cols] with the columns of a tap in eights."""

    value: T
    tf32: bool = False  # kept as the nearest such number: a tensor unit would cut the low bits off

    @property
    def cols(self) -> int:
        """The columns that an op reads."""
        shape = self.value.shape
        return shape[1] if len(shape) == 2 else shape[1] * padded(shape[2])

    def packed(self) -> T:
        """As a matrix, zeros where columns are rounded up."""
        value = self.value if self.value.dim() == 3 else self.value.unsqueeze(1)
        rows, taps, cols = value.shape
        packed = value.new_zeros(rows, taps, padded(cols))
        packed[:, :, :cols] = value
        if self.tf32 and value.dtype == torch.float32:
            packed = nearest(packed)
        return packed.reshape(rows, -1)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same memory read in the same way."""
        return self.value.data_ptr(), tuple(self.value.shape), self.value.stride(), self.tf32


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """An op, a view or a fallback; `steps` are the steps of the flow that it stands for."""

    name: str
    kind: str
    reads: tuple[str, ...]
    steps: tuple[str, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    weights: tuple[Weight, ...] = ()
    wide: tuple[T | None, ...] = ()
    constants: tuple[tuple[str, T], ...] = ()  # matrices among the reads that are always the same
    also: str = ""  # a second value it makes
    begin: int = 0  # of a part: its first column
    reason: str = ""  # of a fallback

    @property
    def is_tiled(self) -> bool:
        """Does it become a tile op?"""
        return self.kind in ATTRS

    @property
    def makes(self) -> tuple[str, ...]:
        """The values that are there afterwards."""
        return (self.name, self.also) if self.also else (self.name,)

    def tile_attrs(self) -> Attrs:
        """The attributes in the order of its kind."""
        return tuple((name, self.attrs[name]) for name in ATTRS[self.kind])


class Values:
    """The shapes of a flow's values, and which dim of each is its columns."""

    def __init__(self, flow: Flow) -> None:
        self.shapes = dict(flow.shapes)
        self.dtypes = dict(flow.dtypes)
        self.dtype = _main_dtype(flow)
        self.images: dict[str, bool] = {}  # of values with four dims; undecided if not here

    def is_tensor(self, name: str) -> bool:
        """Is it one tensor of the model's element type, not a number or nothing?"""
        shape = self.shapes.get(name)
        return bool(shape) and self.dtypes[name] == self.dtype and 0 not in self.shapes[name]

    def take(self, name: str, *, image: bool) -> bool:
        """Read or make a value this way; False if it already lies in the other."""
        if not self.is_tensor(name) or (image and len(self.shapes[name]) != 4):
            return False
        if len(self.shapes[name]) != 4:
            return True
        return self.images.setdefault(name, image) == image

    def is_image(self, name: str) -> bool:
        """Are its columns channels? Of four dims this is assumed until something says otherwise."""
        return len(self.shapes[name]) == 4 and self.images.get(name, True)

    def matrix(self, name: str) -> Matrix:
        """Its rows and columns."""
        shape = self.shapes[name]
        cols = shape[1] if self.is_image(name) else shape[-1]
        rows = 1
        for size in shape:
            rows *= size
        return Matrix(rows // cols, cols)

    def add(self, name: str, like: str, cols: int) -> None:
        """A new value: as another one, with other columns."""
        shape = list(self.shapes[like])
        shape[1 if self.is_image(like) else -1] = cols
        self.shapes[name], self.dtypes[name] = tuple(shape), self.dtypes[like]
        if len(shape) == 4:
            self.images[name] = self.is_image(like)


def _main_dtype(flow: Flow) -> torch.dtype:
    """The element type of most values that are numbers with a point."""
    counts: dict[torch.dtype, int] = {}
    for name in (*flow.inputs, *(step.name for step in flow.steps)):
        dtype = flow.dtypes.get(name)
        if dtype is not None and dtype.is_floating_point:
            counts[dtype] = counts.get(dtype, 0) + 1
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
