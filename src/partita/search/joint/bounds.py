"""No plan with given groups of devices and micro-batches takes less: bounds by prices.

Let rank r of p have the segments S_r, run m micro-batches of them, and hold the activations of k_r
at some moment. Every rank fits its room, and is busy no longer than the step less the time that it
has to wait first. So for a price c per byte, weights mu_r that add up to 1 and any weight w of the
network

    step >= sum over r of mu_r (wait_r + T(w, c, k_r)(S_r)) - c room

with T the least of `costs.least`, which adds up over segments. The bound lets every segment go to
the rank where it is cheapest; mu makes all ranks about equally cheap. Families of orders:

    single      one stage, so one mesh for all segments
    one stage   rank r waits for a forward of all before it; k_r = 1 holds for every order
    turns       k_r is the most micro-batches that all chunks of a rank hold at one moment, read off
                the orders themselves; waits are left out, since first stages may be short

The bound of an arrangement is the less of its families, each at the best prices tried. T is concave
in k, so that between two k a straight line is below it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from partita.costs.least import LeastSegments, Prices
from partita.costs.segments import MeshWays
from partita.schedules.named import NAMED

Floats = npt.NDArray[np.float64]
Family = Callable[[float, float], float]
STEPS = ((0.2, 0.2), (0.1, 0.08), (0.05, 0.03))  # of the network's weight, of a full memory's price
MOST_TRIED = 24
TURNS = (("zb-v", 2), ("interleaved", 2))  # of interleaved, two chunks hold least


@dataclass
class Bound:
    """The question: ways on every mesh, the ranks, the room of a device."""

    ways: Sequence[MeshWays]
    num_ranks: int
    num_microbatches: int
    room: float
    training: bool
    _known: dict[Prices, Floats] = field(default_factory=dict)

    @functools.cached_property
    def meshes(self) -> list[LeastSegments]:
        """The least costs on every mesh."""
        return [ways.least for ways in self.ways]

    @functools.cached_property
    def quick_s(self) -> float:
        """The bound without prices; infinite where not even what must lie on a device fits."""
        return min((family(0.0, 0.0) for family in self._families), default=math.inf)

    def climbed_s(self, enough: float = math.inf) -> float:
        """The bound at the best prices tried, or some that reach what is enough."""
        if not math.isfinite(self.quick_s):
            return math.inf
        least = math.inf
        for family in sorted(self._families, key=lambda family: family(0.0, 0.0)):
            if family(0.0, 0.0) >= least:
                break  # another family is below in any case
            least = min(least, self._climbed(family, min(least, enough)))
        return least

    @property
    def _alone(self) -> bool:
        """One stage that runs once: there gradients come as activations go."""
        return self.num_ranks == self.num_microbatches == 1

    @functools.cached_property
    def _families(self) -> list[Family]:
        """The kinds of plans that may fit: on a single rank one for each mesh."""
        held = [mesh.least_bytes(gradients=not self._alone) for mesh in self.meshes]
        if self.num_ranks == 1:
            return [
                functools.partial(self._single, mesh)
                for mesh, own in zip(self.meshes, held, strict=True)
                if float(own.sum()) <= self.room
            ]
        if float(np.min(held, axis=0).sum()) / self.num_ranks > self.room:
            return []
        return [self._one_stage, self._turns] if self.training else [self._turns]

    def _climbed(self, family: Family, enough: float) -> float:
        """The best of a family's bounds over prices: a walk on a grid that becomes finer.

        The bound is concave in both prices together: where no small step goes up, none does. The
        walk ends where what it has is enough.
        """
        best = family(0.0, 0.0)
        if self.room <= 0:
            return best
        unit, at, tried = best / self.room, (0.0, 0.0), {(0.0, 0.0): best}
        for network, part in (STEPS[-1], *STEPS):
            moved = True
            while moved and len(tried) < MOST_TRIED and best < enough:
                moved = False
                for step in ((0.0, part), (network, part), (network, 0.0), (0.0, -part)):
                    there = (round(at[0] + step[0], 6), round(at[1] + step[1], 6))
                    if there in tried or not (0 <= there[0] < 1 and there[1] >= 0):
                        continue
                    tried[there] = family(there[0], there[1] * unit)
                    if tried[there] > best * (1 + 1e-6):
                        best, at, moved = tried[there], there, True
                        break
            if at == (0.0, 0.0):
                break
        return best

    # Families.

    def _single(self, mesh: LeastSegments, network: float, price: float) -> float:
        """One stage has one mesh."""
        prices = Prices(network, price, 1.0, sync=True, gradients=not self._alone)
        return float(mesh.priced(prices).sum()) - price * self.room

    def _one_stage(self, network: float, price: float) -> float:
        """Ranks in a line, each with one stage: rank r waits for a forward of those before it."""
        own = self._least(Prices(network, price, 1.0, sync=True))
        forward = np.min([mesh.least_forward() for mesh in self.meshes], axis=0)
        p, total = self.num_ranks, float(own.sum())
        if total <= 0:
            return 0.0
        share = float(forward.sum()) / total  # of a forward in all that a rank does in a step
        after = 0.0  # weight of the ranks behind, as a part of what all ranks cost alike
        weights, behind = [], []
        for _ in range(p):
            behind.append(after)
            weights.append(1.0 - share * after)
            after += weights[-1]
        scale = 1 / after
        costs = [
            scale * (weight * own + later * forward)
            for weight, later in zip(weights, behind, strict=True)
        ]
        return float(np.min(costs, axis=0).sum()) - price * self.room

    def _turns(self, network: float, price: float) -> float:
        """Ranks that take turns with several stages: what they hold at a time counts."""
        p, m = self.num_ranks, self.num_microbatches
        flights = [1.0] * p
        if self.training and price:
            flights = least_in_flight(p, m)
        low, high = min(flights), max(flights)
        at_low = self._least(Prices(network, price, low))
        at_high = self._least(Prices(network, price, high)) if high > low else at_low
        costs = []
        for flight in flights:
            part = (flight - low) / (high - low) if high > low else 0.0
            costs.append(at_low + part * (at_high - at_low))
        totals = [max(float(cost.sum()), 1e-30) for cost in costs]
        scale = 1 / sum(1 / total for total in totals)
        weighted = [scale / total * cost for total, cost in zip(totals, costs, strict=True)]
        return float(np.min(weighted, axis=0).sum()) - price * self.room

    def _least(self, prices: Prices) -> Floats:
        if prices not in self._known:
            self._known[prices] = np.min([mesh.priced(prices) for mesh in self.meshes], axis=0)
        return self._known[prices]


@functools.lru_cache(maxsize=256)
def least_in_flight(p: int, m: int) -> list[float]:
    """Per rank, how many micro-batches all its chunks hold at some moment, in the thriftiest order.

    A moment counts by the chunk that holds least then, so that it does not matter how much of a
    rank's segments each chunk has.
    """
    best = [math.inf] * p
    for name, chunks in TURNS:
        if NAMED[name].refuses(p, chunks, m):
            continue
        for rank, row in enumerate(NAMED[name].order(p, chunks, m)):
            held: dict[int, int] = {}
            most = 0
            for action in row:
                change = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
                held[action.stage] = held.get(action.stage, 0) + change
                if len(held) == chunks:
                    most = max(most, min(held.values()))
            best[rank] = min(best[rank], float(most))
    return [1.0 if math.isinf(flight) else flight for flight in best]
