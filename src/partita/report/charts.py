"""Small charts as SVG that stand by themselves: lines, bars, heat maps, points on a diagonal.

Each function takes plain numbers and gives the text of a picture. Every name is escaped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from partita.report.axis import tick_text, ticks
from partita.report.palette import CATEGORY_COLORS

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 78, 170, 44, 56
COLORS = tuple(CATEGORY_COLORS[place] for place in (0, 11, 2, 10, 9, 7, 13, 5, 8, 1, 4, 6))
DASHES = ("", "9 3", "2 3", "9 3 2 3")  # of lines beside each other
_STYLE = (
    "text{font:12px ui-sans-serif,system-ui,Helvetica,Arial,sans-serif;fill:#333}"
    ".t{font-size:14px;font-weight:600}.s{fill:#666}.m{text-anchor:middle}.e{text-anchor:end}"
    ".g{stroke:#e4e7eb}.a{stroke:#9aa3ad}.b{fill:#fff}.k{stroke:#222}.n{fill:#f1f3f5}"
    "@media screen and (prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9aa4af}"
    ".g{stroke:#30363d}.a{stroke:#6e7681}.b{fill:#0d1117}.k{stroke:#e6edf3}.n{fill:#161b22}text.c{fill:#222}}"
)


@dataclass(frozen=True)
class ChartLine:
    """Points joined by a line; `steps` keeps the last value until the next."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    steps: bool = False
    group: str = ""  # lines of one group share a colour and an entry in the legend


@dataclass(frozen=True)
class ChartAxis:
    """Where values lie in a picture, linear or logarithmic."""

    low: float
    high: float
    log: bool
    start: float
    length: float  # negative: upwards
    given: tuple[float, ...] = ()  # ticks, where they are known

    def at(self, value: float) -> float:
        """Where a value lies; at the nearer end if it is outside."""
        low, high, value = (self._scaled(x) for x in (self.low, self.high, value))
        part = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, part)) * self.length

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    def ticks(self) -> list[float]:
        """Round values inside."""
        if self.given:
            return list(self.given)
        if not self.log or self.high < 8 * self.low:
            span = self.high - self.low
            most = min(400, round(7 * self.high / span)) if span > 0 else 2
            return [x for x in ticks(self.high, max(7, most)) if x >= self.low] or [self.low]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1, 2, 5) if last - first <= 2 else (1,)
        every = [m * 10.0**k for k in range(first, last + 1) for m in factors]
        return [x for x in every if self.low * 0.999 <= x <= self.high * 1.001] or [self.low]


def line_chart(
    title: str,
    lines: Sequence[ChartLine],
    x_name: str,
    y_name: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    marks: bool = False,
) -> str:
    """Lines over common axes; the legend stands at the right."""
    points = [point for line in lines for point in line.points]
    if not points:
        return frame(title, ['<text class="s" x="80" y="80">nothing to draw yet</text>'])
    log_x = log_x and min(x for x, _ in points) > 0
    x, y = _axes([p[0] for p in points], [p[1] for p in points], log_x, log_y)
    if marks:
        x = replace(x, given=tuple(sorted({a for a, _ in points})))
    parts = grid(x, y, x_name, y_name)
    groups = list(dict.fromkeys(line.group or line.name for line in lines))
    for line in lines:
        number = groups.index(line.group or line.name)
        color = COLORS[number % len(COLORS)]
        path = _path(line, x, y)
        dash = _dash(number, line.dashed)
        parts.append(
            f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dash}>'
            f"<title>{escape(line.name)}</title></path>"
        )
        if marks or len(line.points) == 1:
            parts += [
                f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="3.4" fill="{color}">'
                f"<title>{escape(line.name)}: {tick_text(a)}, {b:.6g}</title></circle>"
                for a, b in line.points
            ]
    dashed = {line.group or line.name: line.dashed for line in lines}
    parts += _legend(groups, dashed)
    return frame(title, parts)


