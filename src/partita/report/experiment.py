"""An experiment as a folder to look at: table (CSV, JSON, Markdown), charts, an index page.

index.html  animation.html  table.csv  table.json  table.md  charts/*.svg  runs/*.json

Tables are CSV and JSON by run, Markdown and text in summary; charts show comparison, convergence,
archive, placement, sweeps and what was measured.
"""

import base64
import csv
import io
import statistics
from collections.abc import Callable, Hashable, Sequence
from html import escape
from pathlib import Path
from typing import TypeVar

from partita import units
from partita.files import encode_json, write_atomically
from partita.jobs.experiment import Case, ExperimentOutcome, RunRecord
from partita.jobs.experiment_file import MeasuredSpec
from partita.report.animation import animation_page
from partita.report.charts import ChartLine, bar_chart, diagonal_chart, heat_map, line_chart
from partita.report.html_parts import document, table
from partita.report.placement_page import forward_svg

K = TypeVar("K", bound=Hashable)

HEADER = (
    "case", "optimiser", "seed", "status", "step_ms", "bound_ms", "gap", "devices",
    "largest_memory_bytes", "evaluations", "seconds",
)  # fmt: skip


def _row(run: RunRecord) -> tuple[object, ...]:
    return (
        run.case, run.optimiser, run.seed, run.status,
        None if run.objective_s is None else run.objective_s * 1e3,
        None if run.lower_bound_s is None else run.lower_bound_s * 1e3,
        run.gap, run.num_devices, max(run.peak_memory_bytes, default=0.0), run.evaluations,
        run.seconds,
    )  # fmt: skip


