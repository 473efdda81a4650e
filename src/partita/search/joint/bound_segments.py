"""What the segments of a chain take at the very least on a mesh, whatever their splits.

For a Lagrange multiplier c on every byte that lies on a device, and a weight w on the network, the
least over all splits of a segment's ops of

    m ((1 - w) (compute + beside + waits) + w network) + c (static + k saved)

with m micro-batches, of which k are in flight at least; or, with full checkpointing, the forward
twice and nothing saved; or, with selective checkpointing, cheap ops twice and what they make not
saved, if that is less. These may run while the backward waits, so that either they count or the
waits of the backward, whichever is more. Below every plan, by what lowering does:

    waits    a device runs its ops in order, so where an op reads what the op right before it made,
             it waits for the conversion between them: forward, twice if all runs again; in the
             backward less the weight gradients that run meanwhile
    beside   what computing pays for collectives that run at the same time: gathers of parameters,
             and by bandwidth sums of gradients
    network  conversions, parameters gathered for each micro-batch and sums of their gradients; sums
             that go in buckets count by bandwidth only
    saved    what a gradient reads is kept at least as large as its forward read it

Conversions between segments do not count: a stage may end there. So each segment is a small problem
of its own, and the exact sharding search solves all of them at once. Its tables are made by
`bound_tables`.

Selective checkpointing (`Cheap`). A tensor that gradients read is kept from forward to backward, or
the cheap op that made it runs again: then it takes at least that op's seconds at its quickest
split, and what the op reads has to be there. Where an input is made by a product, read by nobody
else and by no gradient, it is kept for this alone, spread over all devices at best. Of what is read
through a view only a copy in the view's layout need be given up, for nothing. Per tensor the less
of both, so that whatever a stage names to run again, it is not below this.

The backward (`Backward`). A device runs its gradient ops in the order of the graph, weight
gradients right after the data gradients of their op (or, taken apart, much later). Between the data
gradients of an op and those of the op before it nothing else runs, so that

    wait >= statistics, conversion of the gradient between the two, halos
            - the weight gradients in between

Conversions of one device follow each other on its network lane, so waits add up. Where several ops
read a tensor, their gradients are added first, in the layout in which one of them lies: a share if
any lies sharded, partial sums only if all are. Such a sum is a node of its own beside the ops: its
choices are layouts, each with the reader that has it ("witness"), and pairs that cannot be are
forbidden. It takes its own time, and what it makes is waited for in full.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from partita.cluster import DeviceKind
from partita.costs.layouts import Layout
from partita.costs.roofline import op_cost
from partita.costs.sharding import ShardingModel, SplitChoice, ways_of
from partita.graph.backward import CHEAP_KINDS
from partita.graph.loops import loop_nest
from partita.graph.record import Graph, Op
from partita.graph.splits import PARTIAL, TensorPlacement, placements
from partita.problems.sharding import ShardingProblem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Solve = Callable[[ShardingProblem], "tuple[int, ...] | None"]  # None where nothing is proven
Near = tuple[bool, ...]  # see Backward.take
BACKWARD = ("dgrad", "wgrad")
ALL = -1  # the witness of partial sums: every reader


@dataclass(frozen=True, eq=False)
class Freed:
    """Tensors that need not be kept, an entry for each choice of the op whose gradient reads it.

    By the row of the choice: bytes kept otherwise, seconds to make the tensor again, bytes kept
    for that.
    """

    row: Ints
    saved: Floats
    seconds: Floats
    instead: Floats

    def less(self, count: int, s_per_second: float, s_per_byte: float) -> Floats:
        """By how much each row costs less, with multipliers on seconds and on bytes."""
        paid = s_per_second * self.seconds + s_per_byte * self.instead
        less: Floats = np.zeros(count)
        np.add.at(less, self.row, np.maximum(0.0, s_per_byte * self.saved - paid))
        return less


@dataclass(frozen=True)
class Cheap:
    """Looks for what it takes to make kept tensors again; `saved` are all that gradients read."""

    graph: Graph
    model: ShardingModel
    kind: DeviceKind
    looks_at: Mapping[str, str]
    saved: frozenset[str]

    def again(self, tensor: str, root: str) -> tuple[float, float] | None:
        """(seconds, bytes kept for it) to make a tensor again that is kept; None: it cannot be."""
        maker = self.graph.producer(root)
        assert maker is not None, "what is kept was made"
        spread = self.graph.tensor(root).size_bytes / len(self.model.mesh.devices)
        if maker.kind not in CHEAP_KINDS:
            return (0.0, spread) if tensor != root else None
        instead = sum(map(self._alone, maker.inputs))
        if tensor != root:
            return 0.0, min(spread, instead)
        return self._seconds(maker) / len(maker.outputs), instead

    def _seconds(self, op: Op) -> float:
        axes = self.model.mesh.axes
        choices = self.model.choices[self.model.ops.index(op.name)]
        splits = {tuple(sorted(ways_of(choice.dims, axes).items())) for choice in choices}
        return min(op_cost(self.graph, op, self.kind, split).seconds for split in splits)

    def _alone(self, name: str) -> float:
        """Bytes of an input that would be kept for one op alone."""
        while True:
            users = [u for u in self.graph.consumers(name) if u.phase == "forward"]
            if len(users) > 1:
                return 0.0
            if name not in self.looks_at:
                break
            name = self.looks_at[name]
        maker = self.graph.producer(name)
        if maker is None or maker.kind in CHEAP_KINDS or name in self.saved:
            return 0.0
        return self.graph.tensor(name).size_bytes / len(self.model.mesh.devices)


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Multipliers of a bound; all are kept to what a question needs, so that answers are shared."""

    network: float = 0.0  # 0 to 1: how much the network lane counts beside the device
    s_per_byte: float = 0.0
    in_flight: float = 1.0
    sync: bool = False  # do gradient all-reduces, once a step, count to the network?
    gradients: bool = True  # do gradients lie there while activations do?
    busy_only: bool = False  # is only the time counted that lanes are busy, without waits?
    last: float = 0.0  # 0 to 1: how much the network counts beside the last backward
    once: bool = False  # does what computing pays once a step count?
    updates: bool = True  # do updates count, which a group does when its own blocks are done?


