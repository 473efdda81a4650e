"""Is a region's table safe to launch? Proven from its numbers, whoever wrote them.

The kernel does what the table says: it has no bounds of its own. So this reads the table as the
kernel does, row by row, with the sizes that each branch of the code was generated for, and refuses
it unless

- every number points to something: a branch, a tile, a counter, a wait, a row;
- every row is a tile of one of the ops, with this op's operands, and every tile runs once;
- all operands lie inside the arenas; results share no memory with each other, with weights (they
  are read before a task waits) or with a value that is not said to be read from them;
- a counter is waited for with as many tiles as signal it: fewer would let a later launch go on too
  early, more would never come;
- programs in any turns come to their end: no circle of waits;
- whatever a task reads that another writes, happened before it in every such run. That is followed
  with a vector clock: how far every other program is known to be when a task begins.

It takes one pass over the rows, each with a vector as long as there are programs.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import numpy as np

from partita.errors import VerificationError
from partita.gpu.bounds import outside
from partita.gpu.rtasks.bounds import region_reaches, touched
from partita.gpu.rtasks.table import INLINE, READS, WAITS, WIDTH, LaunchTable, Row, operand_columns
from partita.gpu.rtasks.tileops import ReadsFrom, Tile, TileOp, num_tiles

MOST = 2**31  # numbers of the table have 32 bits


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows of elements of the arena, `stride` apart."""

    at: int
    rows: int
    cols: int
    stride: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.at + (self.rows - 1) * self.stride + self.cols

    def meets(self, other: "Rectangle") -> bool:
        """Is there an element of both?"""
        if self.at >= other.end or other.at >= self.end:
            return False
        if self.stride == other.stride:  # the k-th row after one of mine begins d + k stride on
            distance, stride = other.at - self.at, self.stride
            first = max(-((distance + other.cols - 1) // stride), 1 - self.rows)
            last = min((self.cols - 1 - distance) // stride, other.rows - 1)
            return first <= last
        mine = self.at + np.arange(self.rows, dtype=np.int64) * self.stride
        theirs = other.at + np.arange(other.rows, dtype=np.int64) * other.stride
        following = np.searchsorted(theirs, mine + self.cols)  # the first that begins after mine
        begins = theirs[np.maximum(following - 1, 0)]
        return bool(((following > 0) & (begins + other.cols > mine)).any())


def check_table(
    ops: Sequence[TileOp],
    reads_from: ReadsFrom,
    tiles: Sequence[Tile],
    codes: Sequence[int],
    table: LaunchTable,
    data: int,
    wide: int,
) -> None:
    """Refuse a table that could do anything but run the ops in an arena of these sizes."""
    wrong = why_unsafe(ops, reads_from, tiles, codes, table, data, wide)
    if wrong:
        raise VerificationError(tuple(f"a region must not be launched: {each}" for each in wrong))


def why_unsafe(
    ops: Sequence[TileOp],
    reads_from: ReadsFrom,
    tiles: Sequence[Tile],
    codes: Sequence[int],
    table: LaunchTable,
    data: int,
    wide: int,
) -> tuple[str, ...]:
    """Why a table must not be launched, one sentence each; empty if it is safe."""
    wrong = _malformed(table)
    if wrong:
        return wrong
    owners, wrong = _owners(ops, tiles, codes, table)
    wrong += tuple(f"{each}" for each in outside(region_reaches(ops, data, wide)))
    if wrong:
        return wrong
    sources, wrong = _sources(ops, reads_from)
    return wrong or _wrong_counts(table) or _unordered(ops, table, owners, sources)


def _malformed(table: LaunchTable) -> tuple[str, ...]:
    """Numbers that point to nothing."""
    starts = table.starts
    if len(starts) < 2 or starts[0] != 0 or list(starts) != sorted(starts):
        return (f"its programs begin at {starts[:4]}...",)
    if starts[-1] != len(table.rows) - 1:
        return (f"its programs end at row {starts[-1]} of {len(table.rows) - 1}",)
    wrong = []
    for number, row in enumerate(table.rows):
        if len(row) != WIDTH or not all(-MOST <= each < MOST for each in row):
            wrong.append(f"row {number} is not {WIDTH} numbers of 32 bits")
        elif number == starts[-1]:
            continue  # only read ahead
        elif row[3] < 0 or (row[3] > INLINE and not 0 <= row[2] <= _last_wait(table, row)):
            wrong.append(f"row {number} waits for {row[3]} counters from {row[2]} on, of a list of "
                         f"{len(table.waits)}")  # fmt: skip
        elif not -1 <= row[4] < table.num_counters:
            wrong.append(f"row {number} signals counter {row[4]} of {table.num_counters}")
        else:
            wrong += [
                f"row {number} waits for counter {counter} of {table.num_counters}"
                for counter, _ in table.pairs(row)
                if not 0 <= counter < table.num_counters
            ]
    return tuple(wrong)


def _last_wait(table: LaunchTable, row: Row) -> int:
    return len(table.waits) - (row[3] - INLINE)


def _owners(
    ops: Sequence[TileOp], tiles: Sequence[Tile], codes: Sequence[int], table: LaunchTable
) -> tuple[list[int], tuple[str, ...]]:
    """The op of every row; what is no tile of one, runs twice or never."""
    known = {(codes[index], operand_columns(op)): index for index, op in enumerate(ops)}
    if len(known) < len(ops):
        return [], ("two ops are the same",)
    counts = [num_tiles(op, tile) for op, tile in zip(ops, tiles, strict=True)]
    owners: list[int] = []
    ran: set[tuple[int, int]] = set()
    wrong = []
    for number, row in enumerate(table.rows[:-1]):
        index = known.get((row[0], row[READS:WAITS]))
        if index is None:
            wrong.append(f"row {number} has the operands of no op with code {row[0]}")
            continue
        task = (index, row[1])
        if not 0 <= row[1] < counts[index]:
            wrong.append(f"row {number}: {ops[index].name!r} has no tile {row[1]}")
        elif task in ran:
            wrong.append(f"row {number}: tile {row[1]} of {ops[index].name!r} runs a second time")
        ran.add(task)
        owners.append(index)
    if not wrong and len(ran) < sum(counts):
        every = ((index, tile) for index, count in enumerate(counts) for tile in range(count))
        wrong = [f"tile {tile} of {ops[i].name!r} never runs" for i, tile in every
                 if (i, tile) not in ran]  # fmt: skip
    return owners, tuple(wrong)


def _sources(
    ops: Sequence[TileOp], reads_from: ReadsFrom
) -> tuple[list[list[int]], tuple[str, ...]]:
    """The ops whose results each op reads; results that share memory with what they must not."""
    results = _Results(ops)
    sources: list[list[int]] = []
    wrong: list[str] = []
    for index, op in enumerate(ops):
        before: set[int] = set()
        if len(op.writes) > 1 and results.meets_itself(index):
            wrong.append(f"results of {op.name!r} lie over each other")
        for number, (operand, place, rows, cols) in enumerate(touched(op)):
            met = results.meeting(Rectangle(place.at, rows, cols, place.stride))
            if number < len(op.writes):
                allowed = {index}
            elif place in op.weights:
                allowed = set()
            else:
                reads = zip(op.reads, reads_from[index], strict=True)
                allowed = {each for read, some in reads if read == place for each in some}
                allowed -= {index}
                before |= met
            wrong += [
                f"{ops[other].name!r} writes where {op.name!r} has its {operand}"
                for other in sorted(met - allowed)
            ]
        sources.append(sorted(before))
    return sources, tuple(wrong)


class _Results:
    """Where ops write, in the order of the arena."""

    def __init__(self, ops: Sequence[TileOp]) -> None:
        self.written = sorted(
            (
                (Rectangle(place.at, rows, cols, place.stride), index)
                for index, op in enumerate(ops)
                for _, place, rows, cols in islice(touched(op), len(op.writes))
            ),
            key=lambda pair: pair[0].at,
        )
        self.begins = [rectangle.at for rectangle, _ in self.written]
        self.longest = max((r.end - r.at for r, _ in self.written), default=0)

    def meets_itself(self, index: int) -> bool:
        """Do two results of one op share memory?"""
        own = [result for result, maker in self.written if maker == index]
        return any(one.meets(other) for one, other in combinations(own, 2))

    def meeting(self, place: Rectangle) -> set[int]:
        """The ops that write some element of it."""
        first = bisect_left(self.begins, place.at - self.longest)
        last = bisect_left(self.begins, place.end)
        return {index for result, index in self.written[first:last] if result.meets(place)}


def reads_by_place(ops: Sequence[TileOp]) -> ReadsFrom:
    """Whose results every read is, if nothing shares memory but for that."""
    results = _Results(ops)
    return tuple(
        tuple(
            tuple(sorted(results.meeting(Rectangle(p.at, p.rows, p.cols, p.stride)) - {index}))
            for p in op.reads
        )
        for index, op in enumerate(ops)
    )


def _wrong_counts(table: LaunchTable) -> tuple[str, ...]:
    """Waits for other numbers of tiles than signal a counter in every launch."""
    signals: dict[int, int] = defaultdict(int)
    for row in table.rows[:-1]:
        signals[row[4]] += 1
    return tuple(
        f"row {number} waits for {tiles} tiles of counter {counter}, which has {signals[counter]}"
        for number, row in enumerate(table.rows[:-1])
        for counter, tiles in table.pairs(row)
        if tiles != signals[counter] or tiles == 0
    )


def _unordered(
    ops: Sequence[TileOp], table: LaunchTable, owners: list[int], sources: list[list[int]]
) -> tuple[str, ...]:
    """Reads that need not come after the write; programs that wait for ever."""
    run = _TableRun(table, owners)
    last = run.last_of_ops(len(ops))
    wrong = []
    for row, program in run.rows():
        index = owners[row]
        wrong += [
            f"row {row}: tile {table.rows[row][1]} of {ops[index].name!r} reads what "
            f"{ops[source].name!r} writes and does not wait for it"
            for source in sources[index]
            if (last[source] > run.clocks[program]).any()
        ]
    wrong += [
        f"program {program} waits for ever at row {row}, for {ops[owners[row]].name!r}"
        for program, row in run.stuck()
    ]
    return tuple(wrong)


class _TableRun:
    """A launch without time: who goes on when, and what is known to have happened by then."""

    def __init__(self, table: LaunchTable, owners: list[int]) -> None:
        self.table, self.owners = table, owners
        shape = (table.num_programs, table.num_programs)
        self.clocks = np.zeros(shape, np.int32)  # rows of each program that happened before
        self.heard = np.zeros((table.num_counters, table.num_programs), np.int32)
        self.next = list(table.starts[:-1])

    def last_of_ops(self, num_ops: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """How far each program must be for all tiles of an op to be done."""
        last = np.zeros((num_ops, self.table.num_programs), np.int32)
        for program, (begin, end) in enumerate(self._spans()):
            for row in range(begin, end):
                last[self.owners[row], program] = row - begin + 1
        return last

    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self.table.starts[:-1], self.table.starts[1:], strict=True))

    def rows(self) -> Iterator[tuple[int, int]]:
        """Rows in an order that the waits allow, as (row, program), when each may begin."""
        left: dict[int, int] = defaultdict(int)
        for row in self.table.rows[:-1]:
            left[row[4]] += 1
        asleep: dict[int, list[int]] = defaultdict(list)
        awake = list(range(self.table.num_programs))[::-1]
        while awake:
            program = awake.pop()
            begin, end = self.table.starts[program : program + 2]
            while self.next[program] < end:
                row = self.table.rows[self.next[program]]
                waits = [counter for counter, _ in self.table.pairs(row)]
                unheard = next((counter for counter in waits if left[counter]), None)
                if unheard is not None:
                    asleep[unheard].append(program)
                    break
                for counter in waits:
                    np.maximum(self.clocks[program], self.heard[counter], out=self.clocks[program])
                yield self.next[program], program
                self.next[program] += 1
                self.clocks[program, program] = self.next[program] - begin
                if row[4] >= 0:
                    np.maximum(self.heard[row[4]], self.clocks[program], out=self.heard[row[4]])
                    left[row[4]] -= 1
                    if not left[row[4]]:
                        awake += asleep.pop(row[4], [])

    def stuck(self) -> list[tuple[int, int]]:
        """Programs that did not come to their end, with the row that they wait at."""
        places = zip(self.next, self.table.starts[1:], strict=True)
        return [(program, row) for program, (row, end) in enumerate(places) if row < end]
