"""The tables of `bound_segments`: costs of every choice of an op, and of pairs in a segment.

Read off a mesh's sharding model, the roofline and the order of the ops. Ops that share a table of
the model share their rows here, and edges between equal ops their matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.costs.layouts import (
    Reductions,
    num_shards,
    zero_axes,
)
from partita.costs.memory import is_view
from partita.costs.roofline import Split, op_cost
from partita.costs.sharding import (
    STAT_BYTES,
    ShardingModel,
    SplitChoice,
    heterogeneous,
    ways_of,
)
from partita.graph.chain import Folded
from partita.graph.record import Call, Graph, Op, dtype_bytes
from partita.graph.splits import communication, placements, shares_between
from partita.search.joint.bound_segments import (
    BACKWARD,
    Backward,
    BoundSegments,
    Cheap,
    Floats,
    Freed,
    Near,
    Solve,
)


def bound_segments(
    graph: Graph,
    fold: Folded,
    cluster: Cluster,
    model: ShardingModel,
    num_microbatches: int,
    collectives: Collectives,
    solve: Solve,
    *,
    across: bool = False,
    member: int = 0,
) -> BoundSegments:
    """The bounds of a mesh's segments; `graph` is the folded one for one micro-batch.

    With `across`, edges between segments are there as well: those of one stage. Of devices that
    differ in kind or share, the bound is what the one with this number does.
    """
    builder = _BoundBuilder(
        graph, fold, cluster, model, num_microbatches, collectives, solve, member
    )
    builder.across = across
    return builder.build()


@dataclass(frozen=True, eq=False)
class _Edge:
    """Seconds of a pair of choices: waited for, forward and backward, and on the network."""

    ends: tuple[int, int]
    waits: Floats
    back_waits: Floats
    moved: Floats


class _Sums(NamedTuple):
    """Seconds to add up an op's gradients: within shard groups, of untied ones; among replicas."""

    within: float
    untied: float
    across: float


