"""What stands on an axis: round ticks, and times and amounts in the units of a program.

Where a program counts in seconds its memory is bytes; where it counts in steps both are plain
numbers.
"""

import math

from partita import units
from partita.program import Program

_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def time_scale(program: Program, longest: float) -> tuple[float, str]:
    """(how much one unit is, its name) to write times up to `longest` with."""
    if program.time_unit != "s":
        return 1.0, "steps"
    fitting = [(size, name) for size, name in _TIME if longest >= size]
    return fitting[0] if fitting else _TIME[-1] if longest > 0 else _TIME[0]


def time_text(program: Program, moment: float) -> str:
    """A moment or a duration: `12.3 ms`, `33 steps`."""
    if program.time_unit == "s":
        return units.seconds(moment)
    return "1 step" if moment == 1 else f"{_plain(moment)} steps"


def memory_text(program: Program, amount: float) -> str:
    """An amount of memory: `1.50 GiB`, or a plain number."""
    return units.size(amount) if program.time_unit == "s" else _plain(amount)


def ticks(longest: float, most: int) -> list[float]:
    """At most `most` round moments from 0 to `longest`: 1, 2 or 5 times a power of ten apart."""
    if not longest > 0 or most < 2:
        return [0.0]
    rough = longest / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [k * step for k in range(int(longest / step * (1 + 1e-9)) + 1)]


def tick_text(value: float) -> str:
    """The label of a tick, without the noise of rounding."""
    return f"{value:.6g}"


def _plain(value: float) -> str:
    """Whole numbers whole, others with three digits that matter."""
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"
