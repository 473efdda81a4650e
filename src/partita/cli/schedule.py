"""`partita schedule`: the best order of micro-batches for a placement under a memory cap."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita import files
from partita.cli.base import (
    PAGE,
    Output,
    OutputFile,
    common_options,
    output_option,
    refuse_twice,
)
from partita.cli.schedule_order import (
    GivenOrder,
    is_plan,
    order_of_file,
    order_of_name,
    order_of_plan,
    order_text,
)
from partita.errors import InputError, ProblemError
from partita.jobs.schedule import ScheduleResult, schedule
from partita.problems import schedule as problems
from partita.problems.schedule import ScheduleProblem, work_per_device
from partita.schedules.named import NAMED
from partita.schedules.order_problem import csv_pipeline, order_of_solution, placement_of_order
from partita.schedules.placement import asked
from partita.schedules.shapes import SHAPES, ShapeOptions, shape
from partita.schedules.torch_comms import in_loss_order, with_comms
from partita.schedules.torch_csv import torch_schedule
from partita.search.base import Status, Stop
from partita.units import number, seconds, table

if TYPE_CHECKING:
    from partita.jobs.baselines import Baseline  # compiled code: only --compare pays for it

DEVICES = 4  # of a shape, where no number is given
PLACED_S = 2.0  # for our schedule on each other placement that --compare shows

# What shapes (and orders, which have no blocks either) leave open: flag -> field of ShapeOptions.
FIGURES = {
    "--forward-span": "forward_span",
    "--backward-span": "backward_span",
    "--weight-span": "weight_span",
    "--block-memory": "memory",
    "--weight-memory": "weight_memory",
    "--shared-forward-span": "shared_forward_span",
    "--shared-backward-span": "shared_backward_span",
    "--shared-memory": "shared_memory",
    "--chunks": "chunks",
    "--delay": "delay",
}
SHARED = ("--shared-forward-span", "--shared-backward-span", "--shared-memory")
WRITTEN = {  # endings of what is written, by option
    "save": (".json",), "csv": (".csv",), "svg": (".svg",), "trace": (".json",), "page": PAGE,
}  # fmt: skip
ENDINGS = {
    Status.OPTIMAL: "proven optimal",
    Status.FEASIBLE: "not proven optimal",
    Status.STOPPED: "stopped early",
    Status.INFEASIBLE: "infeasible",
}


@dataclass(frozen=True, slots=True)
class ScheduleTable:
    """The table of published schedules and ours, and (title, why) of what is not in it."""

    rows: list[dict[str, Any]]
    left_out: tuple[tuple[str, str], ...]
    ran: "tuple[Baseline, ...]" = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be scheduled: the problem, and the order where that is given as well."""

    problem: ScheduleProblem
    given: GivenOrder | None = None


def _number(text: str) -> float:
    """A number, whole where it is written so."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"found {text!r}, a number is needed") from None


def _memory(text: str) -> float | tuple[float, ...]:
    """One number for all devices, or one for each with commas between."""
    caps = tuple(_number(part) for part in text.split(","))
    return caps if len(caps) > 1 else caps[0]


def _seconds(text: str) -> float:
    seconds = _number(text)
    if not seconds >= 0:
        raise click.BadParameter(f"found {text}, at least 0 is needed")
    return seconds


def _figures(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Options for the spans and memory of a shape's blocks, in the order of the help."""
    about = {
        "--forward-span": "Of a forward block; 1 if not given.",
        "--backward-span": "Of a backward block; 3 for most shapes.",
        "--weight-span": "Make weight gradients blocks of their own, of this span.",
        "--block-memory": "What a forward holds until its backward; 1.",
        "--weight-memory": "What of that is held until the weight gradients; all.",
        "--shared-forward-span": "Of a forward on all devices; 1.",
        "--shared-backward-span": "Of a backward on all devices.",
        "--shared-memory": "What a forward on all devices holds.",
        "--chunks": "Stages on each device: looped and wave; 2.",
        "--delay": "Between blocks on different devices; 0.",
    }
    for flag, text in reversed(about.items()):
        whole = flag == "--chunks"
        command = click.option(flag, metavar="V" if whole else "X", help=text,
                               type=int if whole else _number)(command)  # fmt: skip
    return command


