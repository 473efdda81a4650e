"""What has to be known at each cut of a line of devices: see `line`."""

from collections.abc import Sequence
from typing import NamedTuple

from partita.problems.schedule import ScheduleProblem
from partita.search.schedule.grid import Grid, GridMemory
from partita.search.schedule.pairs import Pair, Pairing

_MOST_MEMORY = 1000  # units of a cap
MOST_SUM = 2**15 - 1


class ChainEdge(NamedTuple):
    """A dependency of a chain; `done` is the place in the line at which both ends are known."""

    first: int
    second: int
    lag: int
    done: int


class Need(NamedTuple):
    """What a device with a cap holds: `pairs` there, and the weight of each edge in the sum."""

    pairs: tuple[Pair, ...]
    weights: tuple[int, ...]
    cap: int


class CutRange(NamedTuple):
    """A part of a chain that is still to come, from `first` to `second`; -1: not known yet."""

    first: int
    second: int
    lag: int
    weight: int


class Number(NamedTuple):
    """A number at a cut, as small as can be: the largest of its sources.

    A source is (number at the cut before or -1, weights of the edges now done, place of the device
    if it is the one now placed, else -1). With what each of `ahead` adds at least, and its cap
    taken off, it may not exceed 0. `kept` if it matters later.
    """

    sources: tuple[tuple[int, tuple[int, ...], int], ...]
    ahead: tuple[tuple[tuple[CutRange, ...], int], ...]
    low: int
    high: int
    kept: bool


def chains(problem: ScheduleProblem, grid: Grid) -> dict[tuple[int, int], int] | None:
    """The lag of each dependency, if every block waits for one at most and one waits for it."""
    longest: dict[tuple[int, int], int] = {}
    for pair, lag in zip(problem.deps, grid.lags, strict=True):
        longest[pair] = max(lag, longest.get(pair, lag))
    firsts, seconds = [a for a, _ in longest], [b for _, b in longest]
    single = len(set(firsts)) == len(firsts) and len(set(seconds)) == len(seconds)
    return longest if single else None


def in_line(devices: Sequence[int], links: Sequence[tuple[int, int]]) -> list[int] | None:
    """The devices in an order in which links only join neighbours; None if there is none."""
    beside: dict[int, set[int]] = {device: set() for device in devices}
    for one, other in links:
        if one != other:
            beside[one].add(other)
            beside[other].add(one)
    order: list[int] = []
    for end in devices:
        if end in order or len(beside[end]) > 1:
            continue
        reached: int | None = end
        while reached is not None:
            order.append(reached)
            reached = min(beside[reached] - set(order), default=None)
    if len(order) < len(devices) or any(len(near) > 2 for near in beside.values()):
        return None  # a ring, or a branch
    return order


def needs_of(
    problem: ScheduleProblem,
    memory: Sequence[GridMemory],
    edges: Sequence[ChainEdge],
    order: list[int],
) -> tuple[Need | None, ...] | None:
    """What each place of the line must keep to; None if memory is not in pairs."""
    needs: list[Need | None] = [None] * len(order)
    pairing = Pairing(problem)
    index = {edge.first: i for i, edge in enumerate(edges)}
    for limit in memory:
        pairs = pairing.pairs(limit.amounts)
        if pairs is None:
            return None
        if limit.cap > _MOST_MEMORY:
            return None
        weights = [0] * len(edges)
        for taker, giver, amount in pairs:
            block = taker
            while block != giver:
                weights[index[block]] += int(amount)
                block = edges[index[block]].second
        largest = 2 + max((edge.lag for edge in edges), default=0)
        if limit.cap + (sum(weights) + sum(map(abs, limit.amounts.values()))) * largest > MOST_SUM:
            return None
        needs[order.index(limit.device)] = Need(pairs, tuple(weights), limit.cap)
    return tuple(needs)


class _CutGroup:
    """Devices that share a number at a cut."""

    def __init__(self) -> None:
        self.sources: dict[tuple[int, tuple[int, ...], int], None] = {}
        self.ahead: dict[tuple[tuple[CutRange, ...], int], None] = {}
        self.low = self.high = 0

    def number(self, kept: bool) -> Number:
        """As a record."""
        return Number(tuple(self.sources), tuple(self.ahead), self.low, self.high, kept)


_Key = tuple[bool, tuple[int, ...]]  # (are the devices placed, their weights)


def cuts_of(
    needs: Sequence[Need | None], edges: Sequence[ChainEdge]
) -> tuple[tuple[Number, ...], ...] | None:
    """The numbers after each place; None where more than two would have to be kept."""
    before: dict[_Key, int] = {}
    cuts = []
    for cut in range(len(needs)):
        groups = _groups(needs, edges, cut, before)
        kept = [key for key in groups if any(key[1])]
        if len(kept) > 2:
            return None
        keys = [*kept, *(key for key in groups if key not in kept)]
        cuts.append(tuple(groups[key].number(kept=any(key[1])) for key in keys))
        before = {key: number for number, key in enumerate(kept)}
    return tuple(cuts)


def _groups(
    needs: Sequence[Need | None], edges: Sequence[ChainEdge], cut: int, before: dict[_Key, int]
) -> dict[_Key, _CutGroup]:
    now = [i for i, edge in enumerate(edges) if max(edge.done, 0) == cut]
    groups: dict[_Key, _CutGroup] = {}
    for place, need in enumerate(needs):
        if need is None:
            continue
        key = _key(need, edges, place, cut)
        source = (
            before.get(_key(need, edges, place, cut - 1), -1),
            tuple(need.weights[i] for i in now),
            place if place == cut else -1,
        )
        if place > cut and not any(key[1]):
            continue  # nothing of its sum is known
        if place < cut and source[0] < 0:
            continue  # all of its sum was known before
        group = groups.setdefault(key, _CutGroup())
        group.sources[source] = None
        runs = cut_ranges(need, edges, cut)
        if place <= cut:
            group.low = min(group.low, -need.cap)
            group.ahead[runs, 0] = None
        else:
            group.high = max(group.high, need.cap)
            if len(group.ahead) > 1:  # the next device and the last one say enough
                group.ahead.popitem()
            group.ahead[runs, -need.cap] = None
    return groups


def cut_ranges(need: Need, edges: Sequence[ChainEdge], cut: int) -> tuple[CutRange, ...]:
    """The ranges of the device's pairs that are still to come."""
    behind = {edge.first: edge for edge in edges}
    ranges: list[CutRange] = []
    for taker, giver, amount in need.pairs:
        block, begun = taker, False
        while block != giver:
            edge = behind[block]
            if max(edge.done, 0) > cut:
                if not begun:
                    ranges.append(CutRange(block, -1, 0, int(amount)))
                last = ranges[-1]
                ranges[-1] = last._replace(second=edge.second, lag=last.lag + edge.lag)
                begun = True
            else:
                begun = False
            block = edge.second
    return tuple(ranges)


def _key(need: Need, edges: Sequence[ChainEdge], place: int, cut: int) -> _Key:
    """Weights on the side that matters: what is still to come if done, else what is known."""
    done = place <= cut
    weights = tuple(
        weight if (max(edge.done, 0) > cut) == done else 0
        for weight, edge in zip(need.weights, edges, strict=True)
    )
    return done, weights
