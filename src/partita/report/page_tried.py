"""The part of a plan's page on what else was tried: times, memory, other orders."""

from collections.abc import Sequence
from html import escape

from partita import units
from partita.costs.physics import around
from partita.jobs.other_orders import OtherOrder
from partita.jobs.pareto import pareto_front
from partita.jobs.simulate import Simulation, sketch
from partita.plans import Plan
from partita.report.figures import Mark, interval_bars, linear_axes, scatter
from partita.report.html_parts import folded
from partita.report.small_timeline import SmallTimeline, small_timelines
from partita.report.tried_timelines import TriedTimeline, tried_timelines

LONGEST_S = 1e12  # of what is drawn: plan files may say anything
MOST_ROWS = 24


def tried_section(plan: Plan, simulation: Simulation, orders: Sequence[OtherOrder]) -> str:
    """Bars with intervals, the Pareto front to choose from, the same stages in other orders."""
    return (
        _alternatives(plan, simulation) + _timelines(plan, simulation) + _orders(simulation, orders)
    )


def _alternatives(plan: Plan, simulation: Simulation) -> str:
    """Plans by (name, seconds, bytes, why); the chosen one first."""
    chosen = (
        f"chosen: {simulation.arrangement}", plan.prediction.objective_s,
        simulation.fullest[0], "the plan of this page",
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
            "plans by time and memory", marks[::-1], f"{what}, ms",  # the chosen one on top
            "memory of the fullest device, GiB",
            [line], axes,
        )
        + '<p class="soft">◆ the plan of this page, ■ others that no plan beats in both, ● the '
        f'rest. Choose a mark to read of it.</p><ul class="picked">{told}</ul>'
    )  # fmt: skip


def _timelines(plan: Plan, simulation: Simulation) -> str:
    """What was tried as timelines; nothing for plans of before these were remembered."""
    others = [one for one in plan.origin.alternatives if one.sketch and 0 < one.step_s < LONGEST_S]
    own = sketch(simulation.timeline)
    if not others or not own:
        return ""
    best = simulation.step_s
    peak = units.size(simulation.fullest[0])
    chosen = TriedTimeline(
        f"chosen: {simulation.arrangement}", best, f"{units.seconds(best)}, {peak}", own
    )
    rows = [
        TriedTimeline(
            f"{one.name}: {one.arrangement}",
            one.step_s,
            f"{units.seconds(one.step_s)}, x{one.step_s / best:.2f}; {one.why}",
            one.sketch,
        )
        for one in others[:MOST_ROWS]
    ]
    return folded(
        f"the timelines of these {1 + len(rows)} plans, on one axis",
        tried_timelines("timelines of what was tried", [chosen, *rows])
        + '<p class="soft">One row for devices that do the same, four of those that differ, and '
        "the link that is used most. Dashed: the chosen plan ends. Stages with many ops are drawn "
        "as what they do most of the time.</p>",
        is_open=True,
    )


def _orders(simulation: Simulation, orders: Sequence[OtherOrder]) -> str:
    """The same stages in other orders, one small timeline under the other, on one axis."""
    if len(orders) < 2:
        return ""
    rows = [
        SmallTimeline(
            order.title + (" (this plan)" if order.simulation is simulation else ""),
            units.seconds(order.simulation.step_s),
            order.simulation.timeline,
        )
        for order in orders
    ]
    names = ", ".join(
        f"{order.title} {units.seconds(order.simulation.step_s)} "
        f"(bubble {order.simulation.bubble:.0%}, "
        f"{units.size(order.simulation.fullest[0])})"
        for order in orders
    )
    return folded(
        f"the same stages in {len(orders)} orders, on one axis",
        f"{small_timelines('the same stages in other orders', rows)}"
        f'<p class="soft">{escape(names)}. Hatched: idle.</p>',
        is_open=True,
    )
