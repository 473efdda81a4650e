"""The sharding problem of a model on a mesh: a split for every op at the least total time.

Each forward op chooses one splittable loop dim (or none) per mesh axis, and whether its parameters
are kept replicated or sharded; its backward follows. A dispatch to experts and its combine must
route the same groups of tokens: other pairs of their choices are forbidden (infinite along an
edge). What a choice costs is kept in parts,

    compute    all phases and the update, per kind of device
    blocking   statistics and halos, and along edges the conversion of layouts: somebody waits;
               of inference also what it takes to add up partial sums that the model returns
    hidden     sums of parameter gradients, gathering of shares, adding up a loss: may run beside
               compute
    ends       gathering of what was updated sharded, when all else is done
    buckets    a part of what it takes to start a collective, of hidden ones and of those at the
               end: gradients share buckets, so that a small one pays for as much as it fills
    slowed     what computing pays for hidden communication beside it: gathers in full, sums by
               bandwidth
    memory     parameters, gradients, states and saved activations held on a device

and a problem is made from them with weights: blocking and hidden communication count in part, as
far as they are expected to overlap; bytes have a price per byte, by which a cap on memory becomes a
Lagrangian. Where a tensor has several consumers its conversion is done once, so each pays a part.
A parameter with several readers (tied) is counted to the first: their gradients are added up before
they are reduced, and where these do not lie alike, the pair pays for making them so.
For one of several micro-batches, what happens once a step (updates, and gradients of parameters
that are kept replicated) counts in equal parts to each.

Bounds. A device's compute lane and its network lane are each busy no longer than a step, so for any
0 <= w <= 1 the least value of (1 - w) compute + w communication over all choices is below every
step time; and with a price per byte, that value less price * cap is below every step that fits.
What depends on other ops (buckets, slowed, gradients of tied parameters) does not count there.
"""

import functools
import itertools
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from partita.cluster import Cluster, DeviceKind
from partita.costs.collectives import Collectives, Groups
from partita.costs.layouts import (
    Conversions,
    Layout,
    Reductions,
    best_bundle,
    common_layout,
    conversion_seconds,
    gather_start,
    gradient_target,
    num_shards,
    token_groups,
    zero_axes,
)
from partita.costs.roofline import Split, op_cost
from partita.graph.backward import recomputable
from partita.graph.loops import Access, Nest, loop_nest
from partita.graph.record import Call, Graph, Op, Tensor, dtype_bytes
from partita.graph.splits import (
    PARTIAL,
    REPEAT,
    REPLICATE,
    communication,
    input_placement,
    output_placement,
    routed_pairs,
    shares_between,
    splittable,
)
from partita.graph.work import cached_inputs
from partita.plans import BUCKET_BYTES, Axis, Mesh, OpSplit
from partita.problems.sharding import ShardingProblem

STAT_BYTES = 4
LEVELS = (0, 1, 3)  # what a search may choose for an op's parameters
Dims = tuple[str, ...]  # one loop dim per mesh axis, '' for none
Keep = Callable[[Call, Dims], bool]  # may an op be split like this?
Floats = npt.NDArray[np.float64]
DimsParts = tuple[list[float], float, float, float, float]  # see _ShardingBuilder._dims_parts


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """One way to run an op: its dims per axis, and how its parameters are kept."""

    dims: Dims
    zero: int = 0


@dataclass(frozen=True, slots=True)
class Weights:
    """How the parts of a cost count."""

    compute: float = 1.0
    blocking: float = 1.0
    hidden: float = 1.0
    s_per_byte: float = 0.0
    shared: float = 1.0  # what ops pay in common; 0 for bounds
    in_flight: float = 1.0  # micro-batches whose activations are held at a time
    selective: bool = False  # are cheap ops run again rather than what they make held?


PLAIN = Weights()


