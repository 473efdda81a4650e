"""What lowering a stage knows and never changes: the stage, its graph, its devices, its links."""

import functools
from dataclasses import dataclass

from partita.cluster import Cluster, DeviceKind
from partita.costs.collectives import Collectives, Groups
from partita.costs.layouts import Layout, num_shards, zero_axes, zero_parts
from partita.errors import PlanError
from partita.graph.record import Graph, Op
from partita.graph.splits import check_split
from partita.lower.pieces import StageGraph
from partita.plans import Axis, Stage

MAX_REPRESENTATIVES = 16


@dataclass(frozen=True, eq=False)
class Context:
    """One stage's graph on the devices that are drawn; `number` is the stage's place in the plan.

    `recomputed` are ops of the graph that run the forward of another op once more; `original` has
    what these ops and what they make are called in the model.
    """

    stage: Stage
    number: int
    graph: Graph
    cluster: Cluster
    devices: tuple[int, ...]
    collectives: Collectives
    recomputed: frozenset[str]
    original: dict[str, str]
    gradient_of: dict[str, str]  # gradient -> the tensor of the model that it belongs to
    dims: dict[str, tuple[str, ...]]  # of every forward op
    levels: dict[str, int]  # the ZeRO stage of each parameter
    bundle_of: dict[str, int]  # of forward ops whose parameters are gathered with those of others
    update_of: dict[str, Op]  # by gradient
    kinds: dict[int, DeviceKind]
    index: dict[int, int]  # device -> its number among those drawn
    places: dict[int, tuple[int, ...]]  # device -> its coordinates on the mesh
    groups: tuple[Groups, ...]  # per axis
    members: tuple[tuple[tuple[int, ...], ...], ...]  # per axis the drawn devices of each line
    ways: tuple[float, ...]
    execution: str = "graph"  # or eager, compiled: what each op starts, and what the host pays

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the stage's mesh."""
        return self.stage.mesh.axes

    @functools.cached_property
    def op_by_op(self) -> bool:
        """Does a runtime start each op of the stage by itself, for what is sent between them?"""
        along = {dim for dims in self.dims.values() for dim in dims} - {"", "b"}
        return bool(self.axes) and bool(along or 3 in self.levels.values())

    def held_bytes(self, name: str, layout: Layout) -> float:
        """What a device holds of a tensor."""
        return self.graph.tensor(name).size_bytes / num_shards(layout, self.ways)

    def zero_axes(self, layout: Layout) -> tuple[int, ...]:
        """The axes along which ZeRO shards what devices would hold copies of."""
        return zero_axes(layout, self.axes)

    def zero_parts(self, layout: Layout) -> int:
        """Into how many parts ZeRO cuts a shard."""
        return zero_parts(layout, self.axes)

    def network(self, device: int) -> int:
        """The lane of a device's network; its compute lane is its number."""
        return len(self.devices) + self.index[device]


def context_of(
    stage: Stage,
    graph: Graph,
    cluster: Cluster,
    devices: tuple[int, ...],
    collectives: Collectives,
    number: int = 0,
    part: StageGraph | None = None,
    execution: str = "graph",
) -> Context:
    """Everything that lowering a stage looks up; refuses splits that the graph does not have."""
    mesh = stage.mesh
    drawn = {device: i for i, device in enumerate(devices)}
    groups = tuple(mesh.groups(i) for i in range(len(mesh.axes)))
    _check_splits(stage, graph)
    return Context(
        stage,
        number,
        graph,
        cluster,
        devices,
        collectives,
        frozenset() if part is None else part.recomputed,
        {} if part is None else part.original,
        _gradient_of(graph, part),
        stage.dims(),
        _levels(stage, graph),
        _bundles(stage),
        {op.inputs[1]: op for op in graph.ops if op.phase == "update"},
        {device: cluster.kind_of(device) for device in devices},
        drawn,
        {device: mesh.place(device) for device in devices},
        groups,
        tuple(
            tuple(
                tuple(d for d in line if d in drawn)
                for line in lines
                if not drawn.keys().isdisjoint(line)
            )
            for lines in groups
        ),
        tuple(axis.ways() for axis in mesh.axes),
        execution,
    )


def _bundles(stage: Stage) -> dict[str, int]:
    """The number of each op's bundle: all up to the op that begins the next."""
    firsts, number = set(stage.bundles or ()), -1
    bundle_of: dict[str, int] = {}
    for split in stage.splits:
        number += split.op in firsts
        if number >= 0:
            bundle_of[split.op] = number
    return bundle_of


def representative_devices(
    stage: Stage, cluster: Cluster, most_devices: int = MAX_REPRESENTATIVES
) -> tuple[int, ...]:
    """The representative ranks, which get lanes of their own: all, or the first of each kind.

    Ranks of one kind do the same; beyond `most_devices` one of each stands for all of them, while
    collectives still cost what they cost among all.
    """
    devices = stage.mesh.devices
    return devices if len(devices) <= most_devices else first_of_kinds(devices, cluster)


def first_of_kinds(devices: tuple[int, ...], cluster: Cluster) -> tuple[int, ...]:
    """The first device of each kind among some."""
    kinds: dict[str, int] = {}
    for device in devices:
        kinds.setdefault(cluster.devices[device].kind, device)
    return tuple(kinds.values())


def _check_splits(stage: Stage, graph: Graph) -> None:
    splits = stage.dims()
    for op in graph.ops:
        if op.phase == "forward" and op.name not in splits:
            raise PlanError(
                f"op {op.name!r} has no split",
                fix="the plan was made for another model; plan this one",
                field=f"stage {stage.name!r} splits",
            )
    for name, dims in splits.items():
        parts: dict[str, int] = {}
        for dim, axis in zip(dims, stage.mesh.axes, strict=True):
            if dim:
                parts[dim] = parts.get(dim, 1) * axis.parts
        check_split(graph.call(graph.op(name)), parts)


def _levels(stage: Stage, graph: Graph) -> dict[str, int]:
    """How each parameter is kept: as the first op that reads it says."""
    zero = {split.op: split.zero for split in stage.splits}
    levels: dict[str, int] = {}
    for op in graph.ops:
        if op.phase == "forward":
            for name in op.inputs:
                if graph.tensor(name).role == "parameter":
                    levels.setdefault(name, zero.get(op.name, 0))
    return levels


def _gradient_of(graph: Graph, part: StageGraph | None) -> dict[str, str]:
    """The tensor that each gradient belongs to: given by an op, received, or a sum of such."""
    gradient_of: dict[str, str] = {}
    original: dict[str, str] = {}
    if part is not None:
        gradient_of = {name: activation for activation, _, name in part.gradients_in}
        original = part.original
    for op in graph.ops:
        if op.forward:
            forward, call = graph.op(op.forward), graph.call(op)
            for name, read in zip(op.inputs, call.reads, strict=True):
                if read[0] == "g":  # also of the loss, which no op gives
                    made = forward.outputs[int(read[1:])]
                    gradient_of.setdefault(name, original.get(made, made))
            for name, i in zip(op.outputs, call.wrt, strict=True):
                source = forward.inputs[i]
                gradient_of[name] = original.get(source, source)
        elif op.phase in ("dgrad", "wgrad") and op.inputs[0] in gradient_of:
            gradient_of[op.outputs[0]] = gradient_of[op.inputs[0]]
    return gradient_of
