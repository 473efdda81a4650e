"""From a plan to the program that runs it: every device computes its share, collectives between.

Each device has a compute lane and a network lane. An op of the training graph becomes one task per
device; where a tensor does not lie as the next op needs it, a collective per line of the mesh axis
moves it: summands are added (all-reduce, reduce-scatter), shares gathered or exchanged. Parameter
gradients are synchronised in buckets while the backward goes on, then the optimizer runs.

Memory is taken where a tensor is made and given back after its last use, on every device.
Devices that do the same are drawn once: beyond `MAX_DRAWN` only one per device kind is lowered,
while collectives still cost what they cost among all.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from partita.cluster import Cluster
from partita.costs.collectives import Collectives, Groups
from partita.costs.layouts import Layout, conversion, num_shards
from partita.costs.memory import workspace_bytes
from partita.costs.roofline import OpCost, Split, op_cost
from partita.costs.sharding import ways_of
from partita.errors import PlanError
from partita.graph.dtypes import dtype_bytes
from partita.graph.loops import loop_nest
from partita.graph.record import Call, Graph, Op, Tensor
from partita.graph.splits import (
    PARTIAL,
    REPLICATE,
    Placement,
    check_split,
    communication,
    placements,
)
from partita.graph.traffic import VIEWS, passes_through
from partita.plans import Stage
from partita.program import Kind, Program, ProgramBuilder

MAX_DRAWN = 16
BUCKET_BYTES = 25 * 1024 * 1024
STAT_BYTES = 4
PREFETCH = 2  # parameters are gathered this many layers ahead of their use

Ready = dict[int, list[int]]  # per device the tasks to wait for
Made = dict[int, int]  # per device the task that makes something
PHASE_KINDS = {
    "forward": Kind.FORWARD,
    "dgrad": Kind.DGRAD,
    "wgrad": Kind.WGRAD,
    "update": Kind.UPDATE,
}


@dataclass(eq=False)
class Buffer:
    """A tensor in one layout: which task makes it on each device, and what it occupies."""

    name: str
    layout: Layout
    size_bytes: float
    made_by: Made = field(default_factory=dict)
    root: "Buffer | None" = None  # views occupy nothing of their own
    last_use: Made = field(default_factory=dict)

    def owner(self) -> "Buffer":
        """The buffer whose memory this one is a view of."""
        return self.root.owner() if self.root is not None else self


@dataclass
class StageTask:
    """A task before the program is built."""

    block: str
    lanes: tuple[int, ...]
    seconds: float
    waits: tuple[int, ...]
    kind: Kind
    takes: dict[int, float] = field(default_factory=dict)  # memory -> bytes from the start on
    gives: dict[int, float] = field(default_factory=dict)  # memory -> bytes back at the end


@dataclass(frozen=True)
class Lowered:
    """A stage's program, and what each op costs on the first device under its split."""

    program: Program
    splits: dict[str, Split]
    costs: dict[str, OpCost]


def lower_stage(
    stage: Stage,
    graph: Graph,
    cluster: Cluster,
    most_devices: int = MAX_DRAWN,
    collectives: Collectives | None = None,
) -> Lowered:
    """The program of a stage that holds the whole model."""
    devices = drawn_devices(stage, cluster, most_devices)
    return StageLowering(stage, graph, cluster, devices, collectives or Collectives(cluster)).run()


def drawn_devices(stage: Stage, cluster: Cluster, most_devices: int = MAX_DRAWN) -> tuple[int, ...]:
    """The devices that get lanes of their own: all, or beyond so many the first of each kind."""
    devices = stage.mesh.devices
    if len(devices) <= most_devices:
        return devices
    kinds: dict[str, int] = {}
    for device in devices:
        kinds.setdefault(cluster.devices[device].kind, device)
    return tuple(kinds.values())


