"""What selective checkpointing saves and takes at the least: the third alternative of a bound.

A tensor that gradients read is kept from forward to backward, or the cheap op that made it runs
again: then it takes at least that op's seconds at its quickest split, and what the op reads has to
be there. Where an input is made by a product, read by nobody else and by no gradient, it is kept
for this alone, spread over all devices at best. Of what is read through a view only a copy in the
view's layout need be given up, for nothing. Per tensor the less of both, so that whatever a stage
names to run again, it is not below this.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.cluster import DeviceKind
from partita.costs.roofline import op_cost
from partita.costs.sharding import ShardingModel, ways_of
from partita.graph.backward import CHEAP_KINDS
from partita.graph.record import Graph, Op

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Freed:
    """Tensors that need not be kept, an entry for each choice of the op whose gradient reads it.

    By the row of the choice: bytes kept otherwise, seconds to make the tensor again, bytes kept
    for that.
    """

    row: Ints
    saved: Floats
    seconds: Floats
    instead: Floats

    def less(self, count: int, s_per_second: float, s_per_byte: float) -> Floats:
        """By how much each row costs less, with multipliers on seconds and on bytes."""
        paid = s_per_second * self.seconds + s_per_byte * self.instead
        less: Floats = np.zeros(count)
        np.add.at(less, self.row, np.maximum(0.0, s_per_byte * self.saved - paid))
        return less


@dataclass(frozen=True)
class Cheap:
    """Looks for what it takes to make kept tensors again; `saved` are all that gradients read."""

    graph: Graph
    model: ShardingModel
    kind: DeviceKind
    looks_at: Mapping[str, str]
    saved: frozenset[str]

    def again(self, tensor: str, root: str) -> tuple[float, float] | None:
        """(seconds, bytes kept for it) to make a tensor again that is kept; None: it cannot be."""
        maker = self.graph.producer(root)
        assert maker is not None, "what is kept was made"
        spread = self.graph.tensor(root).size_bytes / len(self.model.mesh.devices)
        if maker.kind not in CHEAP_KINDS:
            return (0.0, spread) if tensor != root else None
        instead = sum(map(self._alone, maker.inputs))
        if tensor != root:
            return 0.0, min(spread, instead)
        return self._seconds(maker) / len(maker.outputs), instead

    def _seconds(self, op: Op) -> float:
        axes = self.model.mesh.axes
        choices = self.model.choices[self.model.ops.index(op.name)]
        splits = {tuple(sorted(ways_of(choice.dims, axes).items())) for choice in choices}
        return min(op_cost(self.graph, op, self.kind, split).seconds for split in splits)

    def _alone(self, name: str) -> float:
        """Bytes of an input that would be kept for one op alone."""
        while True:
            users = [u for u in self.graph.consumers(name) if u.phase == "forward"]
            if len(users) > 1:
                return 0.0
            if name not in self.looks_at:
                break
            name = self.looks_at[name]
        maker = self.graph.producer(name)
        if maker is None or maker.kind in CHEAP_KINDS or name in self.saved:
            return 0.0
        return self.graph.tensor(name).size_bytes / len(self.model.mesh.devices)
