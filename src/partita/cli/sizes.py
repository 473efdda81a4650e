"""Sizes as people type them: `40GB`, `16GiB`, or a plain number of bytes."""

from partita.units import size_bytes

__all__ = ["size_bytes"]
