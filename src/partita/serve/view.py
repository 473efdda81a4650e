"""A timeline as a page of its own, which the live page shows in a frame."""

from html import escape

from partita.jobs.idle import idle_account
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


def timeline_view(title: str, timeline: Timeline, note: str = "") -> str:
    """The page: nothing but the timeline and a note."""
    shown = live_timeline(timeline, TimelineExtras(idle_account(timeline), saves=("svg",)))
    words = f'<p class="soft">{escape(note)}</p>' if note else ""
    return document(title, _STYLE, f"{shown}{words}{timeline_script()}")
