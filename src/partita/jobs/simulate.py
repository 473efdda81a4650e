"""How long does it take, what bounds it, does it fit: a plan, or a model spread plainly.

Without a plan a model is run data parallel over all devices of the cluster: every op splits its
batch where it can. The answer is simulated on the program that would run.

What was tried beside the plan that is answered is told by what stood against it, and a sketch of
how it would run (`alternatives`). One candidate, piece of advice or picture that fails is one line:
the answer does not hang on it (`Attempts`). What goes wrong in one is a mistake of ours, or of a
model nobody thought of; it is logged, and the rest is shown. Where everything has failed there is
no rest: then the first error is the answer.
"""

import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, overload

import numpy as np

from partita import units
from partita.cluster import Cluster, resolve
from partita.cluster.calibration import Calibration, calibrated
from partita.costs.collectives import Collectives
from partita.costs.memory import ModelMemory, model_memory, workspace_bytes
from partita.costs.physics import MEMORY_SPREAD, PhysicsSet, around, sets_of, spread_of
from partita.costs.roofline import OpCost, Split, op_cost
from partita.costs.sharding import Dims, dims_of, ways_of
from partita.degrees import axis_names, summary
from partita.engine import run
from partita.errors import GraphError, PartitaError, PlanError
from partita.forecast import Forecast, Strategy, Transformer
from partita.graph.loops import loop_nest
from partita.graph.rebatch import batch_dims
from partita.graph.record import Graph, Op
from partita.graph.work import flops
from partita.jobs.check_plan import refuse_wrong_decisions
from partita.jobs.forecast import forecast_model
from partita.jobs.idle import idle_account
from partita.jobs.workload import Workload, load, load_cluster, load_model
from partita.lower import MAX_REPRESENTATIVES, Lowered, Memo, lower_plan
from partita.plans import (
    Alternative,
    Axis,
    Mesh,
    OpSplit,
    Plan,
    Prediction,
    Schedule,
    Stage,
    device_groups,
    runs_once,
)
from partita.program import Kind, Memory, Program
from partita.showing import plot_of, repr_html, table_of
from partita.timeline import WHOLE, LaneSketch, Span, Timeline
from partita.verify import check_meaning, check_timeline

log = logging.getLogger("partita")
T = TypeVar("T")

NUMBERS = re.compile(r"(?<![0-9a-zA-Z])[0-9]+(?![0-9a-zA-Z_])")  # h.3, layer_3: ends of parts
MOST_TASKS = 120  # of a lane that a sketch tells one by one; of more, columns of time
COLUMNS = 200
MOST_DEVICES = 4  # lanes of devices that differ, from first to last
MOST_LOOKED_AT = 64


@dataclass(frozen=True)
class OpReport:
    """What one device does for an op, and what bounds it there."""

    name: str
    kind: str
    phase: str
    split: Split
    cost: OpCost


@dataclass(frozen=True)
class OpGroup:
    """Ops that differ only in the numbers in their names (`h.*.attn.q`) and cost the same."""

    name: str
    first: OpReport
    count: int

    @property
    def seconds(self) -> float:
        """Of all of them together."""
        return self.first.cost.seconds * self.count


def slowest_groups(ops: Sequence[OpReport], most: int) -> tuple[OpGroup, ...]:
    """The repeated ops that take longest in all, longest first."""
    members: dict[tuple[object, ...], list[OpReport]] = {}
    for report in ops:
        pattern = NUMBERS.sub("*", report.name)
        key = (pattern, report.kind, report.phase, report.split, report.cost)
        members.setdefault(key, []).append(report)
    groups = [
        OpGroup(str(key[0]) if len(same) > 1 else same[0].name, same[0], len(same))
        for key, same in members.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.seconds, group.name))[:most])


