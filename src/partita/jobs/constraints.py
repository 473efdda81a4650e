"""What the user has decided or ruled out before the search: read, refused, kept to.

`--pin` and `--forbid`:

    pp=4    vpp=2    dp=8    tp=2    cp=1    ep=1    sp=yes
    micro-batches=16    schedule=1f1b    recompute=selective    mesh=16x8    zero=1
    micro-batch=2 (samples of one replica in one micro-batch; with dp)
    hsdp=8 (replicas that one copy of the parameters is sharded over; zero=3 unless pinned)
    grad-dtype=f32    matmul-dtype=fp8    execution=compiled
    cut=modules (stages begin between the blocks of the model) or anywhere
    shape=m (the first ops on all devices together, then a stage on each), nn (and ops halfway), k
    (two branches on devices of their own, which meet on all) or line (nothing on all devices)

A pin leaves one value of that decision, a ban all others. Degrees are those that a plan's summary
prints (`degrees.py`). Two constraints that contradict each other are refused, both named.

Pinned degrees say what each axis of a mesh may split. A mesh has two axes at the most, three where
parameters are sharded over a part of the replicas (hsdp: the first two axes are both dp, replicas
and shard group). An axis stands for what ops split along it (`degrees.py`). With pins every axis
gets a role: the name that was pinned to its size, or `other`, along which nothing that a pinned
name stands for may be split. The search then chooses among the splits that the roles leave:

    role     splits
    dp       batch
    cp       sequence
    ep       experts, batch
    tp       features; experts unless ep is pinned; sequence in norms unless sp=no (only it: sp=yes)
    other    whatever no pinned name stands for

Products must split it (linear layers for dp and tp, attention for cp, experts for ep) wherever the
parts are whole; ops whose dims have no meaning of their own (additions, reshapes) follow as they
like. A plan whose axes turn out to be named otherwise is not taken.

Constraints that no plan can meet, whatever fits, are told before the search (`check_constraints`),
both sides named.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from partita.cluster import Cluster
from partita.costs.sharding import LEVELS
from partita.degrees import PRODUCTS, axis_names, meaning, shard_group, stage_degrees
from partita.errors import InputError
from partita.graph.record import FLOATS, Call, Graph
from partita.plans import CHECKPOINTING, EXECUTIONS, ZERO_STAGES, Axis, Stage
from partita.schedules.named import NAMED
from partita.search.joint.cells import (
    device_groupings,
    divisors,
    mesh_shapes,
    shard_group_shapes,
)
from partita.search.joint.orders import refused
from partita.suggest import suggest

DEGREES = ("dp", "tp", "cp", "ep")  # of the axes of a mesh
DECISIONS = (
    "pp", "vpp", *DEGREES, "sp", "micro-batch", "micro-batches", "schedule", "recompute", "mesh",
    "cut", "shape", "zero", "hsdp", "grad-dtype", "matmul-dtype", "execution",
)  # fmt: skip
# How a model is computed, which a plan carries: what it is unless something else is asked for, and
# what it is where that is forbidden.
COMPUTED = ("grad-dtype", "matmul-dtype", "execution")
INSTEAD = {
    "grad-dtype": ("f32",),
    "matmul-dtype": ("f8",),
    "execution": ("graph", "compiled", "eager"),
}
COUNTS = ("pp", "vpp", *DEGREES, "micro-batch", "micro-batches", "hsdp")
FLAGS = {
    **dict.fromkeys(("yes", "true", "on", "1"), "yes"),
    **dict.fromkeys(("no", "false", "off", "0"), "no"),
}
TYPES = (*FLOATS, "tf32", "f4")
NARROW = {"fp8": "f8", "fp4": "f4", "fp16": "f16", "fp32": "f32"}  # as others write them
# Keys of `partita simulate` that are no decision of a plan, and what there is instead.
ELSEWHERE = {
    "layers": "a plan is cut where that is fastest: pin pp; partita simulate --layers forecasts",
    "attention": "a plan's attention is one fused kernel: partita simulate --attention forecasts",
    "dropout": "ops are those of the model: partita simulate --dropout forecasts",
    "dtype": "write --dtype",
    "batch": "write --batch",
}
SHARED_SHAPES = ("m", "nn", "k")  # with stages that groups of devices share
LINE_SHAPE, OTHER_SHAPE = "line", "other"  # without; with others than these
WHOLE_BLOCKS, ANYWHERE = "modules", "anywhere"  # where a model is cut
SEARCHED = "searched"  # what a plan calls an order that was found for its stages
EARLIER = {"stages": "pp", "microbatches": "micro-batches", "sharded": "zero"}
EARLIER_ZERO = {"none": "0", "states": "1", "gradients": "2", "parameters": "3"}
EARLIER_RECOMPUTE = {
    "no": "none", "off": "none", "false": "none", "light": "selective", "yes": "full",
    "on": "full", "true": "full",
}  # fmt: skip
OTHER = "other"
OUTER_FIRST = ("dp", "cp", "ep", OTHER, "tp")  # tensor parallelism talks most: innermost
SPLITS = {"dp": ("batch",), "cp": ("sequence",), "ep": ("experts", "batch"), "tp": ("features",)}
STANDS_FOR = {"dp": "batch", "cp": "sequence", "ep": "experts", "tp": "features"}
EVERYTHING = ("batch", "sequence", "experts", "features", "space")
NORMS = ("layer_norm", "rms_norm")
Keep = Callable[[Call, tuple[str, ...]], bool]
MOST_SHOWN = 6


@dataclass(frozen=True)
class Constraints:
    """Values that must be, and values that must not."""

    pinned: tuple[tuple[str, str], ...] = ()
    banned: tuple[tuple[str, str], ...] = ()

    def allow(self, decision: str, value: object) -> bool:
        """May a decision have this value?"""
        text = _text(value)
        if any(key == decision and text != wanted for key, wanted in self.pinned):
            return False
        return (decision, text) not in self.banned

    def allow_order(self, name: str, num_groups: int) -> bool:
        """May stages on so many groups of devices run in this order?

        One group has nothing to order: a pinned order asks for more, a ban means none of them.
        """
        if num_groups == 1:
            return self.pinned_to("schedule") is None
        return self.allow("schedule", name)

    def pinned_to(self, decision: str) -> str | None:
        """The value a decision must have, if one was named."""
        return dict(self.pinned).get(decision)

    def __bool__(self) -> bool:
        return bool(self.pinned or self.banned)

    def __str__(self) -> str:
        pins = [f"{key}={value}" for key, value in self.pinned]
        return ", ".join((*pins, *(f"not {key}={value}" for key, value in self.banned)))


def parse_constraints(pins: Iterable[str] = (), bans: Iterable[str] = ()) -> Constraints:
    """The constraints in texts such as `pp=4`."""
    pinned: dict[str, str] = {}
    for text in pins:
        key, value = _parse(text, "pin")
        if pinned.get(key, value) != value:
            raise InputError(
                f"{key}={pinned[key]} and {key}={value} contradict each other",
                fix="keep one of the two",
                field="pin",
            )
        pinned[key] = value
    banned = []
    for text in bans:
        key, value = _parse(text, "forbid")
        if pinned.get(key) == value:
            raise InputError(
                f"--pin {key}={value} and --forbid {key}={value} contradict each other",
                fix="keep one of the two",
                field="forbid",
            )
        banned.append((key, value))
    return Constraints(tuple(pinned.items()), tuple(banned))


@dataclass(frozen=True, slots=True)
class Computation:
    """How a model is computed, as far as it is asked for; '' is the model's own type."""

    grad_dtype: str = ""
    matmul_dtype: str = ""
    execution: str = "graph"


