"""A timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per kind of lane, one thread per lane, one slice per task and lane; an arrow from each
send to its receive, or to what waits for it where receiving takes no time; one counter per memory,
netted per instant. A slice carries what its task is: purpose, op, tensors with their layouts,
collective, bytes, ranks. What is inside the blocks of a pipeline has processes of its own: one
micro-batch of each stage, as if it ran alone from time 0. The format counts microseconds; a step of
a schedule without seconds is drawn as one millisecond. Times are rounded to nanoseconds, ends as
well as starts, so that slices that touch still do.
"""

from typing import Any

import msgspec

from partita.meaning import Purpose
from partita.program import Kind
from partita.report.tasks import CATEGORIES, categories, fields
from partita.timeline import Timeline

_Event = dict[str, Any]
_MICROSECONDS = {"s": 1e6, "": 1e3}
MOST_INSIDE = 50_000  # tasks inside blocks that a trace shows; further stages are left out


def chrome_trace(timeline: Timeline) -> bytes:
    """The text of a trace file (JSON)."""
    events = _drawn(timeline, 0, "")
    processes = len({lane.kind for lane in timeline.program.lanes}) + 1
    for name, inside in _inside(timeline):
        events += _drawn(inside, processes, name)
        processes += len({lane.kind for lane in inside.program.lanes}) + 1
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}) + b"\n"


def _inside(timeline: Timeline) -> list[tuple[str, Timeline]]:
    """A micro-batch of every stage of a pipeline, op by op, as far as there is room."""
    program = timeline.program
    names: dict[int, str] = {}  # of each body, by the first task that stands for it
    for task in program.tasks_of(Purpose.COMPUTE):
        work = program.work_of(task)
        if work is not None and work.body >= 0:
            names.setdefault(work.body, program.blocks[program.block[task]])
    bodies, room = [], MOST_INSIDE
    for number, name in names.items():
        body = program.bodies[number]
        room -= body.program.num_tasks
        if room < 0:
            break
        bodies.append((f"inside {name}, ", Timeline(body.program, body.start, body.end)))
    return bodies


def _drawn(timeline: Timeline, before: int, title: str) -> list[_Event]:
    """All events of one timeline; its processes have numbers above `before`."""
    program = timeline.program
    scale = _MICROSECONDS[program.time_unit]
    start = [round(t * scale, 3) for t in timeline.start.tolist()]
    end = [round(t * scale, 3) for t in timeline.end.tolist()]
    kinds = sorted({lane.kind for lane in program.lanes})
    process = {kind: number for number, kind in enumerate(kinds, start=before + 1)}
    memory = before + len(kinds) + 1
    events = _names(timeline, process, memory, title)
    events += _slices(timeline, start, end, process)
    events += _arrows(timeline, start, end, process)
    events += _counters(timeline, scale, memory)
    return events


def _names(timeline: Timeline, process: dict[str, int], memory: int, title: str) -> list[_Event]:
    """What processes and threads are called, and the order they are shown in."""
    events = []
    for kind, number in process.items():
        events += _about(number, 0, "process", f"{title}{kind or 'lanes'}", number)
    for index, lane in enumerate(timeline.program.lanes):
        events += _about(process[lane.kind], index + 1, "thread", lane.name, index)
    if timeline.program.memories:
        events += _about(memory, 0, "process", f"{title}memory", memory)
    return events


def _about(pid: int, tid: int, what: str, name: str, place: int) -> list[_Event]:
    at = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {**at, "name": f"{what}_name", "args": {"name": name}},
        {**at, "name": f"{what}_sort_index", "args": {"sort_index": place}},
    ]


def _slices(
    timeline: Timeline, start: list[float], end: list[float], process: dict[str, int]
) -> list[_Event]:
    """One slice per task and lane; a milestone, which has no lane, is an instant of the whole."""
    program = timeline.program
    events: list[_Event] = []
    category = categories(program).tolist()
    works = [fields(program, work) for work in program.works]
    pids = [process[lane.kind] for lane in program.lanes]
    bounds, lane_of = program.lane_start.tolist(), program.lane_of.tolist()
    first = min(process.values(), default=1)
    for task, work in enumerate(program.work.tolist()):
        label = program.task_label(task)
        args: _Event = {"block": label.block, "task": task}
        if label.microbatch >= 0:
            args["microbatch"] = label.microbatch
        if work >= 0:
            args |= works[work]
        event = {"name": str(label), "cat": CATEGORIES[category[task]], "ts": start[task]}
        event["args"] = args
        if bounds[task] == bounds[task + 1]:
            events.append({**event, "ph": "i", "s": "g", "pid": first, "tid": 1})
            continue
        event |= {"ph": "X", "dur": round(end[task] - start[task], 3)}
        lanes = lane_of[bounds[task] : bounds[task + 1]]
        events += [{**event, "pid": pids[lane], "tid": lane + 1} for lane in lanes]
    return events


def _arrows(
    timeline: Timeline, start: list[float], end: list[float], process: dict[str, int]
) -> list[_Event]:
    """An arrow from within each send to within what receives it."""
    program = timeline.program
    waiting: dict[int, list[int]] = {receive: [] for receive in program.pairs[:, 1].tolist()}
    for task in range(program.num_tasks):
        for other, _ in program.waits_of(task):
            if other in waiting:
                waiting[other].append(task)
    number = 0
    events: list[_Event] = []
    for send, receive in program.pairs.tolist():
        ends = [(receive, end[receive])]
        if not program.duration[receive]:
            ends = [(task, start[task]) for task in waiting[receive]] or ends
        for task, moment in ends:
            if not program.lanes_of(send) or not program.lanes_of(task):
                continue
            places = ((send, "s", start[send]), (task, "f", moment))
            for place, phase, ts in places:
                lane = program.lanes_of(place)[0]
                event = {"name": "message", "cat": Kind.SEND.words, "ph": phase, "id": number}
                event |= {"ts": ts, "pid": process[program.lanes[lane].kind], "tid": lane + 1}
                events.append(event | ({"bp": "e"} if phase == "f" else {}))
            number += 1
    return events


def _counters(timeline: Timeline, scale: float, pid: int) -> list[_Event]:
    """What each memory holds, whenever that changes."""
    events: list[_Event] = []
    for index, memory in enumerate(timeline.program.memories):
        times, amounts = timeline.memory_steps(index)
        events += [
            {
                "name": memory.name,
                "ph": "C",
                "pid": pid,
                "tid": 0,
                "ts": round(time * scale, 3),
                "args": {"held": amount},
            }
            for time, amount in zip(times.tolist(), amounts.tolist(), strict=True)
        ]
    return events
