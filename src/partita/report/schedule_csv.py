"""Orders as torch.distributed.pipelining reads them: a CSV row per rank, a cell per action.

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

Cells are those of `partita.schedules.actions`. What is written here, torch's multi-stage schedules
load with `_load_csv(file, format="compute_only")`. Read are these files, and those torch writes
itself: empty cells are passed over, actions that only communicate or gather weights too, and an
overlapped pair `(0F1;3B0)OVERLAP_F_B` is its two actions.
"""

import csv
import io
import re
from pathlib import Path

from partita import files
from partita.errors import FileError, InputError, ProblemError
from partita.problems.schedule import ScheduleProblem, ScheduleSolution
from partita.schedules.actions import Action, Order, parse_action
from partita.schedules.pipeline import Pipeline, order_of, pipeline_of
from partita.schedules.placement import Block, Placement
from partita.schedules.shapes import BACKWARD_SPAN, ShapeOptions

MAX_CELLS = 5_000_000
_NO_COMPUTE = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*")
_PAIR = re.compile(r"\((?P<parts>[^()]*)\)OVERLAP_F_B")


def schedule_csv(problem: ScheduleProblem, solution: ScheduleSolution) -> str:
    """The order of a schedule as CSV; refused where torch has no words for the placement."""
    text = io.StringIO()
    order = order_of(csv_pipeline(problem), solution.starts)
    csv.writer(text, lineterminator="\n").writerows(order)
    return text.getvalue()


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


def read_order(path: str | Path) -> Order:
    """The order in a CSV file; a cell that is no action is named by row and column."""
    data = files.read_bytes(path)
    try:
        return parse_csv(data.decode())
    except UnicodeDecodeError:
        raise FileError("is not text", fix="give a CSV of actions", file=str(path)) from None
    except InputError as error:
        raise FileError(error.found, fix=error.fix, field=error.field, file=str(path)) from None


def parse_csv(text: str) -> Order:
    """The order in the text of such a file."""
    rows = []
    cells = 0
    try:
        for number, cells_of_row in enumerate(csv.reader(io.StringIO(text)), start=1):
            cells += len(cells_of_row)
            if cells > MAX_CELLS:
                raise InputError(f"has more than {MAX_CELLS:,} cells", fix="give a smaller order")
            rows.append(tuple(_row(cells_of_row, number)))
    except csv.Error as error:
        raise InputError(f"is not CSV ({error})", fix="give a CSV of actions") from None
    if not any(rows):
        raise InputError("has no actions", fix="give a row per rank: 0F0,0B0")
    return tuple(rows)


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


def num_microbatches(order: Order) -> int:
    """How many micro-batches an order is for."""
    return 1 + max(action.microbatch for row in order for action in row)


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


def _row(cells: list[str], number: int) -> list[Action]:
    actions = []
    for column, cell in enumerate(cells, start=1):
        text = cell.strip()
        pair = _PAIR.fullmatch(text)
        parts = pair["parts"].split(";") if pair else [text]
        for part in map(str.strip, parts):
            if not part or _NO_COMPUTE.fullmatch(part):
                continue
            try:
                actions.append(parse_action(part))
            except InputError as error:
                where = f"row {number}, cell {column}"
                raise InputError(error.found, fix=error.fix, field=where) from None
    return actions


def _no_csv(why: str) -> ProblemError:
    return ProblemError(f"cannot be written: {why}")
