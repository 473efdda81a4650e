"""`partita compare`: named strategies and our searches in one table."""

import click

from partita import units
from partita.cli.base import Output, common_options
from partita.cli.model_options import ModelOptions, model_options
from partita.jobs.compare import Compared, Comparison


@click.command()
@click.argument("model")
@click.option("--cluster", "-c", required=True, help="A preset, 4xA100, 2x8xH100, or a .toml file.")
@click.option(
    "--time-limit",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds for each of our searches.",
)
@model_options
@common_options
def command(model: str, cluster: str, time_limit: float, options: ModelOptions, out: Output) -> int:
    """Put named strategies and our searches side by side for a MODEL on a cluster.

    Data parallel, ZeRO, FSDP, Megatron-style tensor parallel, GPipe, 1F1B, interleaved and
    Megatron-style TP x PP x DP, each with the best of the meshes and depths it knows; then the
    search for splits alone (partita shard) and the joint search (partita plan).
    """
    from partita.jobs.compare import compare

    with out.stop(time_s=time_limit, gap=0.01, words=units.seconds) as stop:
        found = compare(model, cluster, stop=stop, seed=out.seed, **options.as_dict())
    out.show(_text(found))
    out.result(
        {
            "format": "partita/comparison@1",
            "model": model,
            "cluster": cluster,
            "lower_bound_s": found.lower_bound_s,
            "rows": [_row_json(row) for row in found.rows],
        }
    )
    return 0 if found.best is not None else 1


def _text(found: Comparison) -> str:
    from partita.report.summary import arrangement

    best = found.best
    rows = []
    for row in sorted(found.rows, key=lambda r: (not r.fits, r.step_s)):
        simulation = row.simulation
        if simulation is None:
            rows.append((row.name, row.summary, "cannot run here", "", "", "", "", ""))
            continue
        ratio = "" if best is None else f"x{row.step_s / best.step_s:.2f}"
        rows.append(
            (
                row.name,
                row.summary,
                arrangement(simulation).rsplit(", bubble", 1)[0],
                units.seconds(row.step_s),
                ratio if row.fits else "does not fit",
                units.size(max(simulation.peak_bytes)),
                f"{simulation.bubble:.0%}",
                units.seconds(row.seconds),
            )
        )
    header = ("strategy", "what it is", "plan", "step", "", "memory", "idle", "search")
    return units.table(header, rows, numbers=(3, 4, 5, 6, 7))


def _row_json(row: Compared) -> dict[str, object]:
    simulation = row.simulation
    return {
        "name": row.name,
        "fits": row.fits,
        "step_s": None if simulation is None else row.step_s,
        "peak_memory_bytes": None if simulation is None else max(simulation.peak_bytes),
        "bubble": None if simulation is None else simulation.bubble,
        "seconds": row.seconds,
        "num_plans": row.num_plans,
    }
