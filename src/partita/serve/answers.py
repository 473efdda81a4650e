"""What is answered: figures, words, what memory holds, and a view of the timeline.

`ANSWERS` gives for each kind of question a function `(ask, stop) -> answer`. An answer is plain
values: `cards` (name, value, note), `text` as the command prints it, `numbers` as under its
`--json`, `memory` (bars of named parts), `view` (a page of its own) and `files` to keep.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from partita import units
from partita.cluster import resolve
from partita.costs.physics import MEMORY_SPREAD, around
from partita.errors import InputError
from partita.forecast import Forecast
from partita.jobs.baselines import order_result
from partita.jobs.forecast import forecast_model
from partita.jobs.forecast_timeline import forecast_timeline
from partita.jobs.memory_parts import PARTS, MemoryCurves, memory_parts
from partita.jobs.plan import plan
from partita.jobs.plan_simulator import Planned
from partita.jobs.schedule import ScheduleResult, schedule
from partita.jobs.simulate import Simulation, data_parallel, simulate_stage
from partita.jobs.workload import Workload, load
from partita.report.forecast import COMPONENTS, fitting_ways, forecast_json, forecast_text
from partita.report.page import plan_page
from partita.report.planned import planned_json, planned_text
from partita.report.summary import simulation_json, simulation_text, throughput
from partita.schedules.named import NAMED
from partita.schedules.order_problem import placement_of_order
from partita.schedules.placement import asked
from partita.schedules.shapes import ShapeOptions, shape
from partita.search.base import Stop
from partita.serve.asks import Ask, PlanAsk, ScheduleAsk, SimulateAsk, StrategyAsk
from partita.serve.view import timeline_view

Answer = dict[str, Any]
Card = tuple[str, str, str]

KEPT_WORKLOADS = 8
MOST_BARS = 64  # of memory
USUAL_CHUNKS = 2  # stages on a device, where there are several
GAP = 0.01  # as `partita plan` has it
WORDS = {"optimizer": "optimizer states", "states": "optimizer states", "output": "logits"}


def answer(ask: Ask, stop: Stop) -> Answer:
    """The answer to any question."""
    return ANSWERS[type(ask)](ask, stop)


def warm_up() -> None:
    """Load all that an answer needs, so that the first one is as quick as the others."""
    answer(SimulateAsk("alexnet", "2xA100", 8), Stop())


@functools.lru_cache(KEPT_WORKLOADS)
def _workload(model: str, batch: int, dtype: str | None, training: bool) -> Workload:
    """Moving one slider builds no model twice."""
    return load(model, batch=batch, dtype=dtype, training=training)


def _simulate(ask: Ask, stop: Stop) -> Answer:
    ask = cast(SimulateAsk, ask)
    machine = resolve(ask.machine)
    workload = _workload(ask.model, ask.batch, ask.dtype, ask.training)
    simulation = simulate_stage(workload, machine, data_parallel(workload.graph, machine))
    title = f"{ask.model} on {ask.machine}, data parallel"
    parts = memory_parts(simulation)
    return {
        "fits": simulation.fits,
        "cards": _step_cards(simulation),
        "text": simulation_text(simulation),
        "numbers": _numbers(simulation_json(simulation)),
        "memory": _peak_memory(parts),
        "view": timeline_view(title, simulation.timeline, parts=parts),
    }


def _step_cards(simulation: Simulation) -> list[Card]:
    peak, capacity = simulation.fullest
    likely = " to ".join(map(units.seconds, simulation.likely_step_s))
    waits = "bubble" if simulation.num_stages > 1 else "exposed communication"
    share = simulation.bubble
    if simulation.num_stages < 2 and simulation.step_s:
        share = max(0.0, simulation.exposed_s) / simulation.step_s
    return [
        ("step", units.seconds(simulation.step_s), f"80 % interval {likely}"),
        _rate_card(simulation),
        ("MFU", f"{simulation.mfu:.0%}", f"{_mfu_range(simulation)} of the peak of all devices"),
        _memory_card(peak, capacity, simulation.fits),
        (waits, f"{share:.0%}", "of the step"),
    ]


def _rate_card(simulation: Simulation) -> Card:
    """Tokens a second, or samples where there are none; the rest as a note."""
    told = throughput(simulation, simulation.step_s).split(", ")
    first = min(len(told) - 1, 1)
    return "throughput", told[first], ", ".join(told[:first] + told[first + 1 :])


def _mfu_range(told: Simulation | Forecast) -> str:
    """The interval of an MFU, which is that of the step."""
    ends = told.interval_s if isinstance(told, Forecast) else told.likely_step_s
    low, high = (told.mfu * told.step_s / seconds for seconds in reversed(ends))
    return f"{low:.0%} to {min(high, 1.0):.0%}"


def _memory_card(peak: float, capacity: float, fits: bool) -> Card:
    verdict = "" if fits else "; DOES NOT FIT"
    low, high = map(units.size, around(peak, MEMORY_SPREAD))
    told = f"{low} to {high} of {units.size(capacity)} per device{verdict}"
    return "memory", units.size(peak), told


def _peak_memory(memories: tuple[MemoryCurves, ...]) -> dict[str, Any]:
    """What every device holds when it is fullest, by part, and what it has."""
    bars = [
        {"name": one.name, "parts": _named(one.at_peak()), "capacity": one.capacity_bytes}
        for one in memories[:MOST_BARS]
    ]
    return {"parts": [WORDS.get(part, part) for part in PARTS], "bars": bars}


def _named(parts: dict[str, float]) -> dict[str, float]:
    return {WORDS.get(part, part): held for part, held in parts.items()}


def _strategy(ask: Ask, stop: Stop) -> Answer:
    ask = cast(StrategyAsk, ask)
    forecast = forecast_model(ask.model, ask.machine, **ask.keys())
    ways = fitting_ways(forecast)
    timeline = forecast_timeline(forecast)
    title = f"{ask.model} on {ask.machine}"
    view = None
    if timeline is not None:
        view = timeline_view(title, timeline, "One rank of each stage, block by block.")
    return {
        "fits": forecast.fits,
        "cards": _forecast_cards(forecast),
        "text": forecast_text(forecast, ask.machine, ways),
        "numbers": _numbers(forecast_json(forecast, ask.machine, ways)),
        "memory": _stage_memory(forecast),
        "view": view,
    }


def _forecast_cards(forecast: Forecast) -> list[Card]:
    low, high = map(units.seconds, forecast.interval_s)
    exposed = sum(seconds for _, seconds in forecast.exposed_s) / forecast.step_s
    count, size = forecast.strategy.num_microbatches, forecast.strategy.micro_batch
    rate = f"{forecast.tokens_per_s:,.0f} tokens/s"
    each = f"{forecast.tokens_per_s / forecast.machine.num_devices:,.0f} a device"
    return [
        ("step", units.seconds(forecast.step_s), f"80 % interval {low} to {high}"),
        ("throughput", rate, each),
        ("MFU", f"{forecast.mfu:.0%}", f"{_mfu_range(forecast)}; HFU {forecast.hfu:.0%}"),
        _memory_card(forecast.memory.total, forecast.capacity_bytes, forecast.fits),
        ("bubble", f"{forecast.bubble_s / forecast.step_s:.0%}", "of the step"),
        ("exposed communication", f"{exposed:.0%}", "of the step"),
        (
            "micro-batches",
            f"{count:,}",
            f"of {size:,} on {units.counted(forecast.strategy.dp, 'replica')}",
        ),
    ]


def _stage_memory(forecast: Forecast) -> dict[str, Any]:
    """One rank of each stage by part."""
    bars = [
        {
            "name": f"stage {index}",
            "parts": {WORDS.get(name, name): getattr(parts, name) for name in COMPONENTS},
            "capacity": forecast.capacity_bytes,
        }
        for index, parts in enumerate(forecast.memory_of_stages[:MOST_BARS])
    ]
    return {"parts": [WORDS.get(name, name) for name in COMPONENTS], "bars": bars}


def _plan(ask: Ask, stop: Stop) -> Answer:
    ask = cast(PlanAsk, ask)
    workload_keys = {"batch": ask.batch, "dtype": ask.dtype, "training": ask.training}
    limits = replace(stop, time_s=ask.time_limit, gap=GAP)
    planned = plan(ask.model, ask.machine, pin=ask.pins(), stop=limits, **workload_keys)  # type: ignore[arg-type]
    best = None if planned.best is None else planned.best.simulation
    made: Answer = {
        "fits": best is not None,
        "cards": [] if best is None else [*_step_cards(best), _gap_card(planned)],
        "text": planned_text(planned),
        "numbers": _numbers(planned_json(planned, ask.model, ask.machine, None)),
        "memory": None if best is None else _peak_memory(memory_parts(best)),
        "view": None,
        "files": {},
    }
    if planned.plan is not None and best is not None:
        made["view"] = plan_page(planned.plan, best)
        made["files"] = {"plan.json": planned.plan.to_json().decode()}
    return made


def _gap_card(planned: Planned) -> Card:
    bound = f"no plan of its space below {units.seconds(planned.lower_bound_s)}"
    return "from optimal", "–" if planned.gap is None else f"≤ {planned.gap:.1%}", bound


def _schedule(ask: Ask, stop: Stop) -> Answer:
    ask = cast(ScheduleAsk, ask)
    result = _published(ask) if ask.placement in NAMED else _searched(ask, stop)
    made: Answer = {
        "fits": result.outcome.solution is not None,
        "cards": [], "text": str(result), "numbers": _numbers(result.to_json()),
        "memory": None, "view": None,
    }  # fmt: skip
    if result.outcome.solution is None:
        return made
    title = f"{ask.placement} on {ask.devices} devices, {result.num_microbatches} micro-batches"
    made["cards"] = _schedule_cards(result)
    made["view"] = timeline_view(title, result.timeline())
    caps = result.problem.memory_capacity or [None] * result.problem.num_devices
    made["memory"] = {
        "parts": ["peak"],
        "unit": "",
        "bars": [
            {"name": f"device {device}", "parts": {"peak": peak}, "capacity": cap}
            for device, (peak, cap) in enumerate(zip(result.peak_memory, caps, strict=True))
        ][:MOST_BARS],
    }
    return made


def _schedule_cards(result: ScheduleResult) -> list[Card]:
    gap = result.gap
    assert result.makespan is not None
    cards = [
        ("makespan", units.number(result.makespan), f"{result.num_microbatches} micro-batches"),
        ("bubble", f"{result.bubble_rate:.1%}", "of all devices' time"),
        ("memory", units.number(max(result.peak_memory)), "of the fullest device"),
        ("from optimal", "–" if gap is None else f"≤ {gap:.1%}", str(result.status)),
    ]
    if result.period is not None:
        cards.insert(1, ("period", units.number(result.period), "per micro-batch, for ever"))
    return cards


def _options(ask: ScheduleAsk) -> ShapeOptions:
    return ShapeOptions(
        forward_span=_whole(ask.forward_span),
        backward_span=None if ask.backward_span is None else _whole(ask.backward_span),
        weight_span=None if ask.weight_span is None else _whole(ask.weight_span),
        delay=_whole(ask.delay),
        chunks=USUAL_CHUNKS if ask.chunks is None else ask.chunks,
    )


def _whole(value: float) -> float:
    """A whole number where it is one, as the command line reads it."""
    return int(value) if float(value).is_integer() else value


def _searched(ask: ScheduleAsk, stop: Stop) -> ScheduleResult:
    problem = shape(ask.placement, ask.devices, _options(ask)).problem()
    memory = None if ask.memory is None else _whole(ask.memory)
    problem = asked(problem, memory, ask.microbatches)
    return schedule(problem, stop=replace(stop, time_s=ask.time_limit))


def _published(ask: ScheduleAsk) -> ScheduleResult:
    named = NAMED[ask.placement]
    if ask.microbatches is None:
        raise InputError(
            f"{ask.placement} is for a number of them", fix="give one", field="microbatches"
        )
    chunks = (ask.chunks or USUAL_CHUNKS) if named.layout in ("looped", "wave") else 1
    why = "holds the model twice, which torch does not" if named.layout == "two-way" else ""
    why = why or named.refuses(ask.devices, chunks, ask.microbatches)
    if why:
        raise InputError(f"{named.title} {why}", fix="choose other numbers", field="placement")
    order = named.order(ask.devices, chunks, ask.microbatches)
    options = replace(_options(ask), chunks=USUAL_CHUNKS)  # the order has its own
    problem = replace(placement_of_order(order, options).problem(), name=ask.placement)
    memory = None if ask.memory is None else _whole(ask.memory)
    return order_result(asked(problem, memory, ask.microbatches), order)


def _numbers(value: dict[str, Any]) -> dict[str, Any]:
    """What a command prints under `--json`, as far as it is one value."""
    return {k: v for k, v in value.items() if v is None or isinstance(v, str | int | float | bool)}


ANSWERS: dict[type[Ask], Callable[[Ask, Stop], Answer]] = {
    SimulateAsk: _simulate,
    StrategyAsk: _strategy,
    PlanAsk: _plan,
    ScheduleAsk: _schedule,
}
