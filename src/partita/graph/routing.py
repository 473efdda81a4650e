"""Which dispatch and combine ops of a model with experts route the same tokens.

A dispatch lets every expert take the tokens that want it most, as many as it has places for, within
each group of tokens that are routed together. A combine gives what the experts made back to these
tokens, so it has to know the same groups. The two are tied by the tokens: a combine belongs to
every dispatch whose places its first input holds.
"""

from partita.graph.record import Graph, Op


def routed_pairs(graph: Graph) -> tuple[tuple[Op, Op], ...]:
    """Every (dispatch, combine) of the same tokens, in the order of the combines."""
    key = ("routed pairs", "")
    if key not in graph.memo:
        graph.memo[key] = _routed_pairs(graph)
    pairs: tuple[tuple[Op, Op], ...] = graph.memo[key]
    return pairs


def _routed_pairs(graph: Graph) -> tuple[tuple[Op, Op], ...]:
    dispatches: dict[str, dict[str, Op]] = {}  # tensor -> the dispatches whose places it holds
    pairs: list[tuple[Op, Op]] = []
    for op in graph.ops:
        if op.phase != "forward":
            continue
        if op.kind == "moe_combine":
            pairs.extend((dispatch, op) for dispatch in dispatches.get(op.inputs[0], {}).values())
        elif op.kind == "moe_dispatch":
            dispatches.update({name: {op.name: op} for name in op.outputs})
        else:
            held = {k: v for name in op.inputs for k, v in dispatches.get(name, {}).items()}
            if held:
                dispatches.update((name, held) for name in op.outputs)
    return tuple(pairs)