@dataclass(frozen=True, eq=False)
class OpTable:
    """The parts of every choice of one op; what parameters send is worked out when asked for."""

    compute: Floats  # choices x kinds of device
    blocking: Floats
    memory: Floats
    activations: Floats  # of the memory, what each micro-batch holds
    selectively: Floats  # of that, what is held where cheap ops run again
    updates: Floats  # of compute, what the optimizer takes
    send: Callable[[], Floats] = field(repr=False)  # rows as the properties below

    @functools.cached_property
    def _sent(self) -> Floats:
        return self.send()

    @property
    def hidden(self) -> Floats:
        """Seconds that may run beside compute."""
        return self._column(0)

    @property
    def ends(self) -> Floats:
        """Seconds at the end of a step."""
        return self._column(1)

    @property
    def hidden_buckets(self) -> Floats:
        """A part of what it takes to start collectives that may run beside compute."""
        return self._column(2)

    @property
    def ends_buckets(self) -> Floats:
        """The same of those at the end of a step."""
        return self._column(3)

    @property
    def slowed(self) -> Floats:
        """What computing pays for hidden communication beside it."""
        return self._column(4)

    def _column(self, number: int) -> Floats:
        column: Floats = self._sent[number]
        return column

    def held(self, in_flight: float, *, selective: bool = False) -> Floats:
        """Each choice's bytes with so many micro-batches on their way."""
        each = self.selectively if selective else self.activations
        total: Floats = self.memory - self.activations + in_flight * each
        return total

    def cost(self, weights: Weights) -> Floats:
        """Each choice's cost under weights."""
        total: Floats = weights.compute * self.compute.max(axis=1)
        total += weights.blocking * (self.blocking + self.ends) + weights.hidden * self.hidden
        if weights.shared:
            started = weights.hidden * self.hidden_buckets + weights.blocking * self.ends_buckets
            total += weights.shared * (started + weights.compute * self.slowed)
        total += weights.s_per_byte * self.held(weights.in_flight, selective=weights.selective)
        return total


@dataclass(frozen=True, eq=False)
class ShardingModel:
    """All choices of all ops with the parts of their costs; problems are made from it."""

    mesh: Mesh
    ops: tuple[str, ...]
    choices: tuple[tuple[SplitChoice, ...], ...]
    tables: tuple[OpTable, ...]
    conversions: Conversions
    pair_up: Callable[[], "ModelEdges"] = field(repr=False)  # bounds do without

    @functools.cached_property
    def _pairs(self) -> "ModelEdges":
        return self.pair_up()

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of ops, by number, whose choices together cost something."""
        return self._pairs.edges

    @property
    def matrix_of(self) -> tuple[int, ...]:
        """The matrix of every edge."""
        return self._pairs.matrix_of

    @property
    def matrices(self) -> tuple[Floats, ...]:
        """Seconds of pairs of choices; edges between equal ops share theirs."""
        return self._pairs.matrices

    @property
    def tied(self) -> frozenset[int]:
        """Matrices of readers of one parameter."""
        return self._pairs.tied

    def problem(
        self, weights: Weights = PLAIN, exposed: Container[str] = frozenset()
    ) -> ShardingProblem:
        """The pairwise problem under weights; of `exposed` ops nothing is hidden."""
        waiting, blocking = replace(weights, hidden=1.0), weights.blocking
        own: dict[tuple[int, bool], Floats] = {}  # ops that are alike share their tables
        for op, table in zip(self.ops, self.tables, strict=True):
            if (key := (id(table), op in exposed)) not in own:
                own[key] = table.cost(waiting if key[1] else weights)
        return ShardingProblem(
            costs=tuple(
                own[id(table), op in exposed]
                for op, table in zip(self.ops, self.tables, strict=True)
            ),
            edges=self.edges,
            matrix_of=self.matrix_of,
            matrices=tuple(
                _weighted(matrix, 0.0 if number in self.tied and not weights.shared else blocking)
                for number, matrix in enumerate(self.matrices)
            ),
            names=self.ops,
        )

    def splits(self, assignment: tuple[int, ...]) -> tuple[OpSplit, ...]:
        """What an assignment decides, op by op."""
        return tuple(
            OpSplit(op, choices[x].dims, choices[x].zero)
            for op, choices, x in zip(self.ops, self.choices, assignment, strict=True)
        )

    def assignment(self, splits: tuple[OpSplit, ...]) -> tuple[int, ...]:
        """The numbers of given splits, the inverse of `splits`."""
        wanted = {split.op: split for split in splits}
        assignment = []
        for op, choices in zip(self.ops, self.choices, strict=True):
            split = wanted[op]
            exact, plain = SplitChoice(split.dims, split.zero), SplitChoice(split.dims)
            # An op with nothing to keep sharded has only the plain choice.
            assignment.append(choices.index(exact if exact in choices else plain))
        return tuple(assignment)

    def memory_bytes(self, assignment: tuple[int, ...]) -> float:
        """What a device holds by this model's count (without what is live only for a moment)."""
        return sum(float(table.memory[x]) for table, x in zip(self.tables, assignment, strict=True))

    def memory_bound_bytes(self) -> float:
        """Every op at its thriftiest choice."""
        return sum(float(table.memory.min()) for table in self.tables)

    def compute_bound_s(self) -> float:
        """What the busiest kind of device computes even if every op is at its best."""
        least = sum(table.compute.min(axis=0) for table in self.tables)
        return float(np.max(least, initial=0.0))


