"""IOS's search as published, in plain Python: dynamic programming over what is left.

    f(nothing) = 0,   f(S) = min over last stages E of S of  f(S without E) + cost(E)

with at most s groups of at most r ops each, or a merge (Ding et al., "IOS: Inter-Operator
Scheduler for CNN Acceleration", MLSys 2021, algorithm 1). Sets of ops are bits of an int. Written
to be read and to oracle the faster search.

    evaluations: one for the ops one by one, then costs of stages, each stage of a part once
"""

from collections.abc import Iterator
from dataclasses import dataclass

from partita.problems.streams import (
    StreamsProblem,
    StreamsSolution,
    StreamStage,
    evaluate,
    lower_bound,
    part_bound,
    stage_us,
)
from partita.search.base import UNTIL_DONE, Result, Run, Status, Stop
from partita.search.streams.sequential import one_by_one


@dataclass(frozen=True, slots=True)
class Ios:
    """The published dynamic program; as slow as it is plain."""

    def __call__(
        self, problem: StreamsProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[StreamsSolution]:
        """Search part by part until each is at its best."""
        run: Run[StreamsSolution] = Run(stop, "ios", seed)
        run.bound(lower_bound(problem))
        best = [one_by_one(part) for part in problem.parts]
        if run.done():
            return run.result()
        run.evaluations += 1
        run.offer(StreamsSolution(tuple(best)), evaluate(problem, StreamsSolution(tuple(best))))
        bounds = [part_bound(problem, part) for part in problem.parts]
        states = transitions = 0
        for number, part in enumerate(problem.parts):
            search = _Part(problem, tuple(sorted(part)), run)
            if run.done() or not search.finish():
                return run.result()
            best[number] = search.stages()
            bounds[number] = search.best[search.everything][0]
            states += len(search.best) - 1
            transitions += search.transitions
            solution = StreamsSolution(tuple(best))
            run.offer(solution, evaluate(problem, solution))
            run.bound(sum(bounds))
        why = f"no schedule is shorter: {states:,} states, {transitions:,} transitions"
        return run.result(Status.OPTIMAL, why)


class _Part:
    """What is known of one part: the least time of every set of its ops met so far."""

    def __init__(
        self, problem: StreamsProblem, ops: tuple[int, ...], run: Run[StreamsSolution]
    ) -> None:
        self.problem = problem
        self.ops = ops
        self.run = run
        self.everything = (1 << len(ops)) - 1
        place = {op: at for at, op in enumerate(ops)}
        self.follows = [1 << at for at in range(len(ops))]  # what follows from an op, and itself
        for at in reversed(range(len(ops))):
            for later in problem.successors[ops[at]]:
                if later in place:
                    self.follows[at] |= self.follows[place[later]]
        self.best: dict[int, tuple[float, int, StreamStage | None]] = {0: (0.0, 0, None)}
        self.costs: dict[StreamStage, float] = {}
        self.transitions = 0

    def finish(self) -> bool:
        """Settle everything and all it needs; False if stopped."""
        waiting = [self.everything]
        while waiting:
            if self.run.done():
                return False
            left = waiting[-1]
            if left in self.best:
                waiting.pop()
                continue
            missing = [rest for rest in self._without_one(left) if rest not in self.best]
            if missing:
                waiting += missing
            elif not self._settle(left):
                return False
        return True

    def stages(self) -> tuple[StreamStage, ...]:
        """The stages of the best schedule."""
        stages, left = [], self.everything
        while left:
            _, left, stage = self.best[left]
            assert stage is not None
            stages.append(stage)
        return tuple(reversed(stages))

    def _without_one(self, left: int) -> Iterator[int]:
        """The set less an op from which nothing follows; by these steps all sets are reached."""
        for at in _places(left):
            if self.follows[at] & left == 1 << at:
                yield left ^ (1 << at)

    def _settle(self, left: int) -> bool:
        shortest: tuple[float, int, StreamStage | None] = (float("inf"), 0, None)
        for number, (taken, stage) in enumerate(self.last_stages(left)):
            if stage not in self.costs or number % 256 == 0:
                if self.run.done():
                    return False
                if stage not in self.costs:
                    self.run.evaluations += 1
                    self.costs[stage] = stage_us(self.problem, stage)
            self.transitions += 1
            rest = left & ~taken
            time_us = self.best[rest][0] + self.costs[stage]
            if time_us < shortest[0]:
                shortest = (time_us, rest, stage)
        self.best[left] = shortest
        return True

    def last_stages(self, left: int) -> Iterator[tuple[int, StreamStage]]:
        """Every stage that may come last, with the ops that it takes."""
        problem = self.problem
        groups = [self.follows[at] & left for at in _places(left)]
        small = [each for each in groups if problem.r is None or each.bit_count() <= problem.r]
        for chosen in _disjoint(small, len(small) if problem.s is None else problem.s):
            yield sum(chosen), StreamStage(groups=tuple(self._named(group) for group in chosen))
        kinds: dict[object, list[int]] = {}
        for group in groups:
            if group.bit_count() == 1:
                kind = problem.merge_class(self.ops[group.bit_length() - 1])
                kinds.setdefault(kind, []).append(group)
        kinds.pop(None, None)
        for alike in kinds.values():
            for chosen in _disjoint(alike, len(alike)):
                if len(chosen) > 1:
                    yield sum(chosen), StreamStage(merge=self._named(sum(chosen)))

    def _named(self, group: int) -> tuple[int, ...]:
        return tuple(self.ops[at] for at in _places(group))


def _places(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _disjoint(groups: list[int], at_most: int) -> Iterator[tuple[int, ...]]:
    """Every choice of one to `at_most` groups that share no op."""
    for index, first in enumerate(groups):
        yield (first,)
        if at_most > 1:
            others = [group for group in groups[index + 1 :] if not group & first]
            for more in _disjoint(others, at_most - 1):
                yield (first, *more)
