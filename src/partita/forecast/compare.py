"""Which of two forecasts is faster, as far as forecasts can tell.

Two forecasts are wrong together where they are made of the same work: a product that is slower than
thought is so in both. How much of the error is shared was looked at in the published runs: pairs of
runs of one model, batch and machine, by how differently their steps are composed (half of the sum
of differences of shares: products, attention, memory, host, each kind of exposed communication,
bubble). The error of their quotient is, as a part of what independent errors would give,

    composed alike (under 1 %)     about a quarter
    4 to 10 %                      a half to nine tenths
    more than 12 %                 all of it: the errors are as good as independent

which is taken as min(1, 1/4 + 6 x difference). Other models or machines are independent.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from partita.forecast.predict import QUANTILE, Forecast

SHARED_LEAST = 0.25  # of independent errors, between steps that are composed alike
SHARED_SLOPE = 6.0


@dataclass(frozen=True, slots=True)
class Ranked:
    """A forecast in a list, and whether it may be as fast as the first."""

    forecast: Forecast
    equal_to_first: bool


def equal(a: Forecast, b: Forecast) -> bool:
    """May both take the same time, with 80 %?"""
    return abs(math.log(a.step_s / b.step_s)) <= QUANTILE * difference_spread(a, b)


def difference_spread(a: Forecast, b: Forecast) -> float:
    """Standard deviation of the logarithm of the true quotient over the predicted one."""
    if a.strategy == b.strategy and a.model == b.model and a.machine == b.machine:
        return 0.0
    independent = math.hypot(a.spread, b.spread)
    if a.model != b.model or a.machine != b.machine:
        return independent
    return independent * min(1.0, SHARED_LEAST + SHARED_SLOPE * composition_difference(a, b))


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
