"""The sizes of a stack of equal transformer layers, read off a graph, whatever it was made from."""

import functools
from collections import defaultdict
from dataclasses import dataclass

from partita.forecast.inputs import ExpertLayers, Transformer
from partita.graph.loops import loop_nest
from partita.graph.record import Graph, Op
from partita.jobs.framework_plan import layer_stack


@dataclass(frozen=True)
class StackSizes:
    """What frameworks are told of a model, and forecasts need to know."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    seq: int
    rms_norm: bool
    gated: bool
    biases: bool
    tied: bool
    learned_positions: bool
    experts: int = 0  # of a layer; 0: none
    top_k: int = 0
    expert_ffn: int = 0

    def transformer(self, name: str) -> Transformer:
        """The record that forecasts take."""
        sparse = None
        if self.experts:
            sparse = ExpertLayers(self.experts, self.top_k, self.expert_ffn)
        return Transformer(
            name, self.num_layers, self.hidden, self.heads, self.ffn or self.expert_ffn,
            self.vocab, self.seq, kv_heads=self.kv_heads, head_size=self.head_size,
            gated=self.gated, biases=self.biases, tied=self.tied,
            positions=self.learned_positions, experts=sparse,
        )  # fmt: skip


@functools.lru_cache(maxsize=8)
def stack_sizes(graph: Graph) -> StackSizes | None:
    """The sizes of a model; None where it is not a stack of transformer layers over words."""
    stack = layer_stack(graph)
    if stack is None:
        return None
    unit_of = dict(stack.units)
    ops = [graph.op(name) for name, _ in stack.units]
    attention = [op for op in ops if op.kind == "attention"]
    tables = [op for op in ops if op.kind == "embedding" and unit_of[op.name] == 0]
    inputs = {tensor.name for tensor in graph.inputs}
    words = [op for op in tables if op.inputs[0] in inputs]
    norms = [op for op in ops if op.kind in ("layer_norm", "rms_norm")]
    layer = [op for op in ops if unit_of[op.name] == stack.num_layers]  # the last: it may have more
    if len(attention) != stack.num_layers or not words or not norms:
        return None
    core, table = _extents(graph, attention[0]), _extents(graph, words[0])
    products = [op for op in layer if op.kind == "linear"]
    after = [op for op in products if _follows(layer, op, "attention")]
    sparse = [op for op in layer if op.kind == "expert_linear"]
    count, top_k, inner = _experts(graph, layer, sparse, table)
    readers = [op for op in graph.consumers(words[0].inputs[1]) if op.phase == "forward"]
    return StackSizes(
        num_layers=stack.num_layers, hidden=table["e"], heads=core["h"] * core["g"],
        kv_heads=core["h"], head_size=core["d"],
        ffn=max((_extents(graph, op)["n"] for op in after), default=0) if not sparse else 0,
        vocab=table["v"], seq=table["s"], rms_norm=norms[0].kind == "rms_norm",
        gated=_is_gated(graph, layer), biases=any(len(op.inputs) > 2 for op in products),
        tied=len(readers) > 1, learned_positions=len(tables) > len(words), experts=count,
        top_k=top_k, expert_ffn=inner,
    )  # fmt: skip


def _extents(graph: Graph, op: Op) -> dict[str, int]:
    """Of the loops of an op; those of extent 1 are not in its nest."""
    return defaultdict(lambda: 1, {dim.name: dim.extent for dim in loop_nest(graph.call(op)).dims})


def _follows(layer: list[Op], op: Op, kind: str) -> bool:
    """Does an op of a layer come after the first of a kind?"""
    names = [one.name for one in layer]
    first = next((i for i, one in enumerate(layer) if one.kind == kind), len(layer))
    return names.index(op.name) > first


def _experts(
    graph: Graph, layer: list[Op], sparse: list[Op], table: dict[str, int]
) -> tuple[int, int, int]:
    """Experts of a layer, how many a token visits, and their inner width."""
    if not sparse or not any(op.kind == "moe_dispatch" for op in layer):
        return 0, 0, 0
    first = _extents(graph, sparse[0])
    tokens = table["b"] * table["s"]
    return first["e"], max(1, round(first["e"] * first["c"] / tokens)), first["n"]


def _is_gated(graph: Graph, layer: list[Op]) -> bool:
    """Does an activation read two products?"""
    for op in layer:
        makers = [graph.producer(name) for name in op.inputs]
        kinds = ("linear", "expert_linear")
        products = [maker for maker in makers if maker is not None and maker.kind in kinds]
        if op.kind == "elementwise" and len(makers) == len(products) == 2:
            return True
    return False
