"""Tessel's M shape as candidates of `plan`: first ops on all devices, then a stage on each.

It is no cell of the joint space, and it pays only beside pipelines: what would burden one stage
(an embedding, a stem on large inputs) is spread over all. So it is tried where it is pinned
(`shape=m`), and where a pipeline has won that nobody asked for. How much is shared and the number
of micro-batches are tried one after the other; the order of blocks is searched for the best.
"""

from functools import partial

from partita.errors import PlanError
from partita.jobs.constraints import SEARCHED
from partita.jobs.plan_order import searched_schedule
from partita.jobs.plan_simulator import SimulatedPlan, Simulator, rank
from partita.jobs.shared_stages import m_shape
from partita.plans import Schedule, device_groups
from partita.search.base import Result, Status
from partita.search.joint.groupings import divisors

NAME = "m-shape"
PINS = ("pp", "vpp", "dp", "tp", "cp", "ep", "sp", "mesh")  # what a pipeline was asked for with


def only_shapes(simulator: Simulator) -> Result[object]:
    """All that is tried where the shape is pinned; nothing is known of what was not tried."""
    candidates = _tried(simulator, simulator.settings.shapes.shared, _counts(simulator))
    for candidate in sorted(candidates, key=rank)[: simulator.settings.shapes.ordered]:
        _reorder(simulator, candidate)
    return Result(
        NAME, Status.FEASIBLE, None, None, None, "all shapes were tried",
        simulator.clock.seconds(), simulator.seed, len(candidates),
    )  # fmt: skip


def shape_space(simulator: Simulator) -> str:
    """What is tried where the shape is pinned, in words."""
    parts = ", ".join(f"{part:.0%}" for part in simulator.settings.shapes.shared)
    counts = " or ".join(map(str, _counts(simulator))) or "no number of"
    orders = simulator.constraints.pinned_to("schedule") or f"1f1b and {SEARCHED}"
    return (
        f"{parts} of the arithmetic on all devices, then a stage on each; {counts} micro-batches; "
        f"orders {orders}; with {simulator.constraints}"
    )


def also_shapes(simulator: Simulator) -> None:
    """The shape beside a pipeline that won by itself, on as many micro-batches."""
    best, settings = simulator.best(), simulator.settings.shapes
    if best is None or any(simulator.constraints.pinned_to(pin) for pin in PINS):
        return
    num_devices = simulator.cluster.num_devices
    if len(device_groups(best.simulation.stages)) < 2 or num_devices > settings.most_devices:
        return
    count = best.simulation.schedule.num_microbatches
    if simulator.workload.batch // count < num_devices:
        return  # a sample for every device is needed
    candidates = _tried(simulator, settings.shared[: settings.beside], (count,))
    fitting = [candidate for candidate in candidates if candidate.fits]
    close = best.objective_s * (1 + settings.gain)
    if fitting and min(fitting, key=rank).objective_s < close:
        _reorder(simulator, min(fitting, key=rank))


def _counts(simulator: Simulator) -> tuple[int, ...]:
    """Numbers of micro-batches: a few for each device, each with a sample for every device."""
    batch, size = simulator.workload.batch, simulator.cluster.num_devices
    allow = simulator.constraints.allow
    counts = [n for n in divisors(batch) if batch // n >= size and allow("micro-batches", n)]
    wanted = simulator.settings.shapes.microbatches * size
    return tuple(sorted(sorted(counts, key=lambda n: (abs(n - wanted), n))[:2]))


def _tried(
    simulator: Simulator, parts: tuple[float, ...], counts: tuple[int, ...]
) -> list[SimulatedPlan]:
    """The shape with each part shared and each number, under 1F1B or the schedule that is asked."""
    name = simulator.constraints.pinned_to("schedule") or "1f1b"
    workload, size = simulator.workload, simulator.cluster.num_devices
    if not (workload.training and simulator.model.is_cut and size > 1):
        return []
    tried: list[SimulatedPlan] = []
    for shared in parts:
        try:
            stages = m_shape(workload, size, shared)
        except PlanError:
            continue  # too few ops are left for a stage on each device
        for count in counts:
            if simulator.cut():
                return tried
            if not simulator.allowed(stages, Schedule(name, count)):
                continue
            candidate = simulator.add(NAME, stages, Schedule(name, count))
            tried += [] if candidate is None else [candidate]
    return tried


def _reorder(simulator: Simulator, candidate: SimulatedPlan) -> None:
    if not simulator.constraints.allow("schedule", SEARCHED) or simulator.cut():
        return
    order = simulator.attempt(
        "a searched order of an m-shape",
        partial(
            searched_schedule, candidate.simulation, simulator.memo, simulator.left(),
            simulator.seed, simulator.settings,
        ),
    )  # fmt: skip
    if order is not None:
        simulator.add(NAME, candidate.simulation.stages, order)
