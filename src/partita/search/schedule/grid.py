"""Time and memory as whole numbers, for solvers that know no others.

Where all spans and delays are multiples of a common unit and not too many of it, times on the grid
are exact. Elsewhere spans and delays are rounded *down*: whatever is impossible on the grid is
impossible, so bounds hold, and an order of blocks found on the grid is then given its true times.

Memory is scaled per device. Where it is not whole, amounts are rounded to a unit of cap / 2**40 and
the cap is raised by what the rounding can add up to, which is less than the tolerance of the check.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from partita.problems.schedule import (
    ScheduleProblem,
    blocks_per_device,
    memory_left_per_device,
    memory_per_microbatch,
)

STEPS = 2**15  # of all spans together, where there is no common unit; solvers creep on finer ones
_MOST_STEPS = 2**18  # of the exact grid, for the sum of all spans and delays
_MOST_MEMORY = 2**40


@dataclass(frozen=True, slots=True)
class Grid:
    """Spans and lags in whole steps of `unit`; `exact` if nothing was rounded."""

    unit: Fraction
    exact: bool
    spans: tuple[int, ...]  # of each block
    lags: tuple[int, ...]  # of each dependency, from start to start

    def steps(self, time: float) -> Fraction:
        """A time in steps, exactly."""
        return as_fraction(time) / self.unit

    def whole_steps(self, time: float) -> int:
        """A time in whole steps: the nearest where they are exact, else rounded down."""
        steps = self.steps(time)
        return round(steps) if self.exact else math.floor(steps)

    def time(self, steps: int) -> float:
        """Steps as a time, whole where it is."""
        return plain(steps * self.unit)


@dataclass(frozen=True, slots=True)
class GridMemory:
    """What is limited on one device, in whole units: `amounts[block]` and the cap."""

    device: int
    amounts: dict[int, int]
    cap: int


def on_grid(problem: ScheduleProblem) -> Grid:
    """The problem's times in whole steps."""
    spans = [as_fraction(block.span) for block in problem.blocks]
    delays = [as_fraction(delay) for delay in problem.delays] or [Fraction(0)] * len(problem.deps)
    amounts = [amount for amount in (*spans, *delays) if amount]
    scale = math.lcm(*(amount.denominator for amount in amounts))
    unit = Fraction(math.gcd(*(int(amount * scale) for amount in amounts)), scale)
    exact = sum(amounts) / unit <= _MOST_STEPS
    if not exact:
        unit = sum(spans, start=Fraction(0)) / STEPS
    return Grid(
        unit=unit,
        exact=exact,
        spans=tuple(int(span / unit) for span in spans),
        lags=tuple(
            int((spans[first] + delay) / unit)
            for (first, _), delay in zip(problem.deps, delays, strict=True)
        ),
    )


def memory_on_grid(problem: ScheduleProblem) -> list[GridMemory]:
    """Devices whose cap can be exceeded, with blocks that change what they hold."""
    grid_memories: list[GridMemory] = []
    if problem.memory_capacity is None:
        return grid_memories
    room = memory_left_per_device(problem)
    for device, here in enumerate(blocks_per_device(problem)):
        amounts = {block: problem.blocks[block].memory for block in here}
        amounts = {block: amount for block, amount in amounts.items() if amount}
        if any(amount > 0 for amount in amounts.values()):
            grid_memories.append(
                _scaled(device, amounts, problem.memory_capacity[device], room[device])
            )
    return grid_memories


def balanced(problem: ScheduleProblem, memory: list[GridMemory]) -> list[GridMemory]:
    """Those that hold the same before and after a micro-batch."""
    kept = memory_per_microbatch(problem)
    return [limit for limit in memory if kept[limit.device] == 0]


def as_fraction(value: float) -> Fraction:
    """The number as it is written: 0.1 is a tenth."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def plain(value: Fraction) -> float:
    """As a whole number where it is one."""
    return int(value) if value.denominator == 1 else float(value)


def _scaled(device: int, amounts: dict[int, float], cap: float, room: float) -> GridMemory:
    exact = [as_fraction(amount) for amount in (*amounts.values(), cap)]
    scale = math.lcm(*(amount.denominator for amount in exact))
    common = math.gcd(*(int(amount * scale) for amount in exact[:-1]))
    unit = Fraction(common, scale)
    if max(map(abs, exact)) / unit <= _MOST_MEMORY:
        whole = {block: int(as_fraction(amount) / unit) for block, amount in amounts.items()}
        return GridMemory(device, whole, math.floor(exact[-1] / unit))
    unit = max(map(abs, exact)) / _MOST_MEMORY
    whole = {block: round(as_fraction(amount) / unit) for block, amount in amounts.items()}
    total = sum(whole.values())
    if abs(total) <= len(whole):  # balanced but for rounding
        last = max(whole, key=lambda block: (abs(whole[block]), block))
        whole[last] -= total
    return GridMemory(device, whole, math.floor(as_fraction(room) / unit) + len(whole))
