"""Breadth-first levels: every op as early as its producers allow, all ops of a level together.

Level 0 are the ops that need nothing of the part, level k + 1 those whose last producer is in level
k. A level is one stage with a group per op, or several where a stage may not have that many groups.
"""

import itertools
from dataclasses import dataclass

from partita.problems.streams import (
    StreamsProblem,
    StreamsSolution,
    StreamStage,
    evaluate,
    lower_bound,
)
from partita.search.base import UNTIL_DONE, Result, Run, Stop


@dataclass(frozen=True, slots=True)
class GreedyStreams:
    """Runs all ops that are ready together, level by level."""

    def __call__(
        self, problem: StreamsProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[StreamsSolution]:
        """There is one answer; no search."""
        run: Run[StreamsSolution] = Run(stop, "greedy", seed)
        run.bound(lower_bound(problem))
        if run.done():
            return run.result()
        solution = StreamsSolution(tuple(by_level(problem, part) for part in problem.parts))
        run.evaluations += 1
        run.offer(solution, evaluate(problem, solution))
        return run.result()


def by_level(problem: StreamsProblem, ops: tuple[int, ...]) -> tuple[StreamStage, ...]:
    """The levels of these ops as stages."""
    level: dict[int, int] = {}
    for op in sorted(ops):
        preds = (level[pred] + 1 for pred in problem.ops[op].preds if pred in level)
        level[op] = max(preds, default=0)
    order = sorted(level, key=lambda op: (level[op], op))
    stages = []
    for _, alike in itertools.groupby(order, key=level.__getitem__):
        together = [(op,) for op in alike]
        size = len(together) if problem.s is None else problem.s
        begins = range(0, len(together), size)
        stages += [StreamStage(groups=tuple(together[begin : begin + size])) for begin in begins]
    return tuple(stages)
