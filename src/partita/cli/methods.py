"""`partita methods`: the named searches for each kind of problem, and what each one does."""

from typing import Any

import click

from partita.cli.base import Output, common_options, suggest
from partita.errors import InputError
from partita.search import KINDS, searches
from partita.units import table


@click.command()
@click.argument("kind", required=False)
@common_options
def command(kind: str | None, out: Output) -> None:
    """List the search methods, of all kinds of problems or of one KIND.

    The first method of a kind is the one used when none is asked for.
    """
    if kind is not None and kind not in KINDS:
        raise InputError(f"found {kind!r}", fix=suggest(kind, KINDS), field="KIND")
    by_kind = {name: _methods(name) for name in KINDS if kind in (None, name)}
    rows = [
        (name if method["default"] else "", method["name"], method["summary"])
        for name, methods in by_kind.items()
        for method in methods
    ]
    out.show(table(("problem", "method", "what it does"), rows))
    out.result({"format": "partita/methods@1", "kinds": by_kind})


def _methods(kind: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "default": index == 0, "summary": _summary(search)}
        for index, (name, search) in enumerate(searches(kind).items())
    ]


def _summary(search: object) -> str:
    """The first line of what the search's author wrote about it."""
    text = search.__doc__ or type(search).__doc__ or ""
    return text.strip().split("\n")[0]
