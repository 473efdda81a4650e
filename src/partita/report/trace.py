"""A timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per kind of lane, one thread per lane, one slice per task and lane; an arrow from each
send to its receive; one counter per memory, netted per instant. The format counts microseconds;
a step of a schedule without seconds is drawn as one millisecond. Times are rounded to nanoseconds,
ends as well as starts, so that slices that touch still do.
"""

from typing import Any

import msgspec

from partita.program import Kind
from partita.timeline import Timeline

_Event = dict[str, Any]
_MICROSECONDS = {"s": 1e6, "": 1e3}


def chrome_trace(timeline: Timeline) -> bytes:
    """The text of a trace file (JSON)."""
    program = timeline.program
    scale = _MICROSECONDS[program.time_unit]
    start = [round(t * scale, 3) for t in timeline.start.tolist()]
    end = [round(t * scale, 3) for t in timeline.end.tolist()]
    kinds = sorted({lane.kind for lane in program.lanes})
    process = {kind: number for number, kind in enumerate(kinds, start=1)}
    events = _names(timeline, process)
    events += _slices(timeline, start, end, process)
    events += _arrows(timeline, start, end, process)
    events += _counters(timeline, scale, len(kinds) + 1)
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}) + b"\n"


def _names(timeline: Timeline, process: dict[str, int]) -> list[_Event]:
    """What processes and threads are called, and the order they are shown in."""
    events = []
    for kind, number in process.items():
        events += _about(number, 0, "process", kind or "lanes", number)
    for index, lane in enumerate(timeline.program.lanes):
        events += _about(process[lane.kind], index + 1, "thread", lane.name, index)
    if timeline.program.memories:
        events += _about(len(process) + 1, 0, "process", "memory", len(process) + 1)
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
    categories = {kind: kind.name.lower() for kind in Kind}
    pids = [process[lane.kind] for lane in program.lanes]
    bounds, lane_of = program.lane_start.tolist(), program.lane_of.tolist()
    for task in range(program.num_tasks):
        label = program.task_label(task)
        args: _Event = {"block": label.block, "task": task}
        if label.microbatch >= 0:
            args["microbatch"] = label.microbatch
        name, cat, ts = str(label), categories[label.kind], start[task]
        event = {"name": name, "cat": cat, "ts": ts, "args": args}
        if bounds[task] == bounds[task + 1]:
            events.append({**event, "ph": "i", "s": "g", "pid": 1, "tid": 1})
            continue
        event |= {"ph": "X", "dur": round(end[task] - ts, 3)}
        lanes = lane_of[bounds[task] : bounds[task + 1]]
        events += [{**event, "pid": pids[lane], "tid": lane + 1} for lane in lanes]
    return events


def _arrows(
    timeline: Timeline, start: list[float], end: list[float], process: dict[str, int]
) -> list[_Event]:
    """An arrow from within each send to within its receive."""
    program = timeline.program
    events: list[_Event] = []
    for number, pair in enumerate(program.pairs.tolist()):
        for task, phase in zip(pair, ("s", "f"), strict=True):
            lanes = program.lanes_of(task)
            if not lanes:
                continue
            events.append(
                {
                    "name": "message",
                    "cat": Kind.SEND.name.lower(),
                    "ph": phase,
                    "id": number,
                    "ts": start[task] if phase == "s" else end[task],
                    "pid": process[program.lanes[lanes[0]].kind],
                    "tid": lanes[0] + 1,
                    **({"bp": "e"} if phase == "f" else {}),
                }
            )
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
