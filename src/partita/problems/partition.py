"""Partition: give every node of a model a stage and every stage a device; least busy time wins.

    device time = sum of (fwd_ms + bwd_ms) of its nodes + (bytes sent + received) / bandwidth
    objective   = the largest device time, in ms

Communication: for each producer and each other device that consumes it, its fwd_bytes go there once
and the largest bwd_bytes come back once (where edges to the same device differ in fwd_bytes, the
largest counts). Nodes of type IN are inputs: free, on no device, in no stage.

A device may hold several stages, but the graph of stages must have no cycle. Device times depend on
devices only, and single nodes as stages never form a cycle: so every assignment of devices is valid
with some staging, and `stages_from_devices` gives one with few stages.

The file (FTPipe's graphs) leaves open how many devices there are; `num_devices`, and `bandwidth`
in bytes/s if it is not 12e9, are given when it is read, or stand in the file.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita import files
from partita.errors import FileError, InputError, ProblemError

FORMAT = "partition-problem"
INPUT = "IN"
BANDWIDTH_BYTES_PER_S = 12e9
LARGEST = 1e100  # beyond it sums overflow
MAX_DEVICES = 1_000_000


@dataclass(frozen=True, slots=True)
class PartitionNode:
    """A piece of the model that is not cut further."""

    id: int
    type: str
    fwd_ms: float
    bwd_ms: float
    scope: str = ""
    params: int = 0
    out_bytes: int = 0

    @property
    def is_input(self) -> bool:
        """Is it an input, free and on no device?"""
        return self.type == INPUT


@dataclass(frozen=True, slots=True)
class PartitionEdge:
    """What flows from one node to another, and back in the backward pass."""

    src: int
    dst: int
    fwd_bytes: int
    bwd_bytes: int


@dataclass(frozen=True, slots=True)
class PartitionSolution:
    """A stage for every node and a device for every stage, as sorted pairs."""

    stage_of: tuple[tuple[int, int], ...]  # (node id, stage)
    device_of: tuple[tuple[int, int], ...]  # (stage, device)

    def to_json(self) -> dict[str, Any]:
        """As the `solution` of an answer."""
        return {
            "stage_of": {str(node): stage for node, stage in self.stage_of},
            "device_of": {str(stage): device for stage, device in self.device_of},
        }

    @classmethod
    def from_json(cls, value: object, file: str = "") -> "PartitionSolution":
        """Read what `to_json` wrote."""
        wire = files.convert(value, _SolutionWire, file)
        return cls(
            _pairs(wire.stage_of, "stage_of", file), _pairs(wire.device_of, "device_of", file)
        )


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    """A model's nodes with their times, its edges with their bytes, and identical devices."""

    nodes: tuple[PartitionNode, ...]
    edges: tuple[PartitionEdge, ...]
    num_devices: int
    bandwidth_bytes_per_s: float = BANDWIDTH_BYTES_PER_S
    outputs: tuple[int, ...] = ()
    name: str = ""
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_machine(self)
        _check_nodes(self)
        _check_edges(self)
        object.__setattr__(self, "order", _topological_order(self))

    @property
    def placed(self) -> tuple[PartitionNode, ...]:
        """The nodes that need a device, each after everything it consumes."""
        by_id = {node.id: node for node in self.nodes}
        return tuple(by_id[node] for node in self.order if not by_id[node].is_input)

    @property
    def inner_edges(self) -> tuple[PartitionEdge, ...]:
        """The edges between nodes that need a device."""
        inputs = {node.id for node in self.nodes if node.is_input}
        return tuple(edge for edge in self.edges if edge.src not in inputs)

    def to_json(self) -> dict[str, Any]:
        """As plain values, devices and bandwidth included."""
        return {
            "format": f"partita/{FORMAT}@1",
            "name": self.name,
            "num_devices": self.num_devices,
            "bandwidth": self.bandwidth_bytes_per_s,
            "outputs": list(self.outputs),
            "nodes": [
                {name: getattr(node, name) for name in PartitionNode.__slots__}
                for node in self.nodes
            ],
            "edges": [
                {name: getattr(edge, name) for name in PartitionEdge.__slots__}
                for edge in self.edges
            ],
        }


def check(problem: PartitionProblem, solution: PartitionSolution) -> tuple[str, ...]:
    """What is wrong with this solution, one sentence each; empty if nothing is."""
    stages, devices = dict(solution.stage_of), dict(solution.device_of)
    twice = [
        f"{what} {key} is given {count} times"
        for what, pairs in (("node", solution.stage_of), ("stage", solution.device_of))
        for key, count in Counter(key for key, _ in pairs).items()
        if count > 1
    ]
    needed = {node.id: not node.is_input for node in problem.nodes}
    wrong = [f"node {node} has no stage" for node in needed if needed[node] and node not in stages]
    wrong += [f"there is no node {node}" for node in stages if node not in needed]
    wrong += [f"node {n} is an input and takes no stage" for n in stages if not needed.get(n, True)]
    wrong += [
        f"stage {stage} has no device"
        for stage in sorted(set(stages.values()))
        if stage not in devices
    ]
    wrong += [
        f"stage {stage} is on device {device} of {problem.num_devices}"
        for stage, device in devices.items()
        if not 0 <= device < problem.num_devices
    ]
    return tuple(twice + wrong) or _stage_cycle(problem, stages)


