"""Particle swarm over choices: each particle has a leaning towards every device of every gene.

    v <- w v + a r1 (own best - x) + b r2 (best of all - x),   x and bests as one-hot rows
    x <- the device of the greatest x + v + noise

The continuous method of Kennedy and Eberhart moves through device numbers as if they had an order;
here a particle moves in the space of choices instead.
"""

from dataclasses import dataclass

import numpy as np

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import UNTIL_DONE, Result, Stop
from partita.search.placement.attempt import Attempt
from partita.search.placement.episodes import memory_multiplier
from partita.search.placement.moves import line_of
from partita.search.placement.starts import random_placements, random_stages, single_devices
from partita.search.placement.variation import (
    costs,
    genes_of_layers,
    layers_of_genes,
    mutate_zones,
    within_limit,
)


@dataclass(frozen=True, slots=True)
class ParticleSwarm:
    """Moves particles towards their own best placement and the best of all."""

    swarm: int = 60
    rounds: int = 300
    inertia: float = 0.7
    own: float = 0.6
    common: float = 0.6
    noise: float = 0.2
    zone_rate: float = 0.5  # how often a particle also moves a run of the line

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Ends after its rounds; a problem of few genes has as few as five per gene."""
        with Attempt(problem, stop, "particle-swarm", seed) as attempt:
            net = attempt.net
            line, generator = line_of(problem, net), np.random.default_rng(seed)
            first = np.concatenate(
                (
                    single_devices(net),
                    random_stages(net, line, self.swarm // 2, generator),
                    random_placements(net, self.swarm, generator),
                )
            )[: self.swarm]
            details = attempt.details(first)
            price = memory_multiplier(net, attempt.makespan_ms)
            here = genes_of_layers(net, first)
            best, best_cost = here.copy(), costs(details, price)
            choices = np.eye(len(net.limit_bytes), dtype=np.float32)
            leaning = np.zeros((*here.shape, len(choices)), np.float32)
            for _ in range(min(self.rounds, 5 * len(line))):
                if not attempt.goes_on():
                    break
                leader = best[best_cost.argmin()]
                at = choices[here]
                pulls = generator.random((2, len(here), 1, 1), np.float32)
                leaning *= np.float32(self.inertia)
                leaning += np.float32(self.own) * pulls[0] * (choices[best] - at)
                leaning += np.float32(self.common) * pulls[1] * (choices[leader] - at)
                noise = np.float32(self.noise) * generator.standard_normal(
                    leaning.shape, np.float32
                )
                here = np.where(net.may, at + leaning + noise, -np.inf).argmax(axis=2)
                zoned = generator.random(len(here)) < self.zone_rate
                here = np.where(zoned[:, None], mutate_zones(net, line, here, generator), here)
                here = within_limit(net, here)
                cost = costs(attempt.details(layers_of_genes(net, here)), price)
                better = cost < best_cost
                best[better], best_cost[better] = here[better], cost[better]
            return attempt.result()
