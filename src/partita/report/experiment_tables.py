"""The runs of an experiment as tables: CSV and JSON by run, Markdown and text in summary."""

import csv
import io
import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from partita import units
from partita.files import encode_json
from partita.jobs.experiment import ExperimentOutcome, RunRecord

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
