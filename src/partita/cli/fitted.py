"""Answers in the columns that a terminal has: prose wraps, wide columns of tables are cut.

Only what a person sees is fitted: text in a pipe or a file stays as it is, for `grep` and `cut`.
Timelines are drawn at the right width in the first place and are left alone, and so are lines with
a command, which must stay whole to be copied.
"""

import re
import shutil
import sys
import textwrap

NARROWEST = 60
WIDEST = 240
LEAST_CELL = 12  # a column is not cut to less
_LABEL = re.compile(r"\s*\S+(?: \S+){0,2} {2,}")  # `bound by   compute 97%`: words, then a gap
_DRAWN = frozenset("│┌├└")
_COMMAND = re.compile(r"\b(?:partita [a-z-]+ |torchrun )")


def room() -> int | None:
    """The columns of the terminal that answers go to; None where they go somewhere else."""
    if not sys.stdout.isatty():
        return None
    return min(WIDEST, max(NARROWEST, shutil.get_terminal_size((100, 24)).columns))


def fitted(text: str, width: int) -> str:
    """The text in lines of at most `width` characters, as far as its words allow."""
    paragraphs = re.split(r"(\n{2,})", text)
    return "".join(_paragraph(part, width) for part in paragraphs)


def _paragraph(text: str, width: int) -> str:
    lines = text.split("\n")
    if all(len(line) <= width for line in lines) or _DRAWN & set(text):
        return text
    columns = _columns(lines)
    if len(lines) > 1 and len(columns) > 2:
        return "\n".join(_cut_rows(lines, columns, width))
    return "\n".join(wrapped for line in lines for wrapped in _wrapped(line, width))


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width or _COMMAND.search(line):
        return [line]
    label = _LABEL.match(line)
    indent = min(len(label[0]) if label else len(line) - len(line.lstrip()) + 2, width // 3)
    return textwrap.wrap(
        line, width, subsequent_indent=" " * indent, break_long_words=False,
        break_on_hyphens=False, drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip


def _columns(lines: list[str]) -> list[tuple[int, int]]:
    """Begin and end of each column: what two blanks in all lines part."""
    longest = max(map(len, lines))
    blank = [all(at >= len(line) or line[at] == " " for line in lines) for at in range(longest)]
    columns, begin = [], None
    for at in range(longest + 1):
        gap = at == longest or (blank[at] and (at + 1 == longest or blank[at + 1]))
        if gap and begin is not None:
            columns.append((begin, at))
            begin = None
        elif not gap and not blank[min(at, longest - 1)] and begin is None:
            begin = at
    return columns


def _cut_rows(lines: list[str], columns: list[tuple[int, int]], width: int) -> list[str]:
    """Shorten the widest columns, one letter at a time, until rows fit."""
    sizes = [end - begin for begin, end in columns]
    gaps = 2 * (len(columns) - 1)
    words = [i for i, (begin, end) in enumerate(columns) if not _has_numbers(lines, begin, end)]
    while words and sum(sizes) + gaps > width:
        widest = max(words, key=lambda i: sizes[i])
        if sizes[widest] <= LEAST_CELL:
            break
        sizes[widest] -= 1
    rows = []
    for line in lines:
        cells = [line[begin:end].ljust(end - begin) for begin, end in columns]
        short = (_cell(cell, size) for cell, size in zip(cells, sizes, strict=True))
        rows.append("  ".join(short).rstrip())
    return rows


def _has_numbers(lines: list[str], begin: int, end: int) -> bool:
    """Is a column set to the right? A number that is cut says something else."""
    return any(line[begin:end].startswith(" ") and line[begin:end].strip() for line in lines)


def _cell(text: str, size: int) -> str:
    if len(text) <= size:
        return text
    text = text.rstrip()
    return text.ljust(size) if len(text) <= size else f"{text[: size - 1]}…"
