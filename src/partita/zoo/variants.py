"""Choosing the sizes of one variant of a family."""

from typing import TypeVar

from partita.errors import ModelError

T = TypeVar("T")


def sizes_of(family: str, variant: str, table: dict[str, T]) -> T:
    """The sizes of a variant; an unknown one is refused with those there are."""
    if variant not in table:
        raise ModelError(
            f"has no variant {variant!r}", fix=f"use one of {', '.join(table)}", field=family
        )
    return table[variant]
