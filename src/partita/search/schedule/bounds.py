"""Lower bounds that need no search: work, critical paths and memory held over time.

Memory, per device with cap c. A pair (see `pairs`) is open from the start of its taker to the end
of its giver. Let X be blocks of the device that conflict with every block between the takers and
the givers, that is, share a device with each of them: while one of X runs, no block on a path from
a taker to its giver does. So each pair is open, outside of the runs of X, for at least the longest
such path, and no more than c is open at any time:

    period >= sum over pairs (amount * longest path outside X) / c + sum of the spans of X.

With X empty, delays count as well. The same holds for N micro-batches from the first start to the
last end on the device.

Blocks X that conflict with *all* others can be cut out of time altogether: what is left is a
schedule of the other blocks, without delays, so its bound and the time of X add up.

Makespan. Of blocks of the same kind the i-th start belongs to micro-batch i, which changes neither
dependencies nor memory. So a block of micro-batch m starts after the same block of m - 1, and the
m-th taker of a pair after the giver of m - floor(c / amount) has ended. That gives every block of
every micro-batch a head and a tail; a device that had to do nothing but its own blocks, and could
interrupt them, would still need (Jackson's preemptive rule, O(n log n))

    max over time of (when the largest tail first is worked off) + its tail.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from partita.problems.schedule import (
    ScheduleProblem,
    blocks_per_device,
    heads,
    is_whole,
    lags,
    lower_bound,
    predecessors,
    tails,
    topological_order,
)
from partita.search.schedule.pairs import Pair, distances, pairs_per_device

Table = list[list[float]]  # [microbatch][block]
_MAX_TASKS = 200_000  # blocks times micro-batches that get heads and tails of their own


def objective_bound(problem: ScheduleProblem) -> float:
    """The bound of what is asked for: the makespan with N given, the period without."""
    return period_bound(problem) if problem.num_microbatches is None else makespan_bound(problem)


def period_bound(problem: ScheduleProblem) -> float:
    """No schedule that repeats has a shorter period, however many micro-batches it repeats."""
    best = lower_bound(replace(problem, num_microbatches=None))
    for holding in _holdings(problem):
        best = max(best, _down(_divided(holding.held, holding.cap) + holding.alone))
    rest = without_lonely(problem)
    if rest is not None:
        best = max(best, _down(period_bound(rest[0]) + rest[1]))
    return best


def makespan_bound(problem: ScheduleProblem) -> float:
    """No schedule of the problem's micro-batches ends earlier."""
    count = problem.num_microbatches
    assert count is not None
    best = max(lower_bound(problem), _holding_makespan(problem, count))
    rest = without_lonely(problem)
    if rest is not None:
        best = max(best, _down(makespan_bound(rest[0]) + count * rest[1]))
    if count * len(problem.blocks) > _MAX_TASKS:
        return best
    first, after = heads_and_tails(problem, count)
    for here in blocks_per_device(problem):
        jobs = [
            (first[m][block], after[m][block], problem.blocks[block].span)
            for m in range(count)
            for block in here
        ]
        best = max(best, _down(preemptive(jobs)))
    return best


# --- blocks that run alone -----------------------------------------------------------------------


def without_lonely(problem: ScheduleProblem) -> tuple[ScheduleProblem, float] | None:
    """The problem without the blocks that conflict with all others, and their time; or None."""
    devices = [set(block.devices) for block in problem.blocks]
    lonely = [i for i, own in enumerate(devices) if all(own & other for other in devices)]
    if not lonely or len(lonely) == len(devices):
        return None
    stay = [i for i in range(len(devices)) if i not in set(lonely)]
    index = {block: place for place, block in enumerate(stay)}
    memory = _memory_without(problem, set(lonely))
    before = predecessors(problem)
    waits: list[set[int]] = [set() for _ in devices]  # for blocks that stay, directly or not
    for block in topological_order(problem):
        for first, _ in before[block]:
            waits[block] |= {first} if first in index else waits[first]
    rest = ScheduleProblem(
        num_devices=problem.num_devices,
        blocks=tuple(replace(problem.blocks[i], memory=memory[i]) for i in stay),
        deps=tuple((index[first], index[i]) for i in stay for first in sorted(waits[i])),
        memory_capacity=problem.memory_capacity,
        num_microbatches=problem.num_microbatches,
    )
    return rest, sum(problem.blocks[block].span for block in lonely)


