"""Constraints that no plan can meet, whatever fits: told before the search, both sides named."""

from partita.cluster import Cluster
from partita.errors import InputError
from partita.jobs.constraints import Constraints
from partita.schedules.named import NAMED
from partita.search.joint.groupings import device_groupings, divisors, mesh_shapes

MOST_SHOWN = 6
CHUNKS = (1, 2, 3, 4)  # stages on each group of devices: an order that needs more is refused later


def check_constraints(
    constraints: Constraints, *, batch: int, cluster: Cluster, num_segments: int, inner_size: int,
    training: bool,
) -> None:  # fmt: skip
    """Refuse pins that contradict the model, the machine or each other."""
    _check_count(constraints, batch)
    _check_stages(constraints, cluster, num_segments)
    _check_mesh(constraints, cluster, num_segments, inner_size)
    _check_order(constraints, training)


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


def _check_order(constraints: Constraints, training: bool) -> None:
    again = constraints.pinned_to("recompute")
    if not training and again in ("full", "selective"):
        raise InputError(
            f"recompute={again}, but inference has no backward that could run anything again",
            fix="leave it out, or plan for training",
            field="pin",
        )
    stages, name = constraints.pinned_to("pp"), constraints.pinned_to("schedule")
    if name is None or stages is None:
        return
    if stages == "1" and name != "1f1b":
        raise InputError(
            f"pp=1 and schedule={name} contradict each other: one stage has nothing to order",
            fix="give more stages, or leave the schedule out",
            field="pin",
        )
    count = constraints.pinned_to("micro-batches")
    if count is not None:
        why = [NAMED[name].refuses(int(stages), chunks, int(count)) for chunks in CHUNKS]
        if all(why):
            raise InputError(
                f"pp={stages}, micro-batches={count} and schedule={name} contradict each "
                f"other: {why[0]}",
                fix="change one of the three",
                field="pin",
            )


def _either(values: list[int] | list[str]) -> str:
    texts = list(map(str, values))
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
