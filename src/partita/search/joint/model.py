"""A model on a cluster as a joint problem, and solutions of it as stages.

The model is a chain of segments with its repeats folded (`graph.chain`). The space is every
grouping of the devices (`cells`), every number of micro-batches that divides the batch, every
mesh of a group, and the orders that constraints leave. Strategies are made when they are asked for:
the sharding problem of the folded graph, for one mesh and micro-batch size (`strategies`); groups
that lie alike in the cluster share them.

Stages are given a quick look before a slow one (`StageBound`). The busiest group of devices
computes all its ops for every micro-batch, and its parameters, gradients and states lie there all
the time, and what is saved and not recomputed of at least one micro-batch, spread over all devices
at best. Worked out on the folded graph, op by op, each way to split an op once. A plan that is
slower than the best by this alone, or larger than the memory, need not be simulated.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from partita.cluster import Cluster, DeviceKind
from partita.costs.collectives import Collectives, Patterns
from partita.costs.memory import gradient_bytes, model_memory, workspace_bytes
from partita.costs.roofline import op_cost
from partita.costs.sharding import LEVELS, Keep, heterogeneous, ways_of
from partita.errors import GraphError
from partita.graph.backward import training_graph
from partita.graph.chain import Chain, Folded, chain_of, folded
from partita.graph.rebatch import batch_of, rebatch
from partita.graph.record import Graph, Op
from partita.graph.splits import placements
from partita.plans import CHECKPOINTING, Axis, Mesh, OpSplit, Schedule, Stage
from partita.problems.joint import (
    Cell,
    FlightKey,
    Grouping,
    JointProblem,
    JointSchedule,
    JointSolution,
    JointStrategy,
    MeshShape,
    StageChoice,
    TableKey,
)
from partita.problems.sharding import ShardingProblem
from partita.schedules.named import NAMED
from partita.search.base import Status, Stop
from partita.search.joint.bound_whole import WholeChain
from partita.search.joint.cells import (
    USUAL_GROUPS,
    GroupingSettings,
    device_groupings,
    divisors,
    mesh_of,
    mesh_shapes,
    shard_group_shapes,
    weighted_meshes,
)
from partita.search.joint.orders import SINGLE, in_flight, joint_schedule, refused
from partita.search.joint.strategies import DistinctOps, MeshStrategies, SplitStrategy
from partita.search.sharding import SEARCHES

log = logging.getLogger("partita")
K = TypeVar("K")
V = TypeVar("V")
Allow = Callable[[str, object], bool]
# Of every device that differs its kind and place, and its seconds forward and back; bytes that lie
# there, and that wait for the backward.
Members = tuple[tuple[DeviceKind, tuple[int, ...]], ...]
Share = tuple[tuple[tuple[float, float], ...], float, float]
REPLICATED = (0,)  # parameters are not sharded in any way


@dataclass
class StageBound:
    """Bounds of given stages; `graph_of` gives the folded graph of one of m micro-batches."""

    fold: Folded
    cluster: Cluster
    training: bool
    graph_of: Callable[[int], Graph]
    budget: Callable[[Sequence[int]], float]
    _phase_ops: dict[int, dict[str, list[Op]]] = field(default_factory=dict)
    _shares: dict[tuple[object, ...], dict[object, Share]] = field(default_factory=dict)
    _saved: dict[int, frozenset[str]] = field(default_factory=dict)

    def __call__(self, stages: Sequence[Stage], num_microbatches: int) -> tuple[float, float]:
        """(seconds, bytes over the cap): what the simulator will at least find for these stages.

        The busiest group computes all its ops for every micro-batch, each of its devices that
        differ its own share; parameters, gradients and states lie there all the time. Worked out
        on the folded graph, op by op.
        """
        busy: dict[tuple[int, ...], float] = {}
        held: dict[tuple[int, ...], float] = {}
        for stage in stages:
            devices = stage.mesh.devices
            times, again = 2 if (stage.checkpointing == "full") else 1, set(stage.recomputed)
            axes = stage.mesh.axes
            members = tuple(heterogeneous(self.cluster, stage.mesh))
            asked = tuple((kind.name, place) for kind, place in members)
            known = self._shares.setdefault((num_microbatches, axes, asked), {})
            seconds, size = [0.0] * len(members), 0.0
            for split in stage.splits:
                key = (self.fold.op_like[split.op], split.dims, split.zero)
                share = known.get(key)
                if share is None:
                    share = known[key] = self._share(num_microbatches, key[0], split, axes, members)
                for number, (forward, back) in enumerate(share[0]):
                    seconds[number] += times * forward + back
                kept = stage.checkpointing != "full" and split.op not in again
                size += share[1] + (share[2] if kept else 0.0)
            busy[devices] = busy.get(devices, 0.0) + max(seconds)
            held[devices] = held.get(devices, 0.0) + size
        over = max(size - self.budget(devices) for devices, size in held.items())
        return num_microbatches * max(busy.values()), over

    def _share(
        self, m: int, op: str, split: OpSplit, axes: tuple[Axis, ...], members: Members
    ) -> Share:
        graph = self.graph_of(m)
        phases = self._phases(m)[op]
        seconds = []
        for kind, place in members:
            share = tuple(sorted(ways_of(split.dims, axes, place).items()))
            own = [op_cost(graph, phase, kind, share).seconds for phase in phases]
            seconds.append((own[0], sum(own[1:])))
        lies = self._lies(graph, op, split, axes)
        keeps = self._keeps(m, op, axes) if seconds[0][0] else 0.0
        return tuple(seconds), lies, keeps

    def _keeps(self, m: int, op: str, axes: tuple[Axis, ...]) -> float:
        """The least bytes of an op's outputs that wait for the backward on a device."""
        graph = self.graph_of(m)
        if m not in self._saved:
            self._saved[m] = frozenset(
                name for o in graph.ops if o.phase in ("dgrad", "wgrad") for name in o.inputs
            )
        parts = 1.0
        for axis in axes:
            parts *= axis.parts / min(axis.weights) if axis.weights else axis.size
        kept = (name for name in graph.op(op).outputs if name in self._saved[m])
        return sum(graph.tensor(name).size_bytes for name in kept) / parts

    def _lies(self, graph: Graph, op: str, split: OpSplit, axes: tuple[Axis, ...]) -> float:
        """The least bytes of parameters, gradients and states that an op keeps on a device."""
        mine = graph.op(op)
        needed = placements(graph.call(mine), split.dims)[0]
        total = 0.0
        for name, layout in zip(mine.inputs, needed, strict=True):
            tensor = graph.tensor(name)
            users = [user for user in graph.consumers(name) if user.phase == "forward"]
            if tensor.role != "parameter" or len(users) > 1:
                continue
            shards = copies = 1.0
            for place, axis in zip(layout, axes, strict=True):
                most = axis.parts / min(axis.weights) if axis.weights else axis.size
                shards *= most if place.kind == "shard" else 1.0
                cut = place.kind != "shard" and not axis.replicates
                copies *= axis.size if cut else 1.0
            size = tensor.size_bytes / shards
            total += size / (copies if split.zero == 3 else 1)
            if self.training:
                states = self._state_bytes(graph, name) / shards
                total += states / (1 if split.zero == 0 else copies)
                kept = split.zero in (3, 2)
                total += gradient_bytes(graph, name) / shards / (copies if kept else 1)
        return total

    def _state_bytes(self, graph: Graph, parameter: str) -> float:
        for user in graph.consumers(parameter):
            if user.phase == "update":
                return float(sum(graph.tensor(name).size_bytes for name in user.inputs[2:]))
        return 0.0

    def _phases(self, m: int) -> dict[str, list[Op]]:
        if m not in self._phase_ops:
            graph = self.graph_of(m)
            ops_of = {op.name: [op] for op in graph.ops if op.phase == "forward"}
            for op in graph.ops:
                if op.forward:
                    ops_of[op.forward].append(op)
            self._phase_ops[m] = ops_of
        return self._phase_ops[m]


