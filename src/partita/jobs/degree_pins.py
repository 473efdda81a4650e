"""Degrees that the user has pinned: what each axis of a mesh may split, and a check of plans.

A mesh has two axes at the most, three where parameters are sharded over a part of the replicas
(hsdp: the first two axes are both dp, replicas and shard group). An axis stands for what ops split
along it (`degrees.py`). With pins every axis gets a role: the name that was pinned to its size, or
`other`, along which nothing that a pinned name stands for may be split. The search then chooses
among the splits that the roles leave:

    role     splits
    dp       batch
    cp       sequence
    ep       experts, batch
    tp       features; experts unless ep is pinned; sequence in norms unless sp=no (only it: sp=yes)
    other    whatever no pinned name stands for

Products must split it (linear layers for dp and tp, attention for cp, experts for ep) wherever the
parts are whole; ops whose dims have no meaning of their own (additions, reshapes) follow as they
like. A plan whose axes turn out to be named otherwise is not taken.
"""

import itertools
import math
from collections.abc import Callable, Sequence

from partita.degrees import PRODUCTS, axis_names, meaning, shard_group, stage_degrees
from partita.graph.record import Call, Graph
from partita.jobs.constraints import DEGREES, Constraints
from partita.plans import Axis, Stage

OTHER = "other"
OUTER_FIRST = ("dp", "cp", "ep", OTHER, "tp")  # tensor parallelism talks most: innermost
SPLITS = {"dp": ("batch",), "cp": ("sequence",), "ep": ("experts", "batch"), "tp": ("features",)}
STANDS_FOR = {"dp": "batch", "cp": "sequence", "ep": "experts", "tp": "features"}
EVERYTHING = ("batch", "sequence", "experts", "features", "space")
NORMS = ("layer_norm", "rms_norm")
# What the ops that a name is about must split along an axis of that name.
MUST = {
    ("dp", "linear"): "batch",
    ("tp", "linear"): "features",
    ("cp", "attention"): "sequence",
    ("ep", "expert_linear"): "experts",
}

Keep = Callable[[Call, tuple[str, ...]], bool]


def pinned_degrees(constraints: Constraints) -> dict[str, int]:
    """The degrees of mesh axes that were pinned."""
    return {key: int(value) for key, value in constraints.pinned if key in DEGREES}


def roles(constraints: Constraints, shape: Sequence[int]) -> tuple[str, ...] | None:
    """What each axis of a mesh stands for; None where the pins cannot be met on it."""
    pinned = pinned_degrees(constraints)
    wanted = sorted(pinned)
    assignments = []
    for assigned in itertools.product((*wanted, OTHER), repeat=len(shape)):
        sizes = dict.fromkeys(wanted, 1)
        for role, size in zip(assigned, shape, strict=True):
            if role != OTHER:
                sizes[role] *= size
        idle = any(r != OTHER and size == 1 for r, size in zip(assigned, shape, strict=True))
        if sizes == pinned and not idle:
            assignments.append(assigned)
    if set(wanted) == set(DEGREES):  # nothing is left that another axis could split
        assignments = [
            one for one in assignments
            if all(r != OTHER or size == 1 for r, size in zip(one, shape, strict=True))
        ]  # fmt: skip
    return min(assignments, key=_inversions, default=None)


def _inversions(assigned: tuple[str, ...]) -> int:
    """Pairs of axes in another order than usual."""
    places = [OUTER_FIRST.index(role) for role in assigned]
    return sum(a > b for a, b in itertools.combinations(places, 2))


