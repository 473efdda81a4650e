"""Search problems: small numeric records, independent of graphs and torch.

    kind       record             what is decided
    sharding   ShardingProblem    a split of every op
    schedule   ScheduleProblem    when each block of each micro-batch runs
    partition  PartitionProblem   a stage for every node, a device for every stage
    placement  PlacementProblem   a device for every layer
    streams    StreamsProblem     which ops of one GPU run together, in which order
    rtasks     RtasksProblem      which tile of which op runs on which execution unit
    joint      JointProblem       cuts, devices, strategies, checkpointing and order of a plan

Each kind is a module here with the same names: the record and its solution, `read`, `from_json`,
`check` (what is wrong with a solution, in words), `evaluate` (its objective) and `lower_bound`.
This module chooses among them; the modules are imported when they are needed.
"""

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from partita import files
from partita.errors import FileError, ProblemError

KINDS = ("sharding", "schedule", "partition", "placement", "streams", "rtasks", "joint")


def load(path: str | Path, **options: Any) -> Any:
    """The problem in a file: `.npz` is sharding, JSON says its kind in `format`.

    Options are what the kind's file leaves open (`num_devices` of a partition problem, ...);
    one that is None is as if it were not given.
    """
    given = {name: value for name, value in options.items() if value is not None}
    file = str(path)
    data = files.read_bytes(path)
    if data.startswith(b"PK") or Path(path).suffix.lower() == ".npz":
        module = module_of("sharding")
        _refuse_unknown("sharding", module.from_npz, given, file)
        return module.from_npz(data, file)
    try:
        value = files.decode_json(data, file)
    except FileError as error:
        raise FileError(error.found, fix=_readable(), file=file) from None
    kind = _kind_of_format(value, file)
    module = module_of(kind)
    _refuse_unknown(kind, module.from_json, given, file)
    return module.from_json(value, file, **given)


def kind_of(problem: object) -> str:
    """Which kind of problem this record is."""
    name = type(problem).__name__
    for kind in KINDS:
        if name == f"{kind.capitalize()}Problem":
            return kind
    records = ", ".join(f"{kind.capitalize()}Problem" for kind in KINDS)
    raise ProblemError(f"found a {name}, which is no problem record", fix=f"give one of {records}")


def module_of(kind: str) -> ModuleType:
    """The module of one kind of problem."""
    if kind not in KINDS:
        raise ProblemError(f"found the kind {kind!r}", fix=f"choose one of {', '.join(KINDS)}")
    return importlib.import_module(f"partita.problems.{kind}")


def check(problem: Any, solution: Any) -> tuple[str, ...]:
    """What is wrong with this solution, one sentence each; empty if nothing is."""
    violations: tuple[str, ...] = module_of(kind_of(problem)).check(problem, solution)
    return violations


def evaluate(problem: Any, solution: Any) -> float:
    """The objective of a valid solution."""
    objective: float = module_of(kind_of(problem)).evaluate(problem, solution)
    return objective


def lower_bound(problem: Any) -> float:
    """A cheap bound that no valid solution goes below."""
    bound: float = module_of(kind_of(problem)).lower_bound(problem)
    return bound


def _kind_of_format(value: dict[str, Any], file: str) -> str:
    given = value.get("format")
    if given is not None and not isinstance(given, str):
        raise FileError("is not text", fix=_readable(), field="format", file=file)
    try:
        kind = files.format_kind(value, file)
    except FileError as error:
        raise FileError(error.found, fix=_readable(), field=error.field, file=file) from None
    if kind.removesuffix("-problem") in KINDS and kind.endswith("-problem"):
        return kind.removesuffix("-problem")
    raise FileError(
        f'found "partita/{kind}", which is no search problem',
        fix=_readable(),
        field="format",
        file=file,
    )


def _refuse_unknown(kind: str, reader: Any, options: dict[str, Any], file: str) -> None:
    """An option that this kind does not have was meant for another: say so."""
    parameters = inspect.signature(reader).parameters.values()
    known = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            fix = f"it has {', '.join(known)}" if known else "it has no options"
            wrong = f"a {kind} problem has no such option"
            raise ProblemError(wrong, fix=fix, field=name, file=file)


def _readable() -> str:
    formats = ", ".join(f"partita/{kind}-problem@1" for kind in KINDS)
    return f"what is read: JSON whose format is one of {formats}; or a sharding problem as .npz"
