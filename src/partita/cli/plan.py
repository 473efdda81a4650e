"""`partita plan`: how to run a model on a cluster, everything decided in one search."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita import files, units
from partita.cli.base import Output, OutputFile, common_options, output_option, refuse_twice
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
    from partita.jobs.plan_simulator import Planned
    from partita.jobs.vanish import Vanished


@click.command()
@click.argument("model")
@click.option("--cluster", "-c", help="A preset, 4xA100, 2x8xH100, or a .toml file.")
@calibration_option
@objective_option
@click.option("--pin", multiple=True, metavar="WHAT=VALUE", help=f"Decide {', '.join(DECISIONS)}.")
@click.option("--forbid", multiple=True, metavar="WHAT=VALUE", help="Rule a value out.")
@click.option(
    "--cut",
    type=click.Choice(["modules", "anywhere"]),
    help="Where stages begin: at the borders of the model's blocks, or where that is fastest; "
    "unless given, at the borders where that costs half a percent at most.",
)
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
@click.option(
    "--without",
    multiple=True,
    metavar="NODE",
    help="Also plan for the machine without this node or device, and say what moving costs.",
)
@click.option("--save", metavar="FILE", help="Write the problem here; `partita solve` reads it.")
@output_option("Write the plan here.", only_json=True)
@what_if_options
@model_options
@common_options
def command(
    model: str,
    cluster: str | None,
    calibration: str | None,
    objective: str,
    pin: tuple[str, ...],
    forbid: tuple[str, ...],
    cut: str | None,
    max_memory: str | None,
    time_limit: float,
    gap: float,
    start: str | None,
    without: tuple[str, ...],
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

    With --without n3 the machine that is left if node n3 goes is planned for, too (within another
    --time-limit), and what moving parameters and states there costs is said; with -o plan.json that
    plan is written as plan.without-n3.json. MODEL may then be a plan that is running already.

    Exit code 1 says that nothing fits; the message says what would help.
    """
    from partita.cli.vanishing import answer_for_plan, beside, is_plan_file
    from partita.cluster import resolve
    from partita.jobs.curve import CurveTask
    from partita.jobs.plan import plan
    from partita.jobs.prices import read_prices
    from partita.jobs.vanish import machine_without, vanished

    if cluster is None and without and is_plan_file(model):
        return answer_for_plan(model, without, time_limit, gap, output, out)
    if cluster is None:
        raise click.UsageError("Missing option '--cluster' / '-c'.")
    if calibration is not None:  # part of the machine's name, so that the plan says so
        cluster = f"{cluster}+{calibration}"
    asked: dict[str, Any] = {
        "objective": objective, "forbid": forbid, "seed": out.seed,
        "pin": pin if cut is None else (*pin, f"cut={cut}"),
        "max_memory": None if max_memory is None else size_bytes(max_memory, "--max-memory"),
        **options.as_dict(),
    }  # fmt: skip
    if what_if.devices is not None:
        task = CurveTask(model, cluster, 0, time_s=time_limit, gap=gap, **asked)
        return planned_curve(task, what_if, output, out)
    if what_if.price is not None:  # these are refused before anything is planned
        read_prices(what_if.price, resolve(cluster))
    if without:
        machine_without(resolve(cluster), without)
    other = None if output is None or not without else beside(output, without)
    force = bool(click.get_current_context().params["force"])
    problem = None if save is None else OutputFile(Path(save), force)
    refuse_twice(output, other, problem)
    with out.stop(time_s=time_limit, gap=gap, words=units.seconds) as stop:
        planned, gone = plan(model, cluster, stop=stop, start=start, **asked), None
    written = _saved(planned, output, problem, out)
    if without and planned.plan is not None:
        with out.stop(time_s=time_limit, gap=gap, words=units.seconds) as stop:
            gone = vanished(planned.plan, without, partial(plan, model, stop=stop, **asked))
    out.result(_shown(planned, gone, (*written, other), what_if, (model, cluster), out))
    return 0 if planned.best is not None else 1


