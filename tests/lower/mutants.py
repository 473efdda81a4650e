"""Wrong programs made of right ones: one communication task removed, reordered or retargeted."""

from dataclasses import replace

import numpy as np

from partita.meaning import COMMUNICATION, Purpose
from partita.program import Body

KINDS = ("remove", "reorder", "axis", "group", "value", "kind", "pair", "peer")
OTHER_KIND = {
    "all_reduce": "all_gather", "all_gather": "all_reduce", "reduce_scatter": "all_reduce",
    "all_to_all": "all_gather",
}  # fmt: skip


def mutant(random, program):
    """(what was done, the program with one communication wrong); None where it cannot be done."""
    places = [None, *range(len(program.bodies))]
    random.shuffle(places)
    kinds = random.sample(KINDS, len(KINDS))
    for place in places:
        inside = program if place is None else program.bodies[place].program
        works = [n for n, work in enumerate(inside.works) if _communicates(work)]
        random.shuffle(works)
        for number in works[:3]:
            for kind in kinds:
                changed = MUTATIONS[kind](random, inside, number)
                if changed is None:
                    continue
                work = inside.works[number]
                what = f"{kind} {work.purpose.name} {work.collective}"
                if place is None:
                    return what, changed
                body = program.bodies[place]
                bodies = list(program.bodies)
                bodies[place] = Body(body.stage, changed, body.start, body.end)
                return what, replace(program, bodies=tuple(bodies))
    return None


def _communicates(work):
    return work.purpose in COMMUNICATION and work.body < 0


def _with_work(program, number, work):
    works = (*program.works[:number], work, *program.works[number + 1 :])
    return replace(program, works=works)


def _remove(random, program, number):
    """As if it had been forgotten: what it makes is what it reads."""
    work = program.works[number]
    instead = {}
    if work.purpose is not Purpose.EXCHANGE:
        instead = dict(zip(work.writes, work.reads, strict=False))
    works = tuple(
        replace(other, reads=tuple(instead.get(v, v) for v in other.reads))
        for other in program.works
    )
    values = tuple(
        replace(value, of=instead[value.of]) if instead.get(value.of, k) < k else value
        for k, value in enumerate(program.values)
    )
    column = program.work.copy()
    column[column == number] = -1
    pairs = program.pairs
    if len(pairs):
        gone = np.isin(pairs, np.flatnonzero(program.work == number)).any(axis=1)
        pairs = pairs[~gone]
    kind = program.kind.copy()
    kind[program.work == number] = 8
    return replace(program, works=works, values=values, work=column, pairs=pairs, kind=kind)


def _reorder(random, program, number):
    """It comes after one that reads what it makes, which no longer waits for it."""
    work = program.works[number]
    made = set(work.writes)
    readers = [n for n, w in enumerate(program.works) if n != number and made & set(w.reads)]
    if work.purpose in (Purpose.SEND, Purpose.RECEIVE) or not readers:
        return None
    reader = random.choice(readers)
    mine, its = np.flatnonzero(program.work == number), np.flatnonzero(program.work == reader)
    if not len(mine) or not len(its) or mine.min() > its.max():
        return None
    order = [t for t in range(program.num_tasks) if t not in set(mine.tolist())]
    at = order.index(int(its.max())) + 1
    order[at:at] = mine.tolist()
    keep = np.ones(len(program.wait_on), bool)
    owner = np.repeat(np.arange(program.num_tasks), np.diff(program.wait_start))
    keep[np.isin(owner, its) & np.isin(program.wait_on, mine)] = False
    counts = np.bincount(owner[keep], minlength=program.num_tasks)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return replace(
        program,
        order=np.array(order, np.int32),
        wait_start=starts,
        wait_on=program.wait_on[keep],
        wait_delay=program.wait_delay[keep],
    )


def _axis(random, program, number):
    """Along another axis of the mesh, among its devices."""
    work = program.works[number]
    others = {(w.axis, w.group) for w in program.works if w.axis >= 0 and w.axis != work.axis}
    if work.axis < 0 or not others:
        return None
    axis, group = random.choice(sorted(others))
    return _with_work(program, number, replace(work, axis=axis, group=group))


def _group(random, program, number):
    """Among other devices than those of its axis."""
    work = program.works[number]
    others = [n for n in range(len(program.groups)) if n != work.group]
    if work.axis < 0 or not others:
        return None
    return _with_work(program, number, replace(work, group=random.choice(others)))


def _value(random, program, number):
    """It reads another value of the same shape of layout."""
    work = program.works[number]
    if not work.reads:
        return None
    k = random.randrange(len(work.reads))
    here = program.values[work.reads[k]]
    like = [
        n
        for n, value in enumerate(program.values)
        if n != work.reads[k] and (value.layout, value.flat) == (here.layout, here.flat)
    ]
    if not like:
        return None
    reads = (*work.reads[:k], random.choice(like), *work.reads[k + 1 :])
    return _with_work(program, number, replace(work, reads=reads))


def _kind(random, program, number):
    work = program.works[number]
    if work.collective not in OTHER_KIND or work.axis < 0:
        return None
    return _with_work(program, number, replace(work, collective=OTHER_KIND[work.collective]))


def _pair(random, program, number):
    """The receives of two messages are exchanged."""
    if len(program.pairs) < 2:
        return None
    pairs = program.pairs.copy()
    a, b = random.sample(range(len(pairs)), 2)
    pairs[[a, b], 1] = pairs[[b, a], 1]
    return replace(program, pairs=pairs)


def _peer(random, program, number):
    work = program.works[number]
    stages = sorted({w.stage for w in program.works if w.stage >= 0})
    others = [s for s in stages if s not in (work.peer, work.stage)]
    if work.peer < 0 or not others:
        return None
    return _with_work(program, number, replace(work, stage=random.choice(others)))


MUTATIONS = {
    "remove": _remove, "reorder": _reorder, "axis": _axis, "group": _group, "value": _value,
    "kind": _kind, "pair": _pair, "peer": _peer,
}  # fmt: skip
