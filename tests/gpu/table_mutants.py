"""Wrong tables of regions, and a machine that runs them to see what comes of it.

The machine knows the kernel, not the check: it reads a table number by number as `kernels/tiles.py`
does, element by element, programs in turns that nobody promises. Memory holds tags instead of
numbers; what a tile computes is a digest of the tags that it read. So any element that is not what
it should be shows in the results. An access outside of a buffer and a wait for ever are said.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from partita.gpu.rtasks.arena import RegionOps
from partita.gpu.rtasks.generate import Source
from partita.gpu.rtasks.table import (
    INLINE,
    READS,
    WAITS,
    WEIGHTS,
    WIDE,
    WRITES,
    LaunchTable,
    launch_table,
)
from partita.gpu.rtasks.tileops import NOWHERE, Place, ReadsFrom, Tile, TileOp
from partita.problems.rprogram import RProgram


@dataclass(frozen=True)
class Launch:
    """Everything that a launch of a region is made of, but for the contents of the arenas."""

    ops: tuple[TileOp, ...]
    reads_from: ReadsFrom
    tiles: tuple[Tile, ...]
    codes: tuple[int, ...]
    table: LaunchTable
    data: int
    wide: int


def launch_of(
    region: RegionOps, tiles: Sequence[Tile], program: RProgram, data: int, wide: int
) -> Launch:
    """The launch of a program."""
    codes = Source(region.ops, tiles).codes
    table = launch_table(region.ops, codes, program)
    return Launch(region.ops, region.reads_from, tuple(tiles), codes, table, data, wide)


# What a task touches: offsets of elements from the begin of an operand, masked as the kernel does.


def matrix(rows: np.ndarray, cols: np.ndarray, stride: int) -> np.ndarray:
    return (rows[:, None] * stride + cols[None, :]).reshape(-1)


def tile_of(out: Place, tile: Tile, number: int) -> tuple[np.ndarray, np.ndarray]:
    down = -(out.rows // -tile.rows)
    rows = np.arange(number % down * tile.rows, number % down * tile.rows + tile.rows)
    cols = np.arange(number // down * tile.cols, number // down * tile.cols + tile.cols)
    return rows[(rows < out.rows)], cols[cols < out.cols]


def windows(op: TileOp, rows: np.ndarray) -> np.ndarray:
    """The pixels that output pixels read."""
    (high, wide), (out_high, out_wide) = op.attr("image"), op.attr("out")
    (kh, kw), (sh, sw) = op.attr("kernel"), op.attr("stride")
    (ph, pw), (dh, dw) = op.attr("padding"), op.attr("dilation")
    pixels = []
    for m in rows:
        image, i0 = m // (out_high * out_wide), m // out_wide % out_high * sh - ph
        j0 = m % out_wide * sw - pw
        for tap in range(kh * kw):
            i, j = i0 + tap // kw * dh, j0 + tap % kw * dw
            if 0 <= i < high and 0 <= j < wide:
                pixels.append((image * high + i) * wide + j)
    return np.array(pixels, dtype=np.int64)


def early(op: TileOp, tile: Tile, number: int) -> Iterator[tuple[int, np.ndarray, bool]]:
    """(column, elements, in the wide arena) that are read before waiting."""
    if op.kind in ("lstm_cell", "gru_cell"):
        x, h = op.reads[:2]
        units = np.arange(number * tile.cols, number * tile.cols + tile.cols)
        units = units[units < h.cols]
        gates = 4 if op.kind == "lstm_cell" else 3
        lines = np.concatenate([gate * h.cols + units for gate in range(gates)])
        yield WEIGHTS, matrix(lines, np.arange(x.cols), op.weights[0].stride), False
        yield WEIGHTS + 1, matrix(lines, np.arange(h.cols), op.weights[1].stride), False
        for index, at in enumerate(op.wide):
            if at != NOWHERE and index < (1 if gates == 4 else 2):
                yield WIDE + index, lines, True
        return
    _, cols = written(op, tile, number)
    if op.kind == "gemv":
        yield WEIGHTS, matrix(cols, np.arange(op.reads[0].cols), op.weights[0].stride), False
    elif op.kind == "conv":
        taps, channels = op.attr("kernel")[0] * op.attr("kernel")[1], -(op.reads[0].cols // -8) * 8
        yield WEIGHTS, matrix(cols, np.arange(taps * channels), op.weights[0].stride), False
    elif op.kind == "window" and op.weights:
        taps = op.attr("kernel")[0] * op.attr("kernel")[1]
        yield WEIGHTS, matrix(np.arange(taps), cols, op.weights[0].stride), False
    for index, at in enumerate(op.wide):
        if at != NOWHERE:
            channels = np.arange(-(op.reads[0].cols // -8) * 8)
            yield WIDE + index, channels if op.kind == "conv" and index else cols, True


def late(op: TileOp, tile: Tile, number: int) -> Iterator[tuple[int, np.ndarray]]:
    """(column, elements) that are read after waiting."""
    out = op.writes[0]
    if op.kind in ("lstm_cell", "gru_cell"):
        units = np.arange(number * tile.cols, number * tile.cols + tile.cols)
        yield READS, np.arange(op.reads[0].cols)
        yield READS + 1, np.arange(op.reads[1].cols)
        if op.kind == "lstm_cell":
            yield READS + 2, units[units < op.reads[1].cols]
        return
    rows, cols = written(op, tile, number)
    if op.kind in ("combine", "chain"):
        for index, place in enumerate(op.reads):
            m = rows[:1] * 0 if place.rows == 1 else rows
            n = cols[:1] * 0 if place.cols == 1 else cols[cols < place.cols]
            yield READS + index, matrix(m, n, place.stride)
        return
    x = op.reads[0]
    if op.kind == "gemv":
        yield READS, matrix(rows, np.arange(x.cols), x.stride)
    elif op.kind == "rows":
        yield READS, matrix(rows, np.arange(out.cols), x.stride)
    elif op.kind == "conv":
        yield READS, matrix(windows(op, rows), np.arange(x.cols), x.stride)
    else:
        yield READS, matrix(windows(op, rows), cols, x.stride)
    if len(op.reads) > 1:
        yield READS + 1, matrix(rows, cols, op.reads[1].stride)


def written(op: TileOp, tile: Tile, number: int) -> tuple[np.ndarray, np.ndarray]:
    out = op.writes[0]
    if op.kind == "rows":  # the kernel has no mask for its row
        return np.array([number]), np.arange(out.cols)
    if op.kind in ("gemv", "lstm_cell", "gru_cell"):
        cols = np.arange(number * tile.cols, (number + 1) * tile.cols)
        return np.arange(out.rows), cols[cols < out.cols]
    return tile_of(out, tile, number)


class Unsafe(Exception):  # noqa: N818 - what is found, no error
    """What a launch did that it must not do."""


class Machine:
    """Memory, counters, and programs that run a table in random turns."""

    def __init__(self, launch: Launch, like: Launch | None = None) -> None:
        self.launch = launch
        self.branch = {
            code: (op, tile)
            for code, op, tile in zip(launch.codes, launch.ops, launch.tiles, strict=True)
        }
        like = like or launch
        tags = np.random.default_rng(0)
        self.data = tags.integers(1, 2**62, max(like.data, launch.data))[: launch.data]
        self.wide = tags.integers(1, 2**62, max(like.wide, launch.wide))[: launch.wide]
        self.flags = np.zeros(launch.table.num_counters, np.int64)
        self.epoch = 0

    def read(self, memory: np.ndarray, at: int, elements: np.ndarray) -> bytes:
        where = at + elements
        if len(where) and (where.min() < 0 or where.max() >= len(memory)):
            raise Unsafe(f"element {where.max()} of {len(memory)}")
        return memory[where].tobytes()

    def _number(self, numbers: Sequence, at: int):
        if not 0 <= at < len(numbers):
            raise Unsafe(f"number {at} of {len(numbers)}")
        return numbers[at]

    def program(self, number: int) -> Iterator[Callable[[], bool] | None]:
        """One program; it yields where others may run, and what it waits for."""
        table = self.launch.table
        row_at = table.starts[number]
        code = self._number(table.rows, row_at)[0]
        while row_at < table.starts[number + 1]:
            row = self._number(table.rows, row_at)
            following = self._number(table.rows, row_at + 1)[0]
            if code in self.branch:  # no branch: the task does nothing but signal
                yield from self._task(row, *self.branch[code])
            yield None
            if row[4] >= 0:
                self._number(self.flags, row[4])
                self.flags[row[4]] += 1
            code, row_at = following, row_at + 1

    def _task(self, row, op: TileOp, tile: Tile) -> Iterator[Callable[[], bool] | None]:
        digest = blake2b(repr((row[0], row[1])).encode(), digest_size=8)
        for column, elements, is_wide in early(op, tile, row[1]):
            memory, at = (self.wide, row[column]) if is_wide else (self.data, row[column] * 8)
            digest.update(self.read(memory, at, elements))
        for number in range(row[3]):
            if number < INLINE:
                counter, tiles = row[WAITS + 2 * number], row[WAITS + 2 * number + 1]
            else:
                counter, tiles = self._number(self.launch.table.waits, row[2] + number - INLINE)
            self._number(self.flags, counter)
            target = tiles * (self.epoch + 1)
            yield lambda counter=counter, target=target: self.flags[counter] >= target
        for column, elements in late(op, tile, row[1]):
            digest.update(self.read(self.data, row[column] * 8, elements))
        yield None
        value = int.from_bytes(digest.digest()) >> 2
        rows, cols = written(op, tile, row[1])
        for index, place in enumerate(op.writes):
            where = row[WRITES + index] * 8 + matrix(rows, cols, place.stride)
            if len(where) and (where.min() < 0 or where.max() >= len(self.data)):
                raise Unsafe(f"element {where.max()} of {len(self.data)} is written")
            tags = value + (index + 1) * (matrix(rows, cols, 1 << 16) + 1)
            self.data[where] = tags

    def run(self, turns: random.Random) -> None:
        """One launch: by chance, or each program as far as it can go."""
        programs = {each: self.program(each) for each in range(self.launch.table.num_programs)}
        blocked: dict[int, Callable[[], bool]] = {}
        eager = turns.random() < 0.7
        order = list(programs)
        turns.shuffle(order)
        while programs:
            ready = [number for number in order if number in programs
                     and (number not in blocked or blocked[number]())]  # fmt: skip
            if not ready:
                raise Unsafe("all programs wait")
            number = ready[0] if eager else turns.choice(ready)
            blocked.pop(number, None)
            try:
                condition = next(programs[number])
            except StopIteration:
                del programs[number]
                continue
            if condition is not None:
                blocked[number] = condition
        self.epoch += 1

    def results(self) -> list[bytes]:
        """What stands where every op has its results."""
        results = []
        for op in self.launch.ops:
            rows, cols = np.arange(op.writes[0].rows), np.arange(op.writes[0].cols)
            results += [
                self.read(self.data, place.at, matrix(rows, cols, place.stride))
                for place in op.writes
            ]
        return results


def does_wrong(launch: Launch, right: Launch, tries: int, seed: int = 0) -> str | None:
    """What a launch does that the right one does not, in some of `tries` runs of two launches."""
    wanted = Machine(right)
    wanted.run(random.Random(0))
    results = wanted.results()
    for number in range(tries):
        machine, turns = Machine(launch, right), random.Random(seed * 1000 + number)
        try:
            for _ in range(2):
                machine.run(turns)
                if machine.results() != results:
                    return "other results"
        except Unsafe as unsafe:
            return str(unsafe)
    return None


# One number, row or place of a right launch made wrong.

Change = Callable[[Launch, random.Random], Launch | None]


def _with_row(launch: Launch, at: int, changes: dict[int, int]) -> Launch:
    row = list(launch.table.rows[at])
    for column, value in changes.items():
        row[column] = value
    rows = (*launch.table.rows[:at], tuple(row), *launch.table.rows[at + 1 :])
    return replace(launch, table=replace(launch.table, rows=rows))


def _pick(launch: Launch, rng: random.Random, wanted: Callable = lambda row: True) -> int | None:
    rows = [at for at, row in enumerate(launch.table.rows[:-1]) if wanted(row)]
    return rng.choice(rows) if rows else None


def _waiting(launch: Launch, rng: random.Random) -> tuple[int, int] | None:
    at = _pick(launch, rng, lambda row: row[3] > 0)
    if at is None:
        return None
    return at, WAITS + 2 * rng.randrange(min(launch.table.rows[at][3], INLINE))


def drop_wait(launch: Launch, rng: random.Random) -> Launch | None:
    where = _waiting(launch, rng)
    if where is None:
        return None
    at, column = where
    row = launch.table.rows[at]
    waits = [*row[WAITS:column], *row[column + 2 :], 0, 0]
    changed = _with_row(launch, at, dict(enumerate(waits, start=WAITS)))
    return _with_row(changed, at, {3: row[3] - 1})


def wait_elsewhere(launch: Launch, rng: random.Random) -> Launch | None:
    where = _waiting(launch, rng)
    counters = launch.table.num_counters
    return where and _with_row(launch, where[0], {where[1]: rng.randint(-1, counters)})


def wait_for_other_number(launch: Launch, rng: random.Random) -> Launch | None:
    where = _waiting(launch, rng)
    if where is None:
        return None
    tiles = launch.table.rows[where[0]][where[1] + 1]
    return _with_row(launch, where[0], {where[1] + 1: tiles + rng.choice((-tiles, -1, 1, tiles))})


def number_of_waits(launch: Launch, rng: random.Random) -> Launch | None:
    at = _pick(launch, rng)
    return _with_row(launch, at, {3: launch.table.rows[at][3] + rng.choice((-1, 1, 2, 7, 1000))})


def further_waits(launch: Launch, rng: random.Random) -> Launch | None:
    at = _pick(launch, rng, lambda row: row[3] > INLINE)
    return None if at is None else _with_row(launch, at, {2: rng.choice((-1, 1, 2, 10**6))})


def drop_signal(launch: Launch, rng: random.Random) -> Launch | None:
    at = _pick(launch, rng, lambda row: row[4] >= 0)
    return None if at is None else _with_row(launch, at, {4: -1})


def signal_elsewhere(launch: Launch, rng: random.Random) -> Launch | None:
    at = _pick(launch, rng)
    return _with_row(launch, at, {4: rng.randint(-2, launch.table.num_counters)})


def other_tile(launch: Launch, rng: random.Random) -> Launch | None:
    at = _pick(launch, rng)
    tile = launch.table.rows[at][1]
    return _with_row(launch, at, {1: tile + rng.choice((-1, 1, 2, 64, -(10**6)))})


def other_code(launch: Launch, rng: random.Random) -> Launch | None:
    return _with_row(launch, _pick(launch, rng), {0: rng.randint(-1, max(launch.codes) + 1)})


def other_operand(launch: Launch, rng: random.Random) -> Launch | None:
    at = _pick(launch, rng)
    row = launch.table.rows[at]
    column = rng.choice([each for each in range(READS, WRITES + 2) if row[each] != NOWHERE])
    return _with_row(launch, at, {column: row[column] + rng.choice((-1, 1, 8, -8, 1 << 20))})


def swap_rows(launch: Launch, rng: random.Random) -> Launch | None:
    rows = list(launch.table.rows)
    one, other = rng.randrange(len(rows) - 1), rng.randrange(len(rows) - 1)
    rows[one], rows[other] = rows[other], rows[one]
    return replace(launch, table=replace(launch.table, rows=tuple(rows)))


def move_row(launch: Launch, rng: random.Random) -> Launch | None:
    rows, last = list(launch.table.rows), launch.table.starts[-1]
    rows.insert(rng.randrange(last), rows.pop(rng.randrange(last)))
    return replace(launch, table=replace(launch.table, rows=tuple(rows)))


def lose_row(launch: Launch, rng: random.Random) -> Launch | None:
    rows = list(launch.table.rows)
    lost = rng.randrange(len(rows))
    starts = tuple(start - (start > lost) for start in launch.table.starts)
    left = (*rows[:lost], *rows[lost + 1 :])
    return replace(launch, table=replace(launch.table, rows=left, starts=starts))


def move_start(launch: Launch, rng: random.Random) -> Launch | None:
    starts = list(launch.table.starts)
    starts[rng.randrange(len(starts))] += rng.choice((-1, 1, 5))
    return replace(launch, table=replace(launch.table, starts=tuple(starts)))


def _elements(places: Iterable[Place]) -> set[int]:
    return {
        place.at + element
        for place in places
        for element in matrix(np.arange(place.rows), np.arange(place.cols), place.stride).tolist()
    }


def overlap_values(launch: Launch, rng: random.Random) -> Launch | None:
    """A value somewhere else in the arena, with all that lies inside of it, for all ops."""
    results = [place for op in launch.ops for place in op.writes]
    values = {*results, *(place for op in launch.ops for place in op.reads)}
    moving = {rng.choice(results)}
    while True:  # whatever shares memory with it goes along
        begin = min(place.at for place in moving)
        end = max(place.at + place.rows * place.stride for place in moving)
        more = {p for p in values if p.at < end and begin < p.at + p.rows * p.stride}
        if more == moving:
            break
        moving = more
    if not _elements(moving) <= _elements(p for p in results if p in moving):
        return None  # an input of the region is among them
    weights = {place for op in launch.ops for place in op.weights}
    target = rng.choice(sorted({*values, *weights}, key=lambda place: (place.at, place.rows)))
    by = max(target.at + rng.choice((0, 0, 8, -8, 64)), 0) - begin

    def there(some: tuple[Place, ...]) -> tuple[Place, ...]:
        return tuple(replace(p, at=p.at + by) if p in moving else p for p in some)

    begins = {place.at // 8 for place in moving}
    columns = {*range(READS, WEIGHTS), *range(WRITES, WRITES + 2)}
    ops = tuple(replace(op, reads=there(op.reads), writes=there(op.writes)) for op in launch.ops)
    rows = tuple(
        tuple(n + by // 8 if c in columns and n in begins else n for c, n in enumerate(row))
        for row in launch.table.rows
    )
    return replace(launch, ops=ops, table=replace(launch.table, rows=rows))


def short_arena(launch: Launch, rng: random.Random) -> Launch | None:
    if rng.random() < 0.3 and launch.wide > 8:
        return replace(launch, wide=rng.randrange(launch.wide))
    return replace(launch, data=rng.randrange(launch.data))


CHANGES: tuple[Change, ...] = (
    drop_wait, wait_elsewhere, wait_for_other_number, number_of_waits, further_waits, drop_signal,
    signal_elsewhere, other_tile, other_code, other_operand, swap_rows, move_row, lose_row,
    move_start, overlap_values, short_arena,
)  # fmt: skip