@dataclass(frozen=True, eq=False)
class ModelEdges:
    """What pairs of choices cost."""

    edges: tuple[tuple[int, int], ...]
    matrix_of: tuple[int, ...]
    matrices: tuple[Floats, ...]
    tied: frozenset[int] = frozenset()


def _weighted(matrix: Floats, weight: float) -> Floats:
    """A part of the seconds of pairs; a pair that is forbidden stays so."""
    if weight > 0:
        return weight * matrix
    none: Floats = np.where(np.isinf(matrix), matrix, 0.0)
    return none


def sharding_model(
    graph: Graph,
    cluster: Cluster,
    mesh: Mesh,
    levels: tuple[int, ...] = LEVELS,
    collectives: Collectives | None = None,
    num_microbatches: int = 1,
    keep: Keep | None = None,
) -> ShardingModel:
    """All ways to split every forward op of a (training) graph over a mesh.

    With several micro-batches the graph is one's, and what a step does once counts in part. With
    `keep` only the splits that it keeps; all of an op of which it keeps none.
    """
    times = collectives or Collectives(cluster)
    return _ShardingBuilder(graph, cluster, mesh, levels, times, num_microbatches, keep).build()


@functools.lru_cache(maxsize=65536)
def dims_of(call: Call, axes: tuple[Axis, ...]) -> tuple[Dims, ...]:
    """Every way to give each axis a dim (or none) such that all parts are whole."""
    extents = {dim.name: dim.extent for dim in loop_nest(call).dims}
    per_axis = [
        (*splittable(call, axis.parts), REPEAT) if axis.size > 1 else (REPEAT,) for axis in axes
    ]
    legal = []
    for dims in itertools.product(*per_axis):
        parts: dict[str, int] = {}
        for dim, axis in zip(dims, axes, strict=True):
            if dim:
                parts[dim] = parts.get(dim, 1) * axis.parts
        if all(extents[dim] % count == 0 for dim, count in parts.items()):
            legal.append(dims)
    return tuple(legal)


def ways_of(
    dims: Dims, axes: tuple[Axis, ...], place: tuple[int, ...] | None = None
) -> dict[str, float]:
    """How many ways each dim is split, as the device at `place` sees it (or the busiest one)."""
    ways: dict[str, float] = {}
    for i, (dim, axis) in enumerate(zip(dims, axes, strict=True)):
        if dim and axis.size > 1:
            own = axis.ways(None if place is None else place[i])
            ways[dim] = ways.get(dim, 1) * own
    return ways


@dataclass(slots=True)
class _Sent:
    """Seconds of the communication of an op's parameters, as `OpTable` has them."""

    hidden: float = 0.0
    ends: float = 0.0
    hidden_buckets: float = 0.0
    ends_buckets: float = 0.0


class _Facts:
    """What the builder needs to know of a graph on any mesh; worked out once per graph."""

    def __init__(self, graph: Graph) -> None:
        self.forward = tuple(op for op in graph.ops if op.phase == "forward")
        self.phases: dict[str, list[Op]] = {op.name: [op] for op in self.forward}
        for op in graph.ops:
            if op.forward:
                self.phases[op.forward].append(op)
        self.update_of = {op.inputs[0]: op for op in graph.ops if op.phase == "update"}
        self.owner: dict[str, str] = {}  # parameter -> the op that decides how it is kept
        for op in self.forward:
            for name in op.inputs:
                if graph.tensor(name).role == "parameter":
                    self.owner.setdefault(name, op.name)
        self.saved = {
            name for op in graph.ops if op.phase in ("dgrad", "wgrad") for name in op.inputs
        }
        self.users = {
            tensor.name: sum(1 for op in graph.consumers(tensor.name) if op.phase == "forward")
            for tensor in graph.tensors
        }
        self.again = recomputable(graph, self.saved)
        self.pairs = self._pairs(graph)
        self.routed = routed_pairs(graph)
        numbers: dict[tuple[object, ...], int] = {}
        self.signature = {  # ops with equal signatures have equal choices and costs
            op.name: numbers.setdefault(
                tuple(self._signature(graph, phase) for phase in self.phases[op.name]), len(numbers)
            )
            for op in self.forward
        }

    def _pairs(self, graph: Graph) -> list[tuple[Op, Op, Tensor]]:
        """Forward edges, and pairs of ops that read the same parameter (tied weights)."""
        pairs = [
            (u, v, tensor)
            for u, v, tensor in graph.edges()
            if u.phase == "forward" and v.phase == "forward"
        ]
        for parameter in graph.parameters:
            users = [op for op in graph.consumers(parameter.name) if op.phase == "forward"]
            pairs.extend((users[0], user, parameter) for user in users[1:])
        return pairs

    def _signature(self, graph: Graph, op: Op) -> tuple[object, ...]:
        tensors = tuple(
            (
                t.dtype,
                t.role,
                t.name in self.saved,
                self.owner.get(t.name) == op.name,
                t.name in graph.outputs,
            )
            for t in map(graph.tensor, (*op.inputs, *op.outputs))
        )
        return (graph.call(op), tensors, op.name in self.again)


