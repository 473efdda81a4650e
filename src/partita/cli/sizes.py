"""Sizes as people type them: `40GB`, `16GiB`, or a plain number of bytes."""

import re

from partita.errors import InputError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*(?:([KMGT]?)(I?)B)?", re.IGNORECASE)


def size_bytes(text: str, field: str) -> float:
    """The bytes of a typed size; `field` is the option it was typed for."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise InputError(f"found {text!r}", fix="write a size such as 40GB or 16GiB", field=field)
    power = " KMGT".index((match[2] or " ").upper())
    return float(match[1]) * float((1024 if match[3] else 1000) ** power)
