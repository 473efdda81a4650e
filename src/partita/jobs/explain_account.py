"""The step of a plan, second by second, for each group of devices that works together.

What a task is stands in its work, so all of this are queries on programs: one stage that runs once
is simulated op by op, and its busiest device is read off the timeline. In a pipeline a block is one
task; what is inside it is read off its body, a program with a run of its own, phase by phase and in
every micro-batch the same. While a group waits for another one's block it is idle; of the bubble
this is what is not messages.

A lane's time goes to what it does, and to what it waits for. Between two tasks of a lane lies a
wait. Its end is the end of the task that let the later one start; walking back from there over what
each task waited for (the latest of its waits and of the tasks before it on its lanes), the wait is
covered without gaps by tasks of other lanes. So every second of a window belongs to one task, and
the sum over all tasks is the window. O(tasks).

Links have names that people know (`Links`). The hierarchy of a cluster is in its levels: groups of
devices that reach each other over links of at least some bandwidth. A collective crosses the
innermost level that has all members of each of its groups together. A link belongs to the widest
level that is no wider than the link; what is narrower than all levels belongs to the last. Names
are those of the presets whose bandwidth and latency a level's links have: `nvlink3`,
`infiniband-200`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from partita import units
from partita.cluster import Cluster, Link
from partita.cluster.presets import list_interconnects
from partita.costs.collectives import Groups, Patterns
from partita.costs.layouts import paired
from partita.jobs.idle import BLOCK_PHASES
from partita.jobs.simulate import Simulation, simulate_stages
from partita.jobs.workload import Workload
from partita.meaning import COMMUNICATION, Phase, Purpose, Work
from partita.plans import Schedule, Stage, device_groups, runs_once
from partita.program import Body, Kind, Program
from partita.timeline import Timeline

Shares = dict["TimeItem", float]
WAITING = "waiting for stages"
DUST = 1e-12  # of a step


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


@dataclass(frozen=True)
class Links:
    """The levels of a cluster by name, and which of them communication crosses."""

    cluster: Cluster

    @cached_property
    def names(self) -> tuple[str, ...]:
        """A name for each level, innermost first; none for a single device."""
        if self.cluster.num_devices == 1:
            return ()
        return tuple(self._name(place) for place in range(len(self.cluster.levels())))

    def crossed(self, groups: Groups) -> str:
        """The name of the level that a collective in these groups crosses; none on one device."""
        if not self.names:
            return ""
        return self.names[self._level(groups)]

    def level_of(self, link: Link) -> int:
        """The level that a link belongs to."""
        levels = self.cluster.levels()
        for place, level in enumerate(levels):
            if link.bytes_per_s >= level.bytes_per_s:
                return place
        return len(levels) - 1

    def faster(self, level: int, times: float) -> Cluster:
        """The cluster with all links of one level so many times as fast, latency included."""
        return replace(
            self.cluster,
            links=tuple(
                replace(
                    link, bytes_per_s=link.bytes_per_s * times, latency_s=link.latency_s / times
                )
                if self.level_of(link) == level
                else link
                for link in self.cluster.links
            ),
        )

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns.of(self.cluster)

    def _level(self, groups: Groups) -> int:
        for place, home in enumerate(self._patterns.homes):
            if all(home[device] == home[group[0]] for group in groups for device in group):
                return place
        return len(self._patterns.homes) - 1

    def _name(self, place: int) -> str:
        level = self.cluster.levels()[place]
        rate = units.rate(level.bytes_per_s, "B")
        node = [device.node for device in self.cluster.devices]
        inside = all(node[device] == node[group[0]] for group in level.groups for device in group)
        where = "inside nodes" if inside else "between nodes"
        wires = {
            (link.latency_s, link.bytes_per_s)
            for link in self.cluster.links
            if link.bytes_per_s == level.bytes_per_s
        }
        known = [
            cable.name
            for cable in list_interconnects()
            if (cable.wire.latency_s, cable.wire.bytes_per_s) in wires
        ]
        return f"{known[0] if known else 'links'} {where} ({rate})"


RECOMPUTE = TimeItem("compute", "recompute")
UPDATE = TimeItem("update", "optimizer update")


@dataclass(frozen=True)
class GroupAccount:
    """What a group of devices does in a step; the seconds add up to the step."""

    name: str
    stages: tuple[int, ...]
    busy_s: float
    shares: Shares

    def seconds(self, kind: str) -> float:
        """All that is of one kind: compute, communication, update or idle."""
        return sum(s for item, s in self.shares.items() if item.kind == kind)


@dataclass(frozen=True)
class Account:
    """A simulated plan and where its time goes, group by group."""

    simulation: Simulation
    links: Links
    groups: tuple[GroupAccount, ...]

    @property
    def busiest(self) -> GroupAccount:
        """The group that works longest; the first of equals."""
        return max(self.groups, key=lambda group: group.busy_s)

    @property
    def waiting(self) -> float:
        """The share of the step that groups of devices wait for others' computing, on average.

        The bubble is this and the messages that nothing hides.
        """
        step = self.simulation.step_s
        idle = sum(group.seconds("idle") for group in self.groups)
        return idle / len(self.groups) / step if step else 0.0


def account(
    workload: Workload, cluster: Cluster, stages: tuple[Stage, ...], schedule: Schedule
) -> Account:
    """Simulate a plan and account for its step."""
    return account_of(simulate_stages(workload, cluster, stages, schedule))


def account_of(simulation: Simulation) -> Account:
    """Account for the step of a simulated plan."""
    links, stages = Links(simulation.cluster), simulation.stages
    timeline = simulation.timeline
    busy = timeline.busy()
    if runs_once(stages, simulation.schedule):
        walk = TimelineWalk(timeline, OpMeaning(timeline.program, links))
        rows: list[tuple[int, tuple[int, ...]]] = [(busiest_lane(timeline), (0,))]
    else:
        walk = TimelineWalk(timeline, BlockMeaning(timeline.program, links, stages))
        rows = list(enumerate(device_groups(stages)))
    groups = tuple(
        GroupAccount(
            timeline.program.lanes[lane].name,
            members,
            float(busy[lane]),
            _without_dust(walk.lane(lane)),
        )
        for lane, members in rows
    )
    return Account(simulation, links, groups)


def busiest_lane(timeline: Timeline) -> int:
    """The device's lane with the most to do."""
    lanes = timeline.program.lanes
    devices = np.array([lane.kind == "device" for lane in lanes])
    return int(np.where(devices, timeline.busy(), -1.0).argmax())


