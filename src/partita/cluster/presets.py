"""Presets by name, and `resolve`: whatever a user types for a cluster, as a `Cluster`.

    dgx-a100           a machine that comes with partita
    my-cluster.toml    a file, or .json as partita saves it
    4xA100             four of a kind in one node
    2x8xH100           two nodes of eight
    4xV100+8xP100      groups of different kinds, joined by the network
    4xdgx-a100         several machines
    8xA100@links=0.5   any of these with other memory or links

A group is cut into nodes of 8 (72 for GB200, one pod for TPUs) unless the node size is given. What
is inside a node, and its network cards, are those usual for the kind: NVLink or Infinity Fabric
and a card per device in data centres, PCIe and a card per node otherwise.

What if a machine were a little different is said behind `@`:

    memory=24GB     every device has this much (or 24GiB, or bytes)
    links=0.5       every link has this many times its bandwidth
    without=n1      this node, or this device (n0.gpu3), is gone

Changes stand in the machine's name, so that plans and commands say them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from partita.cluster.calibration import calibrated, calibration_of
from partita.cluster.machines import (
    Catalogue,
    CatalogueMachine,
    Interconnect,
    KindPreset,
    Node,
    NodeNetwork,
    Parts,
    plain,
    read_kind,
    read_wire,
    wire_nodes,
)
from partita.cluster.record import MAX_DEVICES, Cluster, DeviceKind
from partita.cluster.tables import Document, TomlTable
from partita.cluster.toml import read_cluster, read_toml
from partita.errors import ClusterError, FileError
from partita.files import read_bytes
from partita.suggest import suggest
from partita.units import size_bytes

LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3
Read = Callable[[str], bytes]
DATA = Path(__file__).with_name("presets.toml")
_GROUP = re.compile(r"(?:([+-]?[0-9]+)[x×*])?(?:([+-]?[0-9]+)[x×*])?(\S.*)", re.IGNORECASE)


def split_changes(spec: str) -> tuple[str, str]:
    """The machine and its changes; these are empty where the name has none."""
    base, at, changes = spec.rpartition("@")
    return (base, changes) if at and "=" in changes else (spec, "")


def changed(cluster: Cluster, changes: str) -> Cluster:
    """The cluster with the changes of its name made."""
    for change in changes.split(","):
        name, _, value = change.partition("=")
        if name not in CHANGES:
            raise ClusterError(f"found {name[:60]!r}", fix=suggest(name, CHANGES), field="cluster")
        cluster = CHANGES[name](cluster, value)
    return replace(cluster, name=f"{cluster.name}@{changes}"[:200])


def _memory(cluster: Cluster, text: str) -> Cluster:
    memory_bytes = int(size_bytes(text, "memory"))
    kinds = tuple(replace(kind, memory_bytes=memory_bytes) for kind in cluster.kinds)
    return replace(cluster, kinds=kinds)


def _links(cluster: Cluster, text: str) -> Cluster:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not LEAST_FACTOR <= factor <= MOST_FACTOR:
        raise ClusterError(
            f"found {text[:60]!r}",
            fix=f"give a factor of {LEAST_FACTOR:g} to {MOST_FACTOR:g}: links=0.5",
            field="links",
        )
    links = tuple(replace(link, bytes_per_s=link.bytes_per_s * factor) for link in cluster.links)
    return replace(cluster, links=links)


def _without(cluster: Cluster, text: str) -> Cluster:
    left = [i for i, each in enumerate(cluster.devices) if text not in (each.node, each.name)]
    nodes = dict.fromkeys(each.node for each in cluster.devices if each.node)
    if len(left) == cluster.num_devices:
        names = [*nodes, *(each.name for each in cluster.devices)]
        raise ClusterError(
            f"{cluster.name} has no node or device {text[:60]!r}",
            fix=f"{suggest(text, names)}; its nodes are {', '.join(list(nodes)[:8]) or 'unnamed'}",
            field="without",
        )
    if not left:
        raise ClusterError(
            f"nothing is left of {cluster.name} without {text}",
            fix="name a part of it",
            field="without",
        )
    return cluster.subset(left)


CHANGES: dict[str, Callable[[Cluster, str], Cluster]] = {
    "memory": _memory,
    "links": _links,
    "without": _without,
}


def resolve(spec: str | PathLike[str], read: Read = read_bytes) -> Cluster:
    """The cluster that a preset name, a file or a shorthand such as `2x8xH100` stands for.

    `read` gives the bytes of a file that is named: a plan carries them.
    """
    base, plus, measured = str(spec).rpartition("+")
    if plus and measured.lower().endswith(".json") and not Path(spec).exists():
        return calibrated(resolve(base, read), calibration_of(read(measured), measured))
    if isinstance(spec, str) and not spec.lower().endswith((".toml", ".json")):
        base, changes = split_changes(spec)
        if changes:
            return changed(resolve(base, read), changes)
    if isinstance(spec, PathLike) or str(spec).lower().endswith((".toml", ".json")):
        return _read_file(Path(spec), read)
    if not isinstance(spec, str) or not spec.strip():
        raise ClusterError(
            f"found {spec!r} where a cluster belongs", fix="name one, such as 4xA100"
        )
    text = spec.strip()
    machine = catalogue().machine(text) if text.isprintable() else None
    if machine is not None:
        return _machine_cluster(machine)
    return _from_groups(text)


def several(kind: DeviceKind, count: int) -> Cluster:
    """So many devices of a kind, joined as A100s are, be the kind known or from a user's file."""
    usual = resolve(f"{count}xA100")
    as_named_there = replace(kind, name=usual.kinds[0].name)
    return replace(usual, name=f"{count}x{kind.name}", kinds=(as_named_there,))


