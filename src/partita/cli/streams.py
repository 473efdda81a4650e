"""`partita streams`: the ops of a model side by side on one GPU."""

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from partita import files, units
from partita.cli import INTERRUPTED
from partita.cli.base import Output, OutputFile, common_options, output_option
from partita.cli.progress import saying
from partita.errors import FileError, InputError

if TYPE_CHECKING:
    from partita.timeline import Timeline

MEASURED = (".json", ".py")
DRAWN = (".html", ".svg", ".trace.json")
ANALYTIC = (".json", *DRAWN)


def _batches(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and 0 < int(word) < 10**6 for word in words):
        raise click.BadParameter(f"found {text!r}, sizes like 1 or 1,16,32 are needed")
    return tuple(map(int, words))


@click.command()
@click.argument("model")
@click.option(
    "--device",
    type=click.Choice(["cuda", "analytic"]),
    default="cuda",
    show_default=True,
    help="Measure on this machine's GPU, or work with analytic costs.",
)
@click.option("--gpu", default="H200", show_default=True, help="Analytic: the kind of GPU.")
@click.option(
    "--batch", "-b", type=_batches, default="1", show_default=True,
    help="Samples per call; a schedule for each of 1,16,32.",
)  # fmt: skip
@click.option("--dtype", type=click.Choice(["f32", "f16", "bf16"]), help="Element type.")
@click.option("--method", help="Analytic: a search; see: partita methods streams.")
@click.option(
    "--time-limit", type=click.FloatRange(0, min_open=True), help="Seconds to search; 60 on a GPU."
)
@click.option("--profile", metavar="FILE", help="Keep measurements in this file.")
@click.option("--no-compile", is_flag=True, help="Leave torch.compile out of the comparison.")
@output_option(
    "Write the schedule (.json) here, from a GPU also as Python source (.py), from analytic costs "
    "also its page (.html) or timeline (.svg, .trace.json)."
)
@common_options
def command(model: str, device: str, output: OutputFile | None, out: Output, **options: Any) -> int:
    """Run the ops of a MODEL side by side on one GPU.

    MODEL is a zoo name (inception_v3, nasnet_large@331) or file.py:function, which gives a PyTorch
    module and the arguments of a call.

    On a GPU the model becomes one CUDA graph over several streams. Every candidate, the sequential
    graph and torch.compile among them, is checked and timed as a whole; the fastest is kept.

    Without a GPU, --device analytic finds stages and streams by a roofline in which ops share the
    processors, and draws the timeline of the best.
    """
    if device == "analytic":
        return _analytic(model, output, out, **options)
    return _measured(model, output, out, **options)


def _analytic(
    model: str, output: OutputFile | None, out: Output, *, gpu: str, batch: tuple[int, ...],
    dtype: str | None, method: str | None, time_limit: float | None, **_: Any,
) -> int:  # fmt: skip
    from partita.jobs.streams import streams_by_costs
    from partita.report.terminal import gantt

    ending = ".json" if output is None else output.ending(ANALYTIC)
    with out.stop(time_s=time_limit, words=lambda us: units.seconds(us * 1e-6)) as stop:
        streams = streams_by_costs(
            model, gpu, batch=batch[0], dtype=dtype, method=method, stop=stop, seed=out.seed
        )
    best = streams.best
    data = {
        "format": "partita/result@1",
        "problem": model,
        "device": streams.device.name,
        "method": best.method,
        "status": str(best.status),
        "objective": best.objective,
        "lower_bound": best.lower_bound,
        "seconds": sum(each.seconds for each in streams.results),
        "seed": out.seed,
        "why": best.why,
        "solution": None if best.solution is None else best.solution.to_json(),
        "candidates": {each.method: each.objective for each in streams.results},
        "ops": [op.name for op in streams.model.problem.ops],
    }
    written = None
    if output is not None:
        written = out.save(output, partial(_drawn, ending, data, streams.timeline, model))
    problem = streams.model.problem
    out.show(
        f"{problem.model} on {streams.device.name}: {len(problem.ops) - 1} launches in "
        f"{len(problem.parts)} parts, analytic costs"
    )
    for each in streams.results:
        if each.objective is not None:
            out.show(f"  {each.method:14}{each.objective:10.1f} us  {each.why}")
    if streams.timeline is not None:
        out.show("\n" + gantt(streams.timeline, out.width))
    if written is not None:
        out.show(f"written to {written}")
    out.show(f"measure it on a GPU with: partita streams {model} --device cuda")
    out.result(data)
    return 0 if best.solution is not None else 1


