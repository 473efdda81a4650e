"""Plan: the decisions, complete enough to execute, saved as `partita/plan@6`.

A plan belongs to one model on one machine (both by fingerprint). It has stages in pipeline order;
each stage runs its ops on a mesh of devices, every op split along named loop dims, one per mesh
axis. The batch passes through the stages in micro-batches; the schedule says in which order. What
was predicted and how it was found stand beside the decisions, so that a plan explains itself.

A plan carries what it was made from where that was a file: the model's graph and the description of
the machine, both as text, line by line. So opening a plan runs no code and opens no other file. A
model of the zoo and a preset are named, and built again. `jobs/workload.py` reads both.

Stages have all their devices in common (several stages are interleaved on one mesh), none, or some:
a stage on all devices beside stages on single ones (Tessel's M, NN and K shapes) is *shared*. Files
of version 1 hold one stage and no schedule: the whole batch passes once. Up to version 2 stages
keep all their activations or recompute all. Up to version 3 the order of collectives is not said:
it is decided when such a plan is lowered, as it was then. Up to version 4 nothing is carried. Up to
version 5 ZeRO shards over all replicas and gathers each op's parameters by themselves, gradients
have the type of their parameters, products that of the model, and kernels lie in CUDA graphs.
"""

import functools
import itertools
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from partita.degrees import summary
from partita.errors import PlanError
from partita.files import check_format, convert, decode_json, encode_json, read_bytes
from partita.graph.record import FLOATS
from partita.showing import plot_of, repr_html, table_of
from partita.suggest import suggest
from partita.timeline import LaneSketch

