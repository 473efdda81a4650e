"""One self-contained HTML page for a plan: summary, timeline, splits, slowest ops, offline.

Every name is escaped, so that whatever a model or machine is called shows as text.
"""

import base64
import math
from collections.abc import Sequence
from html import escape

from partita import units
from partita.graph.backward import forward_part
from partita.graph.draw import to_svg
from partita.jobs.cost_tree import cost_tree
from partita.jobs.idle import IdleAccount, bound_gap, idle_account
from partita.jobs.measured_lanes import MeasuredLane, measured_lanes
from partita.jobs.memory_parts import memory_parts
from partita.jobs.other_orders import other_orders
from partita.jobs.run_trace import RankTrace
from partita.jobs.simulate import Simulation, slowest_groups
from partita.jobs.traffic import HiddenShare, hidden_share, sent
from partita.meaning import Purpose
from partita.plans import Plan, Progress
from partita.report.charts import ChartLine, line_chart
from partita.report.html_parts import cards, document, folded, legend, page_script, table
from partita.report.lanes import alike
from partita.report.live_timeline import (
    TIMELINE_STYLE,
    TimelineExtras,
    live_timeline,
    timeline_script,
)
from partita.report.page_links import links_section
from partita.report.page_memory import memory_section
from partita.report.page_model import model_section, roofline_section
from partita.report.page_time import time_section
from partita.report.page_tried import tried_section
from partita.report.palette import hatch
from partita.report.planned import STAGE_HEADER, stage_rows
from partita.report.summary import (
    KEPT,
    OP_HEADER,
    arrangement,
    batch_text,
    bound_shares,
    op_row,
    throughput,
    types_text,
)
from partita.timeline import Timeline

MOST_STAGES = 64
LONGEST_S = 1e12  # of what a chart of the search shows
MOST_SPLITS = 400
MOST_OPS = 25
MOST_BOXES = 160  # of the model, before modules are folded

_STYLE = f"""
.bar{{display:flex;height:18px;border-radius:4px;overflow:hidden;background:var(--line)}}
.bar i{{display:block}}
{TIMELINE_STYLE}
.model{{max-height:36rem;overflow:auto;border:1px solid var(--line);border-radius:8px}}
.model svg{{display:block;margin:auto}}
.chip{{color:#fff;border-radius:9px;padding:.05rem .5rem;font-size:.8rem;display:inline-block}}
.chip.plain{{color:var(--ink);border:1px solid var(--line)}}
.tree{{font-size:.9rem;max-height:30rem;overflow:auto;border:1px solid var(--line);
border-radius:8px;padding:.4rem .8rem}}
.tree details{{margin-left:1.1rem}}.tree>details{{margin-left:0}}
.tree p{{margin:.1rem 0 .1rem 1.1rem}}.tree>p{{margin-left:0}}.tree summary{{cursor:pointer}}
.line{{display:inline-flex;flex-wrap:wrap;gap:0 .4rem;align-items:baseline;vertical-align:top;
width:calc(100% - 1.3rem)}}.tree p .line{{margin-left:1.2rem}}
.tree .n{{margin-left:auto;font-variant-numeric:tabular-nums;font-size:.85rem}}
.share{{display:inline-block;height:.6em;background:var(--soft);border-radius:2px}}
input[type=search]{{font:inherit;color:var(--ink);background:var(--card);
border:1px solid var(--line);border-radius:6px;padding:.15rem .55rem}}
@media print{{.tree,.model{{max-height:none;overflow:visible}}
.model svg{{max-width:100%;max-height:245mm;height:auto;width:auto}}.fig{{min-width:0!important}}
.timeline canvas{{height:auto!important}}}}
""".strip()
_SHADES = (("#2f74d0", 0), ("#a5650f", 3), ("#6b7683", 4), ("#c4473f", 2))  # of what bounds a step


