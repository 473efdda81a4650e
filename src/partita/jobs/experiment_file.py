"""An experiment as a TOML file: networks x machines x optimisers x seeds, each a run.

    name = "bandwidth"
    semantics = "exprimo"            # or partita, the default
    seeds = [0, 1, 2]
    evaluations = 20000              # and, or instead: time_limit_s = 5
    batches = [1, 10]                # batches in a step; a list is a sweep
    in_flight = 4                    # at most so many at once; a list is a sweep

    [[networks]]
    model = "resnet50"               # whatever `partita place` takes
    batch = 128

    [[clusters]]
    cluster = "malvik"
    bandwidth = [0.25, 1, 4]         # times what its links have; a sweep
    memory = [1, 0.5]                # times what its devices have; a sweep
    memory_GB = { "gpu*" = 2.5 }     # or so much on these devices

    [[problems]]                     # saved problem files, in place of networks and clusters
    file = "alexnet.json"

    [[optimisers]]
    method = "map-elites"
    parameters = { rounds = 100 }

    [[measured]]                     # what somebody measured, to compare with
    network = "gpt"
    batches = 24
    step_s = 1.53
    source = "..."

Paths are relative to the file. Every field is checked before anything runs; of a name that is not
known, the nearest is suggested.
"""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from partita.costs.placement import SEMANTICS
from partita.errors import FileError, InputError
from partita.files import read_bytes
from partita.search import searches
from partita.suggest import suggest

MAX_RUNS = 10_000


@dataclass(frozen=True)
class NetworkSpec:
    """A model to place."""

    model: str
    name: str = ""
    batch: int | None = None
    dtype: str | None = None
    training: bool = True
    optimizer: str = "adamw"


@dataclass(frozen=True)
class ClusterSpec:
    """A machine, and factors to sweep its links and memory by."""

    cluster: str
    name: str = ""
    bandwidth: tuple[float, ...] = (1.0,)
    memory: tuple[float, ...] = (1.0,)
    memory_GB: dict[str, float] = field(default_factory=dict)  # noqa: N815 - the file's spelling


@dataclass(frozen=True)
class ProblemSpec:
    """A saved placement problem."""

    file: str
    name: str = ""


@dataclass(frozen=True)
class OptimiserSpec:
    """A search by name, with its parameters."""

    method: str
    name: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    evaluations: int | None = None
    time_limit_s: float | None = None


@dataclass(frozen=True)
class MeasuredSpec:
    """A published or own measurement of one case."""

    step_s: float
    source: str
    name: str = ""
    network: str | None = None
    cluster: str | None = None
    batches: int | None = None
    in_flight: int | None = None


@dataclass(frozen=True)
class Experiment:
    """Everything an experiment file says."""

    name: str
    description: str = ""
    semantics: str = "partita"
    seeds: tuple[int, ...] = (0,)
    evaluations: int | None = None
    time_limit_s: float | None = None
    batches: tuple[int, ...] = (1,)
    in_flight: tuple[int, ...] = ()  # at once; none: as many as there are devices
    pin: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    colocate: tuple[str, ...] = ()
    max_devices: int | None = None
    networks: tuple[NetworkSpec, ...] = ()
    clusters: tuple[ClusterSpec, ...] = ()
    problems: tuple[ProblemSpec, ...] = ()
    optimisers: tuple[OptimiserSpec, ...] = ()
    measured: tuple[MeasuredSpec, ...] = ()
    folder: str = ""  # that of the file: paths are relative to it


TABLES: dict[str, type] = {
    "networks": NetworkSpec,
    "clusters": ClusterSpec,
    "problems": ProblemSpec,
    "optimisers": OptimiserSpec,
    "measured": MeasuredSpec,
}
MANY = frozenset(
    {"bandwidth", "memory", "batches", "in_flight", "seeds"}
)  # a single value is a list of one


