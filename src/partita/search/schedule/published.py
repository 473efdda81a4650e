"""Published schedules as first answers, where a problem is a pipeline that one is made for.

Each is an order of blocks on every device; run as early as it can it is a schedule like any other,
and one that holds more than a cap allows is left out. O(blocks * micro-batches) for each.
"""

from collections.abc import Iterator

from partita.errors import ProblemError
from partita.problems.schedule import (
    ScheduleProblem,
    ScheduleSolution,
    blocks_per_device,
    check,
    predecessors,
    solution_of,
)
from partita.schedules.actions import Order
from partita.schedules.named import NAMED
from partita.schedules.pipeline import Pipeline, StageHolding, held, on_devices, pipeline_of
from partita.search.base import Run

Table = list[list[float]]  # [microbatch][block]


def offer_published(problem: ScheduleProblem, run: Run[ScheduleSolution]) -> None:
    """Offer every published schedule that fits; nothing where the problem is no pipeline.

    Of those that end at the same time, the one whose devices wait least between their first start
    and their last end is first, and so kept: that is how bubbles are counted in publications. Then
    the one that holds least.
    """
    assert problem.num_microbatches is not None
    ranked: list[tuple[float, float, float, int, ScheduleSolution]] = []
    for table in published(problem, problem.num_microbatches):
        if run.done():
            return
        run.evaluations += 1
        solution = solution_of(problem, table)
        span, held = longest_span(problem, table), most_held(problem, table)
        ranked.append((solution.makespan, span, held, len(ranked), solution))
    for makespan, _, _, _, solution in sorted(ranked, key=lambda entry: entry[:-1]):
        if run.objective is not None and makespan >= run.objective:
            return
        if not check(problem, solution):
            run.offer(solution, makespan)


def longest_span(problem: ScheduleProblem, table: Table) -> float:
    """The longest that a device takes from its first start to its last end."""
    return max(
        max(row[block] + problem.blocks[block].span for row in table for block in here)
        - min(row[block] for row in table for block in here)
        for here in blocks_per_device(problem)
        if here
    )


def most_held(problem: ScheduleProblem, table: Table) -> float:
    """The most memory that any device holds at a time."""
    most: float = 0
    for here in blocks_per_device(problem):
        held: float = 0
        for _, block in sorted((row[block], block) for row in table for block in here):
            held += problem.blocks[block].memory
            most = max(most, held)
    return most


def published(problem: ScheduleProblem, count: int) -> Iterator[Table]:
    """The schedules, whether they fit the caps or not."""
    try:
        pipeline = pipeline_of(problem)
    except ProblemError:
        return
    where = held(pipeline)
    if where is None or not pipeline.training:
        return
    for named in NAMED.values():
        if named.layout != where.layout or (named.split and not pipeline.split):
            continue
        if named.refuses(len(where.ranks), where.chunks, count):
            continue
        order = named.order(len(where.ranks), where.chunks, count)
        table = earliest(problem, _rows(pipeline, where, order), count)
        if table is not None:
            yield table


def earliest(
    problem: ScheduleProblem, rows: list[list[tuple[int, int]]], count: int
) -> Table | None:
    """Each device runs its (micro-batch, block)s in order, as early as it can; None if stuck.

    For blocks on one device each.
    """
    before = predecessors(problem)
    behind: list[list[int]] = [[] for _ in problem.blocks]
    for first, second in problem.deps:
        behind[first].append(second)
    starts: dict[tuple[int, int], float] = {}
    at = [0] * len(rows)
    free_at: list[float] = [0] * len(rows)
    ready = list(range(len(rows)))
    while ready:
        device = ready.pop()
        while at[device] < len(rows[device]):
            m, block = rows[device][at[device]]
            if any((m, first) not in starts for first, _ in before[block]):
                break
            times = [starts[m, first] + lag for first, lag in before[block]]
            starts[m, block] = max(free_at[device], *times, 0)
            free_at[device] = starts[m, block] + problem.blocks[block].span
            at[device] += 1
            ready += [problem.blocks[child].devices[0] for child in behind[block]]
    if len(starts) < count * len(problem.blocks):
        return None
    return [[starts[m, block] for block in range(len(problem.blocks))] for m in range(count)]


def _rows(pipeline: Pipeline, where: StageHolding, order: Order) -> list[list[tuple[int, int]]]:
    """The blocks of each device's actions; `B` is both kinds of gradients."""
    rows: list[list[tuple[int, int]]] = []
    for actions in on_devices(order, where.ranks):
        row: list[tuple[int, int]] = []
        for stage_number, kind, m in actions:
            stage = pipeline.stages[stage_number]
            blocks = {
                "F": (stage.forward,),
                "I": (stage.backward,),
                "W": (stage.weight,),
                "B": (stage.backward, stage.weight),
            }[kind]
            row += [(m, block) for block in blocks if block is not None]
        rows.append(row)
    return rows
