"""A program: tasks on lanes. Whatever is planned, this is what runs in the end.

A *lane* is anything that does one thing at a time: a device, a link, a CUDA stream, an execution
unit. A *task* occupies its lanes for a duration, waits for other tasks (each wait may add a delay
after the other's end), and takes or gives back memory at its start and at its end. What a task is
stands in its `work` (`meaning.py`): op, tensors, collective, purpose. `blocks` are the names that
people read, made from works where there are any; nothing is ever read back out of them.

Tasks are columns of arrays, not objects, so that a million of them are cheap: 81 bytes each with
one lane, two waits and one memory effect. A list per task is held as two columns, `x_start` (one
more entry than tasks) and its values: task i has `x_of[x_start[i]:x_start[i + 1]]`.

What the columns mean:
- Each lane runs its tasks in the order of their indices, or in that of `order` where it is given
  (`order[k]` is the k-th task, over all lanes). FIFO and priority runs choose by themselves.
- A task on no lane takes no time: it is a milestone (a barrier, a release of memory). Time that
  passes on no lane, such as latency, is the delay of a wait.
- `pairs` are (send, receive) tasks that must match. The engine does not read them: the receive
  waits for its send like any other wait, and the verifier checks that it did. A transfer that
  holds both ends at once is simply one task on several lanes.
- Every (block, kind) runs once per microbatch; what runs again, such as a recomputed forward, is
  a block of its own. Tasks of microbatch -1 belong to no microbatch and are free of this.
- Time is a plain number: seconds (`time_unit="s"`) or steps of a schedule (`time_unit=""`).
- `work` is -1 for tasks that say nothing of themselves. Works name `values` and `groups` by number.
  A block of a pipeline is one task; the tasks inside it are those of its phase in one of `bodies`,
  a program of its own with the run that the block's duration and memory were read off.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, SupportsIndex

import msgspec
import numpy as np
import numpy.typing as npt

from partita.errors import InputError, ProgramError
from partita.files import check_format, convert, decode_json, encode_json, read_bytes
from partita.graph.splits import TensorPlacement
from partita.meaning import SOURCES, Groups, Phase, Purpose, Value, Work, label
from partita.showing import plot_of, repr_html, table_of

VERSION = 2
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I8 = npt.NDArray[np.int8]

_INT32 = np.iinfo(np.int32)


class Kind(IntEnum):
    """What a task does, as far as names, colours and checks need it."""

    FORWARD = 0
    BACKWARD = 1  # gradients of data and weights in one
    DGRAD = 2  # gradient of the data only
    WGRAD = 3  # gradient of the weights only
    UPDATE = 4  # optimizer step
    COLLECTIVE = 5
    SEND = 6
    RECEIVE = 7
    OTHER = 8

    @property
    def letter(self) -> str:
        """The letter this kind has in the name of a task."""
        return "FBDWUCSRX"[self]

    @property
    def words(self) -> str:
        """What reports call it."""
        split = {Kind.DGRAD: "data gradient", Kind.WGRAD: "weight gradient"}
        return split.get(self, self.name.lower())


KINDS: dict[str, Kind] = {kind.letter: kind for kind in Kind}

_NAME = re.compile(r"(?P<kind>[FBDWUCSRX])(?P<microbatch>0|[1-9][0-9]{0,9})?@(?P<block>.*)", re.S)


class TaskName(NamedTuple):
    """The labels that name a task: `F3@stage2` is the forward of microbatch 3 of block stage2."""

    kind: Kind
    microbatch: int  # -1: none
    block: str

    def __str__(self) -> str:
        number = "" if self.microbatch < 0 else str(self.microbatch)
        return f"{self.kind.letter}{number}@{self.block}"


def parse_task_name(text: str) -> TaskName:
    """The labels in a task's name, the inverse of `str`."""
    match = _NAME.fullmatch(text)
    microbatch = int(match["microbatch"] or -1) if match else 0
    if match is None or microbatch > _INT32.max:
        raise ProgramError(
            f"{_shown(text)} does not name a task",
            fix=f"write one of {''.join(KINDS)}, the microbatch if any, @ and the block: F3@stage2",
        )
    return TaskName(KINDS[match["kind"]], microbatch, match["block"])


