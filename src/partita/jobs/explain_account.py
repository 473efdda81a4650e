"""The step of a plan, second by second, for each group of devices that works together.

What a task is stands in its work, so all of this are queries on programs: one stage that runs once
is simulated op by op, and its busiest device is read off the timeline. In a pipeline a block is one
task; what is inside it is read off its body, a program with a run of its own, phase by phase and in
every micro-batch the same. While a group waits for another one's block it is idle: the bubble.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partita.cluster import Cluster
from partita.costs.collectives import Groups
from partita.costs.layouts import paired
from partita.jobs.explain_links import Links
from partita.jobs.explain_time import Shares, TimeItem, TimelineWalk, add, scaled
from partita.jobs.idle import BLOCK_PHASES
from partita.jobs.simulate import Simulation, simulate_stages
from partita.jobs.workload import Workload
from partita.meaning import COMMUNICATION, Phase, Purpose, Work
from partita.plans import Schedule, Stage, device_groups, runs_once
from partita.program import Body, Kind, Program
from partita.timeline import Timeline

BUBBLE = "bubble"
RECOMPUTE = TimeItem("compute", "recompute")
UPDATE = TimeItem("update", "optimizer update")
DUST = 1e-12  # of a step


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
    def bubble(self) -> float:
        """The share of the step that all groups of devices are idle, on average."""
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
            return {TimeItem("idle", BUBBLE, name): seconds}
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