def read_experiment(path: str | Path) -> Experiment:
    """The experiment in a file, checked."""
    try:
        value = tomllib.loads(read_bytes(path).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileError(
            f"is not TOML ({error})", fix="see docs/placement.md for an example", file=str(path)
        ) from None
    try:
        return experiment_from(value, str(Path(path).parent))
    except InputError as error:
        raise (error if error.file else error.within(str(path))) from None


def experiment_from(value: Mapping[str, Any], folder: str = "") -> Experiment:
    """The experiment in decoded TOML."""
    known = [f.name for f in dataclasses.fields(Experiment) if f.name != "folder"]
    _check_names(value, known, "")
    tables: dict[str, Any] = {}
    for name, kind in TABLES.items():
        rows = value.get(name, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError("is no table", fix=f"write [[{name}]]", field=name)
        tables[name] = tuple(_record(row, kind, f"{name}[{i}]") for i, row in enumerate(rows))
    plain = {key: item for key, item in value.items() if key not in TABLES}
    if isinstance(plain.get("seeds"), int) and not isinstance(plain["seeds"], bool):
        plain["seeds"] = list(range(plain["seeds"]))  # so many of them
    experiment: Experiment = _record(plain | {"folder": folder}, Experiment, "")
    experiment = dataclasses.replace(experiment, **tables)
    _check(experiment)
    return experiment


def _record(row: Mapping[str, Any], kind: type, where: str) -> Any:
    names = [f.name for f in dataclasses.fields(kind)]
    _check_names(row, names, where)
    values = {
        key: [item] if key in MANY and not isinstance(item, list) and kind is not MeasuredSpec
        else item
        for key, item in row.items()
    }  # fmt: skip
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).rpartition(" - at ")
        inner = path.strip("`").removeprefix("$").removeprefix(".") if message else ""
        parts = [part for part in (where, inner) if part]
        raise InputError(
            message or str(error), fix="correct this field", field=".".join(parts)
        ) from None


def _check_names(row: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in row:
        if key not in known:
            raise InputError(
                f"there is no field {key!r}", fix=suggest(key, known), field=where or key
            )


def _check(experiment: Experiment) -> None:
    if not experiment.name or not experiment.name.isprintable():
        raise InputError("is empty", fix="give the experiment a name", field="name")
    if experiment.semantics not in SEMANTICS:
        raise InputError(
            f"found {experiment.semantics!r}",
            fix=suggest(experiment.semantics, SEMANTICS),
            field="semantics",
        )
    if bool(experiment.networks) != bool(experiment.clusters) or not (
        experiment.networks or experiment.problems
    ):
        raise InputError(
            "there is nothing to place",
            fix="give [[networks]] and [[clusters]], or [[problems]]",
            field="networks",
        )
    if not experiment.optimisers:
        raise InputError("is missing", fix="give [[optimisers]]", field="optimisers")
    for name in ("batches", "seeds"):
        _check_many(getattr(experiment, name), name, least=1 if name == "batches" else 0)
    if experiment.in_flight:
        _check_many(experiment.in_flight, "in_flight", least=1)
    for name in ("evaluations", "time_limit_s", "max_devices"):
        _check_positive(getattr(experiment, name), name)
    for index, cluster in enumerate(experiment.clusters):
        for name in ("bandwidth", "memory"):
            _check_factors(getattr(cluster, name), f"clusters[{index}].{name}")
        for pattern, amount in cluster.memory_GB.items():
            _check_positive(amount, f"clusters[{index}].memory_GB.{pattern}")
    for index, measured in enumerate(experiment.measured):
        _check_positive(measured.step_s, f"measured[{index}].step_s")
    for index, optimiser in enumerate(experiment.optimisers):
        check_optimiser(optimiser, f"optimisers[{index}]")
    names = [spec.name or spec.method for spec in experiment.optimisers]
    if len(set(names)) < len(names):
        raise InputError(
            "two optimisers have one name", fix="give each its own name", field="optimisers"
        )
    count = len(experiment.seeds) * len(experiment.optimisers) * _num_cases(experiment)
    if count > MAX_RUNS:
        raise InputError(
            f"asks for {count:,} runs", fix=f"at most {MAX_RUNS:,} are made", field="seeds"
        )


def _num_cases(experiment: Experiment) -> int:
    machines = sum(len(spec.bandwidth) * len(spec.memory) for spec in experiment.clusters)
    pipelines = len(experiment.batches) * max(1, len(experiment.in_flight))
    return len(experiment.problems) + len(experiment.networks) * machines * pipelines


def check_optimiser(spec: OptimiserSpec, where: str) -> None:
    """Refuse an unknown method or parameter with the nearest; and a value of the wrong type."""
    known = searches("placement")
    if spec.method not in known:
        raise InputError(
            f"there is no optimiser {spec.method!r}",
            fix=suggest(spec.method, known),
            field=f"{where}.method",
        )
    _check_positive(spec.evaluations, f"{where}.evaluations")
    _check_positive(spec.time_limit_s, f"{where}.time_limit_s")
    search: Any = known[spec.method]
    fields = dataclasses.fields(search) if dataclasses.is_dataclass(search) else ()
    defaults: dict[str, Any] = {f.name: getattr(search, f.name) for f in fields}
    defaults.pop("watch", None)  # a callable, not for files
    for name, value in spec.parameters.items():
        if name not in defaults:
            fix = suggest(name, defaults) if defaults else "leave it out: it has none"
            raise InputError(
                f"{spec.method} has no parameter {name!r}", fix=fix, field=f"{where}.parameters"
            )
        _check_value(value, defaults[name], f"{where}.parameters.{name}")


def _check_value(value: Any, default: Any, where: str) -> None:
    if isinstance(default, bool) or isinstance(value, bool):
        good = isinstance(default, bool) and isinstance(value, bool)
    elif isinstance(default, int):
        good = isinstance(value, int) and value >= 0
    elif isinstance(default, float):
        good = isinstance(value, int | float) and value >= 0
    else:
        good = isinstance(value, type(default))
    if not good:
        raise InputError(
            f"found {value!r}", fix=f"give something like {default!r}, its default", field=where
        )


def _check_positive(value: float | None, where: str) -> None:
    if value is not None and not 0 < value < 1e18:
        raise InputError(f"found {value!r}", fix="give a number above 0", field=where)


def _check_many(values: Sequence[int], where: str, least: int) -> None:
    if not values or min(values) < least or len(set(values)) < len(values):
        raise InputError(
            f"found {list(values)}",
            fix=f"give whole numbers of at least {least}, each once",
            field=where,
        )


def _check_factors(values: Sequence[float], where: str) -> None:
    if not values or not all(0 < value < 1e9 for value in values):
        raise InputError(f"found {list(values)}", fix="give factors above 0", field=where)
