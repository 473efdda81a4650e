"""What training frameworks do with a model: degrees in, stages out, and the best degrees of each.

What a framework can be told is a `FrameworkStrategy`, and `framework_plan` the plan that it is:

    world = pp x dp x cp x tp       batch = micro_batch x num_microbatches x dp

Megatron-LM, torchtitan, DeepSpeed and plain PyTorch share one family of plans: layers by columns
then rows inside groups of `tp` (with the rest by sequence if `sp`), everything by its sequence over
`cp` (attention gathers keys and values), whole layers on `pp` groups of devices (each with `vpp`
virtual stages), the batch over `dp` replicas that share parameters by a ZeRO stage (those of `cp`
count as replicas there), one way to recompute for all layers. Such a strategy becomes stages of a
plan, and is simulated like any other plan; what a framework cannot be told is not in the record.

    recompute    what runs again in the backward
    none         nothing
    norms        norms (Megatron: --recompute-modules layernorm)
    attention    the core of attention (Megatron: --recompute-modules core_attn)
    selective    norms and activations, whatever has no product (torchtitan: selective, op)
    full         each layer from its input

The field is what frameworks do when their own degrees are tuned, by name:

    ddp         replicas, micro-batches of any size
    fsdp2       parameters or gradients sharded over the replicas, or over those of a node (HSDP),
                tensor parallel inside a node
    deepspeed   ZeRO 1 to 3 over all devices, or a pipeline with ZeRO 1
    gpipe       a pipeline, forwards first, recomputed, over replicas
    megatron    TP x CP x PP x DP with sequence parallelism, interleaving, recompute of norms or
                layers, distributed optimizer
    torchtitan  TP x CP x PP x FSDP or HSDP with sequence parallelism, interleaving or ZB-V, any
                recompute

All degrees of a family are ranked by forecasts (`forecast/`: a millisecond or less each), each with
the least recomputation that fits there; the first few become plans. What a family cannot be told is
not in it: `partita export` writes what is. A stack of layers without a forecast (other layers than
a transformer's, heterogeneous devices) has a few of its degrees, evenly, instead. The sizes that a
forecast needs are read off the graph, whatever it was made from (`stack_sizes`).
"""

import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from partita.cluster import Cluster
from partita.costs.sharding import dims_of
from partita.errors import GraphError, InputError, PartitaError, PlanError
from partita.forecast import Machine, Strategy, forecast, machine_of
from partita.forecast.inputs import ExpertLayers, Transformer
from partita.forecast.memory import in_flight
from partita.graph.loops import loop_nest
from partita.graph.rebatch import rebatch
from partita.graph.record import Graph, Op
from partita.jobs.simulate import data_splits
from partita.jobs.strategies import SEQUENCE, feature_splits
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage
from partita.search.joint.cells import divisors

RECOMPUTE = ("none", "norms", "attention", "selective", "full")
V_SHAPED = ("zb-v",)  # the second half of the stages goes back over the groups
SEVERAL = ("interleaved", *V_SHAPED)  # schedules of several virtual stages
NORMS = frozenset({"layer_norm", "rms_norm"})
PRODUCTS = frozenset({"linear", "expert_linear"})
ALIKE = 0.4  # of the layers: experts in every other one, and a first one of its own, are a stack
INSIDE = 0.75  # of the ops: what has more around its layers is no stack of them
NUMBERED = re.compile(r"(?P<stack>(?:[^.0-9][^.]*\.)*?)(?P<number>[0-9]+)\.")
FrameworkPlan = tuple[tuple[Stage, ...], Schedule]


