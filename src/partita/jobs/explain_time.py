"""Where a lane's time goes: what it does, and while it waits, what it waits for.

Between two tasks of a lane lies a wait. Its end is the end of the task that let the later one
start; walking back from there over what each task waited for (the latest of its waits and of the
tasks before it on its lanes), the wait is covered without gaps by tasks of other lanes. So every
second of a window belongs to one task, and the sum over all tasks is the window. O(tasks).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from partita.timeline import Timeline

Shares = dict["TimeItem", float]


@dataclass(frozen=True, slots=True, order=True)
class TimeItem:
    """Something that takes time; `where` is the link it crosses, or whom it waits for."""

    kind: str  # compute, communication, update or idle
    what: str
    where: str = ""


NOBODY = TimeItem("idle", "latency and gaps")


@dataclass(frozen=True, slots=True)
class TimePart:
    """So many seconds of something, and what part of the whole that is."""

    item: TimeItem
    seconds: float
    share: float


def parts_of(shares: Shares) -> tuple[TimePart, ...]:
    """Largest first, without what takes nothing."""
    total = sum(shares.values())
    parts = [TimePart(item, s, s / total if total else 0.0) for item, s in shares.items() if s > 0]
    return tuple(sorted(parts, key=lambda part: (-part.seconds, part.item)))


def add(shares: Shares, more: Shares, times: float = 1.0) -> None:
    """Add one account to another, as often as given."""
    for item, seconds in more.items():
        shares[item] = shares.get(item, 0.0) + seconds * times


def scaled(shares: Shares, seconds: float) -> Shares:
    """The same proportions with another sum; empty where there is nothing to go by."""
    total = sum(shares.values())
    return {item: s * seconds / total for item, s in shares.items()} if total > 0 else {}


@dataclass(frozen=True)
class TimelineWalk:
    """Reads one timeline. `meaning` says what seconds of a task are; own ones or waited for."""

    timeline: Timeline
    meaning: Callable[[int, float, bool], Shares]
    _latest: dict[int, int | None] = field(default_factory=dict, repr=False)

    def lane(
        self, lane: int, begin: float = 0.0, end: float | None = None, last: int | None = None
    ) -> Shares:
        """The account of a lane from `begin` to `end`; `last` is the task that ends the window."""
        start, finish = self.timeline.start, self.timeline.end
        until = self.timeline.makespan if end is None else end
        shares: Shares = {}
        at = begin
        for task in self.timeline.lane_tasks(lane).tolist():
            first, after = max(float(start[task]), begin), min(float(finish[task]), until)
            if after <= at:
                continue
            if first > at:
                self._blame(self._cause(task), at, first, shares)
                at = first
            add(shares, self.meaning(task, after - at, True))
            at = after
        if at < until:
            ends = int(finish.argmax()) if last is None else self._cause(last)
            self._blame(ends, at, until, shares)
        return shares

    def _blame(self, task: int | None, begin: float, end: float, into: Shares) -> None:
        """Cover [begin, end) backwards by `task` and what it waited for."""
        start, finish = self.timeline.start, self.timeline.end
        seen: set[int] = set()
        while end > begin:
            if task is None or task in seen:
                add(into, {NOBODY: end - begin})
                return
            seen.add(task)
            after, first = min(float(finish[task]), end), max(float(start[task]), begin)
            if after < end:
                add(into, {NOBODY: end - max(after, begin)})
                end = max(after, begin)
            if after > first:
                add(into, self.meaning(task, after - first, False))
                end = first
            task = self._cause(task)

    def _cause(self, task: int) -> int | None:
        """What let a task start: the latest of its waits and of those before it on its lanes."""
        if task not in self._latest:
            program, finish = self.timeline.program, self.timeline.end
            ways = [(float(finish[o]) + delay, o) for o, delay in program.waits_of(task)]
            before = self._before.get(task, ())
            ways += [(float(finish[o]), o) for o in before]
            self._latest[task] = max(ways, key=lambda way: way[0])[1] if ways else None
        return self._latest[task]

    @cached_property
    def _before(self) -> dict[int, list[int]]:
        program = self.timeline.program
        before: dict[int, list[int]] = {}
        last: dict[int, int] = {}
        start, end = self.timeline.start.tolist(), self.timeline.end.tolist()
        for task in sorted(range(program.num_tasks), key=lambda i: (start[i], end[i], i)):
            for lane in program.lanes_of(task):
                if lane in last:
                    before.setdefault(task, []).append(last[lane])
                last[lane] = task
        return before
