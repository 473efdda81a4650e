"""Is there a repetition of K micro-batches in a given length? A model for CP-SAT.

All times are steps of the grid. S is the start of a block in the first repetition; it starts again
every `length` P. On each device one block is the anchor A, at S_A; every other start u lies

    S_u = S_A + turn_u P + after_u,     span_A <= after_u <= P - span_u,

so that `after` is a time on a line, not on a circle, and u, v are apart iff one is after the other:

    u before v:  after_v - after_u >= span_u        (a boolean per pair).

How often u has started when v starts, floor((S_v - S_u) / P) + 1 = turn_v - turn_u + [u before v],
is linear in these. So are the rules of memory, which sums to zero over a micro-batch:

    held just after v:  sum over u of memory_u * ([u before v] - turn_u) <= cap.

Two kinds of redundant inequalities make proofs short:

* what a device holds, over one repetition, is -sum memory_u S_u, and at most what it holds
  after the start of each of its blocks times the span, and the cap while it is idle;
* blocks X that conflict with both ends of a dependency a -> b and with each other run between the
  two: S_b - S_a >= span_a + sum over X of span * (starts in between).

The i-th start of a block belongs to micro-batch i (exchanging micro-batches changes nothing else),
and where the blocks fall into parts without dependencies between them, that give back what they
take, a part may be moved by whole micro-batches. So copies start in order, and the first block of
each part after that of the first part, less than a micro-batch later.

Starts further apart than blocks * (P + longest lag) have a gap that can be shortened by P, which
never holds more where memory is taken before it is given back.

If P is feasible, so is any larger P' (multiply all starts by P' / P: what was apart is apart, and
whole starts exist as all differences asked for are whole). So one infeasible P rules out all below.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita.problems.schedule import ScheduleProblem, blocks_per_device, topological_order
from partita.search.base import Run
from partita.search.schedule.grid import Grid, GridMemory
from partita.search.schedule.solver import LARGE, Allowance, SolverAnswer, SolverOutcome, solve

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_Start = tuple[int, int]  # (copy, block)


@dataclass(frozen=True, slots=True)
class Repetition:
    """The question: do `copies` micro-batches fit into `length` steps?"""

    problem: ScheduleProblem
    grid: Grid
    memory: Sequence[GridMemory]  # of the devices where it sums to zero
    copies: int
    length: int

    def decide(
        self,
        run: Run[Any],
        effort: float | None = None,
        linear: int = 1,
        allowance: Allowance | None = None,
    ) -> SolverAnswer:
        """Starts by copy and block, row after row, or that there are none."""
        if max(self.grid.spans) > self.length:
            return SolverAnswer(SolverOutcome.INFEASIBLE)
        model = _CyclicModel(self)
        return solve(model.cp, model.flat(), run, effort=effort, linear=linear, allowance=allowance)

    def shorten(
        self, run: Run[Any], effort: float, allowance: Allowance | None = None
    ) -> SolverAnswer:
        """The same with the least time from its first start to its last end, as far as it gets."""
        model = _CyclicModel(self)
        model.minimise_latency()
        linear = 1 if self.length < LARGE else 0
        return solve(model.cp, model.flat(), run, effort=effort, linear=linear, allowance=allowance)


class _CyclicModel:
    """The variables and rules of a `Repetition`."""

    def __init__(self, asked: Repetition) -> None:
        from ortools.sat.python import cp_model

        self.asked = asked
        self.spans, self.length, self.copies = asked.grid.spans, asked.length, asked.copies
        self.size = len(self.spans)
        self.cp = cp_model.CpModel()
        longest = max((*asked.grid.lags, *self.spans))
        self.reach = self.size * (min(self.copies, 2) * self.length + longest)
        self.starts: dict[_Start, cp_model.IntVar] = {
            start: self.cp.new_int_var(0, 2 * self.reach, "")
            for start in itertools.product(range(self.copies), range(self.size))
        }
        self.here = blocks_per_device(asked.problem)
        self.anchors = [self._anchor(here) for here in self.here]
        self.turns: dict[tuple[_Start, _Start], Any] = {}  # (start, anchor)
        self.after: dict[tuple[_Start, _Start], Any] = {}
        self.before: dict[tuple[_Start, _Start, _Start], Any] = {}  # (one, other, anchor)
        self._dependencies()
        self._copies_in_order()
        self._parts_in_order()
        for anchor, here in zip(self.anchors, self.here, strict=True):
            if anchor is not None:
                self._one_at_a_time(anchor, here)
        for memory in asked.memory:
            self._within_cap(memory)
        self._conflicts_take_time()

    def flat(self) -> list["cp_model.IntVar"]:
        """The starts, row after row."""
        return list(self.starts.values())

    def minimise_latency(self) -> None:
        """From the first start to the last end."""
        first = self.cp.new_int_var(0, 2 * self.reach, "")
        last = self.cp.new_int_var(0, 3 * self.reach, "")
        for (_, block), start in self.starts.items():
            self.cp.add(start >= first)
            self.cp.add(start + self.spans[block] <= last)
        self.cp.minimize(last - first)

    # --- what repeats ---

    def _dependencies(self) -> None:
        longest: dict[tuple[int, int], int] = {}
        for pair, lag in zip(self.asked.problem.deps, self.asked.grid.lags, strict=True):
            longest[pair] = max(lag, longest.get(pair, lag))
        close = _close(self.asked.problem)
        slack = min(self.copies, 2) * self.length
        for (first, second), lag in longest.items():
            for copy in range(self.copies):
                distance = self.starts[copy, second] - self.starts[copy, first]
                self.cp.add(distance >= lag)
                if (first, second) in close:
                    self.cp.add(distance < lag + slack)

    def _copies_in_order(self) -> None:
        for block, span in enumerate(self.spans):
            rows = [self.starts[copy, block] for copy in range(self.copies)]
            for one, other in zip(rows, [*rows[1:], rows[0] + self.length], strict=True):
                self.cp.add(other >= one + span)

    def _parts_in_order(self) -> None:
        parts = _parts(self.asked)
        roots = [[self.starts[copy, part[0]] for copy in range(self.copies)] for part in parts]
        first, *others = roots
        self.cp.add(first[0] == self.reach)
        gaps = [
            other - one
            for one, other in zip(first, [*first[1:], first[0] + self.length], strict=True)
        ]
        for gap in gaps[1:]:  # any copy may be called the first: the one before the longest gap
            self.cp.add(gaps[0] >= gap)
        for root in others:
            self.cp.add(root[0] >= first[0])
            self.cp.add(root[-1] - self.length < first[0])

    # --- devices ---

    def _anchor(self, here: Sequence[int]) -> _Start | None:
        """What the starts of a device are counted from: something shared with other devices."""
        blocks = self.asked.problem.blocks
        if not here:
            return None
        return 0, max(
            here,
            key=lambda b: (len(blocks[b].devices), blocks[b].memory != 0, self.spans[b], -b),
        )

    def _one_at_a_time(self, anchor: _Start, here: Sequence[int]) -> None:
        """Place every start of the device after the anchor, and no two at once."""
        starts = [(copy, block) for copy in range(self.copies) for block in here]
        for start in starts:
            self._place(start, anchor)
        for one, other in itertools.combinations(starts, 2):
            if (one, other, anchor) in self.before or anchor in (one, other):
                continue
            first = self.cp.new_bool_var("")
            self.before[one, other, anchor] = first
            self.before[other, one, anchor] = 1 - first
            distance = self.after[other, anchor] - self.after[one, anchor]
            self.cp.add(distance >= self.spans[one[1]]).only_enforce_if(first)
            self.cp.add(-distance >= self.spans[other[1]]).only_enforce_if(first.negated())

    def _place(self, start: _Start, anchor: _Start) -> None:
        if (start, anchor) in self.after:
            return
        if start == anchor:
            self.turns[start, anchor] = self.after[start, anchor] = 0
            return
        most = self.reach // self.length + 1
        turns = self.cp.new_int_var(-most, most, "")
        earliest, latest = self.spans[anchor[1]], self.length - self.spans[start[1]]
        if earliest > latest:
            self.cp.add_bool_or([])
            latest = earliest
        after = self.cp.new_int_var(earliest, latest, "")
        self.cp.add(self.starts[start] == self.starts[anchor] + turns * self.length + after)
        self.turns[start, anchor], self.after[start, anchor] = turns, after

    def _begun(self, one: _Start, other: _Start, anchor: _Start) -> Any:
        """[one is before other, or the same], as the device of the anchor sees them."""
        if one in (other, anchor):
            return 1
        return 0 if other == anchor else self.before[one, other, anchor]

    def _times_started(self, one: _Start, at: _Start) -> Any:
        """How often `one` has started when `at` starts, itself included; they share a device."""
        device = min(self._devices(one[1]) & self._devices(at[1]))
        anchor = self.anchors[device]
        assert anchor is not None
        turns = self.turns[at, anchor] - self.turns[one, anchor]
        return turns + self._begun(one, at, anchor)

    # --- memory, and what follows ---

    def _within_cap(self, memory: GridMemory) -> None:
        anchor, here = self.anchors[memory.device], self.here[memory.device]
        assert anchor is not None
        starts = [(copy, block) for copy in range(self.copies) for block in here]
        changes = [start for start in starts if start[1] in memory.amounts]
        held = {
            at: sum(
                memory.amounts[one[1]] * (self._begun(one, at, anchor) - self.turns[one, anchor])
                for one in changes
            )
            for at in starts
        }
        for at in changes:
            if memory.amounts[at[1]] > 0:
                self.cp.add(held[at] <= memory.cap)
        over_time = sum(-memory.amounts[one[1]] * self.starts[one] for one in changes)
        working = sum(self.spans[at[1]] * held[at] for at in starts)
        idle = self.length - sum(self.spans[at[1]] for at in starts)
        self.cp.add(over_time <= working + memory.cap * idle)

    def _conflicts_take_time(self) -> None:
        for first, second in self.asked.problem.deps:
            between = self._conflicting(first, second)
            for copy in range(self.copies):
                one, other = (copy, first), (copy, second)
                time = sum(
                    self.spans[block] * self._starts_between((each, block), one, other)
                    for block in between
                    for each in range(self.copies)
                )
                distance = self.starts[other] - self.starts[one]
                self.cp.add(distance >= self.spans[first] + time)

    def _starts_between(self, start: _Start, one: _Start, other: _Start) -> Any:
        until = 0 if start == other else self._times_started(start, other)
        return until - (1 if start == one else self._times_started(start, one))

    def _conflicting(self, first: int, second: int) -> list[int]:
        """Blocks that share a device with both and with each other, the widest first."""
        conflicting: list[int] = []
        widest = sorted(range(self.size), key=lambda block: (-len(self._devices(block)), block))
        for block in widest:
            if all(self._devices(block) & self._devices(o) for o in (first, second, *conflicting)):
                conflicting.append(block)
        return conflicting

    def _devices(self, block: int) -> set[int]:
        return set(self.asked.problem.blocks[block].devices)


def _close(problem: ScheduleProblem) -> set[tuple[int, int]]:
    """Dependencies whose ends need not be a repetition further apart than their lag.

    A block that takes memory may move to the right by P, all its copies together, until one of its
    successors is in the way; one that gives it back to the left; both only make room. Others move
    to the left if they wait for something, else to the right. No block moves for ever.
    """
    before: list[set[int]] = [set() for _ in problem.blocks]
    behind: list[set[int]] = [set() for _ in problem.blocks]
    for first, second in problem.deps:
        before[second].add(first)
        behind[first].add(second)
    pairs = set()
    for index, block in enumerate(problem.blocks):
        to_the_left = block.memory < 0 or (block.memory == 0 and bool(before[index]))
        if to_the_left and len(before[index]) == 1:
            pairs.add((min(before[index]), index))
        if not to_the_left and len(behind[index]) == 1:
            pairs.add((index, min(behind[index])))
    return pairs


def _parts(asked: Repetition) -> list[list[int]]:
    """Blocks that depend on each other, in topological order; one part if memory crosses them."""
    part = list(range(len(asked.problem.blocks)))

    def find(block: int) -> int:
        while part[block] != block:
            block = part[block]
        return block

    for first, second in asked.problem.deps:
        one, other = sorted((find(first), find(second)))
        part[other] = one
    order = topological_order(asked.problem)
    parts: dict[int, list[int]] = {}
    for block in order:
        parts.setdefault(find(block), []).append(block)
    for memory in asked.memory:
        for blocks in parts.values():
            if sum(memory.amounts.get(block, 0) for block in blocks):
                return [order]
    return list(parts.values())
