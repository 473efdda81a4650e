"""Schedules as torch.distributed.pipelining keeps them: a CSV row per rank, a cell per action.

    0F0,0F1,0B0,0B1                                         compute_only
    1F0,1B0,1F1,1B1

    0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD                  compute_comms
    1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD

A cell is stage, kind, micro-batch. Kinds that compute are those of `actions.py`; the others are

    SEND_F RECV_F      activations: of stage 2 to the next stage, for stage 2 from the one before
    SEND_B RECV_B      gradients: of stage 2 to the stage before, for stage 2 from the next
    UNSHARD RESHARD    gather the parameters of a stage (FSDP), and let them go; no micro-batch
    REDUCE_GRAD        divide and reduce the gradients of a stage; no micro-batch

`(0F7;7B3)OVERLAP_F_B` is a forward and a backward in one cell, which torch runs one after the
other unless a function for the pair is registered with it. An empty cell is a step of waiting. What
is read is kept cell by cell, so that it is written as it was.
"""

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from partita import files
from partita.errors import FileError, InputError
from partita.schedules.actions import Action, Order

MAX_CELLS = 5_000_000
COMPUTE = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
WHOLE_STAGE = ("UNSHARD", "RESHARD", "REDUCE_GRAD")  # of no micro-batch
KINDS = (*COMPUTE, *MESSAGES, *WHOLE_STAGE)
OVERLAP = "OVERLAP_F_B"

Form = Literal["compute_only", "compute_comms"]

_ACTION = re.compile(rf"([0-9]{{1,9}})({'|'.join(KINDS)})([0-9]{{0,9}})")
_PAIR = re.compile(rf"\((?P<parts>[^()]*)\){OVERLAP}")
_OLD_BACKWARD = re.compile(r"[0-9]+BW[0-9]+")


class TorchAction(NamedTuple):
    """One action of torch's runtime; those of `WHOLE_STAGE` have no micro-batch."""

    stage: int
    kind: str  # one of KINDS
    microbatch: int | None = None

    @property
    def computes(self) -> bool:
        """Is it a forward or a part of a backward?"""
        return self.kind in COMPUTE

    def __str__(self) -> str:
        count = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{self.kind}{count}"


Cell = tuple[TorchAction, ...]  # nothing, an action, or the two of an overlapped pair


class CellPlace(NamedTuple):
    """An action and where it stands; rank and column count from 0."""

    rank: int
    column: int
    action: TorchAction

    def __str__(self) -> str:
        return f"row {self.rank + 1} (rank {self.rank}), cell {self.column + 1}, {self.action}"


