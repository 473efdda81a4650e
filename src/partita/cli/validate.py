"""`partita validate`: predictions against measured runs of a file."""

import time
from pathlib import Path

import click

from partita.cli.base import Output, OutputFile, common_options
from partita.errors import InputError
from partita.suggest import suggest


@click.command()
@click.argument("rows", required=False)
@click.option("--group", "groups", metavar="NAME", multiple=True, help="These groups alone.")
@click.option(
    "--worst", metavar="N", type=click.IntRange(0, 1000), default=2, show_default=True,
    help="Rows with the largest errors to show of each group.",
)  # fmt: skip
@click.option("--page", metavar="FILE.html", help="Write a page with scatter plots here.")
@click.option("--force", is_flag=True, help="Overwrite the page.")
@common_options
def command(
    rows: str | None,
    groups: tuple[str, ...],
    worst: int,
    page: str | None,
    force: bool,
    out: Output,
) -> int:
    """Compare what is predicted for the measured runs in ROWS (JSON) with what was measured.

    Every row gives a model, a machine, a strategy by name and the time of a step or the memory of
    the fullest rank. Shown by group: mean error (MAPE), bias, rank correlation, regret of picking
    by predicted time, verdicts on memory, coverage of the 80 % intervals, the largest errors. A row
    that cannot be modelled or lacks something is skipped, counted and said. A third of the rows,
    by their ids, was never looked at when the parameters were fitted; it is shown apart.

    No rows come with partita: docs/validate.md says how to write a file of your own.
    """
    from partita.jobs.published import FORMAT, read_rows
    from partita.jobs.validate import validate
    from partita.report.validation import validation_json, validation_text

    start = time.perf_counter()
    output = None if page is None else OutputFile(Path(page), force)
    if output is not None:
        output.check_page()
    if rows is None:
        raise InputError(
            "no file with measured runs is given and none comes with partita",
            fix=f"name one: partita validate ROWS.json (format {FORMAT}, see docs/validate.md)",
            field="ROWS",
        )
    kept, skipped = read_rows(rows)
    if groups:
        _check_groups(groups, {row.group for row in kept} | {one.group for one in skipped})
        kept = tuple(row for row in kept if row.group in groups)
        skipped = tuple(one for one in skipped if one.group in groups)
    validation = validate(kept, skipped)
    out.show(validation_text(validation, worst))
    written = None
    if output is not None:
        from partita.report.validation_page import validation_page

        title = Path(rows).name
        written = out.save(output, lambda: validation_page(validation, title, worst))
    if written is not None:
        out.show(f"\npage in {written}")
    seconds = time.perf_counter() - start
    drawn = None if written is None else str(written)
    out.result({**validation_json(validation, worst), "seconds": seconds, "page": drawn})
    return 0 if validation.checked else 1


def _check_groups(wanted: tuple[str, ...], known: set[str]) -> None:
    for name in wanted:
        if name not in known:
            raise InputError(
                f"no row is of a group {name!r}", fix=suggest(name, sorted(known)), field="--group"
            )
