"""No plan of a cell takes less when it is simulated: bounds by Lagrange multipliers.

Let rank r of p have the segments S_r, run m micro-batches of them, and hold the activations of k_r
at some moment. Every rank keeps to its budget, and is busy no longer than the step less the time
that it has to wait first. So for a multiplier c per byte, weights mu_r that add up to 1 and any
weight w of the network

    step >= sum over r of mu_r (wait_r + T(w, c, k_r)(S_r)) - c budget

with T the least of `bound_segments`, which adds up over segments. The bound lets every segment go
to the rank where it is cheapest; mu makes all ranks about equally cheap. Families of orders:

    single       one stage, so one mesh for all segments
    one stage    rank r has a layer range: the least over all cuts of the most over the ranks
                 (`line_bound`) is no less than with any weights mu; k_r = 1 holds for every order
    looped, wave k_r is the most micro-batches that all virtual stages of a rank hold at a moment,
                 read off the orders; first stages may be as short as a segment, so that rank r
                 waits for r of them; bubbles of rounds count beside (`virtual_bound`)

The bound of a cell is the less of its families, each at the best multipliers tried by a dual
ascent. T is concave in k, so that between two k a straight line is below it. Where only the busy
time of lanes counts (steady-state throughput), T has no waits.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from partita.schedules.named import NAMED
from partita.search.joint.bound_segments import BoundSegments, Multipliers
from partita.search.joint.order_bounds import (
    Paths,
    SegmentSeconds,
    VirtualOrders,
    first_waits,
    least_cuts_s,
    range_sums,
)
from partita.search.joint.strategies import MeshStrategies

Floats = npt.NDArray[np.float64]
Family = Callable[[float, float], float]
INTERLEAVED = (("zb-v", 2), ("interleaved", 2))  # of interleaved, two virtual stages hold least


@dataclass(frozen=True, slots=True)
class AscentSettings:
    """How far multipliers are looked for; any of them give a valid bound."""

    # Steps of the network's weight, and of the multiplier on bytes by that of a full memory.
    steps: tuple[tuple[float, float], ...] = ((0.2, 0.2), (0.1, 0.08), (0.05, 0.03))
    most_tried: int = 24


@dataclass(frozen=True, eq=False)
class LineRanges:
    """Of every layer range of a line: longest paths, and what a step takes by computing alone."""

    paths: Paths
    costs: Floats


@dataclass
class CellBound:
    """The question: strategies on every mesh, the ranks, the budget of a device."""

    strategies: Sequence[MeshStrategies]
    num_ranks: int
    num_microbatches: int
    budget: float
    training: bool
    line: LineRanges | None = None  # where there are orders with one stage on each rank
    virtual: VirtualOrders | None = None  # where there are orders with several, and
    seconds: SegmentSeconds | None = None  # what segments compute at the least
    busy_only: bool = False
    ascent: AscentSettings = AscentSettings()
    _known: dict[Multipliers, Floats] = field(default_factory=dict)

    @functools.cached_property
    def meshes(self) -> list[MeshStrategies]:
        """Those with the least computing first: others need often not be looked at."""
        return sorted(self.strategies, key=lambda mesh: float(mesh.compute_bound.sum()))

    @functools.cached_property
    def first_s(self) -> float:
        """The bound with tables of one mesh: others count by their computing alone. 0 if alone."""
        if self.num_ranks == 1:
            return 0.0
        first = self.meshes[0].quick_bounds.least(Multipliers(busy_only=self.busy_only))
        own = np.min([first, *(mesh.compute_bound for mesh in self.meshes[1:])], axis=0)
        line_s = [] if self.line is None else [self._line_s(self.line, own)]
        virtual_s = []
        if self.virtual is not None and self.seconds is not None:
            virtual_s = [self.virtual.least_s(own, self.seconds)]
        return min((*line_s, *virtual_s), default=0.0)

    @functools.cached_property
    def quick_s(self) -> float:
        """The bound without multipliers; infinite where not even what must lie on a device fits."""
        least = math.inf
        for least_s, make in self._families:
            if least_s >= least:
                break
            family = make()
            if family is not None:
                least = min(least, family(0.0, 0.0))
        return least

    def climbed_s(self, enough: float = math.inf) -> float:
        """The bound at the best multipliers tried, or some that reach what is enough."""
        least = math.inf
        for least_s, make in self._families:
            if least_s >= least:
                break
            family = make()
            if family is not None and family(0.0, 0.0) < least:
                least = min(least, self._climbed(family, min(least, enough)))
        return least

    @property
    def _alone(self) -> bool:
        """One stage that runs once: there gradients come as activations go."""
        return self.num_ranks == self.num_microbatches == 1

    @functools.cached_property
    def _families(self) -> list[tuple[float, Callable[[], Family | None]]]:
        """The kinds of plans: what is known to be below, and the family if its plans may fit.

        On a single rank one for each mesh, those that compute least first.
        """
        if self.num_ranks == 1:
            return [
                (float(mesh.compute_bound.sum()), functools.partial(self._of_mesh, mesh))
                for mesh in self.meshes
            ]
        if not self._may_fit():
            return []
        families: list[tuple[float, Family]] = []
        if self.line is not None:
            families.append((self._one_stage(0.0, 0.0), self._one_stage))
        if self.virtual is not None and self.virtual.rounds:
            families.append((self._looped(0.0, 0.0), self._looped))
        if self.virtual is not None and self.virtual.wave:
            families.append((self._wave_before(families), self._wave))
        families.sort(key=lambda pair: pair[0])
        return [(least_s, functools.partial(_itself, family)) for least_s, family in families]

    def _wave_before(self, others: Sequence[tuple[float, Family]]) -> float:
        """A bound of waves: without all paths of their orders where others are below that."""
        orders, seconds = self._virtual
        at_once = orders.wave_s(self._free, seconds, whole=False)
        if any(bound_s <= at_once for bound_s, _ in others):
            return at_once
        return self._wave(0.0, 0.0)

    def _of_mesh(self, mesh: MeshStrategies) -> Family | None:
        """A single stage on a mesh, unless what must lie on a device is too much."""
        held = mesh.bounds.least_bytes(gradients=not self._alone)
        fits = float(held.sum()) <= self.budget
        return functools.partial(self._single, mesh.bounds) if fits else None

    def _may_fit(self) -> bool:
        """May the ranks hold what must lie there, each segment on the mesh where it is least?"""
        held = np.full(len(self.meshes[0].fold.like), math.inf)
        for mesh in self.meshes:
            held = np.minimum(held, mesh.quick_bounds.least_bytes())
            if float(held.sum()) / self.num_ranks <= self.budget:
                return True
        return False

    def _climbed(self, family: Family, enough: float) -> float:
        """The best of a family's bounds: dual ascent on a grid that becomes finer.

        The bound is concave in both multipliers together: where no small step goes up, none does.
        It ends where what it has is enough.
        """
        best = family(0.0, 0.0)
        if self.budget <= 0:
            return best
        unit, at, tried = best / self.budget, (0.0, 0.0), {(0.0, 0.0): best}
        for network, part in (self.ascent.steps[-1], *self.ascent.steps):
            moved = True
            while moved and len(tried) < self.ascent.most_tried and best < enough:
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

    def _single(self, mesh: BoundSegments, network: float, multiplier: float) -> float:
        """One stage has one mesh."""
        at = Multipliers(
            network, multiplier, 1.0, sync=True, gradients=not self._alone, busy_only=self.busy_only
        )
        return float(mesh.least(at).sum()) - multiplier * self.budget

    def _one_stage(self, network: float, multiplier: float) -> float:
        """Ranks in a line, each with one layer range."""
        assert self.line is not None, "families are those that there are"
        own = self._least(
            Multipliers(
                network, multiplier, sync=self.training and network > 0, busy_only=self.busy_only
            )
        )
        return self._line_s(self.line, own, multiplier * self.budget)

    def _line_s(self, line: LineRanges, own: Floats, less_s: float = 0.0) -> float:
        """Over all cuts, where segments take so long in a step."""
        costs = line.paths.start + range_sums(own) - less_s
        return least_cuts_s([np.maximum(line.costs, costs)] * self.num_ranks)

    def _looped(self, network: float, multiplier: float) -> float:
        """Ranks with several virtual stages in rounds: what they hold at a time counts."""
        if not network and not multiplier:
            return self._looped_free_s
        orders, _ = self._virtual
        costs, waits = self._of_ranks(network, multiplier), self._first_waits
        path = (1 - network) * self._free / self.num_microbatches
        bound = orders.looped_of_groups_s(costs, path, waits)
        return bound - multiplier * self.budget

    def _wave(self, network: float, multiplier: float) -> float:
        """Ranks with two virtual stages in a wave: the same."""
        if not network and not multiplier:
            return self._wave_free_s
        costs = self._of_ranks(network, multiplier)
        weights = 1 / np.maximum(costs.sum(axis=1), 1e-30)
        weights /= weights.sum()
        bound = float((weights[:, None] * costs).min(axis=0).sum() + weights @ self._first_waits)
        return bound - multiplier * self.budget

    @functools.cached_property
    def _free(self) -> Floats:
        """Per segment the least without multipliers."""
        return self._least(Multipliers(busy_only=self.busy_only))

    @functools.cached_property
    def _looped_free_s(self) -> float:
        orders, seconds = self._virtual
        return orders.looped_s(self._free, seconds)

    @functools.cached_property
    def _wave_free_s(self) -> float:
        orders, seconds = self._virtual
        return orders.wave_s(self._free, seconds)

    @functools.cached_property
    def _first_waits(self) -> Floats:
        """What each rank waits for before its first forward."""
        orders, seconds = self._virtual
        return first_waits(seconds.forward * orders.is_chain, self.num_ranks)

    @property
    def _virtual(self) -> tuple[VirtualOrders, SegmentSeconds]:
        assert self.virtual is not None, "families are those that there are"
        assert self.seconds is not None, "and what segments compute is known with them"
        return self.virtual, self.seconds

    def _of_ranks(self, network: float, multiplier: float) -> Floats:
        """Per rank what every segment costs there, by the micro-batches that it holds."""
        p, m = self.num_ranks, self.num_microbatches
        flights = np.array(fewest_in_flight(p, m) if multiplier else [1.0] * p)
        low, high = float(flights.min()), float(flights.max())
        at_low = self._least(Multipliers(network, multiplier, low, busy_only=self.busy_only))
        at_high = at_low
        if high > low:
            at_high = self._least(Multipliers(network, multiplier, high, busy_only=self.busy_only))
        parts = (flights - low) / (high - low) if high > low else 0.0 * flights
        costs: Floats = at_low + parts[:, None] * (at_high - at_low)
        return costs

    def _least(self, at: Multipliers) -> Floats:
        """Per segment the least of all meshes; one that computes no less is not asked further."""
        if at not in self._known:
            free = not at.network and not at.s_per_byte
            least = np.full(len(self.meshes[0].fold.like), math.inf)
            for mesh in self.meshes:
                if ((1 - at.network) * mesh.compute_bound < least).any():
                    bounds = mesh.quick_bounds if free else mesh.bounds
                    least = np.minimum(least, bounds.least(at))
            self._known[at] = least
        return self._known[at]


def _itself(family: Family) -> Family:
    return family


@functools.lru_cache(maxsize=256)
def fewest_in_flight(p: int, m: int) -> list[float]:
    """Per rank, how many micro-batches all its chunks hold at a moment, in the thriftiest order.

    A moment counts by the chunk that holds least then, so that it does not matter how much of a
    rank's segments each chunk has.
    """
    best = [math.inf] * p
    for name, chunks in INTERLEAVED:
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
