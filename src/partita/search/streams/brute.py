"""Tries every schedule of every part: the oracle of the other searches, for small parts.

Parts do not influence each other, so the best schedule of each makes the best of all. Nothing is
remembered between schedules: the same ops left over are gone through again and again.

    evaluations: all lists of stages, part by part added up; 149 for 6 ops of SqueezeNet, 5 million
    for 12 ops of Inception v3
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from partita.problems.streams import (
    StreamsProblem,
    StreamsSolution,
    StreamStage,
    evaluate,
    lower_bound,
    stage_us,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.streams.sequential import one_by_one

MAX_PART_OPS = 200  # the recursion is as deep as a part is long


@dataclass(frozen=True, slots=True)
class BruteStreams:
    """Tries every schedule of every part; for small parts and as oracle."""

    def __call__(
        self, problem: StreamsProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[StreamsSolution]:
        """Search until every schedule was tried."""
        run: Run[StreamsSolution] = Run(stop, "brute", seed)
        longest = max(map(len, problem.parts))
        if longest > MAX_PART_OPS:
            run.bound(lower_bound(problem))
            why = f"a part has {longest} ops; schedules of at most {MAX_PART_OPS} are tried"
            return run.result(Status.STOPPED, why)
        best = [one_by_one(part) for part in problem.parts]
        for number, part in enumerate(problem.parts):
            shortest = float("inf")
            for stages in schedules(problem, frozenset(part)):
                if run.done():
                    run.bound(lower_bound(problem))  # not earlier: an oracle trusts no bound
                    return run.result()
                run.evaluations += 1
                time_us = sum(stage_us(problem, stage) for stage in stages)
                if time_us < shortest:
                    shortest, best[number] = time_us, stages
                    solution = StreamsSolution(tuple(best))
                    run.offer(solution, evaluate(problem, solution))
        return run.result(Status.OPTIMAL, f"all {run.evaluations:,} schedules were tried")


def schedules(problem: StreamsProblem, left: frozenset[int]) -> Iterator[tuple[StreamStage, ...]]:
    """Every list of stages that does what is left."""
    if not left:
        yield ()
        return
    for last in last_stages(problem, left):
        for before in schedules(problem, left.difference(last.ops)):
            yield (*before, last)


def last_stages(problem: StreamsProblem, left: frozenset[int]) -> Iterator[StreamStage]:
    """Every stage that may come last in what is left."""
    closures = [problem.closure(op, left) for op in sorted(left)]
    allowed = [each for each in closures if problem.r is None or len(each) <= problem.r]
    for groups in _disjoint(allowed, len(left) if problem.s is None else problem.s):
        yield StreamStage(groups=tuple(tuple(sorted(group)) for group in groups))
    last = [op for op in sorted(left) if problem.closure(op, left) == {op}]
    kinds: dict[object, list[int]] = {}
    for op in last:
        kinds.setdefault(problem.merge_class(op), []).append(op)
    kinds.pop(None, None)  # ops that cannot be merged
    for alike in kinds.values():
        for size in range(2, len(alike) + 1):
            for ops in itertools.combinations(alike, size):
                yield StreamStage(merge=ops)


def _disjoint(groups: list[frozenset[int]], at_most: int) -> Iterator[tuple[frozenset[int], ...]]:
    """Every choice of one to `at_most` groups that share no op."""
    for index, first in enumerate(groups):
        yield (first,)
        if at_most > 1:
            others = [group for group in groups[index + 1 :] if not group & first]
            for more in _disjoint(others, at_most - 1):
                yield (first, *more)
