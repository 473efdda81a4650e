"""What a plan is in the field's words: `pp=4 dp=8 tp=2 zero=1, 1F1B, 16 micro-batches`.

A mesh axis has no meaning of its own: along it every op splits one of its loop dims. It gets a name
where all ops that know what their dims stand for agree:

    splits along the axis                       name
    batch                                       dp
    features (heads, channels, vocabulary)      tp
    features, and sequence in norms and losses  tp_sp   (Megatron's sequence parallel)
    sequence, attention included                cp
    experts, and the batch elsewhere            ep
    features, and experts                       tp_ep
    height or width of images                   spatial

Ops that only move or combine elements (reshape, add, ...) have dims by position and do not vote. A
few ops that split something else (a table of positions where all else splits its batch) do not take
the name away: nearly all is enough. An axis along which ops split other mixtures keeps a neutral
name, and the summary says what it splits.

This module lies left of the records of plans, so that they can print themselves with it; it reads
stages through the few fields in the protocols below.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from partita.graph.loops import loop_nest
from partita.graph.record import Call, Graph
from partita.graph.splits import REPLICATE, input_placement

NEUTRAL = ("x", "y", "z")
WHOLE = ("i64", "i32", "i16", "i8", "u8")  # types of ids
FEW = 0.05  # of the ops that vote: so many may split something else than the name says
# How schedules are written; any other is written as it is.
TITLES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zb-v": "ZB-V",
    "interleaved": "interleaved 1F1B",
    "looped-bfs": "looped BFS",
    "hanayo": "Hanayo",
    "chimera": "Chimera",
    "dualpipe": "DualPipe",
    "dualpipe-v": "DualPipeV",
}
# Degrees in the order in which they are written, and what is written after a tp or dp axis.
DEGREES = ("dp", "cp", "ep", "spatial", "tp")
REPLICAS = ("dp", "cp", *NEUTRAL)  # axes along which parameters have copies
# Ops whose sequence split is not Megatron's sequence parallel but context parallel.
PRODUCTS = frozenset({"linear", "attention", "matmul", "einsum", "expert_linear", "conv"})

_LEADING = {"b": "batch", **dict.fromkeys(("s", "t", "u", "w", "x", "y", "z"), "sequence")}
_IMAGE = {"b": "batch", **dict.fromkeys("gnc", "features"), **dict.fromkeys("dhw", "space")}
_CELL = {"b": "batch", **dict.fromkeys("zhik", "features"), "t": "sequence"}
_TOKENS = {**_LEADING, "e": "experts", "k": "features"}
_NORM = {**_LEADING, **dict.fromkeys(("c", "d", "e", "f"), "features")}

# What the loop dims of a kind stand for; a kind that is not here does not say.
MEANINGS: dict[str, dict[str, str]] = {
    "linear": {**_LEADING, "n": "features", "k": "features"},
    "matmul": {"b": "batch", "h": "features", "g": "features"},
    "conv": _IMAGE,
    "pool": _IMAGE,
    "batch_norm": _IMAGE,
    "group_norm": _IMAGE,
    "resize": _IMAGE,
    "layer_norm": _NORM,
    "rms_norm": _NORM,
    "attention": {**_LEADING, "h": "features", "g": "features"},
    "embedding": {**_LEADING, "v": "features", "e": "features"},
    "state_space": {"b": "batch", "g": "features", "r": "features"},
    "lstm": _CELL,
    "gru": _CELL,
    "lstm_cell": _CELL,
    "gru_cell": _CELL,
    "moe_router": _TOKENS,
    "moe_dispatch": _TOKENS,
    "moe_combine": _TOKENS,
    # The places of an expert are filled by tokens of the batch.
    "expert_linear": {"e": "experts", "c": "batch", "n": "features", "k": "features"},
    "cross_entropy": {**_LEADING, "v": "features"},
}


class AxisLike(Protocol):
    """What is read of an axis."""

    @property
    def name(self) -> str:
        """dp, tp, ..., or a neutral name."""

    @property
    def size(self) -> int:
        """Devices along it."""

    @property
    def weights(self) -> tuple[int, ...]:
        """Shares of heterogeneous devices; none where all are equal."""

    @property
    def replicates(self) -> bool:
        """Does ZeRO keep replicas along it?"""


class MeshLike(Protocol):
    """What is read of a mesh."""

    @property
    def axes(self) -> Sequence[AxisLike]:
        """Its axes, outermost first."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Its devices."""


