"""A traced run as lanes to lay under the predicted ones: one step of every rank, from its begin.

The step that is shown is the one of median length among those of the quicker half. Blocks that ran
as a whole are one task each; of those that ran op by op their ops are shown. A block begins when
its rank turns to it, and waits for its message inside: while something runs within something else,
the inner one is shown, before and after it the outer one.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partita.jobs.run_trace import RankTrace, TaskTime
from partita.jobs.simulate import Simulation
from partita.jobs.trace_match import containers, quicker_half, step_lengths
from partita.lower import representative_devices
from partita.meaning import Phase, Purpose
from partita.plans import Plan, device_groups
from partita.program import F64, I8, Kind

MOST_RANKS = 64
BLOCKS = (Kind.FORWARD, Kind.BACKWARD, Kind.DGRAD, Kind.WGRAD)
_KINDS = {
    Phase.FORWARD: Kind.FORWARD,
    Phase.BACKWARD: Kind.BACKWARD,  # a block says itself whether that is the data gradient alone
    Phase.WEIGHT: Kind.WGRAD,
    Phase.UPDATE: Kind.UPDATE,
    Phase.REDUCE: Kind.COLLECTIVE,
}


@dataclass(frozen=True)
class MeasuredLane:
    """What one rank did in a step, in order; `under` is the lane that predicted it."""

    name: str
    under: int
    start: F64
    end: F64
    kinds: tuple[int, ...]
    microbatches: tuple[int, ...]
    names: tuple[str, ...]


def measured_lanes(
    plan: Plan, simulation: Simulation, traces: tuple[RankTrace, ...]
) -> tuple[MeasuredLane, ...]:
    """A lane for each rank of a traced run, by the device it ran on."""
    traces = quicker_half(traces)
    lengths = step_lengths(traces)
    median = statistics.median_low(lengths)
    number = lengths.index(median)
    begin = min(trace.steps[number].start for trace in traces)
    devices = sorted({device for stage in plan.stages for device in stage.mesh.devices})
    lane_of = _lanes(simulation)
    lanes = []
    for trace in sorted(traces, key=lambda one: one.rank)[:MOST_RANKS]:
        device = devices[trace.rank]
        step = trace.steps[number]
        name = f"measured: rank {trace.rank}, {simulation.cluster.devices[device].name}"
        kinds = simulation.timeline.program.kind
        lanes.append(_lane(name, lane_of.get(device, 0), step.tasks, begin, kinds))
    return tuple(lanes)


def _lanes(simulation: Simulation) -> dict[int, int]:
    """The lane that stands for each device."""
    if simulation.is_pipelined:
        return {
            device: lane
            for lane, members in enumerate(device_groups(simulation.stages))
            for device in simulation.stages[members[0]].mesh.devices
        }
    drawn = representative_devices(simulation.stage, simulation.cluster)
    kinds = {simulation.cluster.devices[device].kind: lane for lane, device in enumerate(drawn)}
    lanes = {
        device: kinds.get(simulation.cluster.devices[device].kind, 0)
        for device in simulation.stage.mesh.devices
    }
    return {**lanes, **{device: lane for lane, device in enumerate(drawn)}}


def _lane(
    name: str, under: int, tasks: tuple[TaskTime, ...], begin: float, kinds: I8
) -> MeasuredLane:
    opened = containers(tasks)
    shown = [each for each in tasks if each.work >= 0 or each.task not in opened]
    parts = one_at_a_time([(each.start, each.end) for each in shown])
    return MeasuredLane(
        name, under,
        np.array([start - begin for _, start, _ in parts]),
        np.array([end - begin for _, _, end in parts]),
        tuple(_kind(shown[place], kinds) for place, _, _ in parts),
        tuple(shown[place].microbatch for place, _, _ in parts),
        tuple(
            shown[place].name or shown[place].op or shown[place].purpose for place, _, _ in parts
        ),
    )  # fmt: skip


def one_at_a_time(spans: Sequence[tuple[float, float]]) -> list[tuple[int, float, float]]:
    """(place, start, end) in order of time: at every moment the span that began last.

    What lies around another comes before and after it. O(n log n + parts).
    """
    order = sorted(range(len(spans)), key=lambda n: (spans[n][0], -spans[n][1], n))
    parts: list[tuple[int, float, float]] = []
    open_spans: list[int] = []
    now = 0.0

    def until(moment: float) -> None:
        """Give the time up to a moment to whoever is innermost."""
        nonlocal now
        while open_spans and now < moment:
            last = open_spans[-1]
            end = min(spans[last][1], moment)
            if end > now:
                parts.append((last, now, end))
                now = end
            if spans[last][1] <= now:
                open_spans.pop()

    for place in order:
        start, end = spans[place]
        until(start)
        now = start
        if end > start:
            open_spans.append(place)
    until(float("inf"))
    return parts


def _kind(each: TaskTime, kinds: I8) -> int:
    """The kind of a record: that of its block, or from the purpose and phase it names."""
    words = {purpose.words: purpose for purpose in Purpose}
    purpose = words.get(each.purpose, Purpose.OTHER)
    by_purpose = {
        Purpose.SEND: Kind.SEND,
        Purpose.RECEIVE: Kind.RECEIVE,
        Purpose.UPDATE: Kind.UPDATE,
    }
    if purpose in by_purpose:
        return int(by_purpose[purpose])
    if purpose not in (Purpose.COMPUTE, Purpose.RECOMPUTE):
        return int(Kind.COLLECTIVE if purpose is not Purpose.OTHER else Kind.OTHER)
    if each.work < 0 and 0 <= each.task < len(kinds) and kinds[each.task] in BLOCKS:
        return int(kinds[each.task])
    names = {phase.name.lower(): phase for phase in Phase}
    return int(_KINDS.get(names.get(each.phase.lower(), Phase.NONE), Kind.OTHER))
