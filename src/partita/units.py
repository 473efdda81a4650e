"""Numbers for people: seconds, bytes, FLOPs, counts, and tables of them.

A table is as wide as its cells. On a terminal the command line says how many columns there are
(`fitting`), and tables keep to them: long text is cut, and what is still too wide goes on in the
next line.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from partita.errors import InputError

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E", "Z")
_COUNTS = ("", "K", "M", "B", "T")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*(?:([KMGT]?)(I?)B)?", re.IGNORECASE)
_GAP = 2  # columns between cells
_INDENT = 4  # of what goes on in the next line
_LEAST = 14  # columns that text keeps before a table goes on in the next line
_columns: ContextVar[int | None] = ContextVar("columns", default=None)  # set by `fitting` alone


def seconds(value: float) -> str:
    """`1.23 s`, `4.56 ms`, `7.89 us`; minutes and hours from 100 s up."""
    if not math.isfinite(value):
        return f"{value} s"
    size = abs(value)
    if size >= 100:
        minutes, rest = divmod(round(size), 60)
        sign = "-" if value < 0 else ""
        if minutes < 60:
            return f"{sign}{minutes} min {rest:02d} s"
        return f"{sign}{minutes // 60:,} h {minutes % 60:02d} min"
    for unit, name in _SECONDS:
        if _rounded(size / unit) >= 1:
            return f"{_three(value / unit)} {name}"
    return f"{_three(value / 1e-9)} ns" if value else "0 s"


def size(value_bytes: float) -> str:
    """`512 B`, `1.50 GiB`: binary units, three digits."""
    return _scaled(value_bytes, 1024, _BINARY)


def size_bytes(text: str, field: str) -> float:
    """The bytes of a size as people type it (`40GB`, `16GiB`, `1024`); `field` is what it is of."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise InputError(f"found {text!r}", fix="write a size such as 40GB or 16GiB", field=field)
    power = " KMGT".index((match[2] or " ").upper())
    return float(match[1]) * float((1024 if match[3] else 1000) ** power)


def flops(value: float) -> str:
    """`3.21 TFLOP`: decimal units, three digits."""
    return _scaled(value, 1000, tuple(f"{prefix}FLOP" for prefix in _DECIMAL))


def rate(value: float, unit: str) -> str:
    """`312 TFLOP/s`, `2.04 TB/s`: decimal units, three digits."""
    return _scaled(value, 1000, tuple(f"{prefix}{unit}/s" for prefix in _DECIMAL))


def count(value: float) -> str:
    """`124M`, `6.74B`, `175B`: how people write the size of a model."""
    return _scaled(value, 1000, _COUNTS, space="")


def number(value: float) -> str:
    """A plain number with at most six digits that matter, thousands separated when whole."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.6g}"


def counted(count: int, noun: str) -> str:
    """`1 candidate`, `2,000 candidates`."""
    return f"{count:,} {noun}" + "s" * (count != 1)


@contextmanager
def fitting(columns: int | None) -> Iterator[None]:
    """Tables that are made inside keep to so many columns; with None to none."""
    token = _columns.set(columns)
    try:
        yield
    finally:
        _columns.reset(token)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Aligned columns as text; the columns listed in `numbers` are set to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    most = _columns.get()
    if most is not None:
        widths = _narrowed(widths, numbers, most)
        lines = [
            [_cut(cell, width) for cell, width in zip(line, widths, strict=True)] for line in lines
        ]
    groups = _groups(widths, most)
    return "\n".join(
        " " * (_INDENT if place else 0)
        + (" " * _GAP)
        .join(
            line[column].rjust(widths[column])
            if column in numbers
            else line[column].ljust(widths[column])
            for column in group
        )
        .rstrip()
        for line in lines
        for place, group in enumerate(groups)
        if not place or any(line[column] for column in group)  # no line for nothing
    )


def _narrowed(widths: list[int], numbers: Sequence[int], most: int) -> list[int]:
    """Text gives way, the widest first, down to a least; numbers keep their width.

    Where that is not enough, a row goes on in the next line, and nothing need give way.
    """
    narrow = list(widths)
    over = sum(narrow) + _GAP * (len(narrow) - 1) - most
    while over > 0:
        text = [c for c in range(len(narrow)) if c not in numbers and narrow[c] > _LEAST]
        if not text:
            break
        widest = max(text, key=lambda column: narrow[column])
        narrow[widest] -= 1
        over -= 1
    return [min(width, most - _INDENT) for width in (narrow if over <= 0 else widths)]


def _groups(widths: Sequence[int], most: int | None) -> list[list[int]]:
    """Columns that stand on one line; all of them where there is room."""
    groups: list[list[int]] = [[]]
    used = 0
    for column, width in enumerate(widths):
        if groups[-1] and most is not None and used + _GAP + width > most:
            groups.append([])
            used = _INDENT - _GAP
        used += width + (_GAP if groups[-1] or len(groups) > 1 else 0)
        groups[-1].append(column)
    return groups


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: max(0, width - 1)]}…"


def _scaled(value: float, base: int, names: Sequence[str], space: str = " ") -> str:
    if not math.isfinite(value):
        return f"{value}{space}{names[0]}".rstrip()
    power = 0
    while _rounded(abs(value)) >= base and power < len(names) - 1:
        value /= base
        power += 1
    digits = f"{value:,.0f}" if power == 0 and value == int(value) else _three(value)
    return f"{digits}{space}{names[power]}".rstrip()


def _rounded(value: float) -> float:
    """As it will be shown, so that 999.9996 ms becomes 1.00 s and not 1000 ms."""
    return float(f"{value:.3g}") if value < 1000 else round(value)


def _three(value: float) -> str:
    """Three digits that matter, without an exponent."""
    whole = len(str(int(abs(_rounded(abs(value))))))
    return f"{value:,.{max(0, 3 - whole)}f}"
