"""A timeline to look around in: a canvas that zooms, with everything it shows packed beside it.

Columns travel as base64 of little-endian arrays inside one JSON element, about 45 bytes per task:
50,000 tasks make 2.5 MB. What a task is (purpose, bytes, ranks, tensors) is told once for all tasks
that share a work. Names are JSON text that the script only ever sets as text; the
characters that could end the element are escaped. Nothing is loaded from anywhere.
"""

import base64
import json
from html import escape
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.report.tasks import CATEGORIES, COLORS, about, categories
from partita.timeline import Timeline

MOST_LANES = 256
MOST_STEPS = 20_000  # of one memory's curve


def timeline_script() -> str:
    """The script that brings every timeline of a page to life; once per page."""
    text = resources.files("partita.report").joinpath("assets/timeline.js").read_text("utf-8")
    return f"<script>\n{text}</script>"


def timeline_colors() -> str:
    """The colours of the categories as variables of a style sheet."""
    return "".join(f"--k{place}:{color};" for place, color in enumerate(COLORS))


def live_timeline(timeline: Timeline) -> str:
    """The timeline as an element; `timeline_script` must follow it on the page."""
    drawn, _ = timeline.slots()
    present = np.unique(categories(timeline.program)[drawn]).tolist()
    buttons = "".join(
        f'<button type="button" data-kind="{category}" aria-pressed="true">'
        f'<i style="background:var(--k{category})"></i>{escape(CATEGORIES[category])}</button>'
        for category in present
    )
    left_out = len(timeline.program.lanes) - MOST_LANES
    more = f'<p class="soft">{left_out:,} more lanes are not drawn.</p>' if left_out > 0 else ""
    return (
        '<div class="timeline">'
        f'<div class="tools">{buttons}'
        '<button type="button" data-critical aria-pressed="false">critical path</button>'
        '<button type="button" data-all>whole step</button>'
        '<span class="soft">wheel or + and − zoom, drag or ← → move, hover tells more</span></div>'
        '<canvas tabindex="0" role="img" aria-label="timeline of one step"></canvas>'
        f'<div class="tip" hidden></div>{more}'
        f'<script type="application/json">{_embedded(_packed(timeline))}</script></div>'
    )


def _embedded(value: object) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _packed(timeline: Timeline) -> dict[str, Any]:
    program = timeline.program
    lanes = program.lanes[:MOST_LANES]
    ordered = [timeline.lane_tasks(lane) for lane in range(len(lanes))]
    places = np.cumsum([0, *(len(tasks) for tasks in ordered)])
    slots = np.concatenate(ordered) if ordered else np.empty(0, np.int64)
    return {
        "unit": program.time_unit,
        "makespan": timeline.makespan,
        "lanes": [lane.name for lane in lanes],
        "kinds": list(CATEGORIES),
        "works": [list(about(program, work)) for work in program.works],
        "blocks": list(program.blocks),
        "start": _base64(timeline.start, "<f8"),
        "end": _base64(timeline.end, "<f8"),
        "kind": _base64(categories(program), "<u1"),
        "work": _base64(program.work, "<i4"),
        "block": _base64(program.block, "<i4"),
        "microbatch": _base64(program.microbatch, "<i4"),
        "slot_task": _base64(slots, "<i4"),
        "slot_from": _base64(places, "<i4"),
        "critical": _base64(np.array(timeline.critical_path(), np.int32), "<i4"),
        "memories": [_memory(timeline, i) for i in range(min(len(program.memories), MOST_LANES))],
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
        "name": memory.name,
        "capacity": memory.capacity,
        "peak": peak,
        "times": _base64(times, "<f8"),
        "amounts": _base64(amounts, "<f8"),
    }


def _base64(column: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(column, dtype).tobytes()).decode()
