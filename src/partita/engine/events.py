"""The event engine: when does each task of a program start and end?

Three ways for a lane to choose what it runs next; in all of them a task starts at the earliest
moment its waits (with their delays) and its lanes allow, and memory never holds it back:

static    each lane runs its tasks in the program's order. O(tasks + waits)
fifo      each lane has a queue; a task joins the queues of all its lanes when its last wait is
          over, all at once, in one sequence for the whole program: by moment, then by index. It
          starts when it heads all its queues and these lanes are free. O(tasks log tasks)
priority  the same with queues sorted by priority (largest first), then by that moment, then by
          index. Lanes choose once all that happens at a moment has happened; a task of no length
          ends at its moment, and its lanes then choose again. O(tasks log tasks)

A lane whose head still waits for another lane stays idle: it is reserved. This cannot deadlock:
queues are sorted alike everywhere, so the first task of all that wait heads all its queues.
Milestones (tasks on no lane) join no queue; they happen the moment their last wait is over.
Only waits that form a cycle, in static order together with the order on the lanes, can stop a
run; such a cycle is named.

`run` is the front door. Inside a search, call `evaluate_static` and `evaluate_fifo` on raw arrays:
they write into arrays that the caller keeps, return the makespan, and can be called from other
compiled loops. They trust their input; `Program` is what checks it. Scratch is at most 64 bytes
per task with one lane and two waits; a static program in a good order needs none.
"""

from typing import Any, Literal

import numpy as np

from partita.compiled import compiled
from partita.errors import ProgramError
from partita.program import F64, I32, Program
from partita.timeline import Timeline

Mode = Literal["static", "fifo", "priority"]
MODES: tuple[Mode, ...] = ("static", "fifo", "priority")

SMALL = 60_000  # numbers in a program that is soon timed without compiling
_NOT_RUN = -1.0  # no end is negative
_NO_ORDER: I32 = np.empty(0, np.int32)
_NO_PRIORITY: F64 = np.empty(0, np.float64)
# As the arrays of a program are: for arrays that can be written to, all would be compiled again.
_NO_ORDER.flags.writeable = _NO_PRIORITY.flags.writeable = False


def run(program: Program, mode: Mode = "static") -> Timeline:
    """The timeline of a program; a deadlock is refused with the cycle that causes it."""
    if mode not in MODES:
        raise ProgramError(f"found {mode!r}", fix=f"one of {', '.join(MODES)}", field="mode")
    start, end = np.empty(program.num_tasks), np.empty(program.num_tasks)
    lanes = (program.duration, program.lane_start, program.lane_of)
    waits = (program.wait_start, program.wait_on, program.wait_delay)
    lane_free = np.empty(len(program.lanes))
    if mode == "static":
        order = _NO_ORDER if program.order is None else program.order
        makespan = evaluate_static(*lanes, *waits, order, lane_free, start, end)
    elif mode == "fifo":
        after = followers(*waits)
        makespan = evaluate_fifo(*lanes, program.wait_start, *after, lane_free, start, end)
    else:
        after = followers(*waits)
        priority = _NO_PRIORITY if program.priority is None else program.priority
        makespan = _priority(
            *lanes, program.wait_start, *after, priority, len(program.lanes), start, end
        )
    if not np.isfinite(makespan):
        _refuse(program, end, with_lanes=mode == "static")
    start.flags.writeable = end.flags.writeable = False  # so that the record need not copy them
    return Timeline(program, start, end)


# --- static order -------------------------------------------------------------------------------