def _without_dust(shares: Shares) -> Shares:
    """Without what is there by rounding alone."""
    least = DUST * sum(shares.values())
    return {item: seconds for item, seconds in shares.items() if seconds > least}


# What tasks are.


def _work(program: Program, task: int) -> Work:
    work = program.work_of(task)
    assert work is not None, "lowered tasks say what they are"
    return work


@dataclass(frozen=True)
class OpMeaning:
    """What the tasks of a stage lowered op by op are."""

    program: Program
    links: Links

    def __call__(self, task: int, seconds: float, own: bool) -> Shares:
        """What so many seconds of a task are, for the lane it runs on or one that waits for it."""
        work, kind = _work(self.program, task), Kind(int(self.program.kind[task]))
        if work.purpose in COMMUNICATION:
            return {self.communication(work): seconds}
        if not own and self.program.lanes_of(task):
            lane = self.program.lanes[self.program.lanes_of(task)[0]].name
            return {TimeItem("idle", "waiting for other devices", lane): seconds}
        if work.purpose is Purpose.UPDATE:
            return {UPDATE: seconds}
        if work.purpose is Purpose.RECOMPUTE:
            return {RECOMPUTE: seconds}
        return {TimeItem("compute", kind.words): seconds}

    def communication(self, work: Work) -> TimeItem:
        """What a collective moves, and over which links."""
        where = "" if work.group < 0 else self._crossed[work.group]
        return TimeItem("communication", self._moved(work), where)

    def _moved(self, work: Work) -> str:
        if work.purpose is Purpose.EXCHANGE and work.collective == "halo":
            return "exchange of borders"
        what = "activations"
        if work.purpose is Purpose.EXCHANGE:
            what = "statistics"
        elif work.purpose is Purpose.PARAMETER_GATHER:
            what = "parameters"
        elif work.purpose is Purpose.GRADIENT_REDUCTION:
            what = "gradients"
        else:  # a conversion: mostly of activations and their gradients
            moved = {self.program.values[value].tensor for value in work.reads}
            for source in ("parameter", "gradient"):
                if moved & self._tensors_from[source]:
                    what = f"{source}s"
        return f"{work.collective.replace('_', '-')} of {what}"

    @cached_property
    def _crossed(self) -> tuple[str, ...]:
        return tuple(map(self.links.crossed, self.program.groups))

    @cached_property
    def _tensors_from(self) -> dict[str, set[str]]:
        """The tensors that lie there from the start, and those that micro-batches add to."""
        return {
            source: {value.tensor for value in self.program.values if value.source == source}
            for source in ("parameter", "gradient")
        }