def bar_chart(
    title: str, rows: Sequence[tuple[str, float, float, float]], x_name: str, bound: float | None
) -> str:
    """A bar per (name, mean, least, largest), with a whisker; a dashed line at the bound."""
    high = max((row[3] for row in rows), default=1.0) * 1.05 or 1.0
    height = TOP + 30 * len(rows) + BOTTOM
    axis = ChartAxis(0.0, high, False, 160.0, WIDTH - 160.0 - 90)
    parts = []
    for tick in axis.ticks():
        at = axis.at(tick)
        parts.append(f'<line class="g" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - 44}"/>')
        parts.append(f'<text class="m s" x="{at:.1f}" y="{height - 28}">{tick_text(tick)}</text>')
    for number, (name, mean, least, most) in enumerate(rows):
        y = TOP + 30 * number + 5
        color = COLORS[number % len(COLORS)]
        parts += [
            f'<text class="e" x="152" y="{y + 14}">{escape(cut(name, 24))}</text>',
            f'<rect x="160" y="{y}" width="{axis.at(mean) - 160:.1f}" height="19" rx="3" '
            f'fill="{color}"/>',
            f'<path d="M{axis.at(least):.1f} {y + 9.5}H{axis.at(most):.1f}" class="k"/>',
            f'<text x="{axis.at(most) + 6:.1f}" y="{y + 14}">{mean:.4g}</text>',
        ]
    if bound:
        at = axis.at(bound)
        parts.append(
            f'<path d="M{at:.1f} {TOP}V{height - 44}" class="k" stroke-dasharray="5 4">'
            f"<title>lower bound {bound:.6g}</title></path>"
            f'<text class="m s" x="{at:.1f}" y="{TOP - 4}">bound</text>'
        )
    parts.append(f'<text class="m s" x="400" y="{height - 8}">{escape(x_name)}</text>')
    return frame(title, parts, height)


def heat_map(
    title: str,
    cells: Sequence[tuple[int, int, float, bool]],
    row_names: Sequence[str],
    column_names: Sequence[str],
    row_title: str,
    column_title: str,
    unit: str,
) -> str:
    """A cell per (row, column, value, good), green to red; grey and in brackets if not good."""
    left, wide, tall = 110, max(48.0, min(74.0, 640 / max(1, len(column_names)))), 40.0
    width = left + wide * len(column_names) + 30
    height = TOP + tall * len(row_names) + 66
    values = [value for _, _, value, good in cells if good]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    parts = []
    for row, name in enumerate(row_names):
        y = TOP + tall * (len(row_names) - 1 - row)
        parts.append(f'<text class="e" x="{left - 8}" y="{y + 25:.0f}">{escape(name)}</text>')
        parts += [
            f'<rect x="{left + wide * column:.1f}" y="{y:.1f}" width="{wide - 2:.1f}" '
            f'height="{tall - 2}" rx="4" class="n"/>'
            for column in range(len(column_names))
        ]
    for row, column, value, good in cells:
        color = shade(value, low, high) if good else "#d5d9de"
        text = short(value) if good else f"({short(value)})"
        x, y = left + wide * column, TOP + tall * (len(row_names) - 1 - row)
        parts.append(
            f'<g><rect x="{x:.1f}" y="{y:.1f}" width="{wide - 2:.1f}" height="{tall - 2}" rx="4" '
            f'fill="{color}"/><text class="m c" x="{x + wide / 2 - 1:.1f}" '
            f'y="{y + 25:.0f}">{text}</text><title>{escape(row_names[row])}, '
            f"{escape(column_names[column])}: {value:.6g} {escape(unit)}</title></g>"
        )
    bottom = TOP + tall * len(row_names)
    parts += [
        f'<text class="m s" x="{left + wide * (column + 0.5):.1f}" y="{bottom + 16:.0f}">'
        f"{escape(name)}</text>"
        for column, name in enumerate(column_names)
    ]
    middle = left + wide * len(column_names) / 2
    parts += [
        f'<text class="m s" x="{middle:.1f}" y="{bottom + 38:.0f}">{escape(column_title)}</text>',
        f'<text class="m s" transform="translate(18 {TOP + tall * len(row_names) / 2:.0f}) '
        f'rotate(-90)">{escape(row_title)}</text>',
    ]
    return frame(title, parts, height, width)


def diagonal_chart(
    title: str, points: Sequence[tuple[str, float, float]], x_name: str, y_name: str
) -> str:
    """Points (name, x, y) about the line y = x, on equal logarithmic axes."""
    values = [value for _, *both in points for value in both if value > 0]
    if not values:
        return frame(title, ['<text class="s" x="80" y="80">nothing to draw yet</text>'])
    low, high = min(values) / 1.4, max(values) * 1.4
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    x = ChartAxis(low, high, True, LEFT, width)
    y = ChartAxis(low, high, True, HEIGHT - BOTTOM, -height)
    parts = grid(x, y, x_name, y_name)
    for factor, dash in ((1.0, ""), (1.2, "4 4"), (1 / 1.2, "4 4")):
        a, b = max(low, low / factor), min(high, high / factor)
        parts.append(
            f'<path d="M{x.at(a):.1f} {y.at(a * factor):.1f}L{x.at(b):.1f} {y.at(b * factor):.1f}" '
            f'stroke="#9aa3ad" stroke-dasharray="{dash}" fill="none"/>'
        )
    for number, (name, a, b) in enumerate(points):
        color = COLORS[number % len(COLORS)]
        parts.append(
            f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="5" fill="{color}">'
            f"<title>{escape(name)}: {a:.4g} and {b:.4g}</title></circle>"
        )
    parts += _legend([name for name, *_ in points], {})
    return frame(title, parts)


