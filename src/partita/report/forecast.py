"""A forecast in words and for programs: step with its interval, what bounds it, memory by part."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from partita import units
from partita.costs.physics import MEMORY_SPREAD, around
from partita.degrees import TITLES
from partita.forecast import Forecast, equal
from partita.forecast.compare import (
    FittingChange,
    Sensitivity,
    Shift,
    Shortage,
    shortages,
    ways_to_fit,
)
from partita.forecast.inputs import Strategy
from partita.forecast.memory import MemoryParts, StageLayers, stage_layers
from partita.report.summary import MEMORY_ERROR

FORMAT = "partita/forecast@1"
CONFIDENCE = 0.8
WORDS = {
    "products": "matrix products", "gaps": "gaps between kernels", "memory": "memory traffic",
    "fixed": "fixed cost of a step",
}  # fmt: skip
COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "output", "workspace")
MEMORY_HEADER = (
    "stage", "ranks", "layers", "parameters", "gradients", "optimizer", "activations", "logits",
    "workspace", "total", "",
)  # fmt: skip
ENDS = {(True, True): " e o", (True, False): " e", (False, True): " o", (False, False): ""}
MOST_SHORT = 4
MOST_ROWS = 11  # stages whose memory is shown: the first ones, which hold most, and the last three


def forecast_text(forecast: Forecast, cluster: str, ways: Sequence[FittingChange] = ()) -> str:
    """What to know of a forecast, in a screenful."""
    return "\n".join(
        (
            *_headline(forecast, cluster),
            "",
            *_times(forecast),
            "",
            *_memory(forecast),
            *_fit(forecast, ways),
            "",
            *_basis(forecast),
        )
    )


def strategy_words(s: Strategy) -> str:
    """A strategy in the field's words, its schedule written as the field writes it."""
    return str(s).replace(f", {s.schedule},", f", {TITLES.get(s.schedule, s.schedule)},")


def _headline(forecast: Forecast, cluster: str) -> tuple[str, ...]:
    model, s = forecast.model, forecast.strategy
    dtype = s.dtype if s.product_dtype == s.dtype else f"{s.dtype}, products in {s.product_dtype}"
    return (
        f"{model.name}: {units.count(model.parameters)} parameters, {model.layers} layers, "
        f"sequence {model.seq}, training, global batch {s.batch}, {dtype}, {s.execution}",
        f"{cluster}: {forecast.machine.num_devices} devices as {strategy_words(s)}",
    )


def _times(forecast: Forecast) -> tuple[str, ...]:
    low, high = map(units.seconds, forecast.interval_s)
    exposed = [f"{name} {units.seconds(s)}" for name, s in forecast.exposed_s if s > 0]
    total = sum(s for _, s in forecast.exposed_s)
    bubble = forecast.bubble_s / forecast.step_s
    return (
        f"step       {units.seconds(forecast.step_s)}   predicted; "
        f"{low} to {high} with {CONFIDENCE:.0%}",
        f"           {forecast.tokens_per_s:,.0f} tokens/s, {forecast.tflops_per_device:,.0f} "
        f"TFLOP/s a device, MFU {_likely(forecast, forecast.mfu)}, "
        f"HFU {_likely(forecast, forecast.hfu)}",
        f"bound by   {_bounds(forecast)}",
        f"bubble     {units.seconds(forecast.bubble_s)} ({bubble:.1%})",
        f"exposed    {', '.join(exposed) or 'no'} communication"
        + (f" ({total / forecast.step_s:.1%})" if exposed else ""),
    )


def _likely(forecast: Forecast, share: float) -> str:
    """A part of the peak with its interval, which is that of the step."""
    low, high = (share * forecast.step_s / seconds for seconds in reversed(forecast.interval_s))
    return f"{share:.1%} ({low:.0%} to {min(high, 1.0):.0%})"


def _bounds(forecast: Forecast) -> str:
    """The largest parts of the step, largest first."""
    exposed = {f"exposed {name} communication": s for name, s in forecast.exposed_s}
    parts = {WORDS.get(name, name): s for name, s in forecast.parts_s}
    every = {**parts, **exposed, "bubble": forecast.bubble_s}
    largest = sorted(every.items(), key=lambda item: -item[1])
    told = [f"{name} {s / forecast.step_s:.0%}" for name, s in largest if s >= forecast.step_s / 50]
    return ", ".join(told)