@dataclass(frozen=True)
class BlockMeaning:
    """What the tasks of a pipeline are."""

    program: Program
    links: Links
    stages: tuple[Stage, ...]

    def __call__(self, task: int, seconds: float, own: bool) -> Shares:
        """What so many seconds of a task are, for the lane it runs on or one that waits for it."""
        work = _work(self.program, task)
        if work.purpose in COMMUNICATION:
            return self._sent(work, seconds)
        if not own:
            name = "" if work.stage < 0 else self.stages[work.stage].name
            return {TimeItem("idle", WAITING, name): seconds}
        if work.purpose is Purpose.UPDATE:
            return {UPDATE: seconds}
        block: Shares = {}
        for phase in BLOCK_PHASES[Kind(int(self.program.kind[task]))]:
            add(block, self._inside[work.body].get(phase, {}))
        return scaled(block, seconds)

    def _sent(self, work: Work, seconds: float) -> Shares:
        if work.body >= 0:
            return self._ended(work, seconds)
        if work.peer >= 0 and work.purpose is Purpose.GRADIENT_REDUCTION:
            what = f"{work.collective.replace('_', '-')} of gradients that stages share"
            pairs = paired(self.stages[work.stage].mesh, self.stages[work.peer].mesh)
            return {TimeItem("communication", what, self._between(pairs)): seconds}
        what = "activations" if work.phase is Phase.FORWARD else "gradients"
        where = self._between(self.program.groups[work.group])
        return {TimeItem("communication", f"send of {what}", where): seconds}

    def _between(self, pairs: Groups) -> str:
        """The links between two stages; none where they are on the same devices."""
        apart = tuple(pair for pair in pairs if len(set(pair)) > 1)
        return self.links.crossed(apart) if apart else ""

    def _ended(self, work: Work, seconds: float) -> Shares:
        """The collectives that end a step, as far as they outlast the last backward."""
        known = scaled(self._endings[work.body], seconds)
        if known:
            return known
        devices = self.stages[work.stage].mesh.devices
        where = self.links.crossed((devices,)) if len(devices) > 1 else ""
        return {TimeItem("communication", work.purpose.words, where): seconds}

    @cached_property
    def _inside(self) -> dict[int, dict[Phase, Shares]]:
        """The account of every phase, of each body that blocks of micro-batches have."""
        blocks = {work.body for work in self.program.works if work.purpose is Purpose.COMPUTE}
        return {
            number: phases_of(self.program.bodies[number], self.links) for number in sorted(blocks)
        }

    @cached_property
    def _endings(self) -> dict[int, Shares]:
        """What is sent after the phases of the last micro-batch, of each body that ends a step."""
        steady_s = {
            body.stage: float(body.end.max())
            for number, body in enumerate(self.program.bodies)
            if number in self._inside
        }
        endings: dict[int, Shares] = {}
        for number, body in enumerate(self.program.bodies):
            if number not in self._inside:
                timeline = Timeline(body.program, body.start, body.end)
                walk = TimelineWalk(timeline, OpMeaning(body.program, self.links))
                begin = min(steady_s[body.stage], timeline.makespan)
                tail = walk.lane(busiest_lane(timeline), begin)
                endings[number] = {i: s for i, s in tail.items() if i.kind == "communication"}
        return endings


def phases_of(body: Body, links: Links) -> dict[Phase, Shares]:
    """What the busiest device of a stage does in each phase of a micro-batch.

    A phase ends with a milestone that all its tasks come before and all later ones wait for.
    """
    timeline = Timeline(body.program, body.start, body.end)
    walk = TimelineWalk(timeline, OpMeaning(body.program, links))
    lane, before = busiest_lane(timeline), 0.0
    shares: dict[Phase, Shares] = {}
    for milestone in body.program.tasks_of(Purpose.OTHER):
        moment = float(body.end[milestone])
        phase = _work(body.program, milestone).phase
        shares[phase] = walk.lane(lane, before, moment, milestone)
        before = moment
    return shares