VERSION = 6
FORMAT = f"partita/plan@{VERSION}"
RENAMED = ("1", "2", "3")  # versions with other words, which are still read
UNBUNDLED = ("4", "5")  # with these words, and each op's parameters gathered by themselves
SHARDED = ("none", "states", "gradients", "parameters")  # ZeRO stages there
ZERO_STAGES = (0, 1, 2, 3)  # sharded: nothing, optimizer states, gradients too, parameters too
EXECUTIONS = ("eager", "compiled", "graph")  # how kernels are started
CHECKPOINTING = ("none", "selective", "full")  # what of a stage's forward runs again


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a device mesh. `weights` give heterogeneous devices ragged shares: (2, 2, 1) of
    5.

    ZeRO shards along all axes with replicas but those that `replicates`: along them every place
    keeps what its shard group keeps, and gradients are all-reduced (HSDP).
    """

    name: str
    size: int
    weights: tuple[int, ...] = ()
    replicates: bool = False

    def __post_init__(self) -> None:
        if not self.name or self.size < 1:
            raise PlanError(
                f"axis {self.name!r} has size {self.size}", fix="a name and a size of at least 1"
            )
        if self.weights and (len(self.weights) != self.size or min(self.weights) < 1):
            raise PlanError(
                f"axis {self.name!r} of {self.size} has the weights {list(self.weights)}",
                fix="give one whole number of at least 1 per place, or none",
            )

    @property
    def parts(self) -> int:
        """Into how many equal parts a dim is cut before the devices take theirs."""
        return sum(self.weights) if self.weights else self.size

    def ways(self, place: int | None = None) -> float:
        """1 / the share of a place; without one, of the place with the largest share."""
        if not self.weights:
            return self.size
        return self.parts / (max(self.weights) if place is None else self.weights[place])

    def __str__(self) -> str:
        weights = f" ({':'.join(map(str, self.weights))})" if self.weights else ""
        replicas = " (replicas)" if self.replicates else ""
        return f"{self.name}={self.size}{weights}{replicas}"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices of a cluster (by index) arranged row by row along axes."""

    axes: tuple[Axis, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        size = math.prod(axis.size for axis in self.axes)
        if size != len(self.devices) or len(set(self.devices)) != len(self.devices):
            raise PlanError(
                f"a mesh of {size} places has {len(self.devices)} devices",
                fix="give each place one device of its own",
                field="mesh",
            )
        if len({axis.name for axis in self.axes}) != len(self.axes):
            raise PlanError("two axes have the same name", fix="rename one", field="mesh")

    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """The lines of devices along an axis: they differ in this coordinate only."""
        return _lines(self, axis)

    def place(self, device: int) -> tuple[int, ...]:
        """The coordinates of a device, one per axis."""
        index = self.devices.index(device)
        coordinates = []
        for axis in reversed(self.axes):
            index, coordinate = divmod(index, axis.size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def __str__(self) -> str:
        return " x ".join(map(str, self.axes)) or "one device"


@functools.lru_cache(maxsize=4096)  # one object for one mesh: costs are remembered by identity
def _lines(mesh: Mesh, axis: int) -> tuple[tuple[int, ...], ...]:
    sizes = [a.size for a in mesh.axes]
    stride = math.prod(sizes[axis + 1 :])
    others = [range(s) if i != axis else range(1) for i, s in enumerate(sizes)]
    lines = []
    for place in itertools.product(*others):
        start = 0
        for coordinate, size in zip(place, sizes, strict=True):
            start = start * size + coordinate
        lines.append(tuple(mesh.devices[start + k * stride] for k in range(sizes[axis])))
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class OpSplit:
    """How one forward op (and its backward) is split: a loop dim per mesh axis, '' for none.

    `zero` is the ZeRO stage of its parameters along the axes that would replicate them.
    """

    op: str
    dims: tuple[str, ...]
    zero: int = 0

    def __post_init__(self) -> None:
        if self.zero not in ZERO_STAGES:
            raise PlanError(
                f"found {self.zero!r}",
                fix="use a ZeRO stage from 0 to 3",
                field=f"split of {self.op!r} zero",
            )


@dataclass(frozen=True, slots=True)
class Overlap:
    """In which order the collectives of a stage go through the network.

    `12 g r3` are twelve collectives that an op waits for, the next gather of parameters, and the
    fourth reduction; `order` is that of every micro-batch, `last` that of the one that ends a step,
    where gradients are reduced once a step. A stage that runs once has one order.
    """

    order: str = ""
    last: str = ""


PREFETCH = 4
BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Stage:
    """Ops that run on one mesh, each with its split.

    Sharded parameters are gathered for `prefetch` ops at a time: the one that runs, and those after
    it; in bundles, of which the ops in `bundles` are the first, and while one is used the next is
    on its way. Without any, each op's are gathered by themselves. Gradients are reduced in buckets
    of at least `bucket_bytes`. The order of collectives is undecided where `overlap` is None, what
    is gathered together where `bundles` is None.

    With `full` activation checkpointing the backward runs the forward again instead of keeping
    its activations: in checkpoint segments, of which the ops in `segments` are the first, and only
    what passes from segment to segment is kept. `selective` names the ops that are `recomputed`,
    each right before the gradients of the first op that need what it makes; all else is kept.
    """

    name: str
    mesh: Mesh
    splits: tuple[OpSplit, ...]
    checkpointing: str = "none"
    segments: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    prefetch: int = PREFETCH
    bucket_bytes: int = BUCKET_BYTES
    overlap: Overlap | None = None
    bundles: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.prefetch < 1 or self.bucket_bytes < 0:
            raise PlanError(
                f"gathers for {self.prefetch} ops, reduces {self.bucket_bytes} bytes at a time",
                fix="give a prefetch of at least 1 and buckets of at least 0 bytes",
                field=f"stage {self.name!r}",
            )
        ops = {split.op for split in self.splits}
        self._check_checkpointing(ops)
        if self.bundles and (unknown := set(self.bundles) - ops):
            raise PlanError(
                f"names op {min(unknown)!r}, which is not in it",
                fix="name ops of the stage, with which a bundle of parameters begins",
                field=f"stage {self.name!r} bundles",
            )
        for split in self.splits:
            if len(split.dims) != len(self.mesh.axes):
                raise PlanError(
                    f"op {split.op!r} has {len(split.dims)} dims for {len(self.mesh.axes)} axes",
                    fix="give one dim per axis, '' for none",
                    field=f"stage {self.name!r} splits",
                )

    def undecided(self) -> "Stage":
        """The same with nothing said of when collectives run, and of what goes together."""
        return replace(self, overlap=None, bundles=None)

    def _check_checkpointing(self, ops: set[str]) -> None:
        where = f"stage {self.name!r}"
        if self.checkpointing not in CHECKPOINTING:
            raise PlanError(
                f"found {self.checkpointing!r}",
                fix=f"use one of {', '.join(CHECKPOINTING)}",
                field=f"{where} checkpointing",
            )
        named = {"segments": (self.segments, "full"), "recomputed": (self.recomputed, "selective")}
        for name, (names, kind) in named.items():
            unknown = set(names) - ops
            if unknown:
                what = f"names op {min(unknown)!r}, which is not in it"
            elif len(set(names)) < len(names):
                what = "names an op twice"
            elif names and self.checkpointing != kind:
                what = f"names ops with {self.checkpointing} checkpointing"
            else:
                continue
            raise PlanError(
                what,
                fix=f"name ops of the stage, each once, with {kind} checkpointing",
                field=f"{where} {name}",
            )
        if self.checkpointing == "selective" and not self.recomputed:
            raise PlanError(
                "has selective checkpointing and names no op",
                fix="name the ops that are recomputed, or use none",
                field=f"{where} recomputed",
            )

    def dims(self) -> dict[str, tuple[str, ...]]:
        """The dims of every op, by name."""
        return {split.op: split.dims for split in self.splits}


@dataclass(frozen=True, slots=True)
class Schedule:
    """In which order the stages run their micro-batches.

    `name` is that of a known schedule (1f1b, gpipe, interleaved, zb-h1, ...), or of whatever found
    the `order`: a row for each group of devices (`device_groups`) of actions such as `3F2`, the
    forward of stage 3 for micro-batch 2; F forward, B backward, I and W its two halves. Actions
    of a shared stage stand in the rows of all its groups, in the same relative order.
    """

    name: str = "1f1b"
    num_microbatches: int = 1
    order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or self.num_microbatches < 1:
            raise PlanError(
                f"{self.name!r} of {self.num_microbatches} micro-batches",
                fix="give a name and at least one micro-batch",
                field="schedule",
            )

    def __str__(self) -> str:
        count = self.num_microbatches
        return f"{self.name}, {count} micro-batch{'es' * (count != 1)}"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Which model a plan is for: its name, its fingerprint, and its graph if a file was named.

    Gradients of parameters are added up and reduced in `grad_dtype`, linear layers multiply in
    `matmul_dtype`; '' is the type of the model. `execution` is how kernels are started.

    `graph` is the forward in its text form, a line each. `sha256` is of the Python file that was
    run to capture it: `emit` and `run` run no other.
    """

    spec: str
    batch: int
    dtype: str
    training: bool
    optimizer: str
    fingerprint: str
    graph: tuple[str, ...] = ()
    sha256: str = ""
    grad_dtype: str = ""
    matmul_dtype: str = ""
    execution: str = "graph"

    def __post_init__(self) -> None:
        known = {
            "grad_dtype": (self.grad_dtype, FLOATS),
            "matmul_dtype": (self.matmul_dtype, FLOATS),
            "execution": (self.execution, EXECUTIONS),
        }
        for name, (value, values) in known.items():
            if value not in values and (value or name == "execution"):
                raise PlanError(
                    f"found {value!r}", fix=suggest(value, values), field=f"model {name}"
                )


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """A text file that a plan carries: the name by which it was read, and its lines."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClusterRef:
    """Which machine a plan is for, with the files that describe it."""

    spec: str
    num_devices: int
    fingerprint: str
    files: tuple[CarriedFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of a plan.

    `interval_s` is the time from one batch to the next where the plan was made for that, and not
    for the time of one batch; the lower bound is of whichever was asked for.
    """

    step_s: float
    lower_bound_s: float
    compute_s: float
    communication_s: float
    peak_memory_bytes: tuple[float, ...]
    capacity_bytes: tuple[float, ...]
    interval_s: float | None = None

    @property
    def objective_s(self) -> float:
        """What the plan was made to be short in."""
        return self.step_s if self.interval_s is None else self.interval_s


@dataclass(frozen=True, slots=True)
class Progress:
    """One moment of the search: the best plan and the best bound it had."""

    seconds: float
    step_s: float | None
    lower_bound_s: float | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was tried and not taken."""

    name: str
    arrangement: str
    step_s: float
    peak_memory_bytes: float
    why: str  # what stood against it
    interval_s: float | None = None  # from batch to batch, where that was asked for
    sketch: tuple[LaneSketch, ...] = ()  # its timeline, coarsely

    @property
    def objective_s(self) -> float:
        """What it was tried for to be short in."""
        return self.step_s if self.interval_s is None else self.interval_s


@dataclass(frozen=True, slots=True)
class Origin:
    """How a plan was found, and what else was tried."""

    method: str
    status: str
    why: str
    seed: int
    seconds: float
    version: str
    history: tuple[Progress, ...] = ()
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided for one model on one machine."""

    model: ModelRef
    cluster: ClusterRef
    stages: tuple[Stage, ...]
    prediction: Prediction
    origin: Origin
    schedule: Schedule = Schedule()
    folder: str = field(default="", compare=False, repr=False)  # where its file is; not saved

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("the plan has no stages", fix="a plan has at least one", field="stages")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise PlanError("two stages have one name", fix="rename one", field="stages")
        if self.model.batch % self.schedule.num_microbatches:
            raise PlanError(
                f"a batch of {self.model.batch} in {self.schedule.num_microbatches} micro-batches",
                fix="give a number that divides the batch",
                field="schedule",
            )

    def to_json(self) -> bytes:
        """The plan as a file."""
        value = asdict(self)
        del value["folder"]
        for part, names in (
            ("model", ("graph", "sha256", "grad_dtype", "matmul_dtype")),
            ("cluster", ("files",)),
        ):
            for name in names:
                if not value[part][name]:
                    del value[part][name]
        return encode_json({"format": FORMAT, **value})

    def __str__(self) -> str:
        words = summary(self.stages, self.schedule)
        return f"{self.model.spec} on {self.cluster.spec}: {words}"


def runs_once(stages: tuple[Stage, ...], schedule: Schedule) -> bool:
    """Is it one stage that runs one micro-batch? Then the plan is simulated op by op."""
    return len(stages) == 1 and schedule.num_microbatches == 1


def device_groups(stages: tuple[Stage, ...]) -> tuple[tuple[int, ...], ...]:
    """The stages (by number) of each group of devices, in the order the groups are met.

    A group is the devices that hold the same stages. A stage that is in several is *shared*: all
    their devices run it together.
    """
    return tuple(_grouped(stages))


def group_devices(stages: tuple[Stage, ...]) -> tuple[tuple[int, ...], ...]:
    """The devices of each group, as the mesh of its first stage has them."""
    return tuple(map(tuple, _grouped(stages).values()))


def _grouped(stages: tuple[Stage, ...]) -> dict[tuple[int, ...], list[int]]:
    """Stages of a group -> its devices."""
    held: dict[int, list[int]] = {}
    for number, stage in enumerate(stages):
        for device in stage.mesh.devices:
            held.setdefault(device, []).append(number)
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, members in held.items():
        groups.setdefault(tuple(members), []).append(device)
    return dict(sorted(groups.items()))


def shared_stages(groups: tuple[tuple[int, ...], ...]) -> frozenset[int]:
    """The stages that several groups of devices run together."""
    seen: set[int] = set()
    shared: set[int] = set()
    for members in groups:
        shared |= seen & set(members)
        seen |= set(members)
    return frozenset(shared)


def upgraded(value: dict[str, Any]) -> dict[str, Any]:
    """A decoded file of any version in the words of this one; what is wrong in it stays so."""
    version = str(value.get("format", "")).rpartition("@")[2]
    if version not in (*RENAMED, *UNBUNDLED) or not isinstance(value.get("stages"), list):
        return value
    stages = [_upgraded_stage(s, version) if isinstance(s, dict) else s for s in value["stages"]]
    return {**value, "stages": stages}


def _upgraded_stage(stage: dict[str, Any], version: str) -> dict[str, Any]:
    stage = {"bundles": [], **stage}
    if version in UNBUNDLED:
        return stage
    whole, recomputed = stage.pop("recompute", False), stage.pop("again", [])
    stage["checkpointing"] = "full" if whole else "selective" if recomputed else "none"
    stage["recomputed"], stage["segments"] = recomputed, stage.pop("checkpoints", [])
    splits = stage.get("splits")
    if isinstance(splits, list):
        stage["splits"] = [_upgraded_split(s) if isinstance(s, dict) else s for s in splits]
    return stage


def _upgraded_split(split: dict[str, Any]) -> dict[str, Any]:
    level = split.get("sharded", "none")
    rest = {key: item for key, item in split.items() if key != "sharded"}
    return {**rest, "zero": SHARDED.index(level) if level in SHARDED else level}


def plan_from_json(value: dict[str, Any], file: str = "") -> Plan:
    """The plan in a decoded file."""
    check_format(value, "plan", VERSION, file)
    decisions = {k: item for k, item in upgraded(value).items() if k not in ("format", "folder")}
    try:
        plan = convert(decisions, Plan, file)
    except PlanError as error:
        raise error.within(file) from None
    return replace(plan, folder=str(Path(file).parent) if file else "")


def read_plan(path: str | Path) -> Plan:
    """The plan in a file."""
    return plan_from_json(decode_json(read_bytes(path), str(path)), str(path))
