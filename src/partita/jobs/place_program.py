"""From a placement to the program that runs it: our own rules for a step on heterogeneous devices.

Every device is a lane, every direction of a link (or every medium that links share) is one. Every
op of the training graph is a task on the device of its layer, once per batch. A tensor read on
another device is sent once to it: a task that holds the links of its route for bytes / narrowest
bandwidth, and is received a latency later; where the route passes through a device, the next piece
starts when that device has all of it. Transfers and compute overlap.

Weight gradients are tasks of their own that nobody downstream waits for; gradients of several
batches are added up in place; then each layer's parameters are updated in one kernel. A parameter
read on several devices is updated where it is read first, and sent from there to the others.

Memory is taken when a tensor's maker (or its transfer) starts and given back when the last reader
on that device ends. Parameters, optimizer states and the workspace are held throughout, and so
are gradients where several batches share them.

A placement says where, not when. Four rules of dispatch are tried (`DISPATCHES`); the engine runs
each, and the verifier checks the timeline that is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from partita.costs.memory import workspace_bytes
from partita.costs.placement import PlacedOp, PlacementModel
from partita.engine import run
from partita.graph.record import Op
from partita.program import F64, Kind, Memory, Program, ProgramBuilder
from partita.timeline import Timeline
from partita.verify import check_timeline

KINDS = {"forward": Kind.FORWARD, "dgrad": Kind.DGRAD, "wgrad": Kind.WGRAD, "update": Kind.UPDATE}
Wait = tuple[int, float]


@dataclass(slots=True)
class _Task:
    block: str
    lanes: tuple[int, ...]
    seconds: float
    waits: list[Wait]
    kind: Kind
    batch: int = -1
    effects: dict[int, list[float]] = field(default_factory=dict)  # memory -> [at start, at end]

    def take(self, memory: int, amount: float) -> None:
        """More of a memory from the start on."""
        self.effects.setdefault(memory, [0.0, 0.0])[0] += amount

    def give(self, memory: int, amount: float) -> None:
        """Back at the end."""
        self.effects.setdefault(memory, [0.0, 0.0])[1] -= amount


@dataclass(slots=True)
class _Buffer:
    """A tensor on a device: when it is there, what it occupies, who reads it."""

    ready: Wait
    device: int
    size_bytes: float
    users: list[int] = field(default_factory=list)
    kept: bool = False


def lower_placement(
    model: PlacementModel, placement: Sequence[int], batches: int = 1, in_flight: int = 1
) -> Program:
    """The program of a placement: a device per layer of the model."""
    return _PlacementLowering(model, placement, batches, in_flight).run()


def simulate_placement(
    model: PlacementModel, placement: Sequence[int], batches: int = 1, in_flight: int = 1
) -> tuple[Timeline, str]:
    """The fastest of the dispatch rules that fits the memory, verified, and its name."""
    program = lower_placement(model, placement, batches, in_flight)
    tried = [(rule(program), name) for name, rule in DISPATCHES.items()]
    timeline, name = min(tried, key=lambda item: (_excess(item[0]), item[0].makespan))
    # Too much memory is an answer, not a mistake: everything else must hold.
    caps = program if _excess(timeline) == 0 else _without_caps(program)
    check_timeline(caps, timeline)
    return timeline, name


def excess_bytes(timeline: Timeline) -> float:
    """Bytes over the capacities of all memories together."""
    return _excess(timeline)


def _excess(timeline: Timeline) -> float:
    return sum(
        max(0.0, float(peak) - memory.capacity)
        for peak, memory in zip(timeline.peaks(), timeline.program.memories, strict=True)
        if memory.capacity is not None
    )


def _without_caps(program: Program) -> Program:
    return replace(program, memories=tuple(Memory(memory.name) for memory in program.memories))


# --- dispatch -----------------------------------------------------------------------------------


def _in_order_of_arrival(program: Program) -> Timeline:
    return run(program, "fifo")


def _longest_first(program: Program) -> Timeline:
    """What the longest chain of tasks waits for goes first."""
    return run(replace(program, priority=_tails(program)), "priority")


def _earliest_first(program: Program) -> Timeline:
    """Earlier batches go first; within one, what the longest chain waits for."""
    return run(replace(program, priority=_by_batch(program)), "priority")


def _weights_last(program: Program) -> Timeline:
    """The same, but weight gradients only while nothing else can be done, as in zero bubble."""
    late = np.where(program.kind == Kind.WGRAD, 2.0 * (program.num_tasks + 1), 0.0)
    return run(replace(program, priority=_by_batch(program) - late), "priority")


DISPATCHES: dict[str, Callable[[Program], Timeline]] = {
    "longest path first": _longest_first,
    "earliest batch first": _earliest_first,
    "weight gradients last": _weights_last,
    "first come first served": _in_order_of_arrival,
}


def _by_batch(program: Program) -> F64:
    """A whole number per batch, and within it the tail as a part of the longest."""
    tails = _tails(program)
    top = float(tails.max(initial=0.0)) or 1.0
    return tails / top - 2.0 * program.microbatch


def _tails(program: Program) -> F64:
    """The longest time from each task's start to the end of all.

    Every task has a lower index than those that wait for it, so one pass backwards is enough.
    """
    duration = program.duration.tolist()
    starts, others = program.wait_start.tolist(), program.wait_on.tolist()
    delays = program.wait_delay.tolist()
    tail = [0.0] * program.num_tasks
    for task in range(program.num_tasks - 1, -1, -1):
        length = duration[task] + tail[task]
        tail[task] = length
        for entry in range(starts[task], starts[task + 1]):
            other = others[entry]
            tail[other] = max(tail[other], length + delays[entry])
    return np.array(tail)


# --- lowering -----------------------------------------------------------------------------------


class _PlacementLowering:
    def __init__(
        self, model: PlacementModel, placement: Sequence[int], batches: int, in_flight: int
    ) -> None:
        self.model, self.graph, self.cluster = model, model.graph, model.cluster
        self.placement, self.batches, self.in_flight = placement, batches, in_flight
        self.used = sorted(set(placement))
        self.lane = {device: index for index, device in enumerate(self.used)}
        self.links: dict[str, int] = {}  # medium -> lane
        self.tasks: list[_Task] = []
        self.pairs: list[tuple[int, int]] = []  # (send, receive)
        self.buffers: dict[tuple[str, int], _Buffer] = {}  # of the batch at hand
        self.gradients: dict[str, list[Wait]] = {}  # at the parameter's home, one per batch
        self.home: dict[str, int] = {}  # tensor -> the device that makes it
        self.outputs = frozenset(self.graph.outputs)
        self.made: list[_Buffer] = []
        self.ends: list[list[int]] = []  # per batch the tasks of its backward
        self.updates = {op.inputs[1]: op for op in self.graph.ops if op.phase == "update"}
        self.readers = self._parameter_readers()
        self.index = {op.name: number for number, op in enumerate(self.graph.ops)}

    def run(self) -> Program:
        start = self._add(_Task("parameters, states and workspace", (), 0.0, [], Kind.OTHER))
        for device in self.used:
            self.tasks[start].take(self.lane[device], self._static_bytes(device))
        for batch in range(self.batches):
            admitted = self._admit(batch, start)
            self.buffers, self.ends = {}, [*self.ends, []]
            for step in self.model.steps:
                self._run_step(step, batch, admitted)
        self._update(start)
        self._release()
        return self._build()

    def _admit(self, batch: int, start: int) -> int:
        """A batch begins when one so many places before it has ended."""
        before = batch - self.in_flight
        if before < 0:
            return start
        waits = [(task, 0.0) for task in self.ends[before]]
        return self._add(_Task(f"batch {before} is done", (), 0.0, waits, Kind.OTHER))

    def _run_step(self, step: PlacedOp, batch: int, admitted: int) -> None:
        device = self.placement[step.layer]
        inputs = [self._here(name, device, batch) for name in step.reads]
        waits = _merged([buffer.ready for buffer in inputs]) or [(admitted, 0.0)]
        lanes = (self.lane[device],)
        task = _Task(step.name, lanes, step.seconds[device], waits, KINDS[step.phase], batch)
        number = self._add(task)
        for buffer in inputs:
            buffer.users.append(number)
        self.ends[batch].append(number)
        view = inputs[0] if inputs and step.free else None
        for name, size in step.makes:
            self._make(name, size, number, device, view)

    def _make(self, name: str, size: float, task: int, device: int, view: _Buffer | None) -> None:
        self.home[name] = device
        if view is not None:
            # Who reads the view reads what it is a view of, once that is made.
            self.buffers[name, device] = _View((task, 0.0), device, 0.0, view.users)
            return
        shared = name in self.updates and self.batches > 1  # added up in place
        buffer = _Buffer((task, 0.0), device, 0.0 if shared else size)
        buffer.kept = name in self.outputs
        self.buffers[name, device] = buffer
        if buffer.size_bytes:
            self.tasks[task].take(self.lane[device], buffer.size_bytes)
            self.made.append(buffer)
        if name in self.updates:
            self.gradients.setdefault(name, []).append((task, 0.0))

    def _here(self, name: str, device: int, batch: int) -> _Buffer:
        """A computed tensor on the device that reads it, sent there if need be."""
        buffer = self.buffers.get((name, device))
        if buffer is None:
            source = self.buffers[name, self.home[name]]
            buffer = self.buffers[name, device] = self._send(name, source, device, batch)
        return buffer

    def _send(self, name: str, source: _Buffer, target: int, batch: int) -> _Buffer:
        size = float(self.graph.tensor(name).size_bytes)
        ready, first = self._transfer(name, size, source.ready, source.device, target, batch)
        source.users.append(first)
        buffer = _Buffer(ready, target, size)
        self.tasks[first].take(self.lane[target], size)
        self.made.append(buffer)
        return buffer

    def _transfer(
        self, name: str, size: float, ready: Wait, source: int, target: int, batch: int
    ) -> tuple[Wait, int]:
        """Tasks along the route: (when it has arrived, the first task)."""
        label = f"{name} to {self.cluster.devices[target].name}"
        first = len(self.tasks)
        for number, piece in enumerate(self.model.segments(source, target)):
            lanes = tuple(sorted({self._link(link) for link in piece.links}))
            block = label if number == 0 else f"{label}, hop {number + 1}"
            sent = _Task(block, lanes, size / piece.bytes_per_s, [ready], Kind.SEND, batch)
            send = self._add(sent)
            arrival = _Task(block, (), 0.0, [(send, piece.latency_s)], Kind.RECEIVE, batch)
            ready = (self._add(arrival), 0.0)
            self.pairs.append((send, ready[0]))
        return ready, first

    def _update(self, start: int) -> None:
        """One kernel per layer once its gradients are there; then copies elsewhere follow."""
        by_layer: dict[int, list[Op]] = {}
        for op in self.updates.values():
            by_layer.setdefault(self.model.layer_of[op.name], []).append(op)
        for layer in sorted(by_layer):
            device = self.placement[layer]
            waits, seconds = [], 0.0
            for op in by_layer[layer]:
                waits += self._gradient(op.inputs[1], device)
                seconds += float(self.model.seconds[self.index[op.name], device])
            name = f"update of {self.model.layers[layer][0]}"
            lanes = (self.lane[device],)
            merged = _merged(waits) or [(start, 0.0)]
            number = self._add(_Task(name, lanes, seconds, merged, Kind.UPDATE))
            for op in by_layer[layer]:
                buffer = self.buffers.get((op.inputs[1], device))
                if buffer is not None:
                    buffer.users.append(number)
                self._synchronise(op.inputs[0], number, device)

    def _gradient(self, name: str, device: int) -> list[Wait]:
        """Waits for a parameter's gradient, from every batch."""
        gradient = self.gradients[name]
        last = self._here(name, device, self.batches - 1)
        return [*gradient[:-1], last.ready]

    def _synchronise(self, parameter: str, updated: int, home: int) -> None:
        size = float(self.graph.tensor(parameter).size_bytes)
        for device in sorted(self.readers[parameter] - {home}):
            self._transfer(parameter, size, (updated, 0.0), home, device, -1)

    # Memory.

    def _static_bytes(self, device: int) -> float:
        total = workspace_bytes(self.cluster.kind_of(device))
        for tensor in self.graph.parameters:
            if device in self.readers.get(tensor.name, ()):
                total += tensor.size_bytes
        for gradient, op in self.updates.items():
            if self.batches > 1 and device in self.readers[op.inputs[0]]:
                total += self.graph.tensor(gradient).size_bytes
            if self._device(op) == device:
                total += sum(self.graph.tensor(name).size_bytes for name in op.inputs[2:])
        return total

    def _release(self) -> None:
        """Give back at the end of the only reader, or when all of several have ended."""
        for number, buffer in enumerate(self.made):
            users = sorted(set(buffer.users)) or [buffer.ready[0]]
            if buffer.kept:
                continue
            memory = self.lane[buffer.device]
            if len(users) == 1:
                self.tasks[users[0]].give(memory, buffer.size_bytes)
            else:
                waits = [(task, 0.0) for task in users]
                done = _Task(f"release {number}", (), 0.0, waits, Kind.OTHER)
                done.give(memory, buffer.size_bytes)
                self._add(done)

    # Small things.

    def _device(self, op: Op) -> int:
        return self.placement[self.model.layer_of[op.name]]

    def _parameter_readers(self) -> dict[str, set[int]]:
        parameter_readers: dict[str, set[int]] = {}
        for op in self.graph.ops:
            if op.phase == "forward":
                for name in op.inputs:
                    if self.graph.tensor(name).role == "parameter":
                        parameter_readers.setdefault(name, set()).add(self._device(op))
        return parameter_readers

    def _link(self, link: int) -> int:
        this_link = self.cluster.links[link]
        medium = this_link.lane or f"{this_link.source} → {this_link.target}"
        return self.links.setdefault(medium, len(self.used) + len(self.links))

    def _add(self, task: _Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _build(self) -> Program:
        builder = ProgramBuilder()
        for device in self.used:
            builder.lane(self.cluster.devices[device].name, "device")
            capacity = float(self.cluster.kind_of(device).memory_bytes)
            builder.memory(self.cluster.devices[device].name, capacity)
        for medium in self.links:
            builder.lane(medium, "link")
        for task in self.tasks:
            effects = [(memory, a, b) for memory, (a, b) in sorted(task.effects.items())]
            builder.add(
                task.block, task.lanes, task.seconds, task.waits, effects, task.kind, task.batch
            )  # fmt: skip
        for send, receive in self.pairs:
            builder.pair(send, receive)
        return builder.build()


class _View(_Buffer):
    """Occupies nothing; its readers are readers of what it is a view of."""


def _merged(waits: list[Wait]) -> list[Wait]:
    """Each task once, with its longest delay."""
    if len(waits) < 2:
        return waits
    total: dict[int, float] = {}
    for task, delay in waits:
        total[task] = max(delay, total.get(task, 0.0))
    return sorted(total.items())
