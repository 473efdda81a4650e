"""Partition: give every node of a model a stage and every stage a device; least busy time wins.

    device time = sum of (fwd_ms + bwd_ms) of its nodes + (bytes sent + received) / bandwidth
    objective   = the largest device time, in ms

Communication: for each producer and each other device that consumes it, its fwd_bytes go there once
and the largest bwd_bytes come back once (where edges to the same device differ in fwd_bytes, the
largest counts). Nodes of type IN are inputs: free, on no device, in no stage.

A device may hold several stages, but the graph of stages must have no cycle. Device times depend on
devices only, and single nodes as stages never form a cycle: so every assignment of devices is valid
with some staging, and `stages_from_devices` gives one with few stages. What may be asked besides:

    memory       no device holds more than its cap: param_bytes + in_flight * activation_bytes
    speeds       times are divided by the device's speed; or nodes have times_ms for every device
    links        bandwidth and latency for every pair; a message costs both ends latency + time
    recompute    the backward runs the forward again: fwd_ms counts twice, and a device keeps the
                 activations of one micro-batch, but for all in flight what it got from others
    num_stages   exactly so many stages; straight: at most one stage on a device

The file (FTPipe's graphs) leaves open how many devices there are; `num_devices`, and `bandwidth`
in bytes/s if it is not 12e9, are given when it is read, or stand in the file.

From devices to stages: nodes come in topological order, with the producers and the device of each;
every function gives groups that can run one after the other, in an order in which they can run,
each in topological order.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from partita import files
from partita.errors import FileError, InputError, ProblemError
from partita.problems.dag import sorted_or_cycle
from partita.units import size

LARGEST = 1e100  # beyond it sums overflow
MAX_DEVICES = 1_000_000
FORMAT = "partition-problem"
INPUT = "IN"
BANDWIDTH_BYTES_PER_S = 12e9


def check_machine(problem: "PartitionProblem") -> None:
    """Refuse devices, links or options that cannot be."""
    if not isinstance(problem.num_devices, int) or not 1 <= problem.num_devices <= MAX_DEVICES:
        fix = f"1 to {MAX_DEVICES:,} devices can be planned for"
        raise ProblemError(f"is {problem.num_devices}", fix=fix, field="num_devices")
    check_positive(
        problem.bandwidth_bytes_per_s, "bandwidth", "a positive number of bytes per second"
    )
    _check_length(problem.memory_bytes, problem, "memory")
    for index, cap in enumerate(problem.memory_bytes):
        _check_amount(cap, f"memory[{index}]")
    _check_length(problem.speeds, problem, "speeds")
    for index, speed in enumerate(problem.speeds):
        check_positive(speed, f"speeds[{index}]", "a positive factor")
    if problem.links is not None:
        _check_links(problem)
    for count, name in ((problem.in_flight, "in_flight"), (problem.num_stages, "num_stages")):
        if count is not None and (not isinstance(count, int) or not 1 <= count <= MAX_DEVICES):
            fix = f"a whole number from 1 to {MAX_DEVICES:,} is needed"
            raise ProblemError(f"is {count}", fix=fix, field=name)


def _check_links(problem: "PartitionProblem") -> None:
    links = problem.links
    assert links is not None
    for table, name in ((links.bandwidth, "bandwidth"), (links.latency_s, "latency_s")):
        if not table and name == "latency_s":
            continue
        field = f"links.{name}"
        _check_length(table, problem, field, needed=True)
        for index, row in enumerate(table):
            _check_length(row, problem, f"{field}[{index}]", needed=True)
            for other, value in enumerate(row):
                where = f"{field}[{index}][{other}]"
                if index == other:
                    continue  # nothing is sent to oneself
                if name == "bandwidth":
                    check_positive(value, where, "a positive number of bytes per second")
                else:
                    _check_amount(value, where)


def _check_length(
    values: Sequence[object], problem: "PartitionProblem", field: str, needed: bool = False
) -> None:
    if (values or needed) and len(values) != problem.num_devices:
        fix = f"one entry per device is needed: {problem.num_devices}"
        raise ProblemError(f"has {len(values)} entries", fix=fix, field=field)


def check_positive(value: float, field: str, needed: str) -> None:
    """Refuse what is not a positive number of a sane size."""
    if not 1 / LARGEST <= value <= LARGEST:
        raise ProblemError(f"is {value}", fix=f"{needed} is needed", field=field)


def check_nodes(problem: "PartitionProblem") -> None:
    """Refuse ids that are there twice and amounts that make no sense."""
    seen: set[int] = set()
    for index, node in enumerate(problem.nodes):
        if node.id in seen:
            fix = "every node needs an id of its own"
            raise ProblemError(f"{node.id} is there twice", fix=fix, field=f"nodes[{index}].id")
        seen.add(node.id)
        for name in ("fwd_ms", "bwd_ms", "params", "out_bytes", "param_bytes", "activation_bytes"):
            _check_amount(getattr(node, name), f"nodes[{index}].{name}")
        _check_times(problem, node, f"nodes[{index}].times_ms")
    if all(node.is_input for node in problem.nodes):
        fix = 'give at least one node whose type is not "IN"'
        raise ProblemError("hold nothing to place", fix=fix, field="nodes")
    for index, output in enumerate(problem.outputs):
        if output not in seen:
            fix = "name the id of a node"
            raise ProblemError(f"there is no node {output}", fix=fix, field=f"outputs[{index}]")


def _check_times(problem: "PartitionProblem", node: "PartitionNode", field: str) -> None:
    if not node.times_ms:
        return
    if problem.speeds:
        fix = "leave out one of them: a time per device already says how fast it is"
        raise ProblemError("are there as well as speeds", fix=fix, field=field)
    _check_length(node.times_ms, problem, field)
    for device, pair in enumerate(node.times_ms):
        for ms in pair:
            _check_amount(ms, f"{field}[{device}]")


def check_edges(problem: "PartitionProblem") -> None:
    """Refuse edges between nodes that are not there."""
    inputs = {node.id: node.is_input for node in problem.nodes}
    for index, edge in enumerate(problem.edges):
        for end, name in ((edge.src, "src"), (edge.dst, "dst")):
            if end not in inputs:
                fix = "name the id of a node"
                raise ProblemError(
                    f"there is no node {end}", fix=fix, field=f"edges[{index}].{name}"
                )
        if inputs[edge.dst]:
            fix = 'a node of type "IN" consumes nothing'
            raise ProblemError(f"{edge.dst} is an input", fix=fix, field=f"edges[{index}].dst")
        for name in ("fwd_bytes", "bwd_bytes"):
            _check_amount(getattr(edge, name), f"edges[{index}].{name}")


def _check_amount(amount: float, field: str) -> None:
    if not 0 <= amount <= LARGEST:  # also refuses NaN
        fix = f"a number from 0 to {LARGEST:g} is needed"
        raise ProblemError(f"is {amount}", fix=fix, field=field)


def device_groups(
    order: list[int], producers: dict[int, list[int]], device_of: dict[int, int]
) -> list[list[int]]:
    """The nodes of each device, producing devices first if that is possible."""
    devices = sorted({device_of[node] for node in order})
    place = {device: index for index, device in enumerate(devices)}
    consumers: list[list[int]] = [[] for _ in devices]
    for node in order:
        here = place[device_of[node]]
        for src in producers[node]:
            if place[device_of[src]] != here:
                consumers[place[device_of[src]]].append(here)
    ascending, cycle = sorted_or_cycle(consumers)
    ranks = range(len(devices)) if cycle else ascending
    members: dict[int, list[int]] = {device: [] for device in devices}
    for node in order:
        members[device_of[node]].append(node)
    return [members[devices[rank]] for rank in ranks]


def level_groups(
    order: list[int], producers: dict[int, list[int]], device_of: dict[int, int]
) -> list[list[int]]:
    """A level of a device is a stage.

    A node's level is one more than that of a producer on another device and no less than that of
    one on its own, so an edge between two stages always climbs.
    """
    level: dict[int, int] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    for node in order:
        here = device_of[node]
        climbs = [level[src] + (device_of[src] != here) for src in producers[node]]
        level[node] = max(climbs, default=0)
        groups.setdefault((level[node], here), []).append(node)
    return [groups[key] for key in sorted(groups)]


def run_groups(
    order: list[int], producers: dict[int, list[int]], device_of: dict[int, int]
) -> list[list[int]]:
    """One device after the other runs all it can; the one with most nodes ready is next."""
    consumers: dict[int, list[int]] = {node: [] for node in order}
    missing = {node: len(producers[node]) for node in order}
    for node in order:
        for src in producers[node]:
            consumers[src].append(node)
    ready: dict[int, list[int]] = {device_of[node]: [] for node in order}
    for node in reversed(order):
        if not missing[node]:
            ready[device_of[node]].append(node)
    groups: list[list[int]] = []
    left = len(order)
    while left:
        device = max(sorted(ready), key=lambda each: len(ready[each]))
        group = []
        while ready[device]:
            node = ready[device].pop()
            group.append(node)
            for consumer in consumers[node]:
                missing[consumer] -= 1
                if not missing[consumer]:
                    ready[device_of[consumer]].append(consumer)
        groups.append(group)
        left -= len(group)
    return groups


def cut_up(groups: list[list[int]], count: int) -> list[list[int]]:
    """The longest groups cut in two until there are `count`, or single nodes."""
    pieces = list(groups)
    while len(pieces) < count:
        longest = max(range(len(pieces)), key=lambda index: (len(pieces[index]), -index))
        whole = pieces[longest]
        if len(whole) == 1:
            break
        pieces[longest : longest + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return pieces


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
    param_bytes: int = 0  # held for its parameters, with their gradients and optimizer states
    activation_bytes: int = 0  # kept from its forward to its backward, for one micro-batch
    times_ms: tuple[tuple[float, float], ...] = ()  # forward and backward on every device

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
class PartitionLinks:
    """Bytes per second and latency from every device to every other; one row per sender."""

    bandwidth: tuple[tuple[float, ...], ...]
    latency_s: tuple[tuple[float, ...], ...] = ()

    @property
    def uniform(self) -> bool:
        """Are all pairs of devices joined alike?"""
        return all(
            len({value for i, row in enumerate(table) for j, value in enumerate(row) if i != j})
            <= 1
            for table in (self.bandwidth, self.latency_s)
        )


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
    """A model's nodes with their times, its edges with their bytes, and the devices."""

    nodes: tuple[PartitionNode, ...]
    edges: tuple[PartitionEdge, ...]
    num_devices: int
    bandwidth_bytes_per_s: float = BANDWIDTH_BYTES_PER_S
    outputs: tuple[int, ...] = ()
    name: str = ""
    memory_bytes: tuple[float, ...] = ()  # the cap of every device; none: no cap
    speeds: tuple[float, ...] = ()  # of every device; none: all 1
    links: PartitionLinks | None = None  # instead of one bandwidth for all
    recompute: bool = False
    in_flight: int = 1  # micro-batches whose activations a device holds at once
    num_stages: int | None = None  # None: as many as it takes
    straight: bool = False
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_machine(self)
        check_nodes(self)
        check_edges(self)
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

    @property
    def alike(self) -> bool:
        """Are all devices the same, so that renaming them changes nothing?"""
        return (
            (self.links is None or self.links.uniform)
            and len(set(self.speeds)) <= 1
            and len(set(self.memory_bytes)) <= 1
            and not any(node.times_ms for node in self.nodes)
        )

    def node_ms(self, node: PartitionNode, device: int) -> float:
        """How long a node keeps a device busy."""
        fwd, bwd = node.times_ms[device] if node.times_ms else (node.fwd_ms, node.bwd_ms)
        speed = self.speeds[device] if self.speeds else 1.0
        return (fwd + bwd + (fwd if self.recompute else 0.0)) / speed

    def node_bytes(self, node: PartitionNode) -> int:
        """What a device holds for a node."""
        kept = 1 if self.recompute else self.in_flight
        return node.param_bytes + kept * node.activation_bytes

    def message_ms(self, src: int, dst: int, sent_bytes: float) -> float:
        """How long a message keeps its sender and its receiver busy; none without bytes."""
        if self.links is None or sent_bytes == 0:
            return sent_bytes / self.bandwidth_bytes_per_s * 1e3
        latency_s = self.links.latency_s[src][dst] if self.links.latency_s else 0.0
        return (latency_s + sent_bytes / self.links.bandwidth[src][dst]) * 1e3

    def to_json(self) -> dict[str, Any]:
        """As plain values, devices and bandwidth included; what is not used is left out."""
        value: dict[str, Any] = {
            "format": f"partita/{FORMAT}@1",
            "name": self.name,
            "num_devices": self.num_devices,
            "bandwidth": self.bandwidth_bytes_per_s,
            "outputs": list(self.outputs),
            "nodes": [_used_fields(node) for node in self.nodes],
            "edges": [_used_fields(edge) for edge in self.edges],
        }
        if self.memory_bytes:
            value["memory"] = list(self.memory_bytes)
        if self.links is not None:
            value["links"] = _used_fields(self.links)
        for each in fields(self)[7:]:
            if each.init and getattr(self, each.name) != each.default and each.name != "links":
                value[each.name] = getattr(self, each.name)
        return value


