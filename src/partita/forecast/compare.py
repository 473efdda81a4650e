"""Which of two forecasts is faster, as far as forecasts can tell.

Two forecasts are wrong together where they are made of the same work: a product that is slower than
thought is so in both, and so is a link. With `base` the spread of a forecast without communication,
`d` how differently two steps are composed (half of the sum of differences of shares: products,
attention, memory, host, each kind of exposed communication, bubble) and `c` the part of the spread
that communication makes, the logarithm of the true quotient over the predicted one has the standard
deviation

    hypot(base_a, base_b) min(1, 1/2 + 6 d)    and, added in squares,    1.4 |c_a - c_b|

Looked at in 6,000 pairs of published runs of one model, batch and machine: 80 % of the quotients
lie within 1.28 of it, alike for pairs that are composed alike and for others. Forecasts of other
models or machines are independent.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from partita.costs.physics import alike
from partita.forecast.predict import Forecast

OWN_LEAST = 0.5  # of independent errors, between steps that are composed alike
OWN_SLOPE = 6.0
COMMUNICATION = 1.4  # more than links alone: who communicates more is also otherwise unlike


@dataclass(frozen=True, slots=True)
class Ranked:
    """A forecast in a list, and whether it may be as fast as the first."""

    forecast: Forecast
    equal_to_first: bool


def equal(a: Forecast, b: Forecast) -> bool:
    """May both take the same time, with 80 %?"""
    return alike(a.step_s, b.step_s, difference_spread(a, b))


def difference_spread(a: Forecast, b: Forecast) -> float:
    """Standard deviation of the logarithm of the true quotient over the predicted one."""
    if a.strategy == b.strategy and a.model == b.model and a.machine == b.machine:
        return 0.0
    if a.model != b.model or a.machine != b.machine:
        return math.hypot(a.spread, b.spread)
    own = math.hypot(a.base_spread, b.base_spread)
    own *= min(1.0, OWN_LEAST + OWN_SLOPE * composition_difference(a, b))
    return math.hypot(own, COMMUNICATION * (a.communication_spread - b.communication_spread))


def composition_difference(a: Forecast, b: Forecast) -> float:
    """How differently two steps are composed: 0 alike, 1 of nothing in common."""
    first, second = _shares(a), _shares(b)
    return 0.5 * sum(abs(first[name] - second[name]) for name in first)


def _shares(forecast: Forecast) -> dict[str, float]:
    parts = {
        **dict(forecast.parts_s), **dict(forecast.exposed_s), "bubble": forecast.bubble_s,
    }  # fmt: skip
    total = sum(parts.values()) or 1.0
    return {name: seconds / total for name, seconds in parts.items()}


def ranked(forecasts: Iterable[Forecast]) -> tuple[Ranked, ...]:
    """Fastest first; those that cannot be told from the first are marked."""
    ordered = sorted(forecasts, key=lambda one: (one.step_s, str(one.strategy)))
    return tuple(Ranked(one, equal(one, ordered[0])) for one in ordered)
