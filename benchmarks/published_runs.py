"""Predictions against published runs as the tables of docs/benchmarks.md.

    python benchmarks/published_runs.py ROWS.json [--write]

The rows are those of `partita validate ROWS.json`; `--write` puts the tables between the two marks
in docs/benchmarks.md.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from partita.jobs.published import read_rows
from partita.jobs.validate import Validation, validate
from partita.report.validation import (
    COVERAGE,
    DUELS,
    GROUPS,
    MEMORY,
    REGRETS,
    coverage_rows,
    duel_rows,
    group_rows,
    memory_rows,
    reason_rows,
    regret_rows,
    verdict_text,
)

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
MARK, END = "<!-- published runs -->", "<!-- end of published runs -->"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(validation: Validation, seconds: float) -> str:
    """All of them, with a sentence each."""
    reasons = "; ".join(f"{count} {reason}" for count, reason in reason_rows(validation))
    return "\n\n".join(
        (
            f"{len(validation.checked):,} rows in {seconds:.1f} s.",
            table(GROUPS, group_rows(validation)),
            f"Skipped: {reasons}.",
            "Regret: how much slower the run picked by predicted time was than the best measured "
            "one, of runs that share model, machine and batch (blind: any of them).",
            table(REGRETS, regret_rows(validation)),
            "ZeRO-3 against tensor and pipeline parallelism, seconds of one device per sequence:",
            table(DUELS, duel_rows(validation)),
            f"Memory of the fullest rank. {verdict_text(validation)}.",
            table(MEMORY, memory_rows(validation)),
            "Measured times inside the 80 % interval:",
            table(COVERAGE, coverage_rows(validation)),
        )
    )


def main() -> None:
    """Print, or write into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    start = time.perf_counter()
    validation = validate(*read_rows(options.rows))
    text = tables(validation, time.perf_counter() - start)
    if not options.write:
        print(text)
        return
    head, mark, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    _, end, tail = rest.partition(END)
    assert mark, f"{PAGE} has no mark"
    assert end, f"{PAGE} has no second mark"
    PAGE.write_text(f"{head}{MARK}\n\n{text}\n\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