def plan_page(plan: Plan, simulation: Simulation, traces: tuple[RankTrace, ...] = ()) -> str:
    """The page of a plan and its simulation; with traces of a run, beside what was measured."""
    title = f"{plan.model.spec} on {plan.cluster.spec}"
    idle = idle_account(simulation.timeline)
    hidden = hidden_share(simulation.timeline)
    parts = memory_parts(simulation)
    measured = measured_lanes(plan, simulation, traces) if traces else ()
    extras = TimelineExtras(idle, parts, measured)
    gap = bound_gap(idle, _bound_of_step(plan, simulation))
    body = "\n".join(
        (
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft">{escape(_subtitle(plan, simulation))}</p>',
            _cards(plan, simulation, idle, hidden),
            _assumptions(simulation),
            time_section(idle, gap, among="plan of its space"),
            "<h2>Timeline of one step</h2>",
            live_timeline(simulation.timeline, extras),
            _drawn(simulation),
            _measured_note(simulation, measured),
            _bounds(simulation),
            *_inside(simulation),
            memory_section(simulation, parts),
            *_search(plan, simulation),
            *_stages(simulation),
            model_section(cost_tree(simulation)),
            _model(plan, simulation),
            roofline_section(simulation),
            _slowest(simulation),
            links_section(simulation.cluster, sent(simulation.timeline.program), hidden),
            "<h2>How every op is split</h2>",
            _splits(plan, simulation),
            f'<p class="soft">{escape(_origin(plan))}</p>',
            timeline_script(),
            page_script(),
        )
    )
    return document(title, _STYLE, body)


def _bound_of_step(plan: Plan, simulation: Simulation) -> float:
    """The bound of one step: what is known of steady state bounds a step as well."""
    return min(max(0.0, plan.prediction.lower_bound_s), simulation.step_s)


def _assumptions(simulation: Simulation) -> str:
    """What the prediction rests on, in lines."""
    workload = simulation.workload
    how = {
        "graph": "kernels start from a CUDA graph; the host costs nothing",
        "eager": "PyTorch op by op; the host starts every kernel",
        "compiled": "chains of cheap ops are fused; the host starts what is left",
    }[workload.execution]
    lines = [f"execution {workload.execution}: {how}", f"types: {types_text(workload)}"]
    for record in simulation.physics_sets:
        known = record.physics
        own = "fitted or measured for this kind" if record.own else "taken from a kind most like it"
        lines.append(
            f"{record.kind} ({own}): products reach {known.products:.0%} of the peak, memory "
            f"{known.memory:.0%}, links {known.inside:.0%} inside and {known.across:.0%} between "
            f"nodes; a collective costs at least {units.seconds(known.inside_s)}; interference "
            f"{known.interference:.0%}; measured runs lie within a factor of "
            f"{math.exp(1.2816 * record.spread):.2f} (80 %)"
        )
    lines.append(
        "memory: what the program holds and the workspace of drivers and libraries; "
        "fragmentation is not counted; 80 % of published peaks lie within 6 %"
    )
    lines.append("all devices of a kind are equally fast, and nothing else runs on them")
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return folded("what this prediction assumes", f"<ul>{items}</ul>")


def _subtitle(plan: Plan, simulation: Simulation) -> str:
    job = f"training with {plan.model.optimizer}" if plan.model.training else "inference"
    parameters = units.count(simulation.workload.graph.num_parameters)
    return (
        f"{parameters} parameters, {job}, {batch_text(simulation.workload)}, {plan.model.dtype}; "
        f"{simulation.num_devices} devices as {arrangement(simulation)}; {plan.origin.method}"
    )


def _cards(plan: Plan, simulation: Simulation, idle: IdleAccount, hidden: HiddenShare) -> str:
    step = simulation.step_s
    steady = plan.prediction.interval_s is not None
    objective = simulation.interval_s if steady else step
    bound = plan.prediction.lower_bound_s
    gap = 1 - bound / objective if objective else 0.0
    peak, capacity = simulation.fullest
    rate = throughput(simulation, objective)
    likely = "80 % interval " + " to ".join(map(units.seconds, simulation.likely_step_s))
    mfu = " to ".join(f"{part:.0%}" for part in simulation.likely_mfu)
    memory = " to ".join(map(units.size, simulation.likely_peak_bytes))
    every = f"a batch every {units.seconds(objective)}, " if steady else ""
    figures = (
        ("step (predicted)", units.seconds(step), f"{likely}; {every}{rate}"),
        ("from optimal", f"≤ {gap:.1%}",
         f"no plan of its space below {units.seconds(bound)} on this cost model"),
        ("MFU", f"{simulation.mfu:.0%}", f"{mfu} of the peak FLOP/s of all devices"),
        ("memory", units.size(peak), f"{memory} of {units.size(capacity)} per device"),
        _waiting_card(simulation, idle),
        *_overlap_card(hidden, len(idle.lanes)),
    )  # fmt: skip
    ranges = {
        "step (predicted)": (step, *simulation.likely_step_s),
        "MFU": (simulation.mfu, *simulation.likely_mfu),
        "memory": (peak, *simulation.likely_peak_bytes),
    }
    return cards(figures, ranges)


