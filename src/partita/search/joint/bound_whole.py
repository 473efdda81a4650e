"""What a chain takes at the very least on a mesh with the conversions between its segments.

`bound_segments` lets every segment begin in any layout, because a stage may. A single stage has no
such border: there the chain is one problem, solved as a whole. Of a line of stages few borders are
cut, wherever they are. Let x be the best splits of the whole chain, with seconds of every segment
and of every pair of ops in it. Any other splits of a layer range, with those of x around it, are
splits of the whole chain, so that

    any splits of a range >= x of the range - sum over pairs that cross its ends of
                             (the most that the pair may cost - what it costs in x)

Models with many more ops than their folded chain has are left alone: there the chain is long.
"""

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.search.joint.bound_segments import BoundSegments, Multipliers

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class WholeChain:
    """The bounds of a mesh with all pairs of ops of the chain."""

    bounds: BoundSegments
    busy_only: bool = False  # is only the time counted that lanes are busy, without waits?

    @functools.cached_property
    def range_costs(self) -> Floats | None:
        """The least seconds of a step of every layer range, at [i, j]; None: nothing is proven."""
        n, bounds = int(self.bounds.like.max()) + 1, self.bounds
        best = bounds.best(Multipliers(busy_only=self.busy_only, once=True))
        if best is None:
            return None
        nodes = np.zeros(n)
        np.add.at(nodes, bounds.segment_of, best.nodes)
        pairs, lost = np.zeros((n, n)), np.zeros(n + 1)
        for (u, v), seconds, most in zip(bounds.edges, best.pairs, best.most, strict=True):
            first, last = sorted((int(bounds.segment_of[u]), int(bounds.segment_of[v])))
            pairs[first, last] += seconds
            if first < last:
                lost[first + 1 : last + 1] += most - seconds
        before = np.concatenate(([0.0], np.cumsum(nodes)))
        inside = np.zeros((n + 1, n + 1))  # of pairs that begin at i or after and end before j
        inside[:n, 1:] = np.cumsum(np.cumsum(pairs[::-1], axis=0)[::-1], axis=1)
        costs: Floats = before[None, :] - before[:, None] + inside - lost[:, None] - lost[None, :]
        return costs
