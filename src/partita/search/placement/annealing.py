"""Simulated annealing: worse moves are taken too, ever less often as the temperature falls.

Episodes follow one another on several walkers, each twice as long as the one before; they begin
alternately from random stages and from the best placement so far (then cooler).
"""

from dataclasses import dataclass

import numpy as np

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import UNTIL_DONE, Result, Stop
from partita.search.placement.attempt import Attempt
from partita.search.placement.episodes import make_episodes, memory_multiplier
from partita.search.placement.moves import line_of
from partita.search.placement.starts import random_stages, single_devices
from partita.search.placement.walk import begin_episode, walker


@dataclass(frozen=True, slots=True)
class Annealing:
    """Anneals from single devices, random stages and the best so far; temperatures are relative."""

    walkers: int = 4
    rounds: int = 6
    steps_per_gene: int = 50  # times the number of devices: evaluations of the first episodes
    hot: float = 0.03  # of the best score
    cold: float = 1e-3
    again: float = 0.3  # how hot, of `hot`, an episode from the best placement begins

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Ends after its rounds."""
        with Attempt(problem, stop, "annealing", seed) as attempt:
            net = attempt.net
            line, generator = line_of(problem, net), np.random.default_rng(seed)
            walkers = [walker(net, seed, number) for number in range(self.walkers)]
            attempt.score(single_devices(net))
            price = memory_multiplier(net, attempt.makespan_ms)
            steps = self.steps_per_gene * len(line) * len(net.limit_bytes)
            for number in range(self.rounds):
                if not attempt.goes_on():
                    break
                again = number % 2 == 1
                starts = random_stages(net, line, self.walkers, generator)
                if again:
                    starts[:] = attempt.best
                scale = min(attempt.best_score, attempt.makespan_ms)
                hot = scale * self.hot * (self.again if again else 1.0)
                for walk, start in zip(walkers, starts, strict=True):
                    begin_episode(walk, start, steps, hot=hot, cold=self.cold * scale, price=price)
                make_episodes(attempt, line, walkers)
                steps *= 2 if again else 1
            return attempt.result()