@compiled(small=SMALL)
def evaluate_static(
    duration: F64,
    lane_start: I32,
    lane_of: I32,
    wait_start: I32,
    wait_on: I32,
    wait_delay: F64,
    order: I32,
    lane_free: F64,
    start: F64,
    end: F64,
) -> float:
    """Fill `start` and `end`; returns the makespan, or inf where the program deadlocks.

    `order` is a permutation of the tasks, or empty for the order of indices. `lane_free` (one per
    lane) is scratch. One pass over the tasks if each comes after those it waits for.
    """
    num_tasks = len(duration)
    ordered = len(order) > 0
    end[:] = _NOT_RUN
    lane_free[:] = 0.0
    makespan = 0.0
    for k in range(num_tasks):
        i = order[k] if ordered else k
        begin = 0.0
        for s in range(lane_start[i], lane_start[i + 1]):
            begin = max(begin, lane_free[lane_of[s]])
        for w in range(wait_start[i], wait_start[i + 1]):
            other = end[wait_on[w]]
            if other < 0.0:  # it waits for a later one: sort the tasks first
                return _sorted_static(
                    duration, lane_start, lane_of, wait_start, wait_on, wait_delay, order,
                    len(lane_free), start, end,
                )  # fmt: skip
            begin = max(begin, other + wait_delay[w])
        finish = begin + duration[i]
        start[i] = begin
        end[i] = finish
        for s in range(lane_start[i], lane_start[i + 1]):
            lane_free[lane_of[s]] = finish
        makespan = max(makespan, finish)
    return makespan


@compiled(small=SMALL)
def _sorted_static(
    duration: F64,
    lane_start: I32,
    lane_of: I32,
    wait_start: I32,
    wait_on: I32,
    wait_delay: F64,
    order: I32,
    num_lanes: int,
    start: F64,
    end: F64,
) -> float:
    """As `evaluate_static`, by Kahn's algorithm over waits and lane order together."""
    num_tasks = len(duration)
    after_start, after_task, after_delay = followers(wait_start, wait_on, wait_delay)
    left, next_on_lane = _lane_succession(lane_start, lane_of, wait_start, order, num_lanes)
    ready = np.empty(num_tasks, np.int32)  # a stack: any order gives the same times
    top = 0
    for i in range(num_tasks):
        start[i] = 0.0
        end[i] = _NOT_RUN
        if left[i] == 0:
            ready[top] = i
            top += 1
    makespan, num_run = 0.0, 0
    while top > 0:
        top -= 1
        i = ready[top]
        num_run += 1
        finish = start[i] + duration[i]
        end[i] = finish
        makespan = max(makespan, finish)
        for a in range(after_start[i], after_start[i + 1]):
            j = after_task[a]
            start[j] = max(start[j], finish + after_delay[a])
            left[j] -= 1
            if left[j] == 0:
                ready[top] = j
                top += 1
        for s in range(lane_start[i], lane_start[i + 1]):
            j = next_on_lane[s]
            if j >= 0:
                start[j] = max(start[j], finish)
                left[j] -= 1
                if left[j] == 0:
                    ready[top] = j
                    top += 1
    return makespan if num_run == num_tasks else np.inf


@compiled(small=SMALL)
def _lane_succession(
    lane_start: I32, lane_of: I32, wait_start: I32, order: I32, num_lanes: int
) -> tuple[I32, I32]:
    """(how many each task waits for, lanes included; the next task on the lane of each slot)."""
    num_tasks = len(lane_start) - 1
    left = np.empty(num_tasks, np.int32)
    next_on_lane = np.full(len(lane_of), -1, np.int32)
    last_slot = np.full(num_lanes, -1, np.int32)
    for k in range(num_tasks):
        i = order[k] if len(order) > 0 else k
        left[i] = wait_start[i + 1] - wait_start[i]
        for s in range(lane_start[i], lane_start[i + 1]):
            before = last_slot[lane_of[s]]
            if before >= 0:
                next_on_lane[before] = i
                left[i] += 1
            last_slot[lane_of[s]] = s
    return left, next_on_lane


