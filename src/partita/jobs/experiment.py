"""Run an experiment: every case x optimiser x seed, each saved the moment it is done.

A run is known by a key made of everything that decides it (the case with the contents of its files,
the optimiser with its parameters, limits, seed, version), and its record is written atomically
under that key. Whoever starts the same experiment again in the same folder goes on where it
stopped: records that are there are read, the others are made. An interrupted run is not kept.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from partita import __version__
from partita.capture.exprimo_devices import DeviceGraph, device_cluster
from partita.cluster import Cluster
from partita.errors import FileError, InputError
from partita.files import decode_json, encode_json, read_bytes, read_record, write_atomically
from partita.jobs.experiment_file import ClusterSpec, Experiment, NetworkSpec, OptimiserSpec
from partita.jobs.place import Settings, place_subject
from partita.jobs.place_subject import Subject, load_subject
from partita.jobs.sweep import Sweeper, SweepOutcome
from partita.problems.placement import PlacementProblem, read
from partita.search import searches
from partita.search.base import Improvement, Stop
from partita.showing import plot_of, repr_html, table_of

FORMAT = "experiment-run"
EVALUATIONS = 20_000  # of a run without limits: what Exprimo's comparison allows
MOST_FRAMES = 60
SIDE_BY_SIDE = 4  # runs from which on other processes are started, which takes seconds
GB = 1e9


@dataclass(frozen=True)
class Case:
    """One problem of an experiment: a network on a machine, or a saved problem."""

    name: str
    network: str
    cluster: str
    bandwidth: float = 1.0
    memory: float = 1.0
    batches: int = 1
    in_flight: int | None = None
    subject: Subject | None = None
    problem: PlacementProblem | None = None
    print: str = ""  # fingerprint of all that is in it


@dataclass(frozen=True)
class SearchFrame:
    """What a search had at one moment; a cell of its archive is (devices, class, seconds, fits)."""

    evaluations: int
    best_s: float
    placement: tuple[int, ...] = ()
    cells: tuple[tuple[int, int, float, bool], ...] = ()


@dataclass(frozen=True)
class RunRecord:
    """What one run gave; saved as `partita/experiment-run@1`."""

    key: str
    case: str
    optimiser: str
    method: str
    seed: int
    network: str
    cluster: str
    bandwidth: float
    memory: float
    batches: int
    in_flight: int | None
    status: str
    why: str
    objective_s: float | None
    lower_bound_s: float | None
    seconds: float
    evaluations: int
    devices: tuple[str, ...]
    layers: tuple[str, ...]
    placement: tuple[int, ...] = ()
    peak_memory_bytes: tuple[float, ...] = ()
    history: tuple[tuple[float, int, float], ...] = ()  # seconds, evaluations, objective
    class_bytes: tuple[float, ...] = ()  # of an archive
    frames: tuple[SearchFrame, ...] = ()
    format: str = f"partita/{FORMAT}@1"

    @property
    def gap(self) -> float | None:
        """How far from optimal at most."""
        if self.objective_s is None or self.lower_bound_s is None or not self.objective_s:
            return None
        return max(0.0, 1 - self.lower_bound_s / self.objective_s)

    @property
    def num_devices(self) -> int:
        """How many devices are used."""
        return len(set(self.placement))


@dataclass(frozen=True)
class ExperimentOutcome:
    """The runs that are there, in the order of the experiment, and how many are not."""

    experiment: Experiment
    cases: tuple[Case, ...]
    runs: tuple[RunRecord, ...]
    resumed: int  # how many of them were there before
    missing: int

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook


@dataclass(frozen=True)
class ExperimentTask:
    """One run, as it is sent to another process: its case is made again there."""

    experiment: Experiment
    case: str
    optimiser: OptimiserSpec
    seed: int
    key: str


# What is said of a run that is there: its name, best and bound in seconds, was it there before?
RunTold = Callable[[str, float | None, float | None, bool], None]


def run_experiment(
    experiment: Experiment,
    folder: str | Path,
    interrupted: Callable[[], bool] = lambda: False,
    told: RunTold = lambda text, objective_s, lower_bound_s, is_known: None,
    progress: Callable[[Improvement], None] | None = None,
    workers: int = 1,
    dask: str = "",
) -> ExperimentOutcome:
    """Make every run that the folder does not have yet; ends early when interrupted.

    With several workers (0: as many as there are cores) runs are made side by side, each by itself:
    the records are the same wherever evaluations, and not seconds, limit a search. `dask` is the
    address of a Dask scheduler whose workers make them instead. `told` hears of each run that is
    there.
    """
    cases = tuple(_cases(experiment))
    place = Path(folder) / "runs"
    _claim(experiment, Path(folder))
    todo = [
        (case, optimiser, seed)
        for case in cases
        for optimiser in experiment.optimisers
        for seed in experiment.seeds
    ]
    records: dict[int, RunRecord] = {}
    left: list[tuple[int, Path, str, ExperimentTask]] = []
    for number, (case, optimiser, seed) in enumerate(todo):
        key = _key(experiment, case, optimiser, seed)
        title = f"{case.name}, {optimiser.name or optimiser.method}, seed {seed}"
        path = place / f"{_slug(title)}-{key}.json"
        saved = _saved(path)
        if saved is not None:
            records[number] = saved
            told(
                f"run {number + 1} of {len(todo)}: {title}: known",
                saved.objective_s,
                saved.lower_bound_s,
                True,
            )
        else:
            task = ExperimentTask(experiment, case.name, optimiser, seed, key)
            left.append((number, path, title, task))
    resumed = len(records)
    side_by_side = bool(dask) or (workers != 1 and len(left) >= SIDE_BY_SIDE)
    if side_by_side:
        _beside(left, len(todo), workers, dask, interrupted, told)
    for number, path, title, task in left:
        record = _saved(path) if side_by_side else None
        if record is None and not interrupted() and not side_by_side:
            stop = _stop(experiment, task.optimiser, interrupted, progress)
            record = _run(experiment, todo[number][0], task.optimiser, task.seed, stop, task.key)
            if interrupted():  # what was cut short is not what was asked for
                continue
            write_atomically(path, encode_json(record), overwrite=True)
            told(
                f"run {number + 1} of {len(todo)}: {title}",
                record.objective_s,
                record.lower_bound_s,
                False,
            )
        if record is not None:
            records[number] = record
    runs = tuple(records[number] for number in sorted(records))
    return ExperimentOutcome(experiment, cases, runs, resumed, len(todo) - len(runs))


def _beside(
    left: list[tuple[int, Path, str, ExperimentTask]], total: int, workers: int, dask: str,
    interrupted: Callable[[], bool], told: RunTold,
) -> None:  # fmt: skip
    """Make runs in other processes; each is written as soon as it is there."""

    def done(place: int, outcome: SweepOutcome) -> None:
        number, path, title, _ = left[place]
        if outcome.answer is not None:
            write_atomically(path, encode_json(outcome.answer), overwrite=True)
        answer = outcome.answer or {}
        text = f"run {number + 1} of {total}: {title}{f': {outcome.why}' if outcome.why else ''}"
        told(text, answer.get("objective_s"), answer.get("lower_bound_s"), False)

    sweeper = Sweeper(workers, None, interrupted, done, dask=dask)
    sweeper(run_task, [task for *_, task in left])


def num_runs(experiment: Experiment) -> int:
    """How many runs an experiment is made of."""
    each = len(experiment.optimisers) * len(experiment.seeds)
    return sum(1 for _ in _cases(experiment)) * each


def run_task(task: ExperimentTask) -> dict[str, Any]:
    """One run in a process of its own."""
    case = next(case for case in _cases(task.experiment) if case.name == task.case)
    stop = _stop(task.experiment, task.optimiser, lambda: False, None)
    return asdict(_run(task.experiment, case, task.optimiser, task.seed, stop, task.key))


def _claim(experiment: Experiment, folder: Path) -> None:
    """Make the folder ours, or see that it is; another experiment's is left alone."""
    mark = folder / "experiment.json"
    if folder.is_dir() and any(folder.iterdir()):
        owner = ""
        if mark.is_file():
            owner = str(decode_json(read_bytes(mark), str(mark)).get("name", ""))
        if owner != experiment.name:
            what = f"holds the experiment {owner!r}" if owner else "is not empty"
            raise FileError(what, fix="choose another folder", file=str(folder))
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"cannot be made ({error.strerror})", fix="choose another folder", file=str(folder)
        ) from None
    about = {"format": "partita/experiment@1", **asdict(experiment)}
    write_atomically(mark, encode_json(about), overwrite=True)


