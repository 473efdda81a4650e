"""Nodes that may vanish (spot machines): the plan if they do, and what going there costs.

The devices that are left are planned for like any machine; parameters and states that they hold by
the plan so far are moved to where the other plan needs them (`moves`). What only the lost devices
held comes from a checkpoint, and steps since then are done again. Where a node loses only some of
its devices, the machine without all of that node is planned for as well: seven devices of a node
are often slower than none of them, because nothing divides by seven.

Moving from one plan to another on the devices that are left: every device holds of each parameter
and of its optimizer states what its plan gives it. What it needs by the next plan and does not hold
yet comes from the nearest device left that does, the one that has sent least so far; what none of
them holds is lost and must come from a checkpoint. All messages are sent at once, each over its
route:

    seconds = largest over links of (bytes / bandwidth), and the longest latency of a route

A device's part of a tensor is a box: its layout cuts dims, and ZeRO cuts the first dim once more
along the axes of replicas (in truth the flat shard, which is the same but for rows cut in two; rows
of recurrent weights, cut gate by gate, count as one run). Tensors that lie alike are counted once.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.cluster import Cluster
from partita.cluster.presets import changed
from partita.costs.layouts import Layout, copied_axes
from partita.graph.record import Graph
from partita.jobs.explain import lying_parameters
from partita.jobs.plan_simulator import Planned
from partita.jobs.workload import load_cluster, load_model
from partita.plans import Mesh, Plan, Stage

F64 = npt.NDArray[np.float64]
_DIGITS = 12  # borders nearer than this are one
Lying = tuple[Mesh, Layout, bool]  # and whether replicas share it out (ZeRO)
Pairs = dict[tuple[int, int], float]


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """A link, what is sent over it, and how long that takes."""

    link: str
    bytes_sent: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Moves:
    """What going from one plan to another costs."""

    needed_bytes: float  # that the devices hold by the next plan, replicas included
    moved_bytes: float
    lost_bytes: float  # that no device left holds: from a checkpoint
    seconds: float
    links: tuple[LinkLoad, ...]  # the busiest first
    pairs: tuple[tuple[str, str, float], ...]  # sender, receiver, bytes; the most first

    @property
    def kept_bytes(self) -> float:
        """What lies where it is needed already."""
        return self.needed_bytes - self.moved_bytes - self.lost_bytes


def moves(
    before: Sequence[Stage], after: Sequence[Stage], graph: Graph, old: Cluster, new: Cluster
) -> Moves:
    """What the devices of `new`, some of `old`'s, must get to go on with the stages `after`."""
    number = {device.name: index for index, device in enumerate(new.devices)}
    index_of = {i: number[each.name] for i, each in enumerate(old.devices) if each.name in number}
    pairs: Pairs = defaultdict(float)
    needed = lost = 0.0
    sent = np.zeros(new.num_devices)
    near = _Nearness(new)
    for (held, wanted), size in _alike(before, after, graph).items():
        sources = _boxes(held, index_of)
        targets = _boxes(wanted, {i: i for i in range(new.num_devices)})
        for volume, holders, takers in _cells(sources, targets):
            needed += volume * size * len(takers)
            lacking = sorted(set(takers) - set(holders))
            if not holders:
                lost += volume * size * len(lacking)
                continue
            givers = np.array(holders)
            for taker in lacking:
                order = np.lexsort((givers, sent[givers], near(taker, givers)))
                giver = int(givers[order[0]])
                sent[giver] += volume * size
                pairs[giver, taker] += volume * size
    links, latency_s = _loads(pairs, new)
    names = [device.name for device in new.devices]
    ranked = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    return Moves(
        needed,
        sum(pairs.values()),
        lost,
        links[0].seconds + latency_s if links else 0.0,
        links,
        tuple((names[a], names[b], size) for (a, b), size in ranked),
    )


def _alike(
    before: Sequence[Stage], after: Sequence[Stage], graph: Graph
) -> dict[tuple[tuple[Lying, ...], tuple[Lying, ...]], float]:
    """Bytes of parameters and states by how they lie in both plans."""
    old, new = _lying(before, graph), _lying(after, graph)
    states = {
        op.inputs[0]: float(sum(graph.tensor(name).size_bytes for name in op.inputs[2:]))
        for op in graph.ops
        if op.phase == "update"
    }
    sizes: dict[tuple[tuple[Lying, ...], tuple[Lying, ...]], float] = defaultdict(float)
    for name in new:
        for part, size in enumerate((float(graph.tensor(name).size_bytes), states.get(name, 0.0))):
            if size:
                sizes[old.get(name, ((), ()))[part], new[name][part]] += size
    return sizes


def _lying(
    stages: Sequence[Stage], graph: Graph
) -> dict[str, tuple[tuple[Lying, ...], tuple[Lying, ...]]]:
    """Per parameter how it and its states lie, in every stage that holds it."""
    every: dict[str, tuple[tuple[Lying, ...], tuple[Lying, ...]]] = {}
    for stage in stages:
        for name, layout, level in lying_parameters(stage, graph):
            parameter, states = every.get(name, ((), ()))
            every[name] = (
                (*parameter, (stage.mesh, layout, level == 3)),
                (*states, (stage.mesh, layout, level > 0)),
            )
    return every


