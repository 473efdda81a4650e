"""What placing a model gives: the best placement, what it was compared with, and a front.

A placement is saved as `partita/placement@1`. It holds a plan (a stage of its own for every device
that is used, its ops undivided) and what a plan does not say: by which rules it was timed, how many
batches run and how many at once. It is a file of its own because a plan's stages follow one another
as a pipeline, while data may come back to a device here, and ops are dispatched as they become
ready.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.costs.physics import around, sets_of, spread_of
from partita.costs.placement import SEMANTICS, PlacementModel
from partita.errors import PlanError
from partita.files import check_format, convert, decode_json, encode_json, read_bytes
from partita.jobs.place_subject import Subject
from partita.plans import Mesh, OpSplit, Plan, Stage, plan_from_json
from partita.problems.placement import PlacementProblem
from partita.search.base import Improvement, Status, relative_gap
from partita.showing import plot_of, repr_html, table_of
from partita.timeline import Timeline

KIND = "placement"


@dataclass(frozen=True)
class SavedPlacement:
    """A plan with one device per stage, and how it is run."""

    plan: Plan
    semantics: str
    batches: int
    in_flight: int

    def __post_init__(self) -> None:
        if self.semantics not in SEMANTICS:
            raise PlanError(
                f"found {self.semantics!r}",
                fix=f"use one of {', '.join(SEMANTICS)}",
                field="semantics",
            )
        for name in ("batches", "in_flight"):
            if getattr(self, name) < 1:
                raise PlanError(f"found {getattr(self, name)}", fix="give at least 1", field=name)
        for stage in self.plan.stages:
            if len(stage.mesh.devices) != 1:
                raise PlanError(
                    f"the stage {stage.name!r} has {len(stage.mesh.devices)} devices",
                    fix="a placement has one device per stage",
                    field="plan.stages",
                )

    def devices(self) -> dict[str, int]:
        """The device of every forward op."""
        return {
            split.op: stage.mesh.devices[0] for stage in self.plan.stages for split in stage.splits
        }

    def to_json(self) -> bytes:
        """The file's text."""
        return encode_json(
            {
                "format": f"partita/{KIND}@1",
                "semantics": self.semantics,
                "batches": self.batches,
                "in_flight": self.in_flight,
                "plan": decode_json(self.plan.to_json()),
            }
        )


@dataclass(frozen=True)
class _PlacementFile:
    semantics: str
    batches: int
    in_flight: int
    plan: dict[str, Any]


def placement_from_json(value: dict[str, Any], file: str = "") -> SavedPlacement:
    """The placement in a decoded file."""
    check_format(value, KIND, file=file)
    raw = convert({k: v for k, v in value.items() if k != "format"}, _PlacementFile, file)
    try:
        plan = plan_from_json(raw.plan, file)
        return SavedPlacement(plan, raw.semantics, raw.batches, raw.in_flight)
    except PlanError as error:
        raise (error if error.file else error.within(file)) from None


def read_placement(path: str | Path) -> SavedPlacement:
    """The placement in a file."""
    return placement_from_json(decode_json(read_bytes(path), str(path)), str(path))


def stages_of(model: PlacementModel, placement: Sequence[int]) -> tuple[Stage, ...]:
    """One stage per device that is used, in the order of devices; its ops in the graph's order."""
    members: dict[int, list[OpSplit]] = {}
    for op in model.graph.ops:
        if op.phase == "forward":
            device = placement[model.layer_of[op.name]]
            members.setdefault(device, []).append(OpSplit(op.name, ()))
    return tuple(
        Stage(model.cluster.devices[device].name, Mesh((), (device,)), tuple(members[device]))
        for device in sorted(members)
    )


def layer_devices(model: PlacementModel, devices: Mapping[str, int]) -> tuple[int, ...]:
    """The device of each layer; refused where ops of one layer are apart, or missing."""
    layer_devices = []
    for names in model.layers:
        places = {devices.get(name) for name in names}
        if None in places or len(places) > 1:
            raise PlanError(
                f"the ops {', '.join(names[:3])} are on the devices {sorted(map(str, places))}",
                fix="the placement was made for another model; place this one",
                field="plan.stages",
            )
        layer_devices.append(places.pop() or 0)
    return tuple(layer_devices)


@dataclass(frozen=True)
class SimulatedPlacement:
    """One placement that was simulated."""

    name: str
    placement: tuple[int, ...]  # a device per layer
    step_s: float
    peak_bytes: tuple[float, ...]  # per device of the cluster
    excess_bytes: float  # over what the devices have
    dispatch: str = ""  # the rule by which ops were run as they became ready

    @property
    def fits(self) -> bool:
        """Is there memory for it?"""
        return self.excess_bytes == 0

    @property
    def num_devices(self) -> int:
        """How many devices it uses."""
        return len(set(self.placement))


@dataclass(frozen=True)
class Placed:
    """The best placement found, what it was compared with, and how far from optimal it can be."""

    subject: Subject
    model: PlacementModel
    problem: PlacementProblem  # what the search saw
    semantics: str
    method: str
    status: Status
    why: str
    best: SimulatedPlacement | None
    tried: tuple[SimulatedPlacement, ...]
    timeline: Timeline | None
    dispatch: str
    lower_bound_s: float
    seconds: float
    seed: int
    evaluations: int
    saved: SavedPlacement | None
    history: tuple[Improvement, ...] = ()
    archive: Any = field(default=None, compare=False)  # of a method that keeps one

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def plan(self) -> Plan | None:
        """The placement as a plan: a stage per device."""
        return None if self.saved is None else self.saved.plan

    @property
    def gap(self) -> float | None:
        """How far from optimal at most."""
        return relative_gap(None if self.best is None else self.best.step_s, self.lower_bound_s)

    @property
    def likely_step_s(self) -> tuple[float, float] | None:
        """The step lies in here with 80 %; Exprimo's rules were never held against runs."""
        if self.best is None or self.semantics != "partita":
            return None
        cluster, used = self.model.cluster, sorted(set(self.best.placement))
        sets = sets_of(cluster.devices[device].kind for device in used)
        return around(self.best.step_s, spread_of(sets, len(used), exposed=0.0))

    def devices(self) -> dict[str, int]:
        """The device of every forward op."""
        if self.best is None:
            return {}
        return {
            name: device
            for names, device in zip(self.model.layers, self.best.placement, strict=True)
            for name in names
        }

    def front(self) -> tuple[SimulatedPlacement, ...]:
        """Of all that fit, those that none beats in time, memory and devices at once."""
        return front(self.tried)


def front(candidates: Iterable[SimulatedPlacement]) -> tuple[SimulatedPlacement, ...]:
    """The fitting candidates that no other beats in time, largest memory and devices used."""

    def costs(item: SimulatedPlacement) -> tuple[float, float, int]:
        return item.step_s, max(item.peak_bytes), item.num_devices

    fitting = {costs(item): item for item in reversed(list(candidates)) if item.fits}
    kept = [
        mine
        for mine in fitting
        if not any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
            for other in fitting
        )
    ]
    return tuple(fitting[key] for key in sorted(kept))
