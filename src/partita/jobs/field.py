"""The field: what frameworks do with a model when their own degrees are tuned, by name.

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
the least recomputation that fits there; the first few become plans. What a family cannot be told
is not in it: `partita export` writes what is. A stack of layers without a forecast (other layers
than a transformer's, heterogeneous devices) has a few of its degrees, evenly, instead.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from partita.cluster import Cluster
from partita.errors import InputError, PartitaError
from partita.forecast import Machine, Strategy, Transformer, forecast, machine_of
from partita.forecast.memory import in_flight
from partita.graph.record import Graph
from partita.jobs.framework_plan import (
    FrameworkPlan,
    FrameworkStrategy,
    even_layers,
    framework_plan,
    layer_stack,
)
from partita.jobs.stack_sizes import StackSizes, stack_sizes
from partita.search.joint.groupings import divisors


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


USUAL = FieldSettings()


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
    entry: FieldEntry, graph: Graph, cluster: Cluster, batch: int, settings: FieldSettings = USUAL
) -> list[FrameworkPlan]:
    """The most promising plans of a family, the first one first."""
    ranked = ranked_field(entry, graph, cluster, batch, settings)
    return [framework_plan(graph, one.strategy) for one in ranked[: settings.plans]]


def whole_field(
    graph: Graph, cluster: Cluster, batch: int, settings: FieldSettings = USUAL
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
    entry: FieldEntry, graph: Graph, cluster: Cluster, batch: int, settings: FieldSettings = USUAL
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
