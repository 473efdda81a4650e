"""Fewer devices that are faster: where nothing divides their number, or the batch is too small.

A plan uses all devices of its machine. Seven devices and a batch of 64, or a thousand and a batch
of one, are slower than some of them: so the largest power of two of devices is looked at, and the
largest that is not above the batch, with replicas (ZeRO 0, 1, 3) and the best forecast of FSDP2.
This is no search: it says that planning for fewer is worth it.
"""

from dataclasses import dataclass

from partita.errors import PartitaError
from partita.jobs.frameworks import FIELD, FieldSettings, FrameworkPlan, field_plans
from partita.jobs.plan_simulator import Planned
from partita.jobs.simulate import Simulation, simulate_stages
from partita.jobs.strategies import STRATEGIES
from partita.plans import Schedule

WORTH = 0.98  # of the plan's time: less is worth saying
REPLICAS = ("data", "zero1", "fsdp")


@dataclass(frozen=True, slots=True)
class FewerDevices:
    """How many devices are faster than all, how they are used, and how long they take."""

    num_devices: int
    of_devices: int
    arrangement: str
    step_s: float
    times: float  # of the plan's step


def fewer_devices(planned: Planned) -> FewerDevices | None:
    """Fewer devices that beat a training plan, if any do; asked only where that is likely."""
    if planned.best is None or not planned.best.simulation.workload.training:
        return None
    simulation = planned.best.simulation
    total, batch = simulation.cluster.num_devices, simulation.workload.batch
    if not simulation.cluster.is_homogeneous or (batch % total == 0 and _power(total) == total):
        return None
    counts = sorted({_power(total), _power(min(total, batch))} - {total}, reverse=True)
    best: FewerDevices | None = None
    for count in counts:
        for one in _simulated(simulation, count):
            limit = planned.best.step_s * WORTH if best is None else best.step_s
            if one.fits and one.step_s < limit:
                best = FewerDevices(
                    count, total, one.arrangement, one.step_s, one.step_s / planned.best.step_s
                )
    return best


def _power(number: int) -> int:
    """The largest power of two up to a number."""
    return 1 << (number.bit_length() - 1)


def _simulated(simulation: Simulation, count: int) -> list[Simulation]:
    """A few plans for the first devices."""
    workload, graph = simulation.workload, simulation.workload.graph
    cluster = simulation.cluster.subset(range(count))
    plans: list[FrameworkPlan] = [
        ((stage,), Schedule())
        for name in REPLICAS[: 1 if count == 1 else None]
        for stage in STRATEGIES[name].stages(graph, count)
    ]
    simulations = []
    try:
        settings = FieldSettings(plans=1)
        plans += field_plans(FIELD["fsdp2"], graph, cluster, workload.batch, settings)
        simulations = [simulate_stages(workload, cluster, *plan) for plan in plans]
    except PartitaError:  # a plan that cannot be is no advice
        pass
    return simulations
