"""Why devices are idle: every second of a lane that runs nothing, by its cause.

Between two tasks of a device's lane lies a gap. Going back from the task that ends it over what
let each task start (the latest of its waits and of the tasks before it on its lanes), the gap is
covered without holes by what other lanes did meanwhile:

    exposed communication  a message or collective is on its way
    host                   the host has not started the task yet: a delay after a milestone
    dependency             another device computes what is needed next, or the order leaves it free:
                           the bubble of a pipeline
    memory cap             a later task of the lane was ready, and what it takes does not fit
    imbalance              of what would be a dependency, as much as the device has less to do than
                           the busiest one

Inside the blocks of a pipeline the same is read off their bodies. So for every lane the busy
seconds and those of the causes add up to the step. O(tasks).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partita.meaning import COMMUNICATION, Phase, Purpose
from partita.program import F64, Body, Kind, Program
from partita.timeline import I64, Timeline

DEPENDENCY, EXPOSED, MEMORY_CAP = "dependency", "exposed communication", "memory cap"
IMBALANCE, HOST = "imbalance", "host"
CAUSES = (DEPENDENCY, EXPOSED, MEMORY_CAP, IMBALANCE, HOST)
LOOKED_AHEAD = 256  # later tasks of a lane that might have run in a gap
SLACK = 1e-9  # of the makespan or a capacity: less is rounding
SENDING = (Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE)
BLOCK_PHASES = {
    Kind.FORWARD: (Phase.FORWARD,),
    Kind.BACKWARD: (Phase.BACKWARD, Phase.WEIGHT),
    Kind.DGRAD: (Phase.BACKWARD,),
    Kind.WGRAD: (Phase.WEIGHT,),
}  # what a block of a pipeline stands for


@dataclass(frozen=True, slots=True)
class Gap:
    """A part of a lane's idle time that has one cause; `task` is what was waited for, or -1."""

    begin: float
    end: float
    cause: str
    task: int = -1


@dataclass(frozen=True)
class LaneIdle:
    """One device's lane: `busy_s` and the seconds of all causes add up to the step."""

    lane: int
    name: str
    busy_s: float
    seconds: dict[str, float]
    gaps: tuple[Gap, ...]  # between its tasks; what is idle inside blocks is in `seconds` only

    @property
    def idle_s(self) -> float:
        """All that is idle."""
        return math.fsum(self.seconds.values())


@dataclass(frozen=True)
class IdleAccount:
    """All device lanes of a timeline."""

    step_s: float
    lanes: tuple[LaneIdle, ...]

    @property
    def busiest(self) -> LaneIdle | None:
        """The lane with the most to do; the first of equals."""
        return max(self.lanes, key=lambda lane: lane.busy_s, default=None)

    def mean(self) -> dict[str, float]:
        """Seconds of each cause, of the mean lane."""
        count = max(1, len(self.lanes))
        return {
            cause: math.fsum(lane.seconds[cause] for lane in self.lanes) / count for cause in CAUSES
        }

    @property
    def mean_busy_s(self) -> float:
        """Seconds that the mean lane is busy."""
        return math.fsum(lane.busy_s for lane in self.lanes) / max(1, len(self.lanes))


@dataclass(frozen=True, slots=True)
class BoundGap:
    """From the lower bound to the step, on the busiest device; all parts are at least 0.

    `bound_s`, `work_s` and the causes add up to the step. Work beyond the bound is what the device
    does more than the bound proves (recomputing, interference, a bound that is not tight). Where
    the bound is above what the device does, a part of its idle time is proven; causes share the
    rest.
    """

    bound_s: float
    work_s: float
    causes: dict[str, float]


def bound_gap(account: IdleAccount, lower_bound_s: float) -> BoundGap:
    """Why the step is longer than the bound."""
    lane = account.busiest
    if lane is None:
        return BoundGap(account.step_s, 0.0, dict.fromkeys(CAUSES, 0.0))
    bound = min(max(0.0, lower_bound_s), account.step_s)
    above = max(0.0, lane.busy_s - bound)
    uneven = min(above, lane.busy_s - account.mean_busy_s)
    gap = account.step_s - bound - above
    share = gap / lane.idle_s if lane.idle_s > 0 else 0.0
    causes = {cause: seconds * share for cause, seconds in lane.seconds.items()}
    causes[IMBALANCE] += uneven
    return BoundGap(bound, above - uneven, causes)


def idle_account(timeline: Timeline) -> IdleAccount:
    """Why each device of a timeline is idle, and for how long."""
    reader = _IdleReader(timeline)
    lanes = computing_lanes(timeline.program)
    plain = [reader.lane(lane) for lane in lanes]
    most = max((lane.busy_s for lane in plain), default=0.0)
    return IdleAccount(timeline.makespan, tuple(_balanced(lane, most) for lane in plain))


