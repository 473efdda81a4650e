"""An experiment as a folder to look at: table (CSV, JSON, Markdown), charts, an index page.

index.html  animation.html  table.csv  table.json  table.md  charts/*.svg  runs/*.json
"""

import base64
from html import escape
from pathlib import Path

from partita.files import write_atomically
from partita.jobs.experiment import ExperimentOutcome
from partita.report.animation import animation_page
from partita.report.experiment_charts import best_for, charts, label
from partita.report.experiment_tables import (
    SUMMARY,
    summary_rows,
    table_csv,
    table_json,
    table_markdown,
)
from partita.report.html_parts import document, table

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