@compiled(small=SMALL)
def followers(wait_start: I32, wait_on: I32, wait_delay: F64) -> tuple[I32, I32, F64]:
    """The waits the other way round: for each task, who waits for it and with what delay.

    As (`after_start`, `after_task`, `after_delay`), one list per task like the waits themselves.
    """
    num_tasks = len(wait_start) - 1
    after_start = np.zeros(num_tasks + 1, np.int32)
    for w in range(len(wait_on)):
        after_start[wait_on[w] + 1] += 1
    for i in range(num_tasks):
        after_start[i + 1] += after_start[i]
    place = after_start[:-1].copy()
    after_task = np.empty(len(wait_on), np.int32)
    after_delay = np.empty(len(wait_on), np.float64)
    for i in range(num_tasks):
        for w in range(wait_start[i], wait_start[i + 1]):
            at = place[wait_on[w]]
            place[wait_on[w]] = at + 1
            after_task[at] = i
            after_delay[at] = wait_delay[w]
    return after_start, after_task, after_delay


# --- FIFO queues --------------------------------------------------------------------------------
#
# All queues are parts of one sequence, so no queue is kept: tasks are taken in the order in which
# they join, and each starts when its lanes have finished those that joined before it.


@compiled(small=SMALL)
def evaluate_fifo(
    duration: F64,
    lane_start: I32,
    lane_of: I32,
    wait_start: I32,
    after_start: I32,
    after_task: I32,
    after_delay: F64,
    lane_free: F64,
    start: F64,
    end: F64,
) -> float:
    """Fill `start` and `end`; returns the makespan, or inf where waits form a cycle.

    The `after_` arrays come from `followers`, and serve as long as the waits stay the same.
    `lane_free` (one per lane) is scratch.
    """
    num_tasks = len(duration)
    left = wait_start[1:] - wait_start[:-1]
    key_time = np.empty(num_tasks, np.float64)  # a heap of tasks whose moment to join is known
    key_task = np.empty(num_tasks, np.int32)
    milestones = np.empty(num_tasks, np.int32)
    lane_free[:] = 0.0
    start[:] = 0.0
    end[:] = _NOT_RUN
    size, top = 0, 0
    for i in range(num_tasks):
        if left[i] == 0:
            if lane_start[i] == lane_start[i + 1]:
                milestones[top] = i
                top += 1
            else:
                size = _push(key_time, key_task, size, 0.0, i)
    makespan, num_run = 0.0, 0
    while size > 0 or top > 0:
        if top > 0:
            top -= 1
            i = milestones[top]
        else:
            i = key_task[0]
            size = _pop(key_time, key_task, size)
            for s in range(lane_start[i], lane_start[i + 1]):
                start[i] = max(start[i], lane_free[lane_of[s]])
        num_run += 1
        finish = start[i] + duration[i]
        end[i] = finish
        makespan = max(makespan, finish)
        for s in range(lane_start[i], lane_start[i + 1]):
            lane_free[lane_of[s]] = finish
        for a in range(after_start[i], after_start[i + 1]):
            j = after_task[a]
            start[j] = max(start[j], finish + after_delay[a])
            left[j] -= 1
            if left[j] == 0:
                if lane_start[j] == lane_start[j + 1]:
                    milestones[top] = j
                    top += 1
                else:
                    size = _push(key_time, key_task, size, start[j], j)
    return makespan if num_run == num_tasks else np.inf


@compiled()
def _push(key_time: F64, key_task: I32, size: int, time: float, task: int) -> int:
    """Add to a heap by (time, task), each node with four below it; returns its size."""
    at = size
    while at > 0:
        up = (at - 1) >> 2
        if key_time[up] < time or (key_time[up] == time and key_task[up] < task):
            break
        key_time[at] = key_time[up]
        key_task[at] = key_task[up]
        at = up
    key_time[at] = time
    key_task[at] = task
    return size + 1


@compiled()
def _pop(key_time: F64, key_task: I32, size: int) -> int:
    """Remove the first of such a heap; returns its size.

    The hole goes down to the bottom, and what was last goes up from there: being among the
    latest, it seldom goes far.
    """
    size -= 1
    at = 0
    while True:
        first = 4 * at + 1
        if first >= size:
            break
        least, least_time, least_task = first, key_time[first], key_task[first]
        for below in range(first + 1, min(first + 4, size)):
            time = key_time[below]
            if time < least_time or (time == least_time and key_task[below] < least_task):
                least, least_time, least_task = below, time, key_task[below]
        key_time[at] = least_time
        key_task[at] = least_task
        at = least
    _push(key_time, key_task, at, key_time[size], key_task[size])
    return size