def _memory(forecast: Forecast) -> tuple[str, ...]:
    """A row for each stage, stages that need the same in one row."""
    parts = forecast.memory_of_stages
    stages = stage_layers(forecast.model, forecast.strategy)
    each = forecast.strategy.world // forecast.strategy.pp
    groups: list[tuple[int, int]] = []
    for index in range(len(parts)):
        if groups and _alike(parts[index], parts[groups[-1][0]], stages, index, groups[-1][0]):
            groups[-1] = (groups[-1][0], index)
        else:
            groups.append((index, index))
    rows = [_memory_row(forecast, parts[a], stages[a], a, b, each) for a, b in groups]
    if len(rows) > MOST_ROWS:
        left = len(rows) - MOST_ROWS
        between = (f"{left} more",) + ("",) * (len(MEMORY_HEADER) - 1)
        rows = [*rows[: MOST_ROWS - 3], between, *rows[-3:]]
    table = units.table(MEMORY_HEADER, rows, numbers=range(2, 10))
    capacity = units.size(forecast.capacity_bytes)
    wide = around(1.0, MEMORY_SPREAD)[1] - 1
    return (
        f"memory of one rank, of {capacity} (e: with the embedding, o: with the output layer); "
        f"{CONFIDENCE:.0%} of peaks lie within {wide:.0%} of the total",
        *table.split("\n"),
    )


def _alike(a: MemoryParts, b: MemoryParts, stages: tuple[StageLayers, ...], i: int, j: int) -> bool:
    same = all(round(getattr(a, name)) == round(getattr(b, name)) for name in COMPONENTS)
    ends = [(s.layers, s.has_embedding, s.has_output) for s in (stages[i], stages[j])]
    return same and ends[0] == ends[1]


def _memory_row(
    forecast: Forecast, parts: MemoryParts, stage: StageLayers, first: int, last: int, each: int
) -> tuple[str, ...]:
    over = parts.total > forecast.capacity_bytes
    ranks = f"{first * each}-{(last + 1) * each - 1}" if each * (last - first + 1) > 1 else "0"
    if each == 1 and first == last:
        ranks = str(first)
    return (
        f"{first}-{last}" if last > first else str(first),
        ranks,
        f"{stage.layers}{ENDS[stage.has_embedding, stage.has_output]}",
        *(units.size(getattr(parts, name)) for name in COMPONENTS),
        units.size(parts.total),
        "DOES NOT FIT" if over else "",
    )


def _fit(forecast: Forecast, ways: Sequence[FittingChange]) -> tuple[str, ...]:
    """What is missing where, and what would help."""
    missing = shortages(forecast)
    if not missing:
        return ()
    lines = ["", *(_missing(one) for one in missing[:MOST_SHORT])]
    if len(missing) > MOST_SHORT:
        lines.append(f"and {len(missing) - MOST_SHORT} stages more")
    if not ways:
        return (
            *lines,
            "none of the strategies that differ in one or two decisions fits: use more devices",
        )
    rows = [
        (
            way.change,
            units.seconds(way.ranked.forecast.step_s),
            units.size(way.ranked.forecast.memory.total),
            "as fast as the first, within the error" if way.ranked.equal_to_first and i else "",
        )
        for i, way in enumerate(ways)
    ]
    header = ("would fit with", "step", f"memory {MEMORY_ERROR}", "")
    return (*lines, *units.table(header, rows, numbers=(1, 2)).split("\n"))


def _missing(one: Shortage) -> str:
    return (
        f"does not fit: stage {one.stage} (ranks {one.first_rank}-{one.last_rank}) lacks "
        f"{units.size(one.missing_bytes)} ({one.missing_bytes:,.0f} bytes) on each rank"
    )


def _basis(forecast: Forecast) -> tuple[str, ...]:
    """Where the parameters come from."""
    record = forecast.machine.physics_set
    kind = forecast.machine.kind.name
    fitted = sorted(
        n for n, p in record.parameters if "fitted" in p.source or "measured" in p.source
    )
    if not record.own:
        return (
            f"predictions: nobody compared {kind} with measurements; the parameters are borrowed "
            "and the interval is wider",
        )
    told = f"predictions: parameters of {kind}"
    if fitted:
        told += f", {len(fitted)} of {len(record.parameters)} fitted or measured"
    return (f"{told}; --json lists each with its source",)


