"""An explained plan in words: where time and memory go, what was not taken, what would help."""

from collections.abc import Sequence
from dataclasses import asdict
from shlex import quote
from typing import Any

from partita import units
from partita.costs.physics import alike, around
from partita.degrees import num_tokens
from partita.jobs.explain_account import GroupAccount, TimeItem, TimePart
from partita.jobs.explain_plan import CLEAR, Explained, WhatIf, WorseAssumption
from partita.plans import Plan
from partita.report.lanes import ranged
from partita.report.summary import (
    INTERVAL,
    MEMORY_HEADER,
    job_line,
    predicted_words,
    step_line,
)

MOST_PARTS = 12
MOST_GROUPS = 16
KINDS = {"compute": "compute", "communication": "exposed communication"}
SMALL = 5e-4  # of a step: what is smaller is added up


def plan_text(told: Explained, placements: dict[str, tuple[str, ...]], plan: Plan) -> str:
    """Everything of an explained plan, in sections."""
    sections = [
        _head(told),
        _time(told),
        _groups(told),
        _memory(told),
        _alternatives(told, plan),
        _helps(told),
        _hangs_on(told),
        _parameters(told, placements),
    ]
    return "\n\n".join(section for section in sections if section)


def _head(told: Explained) -> str:
    simulation = told.simulation
    devices = f"{simulation.num_devices} devices as {simulation.arrangement}"
    machine = f"{simulation.cluster.name}: {devices}"
    verdict = [f"{bound.name} {bound.share:.1%}" for bound in told.bounds if bound.share >= SMALL]
    text = [job_line(simulation), machine, "", step_line(simulation)]
    if told.objective_s != told.step_s:
        every = around(told.objective_s, simulation.spread)
        text.append(f"steady     a batch every {predicted_words(told.objective_s, every)}")
    text.append(f"bound by   {', '.join(verdict[:5]) or 'nothing'}")
    if told.lower_bound_s and told.objective_s:
        gap = 1 - told.lower_bound_s / told.objective_s
        bound = units.seconds(told.lower_bound_s)
        text.append(
            f"optimum    on this cost model no plan of the search's space is below {bound}: "
            f"at most {gap:.1%} from optimal"
        )
    if not simulation.fits:
        text.append("memory     DOES NOT FIT")
    return "\n".join(text)


def _time(told: Explained) -> str:
    rows, rest = [], 0.0
    for number, part in enumerate(_merged(told.parts)):
        if part.share < SMALL or number >= MOST_PARTS:
            rest += part.seconds
            continue
        kind = KINDS.get(part.item.kind, "")
        rows.append(
            (
                f"{part.share:.1%}",
                units.seconds(part.seconds),
                kind,
                part.item.what,
                part.item.where,
            )
        )
    if rest:
        rows.append((f"{rest / told.step_s:.1%}", units.seconds(rest), "", "all else", ""))
    busiest = ranged(told.busiest.name)
    if len(told.groups) > 1:
        busiest += f" ({_stage_names(told, told.busiest)})"
    table = _table(("share", "time", "", "what", "where"), rows, numbers=(0, 1))
    return f"Where the step goes, on the busiest devices: {_plain(busiest)}\n{table}"


def _merged(parts: Sequence[TimePart]) -> list[TimePart]:
    """Largest first, with all waits for others in one row that names the longest."""
    rows = [part for part in parts if part.item.kind != "idle"]
    waits: dict[str, list[TimePart]] = {}
    for part in parts:
        if part.item.kind == "idle":
            waits.setdefault(part.item.what, []).append(part)
    for what, same in waits.items():
        longest = same[0].item.where
        where = f"waiting for {longest}" if longest else ""
        if len(same) > 1:
            where = f"longest for {longest}"
        item = TimeItem("idle", what, where)
        rows.append(TimePart(item, sum(p.seconds for p in same), sum(p.share for p in same)))
    return sorted(rows, key=lambda part: -part.seconds)