def computation(constraints: Constraints, dtype: str) -> Computation:
    """What is pinned of how a model in `dtype` is computed, or what is left where it is banned."""
    usual = {"grad-dtype": dtype, "matmul-dtype": dtype, "execution": "graph"}
    chosen = {}
    for key, own in usual.items():
        banned = {value for name, value in constraints.banned if name == key}
        wanted = constraints.pinned_to(key)
        left = [value for value in (own, *INSTEAD[key]) if value not in banned]
        if wanted is None and not left:
            raise InputError(
                f"{' and '.join(f'{key}={value}' for value in sorted(banned))} are ruled out, and "
                "nothing else is left",
                fix=f"allow one, or pin {key}",
                field="forbid",
            )
        value = wanted or left[0]
        chosen[key] = "" if value == own and key != "execution" else value
    return Computation(chosen["grad-dtype"], chosen["matmul-dtype"], chosen["execution"])


def settled(constraints: Constraints) -> Constraints:
    """The constraints on decisions of a search; shard groups of replicas shard parameters."""
    pinned = {key: value for key, value in constraints.pinned if key not in COMPUTED}
    banned = tuple(pair for pair in constraints.banned if pair[0] not in COMPUTED)
    group, replicas = pinned.get("hsdp"), pinned.get("dp")
    if group is not None:
        if pinned.setdefault("zero", "3") == "0" or group == "1":
            raise InputError(
                f"hsdp={group} says over how many replicas a copy of the parameters is sharded, "
                f"and {'zero=0' if pinned['zero'] == '0' else 'one replica'} shards nothing",
                fix="pin zero=1, 2 or 3 and hsdp=2 or more, or leave hsdp out",
                field="pin",
            )
        if ("zero", pinned["zero"]) in banned:
            raise InputError(
                f"hsdp={group} is with zero=3 unless another stage is pinned, and zero=3 is "
                "forbidden",
                fix="pin zero=1 or zero=2 beside it",
                field="pin",
            )
        if replicas is not None and int(replicas) % int(group):
            raise InputError(
                f"hsdp={group} does not divide dp={replicas}",
                fix="choose a divisor",
                field="pin",
            )
    return Constraints(tuple(pinned.items()), banned)


