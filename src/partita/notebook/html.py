"""A result as notebooks show it: a title, its figures, its table, its timeline as a picture.

Nothing in it runs, and every name is escaped. `FIGURES` says what counts, keyed by class name;
`TIMELINES` says which have one to draw.
"""

import base64
from collections import Counter
from collections.abc import Callable
from html import escape
from typing import Any

from partita import units
from partita.notebook.rows import result_table
from partita.notebook.table import ResultTable
from partita.report.svg_timeline import timeline_svg

MOST_ROWS = 12
MOST_TASKS = 20_000  # that a picture in a notebook shows
Figures = list[tuple[str, str]]


def result_html(result: object) -> str:
    """The HTML of any result."""
    name = type(result).__name__
    figures = FIGURES[name](result)
    title = " ".join(f"<b>{escape(title)}</b> {escape(value)} &nbsp;" for title, value in figures)
    parts = [f"<div>{title}</div>", *_picture(name, result)]
    if name not in LONG:
        table = result_table(result)
        parts.append(ResultTable(table.columns, table.rows[:MOST_ROWS])._repr_html_())
        if len(table) > MOST_ROWS:
            parts.append(f"<p>{len(table) - MOST_ROWS:,} more rows: .table().to_pandas()</p>")
    return "\n".join(parts)


def _picture(name: str, result: Any) -> list[str]:
    """The timeline as an image: styles inside of it do not reach into the notebook."""
    make = TIMELINES.get(name)
    timeline = None if make is None else make(result)
    if timeline is None or timeline.program.num_tasks > MOST_TASKS:
        return []
    data = base64.b64encode(timeline_svg(timeline).encode()).decode()
    return [f'<img alt="timeline" src="data:image/svg+xml;base64,{data}">']


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _likely(seconds: float, interval_s: tuple[float, float] | None) -> str:
    """A predicted time, with its 80 % interval where one is known."""
    if interval_s is None:
        return units.seconds(seconds)
    return f"{units.seconds(seconds)} ({' to '.join(map(units.seconds, interval_s))})"


def _simulation(s: Any) -> Figures:
    peak, capacity = s.fullest
    return [
        ("model", s.workload.spec), ("machine", s.cluster.name), ("plan", s.arrangement),
        ("step", _likely(s.step_s, s.likely_step_s)),
        ("MFU", f"{s.mfu:.1%} ({' to '.join(f'{share:.0%}' for share in s.likely_mfu)})"),
        ("memory", f"{units.size(peak)} ±6 % of {units.size(capacity)}"),
        ("fits", "yes" if s.fits else "no"),
    ]  # fmt: skip


def _searched(searched: Any) -> Figures:
    """A plan or a sharding: the best, and how far from optimal it can be."""
    ended = [("status", str(searched.status)), ("why", searched.why)]
    if searched.best is None:
        return ended
    return [*_simulation(searched.best.simulation), *ended]


def _forecast(f: Any) -> Figures:
    return [
        ("model", f.model.name), ("strategy", str(f.strategy)),
        ("step", _likely(f.step_s, f.interval_s)),
        ("tokens/s", f"{f.tokens_per_s:,.0f}"), ("MFU", f"{f.mfu:.1%}"),
        ("memory", f"{units.size(f.memory.total)} ±6 % of {units.size(f.capacity_bytes)}"),
        ("fits", "yes" if f.fits else "no"),
    ]  # fmt: skip


def _comparison(c: Any) -> Figures:
    best = c.best
    told = [("lower bound", units.seconds(c.lower_bound_s))]
    if best is not None:
        step = _likely(best.step_s, best.simulation.likely_step_s)
        told.insert(0, ("fastest", f"{best.name}, {step}"))
    return told


def _schedule(r: Any) -> Figures:
    if r.outcome.solution is None:
        return [("status", str(r.status)), ("why", r.why)]
    return [
        ("makespan", units.number(r.makespan)), ("micro-batches", str(r.num_microbatches)),
        ("bubble", _percent(r.bubble_rate)), ("from optimal at most", _percent(r.gap)),
    ]  # fmt: skip