@dataclass(frozen=True)
class Simulation:
    """What running a stage, or several in a pipeline, on a cluster would be like.

    With several stages or micro-batches `ops` holds the busiest group of devices, all its stages
    and micro-batches together. `decided` are the stages with the order of their collectives.
    """

    workload: Workload
    cluster: Cluster
    stages: tuple[Stage, ...]
    schedule: Schedule
    timeline: Timeline
    ops: tuple[OpReport, ...]
    memory: ModelMemory
    cap_bytes: float = math.inf  # what the user allows, where that is less than there is
    decided: tuple[Stage, ...] = ()

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def stage(self) -> Stage:
        """The first stage; often the only one."""
        return self.stages[0]

    def capped(self, cap_bytes: float) -> "Simulation":
        """The same with less memory allowed on each device; pictures of it show the cap, too."""
        program = self.timeline.program
        memories = tuple(
            replace(memory, capacity=min(memory.capacity or 0.0, cap_bytes))
            for memory in program.memories
        )
        timeline = replace(self.timeline, program=replace(program, memories=memories))
        return replace(self, timeline=timeline, cap_bytes=cap_bytes)

    def in_full(self, known: Memo | None = None) -> "Simulation":
        """The same with every op of every stage and all ranks that are drawn, its meaning checked.

        `known` may hold routes and graphs of micro-batches; blocks are made anew.
        One stage that runs once is lowered op by op in any case: that is not done again where more
        devices than are drawn would change nothing.
        """
        if runs_once(self.stages, self.schedule) and self.num_devices > MAX_REPRESENTATIVES:
            check_meaning(self.timeline.program, self.workload.graph, self.decided, self.schedule)
            return self
        memo = None if known is None else Memo(known.collectives, graphs=known.graphs)
        return simulate_stages(self.workload, self.cluster, self.stages, self.schedule, memo)

    def prediction(self, lower_bound_s: float, interval_s: float | None = None) -> Prediction:
        """What a plan says of itself; with an interval where that was asked for, not the step."""
        return Prediction(
            step_s=self.step_s,
            lower_bound_s=lower_bound_s,
            compute_s=self.compute_s,
            communication_s=self.communication_s,
            peak_memory_bytes=self.peak_bytes,
            capacity_bytes=self.capacity_bytes,
            interval_s=interval_s,
        )

    @property
    def num_devices(self) -> int:
        """How many devices the stages use in all."""
        return len({device for stage in self.stages for device in stage.mesh.devices})

    @property
    def is_pipelined(self) -> bool:
        """Are there several stages or micro-batches?"""
        return len(self.stages) > 1 or self.schedule.num_microbatches > 1

    @property
    def arrangement(self) -> str:
        """The plan in the field's words: `pp=4 dp=8 tp=2 zero=1, 1F1B, 16 micro-batches`."""
        return summary(self.decided or self.stages, self.schedule, self.workload.graph)

    @property
    def num_stages(self) -> int:
        """How many stages the plan has."""
        return len(self.stages)

    @property
    def bubble(self) -> float:
        """The share of the step that groups of devices run no stage, on average; 0 for one stage.

        What they wait for is another one's computing, or a message.
        """
        if self.num_stages < 2:
            return 0.0
        busy = self.timeline.busy()
        lanes = self.timeline.program.lanes
        mine = [float(b) for b, lane in zip(busy, lanes, strict=True) if lane.kind == "device"]
        return max(0.0, 1 - sum(mine) / len(mine) / self.step_s) if self.step_s else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of one step (or one inference)."""
        return self.timeline.makespan

    @property
    def spread(self) -> float:
        """How far the truth is from the prediction: standard deviation of log(measured / step)."""
        exposed = 0.0
        if not self.is_pipelined and self.step_s:
            exposed = max(0.0, self.exposed_s) / self.step_s
        return spread_of(self.physics_sets, self.num_devices, exposed)

    @property
    def physics_sets(self) -> list[PhysicsSet]:
        """The parameter sets of the kinds of devices that are used."""
        used = {device for stage in self.stages for device in stage.mesh.devices}
        return sets_of(self.cluster.devices[device].kind for device in used)

    @property
    def likely_step_s(self) -> tuple[float, float]:
        """The step lies in here with 80 %."""
        return around(self.step_s, self.spread)

    @property
    def likely_mfu(self) -> tuple[float, float]:
        """And the MFU in here."""
        return around(self.mfu, self.spread)

    @property
    def likely_peak_bytes(self) -> tuple[float, float]:
        """And the peak memory of the fullest device in here."""
        return around(self.fullest[0], MEMORY_SPREAD)

    @property
    def interval_s(self) -> float:
        """Seconds from one batch to the next when many follow: what the busiest lane needs."""
        return float(self.timeline.busy().max())

    @property
    def compute_s(self) -> float:
        """Seconds the busiest device computes."""
        return self._busy("device")

    @property
    def communication_s(self) -> float:
        """Seconds the busiest network lane transfers."""
        return self._busy("link")

    @property
    def exposed_s(self) -> float:
        """Seconds of the step in which the busiest device waits."""
        return self.step_s - self.compute_s

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak memory of each representative rank."""
        return tuple(float(peak) for peak in self.timeline.peaks())

    @property
    def fullest(self) -> tuple[float, float]:
        """Peak and capacity of the device that has the least memory left, in share."""
        both = zip(self.peak_bytes, self.capacity_bytes, strict=True)
        return max(both, key=lambda pair: pair[0] / max(pair[1], 1.0))

    @property
    def capacity_bytes(self) -> tuple[float, ...]:
        """Memory each representative rank has."""
        memories = self.timeline.program.memories
        return tuple(min(memory.capacity or 0.0, self.cap_bytes) for memory in memories)

    @property
    def fits(self) -> bool:
        """Does every device have the memory it needs?"""
        return all(p <= c for p, c in zip(self.peak_bytes, self.capacity_bytes, strict=True))

    @property
    def flops(self) -> float:
        """Operations of the whole model in one step, each counted once."""
        graph = self.workload.graph
        return sum(flops(graph.call(op)) for op in graph.ops)

    @property
    def mfu(self) -> float:
        """The part of all devices' peak arithmetic that one step uses."""
        used = {device for stage in self.stages for device in stage.mesh.devices}
        peak = sum(self.cluster.kind_of(d).peak(self.workload.dtype) for d in sorted(used))
        return self.flops / (peak * self.step_s) if self.step_s else 0.0

    def workspace_bytes(self) -> float:
        """What drivers and libraries keep of the first device."""
        return workspace_bytes(self.cluster.kind_of(self.stage.mesh.devices[0]))

    def bounds(self) -> dict[str, float]:
        """Seconds of the busiest device by what bounds them: compute, memory, launch, waiting.

        The ops of one stage are those of its first device; their times are stretched to what the
        busiest device takes, which is more on heterogeneous devices and beside communication.
        """
        bounds = self.op_bounds()
        total = sum(bounds.values())
        if total:
            busy_s = self.compute_s
            if self.is_pipelined:  # blocks have idle time inside of them
                lane = idle_account(self.timeline).busiest
                busy_s = total if lane is None else lane.busy_s
            bounds = {name: s * busy_s / total for name, s in bounds.items()}
        return {**bounds, "waiting": max(0.0, self.step_s - sum(bounds.values()))}

    def op_bounds(self) -> dict[str, float]:
        """Seconds of the ops by what bounds each, as if nothing else were running."""
        bounds = dict.fromkeys(("compute", "memory", "launch"), 0.0)
        for report in self.ops:
            if report.cost.bound in bounds:
                bounds[report.cost.bound] += report.cost.seconds
        return bounds

    def _busy(self, kind: str) -> float:
        busy = self.timeline.busy()
        lanes = self.timeline.program.lanes
        return max(
            (float(b) for b, lane in zip(busy, lanes, strict=True) if lane.kind == kind),
            default=0.0,
        )


