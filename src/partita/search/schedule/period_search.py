"""The shortest repetition of 1, 2, ... micro-batches, each shorter length ruled out.

For each number K of micro-batches in a repetition there is a smallest length; every longer one
works too (see `cyclic`), so an interval (ruled out, found] is halved until it is short, and then
ruled out as a whole. The order of what is found is run at its best pace (see `pattern`), which may
be faster than asked for. K + 1 is only asked whether it beats the best so far. A question that
takes too long is put aside and asked again, with more effort, once the others had their turn.

The lower bound holds for any K. Where it is not met the repetitions up to `most_copies` may all be
ruled out, which proves the least period among them.

List scheduling falls into repetitions by itself. Under a cap a list schedule of many micro-batches
soon repeats: after a while every K micro-batches start as the K before them, some time later. The K
that it picks is often one that tight memory asks for, and more than a solver would try.
O(micro-batches * blocks * most copies).
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from partita.problems.schedule import ScheduleProblem, check, heads, tails, topological_order
from partita.search.base import Run
from partita.search.schedule.bounds import period_bound
from partita.search.schedule.cyclic import Repetition
from partita.search.schedule.greedy import Listing
from partita.search.schedule.grid import Grid, as_fraction, balanced, memory_on_grid, on_grid
from partita.search.schedule.line import LineProblem, line_of
from partita.search.schedule.modulo import fit
from partita.search.schedule.pattern import Pattern, fastest
from partita.search.schedule.solver import LARGE, Allowance, SolverAnswer, SolverOutcome

COUNT = 64  # micro-batches that are scheduled
MOST_COPIES = 12
_WINDOWS = (COUNT, 12, 8, 6, 4, 3, 2)  # how many may be under way
FIRST_EFFORT = 0.25
_ROUNDING = Fraction(1, 10**9)
_WORTH = 64  # times the effort, for a way that is sure to answer and mostly does so earlier
_LITTLE = 64  # an interval shorter than 1/64 of the length is asked for as a whole


def steady_states(problem: ScheduleProblem, grid: Grid, run: Run[Any]) -> Iterator[Pattern]:
    """The repetitions of a few list schedules, each at its best pace."""
    forever = replace(problem, num_microbatches=None)
    after = tails(problem)
    seen = set()
    for priority in (after, [-tail for tail in after]):
        for window in _WINDOWS:
            if run.done():
                return
            run.evaluations += 1
            listing = Listing(problem, COUNT, window, priority)
            if not listing.finish(run):
                continue
            steps = [[round(grid.steps(start)) for start in row] for row in listing.table()]
            repeated = repetition(steps)
            if repeated is None or repeated in seen:
                continue
            seen.add(repeated)
            pattern = fastest(forever, repeated[0], repeated[1])
            if pattern is not None:
                yield pattern


def repetition(
    table: Sequence[Sequence[int]],
) -> tuple[tuple[tuple[int, ...], ...], int] | None:
    """(starts, length) of what the middle of the table repeats; None if it does not."""
    begin, end = len(table) // 3, 2 * len(table) // 3
    for copies in range(1, min(MOST_COPIES, (end - begin) // 2) + 1):
        length = table[begin + copies][0] - table[begin][0]
        if all(
            after - before == length
            for m in range(begin, end - copies)
            for before, after in zip(table[m], table[m + copies], strict=True)
        ):
            rows = table[begin : begin + copies]
            first = min(map(min, rows))
            return tuple(tuple(start - first for start in row) for row in rows), length
    return None


class PeriodSearch:
    """What is known about the repetitions of a problem; `go_on` learns more."""

    def __init__(
        self,
        problem: ScheduleProblem,
        run: Run[Any],
        most_copies: int,
        report: Callable[[Pattern], None],
    ) -> None:
        self.problem = replace(problem, num_microbatches=None)
        self.run = run
        self.report = report
        self.grid = on_grid(problem)
        self.memory = balanced(problem, memory_on_grid(problem))
        self.bound = period_bound(problem)
        self.best: Pattern | None = None
        least = self.grid.steps(self.bound) * (1 - Fraction(1, 10**9))
        self.ruled_out = {  # copies -> no repetition is of this length in steps, or shorter
            copies: math.ceil(copies * least) - 1 for copies in range(1, most_copies + 1)
        }
        self.spent: dict[tuple[int, int], float] = {}  # (copies, length) -> effort without answer

    @property
    def period(self) -> Fraction | None:
        """The best so far."""
        return None if self.best is None else self.best.period

    def settled(self, copies: int) -> bool:
        """Is it proven that so many micro-batches per repetition do not beat the best?"""
        return self.best is not None and self.ruled_out[copies] >= self._longest(copies)

    def done(self) -> bool:
        """Is there nothing left to find out?"""
        return self.meets_bound() or all(map(self.settled, self.ruled_out))

    def meets_bound(self) -> bool:
        """Is nothing faster, however many micro-batches a repetition has?"""
        return self.period is not None and self.period <= as_fraction(self.bound) * (1 + _ROUNDING)

    def try_first_fit(self) -> None:
        """Place blocks at the first free moment of a repetition that meets the bound."""
        first, order = heads(self.problem), topological_order(self.problem)
        by_time = sorted(order, key=lambda block: first[block])
        length = self.bound
        if self.grid.exact:
            length = self.grid.time(self.ruled_out[1] + 1)
        starts = fit(self.problem, by_time, length)
        if starts is not None and not self.run.done():
            self.run.evaluations += 1
            self.adopt(Pattern((tuple(starts),), length))

    def try_steady_states(self) -> None:
        """What list schedules repeat."""
        for pattern in steady_states(self.problem, self.grid, self.run):
            self.adopt(pattern)
            if self.done():
                return

    def adopt(self, pattern: Pattern) -> bool:
        """Keep a pattern that keeps the rules and is faster; True if it does and is."""
        if self.period is not None and pattern.period >= self.period:
            return False
        if check(self.problem, pattern.solution(self.problem)):
            return False
        self.best = pattern
        self.report(pattern)
        return True

    def go_on(self, copies: int, effort: float, allowance: Allowance) -> None:
        """Narrow the interval of one number of micro-batches; no question takes more effort."""
        low = self.ruled_out[copies]
        while not (self.run.done() or self.done() or allowance.empty):
            high = self._longest(copies)
            if low >= high:
                return
            length = self._next(copies, low, high)
            outcome = self._ask(copies, length, effort, allowance)
            if outcome is SolverOutcome.INFEASIBLE:
                low = self.ruled_out[copies] = length
            elif outcome is not SolverOutcome.SOLVED:
                low = length

    def _next(self, copies: int, low: int, high: int) -> int:
        """The bound itself first, then halfway, and all that is left once that is little."""
        if low == self.ruled_out[copies] and (copies, low + 1) not in self.spent:
            return low + 1
        return high if (high - low) * _LITTLE < high else (low + 1 + high) // 2

    def _longest(self, copies: int) -> int:
        """The longest repetition that beats the best so far, in steps."""
        if self.best is None:
            alone = sum(self.grid.spans) + sum(self.grid.lags)
            return copies * alone
        steps = self.best.period * copies / self.grid.unit
        if not self.grid.exact:  # less than rounding can add up to is no improvement
            steps -= 2 * copies * len(self.problem.blocks)
        return math.ceil(steps) - 1

    def _ask(self, copies: int, length: int, effort: float, allowance: Allowance) -> SolverOutcome:
        """Decide, in turn with and without linear relaxation, each time with more effort.

        Then along a line of devices, where there is one. Where numbers are large the relaxation
        takes far longer than the solver counts.
        """
        asked = Repetition(self.problem, self.grid, self.memory, copies, length)
        spent = self.spent.get((copies, length), 0.0)
        step = max(FIRST_EFFORT, 4 * spent)
        while spent < effort and not (self.run.done() or allowance.empty):
            step = min(step, effort)
            for linear in (1, 0) if length < LARGE else (0,):
                answer = asked.decide(self.run, step, linear, allowance)
                if answer.outcome is SolverOutcome.INFEASIBLE:
                    return answer.outcome
                if answer.values is not None:
                    return self._take(asked, answer.values)
            if copies == 1:
                answer = self._along_line(length, _WORTH * step, allowance)
                if answer.outcome is SolverOutcome.INFEASIBLE:
                    return answer.outcome
                if answer.values is not None:
                    return self._take(asked, answer.values)
            spent = self.spent[copies, length] = step
            step *= 4
        return SolverOutcome.UNKNOWN

    @functools.cached_property
    def _line(self) -> LineProblem | None:
        return line_of(self.problem, self.grid, self.memory)

    def _along_line(self, length: int, effort: float, allowance: Allowance) -> SolverAnswer:
        if self._line is None:
            return SolverAnswer(SolverOutcome.UNKNOWN)
        if self._line.effort(length) > min(effort, _WORTH * allowance.left):
            return SolverAnswer(SolverOutcome.UNKNOWN)
        return self._line.decide(length, self.run, allowance)

    def _take(self, asked: Repetition, values: Sequence[int]) -> SolverOutcome:
        size = len(self.problem.blocks)
        rows = [values[at : at + size] for at in range(0, len(values), size)]
        pattern = fastest(self.problem, rows, asked.length)
        if pattern is not None and self.adopt(pattern):
            return SolverOutcome.SOLVED
        # Memory given back before it is taken, or rounding: the steady state fits, not the start.
        self.spent[asked.copies, asked.length] = math.inf
        return SolverOutcome.UNKNOWN
