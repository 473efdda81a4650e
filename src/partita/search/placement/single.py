"""The best device for all layers, then the best cuts between devices: a baseline.

All layers on one device need no route and no transfer. Then runs of neighbouring layers are moved:
every run [begin, end) with ends a step apart is offered to every device, the best placement is
kept, and so on while that helps. One round costs O(devices * cuts ** 2) simulations.
"""

from dataclasses import dataclass

import numpy as np

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import UNTIL_DONE, Result, Stop
from partita.search.placement.attempt import Attempt
from partita.search.placement.starts import single_devices
from partita.search.placement.tables import I64, PlacementArrays


@dataclass(frozen=True, slots=True)
class Single:
    """Puts all layers on the best device, then moves runs of layers to others where that helps."""

    cuts: int = 12  # places between layers at which a run may begin or end

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Stops when no run of layers is better elsewhere; nothing is random."""
        with Attempt(problem, stop, "single", seed) as attempt:
            attempt.score(single_devices(attempt.net))
            before = np.inf
            while attempt.goes_on() and attempt.best_score < before:
                before = attempt.best_score
                attempt.score(self._moved(attempt.net, attempt.best))
            return attempt.result()

    def _moved(self, net: PlacementArrays, best: I64) -> I64:
        """The best placement with one run of layers on one device, for all runs and devices."""
        size = len(net.may)
        genes = best[net.gene_layer[net.gene_start[:-1]]]
        places = sorted({round(cut * size / self.cuts) for cut in range(self.cuts + 1)})
        rows = []
        for device in range(len(net.limit_bytes)):
            for begin in places:
                for end in places:
                    if begin < end:
                        moved = genes.copy()
                        moved[begin:end] = np.where(
                            net.may[begin:end, device], device, genes[begin:end]
                        )
                        rows.append(moved)
        return np.array(rows, np.int64)[:, net.gene_of]