def _saved(path: Path) -> RunRecord | None:
    if not path.is_file():
        return None
    try:
        return read_record(path, FORMAT, RunRecord)
    except InputError:
        return None  # not ours, or damaged: make it again


def _stop(
    experiment: Experiment, optimiser: OptimiserSpec, interrupted: Callable[[], bool],
    progress: Callable[[Improvement], None] | None,
) -> Stop:  # fmt: skip
    time_s = optimiser.time_limit_s or experiment.time_limit_s
    evaluations = optimiser.evaluations or experiment.evaluations
    if time_s is None and evaluations is None:
        evaluations = EVALUATIONS
    return Stop(time_s=time_s, evaluations=evaluations, interrupted=interrupted, progress=progress)


# --- cases --------------------------------------------------------------------------------------


def _cases(experiment: Experiment) -> Iterator[Case]:
    for spec in experiment.problems:
        path = _path(experiment, spec.file)
        problem = read(path)
        name = spec.name or problem.name or Path(spec.file).stem
        yield Case(name, name, "", batches=problem.batches, problem=problem, print=_content(path))
    for network in experiment.networks:
        for machine in experiment.clusters:
            yield from _swept(experiment, network, machine)


def _swept(experiment: Experiment, network: NetworkSpec, machine: ClusterSpec) -> Iterator[Case]:
    model = _path(experiment, network.model)
    subject = load_subject(
        model, _path(experiment, machine.cluster), batch=network.batch, dtype=network.dtype,
        training=network.training, optimizer=network.optimizer,
    )  # fmt: skip
    names = network.name or Path(network.model).stem, machine.name or Path(machine.cluster).stem
    for bandwidth in machine.bandwidth:
        for memory in machine.memory:
            changed = changed_machine(subject, bandwidth, memory, machine.memory_GB)
            for batches, in_flight in product(experiment.batches, experiment.in_flight or (None,)):
                parts = [f"{names[0]} on {names[1]}"]
                if len(machine.bandwidth) > 1:
                    parts.append(f"bandwidth x{bandwidth:g}")
                if len(machine.memory) > 1:
                    parts.append(f"memory x{memory:g}")
                if len(experiment.batches) > 1:
                    parts.append(f"{batches} batches")
                if len(experiment.in_flight) > 1:
                    parts.append(f"{in_flight} in flight")
                marks = changed.workload.graph.fingerprint(), changed.cluster.fingerprint()
                yield Case(
                    ", ".join(parts), *names, bandwidth, memory, batches, in_flight,
                    changed, print="/".join(marks),
                )  # fmt: skip


