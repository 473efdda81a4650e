"""Timelines as papers draw them: blocks with their micro-batch, bubbles hatched and in percent.

Several stand under each other on one axis, so that one sees at once which ends first and why.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from partita.jobs.idle import computing_lanes
from partita.report.axis import tick_text, ticks, time_scale
from partita.report.figures import WIDTH, figure
from partita.report.palette import CAUSE_COLORS, CAUSE_PATTERNS, svg_patterns
from partita.report.tasks import CATEGORIES, COLORS, categories
from partita.timeline import Timeline

LANE, LEFT = 13, 150
MOST_LANES = 16
MOST_TASKS = 2000  # of a lane
LETTERS, MOST_LINES = 24, 2  # of a line at the left, and how many


@dataclass(frozen=True)
class SmallTimeline:
    """A timeline with its name and how long it takes, in words."""

    title: str
    note: str
    timeline: Timeline
    where: str = ""  # another placement than the others have


def small_timelines(label: str, rows: Sequence[SmallTimeline]) -> str:
    """Timelines under each other on one axis."""
    longest = max((row.timeline.makespan for row in rows), default=0.0) or 1.0
    parts = [svg_patterns(CAUSE_COLORS, CAUSE_PATTERNS, "idle")]
    top = 18.0
    for row in rows:
        parts += _drawn(row, longest, top)
        lanes = min(MOST_LANES, len(computing_lanes(row.timeline.program)))
        top += max(2 + bool(row.where), lanes) * (LANE + 2) + 14
    return figure(label, [*_axis(rows, longest, top), *parts], top + 4)


def _axis(rows: Sequence[SmallTimeline], longest: float, bottom: float) -> list[str]:
    """Round moments over all rows; their unit stands at the first."""
    if not rows:
        return []
    size, unit = time_scale(rows[0].timeline.program, longest)
    parts = []
    for tick in ticks(longest / size, 9):
        x = LEFT + tick * size * (WIDTH - LEFT - 70) / longest
        parts.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{bottom:.0f}"/>')
        text = tick_text(tick) if tick else f"{tick_text(tick)} {unit}"
        parts.append(f'<text class="m s" x="{x:.1f}" y="10">{text}</text>')
    return parts


def _drawn(row: SmallTimeline, longest: float, top: float) -> list[str]:
    timeline = row.timeline
    program = timeline.program
    scale = (WIDTH - LEFT - 70) / longest
    parts = [
        f'<text x="2" y="{top + 14}">{escape(row.title)}</text>',
        f'<text class="s" x="2" y="{top + 29}">{escape(row.note)}</text>',
    ]
    parts += [
        f'<text class="s" x="2" y="{top + 43 + 13 * place}" style="font-size:11px">{escape(line)}'
        "</text>"
        for place, line in enumerate(textwrap.wrap(row.where, LETTERS)[:MOST_LINES])
    ]
    busy = timeline.busy()
    for place, lane in enumerate(computing_lanes(program)[:MOST_LANES]):
        y = top + 4 + place * (LANE + 2)
        whole = timeline.makespan * scale
        idle = 1 - float(busy[lane]) / timeline.makespan if timeline.makespan else 0.0
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{whole:.1f}" height="{LANE}" fill="url(#idle0)" '
            f'fill-opacity=".55"><title>{escape(program.lanes[lane].name)}: idle {idle:.1%}'
            "</title></rect>"
        )
        parts += _tasks(timeline, lane, y, scale)
        parts.append(
            f'<text class="s" x="{LEFT + whole + 6:.1f}" y="{y + 11}" style="font-size:11px">'
            f"{idle:.0%}</text>"
        )
    return parts


def _tasks(timeline: Timeline, lane: int, y: float, scale: float) -> list[str]:
    program, of, parts = timeline.program, categories(timeline.program), []
    for task in timeline.lane_tasks(lane).tolist()[:MOST_TASKS]:
        x = LEFT + float(timeline.start[task]) * scale
        wide = float(timeline.end[task] - timeline.start[task]) * scale
        label = program.task_label(task)
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(0.2, wide - 0.4):.2f}" height="{LANE}" '
            f'fill="{COLORS[of[task]]}"><title>{escape(CATEGORIES[of[task]])} '
            f"{escape(label.block)}</title></rect>"
        )
        number = str(label.microbatch) if label.microbatch >= 0 else ""
        text = label.kind.letter + number if wide > 18 + 6 * len(number) else number
        if number and wide > 6 + 6 * len(text):
            parts.append(
                f'<text class="m w" x="{x + wide / 2:.1f}" y="{y + 10.5}" '
                f'style="font-size:10px;pointer-events:none">{text}</text>'
            )
    return parts