class _ShardingBuilder:
    def __init__(
        self, graph: Graph, cluster: Cluster, mesh: Mesh, levels: tuple[int, ...],
        collectives: Collectives, num_microbatches: int, keep: Keep | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.mesh, self.levels, self.keep = graph, mesh, levels, keep
        self.once = 1 / num_microbatches  # a micro-batch's part of what a step does once
        self.axes = mesh.axes
        self.ways = tuple(axis.ways() for axis in mesh.axes)
        self.groups: list[Groups] = [mesh.groups(i) for i in range(len(self.axes))]
        self.collectives = collectives
        self.devices = heterogeneous(cluster, mesh)
        facts = graph.memo.get(("sharding", ""))
        if facts is None:
            facts = graph.memo["sharding", ""] = _Facts(graph)
        assert isinstance(facts, _Facts)
        self.forward, self.phases, self.update_of = facts.forward, facts.phases, facts.update_of
        self.owner, self.saved, self.users = facts.owner, facts.saved, facts.users
        self.signature, self.pairs, self.again = facts.signature, facts.pairs, facts.again
        self.routed = facts.routed
        self.known: dict[int, tuple[tuple[SplitChoice, ...], OpTable]] = {}
        self.by_dims: dict[tuple[int, Dims], DimsParts] = {}
        self.sides: dict[tuple[object, ...], tuple[tuple[Layout, Layout | None], ...]] = {}
        self.read_layouts: dict[int, tuple[Access, dict[Dims, Layout]]] = {}
        self.made_layouts: dict[int, tuple[Access, dict[Dims, Layout]]] = {}
        self.matrices: dict[tuple[object, ...], int] = {}
        self.stored: list[Floats] = []
        self.bundles: dict[tuple[int, ...], tuple[float, float, int]] = {}
        kinds = (cluster.kind_of(device) for device in mesh.devices)
        self.least_memory = float(min(kind.memory_bytes for kind in kinds))
        self.tied: set[int] = set()
        self.copied: dict[Layout, tuple[int, ...]] = {}
        self.shards: dict[Layout, float] = {}
        self.reductions = Reductions(self.axes)
        self.conversions = Conversions(self.ways, self.groups, collectives)
        self.starting: dict[tuple[str, int], float] = {}  # of a bucket, beside its bandwidth

    def build(self) -> ShardingModel:
        own = [self._table(op) for op in self.forward]
        choices = tuple(choices for choices, _ in own)
        return ShardingModel(
            self.mesh,
            tuple(op.name for op in self.forward),
            choices,
            tuple(table for _, table in own),
            self.conversions,
            functools.partial(self._model_edges, choices),
        )

    def _model_edges(self, choices: tuple[tuple[SplitChoice, ...], ...]) -> ModelEdges:
        index = {op.name: i for i, op in enumerate(self.forward)}
        edges: list[tuple[int, int]] = []
        matrix_of: list[int] = []
        for source, target, tensor in self.pairs:
            u, v = index[source.name], index[target.name]
            edges.append((u, v))
            matrix_of.append(self._matrix(source, target, tensor, choices[u], choices[v]))
        for dispatch, combine in self.routed:
            u, v = index[dispatch.name], index[combine.name]
            edges.append((u, v))
            matrix_of.append(self._routing_matrix(dispatch, combine, choices[u], choices[v]))
        return ModelEdges(tuple(edges), tuple(matrix_of), tuple(self.stored), frozenset(self.tied))

    # What an op's choices cost by themselves.

    def _table(self, op: Op) -> tuple[tuple[SplitChoice, ...], OpTable]:
        key = self.signature[op.name]
        if key not in self.known:
            choices = self._choices(op)
            parts = [self._parts(op, choice) for choice in choices]
            compute, blocking, *held = (np.array(part) for part in zip(*parts, strict=True))
            send = functools.partial(self._sends, op, choices)
            memory, activations, selectively, updates = held
            table = OpTable(compute, blocking, memory, activations, selectively, updates, send)
            self.known[key] = choices, table
        return self.known[key]

    def _choices(self, op: Op) -> tuple[SplitChoice, ...]:
        mine = [name for name in op.inputs if self.owner.get(name) == op.name]
        choices: list[SplitChoice] = []
        call = self.graph.call(op)
        legal = dims_of(call, self.axes)
        if self.keep is not None:
            legal = tuple(dims for dims in legal if self.keep(call, dims)) or legal
        for dims in legal:
            copied = any(self._replicas(op, name, dims) > 1 for name in mine)
            levels = self.levels if copied else (0,)
            choices.extend(SplitChoice(dims, n) for n in levels if n != 1 or self.update_of)
        return tuple(choices)

    def _parts(
        self, op: Op, choice: SplitChoice
    ) -> tuple[list[float], float, float, float, float, list[float]]:
        updates, memory = self._parameters(op, choice)
        key = (self.signature[op.name], choice.dims)
        if key not in self.by_dims:
            self.by_dims[key] = self._dims_parts(op, choice)
        seconds, blocking, _, activations, selectively = self.by_dims[key]
        at_end = [
            self.once * sum(part * self._update_s(update, kind) for update, part in updates)
            for kind, _ in self.devices
        ]
        compute = [own + end for own, end in zip(seconds, at_end, strict=True)]
        return compute, blocking, memory + activations, activations, selectively, at_end

    def _sends(self, op: Op, choices: tuple[SplitChoice, ...]) -> Floats:
        """What parameters send, choice by choice: hidden, at the end, buckets of both, slowed."""
        rows = []
        for choice in choices:
            own = self._sent(op, choice)
            also_hidden = self.by_dims[self.signature[op.name], choice.dims][2]
            slowed = self.collectives.interference * own.hidden
            hidden = own.hidden + also_hidden
            rows.append((hidden, own.ends, own.hidden_buckets, own.ends_buckets, slowed))
        return np.array(rows).T

    def _update_s(self, update: Op, kind: DeviceKind) -> float:
        """Seconds of a whole update, started by somebody else's launch."""
        cost = op_cost(self.graph, update, kind)
        return cost.seconds - cost.launch_s

    def _dims_parts(self, op: Op, choice: SplitChoice) -> DimsParts:
        """What does not depend on how parameters are kept.

        Seconds of all phases, blocking and hidden communication, activations, and of these what
        selective checkpointing keeps.
        """
        compute = []
        for kind, place in self.devices:
            split: Split = tuple(sorted(ways_of(choice.dims, self.axes, place).items()))
            phases = self.phases[op.name]
            compute.append(sum(op_cost(self.graph, phase, kind, split).seconds for phase in phases))
        blocking, hidden = self._blocking(op, choice.dims), 0.0
        if self.graph.is_training:  # a loss is added up while the backward goes on
            hidden = self._settling(op, choice.dims)
        else:
            blocking += self._settling(op, choice.dims)
        activations = self._activations(op, choice)
        selectively = 0.0 if self._is_recomputable(op, choice.dims) else activations
        return compute, blocking, hidden, activations, selectively

    def _blocking(self, op: Op, dims: Dims) -> float:
        """Statistics and halos of all phases."""
        ways = ways_of(dims, self.axes)
        seconds = 0.0
        for phase in self.phases[op.name]:
            call = self.graph.call(phase)
            if not shares_between(call):
                continue
            width = dtype_bytes(self.graph.dtype(phase))
            for axis, dim in enumerate(dims):
                for exchange in communication(call, ways, along=dim) if dim else ():
                    if exchange.tensor < 0:
                        each = width if exchange.collective == "halo" else STAT_BYTES
                        seconds += self._time(exchange.collective, exchange.elements * each, axis)
        return seconds

    def _settling(self, op: Op, dims: Dims) -> float:
        """Seconds to add up partial sums of what the model returns."""
        nest = loop_nest(self.graph.call(op))
        seconds = 0.0
        for name, access in zip(op.outputs, nest.outputs, strict=True):
            if name in self.graph.outputs:
                made = self._makes(nest, access, dims)
                whole = tuple(REPLICATE if p == PARTIAL else p for p in made)
                seconds += conversion_seconds(
                    self.graph.tensor(name).size_bytes, self.ways, self.groups, self.collectives,
                    made, whole,
                )  # fmt: skip
        return seconds

    def _parameters(self, op: Op, choice: SplitChoice) -> tuple[list[tuple[Op, float]], float]:
        """Updates with their share, bytes held."""
        memory = self._cached_bytes(op, choice)
        updates: list[tuple[Op, float]] = []
        for tensor, layout, copied in self._own_parameters(op, choice):
            copies = 1
            for axis in copied:
                copies *= self.axes[axis].size
            shards = self._shards(layout)
            held = tensor.size_bytes / shards / (copies if choice.zero == 3 else 1)
            memory += held
            update = self.update_of.get(tensor.name)
            if update is None:
                continue
            states = sum(self.graph.tensor(n).size_bytes for n in update.inputs[2:])
            split = shards * (1 if choice.zero == 0 else copies)
            memory += states / split
            gradient = self.graph.tensor(update.inputs[1]).size_bytes / tensor.size_bytes
            memory += held * gradient
            updates.append((update, 1 / split))
        return updates, memory

    def _cached_bytes(self, op: Op, choice: SplitChoice) -> float:
        """Bytes of a decoder's cache that an op reads."""
        cached = cached_inputs(self.graph)
        if cached.keys().isdisjoint(op.inputs):
            return 0.0
        nest = loop_nest(self.graph.call(op))
        return sum(
            self.graph.tensor(name).size_bytes
            / num_shards(self._reads(access, choice.dims), self.ways)
            for name, access in zip(op.inputs, nest.inputs, strict=True)
            if name in cached
        )

    def _own_parameters(
        self, op: Op, choice: SplitChoice
    ) -> Iterator[tuple[Tensor, Layout, tuple[int, ...]]]:
        """The parameters that an op decides about, how they lie, and the axes with copies."""
        nest = loop_nest(self.graph.call(op))
        for name, access in zip(op.inputs, nest.inputs, strict=True):
            if self.owner.get(name) == op.name:
                layout = self._reads(access, choice.dims)
                yield self.graph.tensor(name), layout, self._copied(layout)

    def _copied(self, layout: Layout) -> tuple[int, ...]:
        """The axes along which ZeRO shards what lies so."""
        axes = self.copied.get(layout)
        if axes is None:
            axes = self.copied[layout] = zero_axes(layout, self.axes)
        return axes

    def _shards(self, layout: Layout) -> float:
        shards = self.shards.get(layout)
        if shards is None:
            shards = self.shards[layout] = num_shards(layout, self.ways)
        return shards

    def _sent(self, op: Op, choice: SplitChoice) -> "_Sent":
        """Seconds of communication of an op's parameters."""
        sent = _Sent()
        gathered: dict[tuple[int, ...], float] = {}  # what lies alike is gathered together
        for tensor, layout, copied in self._own_parameters(op, choice):
            held = tensor.size_bytes / self._shards(layout)
            if choice.zero == 3:
                gathered[copied] = gathered.get(copied, 0.0) + held
            if choice.zero == 1 and tensor.name in self.update_of:
                for axis in copied:
                    moving, starting = self._in_bucket("all_gather", held, axis)
                    sent.ends += self.once * moving
                    sent.ends_buckets += self.once * starting
        uses = 1 + any(phase.phase == "dgrad" for phase in self.phases[op.name])
        for axes, held in gathered.items():
            sent.hidden += uses * self._in_bundle(held, axes)
        self._gradient_sums(op, choice, sent)
        return sent

    def _gradient_sums(self, op: Op, choice: SplitChoice, sent: "_Sent") -> None:
        """Reductions of gradients; those of a tied parameter are added up and reduced once."""
        share = 1.0 if choice.zero == 3 else self.once
        for phase in self.phases[op.name]:
            if phase.phase != "wgrad":
                continue
            call = self.graph.call(phase)
            nest = loop_nest(call)
            for name, access, of in zip(phase.outputs, nest.outputs, call.wrt, strict=True):
                if self.owner.get(op.inputs[of]) != op.name:
                    continue
                have = self._makes(nest, access, choice.dims)
                size = self.graph.tensor(name).size_bytes / self._shards(have)
                for step in self.reductions(have, choice.zero):
                    own = self._in_bucket(step.collective, step.part * size, step.axis)
                    if step.across and choice.zero == 3:
                        sent.ends += self.once * own[0]
                        sent.ends_buckets += self.once * own[1]
                    else:
                        sent.hidden += share * own[0]
                        sent.hidden_buckets += share * own[1]

    def _in_bucket(self, collective: str, size: float, axis: int) -> tuple[float, float]:
        """Seconds by bandwidth, and the part of a bucket's start that a gradient pays for."""
        groups = self.groups[axis]
        if (collective, axis) not in self.starting:
            starting = self._time(collective, BUCKET_BYTES, axis)
            starting -= self.collectives.by_bandwidth(collective, BUCKET_BYTES, groups)
            self.starting[collective, axis] = max(0.0, starting)
        part = min(1.0, size / BUCKET_BYTES) * self.starting[collective, axis]
        return self.collectives.by_bandwidth(collective, size, groups), part

    def _in_bundle(self, size: float, axes: tuple[int, ...]) -> float:
        """Seconds of a gather by bandwidth, and its part of the start of its bundle."""
        if axes not in self.bundles:
            start, each = gather_start(self.collectives, self.mesh, axes)
            total = sum(tensor.size_bytes for tensor in self.graph.parameters)
            self.bundles[axes] = start, each, best_bundle(total, start, each, self.least_memory)
        start, each, bundle = self.bundles[axes]
        return size * each + start * (min(1.0, size / bundle) if bundle else 1.0)

    def _activations(self, op: Op, choice: SplitChoice) -> float:
        """Bytes of the op's outputs that are kept for the backward."""
        nest = loop_nest(self.graph.call(op))
        total = 0.0
        for name, access in zip(op.outputs, nest.outputs, strict=True):
            if name in self.saved:
                layout = self._makes(nest, access, choice.dims)
                total += self.graph.tensor(name).size_bytes / num_shards(layout, self.ways)
        return total

    def _is_recomputable(self, op: Op, dims: Dims) -> bool:
        """Can selective recompute make an op's outputs once more, each device by itself?"""
        again = op.name in self.again
        return again and not communication(self.graph.call(op), ways_of(dims, self.axes))

    def _replicas(self, op: Op, name: str, dims: Dims) -> int:
        access = loop_nest(self.graph.call(op)).inputs[op.inputs.index(name)]
        copies = 1
        for dim, axis in zip(dims, self.axes, strict=True):
            if input_placement(access, dim) == REPLICATE and not axis.replicates:
                copies *= axis.size
        return copies

    # What a pair of choices costs along an edge.

    def _matrix(
        self, source: Op, target: Op, tensor: Tensor, rows: tuple[SplitChoice, ...],
        columns: tuple[SplitChoice, ...],
    ) -> int:  # fmt: skip
        """The number of the matrix of conversion times for one edge; equal ones are shared."""
        out = self._side(source, tensor, rows)
        into = self._side(target, tensor, columns)
        tied = tensor.role == "parameter"
        key = (tensor.size_bytes, max(1, self.users[tensor.name]), tied, id(out), id(into))
        if key not in self.matrices:
            self.matrices[key] = len(self.stored)
            matrix = self._tied_matrix if tied else self._conversion_matrix
            self.stored.append(matrix(tensor, out, into))
            if tied:
                self.tied.add(self.matrices[key])
        return self.matrices[key]

    def _routing_matrix(
        self, dispatch: Op, combine: Op, rows: tuple[SplitChoice, ...],
        columns: tuple[SplitChoice, ...],
    ) -> int:  # fmt: skip
        """The number of the matrix that forbids pairs which route unlike groups of tokens."""
        key = ("routing", self.signature[dispatch.name], self.signature[combine.name])
        if key not in self.matrices:
            numbers: dict[object, int] = {}
            sides = [
                [
                    numbers.setdefault(
                        token_groups(self.graph.call(op), choice.dims, self.axes), len(numbers)
                    )
                    for choice in choices
                ]
                for op, choices in ((dispatch, rows), (combine, columns))
            ]
            unlike = np.not_equal.outer(*map(np.array, sides))
            self.matrices[key] = len(self.stored)
            self.stored.append(np.where(unlike, np.inf, 0.0))
        return self.matrices[key]

    def _side(
        self, op: Op, tensor: Tensor, choices: tuple[SplitChoice, ...]
    ) -> tuple[tuple[Layout, Layout | None], ...]:
        """Per choice: the layout of the tensor at this op, and of its gradient there (if any)."""
        making = tensor.name in op.outputs
        position = (op.outputs if making else op.inputs).index(tensor.name)
        key = (self.signature[op.name], making, position)
        if key not in self.sides:
            side = self._made if making else self._wanted
            self.sides[key] = tuple(side(op, position, choice.dims) for choice in choices)
        return self.sides[key]

    def _made(self, op: Op, position: int, dims: Dims) -> tuple[Layout, Layout | None]:
        nest = loop_nest(self.graph.call(op))
        access = nest.outputs[position]
        made = self._makes(nest, access, dims)
        if len(self.phases[op.name]) == 1:
            return made, None
        return made, self._reads(access, dims)

    def _wanted(self, op: Op, position: int, dims: Dims) -> tuple[Layout, Layout | None]:
        access = loop_nest(self.graph.call(op)).inputs[position]
        wanted = self._reads(access, dims)
        gradient = self._gradient_nest(op, position)
        if gradient is None:
            return wanted, None
        return wanted, self._makes(*gradient, dims)

    def _reads(self, access: Access, dims: Dims) -> Layout:
        """How a tensor must lie for an op with these dims to read it."""
        known = self.read_layouts.setdefault(id(access), (access, {}))[1]  # kept: ids stay unique
        if dims not in known:
            known[dims] = tuple(input_placement(access, dim) for dim in dims)
        return known[dims]

    def _makes(self, nest: Nest, access: Access, dims: Dims) -> Layout:
        """How an output of an op with these dims comes to lie."""
        known = self.made_layouts.setdefault(id(access), (access, {}))[1]
        if dims not in known:
            known[dims] = tuple(output_placement(nest, access, dim) for dim in dims)
        return known[dims]

    def _gradient_nest(self, op: Op, position: int) -> tuple[Nest, Access] | None:
        for phase in self.phases[op.name][1:]:
            call = self.graph.call(phase)
            if position in call.wrt:
                nest = loop_nest(call)
                return nest, nest.outputs[call.wrt.index(position)]
        return None

    def _conversion_matrix(
        self,
        tensor: Tensor,
        out: tuple[tuple[Layout, Layout | None], ...],
        into: tuple[tuple[Layout, Layout | None], ...],
    ) -> Floats:
        size, sharers = tensor.size_bytes, max(1, self.users[tensor.name])
        there = self.conversions.table(size, [side[0] for side in out], [side[0] for side in into])
        back = [side[1] for side in out if side[1] is not None]
        gradient = [side[1] for side in into if side[1] is not None]
        if len(back) == len(out) and len(gradient) == len(into):
            there = there + self.conversions.table(size, gradient, back).T
        conversion_matrix: Floats = there / sharers
        return conversion_matrix

    def _tied_matrix(
        self,
        tensor: Tensor,
        out: tuple[tuple[Layout, Layout | None], ...],
        into: tuple[tuple[Layout, Layout | None], ...],
    ) -> Floats:
        """A parameter as a later reader needs it; gradients made alike, then as it is stored."""
        size, others = tensor.size_bytes, max(1, self.users[tensor.name] - 1)
        convert = self.conversions.seconds
        matrix: Floats = self.conversions.table(
            size, [side[0] for side in out], [side[0] for side in into]
        )
        matrix = matrix / others
        known: dict[tuple[Layout, ...], float] = {}
        for i, (stored, first) in enumerate(out):
            for j, (_, later) in enumerate(into):
                if first is None or later is None:
                    continue
                key = (stored, first, later)
                if key not in known:
                    both = common_layout((later, first))  # gradients come from the last reader on
                    once = convert(size, first, both)
                    once += convert(size, both, gradient_target(both, stored))
                    known[key] = once / others + convert(size, later, both)
                matrix[i, j] += known[key]
        return matrix

    def _time(self, collective: str, size_bytes: float, axis: int) -> float:
        return self.collectives.seconds(collective, size_bytes, self.groups[axis])


def heterogeneous(cluster: Cluster, mesh: Mesh) -> list[tuple[DeviceKind, tuple[int, ...]]]:
    """Kind and place of one device for all that do the same: of a kind, at places of one weight."""
    seen: dict[tuple[object, ...], int] = {}
    for device in mesh.devices:
        seen.setdefault((cluster.devices[device].kind, *_weights(mesh, device)), device)
    return [(cluster.kind_of(device), mesh.place(device)) for device in seen.values()]


def _weights(mesh: Mesh, device: int) -> tuple[int, ...]:
    """The weights of a device's places on the axes that have any."""
    if not any(axis.weights for axis in mesh.axes):
        return ()
    place = mesh.place(device)
    return tuple(a.weights[i] for a, i in zip(mesh.axes, place, strict=True) if a.weights)
