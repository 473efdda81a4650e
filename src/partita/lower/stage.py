"""From a plan to the program that runs it: every device computes its share, collectives between.

Each device has a compute lane and a network lane. An op of the training graph becomes one task per
device; where a tensor does not lie as the next op needs it, a collective per line of the mesh axis
moves it: summands are added (all-reduce, reduce-scatter), shares gathered or exchanged. Parameter
gradients are synchronised in buckets while the backward goes on, then the optimizer runs.

Memory is taken where a tensor is made and given back after its last use, on every device.
Devices that do the same are drawn once: beyond `MAX_DRAWN` only one per device kind is lowered,
while collectives still cost what they cost among all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.costs.layouts import Layout, conversion, num_shards
from partita.costs.roofline import OpCost, Split, op_cost
from partita.costs.sharding import ways_of
from partita.errors import PlanError
from partita.graph.dtypes import dtype_bytes
from partita.graph.loops import loop_nest
from partita.graph.record import Call, Graph, Op, Tensor
from partita.graph.splits import (
    REPLICATE,
    Placement,
    check_split,
    communication,
    placements,
)
from partita.graph.traffic import VIEWS, passes_through
from partita.lower.parameters import PREFETCH, ParameterWriter
from partita.lower.pieces import homes, piece
from partita.lower.tasks import Buffer, Made, Ready, after, last_of
from partita.plans import Stage
from partita.program import Kind, Program

MAX_DRAWN = 16
STAT_BYTES = 4

PHASE_KINDS = {
    "forward": Kind.FORWARD,
    "dgrad": Kind.DGRAD,
    "wgrad": Kind.WGRAD,
    "update": Kind.UPDATE,
}


@dataclass(frozen=True)
class Lowered:
    """A stage's program, and what each op costs on the first device under its split.

    The graph is the one that was lowered: with recompute, some ops stand there twice.
    """

    graph: Graph
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
    times = collectives or Collectives(cluster)
    if stage.recomputed != "no" and graph.is_training:
        part = piece(graph, stage, 0, homes(graph, [stage]))
        stage, graph = Stage(stage.name, stage.mesh, part.splits), part.graph
    return StageLowering(stage, graph, cluster, devices, times).run()


def drawn_devices(stage: Stage, cluster: Cluster, most_devices: int = MAX_DRAWN) -> tuple[int, ...]:
    """The devices that get lanes of their own: all, or beyond so many the first of each kind."""
    devices = stage.mesh.devices
    if len(devices) <= most_devices:
        return devices
    kinds: dict[str, int] = {}
    for device in devices:
        kinds.setdefault(cluster.devices[device].kind, device)
    return tuple(kinds.values())


class StageLowering(ParameterWriter):
    """One walk over a stage's ops; `blocks` varies it for a micro-batch of a pipeline."""

    def __init__(
        self, stage: Stage, graph: Graph, cluster: Cluster, devices: tuple[int, ...],
        collectives: Collectives,
    ) -> None:  # fmt: skip
        super().__init__(stage, graph, cluster, devices, collectives)
        self.stage = stage
        self.splits = stage.dims()
        self.places = {device: stage.mesh.place(device) for device in devices}
        self.copies: dict[tuple[str, Layout], Buffer] = {}
        self._check_splits()

    def run(self) -> Lowered:
        """The program of all ops in the graph's order."""
        ops = [op for op in self.graph.ops if op.phase != "update"]
        first = next((i for i, op in enumerate(ops) if op.phase != "forward"), len(ops))
        self._run_ops(ops[:first])
        self.gathered.clear()  # what is gathered for the forward is not kept for the backward
        self._run_ops(ops[first:])
        self._flush_all()
        for number, (gradients, ready) in enumerate(self.synced):
            self._update(number, gradients, ready)
        return Lowered(self.graph, self._build(), self.used, self.costs)

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

    def _run_ops(self, ops: Sequence[Op]) -> None:
        """Ops in their order; what is kept in shares is gathered for some of them at a time."""
        sharing = [op for op in ops if self._reads_shares(op)]
        asked, running = 0, 0
        for op in ops:
            if running < len(sharing) and op is sharing[running]:
                for other in sharing[asked : running + PREFETCH]:
                    self._ask_for(other, self._needs(other))
                asked, running = max(asked, running + PREFETCH), running + 1
            self._run_op(op)

    def _reads_shares(self, op: Op) -> bool:
        return any(self.levels.get(name) == "parameters" for name in op.inputs)

    def _needs(self, op: Op) -> tuple[Layout, ...]:
        return placements(self.graph.call(op), self.splits[op.forward or op.name])[0]

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
        made = last_of(self._exchange(op, dims, factors, after(made), halos=False))
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
        if self._reads_shares(op):
            self.last_compute = made
        return made

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
            have = self._gathered(name, user)
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
            made = self._urgent(
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
                made = self._urgent(
                    f"{op.name} {exchange.collective}", exchange.collective, size, axis, ready
                )
                ready = after(made)
        return ready

    def _held_bytes(self, name: str, layout: Layout) -> float:
        tensor = self.graph.tensor(name)
        if name.endswith(".next"):
            return 0.0
        return tensor.size_bytes / num_shards(layout, self.ways)


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
