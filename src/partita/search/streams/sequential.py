"""One op after the other: what a framework does without streams, and where every search starts."""

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
class Sequential:
    """Runs one op after the other, as frameworks do without streams."""

    def __call__(
        self, problem: StreamsProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[StreamsSolution]:
        """There is one answer; no search."""
        run: Run[StreamsSolution] = Run(stop, "sequential", seed)
        run.bound(lower_bound(problem))
        if run.done():
            return run.result()
        solution = StreamsSolution(tuple(one_by_one(part) for part in problem.parts))
        run.evaluations += 1
        run.offer(solution, evaluate(problem, solution))
        return run.result()


def one_by_one(part: tuple[int, ...]) -> tuple[StreamStage, ...]:
    """Every op a stage of its own; ids are a topological order, so that is always valid."""
    return tuple(StreamStage(groups=((op,),)) for op in sorted(part))