@overload
def simulate(
    model: str | Graph | Plan,
    cluster: str | Cluster | None = None,
    *,
    batch: int | None = None,
    dtype: str | None = None,
    training: bool = True,
    optimizer: str = "adamw",
    calibration: Calibration | None = None,
    execution: str | None = None,
) -> Simulation: ...


@overload
def simulate(
    model: str | Transformer, cluster: str | Cluster, *, strategy: Strategy
) -> Forecast: ...


@overload
def simulate(
    model: str | Transformer,
    cluster: str | Cluster,
    *,
    batch: int,
    micro_batch: int,
    dtype: str | None = None,
    **keys: Any,
) -> Forecast: ...


def simulate(
    model: str | Graph | Plan | Transformer,
    cluster: str | Cluster | None = None,
    *,
    batch: int | None = None,
    dtype: str | None = None,
    training: bool = True,
    optimizer: str = "adamw",
    execution: str | None = None,
    strategy: Strategy | None = None,
    calibration: Calibration | None = None,
    **keys: Any,
) -> Simulation | Forecast:
    """Simulate a plan, or a model run data parallel on a cluster, op by op.

    With a calibration the machine's figures are those that were measured.

    With a strategy, or any of its keys (`tp=8, pp=4, micro_batch=1`), the answer is the forecast of
    one training step of a transformer instead.

    `execution`: `graph` (kernels in a CUDA graph, the host costs nothing: what op by op is without
    it), `eager` (PyTorch op by op, as fast as its host starts kernels) or `compiled` (chains of
    cheap ops fused).
    """
    if strategy is not None or keys or isinstance(model, Transformer):
        if not training or optimizer not in ("adam", "adamw"):
            raise PlanError(
                "a forecast by strategy is of a training step with Adam",
                fix="leave training and optimizer out",
                field="strategy",
            )
        return _by_strategy(model, cluster, strategy, {
            "batch": batch, "dtype": dtype, "execution": execution, **keys,
        })  # fmt: skip
    if isinstance(model, Plan):
        machine = load_cluster(model) if cluster is None else _machine(cluster)
        return simulate_plan(model, machine, execution, calibration)
    if cluster is None:
        raise PlanError("no cluster is given", fix="name one, for example 4xA100", field="cluster")
    machine = _machine(cluster)
    if calibration is not None:
        machine = calibrated(machine, calibration)
    workload = load(model, batch=batch, dtype=dtype, training=training, optimizer=optimizer,
                    execution=execution or "graph")  # fmt: skip
    return simulate_stage(workload, machine, data_parallel(workload.graph, machine))


