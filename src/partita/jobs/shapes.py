"""Tessel's shapes as plans: a stage on each device beside stages of all; orders searched for them.

Branches of a model that meet (two towers, an image and a text encoder) are found by `branches`.
What comes before all else and costs next to nothing (a mask, positions, a cast of the input) may be
read by both. All other ops, in their order, are joined to what feeds them. Ops that would join two
parts which each have a good deal of the arithmetic are where branches meet; these, and all that
reads of them, are behind the branches. Of more than two branches the largest go first, each to the
side that has less.

Shapes:

    m    the first ops on all devices, then a pipeline of one stage on each
    nn   as m, and ops halfway through the pipeline on all devices, too
    k    two branches of the model, each a pipeline on devices of its own, meet on all devices

What a stage of its own would burden one device with (a large embedding, a stem on large inputs, a
loss) is shared by all: each device takes its part of every micro-batch. How much is shared is said
by its part of the model's arithmetic; the rest is cut into equal parts. The order of blocks is that
of a named schedule, or searched.

`searched_schedule` searches the order of a plan's micro-batches under the memory that is left. The
plan's stages are lowered with data and weight gradients apart; their blocks, the transfers and
what each group of devices has left beside parameters and states make a schedule problem, which the
schedule searches solve: groups of devices are its devices, and a stage that several of them share
is a block on all of these. The order found becomes the plan's schedule, action by action.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partita import __version__
from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.engine import run
from partita.errors import InputError, PlanError
from partita.graph.record import Graph, Op
from partita.graph.work import flops
from partita.jobs.constraints import LINE_SHAPE, OTHER_SHAPE, SEARCHED
from partita.jobs.plan_settings import USUAL, PlanSettings
from partita.jobs.simulate import Simulation, data_splits, simulate_stages
from partita.jobs.workload import Workload, cluster_ref
from partita.lower import Memo, first_of_kinds, lower_plan
from partita.lower.blocks import Blocks
from partita.lower.orders import order_text
from partita.lower.pipeline import Lowered
from partita.plans import (
    Axis,
    Mesh,
    OpSplit,
    Origin,
    Plan,
    Schedule,
    Stage,
    device_groups,
    group_devices,
    shared_stages,
)
from partita.schedules.actions import Action, Order
from partita.schedules.stages import StageCost, StageLink, placement_from_stages
from partita.search import searches
from partita.search.base import Stop
from partita.suggest import suggest

LEAST = 0.1  # of the model's arithmetic, in each branch
NOTHING = 0.01  # of it, with all that comes before: an op that both may read
LARGEST_ORDER = 10**4  # blocks in all
Part = tuple[int | None, Sequence[str]]  # the device of a stage (None: all of them), and its ops
BLOCKS = 3  # of a stage and micro-batch: forward, data gradients, weight gradients


@dataclass(frozen=True, slots=True)
class Branches:
    """Forward ops of two branches and of what follows where they meet, each as they can run.

    What both branches read is the beginning of the first: nothing of the second is read by it.
    """

    sides: tuple[tuple[str, ...], tuple[str, ...]]
    meeting: tuple[str, ...]


def branches(graph: Graph) -> Branches | None:
    """The branches of a model, if it has two that meet."""
    ops = [op for op in graph.ops if op.phase == "forward"]
    work = {op.name: float(flops(graph.call(op))) for op in ops}
    parts = _BranchParts(work, max(sum(work.values()), 1.0))
    maker = {tensor: op.name for op in ops for tensor in op.outputs}
    for op in ops:
        parts.add(op.name, [maker[tensor] for tensor in op.inputs if tensor in maker])
    sides = parts.sides()
    if not parts.meeting or set(sides.values()) != {0, 1}:
        return None
    place = {name: sides.get(parts.root(name)) for name in work if name not in parts.meeting}
    _settle(ops, place, maker)
    begin = [*parts.light, *(op.name for op in ops if op.name not in parts.light)]
    left, right = (tuple(name for name in begin if place.get(name) == k) for k in (0, 1))
    return Branches((left, right), tuple(op.name for op in ops if place.get(op.name) is None))


@dataclass
class _BranchParts:
    """Ops that hang together, as far as branches do not meet."""

    own: Mapping[str, float]  # the arithmetic of each op
    total: float
    meeting: set[str] = field(default_factory=set)
    light: dict[str, frozenset[str]] = field(default_factory=dict)  # and all that comes before

    def __post_init__(self) -> None:
        self.above = {name: name for name in self.own}
        self.work = dict(self.own)  # of a part, under the name of its root

    def root(self, name: str) -> str:
        """Whom a part is named after."""
        while self.above[name] != name:
            self.above[name] = self.above[self.above[name]]
            name = self.above[name]
        return name

    def add(self, name: str, feeding: list[str]) -> None:
        """Join an op to what feeds it, unless branches meet there or before."""
        if all(before in self.light for before in feeding):
            cone = frozenset({name}.union(*(self.light[before] for before in feeding)))
            if sum(self.own[each] for each in cone) < NOTHING * self.total:
                self.light[name] = cone
                return
        roots = dict.fromkeys(self.root(before) for before in feeding if before not in self.light)
        meets = sum(self.work[root] >= LEAST * self.total for root in roots) > 1
        if meets or any(root in self.meeting for root in roots):
            self.meeting.add(name)
            return
        for root in roots:
            self.work[name] += self.work[root]
            self.above[root] = name

    def sides(self) -> dict[str, int]:
        """Roots of branches, each with the side that it goes to."""
        roots = (name for name, above in self.above.items() if name == above)
        heavy = [
            (-self.work[root], root)
            for root in roots
            if root not in self.meeting and self.work[root] >= LEAST * self.total
        ]
        side: dict[str, int] = {}
        filled = [0.0, 0.0]
        for negative, root in sorted(heavy):
            side[root] = filled.index(min(filled))
            filled[side[root]] -= negative
        return side


def _settle(ops: list[Op], place: dict[str, int | None], maker: Mapping[str, str]) -> None:
    """Put what is in no branch to who reads it: to the first branch where both do."""
    reading: dict[str, set[int]] = {op.name: set() for op in ops}
    for op in reversed(ops):
        if place.get(op.name) is None:
            sides = reading[op.name]
            if op.name in place:
                place[op.name] = min(sides, default=None)
        else:
            sides = {place[op.name] or 0}
        for tensor in op.inputs:
            if tensor in maker:
                reading[maker[tensor]] |= sides


def m_shape(workload: Workload, num_devices: int, shared: float) -> tuple[Stage, ...]:
    """A stage with `shared` of the arithmetic on all devices, then equal ones on each."""
    _check(num_devices, shared)
    own = (1 - shared) / num_devices
    parts = _cut(workload, _forward(workload), [shared, *[own] * num_devices])
    return _stages(
        workload, num_devices, list(zip([None, *range(num_devices)], parts, strict=True)), "behind"
    )


def nn_shape(workload: Workload, num_devices: int, shared: float) -> tuple[Stage, ...]:
    """As an M shape; the second half of `shared` stands halfway, before the second devices."""
    _check(num_devices, shared)
    own, half = (1 - shared) / num_devices, num_devices // 2
    devices: list[int | None] = [*range(num_devices)]
    sizes = [own] * num_devices
    devices[half:half], sizes[half:half] = [None], [shared / 2]
    parts = _cut(workload, _forward(workload), [shared / 2, *sizes])
    return _stages(workload, num_devices, list(zip([None, *devices], parts, strict=True)), "around")


def k_shape(workload: Workload, num_devices: int, shared: float) -> tuple[Stage, ...]:
    """Two branches on devices by their arithmetic; where they meet, and their ends, on all.

    The shared stage takes ends of both branches until it has `shared` of the arithmetic, and has
    more where more than that comes behind the branches: with 0, just what does.
    """
    _check(num_devices, shared or 0.5)
    forked = branches(workload.graph)
    if forked is None:
        raise PlanError(
            f"the model has no two branches with {LEAST:.0%} of the arithmetic each that meet",
            fix="leave it out, or pin shape=m or shape=nn",
            field="shape",
        )
    work = _arithmetic(workload)
    total = max(sum(work.values()), 1.0)
    behind = sum(work[op] for op in forked.meeting) / total
    ends = max(0.0, shared - behind) / max(1 - behind, 1e-9)  # of each branch
    first, second = (sum(work[op] for op in side) for side in forked.sides)
    own = min(max(1, round(num_devices * first / (first + second))), num_devices - 1)
    parts: list[Part] = []
    meeting = set(forked.meeting)
    for side, devices in zip(forked.sides, (range(own), range(own, num_devices)), strict=True):
        sizes = [(1 - ends) / len(devices)] * len(devices)
        *cut, last = _cut(workload, side, [*sizes, ends])
        parts += zip(devices, cut, strict=True)
        meeting |= set(last)
    behind_all = [op for op in _forward(workload) if op in meeting]
    return _stages(workload, num_devices, [*parts, (None, behind_all)], "before")


SHAPES: dict[str, Callable[[Workload, int, float], tuple[Stage, ...]]] = {
    "m": m_shape,
    "nn": nn_shape,
    "k": k_shape,
}


def shape_name(groups: tuple[tuple[int, ...], ...]) -> str:
    """Which shape the groups of devices of a plan's stages have, by which stages are shared."""
    shared, last = sorted(shared_stages(groups)), max(map(max, groups))
    if not shared:
        return LINE_SHAPE
    if shared == [0]:
        return "m"
    if shared == [last]:
        return "k"
    return "nn" if len(shared) == 2 and shared[0] == 0 and shared[1] < last else OTHER_SHAPE


