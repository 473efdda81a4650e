"""Schedule: when each block of each micro-batch starts, under memory caps.

One micro-batch is a small DAG of blocks; a block has a span, a signed memory effect and the devices
it occupies, all of them for its whole span. Micro-batches are alike and independent. A schedule
gives every block of every micro-batch a start, without preemption, such that

    a device runs one block at a time,
    start_b >= start_a + span_a + delay_ab               for every dependency a -> b,
    at every start on a device, after all changes at that instant, the memory in use is <= its cap,

where the memory of a block counts on each of its devices from its *start* on (a negative one is
given back at its start). As spans are positive and devices exclusive, memory on a device depends
on nothing but the order of the blocks there.

With `num_microbatches` N the objective is the makespan, counted from time 0. Without, it is the
period: the time per micro-batch of a schedule that repeats for ever. `starts` then lists micro-
batches 0 to n - 1 of such a schedule, n large enough to show how it goes on: there is a smallest
K <= n / 2 with start(m + K, b) = start(m, b) + D for all m and b; K micro-batches are one
repetition, D / K is the period, and `unroll` continues the pattern to any number of micro-batches.

Memory need not sum to zero over a micro-batch. With N that is a schedule like any other. Without,
a sum above zero on a device with a cap fits no schedule (memory grows for ever), and a sum below
zero is only limited by how the schedule begins. A cap that no schedule fits makes a problem whose
answer is "infeasible", not one that is refused.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from partita import files
from partita.errors import FileError, InputError, ProblemError
from partita.problems.dag import sorted_or_cycle

KIND = "schedule-problem"
LARGEST = 10**15  # spans, delays and memory up to here add up exactly as whole numbers
MAX_DEVICES = 100_000
MAX_STARTS = 20_000_000  # blocks times micro-batches that we are ready to hold in memory
TOLERANCE = 1e-9  # relative, for spans and starts that are not whole numbers
_SHOWN_VIOLATIONS = 100
_PAIRED_BLOCKS = 400  # all pairs of blocks are compared up to here


@dataclass(frozen=True, slots=True)
class ScheduleBlock:
    """A piece of work that occupies all its devices; `memory` changes on each of them."""

    span: float
    devices: tuple[int, ...]
    memory: float = 0
    name: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class ScheduleProblem:
    """One micro-batch as blocks and dependencies, the devices, and how many micro-batches."""

    num_devices: int
    blocks: tuple[ScheduleBlock, ...]
    deps: tuple[tuple[int, int], ...] = ()
    delays: tuple[float, ...] = ()  # one per dependency, or none at all
    memory_capacity: tuple[float, ...] | None = None  # one per device; None: no limit
    num_microbatches: int | None = None  # None: the period is asked for
    name: str = ""

    def __post_init__(self) -> None:
        _check_counts(self)
        for index, block in enumerate(self.blocks):
            _check_block(self, index, block)
        _check_deps(self)
        if self.memory_capacity is not None:
            _check_capacity(self, self.memory_capacity)
        cycle = [self.label(block) for block in _find_cycle(self)]
        if cycle:
            around = cycle if len(cycle) <= 8 else [*cycle[:6], "...", cycle[-1]]
            raise ProblemError(
                f"blocks wait for each other: {' -> '.join(around)}",
                fix="remove one of these dependencies",
                field="deps",
            )

    def label(self, block: int, microbatch: int | None = None) -> str:
        """A block as people read it: its name, or its index if it has none."""
        name = self.blocks[block].name or f"block {block}"
        return name if microbatch is None else f"{name} of micro-batch {microbatch}"

    def to_json(self) -> dict[str, Any]:
        """The problem as the JSON object that `from_json` reads."""
        value: dict[str, Any] = {
            "format": f"partita/{KIND}@1",
            "name": self.name,
            "num_devices": self.num_devices,
            "blocks": [
                {
                    "name": block.name,
                    "kind": block.kind,
                    "span": block.span,
                    "memory": block.memory,
                    "devices": list(block.devices),
                }
                for block in self.blocks
            ],
            "deps": [list(dep) for dep in self.deps],
        }
        if self.delays:
            value["delays"] = list(self.delays)
        if self.memory_capacity is not None:
            alike = len(set(self.memory_capacity)) == 1
            value["memory_capacity"] = (
                self.memory_capacity[0] if alike else list(self.memory_capacity)
            )
        if self.num_microbatches is not None:
            value["num_microbatches"] = self.num_microbatches
        return value


@dataclass(frozen=True, slots=True)
class ScheduleSolution:
    """Starts as (micro-batch, block, start); see the module for what they are without N.

    `makespan` is the end of the last block listed. `period` is the time per micro-batch; where
    the number of micro-batches is given it is for information, and may be None.
    """

    period: float | None
    makespan: float
    starts: tuple[tuple[int, int, float], ...]

    @classmethod
    def from_json(cls, value: object, file: str = "") -> "ScheduleSolution":
        """The solution in the `solution` object of a result."""
        try:
            raw = files.convert(value, _FileSolution, file)
        except FileError as error:
            raise ProblemError(error.found, fix=error.fix, field=error.field, file=file) from None
        return cls(raw.period, raw.makespan, raw.starts)

    def to_json(self) -> dict[str, Any]:
        """The `solution` object of a result."""
        return {
            "period": self.period,
            "makespan": self.makespan,
            "starts": [list(entry) for entry in self.starts],
        }


def read(
    path: str | Path,
    *,
    memory: float | Sequence[float] | None = None,
    num_microbatches: int | None = None,
) -> ScheduleProblem:
    """Read a problem file; what is given here replaces what the file says."""
    value = files.decode_json(files.read_bytes(path), str(path))
    return from_json(value, str(path), memory=memory, num_microbatches=num_microbatches)


def from_json(
    value: dict[str, Any],
    file: str = "",
    *,
    memory: float | Sequence[float] | None = None,
    num_microbatches: int | None = None,
) -> ScheduleProblem:
    """The problem in a decoded `partita/schedule-problem@1` file; what is given here wins."""
    files.check_format(value, KIND, file=file)
    try:
        problem = _from_raw(files.convert(value, _ScheduleProblemFile, file))
        if memory is not None:
            capacity = _per_device(memory, problem.num_devices)
            problem = replace(problem, memory_capacity=capacity)
        if num_microbatches is not None:
            problem = replace(problem, num_microbatches=num_microbatches)
    except InputError as error:
        raise ProblemError(error.found, fix=error.fix, field=error.field, file=file) from None
    return problem


# --- what a schedule must be ---------------------------------------------------------------------


def check(problem: ScheduleProblem, solution: ScheduleSolution) -> tuple[str, ...]:
    """Why this is not a schedule of this problem, in words; empty if it is one."""
    return tuple(itertools.islice(_violations(problem, solution), _SHOWN_VIOLATIONS))


def evaluate(problem: ScheduleProblem, solution: ScheduleSolution) -> float:
    """The objective, from the starts alone: the makespan with N given, the period without."""
    if problem.num_microbatches is not None:
        return _makespan(problem, _complete_table(problem, solution))
    count, length, _ = _repeating(problem, solution)
    return _plain(length / count)


def unroll(
    problem: ScheduleProblem, solution: ScheduleSolution, num_microbatches: int
) -> ScheduleSolution:
    """The first micro-batches of a schedule that repeats, however many are asked for."""
    count, length, table = _repeating(problem, solution)
    unrolled = _unrolled(table[:count], length, num_microbatches)
    return solution_of(problem, unrolled, period=_plain(length / count))


def solution_of(
    problem: ScheduleProblem, table: Sequence[Sequence[float]], period: float | None = None
) -> ScheduleSolution:
    """The solution with start `table[microbatch][block]`."""
    starts = tuple(
        (microbatch, block, start)
        for microbatch, row in enumerate(table)
        for block, start in enumerate(row)
    )
    return ScheduleSolution(period, _makespan(problem, table), starts)


def periodic(
    problem: ScheduleProblem, table: Sequence[Sequence[float]], length: float
) -> ScheduleSolution:
    """The solution that repeats the micro-batches of `table` every `length`.

    It lists as many repetitions as are under way at the same time, and two more.
    """
    repetitions = _repetitions_to_steady_state(problem, table, length)
    unrolled = _unrolled(table, length, repetitions * len(table))
    return solution_of(problem, unrolled, period=_plain(length / len(table)))


_DOES_NOT_REPEAT = "the starts do not show a repetition (each at least twice)"


def _complete_table(problem: ScheduleProblem, solution: ScheduleSolution) -> list[list[float]]:
    malformed = next(_malformed(problem, solution), None)
    if malformed:
        raise ProblemError(malformed, fix="give a complete schedule", field="starts")
    return _table(problem, solution)


def _repeating(
    problem: ScheduleProblem, solution: ScheduleSolution
) -> tuple[int, float, list[list[float]]]:
    table = _complete_table(problem, solution)
    repetition = _repetition(problem, table)
    if repetition is None:
        raise ProblemError(_DOES_NOT_REPEAT, fix="give a periodic schedule", field="starts")
    return *repetition, table


def _violations(problem: ScheduleProblem, solution: ScheduleSolution) -> Iterator[str]:
    malformed = list(itertools.islice(_malformed(problem, solution), _SHOWN_VIOLATIONS))
    yield from malformed
    if malformed:
        return
    table = _table(problem, solution)
    makespan = _makespan(problem, table)
    if not math.isclose(makespan, solution.makespan, rel_tol=TOLERANCE):
        yield f"the makespan is {makespan}, and {solution.makespan} is claimed"
    if problem.num_microbatches is None:
        yield from _periodic_violations(problem, solution, table)
        return
    busiest = max(work_per_device(problem))
    if solution.period is not None and not solution.period >= busiest * (1 - TOLERANCE):
        yield f"a period of {solution.period} is claimed, and a device works {busiest} in each"
    yield from _rule_violations(problem, table)


def _malformed(problem: ScheduleProblem, solution: ScheduleSolution) -> Iterator[str]:
    """Is each block of each micro-batch there exactly once, at a time that is one?"""
    last_block, seen = len(problem.blocks) - 1, set()
    count = problem.num_microbatches
    if count is None:
        count = max((microbatch for microbatch, _, _ in solution.starts), default=-1) + 1
        if count < 1:
            yield "no micro-batch is scheduled"
            return
        if count > len(solution.starts):
            yield f"micro-batches up to {count - 1} are named by {len(solution.starts)} starts"
            return
    for microbatch, block, start in solution.starts:
        if not 0 <= microbatch < count:
            yield f"micro-batch {microbatch} is scheduled, and they are 0 to {count - 1}"
        elif not 0 <= block <= last_block:
            yield f"block {block} is scheduled, and blocks are 0 to {last_block}"
        elif not 0 <= start <= MAX_STARTS * LARGEST:
            yield f"{problem.label(block, microbatch)} starts at {start}"
        elif (microbatch, block) in seen:
            yield f"{problem.label(block, microbatch)} is scheduled twice"
        seen.add((microbatch, block))
    if len(seen) < count * len(problem.blocks):
        for microbatch, block in itertools.product(range(count), range(last_block + 1)):
            if (microbatch, block) not in seen:
                yield f"{problem.label(block, microbatch)} is not scheduled"


def _rule_violations(problem: ScheduleProblem, table: Sequence[Sequence[float]]) -> Iterator[str]:
    """Dependencies, one block at a time per device, memory: for the micro-batches in `table`."""
    slack = _slack(problem, table)
    for (first, second), lag in zip(problem.deps, lags(problem), strict=True):
        for microbatch, row in enumerate(table):
            if row[second] < row[first] + lag - slack:
                yield (
                    f"{problem.label(second, microbatch)} starts at {row[second]}, and "
                    f"{problem.label(first)} lets it start at {row[first] + lag}"
                )
    room = memory_left_per_device(problem)
    for device, here in enumerate(blocks_per_device(problem)):
        runs = sorted((row[block], m, block) for m, row in enumerate(table) for block in here)
        yield from _overlaps(problem, device, runs, slack)
        yield from _excess_memory(problem, device, runs, slack, room[device])


def _overlaps(
    problem: ScheduleProblem, device: int, runs: Sequence[tuple[float, int, int]], slack: float
) -> Iterator[str]:
    busy_until, running = -math.inf, ""
    for start, microbatch, block in runs:
        if start < busy_until - slack:
            yield (
                f"device {device} starts {problem.label(block, microbatch)} at {start} while "
                f"{running} runs until {busy_until}"
            )
        if start + problem.blocks[block].span > busy_until:
            busy_until = start + problem.blocks[block].span
            running = problem.label(block, microbatch)


def _excess_memory(
    problem: ScheduleProblem,
    device: int,
    runs: Sequence[tuple[float, int, int]],
    slack: float,
    room: float,
) -> Iterator[str]:
    """The first instant at which a device holds more than its cap, if there is one."""
    if problem.memory_capacity is None:
        return
    held: float = 0
    for index, (start, microbatch, block) in enumerate(runs):
        held += problem.blocks[block].memory
        at_once = index + 1 < len(runs) and runs[index + 1][0] <= start + slack
        if held > room and not at_once:
            yield (
                f"device {device} holds {held} after the start of "
                f"{problem.label(block, microbatch)} at {start}, and its cap is "
                f"{problem.memory_capacity[device]}"
            )
            return


def _periodic_violations(
    problem: ScheduleProblem, solution: ScheduleSolution, table: Sequence[Sequence[float]]
) -> Iterator[str]:
    """The rules hold for ever if they hold until the repetitions under way are all alike."""
    repetition = _repetition(problem, table)
    if repetition is None:
        yield _DOES_NOT_REPEAT
        return
    count, length = repetition
    period = _plain(length / count)
    if solution.period is None or not math.isclose(solution.period, period, rel_tol=TOLERANCE):
        yield f"the period is {period}, and {solution.period} is claimed"
    if problem.memory_capacity is not None:
        for device, kept in enumerate(memory_per_microbatch(problem)):
            if kept > 0:
                yield f"device {device} keeps {kept} of every micro-batch, and has a cap"
                return
    repetitions = _repetitions_to_steady_state(problem, table[:count], length)
    if repetitions * count * len(problem.blocks) > MAX_STARTS:
        yield f"{repetitions} repetitions are under way at once: too many to check"
        return
    yield from _rule_violations(problem, _unrolled(table[:count], length, repetitions * count))


def _table(problem: ScheduleProblem, solution: ScheduleSolution) -> list[list[float]]:
    """`table[microbatch][block]` = start, of a solution that is not malformed."""
    count = max(microbatch for microbatch, _, _ in solution.starts) + 1
    table = [[math.nan] * len(problem.blocks) for _ in range(count)]
    for microbatch, block, start in solution.starts:
        table[microbatch][block] = start
    return table


def _makespan(problem: ScheduleProblem, table: Sequence[Sequence[float]]) -> float:
    return max(
        start + block.span
        for row in table
        for start, block in zip(row, problem.blocks, strict=True)
    )


def _repetition(
    problem: ScheduleProblem, table: Sequence[Sequence[float]]
) -> tuple[int, float] | None:
    """(K, D): every K micro-batches the starts repeat, D later; the smallest K there is."""
    slack = _slack(problem, table)
    for count in range(1, len(table) // 2 + 1):
        length = table[count][0] - table[0][0]
        if length > slack and all(
            abs(later - earlier - length) <= slack
            for before, after in zip(table, table[count:], strict=False)
            for earlier, later in zip(before, after, strict=True)
        ):
            return count, length
    return None


def _unrolled(
    table: Sequence[Sequence[float]], length: float, num_microbatches: int
) -> list[list[float]]:
    return [
        [start + (microbatch // len(table)) * length for start in table[microbatch % len(table)]]
        for microbatch in range(num_microbatches)
    ]


def _repetitions_to_steady_state(
    problem: ScheduleProblem, table: Sequence[Sequence[float]], length: float
) -> int:
    """After this many repetitions everything that can be under way at once is."""
    took = _makespan(problem, table) - min(map(min, table))
    return math.ceil(took / length) + 2


def _slack(problem: ScheduleProblem, table: Sequence[Sequence[float]]) -> float:
    """By how much times may disagree: not at all between whole numbers."""
    whole = is_whole(problem) and all(isinstance(start, int) for row in table for start in row)
    return 0 if whole else TOLERANCE * max(1e-30, _makespan(problem, table))


# --- what follows from the problem alone ---------------------------------------------------------


def is_whole(problem: ScheduleProblem) -> bool:
    """Are all spans and delays whole numbers, so that times are exact?"""
    return all(isinstance(block.span, int) for block in problem.blocks) and all(
        isinstance(delay, int) for delay in problem.delays
    )


def lags(problem: ScheduleProblem) -> list[float]:
    """For each dependency how long after the start of the first block the second may start."""
    delays = problem.delays or (0,) * len(problem.deps)
    return [
        problem.blocks[first].span + delay
        for (first, _), delay in zip(problem.deps, delays, strict=True)
    ]


def predecessors(problem: ScheduleProblem) -> list[list[tuple[int, float]]]:
    """For each block the (block, lag) it waits for."""
    predecessors: list[list[tuple[int, float]]] = [[] for _ in problem.blocks]
    for (first, second), lag in zip(problem.deps, lags(problem), strict=True):
        predecessors[second].append((first, lag))
    return predecessors


def topological_order(problem: ScheduleProblem) -> list[int]:
    """All blocks, each after those it waits for, the smallest index first."""
    children: list[list[int]] = [[] for _ in problem.blocks]
    for first, second in problem.deps:
        children[first].append(second)
    return sorted_or_cycle(children)[0]


def heads(problem: ScheduleProblem) -> list[float]:
    """For each block the earliest it can start after the start of its micro-batch."""
    before = predecessors(problem)
    heads: list[float] = [0] * len(problem.blocks)
    for block in topological_order(problem):
        heads[block] = max((heads[first] + lag for first, lag in before[block]), default=0)
    return heads


def tails(problem: ScheduleProblem) -> list[float]:
    """For each block the least time from its start to the end of its micro-batch."""
    before = predecessors(problem)
    tails: list[float] = [block.span for block in problem.blocks]
    for block in reversed(topological_order(problem)):
        for first, lag in before[block]:
            tails[first] = max(tails[first], lag + tails[block])
    return tails


def blocks_per_device(problem: ScheduleProblem) -> list[list[int]]:
    """Which blocks occupy each device, by index."""
    blocks: list[list[int]] = [[] for _ in range(problem.num_devices)]
    for index, block in enumerate(problem.blocks):
        for device in block.devices:
            blocks[device].append(index)
    return blocks


def work_per_device(problem: ScheduleProblem) -> list[float]:
    """How long each device works on one micro-batch."""
    work: list[float] = [0] * problem.num_devices
    for block in problem.blocks:
        for device in block.devices:
            work[device] += block.span
    return work


def memory_per_microbatch(problem: ScheduleProblem) -> list[float]:
    """What one micro-batch leaves behind on each device; rounding is not a remainder."""
    kept: list[float] = [0] * problem.num_devices
    most: list[float] = [0] * problem.num_devices
    for block in problem.blocks:
        for device in block.devices:
            kept[device] += block.memory
            most[device] = max(most[device], abs(block.memory))
    return [
        0 if abs(left) <= TOLERANCE * size else left for left, size in zip(kept, most, strict=True)
    ]


def memory_left_per_device(problem: ScheduleProblem) -> list[float]:
    """What each device may hold: its cap, and the rounding of sums that are not whole numbers."""
    if problem.memory_capacity is None:
        return [math.inf] * problem.num_devices
    room = []
    for cap, here in zip(problem.memory_capacity, blocks_per_device(problem), strict=True):
        effects = [problem.blocks[index].memory for index in here]
        exact = all(isinstance(amount, int) for amount in (cap, *effects))
        room.append(cap if exact else cap + TOLERANCE * max(cap, *map(abs, effects), 0.0))
    return room


def lower_bound(problem: ScheduleProblem) -> float:
    """No schedule has a smaller objective; from work, critical path and memory over time.

    Memory: a device that holds `held` units of memory times time for each micro-batch, at most
    `cap` units at once, is at it for N * held / cap from its first to its last start.
    """
    first, after = heads(problem), tails(problem)
    work, held = work_per_device(problem), held_per_device(problem)
    caps = problem.memory_capacity or (math.inf,) * problem.num_devices
    count, whole = problem.num_microbatches, is_whole(problem)
    bounds = [max(map(sum, zip(first, after, strict=True))) if count is not None else 0]
    for device, here in enumerate(blocks_per_device(problem)):
        if not here:
            continue
        holding = (held[device] or 0, caps[device])
        if count is None:
            bounds += [work[device], _quotient(1, *holding, round_up=False)]
            continue
        head = min(first[index] for index in here)
        tail = min(after[index] - problem.blocks[index].span for index in here)
        bounds.append(head + count * work[device] + tail)
        tail = min(after[index] for index in here)
        bounds.append(head + _quotient(count, *holding, round_up=whole) + tail)
    best = max(bounds)
    return best if isinstance(best, int) else best * (1 - 1e-12)  # the sums above are rounded


def _quotient(count: int, held: float, cap: float, *, round_up: bool) -> float:
    """count * held / cap, rounded up where times are whole; 0 where the cap says nothing."""
    if not held or cap in (0, math.inf):
        return 0
    if not (isinstance(held, int) and isinstance(cap, int)):
        return count * held / cap
    return -(-count * held // cap) if round_up else _plain(count * held / cap)


def held_per_device(problem: ScheduleProblem) -> list[float | None]:
    """Memory times time that one micro-batch takes at least on each device; None: not known.

    Each unit given back is paired with a unit taken by a block that it waits for, however
    indirectly; it is held at least as long as the longest path between the two. Known where all
    memory of the device pairs up.
    """
    if len(problem.blocks) > _PAIRED_BLOCKS:
        return [None] * problem.num_devices
    order, before = topological_order(problem), predecessors(problem)
    from_takes: dict[int, list[float]] = {
        index: _distances(order, before, index)
        for index, block in enumerate(problem.blocks)
        if block.memory > 0
    }
    position = {block: place for place, block in enumerate(order)}
    return [
        _held(problem, sorted(here, key=position.__getitem__), from_takes)
        for here in blocks_per_device(problem)
    ]


def _held(
    problem: ScheduleProblem, here: Sequence[int], from_takes: dict[int, list[float]]
) -> float | None:
    """The same for one device, whose blocks are given in topological order."""
    left: dict[int, float] = {}  # block -> memory it took that is not given back yet
    held: float = 0
    for index in here:
        block = problem.blocks[index]
        if block.memory > 0:
            left[index] = block.memory
        wanted = -block.memory
        for taker in sorted(left, key=lambda i: (from_takes[i][index], i)):  # the nearest first
            amount = min(left[taker], wanted)
            if amount > 0 and from_takes[taker][index] >= 0:
                held += amount * from_takes[taker][index]
                left[taker] -= amount
                wanted -= amount
        if wanted > TOLERANCE * abs(block.memory):
            return None
    rest = TOLERANCE * max((abs(problem.blocks[index].memory) for index in here), default=0)
    return held if all(amount <= rest for amount in left.values()) else None


def _distances(order: list[int], before: list[list[tuple[int, float]]], source: int) -> list[float]:
    """Longest path from the start of `source` to the start of each block; -inf: there is none."""
    distances = [-math.inf] * len(order)
    distances[source] = 0
    for block in order:
        for first, lag in before[block]:
            distances[block] = max(distances[block], distances[first] + lag)
    return distances


# --- what a problem must be ----------------------------------------------------------------------


def _check_counts(problem: ScheduleProblem) -> None:
    if not 1 <= problem.num_devices <= MAX_DEVICES:
        raise ProblemError(
            f"found {problem.num_devices}",
            fix=f"give a whole number from 1 to {MAX_DEVICES:,}",
            field="num_devices",
        )
    if not problem.blocks:
        raise ProblemError("is empty", fix="give at least one block", field="blocks")
    most = MAX_STARTS // len(problem.blocks)
    count = problem.num_microbatches
    if count is not None and not 1 <= count <= most:
        raise ProblemError(
            f"found {count}",
            fix=f"give a whole number from 1 to {most:,}, or none to ask for the period",
            field="num_microbatches",
        )


def _check_block(problem: ScheduleProblem, index: int, block: ScheduleBlock) -> None:
    where = f"blocks[{index}]"
    _check_number(block.span, f"{where}.span", "a number above zero", block.span > 0)
    _check_number(block.memory, f"{where}.memory", "a number; negative gives memory back")
    if not block.devices:
        raise ProblemError(
            "is empty", fix="name the devices that run the block", field=f"{where}.devices"
        )
    for position, device in enumerate(block.devices):
        if not 0 <= device < problem.num_devices:
            raise ProblemError(
                f"found device {device}",
                fix=f"devices are 0 to {problem.num_devices - 1} (num_devices is "
                f"{problem.num_devices})",
                field=f"{where}.devices[{position}]",
            )
    if len(set(block.devices)) != len(block.devices):
        raise ProblemError(
            "names a device twice", fix="name each device once", field=f"{where}.devices"
        )


def _check_deps(problem: ScheduleProblem) -> None:
    for position, pair in enumerate(problem.deps):
        for end, index in enumerate(pair):
            if not 0 <= index < len(problem.blocks):
                raise ProblemError(
                    f"found block {index}",
                    fix=f"blocks are 0 to {len(problem.blocks) - 1}",
                    field=f"deps[{position}][{end}]",
                )
    if problem.delays and len(problem.delays) != len(problem.deps):
        raise ProblemError(
            f"has {len(problem.delays)} entries",
            fix=f"give one per dependency: {len(problem.deps)}",
            field="delays",
        )
    for position, delay in enumerate(problem.delays):
        _check_number(delay, f"delays[{position}]", "a number of at least zero", delay >= 0)


def _check_capacity(problem: ScheduleProblem, caps: Sequence[float]) -> None:
    if len(caps) != problem.num_devices:
        raise ProblemError(
            f"has {len(caps)} entries",
            fix=f"give one number, or one per device: {problem.num_devices}",
            field="memory_capacity",
        )
    for device, cap in enumerate(caps):
        _check_number(cap, f"memory_capacity[{device}]", "a number of at least zero", cap >= 0)


def _check_number(value: float, field: str, needed: str, holds: bool = True) -> None:
    if not (holds and -LARGEST <= value <= LARGEST):  # also refuses NaN
        raise ProblemError(
            f"found {value!r}", fix=f"give {needed}, at most {LARGEST:.0e} in size", field=field
        )


def _find_cycle(problem: ScheduleProblem) -> list[int]:
    """Blocks that wait for each other, the first one again at the end; empty if there are none."""
    order = set(topological_order(problem))
    if len(order) == len(problem.blocks):
        return []
    # Every block left waits for another one left: following them must come round.
    waits_for = {b: a for a, b in reversed(problem.deps) if not order & {a, b}}
    block, seen = min(waits_for), dict[int, None]()
    while block not in seen:
        seen[block] = None
        block = waits_for[block]
    cycle = list(seen)[list(seen).index(block) :]
    return [block, *reversed(cycle)]


def _per_device(memory: float | Sequence[float], num_devices: int) -> tuple[float, ...]:
    if isinstance(memory, Sequence):
        return tuple(_plain(cap) for cap in memory)
    return (_plain(memory),) * num_devices


def _plain(value: float) -> float:
    """2.0 as 2: whole numbers are exact, whatever way they are written."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST
    return int(value) if whole else value


