"""The model as a tree of modules by what each costs, repeated layers folded into one.

The cost of a forward op is what it and its gradients take in a step: seconds of one device, and
device-seconds over all devices of its stage. Modules are the parts of names between dots. Children
that differ only in the numbers in their names, and cost and are split alike, are one node that
stands for all of them. Costs of children, each as often as it stands there, add up to their parent.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from partita.costs.roofline import op_cost
from partita.costs.sharding import ways_of
from partita.graph.rebatch import rebatch
from partita.graph.record import Graph, Op
from partita.jobs.simulate import NUMBERS, Simulation
from partita.plans import OpSplit, Stage

ROUNDED = 9  # digits that two costs must have in common to be the same


@dataclass(frozen=True, slots=True)
class OpChip:
    """How one op is split: its stage, what each mesh axis cuts, what it makes and holds."""

    kind: str
    stage: str
    cuts: tuple[str, ...]  # `dp: b / 4`; empty: whole
    zero: int
    output: str  # shape of a micro-batch, all devices together
    output_bytes: float  # of one device's share
    parameter_bytes: float  # of all, before they are split

    @property
    def words(self) -> str:
        """The cuts in one phrase."""
        return ", ".join(self.cuts) or "whole"


@dataclass(frozen=True)
class CostNode:
    """A module or an op; `count` equal ones, each of these seconds."""

    name: str
    seconds: float  # of one device in a step
    device_s: float  # of all devices of its stage together
    count: int = 1
    children: "tuple[CostNode, ...]" = ()
    chip: OpChip | None = None
    last: str = ""  # the name of the last of several

    @property
    def total_s(self) -> float:
        """Device-seconds of all that it stands for."""
        return self.device_s * self.count

    @property
    def num_ops(self) -> int:
        """Ops under it, all of them."""
        inner = sum(child.num_ops for child in self.children)
        return (inner or 1) * self.count


def cost_tree(simulation: Simulation) -> CostNode:
    """The forward ops of a simulated plan as a tree; the root is the model."""
    graph = simulation.workload.graph
    count = simulation.schedule.num_microbatches
    if count > 1:
        graph = rebatch(graph, simulation.workload.batch // count)
    gradients: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.forward and op.phase != "update":
            gradients.setdefault(op.forward, []).append(op)
    leaves = [
        _leaf(simulation, graph, stage, split, gradients.get(split.op, ()))
        for stage in (simulation.decided or simulation.stages)
        for split in stage.splits
    ]
    paths = [(leaf.name.split("."), leaf) for leaf in leaves]
    return _folded(_module(simulation.workload.spec, paths))


def _leaf(
    simulation: Simulation, graph: Graph, stage: Stage, split: OpSplit, gradients: Sequence[Op]
) -> CostNode:
    op = graph.op(split.op)
    axes = stage.mesh.axes
    ways = ways_of(split.dims, axes)
    cut = tuple(sorted(ways.items()))
    kind = simulation.cluster.kind_of(stage.mesh.devices[0])
    execution = simulation.workload.execution
    runs = [op, *gradients]
    if graph.is_training and (stage.checkpointing == "full" or op.name in stage.recomputed):
        runs.append(op)
    times = simulation.schedule.num_microbatches
    seconds = times * math.fsum(op_cost(graph, one, kind, cut, execution).seconds for one in runs)
    cuts = tuple(
        f"{axis.name}: {dim} / {axis.size}"
        for dim, axis in zip(split.dims, axes, strict=True)
        if dim and axis.size > 1
    )
    made = graph.tensor(op.outputs[0])
    share = math.prod(factor for factor in ways.values())
    learned = sum(
        graph.tensor(name).size_bytes
        for name in op.inputs
        if graph.tensor(name).role == "parameter"
    )
    shape = "×".join(map(str, made.shape)) or "scalar"
    chip = OpChip(
        op.kind, stage.name, cuts, split.zero, f"{shape} {made.dtype}", made.size_bytes / share,
        learned,
    )  # fmt: skip
    return CostNode(op.name, seconds, seconds * len(stage.mesh.devices), chip=chip)


def _module(name: str, paths: "Sequence[tuple[list[str], CostNode]]") -> CostNode:
    """The tree of ops by the parts of their names."""
    inside: dict[str, list[tuple[list[str], CostNode]]] = {}
    for path, leaf in paths:
        inside.setdefault(path[0], []).append((path[1:], leaf))
    children: list[CostNode] = []
    for part, rest in inside.items():
        own = [leaf for path, leaf in rest if not path]
        below = [(path, leaf) for path, leaf in rest if path]
        children += [replace(leaf, name=part) for leaf in own]
        if below:
            child = _module(part, below)
            # A module of one part says no more than that part.
            if len(child.children) == 1:
                only = child.children[0]
                child = replace(only, name=f"{part}.{only.name}")
            children.append(child)
    return _summed(name, children)


def _summed(name: str, children: Iterable[CostNode], count: int = 1, last: str = "") -> CostNode:
    own = tuple(children)
    return CostNode(
        name,
        math.fsum(child.seconds * child.count for child in own),
        math.fsum(child.total_s for child in own),
        count,
        own,
        last=last,
    )


def _folded(node: CostNode) -> CostNode:
    """The same tree with equal neighbours as one node."""
    children = [_folded(child) for child in node.children]
    groups: dict[tuple[object, ...], list[CostNode]] = {}
    for child in children:
        key = (NUMBERS.sub("*", child.name), *_signature(child))
        groups.setdefault(key, []).append(child)
    folded = [
        same[0]
        if len(same) == 1
        else replace(same[0], count=len(same) * same[0].count, last=same[-1].name)
        for same in groups.values()
    ]
    return replace(node, children=tuple(folded)) if node.children else node


def _signature(node: CostNode) -> tuple[object, ...]:
    """Equal for nodes that cost and are split alike, whatever numbers they have."""
    own = f"{node.device_s:.{ROUNDED}g}"
    below = tuple((NUMBERS.sub("*", child.name), *_signature(child)) for child in node.children)
    return (own, node.chip, node.count, below)
