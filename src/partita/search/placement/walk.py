"""A walk through placements, compiled: propose, evaluate against a threshold, accept or not.

With temperature T a candidate of cost c is accepted from cost c0 with probability
min(1, exp((c0 - c) / T)). The random number is drawn first, so the evaluation can be given up as
soon as the candidate is surely too expensive. T falls geometrically from `hot` to `cold` over an
episode; zero is hill climbing, where what is not worse is accepted.

The cost is makespan + price * bytes over the limits. The price moves: up while the walk is where
memory does not suffice, down while it does, so that the walk stays near that border. Only scores
count as results.
"""

from typing import NamedTuple

import numpy as np

from partita.compiled import compiled
from partita.search.placement.fastsim import FEW_JOBS, INVALID, PlacementWork, cost_of, workspace
from partita.search.placement.moves import ALL_MOVES, move, random_state, uniform
from partita.search.placement.tables import F64, I64, U64, PlacementArrays

_MAKESPAN, _OVER, _PRICE, _FLOOR, _HOT, _COLD, _BEST = range(7)
_STEP, _TOTAL, _KINDS = range(3)
_PRICE_PERIOD, _PRICE_STEP = 32, 1.1
_SMALLEST_MULTIPLIER = 0.1  # of the first price
_MOST_IDLE = 64  # moves in a row that change nothing: there is nowhere to go


class Walker(NamedTuple):
    """The state of a walk; it can be left and taken up at any evaluation."""

    work: PlacementWork
    rng: U64
    current: I64
    candidate: I64
    best: I64  # the best of this episode; its score is in `floats`
    floats: F64  # of `current`: makespan, bytes over; price, its least, hot, cold; best score
    steps: I64  # evaluations in this episode so far, and in all; the kinds of moves


def walker(net: PlacementArrays, seed: int, stream: int) -> Walker:
    """A walker that has no episode yet."""
    size = len(net.output_bytes)
    return Walker(
        work=workspace(net),
        rng=random_state(seed, stream),
        current=np.zeros(size, np.int64),
        candidate=np.zeros(size, np.int64),
        best=np.zeros(size, np.int64),
        floats=np.full(7, np.inf),
        steps=np.zeros(3, np.int64),
    )


def begin_episode(
    walk: Walker,
    start: I64,
    total: int,
    *,
    hot: float,
    cold: float,
    price: float,
    kinds: int = ALL_MOVES,
) -> None:
    """Put the walker somewhere, with a number of evaluations to make from there.

    The first evaluation is that of the start.
    """
    walk.current[:] = start
    walk.floats[:] = np.inf, 0.0, price, price * _SMALLEST_MULTIPLIER, hot, cold, np.inf
    walk.steps[:] = 0, total, kinds


def steps_left(walk: Walker) -> int:
    """Evaluations left in this episode."""
    return int(walk.steps[_TOTAL] - walk.steps[_STEP])


def best_of(walk: Walker) -> tuple[I64, float]:
    """The best placement of this episode, and its score; infinite if there is none."""
    return walk.best, float(walk.floats[_BEST])


def _few(net: PlacementArrays, line: I64, walk: Walker, count: int) -> bool:
    return count * len(line) * net.batches <= FEW_JOBS


@compiled(small=_few, nogil=True)
def advance(net: PlacementArrays, line: I64, walk: Walker, count: int) -> int:
    """Make at most `count` evaluations of the episode; how many were made.

    Fewer only where the episode ends; it also ends where no move changes anything.
    """
    floats, steps = walk.floats, walk.steps
    current, candidate, work, rng = walk.current, walk.candidate, walk.work, walk.rng
    count = min(count, steps[_TOTAL] - steps[_STEP])
    done, idle = 0, 0
    price = floats[_PRICE]
    while done < count and idle < _MOST_IDLE:
        for layer in range(len(current)):
            candidate[layer] = current[layer]
        most = np.inf
        if steps[_STEP] + done > 0:
            if not move(net, rng, line, candidate, steps[_KINDS]):
                idle += 1
                continue
            most = floats[_MAKESPAN] + price * floats[_OVER]
            if floats[_HOT] > 0:
                passed = (steps[_STEP] + done) / steps[_TOTAL]
                temperature = floats[_HOT] * (floats[_COLD] / floats[_HOT]) ** passed
                most -= temperature * np.log(1.0 - uniform(rng))
        idle = 0
        cost = cost_of(net, work, candidate, price, most)
        done += 1
        if cost <= most:
            for layer in range(len(current)):
                current[layer] = candidate[layer]
            floats[_MAKESPAN], floats[_OVER] = cost, 0.0
            if cost < INVALID:
                floats[_MAKESPAN], floats[_OVER] = work.result[0], work.result[3]
                if work.result[1] < floats[_BEST]:
                    floats[_BEST] = work.result[1]
                    for layer in range(len(current)):
                        walk.best[layer] = candidate[layer]
        if (steps[_STEP] + done) % _PRICE_PERIOD == 0:
            if floats[_OVER] > 0:
                price = min(price * _PRICE_STEP, net.penalty)
            else:
                price = max(price / _PRICE_STEP, floats[_FLOOR])
    floats[_PRICE] = price
    steps[_STEP] += done
    if idle == _MOST_IDLE:
        steps[_STEP] = steps[_TOTAL]
    return done
