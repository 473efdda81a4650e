"""One self-contained HTML page for a plan: summary, timeline, splits, slowest ops, offline.

Every name is escaped, so that whatever a model or machine is called shows as text.
"""

import base64
from html import escape

from partita import units
from partita.graph.backward import forward_part
from partita.graph.draw import to_svg
from partita.jobs.simulate import Simulation, slowest_groups
from partita.meaning import Purpose
from partita.plans import Plan, Progress
from partita.report.charts import ChartLine, line_chart
from partita.report.html_parts import cards, document, table
from partita.report.live_timeline import live_timeline, timeline_colors, timeline_script
from partita.report.planned import STAGE_HEADER, stage_rows
from partita.report.summary import (
    KEPT,
    OP_HEADER,
    arrangement,
    bound_shares,
    op_row,
    throughput,
)
from partita.timeline import Timeline

MOST_STAGES = 64
LONGEST_S = 1e12  # of what a chart of the search shows
MOST_SPLITS = 400
MOST_OPS = 25
MOST_BOXES = 160  # of the model, before modules are folded

_STYLE = """
.bar{display:flex;height:14px;border-radius:7px;overflow:hidden;background:var(--line)}
.bar i{display:block}
details summary{cursor:pointer}
.timeline{position:relative;--held:#8250df}
.timeline canvas{display:block;width:100%;touch-action:pan-y}
.timeline canvas:focus-visible{outline:2px solid var(--k0);outline-offset:2px}
.tools{display:flex;flex-wrap:wrap;gap:.4rem;align-items:center;margin-bottom:.5rem;
font-size:.85rem}
.tools button{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:.15rem .55rem;cursor:pointer}
.tools button[aria-pressed=false]{opacity:.55}.tools [data-critical][aria-pressed=true]{
border-color:var(--ink)}
.tools i{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.4em}
.tip{position:absolute;pointer-events:none;background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:.3rem .6rem;font-size:.82rem;max-width:30rem;overflow-wrap:anywhere;
box-shadow:0 2px 8px #0003;z-index:1}
.tip div:first-child{font-weight:600}
.model{max-height:36rem;overflow:auto;border:1px solid var(--line);border-radius:8px}
.model svg{display:block;margin:auto}
""".strip()
_SHADES = ("#2f74d0", "#b7701b", "#6b7683", "#c4473f")  # of what bounds a step


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
            live_timeline(simulation.timeline),
            _drawn(simulation),
            *_inside(simulation),
            *_stages(simulation),
            "<h2>The model by stage</h2>",
            _model(plan, simulation),
            "<h2>Slowest ops on one device</h2>",
            _slowest(simulation),
            "<h2>How every op is split</h2>",
            _splits(plan, simulation),
            *_search(plan),
            f'<p class="soft">{escape(_origin(plan))}</p>',
            timeline_script(),
        )
    )
    return document(title, f"{_STYLE}\n.timeline{{{timeline_colors()}}}", body)


def _subtitle(plan: Plan, simulation: Simulation) -> str:
    job = f"training with {plan.model.optimizer}" if plan.model.training else "inference"
    parameters = units.count(simulation.workload.graph.num_parameters)
    return (
        f"{parameters} parameters, {job}, global batch {plan.model.batch}, {plan.model.dtype}; "
        f"{simulation.num_devices} devices as {arrangement(simulation)}; {plan.origin.method}"
    )


