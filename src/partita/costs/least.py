"""What the segments of a chain take at the very least on a mesh, whatever their splits.

For a price c on every byte that lies on a device, and a weight w on the network, the least over all
splits of a segment's ops of

    m ((1 - w) (compute + waits) + w network) + c (static + k saved)

with m micro-batches, of which k are in flight at least; or, with recompute, the forward twice and
nothing saved; or, with light recompute, cheap ops twice and what they make not saved, if that is
less (`least_light`). These may run while the backward waits, so that either they count or the waits
of the backward, whichever is more. Below every plan, by what lowering does:

    waits    a device runs its ops in order, so where an op reads what the op right before it made,
             it waits for the conversion between them: forward, twice with recompute; in the
             backward less the weight gradients that run meanwhile (`least_back`)
    network  conversions, parameters gathered for each micro-batch and sums of their gradients; sums
             that go in buckets count by bandwidth only
    saved    what a gradient reads is kept at least as large as its forward read it

Conversions between segments do not count: a stage may end there. So each segment is a small problem
of its own, and the exact sharding search solves all of them at once. Its tables are made by
`least_tables`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from partita.costs.least_light import Freed
from partita.problems.sharding import ShardingProblem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Solve = Callable[[ShardingProblem], "tuple[int, ...] | None"]  # None where nothing is proven


@dataclass(frozen=True, slots=True)
class Prices:
    """Multipliers of a bound; all are kept to what a question needs, so that answers are shared."""

    network: float = 0.0  # 0 to 1: how much the network lane counts beside the device
    s_per_byte: float = 0.0
    in_flight: float = 1.0
    sync: bool = False  # do sums of gradients, once a step, count to the network?
    gradients: bool = True  # do gradients lie there while activations do?


@dataclass(frozen=True, eq=False)
class LeastSegments:
    """Every choice of every op and every sum of gradients in one row; edges inside segments."""

    solve: Solve
    num_microbatches: int
    first: Ints  # of each op, its first choice
    compute: Floats
    forward: Floats  # of ops that are run again with recompute, else 0
    waited: Floats  # for statistics and halos of the forward
    network: Floats  # for every micro-batch
    sync: Floats  # once a step
    static: Floats
    gradients: Floats  # of static, the gradients
    saved: Floats
    edges: tuple[tuple[int, int], ...]
    waits: tuple[Floats, ...]  # of the forward
    back_waits: tuple[Floats, ...]  # infinite for pairs that cannot be
    moved: tuple[Floats, ...]
    segment_of: Ints
    like: Ints
    make_freed: Callable[[], Freed]
    _known: dict[Prices, Floats] = field(default_factory=dict, repr=False)

    def priced(self, prices: Prices) -> Floats:
        """Per segment of the chain, the least seconds of a whole step."""
        if prices not in self._known:
            if prices.s_per_byte > 0 and self.saved.any():  # what is kept is not recomputed lightly
                light = np.maximum(self._solved(prices, "again"), self._solved(prices, "waits"))
                found = np.minimum(self._solved(prices, "all again"), light)
            else:
                found = self._solved(prices, "waits")
            self._known[prices] = found[self.like]
        return self._known[prices]

    def least_forward(self) -> Floats:
        """Per segment, the least seconds of one forward."""
        return self._sums(np.minimum.reduceat(self.forward, self.first))[self.like]

    def least_bytes(self, *, gradients: bool = True) -> Floats:
        """Per segment, the least that lies on a device all the time."""
        held = self.static - (0.0 if gradients else self.gradients)
        return self._sums(np.minimum.reduceat(held, self.first))[self.like]

    def _solved(self, prices: Prices, counted: str) -> Floats:
        """Counted is that all runs again, that cheap ops do, or the waits of the backward."""
        m, w, c = self.num_microbatches, prices.network, prices.s_per_byte
        times = 2 if counted == "all again" else 1
        own = m * (1 - w) * (self.compute + times * self.waited)
        held = self.static if prices.gradients else self.static - self.gradients
        if counted == "all again":
            own = own + m * (1 - w) * self.forward
        elif c:
            held = held + prices.in_flight * self.saved
        if c:
            own = own + c * held
        if c and counted != "all again":
            per_second = m * (1 - w) if counted == "again" else 0.0
            own = own - self.freed.less(len(own), per_second, c * prices.in_flight)
        if w:
            own = own + m * w * self.network + (w * self.sync if prices.sync else 0.0)
        back_waits = self._without_waits if counted == "again" else self.back_waits
        matrices = [
            m * ((1 - w) * (times * waits + back) + w * moved)
            for waits, back, moved in zip(self.waits, back_waits, self.moved, strict=True)
        ]
        return self._least(own, matrices)

    @functools.cached_property
    def freed(self) -> Freed:
        """What light recompute need not keep; worked out when bytes have a price."""
        return self.make_freed()

    @functools.cached_property
    def _without_waits(self) -> tuple[Floats, ...]:
        return tuple(np.where(np.isinf(back), back, 0.0) for back in self.back_waits)

    def _least(self, own: Floats, matrices: Sequence[Floats]) -> Floats:
        costs = tuple(np.split(own, self.first[1:]))
        some = [k for k, matrix in enumerate(matrices) if matrix.any()]
        chosen = self.solve(
            ShardingProblem(
                costs=costs,
                edges=tuple(self.edges[k] for k in some),
                matrix_of=tuple(range(len(some))),
                matrices=tuple(matrices[k] for k in some),
            )
        )
        if chosen is None:
            return self._sums(np.minimum.reduceat(own, self.first))
        values = own[self.first + np.array(chosen)]
        for k in some:
            u, v = self.edges[k]
            values[v] += matrices[k][chosen[u], chosen[v]]
        return self._sums(values)

    def _sums(self, per_op: Floats) -> Floats:
        sums: Floats = np.zeros(int(self.like.max()) + 1)
        np.add.at(sums, self.segment_of, per_op)
        return sums