def _groups(told: Explained) -> str:
    if len(told.groups) < 2:
        return ""
    rows = []
    for group in told.groups[:MOST_GROUPS]:
        shares = [
            f"{group.seconds(kind) / told.step_s:.1%}" if told.step_s else "-"
            for kind in ("compute", "communication", "update", "idle")
        ]
        mark = "busiest" if group is told.busiest else ""
        rows.append((ranged(group.name), _stage_names(told, group), *shares, mark))
    header = ("devices", "stages", "compute", "exposed communication", "update", "waiting", "")
    table = _table(header, rows, numbers=(2, 3, 4, 5))
    more = len(told.groups) - MOST_GROUPS
    note = f"\n  and {more} groups more (--json has all)" if more > 0 else ""
    bubble = told.simulation.bubble
    messages = max(0.0, bubble - told.waiting)
    split = f"{told.waiting:.1%} waiting for others, {messages:.1%} for messages"
    return f"All groups of devices; the bubble is {bubble:.1%} on average: {split}\n{table}{note}"


def _stage_names(told: Explained, group: GroupAccount) -> str:
    return ", ".join(told.simulation.stages[i].name for i in group.stages)


def _memory(told: Explained) -> str:
    memory = told.memory
    peak = memory.peak_bytes or 1.0
    rows = [
        (f"{value / peak:.1%}", units.size(value), name)
        for name, value in sorted(memory.parts().items(), key=lambda part: -part[1])
        if value
    ]
    table = _table(("share", "size", "what"), rows, numbers=(0, 1))
    used = memory.peak_bytes / memory.capacity_bytes if memory.capacity_bytes else float("inf")
    title = (
        f"What fills the memory, on the fullest devices: {_plain(ranged(memory.name))}, "
        f"{units.size(memory.peak_bytes)} of {units.size(memory.capacity_bytes)} ({used:.0%})"
    )
    return f"{title}\n{table}"


def _alternatives(told: Explained, plan: Plan) -> str:
    if not told.alternatives:
        model, batch = plan.model, plan.model.batch
        words = f"{quote(model.spec)} --cluster {quote(plan.cluster.spec)} --batch {batch}"
        words += "" if model.training else " --infer"
        return (
            "What was not taken: the plan file names nothing. To see what else there is:\n"
            f"  partita compare {words}"
        )
    spread = told.simulation.spread
    rows = [
        (
            other.name,
            other.arrangement,
            units.seconds(other.objective_s),
            _change(other.objective_s / told.objective_s - 1 if told.objective_s else 0.0)
            + (" equal" if alike(other.objective_s, told.objective_s, spread) else ""),
            units.size(other.peak_memory_bytes),
            other.why,
        )
        for other in told.alternatives
    ]
    what = "step" if told.objective_s == told.step_s else "steady state"
    header = ("found by", "plan", what, "", MEMORY_HEADER, "what stood against it")
    table = _table(header, rows, numbers=(2, 3, 4))
    return f"What was not taken, and why (equal: inside the {INTERVAL})\n{table}"


def _helps(told: Explained) -> str:
    told_rows = [what for what in told.what_ifs if abs(what.gain) > CLEAR]
    nothing = [what.change for what in told.what_ifs if abs(what.gain) <= CLEAR]
    rows = [_help_row(what, told.step_s) for what in told_rows]
    lines = ["What would help most: this plan simulated with one thing changed"]
    if rows:
        lines.append(_table(("change", "step", "", ""), rows, numbers=(2,)))
    if nothing:
        lines.append(f"  no difference: {'; '.join(nothing)}")
    lines += [f"  not tried: {left.change}: {_plain(left.why)}" for left in told.untried]
    lines += [
        f"  pad the {rows.size:,} of {_plain(rows.op)} to {rows.padded:,}: products that take "
        f"{units.seconds(rows.seconds)} would be fed 16 bytes at a time"
        for rows in told.odd_rows
    ]
    return "\n".join(lines)


