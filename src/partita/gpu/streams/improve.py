"""Changes a plan and the ways of its steps at random, measures the whole, keeps what is faster.

    moves   a step takes another of its fast ways
            priorities of list scheduling are shifted, with the same or another number of streams
            the ways of all equal steps change together

A change is timed in turns with the best so far and kept if it is faster by more than noise. What
runs fastest alone is not what runs best in company: here that is found out. Ctrl-C ends it early.
"""

import random
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from partita.gpu.measure import compare_us, raise_interrupt
from partita.gpu.streams import order
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.order import LaunchPlan
from partita.gpu.streams.replay import Replay
from partita.gpu.streams.tune import Timed, structure
from partita.gpu.streams.ways import Way

MARGIN = 0.002  # a change must win by this fraction
STREAMS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class Improved:
    """The best that was found; was it cut short by Ctrl-C?"""

    plan: LaunchPlan
    ways: dict[str, Way]
    interrupted: bool = False


def improve(
    bound: Bound,
    plan: LaunchPlan,
    ways: Mapping[str, Way],
    timed: Mapping[int, Timed],
    limit_s: float,
    seed: int,
) -> Improved:
    """The best plan and ways found within the time; at least as fast as what was given."""
    draw, end = random.Random(seed), time.perf_counter() + limit_s
    best, best_ways = Replay(bound, plan, ways), dict(ways)
    moves = _Moves(bound, timed, draw, plan.num_streams)
    try:
        while time.perf_counter() < end:
            next_plan, next_ways = moves.change(best.plan, best_ways)
            other = _replay(bound, next_plan, next_ways)
            if other is None:
                continue
            mine, yours = compare_us([best.replay, other.replay], rounds=3, replays=8)
            if yours < mine * (1 - MARGIN):
                best, best_ways = other, next_ways
    except KeyboardInterrupt:
        return Improved(best.plan, best_ways, interrupted=True)
    return Improved(best.plan, best_ways)


def _replay(bound: Bound, plan: LaunchPlan, ways: Mapping[str, Way]) -> Replay | None:
    """The graph of a plan, if it can be had."""
    try:
        return Replay(bound, plan, ways)
    except RuntimeError as error:  # no memory, or Ctrl-C in the middle of a capture
        raise_interrupt(error)
        return None


class _Moves:
    """Draws changes."""

    def __init__(
        self, bound: Bound, timed: Mapping[int, Timed], draw: random.Random, num_streams: int
    ) -> None:
        self.bound, self.timed, self.draw = bound, timed, draw
        self.num_streams = num_streams
        self.ties: dict[int, float] = {}
        alike = defaultdict(list)
        for index in timed:
            alike[structure(bound, bound.flow.steps[index])].append(index)
        self.alike = [group for group in alike.values() if len(timed[group[0]].ways) > 1]

    def change(
        self, plan: LaunchPlan, ways: Mapping[str, Way]
    ) -> tuple[LaunchPlan, dict[str, Way]]:
        if self.alike and self.draw.random() < 0.7:
            return plan, self.other_ways(ways)
        return self.other_plan(plan), dict(ways)

    def other_ways(self, ways: Mapping[str, Way]) -> dict[str, Way]:
        """One step, or all that are equal to it, run another way."""
        group = self.draw.choice(self.alike)
        timed = self.timed[group[0]]
        fast = [
            way
            for way, time_us in zip(timed.ways, timed.times_us, strict=True)
            if time_us < 1.6 * timed.times_us[0] + 0.5
        ]
        way = self.draw.choice(fast)
        chosen = group if self.draw.random() < 0.5 else [self.draw.choice(group)]
        return {**ways, **{self.bound.flow.steps[index].name: way for index in chosen}}

    def other_plan(self, plan: LaunchPlan) -> LaunchPlan:
        """List scheduling again with other priorities."""
        times = {index: each.times_us[0] + 1.0 for index, each in self.timed.items()}
        spread = self.draw.choice((2.0, 5.0, 15.0))
        ties = {index: self.draw.gauss(0.0, spread) for index in times}
        return order.listed(self.bound.flow, self.draw.choice(STREAMS), times, ties)
