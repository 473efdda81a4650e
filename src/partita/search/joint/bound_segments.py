"""What the segments of a chain take at the very least on a mesh, whatever their splits.

For a Lagrange multiplier c on every byte that lies on a device, and a weight w on the network, the
least over all splits of a segment's ops of

    m ((1 - w) (compute + beside + waits) + w network) + c (static + k saved)

with m micro-batches, of which k are in flight at least; or, with full checkpointing, the forward
twice and nothing saved; or, with selective checkpointing, cheap ops twice and what they make not
saved, if that is less (`bound_selective`). These may run while the backward waits, so that either
they count or the waits of the backward, whichever is more. Below every plan, by what lowering does:

    waits    a device runs its ops in order, so where an op reads what the op right before it made,
             it waits for the conversion between them: forward, twice if all runs again; in the
             backward less the weight gradients that run meanwhile (`bound_backward`)
    beside   what computing pays for collectives that run at the same time: gathers of parameters,
             and by bandwidth sums of gradients
    network  conversions, parameters gathered for each micro-batch and sums of their gradients; sums
             that go in buckets count by bandwidth only
    saved    what a gradient reads is kept at least as large as its forward read it

Conversions between segments do not count: a stage may end there. So each segment is a small problem
of its own, and the exact sharding search solves all of them at once. Its tables are made by
`bound_tables`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from partita.problems.sharding import ShardingProblem
from partita.search.joint.bound_selective import Freed

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Solve = Callable[[ShardingProblem], "tuple[int, ...] | None"]  # None where nothing is proven


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Multipliers of a bound; all are kept to what a question needs, so that answers are shared."""

    network: float = 0.0  # 0 to 1: how much the network lane counts beside the device
    s_per_byte: float = 0.0
    in_flight: float = 1.0
    sync: bool = False  # do gradient all-reduces, once a step, count to the network?
    gradients: bool = True  # do gradients lie there while activations do?
    busy_only: bool = False  # is only the time counted that lanes are busy, without waits?