def _check(num_devices: int, shared: float) -> None:
    if not 0 < shared < 1 or num_devices < 2:
        raise PlanError(
            f"{shared:g} of the work is shared by {num_devices} devices",
            fix="share a part between 0 and 1 on at least 2 devices",
            field="shape",
        )


def _forward(workload: Workload) -> list[str]:
    return [op.name for op in workload.graph.ops if op.phase == "forward"]


def _arithmetic(workload: Workload) -> dict[str, float]:
    graph = workload.graph
    return {op.name: float(flops(graph.call(op))) for op in graph.ops if op.phase == "forward"}


def _cut(workload: Workload, ops: Sequence[str], sizes: Sequence[float]) -> list[list[str]]:
    """Consecutive parts of the ops with these parts of their arithmetic."""
    work = _arithmetic(workload)
    total, before = max(sum(work[op] for op in ops), 1.0), 0.0
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes) - 1)]
    parts: list[list[str]] = [[] for _ in sizes]
    for op in ops:
        parts[bisect_right(ends, (before + work[op] / 2) / total)].append(op)
        before += work[op]
    return parts


def _stages(
    workload: Workload, num_devices: int, parts: Sequence[Part], where: str
) -> tuple[Stage, ...]:
    if not all(ops for _, ops in parts):
        raise PlanError(
            f"the model has too few ops for {num_devices} stages {where} shared ones",
            fix="use fewer devices, or share another part",
            field="shape",
        )
    mesh = Mesh((Axis("dp", num_devices),), tuple(range(num_devices)))
    splits = {split.op: split for split in data_splits(workload.graph, mesh, 0)}
    together = [ops for device, ops in parts if device is None]
    stages = []
    place = {op: number for number, op in enumerate(_forward(workload))}
    for device, ops in parts:
        in_order = sorted(ops, key=place.__getitem__)
        if device is None:
            number = together.index(ops) or ""
            stages.append(Stage(f"shared{number}", mesh, tuple(splits[op] for op in in_order)))
        else:
            own = tuple(OpSplit(op, ()) for op in in_order)
            stages.append(Stage(f"stage{device}", Mesh((), (device,)), own))
    return tuple(stages)


