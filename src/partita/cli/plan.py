"""`partita plan`: how to run a model on a cluster, everything decided in one search."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from partita import files, units
from partita.cli.base import Output, OutputFile, common_options, output_option
from partita.cli.curve_options import CurveOptions, planned_curve, priced, what_if_options
from partita.cli.model_options import (
    ModelOptions,
    calibration_option,
    model_options,
    objective_option,
)
from partita.cli.sizes import size_bytes
from partita.jobs.constraints import DECISIONS

if TYPE_CHECKING:
    from partita.jobs.plan_result import Planned


@click.command()
@click.argument("model")
@click.option("--cluster", "-c", required=True, help="A preset, 4xA100, 2x8xH100, or a .toml file.")
@calibration_option
@objective_option
@click.option("--pin", multiple=True, metavar="WHAT=VALUE", help=f"Decide {', '.join(DECISIONS)}.")
@click.option("--forbid", multiple=True, metavar="WHAT=VALUE", help="Rule a value out.")
@click.option("--max-memory", metavar="SIZE", help="Use at most this much of a device: 40GB.")
@click.option(
    "--time-limit",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds to search.",
)
@click.option(
    "--gap",
    type=click.FloatRange(0, 1),
    default=0.01,
    show_default=True,
    help="Stop when the plan is proven to be this close to optimal.",
)
@click.option(
    "--start", metavar="FILE", help="A plan that is there already: the answer is never worse."
)
@click.option("--save", metavar="FILE", help="Write the problem here; `partita solve` reads it.")
@output_option("Write the plan here.")
@what_if_options
@model_options
@common_options
def command(
    model: str,
    cluster: str,
    calibration: str | None,
    objective: str,
    pin: tuple[str, ...],
    forbid: tuple[str, ...],
    max_memory: str | None,
    time_limit: float,
    gap: float,
    start: str | None,
    save: str | None,
    output: OutputFile | None,
    what_if: CurveOptions,
    options: ModelOptions,
    out: Output,
) -> int:
    """Plan how to run a MODEL on a cluster: splits, stages, devices, micro-batches, schedule.

    MODEL is a zoo name (gpt2, inception_v3@299), a Hugging Face config.json, a saved graph, an ONNX
    file, or file.py:function, which gives a PyTorch module and the arguments of a call. Every op
    may be split along any of its dims, the model cut into stages on groups of devices, activations
    recomputed, states sharded, micro-batches ordered by known schedules or one that is searched.
    What fits the memory and is fastest on the simulator is kept: never slower than a named
    strategy. No plan of the space that is named at the end is below the lower bound; --save writes
    the part of it for which strategies were worked out.

    With --devices 8..1024 it is a curve: a plan for each number of devices like those of
    --cluster 8xH100, on all cores, and the Pareto front of step, memory, devices and price; -o
    then writes the plan for --deadline and --budget, or the fastest.

    Exit code 1 says that nothing fits; the message says what would help.
    """
    from partita.cli.launching import launch_lines, launch_of
    from partita.cluster import resolve
    from partita.jobs.curve import CurveTask
    from partita.jobs.plan import plan
    from partita.jobs.prices import read_prices
    from partita.report.planned import planned_json, planned_text

    if calibration is not None:  # part of the machine's name, so that the plan says so
        cluster = f"{cluster}+{calibration}"
    budget = None if max_memory is None else size_bytes(max_memory, "--max-memory")
    if what_if.devices is not None:
        task = CurveTask(
            model, cluster, 0, objective=objective, pin=pin, forbid=forbid, max_memory=budget,
            time_s=time_limit, gap=gap, seed=out.seed, **options.as_dict(),
        )  # fmt: skip
        return planned_curve(task, what_if, output, out)
    if what_if.price is not None:
        read_prices(what_if.price, resolve(cluster))  # refused before anything is planned
    force = bool(click.get_current_context().params["force"])
    target = None if save is None else OutputFile(Path(save), force)
    with out.stop(time_s=time_limit, gap=gap, words=units.seconds) as stop:
        planned = plan(
            model, cluster, objective=objective, pin=pin, forbid=forbid, max_memory=budget,
            stop=stop, seed=out.seed, start=start, **options.as_dict(),
        )  # fmt: skip
    written = None
    if output is not None and planned.plan is not None:
        written = output.write(planned.plan.to_json())
    if target is not None and planned.problem is not None:
        target.write(files.encode_json(planned.problem.to_json()))
    out.show(planned_text(planned))
    lines, prices = priced(planned, what_if)
    for line in lines:
        out.show(line)
    out.show(f"space: {planned.space}")
    if target is not None:
        out.show(f"problem in {target.path}; solve it with: partita solve {target.path}")
    if written is not None:
        out.show(f"plan in {written}; look at it with: partita report {written} -o report.html")
    run = _run_command(planned, written)
    launch = launch_of(planned)
    for line in launch_lines(launch, run, written):
        out.show(line)
    answer = planned_json(planned, model, cluster, None if written is None else str(written))
    started = {"run": run if written is not None else None, "to_launch": launch, "what_if": prices}
    out.result({**answer, "space": planned.space, **started})
    return 0 if planned.best is not None else 1


def _run_command(planned: "Planned", written: Path | None) -> str | None:
    """What starts the plan; None for one that cannot be run."""
    from partita.jobs.launch_command import run_command, run_refusal

    if planned.plan is None or planned.best is None:
        return None
    if run_refusal(planned.plan, planned.best.simulation.workload.graph) is not None:
        return None
    return run_command(planned.plan, written or "plan.json")