def shade(value: float, low: float, high: float) -> str:
    """From green (low) over yellow to red (high), light enough for dark text."""
    part = (value - low) / (high - low) if high > low else 0.0
    hue = 140 * (1 - min(1.0, max(0.0, part)) ** 0.6)
    return f"hsl({hue:.0f},62%,74%)"


def _axes(
    xs: Sequence[float], ys: Sequence[float], log_x: bool, log_y: bool
) -> tuple[ChartAxis, ChartAxis]:
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    low, high = min(ys), max(ys)
    log_y = log_y and low > 0
    if log_y:
        low, high = low / 1.08, high * 1.08
    else:
        room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        low, high = max(0.0, low - room), high + room
    x = ChartAxis(min(xs), max(xs), log_x, LEFT, width)
    return x, ChartAxis(low, high, log_y, HEIGHT - BOTTOM, -height)


def grid(x: ChartAxis, y: ChartAxis, x_name: str, y_name: str) -> list[str]:
    """Lines at the ticks of both axes, and what they show."""
    left, right = x.start, x.start + x.length
    bottom, top = y.start, y.start + y.length
    parts = []
    for tick in x.ticks():
        at = x.at(tick)
        parts.append(f'<line class="g" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text class="m s" x="{at:.1f}" y="{bottom + 18}">{short(tick)}</text>')
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(f'<line class="g" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="e s" x="{left - 8}" y="{at + 4:.1f}">{short(tick)}</text>')
    middle = (left + right) / 2
    parts += [
        f'<path class="a" d="M{left} {top}V{bottom}H{right}" fill="none"/>',
        f'<text class="m s" x="{middle:.0f}" y="{bottom + 42}">{escape(x_name)}</text>',
        f'<text class="m s" transform="translate(18 {(top + bottom) / 2:.0f}) rotate(-90)">'
        f"{escape(y_name)}</text>",
    ]
    return parts


def _path(line: ChartLine, x: ChartAxis, y: ChartAxis) -> str:
    parts = []
    for number, (a, b) in enumerate(line.points):
        if number == 0:
            parts.append(f"M{x.at(a):.1f} {y.at(b):.1f}")
        elif line.steps:
            parts.append(f"H{x.at(a):.1f}V{y.at(b):.1f}")
        else:
            parts.append(f"L{x.at(a):.1f} {y.at(b):.1f}")
    return "".join(parts)


def _dash(number: int, dashed: bool) -> str:
    """How a group's line is broken: groups are told apart without colour."""
    pattern = "6 4" if dashed else DASHES[number % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def _legend(names: Sequence[str], dashed: dict[str, bool]) -> list[str]:
    parts = []
    for number, name in enumerate(names[:16]):
        y = TOP + 8 + 20 * number
        dash = _dash(number, dashed.get(name, False))
        parts.append(
            f'<path d="M{WIDTH - RIGHT + 12} {y}h18" stroke="{COLORS[number % len(COLORS)]}" '
            f'stroke-width="3"{dash}/><text x="{WIDTH - RIGHT + 36}" y="{y + 4}">'
            f"{escape(cut(name, 19))}<title>{escape(name)}</title></text>"
        )
    return parts


def frame(title: str, parts: Sequence[str], height: float = HEIGHT, width: float = WIDTH) -> str:
    """A picture of its parts under a title."""
    width = max(width, 9.0 * len(title) + 40)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" role="img">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style>",
            f'<rect class="b" width="{width:.0f}" height="{height:.0f}"/>',
            f'<text class="t" x="18" y="24">{escape(title)}</text>',
            *parts,
            "</svg>\n",
        )
    )


def cut(name: str, most: int) -> str:
    """A name that is not longer than that."""
    return name if len(name) <= most else name[: most - 1] + "…"


def short(value: float) -> str:
    """At most four digits, thousands as k, millions as M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "")):
        if letter and abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value / 1e3:.3g}k" if abs(value) >= 1e4 else f"{value:.4g}"
