"""What passes between the stages of a plan: activations, their gradients, shared parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from partita.costs.layouts import Layout, num_shards
from partita.costs.memory import gradient_bytes
from partita.errors import PlanError
from partita.graph.record import Graph
from partita.lower.blocks import Blocks
from partita.lower.known import Memo
from partita.lower.pieces import Homes, StageGraph
from partita.plans import Stage

Pair = tuple[int, int]  # stages: from, to


@dataclass(frozen=True, slots=True)
class Crossing:
    """One tensor between two stages: its name and layout in the one and in the other."""

    source: str
    have: Layout
    target: str
    need: Layout
    gradient_of: str = ""


@dataclass(frozen=True)
class StageSend:
    """What one stage sends another in each micro-batch; bytes are those of one device."""

    seconds: float = 0.0
    source_bytes: float = 0.0
    target_bytes: float = 0.0
    tensors: tuple[Crossing, ...] = ()


@dataclass(frozen=True)
class Tied:
    """Parameters that two stages hold: their gradients are added, or one takes the other's sum."""

    seconds: float = 0.0
    size_bytes: float = 0.0  # of one device
    parameters: tuple[tuple[str, Layout, Layout], ...] = ()  # name, layout here, layout there


@dataclass(frozen=True)
class Sends:
    """What passes between stages: activations one way, gradients the other, shared parameters.

    Gradients of a parameter that several stages hold are added from each holder to the next
    (`added`, in this order); where there are more than two, the sum goes back (`returned`).
    """

    forward: dict[Pair, StageSend] = field(default_factory=dict)
    backward: dict[Pair, StageSend] = field(default_factory=dict)
    added: dict[Pair, Tied] = field(default_factory=dict)
    returned: dict[Pair, Tied] = field(default_factory=dict)


def sends_of(
    graph: Graph, stages: tuple[Stage, ...], where: Homes, blocks: tuple[Blocks, ...], memo: Memo,
    parts: Sequence[StageGraph] | None = None,
) -> Sends:  # fmt: skip
    """All that passes between stages; the names of gradients are known only with the pieces."""
    sends = Sends()
    borders = [where.borders(i) for i in range(len(stages))]
    place = [{name: k for k, name in enumerate(leaving)} for _, leaving in borders]
    for j, (entering, _) in enumerate(borders):
        for k, name in enumerate(entering):
            i = where.maker[name]
            at = place[i][name]
            crossing = Crossing(name, blocks[i].leaves[at], name, blocks[j].enters[k])
            _add(sends.forward, (i, j), graph, stages, crossing, name, memo)
            gradient = blocks[j].sends[k]
            others = [user for user in where.givers.get(name, ()) if user != i]
            if gradient is not None and blocks[i].takes[at]:
                need = blocks[i].takes[at][others.index(j)]
                source, target = _gradient_names(parts, i, j, name)
                crossing = Crossing(source, gradient, target, need, name)
                _add(sends.backward, (j, i), graph, stages, crossing, name, memo)
    _tie(sends, graph, stages, where, blocks, memo)
    # A pair may share several parameters, and each has a chain of holders of its own: sums go
    # forwards from stage to stage and whole ones backwards, so that no chain is out of order.
    return replace(
        sends,
        added={pair: sends.added[pair] for pair in sorted(sends.added)},
        returned={pair: sends.returned[pair] for pair in sorted(sends.returned, reverse=True)},
    )


def _gradient_names(
    parts: Sequence[StageGraph] | None, i: int, j: int, name: str
) -> tuple[str, str]:
    """The names of an activation's gradient in the stage that sends it and in the one before."""
    if parts is None:
        return name, name
    source = dict(parts[j].gradients_out)[name]
    target = next(
        sent for tensor, user, sent in parts[i].gradients_in if (tensor, user) == (name, j)
    )
    return source, target


def _add(
    into: dict[Pair, StageSend], pair: Pair, graph: Graph, stages: tuple[Stage, ...],
    crossing: Crossing, name: str, memo: Memo,
) -> None:  # fmt: skip
    source, target = (stages[i].mesh for i in pair)
    size, have, need = graph.tensor(name).size_bytes, crossing.have, crossing.need
    before = into.get(pair, StageSend())
    into[pair] = StageSend(
        before.seconds + memo.transfer_s(size, source, have, target, need),
        before.source_bytes + size / num_shards(have, [a.ways() for a in source.axes]),
        before.target_bytes + size / num_shards(need, [a.ways() for a in target.axes]),
        (*before.tensors, crossing),
    )


def _tie(
    sends: Sends, graph: Graph, stages: tuple[Stage, ...], where: Homes, blocks: tuple[Blocks, ...],
    memo: Memo,
) -> None:  # fmt: skip
    """Gradients of a parameter that several stages hold, from each to the next and back."""
    holders: dict[str, list[tuple[int, Layout]]] = {}
    for i, own in enumerate(blocks):
        if not own.shared:
            continue
        names = dict.fromkeys(
            name
            for op in where.forward[i]
            for name in op.inputs
            if graph.tensor(name).role == "parameter" and len(where.users[name]) > 1
        )
        for name, layout in zip(names, own.shared, strict=True):
            holders.setdefault(name, []).append((i, layout))
    for name, held in holders.items():
        if name not in where.givers:
            continue
        _check_givers(name, [i for i, _ in held], where, stages)
        links = list(pairwise(held))
        for (i, have), (j, need) in links:
            _tie_pair(sends.added, (i, j), (name, have, need), graph, stages, memo)
        for (i, have), (j, need) in links[-2::-1]:  # the last two have the whole sum already
            _tie_pair(sends.returned, (j, i), (name, need, have), graph, stages, memo)


def _check_givers(name: str, held: Sequence[int], where: Homes, stages: tuple[Stage, ...]) -> None:
    """Holders of a parameter update it by the sum of their gradients: each must have one."""
    if where.update_of and (idle := [i for i in held if i not in where.givers[name]]):
        raise PlanError(
            f"{stages[idle[0]].name} reads {name}, which other stages train, and gives it no "
            "gradient",
            fix="put the ops that read it into one stage",
            field="stages",
        )


def _tie_pair(
    into: dict[Pair, Tied], pair: Pair, item: tuple[str, Layout, Layout], graph: Graph,
    stages: tuple[Stage, ...], memo: Memo,
) -> None:  # fmt: skip
    name, have, need = item
    source, target = (stages[i].mesh for i in pair)
    size = gradient_bytes(graph, name) or graph.tensor(name).size_bytes
    seconds = memo.transfer_s(size, source, have, target, need)
    held = size / num_shards(have, [axis.ways() for axis in source.axes])
    before = into.get(pair, Tied())
    into[pair] = Tied(
        before.seconds + seconds, before.size_bytes + held, (*before.parameters, item)
    )
