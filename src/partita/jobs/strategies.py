"""The ways people split models by hand, by name: what a search must not lose to.

    data      every op by its batch
    zero1     the same, optimizer states sharded
    fsdp      the same, parameters sharded
    tensor    Megatron's: matrices by columns then rows, attention by heads, vocabulary and experts
              sharded along the inner mesh axis, the batch along the other
    one-weird-trick  Krizhevsky's one weird trick: convolutions by batch, dense layers by features
    spatial   images by rows, everything else by batch

`tensor` and `one-weird-trick` know no model: they follow how tensors lie from op to op, and split a
matrix by its rows where its input comes in shards of features, by its columns elsewhere.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from partita.costs.layouts import token_groups
from partita.costs.sharding import dims_of
from partita.graph.loops import Access, loop_nest
from partita.graph.record import Graph, Op
from partita.graph.splits import REPLICATE, TensorPlacement, output_placement, routed_pairs
from partita.jobs.simulate import data_splits
from partita.plans import Axis, Mesh, OpSplit, Stage

MATRICES = frozenset({"linear", "expert_linear"})
MOST_INNER = 64
SEQUENCE = "s"  # the loop over positions
OPENS = {"moe_dispatch": "e", "embedding": "v"}  # ops that may start a split of their own


@dataclass(frozen=True)
class NamedStrategy:
    """A named way; `stages` gives it on every mesh it knows for so many devices."""

    name: str
    summary: str
    stages: Callable[[Graph, int], tuple[Stage, ...]]


def _line(name: str, size: int) -> Mesh:
    return Mesh((Axis(name, size),), tuple(range(size)))


def _data(zero: int) -> Callable[[Graph, int], tuple[Stage, ...]]:
    def stages(graph: Graph, size: int) -> tuple[Stage, ...]:
        mesh = _line("data", size)
        return (Stage("model", mesh, data_splits(graph, mesh, zero)),)

    return stages


def _tensor(graph: Graph, size: int) -> tuple[Stage, ...]:
    """Every inner axis that divides the devices, with and without sharded states."""
    stages: list[Stage] = []
    levels = (0, 1) if graph.is_training else (0,)
    for inner in (n for n in range(2, size + 1) if size % n == 0 and n <= MOST_INNER):
        axes: tuple[Axis, ...] = (Axis("tensor", inner),)
        if inner < size:
            axes = (Axis("data", size // inner), *axes)
        mesh = Mesh(axes, tuple(range(size)))
        splits = feature_splits(graph, mesh)
        for level in levels:
            kept = tuple(replace(split, zero=level) for split in splits)
            stages.append(Stage("model", mesh, kept))
    return tuple(stages)


def _one_weird_trick(graph: Graph, size: int) -> tuple[Stage, ...]:
    mesh = _line("x", size)
    return (Stage("model", mesh, feature_splits(graph, mesh, batch_first=True)),)


def _spatial(graph: Graph, size: int) -> tuple[Stage, ...]:
    mesh = _line("x", size)
    splits = []
    for op in graph.ops:
        if op.phase == "forward":
            legal = dims_of(graph.call(op), mesh.axes)
            order = [("h",), ("b",), ("",)]
            splits.append(OpSplit(op.name, next(dims for dims in order if dims in legal)))
    return (Stage("model", mesh, tuple(splits)),)


STRATEGIES: dict[str, NamedStrategy] = {
    "data": NamedStrategy("data", "data parallel", _data(0)),
    "zero1": NamedStrategy("zero1", "data parallel, states sharded", _data(1)),
    "fsdp": NamedStrategy("fsdp", "fully sharded data parallel", _data(3)),
    "tensor": NamedStrategy("tensor", "Megatron-style tensor parallel", _tensor),
    "one-weird-trick": NamedStrategy(
        "one-weird-trick", "batch for convolutions, features for dense layers", _one_weird_trick
    ),
    "spatial": NamedStrategy("spatial", "images by rows", _spatial),
}


def feature_splits(
    graph: Graph, mesh: Mesh, *, batch_first: bool = False, sequence: bool = False
) -> tuple[OpSplit, ...]:
    """Splits along the last axis that follow features from op to op; the batch along the others.

    With `batch_first`, ops that no dense layer comes before are split by batch there too. With
    `sequence`, what would be replicated along the last axis is split by its sequence (Megatron's
    sequence parallelism): norms, residuals, and tables that the axis does not divide.
    """
    lies: dict[str, TensorPlacement] = {}  # how each tensor lies on the last axis
    splits: list[OpSplit] = []
    for op in graph.ops:
        if op.phase != "forward":
            continue
        legal = _routed_alike(graph, op, dims_of(graph.call(op), mesh.axes), mesh, splits)
        inner = _follow(graph, op, lies, mesh.axes[-1].parts, sequence)
        if not inner and batch_first and _all_replicated(graph, op, lies):
            inner = "b"
        dims = _with_batch(legal, inner)
        splits.append(OpSplit(op.name, dims))
        nest = loop_nest(graph.call(op))
        for name, access in zip(op.outputs, nest.outputs, strict=True):
            placement = output_placement(nest, access, dims[-1])
            if placement.kind != "shard":  # a partial sum is reduced, or reduce-scattered
                placement = _along_sequence(access) if sequence else REPLICATE
            lies[name] = placement
    return tuple(splits)


def _along_sequence(access: Access) -> TensorPlacement:
    """A tensor sharded along its sequence; whole where it has none."""
    for index, names in enumerate(access.dims):
        if names == (SEQUENCE,):
            return TensorPlacement("shard", index)
    return REPLICATE


def _follow(
    graph: Graph, op: Op, lies: dict[str, TensorPlacement], parts: int, sequence: bool = False
) -> str:
    """The loop dim that keeps the shares an op's inputs come in; for matrices, that makes some."""
    nest = loop_nest(graph.call(op))
    extents = {dim.name: dim.extent for dim in nest.dims if not dim.whole}
    wanted = set()
    for name, access in zip(op.inputs, nest.inputs, strict=True):
        place = lies.get(name, REPLICATE)
        if place.kind == "shard" and place.dim < len(access.dims) and access.dims[place.dim]:
            wanted.add(access.dims[place.dim][0])
    if sequence and len(wanted) > 1:  # shares of features or experts come first
        wanted.discard(SEQUENCE)
    free = not wanted or (sequence and wanted == {SEQUENCE})
    last = [SEQUENCE] if sequence else []
    if op.kind in MATRICES and (free or wanted == {"b"}):
        candidates = ["n", *last]
    elif op.kind in OPENS and free:
        candidates = [OPENS[op.kind], *last]
    elif len(wanted) == 1:
        candidates = sorted(wanted)
    else:
        return ""
    return next((d for d in candidates if d in extents and extents[d] % parts == 0), "")


