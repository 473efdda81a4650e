"""Parameters that several segments read: every stage with one of them holds its own.

A sharding problem counts such a parameter to the op that reads it first. In a pipeline another
reader's stage has a copy of its own, with gradient and states, kept in the manner that the first
reader's choice says. `tied_bytes` is what that adds where the first reader is in an earlier stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partita.costs.layouts import num_shards
from partita.costs.sharding import LEVELS, SplitChoice
from partita.graph.record import Graph
from partita.graph.splits import REPLICATE, placements
from partita.plans import Axis


@dataclass(frozen=True, slots=True)
class Reader:
    """A forward op that reads a parameter after the op it is counted to."""

    op: str
    position: int  # among its inputs
    owner: str
    parameter: str
    alone: bool  # does it read no parameter that is its own?


def later_readers(graph: Graph) -> tuple[Reader, ...]:
    """All readers of parameters but the first of each."""
    owner: dict[str, str] = {}
    later: list[tuple[str, int, str]] = []
    owns: set[str] = set()
    for op in graph.ops:
        if op.phase != "forward":
            continue
        for position, name in enumerate(op.inputs):
            if graph.tensor(name).role != "parameter":
                continue
            if owner.setdefault(name, op.name) == op.name:
                owns.add(op.name)
            else:
                later.append((op.name, position, name))
    return tuple(
        Reader(op, position, owner[name], name, op not in owns) for op, position, name in later
    )


def kept_alike(
    choice_of: dict[str, SplitChoice], readers: Sequence[Reader], levels: Sequence[int] = LEVELS
) -> dict[str, SplitChoice]:
    """The choices with later readers keeping states sharded where the first one does.

    Parameters themselves are not, unless the `levels` that may be leave nothing else: gathering
    them again and again was not counted to the reader.
    """
    least = min((level for level in levels if level > 0), default=1)
    choices = dict(choice_of)
    for reader in readers:
        if reader.alone and choices[reader.owner].zero != 0:
            choices[reader.op] = SplitChoice(choices[reader.op].dims, least)
    return choices


def tied_bytes(
    graph: Graph,
    reader: Reader,
    choice: SplitChoice,
    axes: Sequence[Axis],
    update: Mapping[str, int],
) -> float:
    """What a device holds of a parameter at a later reader; `update` has the bytes of states."""
    layout = placements(graph.call(graph.op(reader.op)), choice.dims)[0][reader.position]
    copies = 1
    for place, axis in zip(layout, axes, strict=True):
        copies *= axis.size if place == REPLICATE and not axis.replicates else 1
    shards = num_shards(layout, [axis.ways() for axis in axes])
    held = graph.tensor(reader.parameter).size_bytes / shards
    total = held
    if reader.parameter in update:
        total += gradient_bytes(graph, reader.parameter) / shards
        states = update[reader.parameter] / shards
        total += states / (1 if choice.zero == 0 else copies)
    return total


def gradient_bytes(graph: Graph, parameter: str) -> int:
    """Bytes of the gradient of a parameter that is updated; 0 of any other."""
    updates = (op for op in graph.consumers(parameter) if op.phase == "update")
    return next((graph.tensor(op.inputs[1]).size_bytes for op in updates), 0)


def state_bytes(graph: Graph) -> dict[str, int]:
    """Bytes of the optimizer's states of every parameter that is updated."""
    return {
        op.inputs[0]: sum(graph.tensor(name).size_bytes for name in op.inputs[2:])
        for op in graph.ops
        if op.phase == "update"
    }
