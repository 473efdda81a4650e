"""`partita simulate`: time, bounds and memory of a model (or a plan) on a cluster.

Without a strategy the graph is simulated op by op. With one (`--tp 8 --pp 4 ...`) the answer is a
forecast of the training step of a transformer, with an interval.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita.cli.base import Output, OutputFile, common_options, refuse_twice
from partita.cli.model_options import (
    ModelOptions,
    calibration_option,
    dump_graph_option,
    model_options,
    write_dump,
)
from partita.cli.strategy_options import strategy_options
from partita.errors import InputError

if TYPE_CHECKING:
    from partita.timeline import Timeline


@click.command()
@click.argument("model")
@click.option("--cluster", "-c", help="A preset, 4xA100, 2x8xH100, or a .toml file.")
@calibration_option
@click.option("--gantt", is_flag=True, help="Draw the timeline here.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    callback=lambda ctx, option, path: path if path is None else OutputFile(path).path,
    help="Write a Perfetto trace here.",
)
@click.option("--top", type=click.IntRange(0), default=10, help="How many of the slowest ops.")
@click.option("--sensitivity", is_flag=True, help="What a strategy's forecast hangs on.")
@strategy_options
@dump_graph_option
@model_options
@common_options
def command(
    model: str,
    cluster: str | None,
    calibration: str | None,
    schedule: str | None,
    gantt: bool,
    trace: Path | None,
    top: int,
    sensitivity: bool,
    strategy: dict[str, Any] | None,
    dump_graph: Path | None,
    options: ModelOptions,
    out: Output,
) -> int:
    """Predict how a MODEL runs on a cluster: time, what bounds it, memory.

    MODEL is a zoo name (gpt2, inception_v3@299), a Hugging Face config.json, a saved graph, an ONNX
    file, file.py:function (which gives a PyTorch module and the arguments of a call), or a plan
    made by partita. A model without a plan is run data parallel over all devices.

    With any option of a strategy (--micro-batch, --tp, --pp, --zero, ...) the answer is a forecast
    of one training step of a transformer: zoo names, deepseek-v3 and the like, or a config.json.

    Without one, --execution says how kernels are started: graph (unless given) is the least a
    framework can take (every op one good kernel, a host that costs nothing: what plans are made
    for), eager has the kernels of PyTorch and a device that waits where its host is slower,
    compiled fuses chains of cheap ops.

    --schedule NAME is of a strategy. --schedule FILE.csv runs the stages of a plan in the order of
    a file of torch.distributed.pipelining (compute_only or compute_comms), with the plan's times
    and memory.

    Exit code 1 says that it does not fit the memory.
    """
    refuse_twice(trace, dump_graph)
    from partita.cluster.calibration import read_calibration
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
    execution = None
    if strategy is not None and set(strategy) == {"execution"}:  # of ops, not of a strategy
        execution, strategy = strategy["execution"], None
    if strategy is not None or sensitivity:
        _refuse_beside_strategy(plan is not None, gantt, trace, dump_graph, options)
        assert cluster is not None
        return _forecast(model, cluster, strategy or {}, options, sensitivity, out)
    measured = None if calibration is None else read_calibration(calibration)
    simulation = simulate(
        plan if plan is not None else model,
        cluster,
        execution=execution,
        calibration=measured,
        **options.as_dict(),
    )
    write_dump(dump_graph, simulation.workload.graph, out)
    if trace is not None:
        _write_trace(simulation.timeline, trace, out)
    out.show(simulation_text(simulation, top))
    if gantt:
        from partita.report.terminal import gantt as draw

        out.show("\n" + draw(simulation.timeline, fold=True))
    out.result(simulation_json(simulation))
    return 0 if simulation.fits else 1


def _write_trace(timeline: "Timeline", trace: Path, out: Output) -> None:
    """What runs when, for Perfetto: a lane for ranks that do the same."""
    from partita.report.lanes import representative
    from partita.report.trace import chrome_trace

    drawn = representative(timeline).timeline
    if out.save(OutputFile(trace), lambda: chrome_trace(drawn)) is not None:
        out.note(f"trace in {trace}; open it at ui.perfetto.dev or chrome://tracing")


def _refuse_beside_strategy(
    is_plan: bool, gantt: bool, trace: Path | None, dump: Path | None, options: ModelOptions
) -> None:
    """Refuse what a forecast by strategy does not have."""
    if is_plan:
        raise InputError(
            "is a plan, which has its own strategy", fix="leave the strategy out", field="MODEL"
        )
    for name, given in (("--gantt", gantt), ("--trace", trace), ("--dump-graph", dump)):
        if given:
            raise InputError(
                "a forecast by strategy has no ops to show",
                fix="leave it out, or leave the strategy out",
                field=name,
            )
    if not options.training:
        raise InputError(
            "a forecast by strategy is of a training step",
            fix="leave --infer or the strategy out",
            field="--infer",
        )
    if options.optimizer not in ("adam", "adamw"):
        raise InputError(
            f"a forecast by strategy is with Adam, not {options.optimizer}",
            fix="leave it out, or leave the strategy out",
            field="--optimizer",
        )


def _forecast(
    model: str, cluster: str, strategy: dict[str, Any], options: ModelOptions, sensitivity: bool,
    out: Output,
) -> int:  # fmt: skip
    """The answer of a strategy by name."""
    from partita.forecast.compare import sensitivity as examine
    from partita.jobs.forecast import forecast_model
    from partita.report import forecast as report

    keys = {**strategy, "batch": options.batch, "dtype": options.dtype}
    forecast = forecast_model(model, cluster, **keys)
    ways = report.fitting_ways(forecast)
    out.show(report.forecast_text(forecast, cluster, ways))
    result = report.forecast_json(forecast, cluster, ways)
    if sensitivity:
        examined = examine(forecast)
        out.show("\n" + report.sensitivity_text(examined))
        result["sensitivity"] = report.sensitivity_json(examined)
    out.result(result)
    return 0 if forecast.fits else 1


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