@dataclass(frozen=True, eq=False)
class BoundSegments:
    """Every choice of every op and every sum of gradients in one row; edges inside segments."""

    solve: Solve
    num_microbatches: int
    first: Ints  # of each op, its first choice
    compute: Floats
    updates: Floats  # of compute, what ends a step
    forward: Floats  # of ops that are run again with full checkpointing, else 0
    waited: Floats  # for statistics and halos of the forward
    network: Floats  # for every micro-batch
    sync: Floats  # once a step
    late: Floats  # once a step, after the last micro-batch's forward: sums, and what they end with
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

    def best(self, at: Multipliers) -> "BestSplits | None":
        """The best splits of all segments together, without a multiplier on bytes."""
        assert not at.s_per_byte, "with it, what runs again is another choice"
        own, matrices = self._weighted(at, "busy" if at.busy_only else "waits")
        costs = np.split(own, self.first[1:])
        some = [k for k, matrix in enumerate(matrices) if matrix.any()]
        chosen = self.solve(
            _problem(costs, [self.edges[k] for k in some], [matrices[k] for k in some])
        )
        if chosen is None:
            return None
        pairs = [m[chosen[u], chosen[v]] for (u, v), m in zip(self.edges, matrices, strict=True)]
        nodes = own[self.first + np.array(chosen)]
        return BestSplits(nodes, np.array(pairs), np.array([float(m.max()) for m in matrices]))

    @functools.cached_property
    def least_updates(self) -> Floats:
        """Per segment, the least seconds of updates at the end of a step."""
        least = self.num_microbatches * np.minimum.reduceat(self.updates, self.first)
        return self._sums(least)[self.like]

    def _solved(self, at: Multipliers, counted: str) -> Floats:
        """Counted is that all runs again, cheap ops do, the waits of the backward, or no waits."""
        return self._least(*self._weighted(at, counted))

    def _weighted(self, at: Multipliers, counted: str) -> tuple[Floats, list[Floats]]:
        """Seconds of every choice, and of pairs along every edge."""
        m, w, c = self.num_microbatches, at.network, at.s_per_byte
        times = {"all again": 2, "busy": 0}.get(counted, 1)
        own = m * (1 - w) * (self.compute + self.beside + times * self.waited)
        if not at.updates:
            own = own - m * (1 - w) * self.updates
        if at.once:
            own = own + (1 - w) * (1 - at.last) * self.beside_once
        if at.last:
            own = own + at.last * (1 - w) * (self.late - self.compute - self.beside + self.forward)
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
                behind = (
                    np.where(np.isinf(back), back, 0.0) if m == at.last else (m - at.last) * back
                )
                weighted[key] = (1 - w) * (m * times * waits + behind) + m * w * moved
            matrices.append(weighted[key])
        return own, matrices

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
        chosen = self.solve(
            _problem(
                [costs[op] for op in solved],
                [(number[self.edges[k][0]], number[self.edges[k][1]]) for k in edges],
                [matrices[k] for k in edges],
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


@dataclass(frozen=True, eq=False)
class BestSplits:
    """What the best splits take: of every op and sum, and along every edge, and what most does."""

    nodes: Floats
    pairs: Floats
    most: Floats


def _problem(
    costs: Sequence[Floats], edges: Sequence[tuple[int, int]], matrices: Sequence[Floats]
) -> ShardingProblem:
    """The sharding problem of some ops; edges that share a matrix share it there, too."""
    places: dict[int, int] = {}
    for matrix in matrices:
        places.setdefault(id(matrix), len(places))
    by_place = {places[id(matrix)]: matrix for matrix in matrices}
    return ShardingProblem(
        costs=tuple(costs),
        edges=tuple(edges),
        matrix_of=tuple(places[id(matrix)] for matrix in matrices),
        matrices=tuple(by_place[place] for place in range(len(places))),
    )


Exchanged = Callable[[Op, bool], Floats]  # per choice: halos of an op, or its statistics
Convert = Callable[[float, list[Layout], list[Layout]], Floats]


@dataclass(frozen=True, eq=False)
class Sum:
    """A sum of gradients inside a segment: seconds of every choice, and edges from other ops.

    An edge is (op, seconds waited, seconds on the network); rows are the op's choices.
    """

    segment: int
    seconds: Floats
    edges: tuple[tuple[int, Floats, Floats], ...]


class Backward:
    """Reads waits and sums off the order of a graph's gradient ops."""

    def __init__(
        self, graph: Graph, model: ShardingModel, device: tuple[DeviceKind, tuple[int, ...]],
        segment_of: npt.NDArray[np.int64],
        convert: Convert, exchanged: Exchanged, owed: Callable[[int], Floats],
    ) -> None:  # fmt: skip
        self.graph, self.model, self.convert = graph, model, convert
        self.kind, self.spot = device
        self.segment_of, self.exchanged, self.owed = segment_of, exchanged, owed
        self.taken: set[tuple[str, bool]] = set()  # gradient ops whose exchanges are counted
        self.axes = model.mesh.axes
        self.ops = [op for op in graph.ops if op.phase in BACKWARD]
        self.place = {op.name: i for i, op in enumerate(self.ops)}
        self.number = {name: i for i, name in enumerate(model.ops)}
        self.known: dict[tuple[object, ...], tuple[Floats, tuple[tuple[Floats, Floats], ...]]] = {}

    def take(self, giver: Op, taker: Op) -> Near:
        """Is a conversion waited for, with the giver's statistics, with the taker's halos?

        Empty where it is not; exchanges are for the first edge that asks.
        """
        if not self.is_near(giver, taker):
            return ()
        sides = (giver.name, False), (taker.name, True)
        first = tuple(side not in self.taken for side in sides)
        self.taken.update(sides)
        return first

    def waits(self, giver: Op, taker: Op, conversion: Floats, near: Near) -> Floats:
        """What of a conversion is waited for; choices of the taker's op by those of the giver's."""
        if not near:
            return np.zeros_like(conversion)
        after, before = near
        own = self._own(giver, taker, after)
        maximum: Floats = np.maximum(0.0, conversion + own[None, :])
        if before:
            maximum = np.maximum(
                0.0, conversion + own[None, :] + self.exchanged(taker, True)[:, None]
            )
        return maximum

    def is_near(self, giver: Op, taker: Op) -> bool:
        """Does a taker run right after its giver but for the giver's other gradients?

        Weight gradients are no takers: they may be put off.
        """
        return taker.phase == "dgrad" and all(
            op.forward == giver.forward or self._seconds(op, ("",) * len(self.axes)) == 0
            for op in self._between(giver, taker)
        )

    def _between(self, giver: Op, taker: Op) -> list[Op]:
        return self.ops[self.place[giver.name] + 1 : self.place[taker.name]]

    def _own(self, giver: Op, taker: Op, exchanges: bool) -> Floats:
        """A giver's statistics less the seconds of its other gradients, for each choice.

        With what those pay for sums beside them, which hides a conversion as they do.
        """
        number = self.number[giver.forward]
        choices = self.model.choices[number]
        total = np.zeros(len(choices))
        if exchanges:
            total += self.exchanged(giver, False)
        others = [op for op in self._between(giver, taker) if op.forward == giver.forward]
        for op in others:
            total -= [self._seconds(op, choice.dims) for choice in choices]
        return total - self.owed(number) if others else total

    def _seconds(self, op: Op, dims: tuple[str, ...]) -> float:
        split = tuple(sorted(ways_of(dims, self.axes, self.spot).items()))
        return op_cost(self.graph, op, self.kind, split).seconds

    # Sums.

    def sums(self, look: Callable[[int], int]) -> list[Sum]:
        """The sums whose parts all come from one segment; `look` is equal for ops that are."""
        totals = []
        for op in self.ops:
            if op.forward or op.phase != "dgrad":
                continue
            givers = [self.graph.producer(name) for name in op.inputs]
            readers = [self.number[giver.forward] for giver in givers if giver is not None]
            segments = {int(self.segment_of[j]) for j in readers}
            if len(readers) == len(op.inputs) and len(segments) == 1:
                totals.append(self._sum(op, readers, segments.pop(), look))
        return totals

    def _sum(self, op: Op, readers: list[int], segment: int, look: Callable[[int], int]) -> Sum:
        taker = self._taker(op)
        maker = -1 if taker is None else self.number[taker.forward]
        if maker < 0 or self.segment_of[maker] != segment:
            taker, maker = None, -1
        others = [maker] if taker else []
        near = [self._near(name, op) if taker else () for name in op.inputs]
        halos = taker is not None and (taker.name, True) not in self.taken
        if taker is not None:
            self.taken.add((taker.name, True))
        looks = map(look, (*readers, *others))
        key = (self.graph.call(op), *looks, bool(taker), *near, halos)
        if key not in self.known:
            self.known[key] = self._costs(op, readers, taker, near, halos)
        seconds, matrices = self.known[key]
        ends = (*readers, *others)
        edges = tuple((j, *pair) for j, pair in zip(ends, matrices, strict=True))
        return Sum(segment, seconds, edges)

    def _near(self, part: str, op: Op) -> Near:
        giver = self.graph.producer(part)
        assert giver is not None, "a part is given by an op"
        return self.take(giver, op)

    def _taker(self, op: Op) -> Op | None:
        """The data gradients that read a sum as soon as it is there."""
        after = self.place[op.name] + 1
        if after >= len(self.ops):
            return None
        taker = self.ops[after]
        reads = taker.phase == "dgrad" and taker.forward and op.outputs[0] in taker.inputs
        return taker if reads else None

    def _costs(
        self, op: Op, readers: list[int], taker: Op | None, near: list[Near], halos: bool
    ) -> tuple[Floats, tuple[tuple[Floats, Floats], ...]]:
        """Seconds of every choice of a sum, and (waited, on the network) for each edge."""
        size = float(self.graph.tensor(op.outputs[0]).size_bytes)
        parts = [self._given(name, j) for name, j in zip(op.inputs, readers, strict=True)]
        per_axis = self._choices(parts)
        layouts = [tuple(p for p, _ in choice) for choice in itertools.product(*per_axis)]
        access = loop_nest(self.graph.call(op)).outputs[0]
        seconds = []
        for layout in layouts:
            dims = tuple(
                access.dims[p.dim][0] if p.kind == "shard" and access.dims[p.dim] else ""
                for p in layout
            )
            seconds.append(self._seconds(op, dims))
        matrices = []
        for k, (name, part) in enumerate(zip(op.inputs, parts, strict=True)):
            moved = self.convert(size, part, layouts)
            giver = self.graph.producer(name)
            assert giver is not None, "a part is given by an op"
            waited = np.zeros_like(moved)
            if near[k]:
                waited = np.maximum(0.0, moved + self._own(giver, op, near[k][0])[:, None])
            waited[~_allowed(k, part, per_axis)] = math.inf
            matrices.append((waited, moved))
        if taker is not None:
            moved = self.convert(size, layouts, self._needed(taker, op.outputs[0])).T
            waited = moved + (self.exchanged(taker, True)[:, None] if halos else 0.0)
            matrices.append((waited, moved))
        return np.array(seconds), tuple(matrices)

    def _given(self, name: str, reader: int) -> list[Layout]:
        giver = self.graph.producer(name)
        assert giver is not None, "a part is given by an op"
        at = giver.outputs.index(name)
        return [self._sides(giver, choice)[1][at] for choice in self.model.choices[reader]]

    def _needed(self, taker: Op, name: str) -> list[Layout]:
        at = taker.inputs.index(name)
        choices = self.model.choices[self.number[taker.forward]]
        return [self._sides(taker, choice)[0][at] for choice in choices]

    def _sides(self, op: Op, choice: SplitChoice) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        return placements(self.graph.call(op), choice.dims)

    def _choices(self, parts: list[list[Layout]]) -> list[list[tuple[TensorPlacement, int]]]:
        """Per axis every placement of a sum, with the reader that has it."""
        per_axis = []
        for axis in range(len(self.axes)):
            places: dict[tuple[TensorPlacement, int], None] = {}
            for k, part in enumerate(parts):
                for place in {layout[axis]: None for layout in part}:
                    places[place, ALL if place == PARTIAL else k] = None
            per_axis.append(list(places))
        return per_axis


def _allowed(
    reader: int, part: list[Layout], per_axis: list[list[tuple[TensorPlacement, int]]]
) -> npt.NDArray[np.bool_]:
    """Which layouts of a reader's part go with which choices of the sum: all axes must."""
    known: dict[Layout, npt.NDArray[np.bool_]] = {}
    for own in part:
        if own not in known:
            axes = (
                np.array([_may_be(reader, place, *option) for option in options])
                for place, options in zip(own, per_axis, strict=True)
            )
            known[own] = functools.reduce(np.logical_and.outer, axes).ravel()
    return np.array([known[own] for own in part])


def _may_be(reader: int, own: TensorPlacement, common: TensorPlacement, witness: int) -> bool:
    """May a part lie so along an axis, where the sum is made in such a placement?"""
    if witness == reader and own != common:
        return False
    if common == PARTIAL and own != PARTIAL:
        return False
    return own.kind != "shard" or common.kind == "shard"
