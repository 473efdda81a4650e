"""Forecasts held against each other: which is faster, what it hangs on, what would fit.

Which is faster (`ranked`). Two forecasts are wrong together where they are made of the same work: a
product that is slower than thought is so in both, and so is a link. With `base` the spread of a
forecast without communication, `d` how differently two steps are composed (half of the sum of
differences of shares: products, attention, memory, host, each kind of exposed communication,
bubble) and `c` the part of the spread that communication makes, the logarithm of the true quotient
over the predicted one has the standard deviation

    hypot(base_a, base_b) min(1, 1/2 + 6 d)    and, added in squares,    1.4 |c_a - c_b|

Looked at in 6,000 pairs of published runs of one model, batch and machine: 80 % of the quotients
lie within 1.28 of it, alike for pairs that are composed alike and for others. Forecasts of other
models or machines are independent.

Neighbours differ from a strategy in one decision. Each keeps the devices, the model, the global
batch and the precision: what changes is how the same step is spread and what is kept in memory. A
neighbour that `check_strategy` refuses is left out.

What it hangs on (`sensitivity`). Every parameter of a machine has a relative standard error (`sure`
in `costs/physics.toml`): times and multiples grow by it, shares of peaks shrink by it, interference
stops at 1 (side by side is no slower than one after the other). The same is done to strategies near
the one asked for, which says whether another would win then. "Latency" moves the fixed cost of
every collective and hop.

What would fit (`ways_to_fit`), where a model does not: by how many bytes, on which ranks.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from partita.costs.physics import alike
from partita.errors import PlanError
from partita.forecast.inputs import (
    RECOMPUTE,
    Machine,
    Strategy,
    Transformer,
    check_divisions,
    check_strategy,
)
from partita.forecast.predict import Forecast, forecast
from partita.showing import plot_of, repr_html, table_of

OWN_LEAST = 0.5  # of independent errors, between steps that are composed alike
OWN_SLOPE = 6.0
COMMUNICATION = 1.4  # more than links alone: who communicates more is also otherwise unlike
NEAR = 8  # strategies near the one asked for, the fastest that fit
UNSURE = 0.5  # of a parameter whose set says nothing about it
MOST_WAYS = 6


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


def neighbours(
    model: Transformer, strategy: Strategy, num_devices: int
) -> tuple[tuple[str, Strategy], ...]:
    """What changes in words (`tp=8 dp=4`), and the strategy with that change."""
    legal: list[tuple[str, Strategy]] = []
    known = {strategy}
    for words, changed in _changes(strategy):
        if changed in known:
            continue
        known.add(changed)
        try:
            check_strategy(model, changed, num_devices)
            check_divisions(model, changed)
        except PlanError:
            continue
        legal.append((words, changed))
    return tuple(legal)


def _changes(s: Strategy) -> Iterator[tuple[str, Strategy]]:
    for recompute in RECOMPUTE:
        if recompute != s.recompute:
            yield f"recompute={recompute}", replace(s, recompute=recompute)
    for zero in range(4):
        if zero != s.zero:
            yield f"zero={zero}", replace(s, zero=zero, hsdp=s.hsdp if zero else 0)
    if s.hsdp:
        yield "no hsdp", replace(s, hsdp=0)
    if s.tp > 1:
        yield ("no sp" if s.sp else "sp"), replace(s, sp=not s.sp)
    for micro_batch in (s.micro_batch * 2, s.micro_batch // 2):
        if micro_batch:
            yield f"micro-batch={micro_batch}", replace(s, micro_batch=micro_batch)
    for name in ("tp", "pp", "cp"):
        for other in ("dp", "tp", "pp"):
            if other == name:
                continue
            for more, less in ((name, other), (other, name)):
                if getattr(s, less) % 2 == 0:
                    yield from _moved(s, more, less)
    if s.pp > 1 and s.schedule in ("1f1b", "gpipe"):
        yield "schedule=interleaved vpp=2", replace(s, schedule="interleaved", vpp=2, layers=())
    if s.vpp > 1:
        yield "schedule=1f1b, no vpp", replace(s, schedule="1f1b", vpp=1, layers=())


def _moved(s: Strategy, more: str, less: str) -> Iterator[tuple[str, Strategy]]:
    """Half of one degree given to another; sequence parallelism and chunks stay where they can."""
    degrees = {more: getattr(s, more) * 2, less: getattr(s, less) // 2}
    changed = replace(s, layers=(), **degrees)
    if changed.tp == 1:
        changed = replace(changed, sp=False)
    if changed.pp == 1:
        changed = replace(changed, schedule="1f1b", vpp=1)
    if changed.hsdp > changed.dp:
        changed = replace(changed, hsdp=0)
    yield f"{more}={degrees[more]} {less}={degrees[less]}", changed


# What is moved together: a name, what gets worse in words, the parameters that grow and shrink.
SHIFTS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("interference", "communication slows computing beside it more", ("interference",), ()),
    ("latency", "every collective and hop costs more", ("inside_s", "across_s", "hop_s"), ()),
    ("links", "links give less of their bandwidth", (), ("inside", "across")),
    ("host", "the host launches more slowly", ("host_s", "host_compiled_s", "action_s"), ()),
    (
        "products",
        "matrix products reach less of the peak",
        (),
        ("products", "products_f8", "products_f4"),
    ),
    (
        "attention",
        "attention reaches less of the peak",
        (),
        ("attention_forward", "attention_backward"),
    ),
    ("memory", "elementwise work moves its bytes more slowly", ("eager_traffic",), ("memory",)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shift:
    """One group of parameters made worse, and what becomes of the step then."""

    name: str
    words: str
    factor: float  # the largest by which one of them is worse
    step_s: float
    winner: Strategy  # the fastest of those compared, then
    winner_s: float
    equal: bool  # may the strategy asked for be as fast as the winner?


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The forecast, the strategies it was compared with, and the shifts."""

    forecast: Forecast
    compared: tuple[Forecast, ...]  # fastest first, the forecast itself among them
    shifts: tuple[Shift, ...]

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def winner(self) -> Forecast:
        """The fastest with the parameters as they are."""
        return self.compared[0]


