"""The part of a plan's page on memory: what fills it over the step, and when it peaks."""

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from partita import units
from partita.jobs.memory_parts import PARTS, MemoryCurves, few_steps, peak_moment
from partita.jobs.simulate import Simulation
from partita.report.axis import tick_text, ticks
from partita.report.figures import WIDTH, figure
from partita.report.html_parts import folded, legend, table
from partita.report.lanes import alike_memories, group_name, ranged
from partita.report.palette import PART_COLORS, PART_PATTERNS, svg_patterns

Scale = Callable[[float], float]  # a value -> its place in the picture
MOST_OTHERS = 7
MOST_STEPS = 300  # of a drawn curve
LEFT, HEIGHT = 86, 190
NEAR = 2  # times the peak: a capacity above that is said and not drawn
WORDS = {
    "parameters": "parameters",
    "states": "optimizer states",
    "workspace": "workspace of drivers and libraries",
    "gradients": "gradients",
    "buffers": "buffers",
    "activations": "activations",
}


def memory_section(simulation: Simulation, parts: Sequence[MemoryCurves]) -> str:
    """The fullest memory drawn and told, the others folded."""
    if not parts:
        return ""
    filled = [
        float(one.held.max()) / max(1.0, one.capacity_bytes) if len(one.times) else 0.0
        for one in parts
    ]
    fullest = max(range(len(parts)), key=lambda i: filled[i])
    one = parts[fullest]
    at_peak = one.at_peak()
    names = [
        (f"{WORDS[part]} {units.size(size)}", PART_COLORS[part], PART_PATTERNS[part])
        for part, size in at_peak.items()
        if size > 0
    ]
    equal = alike_memories(simulation.timeline, range(len(parts)))
    groups = [[parts[memory] for memory in own] for own in equal]
    others = [own for own in groups if one not in own][:MOST_OTHERS]
    more = ""
    if len(parts) > 1:
        header = ("memory", "peak", "of", *(WORDS[part] for part in PARTS))
        rows = [(_name(own), *_row(own[0])) for own in groups]
        more = folded(
            f"all {len(parts):,} memories, each at its peak",
            table(header, rows, range(1, len(header)))
            + "".join(
                f"<h3>{escape(_name(own))}</h3>{_curve(own[0], simulation.step_s)}"
                for own in others
            ),
        )
    return (
        f"<h2>Memory</h2><p>{escape(peak_text(simulation, fullest, one))}</p>"
        f'<svg width="0" height="0" style="position:absolute" aria-hidden="true">'
        f"{svg_patterns(PART_COLORS, PART_PATTERNS, 'part')}</svg>"
        f"{_curve(one, simulation.step_s)}{legend(names)}{more}"
    )


def peak_text(simulation: Simulation, memory: int, parts: MemoryCurves) -> str:
    """When a memory is fullest, what happens then, what fills it."""
    timeline = simulation.timeline
    moment = peak_moment(timeline, memory, parts)
    peak = float(parts.held[parts.peak])
    what = "at the begin of the step" if not moment.moment else f"at {units.seconds(moment.moment)}"
    if moment.task >= 0:
        label = timeline.program.task_label(moment.task)
        number = f" of micro-batch {label.microbatch}" if label.microbatch >= 0 else ""
        what += f", when {label.block} begins ({label.kind.words}{number})"
    share = f" ({peak / parts.capacity_bytes:.0%})" if parts.capacity_bytes else ""
    words = (
        f"{ranged(parts.name)} is fullest: {units.size(peak)} of "
        f"{units.size(parts.capacity_bytes)}{share} {what}."
    )
    held = parts.at_peak()
    if moment.in_flight > 1:
        words += (
            f" {moment.in_flight} micro-batches are under way and hold "
            f"{units.size(held['activations'])} of activations."
        )
    largest = max(held, key=lambda part: held[part])
    if peak > 0:
        words += f" The largest part is {WORDS[largest]}, {held[largest] / peak:.0%}."
    if parts.capacity_bytes and peak > parts.capacity_bytes:
        words += f" {units.size(peak - parts.capacity_bytes)} are missing."
    return words


def _name(parts: Sequence[MemoryCurves]) -> str:
    """Of memories that hold the same all the time."""
    return group_name([own.name for own in parts])


