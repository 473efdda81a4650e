"""The order in which groups of devices run the blocks of a plan: by name, or as the plan lists it.

A group is the devices that hold the same stages; rows are by group, in the order in which the
stages meet them. Blocks of a stage that several groups run together stand in the row of each.
Inference runs the forwards of the same orders.

Blocks of shared stages are put into an order by `with_shared`. A shared stage is run by several
groups of devices together, beside stages that each group has of its own (Tessel's M, NN and K
shapes). A named schedule orders the groups' own stages; the blocks of the shared ones are put
between them by a run in units of time, in which stages hang together as a line and

- the forward of a shared stage begins when the next of the groups' own stages has nothing else to
  do than to wait for it (so that no more micro-batches are in flight than in the named schedule),
  at once where none follows;
- its backward begins as soon as it can;
- who is ready for a shared block takes part in it before it starts a block of its own.

Rows are cut from one run, so no order waits for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from partita.errors import InputError, PlanError
from partita.plans import Schedule, shared_stages
from partita.schedules.actions import Action, Order, parse_action
from partita.schedules.named import NAMED
from partita.suggest import suggest

Groups = tuple[tuple[int, ...], ...]  # stages of each group of devices
UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
Key = tuple[str, int, int]  # F, B or W of a stage and micro-batch


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


def with_shared(
    own: Order, groups: Sequence[Sequence[int]], shared: frozenset[int], count: int, *,
    training: bool,
) -> Order:  # fmt: skip
    """The rows of all groups, from those of their own stages."""
    return _SharedRun(own, groups, shared, count, training).rows()


@dataclass
class _SharedRun:
    own: Order
    groups: Sequence[Sequence[int]]
    shared: frozenset[int]
    count: int
    training: bool
    end: dict[Key, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_stages = 1 + max(max(members) for members in self.groups)
        self.free = [0.0] * len(self.groups)
        self.place = [0] * len(self.groups)
        self.made: list[list[Action]] = [[] for _ in self.groups]
        self.where = {
            s: [g for g, members in enumerate(self.groups) if s in members]
            for s in range(self.num_stages)
        }
        # The stage whose next forward a shared one goes ahead of, where there is any.
        self.following = {
            s: next((j for j in range(s + 1, self.num_stages) if j not in self.shared), -1)
            for s in sorted(self.shared)
        }
        self.pool: list[Action] = []  # shared blocks that may run as soon as they can
        self.left = len(self.shared) * self.count * (2 if self.training else 1)

    def rows(self) -> Order:
        while self.left or any(map(self._head, range(len(self.groups)))):
            waiting = self._waiting()
            best = min(
                [*self._shared_starts(waiting), *self._own_starts(waiting)], default=None
            )  # by start, shared ones first, then by stage and micro-batch
            if best is None:
                raise PlanError(
                    "blocks of shared stages find no place in this schedule",
                    fix="list the order",
                    field="schedule",
                )
            start, _, _, _, action = best
            self._run(action, start)
        return tuple(map(tuple, self.made))

    def _run(self, action: Action, start: float) -> None:
        kind = "B" if action.kind == "I" else action.kind
        end = start + UNITS[action.kind]
        self.end[kind, action.stage, action.microbatch] = end
        for g in self.where[action.stage]:
            self.free[g] = end
            self.made[g].append(action)
        if action.stage not in self.shared:
            self.place[self.where[action.stage][0]] += 1
        else:
            self.left -= 1
            if action in self.pool:
                self.pool.remove(action)
        self._enable(kind, action.stage, action.microbatch)

    def _enable(self, kind: str, stage: int, m: int) -> None:
        """Shared blocks that this one was the last to keep from running."""
        after, before = stage + 1, stage - 1
        if kind == "F" and after in self.shared and self.following[after] < 0:
            self.pool.append(Action(after, "F", m))
        if kind == "F" and stage in self.shared and after == self.num_stages and self.training:
            self.pool.append(Action(stage, "B", m))
        if kind == "B" and before in self.shared:
            self.pool.append(Action(before, "B", m))

    def _shared_starts(
        self, waiting: list[tuple[float, Action]]
    ) -> list[tuple[float, int, int, int, Action]]:
        return [
            (
                max(at, *(self.free[g] for g in self.where[action.stage])),
                0, action.microbatch, action.stage, action,
            )
            for at, action in waiting
        ]  # fmt: skip

    def _own_starts(
        self, waiting: list[tuple[float, Action]]
    ) -> list[tuple[float, int, int, int, Action]]:
        starts = []
        for g in range(len(self.groups)):
            head = self._head(g)
            if head is None:
                continue
            at = self._after(head)
            if at < 0:
                continue
            start = max(at, self.free[g])
            if not any(g in self.where[a.stage] and ready <= start for ready, a in waiting):
                starts.append((start, 1, head.microbatch, head.stage, head))
        return starts

    def _head(self, group: int) -> Action | None:
        row = self.own[group]
        return row[self.place[group]] if self.place[group] < len(row) else None

    def _after(self, action: Action) -> float:
        """When all that an action waits for has ended; negative where something has not run."""
        stage, m = action.stage, action.microbatch
        if action.kind == "F":
            needs: list[Key] = [("F", stage - 1, m)] if stage else []
        elif action.kind == "W":
            needs = [("B", stage, m)]
        else:
            needs = [("F", stage, m)]
            if stage + 1 < self.num_stages:
                needs.append(("B", stage + 1, m))
        if any(need not in self.end for need in needs):
            return -1.0
        return max((self.end[need] for need in needs), default=0.0)

    def _waiting(self) -> list[tuple[float, Action]]:
        """The shared blocks that may run, and from when on."""
        waiting = [(self._after(action), action) for action in self.pool]
        for stage, following in self.following.items():
            if following < 0:
                continue
            (group,) = self.where[following]
            head = self._head(group)
            if head is None or (head.stage, head.kind) != (following, "F"):
                continue
            action = Action(stage, "F", head.microbatch)
            at = self._after(action)
            if at >= 0 and ("F", stage, head.microbatch) not in self.end:
                waiting.append((max(at, self.free[group]), action))
        return waiting
