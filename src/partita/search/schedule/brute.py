"""Complete search, for tiny problems: the oracle of the others.

With a number of micro-batches. A schedule in which no block can be moved to the left alone is given
by the order of its starts: each block then starts as soon as its dependencies and devices allow.
Some schedule of this kind has the least makespan, so all of them are walked through, depth first,
as sequences with starts that do not decrease (of equal starts, those nearest to the end of their
micro-batch come first, so that each schedule is met once). Memory on a device depends on the order
there alone, and is checked start by start; a block that waits for memory simply comes later in the
sequence. Micro-batches are alike, so the i-th start of a block belongs to micro-batch i. What
cannot beat the best is cut off: a device must still do its remaining work, and a block is followed
by its longest path. Exponential in blocks * micro-batches.

Without a number: the smallest period of a schedule that repeats. Block i starts at S_i = q_i P +
r_i with 0 <= r_i < P, and again every P. For P upward from the bound, in steps of the unit that
divides all spans and delays:

1. try all r: on a device no two blocks overlap modulo P; one block is anchored at r = 0;
2. given r, find q: q_b - q_a >= ceil((lag_ab + r_a - r_b) / P) for each dependency, and for memory,
   which sums to zero over a micro-batch, just after each start v on a device

       sum over blocks u of the device of memory_u * ([r_u <= r_v] - q_u) <= cap,

   which is one linear inequality in q per device. Intervals for q are narrowed until nothing
   changes, then one is split.

Blocks with large gaps between their q can be moved together, so q within a few times the number of
blocks suffices. K micro-batches per repetition are K copies of the blocks. The result is the
smallest period *with K per repetition that is a multiple of the unit*: more per repetition can be
faster, so it is called optimal only where it meets the lower bound. Exponential in the blocks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from partita.problems.schedule import (
    ScheduleProblem,
    ScheduleSolution,
    blocks_per_device,
    check,
    held_per_device,
    lags,
    lower_bound,
    memory_left_per_device,
    memory_per_microbatch,
    periodic,
    predecessors,
    solution_of,
    tails,
    work_per_device,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.schedule.lightest import lightest_order, why_infeasible

_ROUNDING = Fraction(1, 10**9)  # of a bound that is not a whole number


def search_period(
    problem: ScheduleProblem, copies: int, run: Run[ScheduleSolution]
) -> Result[ScheduleSolution]:
    """Try periods upward; the first that works is the smallest."""
    if run.done():
        return run.result()
    lightest = lightest_order(problem)
    why = why_infeasible(problem, lightest)
    if why is not None:
        return run.result(Status.INFEASIBLE, why)
    if lightest.excess:
        why = "one micro-batch alone does not fit, and periods are only tried where it does"
        return run.result(Status.STOPPED, why)
    grid = _on_grid(problem, copies)
    length = max(
        1, math.ceil(Fraction(lower_bound(problem)) * copies / grid.unit * (1 - _ROUNDING))
    )
    while not run.done():
        for starts in _solutions(grid, length, run):
            run.evaluations += 1
            table = [[_plain(start * grid.unit) for start in row] for row in starts]
            solution = periodic(problem, table, _plain(length * grid.unit))
            if not check(problem, solution):
                assert solution.period is not None
                run.offer(solution, solution.period)
                break
        if run.solution is not None:
            break
        length += 1
    if run.reason() is None and _is_usual(problem):
        several = f"{copies} micro-batches" if copies > 1 else "one micro-batch"
        return run.result(why=f"no shorter repetition of {several} works; more might be faster")
    return run.result()


def _is_usual(problem: ScheduleProblem) -> bool:
    """Is memory taken before it is given back, all of it? Then what was tried is a proof."""
    return problem.memory_capacity is None or None not in held_per_device(problem)


def _plain(value: Fraction) -> float:
    return int(value) if value.denominator == 1 else float(value)


@dataclass(frozen=True, slots=True)
class _TimeGrid:
    """The problem in whole units of time, with `copies` micro-batches as one."""

    unit: Fraction
    copies: int
    spans: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]  # of each block
    lags: tuple[tuple[int, int, int], ...]  # (first block, second block, units)
    memory: tuple[float, ...]
    room: tuple[tuple[float, tuple[int, ...]], ...]  # (room, blocks) of each device with a cap


def _on_grid(problem: ScheduleProblem, copies: int) -> _TimeGrid:
    amounts = [block.span for block in problem.blocks] + [
        delay for delay in problem.delays if delay
    ]
    exact = [Fraction(repr(amount)) for amount in amounts]
    scale = math.lcm(*(amount.denominator for amount in exact))
    unit = Fraction(math.gcd(*(int(amount * scale) for amount in exact)), scale)
    size = len(problem.blocks)
    kept = memory_per_microbatch(problem)
    room = zip(memory_left_per_device(problem), blocks_per_device(problem), kept, strict=True)
    # Memory that shrinks for ever limits only the beginning, which the final check looks at.
    limited = [(most, here) for most, here, left in room if most < math.inf and left == 0]
    return _TimeGrid(
        unit=unit,
        copies=copies,
        spans=tuple(_units(block.span, unit) for block in problem.blocks) * copies,
        devices=tuple(block.devices for block in problem.blocks) * copies,
        lags=tuple(
            (copy * size + first, copy * size + second, _units(lag, unit))
            for copy in range(copies)
            for (first, second), lag in zip(problem.deps, lags(problem), strict=True)
        ),
        memory=tuple(block.memory for block in problem.blocks) * copies,
        room=tuple(
            (most, tuple(copy * size + block for copy in range(copies) for block in here))
            for most, here in limited
        ),
    )


def _units(value: float, unit: Fraction) -> int:
    return round(Fraction(repr(value)) / unit)


def _solutions(
    grid: _TimeGrid, length: int, run: Run[ScheduleSolution]
) -> Iterator[list[list[int]]]:
    """Starts by micro-batch and block, for every choice of r that has a q."""
    size = len(grid.spans) // grid.copies
    for residues in _residues(grid, length, run):
        turns = _turns(grid, length, residues, run)
        if turns is not None:
            starts = [q * length + r for q, r in zip(turns, residues, strict=True)]
            first = min(starts)
            yield [
                [start - first for start in starts[copy * size : (copy + 1) * size]]
                for copy in range(grid.copies)
            ]


def _residues(
    grid: _TimeGrid, length: int, run: Run[ScheduleSolution]
) -> Iterator[tuple[int, ...]]:
    """All r without overlap on a device, the first block at 0."""
    chosen: list[int] = []
    choices = [iter((0,) if grid.spans[0] <= length else ())]
    while choices and not run.done():
        residue = next(choices[-1], None)
        if residue is None:
            choices.pop()
            if chosen:
                chosen.pop()
            continue
        if any(_overlap(grid, length, chosen, residue, other) for other in range(len(chosen))):
            continue
        chosen.append(residue)
        if len(chosen) == len(grid.spans):
            yield tuple(chosen)
            chosen.pop()
        else:
            fits = grid.spans[len(chosen)] <= length
            choices.append(iter(range(length) if fits else ()))


def _overlap(grid: _TimeGrid, length: int, chosen: list[int], residue: int, other: int) -> bool:
    """Would the next block, at `residue`, meet block `other` on a device?"""
    block = len(chosen)
    if not set(grid.devices[block]) & set(grid.devices[other]):
        return False
    ahead = (chosen[other] - residue) % length
    return ahead < grid.spans[block] or ahead + grid.spans[other] > length


def _turns(
    grid: _TimeGrid, length: int, residues: tuple[int, ...], run: Run[ScheduleSolution]
) -> list[int] | None:
    """The q of every block, or None if there are none within reach."""
    gaps = [
        (first, second, -((residues[second] - residues[first] - lag) // length))
        for first, second, lag in grid.lags
    ]
    needs = []
    for most, here in grid.room:
        after_start = [
            sum(grid.memory[u] for u in here if residues[u] <= residues[v]) for v in here
        ]
        if after_start:
            needs.append((max(after_start) - most, here))
    reach = len(residues) * (2 + max((gap for _, _, gap in gaps), default=0))
    low, high = [-reach] * len(residues), [reach] * len(residues)
    low[0] = high[0] = 0
    return _assign(grid, gaps, needs, low, high, run)


def _assign(
    grid: _TimeGrid,
    gaps: list[tuple[int, int, int]],
    needs: list[tuple[float, tuple[int, ...]]],
    low: list[int],
    high: list[int],
    run: Run[ScheduleSolution],
) -> list[int] | None:
    """Depth first: narrow, then try the first open interval's value next to 0, below, above."""
    to_try = [(low, high)]
    while to_try and not run.done():
        low, high = to_try.pop()
        if not _narrow(grid, gaps, needs, low, high):
            continue
        block = next((b for b in range(len(low)) if low[b] < high[b]), None)
        if block is None:
            return low
        value = min(max(0, low[block]), high[block])
        to_try.append((_with(low, block, value + 1), high))
        to_try.append((low, _with(high, block, value - 1)))
        to_try.append((_with(low, block, value), _with(high, block, value)))
    return None