def changed_machine(
    subject: Subject, bandwidth: float, memory: float, memory_gb: dict[str, float]
) -> Subject:
    """The same model on a machine whose links and memories are changed."""
    limits = [
        next(
            (gb * GB for pattern, gb in memory_gb.items() if fnmatchcase(device.name, pattern)),
            subject.cluster.kind_of(index).memory_bytes * memory,
        )
        for index, device in enumerate(subject.cluster.devices)
    ]
    for pattern in memory_gb:
        if not any(fnmatchcase(device.name, pattern) for device in subject.cluster.devices):
            known = ", ".join(device.name for device in subject.cluster.devices[:8])
            raise InputError(
                f"no device is called {pattern!r}", fix=f"there is {known}", field="memory_GB"
            )
    if subject.machine is not None:
        machine = _changed_graph(subject.machine, bandwidth, limits)
        return replace(subject, machine=machine, cluster=device_cluster(machine))
    return replace(subject, cluster=_changed_cluster(subject.cluster, bandwidth, limits))


def _changed_graph(machine: DeviceGraph, bandwidth: float, limits: list[float]) -> DeviceGraph:
    return replace(
        machine,
        devices=tuple(
            replace(device, memory_gb=limit / GB)
            for device, limit in zip(machine.devices, limits, strict=True)
        ),
        channels=tuple((kind, gbps * bandwidth) for kind, gbps in machine.channels),
    )


