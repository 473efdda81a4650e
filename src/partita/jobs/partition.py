"""Partition a model: which ops form a stage, which device runs it; then simulate it.

1. The graph of one micro-batch becomes a problem (`costs/partition.py`) for the devices asked for:
   its modules are cut at their borders (`costs/module_layers.py`), or anywhere if asked for.
2. A search finds stages and devices; the objective is the busiest device's time per micro-batch.
   Modules are cut in their order, by dynamic programming; how much a free cut would gain can be
   looked for as well.
3. The stages become a plan: each on one device, its ops whole. Straight pipelines run 1F1B; with
   several stages on a device all forwards of a step come first, then the backwards.
4. The plan is simulated and verified; what the search counted stands beside it.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from partita import __version__
from partita.cluster import Cluster, resolve
from partita.costs.module_layers import module_layers
from partita.costs.partition import PartitionConstraints, PartitionModel, partition_model
from partita.costs.profiles import ModelProfile
from partita.errors import InputError
from partita.graph.rebatch import rebatch
from partita.graph.record import Graph
from partita.jobs.simulate import Simulation, simulate_stages
from partita.jobs.workload import Workload, cluster_ref, load
from partita.lower.orders import order_text, refusal
from partita.plans import (
    Mesh,
    OpSplit,
    Origin,
    Plan,
    Prediction,
    Schedule,
    Stage,
    device_groups,
)
from partita.problems.dag import sorted_or_cycle
from partita.problems.partition import (
    PartitionProblem,
    PartitionSolution,
    check,
    device_bytes,
    device_times_ms,
    lower_bound,
)
from partita.schedules.actions import Action
from partita.search import searches
from partita.search.base import Result, Status, Stop
from partita.showing import plot_of, repr_html, table_of
from partita.suggest import suggest

log = logging.getLogger("partita")

DEFAULT_KIND = "A100"
CUTS = ("modules", "anywhere")
IN_ORDER = "chain"  # the method for modules: their order is the model's
BORDERS = "the best cut of the model's order at the borders of its modules"
QUICKLY = Stop(time_s=10.0, gap=0.005, evaluations=2_000_000)  # where nothing else is asked


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage: its device, its ops, what it takes per micro-batch, what it sends and holds."""

    stage: int
    device: int
    num_ops: int
    forward_ms: float
    backward_ms: float
    sent_bytes: int  # forward, to other devices
    held_bytes: int


@dataclass(frozen=True, slots=True)
class FreeCut:
    """What a search that may cut anywhere found, beside a cut at module borders."""

    bottleneck_ms: float
    num_stages: int
    gain: float  # of the busiest device's time, as a fraction


@dataclass(frozen=True)
class Partitioned:
    """Stages and devices of a model's ops, as found, planned and simulated."""

    workload: Workload
    cluster: Cluster
    model: PartitionModel
    result: Result[PartitionSolution]
    plan: Plan | None
    simulation: Simulation | None
    stage_of: dict[str, int]  # of every forward op; empty where there is no answer
    device_of: dict[int, int]  # of every stage
    reports: tuple[StageReport, ...]
    cut: str = "anywhere"
    free: FreeCut | None = None  # where it was looked for and gains something

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def problem(self) -> PartitionProblem:
        """What the search saw."""
        return self.model.problem

    @property
    def prediction(self) -> Prediction | None:
        """What the simulator says of the plan."""
        return None if self.plan is None else self.plan.prediction

    @property
    def status(self) -> Status:
        """How the search ended."""
        return self.result.status

    @property
    def bottleneck_ms(self) -> float | None:
        """The busiest device's time for one micro-batch."""
        return self.result.objective

    @property
    def lower_bound_ms(self) -> float | None:
        """No partition's busiest device takes less."""
        return self.result.lower_bound

    @property
    def gap(self) -> float | None:
        """How far from optimal at most."""
        return self.result.gap

    @property
    def tied(self) -> tuple[str, ...]:
        """Tied parameters of which two devices hold a copy: their gradients must be added."""
        devices = {name: self.device_of[stage] for name, stage in self.stage_of.items()}
        layers = self.model.layers
        return tuple(
            parameter
            for parameter, readers in self.model.tied
            if devices and len({devices[layers[layer][0]] for layer in readers}) > 1
        )

    def device_times_ms(self) -> list[float]:
        """The time of every device for one micro-batch, as the search counts."""
        return device_times_ms(self.problem, self._node_devices())

    def device_bytes(self) -> list[int]:
        """What every device holds, as the search counts."""
        return device_bytes(self.problem, self._node_devices())

    def _node_devices(self) -> dict[int, int]:
        layers = self.model.layers
        return {
            index: self.device_of[self.stage_of[names[0]]] for index, names in enumerate(layers)
        }


