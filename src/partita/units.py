"""Numbers for people: seconds, bytes, FLOPs, counts, and tables of them."""

import math
import re
from collections.abc import Sequence

from partita.errors import InputError

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E", "Z")
_COUNTS = ("", "K", "M", "B", "T")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*(?:([KMGT]?)(I?)B)?", re.IGNORECASE)


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


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Aligned columns as text; the columns listed in `numbers` are set to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


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
