"""No plan of a cell takes less when it is simulated: bounds of cells, cheap ones first.

Bounds that count computing and waiting for it alone need no table of splits (`ComputeBounds`). Two
steps, each for every plan of a cell:

    ideal      every op as if it could be shared by all devices of a group without loss, and its
               launches; on equal devices only
    computing  every op at its quickest split on any mesh of a group

With one stage on each group the least over all cuts is taken (`least_cuts_s`). With virtual stages
any segment may be on any group, and some bubbles remain (`VirtualOrders`).

Bounds by Lagrange multipliers know splits, memory and the network (`CellBound`). Let rank r of p
have the segments S_r, run m micro-batches of them, and hold the activations of k_r at some moment.
Every rank keeps to its budget, and is busy no longer than the step less the time that it has to
wait first. So for a multiplier c per byte, weights mu_r that add up to 1 and any weight w of the
network

    step >= sum over r of mu_r (wait_r + T(w, c, k_r)(S_r)) - c budget

with T the least of `bound_segments`, which adds up over segments. The bound lets every segment go
to the rank where it is cheapest; mu makes all ranks about equally cheap. Families of orders:

    single       one stage, so one mesh for all segments
    one stage    rank r has a layer range: the least over all cuts of the most over the ranks
                 (`least_cuts_s`) is no less than with any weights mu; k_r = 1 holds for every order
    looped, wave k_r is the most micro-batches that all virtual stages of a rank hold at a moment,
                 read off the orders; first stages may be as short as a segment, so that rank r
                 waits for r of them; bubbles of rounds count beside (`VirtualOrders`)

The bound of a cell is the less of its families, each at the best multipliers tried by a dual
ascent. T is concave in k, so that between two k a straight line is below it. Where only the busy
time of lanes counts (steady-state throughput), T has no waits.

`PlanBounds` has these levels of all cells of a model's space, cheap ones first.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from partita.problems.joint import Cell, JointSchedule
from partita.schedules.named import NAMED
from partita.search.joint.bound_mixed import Border, MixedPipeline, least_of
from partita.search.joint.bound_segments import BoundSegments, Multipliers
from partita.search.joint.bound_whole import WholeChain
from partita.search.joint.model import JointModel
from partita.search.joint.orders import (
    Paths,
    SegmentSeconds,
    Sources,
    VirtualOrders,
    first_waits,
    least_cuts_s,
    paths_of,
    range_costs,
    range_sums,
    refused,
)
from partita.search.joint.strategies import MeshStrategies

Floats = npt.NDArray[np.float64]
Family = Callable[[float, float], float]
KNOWN_WAVES = ("zb-v",)  # in others blocks pass on what is ready before they end
INTERLEAVED = (("zb-v", 2), ("interleaved", 2))  # of interleaved, two virtual stages hold least
ROUNDING = 1 - 1e-9  # sums in another order round differently


@dataclass
class ComputeBounds:
    """What plans of a model's cells compute at the least; remembers what was worked out."""

    model: JointModel
    busy_only: bool = False  # does only the time count that devices are busy?
    # Of the longest path, beside the work of groups, on heterogeneous devices: any give a bound.
    path_parts: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    # Of the moment when a wave turns, beside its start: any give a bound.
    turn_parts: tuple[float, ...] = (0.25, 0.5, 0.75)
    # Of what the network sends last, beside the last backward: any give a bound.
    last_parts: tuple[float, ...] = (0.0, 0.5, 1.0)
    _ideal: dict[int, tuple[SegmentSeconds, SegmentSeconds]] = field(default_factory=dict)
    _links: dict[int, tuple[float, float]] = field(default_factory=dict)  # start, per byte
    _exchanges: dict[object, tuple[float, float]] = field(default_factory=dict)  # the same

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
        # Worked out mesh by mesh, so that time can run out between.
        if any(self.model.interrupted() or not mesh.quickest for mesh in self.meshes(cell)):
            return 0.0
        if len(groups) == 1:
            return min(float(mesh.compute_bound.sum()) for mesh in self.meshes(cell))
        if self.model.cluster.is_homogeneous:
            return self._of_equal_groups(cell, self.quickest(cell))
        return max(self._shared_s(cell), self._path_and_work_s(cell))

    def cuts_s(self, cell: Cell) -> float:
        """The same over all cuts, for heterogeneous groups of one stage each."""
        if len(self._devices(cell)) == 1 or not self.is_line(cell):
            return 0.0
        return self.mixed(cell).line_s()

    def virtual_s(self, cell: Cell, enough: float = math.inf) -> float:
        """The same for heterogeneous groups that may have several stages, in all their orders."""
        if len(self._devices(cell)) == 1 or self.is_line(cell):
            return 0.0
        mixed = self.mixed(cell)
        return self._pipelines_s(cell, mixed, mixed, enough)

    def _pipelines_s(
        self, cell: Cell, line: MixedPipeline, virtual: MixedPipeline, enough: float
    ) -> float:
        """The least of a cell's orders, with one stage on each group and with several."""
        lines = any(each.virtual_stages == 1 for each in self.model.schedules)
        least = line.line_s() if lines else math.inf
        for each in self.virtual_schedules(cell):
            unknown = each.layout == "wave" and each.name not in KNOWN_WAVES
            if unknown or self.model.interrupted():
                return 0.0
            least = min(least, virtual.order_s(each, min(least, enough)))
        return least

    def tables_s(self, cell: Cell, enough: float = math.inf) -> float:
        """The same with waits, updates and sums of gradients, by tables of splits."""
        if len(self._devices(cell)) == 1:
            return self._single_s(cell)
        line, virtual = (self._with_tables(cell, ends=ends) for ends in (True, False))
        return self._pipelines_s(cell, line, virtual, enough)

    def _with_tables(self, cell: Cell, *, ends: bool) -> MixedPipeline:
        """A cell's groups with what tables say of every segment in all, the step's end or not."""
        m, mixed = cell.num_microbatches, self.mixed(cell)
        at = Multipliers(busy_only=self.busy_only, once=ends and self.model.training, updates=ends)
        totals = {}
        for pattern, meshes in self._each_group(cell).items():
            members = ([own.least(at) for own in mesh.of_members] for mesh in meshes)
            rows = [max(own, key=lambda least: float(least.sum())) for own in members]
            totals[pattern] = np.min(rows, axis=0) / m
        pairs = zip(mixed.seconds, self._patterns(cell), strict=True)
        known = {pattern: replace(own, total=totals[pattern]) for own, pattern in pairs}
        return replace(mixed, seconds=tuple(known[p] for p in self._patterns(cell)))

    def _single_s(self, cell: Cell) -> float:
        """A single stage over devices that differ: each does its part, all wait for sums."""
        least = math.inf
        meshes = sorted(self.meshes(cell), key=lambda mesh: float(mesh.compute_bound.sum()))
        for mesh in meshes:
            if float(mesh.compute_bound.sum()) >= least:
                break
            if self.model.interrupted():
                return 0.0
            bounds = [
                float(own.least(Multipliers(busy_only=self.busy_only, last=part, once=True)).sum())
                for own in mesh.of_members
                for part in (self.last_parts if self.model.training else (0.0,))
            ]
            least = min(least, max(bounds))
        return least

    def mixed(self, cell: Cell) -> MixedPipeline:
        """What is known of a cell's groups where they differ."""
        m, training = cell.num_microbatches, self.model.training
        is_chain = self._is_chain and (self._is_back_chain or not training)
        return MixedPipeline(
            tuple(self._rows(cell)), m, training, self._sources, self._back_sources,
            self._sent_bytes / m, self._borders(cell), is_chain, self.busy_only,
            self._first_trained,
        )  # fmt: skip

    def _borders(self, cell: Cell) -> tuple[Border, ...]:
        """What every group and the next send each other; each device its share, all at once."""
        groups = self._devices(cell)
        return tuple(
            Border(self._link(a, b), self._link(b, a))
            for a, b in zip(groups, (*groups[1:], groups[0]), strict=True)
        )

    def _link(self, source: tuple[int, ...], target: tuple[int, ...]) -> tuple[float, float]:
        """Seconds to start, and of each byte of all that is sent from group to group."""
        n, m = len(source), len(target)
        pairs = tuple((source[i * n // m], device) for i, device in enumerate(target))
        pattern = self.model.patterns.pattern((*source, *target)), n
        if pattern not in self._exchanges:
            exchange = self.model.collectives.exchange
            start, some = exchange(0.0, pairs), exchange(1e9, pairs)
            self._exchanges[pattern] = start, (some - start) / 1e9 / m
        return self._exchanges[pattern]

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
        for each in self.virtual_schedules(cell):
            if each.layout == "looped" and not each.deferred:
                rounds.append(each.virtual_stages)
                depth_first = depth_first and each.name == "interleaved"
            elif each.layout == "wave" and each.virtual_stages == 2:
                waves[each.name] = None
            else:
                raise AssertionError(f"no bound is known for {each.name}")
        equal = self.model.cluster.is_homogeneous
        sends = (rounds or waves) and equal and self.counts_waits
        send_s = self._send_s(cell) if sends else ()
        turns = self.turn_parts if self._is_back_chain else ()
        known = ("zb-v",) if [*waves] == [*KNOWN_WAVES] and self._is_back_chain and equal else ()
        return VirtualOrders(
            p, m, tuple(rounds), bool(waves), send_s, turns, depth_first, known,
            self._first_trained, self.counts_waits,
        )  # fmt: skip

    def virtual_schedules(self, cell: Cell) -> list[JointSchedule]:
        """The orders with several stages on each group that a cell has."""
        p, m = len(self._devices(cell)), cell.num_microbatches
        return [
            each
            for each in self.model.schedules
            if each.virtual_stages > 1
            and p * each.virtual_stages <= self.model.chain.num_segments
            and not refused(each.name, p, each.virtual_stages, m)
        ]

    def meshes(self, cell: Cell) -> list[MeshStrategies]:
        """The meshes of all groups; of those that lie alike once."""
        return [mesh for own in self._each_group(cell).values() for mesh in own]

    def quickest(self, cell: Cell) -> SegmentSeconds:
        """The least of every segment over all meshes of a cell."""
        return least_of([mesh.quickest for mesh in self.meshes(cell)])

    def _by_pattern(self, cell: Cell) -> dict[int, SegmentSeconds]:
        return {
            pattern: least_of([mesh.quickest for mesh in meshes])
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


def _even(works: Floats) -> Floats:
    """Weights of the groups that make all about equally busy."""
    speeds = 1 / np.maximum(works.sum(axis=1), 1e-30)
    weights: Floats = speeds / speeds.sum()
    return weights


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
    whole: Callable[[MeshStrategies], WholeChain | None] = lambda mesh: None
    late: Callable[[], bool] = lambda: False  # then nothing is proven any more: 0
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
        at = Multipliers(busy_only=self.busy_only, updates=False)
        first = self.meshes[0].quick_bounds.least(at)
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
            if self.late():
                return 0.0
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
            if self.late():
                return 0.0
            family = make()
            if family is not None and family(0.0, 0.0) < least:
                least = min(least, self._climbed(family, min(least, enough)))
        return least

    def whole_s(self, enough: float) -> float:
        """The bound with what is converted between segments; 0 where it is not known."""
        if self.num_ranks == 1:
            return self._single_whole_s()
        if self.line is None or not self._may_fit():
            return 0.0
        others = self._virtual_free_s()
        if min(others, enough) <= self._one_stage(0.0, 0.0):
            return 0.0  # no line would raise it
        costs = [self._range_costs(mesh) for mesh in self.meshes]
        known = [own for own in costs if own is not None]
        if len(known) < len(costs):
            return 0.0
        own = np.maximum(np.min(known, axis=0), range_sums(self._free + self._updates))
        costs_s = np.maximum(self.line.costs, self.line.paths.start + own)
        return min(others, least_cuts_s([costs_s] * self.num_ranks))

    def _single_whole_s(self) -> float:
        """Of a single stage: the least of its meshes, those that compute least first."""
        least = math.inf
        for mesh in self.meshes:
            if float(mesh.compute_bound.sum()) >= least:
                break
            costs = self._range_costs(mesh) if self._of_mesh(mesh) else np.full((1, 1), math.inf)
            if costs is None:
                return 0.0
            least = min(least, float(costs[0, -1]))
        return least

    def _range_costs(self, mesh: MeshStrategies) -> Floats | None:
        chain = self.whole(mesh)
        return None if chain is None else chain.range_costs

    def _virtual_free_s(self) -> float:
        """Of orders with virtual stages, without multipliers; infinite if there are none."""
        bounds = []
        if self.virtual is not None and self.virtual.rounds:
            bounds.append(self._looped_free_s)
        if self.virtual is not None and self.virtual.wave:
            bounds.append(self._wave_free_s)
        return min(bounds, default=math.inf)

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
                if self.late():
                    return best
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
            network, multiplier, 1.0, sync=True, gradients=not self._alone,
            busy_only=self.busy_only, once=self.training,
        )  # fmt: skip
        return float(mesh.least(at).sum()) - multiplier * self.budget

    def _one_stage(self, network: float, multiplier: float) -> float:
        """Ranks in a line, each with one layer range."""
        assert self.line is not None, "families are those that there are"
        if not network and not multiplier:
            return self._line_s(self.line, self._free + self._updates)
        at = Multipliers(network, multiplier, sync=self.training, busy_only=self.busy_only)
        return self._line_s(self.line, self._least(at), multiplier * self.budget)

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
        """Per segment the least without multipliers, and without updates.

        With several stages on each group, what a path has after a stage runs beside its updates.
        """
        return self._least(Multipliers(busy_only=self.busy_only, updates=False))

    @functools.cached_property
    def _updates(self) -> Floats:
        """Per segment the least that updates take."""
        known = [mesh.quick_bounds.least_updates for mesh in self.meshes]
        least: Floats = np.min(known, axis=0)
        return least

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
        at = Multipliers(network, multiplier, low, busy_only=self.busy_only, updates=False)
        at_low = self._least(at)
        at_high = at_low
        if high > low:
            at_high = self._least(replace(at, in_flight=high))
        parts = (flights - low) / (high - low) if high > low else 0.0 * flights
        costs: Floats = at_low + parts[:, None] * (at_high - at_low)
        return costs

    def _least(self, at: Multipliers) -> Floats:
        """Per segment the least of all meshes; one that computes no less is not asked further."""
        if at not in self._known:
            free = not at.network and not at.s_per_byte
            least = np.full(len(self.meshes[0].fold.like), math.inf)
            for mesh in self.meshes:
                if self.late():
                    return 0.0 * mesh.compute_bound
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


@dataclass
class PlanBounds:
    """Bounds of the cells of one model's space, for simulated plans, from cheap to strong.

    On equal devices: all work over all devices; computing alone, with every op at its quickest
    split (both `ComputeBounds`); `CellBound` without multipliers, of one mesh with its tables and
    then of all; the same after dual ascent; with conversions between segments (`bound_whole`). On
    heterogeneous devices: computing alone; the same over all cuts of lines; of orders with virtual
    stages (`bound_mixed`); with waits, updates and sums of gradients by tables of every group.
    """

    model: JointModel
    busy_only: bool = False  # is the objective the steady-state throughput?
    _cells: dict[Cell, CellBound | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.computing = ComputeBounds(self.model, self.busy_only)

    @property
    def num_levels(self) -> int:
        """How many there are."""
        return len(self._levels())

    def bound(self, cell: Cell, level: int, enough: float) -> float:
        """The bound at a level; infinite where no plan of the cell fits, 0 without time for it."""
        return 0.0 if self.model.interrupted() else self._levels()[level](cell, enough)

    def _levels(self) -> tuple[Callable[[Cell, float], float], ...]:
        computing = self.computing
        if not self.model.cluster.is_homogeneous:
            return (
                lambda cell, _: computing.computing_s(cell) * ROUNDING,
                lambda cell, _: computing.cuts_s(cell) * ROUNDING,
                lambda cell, enough: computing.virtual_s(cell, enough) * ROUNDING,
                lambda cell, enough: computing.tables_s(cell, enough) * ROUNDING,
            )
        return (
            lambda cell, _: computing.ideal_s(cell) * ROUNDING,
            lambda cell, _: computing.computing_s(cell) * ROUNDING,
            self._of_first_mesh,
            self._without_multipliers,
            self._with_multipliers,
            self._as_a_whole,
        )

    def _of_first_mesh(self, cell: Cell, enough: float) -> float:
        bound = self.cell_bound(cell)
        return math.inf if bound is None else bound.first_s

    def _without_multipliers(self, cell: Cell, enough: float) -> float:
        bound = self.cell_bound(cell)
        return math.inf if bound is None else bound.quick_s

    def _with_multipliers(self, cell: Cell, enough: float) -> float:
        bound = self.cell_bound(cell)
        return math.inf if bound is None else bound.climbed_s(enough)

    def _as_a_whole(self, cell: Cell, enough: float) -> float:
        if self.model.is_long:
            return 0.0
        bound = self.cell_bound(cell)
        return math.inf if bound is None else bound.whole_s(enough) * ROUNDING

    def cell_bound(self, cell: Cell) -> CellBound | None:
        """The bounds of a cell by multipliers; None where there is no such plan."""
        if cell not in self._cells:
            self._cells[cell] = self._cell_bound(cell)
        return self._cells[cell]

    def _cell_bound(self, cell: Cell) -> CellBound | None:
        model, computing = self.model, self.computing
        meshes = computing.meshes(cell)
        if not meshes:
            return None
        grouping = model.problem.groupings[cell.grouping]
        line = virtual = seconds = None
        if grouping.num_groups > 1:
            if any(each.virtual_stages == 1 for each in model.schedules):
                line = LineRanges(*computing.line_paths(cell))
            if computing.has_virtual_stages(cell):
                virtual, seconds = computing.orders(cell), computing.quickest(cell)
        return CellBound(
            meshes,
            grouping.num_groups,
            cell.num_microbatches,
            max(map(model.memory_bytes, grouping.devices)),
            model.training,
            line,
            virtual,
            seconds,
            self.busy_only,
            functools.partial(
                model.whole_chain, alone=grouping.num_groups == 1, busy_only=self.busy_only
            ),
            model.interrupted,
        )
