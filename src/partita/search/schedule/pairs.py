"""Which start gives back the memory that another one took, device by device.

Each unit given back is paired with a unit taken by a block that it waits for, however indirectly.
Where all memory of a device pairs up, "the sum over all starts so far is <= cap" says the same as
"the pairs that are open are <= cap", and every schedule of some of the micro-batches holds no more
than the schedule of all of them. Any pairing will do; the nearest come first.

A pair is open from the start of its taker to the *end* of its giver: while the giver runs nothing
else starts on the device, and just before its start the device held no more than the cap.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from partita.problems.schedule import (
    TOLERANCE,
    ScheduleProblem,
    blocks_per_device,
    predecessors,
    topological_order,
)


class Pair(NamedTuple):
    """`amount` of memory that `taker` takes and `giver` gives back, by block index."""

    taker: int
    giver: int
    amount: float


def pairs_per_device(problem: ScheduleProblem) -> list[tuple[Pair, ...] | None]:
    """The pairs of each device; None where some of its memory finds no partner."""
    pairing = Pairing(problem)
    return [
        pairing.pairs({block: problem.blocks[block].memory for block in here})
        for here in blocks_per_device(problem)
    ]


def is_usual(problem: ScheduleProblem) -> bool:
    """Is memory taken before it is given back, all of it, wherever there is a cap?"""
    return problem.memory_capacity is None or None not in pairs_per_device(problem)


def distances(order: list[int], before: list[list[tuple[int, float]]], source: int) -> list[float]:
    """Longest path from the start of `source` to the start of each block; -inf: there is none."""
    distances = [-math.inf] * len(order)
    distances[source] = 0
    for block in order:
        for first, lag in before[block]:
            distances[block] = max(distances[block], distances[first] + lag)
    return distances


class Pairing:
    """Pairs up amounts of memory, however they are counted."""

    def __init__(self, problem: ScheduleProblem) -> None:
        order, before = topological_order(problem), predecessors(problem)
        self.place = {block: index for index, block in enumerate(order)}
        self.from_taker = {
            index: distances(order, before, index)
            for index, block in enumerate(problem.blocks)
            if block.memory > 0
        }

    def pairs(self, amounts: Mapping[int, float]) -> tuple[Pair, ...] | None:
        """The pairs of one device, given what each of its blocks changes; None if some is left."""
        left: dict[int, float] = {}  # taker -> memory that is not given back yet
        pairs: list[Pair] = []
        for block in sorted(amounts, key=self.place.__getitem__):
            if amounts[block] > 0:
                left[block] = amounts[block]
            wanted = -amounts[block]
            for taker in sorted(left, key=lambda other: (self.from_taker[other][block], other)):
                amount = min(left[taker], wanted)
                if amount > 0 and self.from_taker[taker][block] >= 0:
                    pairs.append(Pair(taker, block, amount))
                    left[taker] -= amount
                    wanted -= amount
            if wanted > TOLERANCE * abs(amounts[block]):
                return None
        rest = TOLERANCE * max(map(abs, amounts.values()), default=0)
        return tuple(pairs) if all(amount <= rest for amount in left.values()) else None
