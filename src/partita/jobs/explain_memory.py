"""What fills the memory of the fullest device of a plan.

Parameters, gradients and states follow from how each parameter lies: with `shards` shards of it and
`copies` of each among the devices,

    parameters   size / shards, and / copies where parameters are sharded
    gradients    size / shards, and / copies where gradients are; of one stage that runs once, those
                 that are being made or made at the moment of the peak
    states       size / shards, and / copies where states are
    workspace    what drivers and libraries keep
    activations  the rest of the peak: what waits for the backward, and what is being worked on
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from partita.costs.layouts import Layout, num_shards
from partita.costs.memory import workspace_bytes
from partita.costs.sharding import SplitChoice
from partita.graph.record import Graph
from partita.graph.splits import REPLICATE
from partita.jobs.explain import op_layouts
from partita.jobs.simulate import Simulation
from partita.lower import drawn_devices, first_of_kinds
from partita.plans import Stage, device_groups, group_devices


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
        return [((0,), device) for device in drawn_devices(simulation.stage, simulation.cluster)]
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
