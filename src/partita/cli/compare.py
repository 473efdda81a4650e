"""`partita compare`: named strategies and our searches in one table."""

from typing import TYPE_CHECKING

import click

from partita import units
from partita.cli.base import Output, common_options
from partita.cli.curve_options import CurveOptions, sweep_options
from partita.cli.model_options import ModelOptions, model_options, objective_option
from partita.costs.physics import alike
from partita.jobs.compare import ComparedStrategy, Comparison
from partita.report.summary import INTERVAL, MEMORY_HEADER, likely_range

if TYPE_CHECKING:
    from partita.jobs.compare_curve import ComparedCurve


@click.command()
@click.argument("model")
@click.option("--cluster", "-c", required=True, help="A preset, 4xA100, 2x8xH100, or a .toml file.")
@objective_option
@click.option(
    "--time-limit",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds for each of our searches.",
)
@sweep_options
@model_options
@common_options
def command(
    model: str,
    cluster: str,
    objective: str,
    time_limit: float,
    what_if: CurveOptions,
    options: ModelOptions,
    out: Output,
) -> int:
    """Put named strategies and our searches side by side for a MODEL on a cluster.

    Data parallel, ZeRO, FSDP, tensor parallel, 1F1B, interleaved; and what frameworks do when their
    degrees are tuned: DDP, FSDP2 x TP, DeepSpeed, GPipe, Megatron's TP x PP x DP
    with sequence parallelism, interleaving and distributed optimizer, torchtitan's TP x PP x FSDP.
    All degrees of a transformer are ranked by forecasts, and the best few simulated. On devices of
    several kinds, stages by kind and samples by speed are there, too. Then the
    search for splits alone (partita shard) and the joint search (partita plan). After Ctrl-C what
    was not reached is named. With --devices 8..64 the table has a column for each number of devices
    like those of --cluster 8xH100.
    """
    from partita.jobs.compare import compare

    if what_if.devices is not None:
        return _curve(model, cluster, objective, time_limit, what_if, options, out)

    with out.stop(time_s=time_limit, gap=0.01, words=units.seconds) as stop:
        comparison = compare(
            model, cluster, objective=objective, stop=stop, seed=out.seed, **options.as_dict()
        )
    out.show(_text(comparison))
    out.result(
        {
            "format": "partita/comparison@1",
            "model": model,
            "cluster": cluster,
            "objective": objective,
            "lower_bound_s": comparison.lower_bound_s,
            "rows": [_row_json(row) for row in comparison.rows],
        }
    )
    return 0 if comparison.best is not None else 1


def _curve(
    model: str, cluster: str, objective: str, time_limit: float, what_if: CurveOptions,
    options: ModelOptions, out: Output,
) -> int:  # fmt: skip
    """A comparison for each number of devices."""
    from partita.jobs.compare_curve import ComparedTask, compare_curve
    from partita.jobs.curve import cluster_of, device_numbers

    assert what_if.devices is not None
    tasks = [
        ComparedTask(
            model, cluster_of(cluster, number), number, objective=objective, time_s=time_limit,
            seed=out.seed, **options.as_dict(),
        )
        for number in device_numbers(what_if.devices)
    ]  # fmt: skip
    with out.parts("points", len(tasks)) as parts:
        answer = compare_curve(tasks, what_if.sweeper(out, parts))
    rows = [_curve_row(answer, name) for name in answer.names]
    header = ("strategy", *(f"{number} devices" for number in answer.numbers))
    if rows:
        out.show(units.table(header, rows, numbers=range(1, len(header))))
    for number, why in answer.missing:
        out.show(f"{number} devices: {why}")
    points = [
        {"strategy": name, "num_devices": number, "objective_s": seconds,
         "plan": answer.plans[name, number]}
        for (name, number), seconds in answer.objective_s.items()
    ]  # fmt: skip
    out.result(
        {
            "format": "partita/compared-curve@1",
            "model": model,
            "cluster": cluster,
            "points": points,
            "missing": [{"num_devices": n, "why": why} for n, why in answer.missing],
        }
    )
    return 0 if rows else 1


def _curve_row(answer: "ComparedCurve", name: str) -> tuple[str, ...]:
    cells = []
    for number in answer.numbers:
        seconds = answer.objective_s.get((name, number))
        mark = " *" if answer.best(number) == name else ""
        cells.append("-" if seconds is None else f"{units.seconds(seconds)}{mark}")
    return (name, *cells)


def _text(comparison: Comparison) -> str:
    best = comparison.best
    steady_state = any(row.steady_state for row in comparison.rows)
    rows: list[tuple[str, ...]] = []
    notes: dict[str, list[str]] = {}
    for row in sorted(comparison.rows, key=lambda r: (not r.fits, r.objective_s)):
        simulation = row.simulation
        if simulation is None:
            rows.append((row.name, row.summary, *("-",) * (7 + steady_state)))
            notes.setdefault(row.note, []).append(row.name)
            continue
        ratio = ""
        if best is not None:
            ratio = f"x{row.objective_s / best.objective_s:.2f}{_equal(row, best)}"
        rows.append(
            (
                row.name,
                row.summary,
                simulation.arrangement,
                units.seconds(row.step_s),
                likely_range(simulation),
                *((units.seconds(row.objective_s),) if steady_state else ()),
                ratio if row.fits else "does not fit",
                units.size(simulation.fullest[0]),
                f"{simulation.bubble:.0%}",
                units.seconds(row.seconds),
            )
        )
    interval = ("steady state",) if steady_state else ()
    header = (
        "strategy", "what it is", "plan", "step", INTERVAL, *interval, "", MEMORY_HEADER, "bubble",
        "search",
    )  # fmt: skip
    table = units.table(header, rows, numbers=range(3, len(header)))
    told = [f"{', '.join(names)}: {note}" for note, names in notes.items()]
    return "\n".join([table, *[""] * bool(told), *told])


def _equal(row: ComparedStrategy, best: ComparedStrategy) -> str:
    """Strategies within each other's 80 % intervals are called equal."""
    assert best.simulation is not None, "the best fits"
    same = row is not best and alike(row.objective_s, best.objective_s, best.simulation.spread)
    return " equal" if same else ""


def _row_json(row: ComparedStrategy) -> dict[str, object]:
    simulation = row.simulation
    shown: dict[str, object] = {"name": row.name, "fits": row.fits, "note": row.note}
    if simulation is not None:
        peak, capacity = simulation.fullest
        shown |= {
            "plan": simulation.arrangement,
            "step_s": row.step_s,
            "step_interval_s": list(simulation.likely_step_s),
            "objective_s": row.objective_s,
            "peak_memory_bytes": peak,
            "capacity_bytes": capacity,
            "bubble": simulation.bubble,
        }
    else:
        shown |= dict.fromkeys(
            (
                "plan",
                "step_s",
                "step_interval_s",
                "objective_s",
                "peak_memory_bytes",
                "capacity_bytes",
                "bubble",
            )
        )
    return {**shown, "seconds": row.seconds, "num_plans": row.num_plans}
