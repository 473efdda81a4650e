"""What self-contained pages share: a frame, colours for light and dark, cards, tables, legends.

Every text is escaped here, so that whatever a model or machine is called shows as text.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources

from partita.report.palette import DARK, LIGHT, hatch

_VARIABLES = "".join(f"--{name}:{color};" for name, color in LIGHT.items())
_DARK = "".join(f"--{name}:{color};" for name, color in DARK.items())
STYLE = (
    f":root{{color-scheme:light dark;{_VARIABLES}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}\n"
    f":root.paper{{{_VARIABLES}}}\n"
    + """
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;color:var(--ink);
background:var(--ground);max-width:1100px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2rem 0 .5rem}
h3{font-size:.98rem;margin:1.2rem 0 .4rem}
.soft{color:var(--soft)}p{overflow-wrap:anywhere}
a{color:var(--focus)}:focus-visible{outline:2px solid var(--focus);outline-offset:2px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:.8rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.7rem .9rem;
overflow-wrap:anywhere}
.card b{display:block;font-size:1.35rem}
::placeholder{color:var(--soft);opacity:1}
.range{display:block;width:100%;height:10px;margin:.1rem 0 .25rem}.range path{
vector-effect:non-scaling-stroke}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.fold>summary{cursor:pointer;margin:1rem 0 .4rem}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.88rem;padding:0;margin:.4rem 0;
list-style:none}
.legend i{display:inline-block;width:1.1em;height:.85em;border-radius:2px;margin-right:.45em;
vertical-align:-.05em}
.fig{display:block;width:100%;height:auto}
.fig text{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:var(--ink)}
.fig .s{fill:var(--soft)}.fig .m{text-anchor:middle}.fig .e{text-anchor:end}
.picked{list-style:none;padding:.5rem .9rem;margin:.4rem 0;background:var(--card);
border:1px solid var(--line);border-radius:8px;overflow-wrap:anywhere}
.pick{cursor:pointer}.pick[aria-pressed=true] *{stroke:var(--ink);stroke-width:3}
.pick:focus-visible *{stroke:var(--focus);stroke-width:3}
.fig .g{stroke:var(--line)}.fig .a{stroke:var(--soft);fill:none}.fig .w{fill:#fff}
@media(max-width:600px){body{margin:1rem auto;padding:0 .7rem}.cards{grid-template-columns:
repeat(auto-fit,minmax(145px,1fr));gap:.5rem}.card{padding:.5rem .6rem}}
@media print{html{font-size:11px}body{max-width:none;margin:0;font-size:1rem}
.tools .screen,.tip,.screen,[data-all],[data-critical]{display:none!important}
h2,h3{break-after:avoid}.card,.fig,tr,figure{break-inside:avoid}*{print-color-adjust:exact;
-webkit-print-color-adjust:exact}
th,td{white-space:normal;overflow-wrap:anywhere;padding:.2rem .35rem}.timeline{break-inside:avoid}
.scroll{overflow:visible}img{max-width:100%;height:auto}@page{size:A4;margin:14mm}}
""".strip()
)


def document(title: str, style: str, body: str) -> str:
    """A page of that body; its style comes after the common one. It may load nothing."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
        "frame-src 'self'; base-uri 'none'; form-action 'none'\">"
        f"<title>{escape(title)} · partita</title><style>{STYLE}\n{style}</style></head>"
        f"<body>\n{body}\n</body></html>\n"
    )


def cards(
    figures: Sequence[tuple[str, str, str]],
    ranges: Mapping[str, tuple[float, float, float]] | None = None,
) -> str:
    """A card for each name, value and note; with an error bar where (value, low, high) is known."""
    known = ranges or {}
    inner = "".join(
        f'<div class="card"><span class="soft">{escape(name)}</span><b>{escape(value)}</b>'
        f"{error_bar(*known[name]) if name in known else ''}"
        f'<span class="soft">{escape(note)}</span></div>'
        for name, value, note in figures
    )
    return f'<div class="cards">{inner}</div>'


def error_bar(value: float, low: float, high: float) -> str:
    """A mark on a line from zero, with a whisker over the interval."""
    most = max(high, value) * 1.08 or 1.0
    at, left, right = (100 * part / most for part in (value, low, high))
    return (
        '<svg class="range" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        '<path d="M0 5H100" stroke="var(--line)" stroke-width="1"/>'
        f'<path d="M{left:.1f} 5H{right:.1f}M{left:.1f} 2V8M{right:.1f} 2V8" stroke="var(--ink)"/>'
        f'<path d="M{at:.1f} 0V10" stroke="var(--focus)" stroke-width="2.4"/></svg>'
    )


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Sequence[int] = (),
    *,
    total: bool = False,
) -> str:
    """A table; the columns in `numbers` are set to the right, with `total` the last row is bold."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in numbers else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    lines = [f"<tr>{cells('td', row)}</tr>" for row in rows]
    if total and lines:
        lines[-1] = lines[-1].replace("<tr>", '<tr class="total">', 1)
    head = f"<tr>{cells('th', header)}</tr>"
    return f'<div class="scroll"><table>{head}{"".join(lines)}</table></div>'


def folded(summary: str, content: str, *, is_open: bool = False) -> str:
    """Something that is shown when its line is chosen."""
    opened = " open" if is_open else ""
    return f'<details class="fold"{opened}><summary>{escape(summary)}</summary>{content}</details>'


def legend(entries: Sequence[tuple[str, str, int]]) -> str:
    """A name for each colour and pattern."""
    items = "".join(
        f'<li><i style="background:{hatch(color, pattern)}"></i>{escape(name)}</li>'
        for name, color, pattern in entries
    )
    return f'<ul class="legend">{items}</ul>'


def page_script() -> str:
    """What a page answers to beside its timelines."""
    text = resources.files("partita.report").joinpath("assets/page.js").read_text("utf-8")
    return f"<script>\n{text}</script>"


def embedded(value: object) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