class SplitLike(Protocol):
    """What is read of an op's split."""

    @property
    def op(self) -> str:
        """The op."""

    @property
    def dims(self) -> tuple[str, ...]:
        """A loop dim per axis, '' for none."""

    @property
    def zero(self) -> int:
        """The ZeRO stage of its parameters."""


class StageLike(Protocol):
    """What is read of a stage."""

    @property
    def mesh(self) -> MeshLike:
        """Its devices."""

    @property
    def splits(self) -> Sequence[SplitLike]:
        """Its ops."""

    @property
    def checkpointing(self) -> str:
        """What the backward runs again: none, selective, full."""


class ScheduleLike(Protocol):
    """What is read of a schedule."""

    @property
    def name(self) -> str:
        """Its name in files."""

    @property
    def num_microbatches(self) -> int:
        """Into how many micro-batches the global batch is divided."""


@dataclass(frozen=True, slots=True)
class AxisUse:
    """What ops split along one axis: how many split what, the most first, and a name for it."""

    name: str  # '' for a mixture without one
    counts: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{what} in {count} op{'s' * (count != 1)}" for what, count in self.counts)


def meaning(call: Call, dim: str) -> str:
    """What a loop dim of an op stands for: batch, features, sequence, ...; '' where unknown."""
    return MEANINGS.get(call.kind, {}).get(dim, "")


def axis_use(graph: Graph, dims: Iterable[tuple[str, str]]) -> AxisUse:
    """The use of one axis, from (op, loop dim along the axis) of every op."""
    counts: Counter[str] = Counter()
    in_products: Counter[str] = Counter()
    for name, dim in dims:
        op = graph.op(name)
        what = meaning(graph.call(op), dim) if dim else ""
        if what:
            counts[what] += 1
            if op.kind in PRODUCTS:
                in_products[what] += 1
    ranked = tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    few = FEW * sum(counts.values())
    # Of the products of a layer, the output layer alone may split something else.
    products = {what for what, n in in_products.items() if 6 * n > in_products.total()}
    word = _word(set(counts), products)
    if not word:
        word = _word({what for what, count in ranked if count > few}, products)
    return AxisUse(word, ranked)


def _word(uses: set[str], in_products: set[str]) -> str:
    """The name for what all ops split, and what those that multiply split."""
    plain = {
        frozenset({"batch"}): "dp",
        frozenset({"features"}): "tp",
        frozenset({"sequence"}): "cp",
        frozenset({"experts"}): "ep",
        frozenset({"batch", "experts"}): "ep",
        frozenset({"features", "experts"}): "tp_ep",
        frozenset({"space"}): "spatial",
    }
    if uses == {"features", "sequence"} and "sequence" not in in_products:
        return "tp_sp"
    return plain.get(frozenset(uses), "")


def axis_names(graph: Graph, stage: StageLike) -> tuple[str, ...]:
    """A name for every axis of a stage's mesh, no two alike: dp, tp, a second dp is dp2."""
    names: list[str] = []
    for index in range(len(stage.mesh.axes)):
        use = axis_use(graph, ((split.op, split.dims[index]) for split in stage.splits))
        word = use.name or NEUTRAL[index % len(NEUTRAL)]
        count = sum(_plain(name) == word for name in names)
        names.append(f"{word}{count + 1}" if count else word)
    return tuple(names)


def _plain(name: str) -> str:
    return name.rstrip("0123456789")


