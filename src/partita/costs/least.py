"""What the segments of a chain take at the very least on a mesh, whatever their splits.

For a price c on every byte that lies on a device, and a weight w on the network, the least over all
splits of a segment's ops of

    m ((1 - w) (compute + waits) + w network) + c (static + k saved)

with m micro-batches, of which k are in flight at least; or, with recompute, the forward twice and
nothing saved. Below every plan, by what lowering does:

    waits    a device runs its ops in order, so where an op reads what the op right before it made,
             it waits for the conversion between them: forward, twice with recompute
    network  conversions, parameters gathered for each micro-batch and sums of their gradients; sums
             that go in buckets count by bandwidth only
    saved    what a gradient reads is kept at least as large as its forward read it

Conversions between segments do not count: a stage may end there. So each segment is a small problem
of its own, and the exact sharding search solves all of them at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.costs.layouts import Layout, conversion_seconds, num_shards
from partita.costs.roofline import op_cost
from partita.costs.saved import is_view
from partita.costs.sharding import Choice, ShardingModel, ways_of
from partita.graph.chain import Folded
from partita.graph.record import Call, Graph, Op
from partita.graph.splits import PARTIAL, REPLICATE, placements
from partita.problems.sharding import ShardingProblem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Solve = Callable[[ShardingProblem], "tuple[int, ...] | None"]  # None where nothing is proven

BACKWARD = ("dgrad", "wgrad")
HUGE_BYTES = 1e12  # of a sum so large that only bandwidth counts


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
    """Every choice of every op in one row, with what it costs; edges inside segments."""

    solve: Solve
    num_microbatches: int
    first: Ints  # of each op, its first choice
    compute: Floats
    forward: Floats  # of ops that are run again with recompute, else 0
    network: Floats  # for every micro-batch
    sync: Floats  # once a step
    static: Floats
    gradients: Floats  # of static, the gradients
    saved: Floats
    edges: tuple[tuple[int, int], ...]
    waits: tuple[Floats, ...]
    moved: tuple[Floats, ...]
    segment_of: Ints
    like: Ints
    _known: dict[Prices, Floats] = field(default_factory=dict, repr=False)

    def priced(self, prices: Prices) -> Floats:
        """Per segment of the chain, the least seconds of a whole step."""
        if prices not in self._known:
            found = self._solved(prices, again=False)
            if prices.s_per_byte > 0 and self.saved.any():
                found = np.minimum(found, self._solved(prices, again=True))
            self._known[prices] = found[self.like]
        return self._known[prices]

    def least_forward(self) -> Floats:
        """Per segment, the least seconds of one forward."""
        return self._sums(np.minimum.reduceat(self.forward, self.first))[self.like]

    def least_bytes(self, *, gradients: bool = True) -> Floats:
        """Per segment, the least that lies on a device all the time."""
        held = self.static - (0.0 if gradients else self.gradients)
        return self._sums(np.minimum.reduceat(held, self.first))[self.like]

    def _solved(self, prices: Prices, *, again: bool) -> Floats:
        m, w, c = self.num_microbatches, prices.network, prices.s_per_byte
        own = m * (1 - w) * self.compute
        held = self.static if prices.gradients else self.static - self.gradients
        if again:
            own = own + m * (1 - w) * self.forward
        elif c:
            held = held + prices.in_flight * self.saved
        if c:
            own = own + c * held
        if w:
            own = own + m * w * self.network + (w * self.sync if prices.sync else 0.0)
        times = 2 if again else 1
        matrices = [
            m * ((1 - w) * times * waits + w * moved)
            for waits, moved in zip(self.waits, self.moved, strict=True)
        ]
        return self._least(own, matrices)

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


def least_segments(
    graph: Graph,
    fold: Folded,
    cluster: Cluster,
    model: ShardingModel,
    num_microbatches: int,
    collectives: Collectives,
    solve: Solve,
) -> LeastSegments:
    """The floors of a mesh's segments; `graph` is the folded one for one micro-batch."""
    return _Builder(graph, fold, cluster, model, num_microbatches, collectives, solve).build()


