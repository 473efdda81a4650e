"""A timeline in the terminal: a row per lane, a column per slice of time.

A column shows the category of task (its kind, or its purpose where that says more) that took most
of that slice, or idle where more than half of it is idle; on a link, whatever crossed it. On a lane
with more tasks than columns that would hide the lesser ones, so there the categories of a column
take turns, in proportion to their time. The percentages at the right are exact. Categories differ
in character and in colour, so that it reads without colour; the number of the microbatch stands at
the head of a task that has room for it. Beyond `MOST_LANES` lanes the busiest are drawn, and one
row shows what share of the others is busy at a time.
"""

from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size

from partita.program import F64
from partita.report.axis import memory_text, tick_text, ticks, time_scale, time_text
from partita.report.lanes import representative, short_names
from partita.report.tasks import CATEGORIES, categories
from partita.timeline import Timeline

MOST_LANES = 40
MOST_MEMORIES = 8

IDLE = "·"
FILL = "█▓▒░◆═»«■▚↓↑╌≈"  # of each category: kinds, then recompute, gather, reduction, ...
# Of the 256 that terminals know; each reads on black and on white.
_COLORS = (33, 35, 37, 172, 133, 167, 136, 136, 102, 62, 132, 166, 167, 95)
_LEVELS = " ▁▂▃▄▅▆▇█"
_DIM = 245
_HELD = 103


