"""The order in which groups of devices run the blocks of a plan: by name, or as the plan lists it.

A group is the devices that hold the same stages; rows are by group, in the order in which the
stages meet them. Blocks of a stage that several groups run together stand in the row of each.
Inference runs the forwards of the same orders.
"""

from collections.abc import Sequence

from partita.errors import InputError, PlanError
from partita.lower.shared_orders import with_shared
from partita.plans import Schedule, shared_stages
from partita.schedules.actions import Action, Order, parse_action
from partita.schedules.named import NAMED
from partita.suggest import suggest

Groups = tuple[tuple[int, ...], ...]  # stages of each group of devices


def order_of(schedule: Schedule, groups: Groups, *, training: bool) -> Order:
    """The rows of a schedule for stages on these groups; refuses one that does not fit them."""
    if schedule.order:
        order = _listed(schedule.order)
    else:
        why = refusal(schedule.name, groups, schedule.num_microbatches)
        if why:
            raise PlanError(
                f"{schedule.name} {why}",
                fix="choose another schedule or number of micro-batches",
                field="schedule",
            )
        order = _named(schedule, groups, training=training)
    if not training:
        order = tuple(tuple(a for a in row if a.kind == "F") for row in order)
    _check(order, groups, schedule.num_microbatches, training)
    return order


def refusal(name: str, groups: Groups, num_microbatches: int) -> str:
    """Why a named schedule cannot run on these groups; empty if it can."""
    if name not in NAMED:
        raise PlanError(f"unknown schedule {name!r}", fix=suggest(name, NAMED), field="schedule")
    rows, _ = _own_groups(groups)
    if not rows:
        return "orders stages that a group of devices has for itself, and here all are shared"
    named, p, v = NAMED[name], len(rows), len(rows[0])
    places = {
        "line": [[r] for r in range(p)],
        "looped": [[c * p + r for c in range(v)] for r in range(p)],
        "wave": [[c * p + (p - 1 - r if c % 2 else r) for c in range(v)] for r in range(p)],
    }.get(named.layout)
    if places is None:
        return "holds the model twice, which a plan does not"
    if [list(stages) for stages in rows] != places:
        return f"needs its stages on the devices in the manner of a {named.layout}"
    return named.refuses(p, v, num_microbatches)


def _own_groups(groups: Groups) -> tuple[Groups, tuple[int, ...]]:
    """Stages that are not shared, numbered among themselves, by group; and what they are called."""
    shared = shared_stages(groups)
    own = tuple(sorted(s for members in groups for s in members if s not in shared))
    number = {stage: k for k, stage in enumerate(own)}
    rows = (tuple(number[s] for s in members if s in number) for members in groups)
    return tuple(row for row in rows if row), own


def _named(schedule: Schedule, groups: Groups, *, training: bool) -> Order:
    """The rows of a named schedule, with the blocks of shared stages between those of others."""
    rows, own = _own_groups(groups)
    count, shared = schedule.num_microbatches, shared_stages(groups)
    order = iter(NAMED[schedule.name].order(len(rows), len(rows[0]), count))
    if not shared:
        return tuple(order)
    by_group = tuple(
        tuple(Action(own[a.stage], a.kind, a.microbatch) for a in next(order))
        if any(s not in shared for s in members)
        else ()
        for members in groups
    )
    if not training:
        by_group = tuple(tuple(a for a in row if a.kind == "F") for row in by_group)
    return with_shared(by_group, groups, shared, count, training=training)


def order_text(order: Order) -> tuple[str, ...]:
    """Rows as a plan lists them."""
    return tuple(" ".join(map(str, row)) for row in order)


def _listed(rows: Sequence[str]) -> Order:
    try:
        return tuple(tuple(map(parse_action, row.split())) for row in rows)
    except InputError as error:
        raise PlanError(error.found, fix=error.fix, field="schedule order") from None


def _check(order: Order, groups: Groups, count: int, training: bool) -> None:
    """Every block of every micro-batch once, on the devices of its stage."""
    if len(order) != len(groups):
        raise PlanError(
            f"{len(order)} rows for {len(groups)} groups of devices",
            fix="give one row for each",
            field="schedule order",
        )
    halves: dict[tuple[int, int], str] = {}  # how each stage runs its backwards
    for row, stages in zip(order, groups, strict=True):
        wanted = {(s, m) for s in stages for m in range(count)}
        seen: dict[str, set[tuple[int, int]]] = {kind: set() for kind in "FBIW"}
        for action in row:
            place = action.stage, action.microbatch
            if place not in wanted or place in seen[action.kind]:
                _refuse(action, "stands twice or on devices that do not have its stage")
            seen[action.kind].add(place)
            if action.kind in "BI" and halves.setdefault(place, action.kind) != action.kind:
                _refuse(action, "is whole on some devices of its stage and in halves on others")
        backward = seen["B"] | seen["I"]
        if seen["F"] != wanted or (training and backward != wanted):
            missing = min((wanted - seen["F"]) or (wanted - backward))
            _refuse(Action(missing[0], "F" if missing not in seen["F"] else "B", missing[1]))
        if seen["B"] & seen["I"] or seen["I"] != seen["W"]:
            stage, m = min((seen["B"] & seen["I"]) | (seen["I"] ^ seen["W"]))
            _refuse(Action(stage, "W", m), "does not belong to one data gradient")
        if not training and backward:
            _refuse(Action(*min(backward)[:1], "B", min(backward)[1]), "is not for inference")


def _refuse(action: Action, why: str = "is missing") -> None:
    raise PlanError(f"{action} {why}", fix="run every block once", field="schedule order")