def forecast_json(
    forecast: Forecast, cluster: str, ways: Sequence[FittingChange] = ()
) -> dict[str, Any]:
    """The same for programs."""
    low, high = forecast.interval_s
    return {
        "format": FORMAT,
        "predicted": True,
        "model": forecast.model.name,
        "parameters": forecast.model.parameters,
        "sequence": forecast.model.seq,
        "cluster": cluster,
        "num_devices": forecast.machine.num_devices,
        "strategy": _strategy_json(forecast.strategy),
        "step_s": forecast.step_s,
        "interval_s": {"confidence": CONFIDENCE, "low": low, "high": high},
        "tokens_per_s": forecast.tokens_per_s,
        "tflops_per_device": forecast.tflops_per_device,
        "mfu": forecast.mfu,
        "mfu_interval": [forecast.mfu * forecast.step_s / seconds for seconds in (high, low)],
        "hfu": forecast.hfu,
        "mfu_of_peak": forecast.peak_dtype,
        "bubble_s": forecast.bubble_s,
        "exposed_s": dict(forecast.exposed_s),
        "parts_s": dict(forecast.parts_s),
        "bound": forecast.bound,
        "fits": forecast.fits,
        "capacity_bytes": forecast.capacity_bytes,
        "memory_bytes": [_memory_json(parts) for parts in forecast.memory_of_stages],
        "memory_interval_bytes": list(
            around(forecast.memory.total, MEMORY_SPREAD)
        ),  # the fullest rank
        "shortages": [asdict(one) for one in shortages(forecast)],
        "would_fit": [
            {
                "change": way.change,
                "strategy": _strategy_json(way.ranked.forecast.strategy),
                "step_s": way.ranked.forecast.step_s,
                "memory_bytes": way.ranked.forecast.memory.total,
                "equal_to_first": way.ranked.equal_to_first,
            }
            for way in ways
        ],
        "physics": {
            "kind": forecast.machine.physics_set.kind,
            "own": forecast.machine.physics_set.own,
            "parameters": {
                name: asdict(parameter)
                for name, parameter in forecast.machine.physics_set.parameters
            },
        },
    }


def _strategy_json(s: Strategy) -> dict[str, Any]:
    given = asdict(s)
    return {**given, "layers": list(s.layers), "num_microbatches": s.num_microbatches}


def _memory_json(parts: MemoryParts) -> dict[str, float]:
    return {**asdict(parts), "total": parts.total}


def sensitivity_text(result: Sensitivity) -> str:
    """The step with each parameter worse, and who would win then."""
    rows = [_shift_row(result, shift) for shift in result.shifts]
    header = ("if worse", "by", "step", "", "fastest near it then")
    best = result.winner
    if best.strategy == result.forecast.strategy:
        now = "no strategy that differs in one decision and fits is predicted to be faster"
    else:
        told = " (equal within the error)" if equal(result.forecast, best) else ""
        now = f"fastest near it: {units.seconds(best.step_s)} {strategy_words(best.strategy)}{told}"
    return "\n".join((now, "", units.table(header, rows, numbers=(1, 2, 3))))


def _shift_row(result: Sensitivity, shift: Shift) -> tuple[str, ...]:
    ratio = shift.step_s / result.forecast.step_s - 1
    if shift.winner == result.forecast.strategy:
        told = "this one"
    else:
        known = shift.winner == result.winner.strategy
        words = "the same as now" if known else strategy_words(shift.winner)
        told = f"{units.seconds(shift.winner_s)} {words}"
        told += " (equal within the error)" if shift.equal else ""
    return (
        f"{shift.name}: {shift.words}", f"{shift.factor - 1:.0%}", units.seconds(shift.step_s),
        f"{ratio:+.1%}", told,
    )  # fmt: skip


def sensitivity_json(result: Sensitivity) -> dict[str, Any]:
    """The same for programs."""
    return {
        "compared": [
            {"strategy": _strategy_json(one.strategy), "step_s": one.step_s}
            for one in result.compared
        ],
        "shifts": [
            {
                "name": shift.name,
                "what": shift.words,
                "factor": shift.factor,
                "step_s": shift.step_s,
                "winner": _strategy_json(shift.winner),
                "winner_step_s": shift.winner_s,
                "wins": shift.winner == result.forecast.strategy,
                "equal": shift.equal,
            }
            for shift in result.shifts
        ],
    }


def fitting_ways(forecast: Forecast) -> tuple[FittingChange, ...]:
    """What would make it fit; nothing where it does."""
    return () if forecast.fits else ways_to_fit(forecast)