def _drawn(
    ending: str, data: dict[str, Any], timeline: "Timeline | None", title: str
) -> bytes | str:
    """The answer in the form that the name's ending says."""
    if ending == ".json":
        return files.encode_json(data)
    if timeline is None:
        raise InputError("there is no schedule to draw")
    if ending == ".html":
        return _page(data, timeline, title)
    if ending == ".svg":
        from partita.report.svg_timeline import timeline_svg

        return timeline_svg(timeline, title=title)
    from partita.report.trace import chrome_trace

    return chrome_trace(timeline)


def _page(data: dict[str, Any], timeline: "Timeline", title: str) -> str:
    """The streams as a page, beside what the other searches gave."""
    from partita.report.html_parts import table
    from partita.report.timeline_page import TimelineStory, timeline_page

    best, bound = data["objective"], data["lower_bound"] or 0.0
    rows = [
        (name, units.seconds(value * 1e-6), f"x{value / best:.2f}")
        for name, value in data["candidates"].items()
        if value is not None
    ]
    figures = (
        ("one inference", units.seconds(best * 1e-6), f"by {data['method']}: {data['why']}"),
        (
            "from optimal",
            f"≤ {1 - bound / best:.1%}",
            f"no order of these ops is below {units.seconds(bound * 1e-6)}",
        ),
        ("streams", f"{len(timeline.program.lanes)}", f"for {len(data['ops'])} launches"),
    )
    about = f"streams on {data['device']}, by a roofline in which ops share the processors"
    sections = ("<h2>What was tried</h2>", table(("method", "time", ""), rows, (1, 2)))
    return timeline_page(
        TimelineStory(title, about, timeline, figures, bound * 1e-6, sections=sections,
                      by_block=True)
    )  # fmt: skip


def _measured(
    model: str, output: OutputFile | None, out: Output, *, batch: tuple[int, ...],
    dtype: str | None, time_limit: float | None, profile: str | None, no_compile: bool, **_: Any,
) -> int:  # fmt: skip
    from partita.capture.installed import need_torch

    need_torch("measuring on a GPU (--device analytic needs no GPU)")
    from partita.gpu.model import streams_of
    from partita.gpu.streams.choose import INTERRUPTED as STOPPED
    from partita.gpu.streams.emit import emit

    weights = None
    if output is not None and output.path.name.lower().endswith(DRAWN):
        raise FileError(
            "draws a timeline by analytic costs, and measured streams have none",
            fix="add --device analytic", file=str(output.path),
        )  # fmt: skip
    if output is not None:
        output.ending(MEASURED)
    if output is not None and output.path.suffix == ".py":
        weights = OutputFile(output.path.with_suffix(".pt"), output.force)  # refused now if there

    time_s = time_limit or 60.0
    with saying(out.quiet, time_s * len(batch), out.note) as say:
        streamed = streams_of(
            model, batches=batch, dtype=dtype, time_s=time_s, profile=profile,
            compile=not no_compile, seed=out.seed, note=say,
        )  # fmt: skip
    written = None
    if output is not None and weights is not None:
        written = out.save(output, lambda: emit(streamed, str(weights.path)))
    elif output is not None:
        path, force = output.path, output.force
        written = out.keep(path, lambda: streamed.save(path, overwrite=force))
    for schedule in streamed.schedules:
        out.show(f"{model}, inputs {[list(shape) for shape in schedule.shapes]} {schedule.dtype}:")
        for label, time_us in sorted(schedule.times_us, key=lambda pair: pair[1]):
            kept = "  <- kept" if label == schedule.label else ""
            out.show(f"  {label:32}{units.seconds(time_us / 1e6):>10}{kept}")
        out.show(
            f"  error {schedule.error:.1e} against float64, the model's own "
            f"{schedule.model_error:.1e}; found in {schedule.seconds:.0f} s"
        )
        for note in schedule.notes:
            out.note(note)
    if written is not None:
        out.show(f"written to {written}")
    out.result(
        {
            "format": "partita/result@1",
            "problem": model,
            "schedules": [schedule.to_json() for schedule in streamed.schedules],
            "plan": None if written is None else str(written),
        }
    )
    stopped = any(STOPPED in schedule.notes for schedule in streamed.schedules)
    return INTERRUPTED if stopped else 0
