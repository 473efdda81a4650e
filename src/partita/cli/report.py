"""`partita report`: a plan as text here, as a page, a picture, a trace or a table in a file."""

from functools import partial
from typing import TYPE_CHECKING

import click

from partita.cli.base import (
    Output,
    OutputFile,
    common_options,
    output_option,
)
from partita.errors import InputError
from partita.jobs.simulate import Simulation
from partita.plans import Plan

if TYPE_CHECKING:
    from partita.jobs.run_trace import RankTrace
    from partita.timeline import Timeline

FORMATS = (".html", ".svg", ".trace.json", ".csv", ".pickle", ".txt")
OF_TIMELINES = (".html", ".svg", ".trace.json", ".csv", ".txt")


@click.command()
@click.argument("plan")
@click.option(
    "--width", type=click.IntRange(40, 400), help="Columns of the timeline; those of the terminal."
)
@click.option(
    "--measured", metavar="FOLDER", help="Traces of a run of the plan: lanes under the predicted."
)
@output_option(f"Write a report here; the ending decides: {', '.join(FORMATS)}.")
@common_options
def command(
    plan: str, width: int | None, measured: str | None, output: OutputFile | None, out: Output
) -> int:
    """Draw a PLAN (or a saved timeline): what it predicts, the timeline of one step, memory.

    Text goes to the terminal. With -o report.html you get one self-contained page, with -o
    plan.svg the timeline as a picture, with -o plan.trace.json a trace for Perfetto, with -o
    tasks.csv a table of all tasks, with -o memory.pickle a file for PyTorch's memory viewer.

    With --measured, the folder that partita run --trace wrote, the page has what was measured
    under what was predicted.
    """
    from partita.jobs.simulate import simulate
    from partita.plans import read_plan
    from partita.report.summary import simulation_json, simulation_text
    from partita.report.terminal import gantt

    width = width or out.width
    if _is_timeline(plan):
        return _saved_timeline(plan, width, measured, output, out)
    suffix = None if output is None else output.ending(FORMATS)
    record = read_plan(plan)
    traces = _traces(record, measured)
    simulation = simulate(record)
    drawn = gantt(simulation.timeline, width=width, fold=True)
    text = f"{simulation_text(simulation)}\n\n{drawn}"
    out.show(text)
    written = None
    if output is not None and suffix is not None:
        content = partial(_content, suffix, record, simulation, traces, text)
        written = out.save(output, content)
    if written is not None:
        out.show(f"report in {written}")
    out.result({**simulation_json(simulation), "report": None if written is None else str(written)})
    return 0


def _traces(plan: Plan, folder: str | None) -> "tuple[RankTrace, ...]":
    """What a run of the plan recorded; a run of another one is refused."""
    if folder is None:
        return ()
    from partita.jobs.run_trace import check_plan_of, read_traces

    traces = read_traces(folder)
    check_plan_of(plan, traces)
    return traces


def _content(
    suffix: str, plan: Plan, simulation: Simulation, traces: "tuple[RankTrace, ...]", text: str
) -> bytes | str:
    if suffix == ".html":
        from partita.report.page import plan_page

        return plan_page(plan, simulation, traces)
    if suffix == ".pickle":
        from partita.jobs.memory_parts import memory_parts
        from partita.report.memory_snapshot import memory_snapshot

        return memory_snapshot(memory_parts(simulation))
    return _drawn(suffix, simulation.timeline, str(plan), text)


def _drawn(suffix: str, timeline: "Timeline", title: str, text: str) -> bytes | str:
    """Any timeline in the form that an ending says."""
    if suffix == ".svg":
        from partita.report.svg_timeline import timeline_svg

        return timeline_svg(timeline, title=title, fold=True)
    if suffix == ".trace.json":
        from partita.report.lanes import representative
        from partita.report.trace import chrome_trace

        return chrome_trace(representative(timeline).timeline)
    if suffix == ".csv":
        from partita.report.lanes import representative
        from partita.report.task_table import task_table

        return task_table(representative(timeline).timeline)
    return text + "\n"


# --- a timeline that was saved --------------------------------------------------------------------


def _is_timeline(name: str) -> bool:
    """Does the file say that it is one?"""
    from pathlib import Path

    path = Path(name)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"partita/timeline@' in file.read(200)


def _saved_timeline(
    name: str, width: int, measured: str | None, output: OutputFile | None, out: Output
) -> int:
    from partita.report.terminal import gantt
    from partita.report.timeline_page import TimelineStory, timeline_page
    from partita.timeline import read_timeline

    if measured is not None:
        raise InputError(
            "is for plans; this is a timeline", fix="give the plan that was run", field="--measured"
        )
    suffix = None if output is None else output.ending(OF_TIMELINES)
    timeline = read_timeline(name)
    text = gantt(timeline, width=width, fold=True)
    out.show(text)
    written = None
    if output is not None and suffix is not None:
        story = TimelineStory(name, str(timeline), timeline)
        written = out.save(
            output,
            lambda: (
                timeline_page(story) if suffix == ".html" else _drawn(suffix, timeline, name, text)
            ),
        )
    if written is not None:
        out.show(f"report in {written}")
    report = None if written is None else str(written)
    out.result(
        {
            "format": "partita/result@1",
            "makespan": timeline.makespan,
            "num_tasks": timeline.program.num_tasks,
            "report": report,
        }
    )
    return 0
