"""Gradients of parameters that several stages hold: added from stage to stage, or handed on.

Where both stages have meshes and layouts of one form, each rank exchanges with the one at its own
place; partial sums stay partial sums. Else every rank of both gets all shards of the sender (or of
both) and takes its own part. Sums are added in the order of the stages, the same on both sides.
"""

from typing import TYPE_CHECKING

import torch

from partita.errors import ProgramError
from partita.meaning import Purpose, Value, Work
from partita.plans import Axis, Mesh
from partita.program import Program
from partita.run.distributed.boxes import flat_size, local_shape
from partita.run.distributed.held import cut, joined
from partita.run.local.shards import Place, places

if TYPE_CHECKING:
    from partita.run.distributed.walk import RankWalk

T = torch.Tensor
FIRST_TAG = 1 << 20  # above the numbers of messages between blocks


def tie(walk: "RankWalk", work: Work) -> None:
    """One exchange of the gradients that two stages have of some parameters."""
    for k, number in enumerate(work.reads):
        parameter = walk.program.values[number].tensor
        _tie_one(walk, work, parameter, FIRST_TAG + k * 4096)


def gradient_value(program: Program, stage: int, parameter: str) -> Value:
    """How the gradient of a parameter lies in a stage while micro-batches add to it."""
    for work in program.works:
        if work.purpose is not Purpose.UPDATE or work.stage != stage or work.body < 0:
            continue
        body = program.bodies[work.body].program
        for inner in body.works:
            if inner.purpose is Purpose.UPDATE:
                for k in range(len(inner.writes)):
                    if body.values[inner.reads[2 * k]].tensor == parameter:
                        name = body.values[inner.reads[2 * k + 1]].tensor
                        return _accumulated(program, stage, name)
    raise ProgramError(f"no update of {parameter} in stage {stage}", fix="verify the plan")


def _accumulated(program: Program, stage: int, name: str) -> Value:
    for work in program.works:
        if work.purpose is Purpose.COMPUTE and work.stage == stage and work.body >= 0:
            for value in program.bodies[work.body].program.values:
                if value.tensor == name and value.source == "gradient":
                    return value
    raise ProgramError(f"no block of stage {stage} gives {name}", fix="verify the plan")


def _tie_one(walk: "RankWalk", work: Work, parameter: str, tag: int) -> None:
    program, stages = walk.program, walk.stages
    sides = (work.stage, work.peer)
    values = [gradient_value(program, stage, parameter) for stage in sides]
    meshes = [stages[stage].mesh for stage in sides]
    alike = values[0].layout == values[1].layout and values[0].flat == values[1].flat
    alike = alike and [(a.size, a.weights) for a in meshes[0].axes] == [
        (a.size, a.weights) for a in meshes[1].axes
    ]
    adds = work.collective == "all_reduce"
    if alike:
        spots = [[place] for place in places(meshes[0].axes)]
    else:
        spots = [list(places(meshes[0].axes))]
    # With meshes of one form each place is a world of its own; else all places are one.
    senders = sides if adds else sides[:1]
    held: dict[tuple[int, Place], T] = {}
    comm, rank = walk.run.comm, walk.run.comm.rank
    sending, coming = [], []
    shape = walk.shapes.shape(parameter)
    gates = walk.shapes.num_gates(parameter)
    count = 0
    for group in spots:
        theirs = group if alike else list(places(meshes[1].axes))
        both = [(0, place) for place in group] + [(1, place) for place in theirs]
        for side, place in both:
            source = _rank(walk, meshes[side], place)
            if sides[side] not in senders or (not alike and _is_copy(values[side], place)):
                continue
            for other, spot in both:
                target = _rank(walk, meshes[other], spot)
                count += 1
                if rank == source:
                    own = walk.states[sides[side]].gradients[values[side].tensor][1]
                    if source == target:
                        held[side, place] = own
                    else:
                        sending.append(comm.send(own, target, tag + count))
                elif rank == target:
                    size = _size(values[side], shape, meshes[side].axes, place, gates)
                    like = torch.empty(size, dtype=_dtype(walk, parameter), device=comm.device)
                    coming.append(((side, place), comm.receive(like, source, tag + count)))
    for key, pending in coming:
        held[key] = pending.wait()
    for pending in sending:
        pending.wait()
    for side, stage in enumerate(sides):
        if stage in walk.states and (adds or side == 1):
            _take(walk, stage, values[side], held, values, meshes, alike, shape, gates)


def _take(
    walk: "RankWalk", stage: int, value: Value, held: dict[tuple[int, Place], T],
    values: list[Value], meshes: list[Mesh], alike: bool, shape: tuple[int, ...], gates: int,
) -> None:  # fmt: skip
    """The new gradient of this rank, from what all have."""
    state = walk.states[stage]
    if alike:
        mine = [held[key] for key in sorted(held) if key[1] == state.place]
        total = mine[0]
        for part in mine[1:]:
            total = total + part
    else:
        sums = [
            joined(parts, values[side], shape, meshes[side].axes, gates)
            for side in (0, 1)
            if (parts := {place: own for (k, place), own in sorted(held.items()) if k == side})
        ]
        whole = sums[0] if len(sums) == 1 else sums[0] + sums[1]
        total = cut(whole, value, state.axes, state.place, gates)
    state.gradients[value.tensor] = (value, total.clone(), True)


def _is_copy(value: Value, place: Place) -> bool:
    return not value.flat and any(
        c for c, p in zip(place, value.layout, strict=True) if p.kind == "replicate"
    )


def _rank(walk: "RankWalk", mesh: Mesh, place: Place) -> int:
    index = 0
    for coordinate, axis in zip(place, mesh.axes, strict=True):
        index = index * axis.size + coordinate
    return walk.rank_of[mesh.devices[index]]


def _size(
    value: Value, shape: tuple[int, ...], axes: tuple[Axis, ...], place: Place, gates: int
) -> tuple[int, ...]:
    if value.flat:
        return (flat_size(value, shape, axes, place, gates),)
    return local_shape(shape, value.layout, axes, place, gates)


def _dtype(walk: "RankWalk", parameter: str) -> torch.dtype:
    return walk.run.wide.get(parameter, walk.mail.dtypes[parameter])
