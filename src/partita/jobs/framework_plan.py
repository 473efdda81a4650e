"""What training frameworks can be told, and the plan that it is: degrees in, stages out.

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
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from partita.costs.sharding import dims_of
from partita.errors import GraphError, PlanError
from partita.graph.rebatch import rebatch
from partita.graph.record import Graph, Op
from partita.jobs.simulate import data_splits
from partita.jobs.strategies import SEQUENCE, feature_splits
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage

RECOMPUTE = ("none", "norms", "attention", "selective", "full")
V_SHAPED = ("zb-v",)  # the second half of the stages goes back over the groups
SEVERAL = ("interleaved", *V_SHAPED)  # schedules of several virtual stages
NORMS = frozenset({"layer_norm", "rms_norm"})
PRODUCTS = frozenset({"linear", "expert_linear"})
ALIKE = 0.4  # of the layers: experts in every other one, and a first one of its own, are a stack
INSIDE = 0.75  # of the ops: what has more around its layers is no stack of them
NUMBERED = re.compile(r"(?P<stack>(?:[^.0-9][^.]*\.)*?)(?P<number>[0-9]+)\.")

FrameworkPlan = tuple[tuple[Stage, ...], Schedule]


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
