"""What passes between the stages of a plan: activations, their gradients, shared parameters."""

from dataclasses import dataclass
from itertools import pairwise

from partita.costs.layouts import Layout, num_shards
from partita.graph.record import Graph
from partita.lower.blocks import Blocks
from partita.lower.known import Memo
from partita.lower.pieces import Homes
from partita.plans import Stage


@dataclass(frozen=True)
class Sent:
    """What one stage sends another in each micro-batch; bytes are those of one device."""

    seconds: float
    source_bytes: float
    target_bytes: float


class Sends:
    """What passes between stages: activations one way, gradients the other, shared parameters."""

    def __init__(
        self, graph: Graph, stages: tuple[Stage, ...], where: Homes, blocks: tuple[Blocks, ...],
        memo: Memo,
    ) -> None:  # fmt: skip
        self.graph, self.stages, self.memo = graph, stages, memo
        self.forward: dict[tuple[int, int], Sent] = {}
        self.backward: dict[tuple[int, int], Sent] = {}
        self.tied: dict[tuple[int, int], float] = {}
        borders = [where.borders(i) for i in range(len(stages))]
        place = [{name: k for k, name in enumerate(leaving)} for _, leaving in borders]
        for j, (entering, _) in enumerate(borders):
            for k, name in enumerate(entering):
                i = where.maker[name]
                at = place[i][name]
                self._add(self.forward, (i, j), name, blocks[i].leaves[at], blocks[j].enters[k])
                sent = blocks[j].sends[k]
                others = [user for user in where.givers.get(name, ()) if user != i]
                if sent is not None and blocks[i].takes[at]:
                    need = blocks[i].takes[at][others.index(j)]
                    self._add(self.backward, (j, i), name, sent, need)
        self._tie(where, blocks)

    def _add(
        self, into: dict[tuple[int, int], Sent], pair: tuple[int, int], name: str, have: Layout,
        need: Layout,
    ) -> None:  # fmt: skip
        source, target = (self.stages[i].mesh for i in pair)
        size = self.graph.tensor(name).size_bytes
        before = into.get(pair, Sent(0.0, 0.0, 0.0))
        into[pair] = Sent(
            before.seconds + self.memo.transfer_s(size, source, have, target, need),
            before.source_bytes + size / num_shards(have, [a.ways() for a in source.axes]),
            before.target_bytes + size / num_shards(need, [a.ways() for a in target.axes]),
        )

    def _tie(self, where: Homes, blocks: tuple[Blocks, ...]) -> None:
        """Gradients of a parameter that several stages hold, from each to the next and back."""
        holders: dict[str, list[tuple[int, Layout]]] = {}
        for i, found in enumerate(blocks):
            if not found.shared:
                continue
            names = dict.fromkeys(
                name
                for op in where.forward[i]
                for name in op.inputs
                if self.graph.tensor(name).role == "parameter" and len(where.users[name]) > 1
            )
            for name, layout in zip(names, found.shared, strict=True):
                holders.setdefault(name, []).append((i, layout))
        for name, held in holders.items():
            size = self.graph.tensor(name).size_bytes
            for (i, have), (j, need) in pairwise(held):
                a, b = self.stages[i].mesh, self.stages[j].mesh
                if a.devices != b.devices and name in where.givers:
                    seconds = self.memo.transfer_s(size, a, have, b, need)
                    self.tied[i, j] = self.tied.get((i, j), 0.0) + seconds
