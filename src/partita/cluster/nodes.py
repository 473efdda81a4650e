"""`[[nodes]]` and `[network]` tables: what is inside a machine and what joins several."""

import math
import re

from partita.cluster.catalogue import Catalogue
from partita.cluster.kinds import KindTable
from partita.cluster.record import MAX_DEVICES, shown
from partita.cluster.tables import TomlTable
from partita.cluster.wiring import SHAPES, Cards, Fabric, Node, NodeNetwork, Wire, near_cube
from partita.suggest import suggest

MAX_PER_LINE = 100_000

_BANDWIDTH = {"bytes_per_s": "1", "GB_per_s": "1e9", "Gb_per_s": "0.125e9"}
_LATENCY = {"latency_s": "1", "latency_us": "1e-6"}
_COUNTED = re.compile(r"\s*(?:([0-9]{1,9})\s*[xX×]\s*)?(.*\S)\s*\Z", re.DOTALL)


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
