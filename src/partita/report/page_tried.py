"""The part of a plan's page on what else was tried: times, memory, other orders.

Plans that were tried are drawn as timelines under each other on one axis, the chosen one first.
They are drawn from sketches (`partita.timeline`), so that a plan file is all that is needed. What
takes far longer than the chosen plan is cut at the end of the axis and says how long it goes on.

Kinds have lines over their colour, as in all pictures. Here these are strokes, one path for a lane:
thousands of blocks filled with patterns took a browser minutes to print.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from partita import units
from partita.costs.physics import around
from partita.jobs.other_orders import OtherOrder
from partita.jobs.pareto import pareto_front
from partita.jobs.simulate import Simulation, sketch
from partita.plans import Plan
from partita.program import KINDS, Kind
from partita.report.axis import tick_text, ticks
from partita.report.charts import cut
from partita.report.figures import WIDTH, Mark, figure, interval_bars, linear_axes, scatter
from partita.report.html_parts import folded, legend
from partita.report.lanes import group_name, ranged, short_names
from partita.report.palette import CATEGORY_COLORS, CATEGORY_PATTERNS
from partita.report.small_timeline import SmallTimeline, small_timelines
from partita.timeline import WHOLE, LaneSketch, Span

LANE, LEFT, RIGHT = 13, 166, 66
LONGEST = 2.5  # times the chosen plan: what takes longer is cut
LETTERS = 140  # of a title
SPACE = 7.0  # between two lines of a pattern
LONGEST_S = 1e12  # of what is drawn: plan files may say anything
MOST_ROWS = 24


@dataclass(frozen=True)
class TriedTimeline:
    """A plan by its name, how long it takes, a word on it, and what its lanes do."""

    title: str
    step_s: float
    note: str
    lanes: tuple[LaneSketch, ...]


def tried_timelines(label: str, plans: Sequence[TriedTimeline]) -> str:
    """The plans under each other on one axis of time, and what the colours are."""
    own = plans[0].step_s
    longest = max(one.step_s for one in plans if one.step_s <= LONGEST * own)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts, top = list[str](), 18.0
    for one in plans:
        parts += _plan(one, longest, scale, top)
        top += 24 + len(one.lanes) * (LANE + 2)
    at = LEFT + own * scale
    parts.append(
        f'<path d="M{at:.1f} 8V{top}" stroke="var(--ink)" stroke-dasharray="5 4">'
        f"<title>the chosen plan ends: {units.seconds(own)}</title></path>"
    )
    return figure(label, [*_axis(longest, scale, top), *parts], top + 6) + _legend(plans)


def _axis(longest: float, scale: float, bottom: float) -> list[str]:
    size, unit = next(
        ((size, name) for size, name in ((1.0, "s"), (1e-3, "ms")) if longest >= size), (1e-6, "us")
    )
    parts = []
    for tick in ticks(longest / size, 9):
        x = LEFT + tick * size * scale
        parts.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{bottom:.0f}"/>')
        parts.append(f'<text class="m s" x="{x:.1f}" y="10">{tick_text(tick)} {unit}</text>')
    return parts


def _plan(one: TriedTimeline, longest: float, scale: float, top: float) -> list[str]:
    told = f"{one.title}: {one.note}"
    parts = [
        f'<text x="2" y="{top + 13:.0f}">{escape(cut(told, LETTERS))}'
        f"<title>{escape(told)}</title></text>"
    ]
    names = [ranged(lane.name) for lane in one.lanes]
    for place, (lane, short) in enumerate(zip(one.lanes, short_names(names, 26), strict=True)):
        y = top + 19 + place * (LANE + 2)
        whole = group_name([lane.name] + [""] * (lane.num_lanes - 1))
        more = f" +{lane.num_lanes - 1}" if lane.num_lanes > 1 else ""
        parts.append(
            f'<text class="e s" x="{LEFT - 5}" y="{y + 10.5}" style="font-size:11px">'
            f"{escape(short + more)}<title>{escape(whole)}</title></text>"
        )
        parts += _lane(one, lane, y, longest, scale)
    return parts


def _lane(
    one: TriedTimeline, lane: LaneSketch, y: float, longest: float, scale: float
) -> list[str]:
    spans = lane.parts()
    busy = sum(span.end - span.begin for span in spans if span.letter)
    idle = 1 - busy / WHOLE
    seen = min(one.step_s, longest)
    parts = [
        f'<rect x="{LEFT}" y="{y}" width="{seen * scale:.1f}" height="{LANE}" '
        f'fill="var(--line)"><title>{escape(lane.name)}: idle {idle:.1%}</title></rect>'
    ]
    blocks, lines, texts = list[str](), list[str](), list[str]()
    for span in spans:
        x = LEFT + span.begin * one.step_s / WHOLE * scale
        end = LEFT + min(longest, span.end * one.step_s / WHOLE) * scale
        if span.letter and end > x:
            blocks.append(_block(span, x, end, y))
            lines.append(_lines(CATEGORY_PATTERNS[KINDS[span.letter]], x, end, y))
            texts.append(_text(span, x, end, y))
    strokes = f'<path d="{"".join(lines)}" stroke="#fff" stroke-opacity=".45" fill="none"/>'
    parts += [*blocks, strokes if any(lines) else "", *texts]
    note = f"{idle:.0%} idle" if seen == one.step_s else f"→ {units.seconds(one.step_s)}"
    parts.append(
        f'<text class="s" x="{LEFT + seen * scale + 5:.1f}" y="{y + 10.5}" '
        f'style="font-size:11px">{note}</text>'
    )
    return parts


def _block(span: Span, x: float, end: float, y: float) -> str:
    kind = KINDS[span.letter]
    number = f", micro-batch {span.microbatch}" if span.microbatch >= 0 else ""
    gap = 0.6 if number and end - x > 2 else 0.0
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{end - x - gap:.2f}" height="{LANE}" '
        f'fill="{CATEGORY_COLORS[kind]}"><title>{kind.words}{number}</title></rect>'
    )


def _lines(pattern: int, x: float, end: float, y: float) -> str:
    """The lines of a pattern inside a block, as far as they fit into it."""
    if pattern == 4:  # level
        return f"M{x + 1:.1f} {y + LANE / 2}H{end - 1:.1f}" if end - x > 4 else ""
    leans = {1: (0, LANE, LANE), 2: (LANE, 0, LANE), 3: (0, LANE, 0), 5: (0, LANE, LANE)}
    if pattern not in leans:
        return ""
    low, high, wide = leans[pattern]
    count = int((end - x - 2 - wide) / SPACE) + 1
    return "".join(
        f"M{x + 1 + i * SPACE:.1f} {y + high}L{x + 1 + i * SPACE + wide:.1f} {y + low}"
        for i in range(count)
    )


def _text(span: Span, x: float, end: float, y: float) -> str:
    """The letter and micro-batch on a plain patch: white on lines is hard to read."""
    text = span.letter + (str(span.microbatch) if span.microbatch >= 0 else "")
    if end - x <= 8 + 7 * len(text):
        return ""
    patch, middle = 4 + 6.2 * len(text), (x + end) / 2
    return (
        f'<rect x="{middle - patch / 2:.1f}" y="{y + 1}" width="{patch:.1f}" height="{LANE - 2}" '
        f'fill="{CATEGORY_COLORS[KINDS[span.letter]]}" pointer-events="none"/>'
        f'<text class="m w" x="{middle:.1f}" y="{y + 10.5}" '
        f'style="font-size:10px;pointer-events:none">{text}</text>'
    )


def _legend(plans: Sequence[TriedTimeline]) -> str:
    letters = {span.letter for one in plans for lane in one.lanes for span in lane.parts()}
    kinds = [kind for kind in Kind if kind.letter in letters]
    entries = [
        (f"{kind.words} ({kind.letter})", CATEGORY_COLORS[kind], CATEGORY_PATTERNS[kind])
        for kind in kinds
    ]
    return legend([*entries, ("idle", "var(--line)", 0)])


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