class Made(Mapping[K, V], Generic[K, V]):
    """Values that are made when they are asked for; those that were are its content."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._known: dict[K, V] = {}

    def __getitem__(self, key: K) -> V:
        if key not in self._known:
            self._known[key] = self._make(key)
        return self._known[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: object) -> bool:
        return key in self._known


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What the space of a model has, and how carefully its strategies are made."""

    most_stages: int = 32  # groups of devices, unless more are pinned
    # Orders with one stage on each group (others if pinned), and with several virtual stages.
    plain: tuple[str, ...] = ("1f1b", "zb-h1", "zb-h2")
    virtual: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("zb-v", (2,)),
        ("interleaved", (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)),
    )
    groups: GroupingSettings = USUAL_GROUPS  # of devices, and their meshes
    waiting: float = 0.25  # of the activations: the gradients that are kept for weight gradients
    # Seldom better than those above: only where they are pinned.
    pinned_virtual: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("looped-bfs", (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)),
        ("hanayo", (2,)),  # no bound is known for waves of more stages
        ("dualpipe-v", (2,)),
    )
    finest: int = 200  # segments: the more, the more evenly stages can be cut, and the slower
    whole_blocks: bool = False  # is the model cut between the modules of a list only?
    filled: float = 0.94  # of the memory, before what is live only for a moment is known
    large: int = 128  # devices: beyond, only meshes that the samples reach
    most_weighted: int = 4  # micro-batches of one stage over heterogeneous devices
    close: float = 1e-5  # splits so near to the best are good enough
    most_sweeps: int = 400  # of the sharding search for one mesh and multiplier; most need a few
    # Lagrange multipliers on bytes, each with its strategies: by the model's time per byte.
    multipliers: tuple[float, ...] = (0.0, 0.05, 0.5, 5.0)
    inference_multipliers: tuple[float, ...] = (0.0, 0.05, 0.5)  # it keeps less
    most_whole: int = 600  # ops of a chain that is bounded with all edges between its segments
    half: float = 0.5  # of a node's memory: what parameters and states should fill

    def virtual_stages(self, pinned: str | None) -> dict[str, tuple[int, ...]]:
        """Per order with virtual stages, how many of them each group may have."""
        more = dict(self.pinned_virtual)
        return {**dict(self.virtual), **({pinned: more[pinned]} if pinned in more else {})}


