"""What was tried beside the plan that is answered: what stood against it, how it would run."""

from collections.abc import Iterable, Sequence

import numpy as np

from partita import units
from partita.jobs.simulate import Simulation
from partita.plans import Alternative
from partita.program import Kind
from partita.timeline import WHOLE, LaneSketch, Span, Timeline

MOST_TASKS = 120  # of a lane that a sketch tells one by one; of more, columns of time
COLUMNS = 200
MOST_DEVICES = 4  # lanes of devices that differ, from first to last
MOST_LOOKED_AT = 64


def alternatives(
    others: Iterable[tuple[str, Simulation, bool, float | None]], best: Simulation, most: int
) -> tuple[Alternative, ...]:
    """The first of (name, simulation, does it fit, steady state) that are not the best itself."""
    listed: dict[Alternative, Timeline] = {}
    for name, other, fits, interval_s in others:
        if other.stages == best.stages and other.schedule == best.schedule:
            continue
        told = Alternative(
            name, other.arrangement, other.step_s, other.fullest[0], rejection(other, fits, best),
            interval_s,
        )  # fmt: skip
        listed.setdefault(told, other.timeline)
    first = list(listed.items())[:most]
    return tuple(
        Alternative(
            one.name, one.arrangement, one.step_s, one.peak_memory_bytes, one.why, one.interval_s,
            sketch(timeline),
        )
        for one, timeline in first
    )  # fmt: skip


def rejection(other: Simulation, fits: bool, best: Simulation) -> str:
    """What stands against a plan: memory, or what it loses most by."""
    if not fits:
        peak, capacity = other.fullest
        return f"needs {units.size(peak)} of {units.size(capacity)} per device"
    lost = {
        "longer in computing": other.compute_s - best.compute_s,
        "longer idle": other.bubble * other.step_s - best.bubble * best.step_s,
    }
    if not other.is_pipelined and not best.is_pipelined:  # else stages wait for each other, too
        lost["longer in waiting for communication"] = other.exposed_s - best.exposed_s
    what, seconds = max(lost.items(), key=lambda item: item[1])
    if other.step_s <= best.step_s * (1 + 1e-6) or seconds <= 0:
        return "no faster"
    return f"{units.seconds(seconds)} {what}"


def sketch(timeline: Timeline) -> tuple[LaneSketch, ...]:
    """Lanes of devices that differ, a few of them, and the link that is used most."""
    lanes = timeline.program.lanes
    if not timeline.makespan > 0:
        return ()
    alike: dict[str, list[int]] = {}
    for lane in [n for n, each in enumerate(lanes) if each.kind == "device"][:MOST_LOOKED_AT]:
        alike.setdefault(_spans(timeline, lane), []).append(lane)
    rows = [LaneSketch(lanes[some[0]].name, text, len(some)) for text, some in alike.items()]
    busy = timeline.busy()
    links = [n for n, each in enumerate(lanes) if each.kind == "link" and busy[n] > 0]
    most = max(links, key=lambda lane: busy[lane], default=None)
    used = [] if most is None else [LaneSketch(lanes[most].name, _spans(timeline, most))]
    return (*_some(rows), *used)


def _some(rows: Sequence[LaneSketch]) -> Sequence[LaneSketch]:
    """As many as are drawn, the first and the last among them."""
    if len(rows) <= MOST_DEVICES:
        return rows
    return [rows[i * (len(rows) - 1) // (MOST_DEVICES - 1)] for i in range(MOST_DEVICES)]


def _spans(timeline: Timeline, lane: int) -> str:
    tasks = timeline.lane_tasks(lane).tolist()
    few = len(tasks) <= MOST_TASKS
    return " ".join(map(str, _exact(timeline, tasks) if few else _columns(timeline, lane)))


def _exact(timeline: Timeline, tasks: Sequence[int]) -> list[Span]:
    """Task by task; what is shorter than half a thousandth is not seen."""
    program, scale = timeline.program, WHOLE / timeline.makespan
    spans: list[Span] = []
    now = 0
    for task in tasks:
        begin = max(now, round(float(timeline.start[task]) * scale))
        end = min(WHOLE, round(float(timeline.end[task]) * scale))
        if end <= begin:
            continue
        if begin > now:
            spans.append(Span(now, begin))
        letter = Kind(int(program.kind[task])).letter
        spans.append(Span(begin, end, letter, int(program.microbatch[task])))
        now = end
    return [*spans, Span(now, WHOLE)] if now < WHOLE else spans


def _columns(timeline: Timeline, lane: int) -> list[Span]:
    """Column by column, what the lane does most of each."""
    shares = timeline.shares(COLUMNS, [lane])[0]
    most = np.where(shares.sum(axis=1) < 0.5, -1, shares.argmax(axis=1)).tolist()
    spans: list[Span] = []
    for column, number in enumerate(most):
        letter = "" if number < 0 else Kind(number).letter
        begin, end = column * WHOLE // COLUMNS, (column + 1) * WHOLE // COLUMNS
        if spans and spans[-1].letter == letter:
            begin = spans.pop().begin
        spans.append(Span(begin, end, letter))
    return spans
