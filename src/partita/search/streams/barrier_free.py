"""Without barriers: all ops over k streams, held back by their dependencies alone.

List scheduling (Graham 1966): of the ops that are ready, the one with the longest way to the end
goes to the stream where it can start first, its producer's if there is a choice. Done for every
number of streams, then again and again with priorities shifted at random around the best ones;
each result is run in the fluid model (`problems/streams.py`), and the shortest is kept.

    bound        the longest path, all of the work, or what merging convs leaves of them: holds for
                 both forms of answer; no proof is claimed, as stages are scored otherwise
    evaluations  schedules run in the model; O((ops + edges) log ops) each, TRIES at most
"""

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass

from partita.problems.streams import (
    StreamsProblem,
    StreamsSolution,
    evaluate,
    free_bound,
    lower_bound,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop

MOST_STREAMS = 8
SPREADS = (0.01, 0.03, 0.1)  # of random shifts, as parts of the longest path


@dataclass(frozen=True, slots=True)
class BarrierFree:
    """List scheduling over 1, 2, ... streams, then random changes of its priorities."""

    tries: int = 100

    def __call__(
        self, problem: StreamsProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[StreamsSolution]:
        """Try every number of streams, then shift priorities."""
        run: Run[StreamsSolution] = Run(stop, "barrier-free", seed)
        run.bound(min(free_bound(problem), lower_bound(problem)))
        lists = _Lists(problem)
        draw = random.Random(seed)
        most = min(MOST_STREAMS, problem.s or MOST_STREAMS, len(lists.ops))
        best, width = lists.way, 1
        for number in range(1, most + 1):
            if run.done():
                return _result(run)
            if _offer(run, problem, lists.schedule(best, number)):
                width = number
        for _ in range(self.tries):
            if run.done():
                break
            spread = draw.choice(SPREADS) * max(lists.way.values())
            shifted = {op: way + draw.gauss(0.0, spread) for op, way in sorted(best.items())}
            number = draw.randint(max(1, width - 1), min(most, width + 1))
            if _offer(run, problem, lists.schedule(shifted, number)):
                best, width = shifted, number
        return _result(run)


def _offer(
    run: Run[StreamsSolution], problem: StreamsProblem, streams: tuple[tuple[int, ...], ...]
) -> bool:
    run.evaluations += 1
    solution = StreamsSolution(streams=streams)
    return run.offer(solution, evaluate(problem, solution))


def _result(run: Run[StreamsSolution]) -> Result[StreamsSolution]:
    reason = run.reason()
    if reason is None:
        return run.result(Status.FEASIBLE, "no change of priorities tried made it shorter")
    return run.result(Status.STOPPED, reason)


class _Lists:
    """What list scheduling needs to know of a problem."""

    def __init__(self, problem: StreamsProblem) -> None:
        self.problem = problem
        self.ops = sorted(op for part in problem.parts for op in part)
        inside = set(self.ops)
        self.preds = {
            op: [pred for pred in dict.fromkeys(problem.ops[op].preds) if pred in inside]
            for op in self.ops
        }
        self.way: dict[int, float] = {}  # time from the start of an op to the end of all
        for op in reversed(self.ops):
            after = (self.way[each] for each in problem.successors[op] if each in inside)
            self.way[op] = self.span(op) + max(after, default=0.0)

    def span(self, op: int) -> float:
        """The time of an op by itself."""
        each = self.problem.ops[op]
        return max(each.t_us, each.w_us)

    def schedule(
        self, priority: Mapping[int, float], num_streams: int
    ) -> tuple[tuple[int, ...], ...]:
        """The ops of every stream; streams without ops are left out."""
        missing = {op: len(self.preds[op]) for op in self.ops}
        ready = [(-priority[op], op) for op in self.ops if not missing[op]]
        heapq.heapify(ready)
        end: dict[int, float] = {}
        free = [0.0] * num_streams
        streams: list[list[int]] = [[] for _ in free]
        while ready:
            _, op = heapq.heappop(ready)
            stream = self.earliest(op, end, free, streams)
            end[op] = self.able(op, end, stream, streams, free) + self.span(op)
            free[stream] = end[op]
            streams[stream].append(op)
            for each in self.problem.successors[op]:
                if each in missing:
                    missing[each] -= 1
                    if not missing[each]:
                        heapq.heappush(ready, (-priority[each], each))
        return tuple(tuple(ops) for ops in streams if ops)

    def earliest(
        self, op: int, end: dict[int, float], free: list[float], streams: list[list[int]]
    ) -> int:
        """The stream where the op can start first; the fuller one of equals."""
        return min(
            range(len(free)),
            key=lambda number: (self.able(op, end, number, streams, free), -free[number]),
        )

    def able(
        self, op: int, end: dict[int, float], stream: int, streams: list[list[int]],
        free: list[float],
    ) -> float:  # fmt: skip
        """When the op could start on a stream, with the pause after producers elsewhere."""
        last = streams[stream][-1] if streams[stream] else -1
        pause = self.problem.constants.sync_us
        needs = [end[pred] + (0.0 if pred == last else pause) for pred in self.preds[op]]
        return max([free[stream], *needs])
