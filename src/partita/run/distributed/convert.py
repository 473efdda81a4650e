"""A tensor from one layout into another on the same mesh: what one rank sends, takes and keeps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from partita.errors import ProgramError
from partita.meaning import Layout
from partita.plans import Axis, Mesh
from partita.run.distributed.boxes import box, common, inside, local_shape, put_together, shape_of
from partita.run.distributed.comm import Communicator, Line, Pending
from partita.run.local.shards import Place, Shape, shard_index

T = torch.Tensor


@dataclass(frozen=True)
class MeshPlace:
    """A rank's place on a mesh, and who stands around it."""

    mesh: Mesh
    place: Place
    rank_of: dict[int, int]  # by device

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the mesh."""
        return self.mesh.axes

    def line(self, axis: int) -> Line:
        """The ranks of this rank's line along an axis, in their order."""
        return tuple(self.rank_of[self._device(place)] for place in self.line_places(axis))

    def line_places(self, axis: int) -> list[Place]:
        """The places of that line."""
        own, size = self.place, self.axes[axis].size
        return [(*own[:axis], k, *own[axis + 1 :]) for k in range(size)]

    def _device(self, place: Place) -> int:
        index = 0
        for coordinate, axis in zip(place, self.axes, strict=True):
            index = index * axis.size + coordinate
        return self.mesh.devices[index]


def changed_axis(have: Layout, need: Layout) -> int:
    """The one axis that a step of a conversion changes."""
    axes = [i for i, (a, b) in enumerate(zip(have, need, strict=True)) if a != b]
    if len(axes) != 1:
        raise ProgramError(
            f"a conversion changes {len(axes)} axes at once", fix="convert one after the other"
        )
    return axes[0]


def convert(
    comm: Communicator, at: MeshPlace, own: T, shape: Shape, have: Layout, need: Layout,
    num_gates: int = 1,
) -> Pending:  # fmt: skip
    """Start a conversion along one axis, among the ranks of a line."""
    axis = changed_axis(have, need)
    line = at.line(axis)
    if have[axis].kind == "replicate":
        part = sliced(own, shape, have, need, at.axes, at.place, num_gates)
        return _ready(part)
    if have[axis].kind == "partial":
        return _reduced(comm, at, own, shape, have, need, line, num_gates)
    if num_gates > 1:
        return _by_index(comm, at, own, shape, have, need, line, num_gates)
    return _exchanged(comm, at, own, shape, have, need, line)


def _ready(tensor: T) -> Pending:
    pending = Pending(None, lambda: tensor)
    pending.known = tensor
    return pending


def sliced(
    own: T, shape: Shape, have: Layout, need: Layout, axes: tuple[Axis, ...], place: Place,
    num_gates: int = 1,
) -> T:  # fmt: skip
    """A part of what a rank holds all of along an axis; nothing is sent."""
    axis = changed_axis(have, need)
    if need[axis].kind == "partial":
        return own if place[axis] == 0 else torch.zeros_like(own)
    if num_gates > 1:
        full = own.new_zeros(shape)
        full[shard_index(shape, have, axes, place, num_gates)] = own
        return full[shard_index(shape, need, axes, place, num_gates)]
    return own[inside(box(shape, need, axes, place), box(shape, have, axes, place))]


def _reduced(
    comm: Communicator, at: MeshPlace, own: T, shape: Shape, have: Layout, need: Layout,
    line: Line, num_gates: int,
) -> Pending:  # fmt: skip
    """Partial sums added up; where each keeps a shard of equal size, only that is summed there."""
    axis = changed_axis(have, need)
    whole = (*have[:axis], type(have[axis])("replicate"), *have[axis + 1 :])
    if need[axis].kind == "replicate":
        return comm.all_reduce(own.clone(memory_format=torch.contiguous_format), line)
    shapes = [local_shape(shape, need, at.axes, place, num_gates) for place in at.line_places(axis)]
    if num_gates > 1 or len(set(shapes)) > 1:
        total = comm.all_reduce(own.clone(memory_format=torch.contiguous_format), line)
        return _then(total, lambda t: sliced(t, shape, whole, need, at.axes, at.place, num_gates))
    mine = box(shape, whole, at.axes, at.place)
    parts = [
        [own[inside(box(shape, need, at.axes, place), mine)].reshape(-1)]
        for place in at.line_places(axis)
    ]
    total = comm.reduce_scatter(parts, line)
    return _then(total, lambda t: t.reshape(shapes[0]))


def _then(pending: Pending, change: object) -> Pending:
    finish = pending.finish
    pending.finish = lambda: change(finish())  # type: ignore[operator]
    return pending


def _exchanged(
    comm: Communicator, at: MeshPlace, own: T, shape: Shape, have: Layout, need: Layout, line: Line
) -> Pending:
    """Shards to other shards, or gathered: every rank takes its part from each of its line."""
    axis = changed_axis(have, need)
    spots = at.line_places(axis)
    held = [box(shape, have, at.axes, place) for place in spots]
    wanted = [box(shape, need, at.axes, place) for place in spots]
    mine, needed = box(shape, have, at.axes, at.place), box(shape, need, at.axes, at.place)
    if need[axis].kind == "replicate":
        sizes = [math.prod(shape_of(each)) for each in held]
        pending = comm.all_gather(own, sizes, line)
        return _then(
            pending,
            lambda parts: put_together(list(zip(held, parts, strict=True)), needed, own),
        )
    gives, takes = [], []
    for theirs, there in zip(wanted, held, strict=True):
        given, taken = common(mine, theirs), common(there, needed)
        gives.append(own[inside(given, mine)] if given else own.new_empty(0))
        takes.append(taken)
    sizes = [math.prod(shape_of(taken)) if taken else 0 for taken in takes]
    pending = comm.all_to_all(gives, sizes, line)
    return _then(
        pending,
        lambda parts: put_together(
            [(taken, part) for taken, part in zip(takes, parts, strict=True) if taken], needed, own
        ),
    )


def _by_index(
    comm: Communicator, at: MeshPlace, own: T, shape: Shape, have: Layout, need: Layout,
    line: Line, num_gates: int,
) -> Pending:  # fmt: skip
    """Rows of gates are no boxes: all shards of the line are gathered, and the part is taken."""
    axis = changed_axis(have, need)
    spots: Sequence[Place] = at.line_places(axis)
    shapes = [local_shape(shape, have, at.axes, place, num_gates) for place in spots]
    pending = comm.all_gather(own, [math.prod(each) for each in shapes], line)

    def finish(parts: list[T]) -> T:
        full = own.new_zeros(shape)
        for place, part, size in zip(spots, parts, shapes, strict=True):
            full[shard_index(shape, have, at.axes, place, num_gates)] = part.reshape(size)
        return full[shard_index(shape, need, at.axes, at.place, num_gates)]

    return _then(pending, finish)
