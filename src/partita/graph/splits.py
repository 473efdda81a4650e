"""Legal splits of an op over devices, and what each costs in communication.

An op is split by giving each mesh axis one loop dim (or none: every device repeats the work).
On that axis a tensor is then

    Shard(i)    the dim indexes its dim i: each device holds its share
    Replicate   the dim does not index it: each device holds all of it
    Partial     an output the dim does not index: each device holds a partial sum

which are the placements of PyTorch's DTensor. The communication of a split is read off the nest:
partial outputs must be summed, statistics exchanged, halos fetched from neighbours.

Some splits are tied: those of dispatch and combine ops that route the same tokens. A dispatch lets
every expert take the tokens that want it most, as many as it has places for, within each group of
tokens that are routed together. A combine gives what the experts made back to these tokens, so it
has to know the same groups. The two are tied by the tokens: a combine belongs to every dispatch
whose places its first input holds.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from partita.errors import GraphError
from partita.graph.loops import Access, Nest, loop_nest
from partita.graph.record import Call, Graph, Op

Factors = Mapping[str, float]  # loop dim -> how many ways it is split

REPEAT = ""  # the split that gives an axis no dim


class TensorPlacement(NamedTuple):
    """Where a tensor's elements are along one mesh axis. Text form: `S(0)`, `R`, `P`.

    A named tuple because searches hash and compare millions of them.
    """

    kind: str
    dim: int = -1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "shard" else {"partial": "P"}.get(self.kind, "R")

    @classmethod
    def parse(cls, text: str) -> "TensorPlacement":
        """The placement from its text form."""
        if text == "R":
            return REPLICATE
        if text == "P":
            return PARTIAL
        if text.startswith("S(") and text.endswith(")") and text[2:-1].isdecimal():
            return cls("shard", int(text[2:-1]))
        raise GraphError(f"placement {text!r}", fix="write S(dim), R or P")


REPLICATE = TensorPlacement("replicate")
PARTIAL = TensorPlacement("partial")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Data that crosses devices because a dim is split: `elements` per device and execution.

    `tensor` is the output that is summed, or -1 for statistics and halos.
    """

    collective: str  # all_reduce, all_gather, halo
    elements: int
    tensor: int = -1


def splittable(call: Call, factor: int = 1) -> tuple[str, ...]:
    """The dims that may be split `factor` ways into equal shares, in nest order."""
    return tuple(
        dim.name
        for dim in loop_nest(call).dims
        if not dim.whole and dim.extent >= factor and dim.extent % factor == 0
    )


def check_split(call: Call, split: dict[str, int]) -> None:
    """Refuse a split (factor per dim) that the op does not have."""
    nest = loop_nest(call)
    for name, factor in split.items():
        dim = next((d for d in nest.dims if d.name == name), None)
        if dim is None or dim.whole:
            legal = [d.name for d in nest.dims if not d.whole]
            raise GraphError(
                f"{call.kind} cannot be split along {name!r}",
                fix=f"its dims are {', '.join(legal) or 'none'}",
            )
        if factor < 1 or dim.extent % factor:
            raise GraphError(
                f"{call.kind} dim {name!r} of {dim.extent} cannot be split {factor} ways",
                fix="choose a divisor",
            )


def input_placement(access: Access, dim: str) -> TensorPlacement:
    """How a tensor must lie on an axis for an op that splits `dim` there to read it."""
    position = access.position(dim) if dim else None
    return REPLICATE if position is None else TensorPlacement("shard", position)


def output_placement(nest: Nest, access: Access, dim: str) -> TensorPlacement:
    """How an output lies on an axis after an op that splits `dim` there."""
    if not dim:
        return REPLICATE
    position = access.position(dim)
    if position is not None:
        return TensorPlacement("shard", position)
    return PARTIAL if _leaves_partial_sums(access, dim) else REPLICATE


@functools.lru_cache(maxsize=65536)
def placements(
    call: Call, dims: tuple[str, ...]
) -> tuple[tuple[tuple[TensorPlacement, ...], ...], tuple[tuple[TensorPlacement, ...], ...]]:
    """How an op's inputs must lie and its outputs come to lie, one placement per axis."""
    nest = loop_nest(call)
    return (
        tuple(tuple(input_placement(access, dim) for dim in dims) for access in nest.inputs),
        tuple(tuple(output_placement(nest, a, dim) for dim in dims) for a in nest.outputs),
    )


