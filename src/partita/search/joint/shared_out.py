"""How evenly the segments of a chain can be shared out among groups of devices.

A segment is on one group as a whole, so what a group has to do is a sum of some segments. Of a cap
on what each group may do, `Loads.under` is the largest such sum that keeps to it. Segments that
take equally long are told by their number; where there are many kinds, the shortest ones may be
divided, which is below what can be.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
ALIKE = 1e-9  # of all work: segments that differ by less are of one kind


@dataclass(frozen=True, eq=False)
class Loads:
    """Sums that groups may have."""

    sums: Floats  # of whole segments, ascending
    divided: float  # work that may be divided at will
    total: float  # all work, a little less by rounding

    def under(self, caps: Floats) -> Floats:
        """The most that groups may have to do under caps; negative where a cap is."""
        places = np.searchsorted(self.sums, caps, side="right") - 1
        most: Floats = np.minimum(caps, self.sums[np.maximum(places, 0)] + self.divided)
        return most


def loads_of(work: Floats, most: int = 40_000) -> Loads:
    """All sums of some of the segments, those that take longest whole; `most` bounds how many."""
    unit = float(work.sum()) * ALIKE
    if unit <= 0:
        return Loads(np.zeros(1), 0.0, 0.0)
    values, counts = np.unique(np.floor(work / unit), return_counts=True)
    sums, divided = np.zeros(1), 0.0
    for value, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        if len(sums) * (count + 1) > most:
            divided += value * count
        else:
            sums = (sums[:, None] + value * np.arange(count + 1)).ravel()
    return Loads(np.sort(sums) * unit, divided * unit, float(values @ counts) * unit)


def least_cap(loads: Loads, waits: Floats, start: float, rounds: "Rounds | None" = None) -> float:
    """A step below which the groups cannot do all work, from one that is known to be too short.

    Group r begins and ends with waits; `rounds` has what else must fit into a step.
    """

    def fits(step: float) -> bool:
        most = loads.under(step - waits)
        if (most < 0).any() or float(most.sum()) < loads.total * (1 - ALIKE):
            return False
        return rounds is None or rounds.least_s(loads.total, most) <= step

    if fits(start):
        return start
    low, high = start, start * (1 + 1 / 64)
    while not fits(high):
        low, high = high, high * 1.25
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


@dataclass(frozen=True, slots=True)
class Rounds:
    """Interleaved 1F1B with so many rounds: what its groups wait for on average (`virtual_bound`).

    With L_r the work of group r in a step, in which m micro-batches go through p v stages,

        step >= sum over r of L_r (1 / p + (p - 1 - r) / (m p v)) + sends
    """

    num_groups: int
    num_microbatches: int
    rounds: int
    sent_s: float

    def least_s(self, total: float, most: Floats) -> float:
        """The least with these most loads: the last groups have as much as they can."""
        p = self.num_groups
        each = p * self.num_microbatches * self.rounds
        left, waited = total, 0.0
        for r in reversed(range(p)):
            own = min(left, float(most[r]))
            waited, left = waited + own * (p - 1 - r) / each, left - own
        return total / p + waited + self.sent_s

    def even_s(self, total: float) -> float:
        """The least where work can be divided at will, and groups wait for nothing else."""
        part = (self.num_groups - 1) / (2 * self.num_microbatches * self.rounds)
        return (total / self.num_groups * (1 + 2 * part) + self.sent_s) / (1 + part)