@click.command()
@click.argument("placement")
@click.option("--devices", metavar="D", type=int, help=f"Of a shape; {DEVICES} if not given.")
@click.option("--microbatches", metavar="N", type=int, help="How many; else the period counts.")
@click.option("--memory", metavar="M", type=_memory, help="Cap of a device, or M,M,...; else none.")
@click.option("--infer", is_flag=True, help="Only the forward blocks of a shape.")
@click.option("--method", metavar="NAME", help="Which search; see: partita methods schedule.")
@click.option("--time-limit", metavar="SECONDS", type=_seconds, help="Stop after this long.")
@click.option("--compare", "comparing", is_flag=True, help="Show published schedules beside it.")
@_figures
@click.option("--save", metavar="FILE", help="Write the problem here; `partita solve` reads it.")
@click.option("--csv", "csv_file", metavar="FILE", help="Write the order for torch pipelining.")
@click.option("--comms", is_flag=True, help="With sends, receives, gathers in that CSV.")
@click.option("--svg", "svg_file", metavar="FILE", help="Write a picture here.")
@click.option("--trace", "trace_file", metavar="FILE", help="Write a Perfetto trace here.")
@click.option("--page", "page_file", metavar="FILE", help="Write a page to look around in here.")
@output_option("Write the result here, as with --json.", only_json=True)
@common_options
def command(
    placement: str,
    devices: int | None,
    microbatches: int | None,
    memory: float | tuple[float, ...] | None,
    infer: bool,
    method: str | None,
    time_limit: float | None,
    comparing: bool,
    save: str | None,
    csv_file: str | None,
    comms: bool,
    svg_file: str | None,
    trace_file: str | None,
    page_file: str | None,
    output: OutputFile | None,
    out: Output,
    **figures: Any,
) -> int:
    """Find the best order of micro-batches for PLACEMENT under a memory cap.

    PLACEMENT is a shape (vshape, xshape, mshape, nnshape, kshape, interlace_mlm, mllm, finetune,
    alphafold, looped, wave) or a problem file (.json). Nothing is shown that the verifier refuses.
    Ctrl-C stops with the best so far.

    An order is not searched but checked and run: a .csv of torch.distributed.pipelining, with or
    without messages; the name of a schedule (1f1b, zb-v, ...); a plan. --csv FILE writes any of
    them, and what is found, for torch; with --comms as it will run, messages included.
    """
    force = bool(click.get_current_context().params["force"])
    wanted = {
        "save": save, "csv": csv_file, "svg": svg_file, "trace": trace_file, "page": page_file,
    }  # fmt: skip
    targets = {n: OutputFile(Path(path), force) for n, path in wanted.items() if path is not None}
    refuse_twice(output, *targets.values())
    for name, target in targets.items():
        target.ending(WRITTEN[name])
    given = {flag: figures[flag[2:].replace("-", "_")] for flag in FIGURES}
    given = {flag: value for flag, value in given.items() if value is not None}
    if devices is not None:
        given["--devices"] = devices
    if comms and csv_file is None:
        raise InputError("is for --csv", fix="add --csv FILE, or leave it out", field="--comms")
    what = _with_limits(_asked(placement, given, infer, microbatches), memory, microbatches)
    if "csv" in targets:
        csv_pipeline(what.problem)  # refused before the work begins
    problem = None
    if "save" in targets:
        problem = out.save(targets["save"], lambda: files.encode_json(what.problem.to_json()))
    compared = None
    with out.stop(time_s=time_limit) as stop:
        if what.given is not None:
            result = _given_order(what.problem, what.given)
        else:
            result = _searched(what.problem, method, stop, out.seed)
        if comparing and result.outcome.solution is not None:
            compared = _compared(result, stop, out.seed)
    rows = None if compared is None else compared.rows
    data = {**result.to_json(), "compare": rows}
    if what.given is not None:
        data["torch"] = what.given.to_json()
    saved = None if output is None else out.save(output, lambda: files.encode_json(data))
    drawn = _write(targets, result, what.given, compared, comms, out)
    out.show(_as_text(result, compared, what.given))
    for path in (problem, *drawn, saved):
        if path is not None:
            out.show(f"written to {path}")
    out.result(data)
    return 0 if result.outcome.solution is not None else 1


# --- what is asked -------------------------------------------------------------------------------


def _asked(placement: str, given: dict[str, Any], infer: bool, microbatches: int | None) -> Asked:
    """The problem (and the order) that the words on the command line name."""
    path = Path(placement)
    if placement in NAMED:
        return _asked_named(placement, given, infer, microbatches)
    if placement.endswith(".csv") or is_plan(path):
        if microbatches is not None:
            _refuse("--microbatches", {"--microbatches": 1}, False, "an order, which has its own")
        order = order_of_file(path) if placement.endswith(".csv") else order_of_plan(path)
        return _asked_order(order, placement, given, infer)
    if placement.endswith(".json") or path.is_file() or "/" in placement:
        if given or infer:
            flag = next(iter(given), "--infer")
            raise ProblemError(
                "is for shapes", fix="leave it out, or change the file", field=flag, file=placement
            )
        problem = problems.read(path)
        return Asked(problem if problem.name else replace(problem, name=path.stem))
    return Asked(_asked_shape(placement, dict(given), infer))


