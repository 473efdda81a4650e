"""The verifier: is this timeline a true run of this program, and can the program run at all?

It shares no code with the engine or any search, and reads a timeline only as its two columns.
What holds in a true run:

- every task has one finite start >= 0, and ends its duration later;
- it starts no sooner than the end of each task it waits for, plus the delay of that wait;
- a lane runs one task at a time; a task of no length may touch another's start or end, not lie
  inside it;
- memory is within capacity at every instant, all changes at one instant applied together;
- every send has one receive and every receive one send, and none is received before it is sent;
- every (block, kind) runs once in each microbatch of its block; a backward whole or in two halves.

Moments are compared with a relative tolerance of 1e-9, so that an order or an excess that exists
only by rounding is not held against a timeline. Complexity: O(n log n), in numpy throughout.

A program in static order can run if its waits and lane orders, with each send and receive taken
as one meeting, form no cycle. (That is stricter than what the engine needs: between real machines
a send may not end before its receive begins.)
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.errors import VerificationError
from partita.program import F64, Kind, Memory, Program, TaskName
from partita.timeline import Timeline

TOLERANCE = 1e-9
MOST_LISTED = 20

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


def check_timeline(program: Program, timeline: Timeline) -> None:
    """Raise `VerificationError` unless the timeline is a true run of the program."""
    if violations := verify_timeline(program, timeline):
        raise VerificationError(violations)


def verify_timeline(program: Program, timeline: Timeline) -> tuple[str, ...]:
    """What is wrong with a timeline, in words; empty if nothing is.

    At most `MOST_LISTED` are listed; a last line then counts the others.
    """
    start, end = timeline.start, timeline.end
    if len(start) != program.num_tasks:
        return (f"the timeline has {len(start):,} tasks, the program {program.num_tasks:,}",)
    findings = _Findings()
    _check_moments(program, start, end, findings)
    if not findings.total:  # without moments nothing else can be judged
        _check_waits(program, start, end, findings)
        _check_lanes(program, start, end, findings)
        _check_memory(program, start, end, findings)
        _check_received_after_sent(program, end, findings)
    _check_pairs(program, findings)
    _check_microbatches(program, findings)
    return findings.listed()


def verify_program(program: Program) -> tuple[str, ...]:
    """Why the program cannot run in its static order on real machines; empty if it can."""
    findings = _Findings()
    _check_pairs(program, findings)
    if not findings.total and (cycle := _find_cycle(program)):
        findings.lines.append(f"deadlock: {cycle}")
        findings.total += 1
    return findings.listed()


class _Findings:
    """Violations in words, the first few of them, and how many there are."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.total = 0

    def add(self, bad: I64, say: Callable[[int], str]) -> None:
        """Count `bad`, and put into words as many of them as are still listed."""
        self.total += len(bad)
        self.lines.extend(say(int(i)) for i in bad[: MOST_LISTED - len(self.lines)])

    def listed(self) -> tuple[str, ...]:
        more = self.total - len(self.lines)
        return (*self.lines, f"and {more:,} more") if more else tuple(self.lines)


def _slack(*moments: F64) -> F64:
    """How far moments may be apart and still count as one: relative to the later of them."""
    largest: F64 = np.abs(moments[0])
    for other in moments[1:]:
        largest = np.maximum(largest, np.abs(other))
    return TOLERANCE * largest


def _owners(starts: Any) -> I64:
    """The task of each entry of a list per task."""
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


# --- timelines ----------------------------------------------------------------------------------


def _check_moments(program: Program, start: F64, end: F64, findings: _Findings) -> None:
    name, duration = program.task_name, program.duration
    unset = ~(np.isfinite(start) & np.isfinite(end))
    findings.add(
        np.flatnonzero(unset),
        lambda i: f"{name(i)} has no time: it starts at {start[i]:g} and ends at {end[i]:g}",
    )
    findings.add(
        np.flatnonzero(~unset & (start < 0)),
        lambda i: f"{name(i)} starts at {start[i]:.9g}, before time 0",
    )
    begin, finish = np.where(unset, 0, start), np.where(unset, 0, end)
    due = np.where(unset, 0, begin + duration)
    findings.add(
        np.flatnonzero(np.abs(finish - due) > _slack(finish, due)),
        lambda i: (
            f"{name(i)} runs from {start[i]:.9g} to {end[i]:.9g}, "
            f"which is not its duration of {duration[i]:.9g}"
        ),
    )


def _check_waits(program: Program, start: F64, end: F64, findings: _Findings) -> None:
    owner, other = _owners(program.wait_start), program.wait_on
    ready = end[other] + program.wait_delay
    begin = start[owner]
    bad = np.flatnonzero(begin < ready - _slack(begin, ready))

    def say(w: int) -> str:
        delay = program.wait_delay[w]
        after = f" and {delay:.9g} have passed" if delay else ""
        return (
            f"{program.task_name(owner[w])} starts at {begin[w]:.9g}, before "
            f"{program.task_name(other[w])} has ended at {end[other[w]]:.9g}{after}"
        )

    findings.add(bad, say)


