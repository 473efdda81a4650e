"""Numbers for people, by the name that commands know; they live in `partita.units`."""

from partita.units import count, flops, number, rate, seconds, size, table

__all__ = ["count", "flops", "number", "rate", "seconds", "size", "table"]