def _by_strategy(
    model: object, cluster: str | Cluster | None, strategy: Strategy | None, keys: dict[str, Any]
) -> Forecast:
    if not isinstance(model, str | Transformer):
        raise PlanError(
            f"a {type(model).__name__} cannot be forecast by strategy",
            fix="name a transformer, or leave the strategy out",
            field="model",
        )
    if cluster is None:
        raise PlanError("no cluster is given", fix="name one, for example 4xA100", field="cluster")
    given = {name: value for name, value in keys.items() if value is not None}
    return forecast_model(model, cluster, strategy, **given)


def simulate_plan(
    plan: Plan, cluster: Cluster, execution: str | None = None,
    calibration: Calibration | None = None,
) -> Simulation:  # fmt: skip
    """Simulate a plan on its cluster; a plan for another machine is refused.

    `execution` is the plan's own where it is not given.
    With a calibration the machine is the same, and its figures are those that were measured.
    """
    if cluster.fingerprint() != plan.cluster.fingerprint:
        raise PlanError(
            f"the plan is for {plan.cluster.spec} (fingerprint {plan.cluster.fingerprint}), "
            f"not for {cluster.name}",
            fix="plan again for this machine",
            field="cluster",
        )
    workload = load_model(plan)
    if execution is not None:
        workload = replace(workload, execution=execution)
    refuse_wrong_decisions(plan, workload.graph, cluster)
    if calibration is not None:
        cluster = calibrated(uncalibrated(plan, cluster), calibration)
    simulation = simulate_stages(workload, cluster, plan.stages, plan.schedule)
    allowed = max(plan.prediction.capacity_bytes, default=0.0)  # the user's cap, if there was one
    return simulation.capped(allowed) if allowed > 0 else simulation


