"""Machines as tables describe them: what comes with partita, kinds, nodes, wires and networks.

Wiring makes devices, switches and directed links of a few words. A node holds devices, any number
of fabrics that join them, and network cards:

    switch      every device has a cable to one switch of the node (NVSwitch)
    host        the same, and the network cards hang on that switch too (PCIe)
    all-to-all  every two devices have a cable (Infinity Fabric)
    ring        each device has a cable to the next, the last one to the first
    torus       a grid of the given dims with the ends of each line joined (TPU pods)
    pairs       the cables listed, several between two devices counting as one wider one

Network cards go from the devices (`at = "devices"`: card k serves every device whose share of
the cards it is, rails if there is one each) or from the host switch (`at = "host"`: the cards act
as one of their combined bandwidth) to a network switch that never blocks. With `nodes_per_leaf`
the network is a tree of two levels whose uplinks may be narrower than what hangs below them.
A cluster of one node has no network.

The catalogue is what comes with partita: kinds of devices, interconnects and whole machines. Names
are looked up without regard to case and punctuation: `gtx1080ti` is `GTX-1080-Ti`.

`[[kinds]]` tables have figures in the units people write. They are kept as the decimals that were
written until they are in our units, so that `0.07 GB/s` is 70,000,000 bytes/s exactly.

`[[nodes]]` and `[network]` tables say what is inside a machine and what joins several.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn, TypeVar

from partita.cluster.record import DTYPES, MAX_DEVICES, MAX_LINKS, Device, DeviceKind, Link, shown
from partita.cluster.tables import TomlTable
from partita.errors import ClusterError
from partita.suggest import suggest

SHAPES = ("switch", "host", "all-to-all", "ring", "torus", "pairs")
T = TypeVar("T")
_MEMORY = {"memory_bytes": "1", "memory_GiB": str(2**30), "memory_GB": "1e9"}
_MEMORY_RATE = {"memory_bytes_per_s": "1", "memory_GB_per_s": "1e9"}
_CACHE = {"cache_bytes": "1", "cache_MiB": str(2**20), "cache_KiB": "1024"}
_CACHE_RATE = {"cache_bytes_per_s": "1", "cache_GB_per_s": "1e9"}
_LAUNCH = {"launch_s": "1", "launch_us": "1e-6"}
_SHARED = {"shared_bytes_per_unit": "1", "shared_KiB_per_unit": "1024"}
MAX_PER_LINE = 100_000
_BANDWIDTH = {"bytes_per_s": "1", "GB_per_s": "1e9", "Gb_per_s": "0.125e9"}
_LATENCY = {"latency_s": "1", "latency_us": "1e-6"}
_COUNTED = re.compile(r"\s*(?:([0-9]{1,9})\s*[xX×]\s*)?(.*\S)\s*\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Wire:
    """What a cable does in each direction; half duplex means one direction at a time."""

    latency_s: float
    bytes_per_s: float
    half_duplex: bool = False

    def times(self, count: int) -> "Wire":
        """`count` such cables used as one."""
        return Wire(self.latency_s, self.bytes_per_s * count, self.half_duplex)


@dataclass(frozen=True, slots=True)
class Fabric:
    """One way in which the devices of a node are joined."""

    shape: str
    wire: Wire
    dims: tuple[int, ...] = ()  # of a torus
    pairs: tuple[tuple[int, int, int], ...] = ()  # device, device, number of cables


@dataclass(frozen=True, slots=True)
class Cards:
    """The network cards of one node."""

    wire: Wire
    count: int
    at: str = "devices"  # or host


@dataclass(frozen=True, slots=True)
class Node:
    """One machine: its devices as (type, kind) pairs, its fabrics, its network cards."""

    name: str
    devices: tuple[tuple[str, str], ...]
    fabrics: tuple[Fabric, ...] = ()
    cards: Cards | None = None


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """What joins the nodes: one switch, or leaves with an uplink each."""

    nodes_per_leaf: int = 0  # 0: one switch for all
    uplink: Wire | None = None


@dataclass(slots=True)
class Parts:
    """Devices, switches and links as they accumulate."""

    devices: list[Device] = field(default_factory=list)
    switches: list[str] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)

    def cable(self, a: str, b: str, wire: Wire) -> None:
        """Both directions of one cable."""
        lane = f"{a}|{b}" if wire.half_duplex else ""
        self.links.append(Link(a, b, wire.latency_s, wire.bytes_per_s, lane))
        self.links.append(Link(b, a, wire.latency_s, wire.bytes_per_s, lane))


def wire_nodes(parts: Parts, nodes: list[Node], network: NodeNetwork) -> None:
    """Add the nodes to the parts, and the network between them if there are several."""
    num_links = sum(_num_links(node) for node in nodes)
    if num_links > MAX_LINKS:
        raise ClusterError(
            f"would have up to {num_links:,} links",
            fix=f"at most {MAX_LINKS:,} are built",
            field="nodes",
        )
    joined = len(nodes) > 1 and any(node.cards for node in nodes)
    if joined:
        _add_network(parts, len(nodes), network)
    for index, node in enumerate(nodes):
        uplink = _switch_for(index, network) if joined and node.cards else ""
        _add_node(parts, node, uplink)


def near_cube(count: int) -> tuple[int, ...]:
    """Three dims with this product, as near to a cube as whole numbers get."""
    best = (1, 1, count)
    for a in range(1, round(count ** (1 / 3)) + 1):
        if count % a:
            continue
        rest = count // a
        b = next(b for b in range(math.isqrt(rest), 0, -1) if rest % b == 0)
        if max(a, b, rest // b) < max(best):
            best = (a, b, rest // b)
    return tuple(sorted(best))


def _num_links(node: Node) -> int:
    """How many links the node will have at most, its cards included."""
    n = len(node.devices)
    total = 6 * n
    for fabric in node.fabrics:
        if fabric.shape == "all-to-all":
            total += n * (n - 1)
        else:
            total += 2 * (len(fabric.pairs) + n * max(len(fabric.dims), 1))
    return total


def _add_network(parts: Parts, num_nodes: int, network: NodeNetwork) -> None:
    if not network.nodes_per_leaf or network.uplink is None:
        parts.switches.append("network")
        return
    num_leaves = -(-num_nodes // network.nodes_per_leaf)
    parts.switches.append("spine")
    for index in range(num_leaves):
        parts.switches.append(f"leaf{index}")
        parts.cable(f"leaf{index}", "spine", network.uplink)


def _switch_for(index: int, network: NodeNetwork) -> str:
    if not network.nodes_per_leaf or network.uplink is None:
        return "network"
    return f"leaf{index // network.nodes_per_leaf}"


def _add_node(parts: Parts, node: Node, uplink: str) -> None:
    names = []
    counts: dict[str, int] = {}
    for kind_type, kind in node.devices:
        number = counts.get(kind_type, 0)
        counts[kind_type] = number + 1
        names.append(f"{node.name}.{kind_type}{number}")
        parts.devices.append(Device(names[-1], kind, node.name))
    host = ""
    for number, fabric in enumerate(node.fabrics):
        hub = f"{node.name}.{fabric.shape}{number or ''}"
        if fabric.shape == "host":
            host = host or hub
        _add_fabric(parts, fabric, names, hub)
    if uplink and node.cards:
        _add_cards(parts, node, names, host, uplink)


def _add_fabric(parts: Parts, fabric: Fabric, names: list[str], hub: str) -> None:
    if fabric.shape in ("switch", "host"):
        parts.switches.append(hub)
        for name in names:
            parts.cable(name, hub, fabric.wire)
        return
    for a, b, count in _cables(fabric, len(names)):
        parts.cable(names[a], names[b], fabric.wire.times(count))


def _cables(fabric: Fabric, num: int) -> list[tuple[int, int, int]]:
    if fabric.shape == "all-to-all":
        return [(a, b, 1) for a in range(num) for b in range(a + 1, num)]
    if fabric.shape == "ring":
        return _torus_cables((num,))
    if fabric.shape == "torus":
        return _torus_cables(fabric.dims)
    return list(fabric.pairs)


def _torus_cables(dims: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Each vertex to the next along every dim; a line of two is joined once, not twice."""
    cables = []
    stride = 1
    for extent in reversed(dims):
        for a in range(math.prod(dims)):
            place = a // stride % extent
            if place + 1 < extent:
                cables.append((a, a + stride, 1))
            elif extent > 2:
                cables.append((a, a - place * stride, 1))
        stride *= extent
    return cables


