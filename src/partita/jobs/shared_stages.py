"""Plans in Tessel's M shape: the first ops on all devices together, then a pipeline of one stage
on each device.

What a stage of its own would burden one device with (a large embedding, a stem on large inputs) is
shared by all: each device takes its part of every micro-batch. Where the shared stage ends is said
by its part of the model's arithmetic; the rest is cut into equal parts. The order of blocks is that
of a named schedule, or searched.
"""

from dataclasses import replace

from partita import __version__
from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.errors import PlanError
from partita.graph.flops import flops
from partita.jobs.carried import cluster_ref
from partita.jobs.constraints import SEARCHED
from partita.jobs.plan_order import searched_schedule
from partita.jobs.plan_settings import USUAL
from partita.jobs.simulate import Simulation, data_splits, simulate_stages
from partita.jobs.workload import Workload
from partita.lower import Memo
from partita.plans import Axis, Mesh, OpSplit, Origin, Plan, Schedule, Stage
from partita.search.base import Stop

LARGEST_ORDER = 10**4  # blocks in all


def m_shape(workload: Workload, num_devices: int, shared: float) -> tuple[Stage, ...]:
    """A stage with `shared` of the arithmetic on all devices, then equal ones on each."""
    if not 0 < shared < 1 or num_devices < 2:
        raise PlanError(
            f"{shared:g} of the work is shared by {num_devices} devices",
            fix="share a part between 0 and 1 on at least 2 devices",
            field="shape",
        )
    graph = workload.graph
    ops = [op for op in graph.ops if op.phase == "forward"]
    work = [float(flops(graph.call(op))) for op in ops]
    total, before = max(sum(work), 1.0), 0.0
    parts: list[list[str]] = [[] for _ in range(num_devices + 1)]
    for op, own in zip(ops, work, strict=True):
        place = (before + own / 2) / total
        rest = int((place - shared) / (1 - shared) * num_devices)
        parts[0 if place < shared else min(rest, num_devices - 1) + 1].append(op.name)
        before += own
    if not all(parts):
        raise PlanError(
            f"the model has too few ops for {num_devices} stages behind a shared one",
            fix="use fewer devices, or share another part",
            field="shape",
        )
    mesh = Mesh((Axis("dp", num_devices),), tuple(range(num_devices)))
    splits = {split.op: split for split in data_splits(graph, mesh, 0)}
    first = Stage("shared", mesh, tuple(splits[op] for op in parts[0]))
    own_stages = (
        Stage(f"stage{i}", Mesh((), (i,)), tuple(OpSplit(op, ()) for op in own))
        for i, own in enumerate(parts[1:])
    )
    return (first, *own_stages)


def m_shape_plan(
    workload: Workload, cluster: Cluster, num_microbatches: int, *, shared: float = 0.25,
    schedule: str = SEARCHED, stop: Stop | None = None, seed: int = 0,
) -> Plan:  # fmt: skip
    """The plan of an M shape on all devices of a cluster; the faster of 1F1B and what is found."""
    stages = m_shape(workload, cluster.num_devices, shared)
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
        Origin("m-shape", "feasible", why, seed, 0.0, __version__),
        simulation.schedule,
    )


def _searched(usual: Simulation, stages: tuple[Stage, ...], stop: Stop, seed: int) -> Simulation:
    settings = replace(USUAL, largest_order=LARGEST_ORDER)
    order = searched_schedule(usual, Memo(Collectives(usual.cluster)), stop, seed, settings)
    if order is None:
        return usual
    reordered = simulate_stages(usual.workload, usual.cluster, stages, order)
    return reordered if reordered.fits and reordered.step_s < usual.step_s else usual
