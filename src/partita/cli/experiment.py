"""`partita experiment`: many placement runs from one TOML file, tables and charts in one folder."""

from pathlib import Path

import click

from partita.cli.base import Output, common_options
from partita.cli.curve_options import dask_option
from partita.errors import InputError


@click.command()
@click.argument("file")
@click.option("-o", "--output", "folder", metavar="FOLDER", help="Where to; beside FILE otherwise.")
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0: all cores.")
@dask_option
@common_options
def command(file: str, folder: str | None, workers: int, dask: str, out: Output) -> int:
    """Run the placement experiment in FILE (TOML) and write all it gives into one folder.

    FILE names networks, clusters (with sweeps of bandwidth and memory), optimisers with parameters
    and seeds; examples/placement/ has several. The folder gets table.csv, table.json, table.md,
    charts, an animation of the search and an index.html.

    Every run is saved when it is done: after Ctrl-C, or when FILE was extended, the same command
    goes on where it stopped. --seed is added to the seeds of FILE. One placement alone: partita
    place.
    """
    from dataclasses import replace

    from partita.jobs.experiment import num_runs, run_experiment
    from partita.jobs.experiment_file import read_experiment
    from partita.report.experiment import summary_text, write_report

    experiment = read_experiment(file)
    if out.seed:
        seeds = tuple(seed + out.seed for seed in experiment.seeds)
        experiment = replace(experiment, seeds=seeds)
    place = Path(folder) if folder is not None else Path(file).with_suffix("")
    if place.is_file():
        raise InputError("is a file", fix="name a folder", field="--output", file=str(place))
    with out.parts("runs", num_runs(experiment)) as parts:

        def interrupted() -> bool:
            parts.tick()
            return out.interrupted

        outcome = run_experiment(
            experiment, place, interrupted, told=parts, workers=workers, dask=dask
        )
    write_report(outcome, place)
    out.show(summary_text(outcome))
    if outcome.resumed:
        out.show(f"{outcome.resumed} of {len(outcome.runs)} runs were there already")
    if outcome.missing:
        out.show(f"{outcome.missing} runs are missing; the same command goes on: {file}")
    out.show(f"look at it: {place / 'index.html'}")
    out.result(
        {
            "format": "partita/experiment@1",
            "experiment": experiment.name,
            "folder": str(place),
            "runs": len(outcome.runs),
            "resumed": outcome.resumed,
            "missing": outcome.missing,
            "table": str(place / "table.json"),
        }
    )
    return 0