@dataclass(frozen=True, eq=False)
class BoundSegments:
    """Every choice of every op and every sum of gradients in one row; edges inside segments."""

    solve: Solve
    num_microbatches: int
    first: Ints  # of each op, its first choice
    compute: Floats
    forward: Floats  # of ops that are run again with full checkpointing, else 0
    waited: Floats  # for statistics and halos of the forward
    network: Floats  # for every micro-batch
    sync: Floats  # once a step
    beside: Floats  # what computing pays for gathers and sums of every micro-batch beside it
    beside_once: Floats  # and for sums beside the backward of a stage that runs once
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
    _known: dict[Multipliers, Floats] = field(default_factory=dict, repr=False)

    def least(self, at: Multipliers) -> Floats:
        """Per segment of the chain, the least seconds of a whole step."""
        if at not in self._known:
            if at.busy_only:
                least = self._solved(at, "busy")
            elif at.s_per_byte > 0 and self.saved.any():  # what is kept does not run again
                some = np.maximum(self._solved(at, "again"), self._solved(at, "waits"))
                least = np.minimum(self._solved(at, "all again"), some)
            else:
                least = self._solved(at, "waits")
            self._known[at] = least[self.like]
        return self._known[at]

    def least_bytes(self, *, gradients: bool = True) -> Floats:
        """Per segment, the least that lies on a device all the time."""
        held = self.static - (0.0 if gradients else self.gradients)
        return self._sums(np.minimum.reduceat(held, self.first))[self.like]

    def _solved(self, at: Multipliers, counted: str) -> Floats:
        """Counted is that all runs again, cheap ops do, the waits of the backward, or no waits."""
        m, w, c = self.num_microbatches, at.network, at.s_per_byte
        times = {"all again": 2, "busy": 0}.get(counted, 1)
        own = m * (1 - w) * (self.compute + self.beside + times * self.waited)
        if at.sync and not at.gradients:
            own = own + (1 - w) * self.beside_once
        held = self.static if at.gradients else self.static - self.gradients
        if counted == "all again":
            own = own + m * (1 - w) * self.forward
        elif c:
            held = held + at.in_flight * self.saved
        if c:
            own = own + c * held
        if c and counted != "all again":
            per_second = m * (1 - w) if counted == "again" else 0.0
            own = own - self.freed.less(len(own), per_second, c * at.in_flight)
        if w:
            own = own + m * w * self.network + (w * self.sync if at.sync else 0.0)
        no_waits = counted in ("again", "busy")
        back_waits = self._without_waits if no_waits else self.back_waits
        weighted: dict[tuple[int, int, int], Floats] = {}  # edges of equal segments share theirs
        matrices = []
        for waits, back, moved in zip(self.waits, back_waits, self.moved, strict=True):
            key = (id(waits), id(back), id(moved))
            if key not in weighted:
                weighted[key] = m * ((1 - w) * (times * waits + back) + w * moved)
            matrices.append(weighted[key])
        return self._least(own, matrices)

    @functools.cached_property
    def freed(self) -> Freed:
        """What selective checkpointing need not keep; worked out when bytes have a multiplier."""
        return self.make_freed()

    @functools.cached_property
    def _without_waits(self) -> tuple[Floats, ...]:
        known = {id(back): np.where(np.isinf(back), back, 0.0) for back in self.back_waits}
        return tuple(known[id(back)] for back in self.back_waits)

    def _least(self, own: Floats, matrices: Sequence[Floats]) -> Floats:
        """Per kind of segment the least; of those that cost the same one is solved."""
        costs = np.split(own, self.first[1:])
        counts = {id(matrix): bool(matrix.any()) for matrix in matrices}
        some = [k for k, matrix in enumerate(matrices) if counts[id(matrix)]]
        first = self._first_alike(costs, matrices, some)
        solved = [op for op, k in enumerate(self.segment_of.tolist()) if first[k] == k]
        number = {op: i for i, op in enumerate(solved)}
        edges = [k for k in some if self.edges[k][0] in number]
        places: dict[int, int] = {}
        for k in edges:
            places.setdefault(id(matrices[k]), len(places))
        by_place = {places[id(matrices[k])]: matrices[k] for k in edges}
        chosen = self.solve(
            ShardingProblem(
                costs=tuple(costs[op] for op in solved),
                edges=tuple((number[self.edges[k][0]], number[self.edges[k][1]]) for k in edges),
                matrix_of=tuple(places[id(matrices[k])] for k in edges),
                matrices=tuple(by_place[place] for place in range(len(places))),
            )
        )
        if chosen is None:
            return self._sums(np.minimum.reduceat(own, self.first))
        values = np.zeros(len(costs))
        values[solved] = own[self.first[solved] + np.array(chosen)]
        for k in edges:
            u, v = self.edges[k]
            values[v] += matrices[k][chosen[number[u]], chosen[number[v]]]
        return self._sums(values)[first]

    def _first_alike(
        self, costs: Sequence[Floats], matrices: Sequence[Floats], some: Sequence[int]
    ) -> Ints:
        """Of every kind of segment, the first whose choices and pairs cost the same."""
        kinds = int(self.like.max()) + 1
        own: list[list[bytes]] = [[] for _ in range(kinds)]
        place: dict[int, int] = {}  # of an op in its segment
        for op, k in enumerate(self.segment_of.tolist()):
            place[op] = len(own[k])
            own[k].append(costs[op].tobytes())
        pairs: list[list[tuple[int, int, int]]] = [[] for _ in range(kinds)]
        for k in some:
            u, v = self.edges[k]
            pairs[int(self.segment_of[u])].append((place[u], place[v], id(matrices[k])))
        seen: dict[object, int] = {}
        return np.array(
            [seen.setdefault((tuple(own[k]), tuple(pairs[k])), k) for k in range(kinds)]
        )

    def _sums(self, per_op: Floats) -> Floats:
        sums: Floats = np.zeros(int(self.like.max()) + 1)
        np.add.at(sums, self.segment_of, per_op)
        return sums