def zero_levels(constraints: Constraints) -> tuple[int, ...]:
    """The ZeRO stages that a search may choose from."""
    wanted = constraints.pinned_to("zero")
    if wanted is not None:
        return (int(wanted),)
    left = tuple(level for level in LEVELS if constraints.allow("zero", level))
    if not left and not constraints.allow("zero", 2):
        raise InputError("every ZeRO stage is ruled out", fix="allow one", field="forbid")
    return left or (2,)


def counted(constraints: Constraints, batch: int) -> Constraints:
    """Sizes of micro-batches as numbers of them: a batch is their number times size times dp."""
    pinned = dict(constraints.pinned)
    size = pinned.pop("micro-batch", None)
    if size is not None:
        count = _number(size, pinned.get("dp"), batch, "pin")
        if pinned.setdefault("micro-batches", count) != count:
            raise InputError(
                f"micro-batch={size} with dp={pinned['dp']} and a batch of {batch} are {count} "
                f"micro-batches, which contradicts micro-batches={pinned['micro-batches']}",
                fix="keep one of the two",
                field="pin",
            )
    banned = tuple(
        ("micro-batches", _number(value, pinned.get("dp"), batch, "forbid"))
        if key == "micro-batch"
        else (key, value)
        for key, value in constraints.banned
    )
    return Constraints(tuple(pinned.items()), banned)


def _number(size: str, dp: str | None, batch: int, field: str) -> str:
    if dp is None:
        raise InputError(
            f"micro-batch={size} says how many samples a replica takes at a time, and not how many "
            "replicas there are",
            fix=f"add --pin dp=N, or write micro-batches={max(1, batch // int(size))}",
            field=field,
        )
    count, rest = divmod(batch, int(size) * int(dp))
    if rest or not count:
        raise InputError(
            f"micro-batch={size} times dp={dp} does not divide the batch of {batch}",
            fix="change one of these",
            field=field,
        )
    return str(count)