def _overlap_card(hidden: HiddenShare, num_rows: int) -> tuple[tuple[str, str, str], ...]:
    """How much of all communication is hidden; nothing where nothing is sent."""
    if not hidden.sending_s > 0:
        return ()
    each = units.seconds(hidden.sending_s / max(1, num_rows))
    note = f"of communication runs beside computing ({each} a device, collectives included)"
    return (("overlap", f"{hidden.share:.0%}", note),)


def _waiting_card(simulation: Simulation, idle: IdleAccount) -> tuple[str, str, str]:
    """What keeps devices from computing; of a pipeline between its blocks, and inside of them."""
    sent = units.seconds(simulation.communication_s)
    if simulation.num_stages > 1:
        bubble = simulation.bubble
        inside = max(0.0, 1 - idle.mean_busy_s / (idle.step_s or 1.0) - bubble)
        note = f"the busiest link is in use for {sent}"
        if inside >= 0.005:
            note = f"and {inside:.0%} exposed communication inside stages; {note}"
        return "bubble", f"{bubble:.0%}", note
    exposed = units.seconds(max(0.0, simulation.exposed_s))
    return "exposed communication", exposed, f"of {sent} on the busiest device"


def _bounds(simulation: Simulation) -> str:
    shares = bound_shares(simulation)
    bars = "".join(
        f'<i style="width:{share:.3%};background:{hatch(shade, pattern)}" '
        f'title="{name} {share:.1%}"></i>'
        for (name, share), (shade, pattern) in zip(shares, _SHADES, strict=True)
    )
    words = [
        (f"{name} {share:.0%}", shade, pattern)
        for (name, share), (shade, pattern) in zip(shares, _SHADES, strict=True)
    ]
    return (
        '<h3>What bounds the busiest device</h3><div class="bar" role="img" '
        f'aria-label="what bounds the busiest device">{bars}</div>{legend(words)}'
    )


def _drawn(simulation: Simulation) -> str:
    """Whom the rows of the timeline stand for, where that is more than their names say."""
    program = simulation.timeline.program
    devices = [n for n, lane in enumerate(program.lanes) if lane.kind == "device"]
    rows = len(alike(simulation.timeline, devices))
    if rows >= simulation.num_devices:
        return ""
    who = "a row stands for devices that do the same"
    if simulation.is_pipelined:
        who = "a row stands for devices that work together"
    elif len(devices) < simulation.num_devices:
        who = "the first of each kind is its representative rank, the others do the same"
    many = f"{simulation.num_devices:,} devices in {rows:,} row{'s' * (rows > 1)}"
    return f'<p class="soft">{many}: {who}.</p>'


def _measured_note(simulation: Simulation, lanes: Sequence[MeasuredLane]) -> str:
    """How long the measured step takes, beside the predicted one."""
    longest = max((float(lane.end.max()) for lane in lanes if lane.end.size), default=0.0)
    if not longest > 0:
        return ""
    ratio = longest / simulation.step_s if simulation.step_s else math.inf
    words = f"Measured lanes take {units.seconds(longest)}, {ratio:.3g} times the predicted step."
    if not 0.5 <= ratio <= 2:
        words += ' "one length" draws both equally long.'
    return f'<p class="soft">{escape(words)}</p>'


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
    inner = Timeline(body.program, body.start, body.end)
    extras = TimelineExtras(idle_account(inner))
    return (
        f"<h3>Inside the blocks of {escape(name)}</h3>",
        '<p class="soft">One micro-batch of the stage that takes longest, alone: its ops and '
        "collectives.</p>",
        live_timeline(inner, extras, f"one micro-batch of {name}"),
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
    return folded("the graph of its ops by stage", f'<div class="model scroll">{picture}</div>')


def _slowest(simulation: Simulation) -> str:
    total = sum(op.cost.seconds for op in simulation.ops) or 1.0
    rows = [op_row(group, total) for group in slowest_groups(simulation.ops, MOST_OPS)]
    shown = table(OP_HEADER, rows, numbers=(3, 4, 5, 7))
    return folded("the slowest ops on one device", shown)


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


def _search(plan: Plan, simulation: Simulation) -> tuple[str, ...]:
    """How the search went, and what else it tried; nothing where the plan does not say."""
    drawn = tried_section(plan, simulation, other_orders(simulation))
    sections: list[str] = []
    if drawn or plan.origin.alternatives:
        sections += ["<h2>What else was tried</h2>", drawn]
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
        shown = table(header, rows, numbers=(2, 3, 4))
        sections.append(folded(f"all {len(rows)} with why not", shown))
    if plan.origin.history:
        picture = f'<div class="scroll">{_progress(plan)}</div>'
        sections.append(folded("how the search went", picture))
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