def _saved(
    planned: "Planned", output: OutputFile | None, problem: OutputFile | None, out: Output
) -> tuple[Path | None, Path | None]:
    """Where the plan and the joint problem are written, if they are."""
    plan, joint = planned.plan, planned.problem
    return (
        None if output is None or plan is None else out.save(output, plan.to_json),
        None if problem is None or joint is None
        else out.save(problem, lambda: files.encode_json(joint.to_json())),
    )  # fmt: skip


def _shown(
    planned: "Planned",
    gone: "Vanished | None",
    targets: tuple[Path | None, Path | None, OutputFile | None],
    what_if: CurveOptions,
    names: tuple[str, str],
    out: Output,
) -> dict[str, Any]:
    """Say all of it, where it was written too, and give it for programs."""
    from dataclasses import asdict

    from partita.cli.launching import launch_lines, launch_of
    from partita.cli.vanishing import show_vanished
    from partita.jobs.fewer import fewer_devices
    from partita.report.planned import fewer_text, planned_json, planned_text

    (written, problem, beside), other = targets, planned.cut_otherwise
    out.show(planned_text(planned))
    fewer = fewer_devices(planned)
    if fewer is not None:
        out.show(fewer_text(fewer))
    vanishing = None if gone is None else show_vanished(gone, beside, out)
    lines, prices = priced(planned, what_if)
    for line in lines:
        out.show(line)
    inside = _blocks_cut(planned)
    for line in _cut_lines(planned, inside):
        out.show(line)
    out.show(f"space: {planned.space}")
    if problem is not None:
        out.show(f"problem in {problem}; solve it with: partita solve {problem}")
    if written is not None:
        out.show(f"plan in {written}; look at it with: partita report {written} -o report.html")
    run = _run_command(planned, written)
    launch = launch_of(planned)
    for line in launch_lines(launch, run, written):
        out.show(line)
    return {
        **planned_json(planned, *names, None if written is None else str(written)),
        "space": planned.space,
        "run": run if written is not None else None,
        "to_launch": launch,
        "blocks_cut": inside,
        "cut_otherwise": None if other is None else other.objective_s,
        "what_if": prices,
        "without": vanishing,
        "fewer_devices": None if fewer is None else asdict(fewer),
    }


def _blocks_cut(planned: "Planned") -> dict[str, str]:
    """The first ops of stages that begin inside of a block of the model, and the blocks."""
    from partita.graph.chain import cut_blocks

    if planned.plan is None or planned.best is None:
        return {}
    graph = planned.best.simulation.workload.graph
    forward = {op.name for op in graph.ops if op.phase == "forward"}
    firsts = [
        next((split.op for split in stage.splits if split.op in forward), "")
        for stage in planned.plan.stages
    ]
    return cut_blocks(graph, firsts)


def _cut_lines(planned: "Planned", inside: dict[str, str]) -> list[str]:
    """Where stages begin, and what it would cost or gain if they began elsewhere."""
    best, other = planned.best, planned.cut_otherwise
    gain = None
    if best is not None and other is not None:
        gain = abs(other.objective_s / best.objective_s - 1)
    if inside:
        begin = "begins" if len(inside) == 1 else "begin"
        costs = "" if gain is None else f" (these stages moved there are {gain:.1%} slower)"
        return [
            f"{units.counted(len(inside), 'stage')} {begin} inside of a block "
            f"({next(iter(inside.values()))}); blocks stay whole with --cut modules{costs}"
        ]
    if gain is None:
        return []
    return [
        "stages begin between the blocks of the model; "
        f"inside of them: {gain:.1%} faster, with --cut anywhere"
    ]


def _run_command(planned: "Planned", written: Path | None) -> str | None:
    """What starts the plan; None for one that cannot be run."""
    from partita.jobs.launch_command import run_command, run_refusal

    if planned.plan is None or planned.best is None:
        return None
    if run_refusal(planned.plan, planned.best.simulation.workload.graph) is not None:
        return None
    return run_command(planned.plan, written or "plan.json")