def evaluate(problem: PartitionProblem, solution: PartitionSolution) -> float:
    """The objective of a valid solution: the largest device time, in ms."""
    violations = check(problem, solution)
    if violations:
        raise ProblemError(violations[0], fix="give a valid solution", field="solution")
    stages, devices = dict(solution.stage_of), dict(solution.device_of)
    return max(device_times_ms(problem, {node: devices[stages[node]] for node in stages}))


def device_times_ms(problem: PartitionProblem, device_of: dict[int, int]) -> list[float]:
    """The time of every device, given the device of every node that is no input."""
    times = [0.0] * problem.num_devices
    for node in problem.placed:
        times[device_of[node.id]] += node.fwd_ms + node.bwd_ms
    moved: dict[tuple[int, int], tuple[int, int]] = {}  # (producer, consuming device): fwd, bwd
    for edge in problem.inner_edges:
        there = device_of[edge.dst]
        if device_of[edge.src] != there:
            fwd, bwd = moved.get((edge.src, there), (0, 0))
            moved[edge.src, there] = max(fwd, edge.fwd_bytes), max(bwd, edge.bwd_bytes)
    for (producer, there), (fwd, bwd) in moved.items():
        ms = (fwd + bwd) / problem.bandwidth_bytes_per_s * 1e3
        times[device_of[producer]] += ms
        times[there] += ms
    return times


def lower_bound(problem: PartitionProblem) -> float:
    """No device is done before its longest node, and some device has its share of all work."""
    times = [node.fwd_ms + node.bwd_ms for node in problem.placed]
    return max(max(times), math.fsum(times) / problem.num_devices)


def stages_from_devices(problem: PartitionProblem, device_of: dict[int, int]) -> PartitionSolution:
    """The assignment of devices to nodes with stages that form no cycle.

    A node's level is one more than that of a producer on another device and no less than that of
    one on its own; a stage is a level of a device. An edge between two stages therefore always
    climbs, so there is no cycle. Not always the fewest stages, but few.
    """
    level: dict[int, int] = {}
    producers: dict[int, list[int]] = {node.id: [] for node in problem.nodes}
    for edge in problem.inner_edges:
        producers[edge.dst].append(edge.src)
    for node in problem.placed:
        here = device_of[node.id]
        climbs = [level[src] + (device_of[src] != here) for src in producers[node.id]]
        level[node.id] = max(climbs, default=0)
    keys = sorted({(level[node], device_of[node]) for node in level})
    number = {key: stage for stage, key in enumerate(keys)}
    return PartitionSolution(
        tuple((node, number[level[node], device_of[node]]) for node in sorted(level)),
        tuple((stage, device) for stage, (_, device) in enumerate(keys)),
    )


@dataclass(frozen=True, slots=True)
class _Wire:
    nodes: tuple[PartitionNode, ...]
    edges: tuple[PartitionEdge, ...]
    outputs: tuple[int, ...] = ()
    name: str = ""
    num_devices: int | None = None
    bandwidth: float = BANDWIDTH_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class _SolutionWire:
    stage_of: dict[str, int]
    device_of: dict[str, int]


def read(
    path: str | Path, *, num_devices: int | None = None, bandwidth: float | None = None
) -> PartitionProblem:
    """Read a problem from JSON; what is given here goes before what the file says."""
    value = files.decode_json(files.read_bytes(path), str(path))
    return from_json(value, str(path), num_devices=num_devices, bandwidth=bandwidth)


def from_json(
    value: dict[str, Any],
    file: str = "",
    *,
    num_devices: int | None = None,
    bandwidth: float | None = None,
) -> PartitionProblem:
    """A problem from plain values; what is given here goes before what they say."""
    files.check_format(value, FORMAT, 1, file)
    wire = files.convert(value, _Wire, file)
    devices = wire.num_devices if num_devices is None else num_devices
    if devices is None:
        fix = "say how many devices there are, with --devices or in the file"
        raise ProblemError("is missing", fix=fix, field="num_devices", file=file)
    try:
        return PartitionProblem(
            wire.nodes,
            wire.edges,
            devices,
            wire.bandwidth if bandwidth is None else bandwidth,
            wire.outputs,
            wire.name,
        )
    except InputError as error:
        raise error.within(file) from None


def _check_machine(problem: PartitionProblem) -> None:
    if not isinstance(problem.num_devices, int) or not 1 <= problem.num_devices <= MAX_DEVICES:
        fix = f"1 to {MAX_DEVICES:,} devices can be planned for"
        raise ProblemError(f"is {problem.num_devices}", fix=fix, field="num_devices")
    bandwidth = problem.bandwidth_bytes_per_s
    if not 1 / LARGEST <= bandwidth <= LARGEST:
        fix = "a positive number of bytes per second is needed"
        raise ProblemError(f"is {bandwidth}", fix=fix, field="bandwidth")


