"""`partita solve FILE`: solve a saved problem of any kind, check the answer, show it."""

import re
from pathlib import Path
from typing import Any

import click

from partita import files, problems
from partita.cli.base import Output, OutputFile, common_options, output_option, suggest
from partita.errors import InputError, ProblemError
from partita.search import searches
from partita.search.base import Result, Search, Status
from partita.units import number, seconds

# What the files of a kind leave open: flag -> the reader's names for it.
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "schedule": {"--memory": ("memory",), "--microbatches": ("num_microbatches",)},
    "partition": {
        "--devices": ("num_devices",),
        "--bandwidth": ("bandwidth",),
        "--memory": ("memory",),
    },
    "streams": {"--prune": ("r", "s")},
}
FIELDS = {"memory_capacity": "--memory"} | {
    name: flag for flags in OPTIONS.values() for flag, names in flags.items() for name in names
}
OBJECTIVES = {
    "sharding": ("cost", "FLOP"),
    "partition": ("slowest device", "ms"),
    "placement": ("score", "ms"),
    "streams": ("latency", "us"),
    "rtasks": ("latency", "us"),
    "joint": ("step", "s"),
}
ENDINGS = {
    Status.OPTIMAL: "proven optimal",
    Status.FEASIBLE: "not proven optimal",
    Status.STOPPED: "stopped early",
    Status.INFEASIBLE: "infeasible",
}


def _amount(text: str) -> float:
    """A number of at least zero; NaN is none."""
    try:
        amount = float(text)
    except ValueError:
        raise click.BadParameter(f"found {text!r}, a number is needed") from None
    if not amount >= 0:
        raise click.BadParameter(f"found {text}, at least 0 is needed")
    return amount


def _memory(text: str) -> float | tuple[float, ...]:
    """One number for all devices, or one for each with commas between."""
    try:
        caps = tuple(float(part) for part in text.split(","))
    except ValueError:
        needed = "a number is needed, or one per device: 4,4,8"
        raise click.BadParameter(f"found {text!r}, {needed}") from None
    return caps if len(caps) > 1 else caps[0]