@dataclass(frozen=True, slots=True)
class Lane:
    """Something that does one thing at a time; `kind` is free text: device, link, stream, unit."""

    name: str
    kind: str = "device"

    def __post_init__(self) -> None:
        if not self.name:
            raise ProgramError("a lane has no name", fix="give it one", field="lanes")


@dataclass(frozen=True, slots=True)
class Memory:
    """A store that tasks take from and give back to; capacity None means no limit."""

    name: str
    capacity: float | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ProgramError("a memory has no name", fix="give it one", field="memories")
        if self.capacity is not None and not (0 <= self.capacity < math.inf):
            raise ProgramError(
                f"{self.name} has capacity {self.capacity:g}",
                fix="a capacity is a finite number >= 0, or none at all",
                field="memories",
            )


def _no_floats() -> F64:
    return np.empty(0, np.float64)


def _no_ints() -> I32:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """What the blocks of a stage consist of: a program, and a run of it by itself."""

    stage: int
    program: "Program"
    start: F64
    end: F64

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Body):
            return NotImplemented
        same = self.stage == other.stage and self.program == other.program
        return same and _same(self.start, other.start) and _same(self.end, other.end)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Program:
    """Tasks on lanes, as read-only columns; see the module for what they mean.

    Columns that are left out are filled in: no delays, no memory effects, kind other, the first
    block, no microbatch.
    """

    lanes: tuple[Lane, ...]
    duration: F64
    lane_start: I32
    lane_of: I32
    wait_start: I32
    wait_on: I32
    wait_delay: F64 = field(default_factory=_no_floats)
    memories: tuple[Memory, ...] = ()
    effect_start: I32 = field(default_factory=_no_ints)
    effect_memory: I32 = field(default_factory=_no_ints)
    effect_at_start: F64 = field(default_factory=_no_floats)  # > 0 takes, < 0 gives back
    effect_at_end: F64 = field(default_factory=_no_floats)
    blocks: tuple[str, ...] = ("",)
    block: I32 = field(default_factory=_no_ints)
    kind: I8 = field(default_factory=lambda: np.empty(0, np.int8))
    microbatch: I32 = field(default_factory=_no_ints)
    pairs: I32 = field(default_factory=_no_ints)
    priority: F64 | None = None
    order: I32 | None = None
    time_unit: str = "s"
    work: I32 = field(default_factory=_no_ints)
    works: tuple[Work, ...] = ()
    values: tuple[Value, ...] = ()
    groups: tuple[Groups, ...] = ()
    bodies: tuple[Body, ...] = ()

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    def __post_init__(self) -> None:
        _set_columns(self)
        _check_labels(self)
        _check_meaning(self)
        _check_durations(self)
        _check_lanes(self)
        _check_waits(self)
        _check_effects(self)
        _check_choices(self)

    @property
    def num_tasks(self) -> int:
        """How many tasks there are."""
        return len(self.duration)

    @property
    def nbytes(self) -> int:
        """Bytes that all columns take together."""
        return sum(column.nbytes for _, column in _columns(self) if column is not None)

    def task_label(self, task: SupportsIndex) -> TaskName:
        """The labels of a task: kind, microbatch, block."""
        return TaskName(
            Kind(int(self.kind[task])), int(self.microbatch[task]), self.blocks[self.block[task]]
        )

    def task_name(self, task: SupportsIndex) -> str:
        """The name of a task in text, `F3@stage2`."""
        return str(self.task_label(task))

    def tasks_named(self, text: str) -> tuple[int, ...]:
        """Indices of the tasks with this name; of a microbatch, one in a valid program."""
        label = parse_task_name(text)
        if label.block not in self.blocks:
            return ()
        block = self.blocks.index(label.block)
        tasks_named = (self.block == block) & (self.microbatch == label.microbatch)
        return tuple(np.flatnonzero(tasks_named & (self.kind == label.kind)).tolist())

    def work_of(self, task: SupportsIndex) -> Work | None:
        """What a task is; None where the program does not say."""
        number = int(self.work[task])
        return None if number < 0 else self.works[number]

    def tasks_of(self, purpose: Purpose) -> tuple[int, ...]:
        """The tasks that are for something, in their order."""
        wanted = [number for number, work in enumerate(self.works) if work.purpose is purpose]
        return tuple(np.flatnonzero(np.isin(self.work, wanted)).tolist())

    def lanes_of(self, task: int) -> tuple[int, ...]:
        """The lanes a task occupies."""
        return tuple(self.lane_of[self.lane_start[task] : self.lane_start[task + 1]].tolist())

    def waits_of(self, task: int) -> tuple[tuple[int, float], ...]:
        """What a task waits for: (task, delay after its end)."""
        part = slice(self.wait_start[task], self.wait_start[task + 1])
        return tuple(zip(self.wait_on[part].tolist(), self.wait_delay[part].tolist(), strict=True))

    def to_plain(self) -> dict[str, Any]:
        """Plain Python values, as they stand in a program file."""
        plain: dict[str, Any] = {
            "format": f"partita/program@{VERSION}",
            "time_unit": self.time_unit,
            "lanes": [{"name": lane.name, "kind": lane.kind} for lane in self.lanes],
            "memories": [{"name": m.name, "capacity": m.capacity} for m in self.memories],
            "blocks": list(self.blocks),
        }
        for name, column in _columns(self):
            plain[name] = None if column is None else column.tolist()
        plain["works"] = [_plain_work(work) for work in self.works]
        plain["values"] = [_plain_value(value) for value in self.values]
        plain["groups"] = [[list(group) for group in groups] for groups in self.groups]
        plain["bodies"] = [
            {
                "stage": body.stage,
                "program": body.program.to_plain(),
                "start": body.start.tolist(),
                "end": body.end.tolist(),
            }
            for body in self.bodies
        ]
        return plain

    def to_json(self) -> bytes:
        """The program as the text of a file, `partita/program@2`."""
        return encode_json(self.to_plain(), indent=0)

    @classmethod
    def from_plain(cls, value: dict[str, Any], file: str = "") -> Self:
        """The inverse of `to_plain`; what is malformed is named."""
        check_format(value, "program", VERSION, file)
        try:
            parts = convert(value, _ProgramFile, file)
            return cls(
                lanes=parts.lanes,
                memories=parts.memories,
                blocks=parts.blocks,
                time_unit=parts.time_unit,
                works=tuple(_read_work(work, i) for i, work in enumerate(parts.works)),
                values=tuple(_read_value(value, i) for i, value in enumerate(parts.values)),
                groups=parts.groups,
                bodies=tuple(
                    Body(
                        body.stage,
                        cls.from_plain(body.program, file),
                        np.array(body.start, np.float64),
                        np.array(body.end, np.float64),
                    )
                    for body in parts.bodies
                ),
                **{name: _array(getattr(parts, name), name) for name in _COLUMNS},
            )
        except InputError as error:
            raise (error if error.file else error.within(file)) from None

    @classmethod
    def from_json(cls, data: bytes, file: str = "") -> Self:
        """The inverse of `to_json`; `file` is named in errors."""
        return cls.from_plain(decode_json(data, file), file)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        parts = ("lanes", "memories", "blocks", "time_unit", "works", "values", "groups", "bodies")
        mine, theirs = ([getattr(one, part) for part in parts] for one in (self, other))
        return mine == theirs and all(
            _same(getattr(self, name), getattr(other, name)) for name in _COLUMNS
        )

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        kinds = sorted({lane.kind for lane in self.lanes})
        lanes = ", ".join(f"{sum(x.kind == kind for x in self.lanes):,} {kind}" for kind in kinds)
        unit = f" {self.time_unit}" if self.time_unit else ""
        return (
            f"program of {self.num_tasks:,} tasks "
            f"on {len(self.lanes):,} lanes ({lanes or 'none'}), "
            f"{len(self.wait_on):,} waits, {len(self.memories):,} memories, "
            f"{float(self.duration.sum()):g}{unit} of work"
        )

    __repr__ = __str__


