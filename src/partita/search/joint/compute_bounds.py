"""Bounds of a cell that count computing and waiting for it alone: no table of splits is made.

Two steps, each for every plan of a cell:

    ideal      every op as if it could be shared by all devices of a group without loss, and its
               launches; on equal devices only
    computing  every op at its quickest split on any mesh of a group

With one stage on each group the least over all cuts is taken (`line_bound`). With virtual stages
any segment may be on any group, and some bubbles remain (`virtual_bound`).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from partita.problems.joint import Cell
from partita.search.joint.model import JointModel
from partita.search.joint.order_bounds import (
    Floats,
    Paths,
    SegmentSeconds,
    Sources,
    VirtualOrders,
    least_cuts_s,
    paths_of,
    range_costs,
    refused,
)
from partita.search.joint.strategies import MeshStrategies


@dataclass
class ComputeBounds:
    """What plans of a model's cells compute at the least; remembers what was worked out."""

    model: JointModel
    busy_only: bool = False  # does only the time count that devices are busy?
    # Of the longest path, beside the work of groups, on heterogeneous devices: any give a bound.
    path_parts: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    # Of the moment when a wave turns, beside its start: any give a bound.
    turn_parts: tuple[float, ...] = (0.25, 0.5, 0.75)
    _ideal: dict[int, tuple[SegmentSeconds, SegmentSeconds]] = field(default_factory=dict)
    _links: dict[int, tuple[float, float]] = field(default_factory=dict)  # start, per byte

    # Bounds.

    def ideal_s(self, cell: Cell) -> float:
        """All work shared by all devices without loss, and the launches of every op."""
        groups = self._devices(cell)
        work, launches = self._work_and_launches(cell.num_microbatches)
        size = len(groups[0])
        return self._of_equal_groups(
            cell,
            SegmentSeconds(
                work.total / size + launches.total,
                work.forward / size + launches.forward,
                work.backward / size + launches.backward,
                work.gradients / size + launches.gradients,
                work.weights / size + launches.weights,
            ),
        )

    def computing_s(self, cell: Cell) -> float:
        """Every op at its quickest split; a single stage has one mesh for all of them."""
        groups = self._devices(cell)
        if len(groups) == 1:
            return min(float(mesh.compute_bound.sum()) for mesh in self.meshes(cell))
        if self.model.cluster.is_homogeneous:
            return self._of_equal_groups(cell, self.quickest(cell))
        return max(self._shared_s(cell), self._path_and_work_s(cell))

    def cuts_s(self, cell: Cell) -> float:
        """The same over all cuts, for heterogeneous groups of one stage each."""
        if len(self._devices(cell)) == 1 or not self.is_line(cell):
            return 0.0
        least, by_pattern = self.quickest(cell), self._by_pattern(cell)
        paths = self._paths(least)
        m, training = cell.num_microbatches, self.model.training
        costs = {
            pattern: range_costs(paths, seconds, m, training=training)
            for pattern, seconds in by_pattern.items()
        }
        return least_cuts_s([costs[pattern] for pattern in self._patterns(cell)])

    def line_paths(self, cell: Cell) -> tuple[Paths, Floats]:
        """Of ranges of a line of equal groups: longest paths, and the least that a step takes."""
        seconds = self.quickest(cell)
        paths = self._paths(seconds)
        m, training = cell.num_microbatches, self.model.training
        return paths, range_costs(paths, seconds, m, training=training)

    @property
    def counts_waits(self) -> bool:
        """Does a group with virtual stages wait for all segments before its first?

        Only where every segment reads from the one before it: else a later stage may be first.
        """
        chain = self._is_chain and self._is_back_chain
        return chain and self.model.training and not self.busy_only

    # What is known of cells.

    def is_line(self, cell: Cell) -> bool:
        """Has every group of a cell one stage in all orders?"""
        return not self.has_virtual_stages(cell)

    def has_virtual_stages(self, cell: Cell) -> bool:
        """Has the space orders with several stages on each group for a cell?"""
        orders = self.orders(cell)
        return orders.wave or bool(orders.rounds)

    def _send_s(self, cell: Cell) -> tuple[float, ...]:
        """At every cut what the first stage behind it waits for, there and back, the least first.

        Each device gets its share from one of the group before, all at once.
        """
        groups, m = self._devices(cell), cell.num_microbatches
        if cell.grouping not in self._links:
            pattern, exchange = self.model.patterns.pattern, self.model.collectives.exchange
            links: dict[tuple[object, ...], tuple[tuple[int, int], ...]] = {}
            for a, b in zip(groups, (*groups[1:], groups[0]), strict=True):
                for pair in ((a, b), (b, a)):
                    links.setdefault(pattern((*pair[0], *pair[1])), tuple(zip(*pair, strict=True)))
            start = [exchange(0.0, link) for link in links.values()]
            some = [exchange(1e9, link) for link in links.values()]
            per_byte = min(b - a for a, b in zip(start, some, strict=True)) / 1e9
            self._links[cell.grouping] = min(start), per_byte / len(groups[0])
        start_s, s_per_byte = self._links[cell.grouping]
        seconds = np.where(self._sent_bytes > 0, start_s + self._sent_bytes / m * s_per_byte, 0.0)
        return tuple(np.sort(seconds.sum(axis=0)).tolist())

    @functools.cached_property
    def _sent_bytes(self) -> Floats:
        """At every cut what the segment before it makes and the next one reads; its gradients."""
        graph, at = self.model.graph, self._segment_of
        sizes = np.zeros((2, len(self.model.chain.segments) - 1))
        trained = {op.forward for op in graph.ops if op.phase in ("dgrad", "wgrad")}
        gradients = {
            graph.op(op.forward).inputs[k]
            for op in graph.ops
            if op.phase == "dgrad" and op.forward
            for k in graph.call(op).wrt
        }
        for op in graph.ops:
            for name in op.outputs if op.phase == "forward" else ():
                users = (user for user in graph.consumers(name) if user.phase == "forward")
                cut = at[op.name]
                if any(at[user.name] == cut + 1 for user in users):
                    size = graph.tensor(name).size_bytes
                    sizes[0, cut] += size
                    sizes[1, cut] += size if name in gradients and op.name in trained else 0
        return sizes

    def orders(self, cell: Cell) -> VirtualOrders:
        """The orders with virtual stages of a cell: each stage has a segment at least."""
        p, m = len(self._devices(cell)), cell.num_microbatches
        rounds: list[int] = []
        waves: dict[str, None] = {}
        depth_first = True
        for each in self.model.schedules:
            v = each.virtual_stages
            if v > 1 and p * v <= self.model.chain.num_segments and not refused(each.name, p, v, m):
                if each.layout == "looped" and not each.deferred:
                    rounds.append(v)
                    depth_first = depth_first and each.name == "interleaved"
                elif each.layout == "wave" and v == 2:
                    waves[each.name] = None
                else:
                    raise AssertionError(f"no bound is known for {each.name}")
        equal = self.model.cluster.is_homogeneous
        sends = (rounds or waves) and equal and self.counts_waits
        send_s = self._send_s(cell) if sends else ()
        turns = self.turn_parts if self._is_back_chain else ()
        # Of other waves blocks pass on what is ready before they end.
        known = ("zb-v",) if [*waves] == ["zb-v"] and self._is_back_chain and equal else ()
        return VirtualOrders(
            p, m, tuple(rounds), bool(waves), send_s, turns, depth_first, known,
            self._first_trained, self.counts_waits,
        )  # fmt: skip

    def meshes(self, cell: Cell) -> list[MeshStrategies]:
        """The meshes of all groups; of those that lie alike once."""
        return [mesh for own in self._each_group(cell).values() for mesh in own]

    def quickest(self, cell: Cell) -> SegmentSeconds:
        """The least of every segment over all meshes of a cell."""
        return _least([mesh.quickest for mesh in self.meshes(cell)])

    def _by_pattern(self, cell: Cell) -> dict[int, SegmentSeconds]:
        return {
            pattern: _least([mesh.quickest for mesh in meshes])
            for pattern, meshes in self._each_group(cell).items()
        }

    def _devices(self, cell: Cell) -> tuple[tuple[int, ...], ...]:
        return self.model.problem.groupings[cell.grouping].devices

    def _patterns(self, cell: Cell) -> tuple[int, ...]:
        return self.model.problem.groupings[cell.grouping].patterns

    def _each_group(self, cell: Cell) -> dict[int, list[MeshStrategies]]:
        """The meshes of every group, by pattern: those that lie alike once."""
        first = {p: group for group, p in reversed(list(enumerate(self._patterns(cell))))}
        return {pattern: self.model.meshes_of(cell, group) for pattern, group in first.items()}

    # Equal devices.

    def _of_equal_groups(self, cell: Cell, seconds: SegmentSeconds) -> float:
        """The bound of a cell whose groups all take the same for a segment."""
        p, m = len(self._devices(cell)), cell.num_microbatches
        if p > 1 and self.is_line(cell):
            paths = self._paths(seconds)
            return least_cuts_s([range_costs(paths, seconds, m, training=self.model.training)] * p)
        return self.orders(cell).least_s(m * seconds.total, seconds)

    def _work_and_launches(self, count: int) -> tuple[SegmentSeconds, SegmentSeconds]:
        """Of a micro-batch: device seconds of all work, and of launches on each device."""
        if count not in self._ideal:
            graph, kind = self.model.micro(count), self.model.cluster.kinds[0]
            distinct = self.model.distinct_ops(count)

            work, launches = zip(*distinct.ideal(graph, kind), strict=True)
            self._ideal[count] = (
                distinct.per_segment(np.array(work).T, self.model.fold),
                distinct.per_segment(np.array(launches).T, self.model.fold),
            )
        return self._ideal[count]

    # Heterogeneous devices.

    def _shared_s(self, cell: Cell) -> float:
        """Computing, with any segment on any group.

        With seconds t_r of every segment on group r and weights of the groups that add up to 1,
        no step is below the sum over segments of min_r weight_r t_r: each segment runs somewhere.
        """
        m, rows = cell.num_microbatches, self._rows(cell)
        works = np.array([m * row.total for row in rows])
        weights = _even(works)
        return float((weights[:, None] * works).min(axis=0).sum())

    def _path_and_work_s(self, cell: Cell) -> float:
        """The longest path and computing together, where segments run one after the other.

        A step is no shorter than the path of a micro-batch, nor than the work of any group; so for
        a part a and weights b_r that add up to 1 - a, no shorter than the sum over segments of
        min_r (a path_r + b_r work_r).
        """
        m, rows = cell.num_microbatches, self._rows(cell)
        if self.busy_only or not self._is_chain or m >= len(rows):
            return 0.0  # with many micro-batches groups are busy for longer
        works = np.array([m * row.total for row in rows])
        paths = np.array([row.forward + row.backward for row in rows])
        weights = _even(works)
        fastest = np.arange(len(rows)) == weights.argmax()
        return max(
            float((part * paths + (1 - part) * shares[:, None] * works).min(axis=0).sum())
            for shares in (weights, fastest.astype(np.float64))
            for part in self.path_parts
        )

    def _rows(self, cell: Cell) -> list[SegmentSeconds]:
        by_pattern = self._by_pattern(cell)
        return [by_pattern[pattern] for pattern in self._patterns(cell)]

    # The chain.

    def _paths(self, seconds: SegmentSeconds) -> Paths:
        if self.busy_only:  # batches follow each other: nobody waits for a first forward
            none = np.zeros((len(self._sources) + 1,) * 2)
            return Paths(none, none, none)
        return paths_of(seconds, self._sources, self._back_sources, training=self.model.training)

    @functools.cached_property
    def _is_chain(self) -> bool:
        """Does every segment read what the one before it made?"""
        return all(k - 1 in own for k, own in enumerate(self._sources) if k)

    @functools.cached_property
    def _is_back_chain(self) -> bool:
        """Has every segment gradients for the one before it, back to the first that has any?"""
        first = self._first_trained
        return all(k - 1 in own for k, own in enumerate(self._back_sources) if k > first)

    @functools.cached_property
    def _first_trained(self) -> int:
        """The first segment that has gradients."""
        at = self._segment_of
        return min((at[op.forward] for op in self.model.graph.ops if op.forward), default=0)

    @functools.cached_property
    def _sources(self) -> Sources:
        """Of every segment of the chain, the segments that made what it reads."""
        graph, segments = self.model.graph, self.model.chain.segments
        reads = [[name for op in own.ops for name in graph.op(op).inputs] for own in segments]
        return self._makers(reads)

    @functools.cached_property
    def _back_sources(self) -> Sources:
        """Of every segment of the chain, the segments that its data gradients go to."""
        graph, at = self.model.graph, self._segment_of
        reads: list[list[str]] = [[] for _ in self.model.chain.segments]
        for op in graph.ops:
            if op.phase == "dgrad" and op.forward:
                inputs = graph.op(op.forward).inputs
                reads[at[op.forward]] += [inputs[k] for k in graph.call(op).wrt]
        return self._makers(reads)

    @functools.cached_property
    def _segment_of(self) -> dict[str, int]:
        segments = self.model.chain.segments
        return {op: number for number, segment in enumerate(segments) for op in segment.ops}

    def _makers(self, reads: Sequence[Sequence[str]]) -> Sources:
        """Of every segment the other segments that made some tensors."""
        graph = self.model.graph
        maker = {
            name: number for op, number in self._segment_of.items() for name in graph.op(op).outputs
        }
        return tuple(
            tuple(sorted({maker[name] for name in names if name in maker} - {number}))
            for number, names in enumerate(reads)
        )


def _least(rows: Sequence[SegmentSeconds]) -> SegmentSeconds:
    return SegmentSeconds(
        np.min([row.total for row in rows], axis=0),
        np.min([row.forward for row in rows], axis=0),
        np.min([row.backward for row in rows], axis=0),
        np.min([row.gradients for row in rows], axis=0),
        np.min([row.weights for row in rows], axis=0),
    )


def _even(works: Floats) -> Floats:
    """Weights of the groups that make all about equally busy."""
    speeds = 1 / np.maximum(works.sum(axis=1), 1e-30)
    weights: Floats = speeds / speeds.sum()
    return weights
