"""An experiment as a folder to look at: table (CSV, JSON, Markdown), charts, an index page.

index.html  animation.html  table.csv  table.json  table.md  charts/*.svg  runs/*.json
"""

from collections.abc import Sequence
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

_STYLE = """
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;color:#1f2328;
max-width:1180px;margin:2rem auto;padding:0 1rem;background:#fff}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}.soft{color:#656d76}
table{border-collapse:collapse;font-size:.88rem}.scroll{overflow-x:auto}
th,td{text-align:left;padding:.25rem .7rem;border-bottom:1px solid #d0d7de;white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
figure{margin:1rem 0;border:1px solid #d0d7de;border-radius:8px;padding:.6rem;overflow:auto;
max-height:820px}
figcaption{color:#656d76;font-size:.88rem}img{max-width:none}
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
    named["index.html"] = _index(outcome, {name: title for name, (title, _) in pictures.items()})
    return [write_atomically(place / name, data, overwrite=True) for name, data in named.items()]


def _index(outcome: ExperimentOutcome, pictures: dict[str, str]) -> str:
    experiment = outcome.experiment
    done = f"{len(outcome.runs)} runs" + (
        f", {outcome.missing} still to be made: start the same experiment again"
        if outcome.missing
        else ""
    )
    figures = "\n".join(
        f'<figure><img src="charts/{escape(name)}" alt="{escape(title)}">'
        f'<figcaption><a href="charts/{escape(name)}">{escape(title)}</a></figcaption></figure>'
        for name, title in pictures.items()
    )
    rows = "".join(_cells("td", row) for row in summary_rows(outcome.runs))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(experiment.name)} · partita</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(experiment.name)}</h1><p>{escape(experiment.description)}</p>"
        f'<p class="soft">{escape(done)}; rules: {escape(experiment.semantics)}. '
        '<a href="animation.html">See the search move</a>. Table: <a href="table.csv">CSV</a>, '
        '<a href="table.json">JSON</a>, <a href="table.md">Markdown</a>.</p>'
        f'<div class="scroll"><table>{_cells("th", SUMMARY)}{rows}</table></div>'
        f"{_measured_table(outcome)}{figures}</body></html>\n"
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
    body = "".join(_cells("td", row, (1, 2, 3)) for row in rows)
    return (
        "<h2>Simulated against measured</h2>"
        f'<div class="scroll"><table>{_cells("th", header, (1, 2, 3))}{body}</table></div>'
    )


def _cells(tag: str, row: Sequence[str], numbers: Sequence[int] = range(2, 9)) -> str:
    cells = "".join(
        f"<{tag}{' class=n' if i in numbers else ''}>{escape(cell)}</{tag}>"
        for i, cell in enumerate(row)
    )
    return f"<tr>{cells}</tr>"
