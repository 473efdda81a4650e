"""The sharding problem of a model on a mesh: a split for every op at the least total time.

Each forward op chooses one splittable loop dim (or none) per mesh axis; its backward follows. The
cost of a choice is the compute of all its phases on the slowest device, statistics and halos, and
the synchronisation of its parameter gradients. The cost of a pair of choices along an edge is the
time to bring the tensor (and its gradient, back) from the producer's layout to the consumer's;
where a tensor has several consumers the conversion is done once, so each pays its part.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.cluster import Cluster
from partita.costs.collectives import Collectives, Groups
from partita.costs.layouts import Layout, conversion_seconds
from partita.costs.roofline import Split, op_cost
from partita.graph.dtypes import dtype_bytes
from partita.graph.loops import Access, Nest, loop_nest
from partita.graph.record import Call, Graph, Op, Tensor
from partita.graph.splits import (
    PARTIAL,
    REPEAT,
    communication,
    input_placement,
    output_placement,
    splittable,
)
from partita.plans import Mesh
from partita.problems.sharding import ShardingProblem

STAT_BYTES = 4
Choice = tuple[str, ...]  # one loop dim per mesh axis, '' for none
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ShardingModel:
    """A sharding problem together with what its numbers stand for."""

    problem: ShardingProblem
    ops: tuple[str, ...]
    choices: tuple[tuple[Choice, ...], ...]
    compute_bound_s: float  # what the busiest kind of device computes if every op is at its best

    def splits(self, assignment: tuple[int, ...]) -> tuple[tuple[str, Choice], ...]:
        """What an assignment decides, op by op."""
        return tuple(
            (op, choices[x])
            for op, choices, x in zip(self.ops, self.choices, assignment, strict=True)
        )


def sharding_model(graph: Graph, cluster: Cluster, mesh: Mesh) -> ShardingModel:
    """The problem of splitting every forward op of a (training) graph over a mesh."""
    return _Builder(graph, cluster, mesh).build()


def choices_of(call: Call, sizes: tuple[int, ...]) -> tuple[Choice, ...]:
    """Every way to give each axis a dim (or none) such that all shares are equal."""
    extents = {dim.name: dim.extent for dim in loop_nest(call).dims}
    per_axis = [(*splittable(call, size), REPEAT) if size > 1 else (REPEAT,) for size in sizes]
    found = []
    for choice in itertools.product(*per_axis):
        factors = factors_of(choice, sizes)
        if all(extents[dim] % factor == 0 for dim, factor in factors.items()):
            found.append(choice)
    return tuple(found)


def factors_of(choice: Choice, sizes: tuple[int, ...]) -> dict[str, int]:
    """How many ways each dim is split in all."""
    factors: dict[str, int] = {}
    for dim, size in zip(choice, sizes, strict=True):
        if dim and size > 1:
            factors[dim] = factors.get(dim, 1) * size
    return factors


class _Builder:
    def __init__(self, graph: Graph, cluster: Cluster, mesh: Mesh) -> None:
        self.graph, self.cluster = graph, cluster
        self.sizes = tuple(axis.size for axis in mesh.axes)
        self.groups: list[Groups] = [mesh.groups(i) for i in range(len(self.sizes))]
        self.collectives = Collectives(cluster)
        kinds = {cluster.devices[d].kind: cluster.kind_of(d) for d in mesh.devices}
        self.kinds = tuple(kinds[name] for name in sorted(kinds))
        self.forward = tuple(op for op in graph.ops if op.phase == "forward")
        self.phases: dict[str, list[Op]] = {op.name: [op] for op in self.forward}
        for op in graph.ops:
            if op.forward:
                self.phases[op.forward].append(op)
        self.tables: dict[tuple[object, ...], tuple[Floats, Floats]] = {}  # total, by kind
        self.matrices: dict[tuple[object, ...], int] = {}
        self.stored: list[Floats] = []
        self.converted: dict[tuple[float, Layout, Layout], float] = {}
        self.update_of = {op.inputs[1]: op for op in graph.ops if op.phase == "update"}

    def build(self) -> ShardingModel:
        calls = [self.graph.call(op) for op in self.forward]
        choices = tuple(choices_of(call, self.sizes) for call in calls)
        own = [self._op_costs(op, c) for op, c in zip(self.forward, choices, strict=True)]
        index = {op.name: i for i, op in enumerate(self.forward)}
        edges: list[tuple[int, int]] = []
        matrix_of: list[int] = []
        for source, target, tensor in self._pairs():
            u, v = index[source.name], index[target.name]
            edges.append((u, v))
            matrix_of.append(self._matrix(source, target, tensor, choices[u], choices[v]))
        problem = ShardingProblem(
            costs=tuple(total for total, _ in own),
            edges=tuple(edges),
            matrix_of=tuple(matrix_of),
            matrices=tuple(self.stored),
            names=tuple(op.name for op in self.forward),
        )
        least = sum(by_kind.min(axis=0) for _, by_kind in own)  # per device kind
        return ShardingModel(problem, problem.names, choices, float(np.max(least, initial=0.0)))

    def _pairs(self) -> list[tuple[Op, Op, Tensor]]:
        """Forward edges, and pairs of ops that read the same parameter (tied weights)."""
        found = [
            (u, v, tensor)
            for u, v, tensor in self.graph.edges()
            if u.phase == "forward" and v.phase == "forward"
        ]
        for parameter in self.graph.parameters:
            users = [op for op in self.graph.consumers(parameter.name) if op.phase == "forward"]
            found.extend((users[0], user, parameter) for user in users[1:])
        return found

    def _op_costs(self, op: Op, choices: tuple[Choice, ...]) -> tuple[Floats, Floats]:
        """Seconds of every choice of an op, all phases together; and of compute per device kind."""
        key = (choices, *(self._signature(phase) for phase in self.phases[op.name]))
        if key not in self.tables:
            compute = np.array([self._compute(op, choice) for choice in choices])
            moved = np.array([self._communication(op, choice) for choice in choices])
            self.tables[key] = (compute.max(axis=1) + moved, compute)
        return self.tables[key]

    def _signature(self, op: Op) -> tuple[object, ...]:
        tensors = (*op.inputs, *op.outputs)
        kinds = tuple((t.dtype, t.role) for t in map(self.graph.tensor, tensors))
        return (self.graph.call(op), kinds, tuple(n in self.update_of for n in op.outputs))

    def _compute(self, op: Op, choice: Choice) -> list[float]:
        split: Split = tuple(sorted(factors_of(choice, self.sizes).items()))
        phases = self.phases[op.name]
        return [
            sum(op_cost(self.graph, phase, kind, split).seconds for phase in phases)
            for kind in self.kinds
        ]

    def _communication(self, op: Op, choice: Choice) -> float:
        """Statistics, halos, and the sum of parameter gradients over devices that share them."""
        factors = factors_of(choice, self.sizes)
        seconds = 0.0
        for phase in self.phases[op.name]:
            call = self.graph.call(phase)
            nest = loop_nest(call)
            width = dtype_bytes(self.graph.dtype(phase))
            for axis, dim in enumerate(choice):
                for exchange in communication(call, factors, along=dim) if dim else ():
                    if exchange.tensor < 0:
                        bytes_each = width if exchange.collective == "halo" else STAT_BYTES
                        seconds += self._time(
                            exchange.collective, exchange.elements * bytes_each, axis
                        )
            if phase.phase != "wgrad":
                continue
            for name, access in zip(phase.outputs, nest.outputs, strict=True):
                have = tuple(output_placement(nest, access, dim) for dim in choice)
                need = tuple(input_placement(access, dim) for dim in choice)
                if PARTIAL in have:
                    seconds += self._convert(self.graph.tensor(name).size_bytes, have, need)
        return seconds

    def _matrix(
        self, source: Op, target: Op, tensor: Tensor, rows: tuple[Choice, ...],
        columns: tuple[Choice, ...],
    ) -> int:  # fmt: skip
        """The number of the matrix of conversion times for one edge; equal ones are shared."""
        out = self._side(source, tensor, rows)
        into = self._side(target, tensor, columns)
        key = (tensor.size_bytes, self._sharers(tensor), out, into)
        if key not in self.matrices:
            self.matrices[key] = len(self.stored)
            self.stored.append(self._conversion_matrix(tensor, out, into))
        return self.matrices[key]

    def _side(
        self, op: Op, tensor: Tensor, choices: tuple[Choice, ...]
    ) -> tuple[tuple[Layout, Layout | None], ...]:
        """Per choice: the layout of the tensor at this op, and of its gradient there (if any)."""
        nest = loop_nest(self.graph.call(op))
        if tensor.name in op.outputs:
            access = nest.outputs[op.outputs.index(tensor.name)]
            has_backward = len(self.phases[op.name]) > 1
            return tuple(
                (
                    tuple(output_placement(nest, access, dim) for dim in choice),
                    tuple(input_placement(access, dim) for dim in choice) if has_backward else None,
                )
                for choice in choices
            )
        position = op.inputs.index(tensor.name)
        access = nest.inputs[position]
        gradient = self._gradient_nest(op, position)
        return tuple(
            (
                tuple(input_placement(access, dim) for dim in choice),
                None
                if gradient is None
                else tuple(output_placement(*gradient, dim) for dim in choice),
            )
            for choice in choices
        )

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
        size, sharers = tensor.size_bytes, self._sharers(tensor)
        distinct: dict[tuple[object, object], float] = {}
        matrix = np.empty((len(out), len(into)))
        for i, source in enumerate(out):
            for j, target in enumerate(into):
                key = (source, target)
                if key not in distinct:
                    seconds = self._convert(size, source[0], target[0])
                    if source[1] is not None and target[1] is not None:
                        seconds += self._convert(size, target[1], source[1])
                    distinct[key] = seconds / sharers
                matrix[i, j] = distinct[key]
        return matrix

    def _sharers(self, tensor: Tensor) -> int:
        users = [op for op in self.graph.consumers(tensor.name) if op.phase == "forward"]
        return max(1, len(users))

    def _convert(self, size_bytes: float, have: Layout, need: Layout) -> float:
        key = (size_bytes, have, need)
        if key not in self.converted:
            self.converted[key] = conversion_seconds(
                size_bytes, self.groups, self.collectives, have, need
            )
        return self.converted[key]

    def _time(self, collective: str, size_bytes: float, axis: int) -> float:
        return self.collectives.seconds(collective, size_bytes, self.groups[axis])