def sensitivity(of: Forecast, rivals: Sequence[Strategy] | None = None) -> Sensitivity:
    """Re-forecast with worse parameters; `rivals` are strategies near it unless given."""
    if rivals is None:
        near = neighbours(of.model, of.strategy, of.machine.num_devices)
        candidates = [forecast(of.model, of.machine, one) for _, one in near]
        candidates = sorted((one for one in candidates if one.fits), key=lambda one: one.step_s)
        rivals = [one.strategy for one in candidates[:NEAR]]
    strategies = [of.strategy, *(one for one in rivals if one != of.strategy)]
    compared = [forecast(of.model, of.machine, one) for one in strategies]
    shifts = []
    for name, words, growing, shrinking in SHIFTS:
        machine, factor = worse(of.machine, _used(growing, of), _used(shrinking, of))
        then = [forecast(of.model, machine, one) for one in strategies]
        best = min(then, key=lambda one: one.step_s)
        shifts.append(
            Shift(
                name, words, factor, then[0].step_s, best.strategy, best.step_s,
                equal(then[0], best),
            )
        )  # fmt: skip
    ordered = sorted(compared, key=lambda one: one.step_s)
    return Sensitivity(of, tuple(ordered), tuple(shifts))


def _used(names: Sequence[str], of: Forecast) -> tuple[str, ...]:
    """Without the parameters of other precisions and of other ways to execute."""
    s = of.strategy
    products = {"f8": "products_f8", "f4": "products_f4"}.get(s.product_dtype, "products")
    host = {"eager": "host_s", "compiled": "host_compiled_s"}.get(s.execution, "")
    others = {"products", "products_f8", "products_f4", "host_s", "host_compiled_s"}
    return tuple(name for name in names if name not in others - {products, host})


def worse(
    machine: Machine, growing: Sequence[str], shrinking: Sequence[str]
) -> tuple[Machine, float]:
    """The machine with parameters worse by their standard errors, and the largest factor."""
    given = dict(machine.physics_set.parameters)
    values: dict[str, float] = {}
    factors = [1.0]
    for name in (*growing, *shrinking):
        before = getattr(machine.physics, name)
        factor = 1.0 + (given[name].sure if name in given else UNSURE)
        after = before * factor if name in growing else before / factor
        if name == "interference":
            after = max(before, min(1.0, after))
        values[name] = after
        if before:
            factors.append(max(after / before, before / after))
    moved = replace(machine.physics_set, physics=replace(machine.physics, **values))
    return replace(machine, physics_set=moved), max(factors)


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