def _used_fields(record: Any) -> dict[str, Any]:
    """The fields of a record, without those added later that it does not use."""
    late = ("param_bytes", "activation_bytes", "times_ms", "latency_s")
    return {
        each.name: getattr(record, each.name)
        for each in fields(record)
        if each.name not in late or getattr(record, each.name)
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
    return (
        tuple(twice + wrong)
        or _stage_cycle(problem, stages)
        or (*_wrong_stages(problem, stages, devices), *_over_memory(problem, stages, devices))
    )


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
        times[device_of[node.id]] += problem.node_ms(node, device_of[node.id])
    for (producer, there), (fwd, bwd) in _moved(problem, device_of).items():
        home = device_of[producer]
        ms = problem.message_ms(home, there, fwd) + problem.message_ms(there, home, bwd)
        times[home] += ms
        times[there] += ms
    return times


def device_bytes(problem: PartitionProblem, device_of: dict[int, int]) -> list[int]:
    """What every device holds, given the device of every node that is no input."""
    held = [0] * problem.num_devices
    for node in problem.placed:
        held[device_of[node.id]] += problem.node_bytes(node)
    if problem.recompute:
        for (_, there), (fwd, _) in _moved(problem, device_of).items():
            held[there] += problem.in_flight * fwd
    return held


def _moved(
    problem: PartitionProblem, device_of: dict[int, int]
) -> dict[tuple[int, int], tuple[int, int]]:
    """Bytes there and back, by producer and consuming device."""
    moved: dict[tuple[int, int], tuple[int, int]] = {}
    for edge in problem.inner_edges:
        there = device_of[edge.dst]
        if device_of[edge.src] != there:
            fwd, bwd = moved.get((edge.src, there), (0, 0))
            moved[edge.src, there] = max(fwd, edge.fwd_bytes), max(bwd, edge.bwd_bytes)
    return moved


def lower_bound(problem: PartitionProblem) -> float:
    """No device is done before its longest node, and some device has its share of all work.

    On heterogeneous devices: whatever weights w the devices get, their weighted mean is no more
    than the largest time, and a node adds at least its least w[d] * time[d]; w is each device's
    mean speed.
    """
    placed = problem.placed
    if problem.alike:
        times = [problem.node_ms(node, 0) for node in placed]
        return max(max(times), math.fsum(times) / problem.num_devices)
    table = [[problem.node_ms(node, d) for d in range(problem.num_devices)] for node in placed]
    totals = [math.fsum(column) for column in zip(*table, strict=True)]
    longest = max(min(row) for row in table)
    if min(totals) == 0:
        return longest
    weights = [totals[0] / total for total in totals]
    least = (min(w * ms for w, ms in zip(weights, row, strict=True)) for row in table)
    return max(longest, math.fsum(least) / math.fsum(weights) * (1 - 1e-12))


def infeasible(problem: PartitionProblem) -> str:
    """Why no solution can exist, in words and with what would fit; empty if that is not plain."""
    count, stages = len(problem.placed), problem.num_stages
    if stages is not None and stages > count:
        return f"{count} nodes cannot form {stages} stages; ask for at most {count}"
    if problem.straight and stages is not None and stages > problem.num_devices:
        return (
            f"a straight pipeline of {stages} stages needs as many devices, and there are "
            f"{problem.num_devices}; ask for at most {problem.num_devices} stages"
        )
    if not problem.memory_bytes:
        return ""
    heaviest = max(problem.placed, key=problem.node_bytes)
    needed, largest = problem.node_bytes(heaviest), max(problem.memory_bytes)
    if needed > largest:
        scope = f" ({heaviest.scope})" if heaviest.scope else ""
        return (
            f"node {heaviest.id}{scope} alone needs {size(needed)} and no device has more than "
            f"{size(largest)}; a device needs at least {size(needed)}, or the node must be cut up"
        )
    total, there = sum(map(problem.node_bytes, problem.placed)), sum(problem.memory_bytes)
    if total > there:
        return (
            f"all nodes need {size(total)} and the {problem.num_devices} devices have "
            f"{size(there)}; at least {size(total / problem.num_devices)} each, or "
            f"{math.ceil(total / largest)} devices of {size(largest)}, would be needed"
        )
    return ""


def stages_from_devices(problem: PartitionProblem, device_of: dict[int, int]) -> PartitionSolution:
    """The assignment of devices to nodes with stages that form no cycle, few of them.

    A straight pipeline has one stage per device, which may form a cycle: `check` says so. Where a
    number of stages is asked for and there are fewer, some are cut in two.
    """
    producers: dict[int, list[int]] = {node.id: [] for node in problem.nodes}
    for edge in problem.inner_edges:
        producers[edge.dst].append(edge.src)
    order = [node.id for node in problem.placed]
    if problem.straight:
        groups = device_groups(order, producers, device_of)
    else:
        by_level = level_groups(order, producers, device_of)
        by_run = run_groups(order, producers, device_of)
        groups = by_run if len(by_run) < len(by_level) else by_level
    return _solution_of_groups(problem, groups, device_of)


def solution_of_stages(
    problem: PartitionProblem, stage_of: dict[int, int], device_of: dict[int, int]
) -> PartitionSolution:
    """The solution of a stage and a device for every node, without the stages that are empty."""
    members: dict[int, list[int]] = {}
    for node in problem.placed:
        members.setdefault(stage_of[node.id], []).append(node.id)
    return _solution_of_groups(problem, [members[stage] for stage in sorted(members)], device_of)


def _solution_of_groups(
    problem: PartitionProblem, groups: list[list[int]], device_of: dict[int, int]
) -> PartitionSolution:
    if problem.num_stages is not None and not problem.straight:
        groups = cut_up(groups, problem.num_stages)
    pairs = ((node, stage) for stage, group in enumerate(groups) for node in group)
    return PartitionSolution(
        tuple(sorted(pairs)),
        tuple((stage, device_of[group[0]]) for stage, group in enumerate(groups)),
    )


@dataclass(frozen=True, slots=True)
class _PartitionWire:
    nodes: tuple[PartitionNode, ...]
    edges: tuple[PartitionEdge, ...]
    outputs: tuple[int, ...] = ()
    name: str = ""
    num_devices: int | None = None
    bandwidth: float = BANDWIDTH_BYTES_PER_S
    memory: float | tuple[float, ...] = ()
    speeds: tuple[float, ...] = ()
    links: PartitionLinks | None = None
    recompute: bool = False
    in_flight: int = 1
    num_stages: int | None = None
    straight: bool = False


@dataclass(frozen=True, slots=True)
class _SolutionWire:
    stage_of: dict[str, int]
    device_of: dict[str, int]


def read(path: str | Path, **given: Any) -> PartitionProblem:
    """Read a problem from JSON; options as of `from_json`."""
    return from_json(files.decode_json(files.read_bytes(path), str(path)), str(path), **given)


def from_json(
    value: dict[str, Any],
    file: str = "",
    *,
    num_devices: int | None = None,
    bandwidth: float | None = None,
    memory: float | tuple[float, ...] | None = None,
    num_stages: int | None = None,
    straight: bool | None = None,
    recompute: bool | None = None,
) -> PartitionProblem:
    """A problem from plain values; what is given here goes before what they say."""
    files.check_format(value, FORMAT, 1, file)
    wire = files.convert(value, _PartitionWire, file)
    devices = wire.num_devices if num_devices is None else num_devices
    if devices is None:
        fix = "say how many devices there are, with --devices or in the file"
        raise ProblemError("is missing", fix=fix, field="num_devices", file=file)
    caps = wire.memory if memory is None else memory
    if not isinstance(caps, tuple):
        caps = (caps,) * devices if isinstance(devices, int) else (caps,)
    try:
        return PartitionProblem(
            wire.nodes,
            wire.edges,
            devices,
            wire.bandwidth if bandwidth is None else bandwidth,
            wire.outputs,
            wire.name,
            caps,
            wire.speeds,
            wire.links,
            wire.recompute if recompute is None else recompute,
            wire.in_flight,
            wire.num_stages if num_stages is None else num_stages,
            wire.straight if straight is None else straight,
        )
    except InputError as error:
        raise error.within(file) from None


def _topological_order(problem: PartitionProblem) -> tuple[int, ...]:
    """Node ids, producers first, as near to the file's order as that allows."""
    position = {node.id: index for index, node in enumerate(problem.nodes)}
    consumers: list[list[int]] = [[] for _ in position]
    for edge in problem.edges:
        consumers[position[edge.src]].append(position[edge.dst])
    order, cycle = sorted_or_cycle(consumers)
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
    _, cycle = sorted_or_cycle(consumers)
    if not cycle:
        return ()
    shown = " -> ".join(str(labels[index]) for index in cycle)
    return (f"the stages {shown} form a cycle: each would wait for the other",)


def _wrong_stages(
    problem: PartitionProblem, stages: dict[int, int], devices: dict[int, int]
) -> list[str]:
    """Too many stages, too few, or several on a device of a straight pipeline."""
    used = sorted(set(stages.values()))
    wrong = []
    if problem.num_stages is not None and len(used) != problem.num_stages:
        wrong.append(f"there are {len(used)} stages, and {problem.num_stages} are asked for")
    if problem.straight:
        counts = Counter(devices[stage] for stage in used)
        wrong += [
            f"device {device} has {count} stages, and a straight pipeline has one on each"
            for device, count in sorted(counts.items())
            if count > 1
        ]
    return wrong


def _over_memory(
    problem: PartitionProblem, stages: dict[int, int], devices: dict[int, int]
) -> list[str]:
    if not problem.memory_bytes:
        return []
    held = device_bytes(problem, {node: devices[stage] for node, stage in stages.items()})
    return [
        f"device {device} holds {size(needed)} and has {size(cap)}"
        for device, (needed, cap) in enumerate(zip(held, problem.memory_bytes, strict=True))
        if needed > cap
    ]


def _pairs(mapping: dict[str, int], field: str, file: str) -> tuple[tuple[int, int], ...]:
    pairs = []
    for key, value in mapping.items():
        try:
            pairs.append((int(key), value))
        except ValueError:
            wrong, fix = f"has the key {key[:40]!r}", "whole numbers are needed"
            raise FileError(wrong, fix=fix, field=field, file=file) from None
    return tuple(sorted(pairs))
