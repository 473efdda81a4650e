"""Constraints that no plan can meet, whatever fits: told before the search, both sides named."""

from collections.abc import Mapping, Sequence

from partita.cluster import Cluster
from partita.errors import InputError
from partita.jobs.constraints import ANYWHERE, DEGREES, LINE_SHAPE, WHOLE_BLOCKS, Constraints
from partita.jobs.degree_pins import pinned_degrees, roles
from partita.schedules.named import NAMED
from partita.search.joint.groupings import (
    device_groupings,
    divisors,
    mesh_shapes,
    shard_group_shapes,
)
from partita.search.joint.orders import refused

MOST_SHOWN = 6


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
