"""A placement as a file, `partita/placement@1`, both ways.

It holds a plan (a stage of its own for every device that is used, its ops undivided) and what a
plan does not say: by which rules it was timed, how many batches run and how many at once. It is a
file of its own because a plan's stages follow one another as a pipeline, while data may come back
to a device here, and ops are dispatched as they become ready.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.costs.placement import SEMANTICS, PlacementModel
from partita.errors import PlanError
from partita.files import check_format, convert, decode_json, encode_json, read_bytes
from partita.plans import Mesh, OpSplit, Plan, Stage, plan_from_json

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
