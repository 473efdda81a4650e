"""How sure a prediction is: 80 % intervals by what the parameters of the devices are known from.

The spread of a kind is the standard deviation of log(measured / predicted) over the runs that its
parameters were fitted to (`costs/physics.py`). It is wider where exposed communication is a large
part of the step, on more devices than anyone compared, and for kinds that nobody measured.
"""

import math
from collections.abc import Iterable

from partita.costs.physics import PhysicsSet, physics_of

QUANTILE = 1.2816  # of the normal distribution: 80 % lie within it on both sides
EXPOSED = 0.45  # spread per share of exposed communication
BEYOND = 0.03  # spread per doubling of devices beyond those compared
MEMORY = 0.045  # of bytes: 4.1 % mean error over the 74 published peaks
UNMEASURED = 0.2  # of kinds without any parameter set, such as a user's own


def spread_of(sets: Iterable[PhysicsSet], num_devices: int, exposed: float) -> float:
    """The standard deviation of log(measured / predicted) for a step on devices of some kinds."""
    widest = 0.0
    for record in sets:
        beyond = max(0.0, math.log2(num_devices / max(1.0, record.physics.most_devices)))
        widest = max(widest, math.hypot(record.spread, EXPOSED * exposed, BEYOND * beyond))
    return widest or UNMEASURED


def sets_of(kinds: Iterable[str]) -> list[PhysicsSet]:
    """The parameter sets of kinds by their names, each once."""
    return [physics_of(kind) for kind in sorted(set(kinds))]


def around(value: float, spread: float) -> tuple[float, float]:
    """The 80 % interval around a predicted value."""
    wide = math.exp(QUANTILE * spread)
    return value / wide, value * wide


def alike(first: float, second: float, spread: float) -> bool:
    """Does each of two predictions lie in the other's interval?"""
    return abs(math.log(first / second)) <= QUANTILE * spread if first > 0 < second else False