def table_csv(runs: Sequence[RunRecord]) -> str:
    """A line per run."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for run in runs:
        writer.writerow(["" if cell is None else cell for cell in _row(run)])
    return text.getvalue()


def table_json(outcome: ExperimentOutcome) -> bytes:
    """The same for programs."""
    return encode_json(
        {
            "format": "partita/experiment-table@1",
            "experiment": outcome.experiment.name,
            "missing": outcome.missing,
            "rows": [dict(zip(HEADER, _row(run), strict=True)) for run in outcome.runs],
        }
    )


def summary_rows(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """A row per case and optimiser: best, mean, bound, gap, evaluations, time."""
    rows: list[tuple[str, ...]] = []
    for (case, optimiser), same in grouped(runs, lambda run: (run.case, run.optimiser)).items():
        seconds = [run.objective_s for run in same if run.objective_s is not None]
        bounds = [run.lower_bound_s for run in same if run.lower_bound_s is not None]
        best = min(seconds, default=None)
        bound = max(bounds, default=None)
        away = None if best is None or bound is None else max(0.0, 1 - bound / best)
        rows.append(
            (
                case,
                optimiser,
                "none" if best is None else f"{best * 1e3:.5g}",
                "" if not seconds else f"{statistics.fmean(seconds) * 1e3:.5g}",
                "" if bound is None else f"{bound * 1e3:.5g}",
                "" if away is None else f"{away:.1%}",
                f"{len(seconds)} of {len(same)}",
                f"{statistics.fmean(run.evaluations for run in same):,.0f}",
                units.seconds(statistics.fmean(run.seconds for run in same)),
            )
        )
    return rows


SUMMARY = (
    "case", "optimiser", "best ms", "mean ms", "bound ms", "gap", "found", "evaluations", "time",
)  # fmt: skip


def table_markdown(runs: Sequence[RunRecord]) -> str:
    """The summary for a document."""
    lines = ["| " + " | ".join(SUMMARY) + " |", "|" + "---|" * len(SUMMARY)]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in summary_rows(runs)
    ]
    return "\n".join(lines) + "\n"


def summary_text(outcome: ExperimentOutcome) -> str:
    """The summary for a terminal."""
    return units.table(SUMMARY, summary_rows(outcome.runs), numbers=(2, 3, 4, 5, 6, 7, 8))


def grouped(runs: Sequence[RunRecord], key: Callable[[RunRecord], K]) -> dict[K, list[RunRecord]]:
    """Runs that have the key in common, in the order in which keys are met."""
    groups: dict[K, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def charts(outcome: ExperimentOutcome) -> dict[str, tuple[str, str]]:
    """File name -> (title, picture)."""
    charts: dict[str, tuple[str, str]] = {}
    by_case = grouped(outcome.runs, lambda run: run.case)
    single = [case for case in outcome.cases if case.name in by_case]
    sweeps = _sweeps(outcome.runs)
    for name, (title, text) in sweeps.items():
        charts[f"{name}.svg"] = (title, text)
    if outcome.experiment.measured:
        charts["measured.svg"] = ("Simulated against measured", _measured(outcome))
    for number, case in enumerate(single):
        runs = by_case[case.name]
        if len({run.optimiser for run in runs}) > 1:
            charts[f"compared-{number}.svg"] = (f"{case.name}: compared", _bars(case, runs))
        if any(len(run.history) > 1 for run in runs):
            charts[f"convergence-{number}.svg"] = (f"{case.name}: search", _convergence(case, runs))
        shown = [run for run in runs if run.frames and run.class_bytes]
        if shown:
            charts[f"archive-{number}.svg"] = (f"{case.name}: archive", _archive(case, shown))
        drawn = _drawn(case, runs)
        if drawn is not None:
            charts[f"placement-{number}.svg"] = (f"{case.name}: placement", drawn)
    return charts


def _convergence(case: Case, runs: Sequence[RunRecord]) -> str:
    lines = [
        ChartLine(
            f"{run.optimiser}, seed {run.seed}",
            tuple(
                (float(max(1, evaluations)), objective * 1e3)
                for _, evaluations, objective in (*run.history, *_end(run))
            ),
            steps=True,
            group=run.optimiser,
        )
        for run in runs
        if run.history
    ]
    title = f"{case.name}: best so far"
    return line_chart(title, lines, "evaluations", "step, ms", log_x=True, log_y=True)


def _end(run: RunRecord) -> tuple[tuple[float, int, float], ...]:
    last = run.history[-1]
    return ((run.seconds, max(run.evaluations, last[1]), last[2]),)


def _bars(case: Case, runs: Sequence[RunRecord]) -> str:
    rows, bounds = [], []
    for optimiser, same in grouped(runs, lambda run: run.optimiser).items():
        milliseconds = [run.objective_s * 1e3 for run in same if run.objective_s is not None]
        bounds += [run.lower_bound_s * 1e3 for run in same if run.lower_bound_s is not None]
        if milliseconds:
            rows.append(
                (optimiser, statistics.fmean(milliseconds), min(milliseconds), max(milliseconds))
            )
    title = f"{case.name}: mean of the seeds, least to largest"
    return bar_chart(title, rows, "step, ms", max(bounds, default=None))


def _archive(case: Case, runs: Sequence[RunRecord]) -> str:
    run = min(runs, key=lambda item: item.frames[-1].best_s)
    cells = [
        (used - 1, kind, seconds * 1e3, fits) for used, kind, seconds, fits in run.frames[-1].cells
    ]
    rows = [f"{count}" for count in range(1, len(run.devices) + 1)]
    columns = [units.size(amount) if amount else "none" for amount in run.class_bytes]
    title = f"{case.name}: best step (ms) by devices used and communication; (over memory)"
    sent = "bytes sent between devices a batch, at most"
    return heat_map(title, cells, rows, columns, "devices used", sent, "ms")


def _drawn(case: Case, runs: Sequence[RunRecord]) -> str | None:
    """The best placement on the model's graph, a colour per device."""
    done = [run for run in runs if run.objective_s is not None and run.placement]
    if not done or case.subject is None:
        return None
    best = min(done, key=lambda run: run.objective_s or 0.0)
    graph = case.subject.workload.graph
    founders = dict(zip(best.layers, best.placement, strict=True))
    devices: dict[str, str] = {}
    for op in graph.ops:  # an op that founds no layer is in that of its producer
        before = graph.predecessors(op)
        if op.name in founders:
            devices[op.name] = best.devices[founders[op.name]]
        elif op.phase == "forward" and before and before[0].name in devices:
            devices[op.name] = devices[before[0].name]
    return forward_svg(graph, devices)


SWEPT: dict[str, tuple[str, Callable[[RunRecord], float]]] = {
    "bandwidth": ("bandwidth of all links, times the machine's", lambda run: run.bandwidth),
    "memory": ("memory of all devices, times the machine's", lambda run: run.memory),
    "batches": ("batches in a step", lambda run: float(run.batches)),
}


def _sweeps(runs: Sequence[RunRecord]) -> dict[str, tuple[str, str]]:
    """A chart per swept quantity and pair of network and machine; the best over the seeds."""
    sweeps = {}
    for name, (title, value) in SWEPT.items():
        for number, (pair, same) in enumerate(
            grouped(runs, lambda run: (run.network, run.cluster)).items()
        ):
            if len({value(run) for run in same}) < 2:
                continue
            lines = _sweep_lines(same, value)
            text = line_chart(
                f"{pair[0]} on {pair[1]}: step over {name}" if pair[1] else pair[0],
                lines, title, "step, ms per batch", log_x=True, log_y=True, marks=True,
            )  # fmt: skip
            sweeps[f"sweep-{name}-{number}"] = (f"{pair[0]} on {pair[1]}: {name}", text)
    return sweeps