def share(nest: Nest, access: Access, shape: tuple[int, ...], split: Factors) -> int:
    """Elements of a tensor that one device holds under a split (rounded up per dim)."""
    total = 1
    for size, names in zip(shape, access.dims, strict=True):
        factor = 1.0
        for name in names:
            factor *= split.get(name, 1)
        total *= part(size, factor)
    return total


def part(size: int, ways: float) -> int:
    """One share of `size` elements, rounded up; `ways` need not be whole for heterogeneous
    devices."""
    return math.ceil(size / ways - 1e-9)


def communication(call: Call, split: Factors, along: str | None = None) -> tuple[Exchange, ...]:
    """What one execution of an op exchanges because it is split so (because of one dim only)."""
    return _communication(call, tuple(split.items()), along)


@functools.lru_cache(maxsize=65536)
def _communication(
    call: Call, items: tuple[tuple[str, float], ...], along: str | None
) -> tuple[Exchange, ...]:
    split = dict(items)
    nest = loop_nest(call)
    shapes = _output_shapes(call)
    exchanges = []
    active = {name: factor for name, factor in split.items() if factor > 1}
    for name in active if along is None else [n for n in active if n == along]:
        for stat in (stat for stat in nest.stats if stat.dim == name):
            rows = 1
            for over in stat.over:
                rows *= _extent(nest, over, active)
            exchanges.append(Exchange(stat.collective, rows * stat.values))
        for i, access in enumerate(nest.outputs):
            if _leaves_partial_sums(access, name):
                exchanges.append(Exchange("all_reduce", share(nest, access, shapes[i], active), i))
        exchanges.extend(_halos(call, nest, name, active))
    return tuple(exchanges)


@functools.lru_cache(maxsize=65536)
def shares_between(call: Call) -> bool:
    """May devices share statistics or halos because an op is split? Partial sums do not count."""
    nest = loop_nest(call)
    return bool(nest.stats) or any(any(a.halo) for a in (*nest.inputs, *nest.outputs))


def _leaves_partial_sums(access: Access, dim: str) -> bool:
    """Does splitting `dim` leave partial sums of this output? Not if statistics complete it."""
    return access.position(dim) is None and dim not in access.repeats


def _output_shapes(call: Call) -> tuple[tuple[int, ...], ...]:
    return tuple(call.inputs[i] for i in call.wrt) if call.wrt else call.outputs


def _extent(nest: Nest, name: str, split: Factors) -> int:
    size = next((dim.extent for dim in nest.dims if dim.name == name), 1)
    return part(size, split.get(name, 1))


def _halos(call: Call, nest: Nest, name: str, split: Factors) -> list[Exchange]:
    """Border elements of what it reads that a device needs from its neighbours.

    A border of what it writes (of a transposed convolution, of a gradient) is added to theirs.
    """
    if call.wrt:
        sides = {"g": call.outputs, "o": call.outputs, "i": call.inputs}
        shapes = [sides[code[0]][int(code[1:])] for code in call.reads]
    else:
        shapes = list(call.inputs)
    exchanges = []
    shapes += _output_shapes(call)
    for shape, access in zip(shapes, (*nest.inputs, *nest.outputs), strict=True):
        position = access.position(name)
        if position is None or not access.halo[position]:
            continue
        mine = share(nest, access, shape, split) // max(1, part(shape[position], split[name]))
        exchanges.append(Exchange("halo", mine * access.halo[position]))
    return exchanges


def routed_pairs(graph: Graph) -> tuple[tuple[Op, Op], ...]:
    """Every (dispatch, combine) of the same tokens, in the order of the combines."""
    key = ("routed pairs", "")
    if key not in graph.memo:
        graph.memo[key] = _routed_pairs(graph)
    pairs: tuple[tuple[Op, Op], ...] = graph.memo[key]
    return pairs


def _routed_pairs(graph: Graph) -> tuple[tuple[Op, Op], ...]:
    dispatches: dict[str, dict[str, Op]] = {}  # tensor -> the dispatches whose places it holds
    pairs: list[tuple[Op, Op]] = []
    for op in graph.ops:
        if op.phase != "forward":
            continue
        if op.kind == "moe_combine":
            pairs.extend((dispatch, op) for dispatch in dispatches.get(op.inputs[0], {}).values())
        elif op.kind == "moe_dispatch":
            dispatches.update({name: {op.name: op} for name in op.outputs})
        else:
            held = {k: v for name in op.inputs for k, v in dispatches.get(name, {}).items()}
            if held:
                dispatches.update((name, held) for name in op.outputs)
    return tuple(pairs)
