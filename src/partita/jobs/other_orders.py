"""The same stages in the other orders that people know: how long each takes, what it holds.

A named schedule runs where the stages lie as it needs them. Stages, splits and micro-batches stay;
only the order of blocks changes, so what differs between two timelines is the order's.
"""

from dataclasses import dataclass

from partita.costs.collectives import Collectives
from partita.errors import PartitaError
from partita.jobs.simulate import Simulation, simulate_stages
from partita.lower import Memo
from partita.lower.orders import refusal
from partita.plans import Schedule, device_groups
from partita.schedules.named import NAMED

MOST_BLOCKS = 2_000  # stages times micro-batches of an order that is still drawn


@dataclass(frozen=True, slots=True)
class OtherOrder:
    """A schedule by its name and title, and what the plan would be with it."""

    name: str
    title: str
    simulation: Simulation


def other_orders(simulation: Simulation) -> tuple[OtherOrder, ...]:
    """All named schedules that fit the stages of a pipeline, fastest first; its own too."""
    count = simulation.schedule.num_microbatches
    if len(simulation.stages) < 2 or count * len(simulation.stages) > MOST_BLOCKS:
        return ()
    groups = device_groups(simulation.stages)
    memo = Memo(Collectives(simulation.cluster))
    # The order of collectives belongs to the order of blocks: it is decided anew.
    stages = tuple(stage.undecided() for stage in simulation.stages)
    orders: list[OtherOrder] = []
    if simulation.schedule.order or simulation.schedule.name not in NAMED:
        orders.append(OtherOrder(simulation.schedule.name, "as planned", simulation))
    for name, named in NAMED.items():
        if name == simulation.schedule.name and not simulation.schedule.order:
            orders.append(OtherOrder(name, named.title, simulation))
            continue
        # With one stage on each device a looped order is that of a line under another name.
        alone = len(groups[0]) == 1 and named.layout != "line"
        if alone or refusal(name, groups, count):
            continue
        try:
            other = simulate_stages(
                simulation.workload, simulation.cluster, stages, Schedule(name, count), memo,
                quick=True,
            )  # fmt: skip
        except PartitaError:  # an order that cannot run on these stages is none to compare with
            continue
        orders.append(OtherOrder(name, named.title, other))
    return tuple(sorted(orders, key=lambda order: (order.simulation.step_s, order.name)))