def _memory_without(problem: ScheduleProblem, lonely: set[int]) -> list[float]:
    """What blocks still take and give back; nothing where pairs are broken up."""
    memory = [block.memory for block in problem.blocks]
    if problem.memory_capacity is None:
        return memory
    for pairs in pairs_per_device(problem):
        if pairs is None or any((p.taker in lonely) != (p.giver in lonely) for p in pairs):
            return [0] * len(memory)
    return memory


# --- heads and tails of every micro-batch --------------------------------------------------------


def heads_and_tails(problem: ScheduleProblem, count: int) -> tuple[Table, Table]:
    """Per micro-batch and block: earliest start, and least time from the start to the end of all.

    For schedules in which the i-th start of a block belongs to micro-batch i.
    """
    loops = memory_loops(problem)
    return _heads(problem, count, loops), _tails(problem, count, loops)


def memory_loops(problem: ScheduleProblem) -> list[list[tuple[int, int]]]:
    """For each block the (giver, n): it starts after the giver of n micro-batches before ended."""
    memory_loops: list[dict[int, int]] = [{} for _ in problem.blocks]
    if problem.memory_capacity is not None:
        caps = problem.memory_capacity
        for cap, pairs in zip(caps, pairs_per_device(problem), strict=True):
            for taker, giver, amount in pairs or ():
                rounds = math.floor(cap / amount * (1 + 1e-9))
                if rounds:
                    memory_loops[taker][giver] = min(memory_loops[taker].get(giver, rounds), rounds)
    return [sorted(givers.items()) for givers in memory_loops]


def _heads(problem: ScheduleProblem, count: int, loops: list[list[tuple[int, int]]]) -> Table:
    before, order = predecessors(problem), topological_order(problem)
    spans = [block.span for block in problem.blocks]
    first: Table = [[0] * len(spans) for _ in range(count)]
    for m, row in enumerate(first):
        for block in order:
            start = first[m - 1][block] + spans[block] if m else 0
            for other, lag in before[block]:
                start = max(start, row[other] + lag)
            for giver, rounds in loops[block]:
                if m >= rounds:
                    start = max(start, first[m - rounds][giver] + spans[giver])
            row[block] = start
    return first


def _tails(problem: ScheduleProblem, count: int, loops: list[list[tuple[int, int]]]) -> Table:
    order, spans = topological_order(problem), [block.span for block in problem.blocks]
    behind: list[list[tuple[int, float]]] = [[] for _ in spans]
    for (one, other), lag in zip(problem.deps, lags(problem), strict=True):
        behind[one].append((other, lag))
    takers: list[list[tuple[int, int]]] = [[] for _ in spans]
    for taker, givers in enumerate(loops):
        for giver, rounds in givers:
            takers[giver].append((taker, rounds))
    after: Table = [list(spans) for _ in range(count)]
    for m in reversed(range(count)):
        row = after[m]
        for block in reversed(order):
            tail = spans[block] + (after[m + 1][block] if m + 1 < count else 0)
            for other, lag in behind[block]:
                tail = max(tail, lag + row[other])
            for taker, rounds in takers[block]:
                if m + rounds < count:
                    tail = max(tail, spans[block] + after[m + rounds][taker])
            row[block] = tail
    return after


