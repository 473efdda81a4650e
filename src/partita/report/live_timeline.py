"""A timeline to look around in: a canvas that zooms, with everything it shows packed beside it.

Columns travel as base64 of little-endian arrays inside one JSON element, about 35 bytes per task:
50,000 tasks make less than 2 MB. What a task is (purpose, bytes, ranks, tensors) is told once for
all tasks that share a work. Of more than `MOST_TASKS` tasks only shares travel: the time is cut
into equal columns, and of each lane it is told what part of a column it spends on which kind, so
that a million tasks take no more than 50,000. Names are JSON text that the script only ever sets as
text; the characters that could end the element are escaped. Nothing is loaded from anywhere.
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.jobs.idle import CAUSES, DEPENDENCY, IMBALANCE, IdleAccount
from partita.jobs.measured_lanes import MeasuredLane
from partita.jobs.memory_parts import PARTS, MemoryCurves, few_steps
from partita.program import Program
from partita.report.charts import cut
from partita.report.html_parts import embedded
from partita.report.lanes import ranged, representative, unfolded
from partita.report.palette import (
    CATEGORY_COLORS,
    CATEGORY_PATTERNS,
    CAUSE_COLORS,
    CAUSE_PATTERNS,
    hatch,
)
from partita.report.tasks import CATEGORIES, about, categories
from partita.timeline import Timeline

LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*$)")
ANY_NUMBER = re.compile(r"[0-9]+")
MOST_LANES = 272  # more than the units of any device that is known
MOST_STEPS = 8_000  # of one memory's curve
MOST_TASKS = 120_000  # that travel one by one
MOST_SHARES = 6_000_000  # bytes of the shares that stand for more
MOST_COLUMNS = 16_384
LONGEST_NAME = 36  # on a button
MOST_PART_STEPS = 500  # of each part of a memory
LETTERS = "FBDWU" + " " * (len(CATEGORIES) - 5)  # what papers write into blocks
_TOOLS = (
    '<span class="screen"><input type="search" data-find placeholder="find a task" '
    'aria-label="find a task"> <output data-count></output></span>'
)
_SAVES = (
    ("trace", "Perfetto trace"),
    ("csv", "table (CSV)"),
    ("svg", "picture (SVG)"),
    ("memory", "PyTorch memory viewer"),
)


@dataclass(frozen=True)
class TimelineExtras:
    """What is known of a timeline beside itself: why lanes are idle, memory by part, a run of it.

    `saves` names the downloads that are offered. With `by_block` colours tell blocks apart instead
    of kinds: those that take longest have one each.
    """

    idle: IdleAccount | None = None
    parts: tuple[MemoryCurves, ...] = ()
    measured: tuple[MeasuredLane, ...] = ()
    saves: tuple[str, ...] = ("trace", "csv", "svg", "memory")
    by_block: bool = False


@dataclass(frozen=True)
class TaskColors:
    """The names that have a colour, and for every task the number of its own."""

    names: tuple[str, ...]
    letters: tuple[str, ...]
    of_task: npt.NDArray[np.uint8]


def task_colors(timeline: Timeline, by_block: bool) -> TaskColors:
    """By kind and purpose; or by block, the longest first and the rest together."""
    program = timeline.program
    if not by_block:
        letters = tuple(letter.strip() for letter in LETTERS)
        return TaskColors(CATEGORIES, letters, categories(program))
    most = len(CATEGORY_COLORS) - 1
    names = families(program.blocks, most)
    families_of = {name: place for place, name in enumerate(dict.fromkeys(names))}
    family = np.array([families_of[name] for name in names])[program.block]
    spent = np.bincount(family, weights=program.duration, minlength=len(families_of))
    kept = np.sort(np.argsort(-spent, kind="stable")[:most])  # in the order they first stand there
    number = np.full(len(families_of), len(kept), np.uint8)
    number[kept] = np.arange(len(kept))
    known = list(families_of)
    shown = (*(known[place] for place in kept.tolist()), "others")
    return TaskColors(shown, ("",) * len(shown), number[family])


def families(names: Sequence[str], most: int) -> list[str]:
    """Names with as few of their last numbers left out as make at most `most` different ones."""
    whole = list(names)
    if len(set(whole)) <= most:
        return whole
    without_last = [LAST_NUMBER.sub("*", name) for name in whole]
    if len(set(without_last)) <= most:
        return without_last
    return [ANY_NUMBER.sub("*", name) for name in whole]


def timeline_script() -> str:
    """The script that brings every timeline of a page to life; once per page."""
    assets = resources.files("partita.report").joinpath("assets")
    texts = [assets.joinpath(name).read_text("utf-8") for name in ("downloads.js", "timeline.js")]
    return f"<script>\n{''.join(texts)}</script>"


def timeline_colors() -> str:
    """The colours of the categories and causes as variables of a style sheet."""
    kinds = "".join(f"--k{place}:{color};" for place, color in enumerate(CATEGORY_COLORS))
    causes = "".join(f"--i{place}:{CAUSE_COLORS[cause]};" for place, cause in enumerate(CAUSES))
    return kinds + causes


TIMELINE_STYLE = f"""
.timeline{{position:relative;--held:#8250df;{timeline_colors()}}}
.timeline canvas{{display:block;width:100%;touch-action:pan-y}}
.tools{{display:flex;flex-wrap:wrap;gap:.4rem;align-items:center;margin-bottom:.5rem;
font-size:.85rem}}
.tools button,.tools input,.save>summary{{font:inherit;color:var(--ink);background:var(--card);
border:1px solid var(--line);border-radius:6px;padding:.15rem .55rem;cursor:pointer}}
.tools input{{cursor:text;width:9rem}}
.tools button[aria-pressed=false]{{color:var(--soft);border-style:dashed;
text-decoration:line-through}}
.tools [data-critical][aria-pressed=false],.tools [data-idle][aria-pressed=false],
.tools [data-length][aria-pressed=false]{{text-decoration:none}}
.tools [data-critical][aria-pressed=true],.tools [data-length][aria-pressed=true]{{
border-color:var(--ink);font-weight:600}}
.tools i{{display:inline-block;width:1.1em;height:.8em;border-radius:2px;margin-right:.4em}}
.save{{position:relative}}.save>summary{{list-style:none}}
@media(max-width:600px){{.tools .save>div{{position:static}}}}
.save>div{{position:absolute;z-index:2;background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:.4rem;display:grid;gap:.3rem;white-space:nowrap}}
.tip{{position:absolute;pointer-events:none;background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:.3rem .6rem;font-size:.82rem;max-width:min(30rem,90%);
overflow-wrap:anywhere;box-shadow:0 2px 8px #0003;z-index:1}}
.tip div:first-child{{font-weight:600}}
""".strip()


def live_timeline(
    timeline: Timeline, extras: TimelineExtras | None = None, label: str = "timeline of one step"
) -> str:
    """The timeline as an element; `timeline_script` must follow it on the page."""
    timeline, known = _drawn(timeline, extras or TimelineExtras())
    left_out = len(used_lanes(timeline.program)) - MOST_LANES
    more = f'<p class="soft">{left_out:,} more lanes are not drawn.</p>' if left_out > 0 else ""
    whole = timeline.program.num_tasks <= MOST_TASKS
    if not whole:
        more += (
            f'<p class="soft">{timeline.program.num_tasks:,} tasks are shown as shares of columns '
            "of time; the trace file has each of them.</p>"
        )
    return (
        '<div class="timeline">'
        f'<div class="tools">{_buttons(timeline, known, whole)}</div>'
        f'<canvas tabindex="0" role="img" aria-label="{escape(label)}; plus and minus zoom, left '
        'and right move, up and down choose a lane, n and p go from task to task"></canvas>'
        f'<div class="tip" role="status" hidden></div>{more}'
        f'<script type="application/json">{embedded(_packed(timeline, known, whole))}</script>'
        "</div>"
    )


def _drawn(timeline: Timeline, known: TimelineExtras) -> tuple[Timeline, TimelineExtras]:
    """The rows that differ, and what is known of them; each rank beside its own measured lane."""
    if known.measured:
        return unfolded(timeline), known
    few = representative(timeline)
    row = {lane: place for place, lane in enumerate(few.lanes)}
    parts = tuple(known.parts[memory] for memory in few.memories if memory < len(known.parts))
    if known.idle is None:
        return few.timeline, replace(known, parts=parts)
    lanes = tuple(replace(own, lane=row[own.lane]) for own in known.idle.lanes if own.lane in row)
    return few.timeline, replace(known, idle=replace(known.idle, lanes=lanes), parts=parts)


def _buttons(timeline: Timeline, known: TimelineExtras, whole: bool) -> str:
    drawn, _ = timeline.slots()
    colors = task_colors(timeline, known.by_block)
    shown = {*np.unique(colors.of_task[drawn]).tolist()}
    shown |= {kind for lane in known.measured for kind in lane.kinds}
    parts = [
        f'<button type="button" data-kind="{category}" aria-pressed="true">'
        f'<i style="background:'
        f'{hatch(CATEGORY_COLORS[category], CATEGORY_PATTERNS[category])}"></i>'
        f"{escape(cut(colors.names[category], LONGEST_NAME))}</button>"
        for category in sorted(shown)
    ]
    if known.idle is not None and whole:
        pattern = hatch(CAUSE_COLORS[DEPENDENCY], CAUSE_PATTERNS[DEPENDENCY])
        parts.append(
            f'<button type="button" data-idle aria-pressed="true"><i style="background:{pattern}">'
            "</i>idle by cause</button>"
        )
    if whole:
        parts.append(
            '<button type="button" data-critical aria-pressed="false">critical path</button>'
        )
    if whole and known.measured:
        parts.append(
            '<button type="button" data-length aria-pressed="false" title="draw measured lanes as '
            'long as predicted ones">one length</button>'
        )
    parts.append('<button type="button" data-all>whole step</button>')
    if whole:
        parts.append(_TOOLS)
    offered = [(name, words) for name, words in _SAVES if name in known.saves]
    if not whole:
        offered = [(name, words) for name, words in offered if name == "svg"]
    if not timeline.program.memories:
        offered = [(name, words) for name, words in offered if name != "memory"]
    if offered:
        saves = "".join(
            f'<button type="button" data-save="{name}">{words}</button>' for name, words in offered
        )
        parts.append(
            f'<details class="save screen"><summary>save as</summary><div>{saves}</div></details>'
        )
    parts.append(
        '<span class="soft screen">wheel or + and − zoom, drag or ← → move, hover or n tells '
        "more</span>"
    )
    return "".join(parts)


def _packed(timeline: Timeline, known: TimelineExtras, whole: bool) -> dict[str, Any]:
    program = timeline.program
    measured = known.measured if whole else ()
    longest = max((float(lane.end.max()) for lane in measured if lane.end.size), default=0.0)
    causes = list(CAUSES)
    colors = task_colors(timeline, known.by_block)
    return {
        "unit": program.time_unit,
        "makespan": max(timeline.makespan, longest),
        "predicted": timeline.makespan,
        "kinds": list(colors.names),
        "letters": list(colors.letters),
        "patterns": list(CATEGORY_PATTERNS[: len(colors.names)]),
        "causes": causes,
        "cause_patterns": [CAUSE_PATTERNS[cause] for cause in causes],
        **(
            _tasks(timeline, measured, colors.of_task)
            if whole
            else _shares(timeline, used_lanes(program)[:MOST_LANES], colors.of_task)
        ),
        **_idle(timeline, known.idle if whole else None, measured),
        "memories": [_memory(timeline, i) for i in range(min(len(program.memories), MOST_LANES))],
        "parts": [_part_curves(parts) for parts in known.parts[:MOST_LANES]],
    }


def used_lanes(program: Program) -> list[int]:
    """All lanes but links that nothing crosses."""
    used = np.bincount(program.lane_of, minlength=len(program.lanes)) > 0
    return [n for n, lane in enumerate(program.lanes) if used[n] or lane.kind != "link"]


def display_lanes(timeline: Timeline, measured: Sequence[MeasuredLane]) -> list[tuple[int, int]]:
    """(lane, measured lane) from top to bottom, one of them -1: runs stand under their lane."""
    rows: list[tuple[int, int]] = []
    for lane in used_lanes(timeline.program)[:MOST_LANES]:
        rows.append((lane, -1))
        rows += [(-1, number) for number, own in enumerate(measured) if own.under == lane]
    return rows


def _tasks(
    timeline: Timeline, measured: Sequence[MeasuredLane], of: npt.NDArray[np.uint8]
) -> dict[str, Any]:
    """Every task, and after them those that were measured."""
    program = timeline.program
    rows = display_lanes(timeline, measured)
    count = program.num_tasks
    first = np.cumsum([count, *(len(lane.start) for lane in measured)])
    slots, places = [np.empty(0, np.int64)], [0]
    for lane, number in rows:
        own = (
            timeline.lane_tasks(lane) if lane >= 0 else np.arange(first[number], first[number + 1])
        )
        slots.append(own)
        places.append(places[-1] + len(own))
    names = dict.fromkeys([*program.blocks, *(name for lane in measured for name in lane.names)])
    numbers = {name: place for place, name in enumerate(names)}

    def joined(own: npt.NDArray[Any], others: list[npt.NDArray[Any]], dtype: str) -> str:
        return _base64(np.concatenate([own, *others]), dtype)

    of_names = [np.array([numbers[name] for name in lane.names], np.int32) for lane in measured]
    return {
        "lanes": [
            ranged(program.lanes[lane].name) if lane >= 0 else measured[number].name
            for lane, number in rows
        ],
        "measured": [lane < 0 for lane, _ in rows],
        "works": [list(about(program, work)) for work in program.works],
        "blocks": list(names),
        "start": joined(timeline.start, [lane.start for lane in measured], "<f8"),
        "end": joined(timeline.end, [lane.end for lane in measured], "<f8"),
        "kind": joined(of, [np.array(m.kinds, np.uint8) for m in measured], "<u1"),
        "work": joined(program.work, [np.full(len(m.start), -1) for m in measured], "<i4"),
        "block": joined(
            np.array([numbers[name] for name in program.blocks])[program.block], of_names, "<i4"
        ),
        "microbatch": joined(
            program.microbatch, [np.array(m.microbatches, np.int32) for m in measured], "<i4"
        ),
        "slot_task": _base64(np.concatenate(slots), "<i4"),
        "slot_from": _base64(np.array(places), "<i4"),
        "critical": _base64(np.array(timeline.critical_path(), np.int32), "<i4"),
        "messages": _base64(np.array(messages(program), np.int32).ravel(), "<i4"),
        "columns": 0,
        "present": [],
        "shares": _base64(np.empty(0), "<u1"),
    }


def messages(program: Program) -> list[tuple[int, int, int]]:
    """(send, task that makes what is sent, task that waits for it), on devices, of every message.

    Where nobody waits for the receive, it stands for who would.
    """
    if not len(program.pairs):
        return []
    is_device = np.array([lane.kind == "device" for lane in program.lanes] or [False])
    counts = np.diff(program.lane_start)
    first_lane = np.where(counts > 0, program.lane_start[:-1], 0)
    computes = (counts > 0) & is_device[program.lane_of[first_lane]]
    waiter = np.repeat(np.arange(program.num_tasks), np.diff(program.wait_start))
    by_receive: dict[int, int] = {}
    wanted = np.isin(program.wait_on, program.pairs[:, 1]) & computes[waiter]
    for task, receive in zip(waiter[wanted], program.wait_on[wanted], strict=True):
        by_receive.setdefault(int(receive), int(task))
    triples = []
    for send, receive in program.pairs.tolist():
        makers = [task for task, _ in program.waits_of(send) if computes[task]]
        triples.append((send, makers[0] if makers else send, by_receive.get(receive, receive)))
    return triples


def _shares(timeline: Timeline, lanes: Sequence[int], of: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """How each lane spends each column of time, in 255ths."""
    program = timeline.program
    drawn, _ = timeline.slots()
    present = np.unique(of[drawn]).tolist()
    columns = min(MOST_COLUMNS, MOST_SHARES // max(1, len(lanes) * len(present)))
    classes = np.searchsorted(np.array(present), of).clip(max=max(0, len(present) - 1))
    shares = timeline.shares(columns, lanes, classes, max(1, len(present)))
    nothing = _base64(np.empty(0), "<f8")
    return {
        "lanes": [ranged(program.lanes[lane].name) for lane in lanes],
        "measured": [False] * len(lanes),
        "works": [],
        "blocks": [],
        **dict.fromkeys(("start", "end", "kind", "work", "block", "microbatch"), nothing),
        **dict.fromkeys(("slot_task", "critical", "messages"), nothing),
        "slot_from": _base64(np.zeros(len(lanes) + 1), "<i4"),
        "columns": columns,
        "present": present,
        "shares": _base64(np.rint(shares * 255), "<u1"),
    }


def _idle(
    timeline: Timeline, account: IdleAccount | None, measured: Sequence[MeasuredLane]
) -> dict[str, Any]:
    """Why each lane is idle, in the order of the lanes as they are drawn."""
    by_lane = {} if account is None else {lane.lane: lane for lane in account.lanes}
    begin: list[float] = []
    end: list[float] = []
    cause: list[int] = []
    places, uneven = [0], []
    for lane, _ in display_lanes(timeline, measured):
        own = by_lane.get(lane)
        share = 0.0
        if own is not None:
            for gap in sorted(own.gaps, key=lambda gap: gap.begin):
                number = CAUSES.index(gap.cause)
                if len(begin) > places[-1] and cause[-1] == number and gap.begin <= end[-1]:
                    end[-1] = gap.end  # goes on where the last one ends
                    continue
                begin.append(gap.begin)
                end.append(gap.end)
                cause.append(number)
            waited = own.seconds[DEPENDENCY] + own.seconds[IMBALANCE]
            share = own.seconds[IMBALANCE] / waited if waited > 0 else 0.0
        places.append(len(begin))
        uneven.append(share)
    return {
        "idle_from": _base64(np.array(places), "<i4"),
        "idle_begin": _base64(np.array(begin), "<f8"),
        "idle_end": _base64(np.array(end), "<f8"),
        "idle_cause": _base64(np.array(cause), "<u1"),
        "uneven": uneven,
    }


def _memory(timeline: Timeline, index: int) -> dict[str, Any]:
    """The curve of a memory; where it has more steps than can be seen, the most of each slice."""
    memory = timeline.program.memories[index]
    times, amounts = timeline.memory_steps(index)
    peak = float(amounts.max()) if amounts.size else 0.0
    if len(times) > MOST_STEPS:
        times = np.arange(MOST_STEPS, dtype=np.float64) * (timeline.makespan / MOST_STEPS)
        amounts = timeline.memory_columns(index, MOST_STEPS)
    return {
        "name": ranged(memory.name),
        "capacity": memory.capacity,
        "peak": peak,
        "times": _base64(times, "<f8"),
        "amounts": _base64(amounts, "<f8"),
    }


def _part_curves(parts: MemoryCurves) -> dict[str, Any]:
    """The parts of one memory over time."""
    few = few_steps(parts, MOST_PART_STEPS)
    return {
        "times": _base64(few.times, "<f8"),
        "names": list(PARTS),
        "amounts": [_base64(few.parts[part], "<f4") for part in PARTS],
    }


def _base64(column: npt.NDArray[Any], dtype: str) -> str:
    """A column as text: type, colon, bytes; whole numbers in as few bytes as they need."""
    values = np.asarray(column)
    if dtype == "<i4":
        low, high = int(values.min(initial=0)), int(values.max(initial=0))
        fits = (
            name for name, bits in (("<i1", 7), ("<i2", 15)) if -(2**bits) <= low and high < 2**bits
        )
        dtype = next(fits, "<i4")
    packed = base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()
    return f"{dtype[1:]}:{packed}"