def _parse(text: str, field: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip().lower()
    if key in EARLIER and equals:
        new = f"{EARLIER[key]}={EARLIER_ZERO.get(value, value)}"
        raise InputError(f"found {text!r}", fix=f"write {new}", field=field)
    if key in ELSEWHERE and equals:
        raise InputError(f"found {text!r}", fix=ELSEWHERE[key], field=field)
    if key not in DECISIONS or not equals:
        fix = suggest(key, DECISIONS) if equals else f"write one of {', '.join(DECISIONS)}=value"
        raise InputError(f"found {text!r}", fix=fix, field=field)
    if key in COUNTS:
        if not value.isdecimal() or int(value) < 1:
            raise InputError(f"found {text!r}", fix="give a whole number from 1 on", field=field)
        value = str(int(value))
        if field == "forbid" and key in DEGREES and value == "1":
            raise InputError(
                f"found {text!r}, which leaves all other degrees",
                fix=f"pin the degree that is wanted: --pin {key}=2",
                field=field,
            )
    elif key == "sp":
        if value not in FLAGS:
            raise InputError(f"found {text!r}", fix="write sp=yes or sp=no", field=field)
        value = FLAGS[value]
    elif key == "recompute":
        if value not in CHECKPOINTING:
            known = EARLIER_RECOMPUTE.get(value)
            fix = f"write recompute={known}" if known else suggest(value, CHECKPOINTING)
            raise InputError(f"found {text!r}", fix=fix, field=field)
    elif key == "schedule":
        _check_schedule(text, value, field)
    elif key in COMPUTED:
        values = EXECUTIONS if key == "execution" else TYPES
        value = NARROW.get(value, value)
        if value not in values:
            raise InputError(f"found {text!r}", fix=suggest(value, values), field=field)
    elif key == "shape" and value not in (*SHARED_SHAPES, LINE_SHAPE):
        fix = f"write shape={', shape='.join(SHARED_SHAPES)} or shape={LINE_SHAPE}"
        raise InputError(f"found {text!r}", fix=fix, field=field)
    elif key == "cut" and value not in (WHOLE_BLOCKS, ANYWHERE):
        raise InputError(f"found {text!r}", fix="write cut=modules or cut=anywhere", field=field)
    elif key == "zero" and value not in map(str, ZERO_STAGES):
        raise InputError(f"found {text!r}", fix="give a ZeRO stage from 0 to 3", field=field)
    elif key == "mesh" and not all(part.isdecimal() and int(part) for part in value.split("x")):
        raise InputError(f"found {text!r}", fix="write sizes such as 16x8", field=field)
    return key, value


def _check_schedule(text: str, value: str, field: str) -> None:
    """Orders by name; one that is searched for the stages of a plan can only be ruled out."""
    if value == SEARCHED and field == "pin":
        raise InputError(
            f"found {text!r}, but an order is searched only where it beats the named ones",
            fix="leave the schedule out",
            field=field,
        )
    if value not in (*NAMED, SEARCHED):
        raise InputError(f"found {text!r}", fix=suggest(value, (*NAMED, SEARCHED)), field=field)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value)


# What the ops that a name is about must split along an axis of that name.
MUST = {
    ("dp", "linear"): "batch",
    ("tp", "linear"): "features",
    ("cp", "attention"): "sequence",
    ("ep", "expert_linear"): "experts",
}


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


def check_constraints(
    constraints: Constraints, *, batch: int, cluster: Cluster, num_segments: int, inner_size: int,
    training: bool, virtual_stages: Mapping[str, Sequence[int]], has_experts: bool = True,
) -> None:  # fmt: skip
    """Refuse pins that contradict the model, the machine or each other.

    `virtual_stages` are, per order, the numbers of stages on a group of devices that are tried.
    """
    if not any(constraints.allow("cut", where) for where in (ANYWHERE, WHOLE_BLOCKS)):
        raise InputError("every cut is ruled out", fix="allow one", field="forbid")
    _check_count(constraints, batch)
    _check_stages(constraints, cluster, num_segments)
    _check_mesh(constraints, cluster, num_segments, inner_size)
    _check_degrees(constraints, cluster, num_segments, inner_size, has_experts)
    _check_checkpointing(constraints, training)
    _check_shape(constraints, training, batch, cluster)
    _check_virtual(constraints, virtual_stages, training)
    _check_order(constraints, training, batch, cluster, num_segments, virtual_stages)


def _check_count(constraints: Constraints, batch: int) -> None:
    wanted = constraints.pinned_to("micro-batches")
    if wanted is not None and batch % int(wanted):
        near = sorted(divisors(batch), key=lambda d: (abs(d - int(wanted)), d))[:2]
        raise InputError(
            f"micro-batches={wanted} does not divide the batch of {batch}",
            fix=f"give {' or '.join(map(str, sorted(near)))}, or another batch",
            field="pin",
        )


def _check_stages(constraints: Constraints, cluster: Cluster, num_segments: int) -> None:
    wanted, count = constraints.pinned_to("pp"), cluster.num_devices
    if wanted is None:
        return
    if int(wanted) > num_segments:
        raise InputError(
            f"pp={wanted}, but the model can be cut into {num_segments} parts at most",
            fix=f"give at most {num_segments}",
            field="pin",
        )
    if all(len(groups) != int(wanted) for groups in device_groupings(cluster, int(wanted))):
        known = {len(groups) for groups in device_groupings(cluster, count)}
        near = sorted(known, key=lambda n: (abs(n - int(wanted)), n))[:MOST_SHOWN]
        raise InputError(
            f"pp={wanted} cannot be made of {count} devices, each stage of as many",
            fix=f"give {_either(sorted(near))}",
            field="pin",
        )


