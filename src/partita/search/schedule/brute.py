"""Complete search, for tiny problems: the oracle of the others.

With a number of micro-batches. A schedule in which no block can be moved to the left alone is
given by the order of its starts: each block then starts as soon as its dependencies and devices
allow. Some schedule of this kind has the least makespan, so all of them are walked through, depth
first, as sequences with starts that do not decrease (of equal starts, those nearest to the end of
their micro-batch come first, so that each schedule is met once).
Memory on a device depends on the order there alone, and is checked start by start; a block that
waits for memory simply comes later in the sequence. Micro-batches are alike, so the i-th start of
a block belongs to micro-batch i. What cannot beat the best is cut off: a device must still do its
remaining work, and a block is followed by its longest path. Exponential in blocks * micro-batches.

Without a number, see `brute_period`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from partita.problems.schedule import (
    ScheduleProblem,
    ScheduleSolution,
    lower_bound,
    memory_left_per_device,
    predecessors,
    solution_of,
    tails,
    work_per_device,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.schedule.brute_period import search_period
from partita.search.schedule.lightest import lightest_order, why_infeasible


@dataclass(frozen=True, slots=True)
class BruteSchedule:
    """Tries every schedule; for a handful of blocks."""

    microbatches_per_repetition: int = 1  # where no number of micro-batches is given

    def __call__(
        self, problem: ScheduleProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[ScheduleSolution]:
        """Optimal for a number of micro-batches; nothing is random."""
        run: Run[ScheduleSolution] = Run(stop, "brute", seed)
        run.bound(lower_bound(problem))
        if problem.num_microbatches is None:
            return search_period(problem, self.microbatches_per_repetition, run)
        _StartWalk(problem, problem.num_microbatches).through_all(run)
        if run.reason() is not None:
            return run.result()
        if run.solution is None:
            why = why_infeasible(problem, lightest_order(problem))
            return run.result(Status.INFEASIBLE, why or "no order of the blocks fits the caps")
        return run.result(Status.OPTIMAL, "every schedule was tried")


class _Move(NamedTuple):
    """The next start in the sequence; moves are made in ascending order."""

    start: float
    rank: int  # of the block among those with the same start
    block: int


class _StartWalk:
    """The sequence of starts so far, and what follows from it."""

    def __init__(self, problem: ScheduleProblem, count: int) -> None:
        self.problem = problem
        self.count = count
        self.before = predecessors(problem)
        self.after = tails(problem)
        nearest_first = sorted(range(len(problem.blocks)), key=lambda b: (self.after[b], b))
        self.rank = {block: rank for rank, block in enumerate(nearest_first)}
        self.room = memory_left_per_device(problem)
        self.starts: list[list[float]] = [[] for _ in problem.blocks]  # by micro-batch
        self.free_at: list[list[float]] = [[0] for _ in range(problem.num_devices)]  # a stack each
        self.held: list[float] = [0] * problem.num_devices
        self.to_do = [count * work for work in work_per_device(problem)]

    def through_all(self, run: Run[ScheduleSolution]) -> None:
        """Walk through all sequences; offer and count each complete one."""
        made: list[_Move] = []
        choices = [iter(self.moves(_Move(0, -1, -1)))]
        while choices and not run.done():
            move = next(choices[-1], None)
            if move is None:
                choices.pop()
                if made:
                    self.undo(made.pop())
                continue
            self.do(move)
            made.append(move)
            if len(made) == self.count * len(self.starts):
                table = [list(row) for row in zip(*self.starts, strict=True)]
                solution = solution_of(self.problem, table)
                run.evaluations += 1
                run.offer(solution, solution.makespan)
            hopeless = run.objective is not None and self.least(move) >= run.objective
            choices.append(iter(() if hopeless else self.moves(move)))

    def moves(self, last: _Move) -> list[_Move]:
        """What can come next, in order: taking the first each time skips nothing."""
        moves = []
        for block, starts in enumerate(self.starts):
            if len(starts) < self.count and self.is_ready(block) and self.fits(block):
                move = _Move(self.earliest(block), self.rank[block], block)
                if move > last:
                    moves.append(move)
        return sorted(moves)

    def is_ready(self, block: int) -> bool:
        """Has everything started that the next micro-batch of the block waits for?"""
        microbatch = len(self.starts[block])
        return all(len(self.starts[first]) > microbatch for first, _ in self.before[block])

    def fits(self, block: int) -> bool:
        """Does each device still have room after its start?"""
        memory = self.problem.blocks[block].memory
        devices = self.problem.blocks[block].devices
        return all(self.held[device] + memory <= self.room[device] for device in devices)

    def earliest(self, block: int) -> float:
        microbatch = len(self.starts[block])
        return max(
            *(self.free_at[device][-1] for device in self.problem.blocks[block].devices),
            *(self.starts[first][microbatch] + lag for first, lag in self.before[block]),
            0,
        )

    def least(self, move: _Move) -> float:
        """No completion of the sequence ends before this."""
        working = (free[-1] + work for free, work in zip(self.free_at, self.to_do, strict=True))
        return max(*working, move.start + self.after[move.block])

    def do(self, move: _Move) -> None:
        block = self.problem.blocks[move.block]
        self.starts[move.block].append(move.start)
        for device in block.devices:
            self.free_at[device].append(move.start + block.span)
            self.held[device] += block.memory
            self.to_do[device] -= block.span

    def undo(self, move: _Move) -> None:
        block = self.problem.blocks[move.block]
        self.starts[move.block].pop()
        for device in block.devices:
            self.free_at[device].pop()
            self.held[device] -= block.memory
            self.to_do[device] += block.span
