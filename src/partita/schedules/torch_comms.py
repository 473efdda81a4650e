"""A schedule that only computes, with everything that torch's runtime needs beside.

torch lowers a `compute_only` file when it loads it; here it is done ahead, so that what will run
can be read, checked and changed. The rules are torch's:

    parameters   a stage is gathered (UNSHARD) when it is among the next three that its rank
                 computes on, and let go (RESHARD) when it is not
    gradients    REDUCE_GRAD stands behind the last B or W of a stage
    messages     ranks go through their rows in rounds, one action each, as soon as what the action
                 reads is there; what the next stage needs is sent at once, and the receive is put
                 into the other rank's row at that moment

So both ends of every pair of ranks have their messages in one order, which is what keeps in-order
transports (NCCL) from hanging.
"""

from collections.abc import Sequence

from partita.errors import ProblemError
from partita.schedules.torch_csv import Cell, TorchAction, TorchSchedule

ACTIVE_STAGES = 3  # whose parameters a rank holds at a time: forward, backward, the next


def in_loss_order(schedule: TorchSchedule) -> TorchSchedule:
    """The same with micro-batches numbered in the order in which the last stage runs them.

    torch numbers losses in the order in which they are made, and looks them up by micro-batch.
    Micro-batches are alike, so any schedule can be numbered so.
    """
    last = schedule.num_stages - 1
    number: dict[int, int] = {}
    for place in schedule.places():
        action = place.action
        if action.stage == last and action.kind == "F" and action.microbatch is not None:
            number.setdefault(action.microbatch, len(number))
    if all(old == new for old, new in number.items()):
        return schedule

    def renumbered(action: TorchAction) -> TorchAction:
        if action.microbatch is None:
            return action
        return action._replace(microbatch=number.get(action.microbatch, action.microbatch))

    rows = (tuple(tuple(map(renumbered, cell)) for cell in row) for row in schedule.rows)
    return TorchSchedule(tuple(rows))


def with_comms(schedule: TorchSchedule) -> TorchSchedule:
    """The `compute_comms` form of a `compute_only` schedule; one that cannot run is refused."""
    if schedule.form == "compute_comms":
        return schedule
    count = schedule.num_microbatches
    rows = [_reduced(_gathered([cell for cell in row if cell]), count) for row in schedule.rows]
    return _MessageRows(schedule, rows).added()


def _gathered(row: Sequence[Cell]) -> list[Cell]:
    """The row with UNSHARD and RESHARD where parameters come and go."""
    active: list[int] = []
    cells: list[Cell] = []
    for cell, coming in zip(row, _next_stages(row), strict=True):
        for stage in [stage for stage in active if stage not in coming]:
            active.remove(stage)
            cells.append((TorchAction(stage, "RESHARD"),))
        for stage in [stage for stage in coming if stage not in active]:
            active.append(stage)
            cells.append((TorchAction(stage, "UNSHARD"),))
        cells.append(cell)
    return cells + [(TorchAction(stage, "RESHARD"),) for stage in active]


def _next_stages(row: Sequence[Cell]) -> list[list[int]]:
    """For each cell, the stages that a rank computes on from there; a pair is taken as a whole."""
    next_use: list[tuple[int, int]] = []  # (stage, cell), the next first
    stages = []
    for place in reversed(range(len(row))):
        here = [(action.stage, place) for action in row[place]]
        used = {stage for stage, _ in here}
        next_use = [*dict.fromkeys(here), *(use for use in next_use if use[0] not in used)]
        end = next_use[ACTIVE_STAGES - 1 : ACTIVE_STAGES]
        stages.append([stage for stage, cell in next_use if not end or cell <= end[0][1]])
    return stages[::-1]


def _reduced(row: Sequence[Cell], num_microbatches: int) -> list[Cell]:
    """The row with REDUCE_GRAD behind the last backward of each stage."""
    left: dict[int, int] = {}
    cells: list[Cell] = []
    for cell in row:
        cells.append(cell)
        for action in cell:
            if action.kind in ("B", "W"):
                left[action.stage] = left.get(action.stage, num_microbatches) - 1
                if left[action.stage] == 0:
                    cells.append((TorchAction(action.stage, "REDUCE_GRAD"),))
    return cells


class _MessageRows:
    """Rows that are given their sends and receives, round by round."""

    def __init__(self, schedule: TorchSchedule, rows: Sequence[Sequence[Cell]]) -> None:
        self.rows = rows
        self.rank_of = schedule.rank_of
        self.last = schedule.num_stages - 1
        self.written: list[list[Cell]] = [[] for _ in rows]
        self.there: list[set[TorchAction]] = [set() for _ in rows]  # results by rank

    def added(self) -> TorchSchedule:
        """The rows with their messages."""
        place = [0] * len(self.rows)
        left = sum(map(len, self.rows))
        while left:
            before = left
            for rank, row in enumerate(self.rows):
                if place[rank] < len(row) and self._ready(rank, row[place[rank]]):
                    self._write(rank, row[place[rank]])
                    place[rank] += 1
                    left -= 1
            if left == before:
                rank = next(r for r, row in enumerate(self.rows) if place[r] < len(row))
                raise ProblemError(
                    f"rank {rank} waits for ever before {self.rows[rank][place[rank]][0]}",
                    fix="let every action follow what it reads; partita verify shows the circle",
                    field="schedule",
                )
        return TorchSchedule(tuple(map(tuple, self.written)))

    def _ready(self, rank: int, cell: Cell) -> bool:
        return all(
            needed is None or needed in self.there[rank] for needed in map(self._needed, cell)
        )

    def _needed(self, action: TorchAction) -> TorchAction | None:
        """The result of a neighbour that an action reads, as `_result` names it."""
        if action.kind == "F" and action.stage > 0:
            return action._replace(stage=action.stage - 1)
        if action.kind in ("I", "B") and action.stage < self.last:
            return TorchAction(action.stage + 1, "I", action.microbatch)
        return None

    def _write(self, rank: int, cell: Cell) -> None:
        self.written[rank].append(cell)
        for action in cell:
            if action.kind == "F":
                result, target, way = action, action.stage + 1, "F"
            elif action.kind in ("I", "B"):
                result, target, way = action._replace(kind="I"), action.stage - 1, "B"
            else:
                continue
            self.there[rank].add(result)
            peer = self.rank_of.get(target, rank)
            if peer != rank:
                self.written[rank].append((action._replace(kind=f"SEND_{way}"),))
                self.written[peer].append((TorchAction(target, f"RECV_{way}", action.microbatch),))
                self.there[peer].add(result)