@dataclass
class JointModel:
    """One model on one cluster; remembers what was worked out."""

    graph: Graph
    optimizer: str
    cluster: Cluster
    collectives: Collectives
    allow: Allow = field(default=lambda decision, value: True)
    levels: tuple[int, ...] = LEVELS
    max_memory: float = math.inf
    interrupted: Callable[[], bool] = field(default=lambda: False)
    constraints: str = ""
    pinned_schedule: str | None = None
    pinned_stages: int | None = None
    name: str = ""
    grad_dtype: str = ""  # of gradients of parameters; "": theirs
    shard_group: int = 0  # replicas that parameters are sharded over (HSDP); 0: all there are
    # Which splits of an op may be on a mesh of these axes, the strictest last; none: all may.
    keeps: Callable[[Sequence[Axis]], tuple[Keep, ...]] = field(default=lambda axes: ())
    suits: Callable[[Mesh, Sequence[OpSplit]], bool] = field(default=lambda mesh, splits: True)
    settings: ModelSettings = ModelSettings()
    chain: Chain = field(init=False)
    fold: Folded = field(init=False)

    def __post_init__(self) -> None:
        self.batch = batch_of(self.graph)
        self.training = self.graph.is_training
        finest = self.settings.finest
        self.chain = chain_of(self.graph, finest, finest, whole_blocks=self.settings.whole_blocks)
        self.fold = folded(self.chain)
        short = self.fold.graph
        self.base = short
        if self.training:
            self.base = training_graph(short, self.optimizer, grad_dtype=self.grad_dtype)
        self.patterns = Patterns.of(self.cluster)
        self.search = next(iter(SEARCHES.values()))
        self._graphs: dict[int, Graph] = {}
        self.stage_bound = StageBound(
            self.fold, self.cluster, self.training, self.micro, self.memory_bytes
        )
        self._meshes: dict[tuple[object, ...], MeshStrategies] = {}
        self._splits: dict[TableKey, tuple[SplitStrategy, ...]] = {}
        self._distinct: dict[int, DistinctOps] = {}
        self._whole: dict[tuple[int, bool, bool], WholeChain] = {}
        self._pattern_of: dict[tuple[object, ...], int] = {}
        self._first: list[tuple[int, ...]] = []  # of each pattern, the first group that has it

    # The record.

    @functools.cached_property
    def problem(self) -> JointProblem:
        """The space, and tables that are made when they are asked for."""
        groupings, counts = self._groupings(), self._counts()
        meshes: dict[tuple[int, int], tuple[MeshShape, ...]] = {}
        for pattern, group in enumerate(self._first):
            for count in counts:
                meshes[pattern, count] = self._mesh_shapes(group, count)
        cells = tuple(
            Cell(number, count)
            for number, grouping in enumerate(groupings)
            for count in counts
            if all(meshes[pattern, count] for pattern in grouping.patterns)
        )
        allowed = tuple(
            each for each in CHECKPOINTING if self.allow("recompute", each)
        )  # fmt: skip
        return JointProblem(
            batch=self.batch,
            training=self.training,
            segment_kind=tuple(self.fold.like),
            crossing_bytes=tuple(map(float, self.chain.crossing_bytes)),
            groupings=groupings,
            cells=cells,
            schedules=self.schedules,
            meshes=meshes,
            strategies=Made(self._strategies),
            in_flight=Made(self._in_flight),
            checkpointing=allowed if self.training and allowed else ("none",),
            likely_stages=self._likely_stages(),
            homogeneous=self.cluster.is_homogeneous,
            name=self.name,
            constraints=self.constraints,
        )

    @functools.cached_property
    def schedules(self) -> tuple[JointSchedule, ...]:
        """Orders that may be, those with one stage on each group first."""
        virtual = self.settings.virtual_stages(self.pinned_schedule)
        names = list(self.settings.plain)
        names = names if self.training else ["1f1b"]
        pinned = self.pinned_schedule
        if pinned is not None and pinned not in (*names, *virtual):
            names = [pinned] if NAMED[pinned].layout == "line" else []
        names = names if self.allow("vpp", 1) else []
        joint_schedules = [
            joint_schedule(name)
            for name in names
            if self.allow("schedule", name) or (name == SINGLE and pinned is None)
        ]
        for name, chunks in virtual.items() if self.training else ():
            if self.allow("schedule", name):
                counts = [count for count in chunks if self.allow("vpp", count)]
                joint_schedules += [joint_schedule(name, count) for count in counts]
        return tuple(joint_schedules)

    def _counts(self) -> list[int]:
        counts = [c for c in divisors(self.batch) if self.allow("micro-batches", c)]
        if not self.is_cut and 1 not in counts:
            self.micro(max(counts))  # says which op is to blame
        return counts if self.is_cut else [1]

    @functools.cached_property
    def is_cut(self) -> bool:
        """Can the batch be cut into micro-batches? If not, the log says why."""
        try:
            self.micro(self.batch)
        except GraphError as error:
            log.warning("%s; planned with one micro-batch", error)
            return False
        return True

    def _groupings(self) -> tuple[Grouping, ...]:
        most = min(self.settings.most_stages, self.chain.num_segments)
        if self.pinned_stages is not None:
            most = min(self.pinned_stages, self.chain.num_segments)
        groupings = []
        for groups in device_groupings(self.cluster, most, self.settings.groups):
            ordered = len(groups) > 1 or self.pinned_schedule is None
            if ordered and self.allow("pp", len(groups)):
                latency, per_byte = self._link(groups)
                groupings.append(
                    Grouping(
                        groups,
                        tuple(map(self._pattern, groups)),
                        tuple(self.memory_bytes(g) * self.settings.filled for g in groups),
                        latency,
                        per_byte,
                    )
                )
        return tuple(groupings)

    def _pattern(self, group: tuple[int, ...]) -> int:
        """The number of a group's pattern: equal for groups that lie alike."""
        pattern = self.patterns.pattern(group)
        if pattern not in self._pattern_of:
            self._pattern_of[pattern] = len(self._first)
            self._first.append(group)
        return self._pattern_of[pattern]

    def _link(self, groups: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Latency, and seconds per byte of all that crosses a cut, each device its part."""
        if len(groups) == 1:
            return 0.0, 0.0
        small = min(len(groups[0]), len(groups[1]))
        pairs = tuple(zip(groups[0][:small], groups[1][:small], strict=True))
        none, some = self.collectives.exchange(0.0, pairs), self.collectives.exchange(1e6, pairs)
        return none, (some - none) / 1e6 / small

    def _mesh_shapes(self, group: tuple[int, ...], count: int) -> tuple[MeshShape, ...]:
        """The meshes of a group; of many devices those that the samples reach."""
        inner, settings = self.patterns.inner_size, self.settings.groups
        if self.shard_group:
            chosen = shard_group_shapes(len(group), inner, self.shard_group, settings)
            return tuple(MeshShape(s, (), many) for s, many in chosen if self.allow("mesh", s))
        shapes = mesh_shapes(len(group), inner, settings)
        allowed = [shape for shape in shapes if self.allow("mesh", shape)]
        if self.cluster.num_devices > self.settings.large:
            reached = [shape for shape in allowed if shape[0] <= self.batch // count]
            allowed = reached or allowed
        new_mesh_shapes = [MeshShape(shape) for shape in allowed]
        line = (len(group),)
        if line in allowed and count <= self.settings.most_weighted:
            new_mesh_shapes += [MeshShape(line, weights) for weights in self._weights(group, count)]
        return tuple(new_mesh_shapes)

    def _weights(self, group: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
        """Shares by speed, where one stage has all heterogeneous devices."""
        if self.cluster.is_homogeneous or len(group) < self.cluster.num_devices:
            return []
        meshes = weighted_meshes(
            self.cluster, self._speeds, self.batch // count, self.settings.groups
        )
        return [mesh.axes[0].weights for mesh in meshes]

    @functools.cached_property
    def _speeds(self) -> dict[str, float]:
        graph = self.micro(1)
        return {
            kind.name: 1 / (sum(op_cost(graph, op, kind).seconds for op in graph.ops) or 1.0)
            for kind in self.cluster.kinds
        }

    def _in_flight(self, key: FlightKey) -> tuple[float, ...]:
        schedule, p, m = self.schedules[key.schedule], key.num_groups, key.num_microbatches
        may_be = self.pinned_schedule is None if p == 1 else self.allow("schedule", schedule.name)
        if not may_be or refused(schedule.name, p, schedule.virtual_stages, m):
            return ()
        if not self.training:
            return (1.0,) * p
        return in_flight(schedule.name, p, schedule.virtual_stages, m, self.settings.waiting)

    def _likely_stages(self) -> int:
        """As many as it takes for parameters and states to fill half of a node's memory."""
        memory = model_memory(self.graph)
        held = memory.parameters + memory.gradients + memory.states
        least = min(kind.memory_bytes for kind in self.cluster.kinds)
        wanted = max(1.0, held / (self.settings.half * least * self.patterns.inner_size))
        return int(min(1 << math.ceil(math.log2(wanted)), self.cluster.num_devices))

    # Strategies.

    def _strategies(self, key: TableKey) -> tuple[JointStrategy, ...]:
        return tuple(split.figures for split in self.splits(key))

    def splits(self, key: TableKey) -> tuple[SplitStrategy, ...]:
        """The strategies of a table, with the splits that they stand for."""
        if key not in self._splits and self.interrupted():
            return ()
        if key not in self._splits:
            on_mesh = self.on_mesh(self._mesh(key), key.num_microbatches, key.in_flight)
            split_strategies = list(on_mesh.strategies)
            if key.in_flight == 1 and self._replicas_matter(self._first[key.pattern]):
                # Splits for parameters that are not sharded at all differ, and may be quicker.
                split_strategies += replace(
                    on_mesh, levels=REPLICATED, multipliers=self.settings.multipliers[:1]
                ).strategies
            for keep in self.keeps(self._mesh(key).axes)[1:]:
                split_strategies += replace(on_mesh, keep=keep).strategies
            self._splits[key] = tuple(filter(self._suitable, split_strategies))
        return self._splits[key]

    def _suitable(self, strategy: SplitStrategy) -> bool:
        """Is it what was asked for, on the model as a whole?"""
        ops = [op for segment in self.fold.segments for op in segment]
        return self.suits(strategy.mesh, strategy.splits(ops, self.fold))

    def _replicas_matter(self, group: tuple[int, ...]) -> bool:
        """May a device of a single stage hold everything, and as much again?"""
        alone = any(each.devices == (group,) for each in self.problem.groupings)
        memory = model_memory(self.graph)
        held = memory.parameters + memory.gradients + memory.states
        budget = self.memory_bytes(group) * self.settings.filled
        return alone and len(self.levels) > 1 and 0 in self.levels and 2 * held <= budget

    def _mesh(self, key: TableKey) -> Mesh:
        return mesh_on(key.mesh, self._first[key.pattern])

    def on_mesh(self, mesh: Mesh, num_microbatches: int, flight: int) -> MeshStrategies:
        """What is known of one mesh, shared by all that lie alike."""
        key = (mesh.axes, self.patterns.pattern(mesh.devices), num_microbatches, flight)
        if key not in self._meshes:
            graph, distinct = self.micro(num_microbatches), self.distinct_ops(num_microbatches)
            settings = self.settings
            self._meshes[key] = MeshStrategies(
                graph, self.fold, self.cluster, mesh, num_microbatches, flight, self._solve,
                self._prove, self.collectives, distinct,
                settings.multipliers if self.training else settings.inference_multipliers,
                self.levels,
                self.allow("recompute", "selective"),
                keep=next(iter(self.keeps(mesh.axes)), None),
            )  # fmt: skip
        return self._meshes[key]

    def micro(self, num_microbatches: int) -> Graph:
        """The folded graph for one of so many micro-batches."""
        if num_microbatches not in self._graphs:
            self._graphs[num_microbatches] = rebatch(self.base, self.batch // num_microbatches)
        return self._graphs[num_microbatches]

    def whole_chain(
        self, mesh: MeshStrategies, *, alone: bool, busy_only: bool = False
    ) -> WholeChain | None:
        """The bounds of a mesh with what is converted between segments; None of a long chain.

        `alone`: for a single stage, without any border.
        """
        if self.is_long:
            return None
        key = (id(mesh), alone, busy_only)
        if key not in self._whole:
            graph = rebatch(self.graph, self.batch // mesh.num_microbatches)
            fold = self.unfolded
            if alone:  # gradients are added up between segments as inside of them
                ops = tuple(op for segment in fold.segments for op in segment)
                fold = Folded(graph, (ops,), (0,), fold.op_like)
            self._whole[key] = WholeChain(mesh.whole(graph, fold), busy_only)
        return self._whole[key]

    @property
    def is_long(self) -> bool:
        """Has the chain too many ops to be bounded as a whole?"""
        return len(self.fold.op_like) > self.settings.most_whole

    @functools.cached_property
    def unfolded(self) -> Folded:
        """The chain with every segment by itself."""
        segments = tuple(segment.ops for segment in self.chain.segments)
        ops = {op: op for segment in segments for op in segment}
        return Folded(self.graph, segments, tuple(range(len(segments))), ops)

    def distinct_ops(self, num_microbatches: int) -> DistinctOps:
        """The ops of a micro-batch that differ."""
        if num_microbatches not in self._distinct:
            distinct_ops = DistinctOps.of(self.micro(num_microbatches), self.fold)
            self._distinct[num_microbatches] = distinct_ops
        return self._distinct[num_microbatches]

    def memory_bytes(self, group: Sequence[int]) -> float:
        """What a device of a group has beside its workspace, by the one that has least."""
        kinds = {self.cluster.devices[device].kind: device for device in group}
        generator = (self.cluster.kind_of(device) for device in kinds.values())
        return min(min(k.memory_bytes, self.max_memory) - workspace_bytes(k) for k in generator)

    def _solve(self, problem: ShardingProblem) -> tuple[int, ...] | None:
        """Splits that are good enough for a strategy."""
        settings = self.settings
        stop = Stop(
            gap=settings.close, evaluations=settings.most_sweeps, interrupted=self.interrupted
        )
        solution = self.search(problem, stop, 0).solution
        return None if solution is None else tuple(solution.assignment)

    def _prove(self, problem: ShardingProblem) -> tuple[int, ...] | None:
        """Splits than which none are better, or nothing."""
        stop = Stop(evaluations=self.settings.most_sweeps, interrupted=self.interrupted)
        result = self.search(problem, stop, 0)
        if result.solution is None or result.status is not Status.OPTIMAL:
            return None
        return tuple(result.solution.assignment)

    # Solutions as stages.

    def schedule(self, solution: JointSolution) -> Schedule:
        """The order of a solution, as a plan has it."""
        return Schedule(
            self.schedules[solution.schedule].name, solution.cell.num_microbatches
        )  # fmt: skip

    def stages(self, solution: JointSolution) -> tuple[Stage, ...]:
        """The stages of a solution, with a split for every op."""
        problem = self.problem
        grouping = problem.groupings[solution.cell.grouping]
        schedule = problem.schedules[solution.schedule]
        stages = []
        for number, stage in enumerate(solution.stages):
            group = schedule.group_of(number, grouping.num_groups)
            shape = problem.meshes_of(solution.cell, group)[stage.mesh]
            split = self.splits(problem.key(solution.cell, group, shape))[stage.strategy]
            mesh = mesh_on(shape, grouping.devices[group])
            stages.append(self._stage(number, mesh, split, stage))
        return tuple(stages)

    def _stage(self, number: int, mesh: Mesh, split: SplitStrategy, choice: StageChoice) -> Stage:
        segments = self.chain.segments[choice.first : choice.end]
        ops = [name for segment in segments for name in segment.ops]
        full = choice.checkpointing == "full"
        kept = tuple(segment.ops[0] for segment in segments[1:]) if full else ()
        again = self._again(split, ops) if choice.checkpointing == "selective" else ()
        splits = split.splits(ops, self.fold)
        return Stage(
            f"stage{number}",
            mesh,
            splits,
            "full" if full else "selective" if again else "none",
            kept,
            again,
        )

    def _again(self, split: SplitStrategy, ops: Sequence[str]) -> tuple[str, ...]:
        """The ops of a stage that run again: for gradients of this stage."""
        repeated: set[str] = set()
        mine = set(ops)
        for op in reversed(ops):
            readers, users = self.readers[op]
            if self.fold.op_like[op] in split.again and (readers & mine or users & repeated):
                repeated.add(op)
        return tuple(op for op in ops if op in repeated)

    @functools.cached_property
    def readers(self) -> dict[str, tuple[set[str], set[str]]]:
        """Per op the ops whose gradients read what it makes, and those that read it themselves."""
        readers: dict[str, tuple[set[str], set[str]]] = {}
        for op in self.graph.ops:
            if op.phase == "forward":
                users = [user for name in op.outputs for user in self.graph.consumers(name)]
                readers[op.name] = (
                    {user.forward for user in users if user.forward},
                    {user.name for user in users if user.phase == "forward"},
                )
        return readers

    def meshes_of(self, cell: Cell, group: int) -> list[MeshStrategies]:
        """What is known of the meshes of a group."""
        keys = (
            self.problem.key(cell, group, shape) for shape in self.problem.meshes_of(cell, group)
        )
        return [self.on_mesh(self._mesh(key), key.num_microbatches, key.in_flight) for key in keys]


def mesh_on(shape: MeshShape, devices: Sequence[int]) -> Mesh:
    """A mesh of a shape on some devices."""
    if shape.weights:
        return Mesh((Axis("x", shape.sizes[0], shape.weights),), tuple(devices))
    return mesh_of(shape.sizes, devices, replicates=shape.replicates)
