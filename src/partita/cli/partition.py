"""`partita partition`: cut a model into stages and give each a device."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita import units
from partita.cli.base import Output, OutputFile, common_options, output_option
from partita.cli.model_options import ModelOptions, model_options
from partita.cli.sizes import size_bytes

if TYPE_CHECKING:
    from partita.jobs.partition import Partitioned


@click.command()
@click.argument("model")
@click.option("--cluster", "-c", help="A preset, 4xA100, 2x8xH100, or a .toml file.")
@click.option("--devices", "-p", type=int, help="How many of its devices; alone: so many A100s.")
@click.option(
    "--cut",
    type=click.Choice(["modules", "anywhere"]),
    default="modules",
    show_default=True,
    help="Cut at the borders of modules, or wherever the busiest device is done first.",
)
@click.option("--method", help="A search for partition problems; see: partita methods partition.")
@click.option("--memory", metavar="SIZE", help="Use at most this much of a device: 16GB.")
@click.option("--recompute", is_flag=True, help="Run the forward again in the backward.")
@click.option("--stages", type=int, metavar="N", help="Exactly so many stages.")
@click.option("--straight", is_flag=True, help="At most one stage on a device.")
@click.option(
    "--microbatches", type=int, default=1, show_default=True, help="Parts of the batch per step."
)
@click.option(
    "--profile", type=click.Path(path_type=Path), help="Measured times; see: partita profile."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds to search.",
)
@click.option(
    "--gap",
    type=click.FloatRange(0, 1),
    default=0.005,
    show_default=True,
    help="Stop this close to the bound.",
)
@output_option("Write the plan here.", only_json=True)
@model_options
@common_options
def command(
    model: str,
    cluster: str | None,
    devices: int | None,
    memory: str | None,
    profile: Path | None,
    time_limit: float,
    gap: float,
    output: OutputFile | None,
    options: ModelOptions,
    out: Output,
    **constraints: Any,
) -> int:
    """Cut a MODEL into stages, each on one device, so that the busiest device is done first.

    MODEL is a zoo name (gpt2, inception_v3@299), a Hugging Face config.json, a saved graph, an ONNX
    file, or file.py:function. Stages begin and end at the borders of the model's modules, one stage
    on a device, and what a free cut would gain is said; with --cut anywhere that cut is made, and a
    device may hold several stages unless --straight is given. A device's time for a micro-batch
    is that of its ops and of all it sends and receives. What is found is simulated and verified.

    Exit code 1 says that nothing fits; the message says what would.
    """
    if cluster is None and devices is None:
        raise click.UsageError("give --cluster or --devices, for example: gpt2 --devices 4")
    from partita.costs.profiles import read_profile
    from partita.jobs.partition import partition

    with out.stop(time_s=time_limit, gap=gap, words=_milliseconds) as stop:
        partitioned = partition(
            model,
            cluster,
            devices=devices,
            memory=None if memory is None else size_bytes(memory, "--memory"),
            profile=None if profile is None else read_profile(profile),
            offer=True,
            stop=stop,
            seed=out.seed,
            **constraints,
            **options.as_dict(),
        )
    written = None
    if output is not None and partitioned.plan is not None:
        written = out.save(output, partitioned.plan.to_json)
    out.show(_text(partitioned))
    if written is not None:
        out.show(f"plan in {written}; look at it with: partita report {written} -o report.html")
    out.result(_data(partitioned, model, None if written is None else str(written)))
    return 0 if partitioned.plan is not None else 1


def _milliseconds(value: float) -> str:
    return units.seconds(value * 1e-3)


def _text(partitioned: "Partitioned") -> str:
    from partita.report.summary import likely_seconds

    result = partitioned.result
    if partitioned.plan is None or result.objective is None or partitioned.simulation is None:
        return f"no partition: {result.why}"
    lines = [
        f"{partitioned.workload.spec} on {partitioned.problem.num_devices} of "
        f"{partitioned.cluster.name}: "
        f"{len(partitioned.device_of)} stages, method {result.method}",
        f"busiest device  {_milliseconds(result.objective)} per micro-batch, predicted",
    ]
    if result.lower_bound is not None and result.gap is not None:
        bound = _milliseconds(result.lower_bound)
        ending = "proven optimal" if result.gap <= 1e-9 else f"at most {result.gap:.2%} away"
        lines.append(f"lower bound     {bound} for it on this cost model, over all cuts: {ending}")
    if partitioned.cut == "modules":
        lines.append(f"cut             {_cut_text(partitioned)}")
    step = f"simulated step  {likely_seconds(partitioned.simulation)}"
    count = partitioned.plan.schedule.num_microbatches
    parts = f"{count} micro-batches" if count > 1 else "the batch at once"
    lines.append(f"{step} ({partitioned.plan.schedule.name}, {parts})")
    least = partitioned.plan.prediction.lower_bound_s
    gap = 1 - least / partitioned.simulation.step_s if partitioned.simulation.step_s else 0.0
    lines.append(
        f"                on this cost model no step is below {units.seconds(least)}: at most "
        f"{gap:.1%} from optimal, filling and draining the pipeline included"
    )
    if not partitioned.simulation.fits:
        lines.append("the simulated peak memory is more than a device has")
    if partitioned.tied:
        lines.append(f"held twice, gradients to be added: {', '.join(partitioned.tied)}")
    return "\n".join([*lines, "", _table(partitioned), "", result.why])


def _cut_text(partitioned: "Partitioned") -> str:
    """Where it was cut, and what a free cut would gain."""
    free = partitioned.free
    if free is None:
        return "at module borders"
    return (
        f"at module borders; --cut anywhere: {_milliseconds(free.bottleneck_ms)} "
        f"({free.gain:.1%} less) in {free.num_stages} stages"
    )


def _table(partitioned: "Partitioned") -> str:
    from partita.report.summary import MEMORY_ERROR

    first: dict[int, str] = {}
    for name, stage in partitioned.stage_of.items():
        first.setdefault(stage, name)
    rows = [
        (
            str(report.stage),
            str(report.device),
            str(report.num_ops),
            _milliseconds(report.forward_ms),
            _milliseconds(report.backward_ms),
            units.size(report.sent_bytes),
            units.size(report.held_bytes),
            first[report.stage],
        )
        for report in partitioned.reports
    ]
    holds = f"holds {MEMORY_ERROR}"
    header = ("stage", "device", "ops", "forward", "backward", "sends", holds, "first op")
    return units.table(header, rows, numbers=range(7))


def _data(partitioned: "Partitioned", model: str, written: str | None) -> dict[str, Any]:
    result = partitioned.result
    return {
        "format": "partita/result@1",
        "problem": model,
        "cluster": partitioned.cluster.name,
        **result.figures(),
        "cut": partitioned.cut,
        "free_cut": None
        if partitioned.free is None
        else {name: getattr(partitioned.free, name) for name in partitioned.free.__slots__},
        "step_s": None if partitioned.simulation is None else partitioned.simulation.step_s,
        "step_interval_s": None
        if partitioned.simulation is None
        else list(partitioned.simulation.likely_step_s),
        "tied": list(partitioned.tied),
        "solution": None
        if partitioned.plan is None
        else {
            "stage_of": partitioned.stage_of,
            "device_of": {str(stage): device for stage, device in partitioned.device_of.items()},
        },
        "stages": [
            {name: getattr(report, name) for name in report.__slots__}
            for report in partitioned.reports
        ],
        "plan": written,
    }
