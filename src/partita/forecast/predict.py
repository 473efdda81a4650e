"""The forecast: layers to stages, stages to a pipeline, the ends of a step, an interval.

pipeline     max over stages of (what earlier stages take for one micro-batch
             + micro-batches x what the stage takes), by the bubble of the schedule's kind
step         pipeline + exposed gradient reduction + optimizer
"""

import math
from dataclasses import dataclass

from partita.costs.physics import around, spread_of
from partita.forecast.inputs import Machine, Strategy, Transformer
from partita.forecast.layer import BYTES, GRAPH_GAP, EndWork, LayerWork, Tally, end_work, layer_work
from partita.forecast.memory import (
    MemoryParts,
    StageLayers,
    every_stage,
    fullest_rank,
    stage_layers,
)
from partita.showing import plot_of, repr_html, table_of

HIDDEN = "behind the host"  # communication that runs while the device waits for the host


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one micro-batch: forward, backward for data, for weights; exposed parts."""

    forward: float = 0.0
    data: float = 0.0
    weights: float = 0.0

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.data + self.weights

    @property
    def backward(self) -> float:
        """Both parts of it."""
        return self.data + self.weights

    def plus(self, other: "Times", times: float = 1.0) -> "Times":
        """Both, the other so many times."""
        return Times(
            self.forward + times * other.forward,
            self.data + times * other.data,
            self.weights + times * other.weights,
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a step is predicted to be like. Everything here is a prediction."""

    model: Transformer
    strategy: Strategy
    machine: Machine
    step_s: float
    spread: float  # standard deviation of log(measured / step_s)
    bubble_s: float
    exposed_s: tuple[tuple[str, float], ...]  # communication by kind: tp, pp, dp, cp, ep
    parts_s: tuple[tuple[str, float], ...]  # computing of the busiest rank by what bounds it
    memory: MemoryParts
    hardware_flops: float  # of the whole step, recomputing counted

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def communication_spread(self) -> float:
        """The part of the spread that communication makes."""
        return math.sqrt(max(0.0, self.spread**2 - self.base_spread**2))

    @property
    def base_spread(self) -> float:
        """The spread of a step without communication."""
        return spread_of((self.machine.physics_set,), self.machine.num_devices, 0.0)

    @property
    def interval_s(self) -> tuple[float, float]:
        """The step lies in here with 80 %."""
        return around(self.step_s, self.spread)

    @property
    def capacity_bytes(self) -> float:
        """Memory of one device."""
        return float(self.machine.kind.memory_bytes)

    @property
    def fits(self) -> bool:
        """Does the fullest rank have the memory it needs?"""
        return self.memory.total <= self.capacity_bytes

    @property
    def memory_of_stages(self) -> tuple[MemoryParts, ...]:
        """Memory of one rank of each stage."""
        return every_stage(self.model, self.strategy, self.machine)

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together."""
        return self.strategy.batch * self.model.seq / self.step_s

    @property
    def model_flops(self) -> float:
        """Of one step, each operation counted once."""
        return self.model.step_flops(self.strategy.batch)

    @property
    def tflops_per_device(self) -> float:
        """Model FLOPs a second and device, in 10^12."""
        return self.model_flops / self.step_s / self.machine.num_devices / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs by peak."""
        return self.tflops_per_device * 1e12 / self.machine.kind.peak(self.peak_dtype)

    @property
    def peak_dtype(self) -> str:
        """Whose peak MFU is of: that of products, but never less than 16 bits, as is usual."""
        dtype = self.strategy.product_dtype
        if dtype not in ("f8", "f4"):
            return dtype
        return "f16" if self.strategy.dtype == "f16" else "bf16"

    @property
    def hfu(self) -> float:
        """FLOPs that are computed, recomputing with them, by peak."""
        return self.mfu * self.hardware_flops / self.model_flops

    @property
    def bound(self) -> str:
        """What takes most of the step."""
        every = dict(self.parts_s) | dict(self.exposed_s) | {"bubble": self.bubble_s}
        return max(every, key=lambda name: every[name])


