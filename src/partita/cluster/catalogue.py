"""What comes with partita: kinds of devices, interconnects and whole machines, found by name.

Names are looked up without regard to case and punctuation: `gtx1080ti` is `GTX-1080-Ti`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from partita.cluster.record import DeviceKind
from partita.cluster.wiring import Cards, Fabric, Wire, near_cube

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Interconnect:
    """A sort of cable, and the shape in which it usually joins the devices of a node."""

    name: str
    wire: Wire
    shape: str
    source: str


@dataclass(frozen=True, slots=True)
class KindPreset:
    """A kind of device and the machine it usually sits in."""

    kind: DeviceKind
    aliases: tuple[str, ...]
    inside: str  # interconnect within a node
    nics: str  # interconnect between nodes
    nics_per: str  # device or node
    node_size: int  # devices in a full node


@dataclass(frozen=True, slots=True)
class CatalogueMachine:
    """A whole machine, as the tables of a cluster file."""

    name: str
    aliases: tuple[str, ...]
    description: str
    tables: Mapping[str, Any]
    index: int  # among the machines of the preset file


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All presets, each under its plain name and its plain aliases."""

    kinds: Mapping[str, KindPreset] = field(default_factory=dict)
    interconnects: Mapping[str, Interconnect] = field(default_factory=dict)
    machines: Mapping[str, CatalogueMachine] = field(default_factory=dict)

    def kind(self, name: str) -> KindPreset | None:
        """The preset of this name or alias."""
        return self.kinds.get(plain(name))

    def interconnect(self, name: str) -> Interconnect | None:
        """The preset of this name."""
        return self.interconnects.get(plain(name))

    def machine(self, name: str) -> CatalogueMachine | None:
        """The preset of this name or alias."""
        return self.machines.get(plain(name))

    def default_fabrics(self, preset: KindPreset, num_devices: int) -> tuple[Fabric, ...]:
        """How this many devices of the kind are usually joined within a node."""
        cable = self.interconnect(preset.inside)
        if cable is None or num_devices == 1:
            return ()
        dims = near_cube(num_devices) if cable.shape == "torus" else ()
        return (Fabric(cable.shape, cable.wire, dims),)

    def default_cards(self, preset: KindPreset, num_devices: int) -> Cards | None:
        """The network cards of a node with this many devices of the kind."""
        cable = self.interconnect(preset.nics)
        if cable is None:
            return None
        if preset.nics_per == "node":
            return Cards(cable.wire, 1, "host")
        return Cards(cable.wire, num_devices)


def plain(name: str) -> str:
    """The name in small letters and digits alone."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