def _add_cards(parts: Parts, node: Node, names: list[str], host: str, uplink: str) -> None:
    cards = node.cards
    assert cards is not None
    if cards.at == "host" and host:
        parts.cable(host, uplink, cards.wire.times(cards.count))
    elif cards.count >= len(names):
        for name in names:
            parts.cable(name, uplink, cards.wire)
    else:
        _add_shared_cards(parts, node.name, names, cards, uplink)


def _add_shared_cards(parts: Parts, node: str, names: list[str], cards: Cards, uplink: str) -> None:
    """Fewer cards than devices: the way to a card costs no time, the card's own cable is shared."""
    for number in range(cards.count):
        parts.switches.append(f"{node}.nic{number}")
        parts.cable(f"{node}.nic{number}", uplink, cards.wire)
    for index, name in enumerate(names):
        card = f"{node}.nic{index * cards.count // len(names)}"
        parts.cable(name, card, Wire(0.0, cards.wire.bytes_per_s))


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


@dataclass(slots=True)
class KindTable:
    """The kinds a file defines and the presets it uses, by the names devices are given."""

    catalogue: Catalogue
    by_name: dict[str, DeviceKind] = field(default_factory=dict)
    habits: dict[str, KindPreset] = field(default_factory=dict)  # how a kind is usually wired

    def add(self, table: TomlTable) -> None:
        """Take in one `[[kinds]]` entry."""
        base = None
        if "based_on" in table:
            base = self.catalogue.kind(table.text("based_on"))
            if base is None:
                self._unknown(table, table.text("based_on"), "based_on")
        kind = read_kind(table, base.kind if base else None)
        if kind.name in self.by_name:
            table.fail(f"the kind {kind.name!r} is given twice", "rename one", "name")
        self.by_name[kind.name] = kind
        if base is not None:
            self.habits[kind.name] = base

    def find(self, table: TomlTable, name: str, *keys: str | int) -> DeviceKind:
        """The kind of this name, from the file or else from the presets."""
        if name in self.by_name:
            return self.by_name[name]
        preset = self.catalogue.kind(name)
        if preset is None:
            self._unknown(table, name, *keys)
        preset_name = preset.kind.name
        if preset_name not in self.by_name:
            self.by_name[preset_name] = preset.kind
            self.habits[preset_name] = preset
        return self.by_name[preset_name]

    def used(self) -> tuple[DeviceKind, ...]:
        """All kinds, those of the file first."""
        return tuple(self.by_name.values())

    def _unknown(self, table: TomlTable, name: str, *keys: str | int) -> NoReturn:
        known = {*self.by_name}.union(preset.kind.name for preset in self.catalogue.kinds.values())
        table.fail(f"unknown kind of device {shown(name)}", suggest(name, known), *keys)