def computing_lanes(program: Program) -> list[int]:
    """The lanes of devices; of a program without any, all that are no links."""
    devices = [number for number, lane in enumerate(program.lanes) if lane.kind == "device"]
    return devices or [n for n, lane in enumerate(program.lanes) if lane.kind != "link"]


def _balanced(lane: LaneIdle, most_busy_s: float) -> LaneIdle:
    """Tell imbalance from dependency: what the busiest lane has more to do explains so much."""
    waited = lane.seconds[DEPENDENCY]
    uneven = min(waited, most_busy_s - lane.busy_s)
    if not uneven > 0:
        return lane
    seconds = {**lane.seconds, DEPENDENCY: waited - uneven, IMBALANCE: uneven}
    return LaneIdle(lane.lane, lane.name, lane.busy_s, seconds, lane.gaps)


@dataclass(frozen=True)
class _IdleReader:
    """Reads one timeline; what let each task start is found once for all of them."""

    timeline: Timeline

    def lane(self, lane: int) -> LaneIdle:
        gaps = tuple(self._lane_gaps(lane))
        seconds = dict.fromkeys(CAUSES, 0.0)
        for gap in gaps:
            seconds[gap.cause] += gap.end - gap.begin
        busy = 0.0
        for task in self.timeline.lane_tasks(lane).tolist():
            length = float(self.timeline.end[task] - self.timeline.start[task])
            inside = self._inside(task)
            waits = {cause: share * length for cause, share in inside.items()}
            for cause, waited in waits.items():
                seconds[cause] += waited
            busy += length - math.fsum(waits.values())
        return LaneIdle(lane, self.timeline.program.lanes[lane].name, busy, seconds, gaps)

    def _lane_gaps(self, lane: int) -> Iterator[Gap]:
        tasks = self.timeline.lane_tasks(lane)
        start, end = self.timeline.start, self.timeline.end
        least = self._least
        at = 0.0
        for place, task in enumerate(tasks.tolist()):
            if float(start[task]) - at > least:
                capped = self._capped_from(lane, tasks[place : place + LOOKED_AHEAD], at)
                yield from self._covered(task, at, float(start[task]), capped)
            at = max(at, float(end[task]))
        if self.timeline.makespan - at > least:
            last = int(end.argmax())
            yield from self._covered_by(last, at, self.timeline.makespan, math.inf)

    def _covered(self, task: int, begin: float, end: float, capped: float) -> Iterator[Gap]:
        """The gap before a task, by what it waited for."""
        cause, delay = int(self._latest[task]), float(self._delay[task])
        if cause < 0:
            yield from _cut(begin, end, DEPENDENCY, -1, capped)
            return
        after = max(begin, float(self.timeline.end[cause]))
        if end - after > self._least:
            yield from _cut(after, end, self._delayed(cause, delay), cause, capped)
            end = after
        yield from self._covered_by(cause, begin, end, capped)

    def _covered_by(self, task: int, begin: float, end: float, capped: float) -> Iterator[Gap]:
        """[begin, end) by a task that ends there, and what that one waited for."""
        start, finish = self.timeline.start, self.timeline.end
        least = self._least
        seen: set[int] = set()
        while end - begin > least:
            if task < 0 or task in seen:
                yield from _cut(begin, end, DEPENDENCY, -1, capped)
                return
            seen.add(task)
            first = max(begin, float(start[task]))
            if end - first > 0:
                cause = EXPOSED if self._sends[task] else DEPENDENCY
                yield from _cut(first, end, cause, task, capped)
                end = first
            before, delay = int(self._latest[task]), float(self._delay[task])
            if before >= 0 and end - begin > least:
                after = max(begin, float(finish[before]))
                if end - after > least:
                    yield from _cut(after, end, self._delayed(before, delay), before, capped)
                end = min(end, after)
            task = before

    def _delayed(self, cause: int, delay: float) -> str:
        """What a delay after a task is: the host's after a milestone, else a message's."""
        if not delay > 0:
            return DEPENDENCY
        program = self.timeline.program
        is_milestone = program.lane_start[cause] == program.lane_start[cause + 1]
        return HOST if is_milestone else EXPOSED

    def _capped_from(self, lane: int, later: I64, begin: float) -> float:
        """From when on a task of the lane was ready and had no memory; never where one had."""
        program = self.timeline.program
        ready = np.maximum(self._ready[later], begin)
        waiting = ready < self.timeline.start[later] - self._least
        until = float(self.timeline.start[later[0]])
        moments = []
        for task in later[waiting & (ready < until)].tolist():
            moment = max(begin, float(self._ready[task]))
            part = slice(program.effect_start[task], program.effect_start[task + 1])
            taken = zip(
                program.effect_memory[part].tolist(), program.effect_at_start[part].tolist(),
                strict=True,
            )  # fmt: skip
            if all(self._fits(memory, size, moment) for memory, size in taken):
                return math.inf
            moments.append(moment)
        return min(moments, default=math.inf)

    def _fits(self, memory: int, size: float, moment: float) -> bool:
        capacity = self.timeline.program.memories[memory].capacity
        if capacity is None or not size > 0:
            return True
        times, amounts = self._held(memory)
        if float(amounts.max()) > capacity * (1 + SLACK):
            return True  # more than there is was taken: nobody waited for the cap
        held = float(amounts[int(np.searchsorted(times, moment, side="right")) - 1])
        return held + size <= capacity * (1 + SLACK)

    def _held(self, memory: int) -> tuple[F64, F64]:
        if memory not in self._curves:
            self._curves[memory] = self.timeline.memory_steps(memory)
        return self._curves[memory]

    @cached_property
    def _least(self) -> float:
        return SLACK * self.timeline.makespan

    @cached_property
    def _curves(self) -> dict[int, tuple[F64, F64]]:
        return {}

    @cached_property
    def _sends(self) -> list[bool]:
        return sends(self.timeline.program)

    @cached_property
    def _causes(self) -> tuple[I64, F64, F64]:
        return started_by(self.timeline)

    @property
    def _latest(self) -> I64:
        return self._causes[0]

    @property
    def _delay(self) -> F64:
        return self._causes[1]

    @property
    def _ready(self) -> F64:
        return self._causes[2]

    def _inside(self, task: int) -> dict[str, float]:
        """Shares of a block in which its devices are idle, by cause."""
        work = self.timeline.program.work_of(task)
        if work is None or work.body < 0 or work.purpose is not Purpose.COMPUTE:
            return {}
        kind = Kind(int(self.timeline.program.kind[task]))
        key = (work.body, kind)
        if key not in self._blocks:
            body = self.timeline.program.bodies[work.body]
            self._blocks[key] = _idle_inside(body, BLOCK_PHASES.get(kind, ()))
        return self._blocks[key]

    @cached_property
    def _blocks(self) -> dict[tuple[int, Kind], dict[str, float]]:
        return {}


