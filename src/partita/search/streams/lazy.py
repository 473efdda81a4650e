"""Costs only the stages that the shortest schedule may need: for costs that have to be measured.

Every stage has an optimistic cost: its solo times and its work, without what company costs. The
shortest schedule with these costs is found, its stages are measured, and so on with the measured
costs until a schedule comes out of which every stage is measured: with no stage below its
optimistic cost, no other can be shorter. Each of these times is a lower bound on the way there.

A stage is known by what it runs: groups of ops with equal type, times and shape. Equal stages
anywhere in the problem are measured once. Parts too large to be swept are searched in chunks,
without proof.

    evaluations: stages measured
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partita.problems.streams import (
    StreamsOp,
    StreamsProblem,
    StreamsSolution,
    StreamStage,
    lower_bound,
    stage_us,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.streams.piece import SweepPiece
from partita.search.streams.sequential import one_by_one
from partita.search.streams.sweep import MAX_TABLE, BestStages, Known, rules, solve, stage_hash
from partita.search.streams.units import units
from partita.search.streams.windows import chunks, named

Measure = Callable[[StreamsProblem, StreamStage], float]
HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Lazy:
    """Measures the stages of promising schedules only, until one is proven the shortest.

    `overhead` says how much of the problem's own cost of company (SYNC, ALPHA) is taken for
    granted: 0 nothing, 1 all of it. A lower bound is one if no stage is measured below that.
    """

    measure: Measure = stage_us
    overhead: float = 0.0

    def __call__(
        self, problem: StreamsProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[StreamsSolution]:
        """Search until all stages of the shortest schedule are measured."""
        run: Run[StreamsSolution] = Run(stop, "lazy", seed)
        run.bound(lower_bound(problem))
        work = _LazyWork(problem, run, self)
        try:
            if run.done():
                return run.result()
            work.begin()
            waiting = list(range(len(work.pieces)))
            while waiting:  # in turns, so that all are good early
                waiting = [number for number in waiting if not work.settled(number)]
        except _StoppedError:
            return run.result()
        if work.unproven:
            return run.result(None, f"{work.unproven} ops have too many schedules to prove one")
        why = f"no schedule is shorter: {run.evaluations:,} stages measured"
        return run.result(Status.OPTIMAL, why)


class _StoppedError(Exception):
    """A stop rule holds."""


class _LazyWork:
    """What was measured, and the best stages of every piece."""

    def __init__(self, problem: StreamsProblem, run: Run[StreamsSolution], search: Lazy) -> None:
        self.problem = problem
        self.run = run
        self.search = search
        self.rules = rules(problem.constants, problem.r, problem.s, overhead=search.overhead)
        self.op_hash = {op: _hash(problem.ops[op]) for part in problem.parts for op in part}
        self.measured: dict[int, float] = {}
        self.keys, self.cost_us = np.zeros(64, np.uint64), np.zeros(64)
        self.parts: list[int] = []  # one entry per piece, as in the next four
        self.pieces: list[SweepPiece] = []
        self.stages: list[tuple[StreamStage, ...]] = []
        self.bounds: list[float] = []
        self.proves: list[bool] = []  # false for chunks of what is too large
        self.unproven = 0

    def begin(self) -> None:
        """Every op by itself: where the search starts."""
        for unit in units(self.problem):
            if unit.piece is not None and unit.piece.entries <= MAX_TABLE:
                self.add(unit.part, unit.piece, unit.bound_us, proves=True)
                continue
            self.unproven += len(unit.ops)
            bound_us = unit.bound_us  # of all chunks together: the first one has it
            for piece in chunks(self.problem, unit.ops):
                self.add(unit.part, piece, bound_us, proves=False)
                bound_us = 0.0
        for stages in self.stages:
            self.time(stages)
        self.offer()

    def add(self, part: int, piece: SweepPiece, bound_us: float, *, proves: bool) -> None:
        """One more piece to be searched by itself."""
        self.parts.append(part)
        self.pieces.append(piece)
        self.stages.append(one_by_one(piece.ops))
        self.bounds.append(bound_us)
        self.proves.append(proves)

    def settled(self, number: int) -> bool:
        """Measure the stages of the shortest schedule of a piece; were they all known?"""
        piece = self.pieces[number]
        answer = self.solve(piece)
        if self.proves[number]:
            self.bounds[number] = max(self.bounds[number], answer.time_us)
            self.run.bound(sum(self.bounds))
        stages, before = named(answer.stages, piece.ops), len(self.measured)
        if self.time(stages) < self.time(self.stages[number]):
            self.stages[number] = stages
            self.offer()
        return len(self.measured) == before

    def solve(self, piece: SweepPiece) -> BestStages:
        """The shortest schedule with what is known."""
        hashes = np.array([self.op_hash[op] for op in piece.ops], np.uint64)
        known = Known(hashes, self.keys, self.cost_us)
        answer = solve(piece, self.rules, self.run.done, known)
        if answer is None:
            raise _StoppedError
        return answer

    def offer(self) -> None:
        parts: list[list[StreamStage]] = [[] for _ in self.problem.parts]
        for part, stages in zip(self.parts, self.stages, strict=True):
            parts[part] += stages
        solution = StreamsSolution(tuple(map(tuple, parts)))
        self.run.offer(solution, sum(self.time(stages) for stages in self.stages))

    def time(self, stages: tuple[StreamStage, ...]) -> float:
        """The time of these stages; those not known yet are measured."""
        return sum(self.cost(stage) for stage in stages)

    def cost(self, stage: StreamStage) -> float:
        key = stage_hash(self.op_hash, stage)
        if key not in self.measured:
            if self.run.done():
                raise _StoppedError
            self.run.evaluations += 1
            self.measured[key] = self.search.measure(self.problem, stage)
            if 2 * len(self.measured) > len(self.keys):
                self.keys = np.zeros(4 * len(self.keys), np.uint64)
                self.cost_us = np.zeros(len(self.keys))
                for each in self.measured:
                    self.note(each)
            else:
                self.note(key)
        return self.measured[key]

    def note(self, key: int) -> None:
        """Make a measured cost visible to the sweep."""
        mask = len(self.keys) - 1
        at = key & mask
        while self.keys[at]:
            at = (at + 1) & mask
        self.keys[at], self.cost_us[at] = key, self.measured[key]


def _hash(op: StreamsOp) -> int:
    text = repr((op.type, op.t_us, op.w_us, op.conv)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=HASH_BYTES).digest())