def _with(values: list[int], index: int, value: int) -> list[int]:
    return [*values[:index], value, *values[index + 1 :]]


def _narrow(
    grid: _TimeGrid,
    gaps: list[tuple[int, int, int]],
    needs: list[tuple[float, tuple[int, ...]]],
    low: list[int],
    high: list[int],
) -> bool:
    """Shrink the intervals of q to what the constraints allow; False if one becomes empty."""
    if any(a > b for a, b in zip(low, high, strict=True)):
        return False
    before = None
    while before != (low, high):
        before = (list(low), list(high))
        for first, second, gap in gaps:
            low[second] = max(low[second], low[first] + gap)
            high[first] = min(high[first], high[second] - gap)
        for need, here in needs:
            if not _narrow_memory(grid.memory, need, here, low, high):
                return False
        if any(a > b for a, b in zip(low, high, strict=True)):
            return False
    return True


def _narrow_memory(
    memory: tuple[float, ...], need: float, here: tuple[int, ...], low: list[int], high: list[int]
) -> bool:
    """sum of memory_u q_u >= need: takes as late as can be, what is given back as early."""
    most = [memory[u] * (high[u] if memory[u] > 0 else low[u]) for u in here]
    spare = sum(most) - need
    if spare < -1e-9 * max(1.0, abs(need)):
        return False
    for block in here:
        if memory[block]:
            steps = math.floor(spare / abs(memory[block]) + 1e-9)
            if memory[block] > 0:
                low[block] = max(low[block], high[block] - steps)
            else:
                high[block] = min(high[block], low[block] + steps)
    return True