def simulate_stages(
    workload: Workload,
    cluster: Cluster,
    stages: tuple[Stage, ...],
    schedule: Schedule,
    memo: Memo | None = None,
    most_devices: int = MAX_REPRESENTATIVES,
    *,
    quick: bool = False,
) -> Simulation:
    """Lower stages, run them on the engine, and let the verifier check the timeline.

    One stage that runs once is simulated op by op, with up to `most_devices` representative ranks;
    of others one of each kind in a group. `quick` is for trying many plans: see `lower_plan`.
    """
    lowered = lower_plan(
        stages, schedule, workload.graph, cluster, run, memo, quick=quick,
        most_devices=most_devices, execution=workload.execution,
    )  # fmt: skip
    once = runs_once(stages, schedule)
    result = Simulation(
        workload,
        cluster,
        stages,
        schedule,
        run(lowered.program),
        _reports(lowered)
        if once
        else _busiest_ops(lowered, stages, schedule, cluster, workload.execution),
        model_memory(workload.graph),
        decided=tuple(_named(stage, workload.graph) for stage in lowered.stages),
    )
    _check(result)
    if not quick:
        check_meaning(lowered.program, workload.graph, stages, schedule)
    return result


def _named(stage: Stage, graph: Graph) -> Stage:
    """A stage with the axes of its mesh called what they are: dp, tp, ..."""
    names = axis_names(graph, stage)
    axes = tuple(
        replace(axis, name=name) for axis, name in zip(stage.mesh.axes, names, strict=True)
    )
    return replace(stage, mesh=Mesh(axes, stage.mesh.devices))


def simulate_stage(
    workload: Workload,
    cluster: Cluster,
    stage: Stage,
    most_devices: int = MAX_REPRESENTATIVES,
    collectives: Collectives | None = None,
) -> Simulation:
    """Simulate one stage that holds the whole model and runs it once.

    With `collectives` at hand it is one of many candidates, and only its timeline is checked.
    """
    memo = None if collectives is None else Memo(collectives)
    return simulate_stages(
        workload, cluster, (stage,), Schedule(), memo, most_devices, quick=memo is not None
    )


def _check(simulation: Simulation) -> None:
    """The verifier's word on a timeline."""
    program = simulation.timeline.program
    check_timeline(program if simulation.fits else _without_caps(program), simulation.timeline)


def _without_caps(program: Program) -> Program:
    """Too much memory is an answer, not a mistake: everything else must still hold."""
    return replace(program, memories=tuple(Memory(memory.name) for memory in program.memories))


def data_parallel(graph: Graph, cluster: Cluster, zero: int = 0) -> Stage:
    """Every op splits its batch (its first dim) over all devices; what has none is repeated."""
    size = cluster.num_devices
    mesh = Mesh((Axis("data", size),), tuple(range(size)))
    return Stage("model", mesh, data_splits(graph, mesh, zero))


def data_splits(graph: Graph, mesh: Mesh, zero: int = 0) -> tuple[OpSplit, ...]:
    """The batch along every axis where shares are whole, nothing elsewhere."""
    splits = []
    try:
        carried = batch_dims(graph)
    except GraphError:  # samples are mixed somewhere: only loops that are called b are known
        carried = {}
    for op in graph.ops:
        if op.phase == "forward":
            loop = _batch_loop(graph, op, carried)
            legal = dims_of(graph.call(op), mesh.axes)
            best = max(legal, key=lambda dims: _batch_parts(dims, mesh, loop))
            splits.append(OpSplit(op.name, best, zero))
    return tuple(splits)


def _batch_loop(graph: Graph, op: Op, carried: dict[str, int]) -> str:
    """The loop over the batch: `b`, or in a reshape the outermost of the dim that carries it."""
    nest = loop_nest(graph.call(op))
    dim = carried.get(op.outputs[0])
    if dim is None or any(each.name == "b" for each in nest.dims):
        return "b"
    return next(iter(nest.outputs[0].dims[dim]), "b")


