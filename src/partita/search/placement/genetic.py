"""A genetic algorithm: tournaments, runs crossed over, two kinds of mutation, an elite."""

from dataclasses import dataclass

import numpy as np

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import UNTIL_DONE, Result, Stop
from partita.search.placement.attempt import Attempt
from partita.search.placement.episodes import memory_multiplier
from partita.search.placement.moves import line_of
from partita.search.placement.starts import random_placements, random_stages, single_devices
from partita.search.placement.tables import F64, I64
from partita.search.placement.variation import (
    costs,
    cross,
    genes_of_layers,
    layers_of_genes,
    mutate,
    mutate_zones,
    within_limit,
)


@dataclass(frozen=True, slots=True)
class Genetic:
    """Evolves a population; the best of each generation live on."""

    population: int = 100
    generations: int = 300
    crossover_rate: float = 0.8
    mutations: float = 1.2  # genes changed in a child, on average, besides one that always is
    zone_rate: float = 0.4
    tournament: int = 3
    elite: int = 5

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Ends after its generations; a problem of few genes has as few as five per gene."""
        with Attempt(problem, stop, "genetic", seed) as attempt:
            net = attempt.net
            line, generator = line_of(problem, net), np.random.default_rng(seed)
            first = np.concatenate(
                (
                    single_devices(net),
                    random_stages(net, line, self.population // 2, generator),
                    random_placements(net, self.population, generator),
                )
            )[: self.population]
            genes = genes_of_layers(net, first)
            details = attempt.details(first)
            price = memory_multiplier(net, attempt.makespan_ms)
            cost = costs(details, price)
            for _ in range(min(self.generations, 5 * len(line))):
                if not attempt.goes_on():
                    break
                children = within_limit(net, self._children(attempt, line, genes, cost, generator))
                details = attempt.details(layers_of_genes(net, children))
                keep = np.argsort(cost, kind="stable")[: self.elite]
                genes = np.concatenate((genes[keep], children))
                cost = np.concatenate((cost[keep], costs(details, price)))
            return attempt.result()

    def _children(
        self, attempt: Attempt, line: I64, genes: I64, cost: F64, generator: np.random.Generator
    ) -> I64:
        """The next generation, without the elite."""
        count = max(1, self.population - self.elite)
        one, other = (self._winners(genes, cost, count, generator) for _ in range(2))
        crossed = generator.random(count) < self.crossover_rate
        children = np.where(crossed[:, None], cross(line, one, other, generator), one)
        zoned = generator.random(count) < self.zone_rate
        zones = mutate_zones(attempt.net, line, children, generator)
        single = mutate(attempt.net, children, self.mutations / len(line), generator)
        return np.where(zoned[:, None], zones, single)

    def _winners(self, genes: I64, cost: F64, count: int, generator: np.random.Generator) -> I64:
        """The best of `tournament` random ones, `count` times."""
        drawn = generator.integers(0, len(genes), (count, self.tournament))
        best = cost[drawn].argmin(axis=1)
        winners: I64 = genes[drawn[np.arange(count), best]]
        return winners