@dataclass(frozen=True, slots=True)
class BruteSchedule:
    """Tries every schedule; for a handful of blocks."""

    microbatches_per_repetition: int = 1  # where no number of micro-batches is given

    def __call__(
        self, problem: ScheduleProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[ScheduleSolution]:
        """Optimal for a number of micro-batches; nothing is random."""
        run: Run[ScheduleSolution] = Run(stop, "brute", seed)
        run.bound(lower_bound(problem))
        if problem.num_microbatches is None:
            return search_period(problem, self.microbatches_per_repetition, run)
        _StartWalk(problem, problem.num_microbatches).through_all(run)
        if run.reason() is not None:
            return run.result()
        if run.solution is None:
            why = why_infeasible(problem, lightest_order(problem))
            return run.result(Status.INFEASIBLE, why or "no order of the blocks fits the caps")
        return run.result(Status.OPTIMAL, "every schedule was tried")


class _Move(NamedTuple):
    """The next start in the sequence; moves are made in ascending order."""

    start: float
    rank: int  # of the block among those with the same start
    block: int


class _StartWalk:
    """The sequence of starts so far, and what follows from it."""

    def __init__(self, problem: ScheduleProblem, count: int) -> None:
        self.problem = problem
        self.count = count
        self.before = predecessors(problem)
        self.after = tails(problem)
        nearest_first = sorted(range(len(problem.blocks)), key=lambda b: (self.after[b], b))
        self.rank = {block: rank for rank, block in enumerate(nearest_first)}
        self.room = memory_left_per_device(problem)
        self.starts: list[list[float]] = [[] for _ in problem.blocks]  # by micro-batch
        self.free_at: list[list[float]] = [[0] for _ in range(problem.num_devices)]  # a stack each
        self.held: list[float] = [0] * problem.num_devices
        self.to_do = [count * work for work in work_per_device(problem)]

    def through_all(self, run: Run[ScheduleSolution]) -> None:
        """Walk through all sequences; offer and count each complete one."""
        made: list[_Move] = []
        choices = [iter(self.moves(_Move(0, -1, -1)))]
        while choices and not run.done():
            move = next(choices[-1], None)
            if move is None:
                choices.pop()
                if made:
                    self.undo(made.pop())
                continue
            self.do(move)
            made.append(move)
            if len(made) == self.count * len(self.starts):
                table = [list(row) for row in zip(*self.starts, strict=True)]
                solution = solution_of(self.problem, table)
                run.evaluations += 1
                run.offer(solution, solution.makespan)
            hopeless = run.objective is not None and self.least(move) >= run.objective
            choices.append(iter(() if hopeless else self.moves(move)))

    def moves(self, last: _Move) -> list[_Move]:
        """What can come next, in order: taking the first each time skips nothing."""
        moves = []
        for block, starts in enumerate(self.starts):
            if len(starts) < self.count and self.is_ready(block) and self.fits(block):
                move = _Move(self.earliest(block), self.rank[block], block)
                if move > last:
                    moves.append(move)
        return sorted(moves)

    def is_ready(self, block: int) -> bool:
        """Has everything started that the next micro-batch of the block waits for?"""
        microbatch = len(self.starts[block])
        return all(len(self.starts[first]) > microbatch for first, _ in self.before[block])

    def fits(self, block: int) -> bool:
        """Does each device still have room after its start?"""
        memory = self.problem.blocks[block].memory
        devices = self.problem.blocks[block].devices
        return all(self.held[device] + memory <= self.room[device] for device in devices)

    def earliest(self, block: int) -> float:
        microbatch = len(self.starts[block])
        return max(
            *(self.free_at[device][-1] for device in self.problem.blocks[block].devices),
            *(self.starts[first][microbatch] + lag for first, lag in self.before[block]),
            0,
        )

    def least(self, move: _Move) -> float:
        """No completion of the sequence ends before this."""
        working = (free[-1] + work for free, work in zip(self.free_at, self.to_do, strict=True))
        return max(*working, move.start + self.after[move.block])

    def do(self, move: _Move) -> None:
        block = self.problem.blocks[move.block]
        self.starts[move.block].append(move.start)
        for device in block.devices:
            self.free_at[device].append(move.start + block.span)
            self.held[device] += block.memory
            self.to_do[device] -= block.span

    def undo(self, move: _Move) -> None:
        block = self.problem.blocks[move.block]
        self.starts[move.block].pop()
        for device in block.devices:
            self.free_at[device].pop()
            self.held[device] -= block.memory
            self.to_do[device] += block.span