def gantt(
    timeline: Timeline,
    width: int = 100,
    color: bool = False,
    lanes: Sequence[int] | None = None,
    legend: bool = True,
    memory: bool = True,
    fold: bool = False,
) -> str:
    """The timeline as text of `width` columns; `lanes` chooses rows by index.

    With `fold` one row stands for all lanes that do the same, and collectives inside the blocks of
    a pipeline are drawn beside their stage.
    """
    whole = timeline
    timeline = representative(timeline).timeline if fold and lanes is None else timeline
    program = timeline.program
    peaks = timeline.peaks()
    shown, others = _choose(timeline, lanes)
    memories = _choose_memories(peaks, _fullest(timeline, peaks)) if memory else []
    labels = [program.lanes[lane].name for lane in shown]
    labels += [f"{len(others):,} more"] if others else []
    labels += [f"{program.memories[m].name} mem" for m in memories]
    label_width = min(max(map(cell_len, map(_clean, labels)), default=0), max(8, width // 4))
    labels = short_names([_clean(label) for label in labels], label_width)
    sides = [*_percents(timeline, shown, others), *_held(timeline, memories, peaks)]
    side_width = max(map(len, sides), default=0)
    columns = _num_columns(timeline, max(10, width - label_width - side_width - 4))
    rows = _lane_rows(timeline, shown, columns, color)
    if others:
        rows.append(_paint(_crowd(timeline, others, columns), _DIM, color))
    rows += [_memory_row(timeline, m, columns, color) for m in memories]

    lines = [_headline(whole)]
    lines += [" " * (label_width + 1) + line for line in _axis(timeline, columns)]
    for index, (label, row, side) in enumerate(zip(labels, rows, sides, strict=True)):
        if index and index == len(rows) - len(memories):
            lines.append(f"{' ' * label_width} ├{'─' * columns}┤")
        lines.append(f"{_fit(label, label_width)} │{row}│ {side}")
    if legend:
        lines += _legend(timeline, shown, others, columns, color, width)
        used = int((peaks > 0).sum())
        if memory and used > len(memories):
            lines.append(f"the {len(memories)} fullest of {used:,} memories are drawn")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _choose(timeline: Timeline, lanes: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """(lanes drawn, lanes summed up): all, those asked for, or the busiest where there are many."""
    if lanes is not None:
        return list(lanes), []
    count = len(timeline.program.lanes)
    if count <= MOST_LANES:
        return list(range(count)), []
    by_use = np.argsort(-timeline.busy(), kind="stable")
    return sorted(by_use[: MOST_LANES // 2].tolist()), sorted(by_use[MOST_LANES // 2 :].tolist())


def _choose_memories(peaks: F64, fullest: Sequence[int]) -> list[int]:
    """The memories that are fullest, in their order; none that nothing is taken from."""
    return sorted([m for m in fullest if peaks[m] > 0][:MOST_MEMORIES])


def _fullest(timeline: Timeline, peaks: F64) -> list[int]:
    """Memories by how full they are."""
    stores = timeline.program.memories
    limits = np.array([m.capacity or peak for m, peak in zip(stores, peaks, strict=True)])
    share = np.divide(peaks, limits, out=np.zeros(len(peaks)), where=limits > 0)
    order: list[int] = np.argsort(-share, kind="stable").tolist()
    return order


def _num_columns(timeline: Timeline, room: int) -> int:
    """All the room; where time is counted in steps, as many columns for each as fit."""
    steps = timeline.makespan
    if timeline.program.time_unit == "s" or not 0 < steps <= room or steps != round(steps):
        return room
    return room // round(steps) * round(steps)


def _headline(timeline: Timeline) -> str:
    program = timeline.program
    tasks, lanes = _count(program.num_tasks, "task"), _count(len(program.lanes), "lane")
    return f"{time_text(program, timeline.makespan)} for {tasks} on {lanes}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _axis(timeline: Timeline, columns: int) -> list[str]:
    """The labels of the ticks and the line they stand on."""
    longest = timeline.makespan
    size, unit = time_scale(timeline.program, longest)
    labels, line = [" "] * (columns + 12), ["─"] * columns
    for moment in ticks(longest / size, max(2, columns // 9)):
        at = min(columns - 1, round(moment * size / longest * columns)) if longest > 0 else 0
        text = tick_text(moment) + (f" {unit}" if unit and moment == 0 else "")
        labels[at : at + len(text)] = text
        line[at] = "┬"
    return [" " + "".join(labels).rstrip(), "┌" + "".join(line) + "┐"]


def _lane_rows(timeline: Timeline, lanes: list[int], columns: int, color: bool) -> list[str]:
    """One drawn row per lane."""
    category = categories(timeline.program)
    shares = timeline.shares(columns, lanes, category, len(CATEGORIES))
    idle = 1.0 - shares.sum(axis=2)
    kinds = np.where(idle > 0.5, -1, shares.argmax(axis=2))
    links = _links(timeline, lanes)
    for row in _crowded(timeline, lanes, columns):
        if row not in links:
            kinds[row] = _take_turns(np.column_stack((shares[row], idle[row].clip(0))))
    for row in links:  # messages are short: whatever crosses is seen
        kinds[row] = np.where(shares[row].max(axis=1) > 0, shares[row].argmax(axis=1), -1)
    texts = [[IDLE if k < 0 else FILL[k] for k in row] for row in kinds.tolist()]
    numbered = np.zeros(kinds.shape, np.bool_)
    for row, first, number in _numbers(timeline, lanes, columns):
        texts[row][first : first + len(number)] = number
        numbered[row, first : first + len(number)] = True
    return [
        _paint_row(text, kind, number, color)
        for text, kind, number in zip(texts, kinds.tolist(), numbered.tolist(), strict=True)
    ]


def _links(timeline: Timeline, lanes: list[int]) -> list[int]:
    """Rows of links and networks."""
    return [row for row, lane in enumerate(lanes) if timeline.program.lanes[lane].kind == "link"]


def _crowded(timeline: Timeline, lanes: list[int], columns: int) -> list[int]:
    """Rows of the lanes that have more tasks than columns."""
    counts = np.bincount(timeline.program.lane_of, minlength=len(timeline.program.lanes))
    return np.flatnonzero(counts[lanes] > columns).tolist()


def _take_turns(shares: F64) -> list[int]:
    """A category for each column, or -1 for idle (the last): of what is there, that owed most."""
    owed = np.zeros(shares.shape[1])
    chosen = []
    for share in shares:
        owed += share
        kind = int(np.where(share > 0, owed, -np.inf).argmax())
        owed[kind] -= 1
        chosen.append(kind if kind < len(CATEGORIES) else -1)
    return chosen


def _numbers(timeline: Timeline, lanes: list[int], columns: int) -> list[tuple[int, int, str]]:
    """(row, column, number) of every microbatch number that has room, with a cell to spare."""
    width = timeline.makespan / columns
    if not width > 0:
        return []
    task, lane = timeline.slots()
    row_of = np.full(len(timeline.program.lanes), -1)
    row_of[lanes] = np.arange(len(lanes))
    first = np.ceil(timeline.start[task] / width - 0.5).astype(np.int64)
    end = np.ceil(timeline.end[task] / width - 0.5).astype(np.int64)
    microbatch = timeline.program.microbatch[task]
    roomy = np.flatnonzero((row_of[lane] >= 0) & (microbatch >= 0) & (end - first >= 2))
    numbers = []
    for slot in roomy.tolist():
        number = str(microbatch[slot])
        if end[slot] - first[slot] > len(number):
            numbers.append((int(row_of[lane[slot]]), int(first[slot]), number))
    return numbers


def _crowd(timeline: Timeline, lanes: list[int], columns: int) -> str:
    """How many of these lanes are busy at a time, as bars."""
    return _bars(timeline.shares(columns, lanes).sum(axis=2).mean(axis=0))


def _memory_row(timeline: Timeline, memory: int, columns: int, color: bool) -> str:
    """The most held in each column as bars of the capacity; `!` where that is exceeded."""
    held = timeline.memory_columns(memory, columns)
    capacity = timeline.program.memories[memory].capacity
    full = capacity or float(held.max())
    bars = list(_bars(held / full if full > 0 else np.zeros(columns)))
    over = held > (np.inf if capacity is None else capacity * (1 + 1e-9))
    text = "".join("!" if x else bar for x, bar in zip(over.tolist(), bars, strict=True))
    return _paint(text, _HELD, color)


def _bars(shares: F64) -> str:
    """Shares from 0 to 1 as characters; anything above 0 is seen."""
    levels = np.ceil(np.clip(shares, 0, 1) * 8 - 1e-9).astype(np.int64)
    return "".join(_LEVELS[level] for level in levels.tolist())


def _percents(timeline: Timeline, lanes: list[int], others: list[int]) -> list[str]:
    used = timeline.utilisation()
    percents = [f"{used[lane]:4.0%} busy" for lane in lanes]
    return [*percents, f"{used[others].mean():4.0%} busy"] if others else percents


def _held(timeline: Timeline, memories: list[int], peaks: F64) -> list[str]:
    program = timeline.program
    texts = []
    for m in memories:
        capacity = program.memories[m].capacity
        limit = "" if capacity is None else f" of {memory_text(program, capacity)}"
        texts.append(f"{memory_text(program, float(peaks[m]))}{limit}")
    return texts


def _legend(
    timeline: Timeline, lanes: list[int], others: list[int], columns: int, color: bool, width: int
) -> list[str]:
    """What the characters mean, those that occur, and what a column is."""
    task, lane = timeline.slots()
    category = categories(timeline.program)
    present = np.unique(category[task[np.isin(lane, lanes)]]).tolist()
    signs = [(FILL[k], _COLORS[k], CATEGORIES[k]) for k in present]
    rows, room = [""], width
    for sign, shade, name in (*signs, (IDLE, _DIM, "idle")):
        if rows[-1] and room < len(name) + 2:
            rows.append("")
            room = width
        rows[-1] += f"{'  ' if rows[-1] else ''}{_paint(sign, shade, color)} {name}"
        room -= len(name) + 4
    notes = [f"a column is {time_text(timeline.program, timeline.makespan / columns)}"]
    if (timeline.program.microbatch >= 0).any():
        notes.append("numbers are microbatches")
    lines = ["", *rows, "; ".join(notes)]
    if _links(timeline, lanes):
        lines.append("links show what crosses them, however short; devices what takes longest")
    if set(_crowded(timeline, lanes, columns)) - set(_links(timeline, lanes)):
        lines.append(
            "lanes with more tasks than columns mix their kinds by the share of time each has"
        )
    if others:
        used = timeline.utilisation()[others]
        lines.append(
            f"the {len(lanes)} busiest lanes are drawn; the others are busy "
            f"{used.min():.0%} to {used.max():.0%}, bars show the share of them that is"
        )
    return lines


def _paint_row(text: list[str], kinds: list[int], numbered: list[bool], color: bool) -> str:
    """A row's cells with colours: numbers on a ground of their kind, fills in its colour."""
    if not color:
        return "".join(text)
    styles: list[tuple[int, bool]] = list(zip(kinds, numbered, strict=True))
    painted, begin = [], 0
    for at in range(1, len(text) + 1):
        if at == len(text) or styles[at] != styles[begin]:
            kind, number = styles[begin]
            shade = _DIM if kind < 0 else _COLORS[kind]
            painted.append(_paint("".join(text[begin:at]), shade, True, ground=number))
            begin = at
    return "".join(painted)


def _paint(text: str, shade: int, color: bool, ground: bool = False) -> str:
    if not color:
        return text
    code = f"1;38;5;231;48;5;{shade}" if ground else f"38;5;{shade}"
    return f"\x1b[{code}m{text}\x1b[0m"


def _clean(name: str) -> str:
    """A name without characters that would move the cursor or change the terminal."""
    return "".join(c if c.isprintable() else "?" for c in name)


def _fit(name: str, width: int) -> str:
    """A name in exactly `width` cells, cut with an ellipsis."""
    name = _clean(name)
    if cell_len(name) <= width:
        return set_cell_size(name, width)
    return set_cell_size(set_cell_size(name, width - 1).rstrip() + "…", width)
