"""Strategies of one mesh at one micro-batch size: splits and ZeRO stages for all segments.

The sharding problem of the folded graph is solved once for every Lagrange multiplier on bytes; each
answer is a strategy, with the figures of every kind of segment that `problems.joint` names. All are
of one device and one micro-batch; `sync` and `ends` are once a step. Which ops selective
checkpointing runs again is chosen for each strategy (`Selective`).

Selective checkpointing runs ops again that cost next to nothing for what they free. A tensor that a
gradient reads need not wait for it where it can be made again from what waits anyway: a GELU's
output from its input, a norm's from the residual. An op may run again if

    it has no product loop (`CHEAP_KINDS`), so that its time is that of reading and writing,
    its split exchanges nothing, and what it reads need not be converted once more (parameters that
    are kept sharded are gathered once more: those of such ops are small),
    freed bytes - bytes kept instead > 0, at no more than `worth` times the time to move them.

What was kept as a copy in another layout, such as the gathered input of a split layer, is converted
once more in the backward. That may run beside the data gradient of the layer that reads it, and has
to be shorter.

In the order of the forward each tensor is looked at once, with all cheap ops that it takes to make
it from what is kept: greedy, O(reads). What is made again by an earlier op is free to a later one.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from partita.cluster import Cluster, DeviceKind
from partita.costs.collectives import Collectives, Groups
from partita.costs.layouts import Layout, conversion, conversion_seconds, num_shards
from partita.costs.memory import (
    Dims,
    SavedReads,
    kept_alike,
    later_readers,
    parameter_state_bytes,
    tied_bytes,
)
from partita.costs.roofline import Split, op_cost, op_lower_bound_s
from partita.costs.sharding import (
    LEVELS,
    Keep,
    ShardingModel,
    SplitChoice,
    Weights,
    dims_of,
    heterogeneous,
    sharding_model,
    ways_of,
)
from partita.graph.backward import CHEAP_KINDS
from partita.graph.chain import Folded
from partita.graph.record import Graph, Op
from partita.graph.splits import communication, placements
from partita.graph.work import elements
from partita.plans import Axis, Mesh, OpSplit
from partita.problems.joint import JointStrategy, TiedBytes
from partita.problems.sharding import ShardingProblem
from partita.search.joint.bound_segments import BoundSegments
from partita.search.joint.bound_tables import bound_segments
from partita.search.joint.orders import SegmentSeconds

Held = tuple[str, Layout]
Floats = npt.NDArray[np.float64]
Solve = Callable[[ShardingProblem], "tuple[int, ...] | None"]
PhaseSeconds = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class Again:
    """The ops that run again, and seconds of conversions by the op whose gradient needs them."""

    ops: frozenset[str] = frozenset()
    sent_s: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Selective:
    """Chooses for one way to split a folded training graph; `seconds` are of its forward ops."""

    saved: SavedReads
    kind: DeviceKind
    axes: tuple[Axis, ...]
    groups: Sequence[Groups]
    collectives: Collectives
    choice_of: Mapping[str, SplitChoice]
    seconds: Mapping[str, float]
    worth: float = 8.0  # times the seconds to read what is freed: a norm after another op is below

    def __post_init__(self) -> None:
        self.sizes = [axis.ways() for axis in self.axes]
        self.dims_of: dict[str, Dims] = {op: c.dims for op, c in self.choice_of.items()}
        self.kept: set[Held] = set()
        self.views: dict[str, set[str]] = {}  # kept tensor -> views of it that gradients read
        self.copies: dict[str, dict[Layout, str]] = {}  # tensor -> copies kept, each for which op
        self.cheap: dict[str, bool] = {}

    def chosen(self) -> Again:
        """The ops that are worth to be run again."""
        self._look()
        again: set[str] = set()
        sent: dict[str, float] = {}
        place = {name: i for i, name in enumerate(self.saved.maker)}
        for name in sorted(self.views, key=place.__getitem__):
            closure = self._closure(name, again)
            if closure is None:
                continue
            new, kept = closure
            freed = [one for one in self._held_of(name, new) if one in self.kept]
            gain = sum(self._bytes(*one) for one in freed) - sum(self._bytes(*one) for one in kept)
            moved = self._moved(new)
            spent = sum(self.seconds[op] for op in new)
            if (
                moved is not None
                and gain > 0
                and spent * self.kind.memory_bytes_per_s <= self.worth * gain
            ):
                again |= new
                self.kept = (self.kept | kept) - set(freed)
                for op, seconds in moved.items():
                    sent[op] = sent.get(op, 0.0) + seconds
        return Again(frozenset(again), sent)

    def _look(self) -> None:
        """What is kept for gradients, as it was made or as a copy."""
        saved = self.saved
        for read in saved.reads:
            needed = placements(read.call, self.dims_of[read.origin])[0]
            for k, name in read.tensors:
                held, layout = saved.held(name, needed[k], self.dims_of, self.sizes)
                if held not in saved.maker:
                    continue
                self.kept.add((held, layout))
                views = self.views.setdefault(held, set())
                if layout != saved.made(held, self.dims_of):
                    self.copies.setdefault(held, {}).setdefault(layout, read.origin)
                    continue
                while name != held:
                    views.add(name)
                    name = saved.looks_at[name]

    def _closure(self, name: str, again: set[str]) -> tuple[set[str], set[Held]] | None:
        """The ops that it takes to make a tensor again, and what is kept for them."""
        saved = self.saved
        new: set[str] = set()
        kept: set[Held] = set()
        mine = (name, *sorted(self.views[name]))
        left = [saved.maker[made] for made in mine]
        if not all(map(self._may, left)):
            return None
        while left:
            op = left.pop()
            if op.name in new or op.name in again:
                continue
            new.add(op.name)
            needed = placements(saved.graph.call(op), self.dims_of[op.name])[0]
            for read, need in zip(op.inputs, needed, strict=True):
                if read not in saved.maker:
                    continue
                maker = saved.maker[read]
                if read in mine or maker.name in again or maker.name in new:
                    if self._sends(read, need):
                        return None
                    continue
                held = saved.held(read, need, self.dims_of, self.sizes)
                if held in self.kept or held[0] not in saved.maker:
                    continue
                if self._may(maker) and not self._sends(read, need):
                    left.append(maker)
                else:
                    kept.add(held)
        return new, kept

    def _held_of(self, name: str, ops: set[str]) -> list[Held]:
        """What need not be kept any more when some ops run again to make a tensor."""
        held = [(name, self.saved.made(name, self.dims_of))]
        for op in sorted(ops):
            for made in self.saved.graph.op(op).outputs:
                held.extend((made, layout) for layout in self.copies.get(made, ()))
        return held

    def _moved(self, ops: set[str]) -> dict[str, float] | None:
        """Seconds of conversions that are made once more; None where they take too long."""
        moved: dict[str, float] = {}
        for op in sorted(ops):
            for name in self.saved.graph.op(op).outputs:
                for layout, reader in self.copies.get(name, {}).items():
                    moved[reader] = moved.get(reader, 0.0) + conversion_seconds(
                        self.saved.graph.tensor(name).size_bytes, self.sizes, self.groups,
                        self.collectives, self.saved.made(name, self.dims_of), layout,
                    )  # fmt: skip
        if any(seconds > self._beside(reader) for reader, seconds in moved.items()):
            return None
        return moved

    def _beside(self, reader: str) -> float:
        """Seconds of an op's data gradient."""
        split = tuple(sorted(ways_of(self.dims_of[reader], self.axes).items()))
        graph = self.saved.graph
        return sum(
            op_cost(graph, op, self.kind, split).seconds
            for op in self.saved.gradients.get(reader, ())
            if op.phase == "dgrad"
        )

    def _sends(self, name: str, need: Layout) -> bool:
        """Does a tensor have to be converted by more than a slice?"""
        made = self.saved.made(name, self.dims_of)
        return any(step.collective for step in conversion(1.0, self.sizes, made, need))

    def _may(self, op: Op) -> bool:
        """Is an op cheap, and does each device run it by itself?"""
        if op.name not in self.cheap:
            self.cheap[op.name] = self._is_cheap(op)
        return self.cheap[op.name]

    def _is_cheap(self, op: Op) -> bool:
        graph, choice = self.saved.graph, self.choice_of[op.name]
        if op.kind not in CHEAP_KINDS or not set(graph.outputs).isdisjoint(op.outputs):
            return False
        return not communication(graph.call(op), ways_of(choice.dims, self.axes))

    def _bytes(self, name: str, layout: Layout) -> float:
        return self.saved.graph.tensor(name).size_bytes / num_shards(layout, self.sizes)


