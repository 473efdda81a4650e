"""Random placements, the yardstick for all other methods."""

from dataclasses import dataclass

import numpy as np

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import UNTIL_DONE, Result, Stop
from partita.search.placement.attempt import Attempt
from partita.search.placement.moves import line_of
from partita.search.placement.starts import random_placements, random_stages


@dataclass(frozen=True, slots=True)
class RandomSearch:
    """Tries random placements: half of them gene by gene, half as stages with random cuts."""

    tries: int = 20_000  # at most; a small problem takes as many as it has genes, times `per_gene`
    per_gene: int = 100

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Ends after its tries."""
        with Attempt(problem, stop, "random", seed) as attempt:
            net = attempt.net
            line, generator = line_of(problem, net), np.random.default_rng(seed)
            left = min(self.tries, self.per_gene * len(line))
            while left > 0 and attempt.goes_on():
                count = min(left, 2 * attempt.chunk, 1000)
                scattered = random_placements(net, (count + 1) // 2, generator)
                staged = random_stages(net, line, count // 2, generator)
                attempt.score(np.concatenate((scattered, staged)))
                left -= count
            return attempt.result()
