"""Which part of a tensor a rank holds, and which parts pass between ranks: boxes of intervals.

A box is a (start, stop) per dim. The shards of a layout tile a tensor (replicas have equal boxes),
so what a rank needs of another layout is the intersection of its box with those of others.
"""

import functools
import math
from collections.abc import Sequence

import torch

from partita.meaning import Layout, Value
from partita.plans import Axis, Mesh
from partita.run.local.shards import Place, Shape, shard_index

T = torch.Tensor
Box = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=65536)
def box(shape: Shape, layout: Layout, axes: tuple[Axis, ...], place: Place) -> Box:
    """The part of a tensor that a rank holds; partial sums are as large as the whole."""
    intervals = []
    for own, size in zip(shard_index(shape, layout, axes, place), shape, strict=True):
        assert isinstance(own, slice), "only rows of gates are no intervals"
        intervals.append(own.indices(size)[:2])
    return tuple(intervals)


def shape_of(own: Box) -> Shape:
    """The sizes of a box."""
    return tuple(stop - start for start, stop in own)


def common(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if that is nothing."""
    parts = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in parts) else parts


def inside(part: Box, whole: Box) -> tuple[slice, ...]:
    """Where a box lies in another that holds it."""
    return tuple(slice(p[0] - w[0], p[1] - w[0]) for p, w in zip(part, whole, strict=True))


@functools.lru_cache(maxsize=65536)
def local_shape(
    shape: Shape, layout: Layout, axes: tuple[Axis, ...], place: Place, num_gates: int = 1
) -> Shape:
    """The shape of a rank's shard."""
    index = shard_index(shape, layout, axes, place, num_gates)
    return tuple(
        len(range(size)[own]) if isinstance(own, slice) else len(own)
        for size, own in zip(shape, index, strict=True)
    )


def flat_size(value: Value, shape: Shape, axes: tuple[Axis, ...], place: Place, gates: int) -> int:
    """How many elements a rank holds of a value, in parts along its flat axes."""
    size = math.prod(local_shape(shape, value.layout, axes, place, gates))
    for axis in value.flat:
        index, count = place[axis], axes[axis].size
        size = size * (index + 1) // count - size * index // count
    return size


@functools.lru_cache(maxsize=4096)
def routes(
    shape: Shape, source: Mesh, have: Layout, target: Mesh, need: Layout
) -> tuple[tuple[int, int, Box], ...]:
    """Who sends which part to whom, as (from, to, box) of devices, so that all have what they need.

    What a device has itself it keeps. Of replicas the one at the target's place of the order sends,
    so that no source sends to all.
    """
    holders: dict[Box, list[int]] = {}
    for device in source.devices:
        holders.setdefault(box(shape, have, source.axes, source.place(device)), []).append(device)
    sends = []
    for i, device in enumerate(target.devices):
        needed = box(shape, need, target.axes, target.place(device))
        for held, devices in holders.items():
            part = common(held, needed)
            if part is None and shape:
                continue
            own = device if device in devices else devices[i * len(devices) // len(target.devices)]
            sends.append((own, device, part or ()))
    return tuple(sends)


def put_together(parts: Sequence[tuple[Box, T]], needed: Box, like: T) -> T:
    """A rank's shard from the parts of it; one part that is all of it is taken as it is."""
    if len(parts) == 1 and parts[0][0] == needed:
        return parts[0][1].reshape(shape_of(needed))
    whole = like.new_empty(shape_of(needed))
    for part, tensor in parts:
        whole[inside(part, needed)] = tensor.reshape(shape_of(part))
    return whole
