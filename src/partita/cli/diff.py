"""`partita diff A B`: what two plans do differently, and what it is worth."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

import click

from partita import units
from partita.cli.base import Output, common_options
from partita.jobs.diff import Difference, Figure

MOST = 20


@click.command()
@click.argument("first")
@click.argument("second")
@common_options
def command(first: str, second: str, out: Output) -> int:
    """Compare the plans in two files: FIRST and SECOND.

    Both are simulated. Shown are their figures side by side, where the step of each goes, the
    decisions that differ, and the ops that are split differently, equal changes counted together.
    """
    from partita.jobs.diff import diff
    from partita.plans import read_plan

    difference = diff(read_plan(first), read_plan(second))
    out.show(_text(difference))
    out.result(
        {
            "format": "partita/difference@1",
            "first": first,
            "second": second,
            "figures": [asdict(figure) for figure in difference.figures],
            "parts": [asdict(figure) for figure in difference.parts],
            "decisions": [list(row) for row in difference.decisions],
            "changes": [asdict(change) for change in difference.changes],
            "same_ops": difference.same_ops,
            "num_ops": difference.num_ops,
        }
    )
    return 0


def _text(difference: Difference) -> str:
    parts = [
        _side_by_side("", difference.figures),
        _side_by_side("where the step goes, on the busiest devices", difference.parts[:MOST]),
    ]
    if difference.decisions:
        parts.append(units.table(("decision", "first", "second"), difference.decisions))
    if difference.changes:
        changed = [
            (f"{change.count:,}", change.before, change.after, change.example)
            for change in difference.changes[:MOST]
        ]
        header = ("ops", "first", "second", "for example")
        parts.append(units.table(header, changed, numbers=(0,)))
    left = sum(change.count for change in difference.changes[MOST:])
    more = f"; {left:,} more are split differently" if left else ""
    parts.append(f"{difference.same_ops:,} of {difference.num_ops:,} ops are split alike{more}")
    return "\n\n".join(parts)


def _side_by_side(title: str, figures: Sequence[Figure]) -> str:
    rows = [
        (figure.name, _shown(figure, figure.first), _shown(figure, figure.second), _change(figure))
        for figure in figures
    ]
    return units.table((title, "first", "second", "second / first"), rows, numbers=(1, 2, 3))


def _shown(figure: Figure, value: float) -> str:
    words: dict[str, Callable[[float], str]] = {
        "s": units.seconds,
        "bytes": units.size,
        "share": lambda share: f"{share:.1%}",
        "count": lambda count: f"{count:,.0f}",
    }
    return words[figure.unit](value)


def _change(figure: Figure) -> str:
    return "-" if not math.isfinite(figure.ratio) else f"{figure.ratio:.3f}"