def read_program(path: str | Path) -> Program:
    """Read a program file."""
    return Program.from_json(read_bytes(path), str(path))


_COLUMNS: dict[str, type] = {
    "duration": np.float64,
    "lane_start": np.int32,
    "lane_of": np.int32,
    "wait_start": np.int32,
    "wait_on": np.int32,
    "wait_delay": np.float64,
    "effect_start": np.int32,
    "effect_memory": np.int32,
    "effect_at_start": np.float64,
    "effect_at_end": np.float64,
    "block": np.int32,
    "kind": np.int8,
    "microbatch": np.int32,
    "work": np.int32,
    "pairs": np.int32,
    "priority": np.float64,
    "order": np.int32,
}

_Int = Annotated[int, msgspec.Meta(ge=_INT32.min, le=_INT32.max)]


@dataclass(frozen=True, slots=True)
class _WorkFile:
    purpose: str = "other"
    phase: str = "none"
    op: str = ""
    dims: tuple[str, ...] = ()
    stage: int = -1
    peer: int = -1
    collective: str = ""
    axis: int = -1
    group: int = -1
    size_bytes: float = 0.0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    body: int = -1
    part: int = 0


@dataclass(frozen=True, slots=True)
class _ValueFile:
    tensor: str
    layout: tuple[str, ...]
    source: str = "task"
    of: int = -1
    flat: tuple[int, ...] = ()
    gradient_of: str = ""