def _batch_parts(dims: Dims, mesh: Mesh, loop: str) -> int:
    """Into how many parts the batch is cut; 0 if anything else is cut."""
    parts = 1
    for dim, axis in zip(dims, mesh.axes, strict=True):
        if dim not in ("", loop):
            return 0
        parts *= axis.parts if dim else 1
    return parts


def _reports(lowered: Lowered) -> tuple[OpReport, ...]:
    op_reports, graph = [], lowered.graph
    for op in graph.ops:
        kind = graph.op(op.forward).kind if op.forward else op.kind
        split, cost = lowered.splits[op.name], lowered.costs[op.name]
        op_reports.append(OpReport(op.name, kind, op.phase, split, cost))
    return tuple(op_reports)


def _busiest_ops(
    lowered: Lowered, stages: tuple[Stage, ...], schedule: Schedule, cluster: Cluster,
    execution: str,
) -> tuple[OpReport, ...]:  # fmt: skip
    """What one device of the busiest group does in a step, op by op (without the updates)."""
    groups = device_groups(stages)
    busiest = max(groups, key=lambda group: sum(lowered.blocks[i].busy_s for i in group))
    graph = lowered.graph
    of_op = {split.op: (stages[i], split.dims) for i in busiest for split in stages[i].splits}
    op_reports = []
    for op in graph.ops:
        origin = op.forward or op.name
        if op.phase == "update" or origin not in of_op:
            continue
        stage, dims = of_op[origin]
        kind = cluster.kind_of(stage.mesh.devices[0])
        split = tuple(sorted(ways_of(dims, stage.mesh.axes).items()))
        cost = op_cost(graph, op, kind, split, execution)
        again = (stage.checkpointing == "full") or op.name in stage.recomputed
        twice = again and graph.is_training and op.phase == "forward"
        times = schedule.num_microbatches * (2 if twice else 1)
        whole = OpCost(*(getattr(cost, item.name) * times for item in fields(cost)))
        op_reports.append(OpReport(op.name, graph.op(origin).kind, op.phase, split, whole))
    return tuple(op_reports)


def uncalibrated(plan: Plan, cluster: Cluster) -> Cluster:
    """The machine of a plan as it is described, without what the plan knew of measurements."""
    spec, plus, measured = plan.cluster.spec.rpartition("+")
    return load_cluster(plan, spec) if plus and measured.endswith(".json") else cluster


def _machine(cluster: str | Cluster) -> Cluster:
    return resolve(cluster) if isinstance(cluster, str) else cluster


@dataclass
class Attempts:
    """What failed so far."""

    errors: list[Exception] = field(default_factory=list)

    def __call__(self, what: str, make: Callable[[], T]) -> T | None:
        """What `make` gives; None, and a line, where it fails."""
        try:
            return make()
        except Exception as error:
            self.errors.append(error)
            log.warning("%s is left out: %s", what, in_words(error), extra={"failure": error})
            return None

    def refuse_if_all_failed(self, anything: object) -> None:
        """Raise the first error where nothing else is left to show."""
        if not anything and self.errors:
            raise self.errors[0]


def in_words(error: Exception) -> str:
    """An error in one line, with its class where the text alone says little."""
    text = str(error).split("\n", 1)[0]
    return text if isinstance(error, PartitaError) else f"{type(error).__name__}: {text}"


def alternatives(
    others: Iterable[tuple[str, Simulation, str, float | None]], best: Simulation, most: int
) -> tuple[Alternative, ...]:
    """The first of (name, simulation, what is against it, steady state) but for the best itself."""
    listed: dict[Alternative, Timeline] = {}
    for name, other, why, interval_s in others:
        if other.stages == best.stages and other.schedule == best.schedule:
            continue
        told = Alternative(
            name, other.arrangement, other.step_s, other.fullest[0], why, interval_s,
        )  # fmt: skip
        listed.setdefault(told, other.timeline)
    first = list(listed.items())[:most]
    return tuple(
        Alternative(
            one.name, one.arrangement, one.step_s, one.peak_memory_bytes, one.why, one.interval_s,
            sketch(timeline),
        )
        for one, timeline in first
    )  # fmt: skip


