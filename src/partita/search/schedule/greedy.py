"""List scheduling that never exceeds a cap.

With a number of micro-batches: of all blocks whose dependencies have started, the one that can
start first is next; among equals the one nearest to the end of its micro-batch. A block that would
exceed a cap waits until memory is given back. That can get stuck (each of two micro-batches holds
what the other waits for), so fewer and fewer micro-batches are let in, until they run in their
lightest order one after the other, which fits whenever one of them does. One pass costs
O(log blocks) per block and micro-batch.

Also, and where no number is given: periods are tried upward from the bound until a micro-batch that
repeats with this period keeps the rules.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from partita.problems.schedule import (
    ScheduleProblem,
    ScheduleSolution,
    check,
    heads,
    is_whole,
    memory_left_per_device,
    predecessors,
    solution_of,
    tails,
    topological_order,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.schedule.bounds import objective_bound, period_bound
from partita.search.schedule.grid import plain
from partita.search.schedule.lightest import lightest_order, why_infeasible
from partita.search.schedule.modulo import fit
from partita.search.schedule.pattern import Pattern

Table = list[list[float]]  # [microbatch][block] -> start


@dataclass(frozen=True, slots=True)
class GreedySchedule:
    """Starts what can start first and fits in memory; instant for any number of micro-batches."""

    periods: int = 200  # how many are tried at most

    def __call__(
        self, problem: ScheduleProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[ScheduleSolution]:
        """The best of a few passes; there is nothing random in it."""
        run: Run[ScheduleSolution] = Run(stop, "greedy", seed)
        run.bound(objective_bound(problem))
        if run.done():
            return run.result()
        lightest = lightest_order(problem)
        why = why_infeasible(problem, lightest)
        if why is not None:
            return run.result(Status.INFEASIBLE, why)
        if problem.num_microbatches is not None:
            list_schedules(problem, problem.num_microbatches, lightest.order, run)
        for pattern in repetitions(problem, lightest.order, self.periods, run):
            if offer(problem, pattern, run):
                break
        if run.solution is None and run.reason() is None:
            why = "no order that was tried fits the caps, which proves nothing; brute tries all"
            return run.result(Status.STOPPED, why)
        return run.result()


def offer(problem: ScheduleProblem, pattern: Pattern, run: Run[ScheduleSolution]) -> bool:
    """Offer a repetition, cut off where a number of micro-batches is given; False: it is none."""
    if problem.num_microbatches is None:
        solution = pattern.solution(problem)
        assert solution.period is not None
        objective = solution.period
    else:
        table = pattern.unrolled(problem.num_microbatches)
        solution = solution_of(problem, table, period=plain(pattern.period))
        objective = solution.makespan
    if check(problem, solution):  # it may end while memory that was to come back is missing
        return False
    run.offer(solution, objective)
    return True


def repetitions(
    problem: ScheduleProblem, lightest: Sequence[int], count: int, run: Run[ScheduleSolution]
) -> Iterator[Pattern]:
    """Repetitions that keep the rules, of at most `count` periods from the bound upward."""
    forever = replace(problem, num_microbatches=None)
    for table, length in _repetitions(forever, lightest, count):
        if run.done():
            return
        run.evaluations += 1
        if table is not None:
            pattern = Pattern(tuple(map(tuple, table)), length)
            if not check(forever, pattern.solution(forever)):
                yield pattern


def _repetitions(
    problem: ScheduleProblem, lightest: Sequence[int], count: int
) -> Iterator[tuple[Table | None, float]]:
    """What to try as a repetition, and its length; the last fits whenever one micro-batch does."""
    alone = one_by_one(problem, lightest, 1)
    if alone is None:
        return
    latency = max(start + block.span for start, block in zip(alone[0], problem.blocks, strict=True))
    orders = _orders(problem, lightest)
    for period in _periods(period_bound(problem), latency, count, is_whole(problem)):
        for order in orders:
            starts = fit(problem, order, period)
            yield None if starts is None else [starts], period
    yield alone, latency


def _periods(low: float, high: float, count: int, whole: bool) -> Iterator[float]:
    """At most `count` periods from `low` up to but not including `high`."""
    if whole:
        first, last = math.ceil(low), math.ceil(high)
        yield from range(first, last, max(1, math.ceil((last - first) / count)))
    else:
        yield from (low + (high - low) * step / count for step in range(count))


def _orders(problem: ScheduleProblem, lightest: Sequence[int]) -> list[tuple[int, ...]]:
    """Topological orders that are worth a try."""
    first, place = heads(problem), {b: i for i, b in enumerate(topological_order(problem))}
    by_time = tuple(sorted(place, key=lambda block: (first[block], place[block])))
    return list(dict.fromkeys((by_time, tuple(lightest))))


def list_schedules(
    problem: ScheduleProblem, count: int, lightest: Sequence[int], run: Run[ScheduleSolution]
) -> None:
    """Offer a pass for each priority, and what always works if all of them are stuck."""
    after = tails(problem)
    for priority in (after, [-tail for tail in after]):
        for window in _windows(count):
            if run.done():
                return
            listing = Listing(problem, count, window, priority)
            run.evaluations += 1
            if listing.finish(run):
                solution = solution_of(problem, listing.table())
                run.offer(solution, solution.makespan)
                break
    if run.solution is None and not run.done():
        table = one_by_one(problem, lightest, count)
        run.evaluations += 1
        if table is not None:
            solution = solution_of(problem, table)
            run.offer(solution, solution.makespan)


def _windows(count: int) -> Iterator[int]:
    """How many micro-batches may be under way: all, then fewer and fewer."""
    yield count
    window = min(count // 2, 64)
    while window:
        yield window
        window //= 2


class Listing:
    """One pass. The next micro-batch of a block is the number of times it has started."""

    def __init__(
        self, problem: ScheduleProblem, count: int, window: int, priority: Sequence[float]
    ) -> None:
        self.problem = problem
        self.count = count
        self.window = window
        self.priority = priority
        self.before = predecessors(problem)
        self.after: list[list[int]] = [[] for _ in problem.blocks]
        for first, second in sorted(set(problem.deps)):
            self.after[first].append(second)
        self.room = memory_left_per_device(problem)
        self.starts: Table = [[] for _ in problem.blocks]
        self.free_at: list[float] = [0] * problem.num_devices
        self.held: list[float] = [0] * problem.num_devices
        self.heap: list[tuple[float, float, int]] = []  # (start or earlier, priority, block)
        self.listed = [False] * len(problem.blocks)  # in the heap, or waiting for memory or entry
        self.short_of_memory: list[list[int]] = [[] for _ in range(problem.num_devices)]
        self.not_let_in: list[int] = []
        self.complete = 0  # micro-batches whose blocks have all started
        self.behind = len(problem.blocks)  # blocks that have not started more often than that

    def finish(self, run: Run[ScheduleSolution]) -> bool:
        """Start everything; False if nothing can start any more, or time is up."""
        for block in range(len(self.problem.blocks)):
            self.list_if_ready(block)
        steps = itertools.count(1)
        while self.heap:
            start, _, block = heapq.heappop(self.heap)
            if self.must_wait(block):
                continue
            now = self.earliest(block)
            if now > start:
                self.push(block, now)
                continue
            self.start(block, now)
            if next(steps) % 4096 == 0 and run.done():
                return False
        return all(len(starts) == self.count for starts in self.starts)

    def table(self) -> Table:
        """Starts by micro-batch and block."""
        return [list(row) for row in zip(*self.starts, strict=True)]

    def list_if_ready(self, block: int) -> None:
        """Put the block's next micro-batch on the list once all it waits for has started."""
        microbatch = len(self.starts[block])
        if self.listed[block] or microbatch == self.count:
            return
        if all(len(self.starts[first]) > microbatch for first, _ in self.before[block]):
            self.listed[block] = True
            self.push(block, self.earliest(block))

    def push(self, block: int, start: float) -> None:
        """List it for this moment or later."""
        heapq.heappush(self.heap, (start, self.priority[block], block))

    def earliest(self, block: int) -> float:
        """When the block's next micro-batch can start, memory aside."""
        microbatch = len(self.starts[block])
        start = max(self.free_at[device] for device in self.problem.blocks[block].devices)
        for first, lag in self.before[block]:
            start = max(start, self.starts[first][microbatch] + lag)
        return start

    def must_wait(self, block: int) -> bool:
        """If the block may not start yet, remember it with what it waits for."""
        if len(self.starts[block]) >= self.complete + self.window:
            self.not_let_in.append(block)
            return True
        memory = self.problem.blocks[block].memory
        for device in self.problem.blocks[block].devices:
            if memory > 0 and self.held[device] + memory > self.room[device]:
                self.short_of_memory[device].append(block)
                return True
        return False

    def start(self, block: int, now: float) -> None:
        """Start it, and list what can go on because of that."""
        record = self.problem.blocks[block]
        self.listed[block] = False
        self.starts[block].append(now)
        for device in record.devices:
            self.free_at[device] = now + record.span
            self.held[device] += record.memory
            if record.memory < 0:
                self.relist(self.short_of_memory[device])
        if len(self.starts[block]) == self.complete + 1:
            self.behind -= 1
            if not self.behind:
                self.complete += 1
                self.behind = sum(len(starts) == self.complete for starts in self.starts)
                self.relist(self.not_let_in)
        self.list_if_ready(block)
        for child in self.after[block]:
            self.list_if_ready(child)

    def relist(self, waiting: list[int]) -> None:
        """Look again at what was waiting."""
        for block in waiting:
            self.push(block, self.earliest(block))
        waiting.clear()


def one_by_one(problem: ScheduleProblem, order: Sequence[int], count: int) -> Table | None:
    """Every micro-batch in this order, on each device after the one before; None if too heavy."""
    before, room = predecessors(problem), memory_left_per_device(problem)
    free_at: list[float] = [0] * problem.num_devices
    held: list[float] = [0] * problem.num_devices
    table: Table = []
    for _ in range(count):
        starts: list[float] = [0] * len(problem.blocks)
        for index in order:
            block = problem.blocks[index]
            starts[index] = max(
                *(free_at[device] for device in block.devices),
                *(starts[first] + lag for first, lag in before[index]),
                0,
            )
            for device in block.devices:
                free_at[device] = starts[index] + block.span
                held[device] += block.memory
                if held[device] > room[device]:
                    return None
        table.append(starts)
    return table