@dataclass(frozen=True)
class StackSizes:
    """What frameworks are told of a model, and forecasts need to know."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    seq: int
    rms_norm: bool
    gated: bool
    biases: bool
    tied: bool
    learned_positions: bool
    experts: int = 0  # of a layer; 0: none
    top_k: int = 0
    expert_ffn: int = 0

    def transformer(self, name: str) -> Transformer:
        """The record that forecasts take."""
        sparse = None
        if self.experts:
            sparse = ExpertLayers(self.experts, self.top_k, self.expert_ffn)
        return Transformer(
            name, self.num_layers, self.hidden, self.heads, self.ffn or self.expert_ffn,
            self.vocab, self.seq, kv_heads=self.kv_heads, head_size=self.head_size,
            gated=self.gated, biases=self.biases, tied=self.tied,
            positions=self.learned_positions, experts=sparse,
        )  # fmt: skip


@functools.lru_cache(maxsize=8)
def stack_sizes(graph: Graph) -> StackSizes | None:
    """The sizes of a model; None where it is not a stack of transformer layers over words."""
    stack = layer_stack(graph)
    if stack is None:
        return None
    unit_of = dict(stack.units)
    ops = [graph.op(name) for name, _ in stack.units]
    attention = [op for op in ops if op.kind == "attention"]
    tables = [op for op in ops if op.kind == "embedding" and unit_of[op.name] == 0]
    inputs = {tensor.name for tensor in graph.inputs}
    words = [op for op in tables if op.inputs[0] in inputs]
    norms = [op for op in ops if op.kind in ("layer_norm", "rms_norm")]
    layer = [op for op in ops if unit_of[op.name] == stack.num_layers]  # the last: it may have more
    if len(attention) != stack.num_layers or not words or not norms:
        return None
    core, table = _extents(graph, attention[0]), _extents(graph, words[0])
    products = [op for op in layer if op.kind == "linear"]
    after = [op for op in products if _follows(layer, op, "attention")]
    sparse = [op for op in layer if op.kind == "expert_linear"]
    count, top_k, inner = _experts(graph, layer, sparse, table)
    readers = [op for op in graph.consumers(words[0].inputs[1]) if op.phase == "forward"]
    return StackSizes(
        num_layers=stack.num_layers, hidden=table["e"], heads=core["h"] * core["g"],
        kv_heads=core["h"], head_size=core["d"],
        ffn=max((_extents(graph, op)["n"] for op in after), default=0) if not sparse else 0,
        vocab=table["v"], seq=table["s"], rms_norm=norms[0].kind == "rms_norm",
        gated=_is_gated(graph, layer), biases=any(len(op.inputs) > 2 for op in products),
        tied=len(readers) > 1, learned_positions=len(tables) > len(words), experts=count,
        top_k=top_k, expert_ffn=inner,
    )  # fmt: skip


def _extents(graph: Graph, op: Op) -> dict[str, int]:
    """Of the loops of an op; those of extent 1 are not in its nest."""
    return defaultdict(lambda: 1, {dim.name: dim.extent for dim in loop_nest(graph.call(op)).dims})


def _follows(layer: list[Op], op: Op, kind: str) -> bool:
    """Does an op of a layer come after the first of a kind?"""
    names = [one.name for one in layer]
    first = next((i for i, one in enumerate(layer) if one.kind == kind), len(layer))
    return names.index(op.name) > first


def _experts(
    graph: Graph, layer: list[Op], sparse: list[Op], table: dict[str, int]
) -> tuple[int, int, int]:
    """Experts of a layer, how many a token visits, and their inner width."""
    if not sparse or not any(op.kind == "moe_dispatch" for op in layer):
        return 0, 0, 0
    first = _extents(graph, sparse[0])
    tokens = table["b"] * table["s"]
    return first["e"], max(1, round(first["e"] * first["c"] / tokens)), first["n"]


def _is_gated(graph: Graph, layer: list[Op]) -> bool:
    """Does an activation read two products?"""
    for op in layer:
        makers = [graph.producer(name) for name in op.inputs]
        kinds = ("linear", "expert_linear")
        products = [maker for maker in makers if maker is not None and maker.kind in kinds]
        if op.kind == "elementwise" and len(makers) == len(products) == 2:
            return True
    return False


@dataclass(frozen=True, slots=True)
class FrameworkStrategy:
    """Degrees of parallelism as frameworks are told them; `layers` are those of virtual stages."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    zero: int = 0
    hsdp: int = 0  # replicas that one copy of the parameters is sharded over; 0: all of dp
    micro_batch: int = 1
    num_microbatches: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"
    layers: tuple[int, ...] = ()  # one stage: all of them, whatever they are
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp", "vpp", "dp", "micro_batch", "num_microbatches"):
            if getattr(self, name) < 1:
                raise PlanError(f"is {getattr(self, name)}", fix="use at least 1", field=name)
        if self.zero not in range(4):
            raise PlanError(f"is {self.zero}", fix="use 0, 1, 2 or 3", field="zero")
        alone = self.cp == 1 and self.zero > 0
        if self.hsdp and (self.hsdp < 2 or self.dp % self.hsdp or not alone):
            raise PlanError(
                f"is {self.hsdp} with dp={self.dp} cp={self.cp} zero={self.zero}",
                fix="use a divisor of dp from 2 on, with zero of at least 1 and without cp",
                field="hsdp",
            )
        if self.recompute not in RECOMPUTE:
            raise PlanError(
                f"is {self.recompute!r}",
                fix=f"use one of {', '.join(RECOMPUTE)}",
                field="recompute",
            )
        if self.sp and self.tp == 1:
            raise PlanError("needs tp of at least 2", fix="leave sp out", field="sp")
        if self.pp > 1 and len(self.layers) != self.pp * self.vpp:
            raise PlanError(
                f"{len(self.layers)} numbers of layers for pp={self.pp} x vpp={self.vpp} stages",
                fix=f"give {self.pp * self.vpp}",
                field="layers",
            )

    @property
    def world(self) -> int:
        """Devices."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def batch(self) -> int:
        """Sequences of a step, those of all replicas."""
        return self.micro_batch * self.num_microbatches * self.dp

    def __str__(self) -> str:
        degrees = [f"{n}={getattr(self, n)}" for n in ("pp", "vpp", "dp", "cp", "tp")]
        told = [text for text in degrees if not text.endswith("=1")] + ["sp"] * self.sp
        told += [f"zero={self.zero}"] * (self.zero > 0) + [f"hsdp={self.hsdp}"] * (self.hsdp > 0)
        words = [" ".join(told) or "one device"]
        words += [f"{self.recompute} recompute"] * (self.recompute != "none")
        words += [self.schedule] * (self.pp > 1)
        return ", ".join([*words, f"{self.num_microbatches} micro-batches of {self.micro_batch}"])


@dataclass(frozen=True)
class LayerStack:
    """The repeated layers of a model: for each forward op its unit, 0 before the first layer.

    Layer i (from 0) is unit i + 1; what comes after the last layer is unit `num_layers` + 1.
    """

    name: str  # what the names of layers begin with: `model.layers.`
    num_layers: int
    units: tuple[tuple[str, int], ...]


@functools.lru_cache(maxsize=8)
def layer_stack(graph: Graph) -> LayerStack | None:
    """The stack of equal layers that a model is made of; None where it is none, or is two."""
    forward = [op.name for op in graph.ops if op.phase == "forward"]
    matches = {name: NUMBERED.match(f"{module_of(graph.op(name))}.") for name in forward}
    counts: Counter[str] = Counter()
    for stack, _ in {(m["stack"], m["number"]) for m in matches.values() if m}:
        counts[stack] += 1
    if not counts:
        return None
    (name, number), *others = counts.most_common(2)
    if number < 2 or (others and 2 * others[0][1] > number):
        return None
    units, place = [], 0
    for op in forward:
        match = matches[op]
        if match and match["stack"] == name:
            unit = int(match["number"]) + 1
            if unit not in (max(place, 1), place + 1):
                return None  # layers do not follow one another
            place = unit
        elif place == number:  # not numbered, after the last layer has begun
            place = number + 1
        units.append((op, place))
    return LayerStack(name, number, tuple(units)) if _are_alike(graph, units, number) else None


def _are_alike(graph: Graph, units: list[tuple[str, int]], number: int) -> bool:
    """Have all layers products, most the same ops, and are nearly all ops in layers?"""
    inside = sum(0 < unit <= number for _, unit in units)
    heavy = {unit for op, unit in units if graph.op(op).kind in PRODUCTS}
    if inside < INSIDE * len(units) or not heavy >= set(range(1, number + 1)):
        return False
    kinds: dict[int, list[str]] = {}
    for op, unit in units:
        kinds.setdefault(unit, []).append(graph.op(op).kind)
    shapes = Counter(tuple(kinds.get(unit, ())) for unit in range(1, number + 1))
    return shapes.most_common(1)[0][1] >= ALIKE * number


def module_of(op: Op) -> str:
    """The module that an op is of: what it is called, or where it was captured."""
    named = not op.scope or op.name.startswith(f"{op.scope}.")  # models of the zoo
    return op.name if named else op.scope


def even_layers(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as they can be; what is left over goes to the middle."""
    each, rest = divmod(num_layers, stages)
    counts = [each] * stages
    first = (stages - rest) // 2
    for index in range(first, first + rest):
        counts[index] += 1
    return tuple(counts)