def partition(
    model: str | Graph,
    cluster: str | Cluster | None = None,
    *,
    devices: int | None = None,
    batch: int | None = None,
    microbatches: int = 1,
    dtype: str | None = None,
    training: bool = True,
    optimizer: str = "adamw",
    method: str | None = None,
    memory: float | None = None,
    recompute: bool = False,
    stages: int | None = None,
    straight: bool = False,
    in_order: Sequence[str] = (),
    profile: ModelProfile | None = None,
    cut: str = "modules",
    offer: bool = False,
    stop: Stop = QUICKLY,
    seed: int = 0,
) -> Partitioned:
    """Cut a model into stages for the devices of a cluster (without one: `devices` A100s).

    `memory` caps the bytes of every device, `recompute` runs the forward again in the backward,
    `stages` asks for so many, `straight` for at most one on a device. The ops named `in_order` run
    in that order when the stages run in turn. `profile` replaces the modelled times by measured
    ones. `cut` is "modules" (at their borders) or "anywhere"; `offer` looks for what the latter
    would gain, too.
    """
    if cut not in CUTS:
        raise InputError(f"found {cut!r}", fix=f"use one of {', '.join(CUTS)}", field="cut")
    if cluster is None and devices is None:
        raise InputError(
            "is missing", fix="say how many devices, or name a cluster", field="devices"
        )
    if devices is not None and devices < 1:
        raise InputError(f"is {devices}", fix="at least 1 is needed", field="devices")
    spec = cluster if cluster is not None else f"{devices}x{DEFAULT_KIND}"
    machine = resolve(spec) if isinstance(spec, str) else spec
    workload = load(model, batch=batch, dtype=dtype, training=training, optimizer=optimizer)
    if profile is not None:
        _check_profile(profile, model)
    name = _method(method)
    graph = _microbatch(workload, microbatches)
    constraints = PartitionConstraints(
        memory, recompute, min(microbatches, devices or machine.num_devices), stages, straight,
        tuple(in_order),
    )  # fmt: skip

    def model_of(layers: Sequence[Sequence[str]] | None) -> PartitionModel:
        return partition_model(
            graph, machine, devices, constraints, updates_every=microbatches, profile=profile,
            layers=layers,
        )  # fmt: skip

    free = model_of(None)
    cutting = _Cutting(free, name, method is not None, stop, seed)
    if cut == "modules":
        borders = model_of(module_layers(free.placement, free.problem.num_devices))
        chosen = cutting.at_borders(borders, offer)
    else:
        chosen = cutting.anywhere()
    return _Answer(workload, machine, spec, chosen, microbatches).partitioned()


@dataclass(frozen=True)
class _Chosen:
    """A way to cut, and what its search said."""

    model: PartitionModel
    result: Result[PartitionSolution]
    cut: str
    free: FreeCut | None = None


