"""The default: built starts, then races of annealing walks, with a proven lower bound.

Few placements are tried one by one, which proves the best. Otherwise a *race* begins with the best
of many built placements: single devices, list schedules, stages filled by work or by memory, random
stages. All are annealed for a while; then the better half goes on from its best, a little cooler
and twice as long, until two are left. Races follow one another, longer ones later; every second
one has the best placement so far among its runners.
"""

import math
from dataclasses import dataclass

import numpy as np

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import UNTIL_DONE, Result, Stop
from partita.search.placement.attempt import EFFORT_S, FEW_CHOICES, Attempt, usual_evaluations
from partita.search.placement.episodes import cheapest, make_episodes, memory_multiplier
from partita.search.placement.every import all_tried, num_placements
from partita.search.placement.labels import LabelBound
from partita.search.placement.lists import by_rank, critical_path, earliest_end
from partita.search.placement.moves import line_of
from partita.search.placement.starts import random_stages, single_devices, stages
from partita.search.placement.tables import I64
from partita.search.placement.variation import costs
from partita.search.placement.walk import Walker, begin_episode, best_of, walker

_WIDTHS = (50, 300)  # labels of the lower bound
_USUAL_GENES = 128
_FEWEST = 8  # runners of a large network


@dataclass(frozen=True, slots=True)
class AutoPlacement:
    """Races of annealing walks from built placements; small problems are solved by trying all."""

    most_tried: int = 2000  # a problem with at most so many placements is solved by trying all
    effort_s: float = EFFORT_S  # without a limit: about so long on one core, by the problem's size
    runners: int = 32
    splits: int = 1000  # random stages to choose runners from
    first_steps: int = 500  # evaluations of each runner in the first heat
    hot: float = 0.02  # temperatures, of the best score
    cold: float = 1e-3
    cooler: float = 0.85  # from one heat to the next

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Ends at the limit, without one when its effort is spent, or at the lower bound."""
        with Attempt(problem, stop, "auto", seed) as attempt:
            if not attempt.goes_on():
                return attempt.result()
            if num_placements(attempt.net) <= self.most_tried:
                return all_tried(attempt)
            _Races(self, attempt, line_of(problem, attempt.net), seed).run()
            return attempt.result()


class _Races:
    """One race after another, while the attempt goes on and effort is left."""

    def __init__(self, auto: AutoPlacement, attempt: Attempt, line: I64, seed: int) -> None:
        self.auto, self.attempt, self.line = auto, attempt, line
        self.generator = np.random.default_rng((seed, 0))
        net = attempt.net
        self.budget: float = usual_evaluations(
            len(line), len(net.limit_bytes), net.batches, auto.effort_s
        )
        if attempt.run.stop.time_s is not None or attempt.run.stop.evaluations is not None:
            self.budget = math.inf  # who sets a limit wants it used
        # In a large network a move changes little: cooler walks, and fewer, longer ones.
        self.small = min(1.0, _USUAL_GENES / len(line))
        self.num_runners = max(min(auto.runners, _FEWEST), int(auto.runners * self.small))
        self.first_steps = auto.first_steps * auto.runners // self.num_runners
        self.splits = auto.splits
        if len(line) * len(net.limit_bytes) <= FEW_CHOICES:  # a short race finds what there is
            self.num_runners = min(self.num_runners, _FEWEST)
            self.first_steps, self.splits = auto.first_steps // 5, auto.splits // 10
        self.walkers = [walker(net, seed, number) for number in range(self.num_runners)]
        lists = [by_rank(net, earliest_end), critical_path(net)]
        built = [single_devices(net), *(array[None, :] for array in lists if array is not None)]
        self.built = np.concatenate((*built, stages(net, line, seed)))
        attempt.score(self.built)
        self.price = memory_multiplier(net, attempt.makespan_ms)
        self.labels: LabelBound | None = None
        self.bounded_ms = math.inf  # the score that the bound was last asked to reach

    def run(self) -> None:
        """Race until effort or time is spent."""
        number = 0
        while self.goes_on():
            self.race(number)
            self.raise_bound()
            number += 1

    def raise_bound(self) -> None:
        """Look for a better lower bound, if the best score is another one than last time."""
        attempt = self.attempt
        if attempt.best_score >= self.bounded_ms:
            return
        self.bounded_ms = attempt.best_score
        if self.labels is None:
            self.labels = LabelBound(attempt.net, attempt.goes_on)
            attempt.run.bound(self.labels.root())
        for width in _WIDTHS:
            if attempt.goes_on():
                value = self.labels.search(width, attempt.best_score, attempt.goes_on)
                attempt.run.bound(value)

    def goes_on(self) -> bool:
        return self.attempt.goes_on() and self.attempt.run.evaluations < self.budget

    def race(self, number: int) -> None:
        """One race: heats of ever fewer, longer walks."""
        auto, runners = self.auto, list(self.starts(with_best=number % 2 == 1))
        walkers = self.walkers[: len(runners)]
        steps, heat = self.first_steps * 2 ** min(number // 2, 3), 0
        while self.goes_on():
            scale = min(self.attempt.best_score, self.attempt.makespan_ms) * self.small**2
            for walk, start in zip(walkers, runners, strict=True):
                begin_episode(
                    walk,
                    start,
                    steps,
                    hot=auto.hot * scale * auto.cooler**heat,
                    cold=auto.cold * scale,
                    price=self.price,
                )
            make_episodes(self.attempt, self.line, walkers)
            if number == heat == 0:  # early, so that a run that is cut short has a bound too
                self.raise_bound()
            if len(walkers) <= 2:
                break
            walkers = sorted(walkers, key=lambda walk: best_of(walk)[1])[: len(walkers) // 2]
            runners = [_where(walk) for walk in walkers]
            steps, heat = 2 * steps, heat + 1

    def starts(self, *, with_best: bool) -> I64:
        """The cheapest of the built placements and of new random stages."""
        attempt, net = self.attempt, self.attempt.net
        count = max(2 * self.num_runners, min(self.splits, int(0.5 / attempt.evaluation_s)))
        staged = random_stages(net, self.line, count, self.generator)
        placements = np.concatenate((self.built, staged))
        cost = costs(attempt.details(placements), self.price)
        array = cheapest(placements, cost, self.num_runners)
        if with_best or not len(array):
            array = np.concatenate((attempt.best[None, :], array))[: self.num_runners]
        return array


def _where(walk: Walker) -> I64:
    """Where a runner goes on: its best placement, or where it is if it found none."""
    placement, score = best_of(walk)
    return (placement if score < np.inf else walk.current).copy()