def read_kind(table: TomlTable, base: DeviceKind | None = None) -> DeviceKind:
    """One `[[kinds]]` entry; what it does not say is taken from `base`."""

    def usual(name: str, otherwise: Any = None) -> Any:
        return getattr(base, name) if base else otherwise

    cache_bytes = _whole(table, _CACHE, usual("cache_bytes", 0), positive=False)
    values: dict[str, Any] = {
        "name": table.text("name"),
        "type": table.text("type", usual("type")),
        "flops_per_s": _read_rates(table, base),
        "memory_bytes": _whole(table, _MEMORY, usual("memory_bytes")),
        "memory_bytes_per_s": _real(table, _MEMORY_RATE, usual("memory_bytes_per_s")),
        "cache_bytes": cache_bytes,
        "cache_bytes_per_s": _real(
            table, _CACHE_RATE, usual("cache_bytes_per_s", 0.0), positive=cache_bytes > 0
        ),
        "launch_s": _real(table, _LAUNCH, usual("launch_s", 0.0), positive=False),
        "num_units": table.whole("num_units", usual("num_units", 1), 1),
        "shared_bytes_per_unit": _whole(
            table, _SHARED, usual("shared_bytes_per_unit", 0), positive=False
        ),
        "registers_per_unit": table.whole("registers_per_unit", usual("registers_per_unit", 0)),
        "source": table.text("source", f"as {base.name}: {base.source}" if base else ""),
    }
    table.close()
    with table.located():
        return DeviceKind(**values)