def preemptive(jobs: Sequence[tuple[float, float, float]]) -> float:
    """The least makespan of (head, tail, span) on one device, the tail counted from the start."""
    coming = sorted(jobs)
    waiting: list[tuple[float, float]] = []  # (-tail after the end, span left)
    now: float = 0
    best: float = 0
    index = 0
    while index < len(coming) or waiting:
        if not waiting:
            now = max(now, coming[index][0])
        while index < len(coming) and coming[index][0] <= now:
            _, tail, span = coming[index]
            heapq.heappush(waiting, (span - tail, span))
            index += 1
        after, left = heapq.heappop(waiting)
        until = coming[index][0] if index < len(coming) else math.inf
        if now + left <= until:
            now += left
            best = max(best, now - after)
        else:
            heapq.heappush(waiting, (after, left - (until - now)))
            now = until
    return best


# --- memory over time ----------------------------------------------------------------------------


class _Holding(NamedTuple):
    """A device holds `held` of memory times time per micro-batch outside of `alone`."""

    device: int
    held: float
    alone: float
    cap: float


def _holdings(problem: ScheduleProblem) -> Iterator[_Holding]:
    if problem.memory_capacity is None:
        return
    for device, pairs in enumerate(pairs_per_device(problem)):
        cap = problem.memory_capacity[device]
        if not pairs or not cap:
            continue
        yield _Holding(device, _held(problem, pairs, frozenset()), 0, cap)
        alone = _alone(problem, device, pairs)
        if alone:
            time = sum(problem.blocks[block].span for block in sorted(alone))
            yield _Holding(device, _held(problem, pairs, alone), time, cap)


def _alone(problem: ScheduleProblem, device: int, pairs: Sequence[Pair]) -> frozenset[int]:
    """Blocks of the device that conflict with all blocks between the takers and the givers."""
    order, before = topological_order(problem), predecessors(problem)
    between: set[int] = set()
    for taker in sorted({pair.taker for pair in pairs}):
        below = distances(order, before, taker)
        givers = {pair.giver for pair in pairs if pair.taker == taker}
        wanted = set(givers)
        for block in reversed(order):  # everything above a giver and below the taker
            if block in wanted and below[block] >= 0:
                between.add(block)
                wanted.update(first for first, _ in before[block])
    devices = [set(block.devices) for block in problem.blocks]
    return frozenset(
        block
        for block in range(len(devices))
        if device in devices[block]
        and all(other == block or devices[other] & devices[block] for other in between)
    )


def _held(problem: ScheduleProblem, pairs: Sequence[Pair], alone: frozenset[int]) -> float:
    """Sum over the pairs of amount times the longest path from taker to giver outside `alone`."""
    order = topological_order(problem)
    spans = [0 if i in alone else block.span for i, block in enumerate(problem.blocks)]
    before = predecessors(problem)
    if alone:  # delays may pass while one of them runs
        before = [[(first, spans[first]) for first, _ in firsts] for firsts in before]
    held: float = 0
    for taker in sorted({pair.taker for pair in pairs}):
        longest = distances(order, before, taker)
        for _, giver, amount in (pair for pair in pairs if pair.taker == taker):
            held += amount * (longest[giver] + spans[giver])
    return held


def _holding_makespan(problem: ScheduleProblem, count: int) -> float:
    first, after, whole = heads(problem), tails(problem), is_whole(problem)
    here = blocks_per_device(problem)
    best: float = 0
    for device, held, alone, cap in _holdings(problem):
        head = min(first[block] for block in here[device])
        tail = min(after[block] - problem.blocks[block].span for block in here[device])
        window = _divided(count * held, cap, round_up=whole) + count * alone
        best = max(best, _down(head + window + tail))
    return best


def _divided(held: float, cap: float, *, round_up: bool = False) -> float:
    """held / cap: exact where it is a whole number, rounded up if asked to."""
    if isinstance(held, int) and isinstance(cap, int):
        if round_up:
            return -(-held // cap)
        return held // cap if held % cap == 0 else held / cap
    return held / cap


def _down(value: float) -> float:
    """A bound from sums that are not whole numbers, less their rounding."""
    return value if isinstance(value, int) else value * (1 - 1e-12)
