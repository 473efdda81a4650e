"""The draws of a model: how many each of its nodes makes, and which sizes follow the batch.

A node draws by operators below it (an LSTM has several dropouts, an attention one). They are seen
by running the node without data, at two sizes of batch: the dim that grew with the batch is that of
the samples. The module itself makes the same draws in the same order, but may have another dim in
front while it does (a recurrent layer turns its batch around inside).
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from partita.capture.exported import Captured
from partita.capture.reference_module import DTYPES
from partita.capture.torch_program import Ref, TensorSpec, TorchNode, replaced
from partita.run.draws import Draw, depths, drawn_tensor, is_draw

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DrawTable:
    """All draws of a model in the order of its program, and the number of each node's first."""

    draws: tuple[Draw, ...]
    first: dict[str, int]  # by node


def module_draws(
    module: torch.nn.Module, calls: Sequence[tuple[Any, Any]], batches: Sequence[int]
) -> list[Draw]:
    """The draws of a module as it runs by itself, from calls of it with two sizes of batch."""
    seen = []
    for args, kwargs in calls:
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            args, kwargs = tree_map_only(torch.Tensor, fake.from_tensor, (args, kwargs))
            with _Noting() as noted, _without_cudnn():
                torch.func.functional_call(module, buffers, args, kwargs)
        seen.append(noted)
    own, other = (noted.shapes for noted in seen)
    if len(own) != len(other):
        return [Draw(varies=True)] * len(own)
    draws = []
    for shape, theirs, lies in zip(own, other, seen[0].depths, strict=True):
        draw = _draw(shape, batches[0], theirs, batches[1])
        draws.append(draw if draw.dim is None else replace(draw, depth=lies[draw.dim]))
    return draws


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    """Its recurrent layers look at the memory of their weights, and draw inside."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def draw_table(
    captured: Captured, batch: int, other: Captured | None, other_batch: int
) -> DrawTable:
    """The draws of a model that was captured for two sizes of batch, if it can be."""
    shapes = _shapes(captured)
    others = _shapes(other) if other is not None else {}
    draws: list[Draw] = []
    first = {}
    for node, own in shapes.items():
        first[node] = len(draws)
        theirs = others.get(node, ())
        for number, shape in enumerate(own):
            known = theirs[number] if len(theirs) == len(own) else None
            draws.append(_draw(shape, batch, known, other_batch))
    return DrawTable(tuple(draws), first)


def _draw(shape: Shape, batch: int, other: Shape | None, other_batch: int) -> Draw:
    """How a draw of this shape belongs to samples, by its shape with another batch."""
    if shape == other:
        return Draw()
    if other is not None and len(shape) == len(other):
        grown = [dim for dim, size in enumerate(shape) if size != other[dim]]
        if len(grown) == 1 and shape[grown[0]] % batch == 0:
            each = shape[grown[0]] // batch
            if other[grown[0]] == each * other_batch:
                return Draw(grown[0], each)
    return Draw(varies=True)


class _Noting(TorchDispatchMode):
    """Notes the shape of everything that is drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[Shape] = []
        self.depths: list[list[int]] = []  # how the dims lie in memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if is_draw(func, args, kwargs or {}):
            drawn = drawn_tensor(func, args, made)
            self.shapes.append(tuple(drawn.shape))
            self.depths.append(depths(drawn))
        return made


def _shapes(captured: Captured) -> dict[str, list[Shape]]:
    """What each random node draws, in the order of the program."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return {
            node.name: _drawn(captured, node) for node in captured.record.nodes if node.is_random
        }


def _drawn(captured: Captured, node: TorchNode) -> list[Shape]:
    """What a node draws, seen on a CPU: kernels of a GPU may draw inside, or look at memory."""
    values = captured.record.values

    def empty(ref: Ref) -> Any:
        if ref.name not in values:  # nodes of a reference module read the tensors of its graph
            tensor = captured.graph.tensor(ref.name)
            return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
        return replaced(values[ref.name], TensorSpec, _empty)

    args, kwargs = replaced((node.args, dict(node.kwargs)), Ref, empty)
    args, kwargs = replaced((args, kwargs), torch.device, lambda _: torch.device("cpu"))
    noted = _Noting()
    with noted, torch.no_grad():
        node.target(*args, **kwargs)
    return noted.shapes


def _empty(spec: TensorSpec) -> torch.Tensor:
    if len(spec.stride) != len(spec.shape):  # not known: of reference modules
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
