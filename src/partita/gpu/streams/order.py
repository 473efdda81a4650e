"""Launch plans: the order in which steps are launched, each on a stream, and whom each waits for.

A step sees what ran before it on its stream, what it waits for, and what those have seen. `waits`
holds only the steps of other streams that are not seen already. Views launch nothing: who reads a
concatenation depends on the makers of its members.

    sequential    one stream, the order of the model
    listed        k streams, by list scheduling: the ready step with the longest way to the end goes
                  to the stream where it can start first (Graham), the one of its last producer
                  if several can
    staged        stages with a barrier between them (IOS)
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from partita.gpu.flow.steps import Flow

Depends = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One step on one stream, after the steps it waits for."""

    step: int
    stream: int
    waits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What is launched, in order."""

    name: str
    launches: tuple[Launch, ...]

    @property
    def num_streams(self) -> int:
        """How many streams are used."""
        return len({launch.stream for launch in self.launches})


def launched(flow: Flow) -> tuple[int, ...]:
    """The steps that are launched: all but views."""
    return tuple(index for index, step in enumerate(flow.steps) if not step.is_view)


def depends(flow: Flow) -> Depends:
    """For every step the launched steps it needs; views are looked through."""
    makers: dict[str, tuple[int, ...]] = dict.fromkeys(flow.inputs, ())
    needed: list[tuple[int, ...]] = []
    for index, step in enumerate(flow.steps):
        needs = tuple(sorted({maker for name in step.uses for maker in makers[name]}))
        makers[step.name] = needs if step.is_view else (index,)
        needed.append(needs)
    return tuple(needed)


def sequential(flow: Flow) -> LaunchPlan:
    """Everything on one stream."""
    return LaunchPlan("sequential", tuple(Launch(index, 0) for index in launched(flow)))


def with_waits(
    name: str, chosen: Sequence[tuple[int, int]], needs: Depends, barriers: Sequence[int] = ()
) -> LaunchPlan:
    """The plan of (step, stream) pairs with the fewest waits; a barrier stands before some of them.

    `barriers` are positions in `chosen`: all streams have seen everything before them.
    """
    seen: dict[int, dict[int, int]] = {}  # stream -> stream -> launches seen of it
    after: dict[int, dict[int, int]] = {}  # step -> what is seen once it ran
    place: dict[int, tuple[int, int]] = {}  # step -> (stream, number there)
    tail: dict[int, int] = {}  # stream -> its last step
    number: dict[int, int] = {}
    launched_at = {step: position for position, (step, _) in enumerate(chosen)}
    walls = set(barriers)
    due: dict[int, tuple[int, ...]] = {}  # stream -> what it still has to wait for
    launches = []
    for position, (step, stream) in enumerate(chosen):
        if position in walls:
            everything = tuple(tail.values())
            due = dict.fromkeys({other for _, other in chosen}, everything)
        knows = seen.setdefault(stream, {})
        wanted = (*needs[step], *due.pop(stream, ()))
        waits = []
        for need in sorted(set(wanted), key=launched_at.__getitem__, reverse=True):
            other, at = place[need]
            if other == stream or knows.get(other, 0) >= at:
                continue
            waits.append(need)
            for each, upto in after[need].items():
                knows[each] = max(knows.get(each, 0), upto)
        number[stream] = number.get(stream, 0) + 1
        knows[stream] = number[stream]
        place[step], after[step], tail[stream] = (stream, number[stream]), dict(knows), step
        launches.append(Launch(step, stream, tuple(sorted(waits))))
    return LaunchPlan(name, tuple(launches))


def listed(
    flow: Flow,
    num_streams: int,
    time_us: Mapping[int, float],
    tie: Mapping[int, float] | None = None,
) -> LaunchPlan:
    """List scheduling over some streams with the steps' times; `tie` shifts priorities."""
    needs, steps = depends(flow), launched(flow)
    followers: dict[int, list[int]] = {step: [] for step in steps}
    for step in steps:
        for need in needs[step]:
            followers[need].append(step)
    way: dict[int, float] = {}
    for step in reversed(steps):
        way[step] = time_us[step] + max((way[each] for each in followers[step]), default=0.0)
    order = way if tie is None else {step: way[step] + tie.get(step, 0.0) for step in steps}
    missing = {step: len(needs[step]) for step in steps}
    end: dict[int, float] = {}
    free, last = [0.0] * num_streams, [-1] * num_streams
    chosen = []
    ready = [(-order[step], step) for step in steps if not missing[step]]
    heapq.heapify(ready)
    while ready:
        _, step = heapq.heappop(ready)
        able = max((end[need] for need in needs[step]), default=0.0)
        stream = min(
            range(num_streams),
            key=lambda each: (max(able, free[each]), last[each] not in needs[step], -free[each]),
        )
        end[step] = max(able, free[stream]) + time_us[step]
        free[stream], last[stream] = end[step], step
        chosen.append((step, stream))
        for each in followers[step]:
            missing[each] -= 1
            if not missing[each]:
                heapq.heappush(ready, (-order[each], each))
    # launches in the order of their start, so that early work is early in the graph
    start = {step: end[step] - time_us[step] for step in end}
    rank = {step: at for at, (step, _) in enumerate(chosen)}
    chosen.sort(key=lambda pair: (start[pair[0]], rank[pair[0]]))
    return with_waits(f"{num_streams} streams", chosen, needs)


def staged(flow: Flow, stages: Sequence[Sequence[Sequence[int]]]) -> LaunchPlan:
    """Stages of groups of steps: each group on a stream, a barrier before each further stage."""
    needs = depends(flow)
    chosen: list[tuple[int, int]] = []
    barriers = []
    for groups in stages:
        if chosen and len(groups) > 1:
            barriers.append(len(chosen))
        chosen += [(step, stream) for stream, group in enumerate(groups) for step in group]
    return with_waits("stages", chosen, needs, barriers)


def uncovered(plan: LaunchPlan, needs: Depends) -> list[tuple[int, int]]:
    """(step, producer) pairs that neither a stream's order nor waits keep; empty if it is right."""
    seen: dict[int, set[int]] = {}  # step -> all that has surely ended before it
    before: dict[int, int] = {}  # stream -> the step before
    wrong = []
    for launch in plan.launches:
        known: set[int] = set()
        for each in (*launch.waits, *((before[launch.stream],) if launch.stream in before else ())):
            known |= seen[each] | {each}
        wrong += [(launch.step, need) for need in needs[launch.step] if need not in known]
        seen[launch.step] = known
        before[launch.stream] = launch.step
    return wrong


def renamed(plan: LaunchPlan, name: str) -> LaunchPlan:
    """The same plan under another name."""
    return replace(plan, name=name)
