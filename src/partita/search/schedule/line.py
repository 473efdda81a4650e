"""Does one micro-batch repeat in a given length, where chains run along a line of devices?

Block u starts at q_u P + r_u, 0 <= r_u < P. Devices only look at the r. Once these are chosen, the
q of a chain follow: nothing is gained by waiting longer than to the next r, so for u -> v

    q_v - q_u = c_uv = ceil((r_u + lag - r_v) / P) >= 0,

and what a device d holds just after its block v starts, with memory in pairs (see `pairs`), is

    sum over pairs of amount * ([r_v < r_giver] - [r_v < r_taker] + sum of c from taker to giver).

Its largest value over v is a number that the r on d decide, plus a weighted sum of c. The blocks
that run on all devices get their r first, in every way there is. The other blocks are on one device
each, and the chains only go from a device to itself or a neighbour in the line: devices get their r
one after the other, and of what came before only this matters:

    the r on the last device,
    for each device to come the part of its sum that is known,
    for each device that is done by how much its sum may still grow.

A part of a chain from u to v that is still to come adds at least ceil((r_u + lags - r_v) / P),
which ends most ways early. Devices with the same weights on one side of the cut share one number.
Where two numbers are enough at each cut (one or two chains, there or back, are such), the best
pairs of them are kept for each choice of r, and the question is answered in O(devices * choices^2 *
pairs kept) for each choice of the common blocks. A solver that reasons about single blocks needs
far more steps: it would have to find out about each of these numbers by itself.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from partita.problems.schedule import ScheduleProblem
from partita.search.base import Run
from partita.search.schedule.grid import Grid, GridMemory
from partita.search.schedule.pairs import Pair, Pairing
from partita.search.schedule.solver import Allowance, SolverAnswer, SolverOutcome

_MOST_MEMORY = 1000  # units of a cap
MOST_SUM = 2**15 - 1
_Key = tuple[bool, tuple[int, ...]]  # (are the devices placed, their weights)
PER_EFFORT = 1e8  # steps that are a unit of effort
PER_DEVICE = 30_000  # steps that preparing a device is worth
_AT_ONCE = 2**22  # steps between looks at the stop rules
_MOST_CHOICES = 20_000  # of the blocks on a device
_MOST_WEIGHTS = 10**6  # looked at to find what devices share


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


def placed(
    blocks: Sequence[tuple[int, int]],
    taken: Sequence[tuple[int, int]],
    length: int,
    *,
    fixed: bool = False,
) -> Iterator[list[tuple[int, int]]]:
    """Residues (block, r) of (block, span) clear of what is `taken` as (r, span).

    `fixed`: the first at 0.
    """
    if not blocks:
        yield []
        return
    (block, span), *others = blocks
    for start in range(1 if fixed else length):
        if span <= length and all(
            (start - r) % length >= other and (r - start) % length >= span for r, other in taken
        ):
            for rest in placed(others, [*taken, (start, span)], length):
                yield [(block, start), *rest]


class Pass:
    """One way through the line, with the residues of the common blocks given."""

    def __init__(
        self, line: "LineProblem", length: int, common: dict[int, int], allowance: Allowance
    ) -> None:
        import numpy as np

        self.np = np
        self.line, self.length, self.common = line, length, common
        self.allowance = allowance
        self.made: dict[tuple[int, ...], Any] = {}

    def through(self, run: Run[Any]) -> dict[int, int] | None:
        """Residues of all blocks that keep all caps; empty if there are none, None if stopped."""
        np, line = self.np, self.line
        states = np.zeros((1, 4), np.int64)  # choice, first number, second number, state before
        before = np.zeros((1, 0), np.int16)
        history = []
        for place in range(len(line.places)):
            if run.done() or self.allowance.empty:
                return None
            choices = self._choices(place)
            reached = self._advanced(place, states, before, choices, run)
            if reached is None or not len(reached):
                return None if reached is None else {}
            states = reached
            live, states[:, 0] = np.unique(states[:, 0], return_inverse=True)
            before = choices[live]
            history.append((before, states))
        return self._traced(history)

    def _advanced(
        self, place: int, states: Any, before: Any, choices: Any, run: Run[Any]
    ) -> Any | None:
        """The states after this place; None if the run is to end."""
        from partita.search.schedule.line_steps import NONE, advance, collected

        np, numbers = self.np, self.line.cuts[place]
        bounds = np.array([(n.low, n.high, n.kept) for n in numbers], np.int64).reshape(-1, 3)
        low, high = (numbers[0].low, numbers[0].high) if numbers and numbers[0].kept else (0, 0)
        best = np.full((len(choices), high - low + 1), NONE)
        parent = np.full(best.shape, -1)
        step = max(1, _AT_ONCE // len(states))
        for begin in range(0, len(choices), step):
            if begin and (run.done() or self.allowance.empty):
                return None
            part = slice(begin, begin + step)
            which, grown = self._grown(place, before, choices[part])
            ahead = self._ahead(place, choices[part])
            self.allowance.spend((len(states) * len(choices[part]) + PER_DEVICE) / PER_EFFORT)
            advance(states, which, grown, ahead, bounds, best[part], parent[part])
        return collected(best, parent, low)

    def _choices(self, place: int) -> Any:
        """Residues of the blocks of a place, a row for each way that its device has room for."""
        line = self.line
        spans = tuple(line.grid.spans[block] for block in line.places[place])
        fixed = place == 0 and not line.common
        key = (int(fixed), *spans)
        if key not in self.made:
            taken = [(r, line.grid.spans[block]) for block, r in self.common.items()]
            self.made[key] = self._ways(spans, taken, fixed=fixed)
        choices = self.made[key]
        if line.needs[place] is None:
            return choices
        least = self._local(place, choices)
        for run in line.alone[place]:
            least = least + run.weight * self._at_least(run, place, choices)
        return choices[least <= 0]

    def _ways(self, spans: Sequence[int], taken: Sequence[tuple[int, int]], *, fixed: bool) -> Any:
        """All residues of blocks with these spans, as `placed` has them, a row for each way."""
        np, length = self.np, self.length
        rows = np.zeros((1, 0), np.int16)
        for index, span in enumerate(spans):
            at = np.arange(1 if fixed and not index else length, dtype=np.int16)
            free = np.full((len(rows), len(at)), span <= length)
            before = [*taken, *((rows[:, [i]], other) for i, other in enumerate(spans[:index]))]
            for r, other in before:
                free &= ((at - r) % length >= other) & ((r - at) % length >= span)
            row, start = np.nonzero(free)
            rows = np.concatenate([rows[row], at[start][:, None]], axis=1)
        return rows

    def _ahead(self, place: int, choices: Any) -> Any:
        """What each number will grow by at least, less the cap, for each choice."""
        np, numbers = self.np, self.line.cuts[place]
        counts = np.zeros((len(numbers), len(choices)), np.int64)
        for n, number in enumerate(numbers):
            counts[n] = np.max(
                [
                    base
                    + sum(run.weight * self._at_least(run, place, choices) for run in runs)
                    + np.zeros(len(choices), np.int64)
                    for runs, base in number.ahead
                ],
                axis=0,
            )
        return counts

    def _at_least(self, run: CutRange, place: int, choices: Any) -> Any:
        """The least sum of c along a part of a chain."""
        here, last = self.line.places[place], self.length - 1
        first, second = (
            self.common[block] if block in self.common
            else choices[:, here.index(block)] if block in here
            else unknown
            for block, unknown in ((run.first, 0), (run.second, last))
        )  # fmt: skip
        return -((second - first - run.lag) // self.length)

    def _grown(self, place: int, before: Any, choices: Any) -> tuple[Any, Any]:
        """For each number and source: which number it was, and what is added to it, by choices."""
        np, line = self.np, self.line
        numbers = line.cuts[place]
        costs = [self._cost(e, place, before, choices) for e in line.edges
                 if max(e.done, 0) == place]  # fmt: skip
        most = max((len(number.sources) for number in numbers), default=0)
        which = np.full((len(numbers), most), -2, np.int64)
        grown = np.zeros((len(numbers), most, len(before), len(choices)), np.int16)
        for n, number in enumerate(numbers):
            for s, (old, weights, need) in enumerate(number.sources):
                which[n, s] = old
                for weight, cost in zip(weights, costs, strict=True):
                    if weight:
                        grown[n, s] += np.asarray(weight * cost, np.int16)
                if need >= 0:
                    grown[n, s] += self._local(place, choices)[None, :].astype(np.int16)
        return which, grown

    def _residue(self, block: int, place: int, before: Any, choices: Any) -> Any:
        """By choices before and now, ready to be broadcast."""
        if block in self.common:
            return self.common[block]
        if block in self.line.places[place]:
            return choices[None, :, self.line.places[place].index(block)]
        return before[:, self.line.places[place - 1].index(block), None]

    def _cost(self, edge: ChainEdge, place: int, before: Any, choices: Any) -> Any:
        first = self._residue(edge.first, place, before, choices)
        second = self._residue(edge.second, place, before, choices)
        return -((second - first - edge.lag) // self.length)

    def _local(self, place: int, choices: Any) -> Any:
        """The most a device holds beyond its sum, less its cap, for each choice."""
        np, need = self.np, self.line.needs[place]
        assert need is not None
        at = {
            block: np.broadcast_to(self._residue(block, place, None, choices), (1, len(choices)))[0]
            for pair in need.pairs
            for block in pair[:2]
        }
        held = [
            sum(
                int(amount) * ((at[v] < at[giver]).astype(np.int32) - (at[v] < at[taker]))
                for taker, giver, amount in need.pairs
            )
            for v in sorted({pair.taker for pair in need.pairs})
        ]
        return np.max(held, axis=0) - need.cap

    def _traced(self, history: list[tuple[Any, Any]]) -> dict[int, int]:
        residues, state = dict(self.common), 0
        for place in reversed(range(len(history))):
            choices, states = history[place]
            row = choices[states[state][0]]
            residues.update(zip(self.line.places[place], map(int, row), strict=True))
            state = int(states[state][3])
        return residues


@dataclass(frozen=True, slots=True)
class LineProblem:
    """A problem whose chains run along a line of devices."""

    grid: Grid
    common: tuple[int, ...]  # blocks on all devices of the line
    places: tuple[tuple[int, ...], ...]  # the other blocks of each device along the line
    edges: tuple[ChainEdge, ...]
    needs: tuple[Need | None, ...]  # of each place
    alone: tuple[tuple[CutRange, ...], ...]  # the pairs of each place
    cuts: tuple[tuple[Number, ...], ...]  # after each place

    def effort(self, length: int) -> float:
        """What a question takes at most, about; infinite where it is too large to begin with."""
        spans = self.grid.spans
        configs = _ways([spans[b] for b in self.common], length)
        counts = []
        for here in self.places:
            ways = _ways([spans[b] for b in (*self.common, *here)], length)
            counts.append(ways / max(configs, 1) if self.common else ways * length)
        longest = length + max((edge.lag for edge in self.edges), default=0)
        if max(counts, default=0) > _MOST_CHOICES or longest > MOST_SUM // 2:
            return math.inf
        steps = sum(2 * a * b + PER_DEVICE for a, b in itertools.pairwise([1.0, *counts]))
        return max(configs, 1) * steps / PER_EFFORT

    def decide(
        self, length: int, run: Run[Any], allowance: Allowance | None = None
    ) -> SolverAnswer:
        """A start for each block, or that there are none; UNKNOWN if run or allowance end it."""
        allowance = Allowance() if allowance is None else allowance
        run.evaluations += 1
        spans = self.grid.spans
        for residues in placed([(b, spans[b]) for b in self.common], [], length, fixed=True):
            if run.done():
                return SolverAnswer(SolverOutcome.UNKNOWN)
            through = Pass(self, length, dict(residues), allowance).through(run)
            if through is None:
                return SolverAnswer(SolverOutcome.UNKNOWN)
            if through:
                return SolverAnswer(SolverOutcome.SOLVED, self._starts(through, length))
        return SolverAnswer(SolverOutcome.INFEASIBLE)

    def _starts(self, residues: dict[int, int], length: int) -> tuple[int, ...]:
        """Every chain from its first block on, none later than it must be."""
        starts = dict(residues)
        behind = {edge.first: edge for edge in self.edges}
        for root in set(residues) - {edge.second for edge in self.edges}:
            block = root
            while block in behind:
                _, after, lag, _ = behind[block]
                wait = (residues[after] - starts[block] - lag) % length
                starts[after] = starts[block] + lag + wait
                block = after
        return tuple(starts[block] for block in range(len(starts)))


def line_of(
    problem: ScheduleProblem, grid: Grid, memory: Sequence[GridMemory]
) -> LineProblem | None:
    """The problem as chains along a line; None where it is not that, or rounded."""
    devices = sorted({device for block in problem.blocks for device in block.devices})
    common = [b for b, block in enumerate(problem.blocks) if len(block.devices) == len(devices)]
    if len(devices) == 1:
        common = []
    where = {b: block.devices[0] for b, block in enumerate(problem.blocks) if b not in common}
    chained = chains(problem, grid)
    if not grid.exact or chained is None:
        return None
    if any(len(problem.blocks[b].devices) > 1 for b in where):
        return None
    if len(devices) ** 2 * len(chained) > _MOST_WEIGHTS:
        return None
    order = in_line(devices, [(where[a], where[b]) for a, b in chained if {a, b} <= set(where)])
    if order is None:
        return None
    place = {b: order.index(device) for b, device in where.items()}
    edges = tuple(
        ChainEdge(a, b, lag, max(place.get(a, -1), place.get(b, -1)))
        for (a, b), lag in chained.items()
    )
    needs = needs_of(problem, memory, edges, order)
    cuts = None if needs is None else cuts_of(needs, edges)
    if needs is None or cuts is None:
        return None
    places = tuple(tuple(b for b in where if place[b] == at) for at in range(len(order)))
    alone = tuple(() if need is None else cut_ranges(need, edges, -1) for need in needs)
    return LineProblem(grid, tuple(common), places, edges, needs, alone, cuts)


def _ways(spans: Sequence[int], length: int) -> float:
    """In how many ways blocks fit into a repetition, the first of them at 0."""
    idle = length - sum(spans)
    if idle < 0 or not spans:
        return 0
    return float(math.factorial(len(spans) - 1) * math.comb(idle + len(spans) - 1, len(spans) - 1))