def keep_splits(constraints: Constraints, axes: Sequence[Axis]) -> tuple[Keep, ...]:
    """Which splits of an op the pins leave on a mesh; nothing where they leave all.

    The second is stricter: products must split what their axes are named for. What is found among
    the first may be faster, and may not have the name that was asked for.
    """
    pinned = pinned_degrees(constraints)
    banned = {(key, int(value)) for key, value in constraints.banned if key in DEGREES}
    sequence = constraints.pinned_to("sp")
    shards = constraints.pinned_to("hsdp")
    if not pinned and not banned and sequence is None and shards is None:
        return ()
    sizes = [axis.size for axis in axes]
    assigned = _roles_of(constraints, axes)
    allowed = [_allowed(role, pinned) for role in assigned]

    def loose(call: Call, dims: tuple[str, ...]) -> bool:
        for role, meanings, dim in zip(assigned, allowed, dims, strict=True):
            what = meaning(call, dim) if dim else ""
            beside = role == "tp" and what == "sequence" and call.kind not in PRODUCTS
            if role == "tp" and sequence == "yes" and call.kind in NORMS and what != "sequence":
                return False
            if what and what not in meanings and not (beside and sequence != "no"):
                return False
        return not any(_parts(call, dims, sizes, name) == size for name, size in banned)

    def strict(call: Call, dims: tuple[str, ...]) -> bool:
        for role, dim in zip(assigned, dims, strict=True):
            what = meaning(call, dim) if dim else ""
            if MUST.get((role, call.kind), what) != what:
                return False
        return loose(call, dims)

    return (loose, strict) if pinned or shards else (loose,)


def _roles_of(constraints: Constraints, axes: Sequence[Axis]) -> tuple[str, ...]:
    """What the axes of a mesh stand for; those of replicas that parameters are sharded over: dp."""
    sizes = [axis.size for axis in axes]
    whole = roles(constraints, sizes)
    if constraints.pinned_to("hsdp") is None or whole is None:
        return whole or (OTHER,) * len(sizes)
    first = 2 if axes[0].replicates else 1
    rest = tuple(pair for pair in constraints.pinned if pair[0] != "dp")
    others = roles(Constraints(rest), sizes[first:]) or (OTHER,) * (len(sizes) - first)
    return ("dp",) * first + others


def _parts(call: Call, dims: tuple[str, ...], sizes: Sequence[int], name: str) -> int:
    """Into how many parts an op splits what a name stands for."""
    mine = [meaning(call, dim) == STANDS_FOR[name] if dim else False for dim in dims]
    return math.prod(size for size, counts in zip(sizes, mine, strict=True) if counts)


def _allowed(role: str, pinned: dict[str, int]) -> frozenset[str]:
    if role == OTHER:
        return frozenset(EVERYTHING) - {STANDS_FOR[name] for name in pinned}
    more = ("experts",) if role == "tp" and "ep" not in pinned else ()
    return frozenset((*SPLITS[role], *more))


def keeps_degrees(constraints: Constraints, graph: Graph, stages: Sequence[Stage]) -> bool:
    """Are the degrees of all stages, as a summary prints them, what was asked for?"""
    asked = {key for key, _ in (*constraints.pinned, *constraints.banned)} & {*DEGREES, "sp"}
    if not keeps_shard_groups(constraints, graph, stages):
        return False
    if not asked:
        return True
    for stage in stages:
        degrees = stage_degrees(stage, axis_names(graph, stage))
        words = {**{name: str(degrees[name]) for name in DEGREES}}
        words["sp"] = "yes" if degrees["sp"] else "no"
        if not all(constraints.allow(name, words[name]) for name in sorted(asked)):
            return False
    return True


def keeps_shard_groups(constraints: Constraints, graph: Graph, stages: Sequence[Stage]) -> bool:
    """Are parameters sharded over as many replicas as was asked for?

    All replicas there are may be what was asked for, too; a ban is of a part of them.
    """
    wanted = constraints.pinned_to("hsdp")
    banned = {int(value) for key, value in constraints.banned if key == "hsdp"}
    if wanted is None and not banned:
        return True
    for stage in stages:
        names = axis_names(graph, stage)
        group = shard_group(stage, names)
        if group in banned:
            return False
        degrees = stage_degrees(stage, names)
        if wanted is not None and (group or degrees["dp"] * degrees["cp"]) != int(wanted):
            return False
    return True
