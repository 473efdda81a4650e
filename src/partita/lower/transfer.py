"""Seconds to bring a tensor from the devices of one stage to those of another.

Each target device needs its share as the first op there wants it. It comes from the source device
at the same place of the order; all messages are on their way at once, and what crosses one link
adds up there. Where targets need copies, each may fetch a part only and the copies exchange their
parts over their own, often faster, links: the quicker of the two is taken.
"""

from partita.costs.collectives import Collectives
from partita.costs.layouts import Layout, conversion_seconds, copied_axes, num_shards
from partita.plans import Mesh


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


def paired(source: Mesh, target: Mesh) -> tuple[tuple[int, int], ...]:
    """Who sends to whom: each target's share comes from the source at its place."""
    n, m = len(source.devices), len(target.devices)
    return tuple((source.devices[i * n // m], device) for i, device in enumerate(target.devices))
