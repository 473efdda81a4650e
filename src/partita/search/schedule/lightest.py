"""The order of the blocks of one micro-batch that needs the least memory.

Memory on a device depends only on the order of the blocks there, so one micro-batch fits if and
only if some order of all its blocks does. The sets of blocks done so far are the nodes of a graph;
a path from none to all with the smallest largest excess over the caps is found as Dijkstra finds a
shortest one. A block that takes no memory anywhere is done as soon as it may be: that never hurts.
Wide DAGs have exponentially many such sets; after `MAX_SETS` of them the answer is the best guess.
"""

import heapq
import math
from dataclasses import dataclass

from partita.problems.schedule import (
    ScheduleProblem,
    held_per_device,
    memory_left_per_device,
    memory_per_microbatch,
    predecessors,
    topological_order,
)

MAX_SETS = 8_000  # about a second


@dataclass(frozen=True, slots=True)
class Lightest:
    """An order of all blocks, what it needs on each device, and whether none needs less."""

    order: tuple[int, ...]
    peaks: tuple[float, ...]  # per device
    excess: float  # the most by which a peak exceeds its cap; 0 if none does
    proven: bool


def lightest_order(problem: ScheduleProblem) -> Lightest:
    """The order with the smallest excess over the caps; a topological order where all fit."""
    steps = _Steps(problem)
    if problem.memory_capacity is None:
        order = tuple(topological_order(problem))
        return Lightest(order, steps.peaks(order), 0, proven=True)
    start = steps.settle((), (0,) * problem.num_devices)
    heap: list[tuple[float, int, _Partial]] = [(0, -len(start[0]), start)]
    seen: set[frozenset[int]] = set()
    while heap:
        excess, _, (order, held) = heapq.heappop(heap)
        if len(order) == len(problem.blocks):
            return Lightest(order, steps.peaks(order), excess, proven=True)
        done = frozenset(order)
        if done in seen:
            continue
        seen.add(done)
        if len(seen) > MAX_SETS:
            order = steps.guess(order, held)
            return Lightest(order, steps.peaks(order), steps.excess_of(order), proven=False)
        for block in steps.ready(done):
            after = steps.settle((*order, block), steps.started(held, block))
            over = max(excess, steps.excess(held, block))
            heapq.heappush(heap, (over, -len(after[0]), after))
    raise AssertionError("a problem's dependencies have no cycle")


def why_infeasible(problem: ScheduleProblem, lightest: Lightest) -> str | None:
    """Why no schedule fits the caps, in words, where that can be proven quickly; else None."""
    if problem.memory_capacity is None:
        return None
    for device, kept in enumerate(memory_per_microbatch(problem)):
        count = math.inf if problem.num_microbatches is None else problem.num_microbatches
        if kept > 0 and kept * count > problem.memory_capacity[device]:
            return (
                f"device {device} keeps {kept} of every micro-batch, more than its cap of "
                f"{problem.memory_capacity[device]} holds in the end"
            )
    if not lightest.excess or not lightest.proven or None in held_per_device(problem):
        # Where memory is given back before it is taken, other micro-batches may make room.
        return None
    too_small: dict[tuple[float, float], list[str]] = {}
    for device, pair in enumerate(zip(lightest.peaks, problem.memory_capacity, strict=True)):
        if pair[0] > pair[1]:
            too_small.setdefault(pair, []).append(str(device))
    needs = ", ".join(
        f"{peak} on device{'s' * (len(devices) > 1)} {', '.join(devices)} (where the cap is {cap})"
        for (peak, cap), devices in too_small.items()
    )
    return f"one micro-batch by itself does not fit; the least that works is {needs}"


_Partial = tuple[tuple[int, ...], tuple[float, ...]]  # blocks done in order, memory held


class _Steps:
    """The moves between sets of blocks that are done."""

    def __init__(self, problem: ScheduleProblem) -> None:
        self.problem = problem
        self.before = [{first for first, _ in firsts} for firsts in predecessors(problem)]
        self.room = memory_left_per_device(problem)

    def ready(self, done: frozenset[int]) -> list[int]:
        """Blocks that may be next."""
        return [
            block
            for block, before in enumerate(self.before)
            if block not in done and before <= done
        ]

    def started(self, held: tuple[float, ...], block: int) -> tuple[float, ...]:
        """Memory after the block's start."""
        after = list(held)
        for device in self.problem.blocks[block].devices:
            after[device] += self.problem.blocks[block].memory
        return tuple(after)

    def excess(self, held: tuple[float, ...], block: int) -> float:
        """By how much the block's start exceeds a cap at most; 0 if it does not."""
        memory = self.problem.blocks[block].memory
        over = (held[d] + memory - self.room[d] for d in self.problem.blocks[block].devices)
        return max(0, *over)

    def settle(self, order: tuple[int, ...], held: tuple[float, ...]) -> _Partial:
        """Do all blocks that take no memory and may be next, and what they make ready."""
        while True:
            free = [b for b in self.ready(frozenset(order)) if self.problem.blocks[b].memory <= 0]
            if not free:
                return order, held
            for block in free:
                order, held = (*order, block), self.started(held, block)

    def guess(self, order: tuple[int, ...], held: tuple[float, ...]) -> tuple[int, ...]:
        """Complete the order with what exceeds a cap least at each step."""
        while len(order) < len(self.problem.blocks):
            ready = self.ready(frozenset(order))
            block = min(ready, key=lambda b: (self.excess(held, b), b))
            order, held = self.settle((*order, block), self.started(held, block))
        return order

    def peaks(self, order: tuple[int, ...]) -> tuple[float, ...]:
        """The most memory each device holds in this order."""
        held: tuple[float, ...] = (0,) * self.problem.num_devices
        peaks = held
        for block in order:
            held = self.started(held, block)
            peaks = tuple(map(max, peaks, held))
        return peaks

    def excess_of(self, order: tuple[int, ...]) -> float:
        """The most by which a peak of this order exceeds its cap; 0 if none does."""
        return max(0, *(p - room for p, room in zip(self.peaks(order), self.room, strict=True)))
