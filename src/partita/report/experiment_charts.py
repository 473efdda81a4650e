"""The charts of an experiment: comparison, convergence, archive, placement, sweeps, measured."""

import statistics
from collections.abc import Callable, Sequence

from partita import units
from partita.jobs.experiment import Case, ExperimentOutcome, RunRecord
from partita.jobs.experiment_file import MeasuredSpec
from partita.report.charts import ChartLine, bar_chart, diagonal_chart, heat_map, line_chart
from partita.report.experiment_tables import grouped
from partita.report.placement_page import forward_svg


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