def _row(parts: MemoryCurves) -> tuple[str, ...]:
    held = parts.at_peak()
    return (
        units.size(float(parts.held.max())),
        units.size(parts.capacity_bytes),
        *(units.size(held[part]) for part in PARTS),
    )


def _curve(parts: MemoryCurves, step_s: float) -> str:
    """Parts stacked over time; dashed, the capacity where it is near."""
    few = few_steps(parts, MOST_STEPS)
    held = few.held
    peak = float(held.max()) if len(held) else 0.0
    near = 0 < parts.capacity_bytes < NEAR * peak
    most = max(1.1 * peak, 1.06 * parts.capacity_bytes if near else 0.0) or 1.0
    span = step_s or 1.0
    wide = WIDTH - LEFT - 24

    def x(moment: float) -> float:
        return LEFT + moment / span * wide

    def y(size: float) -> float:
        return 14 + HEIGHT * (1 - size / most)

    drawn = []
    unit, name = next(
        ((2.0**p, n) for p, n in ((40, "TiB"), (30, "GiB"), (20, "MiB")) if most >= 2.0**p),
        (1.0, "B"),
    )
    for tick in ticks(most / unit, 5):
        at = y(tick * unit)
        drawn.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - 24}" y1="{at:.1f}" y2="{at:.1f}"/>')
        drawn.append(
            f'<text class="e s" x="{LEFT - 8}" y="{at + 4:.1f}">{tick_text(tick)} {name}</text>'
        )
    scale, word = next(
        ((s, w) for s, w in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if span >= s), (1e-9, "ns")
    )
    drawn += [
        f'<text class="m s" x="{x(tick * scale):.1f}" y="{HEIGHT + 32}">{tick_text(tick)} '
        f"{word}</text>"
        for tick in ticks(span / scale, 9)
    ]
    base = np.zeros(len(few.times))
    for place, part in enumerate(PARTS):
        top = base + few.parts[part]
        if float(few.parts[part].max(initial=0.0)) > 0:
            drawn.append(_area(few.times.tolist(), base.tolist(), top.tolist(), span, x, y, place))
        base = top
    if len(parts.times):
        drawn += _peak_mark(x(float(parts.times[parts.peak])), y(peak), peak)
    if near:
        at = y(parts.capacity_bytes)
        drawn.append(
            f'<path d="M{LEFT} {at:.1f}H{WIDTH - 24}" stroke="var(--ink)" stroke-dasharray="5 4"/>'
            f'<text class="e" x="{WIDTH - 28}" y="{at - 5:.1f}">'
            f"capacity {units.size(parts.capacity_bytes)}</text>"
        )
    return figure(f"memory of {ranged(parts.name)} over the step, by part", drawn, HEIGHT + 40)


def _peak_mark(x: float, y: float, peak_bytes: float) -> list[str]:
    """The moment of the peak: a line down to the axis, and how much it is."""
    is_right = x > WIDTH - 160
    return [
        f'<path d="M{x:.1f} {y - 8:.1f}V{14 + HEIGHT}" stroke="var(--ink)" stroke-width="1.4" '
        f'stroke-dasharray="3 3"/>',
        f'<text class="{"e" if is_right else ""}" x="{x + (-5 if is_right else 5):.1f}" '
        f'y="{y - 3:.1f}">peak {units.size(peak_bytes)}</text>',
    ]


def _area(
    times: list[float], low: list[float], high: list[float], span: float, x: Scale, y: Scale,
    place: int,
) -> str:  # fmt: skip
    """One part between two curves of steps."""
    points = [f"M{x(times[0]):.1f} {y(high[0]):.1f}"]
    for moment, value in zip(times[1:], high[1:], strict=True):
        points.append(f"H{x(moment):.1f}V{y(value):.1f}")
    points.append(f"H{x(span):.1f}V{y(low[-1]):.1f}")
    points += [f"H{x(times[i]):.1f}V{y(low[i - 1]):.1f}" for i in range(len(times) - 1, 0, -1)]
    points.append(f"H{x(times[0]):.1f}Z")
    title = WORDS[PARTS[place]]
    return f'<path d="{"".join(points)}" fill="url(#part{place})"><title>{title}</title></path>'