@dataclass(frozen=True)
class _Cutting:
    """A model that may be cut anywhere, and how its cuts are searched for."""

    free: PartitionModel
    method: str
    is_asked: bool  # was the method named?
    stop: Stop
    seed: int

    def anywhere(self) -> _Chosen:
        return _Chosen(self.free, self._search(self.free, self.method), "anywhere")

    def at_borders(self, borders: PartitionModel, offer: bool) -> _Chosen:
        """The best cut at module borders; anywhere if there is none.

        The bound is that of all cuts, wherever they are.
        """
        problem = borders.problem
        in_order = not self.is_asked and (problem.num_stages or 0) <= problem.num_devices
        result = self._search(borders, IN_ORDER if in_order else self.method)
        objective_ms = result.objective
        if objective_ms is None:
            if not self.stop.interrupted():
                log.info("no cut at module borders keeps to what was asked: cut anywhere")
            return self.anywhere()
        if in_order and not self.stop.interrupted():
            result = replace(result, status=Status.FEASIBLE, why=BORDERS)
        elif result.status is Status.OPTIMAL:
            result = replace(result, status=Status.FEASIBLE, why=f"{result.why}, at module borders")
        bound_ms = min(lower_bound(self.free.problem), objective_ms)
        free = None
        if offer and objective_ms > bound_ms * (1 + self.stop.gap):
            other = self._search(self.free, self.method)
            bound_ms = max(bound_ms, min(other.lower_bound or 0.0, objective_ms))
            if other.objective is not None and other.solution is not None:
                gain = 1 - other.objective / objective_ms
                count = len(other.solution.device_of)
                free = FreeCut(other.objective, count, gain) if gain > 0 else None
        return _Chosen(borders, replace(result, lower_bound=bound_ms), "modules", free)

    def _search(self, model: PartitionModel, method: str) -> Result[PartitionSolution]:
        stop = self.stop
        if method == IN_ORDER and not self.is_asked:
            stop = replace(stop, gap=0.0, evaluations=None)  # it takes no time
        return searches("partition")[method](model.problem, stop, self.seed)


def _check_profile(profile: ModelProfile, model: str | Graph) -> None:
    """Refuse the profile of another graph; say if it comes from another version of PyTorch."""
    if isinstance(model, Graph) and not model.is_training:
        profile.of(model)
    with contextlib.suppress(PackageNotFoundError):
        here = version("torch")
        measured = profile.environment.torch
        if measured.partition("+")[0] != here.partition("+")[0]:
            log.warning(
                "the profile was measured with torch %s, this is %s: profile again for times of "
                "this version", measured, here,
            )  # fmt: skip


def _method(method: str | None) -> str:
    known = searches("partition")
    name = method or next(iter(known))
    if name not in known:
        raise InputError(f"found {name!r}", fix=suggest(name, tuple(known)), field="method")
    return name