@dataclass(frozen=True, slots=True)
class TorchSchedule:
    """The cells of every rank, as they stand in the file."""

    rows: tuple[tuple[Cell, ...], ...]

    @property
    def form(self) -> Form:
        """What torch calls the format: with messages and gathering of parameters, or without."""
        only = all(place.action.computes for place in self.places())
        return "compute_only" if only else "compute_comms"

    @property
    def num_stages(self) -> int:
        """One more than the highest stage that is named."""
        return 1 + max((place.action.stage for place in self.places()), default=-1)

    @property
    def num_microbatches(self) -> int:
        """One more than the highest micro-batch that is named."""
        named = (place.action.microbatch for place in self.places())
        return 1 + max((count for count in named if count is not None), default=-1)

    @property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage: where its first action stands."""
        ranks: dict[int, int] = {}
        for place in self.places():
            ranks.setdefault(place.action.stage, place.rank)
        return ranks

    @property
    def order(self) -> Order:
        """What computes, row by row."""
        return tuple(
            tuple(
                Action(action.stage, action.kind, action.microbatch)
                for cell in row
                for action in cell
                if action.computes and action.microbatch is not None
            )
            for row in self.rows
        )

    def places(self) -> Iterator[CellPlace]:
        """Every action with its rank and column, row by row; pairs as two actions."""
        for rank, row in enumerate(self.rows):
            for column, cell in enumerate(row):
                for action in cell:
                    yield CellPlace(rank, column, action)

    def compute_only(self) -> "TorchSchedule":
        """The same without messages and gathering, and without steps of waiting."""
        rows = (tuple(cell for cell in row if cell and cell[0].computes) for row in self.rows)
        return TorchSchedule(tuple(rows))

    def to_csv(self) -> str:
        """The text of the file."""
        text = io.StringIO()
        cells = (map(cell_text, row) for row in self.rows)
        csv.writer(text, lineterminator="\n").writerows(cells)
        return text.getvalue()


def cell_text(cell: Cell) -> str:
    """A cell as it is written."""
    if len(cell) > 1:
        return f"({';'.join(map(str, cell))}){OVERLAP}"
    return str(cell[0]) if cell else ""


def torch_schedule(order: Order) -> TorchSchedule:
    """An order of ours as a schedule without messages."""
    rows = (tuple((TorchAction(*action),) for action in row) for row in order)
    return TorchSchedule(tuple(rows))


def read_torch_csv(path: str | Path) -> TorchSchedule:
    """The schedule in a file; a cell that is no action is named by row and column."""
    data = files.read_bytes(path)
    try:
        return parse_torch_csv(data.decode())
    except UnicodeDecodeError:
        raise FileError("is not text", fix="give a CSV of actions", file=str(path)) from None
    except InputError as error:
        raise FileError(error.found, fix=error.fix, field=error.field, file=str(path)) from None


def parse_torch_csv(text: str) -> TorchSchedule:
    """The schedule in the text of such a file."""
    rows: list[tuple[Cell, ...]] = []
    cells = 0
    try:
        for number, texts in enumerate(csv.reader(io.StringIO(text)), start=1):
            cells += len(texts)
            if cells > MAX_CELLS:
                raise InputError(
                    f"has more than {MAX_CELLS:,} cells", fix="give a smaller schedule"
                )
            rows.append(tuple(_cell(t, number, column) for column, t in enumerate(texts, start=1)))
    except csv.Error as error:
        raise InputError(f"is not CSV ({error})", fix="give a CSV of actions") from None
    if not any(cell for row in rows for cell in row):
        raise InputError("has no actions", fix="give a row per rank: 0F0,0B0")
    return TorchSchedule(tuple(rows))


def _cell(text: str, row: int, column: int) -> Cell:
    text = text.strip()
    pair = _PAIR.fullmatch(text)
    try:
        if pair is None:
            return (_action(text),) if text else ()
        parts = tuple(_action(part.strip()) for part in pair["parts"].split(";"))
        if sorted(part.kind for part in parts) not in (["B", "F"], ["F", "I"]):
            raise InputError(
                f"{_shown(text)} is no forward and backward",
                fix="write the two that overlap: (0F7;7B3)OVERLAP_F_B",
            )
    except InputError as error:
        where = f"row {row} (rank {row - 1}), cell {column}"
        raise InputError(error.found, fix=error.fix, field=where) from None
    return parts


def _action(text: str) -> TorchAction:
    match = _ACTION.fullmatch(text)
    if match is None:
        fix = f"write stage, one of {' '.join(KINDS)}, micro-batch: 3F2"
        if _OLD_BACKWARD.fullmatch(text):
            fix = "early torch wrote it so: write B where it has BW, and I where it has B"
        raise InputError(f"{_shown(text)} is no action", fix=fix)
    stage, kind, count = int(match[1]), match[2], match[3]
    if (kind in WHOLE_STAGE) == bool(count):
        needed = "no micro-batch" if count else "its micro-batch"
        shown = f"{stage}{kind}" if count else f"{stage}{kind}0"
        raise InputError(f"{_shown(text)} is no action", fix=f"{kind} has {needed}: {shown}")
    return TorchAction(stage, kind, int(count) if count else None)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
