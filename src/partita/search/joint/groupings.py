"""Which devices form the stages of a pipeline, and how the devices of a stage form a mesh.

Equal devices: every number of stages that divides them, each stage as many neighbours in the
cluster's order (which follows its hierarchy). Heterogeneous devices: each kind is cut by itself, so
that a stage has one kind and gets as many segments as that kind is fast; kinds may come in either
order, and slow kinds may be left out. A mesh is a line, or a rectangle with a short inner axis.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from partita.cluster import Cluster
from partita.plans import Axis, Mesh

AXIS_NAMES = ("x", "y", "z")
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class GroupingSettings:
    """Which groups of devices and meshes of a group are in the space."""

    least_inner: int = 8  # inner axes of up to so many devices are tried, however small the nodes
    most_inner: int = 64  # and none of more, however large
    most_groupings: int = 48  # of heterogeneous devices, those of most devices and fewest groups
    largest_weight: int = 12  # of a device's share of the batch, in whole numbers
    most_weighted: int = 3  # meshes of unequal shares


USUAL_GROUPS = GroupingSettings()


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def device_groupings(
    cluster: Cluster, most_groups: int, settings: GroupingSettings = USUAL_GROUPS
) -> list[Groups]:
    """Ways to give the devices to the groups of a pipeline, few groups first."""
    everything = tuple(range(cluster.num_devices))
    alike = [
        _equal(everything, count) for count in divisors(len(everything)) if count <= most_groups
    ]
    if cluster.is_homogeneous:
        return alike
    by_kind: dict[str, list[int]] = {}
    for device in everything:
        by_kind.setdefault(cluster.devices[device].kind, []).append(device)
    distinct = dict.fromkeys(alike[:1])
    kinds = list(by_kind.values())
    for count in range(1, len(kinds) + 1):
        for order in itertools.permutations(kinds, count):
            for cuts in itertools.product(*(divisors(len(members)) for members in order)):
                if sum(cuts) <= most_groups:
                    groups = tuple(
                        group
                        for members, cut in zip(order, cuts, strict=True)
                        for group in _equal(tuple(members), cut)
                    )
                    distinct.setdefault(groups)
    ranked = sorted(distinct, key=lambda groups: (-sum(map(len, groups)), len(groups), groups))
    return ranked[: settings.most_groupings]


def _equal(devices: tuple[int, ...], count: int) -> Groups:
    size = len(devices) // count
    return tuple(devices[i * size : (i + 1) * size] for i in range(count))


def mesh_shapes(
    size: int, inner_size: int, settings: GroupingSettings = USUAL_GROUPS
) -> list[tuple[int, ...]]:
    """A line, and every rectangle whose inner axis is at most a node or a few devices long."""
    most = min(settings.most_inner, max(settings.least_inner, inner_size))
    inner = [b for b in divisors(size) if 2 <= b < size and b <= most]
    return [(size,), *((size // b, b) for b in inner)]


def shard_group_shapes(
    size: int, inner_size: int, shards: int, settings: GroupingSettings = USUAL_GROUPS
) -> list[tuple[tuple[int, ...], bool]]:
    """Meshes whose replicas come in groups of `shards`: sizes, and whether there are several.

    Groups lie outside of what shares a layer, replicas of them outside of both.
    """
    shapes = []
    for _, *inner in mesh_shapes(size, inner_size, settings):
        groups, rest = divmod(size // math.prod(inner), shards)
        if groups and not rest:
            replicas = (groups,) if groups > 1 else ()
            shapes.append(((*replicas, shards, *inner), groups > 1))
    return shapes


def mesh_of(shape: tuple[int, ...], devices: Sequence[int], *, replicates: bool = False) -> Mesh:
    """A mesh of these devices, row by row; one that `replicates` does so along its first axis."""
    named = zip(AXIS_NAMES, shape, strict=False)
    axes = tuple(
        Axis(name, size, (), replicates and not place) for place, (name, size) in enumerate(named)
    )
    return Mesh(axes, tuple(devices))


def weighted_meshes(
    cluster: Cluster, speed_of: dict[str, float], batch: int,
    settings: GroupingSettings = USUAL_GROUPS,
) -> list[Mesh]:  # fmt: skip
    """Lines over all devices in which shares of the batch follow speed, the best ones first.

    Weights are small whole numbers, one per kind, whose sum over all devices divides the batch:
    other shares would not be whole samples.
    """
    counts: dict[str, int] = {}
    for device in cluster.devices:
        counts[device.kind] = counts.get(device.kind, 0) + 1
    kinds = list(counts)
    if len(kinds) < 2:
        return []
    balances: list[tuple[float, tuple[int, ...]]] = []
    for weights in itertools.product(range(1, settings.largest_weight + 1), repeat=len(kinds)):
        parts = sum(w * counts[kind] for w, kind in zip(weights, kinds, strict=True))
        if math.gcd(*weights) == 1 and len(set(weights)) > 1 and batch % parts == 0:
            slowest = max(w / speed_of[kind] for w, kind in zip(weights, kinds, strict=True))
            balances.append((slowest / parts, weights))
    chosen = [dict(zip(kinds, weights, strict=True)) for _, weights in sorted(balances)]
    chosen = chosen[: settings.most_weighted]
    everything = tuple(range(cluster.num_devices))
    return [
        Mesh(
            (Axis("x", len(everything), tuple(of[device.kind] for device in cluster.devices)),),
            everything,
        )
        for of in chosen
    ]
