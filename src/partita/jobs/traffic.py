"""Who sends how much to whom in a step, and how much of that is hidden behind computing.

Both are queries on works. A collective is counted as a ring, whatever algorithm it takes: of n
bytes among p devices every device sends to its neighbour

    all-reduce 2 n (p - 1) / p    all-gather, reduce-scatter n (p - 1) / p    broadcast n

in an all-to-all n / p to each of the others, with a halo n to both neighbours. The blocks of a
pipeline send what their bodies say, in every micro-batch.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from partita.jobs.idle import BLOCK_PHASES, phase_spans, sends
from partita.meaning import COMMUNICATION, Groups, Phase, Purpose, Work
from partita.program import F64, Kind, Program
from partita.timeline import Timeline

PairBytes = dict[tuple[int, int], float]  # (source, target) -> bytes
ENDINGS = {Purpose.GRADIENT_REDUCTION: Phase.REDUCE, Purpose.UPDATE: Phase.UPDATE}
RINGS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}  # times n (p - 1) / p


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes of one purpose between devices, by their indices in the cluster."""

    purpose: Purpose
    traffic: PairBytes

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return math.fsum(self.traffic.values())


def sent(program: Program) -> tuple[Sent, ...]:
    """What devices send each other in a step, by purpose; the largest first."""
    traffic: dict[Purpose, PairBytes] = {}
    for work, groups, times in _sendings(program):
        into = traffic.setdefault(work.purpose, {})
        for pair, size in messages(work, groups).items():
            into[pair] = into.get(pair, 0.0) + size * times
    everything = [Sent(purpose, pairs) for purpose, pairs in traffic.items() if pairs]
    return tuple(sorted(everything, key=lambda one: (-one.total_bytes, one.purpose)))


def messages(work: Work, groups: Groups) -> PairBytes:
    """Bytes that one run of a work sends from device to device."""
    traffic: PairBytes = {}

    def add(source: int, target: int, size: float) -> None:
        if source != target and size > 0:
            traffic[source, target] = traffic.get((source, target), 0.0) + size

    size = work.size_bytes
    if work.purpose in (Purpose.SEND, Purpose.RECEIVE):
        fan_out = Counter(source for source, _ in groups)
        for source, target in groups:
            add(source, target, size / fan_out[source])
        return traffic
    for members in groups:
        count = len(members)
        after = (*members[1:], members[0])
        if work.collective in RINGS:
            for source, target in zip(members, after, strict=True):
                add(source, target, RINGS[work.collective] * size * (count - 1) / count)
        elif work.collective == "all_to_all":
            for source in members:
                for target in members:
                    add(source, target, size / count)
        elif work.collective == "halo":
            for source, target in pairwise(members):
                add(source, target, size)
                add(target, source, size)
        else:  # a broadcast passes along the line
            for source, target in pairwise(members):
                add(source, target, size)
    return traffic


def _sendings(program: Program) -> Iterator[tuple[Work, Groups, int]]:
    """Every work that sends, its groups of devices, and how often it runs in a step."""
    runs = Counter(zip(program.work.tolist(), program.kind.tolist(), strict=True))
    for (number, kind), times in sorted(runs.items()):
        if number < 0:
            continue
        work = program.works[number]
        if work.body >= 0:
            phases = _phases(work, Kind(kind))
            inner = program.bodies[work.body].program
            for own in inner.works:
                if own.phase in phases and own.purpose in COMMUNICATION and own.group >= 0:
                    yield own, inner.groups[own.group], times
        elif work.purpose in COMMUNICATION - {Purpose.RECEIVE} and work.group >= 0:
            # A collective has a task for each line of devices that is drawn, a message one each.
            once = times if work.purpose is Purpose.SEND else 1
            yield work, program.groups[work.group], once


def _phases(work: Work, kind: Kind) -> tuple[Phase, ...]:
    """The phases of a body that one task stands for."""
    if work.purpose is Purpose.COMPUTE:
        return BLOCK_PHASES.get(kind, ())
    return (ENDINGS[work.purpose],) if work.purpose in ENDINGS else ()