class _Builder:
    def __init__(
        self, graph: Graph, fold: Folded, cluster: Cluster, model: ShardingModel,
        num_microbatches: int, collectives: Collectives, solve: Solve,
    ) -> None:  # fmt: skip
        self.graph, self.fold, self.model = graph, fold, model
        self.m, self.collectives, self.solve = num_microbatches, collectives, solve
        self.kind = cluster.kind_of(model.mesh.devices[0])
        self.axes = model.mesh.axes
        self.sizes = [axis.ways() for axis in self.axes]
        self.groups = [model.mesh.groups(i) for i in range(len(self.axes))]
        at = {name: k for k, ops in enumerate(fold.segments) for name in ops}
        self.segment_of = np.array([at[name] for name in model.ops])
        self.gradient_ops: dict[str, list[Op]] = {name: [] for name in model.ops}
        for op in graph.ops:
            if op.phase in BACKWARD and op.forward:
                self.gradient_ops[op.forward].append(op)
        self.updates = {op.inputs[0]: op for op in graph.ops if op.phase == "update"}
        self.owner = self._owners()
        self.kept = self._kept()
        self.layouts: dict[Layout, int] = {}  # layouts are slow to hash: known by number
        self.converted: dict[tuple[float, int, int], float] = {}
        self.known: dict[tuple[object, ...], list[tuple[float, ...]]] = {}

    def build(self) -> LeastSegments:
        trained = {self.segment_of[i] for i, o in enumerate(self.model.ops) if self.gradient_ops[o]}
        rows = [
            self._rows(i, name, int(self.segment_of[i]) in trained)
            for i, name in enumerate(self.model.ops)
        ]
        columns = np.array([row for own in rows for row in own])
        forward, network, sync, gradients, saved = columns.T
        edges, waits, moved = self._edges()
        return LeastSegments(
            self.solve,
            self.m,
            np.cumsum([0, *(len(own) for own in rows[:-1])]),
            np.concatenate([table.compute.min(axis=1) for table in self.model.tables]),
            forward,
            network,
            sync,
            np.concatenate([table.memory - table.activations for table in self.model.tables]),
            gradients,
            saved,
            edges,
            waits,
            moved,
            self.segment_of,
            np.array(self.fold.like),
        )

    # What a choice costs by itself.

    def _rows(self, number: int, name: str, again: bool) -> list[tuple[float, ...]]:
        """(forward, network, sync, gradients, saved) of every choice of an op."""
        op, choices = self.graph.op(name), self.model.choices[number]
        kept = tuple(self.kept.get(name, ()))
        owned = tuple(p for p in op.inputs if self.owner.get(p) == name)
        key = (self._look(number), kept, len(owned), again)
        if key not in self.known:
            table = self.model.tables[number]
            found: list[tuple[float, ...]] = []
            for x, choice in enumerate(choices):
                split = tuple(sorted(ways_of(choice.dims, self.axes).items()))
                seconds = op_cost(self.graph, op, self.kind, split).seconds if again else 0.0
                network, sync, gradients = self._parameters(op, choice)
                network += float(table.blocking[x])
                saved = sum(self._saved_bytes(op, choice, *one) for one in kept)
                found.append((seconds, network, sync, gradients, saved))
            self.known[key] = found
        return self.known[key]

    def _parameters(self, op: Op, choice: Choice) -> tuple[float, float, float]:
        """Network seconds for each micro-batch and once a step; bytes of gradients."""
        network = sync = gradients = 0.0
        shared = choice.sharded == "parameters"
        needed = placements(self.graph.call(op), choice.dims)[0]
        for name, layout in zip(op.inputs, needed, strict=True):
            if self.owner.get(name) != op.name:
                continue
            held = self.graph.tensor(name).size_bytes / num_shards(layout, self.sizes)
            copied = [i for i, p in enumerate(layout) if p == REPLICATE and self.axes[i].size > 1]
            copies = 1
            for axis in copied:
                copies *= self.axes[axis].size
            if shared:
                uses = 1 + any(g.phase == "dgrad" for g in self.gradient_ops[op.name])
                for axis in copied:
                    once = self.collectives.seconds("all_gather", held, self.groups[axis])
                    network += uses * once
            if name in self.updates:
                gradients += held / (copies if shared else 1)
                if choice.sharded == "states":
                    sync += sum(self._bandwidth("all_gather", held, axis) for axis in copied)
        sums = self._sums(op, choice)
        return network + (sums if shared else 0.0), sync + (0.0 if shared else sums), gradients

    def _sums(self, op: Op, choice: Choice) -> float:
        """Seconds to add up the gradients of an op's parameters, by bandwidth alone."""
        collective = "all_reduce" if choice.sharded == "none" else "reduce_scatter"
        seconds = 0.0
        for gradient in self.gradient_ops[op.name]:
            if gradient.phase == "wgrad":
                given = placements(self.graph.call(gradient), choice.dims)[1]
                for name, layout in zip(gradient.outputs, given, strict=True):
                    size = self.graph.tensor(name).size_bytes / num_shards(layout, self.sizes)
                    for axis, place in enumerate(layout):
                        if place == PARTIAL and self.axes[axis].size > 1:
                            seconds += self._bandwidth(collective, size, axis)
        return seconds

    def _bandwidth(self, collective: str, size: float, axis: int) -> float:
        whole = self.collectives.seconds(collective, HUGE_BYTES, self.groups[axis])
        return size * whole / HUGE_BYTES

    def _saved_bytes(self, op: Op, choice: Choice, gradient: Call, place: int, most: int) -> float:
        """At least so much lies there for one read of a gradient op."""
        read = gradient.reads[place]
        needed = placements(gradient, choice.dims)[0][place]
        inputs, outputs = placements(self.graph.call(op), choice.dims)
        own = inputs[int(read[1:])] if read[0] == "i" else outputs[int(read[1:])]
        shards = num_shards(own, self.sizes) if own == needed else len(self.model.mesh.devices)
        return most / shards

    def _kept(self) -> dict[str, list[tuple[Call, int, int]]]:
        """Per forward op the reads of its gradients that count to it: (gradient, input, bytes).

        A tensor counts once, to the first op whose gradient reads it.
        """
        maker: set[str] = set()
        looks_at: dict[str, str] = {}
        for op in self.graph.ops:
            if op.phase == "forward":
                maker.update(op.outputs)
                if is_view(self.graph.call(op)):
                    looks_at.update(dict.fromkeys(op.outputs, op.inputs[0]))
        seen: set[str] = set()
        found: dict[str, list[tuple[Call, int, int]]] = {}
        for name in self.model.ops:
            for gradient in self.gradient_ops[name]:
                call = self.graph.call(gradient)
                reads = zip(gradient.inputs, call.reads, strict=True)
                for place, (tensor, read) in enumerate(reads):
                    root = tensor
                    while root in looks_at:
                        root = looks_at[root]
                    if read[0] == "g" or root not in maker or root in seen:
                        continue
                    seen.add(root)
                    sizes = (self.graph.tensor(t).size_bytes for t in (tensor, root))
                    found.setdefault(name, []).append((call, place, min(sizes)))
        return found

    def _owners(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in self.model.ops:
            for tensor in self.graph.op(name).inputs:
                if self.graph.tensor(tensor).role == "parameter":
                    found.setdefault(tensor, name)
        return found

    # What a pair of choices costs along an edge inside a segment.

    def _edges(
        self,
    ) -> tuple[tuple[tuple[int, int], ...], tuple[Floats, ...], tuple[Floats, ...]]:
        number = {name: i for i, name in enumerate(self.model.ops)}
        busy = [bool(table.compute.max() > 0) for table in self.model.tables]
        edges, waits, moved = [], [], []
        known: dict[tuple[object, ...], tuple[Floats, Floats]] = {}
        for i, name in enumerate(self.model.ops):
            op = self.graph.op(name)
            for position, tensor in enumerate(op.outputs):
                users = sorted(
                    number[user.name]
                    for user in self.graph.consumers(tensor)
                    if user.phase == "forward"
                )
                for j in dict.fromkeys(users):
                    if self.segment_of[i] != self.segment_of[j]:
                        continue
                    next_to = j == users[0] and not any(busy[i + 1 : j])
                    place = self.graph.op(self.model.ops[j]).inputs.index(tensor)
                    key = (self._look(i), position, self._look(j), place, next_to, len(users))
                    if key not in known:
                        known[key] = self._matrices(i, j, tensor, next_to, len(users))
                    edges.append((i, j))
                    waits.append(known[key][0])
                    moved.append(known[key][1])
        return tuple(edges), tuple(waits), tuple(moved)

    def _look(self, number: int) -> tuple[object, ...]:
        op = self.graph.op(self.model.ops[number])
        calls = (self.graph.call(g) for g in self.gradient_ops[op.name])
        return (self.graph.call(op), self.graph.dtype(op), tuple(calls), self.model.choices[number])

    def _matrices(
        self, i: int, j: int, tensor: str, next_to: bool, users: int
    ) -> tuple[Floats, Floats]:
        maker, user = (self.graph.op(self.model.ops[k]) for k in (i, j))
        size = float(self.graph.tensor(tensor).size_bytes)
        out, into = maker.outputs.index(tensor), user.inputs.index(tensor)
        made = [placements(self.graph.call(maker), c.dims)[1][out] for c in self.model.choices[i]]
        need = [placements(self.graph.call(user), c.dims)[0][into] for c in self.model.choices[j]]
        there = self._conversions(size, made, need)
        waits = there if next_to else np.zeros_like(there)
        moved = there / users
        if users == 1 and user.inputs.count(tensor) == 1:
            moved = moved + self._back(i, j, out, into, size)
        return waits, moved

    def _back(self, i: int, j: int, out: int, into: int, size: float) -> Floats:
        """Conversions of the gradient of a tensor that one op makes and one reads."""
        nothing = np.zeros((len(self.model.choices[i]), len(self.model.choices[j])))
        gives = [
            (g, self.graph.call(g).wrt.index(into))
            for g in self.gradient_ops[self.model.ops[j]]
            if into in self.graph.call(g).wrt
        ]
        takes = [
            (g, self.graph.call(g).reads.index(f"g{out}"))
            for g in self.gradient_ops[self.model.ops[i]]
            if f"g{out}" in self.graph.call(g).reads
        ]
        if not gives or not takes:
            return nothing
        (giver, a), (taker, b) = gives[0], takes[0]
        have = [placements(self.graph.call(giver), c.dims)[1][a] for c in self.model.choices[j]]
        need = [placements(self.graph.call(taker), c.dims)[0][b] for c in self.model.choices[i]]
        return self._conversions(size, have, need).T

    def _conversions(self, size: float, have: list[Layout], need: list[Layout]) -> Floats:
        """Seconds from each layout to each; many choices have the same layout."""
        rows, columns = (
            [self.layouts.setdefault(layout, len(self.layouts)) for layout in layouts]
            for layouts in (have, need)
        )
        known = dict(zip((*rows, *columns), (*have, *need), strict=True))
        seconds = {
            (a, b): self._convert(size, a, b, known) for a in set(rows) for b in set(columns)
        }
        return np.array([[seconds[a, b] for b in columns] for a in rows])

    def _convert(self, size: float, have: int, need: int, known: dict[int, Layout]) -> float:
        if have == need:
            return 0.0
        key = (size, have, need)
        if key not in self.converted:
            self.converted[key] = conversion_seconds(
                size, self.sizes, self.groups, self.collectives, known[have], known[need]
            )
        return self.converted[key]
