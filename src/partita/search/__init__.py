"""Searches: one folder per decision, one file per algorithm, one contract (`base`)."""

import importlib
from typing import Any

from partita.search.base import Search

# The folders that hold searches, by the kind of problem they solve; imported when asked for.
KINDS = ("sharding", "partition", "schedule", "placement", "streams", "rtasks", "joint")


def searches(kind: str) -> dict[str, Search[Any, Any]]:
    """The named methods for one kind of problem; the first is the default."""
    if kind not in KINDS:
        raise KeyError(f"no searches for {kind!r}; kinds are {', '.join(KINDS)}")
    searches: dict[str, Search[Any, Any]] = importlib.import_module(
        f"partita.search.{kind}"
    ).SEARCHES
    return searches
