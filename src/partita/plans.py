"""Plan: the decisions, complete enough to execute, saved as `partita/plan@1`.

A plan belongs to one model on one machine (both by fingerprint). It has stages; each stage runs
its ops on a mesh of devices, every op split along named loop dims, one per mesh axis. What was
predicted and how it was found stand beside the decisions, so that a plan explains itself.
"""

import itertools
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partita.errors import PlanError
from partita.files import check_format, convert, decode_json, encode_json, read_bytes

FORMAT = "partita/plan@1"
SHARDING_LEVELS = ("none", "states", "gradients", "parameters")  # ZeRO stages 0 to 3


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a device mesh. `weights` give unlike devices unlike shares: (2, 2, 1) of 5."""

    name: str
    size: int
    weights: tuple[int, ...] = ()

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
        return f"{self.name}={self.size}{weights}"


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
        sizes = [a.size for a in self.axes]
        stride = math.prod(sizes[axis + 1 :])
        others = [range(s) if i != axis else range(1) for i, s in enumerate(sizes)]
        found = []
        for place in itertools.product(*others):
            start = 0
            for coordinate, size in zip(place, sizes, strict=True):
                start = start * size + coordinate
            found.append(tuple(self.devices[start + k * stride] for k in range(sizes[axis])))
        return tuple(found)

    def place(self, device: int) -> tuple[int, ...]:
        """The coordinates of a device, one per axis."""
        index = self.devices.index(device)
        found = []
        for axis in reversed(self.axes):
            index, coordinate = divmod(index, axis.size)
            found.append(coordinate)
        return tuple(reversed(found))

    def __str__(self) -> str:
        return " x ".join(map(str, self.axes))


@dataclass(frozen=True, slots=True)
class OpSplit:
    """How one forward op (and its backward) is split: a loop dim per mesh axis, '' for none.

    `sharded` says what of its parameters is kept in shares, not copies, along the other axes.
    """

    op: str
    dims: tuple[str, ...]
    sharded: str = "none"

    def __post_init__(self) -> None:
        if self.sharded not in SHARDING_LEVELS:
            raise PlanError(
                f"found {self.sharded!r}",
                fix=f"use one of {', '.join(SHARDING_LEVELS)}",
                field=f"split of {self.op!r} sharded",
            )


@dataclass(frozen=True, slots=True)
class Stage:
    """Ops that run on one mesh, each with its split."""

    name: str
    mesh: Mesh
    splits: tuple[OpSplit, ...]

    def __post_init__(self) -> None:
        for split in self.splits:
            if len(split.dims) != len(self.mesh.axes):
                raise PlanError(
                    f"op {split.op!r} has {len(split.dims)} dims for {len(self.mesh.axes)} axes",
                    fix="give one dim per axis, '' for none",
                    field=f"stage {self.name!r} splits",
                )

    def dims(self) -> dict[str, tuple[str, ...]]:
        """The dims of every op, by name."""
        return {split.op: split.dims for split in self.splits}


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Which model a plan is for: how to build it again, and its fingerprint."""

    spec: str
    batch: int
    dtype: str
    training: bool
    optimizer: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ClusterRef:
    """Which machine a plan is for."""

    spec: str
    num_devices: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of a plan."""

    step_s: float
    lower_bound_s: float
    compute_s: float
    communication_s: float
    peak_memory_bytes: tuple[float, ...]
    capacity_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """How a plan was found."""

    method: str
    status: str
    why: str
    seed: int
    seconds: float
    version: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided for one model on one machine."""

    model: ModelRef
    cluster: ClusterRef
    stages: tuple[Stage, ...]
    prediction: Prediction
    origin: Origin

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("the plan has no stages", fix="a plan has at least one", field="stages")

    def to_json(self) -> bytes:
        """The plan as a file."""
        return encode_json({"format": FORMAT, **asdict(self)})

    def __str__(self) -> str:
        stages = "; ".join(f"{stage.name} on {stage.mesh}" for stage in self.stages)
        return f"{self.model.spec} on {self.cluster.spec}: {stages}"


def plan_from_json(value: dict[str, Any], file: str = "") -> Plan:
    """The plan in a decoded file."""
    check_format(value, "plan", 1, file)
    try:
        return convert({k: v for k, v in value.items() if k != "format"}, Plan, file)
    except PlanError as error:
        raise error.within(file) from None


def read_plan(path: str | Path) -> Plan:
    """The plan in a file."""
    return plan_from_json(decode_json(read_bytes(path), str(path)), str(path))