def _asked_shape(name: str, given: dict[str, Any], infer: bool) -> ScheduleProblem:
    devices = given.pop("--devices", DEVICES)
    options = _options(given, infer)
    if name in SHAPES:
        steps = SHAPES[name].steps(2, 1)
        _refuse("--chunks", given, SHAPES[name].chunked, name)
        for flag in SHARED:
            _refuse(flag, given, any(step.shared for step in steps), name)
    try:
        return shape(name, devices, options).problem()
    except InputError as error:
        flags = {"shape": "PLACEMENT", "devices": "--devices", "num_devices": "--devices"}
        raise _typed(error, flags | _flags()) from None


def _asked_named(name: str, given: dict[str, Any], infer: bool, microbatches: int | None) -> Asked:
    """A published schedule by its name."""
    if microbatches is None:
        raise InputError(
            f"{name} is for a number of them", fix="add --microbatches 8", field="--microbatches"
        )
    chunked = NAMED[name].layout in ("looped", "wave")
    _refuse("--chunks", given, chunked, name)
    devices, chunks = given.get("--devices", DEVICES), given.get("--chunks", 2 if chunked else 1)
    for flag, count in (("--devices", devices), ("--chunks", chunks)):
        if count < 1:
            raise InputError(f"found {count}", fix="give 1 or more", field=flag)
    if microbatches < 1:
        raise InputError(f"found {microbatches}", fix="give 1 or more", field="--microbatches")
    rest = {flag: value for flag, value in given.items() if flag not in ("--devices", "--chunks")}
    return _asked_order(order_of_name(name, devices, chunks, microbatches), name, rest, infer)


def _asked_order(order: GivenOrder, source: str, given: dict[str, Any], infer: bool) -> Asked:
    for flag in ("--devices", "--chunks", *SHARED):
        _refuse(flag, given, False, source)
    if infer:
        _refuse("--infer", {"--infer": True}, False, source)
    try:
        problem = placement_of_order(order.order, _options(given, infer)).problem()
    except InputError as error:
        raise error.within(source) from None
    return Asked(replace(problem, name=order.name), order)


def _options(given: dict[str, Any], infer: bool) -> ShapeOptions:
    fields = {FIGURES[flag]: value for flag, value in given.items() if flag in FIGURES}
    try:
        return ShapeOptions(training=not infer, **fields)
    except InputError as error:
        raise _typed(error, _flags()) from None


def _with_limits(
    what: Asked, memory: float | tuple[float, ...] | None, microbatches: int | None
) -> Asked:
    if what.given is not None:
        microbatches = what.given.schedule.num_microbatches
    try:
        return replace(what, problem=asked(what.problem, memory, microbatches))
    except InputError as error:
        names = {"memory": "--memory", "microbatches": "--microbatches"}
        raise _typed(error, names) from None


def _flags() -> dict[str, str]:
    return {field: flag for flag, field in FIGURES.items()}


def _typed(error: InputError, flags: dict[str, str]) -> InputError:
    """The error with the option as it is typed."""
    field = flags.get(error.field, error.field)
    return type(error)(error.found, fix=error.fix, field=field, file=error.file)


def _refuse(flag: str, given: dict[str, Any], has: bool, what: str) -> None:
    """An option that would change nothing is a mistake, not to be passed over."""
    if flag in given and not has:
        raise InputError(f"says nothing to {what}", fix="leave it out", field=flag)


# --- what is found -------------------------------------------------------------------------------


def _searched(
    problem: ScheduleProblem, method: str | None, stop: Stop, seed: int
) -> ScheduleResult:
    try:
        return schedule(problem, method=method, stop=stop, seed=seed)
    except InputError as error:
        raise _typed(error, {"method": "--method"}) from None


def _given_order(problem: ScheduleProblem, given: GivenOrder) -> ScheduleResult:
    from partita.jobs.baselines import order_result

    return order_result(problem, given.order)


