"""Machine: what a forecast needs of a cluster of equal devices: kind, nodes, two bandwidths.

Times of collectives follow the ring: of n bytes over p ranks, q of them in a node,

    inside      fixed + volume / bandwidth of the wires inside
    across      fixed + hops + the larger of that and volume / (q network cards)

with volume 2 n (p-1)/p for an all-reduce and n (p-1)/p for a gather, a scatter or an all-to-all;
between nodes it is that of p/q ranks, since the ranks of a node add up or share out inside first.
"""

from dataclasses import dataclass

from partita.cluster import Cluster
from partita.cluster.record import DeviceKind
from partita.costs.physics import Physics, PhysicsSet, physics_of
from partita.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Machine:
    """Equal devices in equal nodes."""

    kind: DeviceKind
    num_devices: int
    node_size: int
    inside_bytes_per_s: float  # of one device, one direction
    across_bytes_per_s: float  # of one device's share of the network cards
    physics_set: PhysicsSet

    @property
    def physics(self) -> Physics:
        """The parameters of the kind."""
        return self.physics_set.physics

    def collective(self, kind: str, size_bytes: float, ranks: int, near: int) -> float:
        """Seconds of a collective over `ranks`, `near` of them in each node."""
        if ranks <= 1 or size_bytes <= 0:
            return 0.0
        physics = self.physics
        volume = size_bytes * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
        wires = self.inside_bytes_per_s * physics.inside
        if near >= ranks:
            return physics.inside_s + volume / wires
        near = max(1, near)
        if kind == "all_to_all":
            volume *= (ranks - near) / max(1, ranks - 1)
            cards = self.across_bytes_per_s * physics.across
            return physics.across_s + (ranks - 1) * physics.hop_s + volume / cards
        # Ranks of one node add up first: each node sends and receives once.
        nodes = ranks / near
        cards = self.across_bytes_per_s * physics.across * near
        between = volume * (nodes - 1) / nodes * ranks / (ranks - 1)
        moving = max(between / cards, volume / wires if near > 1 else 0.0)
        return physics.across_s + (ranks - 1) * physics.hop_s + moving

    def send(self, size_bytes: float, *, far: bool) -> float:
        """Seconds of a message to the next stage."""
        physics = self.physics
        if far:
            return physics.across_s + size_bytes / (self.across_bytes_per_s * physics.across)
        return physics.inside_s + size_bytes / (self.inside_bytes_per_s * physics.inside)

    def side_by_side(self, first_s: float, second_s: float) -> float:
        """Seconds of two things that run at the same time and slow each other down."""
        return max(first_s, second_s) + self.physics.interference * min(first_s, second_s)


def machine_of(cluster: Cluster) -> Machine:
    """The machine that a cluster of equal devices is; heterogeneous ones are refused."""
    kinds = {cluster.kind_of(device).name for device in range(cluster.num_devices)}
    if len(kinds) > 1:
        raise ClusterError(
            f"has devices of {len(kinds)} kinds ({', '.join(sorted(kinds))})",
            fix="strategies by name are for equal devices; `partita plan` takes mixed ones",
            field="cluster",
        )
    kind = cluster.kind_of(0)
    nodes = cluster.levels()
    node_size = len(nodes[0].groups[0]) if nodes else 1
    inside, across = _rate(cluster, 0, 1), 0.0
    if cluster.num_devices > node_size:
        across = _rate(cluster, 0, node_size)
    return Machine(
        kind, cluster.num_devices, node_size, inside, across or inside, physics_of(kind.name)
    )


def _rate(cluster: Cluster, source: int, target: int) -> float:
    """Bytes per second of the narrowest link between two devices."""
    if max(source, target) >= cluster.num_devices:
        return 1.0
    return min(cluster.links[i].bytes_per_s for i in cluster.route(source, target))
