"""One page for any timeline: a schedule, streams, units of one kernel, a placement, a saved file.

Figures, where the time goes, the timeline to look around in, and whatever else there is to show.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

from partita.jobs.idle import bound_gap, idle_account
from partita.report.axis import time_text
from partita.report.html_parts import cards, document, page_script
from partita.report.live_timeline import (
    TIMELINE_STYLE,
    TimelineExtras,
    live_timeline,
    timeline_script,
)
from partita.report.page_time import time_section
from partita.report.small_timeline import SmallTimeline, small_timelines
from partita.timeline import Timeline

STYLE = f"""
.bar{{display:flex;height:18px;border-radius:4px;overflow:hidden;background:var(--line)}}
.bar i{{display:block}}
{TIMELINE_STYLE}
@media print{{.fig{{min-width:0!important}}.timeline canvas{{height:auto!important}}}}
""".strip()


@dataclass(frozen=True)
class TimelineStory:
    """What a page tells of a timeline; `rivals` are drawn under it on one axis."""

    title: str
    about: str
    timeline: Timeline
    figures: Sequence[tuple[str, str, str]] = ()
    lower_bound: float = 0.0  # of the makespan; 0 where nothing is known
    rivals: Sequence[SmallTimeline] = ()
    sections: Sequence[str] = ()  # HTML, each with its heading
    style: str = ""
    by_block: bool = False
    as_in_papers: bool = False  # blocks with their micro-batches, bubbles hatched
    among: str = "order of these tasks"  # what the bound was proven for


def timeline_page(story: TimelineStory) -> str:
    """The page, as text."""
    timeline = story.timeline
    words = partial(time_text, timeline.program)
    idle = idle_account(timeline)
    parts = [f"<h1>{escape(story.title)}</h1>", f'<p class="soft">{escape(story.about)}</p>']
    if story.figures:
        parts.append(cards(story.figures))
    parts.append(time_section(idle, bound_gap(idle, story.lower_bound), words, story.among))
    if story.as_in_papers or story.rivals:
        own = SmallTimeline("this one", words(timeline.makespan), timeline)
        title = "On one axis" if story.rivals else "As papers draw it"
        parts.append(f"<h2>{title}</h2>")
        parts.append(small_timelines(story.title, [own, *story.rivals]))
        note = "Hatched: idle, and how much of the whole that is."
        if any(rival.where for rival in story.rivals):
            note += " Where a placement is named, blocks lie on the devices in another way: the "
            note += "bound above is not theirs."
        parts.append(f'<p class="soft">{note}</p>')
    extras = TimelineExtras(idle, by_block=story.by_block)
    parts += ["<h2>Timeline</h2>", live_timeline(timeline, extras, "timeline")]
    parts += [*story.sections, timeline_script(), page_script()]
    return document(story.title, f"{STYLE}\n{story.style}", "\n".join(parts))
