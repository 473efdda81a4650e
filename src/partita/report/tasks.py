"""What tasks are, as pictures, tooltips and traces tell it: a category, some lines, some fields.

All of it is read from the work of a task (`meaning.py`); labels are never taken apart. A task that
says nothing of itself, as those of a bare schedule, has the category of its kind and no more.

A category is what has a colour and a button of its own: a kind, or a purpose that says more than
the kind does (a gather of parameters is a collective, a recomputed op is a forward).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from partita import units
from partita.meaning import COMMUNICATION, Phase, Purpose, Work
from partita.program import Kind, Program
from partita.report.palette import CATEGORY_COLORS

PURPOSES = (
    Purpose.RECOMPUTE,
    Purpose.PARAMETER_GATHER,
    Purpose.GRADIENT_REDUCTION,
    Purpose.CONVERSION,
    Purpose.EXCHANGE,
)  # those with a category of their own, after the kinds
CATEGORIES = (*(kind.words for kind in Kind), *(purpose.words for purpose in PURPOSES))
COLORS = CATEGORY_COLORS
MOST_TENSORS = 4
MOST_RANKS = 16


def categories(program: Program) -> npt.NDArray[np.uint8]:
    """The category of every task, as a number of `CATEGORIES`."""
    numbers = program.kind.astype(np.uint8)
    for place, purpose in enumerate(PURPOSES, start=len(Kind)):
        numbers[list(program.tasks_of(purpose))] = place
    return numbers


def about(program: Program, work: Work) -> tuple[str, ...]:
    """What a work is, in a few lines: purpose, split, collective, bytes, ranks, tensors."""
    lines = []
    if work.purpose in COMMUNICATION and (work.collective or work.group >= 0):
        lines.append(_moved(program, work))
    if work.dims:
        lines.append(f"split: {' x '.join(dim or 'none' for dim in work.dims)}")
    if work.body >= 0:
        lines += _inside(program, work)
    for verb, values in (("reads", work.reads), ("writes", work.writes)):
        if values:
            names = [str(program.values[value]) for value in values[:MOST_TENSORS]]
            more = len(values) - len(names)
            lines.append(f"{verb} {', '.join(names)}" + (f" and {more} more" if more else ""))
    return tuple(lines)


def fields(program: Program, work: Work) -> dict[str, Any]:
    """What a work is, for programs that read a trace; only what it has."""
    told: dict[str, Any] = {"purpose": work.purpose.words}
    if work.phase is not Phase.NONE:
        told["phase"] = work.phase.name.lower()
    if work.op:
        told["op"] = work.op
    if work.dims:
        told["split"] = list(work.dims)
    if work.stage >= 0:
        told["stage"] = work.stage
    if work.peer >= 0:
        told["peer"] = work.peer
    if work.collective:
        told["collective"] = work.collective
    if work.size_bytes:
        told["bytes"] = work.size_bytes
    if work.group >= 0:
        groups = program.groups[work.group]
        told["ranks"] = len(groups[0]) if groups else 0
        told["groups"] = len(groups)
        told["first_group"] = list(groups[0][:MOST_RANKS]) if groups else []
    for name, values in (("reads", work.reads), ("writes", work.writes)):
        if values:
            told[name] = [str(program.values[value]) for value in values]
    return told


def _moved(program: Program, work: Work) -> str:
    """The collective or message in words: how much, among whom."""
    how = work.collective.replace("_", "-") or work.purpose.words
    size = f" of {units.size(work.size_bytes)}" if work.size_bytes else ""
    if work.group < 0 or not program.groups[work.group]:
        return f"{how}{size}"
    groups = program.groups[work.group]
    if work.purpose in (Purpose.SEND, Purpose.RECEIVE):
        who = f" between {len(groups)} pair{'s' * (len(groups) > 1)} of ranks"
    else:
        count = f" in each of {len(groups):,} groups" if len(groups) > 1 else ""
        who = f" among {len(groups[0]):,} ranks{count}"
    return f"{how}{size}{who}"


def _inside(program: Program, work: Work) -> list[str]:
    """How much the block of a pipeline stands for."""
    body = program.bodies[work.body].program
    ops: set[str] = set()
    collectives = 0
    for inner in body.works:
        if inner.phase is work.phase:
            ops |= {inner.op} - {""}
            collectives += bool(inner.collective)
    many = [f"{len(ops):,} ops"] * bool(ops) + [f"{collectives:,} collectives"] * bool(collectives)
    return [f"{' and '.join(many)} inside"] if many else []
