"""What a device's memory holds over a step, part by part; the parts add up to what is held.

    parameters   as they are kept between steps
    states       of the optimizer
    workspace    what drivers and libraries keep
    gradients    of parameters: held from start to end in a pipeline; of a stage that runs once,
                 each from the task that makes it to the last that reads it
    buffers      parameters that are gathered for a while, and what a block takes only while it runs
    activations  all else: what waits for the backward, what is worked on, what is on its way

All of it is read from the memory effects of tasks and from what their works read and write.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from partita.costs.memory import workspace_bytes
from partita.jobs.explain import kept_bytes, memory_places
from partita.jobs.simulate import Simulation
from partita.meaning import Purpose, Work
from partita.program import F64, Kind, Program
from partita.timeline import Timeline

PARTS = ("parameters", "states", "workspace", "gradients", "buffers", "activations")
Change = tuple[float, float]  # (moment, bytes)


@dataclass(frozen=True)
class MemoryCurves:
    """One memory: from each time on so much of each part; they add up to what is held."""

    name: str
    capacity_bytes: float
    times: F64
    parts: dict[str, F64]

    @property
    def held(self) -> F64:
        """All parts together."""
        total: F64 = np.sum([self.parts[part] for part in PARTS], axis=0)
        return total

    @property
    def peak(self) -> int:
        """The place of the first moment at which most is held."""
        return int(self.held.argmax())

    def at_peak(self) -> dict[str, float]:
        """What is held at that moment, by part."""
        return {part: float(self.parts[part][self.peak]) for part in PARTS}


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """When a memory is fullest, the task that begins there, micro-batches that are under way."""

    moment: float
    task: int  # -1: none begins there
    in_flight: int  # forwards begun that something is still to be done for, over all stages here


def memory_parts(simulation: Simulation) -> tuple[MemoryCurves, ...]:
    """The parts of every memory of a simulated plan."""
    timeline = simulation.timeline
    every = []
    for memory, (members, device) in enumerate(memory_places(simulation)):
        kept = [kept_bytes(simulation.stages[i], simulation.workload.graph) for i in members]
        resident = {
            "parameters": sum(part[0] for part in kept),
            "states": sum(part[1] for part in kept),
            "workspace": workspace_bytes(simulation.cluster.kind_of(device)),
        }
        gradients = set().union(*(part[2] for part in kept))
        capacity = simulation.capacity_bytes[memory]
        every.append(parts_of_memory(timeline, memory, resident, gradients, capacity))
    return tuple(every)


def parts_of_memory(
    timeline: Timeline, memory: int, resident: dict[str, float], gradients: set[str],
    capacity_bytes: float,
) -> MemoryCurves:  # fmt: skip
    """The parts of one memory: `resident` lies there all the time, `gradients` are tensors."""
    times, held = timeline.memory_steps(memory)
    total = held.copy()
    parts = {part: np.zeros(len(times)) for part in PARTS}
    always = _resident(timeline.program, memory)
    left = always
    for part, size in resident.items():
        own = min(size, left)
        parts[part] += own
        left -= own
    parts["gradients"] += left  # the rest of what lies there: gradients that micro-batches add to
    made = _curve(_lifetimes(timeline, memory, gradients, ()), times)
    brief = _curve(_transient(timeline, memory), times)
    brief += _curve(_lifetimes(timeline, memory, set(), (Purpose.PARAMETER_GATHER,)), times)
    rest = np.maximum(total - always, 0.0)
    parts["gradients"] += np.clip(made, 0.0, rest)
    rest -= np.clip(made, 0.0, rest)
    parts["buffers"] = np.clip(brief, 0.0, rest)
    parts["activations"] = rest - parts["buffers"]
    name = timeline.program.memories[memory].name
    return MemoryCurves(name, capacity_bytes, times, parts)


def peak_moment(timeline: Timeline, memory: int, parts: MemoryCurves) -> PeakMoment:
    """What happens when a memory is fullest."""
    moment = float(parts.times[parts.peak])
    program = timeline.program
    takers = _effects_on(program, memory)
    begins = [
        task
        for task, at_start, _ in takers
        if timeline.start[task] == moment and at_start > 0 and program.lanes_of(task)
    ]
    lanes = {lane for task, *_ in takers for lane in program.lanes_of(task)}
    devices = {lane for lane in lanes if program.lanes[lane].kind == "device"}
    task, lane = timeline.slots()
    near = np.unique(task[np.isin(lane, sorted(devices))])
    near = near[program.microbatch[near] >= 0]
    stage = np.array([work.stage for work in program.works] + [-1])[program.work[near]]
    keys = list(zip(stage.tolist(), program.microbatch[near].tolist(), strict=True))
    begins_by = (program.kind[near] == Kind.FORWARD) & (timeline.start[near] <= moment)
    ends_after = timeline.end[near] > moment
    begun = {key for key, is_begun in zip(keys, begins_by.tolist(), strict=True) if is_begun}
    under_way = {key for key, is_left in zip(keys, ends_after.tolist(), strict=True) if is_left}
    return PeakMoment(moment, begins[0] if begins else -1, len(begun & under_way))


def _resident(program: Program, memory: int) -> float:
    """What lies there from start to end."""
    wanted = set(program.tasks_of(Purpose.RESIDENT))
    return sum(at_start for task, at_start, _ in _effects_on(program, memory) if task in wanted)


def _effects_on(program: Program, memory: int) -> list[tuple[int, float, float]]:
    """(task, taken at its start, taken at its end) of one memory."""
    places = np.flatnonzero(program.effect_memory == memory)
    tasks = np.searchsorted(program.effect_start, places, side="right") - 1
    return list(
        zip(
            tasks.tolist(), program.effect_at_start[places].tolist(),
            program.effect_at_end[places].tolist(), strict=True,
        )
    )  # fmt: skip


def _transient(timeline: Timeline, memory: int) -> list[Change]:
    """What tasks take at their start and give back at their end."""
    changes: list[Change] = []
    for task, at_start, at_end in _effects_on(timeline.program, memory):
        size = min(max(at_start, 0.0), max(-at_end, 0.0))
        if size > 0 and timeline.program.microbatch[task] >= 0:
            changes.append((float(timeline.start[task]), size))
            changes.append((float(timeline.end[task]), -size))
    return changes


def _lifetimes(
    timeline: Timeline, memory: int, tensors: set[str], purposes: Iterable[Purpose]
) -> list[Change]:
    """From the task that makes a value to the last that reads it, with what it takes.

    Of all values of some tensors, or of those that works of some purposes write.
    """
    program = timeline.program
    wanted = tuple(purposes)
    makers: list[tuple[int, Work, float]] = []
    for task, size, _ in _effects_on(program, memory):
        work = program.work_of(task)
        if size <= 0 or work is None or not work.writes or program.microbatch[task] >= 0:
            continue
        made = [program.values[value].tensor for value in work.writes]
        if work.purpose in wanted or all(name in tensors for name in made):
            makers.append((task, work, size))
    last = _last_reads(program, memory) if makers else {}
    changes: list[Change] = []
    for task, work, size in makers:
        end = max(last.get(value, task) for value in work.writes)
        changes.append((float(timeline.start[task]), size))
        changes.append((float(timeline.end[max(end, task)]), -size))
    return changes


def _last_reads(program: Program, memory: int) -> dict[int, int]:
    """The last task on a memory's device that reads each value, or a slice of it."""
    owner = {
        number: value.of if value.of >= 0 else number for number, value in enumerate(program.values)
    }
    last: dict[int, int] = {}
    lane_of = {memory, memory + sum(lane.kind == "device" for lane in program.lanes)}
    for task in range(program.num_tasks):
        work = program.work_of(task)
        if work is None or not lane_of & set(program.lanes_of(task)):
            continue
        for value in work.reads:
            last[value] = task
            last[owner[value]] = task
    return last


def _curve(changes: list[Change], times: F64) -> F64:
    """Changes summed up, at each of the given times."""
    if not changes:
        return np.zeros(len(times))
    ordered = np.array(sorted(changes))
    sums = np.concatenate(([0.0], np.cumsum(ordered[:, 1])))
    at: F64 = sums[np.searchsorted(ordered[:, 0], times, side="right")]
    return at


def few_steps(parts: MemoryCurves, most: int) -> MemoryCurves:
    """The same with at most so many moments; each stands for the fullest of those it replaces."""
    count = len(parts.times)
    if count <= most:
        return parts
    held = parts.held
    edges = np.linspace(0, count, most + 1).astype(int)
    chosen = [a + int(held[a:b].argmax()) for a, b in pairwise(edges.tolist()) if b > a]
    times = parts.times[edges[:-1]]
    values = {part: curve[chosen] for part, curve in parts.parts.items()}
    return MemoryCurves(parts.name, parts.capacity_bytes, times, values)
