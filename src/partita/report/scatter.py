"""Clouds of points by group about the line y = x or as y / x, and how an error is spread, as SVG.

All take plain numbers and give the text of a picture. A point that is `far` is drawn hollow: its
measured value lies outside the interval of its prediction. Elements of a group carry its number in
`data-group`, so that a page can hide them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from partita.report.charts import COLORS, ChartAxis, frame, grid

WIDTH, HEIGHT = 1040, 560
LEFT, RIGHT, TOP, BOTTOM = 78, 20, 44, 56
BIN = 5.0  # per cent
RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


# Signs, and the paths that draw them around a point.
SHAPES = {
    "●": "m-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z",
    "■": "m-3.2 -3.2h6.4v6.4h-6.4z",
    "◆": "m0 -4.4l4.4 4.4l-4.4 4.4l-4.4 -4.4z",
    "▲": "m0 -4.2l4 7h-8z",
    "▼": "m0 4.2l4 -7h-8z",
}


@dataclass(frozen=True, slots=True)
class CloudPoint:
    """One point with what is said about it."""

    text: str
    x: float
    y: float
    far: bool = False


@dataclass(frozen=True, slots=True)
class Cloud:
    """The points of one group."""

    name: str
    points: tuple[CloudPoint, ...]


def scatter_chart(
    title: str, clouds: Sequence[Cloud], x_name: str, y_name: str, *, band: float | None = None,
    height: int = HEIGHT,
) -> str:  # fmt: skip
    """Points on equal logarithmic axes; the band is shaded a factor up and down from y = x."""
    values = [
        value
        for cloud in clouds
        for point in cloud.points
        for value in (point.x, point.y)
        if value > 0 and math.isfinite(value)
    ]
    if not values:
        return frame(title, ['<text class="s" x="80" y="80">nothing to draw</text>'], 120, WIDTH)
    low, high = min(values) / 1.3, max(values) * 1.3
    x = ChartAxis(low, high, True, LEFT, WIDTH - LEFT - RIGHT)
    y = ChartAxis(low, high, True, height - BOTTOM, -(height - TOP - BOTTOM))
    parts = [_band(x, y, band)] if band else []
    parts += grid(x, y, x_name, y_name)
    ends = f"M{x.at(low):.1f} {y.at(low):.1f}L{x.at(high):.1f} {y.at(high):.1f}"
    parts.append(f'<path d="{ends}" stroke="#6b7683" fill="none"/>')
    return frame(title, [*parts, *_dots(clouds, x, y)], height, WIDTH)


def ratio_chart(
    title: str, clouds: Sequence[Cloud], x_name: str, y_name: str, *, band: float | None = None
) -> str:
    """The same points as y / x over x: what a line over decades hides."""
    ratios = [
        Cloud(
            cloud.name,
            tuple(
                CloudPoint(point.text, point.x, point.y / point.x, point.far)
                for point in cloud.points
                if point.x > 0 and point.y > 0
            ),
        )
        for cloud in clouds
    ]
    every = [point for cloud in ratios for point in cloud.points]
    if not every:
        return frame(title, ['<text class="s" x="80" y="80">nothing to draw</text>'], 120, WIDTH)
    height = 360
    most = max(1.25, *(max(point.y, 1 / point.y) for point in every)) * 1.05
    low, high = min(point.x for point in every) / 1.3, max(point.x for point in every) * 1.3
    shown = tuple(tick for tick in RATIOS if 1 / most <= tick <= most)
    x = ChartAxis(low, high, True, LEFT, WIDTH - LEFT - RIGHT)
    y = ChartAxis(1 / most, most, True, height - BOTTOM, -(height - TOP - BOTTOM), shown)
    parts = []
    if band:
        top, bottom = y.at(band), y.at(1 / band)
        parts.append(
            f'<rect x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - RIGHT}" '
            f'height="{bottom - top:.1f}" fill="#2f74d0" fill-opacity=".09"/>'
        )
    parts += grid(x, y, x_name, y_name)
    parts.append(f'<path d="M{LEFT} {y.at(1.0):.1f}H{WIDTH - RIGHT}" stroke="#6b7683"/>')
    return frame(title, [*parts, *_dots(ratios, x, y)], height, WIDTH)


def _dots(clouds: Sequence[Cloud], x: ChartAxis, y: ChartAxis) -> list[str]:
    """A part per group: large groups first, so that small ones lie on top."""
    parts = []
    for number in sorted(range(len(clouds)), key=lambda i: -len(clouds[i].points)):
        marks = "".join(_mark(point, x, y, shape_of(number)) for point in clouds[number].points)
        color = color_of(number)
        parts.append(f'<g data-group="{number}" fill="{color}" stroke="{color}">{marks}</g>')
    return parts


def _mark(point: CloudPoint, x: ChartAxis, y: ChartAxis, shape: str) -> str:
    """A point of its group's shape, so that groups are told apart without colour."""
    hollow = ' fill="#fff" fill-opacity=".6"' if point.far else ' fill-opacity=".65"'
    return (
        f'<path class="mark" d="M{x.at(point.x):.1f} {y.at(point.y):.1f}{SHAPES[shape]}"{hollow}>'
        f"<title>{escape(point.text)}</title></path>"
    )