@dataclass(frozen=True, eq=False)
class SplitStrategy:
    """One answer for all segments: a choice for each op of the folded graph, and its figures."""

    mesh: Mesh
    choice_of: dict[str, SplitChoice]
    figures: JointStrategy
    again: frozenset[str] = frozenset()  # ops that selective checkpointing runs again

    def splits(self, ops: Sequence[str], fold: Folded) -> tuple[OpSplit, ...]:
        """The splits of some ops of the whole graph."""
        return tuple(
            OpSplit(op, choice.dims, choice.zero)
            for op, choice in ((op, self.choice_of[fold.op_like[op]]) for op in ops)
        )


@dataclass(frozen=True, eq=False)
class MeshStrategies:
    """The question of one mesh at one micro-batch size; every answer is found when asked for.

    `graph` is the folded one for one micro-batch; `solve` may give good splits, `prove` only the
    best. With `selective`, bytes count where selective checkpointing would keep them.
    """

    graph: Graph
    fold: Folded
    cluster: Cluster
    mesh: Mesh
    num_microbatches: int
    in_flight: float
    solve: Solve
    prove: Solve
    collectives: Collectives
    distinct: "DistinctOps"
    multipliers: Sequence[float]  # on a byte, in units of the model's time per byte
    levels: tuple[int, ...] = LEVELS
    selective: bool = True
    overlapped_counts: float = 0.2  # of communication that may be overlapped, in choosing splits
    matters: float = 0.005  # of computing: communication that nothing hides is looked at from there
    keep: Keep | None = None  # which splits of an op may be

    @functools.cached_property
    def model(self) -> ShardingModel:
        """What every choice costs."""
        return sharding_model(
            self.graph, self.cluster, self.mesh, self.levels, self.collectives,
            self.num_microbatches, self.keep,
        )  # fmt: skip

    @functools.cached_property
    def strategies(self) -> tuple[SplitStrategy, ...]:
        """The best splits for every multiplier."""
        model = self.model
        at = {name: k for k, ops in enumerate(self.fold.segments) for name in ops}
        segment_of = np.array([at[name] for name in model.ops])
        reader = _StrategyReader(
            self.graph, self.fold, self.cluster, model, segment_of, self.num_microbatches,
            self.collectives, self.levels,
        )  # fmt: skip
        split_strategies: dict[tuple[int, ...], SplitStrategy] = {}
        unit = 0.0
        for multiplier in self.multipliers:
            weights = Weights(
                hidden=self.overlapped_counts,
                s_per_byte=multiplier * unit,
                in_flight=self.in_flight,
                selective=self.selective,
            )
            chosen = self.solve(model.problem(weights))
            if chosen is None:
                break
            if chosen not in split_strategies:
                split_strategies[chosen] = reader.strategy(chosen)
            if multiplier:
                continue
            unit = _unit_price(model, chosen, self.in_flight)
            # What nothing can hide counts in full: once more, for splits that send less of it.
            exposed = self._exposed(split_strategies[chosen].figures, segment_of)
            chosen = self.solve(model.problem(weights, exposed)) if exposed else None
            if chosen is not None and chosen not in split_strategies:
                split_strategies[chosen] = reader.strategy(chosen)
        return tuple(split_strategies.values())

    def _exposed(self, figures: JointStrategy, segment_of: npt.NDArray[np.int64]) -> frozenset[str]:
        """Ops whose communication has nothing beside it, if the model is one stage.

        Those of the first segments, whose parameters are gathered first and whose gradients come
        last: as many as it takes to explain all that is late. None where that is next to nothing.
        """
        like = np.array(self.fold.like)
        gradients, reach = (figures.compute - figures.forward)[like], -1
        each = self.num_microbatches * figures.compute.sum() * self.matters
        for sent, computing, least in (
            (figures.sync[like], gradients, each),
            (figures.overlapped[like], figures.compute[like], each / self.num_microbatches),
        ):
            late = np.cumsum(sent) - np.cumsum(computing) + computing
            if late.max() > least:
                reach = max(reach, int(late.argmax()))
        kinds = set(like[: reach + 1].tolist())
        return frozenset(op for op, k in zip(self.model.ops, segment_of, strict=True) if k in kinds)

    @functools.cached_property
    def bounds(self) -> BoundSegments:
        """What all splits take at the least."""
        return bound_segments(
            self.graph, self.fold, self.cluster, self.model, self.num_microbatches,
            self.collectives, self.prove,
        )  # fmt: skip

    @functools.cached_property
    def quick_bounds(self) -> BoundSegments:
        """The same where neither bytes nor the network have a multiplier.

        Then one ZeRO stage is no worse than the others, which leaves a third of the choices: the
        one that shards most, or, where computing pays for gathers beside it, the one that shards
        all but parameters.
        """
        best = 1 if self.collectives.interference else max(self.levels)
        if "model" in self.__dict__ or len(self.levels) == 1 or best not in self.levels:
            return self.bounds  # made already, or no larger
        return replace(self, levels=(best,)).bounds

    def whole(self, graph: Graph, fold: Folded) -> BoundSegments:
        """The same with the edges between segments, of another graph of the model.

        Neither bytes nor the network have a multiplier there.
        """
        best = 1 if self.collectives.interference else max(self.levels)
        levels = (best,) if best in self.levels else self.levels
        asked = replace(self, graph=graph, fold=fold, levels=levels)
        return bound_segments(
            graph, fold, self.cluster, asked.model, self.num_microbatches, self.collectives,
            self.prove, across=True,
        )  # fmt: skip

    @functools.cached_property
    def of_members(self) -> tuple[BoundSegments, ...]:
        """What all splits take of every device that differs from the others."""
        return tuple(
            bound_segments(
                self.graph, self.fold, self.cluster, self.model, self.num_microbatches,
                self.collectives, self.prove, member=member,
            )
            for member, _ in enumerate(heterogeneous(self.cluster, self.mesh))
        )  # fmt: skip

    @functools.cached_property
    def quickest(self) -> SegmentSeconds:
        """The least seconds of every segment of the chain, each op at its quickest split.

        Of heterogeneous devices `total` is that of the one with the most to do: each computes its
        share of every op.
        """
        rows = [
            self.distinct.quickest(self.graph, self.fold, kind, self.mesh.axes, place)
            for kind, place in heterogeneous(self.cluster, self.mesh)
        ]
        if len(rows) == 1:
            return rows[0]
        return SegmentSeconds(
            max((row.total for row in rows), key=lambda total: float(total.sum())),
            np.min([row.forward for row in rows], axis=0),
            np.min([row.backward for row in rows], axis=0),
            np.min([row.gradients for row in rows], axis=0),
            np.min([row.weights for row in rows], axis=0),
        )

    @property
    def compute_bound(self) -> Floats:
        """Per segment of the chain the seconds of computing, for all micro-batches."""
        return self.num_microbatches * self.quickest.total


