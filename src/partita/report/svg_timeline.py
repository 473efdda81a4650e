"""A timeline as a picture, the way papers draw schedules: SVG that needs nothing else.

A row per lane, a rectangle per task with its microbatch in it, the memory held under them. Hover
shows a task's name, its times and what it is. It follows the reader's light or dark theme. All
names are escaped: whatever they hold, they show as text. A lane with more tasks than `MOST_TASKS`,
or than its part of `MOST_DRAWN`, shows instead how its time is shared between the categories, as
areas stacked on each other; hover says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

import numpy as np
import numpy.typing as npt

from partita.program import F64
from partita.report.axis import memory_text, tick_text, ticks, time_scale, time_text
from partita.report.lanes import representative, short_names
from partita.report.tasks import CATEGORIES, COLORS, about, categories
from partita.timeline import Timeline

MOST_TASKS = 2000  # per lane, as rectangles of their own
MOST_DRAWN = 20_000  # of all lanes together: some megabytes
MOST_LANES = 200

_STYLE = (
    """
svg.partita{--ink:#1f2328;--soft:#656d76;--line:#d0d7de;--ground:#f6f8fa;--cut:#ffffff;--held:#8250df}
@media(prefers-color-scheme:dark){svg.partita{--ink:#e6edf3;--soft:#8d96a0;--line:#30363d;\
--ground:#161b22;--cut:#0d1117;--held:#a371f7}}
svg.partita text{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
svg.partita text{fill:var(--ink)}
svg.partita .title{font-size:15px;font-weight:600}
svg.partita .soft{fill:var(--soft);font-size:11px}
svg.partita .n{font-size:11px;fill:#fff;text-anchor:middle;pointer-events:none}
svg.partita .row{fill:var(--ground)}
svg.partita .grid{stroke:var(--line);stroke-width:1}
svg.partita .t{stroke:var(--cut);stroke-width:.6}
svg.partita .held{fill:var(--held);fill-opacity:.25;stroke:var(--held);stroke-width:1.2}
svg.partita .cap{stroke:var(--held);stroke-dasharray:4 3}
""".strip()
    + "".join(f"\nsvg.partita .k{place}{{fill:{color}}}" for place, color in enumerate(COLORS))
)

_ROW, _GAP, _TOP, _MEMORY = 22, 5, 58, 40
_LETTER = 7.2  # pixels, about
MOST_LETTERS = 28  # of a row's name


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where things are drawn: `left` to `left + room` is time 0 to the makespan."""

    timeline: Timeline
    width: int
    left: int
    room: float
    category: npt.NDArray[np.uint8]  # of each task
    most_tasks: int = MOST_TASKS  # of a lane, as rectangles

    def x(self, moment: float) -> float:
        longest = self.timeline.makespan
        return self.left + (moment / longest * self.room if longest > 0 else 0.0)


def timeline_svg(
    timeline: Timeline,
    title: str = "",
    width: int = 1000,
    lanes: Sequence[int] | None = None,
    memory: bool = True,
    fold: bool = False,
) -> str:
    """The timeline as one `<svg>` element, to be saved as a file or put into a page.

    With `fold` one row stands for all lanes that do the same, and collectives inside the blocks of
    a pipeline are drawn beside their stage.
    """
    timeline = representative(timeline).timeline if fold and lanes is None else timeline
    program = timeline.program
    shown = list(range(len(program.lanes)) if lanes is None else lanes)
    left_out = len(shown) - MOST_LANES
    shown = shown[:MOST_LANES]
    peaks = timeline.peaks()
    stores = _stores(peaks) if memory else []
    labels = [program.lanes[lane].name for lane in shown]
    labels += [_memory_label(timeline, store) for store in stores]
    labels = short_names(labels, MOST_LETTERS)
    left = 20 + round(_LETTER * max(map(len, labels), default=0))
    held = {store: _peak_text(timeline, store, float(peaks[store])) for store in stores}
    right = 12 + _LETTER * max(map(len, held.values()), default=4)
    most = min(MOST_TASKS, MOST_DRAWN // max(1, len(shown)))
    frame = _Frame(
        timeline, width, left, max(50.0, width - left - right), categories(program), most
    )
    bottom = _TOP + len(shown) * (_ROW + _GAP)
    parts = [*_heading(frame, title), *_axis(frame, _TOP - 6, bottom)]
    for row, lane in enumerate(shown):
        parts += _lane(frame, lane, labels[row], _TOP + row * (_ROW + _GAP))
    if left_out > 0:
        parts.append(_text(left, bottom + 12, f"{left_out:,} more lanes are not drawn", "soft"))
        bottom += 20
    for store, label in zip(stores, labels[len(shown) :], strict=True):
        parts += _memory(frame, store, label, bottom + 6, held[store])
        bottom += _MEMORY + 12
    parts += _legend(frame, shown, bottom + 22)
    height = bottom + 36
    return (
        f'<svg class="partita" xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(_plain(title or "timeline"))}">\n<style>{_STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _stores(peaks: F64) -> list[int]:
    """Memories that something is taken from, up to a dozen: the fullest."""
    used = np.flatnonzero(peaks > 0).tolist()
    return sorted(sorted(used, key=lambda store: -peaks[store])[:12])


def _heading(frame: _Frame, title: str) -> list[str]:
    program = frame.timeline.program
    facts = (
        f"{time_text(program, frame.timeline.makespan)}, {program.num_tasks:,} tasks, "
        f"{len(program.lanes):,} lanes"
    )
    return [_text(8, 20, title or facts, "title"), _text(8, 36, facts, "soft") if title else ""]


def _axis(frame: _Frame, y: float, bottom: float) -> list[str]:
    longest = frame.timeline.makespan
    size, unit = time_scale(frame.timeline.program, longest)
    parts = []
    for moment in ticks(longest / size, max(2, int(frame.room // 90))):
        x = frame.x(moment * size)
        label = tick_text(moment) + (f" {unit}" if moment == 0 else "")
        parts.append(
            f'<line class="grid" x1="{x:.1f}" y1="{y + 2:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
        )
        parts.append(_text(x + 2, y - 2, label, "soft"))
    return parts


def _lane(frame: _Frame, lane: int, label: str, y: float) -> list[str]:
    """The name, the ground, the tasks and the share of time a lane is busy."""
    timeline = frame.timeline
    tasks = timeline.lane_tasks(lane)
    end = frame.left + frame.room
    busy = float((timeline.end[tasks] - timeline.start[tasks]).sum())
    share = busy / timeline.makespan if timeline.makespan > 0 else 0.0
    parts = [
        f'<rect class="row" x="{frame.left}" y="{y}" width="{frame.room:.1f}" height="{_ROW}"/>',
        _text(8, y + 15, label),
        _text(end + 6, y + 15, f"{share:.0%}", "soft"),
    ]
    if len(tasks) > frame.most_tasks:
        return parts + _areas(frame, lane, y)
    return parts + [piece for task in tasks.tolist() for piece in _task(frame, task, y)]


def _task(frame: _Frame, task: int, y: float) -> list[str]:
    """A rectangle with a title, and the microbatch where there is room."""
    program = frame.timeline.program
    start, end = float(frame.timeline.start[task]), float(frame.timeline.end[task])
    x, span = frame.x(start), frame.x(end) - frame.x(start)
    category = int(frame.category[task])
    words = (
        f"{program.task_name(task)}: {CATEGORIES[category]}, "
        f"{time_text(program, start)} to {time_text(program, end)} "
        f"({time_text(program, float(program.duration[task]))})"
    )
    work = program.work_of(task)
    lines = () if work is None else about(program, work)
    parts = [_rect(x, y, span, category, "; ".join((words, *lines)))]
    number = str(program.microbatch[task])
    if program.microbatch[task] >= 0 and span >= 7 * len(number) + 3:
        parts.append(_text(x + span / 2, y + 15, number, "n"))
    return parts


def _areas(frame: _Frame, lane: int, y: float) -> list[str]:
    """A lane with very many tasks: the share of each category, stacked from the bottom up."""
    num_columns = max(1, int(frame.room // 3))
    shares = frame.timeline.shares(num_columns, [lane], frame.category, len(CATEGORIES))[0]
    tops = y + _ROW * (1 - np.column_stack((np.zeros(num_columns), shares.cumsum(axis=1))))
    step = frame.room / num_columns
    parts = []
    for category in np.flatnonzero(shares.any(axis=0)).tolist():
        upper = _steps(frame.left, step, tops[:, category + 1].tolist())
        lower = _steps(frame.left + frame.room, -step, tops[::-1, category].tolist())
        words = f"the share of time that is {CATEGORIES[category]}; tasks are too many to draw"
        parts.append(
            f'<path class="k{category}" d="M{frame.left} {y + _ROW}{upper}{lower}Z">'
            f"<title>{escape(words)}</title></path>"
        )
    return parts


def _steps(x: float, step: float, heights: list[float]) -> str:
    """Path commands along columns of these heights; columns of one height are one."""
    commands, at = [], 0
    for height, run in groupby(f"{h:.1f}" for h in heights):
        at += len(list(run))
        commands.append(f"V{height}H{x + at * step:.1f}")
    return "".join(commands)


def _memory(frame: _Frame, memory: int, label: str, y: float, held: str) -> list[str]:
    """The curve of what a memory holds, with its capacity as a dashed line."""
    timeline = frame.timeline
    store = timeline.program.memories[memory]
    times, amounts = timeline.memory_steps(memory)
    if len(times) > MOST_TASKS:  # more than pixels: the most held in each column instead
        amounts = timeline.memory_columns(memory, int(frame.room))
        times = np.linspace(0, timeline.makespan, len(amounts), endpoint=False)
    top = max(float(amounts.max()), store.capacity or 0.0)
    base = y + _MEMORY

    def height(amount: float) -> float:
        return base - max(0.0, amount) / top * (_MEMORY - 4)

    points = [f"M{frame.left} {base}"]
    for moment, amount in zip(times.tolist(), amounts.tolist(), strict=True):
        points.append(f"H{frame.x(moment):.1f}V{height(amount):.1f}")
    points.append(f"H{frame.left + frame.room:.1f}V{base}Z")
    words = f"{store.name} holds at most {held}"
    parts = [
        _text(8, y + 24, label),
        f'<path class="held" d="{"".join(points)}"><title>{escape(_plain(words))}</title></path>',
        _text(frame.left + frame.room + 6, y + 24, held, "soft"),
    ]
    if store.capacity is not None:
        y = height(store.capacity)
        parts.append(
            f'<line class="cap" x1="{frame.left}" y1="{y:.1f}" '
            f'x2="{frame.left + frame.room:.1f}" y2="{y:.1f}"/>'
        )
    return parts


def _memory_label(timeline: Timeline, memory: int) -> str:
    return f"{timeline.program.memories[memory].name} memory"


def _peak_text(timeline: Timeline, memory: int, peak: float) -> str:
    program = timeline.program
    capacity = program.memories[memory].capacity
    limit = "" if capacity is None else f" of {memory_text(program, capacity)}"
    return memory_text(program, peak) + limit


def _legend(frame: _Frame, lanes: list[int], y: float) -> list[str]:
    """The categories that occur, with their colours."""
    task, lane = frame.timeline.slots()
    parts, x = [], float(frame.left)
    for category in np.unique(frame.category[task[np.isin(lane, lanes)]]).tolist():
        name = CATEGORIES[category]
        parts.append(
            f'<rect class="k{category}" x="{x:.0f}" y="{y - 9:.0f}" width="11" height="11"/>'
        )
        parts.append(_text(x + 16, y, name))
        x += 16 + 7 * len(name) + 14
    return parts


def _rect(x: float, y: float, span: float, category: int, words: str) -> str:
    """A rectangle that is seen however short its task is."""
    return (
        f'<rect class="t k{category}" x="{x:.2f}" y="{y}" width="{max(span, 0.5):.2f}" '
        f'height="{_ROW}"><title>{escape(_plain(words))}</title></rect>'
    )


def _text(x: float, y: float, text: str, style: str = "") -> str:
    of = f' class="{style}"' if style else ""
    return f'<text{of} x="{x:.1f}" y="{y:.1f}">{escape(_plain(text))}</text>'


def _plain(text: str) -> str:
    """Text without characters that XML does not allow or that turn the reading direction."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
