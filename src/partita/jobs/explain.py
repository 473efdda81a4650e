"""Why an op is split as it is, and what fills the memory of the fullest device.

An op (`explain`): what its split sends, and what the other ways would cost. Two prices for every
alternative: with all other ops left as they are (`alone`), and with all other ops free to follow
(`together`), which solves the whole problem again with this op fixed: once to what it is, once to
what it might be.

Memory (`memory_account`): parameters, gradients and states follow from how each parameter lies:
with `shards` shards of it and `copies` of each among the devices,

    parameters   size / shards, and / copies where parameters are sharded
    gradients    size / shards, and / copies where gradients are; of one stage that runs once, those
                 that are being made or made at the moment of the peak
    states       size / shards, and / copies where states are
    workspace    what drivers and libraries keep
    activations  the rest of the peak: what waits for the backward, and what is being worked on
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from partita import units
from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.costs.layouts import Layout, conversion, num_shards
from partita.costs.memory import workspace_bytes
from partita.costs.sharding import (
    LEVELS,
    ShardingModel,
    SplitChoice,
    Weights,
    sharding_model,
    ways_of,
)
from partita.errors import PlanError
from partita.graph.loops import loop_nest
from partita.graph.rebatch import rebatch
from partita.graph.record import Graph, Op
from partita.graph.splits import REPLICATE, communication, input_placement, output_placement
from partita.jobs.check_plan import refuse_wrong_decisions
from partita.jobs.simulate import Simulation
from partita.lower import first_of_kinds, representative_devices
from partita.lower.pieces import homes, piece
from partita.plans import ZERO_STAGES, Mesh, Plan, Stage, device_groups, group_devices
from partita.problems.sharding import ShardingProblem
from partita.search import searches
from partita.search.base import Stop
from partita.showing import plot_of, repr_html, table_of
from partita.suggest import suggest

WEIGHTS = Weights(hidden=0.2)  # as the search counts: most of the hidden communication is hidden
FOLLOWED = 4  # alternatives that are solved anew
SOLVE_S = 10.0


@dataclass(frozen=True)
class SplitTraffic:
    """Something an op's split makes devices send."""

    what: str
    collective: str
    size_bytes: float
    seconds: float


@dataclass(frozen=True)
class OtherSplit:
    """Another way to split the op, by what it would add to a micro-batch (of a step)."""

    choice: SplitChoice
    alone_s: float
    together_s: float | None
    memory_bytes: float

    @property
    def added_s(self) -> float:
        """With all others free to follow, where that is known."""
        return self.alone_s if self.together_s is None else self.together_s


@dataclass(frozen=True)
class Explanation:
    """One op of a plan, explained; all its figures are for one micro-batch."""

    op: str
    kind: str
    nest: str
    choice: SplitChoice
    layouts: tuple[tuple[str, str], ...]  # tensor -> placements per axis
    sent: tuple[SplitTraffic, ...]
    compute_s: float
    alternatives: tuple[OtherSplit, ...]
    num_microbatches: int = 1

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    def why(self) -> str:
        """One sentence."""
        if not self.alternatives:
            return "it has no other way to be split on this mesh"
        if any(other.added_s < 0 for other in self.alternatives):
            return (
                "the estimate would prefer another split, but the simulated step was the fastest "
                "of all candidates with this one"
            )
        nearest = self.alternatives[0]
        extra = units.seconds(nearest.added_s)
        what = "a step" if self.num_microbatches == 1 else "a micro-batch"
        return f"the next best way, {describe(nearest.choice)}, adds {extra} to {what}"


def describe(choice: SplitChoice) -> str:
    """A choice in words: `b x none, ZeRO 1`."""
    dims = " x ".join(dim or "none" for dim in choice.dims)
    return f"{dims}, ZeRO {choice.zero}" if choice.zero else dims