def _prune(text: str) -> tuple[int, int]:
    """`R,S`: groups of at most R ops, at most S groups in a stage."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*,\s*(\d{1,9})\s*", text)
    if match is None:
        raise click.BadParameter(f"found {text!r}, two whole numbers are needed: 3,8")
    return int(match[1]), int(match[2])


@click.command()
@click.argument("problem")
@click.option("--method", metavar="NAME", help="Which search; `partita methods` lists them.")
@click.option("--time-limit", metavar="SECONDS", type=_amount, help="Stop after this long.")
@click.option("--gap", metavar="FRACTION", type=_amount, help="Stop this close to the bound.")
@click.option(
    "--memory", metavar="M", type=_memory, help="schedule, partition: cap of a device, or M,M,..."
)
@click.option("--microbatches", metavar="N", type=int, help="schedule: how many; else the period.")
@click.option("--devices", metavar="P", type=int, help="partition: how many devices.")
@click.option("--bandwidth", metavar="B", type=_amount, help="partition: bytes per second.")
@click.option("--prune", metavar="R,S", type=_prune, help="streams: ops a group, groups a stage.")
@output_option("Write the result here, as with --json.", only_json=True)
@common_options
def command(
    problem: str,
    method: str | None,
    time_limit: float | None,
    gap: float | None,
    output: OutputFile | None,
    out: Output,
    **options: Any,
) -> int:
    """Solve PROBLEM, a saved problem file (JSON or .npz) of any kind.

    What is found is checked against the problem before it is shown. Ctrl-C stops with the best so
    far.
    """
    given = {f"--{name}": value for name, value in options.items() if value is not None}
    record = _load(problem, given)
    kind = problems.kind_of(record)
    search = _search(kind, method)
    with out.stop(time_s=time_limit, gap=gap or 0.0) as stop:
        result = search(record, stop, out.seed)
    _verify(record, result)
    name = _name(record) or Path(problem).stem
    data = _as_data(name, kind, result)
    written = None if output is None else out.save(output, lambda: files.encode_json(data))
    out.show(_as_text(name, kind, record, result))
    if written is not None:
        out.show(f"written to {written}")
    out.result(data)
    return 0 if result.solution is not None else 1


def _load(path: str, given: dict[str, Any]) -> Any:
    """The problem, with the options that its kind has; errors name the option as it is typed."""
    if given:
        _refuse_foreign(path, given)
    options: dict[str, Any] = {}
    for flag, value in given.items():
        names = next(flags[flag] for flags in OPTIONS.values() if flag in flags)
        options |= zip(names, value if flag == "--prune" else (value,), strict=True)
    try:
        return problems.load(path, **options)
    except ProblemError as error:
        flag = FIELDS.get(re.split(r"[\[.]", error.field)[0], "")
        if flag not in given:
            raise
        raise ProblemError(error.found, fix=error.fix, field=flag) from None


def _refuse_foreign(path: str, given: dict[str, Any]) -> None:
    """An option of another kind of problem is a mistake, not to be passed over."""
    data = files.read_bytes(path)
    if data.startswith(b"PK"):
        kind = "sharding"
    else:
        kind = files.format_kind(files.decode_json(data, path), path).removesuffix("-problem")
    if kind not in problems.KINDS:
        return  # not a problem at all, which the reader says better
    for flag in given:
        if flag not in OPTIONS.get(kind, {}):
            known = ", ".join(OPTIONS.get(kind, {}))
            raise ProblemError(
                f"a {kind} problem has no such option",
                fix=f"leave it out; there is {known}" if known else "leave it out",
                field=flag,
                file=path,
            )


def _search(kind: str, method: str | None) -> Search[Any, Any]:
    known = searches(kind)
    if method is None:
        return next(iter(known.values()))
    if method not in known:
        names = ", ".join(known)
        hint = suggest(method, tuple(known))
        also = "" if hint.startswith("known") else f" (for a {kind} problem there is {names})"
        raise InputError(f"found {method!r}", fix=hint + also, field="--method")
    return known[method]


def _verify(problem: Any, result: Result[Any]) -> None:
    """Refuse an answer that is not one, or that claims more than it is."""
    if result.solution is None:
        return
    violations = problems.check(problem, result.solution)
    result.check_claims(violations, lambda: problems.evaluate(problem, result.solution))


def _name(problem: Any) -> str:
    """What the file calls the problem, if it does."""
    names = (getattr(problem, field, "") for field in ("name", "model"))
    return next((name for name in names if isinstance(name, str) and name), "")


def _as_data(name: str, kind: str, result: Result[Any]) -> dict[str, Any]:
    return {
        "format": "partita/result@1",
        "problem": name,
        "kind": kind,
        **result.figures(),
        "solution": None if result.solution is None else result.solution.to_json(),
    }


def _as_text(name: str, kind: str, problem: Any, result: Result[Any]) -> str:
    what, unit = OBJECTIVES.get(kind, ("makespan", ""))
    if kind == "schedule" and problem.num_microbatches is None:
        what = "time per micro-batch"
    lines = [f"{name}: {kind} problem, method {result.method}"]
    if result.objective is None:
        lines.append("infeasible" if result.status is Status.INFEASIBLE else "no answer found")
    else:
        lines.append(f"{what}  {number(result.objective)} {unit}".rstrip())
    if result.lower_bound is not None and result.status in (Status.FEASIBLE, Status.STOPPED):
        away = "" if result.gap is None else f", at most {result.gap:.1%} from optimal"
        lines.append(f"lower bound  {number(result.lower_bound)} {unit}".rstrip() + away)
    ending = "" if result.objective is None else f"{ENDINGS[result.status]}: "
    lines.append(f"{ending}{result.why}")
    count = result.evaluations
    tried = f", {count:,} evaluation{'s' * (count != 1)}" if count else ""
    return "\n".join([*lines, f"{seconds(result.seconds)}{tried}"])
