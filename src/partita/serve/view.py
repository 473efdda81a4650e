"""A timeline as a page of its own, which the live page shows in a frame."""

from html import escape

from partita.report.html_parts import document
from partita.report.live_timeline import live_timeline, timeline_colors, timeline_script
from partita.timeline import Timeline

_STYLE = """
body{margin:0;padding:0;max-width:none}
.timeline{position:relative;--held:#8250df}
.timeline canvas{display:block;width:100%;touch-action:pan-y}
.timeline canvas:focus-visible{outline:2px solid var(--k0);outline-offset:-2px}
.tools{display:flex;flex-wrap:wrap;gap:.4rem;align-items:center;margin-bottom:.5rem;
font-size:.85rem}
.tools button{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:.15rem .55rem;cursor:pointer}
.tools button[aria-pressed=false]{text-decoration:line-through}
.tools [data-critical][aria-pressed]{text-decoration:none}
.tools [data-critical][aria-pressed=true]{border-color:var(--ink)}
.tools i{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.4em}
.tip{position:absolute;pointer-events:none;background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:.3rem .6rem;font-size:.82rem;max-width:30rem;overflow-wrap:anywhere;
box-shadow:0 2px 8px #0003;z-index:1}
.tip div:first-child{font-weight:600}
""".strip()


def timeline_view(title: str, timeline: Timeline, note: str = "") -> str:
    """The page: nothing but the timeline and a note."""
    style = f"{_STYLE}\n.timeline{{{timeline_colors()}}}"
    words = f'<p class="soft">{escape(note)}</p>' if note else ""
    return document(title, style, f"{live_timeline(timeline)}{words}{timeline_script()}")
