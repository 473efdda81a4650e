"""Is the plan ever worse than the best named strategy? The zoo on machines, mixed ones too.

    python benchmarks/fair_zoo.py                         all 100 cases, a line for each
    python benchmarks/fair_zoo.py --rows rows.jsonl       resumable: cases in the file are done
    python benchmarks/fair_zoo.py --rows rows.jsonl --table    what the file says, with the losses

The limit (`--seconds`) is for each of our searches. Seconds are CPU of all of `compare`.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partita import units
from partita.errors import PartitaError
from partita.jobs.compare import compare
from partita.search.base import Stop

# Models with a batch for eight devices, those that plan quickly first.
MODELS = (
    ("alexnet", 256), ("vgg16", 64), ("resnet50", 128), ("vit-b16", 64), ("gpt2", 32),
    ("bert-base", 64), ("bert-large", 32), ("t5-small", 64), ("t5-base", 32), ("unet", 16),
    ("gpt2-medium", 32), ("vit-l16", 64), ("inception_v3", 128), ("gpt2-large", 32),
    ("llama-7b", 32), ("densenet121", 64), ("t5-large", 32), ("gpt2-xl", 32), ("vit-h14", 64),
    ("mixtral-8x7b", 32),
)  # fmt: skip
MACHINES = (  # and how many times the batch
    ("8xA100", 1), ("2x4xV100", 1), ("4xV100+8xP100", 3), ("2x8xH100", 2), ("4xA100+4xH100", 1),
)  # fmt: skip
LOST = 1 - 1e-6  # the best other by the plan: below, the plan has lost


def cases() -> Iterator[tuple[str, str, int]]:
    """Every model on every machine."""
    for model, batch in MODELS:
        for machine, times in MACHINES:
            yield model, machine, batch * times


def measured(model: str, machine: str, batch: int, seconds: float) -> dict[str, Any]:
    """The plan against the best of all others."""
    row: dict[str, Any] = {"model": model, "machine": machine, "batch": batch}
    dtype = "f16" if "P100" in machine or "V100" in machine else None
    started = time.process_time()
    try:
        comparison = compare(model, machine, batch=batch, dtype=dtype, stop=Stop(seconds, 0.01))
    except PartitaError as error:
        return {**row, "error": str(error).splitlines()[0]}
    *others, own = comparison.rows
    fitting = [other for other in others if other.fits]
    if not fitting or not own.fits:
        return {**row, "error": f"the plan fits: {own.fits}; of the others {len(fitting)} do"}
    best = min(fitting, key=lambda other: other.objective_s)
    by_name = [other for other in fitting if other.name != "shard"]
    named = min(by_name, key=lambda other: other.objective_s, default=best)
    return {
        **row,
        "plan_s": own.objective_s,
        "other": best.name,
        "other_s": best.objective_s,
        "named": named.name,
        "named_s": named.objective_s,
        "cpu_s": time.process_time() - started,
    }


def known_rows(path: Path | None) -> list[dict[str, Any]]:
    """The rows of a file; none without one."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(rows: list[dict[str, Any]]) -> str:
    """All rows, and how many were lost."""
    told = [row for row in rows if "error" not in row]
    lines = [
        (
            row["model"],
            row["machine"],
            str(row["batch"]),
            units.seconds(row["plan_s"]),
            f"{row['other']} {units.seconds(row['other_s'])}",
            f"{row['other_s'] / row['plan_s']:.3f}",
            f"{row['named']} {row['named_s'] / row['plan_s']:.3f}",
            f"{row['cpu_s']:.0f} s",
        )
        for row in told
    ]
    header = ("model", "machine", "batch", "plan", "best other", "ratio", "best named", "CPU")
    lost = [row for row in told if row["other_s"] < LOST * row["plan_s"]]
    failed = (row for row in rows if "error" in row)
    errors = [f"{row['model']} on {row['machine']}: {row['error']}" for row in failed]
    names = ", ".join(f"{row['model']} on {row['machine']} to {row['other']}" for row in lost)
    return "\n".join([
        units.table(header, lines),
        f"{len(told)} cases, {len(lost)} lost{': ' if lost else ''}{names}",
        *errors,
    ])  # fmt: skip


def main() -> None:
    """Run the cases that are left, or show what there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--rows", type=Path, help="a file of rows, one for each case that is done")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    rows = known_rows(options.rows)
    done = {(row["model"], row["machine"], row["batch"]) for row in rows}
    for case in () if options.table else cases():
        if case in done:
            continue
        rows.append(measured(*case, options.seconds))
        print(json.dumps(rows[-1]), flush=True)
        if options.rows is not None:
            with options.rows.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
