"""Some blocks of some micro-batches in the least time: a model for CP-SAT.

Every task is a block of a micro-batch with a start in steps of the grid, no earlier than its
release; `tail` is the least time from its start to the end of everything. Minimised is the largest
start + tail. With all blocks of all micro-batches that is the makespan; with those before or after
a schedule has come to repeat, it is the way in or out.

Memory. Where it pairs up (see `pairs`), an open pair is an interval from the start of its taker to
the end of its giver, and the intervals of a device never hold more than its cap at once
(cumulative); one kind of pair alone is a chain: the taker waits for the giver of some micro-batches
before. Elsewhere it is a reservoir that every start fills or empties.

The i-th start of a block belongs to micro-batch i, which loses nothing.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.problems.schedule import ScheduleProblem, blocks_per_device
from partita.search.base import Run
from partita.search.schedule.grid import Grid, GridMemory
from partita.search.schedule.pairs import Pair, Pairing
from partita.search.schedule.solver import Allowance, SolverAnswer, solve

Task = tuple[int, int]  # (microbatch, block)


@dataclass(frozen=True, slots=True)
class TaskSegment:
    """The tasks, in steps of the grid; `earlier` are those that come before all of them."""

    problem: ScheduleProblem
    grid: Grid
    memory: Sequence[GridMemory]
    release: Mapping[Task, int]
    tail: Mapping[Task, int]
    earlier: frozenset[Task] = frozenset()

    def least(
        self,
        run: Run[Any],
        *,
        known: Mapping[Task, int] | None,
        horizon: int | None = None,
        below: int | None = None,
        effort: float | None = None,
        allowance: Allowance | None = None,
        on_solution: Callable[[dict[Task, int]], None] | None = None,
        on_bound: Callable[[float], None] | None = None,
        linear: int = 0,
    ) -> SolverAnswer:
        """Starts by task, in the order of `release`; `known` is a schedule to begin with.

        Without one, `horizon` is a time by which all can be done. Only what ends before `below` is
        of interest, where that is given.
        """
        model = _MakespanModel(self, known, horizon)
        if below is not None:
            model.cp.add(model.end < below)
        tasks = list(self.release)

        def hand_over(values: tuple[int, ...]) -> None:
            if on_solution is not None:
                on_solution(dict(zip(tasks, values, strict=True)))

        return solve(
            model.cp,
            [model.starts[task] for task in tasks],
            run,
            effort=effort,
            allowance=allowance,
            linear=linear,
            on_solution=hand_over,
            on_bound=on_bound,
        )


class _MakespanModel:
    """The variables and rules of a `TaskSegment`."""

    def __init__(
        self, asked: TaskSegment, known: Mapping[Task, int] | None, horizon: int | None
    ) -> None:
        from ortools.sat.python import cp_model

        self.asked = asked
        self.spans = asked.grid.spans
        if known is not None:
            horizon = max(known[task] + asked.tail[task] for task in asked.release)
        assert horizon is not None
        self.horizon = horizon
        self.cp = cp_model.CpModel()
        self.starts: dict[Task, cp_model.IntVar] = {}
        for task, release in asked.release.items():
            self.starts[task] = self.cp.new_int_var(release, self.horizon - asked.tail[task], "")
            if known is not None:
                self.cp.add_hint(self.starts[task], known[task])
        self._dependencies()
        self._microbatches_in_order()
        self._one_at_a_time()
        pairing = Pairing(asked.problem)
        for memory in asked.memory:
            pairs = pairing.pairs(memory.amounts)
            if pairs is None:
                self._reservoir(memory)
            else:
                self._within_cap(memory, pairs)
        self.end = end = self.cp.new_int_var(0, self.horizon, "")
        for task, start in self.starts.items():
            self.cp.add(end >= start + asked.tail[task])
        if known is not None:
            self.cp.add_hint(end, self.horizon)
        self.cp.minimize(end)

    def _dependencies(self) -> None:
        for (first, second), lag in zip(self.asked.problem.deps, self.asked.grid.lags, strict=True):
            for (microbatch, block), start in self.starts.items():
                if block == second and (microbatch, first) in self.starts:
                    self.cp.add(start >= self.starts[microbatch, first] + lag)

    def _microbatches_in_order(self) -> None:
        for (microbatch, block), start in self.starts.items():
            if (microbatch + 1, block) in self.starts:
                after = self.starts[microbatch + 1, block]
                self.cp.add(after >= start + self.spans[block])

    def _one_at_a_time(self) -> None:
        runs = {
            task: self.cp.new_fixed_size_interval_var(start, self.spans[task[1]], "")
            for task, start in self.starts.items()
        }
        for here in blocks_per_device(self.asked.problem):
            blocks = set(here)
            self.cp.add_no_overlap([run for task, run in runs.items() if task[1] in blocks])

    def _within_cap(self, memory: GridMemory, pairs: Sequence[Pair]) -> None:
        for taker, giver, amount in pairs:
            rounds = memory.cap // int(amount)
            for microbatch in sorted({m for m, block in self.starts if block == taker}):
                other = (microbatch - rounds, giver)
                if rounds and other in self.starts:
                    end = self.starts[other] + self.spans[giver]
                    self.cp.add(self.starts[microbatch, taker] >= end)
        if len(pairs) == 1 and memory.cap >= pairs[0].amount:
            return
        opened, demands = [], []
        for microbatch, pair in itertools.product(self._microbatches(), pairs):
            interval = self._open(microbatch, pair)
            if interval is not None:
                opened.append(interval)
                demands.append(int(pair.amount))
        self.cp.add_cumulative(opened, demands, memory.cap)

    def _microbatches(self) -> list[int]:
        return sorted({m for m, _ in (*self.starts, *self.asked.earlier)})

    def _open(self, microbatch: int, pair: Pair) -> Any:
        """When the pair is open; None where it is not open at all in this segment."""
        taker, giver = (microbatch, pair.taker), (microbatch, pair.giver)
        if giver in self.asked.earlier:
            return None
        if taker not in self.starts and taker not in self.asked.earlier:
            return None
        begin: Any = self.starts.get(taker, 0)
        end: Any = self.horizon
        if giver in self.starts:
            end = self.starts[giver] + self.spans[pair.giver]
        size = self.cp.new_int_var(0, self.horizon, "")
        return self.cp.new_interval_var(begin, size, end, "")

    def _reservoir(self, memory: GridMemory) -> None:
        held = sum(memory.amounts.get(block, 0) for _, block in self.asked.earlier)
        changes = [task for task in self.starts if task[1] in memory.amounts]
        amounts = [memory.amounts[block] for _, block in changes]
        times: list[Any] = [self.starts[task] for task in changes]
        least = sum(amount for amount in (*amounts, held) if amount < 0)
        if held:
            times, amounts = [-1, *times], [held, *amounts]
        self.cp.add_reservoir_constraint(times, amounts, min(least, 0), memory.cap)