def _partitioned(p: Any) -> Figures:
    told = [("status", str(p.status)), ("from optimal at most", _percent(p.gap))]
    if p.bottleneck_ms is not None:
        told.insert(0, ("busiest device", units.seconds(p.bottleneck_ms / 1e3)))
    if p.simulation is not None:
        told.insert(0, ("step", _likely(p.simulation.step_s, p.simulation.likely_step_s)))
    return told


def _placed(p: Any) -> Figures:
    told = [("status", str(p.status)), ("from optimal at most", _percent(p.gap))]
    if p.best is not None:
        told.insert(0, ("step", _likely(p.best.step_s, p.likely_step_s)))
    return told


def _validation(v: Any) -> Figures:
    told = [("runs", str(len(v.checked))), ("skipped", str(len(v.skipped)))]
    if v.total.both.mape is not None:
        told.append(("mean error", f"{v.total.both.mape:.1f} %"))
    return told


def _plan(p: Any) -> Figures:
    return [
        ("model", p.model.spec), ("machine", p.cluster.spec), ("plan", str(p)),
        ("step", units.seconds(p.prediction.step_s)),
        ("lower bound", units.seconds(p.prediction.lower_bound_s)),
    ]  # fmt: skip


def _compared_trace(t: Any) -> Figures:
    told = [("predicted", units.seconds(t.predicted_s)), ("measured", units.seconds(t.measured_s))]
    return told if t.worst is None else [*told, ("wrong most", t.worst.sentence)]


def _streams(s: Any) -> Figures:
    best = s.best
    told = "nothing" if best.objective is None else units.seconds(best.objective * 1e-6)
    return [("device", s.device.name), ("best", f"{best.method}, {told}")]


def _fused(f: Any) -> Figures:
    told = "nothing" if f.fused_s is None else units.seconds(f.fused_s)
    return [("device", f.device), ("kernel", told), ("status", str(f.result.status))]


def _result(r: Any) -> Figures:
    told = [("method", r.method), ("status", str(r.status)), ("why", r.why)]
    if r.objective is not None:
        told.insert(1, ("objective", units.number(r.objective)))
    return [*told, ("from optimal at most", _percent(r.gap))]


def _curve(c: Any) -> Figures:
    told = [("plans", f"{len(c.points):,}")]
    if c.best:
        fastest = min(c.best, key=lambda point: point.objective_s)
        step = _likely(fastest.step_s, fastest.step_interval_s)
        told.insert(0, ("fastest", f"{step} on {fastest.cluster}"))
    return told if not c.missing else [*told, ("without a plan", f"{len(c.missing):,}")]


def _compared_curve(c: Any) -> Figures:
    return [(f"fastest on {number:,}", c.best(number)) for number in c.numbers if c.best(number)]


def _explained(e: Any) -> Figures:
    bounds = ", ".join(f"{one.name} {one.share:.0%}" for one in e.bounds[:3])
    return [
        ("step", _likely(e.step_s, e.simulation.likely_step_s)),
        ("lower bound", units.seconds(e.lower_bound_s)),
        ("bound by", bounds), ("bubble", _percent(e.simulation.bubble)),
    ]  # fmt: skip


def _kineto(k: Any) -> Figures:
    return [
        ("predicted", units.seconds(k.predicted_step_s)),
        ("measured", units.seconds(k.measured_step_s)), ("steps", f"{k.num_steps:,}"),
    ]  # fmt: skip


def _graph(g: Any) -> Figures:
    return [
        ("model", g.name), ("ops", f"{len(g.ops):,}"),
        ("parameters", units.count(g.num_parameters)),
        ("training", "yes" if g.is_training else "no"),
    ]  # fmt: skip