def _check_lanes(program: Program, start: F64, end: F64, findings: _Findings) -> None:
    """Sort each lane's tasks by start and compare each with the latest end before it."""
    task, lane = _owners(program.lane_start), program.lane_of.astype(np.int64)
    sort = np.lexsort((end[task], start[task], lane))
    task, lane = task[sort], lane[sort]
    # The running latest end per lane: ranks of ends, raised lane by lane, so that one running
    # maximum over everything begins anew on each lane.
    by_end = np.argsort(end[task], kind="stable")
    rank = np.empty(len(task), np.int64)
    rank[by_end] = np.arange(len(task))
    latest = np.maximum.accumulate(lane * len(task) + rank)
    holder = task[by_end[latest % max(1, len(task))]][:-1]
    later = task[1:]
    begin = start[later]
    inside = begin < end[holder] - _slack(begin, end[holder])
    touching = end[later] <= start[holder] + _slack(end[later], start[holder])
    bad = np.flatnonzero((lane[1:] == lane[:-1]) & inside & ~touching)

    def say(k: int) -> str:
        a, b = holder[k], later[k]
        return (
            f"lane {program.lanes[lane[k + 1]].name} runs {program.task_name(b)} from "
            f"{start[b]:.9g} while {program.task_name(a)} runs until {end[a]:.9g}"
        )

    findings.add(bad, say)


def _check_memory(program: Program, start: F64, end: F64, findings: _Findings) -> None:
    """Sum up each memory's changes in time order; what is given back counts a touch earlier."""
    owner = _owners(program.effect_start)
    moment = np.concatenate((start[owner], end[owner]))
    change = np.concatenate((program.effect_at_start, program.effect_at_end))
    real = np.flatnonzero(change)
    owner, memory = np.tile(owner, 2)[real], np.tile(program.effect_memory, 2)[real]
    moment, change = moment[real], change[real]
    counts_at = np.where(change < 0, moment - _slack(moment), moment)
    sort = np.lexsort((change, counts_at, memory))  # the largest take of an instant comes last
    bounds = np.searchsorted(memory[sort], np.arange(len(program.memories) + 1))
    for index, store in enumerate(program.memories):
        mine = sort[bounds[index] : bounds[index + 1]]
        if store.capacity is None or not len(mine):
            continue
        last = np.append(np.diff(counts_at[mine]) != 0, True)  # the last change of each instant
        held = np.cumsum(change[mine])
        slack = TOLERANCE * max(store.capacity, float(np.abs(held).max()))
        over = np.flatnonzero(last & (held > store.capacity + slack))

        def say(k: int, store: Memory = store, mine: I64 = mine, held: F64 = held) -> str:
            taker = program.task_name(owner[mine[k]])
            return (
                f"memory {store.name} holds {held[k]:.9g} of {store.capacity:.9g} from "
                f"{moment[mine[k]]:.9g} on, when {taker} takes {change[mine[k]]:.9g}"
            )

        findings.add(over[:1], say)  # one per memory: what follows is the same excess


def _check_pairs(program: Program, findings: _Findings) -> None:
    name = program.task_name
    sides = ((Kind.SEND, "send", "receive"), (Kind.RECEIVE, "receive", "send"))
    for column, (kind, verb, partner) in enumerate(sides):
        times = np.bincount(program.pairs[:, column], minlength=program.num_tasks)
        of_kind = program.kind == kind

        def is_none(i: int, verb: str = verb) -> str:
            return f"{name(i)} is paired as a {verb} but is none"

        def not_one(i: int, times: I64 = times, partner: str = partner) -> str:
            return f"{name(i)} has {times[i]} {partner}s, and one is needed"

        findings.add(np.flatnonzero(~of_kind & (times > 0)), is_none)
        findings.add(np.flatnonzero(of_kind & (times != 1)), not_one)


def _check_received_after_sent(program: Program, end: F64, findings: _Findings) -> None:
    name, (send, receive) = program.task_name, program.pairs.T
    findings.add(
        np.flatnonzero(end[receive] < end[send] - _slack(end[receive], end[send])),
        lambda k: (
            f"{name(receive[k])} ends at {end[receive[k]]:.9g}, "
            f"before its {name(send[k])} has ended at {end[send[k]]:.9g}"
        ),
    )