def _check_shape(
    constraints: Constraints, training: bool, batch: int, cluster: Cluster
) -> None:  # fmt: skip
    """Tessel's shapes have a stage on each device, beside those that all share."""
    shape = constraints.pinned_to("shape")
    if shape in (None, LINE_SHAPE):
        return
    size, what = cluster.num_devices, f"shape={shape}"
    why = ""
    if not training:
        why = "is for training"
    elif size < 2:
        why = "needs several devices"
    elif batch // int(constraints.pinned_to("micro-batches") or 1) < size:
        why = f"needs a sample for each of {size} devices in a micro-batch"
    elif constraints.pinned_to("pp") not in (None, str(size)):
        why = f"has a stage on each of {size} devices, and pp={constraints.pinned_to('pp')}"
    else:
        degrees = [key for key in (*DEGREES, "vpp", "mesh") if constraints.pinned_to(key)]
        if degrees:
            why = f"says how devices are used, and so does {degrees[0]}="
    if why:
        raise InputError(f"{what} {why}", fix=f"drop {what}, or the other", field="pin")


def _check_mesh(
    constraints: Constraints, cluster: Cluster, num_segments: int, inner_size: int
) -> None:
    wanted = constraints.pinned_to("mesh")
    if wanted is None:
        return
    stages = constraints.pinned_to("pp")
    shapes = dict.fromkeys(
        "x".join(map(str, shape))
        for groups in device_groupings(cluster, num_segments)
        if stages is None or len(groups) == int(stages)
        for group in groups
        for shape in mesh_shapes(len(group), inner_size)
    )
    if wanted in shapes:
        return
    what = f"mesh={wanted} cannot be made of {cluster.num_devices} devices"
    if stages is not None:
        what = (
            f"pp={stages} and mesh={wanted} contradict each other on {cluster.num_devices} devices"
        )
    raise InputError(what, fix=f"give mesh={_either(list(shapes)[:MOST_SHOWN])}", field="pin")


def _check_degrees(
    constraints: Constraints, cluster: Cluster, num_segments: int, inner_size: int,
    has_experts: bool,
) -> None:  # fmt: skip
    pinned, stages = pinned_degrees(constraints), constraints.pinned_to("pp")
    if constraints.pinned_to("sp") == "yes" and pinned.get("tp", 1) == 1:
        raise InputError(
            "sp=yes splits what tensor parallelism repeats, and tp is not pinned to 2 or more",
            fix="add --pin tp=8, or leave sp out",
            field="pin",
        )
    if pinned.get("ep", 1) > 1 and not has_experts:
        raise InputError(
            f"ep={pinned['ep']}, but the model has no experts", fix="leave it out", field="pin"
        )
    several = [f"{name}={pinned[name]}" for name in DEGREES if pinned.get(name, 1) > 1]
    if len(several) > 2:
        raise InputError(
            f"{', '.join(several)} at once: a stage of a plan has two axes at the most",
            fix="pin two of them; `partita simulate` forecasts any such strategy of a transformer",
            field="pin",
        )
    shards = constraints.pinned_to("hsdp")
    if not pinned and shards is None:
        return
    mesh = constraints.pinned_to("mesh")
    sizes = dict.fromkeys(
        len(group)
        for groups in device_groupings(cluster, num_segments)
        if stages is None or len(groups) == int(stages)
        for group in groups
    )
    shapes = dict.fromkeys(
        shape
        for size in sizes
        for shape in _shapes(size, inner_size, shards)
        if mesh is None or mesh == "x".join(map(str, shape))
    )
    if any(roles(constraints, shape) is not None for shape in shapes):
        return
    asked = [f"pp={stages}"] * (stages is not None) + [f"mesh={mesh}"] * (mesh is not None)
    asked += [f"{name}={value}" for name, value in pinned.items()]
    asked += [f"hsdp={shards}"] * (shards is not None)
    known = ["x".join(map(str, shape)) for shape in shapes][:MOST_SHOWN]
    fix = f"choose degrees that are the sizes of one of these meshes: {_either(known or ['1'])}"
    if shards is not None and not known:
        groups = sorted({n for size in sizes for n in divisors(size) if n > 1})[-MOST_SHOWN:]
        fix = f"pin hsdp={_either(groups)}" if groups else "leave hsdp out"
    raise InputError(
        f"{' and '.join(asked)} cannot be made of {cluster.num_devices} devices", fix=fix,
        field="pin",
    )  # fmt: skip


