"""How a tensor lies on a mesh, and the collectives that turn one layout into another.

A layout is one placement per mesh axis. Axis by axis, with `held` the bytes a device has after:

    S(i) -> R   all-gather of held           P -> R      all-reduce of held
    S(i) -> S(j) all-to-all of held          P -> S(i)   reduce-scatter of what it had before
    R -> S(i)   a slice, free

Summands go first: what is gathered later is then smaller.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partita.costs.collectives import Collectives, Groups
from partita.graph.splits import PARTIAL, REPLICATE, Placement

Layout = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a conversion along one axis; `collective` is empty for a free slice."""

    axis: int
    collective: str
    size_bytes: float
    held_bytes: float
    layout: Layout


def num_shards(layout: Layout, sizes: Sequence[float]) -> float:
    """Into how many shares a tensor is cut."""
    shards = 1.0
    for placement, size in zip(layout, sizes, strict=True):
        if placement.kind == "shard":
            shards *= size
    return shards


def conversion(
    whole_bytes: float, sizes: Sequence[float], have: Layout, need: Layout
) -> tuple[Step, ...]:
    """The steps from one layout to another, for a tensor of `whole_bytes` in all."""
    steps = []
    for axis in sorted(range(len(need)), key=lambda i: (have[i] != PARTIAL, i)):
        before, after = have[axis], need[axis]
        if before == after:
            continue
        held_before = whole_bytes / num_shards(have, sizes)
        have = (*have[:axis], after, *have[axis + 1 :])
        held = whole_bytes / num_shards(have, sizes)
        if before == REPLICATE:
            steps.append(Step(axis, "", 0.0, held, have))
        elif before == PARTIAL:
            name, size = (
                ("all_reduce", held) if after == REPLICATE else ("reduce_scatter", held_before)
            )
            steps.append(Step(axis, name, size, held, have))
        else:
            name = "all_gather" if after == REPLICATE else "all_to_all"
            steps.append(Step(axis, name, held, held, have))
    return tuple(steps)


def conversion_seconds(
    whole_bytes: float,
    sizes: Sequence[float],
    groups: Sequence[Groups],
    collectives: Collectives,
    have: Layout,
    need: Layout,
) -> float:
    """Time of a conversion on a mesh: ways of each axis, and its lines of devices."""
    return sum(
        collectives.seconds(step.collective, step.size_bytes, groups[step.axis])
        for step in conversion(whole_bytes, sizes, have, need)
        if step.collective
    )