class StageLowering:
    """One walk over a stage's ops; `blocks` varies it for a micro-batch of a pipeline."""

    def __init__(
        self, stage: Stage, graph: Graph, cluster: Cluster, devices: tuple[int, ...],
        collectives: Collectives,
    ) -> None:  # fmt: skip
        self.stage, self.graph, self.cluster = stage, graph, cluster
        self.collectives = collectives
        self.axes = stage.mesh.axes
        self.ways = [axis.ways() for axis in self.axes]
        self.groups: list[Groups] = [stage.mesh.groups(i) for i in range(len(self.axes))]
        self.devices = devices
        self.kinds = {device: cluster.kind_of(device) for device in devices}
        self.splits = stage.dims()
        self.places = {device: stage.mesh.place(device) for device in devices}
        self.levels = _levels(stage, graph)
        self.place = {device: i for i, device in enumerate(self.devices)}
        self.members = [  # per axis: the drawn devices of each line that has any
            [drawn for line in lines if (drawn := [d for d in line if d in self.place])]
            for lines in self.groups
        ]
        self.tasks: list[StageTask] = []
        self.made: list[Buffer] = []  # every buffer that occupies memory of its own
        self.buffers: dict[str, Buffer] = {}
        self.copies: dict[tuple[str, Layout], Buffer] = {}
        self.gathered: dict[tuple[str, bool], Buffer] = {}
        self.update_of = {op.inputs[1]: op for op in graph.ops if op.phase == "update"}
        self.buckets: dict[tuple[str, Layout], list[Buffer]] = {}
        self.num_buckets = 0
        self.synced: list[tuple[list[Buffer], Made]] = []
        self.used: dict[str, Split] = {}
        self.costs: dict[str, OpCost] = {}
        self.last_compute: list[Made] = []  # tasks of ops with parameters, latest last
        self._check_splits()

    def run(self) -> Lowered:
        """The program of all ops in the graph's order."""
        for op in self.graph.ops:
            if op.phase != "update":
                self._run_op(op)
        for bucket in list(self.buckets):
            self._flush(bucket)
        for number, (gradients, ready) in enumerate(self.synced):
            self._update(number, gradients, ready)
        return Lowered(self._build(), self.used, self.costs)

    def _check_splits(self) -> None:
        for op in self.graph.ops:
            if op.phase == "forward" and op.name not in self.splits:
                raise PlanError(
                    f"op {op.name!r} has no split",
                    fix="the plan was made for another model; plan this one",
                    field=f"stage {self.stage.name!r} splits",
                )
        for name, dims in self.splits.items():
            op = self.graph.op(name)
            parts: dict[str, int] = {}
            for dim, axis in zip(dims, self.axes, strict=True):
                if dim:
                    parts[dim] = parts.get(dim, 1) * axis.parts
            check_split(self.graph.call(op), parts)

    # One op on every device.

    def _run_op(self, op: Op) -> None:
        if op.phase != "forward" and not op.forward:
            self._add_gradients(op)
            return
        dims = self.splits[op.forward or op.name]
        factors = ways_of(dims, self.axes)
        needed, given = placements(self.graph.call(op), dims)
        buffers = [
            self._obtain(name, layout, op) for name, layout in zip(op.inputs, needed, strict=True)
        ]
        ready = self._exchange(op, dims, factors, self._ready(buffers), halos=True)
        made = self._compute(op, ready, buffers, dims)
        made = _last(self._exchange(op, dims, factors, _after(made), halos=False))
        for name, layout in zip(op.outputs, given, strict=True):
            self._produce(op, name, layout, made, buffers)

    def _add_gradients(self, op: Op) -> None:
        """A sum of gradients: of equal layouts as they are, summands included; else made equal."""
        layouts = [self.buffers[name].layout for name in op.inputs]
        layout = tuple(_common(column) for column in zip(*layouts, strict=True))
        buffers = [self._obtain(name, layout, op) for name in op.inputs]
        access = loop_nest(self.graph.call(op)).outputs[0]
        dims = tuple(
            access.dims[p.dim][0] if p.kind == "shard" and access.dims[p.dim] else ""
            for p in layout
        )
        made = self._compute(op, self._ready(buffers), buffers, dims)
        self._produce(op, op.outputs[0], layout, made, buffers)

    def _compute(self, op: Op, ready: Ready, buffers: list[Buffer], dims: tuple[str, ...]) -> Made:
        made = {}
        for device in self.devices:
            split = tuple(sorted(ways_of(dims, self.axes, self.places[device]).items()))
            cost = op_cost(self.graph, op, self.kinds[device], split)
            self._note(op, device, split, cost)
            made[device] = self._task(
                op.name, (self._lane(device),), cost.seconds, ready[device], PHASE_KINDS[op.phase]
            )
        self._use(buffers, made)
        if any(self.graph.tensor(name).role == "parameter" for name in op.inputs):
            self.last_compute.append(made)
        return made

    def _note(self, op: Op, device: int, split: Split, cost: OpCost) -> None:
        if device == self.devices[0]:
            self.used[op.name] = split
            self.costs[op.name] = cost

    def _produce(self, op: Op, name: str, layout: Layout, made: Made, inputs: list[Buffer]) -> None:
        buffer = Buffer(name, layout, self._held_bytes(name, layout), dict(made))
        if _is_view(self.graph.call(op)) and inputs:
            buffer.root = inputs[0]
        else:
            self._take(buffer, made)
        self.buffers[name] = buffer
        if name in self.update_of:
            self._collect(buffer)

    # Tensors in the layout that is needed.

    def _obtain(self, name: str, need: Layout, user: Op) -> Buffer:
        tensor = self.graph.tensor(name)
        if name not in self.buffers and tensor.is_given:
            # Inputs and parameters are laid out at the start as their first user wants them.
            self.buffers[name] = Buffer(name, need, self._held_bytes(name, need))
        have = self.buffers[name]
        if self.levels.get(name) == "parameters":
            have = self._gather_parameter(have, user)
        if have.layout == need or self._is_free(tensor):
            return have
        key = (have.name, need)
        if key not in self.copies:
            self.copies[key] = self._convert(have, need)
        return self.copies[key]

    def _is_free(self, tensor: Tensor) -> bool:
        """What the model is fed can be fed in any layout."""
        return tensor.role == "input"

    def _convert(self, buffer: Buffer, need: Layout) -> Buffer:
        whole = self.graph.tensor(buffer.name).size_bytes
        for step in conversion(whole, self.ways, buffer.layout, need):
            if not step.collective:  # each device takes its share of what it holds
                made, root = dict(buffer.made_by), buffer
                buffer = Buffer(buffer.name, step.layout, step.held_bytes, made, root)
                continue
            label = f"{buffer.name} {step.collective}"
            made = self._group_tasks(
                label, step.collective, step.size_bytes, step.axis, self._ready([buffer])
            )
            self._use([buffer], made)
            buffer = Buffer(buffer.name, step.layout, step.held_bytes, made)
            self._take(buffer, made)
        return buffer

    def _exchange(
        self, op: Op, dims: tuple[str, ...], factors: dict[str, float],
        ready: Ready, *, halos: bool,
    ) -> Ready:  # fmt: skip
        """Halos before an op, statistics after it."""
        call = self.graph.call(op)
        for axis, dim in enumerate(dims):
            if not dim:
                continue
            for exchange in communication(call, factors, along=dim):
                if exchange.tensor >= 0 or (exchange.collective == "halo") != halos:
                    continue
                size = exchange.elements * (
                    dtype_bytes(self.graph.dtype(op)) if halos else STAT_BYTES
                )
                made = self._group_tasks(
                    f"{op.name} {exchange.collective}", exchange.collective, size, axis, ready
                )
                ready = _after(made)
        return ready

    def _gather_parameter(self, buffer: Buffer, user: Op) -> Buffer:
        """A parameter kept in shares, whole again for the forward or the backward."""
        key = (buffer.name, user.phase == "forward")
        if key not in self.gathered:
            whole = Buffer(buffer.name, buffer.layout, buffer.size_bytes)
            ahead = self.last_compute[-PREFETCH] if len(self.last_compute) >= PREFETCH else {}
            made: Made = dict(ahead)
            for axis in self._copied_axes(buffer.layout):
                made = self._group_tasks(
                    f"{buffer.name} all_gather", "all_gather", buffer.size_bytes, axis,
                    {device: [made[device]] if device in made else [] for device in self.devices},
                )  # fmt: skip
            whole.made_by = made
            self._take(whole, made)
            self.gathered[key] = whole
        return self.gathered[key]

    # Parameter gradients and the optimizer.

    def _collect(self, gradient: Buffer) -> None:
        """Gradients that are synchronised alike wait for each other until they are worth it."""
        level = self.levels[self.update_of[gradient.name].inputs[0]]
        sums = tuple(p if p == PARTIAL else REPLICATE for p in gradient.layout)
        key = (level, sums)
        bucket = self.buckets.setdefault(key, [])
        bucket.append(gradient)
        if sum(item.size_bytes for item in bucket) >= BUCKET_BYTES:
            self._flush(key)

    def _flush(self, key: tuple[str, Layout]) -> None:
        """Synchronise the gradients collected so far; each ends as its parameter lies."""
        bucket = self.buckets.pop(key)
        level, sums = key
        number = self.num_buckets
        self.num_buckets += 1
        ready = self._ready(bucket)
        size = sum(gradient.size_bytes for gradient in bucket)
        name = "all_reduce" if level == "none" else "reduce_scatter"
        for axis, placement in enumerate(sums):
            if placement == PARTIAL and self.axes[axis].size > 1:
                made = self._group_tasks(f"gradients.{number} {name}", name, size, axis, ready)
                ready = _after(made)
        last = _last(ready)
        if level in ("gradients", "parameters"):
            for gradient in bucket:
                shard = Buffer(gradient.name, gradient.layout, self._sharded_bytes(gradient))
                self._take(shard, last)
                self._use([gradient], last)
                self.buffers[gradient.name] = shard
        self.synced.append((bucket, last))

    def _update(self, number: int, gradients: list[Buffer], ready: Made) -> None:
        """One fused optimizer step for a bucket."""
        made = {}
        for device in self.devices:
            kind = self.kinds[device]
            seconds = kind.launch_s
            for gradient in gradients:
                op = self.update_of[gradient.name]
                cost = op_cost(self.graph, op, kind).scaled(self._update_share(op))
                self._note(op, device, (), cost)
                seconds += cost.seconds
            made[device] = self._task(
                f"update.{number}", (self._lane(device),), seconds, [ready[device]], Kind.UPDATE
            )
        self._use([self.buffers[gradient.name] for gradient in gradients], made)
        for axis in range(len(self.axes)):
            copied = sum(
                self.buffers[op.inputs[0]].size_bytes
                for op in (self.update_of[gradient.name] for gradient in gradients)
                if self.levels[op.inputs[0]] in ("states", "gradients")
                and axis in self._copied_axes(self._stored_layout(op))
            )
            if copied:
                made = self._group_tasks(
                    f"parameters.{number} all_gather", "all_gather", copied, axis, _after(made)
                )

    def _update_share(self, op: Op) -> float:
        """The part of a parameter that one device updates."""
        layout = self._stored_layout(op)
        share = 1 / num_shards(layout, self.ways)
        return share if self.levels[op.inputs[0]] == "none" else share / self._copies(layout)

    def _copies(self, layout: Layout) -> int:
        return math.prod(self.axes[axis].size for axis in self._copied_axes(layout))

    def _stored_layout(self, op: Op) -> Layout:
        return self.buffers[op.inputs[0]].layout

    def _sharded_bytes(self, gradient: Buffer) -> float:
        layout = self._stored_layout(self.update_of[gradient.name])
        return gradient.size_bytes / self._copies(layout)

    # Tasks and memory.

    def _group_tasks(self, label: str, name: str, size: float, axis: int, ready: Ready) -> Made:
        """One collective task per line of the axis; every drawn member waits for it."""
        seconds = self.collectives.seconds(name, size, self.groups[axis])
        made = {}
        for members in self.members[axis]:
            waits: list[int] = []
            for device in members:
                waits.extend(ready[device])
            lanes = tuple(self._network(device) for device in members)
            task = self._task(label, lanes, seconds, waits, Kind.COLLECTIVE)
            made.update(dict.fromkeys(members, task))
        return made

    def _task(
        self, block: str, lanes: tuple[int, ...], seconds: float, waits: Iterable[int], kind: Kind
    ) -> int:
        self.tasks.append(StageTask(block, lanes, seconds, tuple(sorted(set(waits))), kind))
        return len(self.tasks) - 1

    def _ready(self, buffers: Iterable[Buffer]) -> Ready:
        ready: Ready = {device: [] for device in self.devices}
        for buffer in buffers:
            for device, task in buffer.made_by.items():
                ready[device].append(task)
        return ready

    def _take(self, buffer: Buffer, made: Made) -> None:
        for device, task in made.items():
            memory = self.place[device]
            takes = self.tasks[task].takes
            takes[memory] = takes.get(memory, 0.0) + buffer.size_bytes
            buffer.last_use[device] = max(task, buffer.last_use.get(device, -1))
        self.made.append(buffer)

    def _use(self, buffers: Iterable[Buffer], made: Made) -> None:
        for buffer in buffers:
            owner = buffer.owner()
            for device, task in made.items():
                owner.last_use[device] = max(task, owner.last_use.get(device, -1))

    def _build(self) -> Program:
        builder = ProgramBuilder()
        names = [self.cluster.devices[device].name for device in self.devices]
        for name in names:
            builder.lane(name, "device")
        for name in names:
            builder.lane(f"{name} net", "link")
        for device, name in zip(self.devices, names, strict=True):
            builder.memory(name, float(self.kinds[device].memory_bytes))
        for buffer in self.made:
            if buffer.name in self.graph.outputs:
                continue  # what the model returns stays
            for device, last in buffer.last_use.items():
                memory = self.place[device]
                gives = self.tasks[last].gives
                gives[memory] = gives.get(memory, 0.0) + buffer.size_bytes
        start = builder.add(
            "parameters, states and workspace", (), 0.0,
            memory=[(m, self._static_bytes(d), 0.0) for m, d in enumerate(self.devices)],
        )  # fmt: skip
        for task in self.tasks:
            memories = sorted({*task.takes, *task.gives})
            builder.add(
                task.block,
                task.lanes,
                task.seconds,
                [wait + 1 for wait in task.waits] or [start],
                [(m, task.takes.get(m, 0.0), -task.gives.get(m, 0.0)) for m in memories],
                task.kind,
            )
        return builder.build()

    def _static_bytes(self, device: int) -> float:
        total = workspace_bytes(self.kinds[device])
        updates = {op.inputs[0]: op for op in self.graph.ops if op.phase == "update"}
        for tensor in self.graph.parameters:
            buffer = self.buffers.get(tensor.name)
            layout = buffer.layout if buffer else (REPLICATE,) * len(self.axes)
            level = self.levels.get(tensor.name, "none")
            shards, copies = num_shards(layout, self.ways), self._copies(layout)
            total += tensor.size_bytes / shards / (copies if level == "parameters" else 1)
            op = updates.get(tensor.name)
            states = [self.graph.tensor(name) for name in op.inputs[2:]] if op else []
            split = 1 if level == "none" else copies
            total += sum(state.size_bytes for state in states) / shards / split
        return total

    def _lane(self, device: int) -> int:
        return self.place[device]

    def _network(self, device: int) -> int:
        return len(self.devices) + self.place[device]

    def _copied_axes(self, layout: Layout) -> list[int]:
        return [i for i, p in enumerate(layout) if p == REPLICATE and self.axes[i].size > 1]

    def _held_bytes(self, name: str, layout: Layout) -> float:
        tensor = self.graph.tensor(name)
        if name.endswith(".next"):
            return 0.0
        return tensor.size_bytes / num_shards(layout, self.ways)


def _levels(stage: Stage, graph: Graph) -> dict[str, str]:
    """How each parameter is kept: as the first op that reads it says."""
    sharded = {split.op: split.sharded for split in stage.splits}
    found: dict[str, str] = {}
    for op in graph.ops:
        if op.phase == "forward":
            for name in op.inputs:
                if graph.tensor(name).role == "parameter":
                    found.setdefault(name, sharded.get(op.name, "none"))
    return found


def _after(made: Made) -> Ready:
    return {device: [task] for device, task in made.items()}


def _last(ready: Ready) -> Made:
    return {device: max(tasks) for device, tasks in ready.items()}


def _common(placements: tuple[Placement, ...]) -> Placement:
    """One placement for tensors that are added: equal ones stay, shares win, else copies."""
    if len(set(placements)) == 1:
        return placements[0]
    return next((p for p in placements if p.kind == "shard"), REPLICATE)


def _is_view(call: Call) -> bool:
    """Are the outputs of an op its first input, seen otherwise?"""
    if call.kind == "elementwise":
        return passes_through(call)
    if call.kind == "reshape":
        return call.phase in ("forward", "dgrad")
    return call.kind in VIEWS and call.phase == "forward"
