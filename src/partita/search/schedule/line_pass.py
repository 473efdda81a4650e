"""One way through a line of devices, with the blocks on all of them placed: see `line`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from partita.search.base import Run
from partita.search.schedule.line_cuts import ChainEdge, CutRange
from partita.search.schedule.solver import Allowance

if TYPE_CHECKING:
    from partita.search.schedule.line import LineProblem

PER_EFFORT = 1e8  # steps that are a unit of effort
PER_DEVICE = 30_000  # steps that preparing a device is worth
_AT_ONCE = 2**22  # steps between looks at the stop rules


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
