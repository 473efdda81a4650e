"""One self-contained HTML page for a validation: scatter plots, tables, what was skipped, offline.

Every name is escaped, so that whatever a row is called shows as text.
"""

from collections.abc import Sequence
from html import escape

from partita import units
from partita.jobs.validate import Checked, Validation
from partita.report.html_parts import cards, document, table
from partita.report.scatter import (
    Cloud,
    CloudPoint,
    color_of,
    error_chart,
    ratio_chart,
    scatter_chart,
    shape_of,
)
from partita.report.validation import (
    COVERAGE,
    DUELS,
    GROUPS,
    MEMORY,
    REASONS,
    REGRETS,
    SECTIONS,
    WORST,
    coverage_rows,
    duel_rows,
    group_rows,
    median_factor,
    memory_rows,
    number,
    reason_rows,
    regret_rows,
    verdict_text,
    worst_rows,
)

_STYLE = """
.cards{grid-template-columns:repeat(auto-fit,minmax(136px,1fr));gap:.6rem}
.card{padding:.6rem .7rem;font-size:.9rem}.card b{font-size:1.25rem}
tr.total td{font-weight:600}
figure{margin:1rem 0;border:1px solid var(--line);border-radius:8px;overflow-x:auto}
figure svg{display:block;width:100%;height:auto;min-width:740px;border-radius:8px}
@media print{figure svg{min-width:0}}
.groups{display:flex;flex-wrap:wrap;gap:.4rem;margin:.8rem 0;font-size:.85rem}
.groups button{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:.15rem .55rem;cursor:pointer}
.groups button[aria-pressed=false]{color:var(--soft);text-decoration:line-through}
.groups i{font-style:normal;margin-right:.4em}
circle:hover{stroke:#000;stroke-width:2}
""".strip()

# A click on a group hides it; a double click shows it alone.
_SCRIPT = """
(() => {
  const buttons = [...document.querySelectorAll(".groups button")];
  const draw = () => buttons.forEach((button, i) => {
    const shown = button.getAttribute("aria-pressed") === "true";
    for (const part of document.querySelectorAll(`figure [data-group="${i}"]`))
      part.style.display = shown ? "" : "none";
  });
  const set = (button, shown) => button.setAttribute("aria-pressed", shown);
  buttons.forEach((button) => {
    button.addEventListener("click", () => {
      set(button, button.getAttribute("aria-pressed") !== "true");
      draw();
    });
    button.addEventListener("dblclick", () => {
      const alone = buttons.every((b) => (b.getAttribute("aria-pressed") === "true") === (b === button));
      buttons.forEach((b) => set(b, alone || b === button));
      draw();
    });
  });
})();
""".strip()  # noqa: E501


def validation_page(validation: Validation, source: str, worst: int) -> str:
    """The page of a validation; `source` is what the row file is called."""
    title = f"Predictions against measured runs: {source}"
    names = [group.name for group in validation.groups if group.both.n]
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_subtitle(validation))}</p>',
        _cards(validation),
        "<h2>Time of a step, predicted and measured</h2>",
        _buttons(names),
        *_times(validation, names),
        f"<figure>{_errors(validation, names)}</figure>",
        "<h2>Errors by group</h2>",
        table(GROUPS, group_rows(validation), range(1, 10), total=True),
        *_section("regret", REGRETS, regret_rows(validation), range(1, 5)),
        *_section("duels", DUELS, duel_rows(validation), (2, 3, 4, 5)),
        *_memory(validation, names),
        *_section("coverage", COVERAGE, coverage_rows(validation), range(1, 5)),
        *_section("worst", WORST, worst_rows(validation, worst), (2, 3, 4)),
        *_section("reasons", REASONS, reason_rows(validation), (0,)),
        f"<script>{_SCRIPT}</script>",
    ]
    return document(title, _STYLE, "\n".join(body))


def _subtitle(validation: Validation) -> str:
    total = validation.total
    return (
        f"{len(validation.checked):,} rows compared, {len(validation.skipped):,} skipped. Error is "
        f"predicted / measured - 1. {total.left_out.n:,} rows were never looked at when the "
        "parameters were fitted."
    )


