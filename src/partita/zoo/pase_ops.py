"""Ops as PaSE sees them: loop nests whose dims are split, and how tensors follow.

V. Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021.

    dims       letter, extent, role in the cost formula, and whether PaSE ever splits it
    inputs     per tensor: who made it, its shape, and per tensor dim the letters that divide it
    output     the same for what it makes; "" is a tensor dim that stays whole, "bc" a merged one

There is no op for an activation: it is `pointwise` work of the op before. What an op costs is said
in `costs.pase`; what is peculiar about PaSE's ops is said where `PaseBuilder` makes them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from partita.errors import GraphError

LARGEST_EXTENT = 2**40
Access = tuple[str, ...]  # per tensor dim the letters of the loop dims that divide it


@dataclass(frozen=True, slots=True)
class PaseDim:
    """One loop of an op."""

    name: str  # one letter
    extent: int
    role: str = ""  # in a product one of B (batch) M N K; X for the axis of a norm, softmax or mean
    splits: bool = True  # whether PaSE ever divides it

    def __post_init__(self) -> None:
        if len(self.name) != 1 or not 1 <= self.extent <= LARGEST_EXTENT:
            raise GraphError(
                f"found the dim {self.name!r} of {self.extent}",
                fix=f"a dim has one letter and an extent of 1 to {LARGEST_EXTENT:,}",
            )


@dataclass(frozen=True, slots=True)
class PaseTensor:
    """A tensor as one op divides it."""

    shape: tuple[int, ...]
    access: Access
    source: int = -1  # the op that makes it, by its place in the graph

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.access):
            raise GraphError(
                f"found a tensor of {len(self.shape)} dims divided as one of {len(self.access)}",
                fix="say for every dim of the tensor which loop dims divide it",
            )


@dataclass(frozen=True, slots=True)
class PaseOp:
    """One op of PaSE: its loops, what it reads, what it makes."""

    name: str
    kind: str
    dims: tuple[PaseDim, ...]
    output: PaseTensor
    inputs: tuple[PaseTensor, ...] = ()
    pointwise: int = 0  # operations on every element of the result: activations, gates
    window: tuple[int, int] = (1, 1)  # of a pooling

    def __post_init__(self) -> None:
        letters = [dim.name for dim in self.dims]
        used = {letter for each in (self.output, *self.inputs) for letter in "".join(each.access)}
        if len(set(letters)) != len(letters) or not used <= set(letters):
            raise GraphError(
                f"has the dims {' '.join(letters)} and divides tensors by {' '.join(sorted(used))}",
                fix="every letter must stand for one dim",
                field=self.name,
            )

    def describe(self, splits: Iterable[int]) -> str:
        """A choice as text: `conv1: b/4 n/2`, or `conv1: whole` where nothing is split."""
        parts = [
            f"{dim.name}/{factor}"
            for dim, factor in zip(self.dims, splits, strict=True)
            if factor > 1
        ]
        return f"{self.name}: {' '.join(parts) or 'whole'}"


@dataclass(frozen=True, slots=True)
class PaseGraph:
    """Ops in topological order, and how finely PaSE divides them at most."""

    name: str
    ops: tuple[PaseOp, ...]
    cutoff: int  # a device keeps at least so much of every dim that is split

    def __post_init__(self) -> None:
        if not self.ops:
            raise GraphError("has no ops", fix="give at least one", field=self.name)
        if self.cutoff < 1:
            raise GraphError(f"has the cutoff {self.cutoff}", fix="give 1 or more", field=self.name)
        if len({op.name for op in self.ops}) != len(self.ops):
            raise GraphError("two ops have one name", fix="rename one", field=self.name)
        for index, op in enumerate(self.ops):
            for tensor in op.inputs:
                if not 0 <= tensor.source < index:
                    wrong = f"op {index} reads what op {tensor.source} makes"
                    raise GraphError(wrong, fix="sort them topologically", field=op.name)
                made = self.ops[tensor.source].output.shape
                if tensor.shape != made:
                    wrong = f"reads a tensor of {tensor.shape} where one of {made} is made"
                    raise GraphError(wrong, fix="give both one shape", field=op.name)


class PaseBuilder:
    """Ops one after another; each method adds one (or two) and gives back its place."""

    def __init__(self) -> None:
        self.ops: list[PaseOp] = []

    def shape(self, x: int) -> tuple[int, ...]:
        """The tensor that op `x` makes."""
        return self.ops[x].output.shape

    def add(
        self,
        name: str,
        kind: str,
        dims: tuple[PaseDim, ...],
        output: tuple[tuple[int, ...], Access],
        inputs: Iterable[tuple[int, Access]] = (),
        pointwise: int = 0,
        window: tuple[int, int] = (1, 1),
    ) -> int:
        """Any op."""
        read = tuple(PaseTensor(self.shape(x), access, x) for x, access in inputs)
        made = PaseTensor(*output)
        self.ops.append(PaseOp(name, kind, dims, made, read, pointwise, window))
        return len(self.ops) - 1

    def conv(
        self,
        name: str,
        x: int | tuple[int, ...],
        channels: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        pointwise: int = 0,
    ) -> int:
        """A convolution of op `x`, or of the model's input of a shape.

        PaSE exchanges no halos, so that h and w are never split.
        """
        image = x if isinstance(x, tuple) else self.shape(x)
        b, c, *size = image
        window, pad = _pair(kernel), _pair(padding)
        h, w = (_windows(*each, stride) for each in zip(size, window, pad, strict=True))
        dims = (
            PaseDim("b", b, "M"),
            PaseDim("c", c, "K"),
            PaseDim("h", h, "M", splits=False),
            PaseDim("w", w, "M", splits=False),
            PaseDim("r", window[0], "K"),
            PaseDim("s", window[1], "K"),
            PaseDim("n", channels, "N"),
        )
        made = ((b, channels, h, w), ("b", "n", "h", "w"))
        read = () if isinstance(x, tuple) else ((x, ("b", "c", "", "")),)
        return self.add(name, "Conv", dims, made, read, pointwise)

    def pool(self, name: str, x: int, kernel: int, stride: int, padding: int = 0) -> int:
        """A maximum or mean over windows; its h and w may be split, at the price of a halo."""
        b, c, *size = self.shape(x)
        h, w = (_windows(extent, kernel, padding, stride) for extent in size)
        return self._same(name, "Pooling", x, (b, c, h, w), "bchw", window=(kernel, kernel))

    def norm(self, name: str, x: int, letters: str, axis: str) -> int:
        """A normalisation over one axis, with a scale and a bias along it."""
        return self._same(name, "Norm", x, self.shape(x), letters, axis)

    def batchnorm(self, name: str, x: int) -> int:
        """A batch norm, in PaSE a norm over the batch axis alone.

        Statistics belong to each channel and pixel, scale and bias to each image of the batch.
        """
        return self.norm(name, x, "bchw", "b")

    def softmax(self, name: str, x: int, letters: str, axis: str) -> int:
        """Exponentials that add up to one along an axis."""
        return self._same(name, "Softmax", x, self.shape(x), letters, axis)

    def loss(self, name: str, x: int, letters: str) -> int:
        """Softmax and cross entropy; the classes are the last dim."""
        return self._same(name, "SoftmaxCrossEntropy", x, self.shape(x), letters, letters[-1])

    def elementwise(
        self, name: str, inputs: tuple[int, ...], letters: str, pointwise: int = 0
    ) -> int:
        """Sums and the like of tensors of one shape."""
        return self._same(
            name, "Elementwise", inputs, self.shape(inputs[0]), letters, pointwise=pointwise
        )

    def mean(self, name: str, x: int) -> int:
        """The mean over h and w of an image."""
        shape = self.shape(x)
        dims = _dims("bchw", shape, "hw")
        return self.add(name, "ReduceMean", dims, (shape[:2], ("b", "c")), [(x, tuple("bchw"))])

    def fc(self, name: str, x: int, width: int, letters: str, pointwise: int = 0) -> int:
        """A linear layer; `letters` are those of its input, the last one is summed over."""
        *lead, k = self.shape(x)
        dims = (
            *(PaseDim(letter, size, "M") for letter, size in zip(letters[:-1], lead, strict=True)),
            PaseDim("n", width, "N"),
            PaseDim(letters[-1], k, "K"),
        )
        made = ((*lead, width), (*letters[:-1], "n"))
        return self.add(name, "FC", dims, made, [(x, tuple(letters))], pointwise)

    def einsum(
        self,
        name: str,
        equation: str,
        inputs: tuple[int, ...],
        extents: dict[str, int],
        pointwise: int = 0,
    ) -> int:
        """A product of two tensors, `bld,df->blf`; where only one input is an op, it is the first.

        A dim of both inputs and the result makes a batch of products. What is summed comes last, in
        the order of the first input; PaSE takes it from a Python set, and the columns of its
        answers change their meaning from run to run.
        """
        both, out = equation.split("->")
        first, second = both.split(",")
        reduced = "".join(letter for letter in first if letter not in out)
        dims = tuple(
            PaseDim(letter, extents[letter], _role(letter, first, second, out))
            for letter in out + reduced
        )
        made = (tuple(extents[letter] for letter in out), tuple(out))
        read = [(x, tuple(term)) for x, term in zip(inputs, (first, second), strict=False)]
        return self.add(name, "Einsum", dims, made, read, pointwise)

    def embedding(self, name: str, shape: tuple[int, int], words: int, width: int) -> int:
        """A table of vectors; PaSE charges the dense product of one-hot tokens with all of it."""
        extents = {"b": shape[0], "l": shape[1], "v": words, "d": width}
        return self.einsum(name, "blv,vd->bld", (), extents)

    def lstm(self, name: str, x: int, layers: int) -> int:
        """A whole LSTM as one op, as wide as its input; the sequence is not split."""
        b, s, units = self.shape(x)
        dims = (
            PaseDim("l", layers, "B"),
            PaseDim("s", s, "M", splits=False),
            PaseDim("b", b, "M"),
            PaseDim("n", units, "N"),
            PaseDim("k", units, "K"),
        )
        made = ((b, s, units), ("b", "s", "n"))
        return self.add(name, "LSTM", dims, made, [(x, ("b", "s", "k"))], pointwise=3)

    def concat(self, name: str, inputs: tuple[int, ...]) -> int:
        """Images put together along their channels, which stay whole."""
        b, _, h, w = self.shape(inputs[0])
        channels = sum(self.shape(x)[1] for x in inputs)
        dims = (PaseDim("b", b), PaseDim("c", 1, splits=False), PaseDim("h", h), PaseDim("w", w))
        access = ("b", "", "h", "w")
        made = ((b, channels, h, w), access)
        return self.add(name, "Concat", dims, made, [(x, access) for x in inputs])

    def stack(self, name: str, inputs: tuple[int, ...], letters: str) -> int:
        """Tensors put together along a new first dim, which stays whole."""
        shape = self.shape(inputs[0])
        dims = (PaseDim("q", 1, splits=False), *_dims(letters, shape))
        made = ((len(inputs), *shape), ("", *letters))
        return self.add(name, "Stack", dims, made, [(x, tuple(letters)) for x in inputs])

    def unstack(self, name: str, x: int, letters: str) -> int:
        """The parts of a tensor along its first dim; all are laid out alike."""
        _, *rest = self.shape(x)
        dims = (PaseDim("q", 1, splits=False), *_dims(letters, rest))
        return self.add(name, "Unstack", dims, (tuple(rest), tuple(letters)), [(x, ("", *letters))])

    def reshape(self, name: str, x: int, letters: str, shape: tuple[int, int]) -> int:
        """Two ops, to one long dim and from there to `b` and `n`; shares must be contiguous."""
        before, total = self.shape(x), shape[0] * shape[1]
        dims = _dims(letters, before)
        ravel = self.add(
            f"{name}.ravel", "Ravel", dims, ((total,), (letters,)), [(x, tuple(letters))]
        )
        made = (shape, ("b", "n"))
        dims = _dims("bn", shape)
        return self.add(f"{name}.unravel", "Unravel", dims, made, [(ravel, ("bn",))])

    def finish(self, name: str, cutoff: int) -> PaseGraph:
        """The graph."""
        return PaseGraph(name, tuple(self.ops), cutoff)

    def _same(
        self,
        name: str,
        kind: str,
        x: int | tuple[int, ...],
        shape: tuple[int, ...],
        letters: str,
        axis: str = "",
        pointwise: int = 0,
        window: tuple[int, int] = (1, 1),
    ) -> int:
        """An op whose inputs and output are divided alike."""
        inputs = x if isinstance(x, tuple) else (x,)
        access = tuple(letters)
        dims = _dims(letters, shape, axis)
        read = [(each, access) for each in inputs]
        return self.add(name, kind, dims, (shape, access), read, pointwise, window)


def _dims(letters: str, shape: Iterable[int], axis: str = "") -> tuple[PaseDim, ...]:
    return tuple(
        PaseDim(letter, extent, "X" if letter in axis else "")
        for letter, extent in zip(letters, shape, strict=True)
    )


def _role(letter: str, first: str, second: str, out: str) -> str:
    if letter not in out:
        return "K"
    if letter in first:
        return "B" if letter in second else "M"
    return "N"


def _windows(extent: int, kernel: int, padding: int, stride: int) -> int:
    return (extent + 2 * padding - kernel) // stride + 1


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)
