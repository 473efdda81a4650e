"""What the simulator will at least find for given stages: a quick look before a slow one.

The busiest group of devices computes all its ops for every micro-batch, and its parameters,
gradients and states lie there all the time, and what is saved and not recomputed of at least one
micro-batch, spread over all devices at best. Worked out on the folded graph, op by op, each way to
split an op once. A plan that is slower than the best by this alone, or larger than the memory, need
not be simulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from partita.cluster import Cluster, DeviceKind
from partita.costs.memory import gradient_bytes
from partita.costs.roofline import op_cost
from partita.graph.chain import Folded
from partita.graph.record import Graph, Op
from partita.graph.splits import placements
from partita.plans import Axis, OpSplit, Stage


@dataclass
class StageBound:
    """Bounds of given stages; `graph_of` gives the folded graph of one of m micro-batches."""

    fold: Folded
    cluster: Cluster
    training: bool
    graph_of: Callable[[int], Graph]
    budget: Callable[[Sequence[int]], float]
    _phase_ops: dict[int, dict[str, list[Op]]] = field(default_factory=dict)
    _shares: dict[tuple[object, ...], dict[object, tuple[float, float, float, float]]] = field(
        default_factory=dict
    )
    _saved: dict[int, frozenset[str]] = field(default_factory=dict)

    def __call__(self, stages: Sequence[Stage], num_microbatches: int) -> tuple[float, float]:
        """(seconds, bytes over the cap): what the simulator will at least find for these stages.

        The busiest group computes all its ops for every micro-batch; parameters, gradients and
        states lie there all the time. Worked out on the folded graph, op by op.
        """
        busy: dict[tuple[int, ...], float] = {}
        held: dict[tuple[int, ...], float] = {}
        for stage in stages:
            devices = stage.mesh.devices
            times, again = 2 if (stage.checkpointing == "full") else 1, set(stage.recomputed)
            names = tuple(sorted({self.cluster.devices[d].kind for d in devices}))
            kinds = tuple(kind for kind in self.cluster.kinds if kind.name in names)
            axes = stage.mesh.axes
            known = self._shares.setdefault((num_microbatches, axes, names), {})
            seconds = size = 0.0
            for split in stage.splits:
                key = (self.fold.op_like[split.op], split.dims, split.zero)
                share = known.get(key)
                if share is None:
                    share = known[key] = self._share(num_microbatches, key[0], split, axes, kinds)
                seconds += times * share[0] + share[1]
                kept = stage.checkpointing != "full" and split.op not in again
                size += share[2] + (share[3] if kept else 0.0)
            busy[devices] = busy.get(devices, 0.0) + seconds
            held[devices] = held.get(devices, 0.0) + size
        over = max(size - self.budget(devices) for devices, size in held.items())
        return num_microbatches * max(busy.values()), over

    def _share(
        self, m: int, op: str, split: OpSplit, axes: tuple[Axis, ...], kinds: tuple[DeviceKind, ...]
    ) -> tuple[float, float, float, float]:
        """Forward and backward seconds of the luckiest device; bytes that lie there, and saved."""
        graph = self.graph_of(m)
        ways: dict[str, float] = {}
        for dim, axis in zip(split.dims, axes, strict=True):
            if dim and axis.size > 1:
                least = axis.parts / min(axis.weights) if axis.weights else axis.size
                ways[dim] = ways.get(dim, 1.0) * least
        share = tuple(sorted(ways.items()))
        seconds = [
            min(op_cost(graph, phase, kind, share).seconds for kind in kinds)
            for phase in self._phases(m)[op]
        ]
        lies = self._lies(graph, op, split, axes)
        return seconds[0], sum(seconds[1:]), lies, self._keeps(m, op, axes) if seconds[0] else 0.0

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