def _read_rates(table: TomlTable, base: DeviceKind | None) -> tuple[tuple[str, float], ...]:
    both = [key for key in ("TFLOPS", "flops_per_s") if key in table]
    if len(both) == 2:
        table.fail("TFLOPS is given as flops_per_s too", "give one of them", "flops_per_s")
    rates = dict(base.flops_per_s) if base else {}
    if not both:
        if base is None:
            table.fail("the peak rates are missing", "add TFLOPS = { f32 = ... }")
        return tuple(rates.items())
    scale = Decimal("1e12" if both[0] == "TFLOPS" else 1)
    listed = table.table(both[0])
    for dtype in DTYPES:
        if dtype in listed:
            rates[dtype] = float(listed.number(dtype) * scale)
    listed.close()
    if "f32" not in rates:
        table.fail("has no rate for f32", "give at least that one", both[0])
    return tuple(rates.items())


def _real(
    table: TomlTable, units: dict[str, str], default: float | None, positive: bool = True
) -> float:
    value = table.quantity(units, positive)
    if value is None and (default is None or (positive and not default)):
        names = list(units)
        table.fail(f"{names[0]} is missing", f"add {' or '.join(names[1:] or names)}")
    return float(value) if value is not None else default or 0.0


def _whole(
    table: TomlTable, units: dict[str, str], default: int | None, positive: bool = True
) -> int:
    value = table.quantity(units, positive)
    if value is not None and value > 2**62:
        key = next(key for key in units if key in table)
        table.fail(f"found {shown(table.get(key))}", "a size below 4 EiB is needed", key)
    if value is None:
        return int(_real(table, units, default, positive))
    return max(round(value), 1) if positive else round(value)


def read_wire(
    table: TomlTable, catalogue: Catalogue, base: Wire | None = None
) -> tuple[Wire | None, str]:
    """Bandwidth and latency in a table, and the usual shape of the interconnect it names."""
    shape = ""
    if "link" in table:
        cable = catalogue.interconnect(table.text("link"))
        if cable is None:
            known = (entry.name for entry in catalogue.interconnects.values())
            table.fail(
                f"unknown interconnect {shown(table.text('link'))}",
                suggest(table.text("link"), known),
                "link",
            )
        base, shape = cable.wire, cable.shape
    rate = table.quantity(_BANDWIDTH)
    latency = table.quantity(_LATENCY, positive=False)
    half_duplex = table.flag("half_duplex") or bool(base and base.half_duplex)
    if base is None and rate is None and latency is None:
        return None, shape
    if base is None and rate is None:
        table.fail("the bandwidth is missing", "add GB_per_s, or a link by name")
    if base is None and latency is None:
        table.fail("the latency is missing", "add latency_us, or a link by name")
    return Wire(
        float(latency) if latency is not None else base.latency_s if base else 0.0,
        float(rate) if rate is not None else base.bytes_per_s if base else 0.0,
        half_duplex,
    ), shape


