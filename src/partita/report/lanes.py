"""Lanes as pictures show them: what is inside blocks, lanes that do the same, names that differ.

A plan's program has a lane per representative rank. Where ranks do the same at the same time, one
row stands for all (`folded`). Blocks of a pipeline hide the collectives of their stage; `unfolded`
puts them on a row of their own beside the stage, at the moments they take inside each block. Pages,
pictures, traces and tables draw `representative(timeline)`, so that they all show the same rows.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.meaning import Phase, Purpose, Work
from partita.program import I32, Body, Lane, Program
from partita.report.tasks import categories
from partita.timeline import Timeline

MOST_INSIDE = 20_000  # collectives inside blocks that are drawn; where there are more, none is
_RANGE = re.compile(r"(\S*?)(\d+) to \1(\d+)")
_TO = "\0"  # between the ends of a range, where no name has it
_NUMBERS = re.compile(rf"(\d+(?:{_TO}\d+)?)")


def alike(timeline: Timeline, lanes: Sequence[int]) -> list[list[int]]:
    """The lanes in groups that run the same blocks and micro-batches at the same moments."""
    program = timeline.program
    category, tasks = categories(program), _tasks_of(timeline)
    groups: dict[object, list[int]] = {}
    for each in lanes:
        mine = tasks[each]
        moments = (timeline.start[mine], timeline.end[mine])
        labels = (category[mine], program.block[mine], program.microbatch[mine])
        key = (program.lanes[each].kind, *(column.tobytes() for column in (*moments, *labels)))
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def _tasks_of(timeline: Timeline) -> list[npt.NDArray[np.int64]]:
    """The tasks of every lane in the order they run."""
    task, lane = timeline.slots()
    order = np.lexsort((task, timeline.end[task], timeline.start[task], lane))
    counts = np.bincount(lane, minlength=len(timeline.program.lanes))
    return np.split(task[order], np.cumsum(counts)[:-1])


def alike_memories(timeline: Timeline, memories: Sequence[int]) -> list[list[int]]:
    """The memories in groups that hold the same at the same moments."""
    groups: dict[object, list[int]] = {}
    for each in memories:
        steps = (column.tobytes() for column in timeline.memory_steps(each))
        key = (timeline.program.memories[each].capacity, *steps)
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def group_name(names: Sequence[str]) -> str:
    """A name for lanes that are alike: `n0.gpu0-3` where they count on, else the first of them.

    `n0.gpu0 to n0.gpu1` and `n0.gpu2 to n0.gpu3` are `n0.gpu0-3` as well, and eight devices on each
    of two nodes `n0-1.gpu0-7`.
    """
    if len(names) == 1:
        return ranged(names[0])
    parts = [_NUMBERS.split(_RANGE.sub(rf"\1\2{_TO}\3", name)) for name in names]
    if len({tuple(own[::2]) for own in parts}) == 1:
        fields = list(zip(*(own[1::2] for own in parts), strict=True))
        merged = [_counted_on(list(dict.fromkeys(field))) for field in fields]
        sizes = [len(set(field)) for field in fields]
        apart = len({tuple(own[1::2]) for own in parts})
        if all(merged) and apart == len(names) == math.prod(sizes):
            texts, numbers = parts[0][::2], [*merged, ""]
            return "".join(f"{text}{number}" for text, number in zip(texts, numbers, strict=True))
    return f"{ranged(names[0])} +{len(names) - 1} alike"


def _counted_on(ranges: Sequence[str]) -> str:
    """One range for several that follow each other; empty if they do not."""
    ends = sorted((own.split(_TO) for own in ranges), key=lambda own: int(own[0]))
    if any(int(before[-1]) + 1 != int(after[0]) for before, after in pairwise(ends)):
        return ""
    first, last = ends[0][0], ends[-1][-1]
    return first if first == last else f"{first}-{last}"


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
class FewerLanes:
    """A timeline in which one lane stands for all that do the same; memories likewise.

    `lanes` and `memories` say which of the whole timeline each of them was, the first of its like.
    """

    timeline: Timeline
    lanes: tuple[int, ...]
    memories: tuple[int, ...]


def representative(timeline: Timeline) -> FewerLanes:
    """What pictures show: lanes that differ, with what is inside the blocks of a pipeline."""
    return folded(unfolded(timeline))


def folded(timeline: Timeline) -> FewerLanes:
    """One lane for all that do the same, and no link that nothing crosses.

    What a task of a lane that is left out waits for, is waited for by and takes of memory goes to
    its like, which starts and ends when it does.
    """
    program = timeline.program
    used = np.bincount(program.lane_of, minlength=len(program.lanes)) > 0
    drawn = [n for n, lane in enumerate(program.lanes) if used[n] or lane.kind != "link"]
    groups = alike(timeline, drawn)
    stores = alike_memories(timeline, range(len(program.memories)))
    few = (tuple(group[0] for group in groups), tuple(store[0] for store in stores))
    names = _different([[program.lanes[one].name for one in group] for group in groups])
    lanes = tuple(
        Lane(name, program.lanes[group[0]].kind) for name, group in zip(names, groups, strict=True)
    )
    held = _different([[program.memories[one].name for one in store] for store in stores])
    memories = tuple(
        replace(program.memories[store[0]], name=name)
        for name, store in zip(held, stores, strict=True)
    )
    if (len(lanes), len(memories)) == (len(program.lanes), len(program.memories)):
        if (lanes, memories) != (program.lanes, program.memories):
            timeline = replace(timeline, program=replace(program, lanes=lanes, memories=memories))
        return FewerLanes(timeline, *few)
    row = np.full(len(program.lanes), -1)
    row[[group[0] for group in groups]] = np.arange(len(groups))
    kept, like = _likes(timeline, groups, row)
    number = (np.cumsum(kept) - 1)[like]  # of each task's like among those that are kept
    owner = np.repeat(np.arange(program.num_tasks), np.diff(program.lane_start))
    here, count = row[program.lane_of] >= 0, int(kept.sum())
    small = replace(
        program,
        lanes=lanes,
        duration=program.duration[kept],
        lane_start=_starts(number[owner[here]], count),
        lane_of=row[program.lane_of[here]].astype(np.int32),
        **_waits(program, kept, number),
        memories=memories,
        **_effects(program, stores, number, count),
        block=program.block[kept],
        kind=program.kind[kept],
        microbatch=program.microbatch[kept],
        pairs=np.unique(number[program.pairs].reshape(-1, 2), axis=0).astype(np.int32),
        work=program.work[kept],
        priority=None,
        order=None,
    )
    return FewerLanes(Timeline(small, timeline.start[kept], timeline.end[kept]), *few)


def _likes(
    timeline: Timeline, groups: Sequence[Sequence[int]], row: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """(which tasks are kept, for each task the kept one that it is like)."""
    program = timeline.program
    owner = np.repeat(np.arange(program.num_tasks), np.diff(program.lane_start))
    kept = np.diff(program.lane_start) == 0
    kept[owner[row[program.lane_of] >= 0]] = True
    like, tasks = np.arange(program.num_tasks), _tasks_of(timeline)
    for group in groups:
        first = tasks[group[0]]
        for other in group[1:]:
            own = tasks[other]
            like[own[~kept[own]]] = first[~kept[own]]
    return kept, like


def _waits(
    program: Program, kept: npt.NDArray[np.bool_], number: npt.NDArray[np.int64]
) -> dict[str, Any]:
    """What the kept tasks wait for: the likes of what they waited for, but never themselves."""
    owner = np.repeat(np.arange(program.num_tasks), np.diff(program.wait_start))
    here = kept[owner] & (number[owner] != number[program.wait_on])
    return {
        "wait_start": _starts(number[owner[here]], int(kept.sum())),
        "wait_on": number[program.wait_on[here]],
        "wait_delay": program.wait_delay[here],
    }


def _effects(
    program: Program, stores: Sequence[Sequence[int]], number: npt.NDArray[np.int64], count: int
) -> dict[str, Any]:
    """What is taken of the memories that are kept, also by likes of tasks that are not."""
    place = np.full(len(program.memories), -1)
    place[[store[0] for store in stores]] = np.arange(len(stores))
    owner = np.repeat(np.arange(program.num_tasks), np.diff(program.effect_start))
    here = place[program.effect_memory] >= 0 if len(owner) else np.zeros(0, np.bool_)
    owner = number[owner[here]]
    order = np.argsort(owner, kind="stable")
    return {
        "effect_start": _starts(owner[order], count),
        "effect_memory": place[program.effect_memory[here]][order],
        "effect_at_start": program.effect_at_start[here][order],
        "effect_at_end": program.effect_at_end[here][order],
    }


def _starts(owner: npt.NDArray[np.int64], count: int) -> I32:
    """Where the entries of each of `count` tasks begin, and where the last ends."""
    return np.append(0, np.cumsum(np.bincount(owner, minlength=count))).astype(np.int32)


def _different(groups: Sequence[Sequence[str]]) -> list[str]:
    """A name for each group, no two the same."""
    names = [group_name(group) for group in groups]
    whole = {name for group in groups for name in group}
    return [
        group[0] if names.count(name) > 1 or (name in whole and name not in group) else name
        for name, group in zip(names, groups, strict=True)
    ]


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