def _compared(result: ScheduleResult, stop: Stop, seed: int) -> ScheduleTable:
    """Published schedules and ours for the same number of micro-batches, the shortest first.

    Where a published one needs another placement, ours is there for that placement as well.
    """
    from partita.jobs.baselines import compare

    ours = result
    if result.problem.num_microbatches is None:
        ours = result.unroll(4 * result.problem.num_devices)
    compared = compare(result.problem, ours.num_microbatches)
    rows = [_our_row(ours, "ours", "this schedule", "as given", compared.baselines)]
    briefly = Stop(time_s=PLACED_S, interrupted=stop.interrupted)
    placed = {b.placement: b for b in compared.ran if b.placement != "as given"}
    for baseline in placed.values():
        count = baseline.num_microbatches // baseline.strategies
        problem = replace(baseline.problem, memory_capacity=result.problem.memory_capacity)
        this_result = schedule(problem, microbatches=count, stop=briefly, seed=seed)
        if this_result.outcome.solution is not None:
            names = ("ours-placed", "ours, placed so", baseline.placement)
            rows.append(_our_row(this_result, *names, baseline.strategies))
    rows += [_baseline_row(baseline, result.problem) for baseline in compared.ran]
    rows.sort(key=lambda row: (row["makespan"], not row["name"].startswith("ours")))
    return ScheduleTable(rows, compared.left_out, tuple(compared.ran))


def _our_row(
    ours: ScheduleResult, name: str, title: str, placement: str, ways: int
) -> dict[str, Any]:
    from partita.jobs.baselines import device_spans, fits

    return {
        "name": name,
        "title": title,
        "placement": placement,
        "microbatches": ours.num_microbatches * ways,
        "makespan": ours.makespan,
        "period": None if ours.period is None else ours.period / ways,
        "longest_span": max(device_spans(ours.timeline())),
        "bubble_rate": ours.bubble_rate,
        "peak_memory": max(ours.peak_memory),
        "fits": fits(ours.peak_memory, ours.problem),
    }


def _baseline_row(baseline: "Baseline", problem: ScheduleProblem) -> dict[str, Any]:
    return {
        "name": baseline.name,
        "title": baseline.title,
        "placement": baseline.placement,
        "microbatches": baseline.num_microbatches,
        "makespan": baseline.makespan,
        "period": baseline.period,
        "longest_span": baseline.longest_span,
        "bubble_rate": baseline.bubble_rate,
        "peak_memory": max(baseline.peak_memory),
        "fits": baseline.fits(problem),
    }


def _write(
    targets: dict[str, OutputFile], result: ScheduleResult, given: GivenOrder | None,
    compared: ScheduleTable | None, comms: bool, out: Output,
) -> list[Path | None]:  # fmt: skip
    """Write the forms of the schedule that were asked for, if there is one."""
    if result.outcome.solution is None:
        return []
    from partita.report.svg_timeline import timeline_svg
    from partita.report.trace import chrome_trace

    title = f"{result.problem.name}, {result.num_microbatches} micro-batches"
    forms: dict[str, Callable[[], bytes | str]] = {
        "csv": lambda: _torch_csv(result, given, comms),
        "svg": lambda: timeline_svg(result.timeline(), title=title),
        "trace": lambda: chrome_trace(result.timeline()),
        "page": lambda: _page(result, compared, title),
    }
    return [out.save(targets[name], make) for name, make in forms.items() if name in targets]


def _page(result: ScheduleResult, compared: ScheduleTable | None, title: str) -> str:
    """The schedule as papers draw it; with --compare the published ones under it."""
    from partita.report.small_timeline import SmallTimeline
    from partita.report.timeline_page import TimelineStory, timeline_page

    timeline = result.timeline()
    bound = result.lower_bound or 0.0
    is_whole = result.problem.num_microbatches is not None
    what = "makespan" if is_whole else "period"
    objective = result.objective or 0.0
    rivals = [
        SmallTimeline(
            b.title, f"{number(b.makespan)} steps", b.timeline,
            "" if b.placement == "as given" else b.placement,
        )
        for b in sorted(compared.ran if compared else (), key=lambda b: b.makespan)
        if b.num_microbatches == result.num_microbatches
    ]  # fmt: skip
    figures = (
        (what, f"{number(objective)} steps", result.why),
        (
            "from optimal",
            f"≤ {result.gap or 0:.1%}",
            f"no order of these blocks is below {number(bound)}",
        ),
        ("bubble", f"{result.bubble_rate or 0:.1%}", "of the time of all devices"),
        ("memory", number(max(result.peak_memory)), "at most on any device"),
    )
    about = _headline(result)
    return timeline_page(
        TimelineStory(
            title,
            about,
            timeline,
            figures,
            bound if is_whole else 0.0,
            rivals,
            as_in_papers=True,
            among="order of these blocks",
        )
    )