def read_nodes(table: TomlTable, kinds: KindTable) -> list[Node]:
    """The machines of all `[[nodes]]` entries, each as often as it is counted."""
    nodes: list[Node] = []
    num_devices = 0
    unnamed = 0
    for entry in table.tables("nodes"):
        count = entry.whole("count", 1, 1, MAX_PER_LINE)
        devices = _read_node_devices(entry, kinds)
        num_devices += count * len(devices)
        if num_devices > MAX_DEVICES:
            entry.fail(f"makes {num_devices:,} devices", f"at most {MAX_DEVICES:,} are read")
        fabrics = _read_inside(entry, kinds, devices)
        cards = _read_nics(entry, kinds, devices, fabrics, _network_wire(table, kinds.catalogue))
        name = entry.text("name", "")
        entry.close()
        for index in range(count):
            own = f"{name}{index if count > 1 else ''}" if name else f"n{unnamed}"
            unnamed += not name
            nodes.append(Node(own, devices, fabrics, cards))
    return nodes


def _read_node_devices(entry: TomlTable, kinds: KindTable) -> tuple[tuple[str, str], ...]:
    listed = isinstance(entry.get("devices"), list)
    devices: list[tuple[str, str]] = []
    for index, text in enumerate(entry.texts("devices")):
        keys = ("devices", index) if listed else ("devices",)
        match = _COUNTED.match(text)
        count = int(match[1] or 1) if match else 0
        if match is None or not 1 <= count <= MAX_PER_LINE:
            entry.fail(
                f"found {shown(text)}", f'write "8xA100", with 1 to {MAX_PER_LINE:,} of them', *keys
            )
        kind = kinds.find(entry, match[2], *keys)
        devices += [(kind.type, kind.name)] * count
        if len(devices) > MAX_DEVICES:
            entry.fail("holds too many devices", f"at most {MAX_DEVICES:,} are read", *keys)
    if not devices:
        entry.fail("has no devices", 'add devices = "8xA100"')
    return tuple(devices)


def _read_inside(
    entry: TomlTable, kinds: KindTable, devices: tuple[tuple[str, str], ...]
) -> tuple[Fabric, ...]:
    value = entry.get("inside")
    if value is None:
        return _usual_fabrics(entry, kinds, devices)
    if value == "none":
        return ()
    listed = isinstance(value, list)
    fabrics = []
    for index, item in enumerate(value if listed else [value]):
        path = (*entry.path, "inside", index) if listed else (*entry.path, "inside")
        if isinstance(item, str):
            item = {"link": item}
        if not isinstance(item, dict):
            raise entry.document.error(
                path, f"found {shown(item)}", 'write "nvlink3" or { shape = "switch", ... }'
            )
        fabrics.append(
            _read_fabric(TomlTable(item, entry.document, path), kinds.catalogue, len(devices))
        )
    return tuple(fabrics)


def _usual_fabrics(
    entry: TomlTable, kinds: KindTable, devices: tuple[tuple[str, str], ...]
) -> tuple[Fabric, ...]:
    """What presets say about their own kind; a mix is for the writer to decide."""
    if len(devices) == 1:
        return ()
    habits = {kind: kinds.habits.get(kind) for _, kind in devices}
    first = habits[devices[0][1]]
    if first is None:
        return ()
    if any(habit is None or habit.inside != first.inside for habit in habits.values()):
        entry.fail(
            "holds several kinds of devices, and does not say how they are joined",
            'add inside = "pcie4", or another interconnect',
        )
    return kinds.catalogue.default_fabrics(first, len(devices))


def _read_fabric(table: TomlTable, catalogue: Catalogue, num_devices: int) -> Fabric:
    wire, usual = read_wire(table, catalogue)
    if wire is None:
        table.fail("says nothing about the links", "add GB_per_s and latency_us, or a link by name")
    shape = table.text("shape", usual or None)
    if shape not in SHAPES:
        table.fail(f"unknown shape {shown(shape)}", suggest(shape, SHAPES), "shape")
    dims: tuple[int, ...] = ()
    if shape == "torus":
        dims = _read_dims(table, num_devices)
    pairs = _read_pairs(table, num_devices) if shape == "pairs" else ()
    table.close()
    return Fabric(shape, wire, dims, pairs)