def _check_nodes(problem: PartitionProblem) -> None:
    seen: set[int] = set()
    for index, node in enumerate(problem.nodes):
        if node.id in seen:
            fix = "every node needs an id of its own"
            raise ProblemError(f"{node.id} is there twice", fix=fix, field=f"nodes[{index}].id")
        seen.add(node.id)
        for name in ("fwd_ms", "bwd_ms", "params", "out_bytes"):
            _check_amount(getattr(node, name), f"nodes[{index}].{name}")
    if all(node.is_input for node in problem.nodes):
        fix = f'give at least one node whose type is not "{INPUT}"'
        raise ProblemError("hold nothing to place", fix=fix, field="nodes")
    for index, output in enumerate(problem.outputs):
        if output not in seen:
            fix = "name the id of a node"
            raise ProblemError(f"there is no node {output}", fix=fix, field=f"outputs[{index}]")


def _check_edges(problem: PartitionProblem) -> None:
    inputs = {node.id: node.is_input for node in problem.nodes}
    for index, edge in enumerate(problem.edges):
        for end, name in ((edge.src, "src"), (edge.dst, "dst")):
            if end not in inputs:
                fix = "name the id of a node"
                raise ProblemError(
                    f"there is no node {end}", fix=fix, field=f"edges[{index}].{name}"
                )
        if inputs[edge.dst]:
            fix = f'a node of type "{INPUT}" consumes nothing'
            raise ProblemError(f"{edge.dst} is an input", fix=fix, field=f"edges[{index}].dst")
        for name in ("fwd_bytes", "bwd_bytes"):
            _check_amount(getattr(edge, name), f"edges[{index}].{name}")


def _check_amount(amount: float, field: str) -> None:
    if not 0 <= amount <= LARGEST:  # also refuses NaN
        fix = f"a number from 0 to {LARGEST:g} is needed"
        raise ProblemError(f"is {amount}", fix=fix, field=field)


def _topological_order(problem: PartitionProblem) -> tuple[int, ...]:
    """Node ids, producers first, as near to the file's order as that allows."""
    position = {node.id: index for index, node in enumerate(problem.nodes)}
    consumers: list[list[int]] = [[] for _ in position]
    for edge in problem.edges:
        consumers[position[edge.src]].append(position[edge.dst])
    order, cycle = _sorted_or_cycle(consumers)
    if cycle:
        shown = " -> ".join(str(problem.nodes[index].id) for index in cycle)
        fix = "remove an edge of it"
        raise ProblemError(f"the nodes {shown} form a cycle", fix=fix, field="edges")
    return tuple(problem.nodes[index].id for index in order)


def _stage_cycle(problem: PartitionProblem, stages: dict[int, int]) -> tuple[str, ...]:
    labels = sorted(set(stages.values()))
    position = {stage: index for index, stage in enumerate(labels)}
    consumers: list[list[int]] = [[] for _ in labels]
    for edge in problem.inner_edges:
        src, dst = stages[edge.src], stages[edge.dst]
        if src != dst:
            consumers[position[src]].append(position[dst])
    _, cycle = _sorted_or_cycle(consumers)
    if not cycle:
        return ()
    shown = " -> ".join(str(labels[index]) for index in cycle)
    return (f"the stages {shown} form a cycle: each would wait for the other",)


def _sorted_or_cycle(consumers: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Kahn's order, smallest index first; and, if it cannot be completed, one cycle."""
    missing = [0] * len(consumers)
    for targets in consumers:
        for target in targets:
            missing[target] += 1
    ready = [index for index, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for target in consumers[index]:
            missing[target] -= 1
            if missing[target] == 0:
                heapq.heappush(ready, target)
    if len(order) == len(consumers):
        return order, []
    return order, _one_cycle(consumers, [index for index, count in enumerate(missing) if count])


def _one_cycle(consumers: Sequence[Sequence[int]], stuck: Sequence[int]) -> list[int]:
    """Walk backwards among the nodes that wait for each other until one comes up again."""
    producer = {
        target: index for index in reversed(stuck) for target in consumers[index]
    }  # of a stuck node some producer is stuck as well
    path, seen = [stuck[0]], {stuck[0]: 0}
    while True:
        before = producer[path[-1]]
        if before in seen:
            return [before, *reversed(path[seen[before] :])]
        seen[before] = len(path)
        path.append(before)


def _pairs(mapping: dict[str, int], field: str, file: str) -> tuple[tuple[int, int], ...]:
    pairs = []
    for key, value in mapping.items():
        try:
            pairs.append((int(key), value))
        except ValueError:
            found, fix = f"has the key {key[:40]!r}", "whole numbers are needed"
            raise FileError(found, fix=fix, field=field, file=file) from None
    return tuple(sorted(pairs))