def shape_plan(
    shape: str, workload: Workload, cluster: Cluster, num_microbatches: int, *,
    shared: float = 0.25, schedule: str = SEARCHED, stop: Stop | None = None, seed: int = 0,
) -> Plan:  # fmt: skip
    """The plan of a shape on all devices of a cluster; the faster of 1F1B and what is found."""
    if shape not in SHAPES:
        raise InputError(f"found {shape!r}", fix=suggest(shape, SHAPES), field="shape")
    stages = SHAPES[shape](workload, cluster.num_devices, shared)
    name = "1f1b" if schedule == SEARCHED else schedule
    simulation = simulate_stages(workload, cluster, stages, Schedule(name, num_microbatches))
    if schedule == SEARCHED:
        simulation = _searched(simulation, stages, stop or Stop(time_s=20.0), seed)
    why = f"{shared:.0%} of the arithmetic on all devices, {simulation.schedule.name}"
    return Plan(
        workload.ref(),
        cluster_ref(cluster.name, cluster),
        simulation.decided,
        simulation.prediction(0.0),
        Origin(f"{shape}-shape", "feasible", why, seed, 0.0, __version__),
        simulation.schedule,
    )


def _searched(usual: Simulation, stages: tuple[Stage, ...], stop: Stop, seed: int) -> Simulation:
    settings = replace(USUAL, largest_order=LARGEST_ORDER)
    order = searched_schedule(usual, Memo(Collectives(usual.cluster)), stop, seed, settings)
    if order is None:
        return usual
    reordered = simulate_stages(usual.workload, usual.cluster, stages, order)
    return reordered if reordered.fits and reordered.step_s < usual.step_s else usual


