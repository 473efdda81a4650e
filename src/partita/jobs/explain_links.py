"""Which links a communication crosses, by names people know, and clusters with other links.

The hierarchy of a cluster is in its levels: groups of devices that reach each other over links of
at least some bandwidth. A collective crosses the innermost level that has all members of each of
its groups together. A link belongs to the widest level that is no wider than the link; what is
narrower than all levels belongs to the last. Names are those of the presets whose bandwidth and
latency a level's links have: `nvlink3`, `infiniband-200`.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from partita import units
from partita.cluster import Cluster, Link
from partita.cluster.presets import list_interconnects
from partita.costs.collectives import Groups, Patterns


@dataclass(frozen=True)
class Links:
    """The levels of a cluster by name, and which of them communication crosses."""

    cluster: Cluster

    @cached_property
    def names(self) -> tuple[str, ...]:
        """A name for each level, innermost first; none for a single device."""
        if self.cluster.num_devices == 1:
            return ()
        return tuple(self._name(place) for place in range(len(self.cluster.levels())))

    def crossed(self, groups: Groups) -> str:
        """The name of the level that a collective in these groups crosses; none on one device."""
        if not self.names:
            return ""
        return self.names[self._level(groups)]

    def level_of(self, link: Link) -> int:
        """The level that a link belongs to."""
        levels = self.cluster.levels()
        for place, level in enumerate(levels):
            if link.bytes_per_s >= level.bytes_per_s:
                return place
        return len(levels) - 1

    def faster(self, level: int, times: float) -> Cluster:
        """The cluster with all links of one level so many times as fast, latency included."""
        return replace(
            self.cluster,
            links=tuple(
                replace(
                    link, bytes_per_s=link.bytes_per_s * times, latency_s=link.latency_s / times
                )
                if self.level_of(link) == level
                else link
                for link in self.cluster.links
            ),
        )

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns.of(self.cluster)

    def _level(self, groups: Groups) -> int:
        for place, home in enumerate(self._patterns.homes):
            if all(home[device] == home[group[0]] for group in groups for device in group):
                return place
        return len(self._patterns.homes) - 1

    def _name(self, place: int) -> str:
        level = self.cluster.levels()[place]
        rate = units.rate(level.bytes_per_s, "B")
        node = [device.node for device in self.cluster.devices]
        inside = all(node[device] == node[group[0]] for group in level.groups for device in group)
        where = "inside nodes" if inside else "between nodes"
        wires = {
            (link.latency_s, link.bytes_per_s)
            for link in self.cluster.links
            if link.bytes_per_s == level.bytes_per_s
        }
        known = [
            cable.name
            for cable in list_interconnects()
            if (cable.wire.latency_s, cable.wire.bytes_per_s) in wires
        ]
        return f"{known[0] if known else 'links'} {where} ({rate})"
