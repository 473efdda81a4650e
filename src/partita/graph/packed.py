"""Where a parameter lies inside a tensor of a checkpoint that holds several.

Checkpoints pack weights that a plan wants apart: queries, keys and values of one layer, the gate
and the input of a feed-forward, stored transposed or head by head. A graph has them as parameters
of their own, so that each can be split, and `Tensor.source` says which part of what they are:

    c_attn.weight[768, 2304] axis 1 at 768:1536:1 transposed
    query_key_value.weight[48, 16] as [4, 3, 4, 16] axis 1 at 0:1:1

The stored tensor is viewed in the shape after `as`, sliced along the axis, its last two dims are
exchanged, and what comes out has the parameter's number of elements in its order.
"""

import functools
import math
import re
from dataclasses import dataclass

from partita.errors import GraphError

Shape = tuple[int, ...]
_SIZES = r"\[(\d+(?:, \d+)*)\]"
_SOURCE = re.compile(
    rf"(?P<name>[^\[\]\s]+){_SIZES}(?: as {_SIZES})?"
    r"(?: axis (?P<axis>\d+) at (?P<start>\d+):(?P<stop>\d+):(?P<step>\d+))?"
    r"(?P<turned> transposed)?"
)


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A part of a stored tensor: a view of it, a slice along one axis, maybe transposed."""

    name: str
    shape: Shape
    view: Shape = ()  # empty: as it is stored
    axis: int = 0
    start: int = 0
    stop: int = 0  # 0: to the end
    step: int = 1
    transposed: bool = False

    @property
    def viewed(self) -> Shape:
        """The shape in which it is sliced."""
        return self.view or self.shape

    @property
    def index(self) -> slice:
        """What is taken along the axis."""
        return slice(self.start, self.stop or self.viewed[self.axis], self.step)

    @property
    def num_elements(self) -> int:
        """How many numbers the part has."""
        sizes = list(self.viewed)
        sizes[self.axis] = len(range(sizes[self.axis])[self.index])
        return math.prod(sizes)

    def __str__(self) -> str:
        text = f"{self.name}{list(self.shape)}"
        if self.view:
            text += f" as {list(self.view)}"
        if self.start or self.stop or self.step != 1:
            taken = self.index
            text += f" axis {self.axis} at {taken.start}:{taken.stop}:{taken.step}"
        return text + (" transposed" if self.transposed else "")

    def expression(self, stored: str, shape: Shape) -> str:
        """Python that takes the part, of this shape, out of what `stored` computes."""
        text, taken, last = stored, self.index, len(self.viewed) - 1
        if self.view:
            text += f".view({', '.join(map(str, self.view))})"
        if (taken.start, taken.stop, taken.step) != (0, self.viewed[self.axis], 1):
            step = "" if taken.step == 1 else f":{taken.step}"
            text += f"[{':, ' * self.axis}{taken.start}:{taken.stop}{step}]"
        text += ".mT" if self.transposed else ""
        sizes = list(self.viewed)
        sizes[self.axis] = len(range(sizes[self.axis])[taken])
        if self.transposed:
            sizes[last - 1], sizes[last] = sizes[last], sizes[last - 1]
        return text if tuple(sizes) == shape else f"{text}.reshape({', '.join(map(str, shape))})"


@functools.lru_cache(maxsize=65536)
def read_source(text: str) -> PackedPart:
    """The part that a `Tensor.source` names."""
    match = _SOURCE.fullmatch(text)
    if match is None:
        raise GraphError(
            f"source {text[:80]!r}",
            fix="it is written like `c_attn.weight[16, 48] axis 1 at 0:16:1 transposed`",
        )
    shape, view = (
        tuple(map(int, sizes.split(", "))) if sizes else () for sizes in match.group(2, 3)
    )
    axis, start, stop, step = (int(match[part] or 0) for part in ("axis", "start", "stop", "step"))
    packed = PackedPart(
        match["name"], shape, view, axis, start, stop, step or 1, bool(match["turned"])
    )
    fits = math.prod(packed.viewed) == math.prod(shape) and axis < len(packed.viewed)
    if not fits or stop > packed.viewed[axis] or (stop and start >= stop):
        raise GraphError(f"source {text[:80]!r} takes what the tensor does not have")
    return packed