@dataclass(frozen=True, eq=False)
class DistinctOps:
    """The ops of a folded graph that differ, each forward op with its gradients, and where."""

    phases: tuple[tuple[Op, ...], ...]  # the forward op first
    counts: Floats  # of every segment of the folded chain, how many of each
    # By kind of device and op, what was asked of `quickest`: meshes have many splits in common.
    seconds_of: dict[str, list[dict[Split, PhaseSeconds]]] = field(default_factory=dict)
    ideal_of: dict[str, list[tuple[PhaseSeconds, PhaseSeconds]]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, fold: Folded) -> "DistinctOps":
        """Look at every op once."""
        phases: dict[str, list[Op]] = {}
        for op in graph.ops:
            if op.phase != "update" and (op.forward or op.phase == "forward"):
                phases.setdefault(op.forward or op.name, []).append(op)
        numbers: dict[object, int] = {}
        distinct: list[tuple[Op, ...]] = []
        places: list[tuple[int, int]] = []
        for k, names in enumerate(fold.segments):
            for name in names:
                forward = graph.op(name)
                key = (
                    graph.call(forward), graph.dtype(forward), elements(graph, forward),
                    tuple(op.phase for op in phases[name]),
                )  # fmt: skip
                if key not in numbers:
                    numbers[key] = len(distinct)
                    distinct.append(tuple(phases[name]))
                places.append((k, numbers[key]))
        counts = np.zeros((len(fold.segments), len(distinct)))
        for k, number in places:
            counts[k, number] += 1
        return cls(tuple(distinct), counts)

    def per_segment(self, values: Floats, fold: Folded) -> SegmentSeconds:
        """Sums per segment of the chain; rows are fields, columns the distinct ops."""
        return SegmentSeconds(*(values @ self.counts.T)[:, np.array(fold.like)])

    def ideal(self, graph: Graph, kind: DeviceKind) -> list[tuple[PhaseSeconds, PhaseSeconds]]:
        """Of every op: device seconds of its work however it is shared, and of its launches."""
        if kind.name not in self.ideal_of:
            self.ideal_of[kind.name] = [
                (
                    by_phase(ops, [op_lower_bound_s(graph, op, kind) for op in ops]),
                    by_phase(ops, [op_cost(graph, op, kind).launch_s for op in ops]),
                )
                for ops in self.phases
            ]
        return self.ideal_of[kind.name]

    def quickest(
        self, graph: Graph, fold: Folded, kind: DeviceKind, axes: tuple[Axis, ...],
        place: tuple[int, ...],
    ) -> SegmentSeconds:  # fmt: skip
        """Of a device at its place in a mesh, every op at its quickest split."""
        values = np.zeros((5, len(self.phases)))
        known = self.seconds_of.setdefault(kind.name, [{} for _ in self.phases])
        for number, phases in enumerate(self.phases):
            dims = dims_of(graph.call(phases[0]), axes)
            splits = {tuple(sorted(ways_of(each, axes, place).items())) for each in dims}
            values[:, number] = _least_of_splits(
                graph, phases, kind, splits, known[number], self.ideal(graph, kind)[number]
            )
        return self.per_segment(values, fold)