class _FileBlock(msgspec.Struct, forbid_unknown_fields=True):
    span: int | float
    devices: tuple[int, ...]
    memory: int | float = 0
    name: str = ""
    kind: str = ""


class _ScheduleProblemFile(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    num_devices: int
    blocks: tuple[_FileBlock, ...]
    deps: tuple[tuple[int, int], ...] = ()
    delays: tuple[int | float, ...] | None = None
    memory_capacity: int | float | tuple[int | float, ...] | None = None
    num_microbatches: int | None = None
    name: str = ""


class _FileSolution(msgspec.Struct, forbid_unknown_fields=True):
    period: int | float | None
    makespan: int | float
    starts: tuple[tuple[int, int, int | float], ...]


def _from_raw(raw: _ScheduleProblemFile) -> ScheduleProblem:
    return ScheduleProblem(
        num_devices=raw.num_devices,
        blocks=tuple(
            ScheduleBlock(_plain(b.span), b.devices, _plain(b.memory), b.name, b.kind)
            for b in raw.blocks
        ),
        deps=raw.deps,
        delays=tuple(map(_plain, raw.delays or ())),
        # A wrong number of devices is refused by the record, before a tuple of that length is made.
        memory_capacity=None
        if raw.memory_capacity is None
        else _per_device(raw.memory_capacity, min(max(raw.num_devices, 0), MAX_DEVICES)),
        num_microbatches=raw.num_microbatches,
        name=raw.name,
    )