def _cluster(c: Any) -> Figures:
    kinds = Counter(device.kind for device in c.devices)
    nodes = len({device.node for device in c.devices})
    return [
        ("machine", c.name), ("devices", ", ".join(f"{n:,} {kind}" for kind, n in kinds.items())),
        ("nodes", f"{nodes:,}"), ("links", f"{len(c.links):,}"),
    ]  # fmt: skip


def _accelerated(a: Any) -> Figures:
    return [
        ("model", a.model), ("device", a.device), ("called", a.kept),
        ("a call", units.seconds(a.used_us * 1e-6)),
    ]  # fmt: skip


def _streamed(s: Any) -> Figures:
    return [
        ("model", type(s.module).__name__),
        *(("x".join(map(str, one.shapes[0])) if one.shapes else "call",
           f"{one.label}, {units.seconds(one.time_us * 1e-6)}") for one in s.schedules),
    ]  # fmt: skip


def _fused_outcome(o: Any) -> Figures:
    told = "not measured" if o.used_us is None else units.seconds(o.used_us * 1e-6)
    return [
        ("model", o.model), ("device", o.device), ("called", o.kept), ("a call", told),
        ("regions", f"{len(o.regions):,}"), ("left to PyTorch", f"{len(o.fallbacks):,}"),
    ]  # fmt: skip


FIGURES: dict[str, Callable[[Any], Figures]] = {
    "Accelerated": lambda fast: _accelerated(fast.report()),
    "AcceleratedReport": _accelerated,
    "AnalyticStreams": _streams,
    "Cluster": _cluster,
    "ComparedCurve": _compared_curve,
    "Comparison": _comparison,
    "Curve": _curve,
    "Difference": lambda d: [("same ops", f"{d.same_ops:,} of {d.num_ops:,}")],
    "ExperimentOutcome": lambda e: [("runs", f"{len(e.runs):,}"), ("missing", f"{e.missing:,}")],
    "Explained": _explained,
    "Explanation": lambda e: [("op", e.op), ("kind", e.kind), ("why", e.why())],
    "Forecast": _forecast,
    "FusedModel": lambda fused: _fused_outcome(fused.report()),
    "FusedPlan": _fused,
    "Graph": _graph,
    "KinetoComparison": _kineto,
    "Outcome": _fused_outcome,
    "Partitioned": _partitioned,
    "Placed": _placed,
    "Plan": _plan,
    "Planned": _searched,
    "Program": lambda p: [("tasks", f"{p.num_tasks:,}"), ("lanes", f"{len(p.lanes):,}"),
                          ("memories", f"{len(p.memories):,}")],
    "Result": _result,
    "ScheduleResult": _schedule,
    "Sensitivity": lambda s: [("step", units.seconds(s.forecast.step_s)),
                              ("fastest near it", str(s.winner.strategy))],
    "Sharding": _searched,
    "Simulation": _simulation,
    "Streamed": _streamed,
    "Timeline": lambda t: [("makespan", f"{units.number(t.makespan)} {t.program.time_unit}"),
                           ("tasks", f"{t.program.num_tasks:,}")],
    "TraceComparison": _compared_trace,
    "Validation": _validation,
}  # fmt: skip

TIMELINES: dict[str, Callable[[Any], Any]] = {
    "AnalyticStreams": lambda s: s.timeline,
    "FusedPlan": lambda f: None if f.result.solution is None else f.timeline(),
    "Partitioned": lambda p: None if p.simulation is None else p.simulation.timeline,
    "Placed": lambda p: p.timeline,
    "Planned": lambda p: None if p.best is None else p.best.simulation.timeline,
    "ScheduleResult": lambda r: None if r.outcome.solution is None else r.timeline(),
    "Sharding": lambda s: None if s.best is None else s.best.simulation.timeline,
    "Simulation": lambda s: s.timeline,
    "Timeline": lambda t: t,
}
LONG = ("FusedPlan", "ScheduleResult", "Simulation", "Timeline")  # their picture says it all
