"""A model that does not fit: by how many bytes on which ranks, and what would make it fit."""

from dataclasses import dataclass

from partita.forecast.compare import Ranked, ranked
from partita.forecast.neighbours import neighbours
from partita.forecast.predict import Forecast, forecast

MOST_WAYS = 6


@dataclass(frozen=True, slots=True)
class Shortage:
    """The ranks of one stage that need more memory than they have."""

    stage: int
    first_rank: int
    last_rank: int
    missing_bytes: float


@dataclass(frozen=True, slots=True)
class FittingChange:
    """A strategy that fits, and what it changes."""

    change: str
    ranked: Ranked


def shortages(of: Forecast) -> tuple[Shortage, ...]:
    """Stage by stage, what is missing; nothing where all ranks have enough.

    Ranks are counted as usual: neighbours in tensor parallelism first, stages last.
    """
    each = of.strategy.world // of.strategy.pp
    return tuple(
        Shortage(
            parts.stage, parts.stage * each, (parts.stage + 1) * each - 1,
            parts.total - of.capacity_bytes,
        )
        for parts in of.memory_of_stages
        if parts.total > of.capacity_bytes
    )  # fmt: skip


def ways_to_fit(of: Forecast, most: int = MOST_WAYS) -> tuple[FittingChange, ...]:
    """Strategies that fit, fastest first: one decision changed, or two where one is not enough."""
    near = _forecasts(of, [("", of)])
    fitting = {words: one for words, one in near if one.fits}
    if not fitting:
        smaller = [(words, one) for words, one in near if one.memory.total < of.memory.total]
        fitting = {words: one for words, one in _forecasts(of, smaller) if one.fits}
    words_of = {id(one): words for words, one in fitting.items()}
    return tuple(
        FittingChange(words_of[id(r.forecast)], r) for r in ranked(fitting.values())[:most]
    )


def _forecasts(of: Forecast, starts: list[tuple[str, Forecast]]) -> list[tuple[str, Forecast]]:
    """Forecasts of all neighbours, each strategy once."""
    known = {of.strategy}
    results = []
    for before, start in starts:
        for words, strategy in neighbours(of.model, start.strategy, of.machine.num_devices):
            if strategy not in known:
                known.add(strategy)
                text = f"{before}, {words}" if before else words
                results.append((text, forecast(of.model, of.machine, strategy)))
    return results
