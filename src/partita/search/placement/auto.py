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
from partita.search.placement.bounds import symmetry_of
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
_WIDEST = 1000  # once, between races
_USUAL_GENES = 128
_FEWEST = 8  # runners of a large network
_CHOICE = 8  # times as many starts are looked at as there are runners
_MOST_ELITES = 24
_BETTER = 0.995  # as much better a score must be for the bound to be looked for again
_PARTS_ALIKE = 12  # placements are alike if fewer than one in so many genes move


@dataclass(frozen=True, slots=True)
class AutoPlacement:
    """Races of annealing walks from built placements; small problems are solved by trying all."""

    most_tried: int = 2000  # a problem with at most so many placements is solved by trying all
    effort_s: float = EFFORT_S  # without a limit: about so long on one core, by the problem's size
    runners: int = 16
    splits: int = 1000  # random stages to choose runners from
    first_steps: int = 500  # evaluations of each runner in the first heat
    hot: float = 0.01  # temperatures, of the best score
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
        self.elites: list[tuple[float, bytes]] = []  # the best of walks: score, placement
        self.alike = symmetry_of(net).first
        self.first_layer = net.gene_layer[net.gene_start[:-1]]
        self.near = len(line) / _PARTS_ALIKE
        self.labels: LabelBound | None = None
        self.bounded_ms = math.inf  # the score that the bound was last asked to reach

    def run(self) -> None:
        """Race until effort or time is spent."""
        number = 0
        while self.goes_on():
            self.race(number)
            self.raise_bound()
            if number == 0 and self.labels is not None and self.labels.gave_up:
                self.raise_bound_to(_WIDEST)
            number += 1

    def raise_bound(self) -> None:
        """Look for a better lower bound, if a better score may leave less to be given up."""
        attempt = self.attempt
        if attempt.best_score >= self.bounded_ms * _BETTER:
            return
        if self.labels is not None and not self.labels.gave_up:
            return
        self.bounded_ms = attempt.best_score
        if self.labels is None:
            self.labels = LabelBound(attempt.net, attempt.goes_on)
            attempt.run.bound(self.labels.root())
        for width in _WIDTHS:
            if attempt.goes_on() and self.labels.gave_up:
                self.raise_bound_to(width)

    def raise_bound_to(self, width: int) -> None:
        """Look for a lower bound with so many labels."""
        assert self.labels is not None
        attempt = self.attempt
        value = self.labels.search(width, attempt.best_score, attempt.goes_on)
        attempt.run.bound(value)

    def keep_elites(self, walkers: list[Walker]) -> None:
        """Remember the best of each walk, among the best of all of them."""
        ended = [(score, placement.tobytes()) for placement, score in map(best_of, walkers)]
        known = sorted({*self.elites, *(one for one in ended if one[0] < np.inf)})
        placements = [np.frombuffer(row, np.int64) for _, row in known]
        kept = self.unlike(placements)[:_MOST_ELITES]
        self.elites = [known[number] for number in kept]

    def unlike(self, placements: list[I64]) -> list[int]:
        """The numbers of placements, without those that are much like an earlier one.

        Devices get their genes in a row mostly, so how many each has, in the order of the line,
        says where the borders are, whatever the devices' names.
        """
        sizes: list[I64] = []
        kept: list[int] = []
        for number, placement in enumerate(placements):
            along = placement[self.first_layer[self.line]]
            devices, first, count = np.unique(along, return_index=True, return_counts=True)
            size = np.zeros(len(self.alike), np.int64)
            size[: len(devices)] = count[np.argsort(first)]
            if all(abs(size - other).sum() > self.near for other in sizes):
                sizes.append(size)
                kept.append(number)
        return kept

    def survivors(self, walkers: list[Walker]) -> list[Walker]:
        """The better half; the best of each kind first, so that not all come to be alike."""
        ranked = sorted(walkers, key=lambda walk: best_of(walk)[1])
        chosen = self.unlike([_where(walk) for walk in ranked])
        others = [number for number in range(len(ranked)) if number not in chosen]
        return [ranked[number] for number in [*chosen, *others][: len(ranked) // 2]]

    def joined_elites(self, count: int) -> I64:
        """One elite up to a cut layer, from there another; an alike device takes the first's name.

        What is good in one part of the network is so whatever the others do, nearly.
        """
        net, size = self.attempt.net, len(self.attempt.net.output_bytes)
        elites = np.array([np.frombuffer(row, np.int64) for _, row in self.elites], np.int64)
        if len(elites) < 2 or len(net.cut) < 3:
            return np.empty((0, size), np.int64)
        pairs = self.generator.integers(0, len(elites), (count, 2))
        cuts = net.cut[self.generator.integers(1, len(net.cut) - 1, count)]
        first_layer = self.first_layer[net.gene_of]
        joined = np.empty((count, size), np.int64)
        for row, (one, other), cut in zip(joined, pairs.tolist(), cuts.tolist(), strict=True):
            here, there = int(elites[one][cut]), int(elites[other][cut])
            names = np.arange(len(self.alike))
            if self.alike[here] == self.alike[there]:
                names[[here, there]] = there, here
            row[:] = np.where(first_layer < cut, elites[one], names[elites[other]])
        return joined

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
            self.keep_elites(walkers)
            if number == heat == 0:  # early, so that a run that is cut short has a bound too
                self.raise_bound()
            if len(walkers) <= 2:
                break
            walkers = self.survivors(walkers)
            runners = [_where(walk) for walk in walkers]
            steps, heat = 2 * steps, heat + 1

    def starts(self, *, with_best: bool) -> I64:
        """The cheapest of the built placements and of new random stages."""
        attempt, net = self.attempt, self.attempt.net
        count = max(2 * self.num_runners, min(self.splits, int(0.5 / attempt.evaluation_s)))
        staged = random_stages(net, self.line, count, self.generator)
        placements = np.concatenate((self.built, staged, self.joined_elites(count)))
        cost = costs(attempt.details(placements), self.price)
        array = cheapest(placements, cost, _CHOICE * self.num_runners)
        unlike = self.unlike(list(array))
        others = [number for number in range(len(array)) if number not in unlike]
        array = array[[*unlike, *others][: self.num_runners]]
        if with_best or not len(array):
            array = np.concatenate((attempt.best[None, :], array))[: self.num_runners]
        return array


def _where(walk: Walker) -> I64:
    """Where a runner goes on: its best placement, or where it is if it found none."""
    placement, score = best_of(walk)
    return (placement if score < np.inf else walk.current).copy()