@dataclass(frozen=True, slots=True)
class _BodyFile:
    stage: int
    program: dict[str, Any]
    start: list[float]
    end: list[float]


def _plain_work(work: Work) -> dict[str, Any]:
    """The fields that say something, enumerations by name."""
    plain: dict[str, Any] = {}
    for item in fields(work):
        value = getattr(work, item.name)
        if value != item.default:
            plain[item.name] = value.name.lower() if isinstance(value, IntEnum) else value
    return plain


def _plain_value(value: Value) -> dict[str, Any]:
    plain: dict[str, Any] = {"tensor": value.tensor, "layout": [str(p) for p in value.layout]}
    for name, usual in (("source", "task"), ("of", -1), ("flat", ()), ("gradient_of", "")):
        if getattr(value, name) != usual:
            plain[name] = getattr(value, name)
    return plain


def _read_work(plain: _WorkFile, number: int) -> Work:
    named = {}
    for name, kinds in (("purpose", Purpose), ("phase", Phase)):
        known = {kind.name.lower(): kind for kind in kinds}
        if getattr(plain, name) not in known:
            raise ProgramError(
                f"work {number} has the {name} {_shown(getattr(plain, name))}",
                fix=f"use one of {', '.join(known)}",
                field="works",
            )
        named[name] = known[getattr(plain, name)]
    rest = {item.name: getattr(plain, item.name) for item in fields(plain)}
    return Work(**{**rest, **named})


def _read_value(plain: _ValueFile, number: int) -> Value:
    if plain.source not in SOURCES:
        raise ProgramError(
            f"value {number} has the source {_shown(plain.source)}",
            fix=f"use one of {', '.join(SOURCES)}",
            field="values",
        )
    try:
        layout = tuple(map(TensorPlacement.parse, plain.layout))
    except InputError as error:
        raise ProgramError(error.found, fix=error.fix, field=f"values {number} layout") from None
    return Value(plain.tensor, layout, plain.source, plain.of, plain.flat, plain.gradient_of)


@dataclass(frozen=True, slots=True)
class _ProgramFile:
    lanes: tuple[Lane, ...]
    duration: list[float]
    lane_start: list[_Int]
    lane_of: list[_Int]
    wait_start: list[_Int]
    wait_on: list[_Int]
    wait_delay: list[float] = field(default_factory=list)
    memories: tuple[Memory, ...] = ()
    effect_start: list[_Int] = field(default_factory=list)
    effect_memory: list[_Int] = field(default_factory=list)
    effect_at_start: list[float] = field(default_factory=list)
    effect_at_end: list[float] = field(default_factory=list)
    blocks: tuple[str, ...] = ("",)
    block: list[_Int] = field(default_factory=list)
    kind: list[_Int] = field(default_factory=list)
    microbatch: list[_Int] = field(default_factory=list)
    pairs: list[tuple[_Int, _Int]] = field(default_factory=list)
    priority: list[float] | None = None
    order: list[_Int] | None = None
    time_unit: str = "s"
    work: list[_Int] = field(default_factory=list)
    works: tuple[_WorkFile, ...] = ()
    values: tuple[_ValueFile, ...] = ()
    groups: tuple[Groups, ...] = ()
    bodies: tuple[_BodyFile, ...] = ()