def framework_plan(graph: Graph, strategy: FrameworkStrategy) -> FrameworkPlan:
    """Stages and schedule of a strategy for a model whose graph has the batch of a step."""
    s = strategy
    axes = [("dp", s.dp), ("cp", s.cp), ("tp", s.tp)]
    if s.hsdp not in (0, s.dp):
        axes = [("dp", s.dp // s.hsdp), ("dp2", s.hsdp), ("tp", s.tp)]
    shape = tuple((name, size) for name, size in axes if size > 1) or (("dp", 1),)
    splits = _splits(graph, shape, s)
    parts = _parts(graph, s)
    size = s.dp * s.cp * s.tp
    stages = []
    for number, names in enumerate(parts):
        mesh = _mesh(shape, group_of(s, number) * size, replicates="dp2" in dict(shape))
        own = tuple(splits[name] for name in names)
        kind, segments, recomputed = _recomputed(graph, names, s.recompute)
        label = "model" if len(parts) == 1 else f"stage{number}"
        stages.append(Stage(label, mesh, own, kind, segments, recomputed))
    return tuple(stages), Schedule(s.schedule, s.num_microbatches)


def group_of(strategy: FrameworkStrategy, stage: int) -> int:
    """The group of devices that holds a virtual stage."""
    there_and_back = strategy.schedule in V_SHAPED and stage >= strategy.pp
    return 2 * strategy.pp - 1 - stage if there_and_back else stage % strategy.pp


def _mesh(shape: Sequence[tuple[str, int]], first: int, *, replicates: bool = False) -> Mesh:
    axes = tuple(
        Axis(name, count, (), replicates and not i) for i, (name, count) in enumerate(shape)
    )
    size = 1
    for _, count in shape:
        size *= count
    return Mesh(axes, tuple(range(first, first + size)))


def _splits(
    graph: Graph, shape: tuple[tuple[str, int], ...], s: FrameworkStrategy
) -> dict[str, OpSplit]:
    """The split of every forward op; how a reshape can be split depends on the micro-batch."""
    splits = _cached_splits(graph, shape, s.micro_batch * s.dp, s.tp > 1, s.sp)
    return {split.op: replace(split, zero=s.zero) for split in splits}


@functools.lru_cache(maxsize=64)
def _cached_splits(
    graph: Graph, shape: tuple[tuple[str, int], ...], batch: int, tensor: bool, sequence: bool
) -> tuple[OpSplit, ...]:
    mesh = _mesh([axis for axis in shape if axis[0] != "cp"] or [("dp", 1)], 0)
    try:
        micro = rebatch(graph, batch)
    except GraphError:  # samples are mixed somewhere: the whole batch is looked at
        micro = graph
    splits = feature_splits(micro, mesh, sequence=sequence) if tensor else data_splits(micro, mesh)
    return _by_context(micro, splits, shape) if dict(shape).get("cp", 1) > 1 else splits


def _by_context(
    graph: Graph, splits: Sequence[OpSplit], shape: tuple[tuple[str, int], ...]
) -> tuple[OpSplit, ...]:
    """The same with every op by its sequence along the axis cp, where that is whole shares."""
    axes = _mesh(shape, 0).axes
    at = [axis.name for axis in axes].index("cp")
    along = []
    for split in splits:
        rest = split.dims if len(axes) > 1 else ()
        legal = dims_of(graph.call(graph.op(split.op)), axes)
        wide = (*rest[:at], SEQUENCE, *rest[at:])
        whole = (*rest[:at], "", *rest[at:])
        along.append(replace(split, dims=wide if wide in legal else whole))
    return tuple(along)


def _parts(graph: Graph, s: FrameworkStrategy) -> list[list[str]]:
    """The forward ops of each virtual stage."""
    if s.pp == 1:
        return [[op.name for op in graph.ops if op.phase == "forward"]]
    stack = layer_stack(graph)
    if stack is None:
        raise PlanError(
            "the model is not one stack of equal layers",
            fix="use pp=1, or a plan with stages of its own",
            field="pp",
        )
    if sum(s.layers) != stack.num_layers or min(s.layers) < 0:
        raise PlanError(
            f"{', '.join(map(str, s.layers))} are {sum(s.layers)} layers, "
            f"the model has {stack.num_layers}",
            fix=f"give {len(s.layers)} numbers that add up to {stack.num_layers}",
            field="layers",
        )
    stage_of, stage, left = {0: 0}, 0, 0
    ends = list(s.layers)
    for unit in range(1, stack.num_layers + 1):
        while left >= ends[stage]:
            stage, left = stage + 1, 0
        stage_of[unit], left = stage, left + 1
    stage_of[stack.num_layers + 1] = len(ends) - 1
    parts: list[list[str]] = [[] for _ in ends]
    for op, unit in stack.units:
        parts[stage_of[unit]].append(op)
    if not all(parts):
        empty = next(i for i, names in enumerate(parts) if not names)
        raise PlanError(
            f"stage {empty} has no layer", fix="give every stage but the ends one", field="layers"
        )
    return parts


def _recomputed(
    graph: Graph, names: Sequence[str], recompute: str
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Checkpointing of a stage: its kind, where segments begin, which ops run again."""
    if recompute == "none" or not graph.is_training:
        return "none", (), ()
    if recompute == "full":
        return "full", tuple(_first_ops(graph, names)), ()
    mine = [graph.op(name) for name in names]
    again = tuple(op.name for op in mine if _runs_again(graph, op, recompute))
    return ("selective", (), again) if again else ("none", (), ())


def _first_ops(graph: Graph, names: Sequence[str]) -> list[str]:
    """The first op of each layer of a stage but its first."""
    stack = layer_stack(graph)
    if stack is None:
        return []
    unit_of = dict(stack.units)
    return [name for before, name in itertools.pairwise(names) if unit_of[before] != unit_of[name]]


def _runs_again(graph: Graph, op: Op, recompute: str) -> bool:
    """Is an op one of those that run again? Each can be made again from what is kept anyway."""
    if recompute == "attention":
        return op.kind == "attention"
    if op.kind in NORMS:
        return True
    if recompute == "norms" or op.kind != "elementwise":
        return False
    makers = [graph.producer(name) for name in op.inputs]
    return all(maker is not None and maker.kind in PRODUCTS for maker in makers)


@dataclass(frozen=True, slots=True)
class FieldSettings:
    """How far degrees are tuned."""

    most_tensor: int = 8  # devices that share a layer, of one node
    most_stages: int = 64
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)  # samples of a replica at a time
    virtual: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12)  # stages of a rank
    least_context: int = 8192  # tokens of a rank below which no sequence is shared out (cp)
    plans: int = 6  # of a family that are simulated in a comparison
    fill: float = 0.97  # of the memory that a forecast may take


USUAL_FIELD = FieldSettings()


@dataclass(frozen=True)
class FieldScope:
    """A model on devices, as families of strategies see it."""

    num_devices: int
    node_size: int
    batch: int
    num_layers: int
    sizes: StackSizes | None
    settings: FieldSettings

    def tensor_degrees(self) -> list[int]:
        """How many devices may share a layer."""
        if self.sizes is None:
            return [1]
        most = min(self.settings.most_tensor, self.node_size)
        sizes = self.sizes
        return [
            tp
            for tp in divisors(self.num_devices)
            if tp <= most
            and sizes.heads % tp == 0
            and (sizes.kv_heads % tp == 0 or tp % sizes.kv_heads == 0)
            and sizes.seq % tp == 0
        ]

    def context_degrees(self, tp: int) -> list[int]:
        """Over how many devices a sequence may be shared out; routing mixes what lies apart."""
        if self.sizes is None or self.sizes.experts:
            return [1]
        least, seq = self.settings.least_context, self.sizes.seq
        return [
            cp
            for cp in divisors(self.num_devices // tp)
            if cp == 1 or (seq >= cp * least and seq % (cp * tp) == 0)
        ]

    def replicas(self, tp: int, pp: int = 1, cp: int = 1) -> Iterator[FrameworkStrategy]:
        """Micro-batches of every size for the replicas that tp, cp and pp leave."""
        dp, rest = divmod(self.num_devices, tp * pp * cp)
        if rest or self.batch % dp:
            return
        each = self.batch // dp
        layers = even_layers(self.num_layers, pp) if pp > 1 else ()
        for micro in self.settings.micro_batches:
            if each % micro == 0:
                yield FrameworkStrategy(
                    tp=tp, sp=tp > 1, pp=pp, dp=dp, micro_batch=micro,
                    num_microbatches=each // micro, layers=layers, cp=cp,
                )  # fmt: skip

    def pipelines(self, tp: int, cp: int = 1) -> Iterator[FrameworkStrategy]:
        """Every number of groups of devices that has layers for all."""
        most = min(self.settings.most_stages, self.num_layers)
        for pp in divisors(self.num_devices // (tp * cp)):
            if 1 < pp <= most:
                yield from self.replicas(tp, pp, cp)

    def grids(self) -> Iterator[tuple[int, int]]:
        """Tensor and context parallelism of frameworks that have both."""
        for tp in self.tensor_degrees():
            yield from ((tp, cp) for cp in self.context_degrees(tp))

    def interleaved(self, one: FrameworkStrategy) -> Iterator[FrameworkStrategy]:
        """A pipeline with all numbers of virtual stages that Megatron takes."""
        for vpp in self.settings.virtual:
            if vpp == 1:
                yield one
            elif one.num_microbatches % one.pp == 0:
                layers = self.equal_chunks(one.pp * vpp)
                if layers:
                    yield replace(one, vpp=vpp, layers=layers, schedule="interleaved")

    def equal_chunks(self, stages: int) -> tuple[int, ...]:
        """As many layers for each stage, where the two ends of the model may count as one each."""
        for ends in (0, 2, 1):
            each, rest = divmod(self.num_layers + ends, stages)
            if not rest and each:
                layers = [each] * stages
                layers[-1] -= ends > 0
                layers[0] -= ends > 1
                return tuple(layers)
        return ()

    def grouped(self, one: FrameworkStrategy) -> Iterator[FrameworkStrategy]:
        """A strategy that shards, and the same within groups of replicas (HSDP).

        A group fills a node, or a power of two of them.
        """
        yield one
        size = self.node_size // one.tp
        while one.zero and one.cp == 1 and 1 < size < one.dp:
            if one.dp % size == 0:
                yield replace(one, hsdp=size)
            size *= 2


Degrees = Callable[[FieldScope], Iterator[FrameworkStrategy]]


@dataclass(frozen=True)
class FieldEntry:
    """A family: its degrees, and the kinds of recomputation it has, the cheapest first."""

    name: str
    summary: str
    degrees: Degrees
    recompute: tuple[str, ...] = ("none", "full")


def _ddp(scope: FieldScope) -> Iterator[FrameworkStrategy]:
    yield from scope.replicas(1)


def _fsdp2(scope: FieldScope) -> Iterator[FrameworkStrategy]:
    for tp in scope.tensor_degrees():
        for one in scope.replicas(tp):
            if one.dp > 1:
                for zero in (3, 2, 1):
                    yield from scope.grouped(replace(one, zero=zero))


def _deepspeed(scope: FieldScope) -> Iterator[FrameworkStrategy]:
    for one in scope.replicas(1):
        if one.dp > 1:
            yield from (replace(one, zero=zero) for zero in (3, 2, 1))
    for one in scope.pipelines(1):
        if scope.num_layers % one.pp == 0:
            yield replace(one, zero=int(one.dp > 1))


def _gpipe(scope: FieldScope) -> Iterator[FrameworkStrategy]:
    for one in scope.pipelines(1):
        yield replace(one, schedule="gpipe")


def _megatron(scope: FieldScope) -> Iterator[FrameworkStrategy]:
    for tp, cp in scope.grids():
        for one in (*scope.replicas(tp, 1, cp), *scope.pipelines(tp, cp)):
            for each in scope.interleaved(one):
                yield replace(each, zero=int(one.dp * cp > 1))


def _torchtitan(scope: FieldScope) -> Iterator[FrameworkStrategy]:
    for tp, cp in scope.grids():
        if cp > 1:
            for one in scope.replicas(tp, 1, cp):
                yield from (replace(one, zero=zero) for zero in (3, 2))
        for one in scope.pipelines(tp, cp):
            zero = int(one.dp * cp > 1)
            for each in scope.interleaved(one):
                if each.num_microbatches >= each.pp * each.vpp:
                    yield from scope.grouped(replace(each, zero=zero))
            if one.num_microbatches >= 2 * one.pp <= scope.num_layers:
                layers = even_layers(scope.num_layers, 2 * one.pp)
                zbv = replace(one, schedule="zb-v", vpp=2, layers=layers, zero=zero)
                yield from scope.grouped(zbv)


FIELD: dict[str, FieldEntry] = {
    "ddp": FieldEntry("ddp", "DDP, gradients accumulated", _ddp, ("none", "selective", "full")),
    "fsdp2": FieldEntry("fsdp2", "FSDP2 or HSDP x TP", _fsdp2, ("none", "selective", "full")),
    "deepspeed": FieldEntry("deepspeed", "ZeRO 1 to 3, or pipeline with ZeRO 1", _deepspeed),
    "gpipe": FieldEntry("gpipe", "GPipe x DP, recomputed", _gpipe, ("full",)),
    "megatron": FieldEntry(
        "megatron", "TP x CP x PP x DP, interleaved, ZeRO 1", _megatron, ("none", "norms", "full")
    ),
    "torchtitan": FieldEntry(
        "torchtitan", "TP x CP x PP x FSDP or HSDP", _torchtitan, ("none", "selective", "full")
    ),
}


@dataclass(frozen=True)
class RankedStrategy:
    """A strategy of a family, and what a forecast says of it; without one, its place in line."""

    family: str
    strategy: FrameworkStrategy
    is_over: bool
    step_s: float


def field_plans(
    entry: FieldEntry,
    graph: Graph,
    cluster: Cluster,
    batch: int,
    settings: FieldSettings = USUAL_FIELD,
) -> list[FrameworkPlan]:
    """The most promising plans of a family, the first one first."""
    ranked = ranked_field(entry, graph, cluster, batch, settings)
    return [framework_plan(graph, one.strategy) for one in ranked[: settings.plans]]


def whole_field(
    graph: Graph, cluster: Cluster, batch: int, settings: FieldSettings = USUAL_FIELD
) -> list[RankedStrategy]:
    """The strategies of all families, each once, the most promising first."""
    best: dict[FrameworkStrategy, RankedStrategy] = {}
    for entry in FIELD.values():
        for one in ranked_field(entry, graph, cluster, batch, settings):
            best.setdefault(one.strategy, one)
    return sorted(best.values(), key=_rank)


def _rank(one: RankedStrategy) -> tuple[bool, float, str]:
    return one.is_over, one.step_s, str(one.strategy)


def ranked_field(
    entry: FieldEntry,
    graph: Graph,
    cluster: Cluster,
    batch: int,
    settings: FieldSettings = USUAL_FIELD,
) -> list[RankedStrategy]:
    """The degrees of a family, those with the shortest forecast first."""
    stack, sizes = layer_stack(graph), stack_sizes(graph)
    if stack is None or not graph.is_training:
        return []
    node = max(len(group) for group in cluster.levels()[0].groups)
    scope = FieldScope(cluster.num_devices, node, batch, stack.num_layers, sizes, settings)
    strategies = list(dict.fromkeys(entry.degrees(scope)))
    machine = _machine(cluster)
    if machine is None or sizes is None:
        plain = [replace(one, recompute=kind) for one in strategies for kind in entry.recompute]
        few = _spread(plain, settings.plans)
        return [RankedStrategy(entry.name, one, False, float(i)) for i, one in enumerate(few)]
    model = sizes.transformer(graph.name)
    dtype = graph.parameters[0].dtype
    ranked = []
    for one in strategies:
        answer = _least_recompute(one, entry, model, machine, dtype, settings.fill)
        ranked += [answer] if answer is not None else []
    return sorted(ranked, key=_rank)


def _least_recompute(
    one: FrameworkStrategy, entry: FieldEntry, model: Transformer, machine: Machine, dtype: str,
    fill: float,
) -> RankedStrategy | None:  # fmt: skip
    """A strategy with the least recomputation that fits by forecast."""
    answer = None
    for kind in entry.recompute:
        strategy = replace(one, recompute=kind)
        try:
            told = forecast(model, machine, _as_forecast(strategy, dtype))
        except InputError:
            return None
        held = told.memory.total + _kept_otherwise(strategy, model)
        over = held > fill * told.capacity_bytes
        answer = RankedStrategy(entry.name, strategy, over, told.step_s)
        if not over:
            break
    return answer


def _kept_otherwise(s: FrameworkStrategy, model: Transformer) -> float:
    """Bytes of activations that a simulation keeps and a forecast does not count, or less than 0.

    Without recomputation what sequence parallelism gathers is kept; norms that run again are
    not, nor what they feed; selective checkpointing keeps no activation functions either.
    """
    if s.recompute == "full":
        return 0.0
    held = in_flight(_as_forecast(s, "bf16"), 0, s.pp)
    tokens = held * s.micro_batch * model.seq / s.cp * math.ceil(model.layers / s.pp)
    if s.recompute == "none":
        return 4 * tokens * model.hidden * (1 - 1 / s.tp) if s.sp else 0.0
    kept = -4 * tokens * model.hidden / (s.tp if s.sp else 1)
    return kept - (2 * tokens * model.inner / s.tp if s.recompute == "selective" else 0.0)


def _as_forecast(s: FrameworkStrategy, dtype: str) -> Strategy:
    recompute = "selective" if s.recompute in ("norms", "attention") else s.recompute
    return Strategy(
        batch=s.batch, micro_batch=s.micro_batch, tp=s.tp, cp=s.cp, pp=s.pp, vpp=s.vpp, dp=s.dp,
        sp=s.sp, zero=s.zero, hsdp=s.hsdp, recompute=recompute, schedule=s.schedule,
        execution="graph",
        dtype=dtype, fused_loss=True,
    )  # fmt: skip


@functools.lru_cache(maxsize=4)
def _machine(cluster: Cluster) -> Machine | None:
    """The machine as forecasts see it; None where its devices are not alike."""
    try:
        return machine_of(cluster)
    except PartitaError:
        return None


def _spread(strategies: list[FrameworkStrategy], most: int) -> list[FrameworkStrategy]:
    """A few of many, evenly."""
    if len(strategies) <= most:
        return strategies
    return [strategies[i * len(strategies) // most] for i in range(most)]