def _changed_cluster(cluster: Cluster, bandwidth: float, limits: list[float]) -> Cluster:
    kinds: dict[str, Any] = {}
    devices = []
    for index, (device, limit) in enumerate(zip(cluster.devices, limits, strict=True)):
        kind = cluster.kind_of(index)
        if round(limit) != kind.memory_bytes:
            kind = replace(
                kind, name=f"{kind.name} ({limit / GB:g} GB)", memory_bytes=max(1, round(limit))
            )
        kinds[kind.name] = kind
        devices.append(replace(device, kind=kind.name))
    links = tuple(replace(link, bytes_per_s=link.bytes_per_s * bandwidth) for link in cluster.links)
    return replace(cluster, kinds=tuple(kinds.values()), devices=tuple(devices), links=links)


def _path(experiment: Experiment, spec: str) -> str:
    """A file beside the experiment if there is one, else what was written."""
    beside = Path(experiment.folder) / spec
    return str(beside) if beside.is_file() else spec


@cache
def _content(path: str) -> str:
    return hashlib.sha256(read_bytes(path)).hexdigest()[:16]


def _key(experiment: Experiment, case: Case, optimiser: OptimiserSpec, seed: int) -> str:
    asked = (experiment.pin, experiment.forbid, experiment.colocate, experiment.max_devices)
    limits = (experiment.evaluations, experiment.time_limit_s, EVALUATIONS)
    about = [
        __version__, experiment.semantics, asked, limits, case.name, case.print, case.batches,
        case.in_flight, asdict(optimiser), seed,
    ]  # fmt: skip
    text = json.dumps(about, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")[:80]


# --- one run ------------------------------------------------------------------------------------


def _run(
    experiment: Experiment, case: Case, optimiser: OptimiserSpec, seed: int, stop: Stop, key: str
) -> RunRecord:
    frames = _Frames()
    search = frames.watched(_search(optimiser))
    fixed: dict[str, Any] = {
        "key": key, "case": case.name, "optimiser": optimiser.name or optimiser.method,
        "method": optimiser.method, "seed": seed, "network": case.network,
        "cluster": case.cluster, "bandwidth": case.bandwidth, "memory": case.memory,
        "batches": case.batches, "in_flight": case.in_flight,
    }  # fmt: skip
    if case.problem is not None:
        return _run_problem(case.problem, search, stop, seed, frames, fixed)
    assert case.subject is not None
    settings = Settings(
        method=search, semantics=experiment.semantics, batches=case.batches,
        in_flight=case.in_flight, pinned=_constraints(experiment.pin, "pin"),
        forbidden=_constraints(experiment.forbid, "forbid"),
        colocated=[group.split(",") for group in experiment.colocate],
        max_devices=experiment.max_devices, stop=stop, seed=seed,
    )  # fmt: skip
    placed = place_subject(case.subject, **settings)
    best = placed.best
    return RunRecord(
        **fixed,
        status=str(placed.status),
        why=placed.why,
        objective_s=None if best is None else best.step_s,
        lower_bound_s=placed.lower_bound_s,
        seconds=placed.seconds,
        evaluations=placed.evaluations,
        devices=tuple(device.name for device in placed.model.cluster.devices),
        layers=tuple(names[0] for names in placed.model.layers),
        placement=() if best is None else best.placement,
        peak_memory_bytes=() if best is None else best.peak_bytes,
        history=_history(placed.history, 1.0),
        class_bytes=frames.class_bytes,
        frames=frames.kept(),
    )


def _run_problem(
    problem: PlacementProblem, search: Any, stop: Stop, seed: int, frames: "_Frames",
    fixed: dict[str, Any],
) -> RunRecord:  # fmt: skip
    result = search(problem, stop, seed)
    placement = () if result.solution is None else tuple(result.solution.placement)
    peaks: tuple[float, ...] = ()
    if placement:
        from partita.problems.placement import simulate_exprimo

        peaks = simulate_exprimo(problem, placement).peak_memory_bytes
    return RunRecord(
        **fixed,
        status=str(result.status),
        why=result.why,
        objective_s=None if result.objective is None else result.objective / 1e3,
        lower_bound_s=None if result.lower_bound is None else result.lower_bound / 1e3,
        seconds=result.seconds,
        evaluations=result.evaluations,
        devices=tuple(f"{i} {device.model}".strip() for i, device in enumerate(problem.devices)),
        layers=tuple(layer.name for layer in problem.layers),
        placement=placement,
        peak_memory_bytes=peaks,
        history=_history(result.history, 1e-3),
        class_bytes=frames.class_bytes,
        frames=frames.kept(),
    )


def _search(optimiser: OptimiserSpec) -> Any:
    search: Any = searches("placement")[optimiser.method]
    return replace(search, **optimiser.parameters) if optimiser.parameters else search


def _history(steps: tuple[Improvement, ...], unit: float) -> tuple[tuple[float, int, float], ...]:
    return tuple(
        (step.seconds, step.evaluations, step.objective * unit)
        for step in steps
        if step.objective is not None
    )


def _constraints(texts: tuple[str, ...], field: str) -> list[tuple[str, str]]:
    constraints = []
    for text in texts:
        pattern, equals, device = text.rpartition("=")
        if not equals:
            raise InputError(f"found {text!r}", fix="write op=device", field=field)
        constraints.append((pattern, device))
    return constraints


class _Frames:
    """The archive of a search that shows it, seen every so often: at most `MOST_FRAMES` times."""

    def __init__(self) -> None:
        self.frames: list[SearchFrame] = []
        self.every, self.seen = 1, 0
        self.class_bytes: tuple[float, ...] = ()

    def watched(self, search: Any) -> Any:
        """The search, telling us of its archive if it can."""
        return replace(search, watch=self.look) if hasattr(search, "watch") else search

    def look(self, archive: Any) -> None:
        """Called with the archive after every round."""
        if self.frames and archive.evaluations < self.frames[-1].evaluations:
            return  # a second search of the same run begins anew: one story is enough
        self.seen += 1
        if (self.seen - 1) % self.every:
            return
        self.class_bytes = tuple(archive.class_bytes)
        self.frames.append(_frame(archive))
        if len(self.frames) > MOST_FRAMES:
            self.frames = self.frames[::2]
            self.every *= 2

    def kept(self) -> tuple[SearchFrame, ...]:
        """The frames."""
        return tuple(self.frames)


def _frame(archive: Any) -> SearchFrame:
    best = min(archive.elites, key=lambda elite: elite.score_ms)
    cells = tuple(
        (
            elite.devices_used,
            elite.communication_class,
            elite.makespan_ms / 1e3,
            bool(elite.score_ms <= elite.makespan_ms),  # no penalty for memory in it
        )
        for elite in archive.elites
    )
    return SearchFrame(archive.evaluations, best.score_ms / 1e3, tuple(best.placement), cells)