def _routed_alike(
    graph: Graph, op: Op, legal: tuple[tuple[str, ...], ...], mesh: Mesh, splits: list[OpSplit]
) -> tuple[tuple[str, ...], ...]:
    """Of a combine's splits those that route the groups of tokens that its dispatch does.

    Dispatches that one combine joins route alike, too.
    """
    pairs = routed_pairs(graph) if op.kind in ("moe_dispatch", "moe_combine") else ()
    combines = {combine.name for pair in pairs for combine in pair[1:] if op in pair}
    related = {dispatch.name for dispatch, combine in pairs if combine.name in combines}
    for split in splits if related else ():
        if split.op in related:
            groups = token_groups(graph.call(graph.op(split.op)), split.dims, mesh.axes)
            legal = tuple(d for d in legal if token_groups(graph.call(op), d, mesh.axes) == groups)
    return legal


def _all_replicated(graph: Graph, op: Op, lies: dict[str, TensorPlacement]) -> bool:
    """True where no input has been cut along features so far."""
    made = [lies[name] for name in op.inputs if name in lies]
    return op.kind not in MATRICES and all(
        p in (REPLICATE, TensorPlacement("shard", 0)) for p in made
    )


@functools.lru_cache(maxsize=4096)  # a deep model asks the same of every layer
def _with_batch(legal: tuple[tuple[str, ...], ...], inner: str) -> tuple[str, ...]:
    """The inner dim if it is legal, and the batch along as many other axes as can be."""

    def score(dims: tuple[str, ...]) -> tuple[bool, int, int]:
        others = dims[:-1]
        strange = sum(1 for dim in others if dim not in ("", "b"))
        return dims[-1] == inner, -strange, others.count("b") - (dims[-1] not in (inner, ""))

    return max(legal, key=score)
