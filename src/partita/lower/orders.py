"""The order in which groups of devices run the blocks of a plan: by name, or as the plan lists it.

A group is the devices that one or several stages share; rows are by group, in the order in which
the stages meet them. Inference runs the forwards of the same orders.
"""

from collections.abc import Sequence

from partita.errors import InputError, PlanError
from partita.plans import Schedule
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
        named, p = NAMED[schedule.name], len(groups)
        order = named.order(p, len(groups[0]), schedule.num_microbatches)
    if not training:
        order = tuple(tuple(a for a in row if a.kind == "F") for row in order)
    _check(order, groups, schedule.num_microbatches, training)
    return order


def refusal(name: str, groups: Groups, num_microbatches: int) -> str:
    """Why a named schedule cannot run on these groups; empty if it can."""
    if name not in NAMED:
        raise PlanError(f"unknown schedule {name!r}", fix=suggest(name, NAMED), field="schedule")
    named, p, v = NAMED[name], len(groups), len(groups[0])
    places = {
        "line": [[r] for r in range(p)],
        "looped": [[c * p + r for c in range(v)] for r in range(p)],
        "wave": [[c * p + (p - 1 - r if c % 2 else r) for c in range(v)] for r in range(p)],
    }.get(named.layout)
    if places is None:
        return "holds the model twice, which a plan does not"
    if [list(stages) for stages in groups] != places:
        return f"needs its stages on the devices in the manner of a {named.layout}"
    return named.refuses(p, v, num_microbatches)


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
    for row, stages in zip(order, groups, strict=True):
        wanted = {(s, m) for s in stages for m in range(count)}
        seen: dict[str, set[tuple[int, int]]] = {kind: set() for kind in "FBIW"}
        for action in row:
            place = action.stage, action.microbatch
            if place not in wanted or place in seen[action.kind]:
                _refuse(action, "stands twice or on devices that do not have its stage")
            seen[action.kind].add(place)
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