def _cards(plan: Plan, simulation: Simulation) -> str:
    step = simulation.step_s
    in_a_row = plan.prediction.interval_s is not None
    objective = simulation.interval_s if in_a_row else step
    bound = plan.prediction.lower_bound_s
    gap = 1 - bound / objective if objective else 0.0
    peak, capacity = simulation.fullest
    rate = throughput(simulation, objective)
    likely = "80 % interval " + " to ".join(map(units.seconds, simulation.likely_step_s))
    mfu = " to ".join(f"{part:.0%}" for part in simulation.likely_mfu)
    memory = " to ".join(map(units.size, simulation.likely_peak_bytes))
    every = f"a batch every {units.seconds(objective)}, " if in_a_row else ""
    figures = (
        ("step (predicted)", units.seconds(step), f"{likely}; {every}{rate}"),
        ("from optimal", f"≤ {gap:.1%}",
         f"no plan of its space below {units.seconds(bound)} on this cost model"),
        ("MFU", f"{simulation.mfu:.0%}", f"{mfu} of the peak FLOP/s of all devices"),
        ("memory", units.size(peak), f"{memory} of {units.size(capacity)} per device"),
        _waiting_card(simulation),
    )  # fmt: skip
    return cards(figures)


def _waiting_card(simulation: Simulation) -> tuple[str, str, str]:
    """What keeps devices from computing."""
    sent = units.seconds(simulation.communication_s)
    if simulation.is_pipelined:
        return "bubble", f"{simulation.bubble:.0%}", f"sends between stages take {sent}"
    exposed = units.seconds(max(0.0, simulation.exposed_s))
    return "exposed communication", exposed, f"of {sent} in all"


def _bounds(simulation: Simulation) -> str:
    shares = bound_shares(simulation)
    bars = "".join(
        f'<i style="width:{share:.3%};background:{shade}" title="{name} {share:.1%}"></i>'
        for (name, share), shade in zip(shares, _SHADES, strict=True)
    )
    words = " · ".join(f"{name} {share:.0%}" for name, share in shares)
    return f'<h2>What bounds it</h2><div class="bar">{bars}</div><p class="soft">{words}</p>'


def _drawn(simulation: Simulation) -> str:
    """Whom the rows of the timeline stand for, where that is more than their names say."""
    rows = sum(lane.kind == "device" for lane in simulation.timeline.program.lanes)
    if rows >= simulation.num_devices:
        return ""
    who = "a row stands for devices that work together"
    if not simulation.is_pipelined:
        who = "the first of each kind is its representative rank, the others do the same"
    many = f"{simulation.num_devices:,} devices in {rows:,} row{'s' * (rows > 1)}"
    return f'<p class="soft">{many}: {who}.</p>'


def _inside(simulation: Simulation) -> tuple[str, ...]:
    """The blocks of the stage that takes longest, op by op; one stage that runs once is that."""
    program = simulation.timeline.program
    stages = {}  # body -> its stage
    for work in program.works:
        if work.body >= 0 and work.purpose is Purpose.COMPUTE:
            stages[work.body] = work.stage
    if not stages:
        return ()
    longest = max(stages, key=lambda number: float(program.bodies[number].end.max()))
    body = program.bodies[longest]
    name = simulation.stages[stages[longest]].name
    return (
        f"<h2>Inside the blocks of {escape(name)}</h2>",
        '<p class="soft">One micro-batch of the stage that takes longest, alone: its ops and '
        "collectives.</p>",
        live_timeline(Timeline(body.program, body.start, body.end)),
    )


def _stages(simulation: Simulation) -> tuple[str, ...]:
    """Who runs what; of one stage alone the lines above say it all."""
    if len(simulation.stages) < 2:
        return ()
    shown = table(STAGE_HEADER, stage_rows(simulation, MOST_STAGES), numbers=(3,))
    left = len(simulation.stages) - MOST_STAGES
    more = f'<p class="soft">{left:,} more stages are in the plan file.</p>' if left > 0 else ""
    return "<h2>The stages</h2>", shown + more


def _model(plan: Plan, simulation: Simulation) -> str:
    """The forward graph, coloured by stage; hover tells shapes and splits."""
    stage_of, labels = {}, {}
    for stage in plan.stages:
        for split in stage.splits:
            stage_of[split.op] = stage.name
            cut = [
                f"{dim} / {axis.size}"
                for dim, axis in zip(split.dims, stage.mesh.axes, strict=True)
                if dim
            ]
            labels[split.op] = ", ".join(cut) or "whole"
    forward = forward_part(simulation.workload.graph)
    picture = to_svg(forward, stage_of, labels, max_nodes=MOST_BOXES)
    return f'<div class="model scroll">{picture}</div>'