def explain(plan: Plan, graph: Graph, cluster: Cluster, op: str) -> Explanation:
    """Explain the split of one forward op of a plan."""
    refuse_wrong_decisions(plan, graph, cluster)
    stage, graph = _stage_of(plan, graph, op)
    names = [split.op for split in stage.splits]
    count = plan.schedule.num_microbatches
    used = {*LEVELS, *(split.zero for split in stage.splits)}
    levels = tuple(level for level in ZERO_STAGES if level in used)
    model = sharding_model(graph, cluster, stage.mesh, levels, num_microbatches=count)
    chosen = _assignment(model, stage)
    index = names.index(op)
    table = model.tables[index]
    current = model.choices[index][chosen[index]]
    return Explanation(
        op,
        graph.op(op).kind,
        str(loop_nest(graph.call(graph.op(op)))),
        current,
        tuple((name, text(layout)) for name, layout in op_layouts(graph, graph.op(op), current)),
        tuple(_sent(graph, cluster, stage, graph.op(op), current)),
        float(table.compute[chosen[index]].max()),
        _alternatives(model, chosen, index),
        count,
    )


def _stage_of(plan: Plan, graph: Graph, op: str) -> tuple[Stage, Graph]:
    """The stage that runs an op, and the part of the graph it runs for one micro-batch."""
    everything = [split.op for stage in plan.stages for split in stage.splits]
    if op not in everything:
        raise PlanError(f"the plan splits no op {op!r}", fix=suggest(op, everything), field="OP")
    number = next(i for i, s in enumerate(plan.stages) if any(p.op == op for p in s.splits))
    count = plan.schedule.num_microbatches
    if len(plan.stages) == count == 1:
        return plan.stages[0], graph
    micro = rebatch(graph, plan.model.batch // count)
    stage = replace(plan.stages[number], checkpointing="none", segments=(), recomputed=())
    return stage, piece(micro, stage, number, homes(micro, plan.stages)).graph


def text(layout: Layout) -> str:
    """Placements as people write them: `S(0) R`."""
    return " ".join(map(str, layout))


def op_layouts(graph: Graph, op: Op, choice: SplitChoice) -> list[tuple[str, Layout]]:
    """How each tensor of an op must lie, and how its outputs come to lie."""
    nest = loop_nest(graph.call(op))
    reads = [
        (name, tuple(input_placement(access, dim) for dim in choice.dims))
        for name, access in zip(op.inputs, nest.inputs, strict=True)
    ]
    writes = [
        (name, tuple(output_placement(nest, access, dim) for dim in choice.dims))
        for name, access in zip(op.outputs, nest.outputs, strict=True)
    ]
    return [*reads, *writes]


def parameter_placements(stage: Stage, graph: Graph) -> dict[str, tuple[str, ...]]:
    """How every parameter lies, as DTensor placements: `Shard(0)` or `Replicate()` per axis.

    A sharded parameter (ZeRO 3) is `Shard(0)` along an axis where it would be replicated.
    """
    placements: dict[str, tuple[str, ...]] = {}
    for split in stage.splits:
        op = graph.op(split.op)
        for name, layout in op_layouts(graph, op, SplitChoice(split.dims, split.zero)):
            if graph.tensor(name).role != "parameter" or name in placements:
                continue
            placements[name] = tuple(
                f"Shard({p.dim})"
                if p.kind == "shard"
                else "Shard(0)"
                if split.zero == 3 and not axis.replicates
                else "Replicate()"
                for p, axis in zip(layout, stage.mesh.axes, strict=True)
            )
    return placements


def _assignment(model: ShardingModel, stage: Stage) -> tuple[int, ...]:
    try:
        return model.assignment(stage.splits)
    except ValueError:
        raise PlanError(
            "the plan holds a split that no search here would choose",
            fix="verify it with: partita verify",
            field="stages",
        ) from None


def _alternatives(
    model: ShardingModel, chosen: tuple[int, ...], index: int
) -> tuple[OtherSplit, ...]:
    problem = model.problem(WEIGHTS)
    alone = problem.costs[index].copy()
    for (u, v), m in zip(problem.edges, problem.matrix_of, strict=True):
        if u == index and v != index:
            alone += problem.matrices[m][:, chosen[v]]
        elif v == index and u != index:
            alone += problem.matrices[m][chosen[u], :]
    now = alone[chosen[index]]
    memory = model.tables[index].memory
    order = [int(x) for x in np.argsort(alone, kind="stable") if x != chosen[index]]
    # A dispatch to experts cannot change without its combine: some splits are forbidden alone.
    possible = sum(1 for x in order if np.isfinite(alone[x]))
    order = order[: possible + FOLLOWED]
    best = _solve(problem, index, chosen[index])
    alternatives = []
    for rank, x in enumerate(order):
        together = None
        if (rank < FOLLOWED or rank >= possible) and best is not None:
            forced = _solve(problem, index, x)
            together = None if forced is None else forced - best
        if rank >= possible:
            if together is None:
                continue
            alone[x] = now + together
        alternatives.append(
            OtherSplit(
                model.choices[index][x],
                float(alone[x] - now),
                together,
                float(memory[x] - memory[chosen[index]]),
            )
        )
    return tuple(sorted(alternatives, key=lambda other: other.added_s))


def _solve(problem: ShardingProblem, index: int, choice: int) -> float | None:
    """The optimum with one op fixed."""
    costs = list(problem.costs)
    fixed = np.full_like(costs[index], math.inf)
    fixed[choice] = costs[index][choice]
    costs[index] = fixed
    forced = ShardingProblem(
        tuple(costs), problem.edges, problem.matrix_of, problem.matrices, problem.names
    )
    search = next(iter(searches("sharding").values()))
    return search(forced, Stop(time_s=SOLVE_S), 0).objective


def _sent(
    graph: Graph, cluster: Cluster, stage: Stage, op: Op, choice: SplitChoice
) -> list[SplitTraffic]:
    """What crosses devices on account of this op, forward and backward."""
    mesh, times = stage.mesh, Collectives(cluster)
    sent = _own_exchanges(graph, mesh, times, op, choice)
    dims = stage.dims()
    nest = loop_nest(graph.call(op))
    for name, access in zip(op.inputs, nest.inputs, strict=True):
        producer = graph.producer(name)
        if producer is None:
            continue
        source = loop_nest(graph.call(producer))
        made = source.outputs[producer.outputs.index(name)]
        have = tuple(output_placement(source, made, dim) for dim in dims[producer.name])
        need = tuple(input_placement(access, dim) for dim in choice.dims)
        ways = tuple(axis.ways() for axis in mesh.axes)
        for step in conversion(graph.tensor(name).size_bytes, ways, have, need):
            if step.collective:
                seconds = times.seconds(step.collective, step.size_bytes, mesh.groups(step.axis))
                what = f"{name}: {text(have)} -> {text(need)}"
                sent.append(SplitTraffic(what, step.collective, step.size_bytes, seconds))
    return sent


def _own_exchanges(
    graph: Graph, mesh: Mesh, times: Collectives, op: Op, choice: SplitChoice
) -> list[SplitTraffic]:
    ways = ways_of(choice.dims, mesh.axes)
    sent = []
    for phase in (op, *(o for o in graph.ops if o.forward == op.name)):
        call = graph.call(phase)
        for axis, dim in enumerate(choice.dims):
            for exchange in communication(call, ways, along=dim) if dim else ():
                if exchange.tensor >= 0 and phase.phase != "wgrad":
                    continue  # counted where it is read
                size = 4.0 * exchange.elements
                what = f"{phase.phase} statistics along {dim}"
                if exchange.tensor >= 0:
                    gradient = phase.outputs[exchange.tensor]
                    parameter = op.inputs[call.wrt[exchange.tensor]]
                    size = graph.tensor(gradient).size_bytes
                    size *= exchange.elements / math.prod(call.inputs[call.wrt[exchange.tensor]])
                    for what, collective in _summed(gradient, parameter, choice.zero):
                        seconds = times.seconds(collective, size, mesh.groups(axis))
                        sent.append(SplitTraffic(what, collective, size, seconds))
                    continue
                if exchange.collective == "halo":
                    what = f"{phase.phase} border along {dim}"
                seconds = times.seconds(exchange.collective, size, mesh.groups(axis))
                sent.append(SplitTraffic(what, exchange.collective, size, seconds))
    return sent


def _summed(gradient: str, parameter: str, zero: int) -> list[tuple[str, str]]:
    """What reducing a gradient and sharding its parameter make devices send."""
    total, whole = f"partial sums of {gradient}", f"{parameter} for the"
    if zero == 0:
        return [(total, "all_reduce")]
    when = ["forward", "backward"] if zero == 3 else ["next step"]
    return [(total, "reduce_scatter"), *((f"{whole} {word}", "all_gather") for word in when)]


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """The fullest device (or group of devices alike), at the moment it is fullest."""

    name: str
    capacity_bytes: float
    peak_bytes: float
    parameters_bytes: float
    gradients_bytes: float
    states_bytes: float
    activations_bytes: float
    workspace_bytes: float

    def parts(self) -> dict[str, float]:
        """What fills it, by name; adds up to the peak."""
        return {
            "parameters": self.parameters_bytes,
            "gradients": self.gradients_bytes,
            "optimizer states": self.states_bytes,
            "activations": self.activations_bytes,
            "workspace": self.workspace_bytes,
        }


def memory_account(simulation: Simulation) -> MemoryAccount:
    """What fills the memory that has the least memory left, by share."""
    filled = [
        peak / capacity if capacity else math.inf
        for peak, capacity in zip(simulation.peak_bytes, simulation.capacity_bytes, strict=True)
    ]
    fullest = max(range(len(filled)), key=lambda i: filled[i])
    members, device = memory_places(simulation)[fullest]
    kept = [kept_bytes(simulation.stages[i], simulation.workload.graph) for i in members]
    parameters = sum(part[0] for part in kept)
    states = sum(part[1] for part in kept)
    gradients = sum(sum(part[2].values()) for part in kept)
    if not simulation.is_pipelined:
        gradients = _made_by_peak(simulation, fullest, kept[0][2])
    workspace = workspace_bytes(simulation.cluster.kind_of(device))
    peak = simulation.peak_bytes[fullest]
    rest = max(0.0, peak - parameters - states - gradients - workspace)
    return MemoryAccount(
        simulation.timeline.program.memories[fullest].name,
        simulation.capacity_bytes[fullest],
        peak, parameters, gradients, states, rest, workspace,
    )  # fmt: skip


def memory_places(simulation: Simulation) -> list[tuple[tuple[int, ...], int]]:
    """For each memory of the program the stages it holds, and a device it stands for."""
    if not simulation.is_pipelined:
        return [
            ((0,), device)
            for device in representative_devices(simulation.stage, simulation.cluster)
        ]
    return [
        (members, device)
        for members, devices in zip(
            device_groups(simulation.stages), group_devices(simulation.stages), strict=True
        )
        for device in first_of_kinds(devices, simulation.cluster)
    ]


def kept_bytes(stage: Stage, graph: Graph) -> tuple[float, float, dict[str, float]]:
    """Bytes of a device's parameters, of its states, and of each gradient."""
    updates = {op.inputs[0]: op for op in graph.ops if op.phase == "update"}
    ways = [axis.ways() for axis in stage.mesh.axes]
    parameters = states = 0.0
    gradients: dict[str, float] = {}
    for name, layout, level in lying_parameters(stage, graph):
        shards = num_shards(layout, ways)
        copies = math.prod(
            axis.size for axis, p in zip(stage.mesh.axes, layout, strict=True) if p == REPLICATE
        )
        size = graph.tensor(name).size_bytes / shards
        parameters += size / (copies if level == 3 else 1)
        if name in updates:
            op = updates[name]
            own = sum(graph.tensor(state).size_bytes for state in op.inputs[2:]) / shards
            states += own / (copies if level != 0 else 1)
            whole = graph.tensor(op.inputs[1]).size_bytes / shards
            is_sharded = level in (2, 3)
            gradients[op.inputs[1]] = whole / (copies if is_sharded else 1)
    return parameters, states, gradients


def lying_parameters(stage: Stage, graph: Graph) -> Iterator[tuple[str, Layout, int]]:
    """Each parameter of a stage once: its layout and level are those its first reader asks for."""
    splits = {split.op: split for split in stage.splits}
    seen: set[str] = set()
    for op in graph.ops:
        split = splits.get(op.name)
        if split is None:
            continue
        for name, layout in op_layouts(graph, op, SplitChoice(split.dims, split.zero)):
            if graph.tensor(name).role == "parameter" and name not in seen:
                seen.add(name)
                yield name, layout, split.zero


def _made_by_peak(simulation: Simulation, memory: int, gradients: dict[str, float]) -> float:
    """Bytes of the gradients that tasks have begun to write when the memory is fullest."""
    times, amounts = simulation.timeline.memory_steps(memory)
    moment = float(times[int(amounts.argmax())])
    program = simulation.timeline.program
    begun: set[str] = set()
    for task in simulation.timeline.lane_tasks(memory).tolist():  # devices' lanes come first
        work = program.work_of(task)
        if work is not None and simulation.timeline.start[task] <= moment:
            begun.update(program.values[value].tensor for value in work.writes)
    return sum(size for name, size in gradients.items() if name in begun)
