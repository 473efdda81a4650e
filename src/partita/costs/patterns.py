"""Groups of devices that lie alike in a cluster's hierarchy: what one costs, all cost.

A pattern is the kinds of the devices and, level by level, which of them are together, in the order
the groups are met. On large clusters it stands for the links themselves, which would be slow to
compare; small ones are compared by what collectives take.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from partita.cluster import Cluster


@dataclass(frozen=True)
class Patterns:
    """Where devices lie in the hierarchy, for comparing groups of them."""

    cluster: Cluster
    homes: tuple[tuple[int, ...], ...]  # per level, the group of each device

    @classmethod
    def of(cls, cluster: Cluster) -> "Patterns":
        """Look up every level once."""
        homes = []
        for level in cluster.levels():
            home = [0] * cluster.num_devices
            for number, members in enumerate(level.groups):
                for device in members:
                    home[device] = number
            homes.append(tuple(home))
        return cls(cluster, tuple(homes))

    @property
    def inner_size(self) -> int:
        """Devices in the largest group of the innermost level."""
        return max(len(group) for group in self.cluster.levels()[0].groups)

    def pattern(self, devices: Sequence[int]) -> tuple[object, ...]:
        """Equal for groups of like devices that lie alike."""
        kinds = tuple(self.cluster.devices[device].kind for device in devices)
        return (
            len(devices),
            kinds[0] if len(set(kinds)) == 1 else kinds,
            tuple(_relabelled(home, devices) for home in self.homes),
        )


def _relabelled(home: Sequence[int], devices: Sequence[int]) -> tuple[int, ...]:
    """Numbers of groups in the order they are met, as run lengths."""
    names: dict[int, int] = {}
    relabelled: list[int] = []
    for key, run in itertools.groupby(home[device] for device in devices):
        relabelled += [names.setdefault(key, len(names)), sum(1 for _ in run)]
    return tuple(relabelled)
