"""Options of what-if: numbers of devices, prices, deadline, budget, and how sweeps run."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita import files, units
from partita.cli.base import Output, OutputFile
from partita.cli.counted import Counted
from partita.errors import InputError

if TYPE_CHECKING:
    from partita.jobs.curve import Curve, CurveTask
    from partita.jobs.plan_simulator import Planned
    from partita.jobs.prices import Prices
    from partita.jobs.sweep import Sweeper

TIME = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*(s|sec|min|h|d)?", re.IGNORECASE)
UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


dask_option = click.option(
    "--dask",
    metavar="ADDRESS",
    default="",
    help="Workers of this Dask scheduler (tcp://host:8786, or its file) instead of processes.",
)


@dataclass(frozen=True, slots=True)
class CurveOptions:
    """What was asked for beside the plan itself."""

    devices: str | None
    price: str | None
    steps: int
    deadline_s: float | None
    budget: float | None
    workers: int
    results: str | None
    dask: str = ""

    @property
    def is_limited(self) -> bool:
        """Is there a deadline or a budget?"""
        return self.deadline_s is not None or self.budget is not None

    def sweeper(self, out: Output, parts: Counted) -> "Sweeper":
        """How the points are planned; `parts` hears of each."""
        from partita.jobs.sweep import Sweeper, SweepOutcome

        def told(place: int, outcome: SweepOutcome) -> None:
            state = "known" if outcome.is_known else outcome.why or "planned"
            answer = outcome.answer or {}
            rows = answer.get("rows", {}).values()
            times = [float(point["objective_s"]) for point in answer.get("points", ())]
            times += [float(objective) for objective, _ in rows]
            best = min(times, default=None)
            figure = "" if best is None else f", {units.seconds(best)}"
            bound = answer.get("lower_bound_s")
            parts(f"point {place + 1}: {state}{figure}", best, bound, outcome.is_known)

        def interrupted() -> bool:
            parts.tick()
            return out.interrupted

        results = None if self.results is None else Path(self.results)
        return Sweeper(self.workers, results, interrupted, told, dask=self.dask)


def sweep_options(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add the options of a sweep alone, handed to the command as `what_if: CurveOptions`."""

    @click.option("--devices", metavar="A..B", help="Compare on 8..1024 (doubling) or 8,12,64.")
    @click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0: all cores.")
    @click.option("--results", metavar="FILE", help="Keep points here, and go on from it.")
    @dask_option
    @functools.wraps(command)
    def wrapped(
        *args: Any, devices: str | None, workers: int, results: str | None, dask: str, **rest: Any
    ) -> int | None:
        asked = CurveOptions(devices, None, 1, None, None, workers, results, dask)
        _refuse_results(asked)
        return command(*args, what_if=asked, **rest)

    return wrapped


def _refuse_results(asked: CurveOptions) -> None:
    for name, given in (("--results", asked.results), ("--dask", asked.dask)):
        if given and asked.devices is None:
            raise InputError("is of several points", fix="add --devices 8..64", field=name)
    if asked.results is not None:  # it may be there: then it goes on
        OutputFile(Path(asked.results), force=True)


def what_if_options(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add the options, handed to the command as `what_if: CurveOptions`."""

    @click.option("--devices", metavar="A..B", help="Plan for 8..1024 (doubling) or 8,12,64.")
    @click.option("--price", metavar="PRICE", help="Of a device and hour: 2.5, or prices.toml.")
    @click.option("--steps", type=click.IntRange(1), default=1, help="Of the whole training.")
    @click.option("--deadline", metavar="TIME", help="For all steps: 20s, 90min, 12h, 14d.")
    @click.option("--budget", type=click.FloatRange(0, min_open=True), help="For all steps.")
    @click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0: all cores.")
    @click.option("--results", metavar="FILE", help="Keep points here, and go on from it.")
    @dask_option
    @functools.wraps(command)
    def wrapped(
        *args: Any, devices: str | None, price: str | None, steps: int, deadline: str | None,
        budget: float | None, workers: int, results: str | None, dask: str, **rest: Any,
    ) -> int | None:  # fmt: skip
        limit = None if deadline is None else _seconds(deadline)
        asked = CurveOptions(devices, price, steps, limit, budget, workers, results, dask)
        if budget is not None and price is None:
            raise InputError("needs prices", fix="add --price 2.5 or a list", field="--budget")
        _refuse_results(asked)
        return command(*args, what_if=asked, **rest)

    return wrapped


def _seconds(text: str) -> float:
    match = TIME.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise InputError(
            f"found {text!r}", fix="write a time such as 20s, 90min, 12h or 14d", field="--deadline"
        )
    return float(match[1]) * UNITS[(match[2] or "s").lower()]


def planned_curve(
    task: "CurveTask", what_if: CurveOptions, output: OutputFile | None, out: Output
) -> int:
    """The answer of `plan --devices`; `task` says all but the number of devices."""
    from dataclasses import replace

    from partita.cluster import resolve
    from partita.jobs.curve import cluster_of, curve, device_numbers
    from partita.jobs.prices import read_prices

    assert what_if.devices is not None
    tasks = []
    for number in device_numbers(what_if.devices):
        spec = cluster_of(task.cluster, number)
        tasks.append(replace(task, cluster=spec, num_devices=number, price=what_if.price or ""))
    prices = None
    if what_if.price is not None:  # a list that lacks a kind is refused before anything is planned
        prices = read_prices(what_if.price, resolve(tasks[0].cluster))
    with out.parts("points", len(tasks)) as parts:
        answer = curve(tasks, what_if.sweeper(out, parts))
    return show_curve(answer, task.model, task.cluster, what_if, prices, output, out)


def show_curve(
    answer: "Curve", model: str, cluster: str, what_if: CurveOptions, prices: "Prices | None",
    output: OutputFile | None, out: Output,
) -> int:  # fmt: skip
    """Print a curve, and write the plan that was chosen: for the limits, else the fastest."""
    from partita.report.curve import choice_text, curve_json, curve_text

    choice = answer.choice(what_if.steps, what_if.deadline_s, what_if.budget)
    out.show(curve_text(answer, None, prices))
    if what_if.is_limited:
        limits = (what_if.steps, what_if.deadline_s, what_if.budget)
        out.show(choice_text(choice, *limits, prices))
    written = None
    if output is not None and choice is not None:
        whole = answer.plans[choice.cluster]
        written = out.save(output, lambda: files.encode_json(whole))
    if written is not None and choice is not None:
        out.show(f"plan for {choice.cluster} in {written}")
    told = curve_json(answer, model, cluster, choice)
    out.result({**told, "output": None if written is None else str(written)})
    return 0 if choice is not None else 1


def priced(planned: "Planned", what_if: CurveOptions) -> tuple[list[str], dict[str, Any] | None]:
    """Price, front and limits of a plan for one machine: lines, and the same for programs."""
    from partita.jobs.curve import curve_of
    from partita.jobs.prices import read_prices
    from partita.report.curve import choice_text, curve_json, curve_text

    if planned.best is None or (what_if.price is None and not what_if.is_limited):
        return [], None
    cluster = planned.best.simulation.cluster
    prices = None if what_if.price is None else read_prices(what_if.price, cluster)
    answer = curve_of(planned, prices)
    limits = (what_if.steps, what_if.deadline_s, what_if.budget)
    choice = answer.choice(*limits)
    lines = ["", curve_text(answer, None, prices)]
    if what_if.is_limited:
        lines.append(choice_text(choice, *limits, prices))
    told = curve_json(answer, planned.best.simulation.workload.spec, cluster.name, choice)
    return lines, told
