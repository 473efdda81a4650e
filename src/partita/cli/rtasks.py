"""`partita rtasks`: a whole model as one persistent kernel, planned tile by tile."""

from functools import partial
from typing import TYPE_CHECKING

import click

from partita import units
from partita.cli.base import Output, OutputFile, common_options, output_option
from partita.jobs.rtasks import FusedPlan

if TYPE_CHECKING:
    from partita.timeline import Timeline

FORMATS = (".json", ".txt", ".html", ".svg", ".trace.json", ".problem.json")


@click.command()
@click.argument("model")
@click.option("--with", "beside", multiple=True, metavar="MODEL", help="In the same kernel.")
@click.option("--device", default="H200", show_default=True, help="A kind of device.")
@click.option("--method", help="A search for rTasks; see: partita methods rtasks.")
@click.option("--time-limit", type=click.FloatRange(0, min_open=True), help="Seconds to search.")
@click.option("--run", "on_gpu", is_flag=True, help="Fuse it on this machine's GPU and measure.")
@click.option("--interpret", is_flag=True, help="Run it tile by tile, without a GPU: slow.")
@click.option("--batch", "-b", type=click.IntRange(1), help="Samples per call; 1.")
@click.option("--dtype", help="Element type of the parameters.")
@output_option(f"Write it here; the ending decides: {', '.join(FORMATS)}.")
@common_options
def command(
    model: str,
    beside: tuple[str, ...],
    device: str,
    method: str | None,
    time_limit: float | None,
    on_gpu: bool,
    interpret: bool,
    batch: int | None,
    dtype: str | None,
    output: OutputFile | None,
    out: Output,
) -> int:
    """Plan a MODEL as one persistent kernel: which tile of which op runs on which unit.

    Every op is cut into tiles; tiles are dealt to the execution units of one GPU so that units wait
    for data, not for each other's launches. The program of every unit (run, signal, wait) is proven
    safe before it is shown: all programs resident, no wait without a signal, none for ever. Costs
    are those of the roofline; no GPU is needed. With --with another model shares the kernel. The
    answer as -o FILE: .txt is the program of every unit, .html a page with the map of units and
    time, .svg and .trace.json its timeline, .problem.json the problem for partita solve.

    With --run the model is lowered to fused regions and fallbacks, compiled, checked and timed on
    this machine's GPU; --interpret does the same tile by tile in PyTorch, to see what is fused and
    that its numbers are the model's. -o FILE is then the report (.json), the programs of all
    regions (.txt) or the planned timeline of the first (.svg, .trace.json).
    """
    if on_gpu or interpret:
        from partita.cli.rtasks_run import run_it

        return run_it(
            model, output, out, beside=beside, device="cuda" if on_gpu else "cpu", kind=device,
            batch=batch or 1, dtype=dtype, method=method, time_s=time_limit,
        )  # fmt: skip
    from partita.jobs.rtasks import plan_rtasks

    suffix = None if output is None else output.ending(FORMATS)
    with out.stop(time_s=time_limit, words=_microseconds) as stop:
        fused = plan_rtasks(
            model, device, beside=beside, batch=batch, dtype=dtype, method=method, stop=stop,
            seed=out.seed,
        )  # fmt: skip
    written = None
    if output is not None and suffix is not None:
        written = out.save(output, partial(_content, suffix, fused))
    out.show(_text(fused))
    if written is not None:
        out.show(f"written: {written}")
    result = fused.result
    out.result(
        {
            "format": "partita/result@1",
            "problem": fused.model.problem.name,
            "method": result.method,
            "status": str(result.status),
            "objective": result.objective,
            "lower_bound": result.lower_bound,
            "seconds": result.seconds,
            "seed": result.seed,
            "why": result.why,
            "unfused_us": fused.model.unfused_s * 1e6,
            "alone_us": [seconds * 1e6 for seconds in fused.alone_s],
            "fallbacks": list(fused.model.fallbacks),
            "solution": None if result.solution is None else result.solution.to_json(),
        }
    )
    return 0 if result.solution is not None else 1


def _microseconds(value: float) -> str:
    return units.seconds(value * 1e-6)


def _content(suffix: str, fused: FusedPlan) -> bytes | str:
    from partita.files import encode_json

    if suffix == ".problem.json":
        return encode_json(fused.model.problem.to_json())
    if suffix == ".json":
        solution = fused.result.solution
        return encode_json({} if solution is None else solution.to_json())
    if suffix == ".txt":
        return f"{fused.program or ''}\n"
    timeline = fused.timeline()
    if suffix == ".html":
        return _page(fused, timeline)
    if suffix == ".svg":
        from partita.report.svg_timeline import timeline_svg

        return timeline_svg(timeline, title=fused.model.problem.name)
    from partita.report.trace import chrome_trace

    return chrome_trace(timeline)


def _page(fused: FusedPlan, timeline: "Timeline") -> str:
    """Units over time: who runs which op when, and what units wait for."""
    from partita.report.timeline_page import TimelineStory, timeline_page

    result, unfused = fused.result, fused.model.unfused_s
    assert fused.fused_s is not None
    bound_s = (result.lower_bound or 0.0) * 1e-6
    busy = float(timeline.utilisation().mean()) if timeline.program.lanes else 0.0
    figures = (
        ("one kernel", units.seconds(fused.fused_s), f"x{unfused / fused.fused_s:.2f} of op by op"),
        ("from optimal", f"≤ {result.gap or 0:.1%}",
         f"no schedule below {units.seconds(bound_s)}"),
        ("units busy", f"{busy:.0%}", f"of {len(timeline.program.lanes):,} on {fused.device}"),
        ("op by op", units.seconds(unfused), "as kernels of their own"),
    )  # fmt: skip
    about = f"rTasks: tiles of ops on the units of {fused.device}; {result.why}"
    story = TimelineStory(
        fused.model.problem.name, about, timeline, figures, bound_s, by_block=True
    )
    return timeline_page(story)


def _text(fused: FusedPlan) -> str:
    result, problem = fused.result, fused.model.problem
    lines = [f"{problem} ({fused.device}), method {result.method}"]
    if fused.fused_s is not None and fused.program is not None:
        unfused = fused.model.unfused_s
        steps = [step.action for veu in fused.program.veus for step in veu]
        lines += [
            f"one kernel   {units.seconds(fused.fused_s)}, at most {result.gap or 0:.1%} from "
            f"optimal (on this cost model no schedule of these tiles is below "
            f"{_microseconds(result.lower_bound or 0.0)})",
            f"op by op     {units.seconds(unfused)} as kernels of their own: "
            f"x{unfused / fused.fused_s:.2f}",
            f"programs     {len(fused.program.veus):,} of {steps.count('run'):,} tiles, "
            f"{steps.count('wait'):,} waits, {steps.count('signal'):,} signals; proven safe",
        ]
    if fused.alone_s and fused.fused_s:
        total = sum(fused.alone_s)
        each = ", ".join(map(units.seconds, fused.alone_s))
        lines.append(
            f"one by one   {units.seconds(total)} as kernels of their own, each fused ({each}): "
            f"x{total / fused.fused_s:.2f}"
        )
    if fused.model.fallbacks:
        named = ", ".join(fused.model.fallbacks[:5])
        lines.append(f"fallbacks    {len(fused.model.fallbacks)} ops have no tiles: {named}")
    return "\n".join([*lines, result.why])