def _shapes(size: int, inner_size: int, shards: str | None) -> list[tuple[int, ...]]:
    """The meshes of so many devices; with shard groups of replicas, those that have them."""
    if shards is None:
        return mesh_shapes(size, inner_size)
    return [shape for shape, _ in shard_group_shapes(size, inner_size, int(shards))]


def _check_virtual(
    constraints: Constraints, virtual_stages: Mapping[str, Sequence[int]], training: bool
) -> None:
    wanted, name = constraints.pinned_to("vpp"), constraints.pinned_to("schedule")
    if wanted is None:
        return
    known = {1, *(count for counts in virtual_stages.values() for count in counts)}
    if name is not None and name in virtual_stages and wanted != "1":
        known = set(virtual_stages[name])
    if wanted != "1" and not training:
        raise InputError(
            f"vpp={wanted}, but inference is not interleaved", fix="leave it out", field="pin"
        )
    if wanted != "1" and constraints.pinned_to("pp") == "1":
        raise InputError(
            f"pp=1 and vpp={wanted} contradict each other: one group has nothing to interleave",
            fix="give more stages, or leave vpp out",
            field="pin",
        )
    if int(wanted) not in known and wanted != "1":
        raise InputError(
            f"vpp={wanted} is not among the numbers of stages on a group that are tried"
            f"{f' with schedule={name}' if name in virtual_stages else ''}",
            fix=f"give {_either(sorted(known))}",
            field="pin",
        )
    if name is not None and (NAMED[name].layout == "line") != (wanted == "1"):
        raise InputError(
            f"schedule={name} and vpp={wanted} contradict each other",
            fix="change one of the two",
            field="pin",
        )


def _check_checkpointing(constraints: Constraints, training: bool) -> None:
    again = constraints.pinned_to("recompute")
    if not training and again in ("full", "selective"):
        raise InputError(
            f"recompute={again}, but inference has no backward that could run anything again",
            fix="leave it out, or plan for training",
            field="pin",
        )


def _check_order(
    constraints: Constraints, training: bool, batch: int, cluster: Cluster, num_segments: int,
    virtual_stages: Mapping[str, Sequence[int]],
) -> None:  # fmt: skip
    """Is there a number of stages and micro-batches for which the pinned order exists?"""
    name = constraints.pinned_to("schedule")
    if name is None:
        return
    layout = NAMED[name].layout
    if layout == "two-way":
        raise InputError(
            f"schedule={name} holds the model twice, which a plan does not",
            fix="pin another; `partita schedule` draws and times this one",
            field="pin",
        )
    if not training and layout != "line":
        raise InputError(
            f"schedule={name}, but inference is not interleaved", fix="leave it out", field="pin"
        )
    asked = [
        f"{key}={constraints.pinned_to(key)}"
        for key in ("pp", "vpp", "micro-batches")
        if constraints.pinned_to(key) is not None
    ]
    asked.append(f"schedule={name}")
    depths = [
        p
        for p in {len(groups): 1 for groups in device_groupings(cluster, num_segments)}
        if constraints.allow("pp", p)
    ]
    if all(p == 1 for p in depths):
        both = f"pp=1 and schedule={name} contradict each other"
        alone = f"schedule={name} on {cluster.num_devices} device"
        raise InputError(
            f"{both if 'pp=1' in asked else alone}: one stage has nothing to order",
            fix="give more stages, or leave the schedule out",
            field="pin",
        )
    chunks = [v for v in virtual_stages.get(name, (1,)) if constraints.allow("vpp", v)]
    counts = [m for m in divisors(batch) if constraints.allow("micro-batches", m)]
    why = [
        _refusal(name, p, v, m, num_segments) for p in depths if p > 1 for v in chunks
        for m in reversed(counts)
    ]  # fmt: skip
    if all(why):
        raise InputError(
            f"{', '.join(asked)} and a batch of {batch} contradict each other: {why[0]}",
            fix="change one of these",
            field="pin",
        )


def _refusal(name: str, p: int, v: int, m: int, num_segments: int) -> str:
    """Why an order is not there for these numbers; empty if it is."""
    if p * v > num_segments:
        return f"the model can be cut into {num_segments} parts at most, not {p * v}"
    if why := NAMED[name].refuses(p, v, m):
        return why
    return f"{name} needs {p} micro-batches or more" if refused(name, p, v, m) else ""


def _either(values: list[int] | list[str]) -> str:
    texts = list(map(str, values))
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