def summary(stages: Sequence[StageLike], schedule: ScheduleLike, graph: Graph | None = None) -> str:
    """A plan in a line; with the graph, what mixed axes split is told in words, not loop dims."""
    shared = [stage for stage in stages if _is_shared(stage, stages)]
    own = [stage for stage in stages if stage not in shared] or shared
    groups = len({frozenset(stage.mesh.devices) for stage in own})
    per_group = math.ceil(len(own) / groups)
    parts = [f"pp={groups}"] if groups > 1 else []
    parts += [f"vpp={per_group}"] if per_group > 1 else []
    parts += [words for words in [_meshes(own, graph)] if words]
    if shared and own != shared:
        parts.append(f"shared {_meshes(shared, graph, counted=True)}")
    zero = zero_words(stages, graph)
    parts += [zero] if zero else []
    told = [" ".join(parts) or "one device", *_checkpointing(stages), *_order(stages, schedule)]
    return ", ".join(told)


def _is_shared(stage: StageLike, stages: Sequence[StageLike]) -> bool:
    """Has a stage all devices of another, and more? Then several groups run it together."""
    devices = set(stage.mesh.devices)
    return any(set(other.mesh.devices) < devices for other in stages)


def _meshes(stages: Sequence[StageLike], graph: Graph | None, *, counted: bool = False) -> str:
    """`dp=8` of stages that are alike, `2 x [dp=2] + 1 x [tp=4]` of others, or if `counted`."""
    alike: dict[object, list[StageLike]] = {}
    for stage in stages:  # by their axes; what mixed ones split is told of all stages together
        axes = tuple((axis.name, axis.size, axis.weights) for axis in stage.mesh.axes)
        alike.setdefault(tuple(axis for axis in axes if axis[1] > 1), []).append(stage)
    each = [(len(group), _mesh_words(group, graph)) for group in alike.values()]
    if len(each) == 1 and not counted:
        return each[0][1]
    return " + ".join(f"{count} x [{words or 'one device'}]" for count, words in each)


def _mesh_words(stages: Sequence[StageLike], graph: Graph | None) -> str:
    """The degrees of stages with the same axes: `dp=8 tp=2`."""
    degrees: dict[str, int] = {}
    ragged: dict[str, str] = {}
    extras: list[str] = []
    mixed: list[str] = []
    for axis in stages[0].mesh.axes:
        word, _, extra = _plain(axis.name).partition("_")
        weights = f" (ragged {':'.join(map(str, axis.weights))})" if axis.weights else ""
        if axis.size == 1:
            continue
        if word not in DEGREES:
            what = _what(stages, axis.name, graph)
            mixed.append(f"{axis.name}={axis.size}{f' ({what})' if what else ''}{weights}")
            continue
        degrees[word] = degrees.get(word, 1) * axis.size
        ragged[word] = ragged.get(word, "") + weights
        if extra:
            extras.append("sp" if extra == "sp" else f"{extra}={axis.size}")
    told = [f"{word}={degrees[word]}{ragged[word]}" for word in DEGREES if word in degrees]
    return " ".join((*told, *dict.fromkeys(extras), *mixed))


def _what(stages: Sequence[StageLike], name: str, graph: Graph | None) -> str:
    """What ops of these stages split along an axis without a name of a degree."""
    pairs = []
    for stage in stages:
        index = [axis.name for axis in stage.mesh.axes].index(name)
        pairs += [(split.op, split.dims[index]) for split in stage.splits]
    if graph is not None:
        words = str(axis_use(graph, pairs))
        if words:
            return words
    counts = Counter(dim for _, dim in pairs if dim)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{dim} in {count}" for dim, count in ranked[:3]) or "replicated"


def stage_degrees(stage: StageLike, names: Sequence[str]) -> dict[str, int]:
    """The degrees of a stage as a summary prints them, 1 where there is none, by axis names.

    `sp` is 1 where norms are split along the sequence on a tp axis, else 0. An axis along which
    features and experts are split is of both.
    """
    degrees = {**dict.fromkeys(DEGREES, 1), "sp": 0}
    for name, axis in zip(names, stage.mesh.axes, strict=True):
        word, _, extra = _plain(name).partition("_")
        if axis.size == 1 or word not in DEGREES:
            continue
        degrees[word] *= axis.size
        if extra == "sp":
            degrees["sp"] = 1
        elif extra:
            degrees[extra] *= axis.size
    return degrees