def _torch_csv(result: ScheduleResult, given: GivenOrder | None, comms: bool) -> str:
    """The order as torch reads it; one that was given keeps its pairs and messages."""
    if given is not None:
        schedule = given.schedule
    else:
        assert result.outcome.solution is not None
        schedule = torch_schedule(order_of_solution(result.problem, result.outcome.solution))
    schedule = in_loss_order(schedule)
    return (with_comms(schedule) if comms else schedule.compute_only()).to_csv()


# --- what is shown -------------------------------------------------------------------------------


def _as_text(
    result: ScheduleResult, compared: ScheduleTable | None, given: GivenOrder | None
) -> str:
    lines = [_headline(result)]
    if result.outcome.solution is None:
        ended = result.status is Status.INFEASIBLE
        lines.append("infeasible" if ended else "no schedule found")
        return "\n".join([*lines, result.why])
    facts = [*_facts(result), *(order_text(given) if given is not None else ())]
    lines += [*facts, "", _drawn(result)]
    if compared is not None:
        lines += [*_comparison(result, compared), ""]
    return "\n".join([*lines, _ending(result)])


def _headline(result: ScheduleResult) -> str:
    problem = result.problem
    count = problem.num_microbatches
    many = "micro-batches without end" if count is None else f"{count:,} micro-batches"
    caps = problem.memory_capacity
    if caps is None:
        cap = "no memory cap"
    else:
        cap = "memory cap " + ", ".join(map(number, caps[:1] if len(set(caps)) == 1 else caps))
    return (
        f"{problem.name}: {len(problem.blocks)} blocks on {problem.num_devices} devices, "
        f"{many}, {cap}; method {result.outcome.method}"
    )


def _facts(result: ScheduleResult) -> list[str]:
    """Makespan, period, bubbles, memory: a line each."""
    lines = []
    bound = ""
    if result.lower_bound is not None and result.gap:
        bound = f"   (at most {result.gap:.1%} from optimal, which is {number(result.lower_bound)}"
        bound += " or more)"
    if result.problem.num_microbatches is not None:
        assert result.makespan is not None
        rates = result.bubble_rates
        idle = f"{result.bubble_rate:.1%}"
        if max(rates) - min(rates) > 5e-4:
            idle += f" ({min(rates):.1%} to {max(rates):.1%} of a device)"
        lines.append(f"makespan  {number(result.makespan)}{bound}; devices idle {idle}")
        bound = ""
    if result.period is not None:
        busiest = max(work_per_device(result.problem)) / result.period
        lines.append(
            f"period    {number(result.period)} a micro-batch when it goes on{bound}; "
            f"the busiest device is idle {1 - busiest:.1%}"
        )
    peaks = ", ".join(map(number, result.peak_memory[:16]))
    more = ", ..." if len(result.peak_memory) > 16 else ""
    return [*lines, f"memory    {peaks}{more} at most on each device"]


def _drawn(result: ScheduleResult) -> str:
    from partita.report.terminal import gantt

    width = min(200, max(60, shutil.get_terminal_size((100, 24)).columns))
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return gantt(result.timeline(), width=width, color=color)


def _comparison(result: ScheduleResult, compared: ScheduleTable) -> list[str]:
    rows = compared.rows
    capped = result.problem.memory_capacity is not None
    header = ["   schedule", "placement", "makespan", "period", "span", "idle", "memory"]
    lines = [
        [
            f"{'->' if row['name'].startswith('ours') else '  '} {row['title']}",
            row["placement"],
            number(row["makespan"]),
            "-" if row["period"] is None else number(row["period"]),
            number(row["longest_span"]),
            f"{row['bubble_rate']:.1%}",
            number(row["peak_memory"]) + ("" if row["fits"] or not capped else " over"),
        ]
        for row in rows
    ]
    shown = [f"for {rows[0]['microbatches']:,} micro-batches:", table(header, lines, (2, 3, 4, 5))]
    shown.append("span: the longest that a device takes from its first start to its last end")
    reasons: dict[str, list[str]] = {}
    for title, why in compared.left_out:
        reasons.setdefault(why, []).append(title)
    return [*shown, *(f"not here: {', '.join(titles)}: {why}" for why, titles in reasons.items())]


def _ending(result: ScheduleResult) -> str:
    tried = result.outcome.evaluations
    more = f", {tried:,} evaluation{'s' * (tried != 1)}" if tried else ""
    return f"{ENDINGS[result.status]}: {result.why}; {seconds(result.outcome.seconds)}{more}"
