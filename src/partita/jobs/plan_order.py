"""Search the order of a plan's micro-batches under the memory that is left.

The plan's stages are lowered with data and weight gradients apart; their blocks, the transfers and
what each group of devices has left beside parameters and states make a schedule problem, which the
schedule searches solve: groups of devices are its devices, and a stage that several of them share
is a block on all of these. The order found becomes the plan's schedule, action by action.
"""

from collections.abc import Sequence

from partita.engine import run
from partita.jobs.constraints import SEARCHED
from partita.jobs.plan_settings import USUAL, PlanSettings
from partita.jobs.simulate import Simulation
from partita.lower import Memo, first_of_kinds, lower_plan
from partita.lower.blocks import Blocks
from partita.lower.orders import order_text
from partita.lower.pipeline import Lowered
from partita.plans import Schedule, Stage, device_groups, group_devices, shared_stages
from partita.schedules.actions import Action, Order
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
