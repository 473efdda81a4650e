"""A timeline: when each task of a program starts and ends, and what follows from that.

Whoever made it (the engine, a solver, a measurement), a timeline is only a claim: this record
checks that it has one start and one end per task, and `verify` judges the rest.

Memory is netted per instant: all that is taken and given back at one instant, at starts and at
ends alike, is applied together. So a task may use what another gives back at that very moment.

A sketch is a timeline told coarsely, small enough to stand in a plan file: what a lane does, in
thousandths.

    F0:12 F1:12 -:30 B0:24 ...

A letter is the kind of a task (`program.Kind`), with its micro-batch where it has one, and `-` is
idle; the numbers add up to 1000, which is the step. A plan remembers those it was chosen from this
way: their stages and splits would be as large as the plan itself, once for each.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from partita.errors import InputError, PlanError, ProgramError
from partita.files import check_format, convert, decode_json, encode_json, read_bytes
from partita.program import F64, Kind, Program
from partita.showing import plot_of, repr_html, table_of

I64 = npt.NDArray[np.int64]

TOUCH = 1e-9  # of the makespan: two moments this close are the same one
WHOLE = 1000  # the parts of a step
_SPAN = re.compile(r"(?:-|([FBDWUCSRX])([0-9]{0,9})):([0-9]{1,4})")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Timeline:
    """Start and end of every task of a program, as read-only columns."""

    program: Program
    start: F64
    end: F64

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            column = _moments(getattr(self, name), name)
            if column.shape != (self.program.num_tasks,):
                raise ProgramError(
                    f"has shape {column.shape} for {self.program.num_tasks} tasks",
                    fix="one time per task is needed",
                    field=name,
                )
            object.__setattr__(self, name, column)

    @property
    def makespan(self) -> float:
        """The time from 0 to the end of the last task."""
        return float(self.end.max()) if self.end.size else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the two columns, without the program."""
        return self.start.nbytes + self.end.nbytes

    def busy(self) -> F64:
        """Time that each lane spends on tasks."""
        task, lane = self.slots()
        spent = (self.end - self.start)[task]
        busy = np.bincount(lane, weights=spent, minlength=len(self.program.lanes))
        return busy.astype(np.float64)

    def utilisation(self) -> F64:
        """The share of the makespan that each lane is busy, 0 to 1."""
        makespan = self.makespan
        return self.busy() / makespan if makespan > 0 else np.zeros(len(self.program.lanes))

    def slots(self) -> tuple[I64, I64]:
        """(task, lane) for each lane of each task, in task order."""
        counts = np.diff(self.program.lane_start)
        task = np.repeat(np.arange(self.program.num_tasks), counts)
        return task, self.program.lane_of.astype(np.int64)

    def lane_tasks(self, lane: int) -> I64:
        """The tasks of one lane in the order they run."""
        task, of = self.slots()
        mine: I64 = task[of == lane]
        sort = np.lexsort((mine, self.end[mine], self.start[mine]))
        return mine.take(sort)

    def memory_steps(self, memory: int) -> tuple[F64, F64]:
        """(times, amounts): from each time on, that much is held; begins at time 0."""
        mine = self.program.effect_memory == memory
        return _steps(*self._changes(np.flatnonzero(mine)))

    def memory_columns(self, memory: int, num_columns: int) -> F64:
        """The most that is held of a memory within each of `num_columns` equal slices of time."""
        times, amounts = self.memory_steps(memory)
        width = self.makespan / num_columns
        if not width > 0:
            return np.full(num_columns, amounts.max())
        edges = np.arange(num_columns) * width
        most: F64 = amounts[np.searchsorted(times, edges, side="right") - 1]
        column = np.minimum((times / width).astype(np.int64), num_columns - 1)
        np.maximum.at(most, column, amounts)
        return most

    def peaks(self) -> F64:
        """The most that is ever held of each memory."""
        memory = self.program.effect_memory
        by_memory = np.argsort(memory, kind="stable")
        bounds = np.searchsorted(memory[by_memory], np.arange(len(self.program.memories) + 1))
        held = [_steps(*self._changes(by_memory[a:b]))[1] for a, b in pairwise(bounds)]
        return np.array([max(0.0, float(amounts.max())) for amounts in held])

    def critical_path(self) -> tuple[int, ...]:
        """The chain of tasks that sets the makespan, first to last.

        Walks back from the last task to end (the first of these by index): to a task it waits
        for whose end, with the delay, is its start; else to the one before it on a lane that ends
        at its start. It stops where nothing does: at time 0, or after a gap that nobody caused.
        """
        if not self.end.size:
            return ()
        before, close = self._before(), TOUCH * self.makespan
        path = [int(self.end.argmax())]
        seen = set(path)  # tasks of no length at one moment may point at each other
        while True:
            cause = self._cause(path[-1], before, close)
            if cause is None or cause in seen:
                return tuple(reversed(path))
            path.append(cause)
            seen.add(cause)

    def shares(
        self, num_columns: int, lanes: Sequence[int], classes: npt.NDArray[Any] | None = None,
        num_classes: int = len(Kind),
    ) -> F64:  # fmt: skip
        """How a lane spends its time: [lane, column, kind], each a share of the column, 0 to 1.

        The makespan is cut into `num_columns` equal columns; what is missing to 1 is idle. Tasks
        are told apart by their kind, or by `classes`, a number below `num_classes` for each.
        """
        shares = np.zeros((len(lanes), num_columns, num_classes))
        width = self.makespan / num_columns
        if not width > 0:
            return shares
        row_of = np.full(len(self.program.lanes), -1)
        row_of[list(lanes)] = np.arange(len(lanes))
        task, lane = self.slots()
        task, row = task[row_of[lane] >= 0], row_of[lane][row_of[lane] >= 0]
        of = self.program.kind if classes is None else classes
        kind = of[task].astype(np.int64)
        begin = np.clip(self.start[task] / width, 0, num_columns)
        finish = np.clip(self.end[task] / width, 0, num_columns)
        first = np.minimum(begin.astype(np.int64), num_columns - 1)
        last = np.minimum(finish.astype(np.int64), num_columns - 1)
        # A task covers [begin, finish): add its columns whole, then cut off what it does not reach.
        change = np.zeros((len(lanes), num_columns + 1, num_classes))
        np.add.at(change, (row, first, kind), 1.0)
        np.add.at(change, (row, last + 1, kind), -1.0)
        shares = change.cumsum(axis=1)[:, :-1]
        np.add.at(shares, (row, first, kind), first - begin)
        np.add.at(shares, (row, last, kind), finish - (last + 1))
        return np.clip(shares, 0.0, 1.0)

    def to_plain(self) -> dict[str, Any]:
        """Plain Python values, as they stand in a timeline file; the program is in it."""
        return {
            "format": "partita/timeline@1",
            "program": self.program.to_plain(),
            "start": self.start.tolist(),
            "end": self.end.tolist(),
        }

    def to_json(self) -> bytes:
        """The timeline as the text of a file, `partita/timeline@1`."""
        return encode_json(self.to_plain(), indent=0)

    @classmethod
    def from_json(cls, data: bytes, file: str = "") -> Self:
        """The inverse of `to_json`; `file` is named in errors."""
        value = decode_json(data, file)
        check_format(value, "timeline", file=file)
        parts = convert(value, _TimelineFile, file)
        program = Program.from_plain(parts.program, file)
        try:
            return cls(program, np.array(parts.start), np.array(parts.end))
        except InputError as error:
            raise error.within(file) from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        return (
            self.program == other.program
            and np.array_equal(self.start, other.start)
            and np.array_equal(self.end, other.end)
        )

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        used = self.utilisation()
        unit = f" {self.program.time_unit}" if self.program.time_unit else ""
        busy = f", lanes busy {used.mean():.0%} of it" if used.size else ""
        return f"timeline of {self.program.num_tasks:,} tasks over {self.makespan:g}{unit}{busy}"

    __repr__ = __str__

    def _changes(self, effects: I64) -> tuple[F64, F64]:
        """(times, changes) of the given memory effects, unsorted."""
        program = self.program
        task = np.searchsorted(program.effect_start, effects, side="right") - 1
        times = np.concatenate((self.start[task], self.end[task]))
        changes = np.concatenate((program.effect_at_start[effects], program.effect_at_end[effects]))
        return times[changes != 0], changes[changes != 0]

    def _before(self) -> I64:
        """For each (task, lane) slot the task before it on that lane, or -1."""
        task, lane = self.slots()
        sort = np.lexsort((task, self.end[task], self.start[task], lane))
        before = np.full(len(task), -1)
        follows = lane[sort][1:] == lane[sort][:-1]
        before[sort[1:][follows]] = task[sort[:-1][follows]]
        return before

    def _cause(self, task: int, before: I64, close: float) -> int | None:
        """The task whose end lets this one start, if there is one."""
        begin = float(self.start[task])
        for other, delay in self.program.waits_of(task):
            if abs(self.end[other] + delay - begin) <= close:
                return other
        lanes = before[self.program.lane_start[task] : self.program.lane_start[task + 1]]
        for other in lanes.tolist():
            if other >= 0 and abs(self.end[other] - begin) <= close:
                return int(other)
        return None


