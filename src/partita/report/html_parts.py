"""What self-contained pages share: a frame, colours for light and dark, cards, tables.

Every text is escaped here, so that whatever a model or machine is called shows as text.
"""

from collections.abc import Sequence
from html import escape

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#656d76;--line:#d0d7de;--card:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#8d96a0;--line:#30363d;--card:#161b22}
body{background:#0d1117}}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;color:var(--ink);
max-width:1100px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.soft{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:.8rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.7rem .9rem}
.card b{display:block;font-size:1.35rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
""".strip()


def document(title: str, style: str, body: str) -> str:
    """A page of that body; its style comes after the common one."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · partita</title><style>{STYLE}\n{style}</style></head>"
        f"<body>\n{body}\n</body></html>\n"
    )


def cards(figures: Sequence[tuple[str, str, str]]) -> str:
    """A card for each name, value and note."""
    inner = "".join(
        f'<div class="card"><span class="soft">{escape(name)}</span><b>{escape(value)}</b>'
        f'<span class="soft">{escape(note)}</span></div>'
        for name, value, note in figures
    )
    return f'<div class="cards">{inner}</div>'


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