@dataclass(frozen=True, slots=True)
class HiddenShare:
    """Seconds that devices send and receive, and those of them in which they compute as well."""

    sending_s: float
    hidden_s: float

    @property
    def share(self) -> float:
        """The part that is hidden; 1 where nothing is sent."""
        return self.hidden_s / self.sending_s if self.sending_s > 0 else 1.0

    def __add__(self, other: "HiddenShare") -> "HiddenShare":
        return HiddenShare(self.sending_s + other.sending_s, self.hidden_s + other.hidden_s)


def hidden_share(timeline: Timeline) -> HiddenShare:
    """How much of all communication is hidden behind computing, over all devices of a timeline."""
    program = timeline.program
    total = _hidden_between(timeline, 0.0, timeline.makespan)
    runs: Counter[tuple[int, int]] = Counter()
    for number, kind in zip(program.work.tolist(), program.kind.tolist(), strict=True):
        if number >= 0 and program.works[number].purpose is Purpose.COMPUTE:
            runs[program.works[number].body, kind] += 1
    for (number, kind), times in sorted(runs.items()):
        if number < 0:
            continue
        body = program.bodies[number]
        inner = Timeline(body.program, body.start, body.end)
        for phase, (begin, end) in phase_spans(body).items():
            if phase in BLOCK_PHASES.get(Kind(kind), ()):
                one = _hidden_between(inner, begin, end)
                total += HiddenShare(one.sending_s * times, one.hidden_s * times)
    return total


def _hidden_between(timeline: Timeline, first: float, last: float) -> HiddenShare:
    """The same of a part of a timeline, without what is inside of blocks."""
    is_sent = np.array(sends(timeline.program), bool)
    sending = hidden = 0.0
    for device, tasks in _sent_by(timeline.program, is_sent).items():
        begin = np.clip(timeline.start[tasks], first, last)
        end = np.clip(timeline.end[tasks], first, last)
        moments, computed = _computed(timeline, device, is_sent)
        sending += float((end - begin).sum())
        until, since = np.interp(end, moments, computed), np.interp(begin, moments, computed)
        hidden += float((until - since).sum())
    return HiddenShare(sending, hidden)


def _sent_by(program: Program, is_sent: npt.NDArray[np.bool_]) -> dict[int, list[int]]:
    """The tasks that each device's lane sends by.

    A task on devices is theirs. One on links is of the devices of its stage; in a program without
    blocks links come in the order of the devices they belong to.
    """
    devices = [lane for lane, own in enumerate(program.lanes) if own.kind == "device"]
    homes: dict[int, set[int]] = {}
    for task in np.flatnonzero(~is_sent).tolist():
        work = program.work_of(task)
        if work is not None and work.purpose is Purpose.COMPUTE and program.bodies:
            homes.setdefault(work.stage, set()).update(program.lanes_of(task))
    tasks: dict[int, list[int]] = {}
    for task in np.flatnonzero(is_sent).tolist():
        lanes, work = program.lanes_of(task), program.work_of(task)
        own = [lane for lane in lanes if program.lanes[lane].kind == "device"]
        if not own and program.bodies and work is not None and lanes:
            own = sorted(homes.get(work.stage, ()))
        elif not own:
            count = len(devices)
            own = [devices[lane - count] for lane in lanes if count <= lane < 2 * count]
        for lane in own:
            tasks.setdefault(lane, []).append(task)
    return tasks


def _computed(timeline: Timeline, lane: int, is_sent: npt.NDArray[np.bool_]) -> tuple[F64, F64]:
    """(moments, seconds): how long a lane has computed until each moment."""
    own = timeline.lane_tasks(lane)
    own = own[~is_sent[own]]
    start, end = timeline.start[own], timeline.end[own]
    moments = np.concatenate(([0.0], np.stack((start, end), axis=1).ravel()))
    total = np.cumsum(end - start)
    until = np.concatenate(([0.0], np.stack((total - (end - start), total), axis=1).ravel()))
    return moments, until