def _hangs_on(told: Explained) -> str:
    """What becomes of the plan where an assumption is worse, beside the named strategies."""
    rivals = told.sensitivity.rivals
    if not told.sensitivity.shifts and not told.sensitivity.untried:
        return ""
    rows = [
        (
            shift.assumption,
            units.seconds(shift.step_s),
            _change(shift.step_s / told.step_s - 1 if told.step_s else 0.0),
            _winner(shift),
        )
        for shift in told.sensitivity.shifts
    ]
    names = ", ".join(f"{_plain(name)} {units.seconds(step_s)}" for name, _, step_s in rivals)
    lines = [f"What the choice hangs on: one assumption worse, against {names or 'nothing else'}"]
    if rows:
        lines.append(_table(("assumption", "step", "", "fastest then"), rows, numbers=(1, 2)))
    lines += [f"  not tried: {_plain(one)}: no time left" for one in told.sensitivity.untried]
    return "\n".join(lines)


def _winner(shift: WorseAssumption) -> str:
    if not shift.winner:
        return "this plan"
    equal = ", equal within the interval" if shift.is_equal else ""
    return f"{shift.winner} {units.seconds(shift.winner_s)}{equal}"


def _help_row(what: WhatIf, step_s: float) -> tuple[str, ...]:
    steps = f"{units.seconds(step_s)} -> {units.seconds(what.step_s)}"
    return what.change, steps, _change(-what.gain), what.note


def _change(part: float) -> str:
    return f"{part:+.1%}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    """An indented table; what plan files say is shown as plain text."""
    text = units.table(header, [[_plain(cell) for cell in row] for row in rows], numbers)
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _parameters(told: Explained, placements: dict[str, tuple[str, ...]]) -> str:
    stages = told.simulation.stages
    most = max(stages, key=lambda stage: len(stage.mesh.axes))
    axes = [str(axis) for axis in most.mesh.axes]
    if len(stages) > 1:
        axes = [f"axis {i}" for i in range(len(axes))]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, layout in placements.items():
        groups.setdefault(layout, []).append(name)
    rows = [
        (
            *layout,
            *("",) * (len(axes) - len(layout)),
            f"{len(names)}",
            ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
        )
        for layout, names in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    if not rows:
        return ""
    table = _table((*axes, "count", "parameters"), rows, numbers=(len(axes),))
    return f"How the parameters lie (DTensor placements)\n{table}"


def plan_json(told: Explained) -> dict[str, Any]:
    """The same for programs, with every group of devices."""
    simulation = told.simulation
    return {
        "model": simulation.workload.spec,
        "cluster": simulation.cluster.name,
        "step_s": told.step_s,
        "objective_s": told.objective_s,
        "lower_bound_s": told.lower_bound_s,
        "fits": simulation.fits,
        "mfu": simulation.mfu,
        "tokens": num_tokens(simulation.workload.graph) or 0,
        "bounds_s": {bound.name: bound.seconds for bound in told.bounds},
        "busiest": told.busiest.name,
        "bubble": told.simulation.bubble,
        "waiting": told.waiting,
        "groups": [
            {
                "devices": group.name,
                "stages": [simulation.stages[i].name for i in group.stages],
                "busy_s": group.busy_s,
                "parts": [
                    {**asdict(item), "seconds": seconds} for item, seconds in group.shares.items()
                ],
            }
            for group in told.groups
        ],
        "memory": {
            "devices": told.memory.name,
            "peak_bytes": told.memory.peak_bytes,
            "capacity_bytes": told.memory.capacity_bytes,
            "parts_bytes": told.memory.parts(),
        },
        "alternatives": [asdict(other) for other in told.alternatives],
        "what_ifs": [asdict(what) for what in told.what_ifs],
        "untried": [asdict(left) for left in told.untried],
        "sensitivity": asdict(told.sensitivity),
        "odd_rows": [{**asdict(rows), "padded": rows.padded} for rows in told.odd_rows],
    }