def searched_schedule(
    simulation: Simulation, memo: Memo, stop: Stop, seed: int, settings: PlanSettings = USUAL
) -> Schedule | None:
    """A better order for the stages of a simulated plan, if the search finds any order."""
    stages, count = simulation.stages, simulation.schedule.num_microbatches
    groups = device_groups(stages)
    shared = shared_stages(groups)
    if len(stages) != len(groups) + len(shared) or (
        BLOCKS * len(stages) * count > settings.largest_order
    ):
        return None
    graph = simulation.workload.graph
    apart = Schedule("zb-h1", count)
    lowered = lower_plan(
        stages, apart, graph, simulation.cluster, run, memo, quick=True,
        execution=simulation.workload.execution,
    )  # fmt: skip
    costs = [
        _cost(stage, tuple(g for g, own in enumerate(groups) if i in own), lowered.blocks[i],
              _entering(lowered, i))
        for i, stage in enumerate(stages)
    ]  # fmt: skip
    budgets = _budgets(simulation, groups, lowered, settings)
    back = lowered.sends.backward
    links = [
        StageLink(i, j, sent.seconds, back[j, i].seconds if (j, i) in back else 0)
        for (i, j), sent in lowered.sends.forward.items()
        if shared or j == i + 1
    ]
    if len(links) != len(lowered.sends.forward) or min(budgets) <= 0:
        return None  # skips between stages far apart are no chain
    if any(cost.backward_s <= 0 or cost.forward_s <= 0 for cost in costs):
        return None
    if not shared and any(cost.weight_s <= 0 for cost in costs):
        return None
    problem = placement_from_stages(costs, links, len(groups)).problem(budgets, count)
    solution = searches("schedule")[settings.order_method](problem, stop, seed).solution
    if solution is None:
        return None
    return Schedule(SEARCHED, count, order_text(_order(costs, len(groups), solution.starts)))


def _entering(lowered: Lowered, number: int) -> float:
    return sum(s.target_bytes for (_, j), s in lowered.sends.forward.items() if j == number)


def _cost(stage: Stage, groups: tuple[int, ...], blocks: Blocks, entering: float) -> StageCost:
    """What a stage takes; one without data gradients (an embedding) has its backward in one."""
    assert blocks.backward is not None, "training has a backward"
    assert blocks.weight is not None, "it was taken apart"
    held = max(blocks.forward.held_bytes)
    kept = min(held, max(blocks.backward.held_bytes))
    backward_s, weight_s = blocks.backward.seconds, blocks.weight.seconds
    if backward_s <= 0:
        backward_s, weight_s = weight_s, 0.0
    return StageCost(
        groups if len(groups) > 1 else groups[0], blocks.forward.seconds, backward_s, weight_s,
        held + entering, kept, stage.name,
    )  # fmt: skip


def _budgets(
    simulation: Simulation, groups: Sequence[Sequence[int]], lowered: Lowered,
    settings: PlanSettings,
) -> list[float]:  # fmt: skip
    """What each group of devices has left for activations."""
    capacity = iter(simulation.capacity_bytes)  # by group, then by kind of device
    budgets = []
    for members, devices in zip(groups, group_devices(simulation.stages), strict=True):
        least = min(next(capacity) for _ in first_of_kinds(devices, simulation.cluster))
        budget = least * settings.order_fills - settings.order_reserve_bytes
        for number in members:
            blocks = lowered.blocks[number]
            assert blocks.backward is not None, "training has a backward"
            held = max(blocks.forward.held_bytes)
            peak = max(*blocks.forward.peak_bytes, *blocks.backward.peak_bytes) - held
            entering = _entering(lowered, number)
            budget -= max(blocks.static_bytes) + (2 * entering + max(0.0, peak))
        budgets.append(budget)
    return budgets


def _order(
    costs: Sequence[StageCost], num_groups: int, starts: Sequence[tuple[int, int, float]]
) -> Order:
    """The rows of all groups; blocks are numbered as `placement_from_stages` adds them."""
    blocks = [(number, "F") for number in range(len(costs))]
    for number in reversed(range(len(costs))):
        halves = costs[number].weight_s > 0
        blocks += [(number, "I"), (number, "W")] if halves else [(number, "B")]
    rows: list[list[Action]] = [[] for _ in range(num_groups)]
    for _, m, block in sorted((start, m, block) for m, block, start in starts):
        number, kind = blocks[block]
        own = costs[number].devices
        for group in (own,) if isinstance(own, int) else own:
            rows[group].append(Action(number, kind, m))
    return tuple(map(tuple, rows))
