"""The part of a plan's page on what else was tried: times, memory, other orders."""

from collections.abc import Sequence
from html import escape

from partita import units
from partita.costs.uncertainty import around
from partita.jobs.other_orders import OtherOrder
from partita.jobs.pareto import pareto_front
from partita.jobs.simulate import Simulation
from partita.plans import Plan
from partita.report.figures import Mark, figure, interval_bars, linear_axes, scatter
from partita.report.html_parts import folded
from partita.report.palette import CAUSE_COLORS, CAUSE_PATTERNS, svg_patterns
from partita.report.tasks import CATEGORIES, COLORS, categories

LONGEST_S = 1e12  # of what is drawn: plan files may say anything
MOST_ROWS = 24
LANE, WIDE, LEFT = 13, 1060, 150
MOST_LANES = 16  # of a small timeline
MOST_TASKS = 6000


def tried_section(plan: Plan, simulation: Simulation, orders: Sequence[OtherOrder]) -> str:
    """Bars with intervals, the Pareto front to choose from, the same stages in other orders."""
    return _alternatives(plan, simulation) + _orders(simulation, orders)


def _alternatives(plan: Plan, simulation: Simulation) -> str:
    """Plans by (name, seconds, bytes, why); the chosen one first."""
    chosen = (
        f"chosen: {simulation.arrangement}", plan.prediction.objective_s,
        max(plan.prediction.peak_memory_bytes, default=0.0), "the plan of this page",
    )  # fmt: skip
    plans = [chosen] + [
        (
            f"{other.name}: {other.arrangement}",
            other.objective_s,
            other.peak_memory_bytes,
            other.why,
        )
        for other in plan.origin.alternatives
    ]
    plans = [one for one in plans if 0 < one[1] < LONGEST_S and 0 <= one[2] < 2.0**60]
    if len(plans) < 2:
        return ""
    best = plans[0][1]
    bars = []
    for name, seconds, _, _ in plans[:MOST_ROWS]:
        low, high = around(seconds, simulation.spread)
        note = f"{units.seconds(seconds)}, x{seconds / best:.2f}"
        bars.append((name, seconds * 1e3, low * 1e3, high * 1e3, note))
    what = "step" if plan.prediction.interval_s is None else "steady state"
    bound = plan.prediction.lower_bound_s * 1e3
    return (
        "<h3>On one axis</h3>"
        + interval_bars(f"{what} of all plans", bars, f"{what}, ms; 80 % intervals", bound)
        + _front(plans, what)
    )


def _front(plans: Sequence[tuple[str, float, float, str]], what: str) -> str:
    """Time against memory: what is on the front is a square; choosing a mark tells of it."""
    points = [(seconds, size) for _, seconds, size, _ in plans]
    front = pareto_front(points)
    marks = [
        Mark(
            seconds * 1e3, size / 2**30,
            "#2f74d0" if number == 0 else "#2b8453" if number in front else "#6b7683",
            f"{name}: {units.seconds(seconds)}, {units.size(size)}",
            8 if number == 0 else 6,
            "diamond" if number == 0 else "square" if number in front else "circle",
            str(number),
        )
        for number, (name, seconds, size, _) in enumerate(plans)
    ]  # fmt: skip
    axes = linear_axes([mark.x for mark in marks], [mark.y for mark in marks])
    path = "M" + "L".join(
        f"{axes[0].at(marks[n].x):.1f} {axes[1].at(marks[n].y):.1f}" for n in front
    )
    line = f'<path class="a" d="{path}" stroke-dasharray="3 3"/>'
    told = "".join(
        f'<li data-picked="{number}"{"" if number == 0 else " hidden"}><b>{escape(name)}</b><br>'
        f"{units.seconds(seconds)}, {units.size(size)} on the fullest device"
        f"{' · on the front' if number in front else ''}<br>{escape(why)}</li>"
        for number, (name, seconds, size, why) in enumerate(plans)
    )
    return (
        "<h3>Time against memory</h3>"
        + scatter(
            "plans by time and memory", marks, f"{what}, ms", "memory of the fullest device, GiB",
            [line], axes,
        )
        + '<p class="soft">◆ the plan of this page, ■ others that no plan beats in both, ● the '
        f'rest. Choose a mark to read of it.</p><ul class="picked">{told}</ul>'
    )  # fmt: skip


def _orders(simulation: Simulation, orders: Sequence[OtherOrder]) -> str:
    """The same stages in other orders, one small timeline under the other, on one axis."""
    if len(orders) < 2:
        return ""
    longest = max(order.simulation.step_s for order in orders)
    parts = [svg_patterns(CAUSE_COLORS, CAUSE_PATTERNS, "idle")]
    top = 0.0
    for order in orders:
        drawn, top = _small(order, longest, top, order.simulation is simulation)
        parts += drawn
    names = ", ".join(
        f"{order.title} {units.seconds(order.simulation.step_s)} "
        f"(bubble {order.simulation.bubble:.0%}, "
        f"{units.size(max(order.simulation.peak_bytes))})"
        for order in orders
    )
    return folded(
        f"the same stages in {len(orders)} orders, on one axis",
        f"{figure('the same stages in other orders', parts, top + 4)}"
        f'<p class="soft">{escape(names)}. Hatched: idle.</p>',
        is_open=True,
    )


def _small(
    order: OtherOrder, longest: float, top: float, is_chosen: bool
) -> tuple[list[str], float]:
    """A timeline of blocks alone; idle time is hatched and told in percent."""
    timeline = order.simulation.timeline
    program = timeline.program
    of = categories(program)
    scale = (WIDE - LEFT - 70) / longest
    mark = " (this plan)" if is_chosen else ""
    parts = [f'<text x="2" y="{top + 14}">{escape(order.title + mark)}</text>']
    parts.append(
        f'<text class="s" x="2" y="{top + 29}">{units.seconds(order.simulation.step_s)}</text>'
    )
    lanes = [n for n, lane in enumerate(program.lanes) if lane.kind == "device"][:MOST_LANES]
    busy = timeline.busy()
    for row, lane in enumerate(lanes):
        y = top + 4 + row * (LANE + 2)
        whole = timeline.makespan * scale
        idle = 1 - float(busy[lane]) / timeline.makespan if timeline.makespan else 0.0
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{whole:.1f}" height="{LANE}" fill="url(#idle0)" '
            f'fill-opacity=".55"><title>{escape(program.lanes[lane].name)}: idle {idle:.1%}'
            "</title></rect>"
        )
        for task in timeline.lane_tasks(lane).tolist()[:MOST_TASKS]:
            x = LEFT + float(timeline.start[task]) * scale
            wide = float(timeline.end[task] - timeline.start[task]) * scale
            label = program.task_label(task)
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(0.2, wide - 0.4):.2f}" height="{LANE}" '
                f'fill="{COLORS[of[task]]}"><title>{escape(CATEGORIES[of[task]])} '
                f"{escape(label.block)}</title></rect>"
            )
            if label.microbatch >= 0 and wide > 9 + 5 * len(str(label.microbatch)):
                parts.append(
                    f'<text class="m w" x="{x + wide / 2:.1f}" y="{y + 10.5}" '
                    f'style="font-size:10px;pointer-events:none">{label.microbatch}</text>'
                )
        parts.append(
            f'<text class="s" x="{LEFT + whole + 6:.1f}" y="{y + 11}" style="font-size:11px">'
            f"{idle:.0%}</text>"
        )
    return parts, top + max(2, len(lanes)) * (LANE + 2) + 14
