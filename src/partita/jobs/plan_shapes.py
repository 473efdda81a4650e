"""Tessel's shapes as candidates of `plan`: a stage on each device, beside what all devices share.

They are no cells of the joint space. M and NN pay only beside pipelines: what would burden one
stage (an embedding, a stem on large inputs) is spread over all. K pays where a model has branches:
they run at the same time. So they are tried where one is pinned (`shape=m`, `nn`, `k`); where
nobody asked for degrees, M beside a pipeline that has won, and K beside anything. How much is
shared and the number of micro-batches are tried one after the other; the order of blocks is
searched for the best.
"""

from functools import partial

from partita.errors import InputError, PlanError
from partita.jobs.constraints import SEARCHED
from partita.jobs.plan_order import searched_schedule
from partita.jobs.plan_simulator import SimulatedPlan, Simulator, rank
from partita.jobs.shared_stages import SHAPES
from partita.plans import Schedule, Stage, device_groups
from partita.search.base import Result, Status
from partita.search.joint.groupings import divisors

PINS = ("pp", "vpp", "dp", "tp", "cp", "ep", "sp", "mesh")  # what a pipeline was asked for with
IN_WORDS = {
    "m": "of the arithmetic on all devices, then a stage on each",
    "nn": "of the arithmetic on all devices, half of it before and half of it halfway through a "
    "stage on each",
    "k": "of the arithmetic on all devices, or just what is behind two branches; before it a "
    "stage of a branch on each",
}


def only_shapes(simulator: Simulator, shape: str) -> Result[object]:
    """All that is tried where a shape is pinned; nothing is known of what was not tried."""
    if not simulator.model.is_cut:
        raise InputError(
            f"shape={shape} is for several micro-batches, and ops of the model mix samples",
            fix=f"drop shape={shape}",
            field="pin",
        )
    placed = _placed(simulator, shape, simulator.settings.shapes.shared)
    candidates = _tried(simulator, shape, placed, _counts(simulator))
    for candidate in sorted(candidates, key=rank)[: simulator.settings.shapes.ordered]:
        _reorder(simulator, shape, candidate)
    return Result(
        f"{shape}-shape", Status.FEASIBLE, None, None, None, "all shapes were tried",
        simulator.clock.seconds(), simulator.seed, len(candidates),
    )  # fmt: skip


def shape_space(simulator: Simulator, shape: str) -> str:
    """What is tried where a shape is pinned, in words."""
    parts = ", ".join(f"{part:.0%}" for part in simulator.settings.shapes.shared)
    counts = " or ".join(map(str, _counts(simulator))) or "no number of"
    orders = simulator.constraints.pinned_to("schedule") or f"1f1b and {SEARCHED}"
    return (
        f"{parts} {IN_WORDS[shape]}; {counts} micro-batches; "
        f"orders {orders}; with {simulator.constraints}"
    )


def also_shapes(simulator: Simulator) -> None:
    """Shapes beside a plan that won by itself: M beside a pipeline, on as many micro-batches.

    K wherever there are branches: a chain of segments has no cut between them.
    """
    best, settings = simulator.best(), simulator.settings.shapes
    if best is None or any(simulator.constraints.pinned_to(pin) for pin in PINS):
        return
    if simulator.cluster.num_devices > settings.most_devices:
        return
    if not (simulator.workload.training and simulator.model.is_cut):
        return
    if len(device_groups(best.simulation.stages)) > 1:
        count = best.simulation.schedule.num_microbatches
        _beside(simulator, "m", (count,), best.objective_s)
    _beside(simulator, "k", _counts(simulator), best.objective_s)


def _beside(
    simulator: Simulator, shape: str, counts: tuple[int, ...], best_s: float
) -> None:  # fmt: skip
    """One shape beside the best plan; the order is searched where it could win."""
    batch, size = simulator.workload.batch, simulator.cluster.num_devices
    settings = simulator.settings.shapes
    if not simulator.constraints.allow("shape", shape):
        return
    counts = tuple(n for n in counts if batch // n >= size)  # a sample for every device
    try:
        placed = _placed(simulator, shape, settings.shared[: settings.beside])
    except InputError:
        return  # the model is not of this shape
    fitting = [each for each in _tried(simulator, shape, placed, counts) if each.fits]
    if fitting and min(fitting, key=rank).objective_s < best_s * (1 + settings.gain):
        _reorder(simulator, shape, min(fitting, key=rank))


def _counts(simulator: Simulator) -> tuple[int, ...]:
    """Numbers of micro-batches: a few for each device, each with a sample for every device."""
    batch, size = simulator.workload.batch, simulator.cluster.num_devices
    allow = simulator.constraints.allow
    counts = [n for n in divisors(batch) if batch // n >= size and allow("micro-batches", n)]
    wanted = simulator.settings.shapes.microbatches * size
    return tuple(sorted(sorted(counts, key=lambda n: (abs(n - wanted), n))[:2]))


def _placed(
    simulator: Simulator, shape: str, parts: tuple[float, ...]
) -> list[tuple[Stage, ...]]:  # fmt: skip
    """The stages of a shape with each part shared; refused where the model has none of them."""
    placed: list[tuple[Stage, ...]] = []
    why: PlanError | None = None
    for shared in (0.0, *parts) if shape == "k" else parts:
        try:
            stages = SHAPES[shape](simulator.workload, simulator.cluster.num_devices, shared)
        except PlanError as error:
            why = error  # too few ops for a stage on each device, or no branches
            continue
        placed += [] if stages in placed else [stages]
    if why is not None and not placed:
        raise InputError(f"shape={shape}: {why.found}", fix=why.fix, field="pin") from None
    return placed


def _tried(
    simulator: Simulator, shape: str, placed: list[tuple[Stage, ...]], counts: tuple[int, ...]
) -> list[SimulatedPlan]:
    """Stages of a shape with each number, under 1F1B or the schedule that is asked for."""
    name = simulator.constraints.pinned_to("schedule") or "1f1b"
    tried: list[SimulatedPlan] = []
    for stages in placed:
        for count in counts:
            if simulator.cut():
                return tried
            if not simulator.allowed(stages, Schedule(name, count)):
                continue
            candidate = simulator.add(f"{shape}-shape", stages, Schedule(name, count))
            tried += [] if candidate is None else [candidate]
    return tried


def _reorder(simulator: Simulator, shape: str, candidate: SimulatedPlan) -> None:
    if not simulator.constraints.allow("schedule", SEARCHED) or simulator.cut():
        return
    order = simulator.attempt(
        f"a searched order of {shape}-shape",
        partial(
            searched_schedule, candidate.simulation, simulator.memo, simulator.left(),
            simulator.seed, simulator.settings,
        ),
    )  # fmt: skip
    if order is not None:
        simulator.add(f"{shape}-shape", candidate.simulation.stages, order)
