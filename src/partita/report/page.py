"""One self-contained HTML page for a plan: summary, timeline, splits, slowest ops. No scripts.

Every name is escaped, so that whatever a model or machine is called shows as text.
"""

from collections.abc import Sequence
from html import escape

from partita import units
from partita.jobs.simulate import Simulation, slowest_groups
from partita.plans import Plan
from partita.report.summary import OP_HEADER, op_row
from partita.report.svg_timeline import timeline_svg

MOST_SPLITS = 400
MOST_OPS = 25
KEPT = {
    "none": "copies",
    "states": "states in shares",
    "gradients": "states, gradients in shares",
    "parameters": "all in shares",
}

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#656d76;--line:#d0d7de;--card:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#8d96a0;--line:#30363d;--card:#161b22}
body{background:#0d1117}}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;color:var(--ink);
max-width:1100px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.soft{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:.8rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.7rem .9rem}
.card b{display:block;font-size:1.35rem}
.bar{display:flex;height:14px;border-radius:7px;overflow:hidden;background:var(--line)}
.bar i{display:block}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
details summary{cursor:pointer}
""".strip()
_SHADES = {"compute": "#2f74d0", "memory": "#b7701b", "launch": "#6b7683", "waiting": "#c4473f"}


def plan_page(plan: Plan, simulation: Simulation) -> str:
    """The page of a plan and its simulation."""
    title = f"{plan.model.spec} on {plan.cluster.spec}"
    body = "\n".join(
        (
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft">{escape(_subtitle(plan, simulation))}</p>',
            _cards(plan, simulation),
            _bounds(simulation),
            "<h2>Timeline of one step</h2>",
            f'<div class="scroll">{timeline_svg(simulation.timeline, width=1060)}</div>',
            "<h2>Slowest ops on one device</h2>",
            _slowest(simulation),
            "<h2>How every op is split</h2>",
            _splits(plan),
            f'<p class="soft">{escape(_origin(plan))}</p>',
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · partita</title><style>{_STYLE}</style></head>"
        f"<body>\n{body}\n</body></html>\n"
    )


def _subtitle(plan: Plan, simulation: Simulation) -> str:
    job = f"training with {plan.model.optimizer}" if plan.model.training else "inference"
    parameters = units.count(simulation.workload.graph.num_parameters)
    return (
        f"{parameters} parameters, {job}, batch {plan.model.batch}, {plan.model.dtype}; "
        f"{plan.cluster.num_devices} devices as {plan.stages[0].mesh}; {plan.origin.method}"
    )


def _cards(plan: Plan, simulation: Simulation) -> str:
    step = simulation.step_s
    bound = plan.prediction.lower_bound_s
    gap = 1 - bound / step if step else 0.0
    peak, capacity = max(simulation.peak_bytes), min(simulation.capacity_bytes)
    rate = plan.model.batch / step if step else 0.0
    cards = (
        ("step", units.seconds(step), f"{rate:,.0f} samples/s"),
        ("from optimal", f"≤ {gap:.1%}", f"no split below {units.seconds(bound)}"),
        ("of peak arithmetic", f"{simulation.utilisation:.0%}", "of all devices"),
        ("memory", units.size(peak), f"of {units.size(capacity)} per device"),
        (
            "communication",
            units.seconds(simulation.communication_s),
            f"{units.seconds(max(0.0, simulation.exposed_s))} waited for",
        ),
    )  # fmt: skip
    inner = "".join(
        f'<div class="card"><span class="soft">{escape(name)}</span><b>{escape(value)}</b>'
        f'<span class="soft">{escape(note)}</span></div>'
        for name, value, note in cards
    )
    return f'<div class="cards">{inner}</div>'


def _bounds(simulation: Simulation) -> str:
    bounds = simulation.bounds()
    total = sum(bounds.values()) or 1.0
    bars = "".join(
        f'<i style="width:{seconds / total:.3%};background:{_SHADES[name]}" '
        f'title="{name} {seconds / total:.1%}"></i>'
        for name, seconds in bounds.items()
    )
    words = " · ".join(f"{name} {seconds / total:.0%}" for name, seconds in bounds.items())
    return f'<h2>What bounds it</h2><div class="bar">{bars}</div><p class="soft">{words}</p>'


def _slowest(simulation: Simulation) -> str:
    total = sum(op.cost.seconds for op in simulation.ops) or 1.0
    rows = [op_row(group, total) for group in slowest_groups(simulation.ops, MOST_OPS)]
    return _table(OP_HEADER, rows, numbers=(3, 4, 5, 7))


def _splits(plan: Plan) -> str:
    stage = plan.stages[0]
    header = ("op", *map(str, stage.mesh.axes), "parameters")
    rows = [
        (split.op, *(dim or "–" for dim in split.dims), KEPT[split.sharded])
        for split in stage.splits[:MOST_SPLITS]
    ]
    left = len(stage.splits) - len(rows)
    more = f'<p class="soft">{left:,} more ops are in the plan file.</p>' if left > 0 else ""
    return (
        f"<details><summary>{len(stage.splits):,} ops, the loop dim each mesh axis splits"
        f"</summary>{_table(header, rows)}{more}</details>"
    )


def _origin(plan: Plan) -> str:
    origin = plan.origin
    return (
        f"{origin.status}: {origin.why}. Found in {units.seconds(origin.seconds)} by "
        f"partita {origin.version}, seed {origin.seed}."
    )


def _table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], numbers: tuple[int, ...] = ()
) -> str:
    def cells(tag: str, row: tuple[str, ...]) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in numbers else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    head = f"<tr>{cells('th', header)}</tr>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{head}{body}</table></div>'