class _Step:
    """One forecast being made: the costs of layers, worked out once each."""

    def __init__(self, model: Transformer, machine: Machine, s: Strategy) -> None:
        self.model, self.machine, self.s = model, machine, s
        self.exposed = dict.fromkeys(("tp", "pp", "dp", "cp", "ep"), 0.0)
        self.dense = layer_work(model, s, machine, sparse=False)
        self.sparse = layer_work(model, s, machine, sparse=True) if model.sparse_layers else None
        self.ends: EndWork = end_work(model, s, machine)
        node = machine.node_size
        self.near_tp = min(s.tp, node)
        self.near_cp = max(1, min(s.cp, node // s.tp))
        self.near_dp = max(1, min(s.dp * s.cp, node // s.tp))
        self.near_ep = min(s.ep, node)

    def layer(self, work: LayerWork) -> tuple[Times, dict[str, float]]:
        """Seconds of a layer with its communication, and the exposed part by kind."""
        s, machine = self.s, self.machine
        tp = self._tensor(work.reduce_bytes)
        exchange = machine.collective("all_to_all", work.exchange_bytes, s.ep, self.near_ep)
        ring = machine.collective(
            "all_gather", work.ring_bytes * s.cp, s.cp, self.near_cp
        )  # fmt: skip
        forward, exposed_f = self._phase((work.forward,), tp * work.num_forward, 2 * exchange, ring)
        data, exposed_d = self._phase(
            (work.data, work.again), tp * (work.num_backward + work.num_again),
            (4 if s.recompute == "full" else 2) * exchange, 2 * ring,
        )  # fmt: skip
        weights, _ = self._phase((work.weights,), 0.0, 0.0, 0.0)
        times = Times(forward, data, weights)
        exposed = {name: exposed_f[name] + exposed_d[name] for name in exposed_f}
        if s.zero == 3:
            times, more = self._sharded(times, work)
            exposed["dp"] = more
        return times, exposed

    def _tensor(self, size: float) -> float:
        s, machine = self.s, self.machine
        if s.tp == 1:
            return 0.0
        if s.sp:
            return machine.collective("all_gather", size, s.tp, self.near_tp) + machine.collective(
                "reduce_scatter", size, s.tp, self.near_tp
            )
        return machine.collective("all_reduce", size, s.tp, self.near_tp)

    def _phase(
        self, tallies: tuple[Tally, ...], tp: float, exchange: float, ring: float
    ) -> tuple[float, dict[str, float]]:
        """Seconds of computing and communication; host and device run side by side."""
        s, machine = self.s, self.machine
        computing = sum(tally.device_s(s.execution) for tally in tallies)
        host = sum(tally.kernels for tally in tallies) * machine.physics.host(s.execution)
        exposed_tp = tp
        if s.overlap_tp:
            exposed_tp = machine.side_by_side(computing, tp) - computing
        attention = sum(tally.attention_s for tally in tallies)
        exposed_ring = machine.side_by_side(attention, ring) - attention
        exposed_ep = exchange
        if s.overlap_ep:
            exposed_ep = machine.side_by_side(computing, exchange) - computing
        device = computing + exposed_tp + exposed_ring + exposed_ep
        seconds = max(device, host)
        # What the host takes longer than the device hides communication, too. It is no less unsure.
        whole = device - computing
        left = (seconds - max(computing, host)) / whole if whole > 0 else 0.0
        exposed = {"tp": exposed_tp, "cp": exposed_ring, "ep": exposed_ep}
        hidden = {HIDDEN: whole * (1 - left)}
        return seconds, {name: part * left for name, part in exposed.items()} | hidden

    def _sharded(self, times: Times, work: LayerWork) -> tuple[Times, float]:
        """A layer whose parameters are sharded: gathered forward and backward, reduced."""
        s, machine = self.s, self.machine
        ranks = s.hsdp or s.dp * s.cp
        size = work.weight_bytes * BYTES[s.dtype] / 2
        near, pieces = min(self.near_dp, ranks), s.gathers
        gather = pieces * machine.collective("all_gather", size / pieces, ranks, near)
        grads = work.weight_bytes / 2 * BYTES[s.grad_dtype]
        scatter = pieces * machine.collective("reduce_scatter", grads / pieces, ranks, near)
        if work.expert_bytes:  # experts are sharded over the ranks that hold the same ones
            few = max(1, s.dp * s.cp * s.tp // s.ep)
            near_few = max(1, min(few, machine.node_size // s.ep))
            count = work.expert_bytes / 2
            gather += machine.collective("all_gather", count * BYTES[s.dtype], few, near_few)
            scatter += machine.collective(
                "reduce_scatter", count * BYTES[s.grad_dtype], few, near_few
            )
        forward = machine.side_by_side(times.forward, gather)
        backward = machine.side_by_side(times.backward, gather + scatter)
        longer = max(0.0, forward + backward - times.total)
        data = max(0.0, backward - times.weights)
        return Times(forward, data, times.weights), longer

    def ends_of(self, stage: StageLayers) -> Times:
        """What the embedding and the output layer add to a stage."""
        s, ends = self.s, self.ends
        times = Times()
        if stage.has_embedding:
            times = times.plus(
                Times(ends.embedding.seconds(s.execution),
                      0.0, ends.embedding_backward.seconds(s.execution))
            )  # fmt: skip
        if stage.has_output:
            times = times.plus(
                Times(ends.output.seconds(s.execution), ends.output_data.seconds(s.execution),
                      ends.output_weights.seconds(s.execution))
            )  # fmt: skip
        return times


def forecast(model: Transformer, machine: Machine, strategy: Strategy) -> Forecast:
    """Predict one training step."""
    s = strategy
    step = _Step(model, machine, s)
    stages = stage_layers(model, s)
    dense, exposed_dense = step.layer(step.dense)
    sparse, exposed_sparse = step.layer(step.sparse) if step.sparse else (Times(), {})
    times = _stage_times(step, stages, dense, sparse)
    send = _send(model, machine, s)
    pipeline, busiest, waits = _pipeline(s, times, send)
    exposed = dict.fromkeys(("tp", "pp", "dp", "cp", "ep", HIDDEN), 0.0)
    count = s.num_microbatches
    for exposed_each, layers in ((exposed_dense, stages[busiest].dense),
                                 (exposed_sparse, stages[busiest].sparse)):  # fmt: skip
        for name, seconds in exposed_each.items():
            exposed[name] += seconds * layers * count
    exposed["pp"] += waits
    reduction = max(_reduction(step, stage, one) for stage, one in zip(stages, times, strict=True))
    exposed["dp"] += reduction
    optimizer = max(_optimizer(machine, s, stage) for stage in stages)
    total = pipeline + reduction + optimizer + machine.physics.step_s
    bubble = pipeline - count * times[busiest].total - waits
    memory = fullest_rank(model, s, machine, stages)
    spread = spread_of((machine.physics_set,), machine.num_devices, sum(exposed.values()) / total)
    del exposed[HIDDEN]
    return Forecast(
        model, s, machine, total, spread, max(0.0, bubble),
        tuple(exposed.items()), _parts(step, stages[busiest], optimizer), memory,
        _hardware_flops(model, s),
    )  # fmt: skip


def _stage_times(
    step: _Step, stages: tuple[StageLayers, ...], dense: Times, sparse: Times
) -> list[Times]:
    """What one micro-batch takes in each stage, given what it takes in a layer."""
    s, action_s = step.s, step.machine.physics.action_s
    action = Times(action_s, action_s) if s.pp > 1 else Times()
    return [
        step.ends_of(stage).plus(dense, stage.dense).plus(sparse, stage.sparse)
        .plus(action, s.vpp)
        for stage in stages
    ]  # fmt: skip


def stage_times(model: Transformer, machine: Machine, strategy: Strategy) -> list[Times]:
    """What one micro-batch takes in each stage."""
    step = _Step(model, machine, strategy)
    dense = step.layer(step.dense)[0]
    sparse = step.layer(step.sparse)[0] if step.sparse else Times()
    return _stage_times(step, stage_layers(model, strategy), dense, sparse)


def layer_seconds(model: Transformer, machine: Machine, strategy: Strategy) -> float:
    """Seconds of one layer, forward and backward, for one micro-batch."""
    step = _Step(model, machine, strategy)
    return step.layer(step.sparse or step.dense)[0].total


def _send(model: Transformer, machine: Machine, s: Strategy) -> float:
    """Seconds of the slowest message between neighbouring stages."""
    if s.pp == 1:
        return 0.0
    span = s.tp * s.cp * s.dp
    far = span * s.pp > machine.node_size
    size = s.micro_batch * model.seq / s.cp * model.hidden * BYTES[s.dtype] / s.tp
    return machine.send(size, far=far)


def _pipeline(s: Strategy, times: list[Times], send: float) -> tuple[float, int, float]:
    """Seconds of all micro-batches, the stage that bounds them, and its waits for messages."""
    count, last = s.num_microbatches, len(times) - 1
    if last == 0:
        return count * times[0].total, 0, 0.0
    waiting = 0.0 if s.overlap_pp else 2 * send * s.vpp * count
    fill = _fill(s, times, send)
    ends = [count * one.total + fill[i] + waiting for i, one in enumerate(times)]
    busiest = max(range(len(times)), key=lambda i: ends[i])
    return ends[busiest], busiest, waiting


def _fill(s: Strategy, times: list[Times], send: float) -> list[float]:
    """For each stage, seconds in which it cannot work: the bubble of the schedule.

    With F, B, W of equal stages, from a rank's first start to its last end, p - 1 times

        gpipe, 1f1b, interleaved    (F + B + W) / vpp       exact; gpipe of unequal stages, too
        zb-h1, zb-h2                F + B - W, F + B - 2 W   exact where W is the smallest
        zb-v                        max(F, B) - W            within 0.1 F
        dualpipe-v                  (F + B - W) / 2          within a tenth, B and W near F

    Stages that differ by 30 % move the step by at most 10 % from this (13 % interleaved), fewer
    where there are many micro-batches. Zero-bubble ranks do not wait for each other at the end of a
    step: their optimizers run when their own gradients are there.
    """
    p = len(times)
    if s.schedule == "gpipe":
        more = s.num_microbatches - 1
        forward = sum(t.forward for t in times) + more * max(t.forward for t in times)
        backward = sum(t.backward for t in times) + more * max(t.backward for t in times)
        both = forward + backward + 2 * (p - 1) * send
        return [both - s.num_microbatches * t.total for t in times]
    mean = Times().plus(
        Times(sum(t.forward for t in times), sum(t.data for t in times),
              sum(t.weights for t in times)), 1 / p,
    )  # fmt: skip
    fills = []
    for i in range(p):
        others = [t for j, t in enumerate(times) if j != i]
        whole = sum(t.total for t in others)
        if s.schedule in ("zb-h1", "zb-h2", "zb-v", "dualpipe-v"):
            f, b, w = mean.forward, mean.data, mean.weights
            each = {
                "zb-h1": f + b - w, "zb-h2": f + b - 2 * w, "zb-v": max(f, b) - w,
                "dualpipe-v": (f + b - w) / 2,
            }[s.schedule]  # fmt: skip
            bubble = (p - 1) * max(0.0, each)
        else:
            bubble = whole / (s.vpp if s.vpp > 1 else 1)
        fills.append(bubble + 2 * (p - 1) * send)
    return fills


def _reduction(step: _Step, stage: StageLayers, times: Times) -> float:
    """Exposed seconds of reducing gradients and gathering parameters at the end of a step."""
    s, machine = step.s, step.machine
    ranks = s.dp * s.cp
    shared, expert = stage.shared_parameters, stage.expert_parameters
    if s.zero == 3:
        replicas = s.dp * s.cp // s.hsdp if s.hsdp else 1
        size = shared / (s.hsdp or 1) * BYTES[s.grad_dtype]
        seconds = machine.collective("all_reduce", size, replicas, 1)
        layers = stage.layers * step.dense.weight_bytes / 2
        outside = max(0.0, shared - layers)  # embedding and output layer are gathered, too
        grads = machine.collective("reduce_scatter", outside * 4, ranks, step.near_dp)
        both = 2 * machine.collective("all_gather", outside * 2, ranks, step.near_dp) + grads
        return seconds + both * s.num_microbatches
    kind = "reduce_scatter" if s.zero else "all_reduce"
    seconds = machine.collective(kind, shared * BYTES[s.grad_dtype], ranks, step.near_dp)
    few = max(1, s.dp * s.cp * s.tp // s.ep)
    near_few = max(1, min(few, machine.node_size // s.ep))
    if expert:
        seconds += machine.collective(kind, expert * BYTES[s.grad_dtype], few, near_few)
    if s.overlap_dp:
        seconds = machine.side_by_side(times.backward, seconds) - times.backward
    if s.zero:
        gather = machine.collective("all_gather", shared * BYTES[s.dtype], ranks, step.near_dp)
        gather += machine.collective("all_gather", expert * BYTES[s.dtype], few, near_few)
        if s.overlap_dp:
            gather = machine.side_by_side(times.forward, gather) - times.forward
        seconds += gather
    if s.pp > 1 and step.model.tied and (stage.has_embedding or stage.has_output):
        size = step.model.vocab * step.model.hidden / s.tp * BYTES[s.grad_dtype]
        far = machine.num_devices > machine.node_size
        seconds += machine.collective("all_reduce", size, 2, 1 if far else 2)
    return seconds


def _optimizer(machine: Machine, s: Strategy, stage: StageLayers) -> float:
    """Adam: gradients, two moments and the f32 copy read, all but the first written."""
    shards = (s.hsdp or s.dp * s.cp) if s.zero else 1
    few = max(1, s.dp * s.cp * s.tp // s.ep) if s.zero else 1
    count = stage.shared_parameters / shards + stage.expert_parameters / few
    per = BYTES[s.grad_dtype] * 3 + 24 + BYTES[s.dtype]
    physics = machine.physics
    return count * per * physics.optimizer / (machine.kind.memory_bytes_per_s * physics.memory)


def _parts(step: _Step, stage: StageLayers, optimizer: float) -> tuple[tuple[str, float], ...]:
    """Computing seconds of a stage over the step by what bounds them; `fixed` is once a step."""
    s, physics, ends = step.s, step.machine.physics, step.ends
    bandwidth = step.machine.kind.memory_bytes_per_s * physics.memory
    more = physics.eager_traffic if s.execution == "eager" else 1.0
    gap_s = physics.gap_s * (GRAPH_GAP if s.execution == "graph" else 1.0)
    phases: list[tuple[tuple[Tally, ...], int]] = []  # what host and device do side by side
    for work, layers in ((step.dense, stage.dense), (step.sparse, stage.sparse)):
        if work is not None and layers:
            backward = (work.data, work.again)
            phases += [((work.forward,), layers), (backward, layers), ((work.weights,), layers)]
    if stage.has_embedding:
        phases += [((ends.embedding,), 1), ((ends.embedding_backward,), 1)]
    if stage.has_output:
        phases += [((each,), 1) for each in (ends.output, ends.output_data, ends.output_weights)]
    parts = dict.fromkeys(("products", "attention", "memory", "gaps", "host"), 0.0)
    for tallies, layers in phases:
        times, host = layers * s.num_microbatches, 0.0
        for tally in tallies:
            parts["products"] += tally.products_s * times
            parts["attention"] += tally.attention_s * times
            moved = tally.traffic_bytes * more + tally.plain_bytes
            parts["memory"] += moved / bandwidth * times
            parts["gaps"] += tally.kernels * gap_s * times
            host += tally.kernels * physics.host(s.execution) - tally.device_s(s.execution)
        parts["host"] += max(0.0, host) * times
    if s.pp > 1:  # forward and backward of every chunk are told to start
        parts["host"] += 2 * physics.action_s * s.vpp * s.num_microbatches
    return (*parts.items(), ("optimizer", optimizer), ("fixed", physics.step_s))


def _hardware_flops(model: Transformer, s: Strategy) -> float:
    flops = model.step_flops(s.batch)
    tokens = s.batch * model.seq
    dense, sparse = model.layer_flops
    if s.recompute == "full":
        layers = dense * (model.layers - model.sparse_layers) + sparse * model.sparse_layers
        return flops + layers * tokens
    if s.recompute == "selective":
        core = 2.0 * model.mean_context * model.heads * model.score_width * model.layers
        return flops + core * tokens
    return flops