def _read_dims(table: TomlTable, num_devices: int) -> tuple[int, ...]:
    dims = table.get("dims")
    if dims is None:
        return near_cube(num_devices)
    good = isinstance(dims, list) and all(type(extent) is int and extent > 0 for extent in dims)
    if not good or len(dims) > 16 or math.prod(dims) != num_devices:
        table.fail(f"found {shown(dims)}", f"whole numbers with product {num_devices}", "dims")
    return tuple(dims)


def _read_pairs(table: TomlTable, num_devices: int) -> tuple[tuple[int, int, int], ...]:
    pairs = table.get("pairs")
    if not isinstance(pairs, list):
        table.fail("the pairs are missing", "add pairs = [[0, 1], [2, 3]]")
    cables = []
    for index, pair in enumerate(pairs):
        good = isinstance(pair, list) and len(pair) in (2, 3) and all(type(n) is int for n in pair)
        if not good or not all(0 <= n < num_devices for n in pair[:2]) or pair[0] == pair[1]:
            fix = f"two different devices from 0 to {num_devices - 1}"
            table.fail(f"found {shown(pair)}", fix, "pairs", index)
        count = pair[2] if len(pair) == 3 else 1
        if not 1 <= count <= 1000:
            table.fail(f"found {count} cables", "1 to 1,000 are possible", "pairs", index)
        cables.append((pair[0], pair[1], count))
    return tuple(cables)


def _read_nics(
    entry: TomlTable,
    kinds: KindTable,
    devices: tuple[tuple[str, str], ...],
    fabrics: tuple[Fabric, ...],
    network: Wire | None,
) -> Cards | None:
    value = entry.get("nics")
    if value == "none":
        return None
    habit = kinds.habits.get(devices[0][1])
    if value is None and network is None:
        return kinds.catalogue.default_cards(habit, len(devices)) if habit else None
    if isinstance(value, str):
        value = {"link": value}
    if value is not None and not isinstance(value, dict):
        entry.fail(f"found {shown(value)}", 'write "infiniband-200" or { count = 8, ... }', "nics")
    table = TomlTable(value or {}, entry.document, (*entry.path, "nics"))
    usual = kinds.catalogue.interconnect(habit.nics) if habit else None
    wire, _ = read_wire(table, kinds.catalogue, network or (usual.wire if usual else None))
    if wire is None:
        table.fail("says nothing about the links", "add GB_per_s and latency_us, or a link by name")
    at_host = any(fabric.shape == "host" for fabric in fabrics)
    at = table.text("at", "host" if at_host else "devices")
    if at not in ("devices", "host"):
        table.fail(f"found {shown(at)}", 'write "devices" or "host"', "at")
    count = table.whole("count", 1 if at == "host" else len(devices), 1, MAX_PER_LINE)
    table.close()
    return Cards(wire, count, at)


def _network_wire(table: TomlTable, catalogue: Catalogue) -> Wire | None:
    wire, _ = read_wire(table.table("network"), catalogue)
    return wire


def read_network(table: TomlTable, catalogue: Catalogue) -> NodeNetwork:
    """The `[network]` table; one switch for all where there is none."""
    network = table.table("network")
    read_wire(network, catalogue)
    nodes_per_leaf = network.whole("nodes_per_leaf", 0, 1, MAX_PER_LINE)
    uplink = network.get("uplink")
    if isinstance(uplink, str):
        uplink = {"link": uplink}
    if uplink is not None and not isinstance(uplink, dict):
        network.fail(
            f"found {shown(uplink)}", 'write "infiniband-400" or { count = 8, ... }', "uplink"
        )
    network.close()
    if not nodes_per_leaf and uplink is None:
        return NodeNetwork()
    if not nodes_per_leaf or uplink is None:
        network.fail("a tree needs nodes_per_leaf and uplink", "give both, or neither")
    inner = TomlTable(uplink, network.document, (*network.path, "uplink"))
    wire, _ = read_wire(inner, catalogue)
    if wire is None:
        inner.fail("says nothing about the links", "add GB_per_s and latency_us, or a link by name")
    count = inner.whole("count", 1, 1, MAX_PER_LINE)
    inner.close()
    return NodeNetwork(nodes_per_leaf, wire.times(count))
