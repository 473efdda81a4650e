"""Cuts for groups of devices that take turns with several stages each.

Memory is a group's: all its stages lie there together. So cuts are made for speed first, and stages
are then run in thriftier ways where a group does not fit (`thrift`); where that is not enough, cuts
are made for a price on bytes. How cuts are judged depends on the order:

    looped  stages 0, 1, ... p - 1, 0, 1, ...: all groups work on one round of p stages at a time,
            so that a micro-batch takes the sum over rounds of the round's longest (`rounds`)
    wave    stages 0, 1, ... p - 1, p - 1, ... 0: each group has its own stages one after the other,
            so that the busiest group sets the pace; segments move from its stages to those of
            others, all stages between moving along, while that makes the busiest less busy
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partita.search.joint.cuts import Cuts, Floats, Ints, Stretches, cuts_with_slack
from partita.search.joint.rounds import round_ends
from partita.search.joint.thrift import Item, menu_of, thrifty

PRICES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 2.0, 8.0)  # of a byte, in seconds per byte of all
LONGER = 4  # times the average: no stage has more segments
MOVED = (1, 2)  # segments at a time: blocks are often two of them
PACE = 0.1  # how much the longest of a group's stages counts beside all of them
NOTHING = 1e-9  # differences by rounding
Tables = list[tuple[Floats, Ints]]


@dataclass(frozen=True, eq=False)
class Turns:
    """The question: ways of each stage, what it holds at a time, its group, the groups' room."""

    stages: Sequence[Stretches]
    in_flight: Sequence[float]
    group_of: Sequence[int]
    room: Sequence[float]  # by group
    sends: Floats
    num_microbatches: int
    looped: bool

    def best(self) -> Cuts | None:
        """The best cuts; None where nothing fits."""
        found = self._fitting(0.0)
        if found is not None:
            return found
        low, high = 1, len(PRICES) - 1
        while low <= high:  # what is dearer takes less room
            middle = (low + high) // 2
            cuts = self._fitting(PRICES[middle])
            found = cuts or found
            low, high = (low, middle - 1) if cuts else (middle + 1, high)
        return found

    def _fitting(self, price: float) -> Cuts | None:
        cuts = self._at(price)
        return None if cuts is None else self._thrifty(cuts)

    def _at(self, price: float) -> Cuts | None:
        tables = self._tables(price)
        if self.looped:
            return self._rounds(tables)
        tried = cuts_with_slack(tables, self.sends, self.num_microbatches)
        evened = [
            _evened(tables, cuts, self.sends, self.group_of, self.num_microbatches)
            for cuts in tried
        ]
        return min(evened, key=lambda pair: pair[0])[1] if evened else None

    def _tables(self, price: float) -> Tables:
        """Seconds and way of every stretch at a price."""
        known: dict[tuple[int, float], tuple[Floats, Ints]] = {}
        found = []
        for stretches, count in zip(self.stages, self.in_flight, strict=True):
            key = (id(stretches), count)
            if key not in known:
                known[key] = self._table(stretches, count, price)
            found.append(known[key])
        return found

    def _table(self, stretches: Stretches, count: float, price: float) -> tuple[Floats, Ints]:
        chunks = len(self.stages) // len(self.room)
        share = 1 / (self.num_microbatches * chunks)
        seconds = stretches.seconds + share * stretches.tail
        if price:
            held = stretches.static + count * stretches.saved + stretches.transient / chunks
            unit = float(seconds[:, 0, -1].min() / held[:, 0, -1].min())
            way = (seconds + price * unit * held).argmin(axis=0)
        else:
            way = seconds.argmin(axis=0)
        return np.take_along_axis(seconds, way[None], 0)[0], way

    def _thrifty(self, cuts: Cuts) -> Cuts | None:
        """The same cuts with some stages run in ways that take less room, so that all fit."""
        p, count = len(self.room), len(self.stages)
        menus = [self._menu(s, a, b) for s, (a, b, _) in enumerate(cuts.stages)]
        size = p if self.looped else 1  # a round goes over together: nobody waits for one stage
        together = [range(s, s + size) for s in range(0, count, size)]
        chosen = thrifty(menus, self.group_of, self.room, together, self._pace)
        if chosen is None:
            return None
        stages = tuple(
            (a, b, item.way) for (a, b, _), item in zip(cuts.stages, chosen, strict=True)
        )
        return self._judged(stages, np.array([item.seconds for item in chosen]))

    def _menu(self, stage: int, a: int, b: int) -> list[Item]:
        stretches, chunks = self.stages[stage], len(self.stages) // len(self.room)
        share = 1 / (self.num_microbatches * chunks)
        return menu_of(
            stretches.seconds[:, a, b] + share * stretches.tail[:, a, b],
            stretches.static[:, a, b] + self.in_flight[stage] * stretches.saved[:, a, b],
            stretches.transient[:, a, b],
        )

    def _rounds(self, tables: Tables) -> Cuts | None:
        p, count = len(self.room), len(self.stages)
        size = len(self.sends)
        longest = min(size, math.ceil(LONGER * size / count) + 1)
        ends = round_ends([table for table, _ in tables[:p]], count // p, longest)
        if ends is None:
            return None
        stages = tuple(
            (a, b, int(tables[s][1][a, b])) for s, (a, b) in enumerate(itertools.pairwise(ends))
        )
        own = np.array([tables[s][0][a, b] for s, (a, b, _) in enumerate(stages)])
        return self._judged(stages, own)

    def _judged(self, stages: tuple[tuple[int, int, int], ...], own: Floats) -> Cuts:
        """The cuts with the pace of their order, and the fill of the pipeline."""
        pace = self._pace(own) * len(self.room) / len(own)
        fill = float(own.sum()) + 2 * float(sum(self.sends[a] for a, _, _ in stages))
        return Cuts(stages, (self.num_microbatches - 1) * pace + fill, pace)

    def _pace(self, own: Floats) -> float:
        """Seconds from one micro-batch to the next, if nobody waits for anything else."""
        p = len(self.room)
        if self.looped:
            return float(own.reshape(-1, p).max(axis=1).sum())
        return float(np.bincount(np.array(self.group_of), weights=own, minlength=p).max())


def _evened(
    tables: Sequence[tuple[Floats, Ints]],
    cuts: Cuts,
    sends: Floats,
    group_of: Sequence[int],
    num_microbatches: int,
) -> tuple[float, Cuts]:
    """Segments moved, one or two at a time, from the busiest group to others while that helps.

    With how good the cuts are: less is better.
    """
    ends = [0, *(end for _, end, _ in cuts.stages)]
    count = len(tables)
    members = np.zeros((max(group_of) + 1, count))
    members[list(group_of), range(count)] = 1.0
    seconds = np.stack([table for table, _ in tables])
    stage = np.arange(count)

    def times(ends: Sequence[int]) -> Floats:
        at = np.array(ends)
        found: Floats = seconds[stage, at[:-1], at[1:]]
        return found

    def score(own: Floats) -> tuple[float, float]:
        """The busiest group; in part also the longest stage, at whose pace orders go."""
        if not np.isfinite(own).all():  # a stage that does not fit
            return math.inf, math.inf
        busy, turns = members @ own, count / len(members)
        longest = turns * float(own.max())
        value = (1 - PACE) * float(busy.max()) + PACE * longest
        return value, float(busy @ busy) + float(own @ own)

    own = times(ends)
    while True:
        busiest = int((members @ own).argmax())
        best, moved = score(own), ends
        for i, j, size in itertools.product(range(count), range(count), MOVED):
            if group_of[i] != busiest or group_of[j] == busiest:
                continue
            step = size if j < i else -size  # the cuts between the two stages go this way
            low, high = min(i, j) + 1, max(i, j) + 1
            other = [end + step * (low <= k < high) for k, end in enumerate(ends)]
            found = score(times(other)) if other[i] < other[i + 1] else best
            less = found[0] < best[0] * (1 - NOTHING)
            if less or (found[0] <= best[0] and found[1] < best[1] * (1 - NOTHING)):
                best, moved = found, other
        if moved is ends:
            break
        ends, own = moved, times(moved)
    ways = [int(tables[s][1][a, b]) for s, (a, b) in enumerate(itertools.pairwise(ends))]
    fill = float(own.sum()) + 2 * float(sum(sends[a] for a in ends[:-1]))
    bottleneck = float((members @ own).max()) * len(members) / count
    stages = tuple((a, b, way) for (a, b), way in zip(itertools.pairwise(ends), ways, strict=True))
    step_s = (num_microbatches - 1) * bottleneck + fill
    return score(own)[0], Cuts(stages, step_s, bottleneck)
