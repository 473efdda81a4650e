"""Which columns of a result are drawn, and how: `CHARTS`, keyed by the name of its class.

A chart is a record; `altair_chart` makes one of Altair of it. Altair holds what it shows in the
notebook and needs no network to make it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from partita.capture.installed import need
from partita.notebook.rows import result_table
from partita.notebook.table import ResultTable, Value

MOST_ROWS = 5000  # of a chart in a notebook
WIDTH = 640


@dataclass(frozen=True, slots=True)
class ResultChart:
    """A table and which columns go where: `bar`, `interval` (x to x2), `point`."""

    kind: str
    table: ResultTable
    x: str
    y: str
    color: str = ""
    x2: str = ""  # where bars end; else they begin at zero
    tooltip: tuple[str, ...] = ()
    log: bool = False
    title: str = ""


def result_chart(result: object) -> Any:
    """The Altair chart of any result."""
    return altair_chart(chart_of(result))


def chart_of(result: object) -> ResultChart:
    """The chart of any result, as a record."""
    return CHARTS[type(result).__name__](result)


def altair_chart(chart: ResultChart) -> Any:
    """The same for Altair; the longest rows alone where there are more than can be seen."""
    need("altair", "notebook", "a chart")
    import altair

    values = altair.Data(values=_values(chart))
    base = altair.Chart(values, title=chart.title, width=WIDTH)
    mark = base.mark_circle(size=60) if chart.kind == "point" else base.mark_bar()
    scale = altair.Scale(type="log") if chart.log else altair.Undefined
    number = altair.X(chart.x, type="quantitative", scale=scale)
    if chart.kind == "point":
        other = altair.Y(chart.y, type="quantitative", scale=scale)
    else:
        other = altair.Y(chart.y, type="nominal", sort=None)
    channels: dict[str, Any] = {"x": number, "y": other}
    if chart.x2:
        channels["x2"] = altair.X2(chart.x2)
    if chart.color:
        channels["color"] = altair.Color(chart.color, type="nominal")
    shown = dict.fromkeys((chart.y, chart.color, chart.x, chart.x2, *chart.tooltip))
    kinds = _kinds(chart.table)
    channels["tooltip"] = [altair.Tooltip(name, type=kinds[name]) for name in shown if name]
    return mark.encode(**channels)


def _values(chart: ResultChart) -> list[dict[str, Value]]:
    rows = chart.table.to_dicts()
    if len(rows) > MOST_ROWS:
        rows.sort(key=lambda row: -_length(row, chart))
        rows = rows[:MOST_ROWS]
    return rows


def _length(row: dict[str, Value], chart: ResultChart) -> float:
    begin, end = row[chart.x], row[chart.x2] if chart.x2 else 0.0
    assert isinstance(begin, int | float)
    assert isinstance(end, int | float)
    return abs(end - begin)


def _kinds(table: ResultTable) -> dict[str, Any]:
    """Of every column: is it numbers or names?"""
    kinds = {}
    for place, name in enumerate(table.columns):
        values = [row[place] for row in table.rows if row[place] is not None]
        is_number = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        kinds[name] = "quantitative" if values and is_number else "nominal"
    return kinds


def _only(table: ResultTable, column: str) -> ResultTable:
    """The rows that have a value there."""
    place = table.columns.index(column)
    return ResultTable(table.columns, tuple(row for row in table.rows if row[place] is not None))


def _steps(y: str, title: str) -> Callable[[object], ResultChart]:
    """Bars of what each way takes."""

    def chart(result: object) -> ResultChart:
        table = _only(result_table(result), "step_s")
        return ResultChart("bar", table, "step_s", y, "fits", tooltip=("low_s", "high_s"),
                           title=title)  # fmt: skip

    return chart


def _bars(x: str, y: str, title: str, color: str = "") -> Callable[[object], ResultChart]:
    return lambda result: ResultChart("bar", result_table(result), x, y, color, title=title)


def _points(
    x: str, y: str, title: str, color: str = "", log: bool = False, more: tuple[str, ...] = ()
) -> Callable[[object], ResultChart]:
    return lambda result: ResultChart(
        "point", _only(result_table(result), x), x, y, color, tooltip=more, log=log, title=title
    )


def _gantt(timeline_of: Callable[[Any], Any]) -> Callable[[object], ResultChart]:
    """A bar per task from its start to its end."""

    def chart(result: object) -> ResultChart:
        table = result_table(timeline_of(result))
        return ResultChart("interval", table, "start", "lane", "kind", "end",
                           ("task", "microbatch"), title="timeline")  # fmt: skip

    return chart


def _phases(result: object) -> ResultChart:
    """Of a partition: what the forward and the backward of each stage take."""
    columns = result_table(result).to_dicts()
    rows = tuple(
        (f"stage {row['stage']}", phase, row[f"{phase}_ms"])
        for row in columns
        for phase in ("forward", "backward")
    )
    table = ResultTable(("stage", "phase", "ms"), rows)
    return ResultChart("bar", table, "ms", "stage", "phase", title="one micro-batch by stage")


def _progress(result: object) -> ResultChart:
    """Of a search: best answer and bound over its time."""
    rows = tuple(
        (row["seconds"], row[which], which)
        for row in result_table(result).to_dicts()
        for which in ("objective", "lower_bound")
        if row[which] is not None
    )
    table = ResultTable(("seconds", "value", "which"), rows)
    return ResultChart("point", table, "seconds", "value", "which", title="best and bound")


def _measured(result: object) -> ResultChart:
    """Of a trace: predicted and measured seconds, one above the other."""
    table = result_table(result)
    names = [name for name in table.columns if not name.endswith("_s") and name != "count"]
    rows = tuple(
        (" ".join([*(str(row[name]) for name in names), what]), what, row[f"{what}_s"])
        for row in table.to_dicts()
        for what in ("predicted", "measured")
    )
    drawn = ResultTable(("tasks", "which", "seconds"), rows)
    return ResultChart("bar", drawn, "seconds", "tasks", "which", title="predicted and measured")


CHARTS: dict[str, Callable[[Any], ResultChart]] = {
    "Accelerated": _bars("us", "candidate", "a whole call", "kept"),
    "AcceleratedReport": _bars("us", "candidate", "a whole call", "kept"),
    "AnalyticStreams": _bars("us", "method", "methods"),
    "Cluster": _bars("memory_bytes", "device", "memory of the devices", "kind"),
    "ComparedCurve": _points(
        "devices", "objective_s", "strategies by devices", "strategy", log=True, more=("plan",)
    ),
    "Comparison": _steps("strategy", "step by strategy"),
    "Curve": _points(
        "devices", "step_s", "plans by devices", "best", log=True,
        more=("plan", "found_by", "price_per_step"),
    ),
    "Difference": _bars("ratio", "name", "second plan over first"),
    "ExperimentOutcome": _points(
        "evaluations", "step_s", "runs", "optimiser", more=("case", "seed", "seconds")
    ),
    "Explained": _bars("seconds", "part", "where the step goes", "kind"),
    "Explanation": _bars("added_s", "split", "what other splits would add"),
    "Forecast": _bars("seconds", "part", "where the step goes"),
    "FusedModel": _bars("planned_us", "region", "regions as planned", "kept"),
    "FusedPlan": _gantt(lambda fused: fused.timeline()),
    "Graph": _bars("flops", "kind", "FLOPs by kind of op", "phase"),
    "KinetoComparison": _measured,
    "Outcome": _bars("planned_us", "region", "regions as planned", "kept"),
    "Partitioned": _phases,
    "Placed": _points("step_s", "peak_bytes", "placements", "fits", more=("name", "devices")),
    "Plan": lambda plan: _gantt(_simulated)(plan),
    "Planned": _steps("plan", "the plan and the next best"),
    "Program": _bars("duration", "lane", "work of each lane", "kind"),
    "Result": _progress,
    "ScheduleResult": _gantt(lambda result: result.timeline()),
    "Sensitivity": _bars("step_s", "parameter", "the step with each parameter worse"),
    "Sharding": _steps("mesh", "ways to split"),
    "Simulation": _gantt(lambda simulation: simulation.timeline),
    "Streamed": _bars("us", "candidate", "a whole call", "kept"),
    "Timeline": _gantt(lambda timeline: timeline),
    "TraceComparison": _measured,
    "Validation": _points(
        "measured_s", "predicted_s", "predicted and measured steps", "group", log=True,
        more=("id", "model", "device", "error"),
    ),
}  # fmt: skip


def _simulated(plan: Any) -> Any:
    from partita.jobs.simulate import simulate

    return simulate(plan).timeline
