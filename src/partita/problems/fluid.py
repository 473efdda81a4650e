"""Ops on streams without barriers: what runs together shares the GPU.

Each stream runs its ops one after the other; an op starts when the one before it on its stream and
all its producers have ended, `sync_us` later if a producer was on another stream. An op has a solo
time t and work w: by itself it takes m = max(t, w) and uses u = w / m of the GPU. While ops run
together, all go at

    1 / (max(1, sum of their u) (1 + alpha (how many - 1)))

of their solo speed. No op ends before the sum of the m on any path to it, and nothing is shorter
than the sum of all w.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Load:
    """An op as this model sees it."""

    t_us: float
    w_us: float
    preds: tuple[int, ...]

    @property
    def solo_us(self) -> float:
        """What it takes by itself."""
        return max(self.t_us, self.w_us)

    @property
    def use(self) -> float:
        """The part of the GPU it uses by itself."""
        return self.w_us / self.solo_us if self.solo_us > 0 else 0.0


def run_streams(
    loads: Mapping[int, Load], streams: Sequence[Sequence[int]], sync_us: float, alpha: float
) -> dict[int, tuple[float, float]]:
    """Start and end of every op; ops that can never start are left out."""
    run = _FluidState(loads, streams, sync_us)
    now = 0.0
    run.look(now)
    while run.ready or run.left:
        run.begin(now)
        used = sum(loads[op].use for op in run.left)
        slow = max(1.0, used) * (1 + alpha * max(0, len(run.left) - 1))
        shortest = min(run.left.values(), default=math.inf) * slow
        then = min(now + shortest, *run.ready.values()) if run.ready else now + shortest
        ended = run.advance((then - now) / slow, now + shortest <= then)
        now = then
        for op in ended:
            run.end[op] = now
        if ended:
            run.look(now)
    return {op: (run.start[op], run.end[op]) for op in run.end}


class _FluidState:
    """The state at one instant."""

    def __init__(
        self, loads: Mapping[int, Load], streams: Sequence[Sequence[int]], sync_us: float
    ) -> None:
        self.loads, self.sync_us = loads, sync_us
        self.stream_of = {op: number for number, ops in enumerate(streams) for op in ops}
        self.waiting = [list(reversed(ops)) for ops in streams]
        self.start: dict[int, float] = {}
        self.end: dict[int, float] = {}
        self.ready: dict[int, float] = {}  # heads of streams, and when they may start
        self.left: dict[int, float] = {}  # solo time to go, of what runs

    def look(self, now: float) -> None:
        """Which heads of streams have all they need?"""
        busy = {self.stream_of[op] for op in self.left}
        for number, queue in enumerate(self.waiting):
            if not queue or number in busy or queue[-1] in self.ready:
                continue
            op = queue[-1]
            needs = [pred for pred in self.loads[op].preds if pred in self.stream_of]
            if all(pred in self.end for pred in needs):
                others = [self.end[pred] for pred in needs if self.stream_of[pred] != number]
                self.ready[op] = max([now, *(at + self.sync_us for at in others)])

    def begin(self, now: float) -> None:
        """Start what may start."""
        for op in [op for op, at in self.ready.items() if at <= now]:
            del self.ready[op]
            self.waiting[self.stream_of[op]].pop()
            self.start[op], self.left[op] = now, self.loads[op].solo_us

    def advance(self, solo_us: float, ends: bool) -> list[int]:
        """Let everything run for so much solo time; which ops have ended?"""
        least = min(self.left.values(), default=0.0)
        gone = [op for op, left in self.left.items() if ends and left <= least + ROUNDING * least]
        for op in gone:
            del self.left[op]
        for op in self.left:
            self.left[op] = max(0.0, self.left[op] - solo_us)
        return gone