def _sweep_lines(runs: Sequence[RunRecord], value: Callable[[RunRecord], float]) -> list[ChartLine]:
    lines = []
    for optimiser, same in grouped(runs, lambda run: run.optimiser).items():
        best: dict[float, float] = {}
        for run in same:
            if run.objective_s is not None:
                step = run.objective_s * 1e3 / run.batches
                best[value(run)] = min(step, best.get(value(run), step))
        lines.append(ChartLine(optimiser, tuple(sorted(best.items()))))
    bound: dict[float, float] = {}
    for run in runs:
        if run.lower_bound_s:
            low = run.lower_bound_s * 1e3 / run.batches
            bound[value(run)] = max(low, bound.get(value(run), 0.0))
    return [*lines, ChartLine("lower bound", tuple(sorted(bound.items())), dashed=True)]


def _measured(outcome: ExperimentOutcome) -> str:
    points = [
        (label(spec), spec.step_s, run.objective_s)
        for spec in outcome.experiment.measured
        if (run := best_for(outcome.runs, spec)) is not None and run.objective_s is not None
    ]
    title = "Simulated against measured (dashed: 20 % off)"
    return diagonal_chart(title, points, "measured, s", "simulated, s")


def label(spec: MeasuredSpec) -> str:
    """What a measurement is called."""
    return spec.name or spec.source


def best_for(runs: Sequence[RunRecord], spec: MeasuredSpec) -> RunRecord | None:
    """The fastest run of the case that was measured."""
    fitting = [
        run
        for run in runs
        if spec.network in (None, run.network)
        and spec.cluster in (None, run.cluster)
        and spec.batches in (None, run.batches)
        and spec.in_flight in (None, run.in_flight)
        and run.objective_s is not None
    ]
    return min(fitting, key=lambda run: run.objective_s or 0.0, default=None)


_STYLE = """
figure{margin:1rem 0;border:1px solid var(--line);border-radius:8px;padding:.6rem;overflow:auto;
max-height:820px}
figcaption{color:var(--soft);font-size:.88rem}img{max-width:none}
@media print{figure{max-height:none;overflow:visible}img{max-width:100%;height:auto}}
""".strip()


def write_report(outcome: ExperimentOutcome, folder: str | Path) -> list[Path]:
    """Write table, charts and pages of the runs there are; files of a name are replaced."""
    place = Path(folder)
    (place / "charts").mkdir(parents=True, exist_ok=True)
    pictures = charts(outcome)
    named: dict[str, str | bytes] = {f"charts/{name}": text for name, (_, text) in pictures.items()}
    named["table.csv"] = table_csv(outcome.runs)
    named["table.json"] = table_json(outcome)
    named["table.md"] = table_markdown(outcome.runs)
    named["animation.html"] = animation_page(outcome)
    named["index.html"] = _index(outcome, pictures)
    return [write_atomically(place / name, data, overwrite=True) for name, data in named.items()]


def _index(outcome: ExperimentOutcome, pictures: dict[str, tuple[str, str]]) -> str:
    """The page of all charts; it holds them itself, so that it can be sent alone."""
    experiment = outcome.experiment
    done = f"{len(outcome.runs)} runs" + (
        f", {outcome.missing} still to be made: start the same experiment again"
        if outcome.missing
        else ""
    )
    figures = "\n".join(
        f'<figure><img src="data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode()}" '
        f'alt="{escape(title)}"><figcaption><a href="charts/{escape(name)}">{escape(title)}</a>'
        "</figcaption></figure>"
        for name, (title, text) in pictures.items()
    )
    return document(
        experiment.name,
        _STYLE,
        f"<h1>{escape(experiment.name)}</h1><p>{escape(experiment.description)}</p>"
        f'<p class="soft">{escape(done)}; rules: {escape(experiment.semantics)}. '
        '<a href="animation.html">See the search move</a>. Table: <a href="table.csv">CSV</a>, '
        '<a href="table.json">JSON</a>, <a href="table.md">Markdown</a>.</p>'
        f"{table(SUMMARY, summary_rows(outcome.runs), range(2, 9))}"
        f"{_measured_table(outcome)}{figures}",
    )


def _measured_table(outcome: ExperimentOutcome) -> str:
    if not outcome.experiment.measured:
        return ""
    header = ("measured", "measured s", "simulated s", "simulated / measured", "source")
    rows = []
    for spec in outcome.experiment.measured:
        run = best_for(outcome.runs, spec)
        simulated = None if run is None else run.objective_s
        rows.append(
            (
                label(spec),
                f"{spec.step_s:.4g}",
                "none" if simulated is None else f"{simulated:.4g}",
                "" if simulated is None else f"{simulated / spec.step_s:.2f}",
                spec.source,
            )
        )
    return "<h2>Simulated against measured</h2>" + table(header, rows, (1, 2, 3))
