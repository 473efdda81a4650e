"""A timeline as a page of its own, which the live page shows in a frame."""

from html import escape

from partita.jobs.idle import idle_account
from partita.jobs.memory_parts import MemoryCurves
from partita.report.html_parts import document
from partita.report.live_timeline import (
    TIMELINE_STYLE,
    TimelineExtras,
    live_timeline,
    timeline_script,
)
from partita.timeline import Timeline

_STYLE = f"""
body{{margin:0;padding:0;max-width:none}}
{TIMELINE_STYLE}
""".strip()


def timeline_view(
    title: str, timeline: Timeline, note: str = "", parts: tuple[MemoryCurves, ...] = ()
) -> str:
    """The page: the timeline, with idle time by cause and memory by part, and a note."""
    extras = TimelineExtras(idle_account(timeline), parts, saves=("svg",))
    words = f'<p class="soft">{escape(note)}</p>' if note else ""
    return document(title, _STYLE, f"{live_timeline(timeline, extras)}{words}{timeline_script()}")
