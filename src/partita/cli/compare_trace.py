"""`partita compare-trace`: what was predicted and what was measured, side by side."""

from pathlib import Path

import click

from partita.cli.base import Output, OutputFile, common_options, refuse_twice
from partita.errors import InputError
from partita.plans import Plan, read_plan


@click.command("compare-trace")
@click.argument("plan")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--calibration", metavar="FILE",
    help="Write what was measured here; plan and simulate take it with --calibration FILE.",
)  # fmt: skip
@click.option("--trace-out", metavar="FILE", help="Write both as one trace for Perfetto.")
@click.option(
    "--top", type=click.IntRange(0), default=10, help="How many of the largest differences."
)
@click.option("--force", is_flag=True, help="Overwrite the files that are written.")
@common_options
def command(
    plan: str,
    trace: Path,
    calibration: str | None,
    trace_out: str | None,
    top: int,
    force: bool,
    out: Output,
) -> int:
    """Lay a measured run beside the prediction of its PLAN: per task, and in total.

    TRACE is the folder that partita run --trace wrote, or a Kineto trace (Chrome JSON) of
    torch.profiler. Each cause gets a sentence with numbers: products (what ops take), host (time
    between tasks), link (latency and bandwidth), interference (computing beside communication).

    \b
    torchrun --standalone --nproc-per-node 2 -m partita run plan.json --trace trace
    partita compare-trace plan.json trace --calibration measured.json
    partita simulate plan.json --calibration measured.json
    partita plan model.py:make -c 2xA100 --calibration measured.json -o better.json
    """
    record = read_plan(plan)
    files = [None if f is None else OutputFile(Path(f), force) for f in (calibration, trace_out)]
    refuse_twice(*files)
    if trace.is_file():
        return _kineto(record, trace, files, out)
    from partita.jobs.compare_trace import compare_trace
    from partita.jobs.run_trace import read_traces
    from partita.report.compared_trace import comparison_json, comparison_text, comparison_trace

    compared = compare_trace(record, read_traces(trace), top)
    out.show(comparison_text(compared))
    makes = (compared.calibration.to_json, lambda: comparison_trace(compared))
    measured, drawn = (
        None if file is None else out.save(file, make)
        for file, make in zip(files, makes, strict=True)
    )
    if measured is not None:
        out.show(
            f"\ncalibration in {measured}; use it with: "
            f"partita simulate {plan} --calibration {measured}"
        )
    if drawn is not None:
        out.show(f"trace in {drawn}; open it at ui.perfetto.dev")
    named = [None if path is None else str(path) for path in (measured, drawn)]
    out.result({**comparison_json(compared), "calibration": named[0], "trace": named[1]})
    return 0


def _kineto(record: Plan, trace: Path, files: list[OutputFile | None], out: Output) -> int:
    from partita.jobs.kineto import compare_kineto, read_kineto
    from partita.report.compared_trace import kineto_json, kineto_text

    if any(file is not None for file in files):
        raise InputError(
            "a Kineto trace does not say which task of the plan a kernel belongs to",
            fix="trace the run with partita run --trace, and give that folder",
            field="--calibration" if files[0] is not None else "--trace-out",
        )
    compared = compare_kineto(record, read_kineto(trace))
    out.show(kineto_text(compared))
    out.result(kineto_json(compared))
    return 0