def _boxes(lying: Sequence[Lying], index_of: Mapping[int, int]) -> list[tuple[int, F64]]:
    """Device and box, from 0 to 1 along every dim that is cut."""
    boxes = []
    for mesh, layout, shared in lying:
        extra = copied_axes(layout, mesh.axes) if shared else ()
        for place, device in zip(
            itertools.product(*(range(axis.size) for axis in mesh.axes)), mesh.devices, strict=True
        ):
            if device not in index_of:
                continue
            box = np.array([[0.0, 1.0]] * 8)
            cut = [(i, p.dim) for i, p in enumerate(layout) if p.kind == "shard"]
            for axis, dim in [*cut, *((axis, 0) for axis in extra)]:
                weights = mesh.axes[axis].weights or (1,) * mesh.axes[axis].size
                start, length = box[dim, 0], box[dim, 1] - box[dim, 0]
                first = sum(weights[: place[axis]]) / mesh.axes[axis].parts
                last = first + weights[place[axis]] / mesh.axes[axis].parts
                box[dim] = start + length * first, start + length * last
            boxes.append((index_of[device], box.round(_DIGITS)))
    return boxes


def _cells(
    sources: Sequence[tuple[int, F64]], targets: Sequence[tuple[int, F64]]
) -> Iterator[tuple[float, list[int], list[int]]]:
    """Parts of the tensor that no box cuts: share of it, who holds it, who needs it."""
    both = [box for _, box in (*sources, *targets)]
    if not targets:
        return
    borders = [np.unique([box[dim] for box in both]) for dim in range(len(both[0]))]
    has, wants = (
        (np.array([device for device, _ in side]), np.array([box for _, box in side]))
        for side in (sources, targets)
    )
    for corner in itertools.product(*(range(len(each) - 1) for each in borders)):
        low = np.array([borders[dim][at] for dim, at in enumerate(corner)])
        high = np.array([borders[dim][at + 1] for dim, at in enumerate(corner)])
        inside = [
            sorted(set(devices[_contain(boxes, (low + high) / 2)].tolist())) if len(devices) else []
            for devices, boxes in (has, wants)
        ]
        yield float(np.prod(high - low)), inside[0], inside[1]


def _contain(boxes: F64, point: F64) -> npt.NDArray[np.bool_]:
    between = (boxes[:, :, 0] <= point) & (point <= boxes[:, :, 1])
    return np.asarray(between.all(axis=1))


class _Nearness:
    """How far devices are from one: the innermost level of the machine that joins the two."""

    def __init__(self, cluster: Cluster) -> None:
        levels = cluster.levels()
        self.group = np.zeros((len(levels), cluster.num_devices), np.int64)
        for row, level in enumerate(levels):
            for number, members in enumerate(level.groups):
                self.group[row, list(members)] = number

    def __call__(self, device: int, others: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The level for each of the others."""
        joined = self.group[:, others] == self.group[:, [device]]
        return np.asarray(joined.argmax(axis=0), np.int64)


def _loads(pairs: Pairs, cluster: Cluster) -> tuple[tuple[LinkLoad, ...], float]:
    """What every link carries, the slowest first; links of one lane take turns."""
    bytes_sent: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    latency_s = 0.0
    for (giver, taker), size in pairs.items():
        route = [cluster.links[index] for index in cluster.route(giver, taker)]
        latency_s = max(latency_s, sum(link.latency_s for link in route))
        for link in route:
            name = link.lane or f"{link.source} to {link.target}"
            bytes_sent[name] += size
            seconds[name] += size / link.bytes_per_s
    ranked = sorted(seconds, key=lambda name: (-seconds[name], name))
    return tuple(LinkLoad(name, bytes_sent[name], seconds[name]) for name in ranked), latency_s


@dataclass(frozen=True)
class Vanished:
    """What is left without some nodes: the plan for it, and what moving to it costs."""

    names: tuple[str, ...]
    cluster: Cluster  # what is left and used
    idle: tuple[str, ...]  # devices that are left and not used
    num_before: int  # devices
    step_before_s: float
    planned: Planned
    moves: Moves | None  # None where nothing fits what is left

    @property
    def slowdown(self) -> float | None:
        """How many times as long a step takes."""
        best = self.planned.best
        return None if best is None else best.step_s / self.step_before_s


def machine_without(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """The machine that is left; refuses nodes that are not there, and a machine without devices."""
    return changed(cluster, ",".join(f"without={name}" for name in names))


def vanished(before: Plan, names: Sequence[str], replan: Callable[[Cluster], Planned]) -> Vanished:
    """The answer for a plan; `replan` plans its model for what is left."""
    old = load_cluster(before)
    left = used = machine_without(old, names)
    after = replan(left)
    whole = _whole_nodes(old, left)
    if whole is not None:
        other = replan(whole)
        if other.best is not None and (
            after.best is None or other.best.objective_s < after.best.objective_s
        ):
            used, after = whole, other
    cost = None
    if after.best is not None:
        graph = load_model(before).graph
        cost = moves(before.stages, after.best.simulation.decided, graph, old, used)
    in_use = {device.name for device in used.devices}
    return Vanished(
        tuple(names),
        used,
        tuple(device.name for device in left.devices if device.name not in in_use),
        old.num_devices,
        before.prediction.step_s,
        after,
        cost,
    )


def _whole_nodes(old: Cluster, left: Cluster) -> Cluster | None:
    """What is left without nodes that lost some devices; None where all or none are whole."""
    before, now = (Counter(device.node for device in each.devices) for each in (old, left))
    parted = [node for node in now if node and now[node] < before[node]]
    if not parted or len(parted) == len(now):
        return None
    return machine_without(left, parted)
