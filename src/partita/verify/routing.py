"""Do the dispatches to experts and their combines of a plan route the same groups of tokens?

A device that has a share of the tokens routes it by itself, and fills its share of every expert's
places. What a combine gives back is right only if its shares of the tokens are those of the
dispatch; else places are read as other tokens' than those that were put there.
"""

import math
from collections.abc import Sequence

from partita.graph.loops import loop_nest
from partita.graph.record import Graph, Op
from partita.graph.splits import routed_pairs
from partita.plans import Stage


def unlike_routings(graph: Graph, stages: Sequence[Stage]) -> list[str]:
    """A sentence for every dispatch and combine that a plan splits unlike."""
    where = {split.op: (stage, split.dims) for stage in stages for split in stage.splits}
    sentences = []
    for dispatch, combine in routed_pairs(graph):
        if dispatch.name not in where or combine.name not in where:
            continue
        sent, back = (_shares(graph, op, *where[op.name]) for op in (dispatch, combine))
        if sent != back:
            dim = _token_dims(graph, combine)[0]
            sentences.append(
                f"{dispatch.name} routes tokens in {_words(sent)} and {combine.name} gives them "
                f"back in {_words(back)}; split both along {dim!r} into the same shares"
            )
    return sentences


def _shares(graph: Graph, op: Op, stage: Stage, dims: tuple[str, ...]) -> tuple[int, ...]:
    """The sizes of an op's groups of tokens, in whole numbers without a common divisor."""
    shares: tuple[int, ...] = (1,)
    for axis, dim in zip(stage.mesh.axes, dims, strict=True):
        if dim in _token_dims(graph, op):
            weights = axis.weights or (1,) * axis.size
            shares = tuple(share * weight for share in shares for weight in weights)
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares)


def _token_dims(graph: Graph, op: Op) -> list[str]:
    """The dims of a dispatch or combine that run over tokens: those of its gates but the last."""
    gates = loop_nest(graph.call(op)).inputs[1]
    return [name for names in gates.dims[:-1] for name in names]


def _words(shares: tuple[int, ...]) -> str:
    if len(shares) == 1:
        return "one group"
    if len(set(shares)) == 1:
        return f"{len(shares)} groups"
    return f"groups of {':'.join(map(str, shares))}"