def _cards(validation: Validation) -> str:
    total, memory = validation.total, validation.memory
    inside = validation.coverage[0] if validation.coverage else None
    choices = sum(one.groups for one in validation.regret)
    loss = sum(one.mean * one.groups for one in validation.regret) / choices if choices else None
    figures = [
        ("mean error", _percent(total.both.mape), f"bias {number(total.both.bias, sign='+')} %"),
        ("mean error, left out", _percent(total.left_out.mape), f"of {total.left_out.n:,} rows"),
        ("rank correlation", number(total.both.spearman, 3), "Spearman"),
        ("regret", _percent(loss), f"mean of {choices:,} choices"),
        (
            "memory", _percent(memory.total.mape if memory.total else None),
            f"mean error of {memory.total.n if memory.total else 0:,} rows",
        ),
        (
            "what ran fits", _percent(memory.share_right),
            f"of {memory.ran + memory.out_of_memory:,} verdicts right",
        ),
    ]  # fmt: skip
    if inside is not None:
        share = 100 * inside.left_out_inside / inside.left_out if inside.left_out else None
        figures.append(("80 % interval", _percent(share, 0), "of left-out rows inside"))
    return cards(figures)


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{number(value, digits)} %"


def _buttons(names: Sequence[str]) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="true"><i style="color:{color_of(i)}">{shape_of(i)}'
        f"</i>{escape(name)}</button>"
        for i, name in enumerate(names)
    )
    tip = "click hides a group, double click shows it alone"
    return f'<div class="groups" title="{tip}">{buttons}</div>'


def _times(validation: Validation, names: Sequence[str]) -> tuple[str, ...]:
    clouds = [
        Cloud(name, tuple(_point(one) for one in validation.checked if _is_of(one, name)))
        for name in names
    ]
    factor = median_factor(validation)
    axes = "measured, s", "predicted, s"
    both = scatter_chart("Predicted over measured time", clouds, *axes, band=factor)
    names_of_axes = "measured, s", "predicted / measured"
    ratio = ratio_chart("Predicted by measured time", clouds, *names_of_axes, band=factor)
    note = "A hollow point: measured outside the 80 % interval of its prediction."
    if factor is not None:
        note += f" Shaded: the interval of the row in the middle, a factor of {factor:.2f}."
    return f"<figure>{both}</figure><figure>{ratio}</figure>", f'<p class="soft">{note}</p>'


def _is_of(one: Checked, name: str) -> bool:
    return one.row.group == name and one.error is not None


def _point(one: Checked) -> CloudPoint:
    row = one.row
    assert row.measured_s is not None
    assert one.error is not None
    what = f"{row.id}: {row.model.name} on {row.machine.num_devices} {row.machine.kind.name}"
    times = f"predicted {units.seconds(one.predicted_s)}"
    if one.interval_s is not None:
        low, high = one.interval_s
        times += f" ({units.seconds(low)} to {units.seconds(high)})"
    measured = f"measured {units.seconds(row.measured_s)}, {100 * one.error:+.1f} %"
    text = f"{what}\n{row.strategy}\n{times}, {measured}"
    return CloudPoint(text, row.measured_s, one.predicted_s, far=one.covered is False)


def _errors(validation: Validation, names: Sequence[str]) -> str:
    groups = [
        (name, [100 * (one.error or 0.0) for one in validation.checked if _is_of(one, name)])
        for name in names
    ]
    return error_chart("How errors are spread", groups, "error, per cent (the ends are open)")


def _memory(validation: Validation, names: Sequence[str]) -> tuple[str, ...]:
    memory = validation.memory
    if not memory.ran + memory.out_of_memory + len(memory.open):
        return ()
    heading = f"<h2>{escape(SECTIONS['memory'])}</h2>"
    verdicts = f'<p class="soft">{escape(verdict_text(validation))}.</p>'
    if not memory.points:
        return heading, verdicts
    clouds = [
        Cloud(
            name,
            tuple(
                CloudPoint(
                    f"{row.id}: {row.model.name}\n{row.strategy}\n"
                    f"predicted {units.size(predicted)}, measured {units.size(row.memory_bytes)}",
                    row.memory_bytes / 1e9,
                    predicted / 1e9,
                )
                for row, predicted in memory.points
                if row.group == name and row.memory_bytes
            ),
        )
        for name in names
    ]
    title = "Memory of the fullest rank; shaded: within 10 %"
    chart = scatter_chart(title, clouds, "measured, GB", "predicted, GB", band=1.1, height=440)
    errors = table(MEMORY, memory_rows(validation), range(1, 4), total=True)
    return heading, verdicts, f"<figure>{chart}</figure>", errors


def _section(
    name: str, header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]
) -> tuple[str, ...]:
    if not rows:
        return ()
    return f"<h2>{escape(SECTIONS[name])}</h2>", table(header, rows, numbers)