# --- priority queues ----------------------------------------------------------------------------
#
# One heap of events by time: a task's moment to join (coded as the task), or its end (coded as
# the task plus the number of tasks). One heap of waiting tasks per lane, all in one array.


@compiled(small=SMALL)
def _priority(
    duration: F64,
    lane_start: I32,
    lane_of: I32,
    wait_start: I32,
    after_start: I32,
    after_task: I32,
    after_delay: F64,
    priority: F64,
    num_lanes: int,
    start: F64,
    end: F64,
) -> float:
    """Fill `start` and `end`; returns the makespan, or inf where waits form a cycle."""
    num_tasks = len(duration)
    left = wait_start[1:] - wait_start[:-1]
    joined = np.zeros(num_tasks, np.float64)
    event_time = np.empty(num_tasks + 1, np.float64)  # a task has one event ahead at a time
    event = np.empty(num_tasks + 1, np.int32)
    milestones = np.empty(num_tasks, np.int32)
    queue_start = _queue_places(lane_of, num_lanes)
    queue = np.empty(len(lane_of), np.int32)
    waiting = np.zeros(num_lanes, np.int32)
    is_free = np.ones(num_lanes, np.bool_)
    touched = np.empty(num_lanes, np.int32)
    is_touched = np.zeros(num_lanes, np.bool_)
    start[:] = 0.0
    end[:] = _NOT_RUN
    size, top, num_touched, num_run = 0, 0, 0, 0
    for i in range(num_tasks):
        if left[i] == 0:
            if lane_start[i] == lane_start[i + 1]:
                milestones[top] = i
                top += 1
            else:
                size = _push(event_time, event, size, 0.0, i)
    makespan = 0.0
    while size > 0 or top > 0:
        now = event_time[0] if size > 0 else 0.0
        while top > 0 or (size > 0 and event_time[0] == now):
            if top > 0:
                top -= 1
                done = milestones[top]
                end[done] = joined[done]
                start[done] = joined[done]
            else:
                code = event[0]
                size = _pop(event_time, event, size)
                done = code - num_tasks
                lanes_of = code if done < 0 else done
                for s in range(lane_start[lanes_of], lane_start[lanes_of + 1]):
                    lane = lane_of[s]
                    if done < 0:
                        _enqueue(queue, queue_start[lane], waiting[lane], priority, joined, code)
                        waiting[lane] += 1
                    else:
                        is_free[lane] = True
                    if not is_touched[lane]:
                        is_touched[lane] = True
                        touched[num_touched] = lane
                        num_touched += 1
                if done < 0:
                    continue
            num_run += 1
            makespan = max(makespan, end[done])
            for a in range(after_start[done], after_start[done + 1]):
                j = after_task[a]
                joined[j] = max(joined[j], end[done] + after_delay[a])
                left[j] -= 1
                if left[j] == 0:
                    if lane_start[j] == lane_start[j + 1]:
                        milestones[top] = j
                        top += 1
                    else:
                        size = _push(event_time, event, size, joined[j], j)
        for t in range(num_touched):
            is_touched[touched[t]] = False
            head = _startable(touched[t], lane_start, lane_of, queue, queue_start, waiting, is_free)
            if head >= 0:
                start[head] = now
                end[head] = now + duration[head]
                size = _push(event_time, event, size, end[head], head + num_tasks)
                for s in range(lane_start[head], lane_start[head + 1]):
                    lane = lane_of[s]
                    is_free[lane] = False
                    waiting[lane] -= 1
                    _dequeue(queue, queue_start[lane], waiting[lane], priority, joined)
        num_touched = 0
    return makespan if num_run == num_tasks else np.inf


@compiled()
def _queue_places(lane_of: I32, num_lanes: int) -> I32:
    """Where each lane's queue begins in an array with room for all tasks of all lanes."""
    places = np.zeros(num_lanes + 1, np.int32)
    for s in range(len(lane_of)):
        places[lane_of[s] + 1] += 1
    for lane in range(num_lanes):
        places[lane + 1] += places[lane]
    return places


