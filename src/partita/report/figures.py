"""Pictures inside of pages: they take the page's colours, light or dark, and tell more on hover.

Unlike `charts.py`, whose pictures stand alone in files, these share one style sheet. What a mark is
stands in its title; names are escaped. Marks that can be chosen are reached by keys as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from partita.report.axis import tick_text
from partita.report.charts import ChartAxis, cut, grid, short

WIDTH = 1060


@dataclass(frozen=True)
class Mark:
    """A point of a scatter plot; `size` is its radius, `shape` a circle, square or diamond."""

    x: float
    y: float
    color: str
    about: str
    size: float = 5.0
    shape: str = "circle"
    key: str = ""  # what choosing it chooses
    label: str = ""  # beside it, where there is room


def figure(label: str, parts: Sequence[str], height: float, width: float = WIDTH) -> str:
    """A picture of some parts that fills its place; on a narrow page it can be moved sideways."""
    return (
        f'<div class="scroll"><svg class="fig" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'style="max-width:{1.2 * width:.0f}px;min-width:{0.72 * width:.0f}px" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg></div>'
    )


def scatter(
    label: str, marks: Sequence[Mark], x_name: str, y_name: str, lines: Sequence[str] = (),
    axes: tuple[ChartAxis, ChartAxis] | None = None,
) -> str:  # fmt: skip
    """Marks over two axes, logarithmic if nothing else is said; `lines` are drawn below them."""
    x, y = axes or log_axes(
        [mark.x for mark in marks if mark.x > 0], [mark.y for mark in marks if mark.y > 0]
    )
    parts = [*grid(x, y, x_name, y_name), *lines]
    parts += [_mark(mark, x.at(mark.x), y.at(mark.y)) for mark in marks]
    parts += _labels(marks, x, y)
    return figure(label, parts, y.start + 52)


def log_axes(
    xs: Sequence[float], ys: Sequence[float], height: float = 330.0
) -> tuple[ChartAxis, ChartAxis]:
    """Axes that have some room around all values."""
    low_x, high_x = (min(xs) / 1.6, max(xs) * 1.6) if xs else (0.1, 10.0)
    low_y, high_y = (min(ys) / 1.6, max(ys) * 1.6) if ys else (0.1, 10.0)
    x = ChartAxis(low_x, high_x, True, 86.0, WIDTH - 110.0)
    return x, ChartAxis(low_y, high_y, True, 20.0 + height, -height)


def linear_axes(
    xs: Sequence[float], ys: Sequence[float], height: float = 260.0
) -> tuple[ChartAxis, ChartAxis]:
    """Axes from zero (where that is not far away) to a little above the largest value."""

    def span(values: Sequence[float]) -> tuple[float, float]:
        low, high = min(values, default=0.0), max(values, default=1.0) or 1.0
        return (0.0 if low < 0.4 * high else low - 0.15 * (high - low or high)), high * 1.06

    x = ChartAxis(*span(xs), False, 86.0, WIDTH - 110.0)
    return x, ChartAxis(*span(ys), False, 20.0 + height, -height)


def _labels(marks: Sequence[Mark], x: ChartAxis, y: ChartAxis) -> list[str]:
    """Names beside marks: on the first side of them where no mark or other name is."""
    spots = [(x.at(mark.x), y.at(mark.y), mark.size + 1) for mark in marks]
    taken = [(at - r, level - r, at + r, level + r) for at, level, r in spots]
    parts: list[str] = []
    for mark, (at, level, r) in zip(marks, spots, strict=True):
        if not mark.label:
            continue
        text = cut(mark.label, 34)
        wide = 6.2 * len(text)
        for left, middle in (
            (at - r - 4 - wide, level), (at + r + 4, level), (at - wide / 2, level - r - 8),
            (at - wide / 2, level + r + 9), (at - wide, level - r - 8), (at - wide, level + r + 9),
        ):  # fmt: skip
            box = (left, middle - 6, left + wide, middle + 6)
            is_inside = box[0] >= x.start and box[2] <= x.start + x.length
            if is_inside and not any(
                box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken
            ):
                taken.append(box)
                parts.append(
                    f'<text x="{left:.1f}" y="{middle + 4:.1f}" textLength="{wide:.0f}" '
                    f'style="font-size:11px;pointer-events:none">{escape(text)}</text>'
                )
                break
    return parts


def _mark(mark: Mark, x: float, y: float) -> str:
    size = mark.size
    title = f"<title>{escape(mark.about)}</title>"
    style = f'fill="{mark.color}" fill-opacity=".85" stroke="var(--ground)"'
    if mark.shape == "square":
        body = f'<rect x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size:.1f}" '
        body += f'height="{2 * size:.1f}" {style}>{title}</rect>'
    elif mark.shape == "diamond":
        body = f'<path d="M{x:.1f} {y - size * 1.3:.1f}L{x + size * 1.3:.1f} {y:.1f}'
        body += f'L{x:.1f} {y + size * 1.3:.1f}L{x - size * 1.3:.1f} {y:.1f}Z" {style}>{title}'
        body += "</path>"
    else:
        body = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" {style}>{title}</circle>'
    if not mark.key:
        return body
    return (
        f'<g class="pick" tabindex="0" role="button" data-pick="{escape(mark.key)}" '
        f'aria-label="{escape(mark.about)}">{body}</g>'
    )


def interval_bars(
    label: str, rows: Sequence[tuple[str, float, float, float, str]], x_name: str,
    bound: float = 0.0,
) -> str:  # fmt: skip
    """A bar for each (name, value, low, high, note) under each other on one axis, with whiskers.

    Places are parts of the width, so that bars are as wide as the window and letters keep their
    size; notes stand before names, over their bars.
    """
    tall = 38
    high = max((max(row[1], row[3]) for row in rows), default=1.0) * 1.02 or 1.0
    axis = ChartAxis(0.0, high, False, 0.0, 100.0)
    bottom = 12 + tall * len(rows)
    parts = []
    for tick in axis.ticks():
        at, side = axis.at(tick), "" if tick == 0 else "m"
        parts.append(f'<line class="g" x1="{at:.2f}%" x2="{at:.2f}%" y1="6" y2="{bottom}"/>')
        if at < 96:
            text = tick_text(tick)
            parts.append(f'<text class="{side} s" x="{at:.2f}%" y="{bottom + 16}">{text}</text>')
    for number, (name, value, low, top, note) in enumerate(rows):
        y = 10 + tall * number
        color = "#2f74d0" if number == 0 else "#6b7683"
        ends = "".join(
            f'<line x1="{axis.at(end):.2f}%" x2="{axis.at(end):.2f}%" y1="{y + 18}" y2="{y + 26}" '
            'stroke="var(--ink)"/>'
            for end in (low, top)
        )
        parts.append(
            f"<g><title>{escape(name)}: {escape(note)}</title>"
            f'<text x="0" y="{y + 11}"><tspan font-weight="600">{escape(note)}</tspan>'
            f'<tspan dx="8">{escape(cut(name, 110))}</tspan></text>'
            f'<rect x="0" y="{y + 16}" width="{max(0.1, axis.at(value)):.2f}%" height="13" rx="2" '
            f'fill="{color}"/><line x1="{axis.at(low):.2f}%" x2="{axis.at(top):.2f}%" '
            f'y1="{y + 22}" y2="{y + 22}" stroke="var(--ink)"/>{ends}</g>'
        )
    if bound > 0:
        at = axis.at(bound)
        parts.append(
            f'<line x1="{at:.2f}%" x2="{at:.2f}%" y1="2" y2="{bottom}" stroke="var(--ink)" '
            'stroke-dasharray="5 4"><title>lower bound</title></line>'
            f'<text class="m s" x="{at:.2f}%" y="{bottom + 32}">bound</text>'
        )
    parts.append(f'<text class="s" x="0" y="{bottom + 32}">{escape(x_name)}</text>')
    return (
        f'<svg class="fig" height="{bottom + 40}" style="height:{bottom + 40}px" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def matrix(
    label: str, values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str],
    texts: Sequence[Sequence[str]], groups: Sequence[str] = (),
) -> str:  # fmt: skip
    """Cells the darker the more; each says its row, column and value on hover.

    Where neighbours are of different `groups` a line lies between them.
    """
    count = max(1, len(columns))
    left, top = 150.0, 60.0
    side = max(9.0, min(48.0, (WIDTH - left - 20) / count))
    most = max((value for row in values for value in row), default=0.0)
    parts = []
    for i, name in enumerate(rows):
        y = top + side * i
        parts.append(
            f'<text class="e" x="{left - 6}" y="{y + side / 2 + 4:.1f}">{escape(cut(name, 20))}'
            f"<title>{escape(name)}</title></text>"
        )
    for j, name in enumerate(columns):
        x = left + side * (j + 0.5)
        parts.append(
            f'<text transform="translate({x + 4:.1f} {top - 6}) rotate(-60)">'
            f"{escape(cut(name, 12))}<title>{escape(name)}</title></text>"
        )
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            part = math.sqrt(value / most) if most > 0 else 0.0
            parts.append(
                f'<g><rect x="{left + side * j:.1f}" y="{top + side * i:.1f}" '
                f'width="{side - 1:.1f}" height="{side - 1:.1f}" fill="#2f74d0" '
                f'fill-opacity="{0.06 + 0.64 * part:.3f}"/>'
                f"<title>{escape(rows[i])} to {escape(columns[j])}: {escape(texts[i][j])}</title>"
                "</g>"
            )
            if value > 0 and side > 30:
                parts.append(
                    f'<text class="m" x="{left + side * (j + 0.5):.1f}" '
                    f'y="{top + side * (i + 0.5) + 4:.1f}" style="font-size:10px;'
                    f'pointer-events:none">{escape(short_size(value, side > 42))}</text>'
                )
    between = [n for n in range(1, len(groups)) if groups[n] != groups[n - 1]]
    end, bottom = left + side * count, top + side * len(rows)
    parts += [
        f'<path d="M{left} {top + side * n - 0.5:.1f}H{end:.1f}M{left + side * n - 0.5:.1f} '
        f'{top}V{bottom:.1f}" stroke="var(--ink)" stroke-width="1.6"/>'
        for n in between
    ]
    width = max(420.0, left + side * count + 30)
    return figure(label, parts, top + side * len(rows) + 10, width)


def short_size(value_bytes: float, has_room: bool = False) -> str:
    """A size in at most four signs, `1.2G`; with some more room its whole unit, `1.2 GiB`."""
    for size, letter in ((2**40, "T"), (2**30, "G"), (2**20, "M"), (2**10, "K")):
        if value_bytes >= size:
            scaled = value_bytes / size
            unit = f" {letter}iB" if has_room else letter
            return f"{scaled:.0f}{unit}" if scaled >= 10 else f"{scaled:.1f}{unit}"
    return short(value_bytes)
