"""`partita simulate`: time, bounds and memory of a model (or a plan) on a cluster."""

from pathlib import Path

import click

from partita.cli.base import Output, common_options
from partita.cli.model_options import ModelOptions, dump_graph_option, model_options, write_dump
from partita.errors import InputError
from partita.files import write_atomically


@click.command()
@click.argument("model")
@click.option("--cluster", "-c", help="A preset, 4xA100, 2x8xH100, or a .toml file.")
@click.option("--schedule", metavar="FILE.csv", help="Run a plan's stages in this order.")
@click.option("--gantt", is_flag=True, help="Draw the timeline here.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Perfetto trace here.")
@click.option("--top", type=click.IntRange(0), default=10, help="How many of the slowest ops.")
@dump_graph_option
@model_options
@common_options
def command(
    model: str,
    cluster: str | None,
    schedule: str | None,
    gantt: bool,
    trace: Path | None,
    top: int,
    dump_graph: Path | None,
    options: ModelOptions,
    out: Output,
) -> int:
    """Predict how a MODEL runs on a cluster: time, what bounds it, memory.

    MODEL is a zoo name (gpt2, inception_v3@299), a Hugging Face config.json, a saved graph, an ONNX
    file, file.py:function (which gives a PyTorch module and the arguments of a call), or a plan
    made by partita. A model without a plan is run data parallel over all devices.

    --schedule FILE.csv runs the stages of a plan in the order of a file of
    torch.distributed.pipelining (compute_only or compute_comms), with the plan's times and memory.

    Exit code 1 says that it does not fit the memory.
    """
    from partita.jobs.simulate import simulate
    from partita.report.summary import simulation_json, simulation_text

    plan = _as_plan(model)
    if schedule is not None:
        from partita.jobs.torch_schedule import plan_with_schedule
        from partita.schedules.torch_csv import read_torch_csv

        if plan is None:
            raise InputError(
                "is for plans", fix="plan the model with: partita plan -o plan.json",
                field="--schedule",
            )  # fmt: skip
        plan = plan_with_schedule(plan, read_torch_csv(schedule), schedule)
    if plan is None and cluster is None:
        raise InputError("no cluster is given", fix="add --cluster 4xA100", field="--cluster")
    simulation = simulate(plan if plan is not None else model, cluster, **options.as_dict())
    write_dump(dump_graph, simulation.workload.graph)
    if trace is not None:
        from partita.report.trace import chrome_trace

        write_atomically(trace, chrome_trace(simulation.timeline))
        out.note(f"trace in {trace}; open it at ui.perfetto.dev or chrome://tracing")
    out.show(simulation_text(simulation, top))
    if gantt:
        from partita.report.terminal import gantt as draw

        out.show("\n" + draw(simulation.timeline))
    out.result(simulation_json(simulation))
    return 0 if simulation.fits else 1


def _as_plan(model: str):  # type: ignore[no-untyped-def]
    """The plan, if the file named is one."""
    if not model.endswith(".json") or not Path(model).is_file():
        return None
    from partita.files import decode_json, read_bytes
    from partita.plans import plan_from_json

    value = decode_json(read_bytes(model), model)
    if not str(value.get("format", "")).startswith("partita/plan@"):
        return None
    return plan_from_json(value, model)
