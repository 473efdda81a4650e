"""Seconds to bring a tensor from the devices of one stage to those of another.

Each target device needs its share as the first op there wants it. It comes from the source device
at the same place of the order; all messages are on their way at once, and what crosses one link
adds up there. Where targets need copies, each may fetch a part only and the copies exchange their
parts over their own, often faster, links: the quicker of the two is taken.

Between meshes that have some devices in common a device keeps what it has, and takes the rest from
whoever has it.
"""

import functools
import itertools
import math

from partita.costs.collectives import Collectives
from partita.costs.layouts import Layout, conversion_seconds, copied_axes, num_shards
from partita.plans import Axis, Mesh

Extent = tuple[tuple[float, float], ...]  # of each dim that is cut, from where to where


def transfer_seconds(
    size_bytes: float, source: Mesh, have: Layout, target: Mesh, need: Layout, times: Collectives
) -> float:
    """Time of one tensor of `size_bytes` in all, from layout `have` to layout `need`."""
    ways = tuple(axis.ways() for axis in target.axes)
    if source.devices == target.devices:
        if source.axes != target.axes:
            return 0.0
        groups = [source.groups(i) for i in range(len(source.axes))]
        return conversion_seconds(size_bytes, ways, groups, times, have, need)
    if not set(source.devices).isdisjoint(target.devices):
        moved = moved_parts(source, have, target, need)
        largest = max((part for _, _, part in moved), default=0.0)
        return times.exchange(size_bytes * largest, tuple((a, b) for a, b, _ in moved))
    share = size_bytes / num_shards(need, ways)
    copied = copied_axes(need, target.axes)
    pairs = paired(source, target)
    direct = times.exchange(share, pairs)
    if not copied:
        return direct
    part, gather = share, 0.0
    for axis in copied:
        gather += times.seconds("all_gather", part, target.groups(axis))
        part /= target.axes[axis].size
    return min(direct, times.exchange(part, pairs) + gather)


def sent_pairs(
    source: Mesh, have: Layout, target: Mesh, need: Layout
) -> tuple[tuple[int, int], ...]:
    """Who sends to whom when a tensor passes between two meshes."""
    if set(source.devices).isdisjoint(target.devices) or source.devices == target.devices:
        return paired(source, target)
    return tuple((a, b) for a, b, _ in moved_parts(source, have, target, need))


def paired(source: Mesh, target: Mesh) -> tuple[tuple[int, int], ...]:
    """Who sends to whom: each target's share comes from the source at its place."""
    n, m = len(source.devices), len(target.devices)
    return tuple((source.devices[i * n // m], device) for i, device in enumerate(target.devices))


@functools.lru_cache(maxsize=4096)
def moved_parts(
    source: Mesh, have: Layout, target: Mesh, need: Layout
) -> tuple[tuple[int, int, float], ...]:
    """What passes between meshes that have devices in common: from, to, which part of the tensor.

    The shards of a layout tile a tensor, so what a device lacks lies in shards that it has nothing
    of. Of replicas the one at the target's place of the order sends.
    """
    cut = sorted({p.dim for p in (*have, *need) if p.kind == "shard"})
    holders: dict[Extent, list[int]] = {}
    for device in source.devices:
        extent = _extent(have, source.axes, source.place(device), cut)
        holders.setdefault(extent, []).append(device)
    moved = []
    for i, device in enumerate(target.devices):
        needed = _extent(need, target.axes, target.place(device), cut)
        for extent, devices in holders.items():
            part = math.prod(
                max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
                for a, b in zip(extent, needed, strict=True)
            )
            if part > 0 and device not in devices:
                moved.append((devices[i * len(devices) // len(target.devices)], device, part))
    return tuple(moved)


def _extent(
    layout: Layout, axes: tuple[Axis, ...], place: tuple[int, ...], dims: list[int]
) -> Extent:
    """What a device has of each dim that any layout cuts: axes that cut one dim nest."""
    extent = dict.fromkeys(dims, (0.0, 1.0))
    for placement, axis, coordinate in zip(layout, axes, place, strict=True):
        if placement.kind == "shard":
            weights = axis.weights or (1,) * axis.size
            borders = (0, *itertools.accumulate(weights))
            start, stop = extent[placement.dim]
            unit = (stop - start) / borders[-1]
            extent[placement.dim] = (
                start + unit * borders[coordinate], start + unit * borders[coordinate + 1]
            )  # fmt: skip
    return tuple(extent[dim] for dim in dims)
