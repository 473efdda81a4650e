"""Plans in Tessel's shapes: a stage on each device, beside stages that all devices run together.

    m    the first ops on all devices, then a pipeline of one stage on each
    nn   as m, and ops halfway through the pipeline on all devices, too
    k    two branches of the model, each a pipeline on devices of its own, meet on all devices

What a stage of its own would burden one device with (a large embedding, a stem on large inputs, a
loss) is shared by all: each device takes its part of every micro-batch. How much is shared is said
by its part of the model's arithmetic; the rest is cut into equal parts. The order of blocks is that
of a named schedule, or searched.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

from partita import __version__
from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.errors import InputError, PlanError
from partita.graph.work import flops
from partita.jobs.branches import LEAST, branches
from partita.jobs.carried import cluster_ref
from partita.jobs.constraints import LINE_SHAPE, OTHER_SHAPE, SEARCHED
from partita.jobs.plan_order import searched_schedule
from partita.jobs.plan_settings import USUAL
from partita.jobs.simulate import Simulation, data_splits, simulate_stages
from partita.jobs.workload import Workload
from partita.lower import Memo
from partita.plans import Axis, Mesh, OpSplit, Origin, Plan, Schedule, Stage, shared_stages
from partita.search.base import Stop
from partita.suggest import suggest

LARGEST_ORDER = 10**4  # blocks in all

Part = tuple[int | None, Sequence[str]]  # the device of a stage (None: all of them), and its ops


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