def _least_of_splits(
    graph: Graph, phases: Sequence[Op], kind: DeviceKind, splits: set[Split],
    known: dict[Split, PhaseSeconds], ideal: tuple[PhaseSeconds, PhaseSeconds],
) -> PhaseSeconds:  # fmt: skip
    """The least seconds of an op over its splits, each figure by itself.

    A split that leaves an axis idle need not be costed where even a part of the work without any
    loss takes longer than what others take.
    """
    least: PhaseSeconds = (math.inf,) * 5
    ways = {split: math.prod(factor for _, factor in split) for split in splits}
    for split in sorted(splits, key=lambda each: (-ways[each], each)):
        row = known.get(split)
        if row is None:
            bound = (work / ways[split] + launch for work, launch in zip(*ideal, strict=True))
            if all(own >= best for own, best in zip(bound, least, strict=True)):
                continue
            row = known[split] = _phase_seconds(graph, phases, kind, split)
        least = tuple(map(min, least, row))  # type: ignore[assignment]
    return least


def _phase_seconds(
    graph: Graph, phases: Sequence[Op], kind: DeviceKind, split: Split
) -> PhaseSeconds:
    """Seconds of an op under a split, as `by_phase` tells them."""
    seconds = [op_cost(graph, op, kind, split).seconds for op in phases]
    return by_phase(phases, seconds)