def rejection(other: Simulation, best: Simulation) -> str:
    """What stands against a plan: memory, or what it loses most by."""
    if not other.fits:
        peak, capacity = other.fullest
        return f"needs {units.size(peak)} of {units.size(capacity)} per device"
    lost = {
        "longer in computing": other.compute_s - best.compute_s,
        "longer idle": other.bubble * other.step_s - best.bubble * best.step_s,
    }
    if not other.is_pipelined and not best.is_pipelined:  # else stages wait for each other, too
        lost["longer in waiting for communication"] = other.exposed_s - best.exposed_s
    what, seconds = max(lost.items(), key=lambda item: item[1])
    if other.step_s <= best.step_s * (1 + 1e-6) or seconds <= 0:
        return "no faster"
    return f"{units.seconds(seconds)} {what}"


def sketch(timeline: Timeline) -> tuple[LaneSketch, ...]:
    """Lanes of devices that differ, a few of them, and the link that is used most."""
    lanes = timeline.program.lanes
    if not timeline.makespan > 0:
        return ()
    alike: dict[str, list[int]] = {}
    for lane in [n for n, each in enumerate(lanes) if each.kind == "device"][:MOST_LOOKED_AT]:
        alike.setdefault(_spans(timeline, lane), []).append(lane)
    rows = [LaneSketch(lanes[some[0]].name, text, len(some)) for text, some in alike.items()]
    busy = timeline.busy()
    links = [n for n, each in enumerate(lanes) if each.kind == "link" and busy[n] > 0]
    most = max(links, key=lambda lane: busy[lane], default=None)
    used = [] if most is None else [LaneSketch(lanes[most].name, _spans(timeline, most))]
    return (*_some(rows), *used)


def _some(rows: Sequence[LaneSketch]) -> Sequence[LaneSketch]:
    """As many as are drawn, the first and the last among them."""
    if len(rows) <= MOST_DEVICES:
        return rows
    return [rows[i * (len(rows) - 1) // (MOST_DEVICES - 1)] for i in range(MOST_DEVICES)]


def _spans(timeline: Timeline, lane: int) -> str:
    tasks = timeline.lane_tasks(lane).tolist()
    few = len(tasks) <= MOST_TASKS
    return " ".join(map(str, _exact(timeline, tasks) if few else _columns(timeline, lane)))


def _exact(timeline: Timeline, tasks: Sequence[int]) -> list[Span]:
    """Task by task; what is shorter than half a thousandth is not seen."""
    program, scale = timeline.program, WHOLE / timeline.makespan
    spans: list[Span] = []
    now = 0
    for task in tasks:
        begin = max(now, round(float(timeline.start[task]) * scale))
        end = min(WHOLE, round(float(timeline.end[task]) * scale))
        if end <= begin:
            continue
        if begin > now:
            spans.append(Span(now, begin))
        letter = Kind(int(program.kind[task])).letter
        spans.append(Span(begin, end, letter, int(program.microbatch[task])))
        now = end
    return [*spans, Span(now, WHOLE)] if now < WHOLE else spans


def _columns(timeline: Timeline, lane: int) -> list[Span]:
    """Column by column, what the lane does most of each."""
    shares = timeline.shares(COLUMNS, [lane])[0]
    most = np.where(shares.sum(axis=1) < 0.5, -1, shares.argmax(axis=1)).tolist()
    spans: list[Span] = []
    for column, number in enumerate(most):
        letter = "" if number < 0 else Kind(number).letter
        begin, end = column * WHOLE // COLUMNS, (column + 1) * WHOLE // COLUMNS
        if spans and spans[-1].letter == letter:
            begin = spans.pop().begin
        spans.append(Span(begin, end, letter))
    return spans
