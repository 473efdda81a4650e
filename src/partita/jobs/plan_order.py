"""Search the order of a plan's micro-batches under the memory that is left.

The plan's stages are lowered with data and weight gradients apart; their blocks, the transfers and
what each group of devices has left beside parameters and states make a schedule problem, which the
schedule searches solve. The order found becomes the plan's schedule, action by action.
"""

from partita.engine import run
from partita.jobs.constraints import SEARCHED
from partita.jobs.plan_settings import USUAL, PlanSettings
from partita.jobs.simulate import Simulation
from partita.lower import Memo, lower_plan
from partita.lower.orders import order_text
from partita.plans import Schedule, device_groups
from partita.schedules.pipeline import order_of, pipeline_of
from partita.schedules.stages import StageCost, StageLink, placement_from_stages
from partita.search import searches
from partita.search.base import Stop

BLOCKS = 3  # of a stage and micro-batch: forward, data gradients, weight gradients


def searched_schedule(
    simulation: Simulation, memo: Memo, stop: Stop, seed: int, settings: PlanSettings = USUAL
) -> Schedule | None:
    """A better order for the stages of a simulated plan, if the search finds any order."""
    stages, count = simulation.stages, simulation.schedule.num_microbatches
    groups = device_groups(stages)
    if len(groups) != len(stages) or BLOCKS * len(stages) * count > settings.largest_order:
        return None
    graph = simulation.workload.graph
    apart = Schedule("zb-h1", count)
    lowered = lower_plan(stages, apart, graph, simulation.cluster, run, memo, quick=True)
    costs, budgets = [], []
    capacity = simulation.capacity_bytes
    for number, blocks in enumerate(lowered.blocks):
        assert blocks.backward is not None, "training has a backward"
        assert blocks.weight is not None, "it was taken apart"
        held = max(blocks.forward.held_bytes)
        kept = min(held, max(blocks.backward.held_bytes))
        peak = max(*blocks.forward.peak_bytes, *blocks.backward.peak_bytes) - held
        entering = sum(s.target_bytes for (_, j), s in lowered.sends.forward.items() if j == number)
        seconds = (blocks.forward.seconds, blocks.backward.seconds, blocks.weight.seconds)
        if min(seconds) <= 0:
            return None
        costs.append(StageCost(number, *seconds, held + entering, kept, stages[number].name))
        always = max(blocks.static_bytes) + (2 * entering + max(0.0, peak))
        budget = capacity[min(number, len(capacity) - 1)] * settings.order_fills
        budgets.append(budget - settings.order_reserve_bytes - always)
    back = lowered.sends.backward
    links = [
        StageLink(i, j, sent.seconds, back[j, i].seconds if (j, i) in back else 0)
        for (i, j), sent in lowered.sends.forward.items()
        if j == i + 1
    ]
    if len(links) != len(lowered.sends.forward) or min(budgets) <= 0:
        return None  # skips between stages far apart are no chain
    problem = placement_from_stages(costs, links).problem(budgets, count)
    found = searches("schedule")[settings.order_method](problem, stop, seed).solution
    if found is None:
        return None
    order = order_of(pipeline_of(problem), found.starts)
    return Schedule(SEARCHED, count, order_text(order))
