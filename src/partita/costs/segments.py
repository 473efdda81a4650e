"""What the segments of a chain cost on one mesh at one micro-batch size: a pipeline's raw material.

For a mesh the sharding problem of the folded graph is solved once for every price on bytes (a
Lagrangian for memory); each answer is a `Way` to run every segment. Per segment and micro-batch:

    compute    seconds of all phases            hidden   communication that may run beside it
    blocking   communication that is waited for   sync   what is synchronised once a step
    ends       what a step ends with, once: gathering of what was updated in shares
    forward    the forward's part of both
    static     parameters, gradients, states    saved    activations kept for the backward
    entering   bytes of what enters the segment: all that is kept of it with recompute
    light_s, light_sent, light_saved   with light recompute: what runs again, what is sent for it
               once more (which may run beside it), and what is saved then

Everything is one device's share. A stage is a stretch of segments: sums of these, by prefix sums.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.cluster import Cluster, DeviceKind
from partita.costs.collectives import Collectives
from partita.costs.layouts import num_shards
from partita.costs.least import LeastSegments
from partita.costs.least_tables import least_segments
from partita.costs.light import Again, Light
from partita.costs.roofline import op_cost
from partita.costs.saved import Saved
from partita.costs.sharding import (
    LEVELS,
    Choice,
    ShardingModel,
    Weights,
    dims_of,
    sharding_model,
    unlike,
    ways_of,
)
from partita.costs.tied import Tied, kept_alike, later_readers, state_bytes, tied_bytes
from partita.graph.chain import Chain, Folded
from partita.graph.record import Graph, Op
from partita.graph.splits import placements
from partita.graph.traffic import elements
from partita.plans import Mesh, OpSplit
from partita.problems.sharding import ShardingProblem

Floats = npt.NDArray[np.float64]
Solve = Callable[[ShardingProblem], "tuple[int, ...] | None"]

HIDDEN = 0.2  # of the communication that may be hidden, what counts when splits are chosen
PRICES = (0.0, 0.05, 0.5, 5.0)  # of a byte, in units of the model's time per byte


@dataclass(frozen=True, eq=False)
class Way:
    """One answer for all segments of a chain; `choice_of` is by op of the folded graph."""

    mesh: Mesh
    choice_of: dict[str, Choice]
    compute: Floats
    blocking: Floats
    hidden: Floats
    sync: Floats
    ends: Floats
    forward: Floats
    static: Floats
    saved: Floats
    entering: Floats
    light_s: Floats
    light_sent: Floats
    light_saved: Floats
    again: frozenset[str] = frozenset()  # ops of the folded graph that light recompute runs again
    tied: tuple[Tied, ...] = ()

    def splits(self, ops: Sequence[str], fold: Folded) -> tuple[OpSplit, ...]:
        """The splits of some ops of the whole graph."""
        found = []
        for op in ops:
            choice = self.choice_of[fold.op_like[op]]
            found.append(OpSplit(op, choice.dims, choice.sharded))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class MeshWays:
    """The question of one mesh at one micro-batch size; every answer is found when asked for.

    `graph` is the folded one for one micro-batch; `solve` may give good splits, `prove` only the
    best. With `light`, bytes have their price where light recompute would keep them.
    """

    graph: Graph
    chain: Chain
    fold: Folded
    cluster: Cluster
    mesh: Mesh
    num_microbatches: int
    in_flight: float
    solve: Solve
    prove: Solve
    collectives: Collectives
    prices: Sequence[float] = PRICES
    levels: tuple[str, ...] = LEVELS
    light: bool = True

    @functools.cached_property
    def model(self) -> ShardingModel:
        """What every choice costs."""
        return sharding_model(
            self.graph, self.cluster, self.mesh, self.levels, self.collectives,
            self.num_microbatches,
        )  # fmt: skip

    @functools.cached_property
    def ways(self) -> tuple[Way, ...]:
        """The best splits for every price."""
        model, like = self.model, np.array(self.fold.like)
        at = {name: k for k, ops in enumerate(self.fold.segments) for name in ops}
        segment_of = np.array([at[name] for name in model.ops])
        reader = _Reader(
            self.graph, self.chain, self.fold, self.cluster, model, segment_of,
            self.num_microbatches, self.collectives,
        )  # fmt: skip
        found: dict[tuple[int, ...], Way] = {}
        unit = 0.0
        for price in self.prices:
            weights = Weights(
                hidden=HIDDEN, s_per_byte=price * unit, in_flight=self.in_flight, light=self.light
            )
            chosen = self.solve(model.problem(weights))
            if chosen is None:
                break
            if not unit:
                unit = _unit_price(model, chosen, self.in_flight)
            if chosen not in found:
                found[chosen] = reader.way(chosen, like)
        return tuple(found.values())

    @functools.cached_property
    def least(self) -> LeastSegments:
        """What all ways to split take at the least."""
        return least_segments(
            self.graph, self.fold, self.cluster, self.model, self.num_microbatches,
            self.collectives, self.prove,
        )  # fmt: skip

    @functools.cached_property
    def least_compute(self) -> Floats:
        """Per segment of the chain the seconds of its ops, each at its quickest split.

        For all micro-batches; a floor of `least` that takes next to no time. Of unlike devices it
        is that of the one with the most to do: each computes its share of every op.
        """
        phases: dict[str, list[Op]] = {}
        for op in self.graph.ops:
            if op.phase != "update" and (op.forward or op.phase == "forward"):
                phases.setdefault(op.forward or op.name, []).append(op)
        rows = [self._floor(kind, place, phases) for kind, place in unlike(self.cluster, self.mesh)]
        found: Floats = max(rows, key=lambda row: float(row.sum()))
        return found

    def _floor(
        self, kind: DeviceKind, place: tuple[int, ...], phases: dict[str, list[Op]]
    ) -> Floats:
        """The least of one device, at its place in the mesh."""
        graph, axes = self.graph, self.mesh.axes
        known: dict[object, float] = {}
        sums = np.zeros(len(self.fold.segments))
        for k, ops in enumerate(self.fold.segments):
            for name in ops:
                forward = graph.op(name)
                call, dtype = graph.call(forward), graph.dtype(forward)
                key = (call, dtype, elements(graph, forward), len(phases[name]))
                if key not in known:
                    splits = {
                        tuple(sorted(ways_of(dims, axes, place).items()))
                        for dims in dims_of(call, axes)
                    }
                    known[key] = min(
                        sum(op_cost(graph, op, kind, split).seconds for op in phases[name])
                        for split in splits
                    )
                sums[k] += known[key]
        found: Floats = self.num_microbatches * sums[np.array(self.fold.like)]
        return found


def _unit_price(model: ShardingModel, chosen: tuple[int, ...], in_flight: float) -> float:
    """Seconds per byte of the model as a whole."""
    time = memory = 0.0
    for table, x in zip(model.tables, chosen, strict=True):
        time += float(table.compute[x].max())
        memory += float(table.held(in_flight)[x])
    return time / memory if memory else 0.0


class _Reader:
    """Reads a choice's costs off a sharding model, segment by segment."""

    def __init__(
        self, graph: Graph, chain: Chain, fold: Folded, cluster: Cluster, model: ShardingModel,
        segment_of: npt.NDArray[np.int64], num_microbatches: int, collectives: Collectives,
    ) -> None:  # fmt: skip
        self.graph, self.chain, self.fold, self.model = graph, chain, fold, model
        self.segment_of, self.count = segment_of, len(fold.segments)
        self.num_microbatches, self.collectives = num_microbatches, collectives
        self.kind = cluster.kind_of(model.mesh.devices[0])
        self.sizes = [axis.ways() for axis in model.mesh.axes]
        self.producer = {name: i for i, op in enumerate(model.ops) for name in graph.op(op).outputs}
        self.enters = _entering(graph, fold)
        at = dict(zip(model.ops, map(int, segment_of), strict=True))
        self.saved = Saved(graph, at, self.count)
        self.at, self.later = at, later_readers(graph)
        self.states = state_bytes(graph)

    def spread(self, per_op: Floats, like: npt.NDArray[np.int64]) -> Floats:
        """Sums per segment of the whole chain."""
        sums: Floats = np.zeros(self.count)
        np.add.at(sums, self.segment_of, per_op)
        return sums[like]

    def way(self, chosen: tuple[int, ...], like: npt.NDArray[np.int64]) -> Way:
        model = self.model
        choices = [c[x] for c, x in zip(model.choices, chosen, strict=True)]
        compute = np.array([t.compute[x].max() for t, x in zip(model.tables, chosen, strict=True)])
        blocking = np.array([t.blocking[x] for t, x in zip(model.tables, chosen, strict=True)])
        for (u, v), m in zip(model.edges, model.matrix_of, strict=True):
            blocking[v] += model.matrices[m][chosen[u], chosen[v]]
        hidden = np.array([t.hidden[x] for t, x in zip(model.tables, chosen, strict=True)])
        ends = np.array([t.ends[x] for t, x in zip(model.tables, chosen, strict=True)])
        shared = np.array([choice.sharded == "parameters" for choice in choices])
        static = np.array(
            [t.memory[x] - t.activations[x] for t, x in zip(model.tables, chosen, strict=True)]
        )
        kept = kept_alike(dict(zip(model.ops, choices, strict=True)), self.later)
        dims_of = {op: choice.dims for op, choice in kept.items()}
        forward: Floats = self._forward(choices)
        part = np.divide(forward, compute, out=np.zeros_like(forward), where=compute > 0)
        entering = np.array([self._entering(k, choices) for k in range(self.count)])
        light = self._light(kept, forward)
        again = light.ops
        twice = np.where([op in again for op in model.ops], forward, 0.0)
        sent = np.array([light.sent_s.get(op, 0.0) for op in model.ops])
        saved = self.saved.bytes_of(dims_of, self.sizes)[like]
        lightly = self.saved.bytes_of(dims_of, self.sizes, again)[like] if again else saved
        return Way(
            model.mesh,
            kept,
            self.spread(compute, like),
            self.spread(blocking, like),
            self.spread(np.where(shared, hidden, 0.0), like),
            self.spread(np.where(shared, 0.0, hidden * self.num_microbatches), like),
            self.spread(ends * self.num_microbatches, like),
            self.spread(forward + part * blocking, like),
            self.spread(static, like),
            saved,
            entering[like],
            self.spread(twice, like),
            self.spread(sent, like),
            lightly,
            again,
            self._tied(kept, like),
        )

    def _light(self, choice_of: dict[str, Choice], forward: Floats) -> Again:
        """What light recompute runs again."""
        seconds = dict(zip(self.model.ops, forward.tolist(), strict=True))
        mesh = self.model.mesh
        groups = [mesh.groups(axis) for axis in range(len(mesh.axes))]
        return Light(
            self.saved, self.kind, mesh.axes, groups, self.collectives, choice_of, seconds
        ).chosen()

    def _tied(self, choice_of: dict[str, Choice], like: npt.NDArray[np.int64]) -> tuple[Tied, ...]:
        first = {k: i for i, k in reversed(list(enumerate(map(int, like))))}
        return tuple(
            Tied(
                first[self.at[reader.owner]],
                first[self.at[reader.op]],
                tied_bytes(
                    self.graph, reader, choice_of[reader.op], self.model.mesh.axes, self.states
                ),
            )
            for reader in self.later
        )

    def _forward(self, choices: Sequence[Choice]) -> Floats:
        axes = self.model.mesh.axes
        found = []
        for name, choice in zip(self.model.ops, choices, strict=True):
            split = tuple(sorted(ways_of(choice.dims, axes).items()))
            found.append(op_cost(self.graph, self.graph.op(name), self.kind, split).seconds)
        seconds: Floats = np.array(found, np.float64)
        return seconds

    def _entering(self, segment: int, choices: Sequence[Choice]) -> float:
        total = 0.0
        for name in self.enters[segment]:
            i = self.producer[name]
            op = self.graph.op(self.model.ops[i])
            made = placements(self.graph.call(op), choices[i].dims)[1][op.outputs.index(name)]
            total += self.graph.tensor(name).size_bytes / num_shards(made, self.sizes)
        return total


def _entering(graph: Graph, fold: Folded) -> list[list[str]]:
    """What crosses the cut before each segment of the folded graph."""
    at = {name: k for k, ops in enumerate(fold.segments) for name in ops}
    found: list[dict[str, None]] = [{} for _ in fold.segments]
    for source, target, tensor in graph.edges():
        if source.phase == target.phase == "forward":
            for k in range(at[source.name] + 1, at[target.name] + 1):
                found[k][tensor.name] = None
    return [list(names) for names in found]