def _columns(program: Program) -> list[tuple[str, npt.NDArray[Any] | None]]:
    return [(name, getattr(program, name)) for name in _COLUMNS]


def _same(a: npt.NDArray[Any] | None, b: npt.NDArray[Any] | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


# --- columns: one dtype each, contiguous, read-only ---------------------------------------------


def _array(value: object, name: str) -> Any:
    """`value` as the read-only column `name`; copied if it shares memory that can be written."""
    if value is None:
        return None
    dtype = _COLUMNS[name]
    if type(value) is np.ndarray and value.dtype == dtype and value.ndim:
        flags = value.flags
        if flags.c_contiguous and not flags.writeable:
            return value  # as a builder has made it
    try:
        given = np.asarray(value)
        if np.issubdtype(dtype, np.integer):
            given = _whole(given, np.iinfo(dtype), name)
        column: npt.NDArray[Any] = np.ascontiguousarray(given, dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise ProgramError(
            f"cannot be read as numbers ({error})", fix="give a list of numbers", field=name
        ) from None
    if column.flags.writeable:
        column = column.copy() if column is value or column.base is not None else column
        column.flags.writeable = False
    return column


def _whole(given: npt.NDArray[Any], limits: Any, name: str) -> npt.NDArray[Any]:
    if not given.size:
        return given.astype(np.int32)
    if not np.issubdtype(given.dtype, np.integer):
        raise ProgramError(
            f"holds values of type {given.dtype}", fix="whole numbers are needed", field=name
        )
    if given.min() < limits.min or given.max() > limits.max:
        value = given.min() if given.min() < limits.min else given.max()
        raise ProgramError(
            f"holds {value}", fix=f"{limits.min} to {limits.max} is the range", field=name
        )
    return given


def _set_columns(program: Program) -> None:
    def put(name: str, value: object) -> None:
        object.__setattr__(program, name, value)

    for name in _COLUMNS:
        put(name, _array(getattr(program, name), name))
    for name in ("lanes", "memories", "blocks", "works", "values", "groups", "bodies"):
        put(name, tuple(getattr(program, name)))
    if program.duration.ndim != 1:
        raise ProgramError("is not a flat list", fix="one number per task", field="duration")
    tasks = len(program.duration)
    filled = {
        "wait_delay": np.zeros(program.wait_on.size),
        "effect_start": np.zeros(tasks + 1, np.int32),
        "block": np.zeros(tasks, np.int32),
        "kind": np.full(tasks, Kind.OTHER, np.int8),
        "microbatch": np.full(tasks, -1, np.int32),
        "work": np.full(tasks, -1, np.int32),
    }
    for name, values in filled.items():
        if not getattr(program, name).size:
            put(name, _array(values, name))
    if not program.pairs.size:
        put("pairs", _array(np.empty((0, 2), np.int32), "pairs"))


# --- checks: each names the task and what to change ---------------------------------------------


def _first(bad: npt.NDArray[np.bool_]) -> int | None:
    """The index of the first True, or None."""
    return int(bad.argmax()) if bad.any() else None


def _check_length(column: npt.NDArray[Any], length: int, name: str, per: str = "task") -> None:
    if column.shape != (length,):
        size = f"{len(column)} entries" if column.ndim == 1 else f"shape {column.shape}"
        raise ProgramError(
            f"has {size}", fix=f"one per {per} is needed, {length} in all", field=name
        )


def _check_labels(program: Program) -> None:
    tasks = program.num_tasks
    for name in ("block", "kind", "microbatch", "work"):
        _check_length(getattr(program, name), tasks, name)
    _check_unique([lane.name for lane in program.lanes], "lanes")
    _check_unique([memory.name for memory in program.memories], "memories")
    _check_unique(program.blocks, "blocks")
    limits = {"block": (0, len(program.blocks) - 1), "kind": (0, len(Kind) - 1)}
    limits["microbatch"] = (-1, int(_INT32.max))
    limits["work"] = (-1, len(program.works) - 1)
    for name, (low, high) in limits.items():
        column = getattr(program, name)
        if (task := _first((column < low) | (column > high))) is not None:
            raise ProgramError(
                f"task {task} has {name} {column[task]}",
                fix=f"{low} to {high} is there",
                field=name,
            )
    if program.time_unit not in ("s", ""):
        raise ProgramError(
            f"found {_shown(program.time_unit)}", fix='"s" or "" is needed', field="time_unit"
        )


def _check_meaning(program: Program) -> None:
    """Works name values, groups and bodies that are there; a value is a slice of an earlier one."""
    counts = {"values": len(program.values), "groups": len(program.groups)}
    for number, work in enumerate(program.works):
        numbers = (*work.reads, *work.writes)
        right = not numbers or (min(numbers) >= 0 and max(numbers) < counts["values"])
        if right and work.group < counts["groups"] and work.body < len(program.bodies):
            continue
        named = {
            "values": numbers,
            "groups": () if work.group < 0 else (work.group,),
            "bodies": () if work.body < 0 else (work.body,),
        }
        for table, numbers in named.items():
            there = counts.get(table, len(program.bodies))
            if any(not 0 <= n < there for n in numbers):
                raise ProgramError(
                    f"work {number} names {table} {list(numbers)}",
                    fix=f"there are {there}, counted from 0",
                    field="works",
                )
    for number, value in enumerate(program.values):
        if not -1 <= value.of < number:
            raise ProgramError(
                f"value {number} is a slice of value {value.of}",
                fix="name an earlier value, or -1 for none",
                field="values",
            )
    for body in program.bodies:
        if len(body.start) != body.program.num_tasks or len(body.end) != len(body.start):
            raise ProgramError(
                f"a body has {len(body.start)} starts for {body.program.num_tasks} tasks",
                fix="one start and one end per task is needed",
                field="bodies",
            )


def _check_unique(names: Sequence[str], field_name: str) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ProgramError(
                f"{_shown(name)} is there twice", fix="give each its own name", field=field_name
            )
        seen.add(name)


def _check_durations(program: Program) -> None:
    duration = program.duration
    if (task := _first(~((duration >= 0) & (duration < math.inf)))) is not None:
        raise ProgramError(
            f"{program.task_name(task)} lasts {duration[task]:g}",
            fix="a duration is a finite number >= 0",
            field="duration",
        )


def _check_lists(
    program: Program, start_name: str, value_name: str, limit: int, what: str
) -> npt.NDArray[np.int64]:
    """Check one list per task of indices below `limit`; returns the task of each entry."""
    start, values = getattr(program, start_name), getattr(program, value_name)
    _check_length(start, program.num_tasks + 1, start_name, "task and one at the end")
    if values.ndim != 1:
        raise ProgramError("is not a flat list", fix="one number per entry", field=value_name)
    counts = np.diff(start)
    if start[0] != 0 or (counts < 0).any() or start[-1] != len(values):
        raise ProgramError(
            f"does not rise from 0 to the {len(values)} entries of {value_name}",
            fix="task i owns the entries from the i-th number up to the next",
            field=start_name,
        )
    owner = np.repeat(np.arange(program.num_tasks), counts)
    if (entry := _first((values < 0) | (values >= limit))) is not None:
        there = f"there are {limit}, counted from 0" if limit else "there is none"
        raise ProgramError(
            f"{program.task_name(owner[entry])} names {what} {values[entry]}",
            fix=there,
            field=value_name,
        )
    return owner


def _check_lanes(program: Program) -> None:
    owner = _check_lists(program, "lane_start", "lane_of", len(program.lanes), "lane")
    adrift = (np.diff(program.lane_start) == 0) & (program.duration > 0)
    if (task := _first(adrift)) is not None:
        raise ProgramError(
            f"{program.task_name(task)} is on no lane but lasts {program.duration[task]:g}",
            fix="give it a lane, or no duration and its followers a delay",
            field="lane_of",
        )
    if len(owner) == program.num_tasks and (owner == np.arange(len(owner))).all():
        return  # one lane each: none twice
    keys = np.sort(owner * max(1, len(program.lanes)) + program.lane_of)
    if (entry := _first(keys[1:] == keys[:-1])) is not None:
        task, lane = divmod(int(keys[entry]), len(program.lanes))
        raise ProgramError(
            f"{program.task_name(task)} names lane {program.lanes[lane].name} twice",
            fix="name it once",
            field="lane_of",
        )


def _check_waits(program: Program) -> None:
    owner = _check_lists(program, "wait_start", "wait_on", program.num_tasks, "task")
    if (entry := _first(program.wait_on == owner)) is not None:
        raise ProgramError(
            f"{program.task_name(owner[entry])} waits for itself",
            fix="remove that wait",
            field="wait_on",
        )
    _check_length(program.wait_delay, len(owner), "wait_delay", "wait")
    delay = program.wait_delay
    if (entry := _first(~((delay >= 0) & (delay < math.inf)))) is not None:
        raise ProgramError(
            f"{program.task_name(owner[entry])} waits {delay[entry]:g} after "
            f"{program.task_name(program.wait_on[entry])}",
            fix="a delay is a finite number >= 0",
            field="wait_delay",
        )


def _check_effects(program: Program) -> None:
    owner = _check_lists(program, "effect_start", "effect_memory", len(program.memories), "memory")
    for name in ("effect_at_start", "effect_at_end"):
        amounts = getattr(program, name)
        _check_length(amounts, len(owner), name, "memory effect")
        if (entry := _first(~np.isfinite(amounts))) is not None:
            raise ProgramError(
                f"{program.task_name(owner[entry])} takes {amounts[entry]:g} of "
                f"{program.memories[program.effect_memory[entry]].name}",
                fix="an amount is a finite number",
                field=name,
            )


def _check_choices(program: Program) -> None:
    tasks, pairs = program.num_tasks, program.pairs
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ProgramError(f"has shape {pairs.shape}", fix="two tasks per pair", field="pairs")
    if ((pairs < 0) | (pairs >= tasks)).any():
        row = int(((pairs < 0) | (pairs >= tasks)).any(axis=1).argmax())
        raise ProgramError(
            f"pair {row} names tasks {pairs[row].tolist()}",
            fix=f"there are {tasks}, counted from 0",
            field="pairs",
        )
    if program.priority is not None:
        _check_length(program.priority, tasks, "priority")
        if (task := _first(~np.isfinite(program.priority))) is not None:
            raise ProgramError(
                f"{program.task_name(task)} has priority {program.priority[task]:g}",
                fix="a priority is a finite number",
                field="priority",
            )
    if program.order is not None:
        _check_length(program.order, tasks, "order")
        if (np.sort(program.order) != np.arange(tasks)).any():
            raise ProgramError(
                "does not name every task once", fix="give a permutation", field="order"
            )


# --- building one task at a time ----------------------------------------------------------------


class ProgramBuilder:
    """Collects tasks one by one; `build` checks them and makes the program.

        b = ProgramBuilder()
        gpu = b.lane("gpu0")
        f = b.add("layer", gpu, 2.0, kind=Kind.FORWARD)
        b.add("layer", gpu, 4.0, waits=[f], kind=Kind.BACKWARD)
        program = b.build()

    A wait may name a task that is added later, by the index it will have.
    """

    def __init__(self, time_unit: str = "s") -> None:
        self.time_unit = time_unit
        self.lanes: list[Lane] = []
        self.memories: list[Memory] = []
        self.order: Sequence[int] | None = None
        self.values: list[Value] = []
        self.bodies: list[Body] = []
        self.stages: tuple[str, ...] = ()  # names for the labels of works
        self._blocks: dict[str, int] = {}
        self._works: dict[Work, int] = {}
        self._block_of_work: list[int] = []
        self._groups: dict[Groups, int] = {}
        self._pairs: list[tuple[int, int]] = []
        self._labels: list[tuple[float, int, int, int, float, int]] = []
        self._lane_start, self._lane_of = [0], list[int]()
        self._wait_start, self._waits = [0], list[tuple[int, float]]()
        self._effect_start, self._effects = [0], list[tuple[int, float, float]]()

    def __len__(self) -> int:
        return len(self._labels)

    def lane(self, name: str, kind: str = "device") -> int:
        """Add a lane; returns its index."""
        self.lanes.append(Lane(name, kind))
        return len(self.lanes) - 1

    def memory(self, name: str, capacity: float | None = None) -> int:
        """Add a memory; returns its index."""
        self.memories.append(Memory(name, capacity))
        return len(self.memories) - 1

    def value(self, value: Value) -> int:
        """Add a value that works read and write; returns its number."""
        self.values.append(value)
        return len(self.values) - 1

    def group(self, groups: Groups) -> int:
        """The number of groups of devices that a collective runs in."""
        return self._groups.setdefault(groups, len(self._groups))

    def add(
        self,
        block: str | Work,
        lanes: int | Iterable[int],
        duration: float,
        waits: Iterable[int | tuple[int, float]] = (),
        memory: Iterable[tuple[int, float, float]] = (),
        kind: Kind = Kind.OTHER,
        microbatch: int = -1,
        priority: float = 0.0,
    ) -> int:
        """Add a task; returns its index. It has a name, or a work from which the name is made.

        A wait is a task or (task, delay); a memory effect is (memory, taken at the start, taken
        at the end), where less than zero gives back.
        """
        if isinstance(lanes, (int, np.integer)):
            self._lane_of.append(int(lanes))
        else:
            self._lane_of.extend(lanes)
        self._lane_start.append(len(self._lane_of))
        for wait in waits:
            self._waits.append(wait if isinstance(wait, tuple) else (wait, 0.0))
        self._wait_start.append(len(self._waits))
        self._effects.extend(memory)
        self._effect_start.append(len(self._effects))
        work = -1
        if isinstance(block, Work):
            work = self._works.setdefault(block, len(self._works))
            if work == len(self._block_of_work):  # a new one
                name = label(block, self.values, self.stages)
                self._block_of_work.append(self._blocks.setdefault(name, len(self._blocks)))
            block_index = self._block_of_work[work]
        else:
            block_index = self._blocks.setdefault(block, len(self._blocks))
        self._labels.append((duration, block_index, int(kind), microbatch, priority, work))
        return len(self._labels) - 1

    def pair(self, send: int, receive: int) -> None:
        """Say that two tasks are the two ends of one message."""
        self._pairs.append((send, receive))

    def build(self) -> Program:
        """The program; what is wrong with it is named with the task."""
        duration, block, kind, microbatch, priority, work = _split(self._labels, 6)
        wait_on, wait_delay = _split(self._waits, 2)
        effect_memory, at_start, at_end = _split(self._effects, 3)
        return Program(
            lanes=tuple(self.lanes),
            memories=tuple(self.memories),
            blocks=tuple(self._blocks) or ("",),
            time_unit=self.time_unit,
            works=tuple(self._works),
            values=tuple(self.values),
            groups=tuple(self._groups),
            bodies=tuple(self.bodies),
            **{
                name: _array(values, name)
                for name, values in {
                    "duration": duration,
                    "lane_start": self._lane_start,
                    "lane_of": self._lane_of,
                    "wait_start": self._wait_start,
                    "wait_on": wait_on,
                    "wait_delay": wait_delay,
                    "effect_start": self._effect_start,
                    "effect_memory": effect_memory,
                    "effect_at_start": at_start,
                    "effect_at_end": at_end,
                    "block": block,
                    "kind": kind,
                    "microbatch": microbatch,
                    "work": work,
                    "pairs": self._pairs,
                    "priority": priority if any(priority) else None,
                    "order": self.order,
                }.items()
            },
        )


def _split(rows: list[Any], width: int) -> tuple[tuple[Any, ...], ...]:
    """Columns of a list of tuples; `width` empty ones where there is none."""
    return tuple(zip(*rows, strict=True)) if rows else ((),) * width