def _microbatch(workload: Workload, microbatches: int) -> Graph:
    if microbatches < 1 or workload.batch % microbatches:
        raise InputError(
            f"a batch of {workload.batch} in {microbatches} micro-batches",
            fix="give a number that divides the batch",
            field="microbatches",
        )
    if microbatches == 1:
        return workload.graph
    return rebatch(workload.graph, workload.batch // microbatches)


@dataclass(frozen=True)
class _Answer:
    """What a search found, on its way to a plan."""

    workload: Workload
    cluster: Cluster
    spec: str | Cluster
    chosen: _Chosen
    microbatches: int

    @property
    def model(self) -> PartitionModel:
        return self.chosen.model

    @property
    def result(self) -> Result[PartitionSolution]:
        return self.chosen.result

    def partitioned(self) -> Partitioned:
        solution, problem = self.result.solution, self.model.problem
        if solution is None:
            return Partitioned(
                self.workload, self.cluster, self.model, self.result, None, None, {}, {}, (),
                self.chosen.cut,
            )  # fmt: skip
        assert not check(problem, solution), "a search gave an answer that is not valid"
        stage_of, device_of = _in_order(problem, solution)
        ops = {
            name: stage_of[index] for index, names in enumerate(self.model.layers) for name in names
        }
        plan, simulation = self._plan(ops, device_of)
        reports = self._reports(stage_of, device_of)
        return Partitioned(
            self.workload, self.cluster, self.model, self.result, plan, simulation, ops, device_of,
            reports, self.chosen.cut, self.chosen.free,
        )  # fmt: skip

    def _plan(self, ops: dict[str, int], device_of: dict[int, int]) -> tuple[Plan, Simulation]:
        members: dict[int, list[OpSplit]] = {stage: [] for stage in device_of}
        for op in self.workload.graph.ops:
            if op.phase == "forward":
                members[ops[op.name]].append(OpSplit(op.name, ()))
        recompute = self.model.problem.recompute and self.workload.training
        stages = tuple(
            Stage(
                f"stage{stage}",
                Mesh((), (device_of[stage],)),
                tuple(members[stage]),
                "full" if recompute else "none",
            )
            for stage in sorted(device_of)
        )
        schedule = _schedule(stages, self.microbatches, self.workload.training)
        simulation = simulate_stages(self.workload, self.cluster, stages, schedule)
        result = self.result
        bound_ms = result.lower_bound or 0.0
        plan = Plan(
            self.workload.ref(),
            cluster_ref(
                self.spec if isinstance(self.spec, str) else self.cluster.name, self.cluster
            ),
            simulation.decided,
            Prediction(
                simulation.step_s,
                min(bound_ms * 1e-3 * self.microbatches, simulation.step_s),
                simulation.compute_s,
                simulation.communication_s,
                simulation.peak_bytes,
                simulation.capacity_bytes,
            ),
            Origin(
                f"partition {result.method}", str(result.status), result.why, result.seed,
                result.seconds, __version__,
            ),
            schedule,
        )  # fmt: skip
        return plan, simulation

    def _reports(
        self, stage_of: dict[int, int], device_of: dict[int, int]
    ) -> tuple[StageReport, ...]:
        problem = self.model.problem
        rows = {stage: [0, 0.0, 0.0, 0, 0] for stage in device_of}
        for node in problem.placed:
            stage = stage_of[node.id]
            device = device_of[stage]
            row = rows[stage]
            fwd, bwd = node.times_ms[device] if node.times_ms else (node.fwd_ms, node.bwd_ms)
            row[0] += len(self.model.layers[node.id])
            row[1] += fwd
            row[2] += bwd + (fwd if problem.recompute else 0.0)
            row[4] += problem.node_bytes(node)
        crossing: Counter[tuple[int, int]] = Counter()
        for edge in problem.inner_edges:
            src, dst = stage_of[edge.src], stage_of[edge.dst]
            if device_of[src] != device_of[dst]:
                key = (edge.src, device_of[dst])
                crossing[key] = max(crossing[key], edge.fwd_bytes)
        for (producer, _), size in crossing.items():
            rows[stage_of[producer]][3] += size
        return tuple(
            StageReport(stage, device_of[stage], int(ops), fwd, bwd, int(sent), int(held))
            for stage, (ops, fwd, bwd, sent, held) in sorted(rows.items())
        )


def _in_order(
    problem: PartitionProblem, solution: PartitionSolution
) -> tuple[dict[int, int], dict[int, int]]:
    """The stage of every node and the device of every stage, numbered as they can run."""
    number = {stage: index for index, (stage, _) in enumerate(solution.device_of)}
    stage_of = {node: number[stage] for node, stage in solution.stage_of}
    consumers: list[list[int]] = [[] for _ in number]
    for edge in problem.inner_edges:
        src, dst = stage_of[edge.src], stage_of[edge.dst]
        if src != dst:
            consumers[src].append(dst)
    order, _ = sorted_or_cycle(consumers)
    place = {stage: index for index, stage in enumerate(order)}
    devices = [device for _, device in solution.device_of]
    return (
        {node: place[stage] for node, stage in stage_of.items()},
        {place[stage]: device for stage, device in enumerate(devices)},
    )


def _schedule(stages: tuple[Stage, ...], microbatches: int, training: bool) -> Schedule:
    """1F1B where the stages are a line of devices; else all forwards, then all backwards."""
    groups = device_groups(stages)
    if not refusal("1f1b", groups, microbatches):
        return Schedule("1f1b", microbatches)
    rows = []
    for members in groups:
        row = [Action(s, "F", m) for m in range(microbatches) for s in members]
        if training:
            row += [Action(s, "B", m) for m in range(microbatches) for s in reversed(members)]
        rows.append(tuple(row))
    return Schedule("forwards-first", microbatches, order_text(tuple(rows)))