def by_phase(phases: Sequence[Op], seconds: Sequence[float]) -> PhaseSeconds:
    """Of the seconds of an op's phases: in all, forward, data, all and weight gradients."""
    back = sum(own for op, own in zip(phases, seconds, strict=True) if op.phase == "dgrad")
    weights = sum(own for op, own in zip(phases, seconds, strict=True) if op.phase == "wgrad")
    return sum(seconds), seconds[0], back, sum(seconds[1:]), weights


def _unit_price(model: ShardingModel, chosen: tuple[int, ...], in_flight: float) -> float:
    """Seconds per byte of the model as a whole."""
    time = memory = 0.0
    for table, x in zip(model.tables, chosen, strict=True):
        time += float(table.compute[x].max())
        memory += float(table.held(in_flight)[x])
    return time / memory if memory else 0.0


class _StrategyReader:
    """Reads a choice's costs off a sharding model, segment by segment."""

    def __init__(
        self, graph: Graph, fold: Folded, cluster: Cluster, model: ShardingModel,
        segment_of: npt.NDArray[np.int64], num_microbatches: int, collectives: Collectives,
        levels: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.graph, self.fold, self.model, self.levels = graph, fold, model, levels
        self.segment_of, self.count = segment_of, len(fold.segments)
        self.num_microbatches, self.collectives = num_microbatches, collectives
        self.kind = cluster.kind_of(model.mesh.devices[0])
        self.sizes = [axis.ways() for axis in model.mesh.axes]
        self.producer = {name: i for i, op in enumerate(model.ops) for name in graph.op(op).outputs}
        self.enters = _entering(graph, fold)
        at = dict(zip(model.ops, map(int, segment_of), strict=True))
        self.saved = SavedReads(graph, at, self.count)
        self.at, self.later = at, later_readers(graph)
        self.states = parameter_state_bytes(graph)

    def by_segment(self, per_op: Floats) -> Floats:
        """Sums per segment of the folded chain."""
        sums: Floats = np.zeros(self.count)
        np.add.at(sums, self.segment_of, per_op)
        return sums

    def strategy(self, chosen: tuple[int, ...]) -> SplitStrategy:
        model = self.model
        choices = [c[x] for c, x in zip(model.choices, chosen, strict=True)]
        rows = list(zip(model.tables, chosen, strict=True))
        compute = np.array([table.compute[x].max() for table, x in rows])
        blocking = np.array([table.blocking[x] for table, x in rows])
        for (u, v), m in zip(model.edges, model.matrix_of, strict=True):
            blocking[v] += model.matrices[m][chosen[u], chosen[v]]
        hidden = np.array([table.hidden[x] + table.hidden_buckets[x] for table, x in rows])
        ends = np.array([table.ends[x] + table.ends_buckets[x] for table, x in rows])
        slowed = np.array([table.slowed[x] for table, x in rows])
        sharded = np.array([choice.zero == 3 for choice in choices])
        beside = sharded | (self.num_microbatches == 1)  # else gradients are reduced at the end
        compute = compute + np.where(beside, slowed, 0.0)
        ends = ends + np.where(beside, 0.0, slowed)
        static = np.array([table.memory[x] - table.activations[x] for table, x in rows])
        kept = kept_alike(dict(zip(model.ops, choices, strict=True)), self.later, self.levels)
        dims_of = {op: choice.dims for op, choice in kept.items()}
        forward: Floats = self._forward(choices)
        part = np.divide(forward, compute, out=np.zeros_like(forward), where=compute > 0)
        selective = self._selective(kept, forward)
        again = selective.ops
        saved = self.saved.bytes_of(dims_of, self.sizes)
        figures = JointStrategy(
            compute=self.by_segment(compute),
            blocking=self.by_segment(blocking),
            overlapped=self.by_segment(np.where(sharded, hidden, 0.0)),
            sync=self.by_segment(np.where(sharded, 0.0, hidden * self.num_microbatches)),
            ends=self.by_segment(ends * self.num_microbatches),
            forward=self.by_segment(forward + part * blocking),
            static=self.by_segment(static),
            saved=saved,
            entering=np.array([self._entering(k, choices) for k in range(self.count)]),
            again=self.by_segment(np.where([op in again for op in model.ops], forward, 0.0)),
            again_sent=self.by_segment(
                np.array([selective.sent_s.get(op, 0.0) for op in model.ops])
            ),
            again_saved=self.saved.bytes_of(dims_of, self.sizes, again) if again else saved,
            tied=self._tied(kept),
            selective=bool(again),
            replicated=all(choice.zero == 0 for choice in choices),
        )
        return SplitStrategy(model.mesh, kept, figures, again)

    def _selective(self, choice_of: dict[str, SplitChoice], forward: Floats) -> Again:
        """What selective checkpointing runs again."""
        seconds = dict(zip(self.model.ops, forward.tolist(), strict=True))
        mesh = self.model.mesh
        groups = [mesh.groups(axis) for axis in range(len(mesh.axes))]
        return Selective(
            self.saved, self.kind, mesh.axes, groups, self.collectives, choice_of, seconds
        ).chosen()

    def _tied(self, choice_of: dict[str, SplitChoice]) -> tuple[TiedBytes, ...]:
        first = {k: i for i, k in reversed(list(enumerate(self.fold.like)))}
        return tuple(
            TiedBytes(
                first[self.at[reader.owner]],
                first[self.at[reader.op]],
                tied_bytes(
                    self.graph, reader, choice_of[reader.op], self.model.mesh.axes, self.states
                ),
            )
            for reader in self.later
        )

    def _forward(self, choices: Sequence[SplitChoice]) -> Floats:
        axes = self.model.mesh.axes
        by_op = []
        for name, choice in zip(self.model.ops, choices, strict=True):
            split = tuple(sorted(ways_of(choice.dims, axes).items()))
            by_op.append(op_cost(self.graph, self.graph.op(name), self.kind, split).seconds)
        seconds: Floats = np.array(by_op, np.float64)
        return seconds

    def _entering(self, segment: int, choices: Sequence[SplitChoice]) -> float:
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
    entering: list[dict[str, None]] = [{} for _ in fold.segments]
    for source, target, tensor in graph.edges():
        if source.phase == target.phase == "forward":
            for k in range(at[source.name] + 1, at[target.name] + 1):
                entering[k][tensor.name] = None
    return [list(names) for names in entering]