def _band(x: ChartAxis, y: ChartAxis, factor: float) -> str:
    low, high = x.low, x.high
    corners = (
        (low, low), (low, low * factor), (high / factor, high), (high, high), (high, high / factor),
        (low * factor, low),
    )  # fmt: skip
    path = "L".join(f"{x.at(a):.1f} {y.at(b):.1f}" for a, b in corners)
    return f'<path d="M{path}Z" fill="#2f74d0" fill-opacity=".09"/>'


def error_chart(title: str, groups: Sequence[tuple[str, Sequence[float]]], x_name: str) -> str:
    """How many errors (in per cent) lie in each bin of five; groups are stacked, the ends open."""
    height, most = 320, 40.0
    bins = round(2 * most / BIN)
    counts = [[0] * bins for _ in groups]
    for number, (_, errors) in enumerate(groups):
        for error in errors:
            place = math.floor((min(max(error, -most), most - 1e-9) + most) / BIN)
            counts[number][place] += 1
    tallest = max((sum(column) for column in zip(*counts, strict=True)), default=0) or 1
    x = ChartAxis(-most, most, False, LEFT, WIDTH - LEFT - RIGHT, tuple(range(-40, 41, 10)))
    y = ChartAxis(0.0, tallest * 1.06, False, height - BOTTOM, -(height - TOP - BOTTOM))
    parts = grid(x, y, x_name, "rows")
    bases = [0] * bins
    for number, (name, _) in enumerate(groups):
        bars = ""
        for place, count in enumerate(counts[number]):
            if count:
                text = f"{escape(name)}: {count} of {_range(place, bins, most)}"
                bars += _bar(x, y, -most + BIN * place, bases[place], count, text)
                bases[place] += count
        parts.append(f'<g data-group="{number}" fill="{color_of(number)}">{bars}</g>')
    zero = x.at(0.0)
    parts.append(f'<path d="M{zero:.1f} {TOP}V{height - BOTTOM}" stroke="#6b7683"/>')
    return frame(title, parts, height, WIDTH)


def _range(place: int, bins: int, most: float) -> str:
    low = -most + BIN * place
    if place == 0:
        return f"below {low + BIN:+.0f} %"
    return f"{low:+.0f} % and more" if place == bins - 1 else f"{low:+.0f} to {low + BIN:+.0f} %"


def _bar(x: ChartAxis, y: ChartAxis, start: float, base: int, count: int, text: str) -> str:
    left, right = x.at(start) + 1, x.at(start + BIN) - 1
    top, bottom = y.at(base + count), y.at(base)
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
        f'height="{bottom - top:.1f}" fill-opacity=".85"><title>{text}</title></rect>'
    )


def shape_of(number: int) -> str:
    """The shape of the group of that number, as a sign."""
    return list(SHAPES)[number % len(SHAPES)]


def color_of(number: int) -> str:
    """The colour of the group of that number."""
    return COLORS[number % len(COLORS)]