def _cut(begin: float, end: float, cause: str, task: int, capped: float) -> Iterator[Gap]:
    """One gap, or two where memory is missing from some moment on."""
    if end <= begin:
        return
    if cause == HOST or capped >= end:
        yield Gap(begin, end, cause, task)
        return
    if capped > begin:
        yield Gap(begin, capped, cause, task)
    yield Gap(max(begin, capped), end, MEMORY_CAP)


def _idle_inside(body: Body, phases: Sequence[Phase]) -> dict[str, float]:
    """Shares of some phases of a body that its busiest device is idle, by cause."""
    timeline = Timeline(body.program, body.start, body.end)
    account = idle_account(timeline)
    lane = account.busiest
    spans = [span for phase, span in phase_spans(body).items() if phase in phases]
    total = math.fsum(end - begin for begin, end in spans)
    if lane is None or not total > 0:
        return {}
    shares: dict[str, float] = {}
    for begin, end in spans:
        for gap in lane.gaps:
            part = min(gap.end, end) - max(gap.begin, begin)
            if part > 0:
                shares[gap.cause] = shares.get(gap.cause, 0.0) + part / total
    return shares


def phase_spans(body: Body) -> dict[Phase, tuple[float, float]]:
    """When each phase of a body begins and ends: milestones separate them."""
    spans: dict[Phase, tuple[float, float]] = {}
    before = 0.0
    for milestone in body.program.tasks_of(Purpose.OTHER):
        work = body.program.work_of(milestone)
        moment = float(body.end[milestone])
        if work is not None:
            spans[work.phase] = (before, moment)
        before = moment
    return spans


def sends(program: Program) -> list[bool]:
    """For each task: does it send something?"""
    by_work = np.array([work.purpose in COMMUNICATION for work in program.works] + [False])
    told: list[bool] = (by_work[program.work] | np.isin(program.kind, SENDING)).tolist()
    return told


def started_by(timeline: Timeline) -> tuple[I64, F64, F64]:
    """What let each task start (-1: nothing), the delay after that, and when its waits were met."""
    program = timeline.program
    count = program.num_tasks
    waiting = np.repeat(np.arange(count), np.diff(program.wait_start))
    over = timeline.end[program.wait_on] + program.wait_delay
    ready = np.zeros(count)
    np.maximum.at(ready, waiting, over)
    task, lane = timeline.slots()
    sort = np.lexsort((task, timeline.end[task], timeline.start[task], lane))
    follows = lane[sort][1:] == lane[sort][:-1]
    later, earlier = task[sort[1:][follows]], task[sort[:-1][follows]]
    who = np.concatenate((later, waiting))
    when = np.concatenate((timeline.end[earlier], over))
    what = np.concatenate((earlier, program.wait_on.astype(np.int64)))
    delay = np.concatenate((np.zeros(len(later)), program.wait_delay))
    last = np.lexsort((np.arange(len(who)), when, who))
    latest, delays = np.full(count, -1), np.zeros(count)
    latest[who[last]] = what[last]  # the last one written stays: the latest of each task
    delays[who[last]] = delay[last]
    return latest, delays, ready