@compiled()
def _startable(
    lane: int,
    lane_start: I32,
    lane_of: I32,
    queue: I32,
    queue_start: I32,
    waiting: I32,
    is_free: Any,
) -> int:
    """The head of a lane's queue if it heads all its queues and their lanes are free, or -1."""
    if waiting[lane] == 0:
        return -1
    head = queue[queue_start[lane]]
    for s in range(lane_start[head], lane_start[head + 1]):
        other = lane_of[s]
        if not is_free[other] or queue[queue_start[other]] != head:
            return -1
    return int(head)


@compiled()
def _goes_first(priority: F64, joined: F64, a: int, b: int) -> bool:
    """Does task a go before task b in a priority queue?"""
    if len(priority) > 0 and priority[a] != priority[b]:
        return bool(priority[a] > priority[b])
    return bool(joined[a] < joined[b] or (joined[a] == joined[b] and a < b))


@compiled()
def _enqueue(queue: I32, base: int, size: int, priority: F64, joined: F64, task: int) -> None:
    """Add a task to the priority queue of `size` tasks that begins at `base`."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if _goes_first(priority, joined, queue[base + up], task):
            break
        queue[base + at] = queue[base + up]
        at = up
    queue[base + at] = task


@compiled()
def _dequeue(queue: I32, base: int, size: int, priority: F64, joined: F64) -> None:
    """Remove the head of a priority queue; `size` tasks are left."""
    task = queue[base + size]
    at = 0
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size and _goes_first(
            priority, joined, queue[base + down + 1], queue[base + down]
        ):
            down += 1
        if _goes_first(priority, joined, task, queue[base + down]):
            break
        queue[base + at] = queue[base + down]
        at = down
    queue[base + at] = task


# --- deadlocks ----------------------------------------------------------------------------------


def _refuse(program: Program, end: F64, *, with_lanes: bool) -> None:
    """Say why not every task ran."""
    stuck = end < 0
    if not stuck.any():
        raise ProgramError(
            "the times add up to more than a float can hold", fix="use a larger unit of time"
        )
    raise ProgramError(
        f"deadlock: {_cycle(program, stuck, with_lanes)}",
        fix="break this cycle: change the order of tasks on a lane or remove a wait",
    )


def _cycle(program: Program, stuck: Any, with_lanes: bool) -> str:
    """The sentence that names a cycle of tasks that did not run.

    Each of them waits for another such task, so walking back must come round again.
    """
    before = _stuck_lane_predecessors(program, stuck) if with_lanes else {}
    task = int(np.flatnonzero(stuck)[0])
    seen: dict[int, int] = {}
    steps: list[str] = []
    while task not in seen:
        seen[task] = len(steps)
        waited = next((other for other, _ in program.waits_of(task) if stuck[other]), None)
        if waited is not None:
            steps.append(f"{program.task_name(task)} waits for {program.task_name(waited)}")
            task = waited
        else:
            other, lane = before[task]
            name = program.lanes[lane].name
            steps.append(
                f"{program.task_name(task)} comes after {program.task_name(other)} on lane {name}"
            )
            task = other
    cycle = steps[seen[task] :]
    if len(cycle) > 12:
        cycle = [*cycle[:6], f"... {len(cycle) - 12} more ...", *cycle[-6:]]
    return ", ".join(cycle)


def _stuck_lane_predecessors(program: Program, stuck: Any) -> dict[int, tuple[int, int]]:
    """For tasks that did not run: one that did not run either and is before it on a lane."""
    order = np.arange(program.num_tasks) if program.order is None else program.order
    last: dict[int, int] = {}
    before: dict[int, tuple[int, int]] = {}
    for task in order[stuck[order]].tolist():
        for lane in program.lanes_of(task):
            if lane in last:
                before[task] = (last[lane], lane)
            last[lane] = task
    return before