def _check_microbatches(program: Program, findings: _Findings) -> None:
    """Every (block, kind) once per microbatch of the block; -1 is no microbatch."""
    numbered = np.flatnonzero(program.microbatch >= 0)
    block = program.block[numbered].astype(np.int64)
    width = int(program.microbatch.max(initial=0)) + 1
    each = block * width + program.microbatch[numbered]
    of_block, index = np.unique(each, return_inverse=True)  # (block, microbatch) that occur
    kinds = np.unique(block * len(Kind) + program.kind[numbered])  # (block, kind) that occur
    key = program.kind[numbered].astype(np.int64) * len(of_block) + index
    count = np.bincount(key, minlength=len(Kind) * len(of_block)).reshape(len(Kind), -1)
    occurs = np.zeros((len(Kind), len(program.blocks)), np.bool_)
    occurs[kinds % len(Kind), kinds // len(Kind)] = True
    for half in (Kind.DGRAD, Kind.WGRAD):  # a whole backward is both halves at once
        mixed = occurs[Kind.BACKWARD] & occurs[half]
        count[half] += np.where(mixed[of_block // width], count[Kind.BACKWARD], 0)
    apart = occurs[Kind.DGRAD] | occurs[Kind.WGRAD]
    occurs[Kind.BACKWARD] &= ~apart
    bad = np.flatnonzero(occurs[:, of_block // width] & (count != 1))

    def say(cell: int) -> str:
        kind, column = divmod(cell, len(of_block))
        block, microbatch = divmod(int(of_block[column]), width)
        label = TaskName(Kind(kind), microbatch, program.blocks[block])
        times = int(count[kind, column])
        return f"{label} {f'runs {times} times' if times else 'does not run'}, and once is needed"

    findings.add(bad, say)


# --- programs -----------------------------------------------------------------------------------


def _find_cycle(program: Program) -> str:
    """A cycle of waits, lane order and meetings, in words, or nothing.

    Where each task waits only for earlier ones, and there are no pairs, the order itself is the
    proof that there is none; otherwise tasks are peeled off one by one.
    """
    tasks = program.num_tasks
    order = np.arange(tasks) if program.order is None else program.order.astype(np.int64)
    position = np.empty(tasks, np.int64)
    position[order] = np.arange(tasks)
    waiter, waited = _owners(program.wait_start), program.wait_on.astype(np.int64)
    if not len(program.pairs) and (position[waited] < position[waiter]).all():
        return ""
    before, after, lane = _lane_edges(program, position)
    sources = np.concatenate((waited, before))
    targets = np.concatenate((waiter, after))
    meeting = np.arange(tasks)  # a send and its receive are one node: the send
    meeting[program.pairs[:, 1]] = program.pairs[:, 0]
    between = meeting[sources] != meeting[targets]
    lanes = np.concatenate((np.full(len(waited), -1), lane))
    sources, targets, lanes = sources[between], targets[between], lanes[between]
    stuck = _stuck(meeting[sources], meeting[targets], meeting == np.arange(tasks))
    if not stuck.any():
        return ""
    held = stuck[meeting[sources]] & stuck[meeting[targets]]
    return _say_cycle(program, meeting, sources[held], targets[held], lanes[held])


def _lane_edges(program: Program, position: I64) -> tuple[I64, I64, I64]:
    """(earlier, later, lane) of tasks next to each other on a lane."""
    task, lane = _owners(program.lane_start), program.lane_of.astype(np.int64)
    sort = np.lexsort((position[task], lane))
    task, lane = task[sort], lane[sort]
    same = lane[1:] == lane[:-1]
    return task[:-1][same], task[1:][same], lane[1:][same]


def _stuck(sources: I64, targets: I64, is_node: Bool) -> Bool:
    """Nodes that are left when those without a predecessor are taken away, again and again."""
    nodes = len(is_node)
    left = np.bincount(targets, minlength=nodes).tolist()
    sort = np.argsort(sources, kind="stable")
    followers = targets[sort].tolist()
    begins = np.searchsorted(sources[sort], np.arange(nodes + 1)).tolist()
    free = [node for node in np.flatnonzero(is_node).tolist() if left[node] == 0]
    gone = np.zeros(nodes, np.bool_)
    taken: list[int] = []
    while free:
        node = free.pop()
        taken.append(node)
        for target in followers[begins[node] : begins[node + 1]]:
            left[target] -= 1
            if left[target] == 0:
                free.append(target)
    gone[taken] = True
    return is_node & ~gone


def _say_cycle(program: Program, meeting: I64, sources: I64, targets: I64, lanes: I64) -> str:
    """Walk back along edges between stuck nodes until one comes round again."""
    name = program.task_name
    into: dict[int, int] = {}
    for edge, node in enumerate(meeting[targets].tolist()):
        into.setdefault(node, edge)
    node = min(into)
    seen: dict[int, int] = {}
    steps: list[str] = []
    while node not in seen:
        seen[node] = len(steps)
        edge = into[node]
        a, b, lane = int(sources[edge]), int(targets[edge]), int(lanes[edge])
        steps.append(
            f"{name(b)} waits for {name(a)}"
            if lane < 0
            else f"{name(b)} comes after {name(a)} on lane {program.lanes[lane].name}"
        )
        if meeting[a] != a or a in program.pairs[:, 0]:
            partner = program.pairs[(program.pairs == a).any(axis=1)][0]
            steps[-1] += f" ({name(partner[0])} meets {name(partner[1])})"
        node = int(meeting[a])
    cycle = steps[seen[node] :]
    if len(cycle) > 12:
        cycle = [*cycle[:6], f"... {len(cycle) - 12} more ...", *cycle[-6:]]
    return ", ".join(cycle)
