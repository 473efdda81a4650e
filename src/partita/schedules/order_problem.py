"""From an order to the problem it is an order of, and from a solution to its order.

An order says which rank runs which stage; with spans and memory of a stage it is a schedule problem
that can be simulated, searched and compared. The other way round, a schedule that was found is an
order where its blocks are one pipeline, which is what torch.distributed.pipelining can run.
"""

from partita.errors import ProblemError
from partita.problems.schedule import ScheduleProblem, ScheduleSolution
from partita.schedules.actions import Order
from partita.schedules.pipeline import Pipeline, order_of, pipeline_of
from partita.schedules.placement import Block, Placement
from partita.schedules.shapes import BACKWARD_SPAN, ShapeOptions


def order_of_solution(problem: ScheduleProblem, solution: ScheduleSolution) -> Order:
    """The order of a schedule that was found; refused where torch has no words for it."""
    return order_of(csv_pipeline(problem), solution.starts)


def csv_pipeline(problem: ScheduleProblem) -> Pipeline:
    """The pipeline to be written; a `ProblemError` says why torch has no words for it."""
    try:
        pipeline = pipeline_of(problem)
        if len(pipeline.chains) > 1:
            raise _no_csv(f"it holds {len(pipeline.chains)} pipelines side by side")
        if not pipeline.training:
            raise _no_csv("it has no backward pass, which torch asks for")
        idle = sorted(set(range(problem.num_devices)) - {s.device for s in pipeline.stages})
        if idle:
            raise _no_csv(f"device {idle[0]} runs nothing")
    except ProblemError as error:
        fix = "use --trace or --svg, which draw any placement"
        raise ProblemError(error.found, fix=fix, field="CSV") from None
    return pipeline


def placement_of_order(order: Order, options: ShapeOptions | None = None) -> Placement:
    """The pipeline that an order runs: its stages on the ranks that run them, all alike.

    Spans and memory are of one stage, as in `ShapeOptions`; weight gradients are blocks of their
    own if the order has actions for them (1 of the backward's span if none is given).
    """
    options = options or ShapeOptions()
    ranks: dict[int, int] = {}
    for rank, row in enumerate(order):
        for action in row:
            if ranks.setdefault(action.stage, rank) != rank:
                raise ProblemError(
                    f"stage {action.stage} is on rank {ranks[action.stage]} and on rank {rank}",
                    fix="run a stage on one rank", field="order",
                )  # fmt: skip
    for stage in range(max(ranks) + 1):
        if stage not in ranks:
            raise ProblemError(f"stage {stage} is missing", fix="number them from 0", field="order")
    split = any(action.kind in "IW" for row in order for action in row)
    place = Placement(len(order), "order")
    training = any(action.kind in "BI" for row in order for action in row)
    held = options.memory if training else 0
    forward = [Block(f"F{s}", options.forward_span, held) for s in range(len(ranks))]
    _add_line(place, forward, [ranks[s] for s in range(len(ranks))], options.delay)
    if training:
        _add_backward(place, ranks, options, split)
    return place


def in_flight(order: Order) -> tuple[int, ...]:
    """The most micro-batches of each rank whose forward has begun and whose backward has not ended.

    A micro-batch counts once, however many stages of the rank hold it.
    """
    most = []
    for row in order:
        held: dict[int, int] = {}  # micro-batch -> stages that hold it
        peak = 0
        split = {(action.stage, action.microbatch) for action in row if action.kind == "W"}
        for stage, kind, microbatch in row:
            if kind == "F":
                held[microbatch] = held.get(microbatch, 0) + 1
            elif kind in ("B", "W") or (stage, microbatch) not in split:
                held[microbatch] -= 1
                if not held[microbatch]:
                    del held[microbatch]
            peak = max(peak, len(held))
        most.append(peak)
    return tuple(most)


def _add_backward(
    place: Placement, ranks: dict[int, int], options: ShapeOptions, split: bool
) -> None:
    weight = (options.weight_span or 1) if split else 0
    span = options.backward_span
    if span is None:
        span = BACKWARD_SPAN - weight if weight < BACKWARD_SPAN else weight
    kept = options.memory if options.weight_memory is None else options.weight_memory
    kept = kept if split else 0
    stages = sorted(ranks, reverse=True)
    backward = [Block(f"B{s}", span, kept - options.memory, "backward") for s in stages]
    _add_line(place, backward, [ranks[s] for s in stages], options.delay)
    place.depends(f"F{stages[0]}", f"B{stages[0]}")
    if split:
        for s in stages:
            place.add(Block(f"W{s}", weight, -kept, "weight"), ranks[s], after=f"B{s}")


def _add_line(place: Placement, blocks: list[Block], ranks: list[int], delay: float) -> None:
    """Blocks one after the other, `delay` apart where the rank changes."""
    for index, (block, rank) in enumerate(zip(blocks, ranks, strict=True)):
        place.add(block, rank)
        if index:
            across = ranks[index - 1] != rank
            place.depends(blocks[index - 1], block, delay if across else 0)


def _no_csv(why: str) -> ProblemError:
    return ProblemError(f"cannot be written: {why}")
