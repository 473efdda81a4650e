"""Hill climbing with random restarts: moves that are not worse are taken, nothing else."""

from dataclasses import dataclass

import numpy as np

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import UNTIL_DONE, Result, Stop
from partita.search.placement.attempt import Attempt
from partita.search.placement.episodes import make_episodes, memory_multiplier
from partita.search.placement.moves import line_of
from partita.search.placement.starts import random_placements
from partita.search.placement.walk import begin_episode, walker


@dataclass(frozen=True, slots=True)
class HillClimbing:
    """Climbs from the best single device, then from random placements, several at a time."""

    climbs: int = 4  # at once
    rounds: int = 4
    steps_per_gene: int = 50  # times the number of devices: evaluations of one climb

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Ends after its rounds."""
        with Attempt(problem, stop, "hill-climbing", seed) as attempt:
            net = attempt.net
            line, generator = line_of(problem, net), np.random.default_rng(seed)
            walkers = [walker(net, seed, number) for number in range(self.climbs)]
            steps = self.steps_per_gene * len(line) * len(net.limit_bytes)
            price = memory_multiplier(net, attempt.makespan_ms)
            for number in range(self.rounds):
                starts = random_placements(net, self.climbs, generator)
                if number == 0 and attempt.goes_on():
                    starts[0] = attempt.best
                for walk, start in zip(walkers, starts, strict=True):
                    begin_episode(walk, start, steps, hot=0.0, cold=0.0, price=price)
                make_episodes(attempt, line, walkers)
            return attempt.result()
