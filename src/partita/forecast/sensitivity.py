"""What a forecast hangs on: the step with each parameter worse by its standard error.

Every parameter of a machine has a relative standard error (`sure` in `costs/physics.toml`): times
and multiples grow by it, shares of peaks shrink by it, interference stops at 1 (side by side is no
slower than one after the other). The same is done to strategies near the one asked for, which says
whether another would win then. "Latency" moves the fixed cost of every collective and hop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partita.forecast.compare import equal
from partita.forecast.inputs import Machine, Strategy
from partita.forecast.neighbours import neighbours
from partita.forecast.predict import Forecast, forecast
from partita.showing import plot_of, repr_html, table_of

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
NEAR = 8  # strategies near the one asked for, the fastest that fit
UNSURE = 0.5  # of a parameter whose set says nothing about it


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