def zero_words(stages: Sequence[StageLike], graph: Graph | None = None) -> str:
    """`zero=1`; `zero=0/3` where ops differ; nothing where all parameters are replicated.

    `zero=3 hsdp=8` where parameters are sharded over 8 of the replicas only (`shard_group`). Ops
    whose parameters have no copies to share count only where no graph tells them apart, and then
    only if sharded.
    """
    levels: set[int] = set()
    for stage in stages:
        for split in stage.splits:
            number = split.zero
            if number if graph is None else copied_bytes(graph, stage, split):
                levels.add(number)
    if not any(levels):
        return ""
    groups = {shard_group(stage, [axis.name for axis in stage.mesh.axes]) for stage in stages}
    words = f"zero={'/'.join(map(str, sorted(levels)))}"
    return f"{words} hsdp={'/'.join(map(str, sorted(groups)))}" if groups != {0} else words


def shard_group(stage: StageLike, names: Sequence[str]) -> int:
    """The replicas that one copy of the parameters is sharded over (HSDP); 0: all there are."""
    axes = [axis for axis in stage.mesh.axes if axis.size > 1]
    if not any(axis.replicates for axis in axes):
        return 0
    pairs = zip(names, stage.mesh.axes, strict=True)
    return math.prod(
        axis.size for name, axis in pairs if _plain(name) in REPLICAS and not axis.replicates
    )


def copied_bytes(graph: Graph, stage: StageLike, split: SplitLike) -> float:
    """Bytes of an op's parameters of which several devices have the same: ZeRO is about these."""
    op = graph.op(split.op)
    nest = loop_nest(graph.call(op))
    wide = [dim for axis, dim in zip(stage.mesh.axes, split.dims, strict=True) if axis.size > 1]
    total = 0.0
    for name, access in zip(op.inputs, nest.inputs, strict=True):
        tensor = graph.tensor(name)
        if tensor.role == "parameter" and any(
            input_placement(access, dim) == REPLICATE for dim in wide
        ):
            total += tensor.size_bytes
    return total


def _checkpointing(stages: Sequence[StageLike]) -> list[str]:
    """Which stages recompute, and how much."""
    told = []
    for level, words in (("full", "full recompute"), ("selective", "selective recompute")):
        count = sum(stage.checkpointing == level for stage in stages)
        if count:
            where = f" in {count} of {len(stages)} stages" if count < len(stages) else ""
            told.append(f"{words}{where}")
    return told


def _order(stages: Sequence[StageLike], schedule: ScheduleLike) -> list[str]:
    """The schedule and the number of micro-batches; one stage only accumulates gradients."""
    count = schedule.num_microbatches
    microbatches = f"{count} micro-batch{'es' * (count != 1)}"
    if len(stages) > 1:
        return [TITLES.get(schedule.name, schedule.name), microbatches]
    return [microbatches] if count > 1 else []


def num_tokens(graph: Graph) -> int | None:
    """The tokens of a batch of a language model: ids that an embedding looks up; None for others.

    These are inputs, or made of inputs that are whole numbers (seen as one row, shifted by one). A
    model that looks several up (words, segments, positions) has as many tokens as the longest.
    """
    fed = {tensor.name for tensor in graph.inputs}
    counts = []
    for op in graph.ops:
        if op.phase != "forward" or not op.inputs:
            continue
        if op.kind == "embedding" and op.inputs[0] in fed:
            counts.append(math.prod(graph.tensor(op.inputs[0]).shape))
        elif any(name in fed and graph.tensor(name).dtype in WHOLE for name in op.inputs):
            fed.update(name for name in op.outputs if graph.tensor(name).dtype in WHOLE)
    return max(counts, default=None)