class _BoundBuilder:
    def __init__(
        self, graph: Graph, fold: Folded, cluster: Cluster, model: ShardingModel,
        num_microbatches: int, collectives: Collectives, solve: Solve, member: int = 0,
    ) -> None:  # fmt: skip
        self.graph, self.fold, self.model = graph, fold, model
        self.m, self.collectives, self.solve = num_microbatches, collectives, solve
        self.member = member
        self.kind, self.spot = heterogeneous(cluster, model.mesh)[member]
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
        self.owner, self.tied = self._owners()
        self.kept = self._kept()
        self.known: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
        self.reductions = Reductions(self.axes)
        self.exchanges: dict[tuple[object, ...], Floats] = {}
        self.number = {name: i for i, name in enumerate(model.ops)}
        self.back = Backward(
            graph, model, (self.kind, self.spot), self.segment_of, model.conversions.table,
            self._exchanged, self._owed,
        )  # fmt: skip
        self.led: set[int] = set()  # ops that read what the op right before them made, and
        self.leads: set[int] = set()  # those that made it
        self.across = False  # are edges between segments there?

    def build(self) -> BoundSegments:
        trained = {self.segment_of[i] for i, o in enumerate(self.model.ops) if self.gradient_ops[o]}
        rows = [
            self._rows(i, name, int(self.segment_of[i]) in trained)
            for i, name in enumerate(self.model.ops)
        ]
        self.rows = rows
        columns = np.array([row for own in rows for row in own])
        forward, network, sync, late, gradients, saved, beside, beside_once = columns[:, :8].T
        edges = self._edges()
        sums = self.back.sums(self._look)
        for number, total in enumerate(sums, start=len(rows)):
            for op, waited, sent in total.edges:
                edges.append(_Edge((op, number), 0.0 * sent, waited, sent))
        seconds = [total.seconds for total in sums]
        none = np.zeros(sum(map(len, seconds)))
        counts = [*map(len, rows), *map(len, seconds)]
        return BoundSegments(
            self.solve,
            self.m,
            np.cumsum([0, *counts[:-1]]),
            np.concatenate([*(t.compute[:, self.member] for t in self.model.tables), *seconds]),
            np.concatenate([*(t.updates[:, self.member] for t in self.model.tables), none]),
            np.concatenate([forward, none]),
            np.concatenate([*self._waited(), none]),
            np.concatenate([network, none]),
            np.concatenate([sync, none]),
            np.concatenate([late, none]),
            np.concatenate([beside, none]) * self.collectives.interference,
            np.concatenate([beside_once, none]) * self.collectives.interference,
            np.concatenate([*(t.memory - t.activations for t in self.model.tables), none]),
            np.concatenate([gradients, none]),
            np.concatenate([saved, none]),
            tuple(edge.ends for edge in edges),
            tuple(edge.waits for edge in edges),
            tuple(edge.back_waits for edge in edges),
            tuple(edge.moved for edge in edges),
            np.array([*self.segment_of, *(total.segment for total in sums)]),
            np.array(self.fold.like),
            self._freed,
        )

    def _freed(self) -> Freed:
        """What selective checkpointing need not keep, choice by choice."""
        roots = frozenset(root for pairs in self.read.values() for _, root in pairs)
        cheap = Cheap(self.graph, self.model, self.kind, self.looks_at, roots)
        rows: list[tuple[float, ...]] = []
        first = 0
        for number, name in enumerate(self.model.ops):
            op = self.graph.op(name)
            for one, pair in zip(self.kept.get(name, ()), self.read.get(name, ()), strict=True):
                again = cheap.again(*pair)
                if again is not None:
                    for x, choice in enumerate(self.model.choices[number]):
                        rows.append((first + x, self._saved_bytes(op, choice, *one), *again))
            first += len(self.model.choices[number])
        columns = np.array(rows).reshape(-1, 4).T
        return Freed(columns[0].astype(np.int64), *columns[1:])

    # What a choice costs by itself.

    def _rows(self, number: int, name: str, again: bool) -> list[tuple[float, ...]]:
        """What every choice of an op costs by itself: see the columns in `build`."""
        op, choices = self.graph.op(name), self.model.choices[number]
        kept = tuple(self.kept.get(name, ()))
        owned = tuple(p for p in op.inputs if self.owner.get(p) == name)
        tied = sum(p in self.tied for p in op.inputs)
        key = (self._look(number), kept, len(owned), tied, again)
        if key not in self.known:
            table = self.model.tables[number]
            rows: list[tuple[float, ...]] = []
            for x, choice in enumerate(choices):
                split = tuple(sorted(ways_of(choice.dims, self.axes, self.spot).items()))
                seconds = op_cost(self.graph, op, self.kind, split).seconds if again else 0.0
                sums = self._sums(op, choice)
                network, gathers, sync, gradients = self._parameters(op, choice, sums)
                beside, once, owed = self._beside(op, choice, split, gathers, sums)
                late = sync + (sums.within if choice.zero == 3 else 0.0)
                network += float(table.blocking[x])
                saved = sum(self._saved_bytes(op, choice, *one) for one in kept)
                rows.append((seconds, network, sync, late, gradients, saved, beside, once, owed))
            self.known[key] = rows
        return self.known[key]

    def _beside(
        self, op: Op, choice: SplitChoice, split: Split, gathers: float, sums: "_Sums"
    ) -> tuple[float, float, float]:
        """What computing pays for collectives beside it, as parts of them: always, and if once.

        And what of either, weight gradients pay.

        Every task pays for no more than its own time: the forward for a gather, the gradients for
        another one and for sums. What one cannot pay another may, which does not count here. The
        gradient of a tied parameter is reduced after its last part, and may have nobody to pay.
        """
        if not self.collectives.interference or not (gathers or sums.untied):
            return 0.0, 0.0, 0.0

        def seconds(ops: Sequence[Op]) -> float:
            return sum(op_cost(self.graph, each, self.kind, split).seconds for each in ops)

        gradients = self.gradient_ops[op.name]
        weights = seconds([each for each in gradients if each.phase == "wgrad"])
        owed = min(sums.untied, weights)
        if choice.zero != 3:
            return 0.0, owed, owed
        data = [each for each in gradients if each.phase == "dgrad"]
        gather = gathers / (1 + bool(data))
        paid = min(gather, seconds((op,))) + owed
        return paid + (min(gather, seconds(data)) if data else 0.0), 0.0, owed

    def _owed(self, number: int) -> Floats:
        """Of every choice of an op, what its weight gradients may pay for sums beside them."""
        rows = self.rows[number]
        owed: Floats = np.array([row[-1] for row in rows]) * self.collectives.interference
        return owed

    def _parameters(
        self, op: Op, choice: SplitChoice, sums: "_Sums"
    ) -> tuple[float, float, float, float]:
        """Network seconds for each micro-batch, of these gathers; once a step; gradients' bytes."""
        sync = gradients = 0.0
        shared = choice.zero == 3
        gathered: dict[tuple[int, ...], float] = {}  # what lies alike is gathered together
        needed = placements(self.graph.call(op), choice.dims)[0]
        for name, layout in zip(op.inputs, needed, strict=True):
            if self.owner.get(name) != op.name:
                continue
            shards, copied = num_shards(layout, self.sizes), zero_axes(layout, self.axes)
            held = self.graph.tensor(name).size_bytes / shards
            copies = 1
            for axis in copied:
                copies *= self.axes[axis].size
            if shared:
                gathered[copied] = gathered.get(copied, 0.0) + held
            if name in self.updates:
                summed = self.graph.tensor(self.updates[name].inputs[1])
                gradients += summed.size_bytes / shards / (copies if shared else 1)
                if choice.zero == 1:
                    sync += sum(self._bandwidth("all_gather", held, axis) for axis in copied)
        uses = 1 + any(g.phase == "dgrad" for g in self.gradient_ops[op.name])
        gathers = uses * sum(  # by bandwidth alone: ops share bundles
            self._bandwidth("all_gather", held, axis)
            for axes, held in gathered.items()
            for axis in axes
        )
        each = gathers + (sums.within if shared else 0.0)
        once = sync + (0.0 if shared else sums.within)
        return each, gathers, once + sums.across, gradients

    def _sums(self, op: Op, choice: SplitChoice) -> "_Sums":
        """Seconds to add up an op's gradients, by bandwidth alone.

        Those of a tied parameter are added up before, and count to its first reader.
        """
        within = untied = across = 0.0
        for gradient in self.gradient_ops[op.name]:
            if gradient.phase == "wgrad":
                call = self.graph.call(gradient)
                given = placements(call, choice.dims)[1]
                for name, layout, of in zip(gradient.outputs, given, call.wrt, strict=True):
                    parameter = op.inputs[of]
                    tied = parameter in self.tied
                    if tied and self.owner[parameter] != op.name:
                        continue
                    size = self.graph.tensor(name).size_bytes / num_shards(layout, self.sizes)
                    for step in self.reductions(layout, choice.zero):
                        own = self._bandwidth(step.collective, step.part * size, step.axis)
                        across += own if step.across else 0.0
                        within += 0.0 if step.across else own
                        untied += 0.0 if step.across or tied else own
        return _Sums(within, untied, across)

    def _bandwidth(self, collective: str, size: float, axis: int) -> float:
        return self.collectives.by_bandwidth(collective, size, self.groups[axis])

    def _saved_bytes(
        self, op: Op, choice: SplitChoice, gradient: Call, place: int, most: int
    ) -> float:
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
        self.looks_at = looks_at
        self.read: dict[str, list[tuple[str, str]]] = {}  # of each, what is read and what is kept
        for op in self.graph.ops:
            if op.phase == "forward":
                maker.update(op.outputs)
                if is_view(self.graph.call(op)):
                    looks_at.update(dict.fromkeys(op.outputs, op.inputs[0]))
        seen: set[str] = set()
        kept: dict[str, list[tuple[Call, int, int]]] = {}
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
                    kept.setdefault(name, []).append((call, place, min(sizes)))
                    self.read.setdefault(name, []).append((tensor, root))
        return kept

    def _owners(self) -> tuple[dict[str, str], set[str]]:
        """The first reader of every parameter, and the parameters that have others."""
        owners: dict[str, str] = {}
        tied: set[str] = set()
        for name in self.model.ops:
            for tensor in self.graph.op(name).inputs:
                if self.graph.tensor(tensor).role != "parameter":
                    continue
                if owners.setdefault(tensor, name) != name:
                    tied.add(tensor)
        return owners, tied

    def _waited(self) -> list[Floats]:
        """Of every op's choices, statistics that the next op waits for, and halos of its own."""
        waited = []
        for i, name in enumerate(self.model.ops):
            op, total = self.graph.op(name), np.zeros(len(self.model.choices[i]))
            for halos, some in ((False, self.leads), (True, self.led)):
                if i in some:
                    total += self._exchanged(op, halos)
            waited.append(total)
        return waited

    def _exchanged(self, op: Op, halos: bool) -> Floats:
        """Seconds of the halos that an op gets first, or of the statistics it shares after."""
        number = self.number[op.forward or op.name]
        key = (self._look(number), op.phase, "exchanged", halos)
        if key not in self.exchanges and not shares_between(self.graph.call(op)):
            self.exchanges[key] = np.zeros(len(self.model.choices[number]))
        if key not in self.exchanges:
            known: dict[tuple[str, ...], float] = {}
            for choice in self.model.choices[number]:
                if choice.dims not in known:
                    known[choice.dims] = self._exchange_seconds(op, choice.dims, halos)
            self.exchanges[key] = np.array([known[c.dims] for c in self.model.choices[number]])
        return self.exchanges[key]

    def _exchange_seconds(self, op: Op, dims: tuple[str, ...], halos: bool) -> float:
        width = dtype_bytes(self.graph.dtype(op)) if halos else STAT_BYTES
        factors = ways_of(dims, self.axes)
        return sum(
            self.collectives.seconds(
                exchange.collective, exchange.elements * width, self.groups[axis]
            )
            for axis, dim in enumerate(dims)
            if dim
            for exchange in communication(self.graph.call(op), factors, along=dim)
            if exchange.tensor < 0 and (exchange.collective == "halo") == halos
        )

    # What a pair of choices costs along an edge inside a segment.

    def _edges(self) -> list[_Edge]:
        number = self.number
        busy = [bool(table.compute.max() > 0) for table in self.model.tables]
        edges: list[_Edge] = []
        known: dict[tuple[object, ...], _Edge] = {}
        for i, name in enumerate(self.model.ops):
            op = self.graph.op(name)
            for position, tensor in enumerate(op.outputs):
                users = sorted(
                    number[user.name]
                    for user in self.graph.consumers(tensor)
                    if user.phase == "forward"
                )
                for j in dict.fromkeys(users):
                    if self.segment_of[i] != self.segment_of[j] and not self.across:
                        continue
                    next_to = j == users[0] and not any(busy[i + 1 : j])
                    if next_to:
                        self.leads.add(i)
                        self.led.add(j)
                    place = self.graph.op(self.model.ops[j]).inputs.index(tensor)
                    back = self._gradients(i, j, position, place) if len(users) == 1 else None
                    near = self.back.take(*back) if back else ()
                    key = (self._look(i), position, self._look(j), place, next_to, len(users), near)
                    if key not in known:
                        known[key] = self._matrices(i, j, tensor, next_to, len(users), back, near)
                    edges.append(replace(known[key], ends=(i, j)))
        return edges

    def _look(self, number: int) -> int:
        """Equal for ops whose choices, gradients and costs are: those share a table."""
        return id(self.model.tables[number])

    def _matrices(
        self,
        i: int,
        j: int,
        tensor: str,
        next_to: bool,
        users: int,
        back: tuple[Op, Op] | None,
        near: Near,
    ) -> _Edge:
        maker, user = (self.graph.op(self.model.ops[k]) for k in (i, j))
        size = float(self.graph.tensor(tensor).size_bytes)
        out, into = maker.outputs.index(tensor), user.inputs.index(tensor)
        made = [placements(self.graph.call(maker), c.dims)[1][out] for c in self.model.choices[i]]
        need = [placements(self.graph.call(user), c.dims)[0][into] for c in self.model.choices[j]]
        there = self.model.conversions.table(size, made, need)
        nothing = np.zeros_like(there)
        waits = there if next_to else nothing
        if back is None:
            return _Edge((i, j), waits, nothing, there / users)
        again = self._back(i, j, out, into, size, back)
        return _Edge((i, j), waits, self.back.waits(*back, again, near), there + again)

    def _gradients(self, i: int, j: int, out: int, into: int) -> tuple[Op, Op] | None:
        """The op that gives the gradient of a tensor with one reader, and the first to take it."""
        maker, user = (self.graph.op(self.model.ops[k]) for k in (i, j))
        if user.inputs.count(user.inputs[into]) > 1:
            return None
        gives = (g for g in self.gradient_ops[user.name] if into in self.graph.call(g).wrt)
        takes = (g for g in self.gradient_ops[maker.name] if f"g{out}" in self.graph.call(g).reads)
        giver, taker = next(gives, None), next(takes, None)
        return None if giver is None or taker is None else (giver, taker)

    def _back(
        self, i: int, j: int, out: int, into: int, size: float, back: tuple[Op, Op]
    ) -> Floats:
        """Conversions of the gradient of a tensor that one op makes and one reads."""
        giver, taker = map(self.graph.call, back)
        a, b = giver.wrt.index(into), taker.reads.index(f"g{out}")
        have = [placements(giver, c.dims)[1][a] for c in self.model.choices[j]]
        need = [placements(taker, c.dims)[0][b] for c in self.model.choices[i]]
        return self.model.conversions.table(size, have, need).T
