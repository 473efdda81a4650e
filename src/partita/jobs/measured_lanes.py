"""A traced run as lanes to lay under the predicted ones: one step of every rank, from its begin.

The step that is shown is the one of median length among those of the quicker half. Blocks that ran
as a whole are one task each; of those that ran op by op their ops are shown.
"""

import statistics
from dataclasses import dataclass

import numpy as np

from partita.jobs.run_trace import RankTrace, TaskTime
from partita.jobs.simulate import Simulation
from partita.jobs.trace_match import containers, quicker_half, step_lengths
from partita.lower import drawn_devices
from partita.meaning import Phase, Purpose
from partita.plans import Plan, device_groups
from partita.program import F64, Kind

MOST_RANKS = 64
_KINDS = {
    Phase.FORWARD: Kind.FORWARD,
    Phase.BACKWARD: Kind.BACKWARD,
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
        lanes.append(_lane(name, lane_of.get(device, 0), step.tasks, begin))
    return tuple(lanes)


def _lanes(simulation: Simulation) -> dict[int, int]:
    """The lane that stands for each device."""
    if simulation.is_pipelined:
        return {
            device: lane
            for lane, members in enumerate(device_groups(simulation.stages))
            for device in simulation.stages[members[0]].mesh.devices
        }
    drawn = drawn_devices(simulation.stage, simulation.cluster)
    kinds = {simulation.cluster.devices[device].kind: lane for lane, device in enumerate(drawn)}
    lanes = {
        device: kinds.get(simulation.cluster.devices[device].kind, 0)
        for device in simulation.stage.mesh.devices
    }
    return {**lanes, **{device: lane for lane, device in enumerate(drawn)}}


def _lane(name: str, under: int, tasks: tuple[TaskTime, ...], begin: float) -> MeasuredLane:
    opened = containers(tasks)
    shown = [each for each in tasks if each.work >= 0 or each.task not in opened]
    shown.sort(key=lambda each: (each.start, each.end))
    start = np.array([each.start - begin for each in shown])
    end = np.array([each.end - begin for each in shown])
    if len(shown) > 1:  # one thing at a time: what overlaps is cut where the next begins
        end[:-1] = np.minimum(end[:-1], np.maximum(start[1:], start[:-1]))
    return MeasuredLane(
        name, under, start, end,
        tuple(_kind(each) for each in shown),
        tuple(each.microbatch for each in shown),
        tuple(each.name or each.op or each.purpose for each in shown),
    )  # fmt: skip


def _kind(each: TaskTime) -> int:
    """The kind of a record, from the purpose and phase it names."""
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
    names = {phase.name.lower(): phase for phase in Phase}
    return int(_KINDS.get(names.get(each.phase.lower(), Phase.NONE), Kind.OTHER))