def read_timeline(path: str | Path) -> Timeline:
    """Read a timeline file."""
    return Timeline.from_json(read_bytes(path), str(path))


@dataclass(frozen=True, slots=True)
class _TimelineFile:
    program: dict[str, Any]
    start: list[float]
    end: list[float]


def _moments(value: object, name: str) -> F64:
    """`value` as a read-only column of times; copied if it shares memory that can be written."""
    try:
        column = np.ascontiguousarray(value, np.float64)
    except (ValueError, TypeError) as error:
        raise ProgramError(
            f"cannot be read as times ({error})", fix="give a list of numbers", field=name
        ) from None
    if column.flags.writeable:
        column = column.copy() if column is value or column.base is not None else column
        column.flags.writeable = False
    return column


def _steps(times: F64, changes: F64) -> tuple[F64, F64]:
    """Changes netted per instant and summed up, from time 0 on."""
    moments, inverse = np.unique(np.concatenate(([0.0], times)), return_inverse=True)
    net = np.bincount(inverse[1:], weights=changes, minlength=len(moments))
    return moments, np.cumsum(net)


class Span(NamedTuple):
    """What a lane does from `begin` to `end`, in thousandths of the step; no letter is idle."""

    begin: int
    end: int
    letter: str = ""
    microbatch: int = -1

    def __str__(self) -> str:
        number = "" if self.microbatch < 0 else str(self.microbatch)
        return f"{self.letter + number if self.letter else '-'}:{self.end - self.begin}"


@dataclass(frozen=True, slots=True)
class LaneSketch:
    """One lane, and how many do the same; `spans` as text."""

    name: str
    spans: str
    num_lanes: int = 1

    def __post_init__(self) -> None:
        matches = [_SPAN.fullmatch(part) for part in self.spans.split()]
        whole = sum(int(match[3]) for match in matches if match is not None)
        if None in matches or whole != WHOLE or self.num_lanes < 1:
            raise PlanError(
                "a sketch that does not tell what its lane does",
                fix=f"write spans like F0:12 -:3 that add up to {WHOLE}, or leave the sketch out",
                field="spans",
            )

    def parts(self) -> tuple[Span, ...]:
        """The spans in their order."""
        spans, begin = [], 0
        for letter, number, size in _SPAN.findall(self.spans):
            end = begin + int(size)
            spans.append(Span(begin, end, letter, int(number) if number else -1))
            begin = end
        return tuple(spans)