def list_presets() -> dict[str, str]:
    """The machines that come with partita: name and one line about each."""
    machines = {machine.name: machine for machine in catalogue().machines.values()}
    return {name: machine.description for name, machine in machines.items()}


def list_kinds() -> tuple[DeviceKind, ...]:
    """The kinds of devices that come with partita, in the order of the preset file."""
    return tuple({preset.kind.name: preset.kind for preset in catalogue().kinds.values()}.values())


def list_interconnects() -> tuple[Interconnect, ...]:
    """The interconnects that come with partita, in the order of the preset file."""
    return tuple(catalogue().interconnects.values())


@cache
def catalogue() -> Catalogue:
    """All presets, read from the data file once."""
    root = _document().root()
    wires = {plain(wire.name): wire for wire in map(_interconnect, root.tables("interconnects"))}
    kinds: dict[str, KindPreset] = {}
    for preset in map(_kind_preset, root.tables("kinds")):
        for name in (preset.kind.name, *preset.aliases):
            _enter(kinds, name, preset)
    machines: dict[str, CatalogueMachine] = {}
    for index, table in enumerate(root.tables("machines")):
        machine = _machine(table, index)
        for name in (machine.name, *machine.aliases):
            _enter(machines, name, machine)
    root.close()
    return Catalogue(MappingProxyType(kinds), MappingProxyType(wires), MappingProxyType(machines))


@cache
def _document() -> Document:
    return Document(DATA.read_text(encoding="utf-8"), "presets.toml")


def _enter(entries: dict[str, Any], name: str, value: object) -> None:
    assert plain(name) not in entries, f"two presets are called {name}"
    entries[plain(name)] = value


def _interconnect(table: TomlTable) -> Interconnect:
    name, shape, source = table.text("name"), table.text("shape"), table.text("source")
    wire, _ = read_wire(table, Catalogue())
    assert wire is not None
    table.close()
    return Interconnect(name, wire, shape, source)


def _kind_preset(table: TomlTable) -> KindPreset:
    aliases = tuple(table.texts("aliases"))
    inside, nics = table.text("inside"), table.text("nics")
    nics_per, node_size = table.text("nics_per"), table.whole("node_size", 8, 1)
    return KindPreset(read_kind(table), aliases, inside, nics, nics_per, node_size)


def _machine(table: TomlTable, index: int) -> CatalogueMachine:
    aliases = tuple(table.texts("aliases"))
    tables = {key: value for key, value in table.values.items() if key != "aliases"}
    return CatalogueMachine(table.text("name"), aliases, table.text("description"), tables, index)


def _machine_cluster(machine: CatalogueMachine, tables: Mapping[str, Any] | None = None) -> Cluster:
    path = ("machines", machine.index)
    return read_cluster(TomlTable(tables or machine.tables, _document(), path), catalogue())


