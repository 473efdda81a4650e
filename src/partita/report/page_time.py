"""The part of a plan's page on time: from the bound to the step, and why devices are idle."""

from collections.abc import Callable
from html import escape

from partita import units
from partita.jobs.idle import CAUSES, BoundGap, IdleAccount
from partita.report.html_parts import folded, legend, table
from partita.report.lanes import group_name, ranged
from partita.report.palette import BUSY_COLOR, CAUSE_COLORS, CAUSE_PATTERNS, WORK_COLOR, hatch

Words = Callable[[float], str]  # a time as people read it
MOST_ROWS = 64
WORDS = {
    "dependency": "dependency (bubble)",
    "exposed communication": "exposed communication",
    "memory cap": "memory cap",
    "imbalance": "imbalance",
    "host": "host",
}


def time_section(
    account: IdleAccount, gap: BoundGap, words: Words = units.seconds, among: str = "plan"
) -> str:
    """A bar from nothing over the bound to the step, and a row for every device.

    `among` is what the bound was proven for.
    """
    step = account.step_s or 1.0
    lane, causes = account.busiest, gap.causes
    parts = [
        ("lower bound", gap.bound_s, BUSY_COLOR, 0),
        ("work beyond the bound", gap.work_s, WORK_COLOR, 6),
    ]
    title, who = "From the bound to the step", ""
    if lane is not None:
        who = f" on {escape(ranged(lane.name))}, which has the most to do"
        if not gap.bound_s > 0:  # nothing is proven: all that the device does, and does not
            title, causes = "Where the time goes", lane.seconds
            parts = [("computing", lane.busy_s, BUSY_COLOR, 0)]
    parts += [
        (WORDS[cause], causes[cause], CAUSE_COLORS[cause], CAUSE_PATTERNS[cause])
        for cause in CAUSES
    ]
    bar = "".join(
        f'<i style="width:{seconds / step:.3%};background:{hatch(color, pattern)}" '
        f'title="{escape(name)} {words(seconds)}, {seconds / step:.1%}"></i>'
        for name, seconds, color, pattern in parts
        if seconds > 0
    )
    names = [
        (f"{name} {words(seconds)} ({seconds / step:.1%})", color, pattern)
        for name, seconds, color, pattern in parts
        if seconds > 0.0005 * step
    ]
    missing = step - gap.bound_s
    told = (
        f"{words(missing)} of {words(step)} are above the proven bound{who}: what it computes "
        "beyond it, and idle time by its cause."
    )
    if not gap.bound_s > 0:
        told = f"{words(account.step_s)}{who}: computing, and idle time by its cause."
    elif missing < 0.0005 * step:
        told = f"It is at its proven bound of {words(gap.bound_s)}: no {escape(among)} is faster."
    return (
        f"<h2>{title}</h2>"
        f'<div class="bar" role="img" aria-label="the step by part">{bar}</div>{legend(names)}'
        f'<p class="soft">{told}</p>'
        f"{_devices(account, words)}"
    )


def _devices(account: IdleAccount, words: Words) -> str:
    header = ("row", "busy", *(WORDS[cause] for cause in CAUSES), "step")
    alike: dict[tuple[float, ...], list[str]] = {}
    for lane in account.lanes:
        own = (lane.busy_s, *(lane.seconds[cause] for cause in CAUSES))
        alike.setdefault(own, []).append(lane.name)
    rows = [
        (group_name(names), *map(words, own), words(account.step_s))
        for own, names in list(alike.items())[:MOST_ROWS]
    ]
    mean = account.mean()
    rows.append(
        (
            "mean",
            words(account.mean_busy_s),
            *(words(mean[cause]) for cause in CAUSES),
            words(account.step_s),
        )
    )
    idle = sum(mean.values()) / account.step_s if account.step_s else 0.0
    title = f"idle time by cause, row by row: {idle:.0%} of the step on average"
    left = len(alike) - MOST_ROWS
    more = f'<p class="soft">{left:,} more rows are in the mean.</p>' if left > 0 else ""
    return folded(title, table(header, rows, range(1, len(header)), total=True) + more)
