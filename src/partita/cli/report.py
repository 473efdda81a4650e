"""`partita report`: a plan as text here, as a page, a picture or a trace in a file."""

from functools import partial

import click

from partita.cli.base import Output, OutputFile, common_options, output_option
from partita.jobs.simulate import Simulation
from partita.plans import Plan

FORMATS = (".html", ".svg", ".trace.json", ".txt")


@click.command()
@click.argument("plan")
@click.option(
    "--width", type=click.IntRange(40, 400), help="Columns of the timeline; the terminal's."
)
@output_option(f"Write a report here; the ending decides: {', '.join(FORMATS)}.")
@common_options
def command(plan: str, width: int | None, output: OutputFile | None, out: Output) -> int:
    """Draw a PLAN: what it predicts, the timeline of one step, memory.

    Text goes to the terminal. With -o report.html you get one self-contained page, with -o
    plan.svg the timeline as a picture, with -o plan.trace.json a trace for Perfetto.
    """
    from partita.jobs.simulate import simulate
    from partita.plans import read_plan
    from partita.report.summary import simulation_json, simulation_text
    from partita.report.terminal import gantt

    suffix = None if output is None else output.ending(FORMATS)
    record = read_plan(plan)
    simulation = simulate(record)
    drawn = gantt(simulation.timeline, width=width or out.width, fold=True)
    text = f"{simulation_text(simulation)}\n\n{drawn}"
    out.show(text)
    written = None
    if output is not None and suffix is not None:
        content = partial(_content, suffix, record, simulation, text)
        written = out.save(output, content)
    if written is not None:
        out.show(f"report in {written}")
    out.result({**simulation_json(simulation), "report": None if written is None else str(written)})
    return 0


def _content(suffix: str, plan: Plan, simulation: Simulation, text: str) -> bytes | str:
    if suffix == ".html":
        from partita.report.page import plan_page

        return plan_page(plan, simulation)
    if suffix == ".svg":
        from partita.report.svg_timeline import timeline_svg

        return timeline_svg(simulation.timeline, title=str(plan), fold=True)
    if suffix == ".trace.json":
        from partita.report.lanes import unfolded
        from partita.report.trace import chrome_trace

        return chrome_trace(unfolded(simulation.timeline))
    return text + "\n"
