"""Lanes as pictures show them: what is inside blocks, lanes that do the same, names that differ.

A plan's program has a lane per representative rank. Where ranks do the same at the same time, one
row stands for all. Blocks of a pipeline hide the collectives of their stage; `unfolded` puts them
on a row of their own beside the stage, at the moments they take inside each block.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from partita.meaning import Phase, Purpose, Work
from partita.program import I32, Body, Lane
from partita.report.tasks import categories
from partita.timeline import Timeline

MOST_INSIDE = 20_000  # collectives inside blocks that are drawn; where there are more, none is
_RANGE = re.compile(r"(\S*?)(\d+) to \1(\d+)")


def alike(timeline: Timeline, lanes: Sequence[int]) -> list[list[int]]:
    """The lanes in groups that run the same kinds of tasks at the same moments."""
    task, lane = timeline.slots()
    category = categories(timeline.program)
    groups: dict[object, list[int]] = {}
    for each in lanes:
        mine = task[lane == each]
        columns = (timeline.start[mine], timeline.end[mine], category[mine])
        key = (timeline.program.lanes[each].kind, *(column.tobytes() for column in columns))
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def alike_memories(timeline: Timeline, memories: Sequence[int]) -> list[list[int]]:
    """The memories in groups that hold the same at the same moments."""
    groups: dict[object, list[int]] = {}
    for each in memories:
        steps = (column.tobytes() for column in timeline.memory_steps(each))
        key = (timeline.program.memories[each].capacity, *steps)
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def group_name(names: Sequence[str]) -> str:
    """A name for lanes that are alike: the first, and how many do the same."""
    return names[0] if len(names) == 1 else f"{names[0]} +{len(names) - 1} alike"


def short_names(names: Sequence[str], most: int) -> list[str]:
    """Names of at most so many letters, cut where they are longer; different ones stay different.

    `n0.gpu0 to n0.gpu3` becomes `n0.gpu0-3` first; then the middle is left out, not the end.
    """
    if all(len(name) <= most for name in names):
        return list(names)
    whole = [ranged(name) for name in names]
    most = max(most, 4)
    cut = [_cut(name, most) for name in whole]
    told: dict[str, str] = {}
    for index, (name, text) in enumerate(zip(whole, cut, strict=True)):
        if told.setdefault(text, name) != name:  # as good as cut in the same place
            number = f"#{index}"
            cut[index] = text[: most - len(number)] + number
    return cut


def ranged(name: str) -> str:
    """A name without repeating itself: `n0.gpu0 to n0.gpu3` is `n0.gpu0-3`."""
    return _RANGE.sub(r"\1\2-\3", name)


def _cut(name: str, most: int) -> str:
    if len(name) <= most:
        return name
    head = (most - 1) // 2
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"


@dataclass(frozen=True, slots=True)
class _PhaseLanes:
    """The collectives of one phase of a body, from the phase's begin on."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    kinds: tuple[int, ...]
    works: tuple[Work, ...]
    names: tuple[str, ...]


def unfolded(timeline: Timeline) -> Timeline:
    """The timeline with the collectives inside its blocks on lanes of their own."""
    program = timeline.program
    known = [_phases(body) for body in program.bodies]
    blocks: list[tuple[int, int, _PhaseLanes]] = []  # task, lane, what is inside
    for task, number in enumerate(program.work.tolist()):
        work = program.works[number] if number >= 0 else None
        lanes = program.lanes_of(task)
        if work is not None and work.body >= 0 and work.peer < 0 and lanes:
            inside = known[work.body].get(work.phase)
            if inside is not None and inside.starts:
                blocks.append((task, int(lanes[0]), inside))
    count = sum(len(inside.starts) for *_, inside in blocks)
    return timeline if not 0 < count <= MOST_INSIDE else _with(timeline, blocks)


def _phases(body: Body) -> dict[Phase, _PhaseLanes]:
    """What crosses the busiest link of a stage in each phase; a milestone ends a phase."""
    program = body.program
    task, lane = Timeline(program, body.start, body.end).slots()
    is_link = np.array([each.kind == "link" for each in program.lanes], np.bool_)
    spent = np.bincount(lane, weights=(body.end - body.start)[task], minlength=len(is_link))
    if not is_link.any() or not spent[is_link].any():
        return {}
    busiest = int(np.where(is_link, spent, -1.0).argmax())
    mine = task[lane == busiest]
    mine = mine[np.argsort(body.start[mine], kind="stable")]
    phases: dict[Phase, _PhaseLanes] = {}
    before = 0.0
    for milestone in program.tasks_of(Purpose.OTHER):
        ending, until = program.work_of(milestone), float(body.end[milestone])
        own = mine[(body.start[mine] >= before - 1e-12) & (body.end[mine] <= until + 1e-12)]
        own = own[body.end[own] > body.start[own]]
        works = tuple(_alone(program.work_of(each)) for each in own.tolist())
        if ending is not None:
            phases[ending.phase] = _PhaseLanes(
                tuple((body.start[own] - before).tolist()),
                tuple((body.end[own] - before).tolist()),
                tuple(program.kind[own].tolist()),
                works,
                tuple(program.blocks[number] for number in program.block[own].tolist()),
            )
        before = until
    return phases


def _alone(work: Work | None) -> Work:
    """A work without numbers of values and groups, which are those of its own program."""
    assert work is not None, "tasks inside blocks say what they are"
    return replace(work, reads=(), writes=(), group=-1)


def _with(timeline: Timeline, blocks: list[tuple[int, int, _PhaseLanes]]) -> Timeline:
    program = timeline.program
    nets = {
        lane: len(program.lanes) + i for i, lane in enumerate(sorted({b for _, b, _ in blocks}))
    }
    lanes = [Lane(f"{program.lanes[lane].name} inside", "link") for lane in nets]
    works = {work: index for index, work in enumerate(program.works)}
    names = {name: index for index, name in enumerate(program.blocks)}
    starts: list[float] = []
    ends: list[float] = []
    columns: list[tuple[int, int, int, int, int]] = []  # lane, kind, micro-batch, work, block
    for task, lane, inside in blocks:
        begin, microbatch = float(timeline.start[task]), int(program.microbatch[task])
        starts += [begin + start for start in inside.starts]
        ends += [min(begin + end, timeline.makespan) for end in inside.ends]
        for kind, work, name in zip(inside.kinds, inside.works, inside.names, strict=True):
            number = works.setdefault(work, len(works))
            block = names.setdefault(name, len(names))
            columns.append((nets[lane], kind, microbatch, number, block))
    lane_of, kinds, microbatches, numbers, block_of = zip(*columns, strict=True)
    start, end = np.append(timeline.start, starts), np.append(timeline.end, ends)
    count = len(starts)

    def longer(column: I32) -> I32:
        """Offsets of lists that the new tasks have none of."""
        return np.append(column, np.full(count, column[-1] if len(column) else 0, column.dtype))

    drawn = replace(
        program,
        lanes=(*program.lanes, *lanes),
        duration=np.append(program.duration, np.subtract(ends, starts).clip(0)),
        lane_start=np.append(program.lane_start, program.lane_start[-1] + 1 + np.arange(count)),
        lane_of=np.append(program.lane_of, lane_of),
        wait_start=longer(program.wait_start),
        effect_start=longer(program.effect_start),
        blocks=tuple(names),
        block=np.append(program.block, block_of),
        kind=np.append(program.kind, kinds).astype(np.int8),
        microbatch=np.append(program.microbatch, microbatches),
        work=np.append(program.work, numbers),
        works=tuple(works),
        priority=None,
        order=None,
    )
    return Timeline(drawn, start, end)