def _slowest(simulation: Simulation) -> str:
    total = sum(op.cost.seconds for op in simulation.ops) or 1.0
    rows = [op_row(group, total) for group in slowest_groups(simulation.ops, MOST_OPS)]
    return table(OP_HEADER, rows, numbers=(3, 4, 5, 7))


def _splits(plan: Plan, simulation: Simulation) -> str:
    header = ("op", "stage", "split by", "parameters")
    graph = simulation.workload.graph
    learns = {
        op.name
        for op in graph.ops
        if any(graph.tensor(name).role == "parameter" for name in op.inputs)
    }
    rows = [
        (
            split.op,
            stage.name,
            " x ".join(dim or "–" for dim in split.dims),
            KEPT[split.zero] if split.op in learns else "",
        )
        for stage in plan.stages
        for split in stage.splits
    ]
    total, rows = len(rows), rows[:MOST_SPLITS]
    left = total - len(rows)
    more = f'<p class="soft">{left:,} more ops are in the plan file.</p>' if left > 0 else ""
    return (
        f"<details><summary>{total:,} ops, the loop dim each mesh axis splits"
        f"</summary>{table(header, rows)}{more}</details>"
    )


def _search(plan: Plan) -> tuple[str, ...]:
    """How the search went, and what else it tried; nothing where the plan does not say."""
    sections: list[str] = []
    if plan.origin.history:
        sections += ["<h2>The search</h2>", f'<div class="scroll">{_progress(plan)}</div>']
    if plan.origin.alternatives:
        best = plan.prediction.objective_s or 1.0
        rows = [
            (
                other.name,
                other.arrangement,
                units.seconds(other.objective_s),
                f"x{other.objective_s / best:.2f}",
                units.size(other.peak_memory_bytes),
                other.why,
            )
            for other in plan.origin.alternatives
        ]
        what = "step" if plan.prediction.interval_s is None else "steady state"
        header = ("found by", "plan", what, "", "memory", "why not")
        sections += ["<h2>What else was tried</h2>", table(header, rows, numbers=(2, 3, 4))]
    return tuple(sections)


def _is_sensible(at: Progress) -> bool:
    """Can it be drawn? Plan files may say anything."""
    return all(
        0 <= value < LONGEST_S for value in (at.seconds, at.step_s, at.lower_bound_s) if value
    )


def _progress(plan: Plan) -> str:
    last = Progress(
        max([plan.origin.seconds, *(at.seconds for at in plan.origin.history)]),
        plan.prediction.objective_s,
        plan.prediction.lower_bound_s,
    )
    history = [at for at in (*plan.origin.history, last) if _is_sensible(at)]
    steps = [(at.seconds, at.step_s) for at in history if at.step_s is not None]
    bounds = [(at.seconds, at.lower_bound_s) for at in history if at.lower_bound_s is not None]
    lines = [
        ChartLine("best plan", tuple((x, y * 1e3) for x, y in steps), steps=True),
        ChartLine("lower bound", tuple((x, y * 1e3) for x, y in bounds), dashed=True, steps=True),
    ]
    drawn = [line for line in lines if line.points]
    if not drawn:
        return ""
    chart = line_chart("best plan and bound over time", drawn, "seconds of search", "step, ms")
    # As an image: styles inside one inline picture would reach into the others.
    data = base64.b64encode(chart.encode()).decode()
    return f'<img alt="best plan and bound over time" src="data:image/svg+xml;base64,{data}">'


def _origin(plan: Plan) -> str:
    origin = plan.origin
    return (
        f"{origin.status}: {origin.why}. Found in {units.seconds(origin.seconds)} by "
        f"partita {origin.version}, seed {origin.seed}."
    )
