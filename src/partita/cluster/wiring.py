"""From machines described in a few words to devices, switches and directed links.

A node holds devices, any number of fabrics that join them, and network cards:

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
"""

import math
from dataclasses import dataclass, field

from partita.cluster.record import MAX_LINKS, Device, Link
from partita.errors import ClusterError

SHAPES = ("switch", "host", "all-to-all", "ring", "torus", "pairs")


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