def _read_file(path: Path, read: Read) -> Cluster:
    if path.suffix.lower() not in (".toml", ".json"):
        raise FileError(
            f"ends in {path.suffix!r}", fix="a cluster file ends in .toml or .json", file=str(path)
        )
    data = read(str(path))
    if path.suffix.lower() == ".json":
        return Cluster.from_json(data, str(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FileError(
            f"is not TOML (line {line} has a byte that is not UTF-8)",
            fix="give a text file",
            file=str(path),
        ) from None
    return read_toml(text, catalogue(), str(path))


@dataclass(frozen=True, slots=True)
class _DeviceGroup:
    """One part of a shorthand: `count` devices of a kind in nodes of `node_size`, or machines."""

    count: int
    node_size: int  # 0: as is usual for the kind
    name: str

    def __str__(self) -> str:
        sizes = f"{self.count}x{self.node_size}x" if self.node_size else f"{self.count}x"
        return f"{sizes}{self.name}"


def _from_groups(text: str) -> Cluster:
    groups = [_parse_group(part, text) for part in text.split("+")]
    kinds: dict[str, DeviceKind] = {}
    nodes: list[Node] = []
    names = []
    for group in groups:
        preset = catalogue().kind(group.name)
        if preset is None:
            return _from_machines(groups, text)
        kinds[preset.kind.name] = preset.kind
        nodes += _nodes_of(group, preset, len(nodes), text)
        names.append(str(replace(group, name=preset.kind.name)))
        _check_total(sum(len(node.devices) for node in nodes), text)
    parts = Parts()
    wire_nodes(parts, nodes, NodeNetwork())
    return Cluster(
        "+".join(names)[:200],
        tuple(kinds.values()),
        tuple(parts.devices),
        tuple(parts.switches),
        tuple(parts.links),
    )


def _nodes_of(group: _DeviceGroup, preset: KindPreset, first: int, text: str) -> list[Node]:
    if group.node_size:
        _check_total(group.count * group.node_size, text)
        sizes = [group.node_size] * group.count
    else:
        full, rest = divmod(group.count, preset.node_size)
        sizes = [preset.node_size] * full + ([rest] if rest else [])
    kind = preset.kind
    made: dict[int, Node] = {}
    for size in sizes:
        if size not in made:
            devices = ((kind.type, kind.name),) * size
            fabrics = catalogue().default_fabrics(preset, size)
            made[size] = Node("", devices, fabrics, catalogue().default_cards(preset, size))
    return [replace(made[size], name=f"n{first + index}") for index, size in enumerate(sizes)]


def _from_machines(groups: list[_DeviceGroup], text: str) -> Cluster:
    """Machines that are made of nodes, several of each, on one network."""
    tables: list[dict[str, Any]] = []
    names = []
    for group in groups:
        machine = catalogue().machine(group.name)
        if machine is None:
            _unknown(group.name, text)
        if group.node_size or set(machine.tables) - {"name", "description", "nodes"}:
            raise ClusterError(
                f"{machine.name} in {text!r} is one machine and cannot be multiplied",
                fix="write a cluster file, or use kinds of devices as in 2x8xA100",
                field="cluster",
            )
        nodes = machine.tables["nodes"]
        tables += [{**node, "count": node.get("count", 1) * group.count} for node in nodes]
        names.append(f"{group.count}x{machine.name}")
    joined = {"name": "+".join(names)[:200], "nodes": tables}
    return read_cluster(TomlTable(joined, Document("", text[:200])), catalogue())


def _parse_group(part: str, text: str) -> _DeviceGroup:
    match = _GROUP.fullmatch(part.strip())
    if match is None or not part.isprintable():
        raise ClusterError(
            f"found {text[:60]!r}",
            fix="write a preset, a .toml or .json file, or a shorthand such as 4xA100 or 2x8xH100",
            field="cluster",
        )
    counts = [_count(number, text) for number in match.groups()[:2] if number is not None]
    size = counts[1] if len(counts) == 2 else 0
    return _DeviceGroup(counts[0] if counts else 1, size, match[3])


def _count(digits: str, text: str) -> int:
    number = int(digits) if len(digits) < 10 else MAX_DEVICES + 1
    if digits.startswith("-") or number < 1 or number > MAX_DEVICES:
        raise ClusterError(
            f"found the count {digits[:20]} in {text[:60]!r}",
            fix=f"counts go from 1 to {MAX_DEVICES:,}",
            field="cluster",
        )
    return number


def _check_total(count: int, text: str) -> None:
    if count > MAX_DEVICES:
        raise ClusterError(
            f"{text[:60]!r} has {count:,} devices",
            fix=f"at most {MAX_DEVICES:,} are possible",
            field="cluster",
        )


def _unknown(name: str, text: str) -> NoReturn:
    known = {preset.kind.name for preset in catalogue().kinds.values()}
    known |= {alias for preset in catalogue().kinds.values() for alias in preset.aliases}
    known |= set(list_presets())
    inside = f" in {text[:60]!r}" if text != name else ""
    raise ClusterError(
        f"unknown device or machine {name[:60]!r}{inside}",
        fix=f"{suggest(name, known)} (partita clusters lists all)",
        field="cluster",
    )
