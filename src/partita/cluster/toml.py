"""Clusters as TOML, both ways: short to write by hand, exact when written by partita.

By hand, a file holds kinds of devices (those that come with partita need no entry), nodes, the
network between them, and single devices, switches and links where the shape is irregular;
docs/clusters.md has one of each. `write_toml` spells every device and link out, so that
`read_toml(write_toml(cluster), ...) == cluster` to the last bit.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import PurePath

from partita.cluster.machines import (
    Catalogue,
    KindTable,
    Parts,
    read_network,
    read_nodes,
    read_wire,
    wire_nodes,
)
from partita.cluster.record import Cluster, Device, DeviceKind, Link, shown
from partita.cluster.tables import Document, TomlTable
from partita.errors import ClusterError

FORMAT = "partita/cluster@1"


def read_toml(text: str, catalogue: Catalogue, file: str = "") -> Cluster:
    """The cluster that the text describes; `file` is named in errors."""
    return read_cluster(Document(text, file).root(), catalogue)


def read_cluster(table: TomlTable, catalogue: Catalogue) -> Cluster:
    """The cluster that a table describes: a whole file, or a machine among the presets."""
    _check_format(table)
    name = table.text("name", PurePath(table.document.file).stem or "cluster")
    table.text("description", "")
    kinds = KindTable(catalogue)
    for entry in table.tables("kinds"):
        kinds.add(entry)
    made = _Made()
    with table.located():
        wire_nodes(made.parts, read_nodes(table, kinds), read_network(table, catalogue))
    _read_single_parts(table, kinds, made)
    table.close()
    parts = made.parts
    try:
        return Cluster(
            name, kinds.used(), tuple(parts.devices), tuple(parts.switches), tuple(parts.links)
        )
    except ClusterError as error:
        raise made.located(table, error) from None


def write_toml(cluster: Cluster) -> str:
    """The cluster with every part spelled out; `read_toml` gives an equal one back."""
    lines = [f'format = "{FORMAT}"', f"name = {_quoted(cluster.name)}"]
    lines.append(f"switches = [{', '.join(map(_quoted, cluster.switches))}]")
    lines.append("devices = [")
    for device in cluster.devices:
        node = f", node = {_quoted(device.node)}" if device.node else ""
        lines.append(f"  {{ name = {_quoted(device.name)}, kind = {_quoted(device.kind)}{node} }},")
    lines += ["]", "links = ["]
    for link in cluster.links:
        lane = f", lane = {_quoted(link.lane)}" if link.lane else ""
        lines.append(
            f"  {{ source = {_quoted(link.source)}, target = {_quoted(link.target)}, "
            f"latency_s = {link.latency_s!r}, bytes_per_s = {link.bytes_per_s!r}{lane} }},"
        )
    lines.append("]")
    for kind in cluster.kinds:
        lines += ["", "[[kinds]]", *_kind_lines(kind)]
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class _Made:
    """The parts read so far, and where the single ones stand in the file."""

    parts: Parts = field(default_factory=Parts)
    places: dict[tuple[str, int], TomlTable] = field(default_factory=dict)

    def located(self, table: TomlTable, error: ClusterError) -> ClusterError:
        """What the cluster complains about, with the place it was read from."""
        match = re.match(r"(\w+)\[(\d+)\](.*)", error.field)
        place = self.places.get((match[1], int(match[2]))) if match else None
        if match is None or place is None:
            keys = tuple(key for key in ("devices", "nodes", "links") if key in table.values)[:1]
            if error.field == "name":
                keys = ("name",)
            return table.document.error((*table.path, *keys), error.found, error.fix)
        key = match[3].removeprefix(".")
        path = (*place.path, key) if key else place.path
        return table.document.error(path, error.found, error.fix)


def _check_format(table: TomlTable) -> None:
    if "format" in table:
        from partita.files import check_format

        check_format({"format": table.get("format")}, "cluster", file=table.document.file)


def _read_single_parts(table: TomlTable, kinds: KindTable, made: _Made) -> None:
    """The devices, switches and links given one by one, after those of the nodes."""
    parts = made.parts
    for entry in table.tables("devices"):
        made.places["devices", len(parts.devices)] = entry
        name = entry.text("name")
        kind = kinds.find(entry, entry.text("kind"), "kind")
        node = entry.text("node", "")
        entry.close()
        with entry.located():
            parts.devices.append(Device(name, kind.name, node))
    parts.switches += _read_switches(table, made)
    for entry in table.tables("links"):
        made.places["links", len(parts.links)] = entry
        _read_link(entry, kinds.catalogue, made)


def _read_switches(table: TomlTable, made: _Made) -> list[str]:
    value = table.get("switches")
    if isinstance(value, list) and not all(isinstance(item, dict) for item in value):
        return table.texts("switches")
    names: list[str] = []
    for entry in table.tables("switches"):
        made.places["switches", len(made.parts.switches) + len(names)] = entry
        names.append(entry.text("name"))
        entry.close()
    return names


def _read_link(entry: TomlTable, catalogue: Catalogue, made: _Made) -> None:
    wire, _ = read_wire(entry, catalogue)
    if wire is None:
        entry.fail("says nothing about the link", "add GB_per_s and latency_us, or a link by name")
    lane = entry.text("lane", "")
    if "between" not in entry:
        source, target = entry.text("source"), entry.text("target")
        entry.close()
        if wire.half_duplex and not lane:
            entry.fail("shares its medium, but not with what", "name a lane, or use between")
        with entry.located():
            link = Link(source, target, wire.latency_s, wire.bytes_per_s, lane)
            made.parts.links.append(link)
        return
    ends = entry.texts("between")
    entry.close()
    if len(ends) != 2:
        entry.fail(f"found {shown(ends)}", "the names of two vertices are needed", "between")
    if lane or wire.half_duplex:
        lane = lane or f"{ends[0]}|{ends[1]}"
    made.places["links", len(made.parts.links) + 1] = entry
    with entry.located():
        for source, target in (ends, ends[::-1]):
            link = Link(source, target, wire.latency_s, wire.bytes_per_s, lane)
            made.parts.links.append(link)


def _kind_lines(kind: DeviceKind) -> list[str]:
    rates = ", ".join(f"{dtype} = {rate!r}" for dtype, rate in kind.flops_per_s)
    return [
        f"name = {_quoted(kind.name)}",
        f"type = {_quoted(kind.type)}",
        f"flops_per_s = {{ {rates} }}",
        f"memory_bytes = {kind.memory_bytes}",
        f"memory_bytes_per_s = {kind.memory_bytes_per_s!r}",
        f"cache_bytes = {kind.cache_bytes}",
        f"cache_bytes_per_s = {kind.cache_bytes_per_s!r}",
        f"launch_s = {kind.launch_s!r}",
        f"num_units = {kind.num_units}",
        f"shared_bytes_per_unit = {kind.shared_bytes_per_unit}",
        f"registers_per_unit = {kind.registers_per_unit}",
        f"source = {_quoted(kind.source)}",
    ]


def _quoted(text: str) -> str:
    """A TOML basic string: JSON's escapes, plus the one character JSON leaves bare."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
