"""What a compiler that fuses chains of cheap ops leaves to be read and written.

Ops without a product loop (elementwise functions, norms, softmax, losses, views) that follow each
other become one kernel: what one of them makes for the next stays in registers. Two such ops are in
one kernel where one reads what the other makes and nothing that cannot be fused (a product,
attention) lies between: where both have the same *level*, the most such ops on a way to them. A
tensor is written where something outside of its kernel reads it. What an elementwise function makes
of one tensor is not kept for the backward but made again there.
"""

from dataclasses import replace

from partita.graph.record import Graph, Op
from partita.graph.work import VIEWS, Elements, elements

FUSED = VIEWS | {
    "elementwise", "layer_norm", "rms_norm", "group_norm", "batch_norm", "softmax", "transpose",
    "concat", "pad", "reduce", "cross_entropy", "mse_loss", "embedding", "resize",
}  # fmt: skip


def fused_elements(graph: Graph, op: Op) -> tuple[Elements, Elements]:
    """The tensors an op reads and writes, those that stay inside a fused kernel without bytes."""
    key = ("fused elements", op.name)
    if key not in graph.memo:
        reads, writes = elements(graph, op)
        if is_fused(graph, op):
            reads = tuple(
                replace(item, element_bytes=0) if _is_inside(graph, name, op) else item
                for item, name in zip(reads, op.inputs, strict=True)
            )
            writes = tuple(
                item if is_written(graph, op, name) else replace(item, element_bytes=0)
                for item, name in zip(writes, op.outputs, strict=True)
            )
        graph.memo[key] = reads, writes
    fused: tuple[Elements, Elements] = graph.memo[key]
    return fused


def is_fused(graph: Graph, op: Op) -> bool:
    """Can an op be a part of a larger kernel? Not the gradient of a lookup, which scatters."""
    kind = graph.call(op).kind
    return kind in FUSED and not (kind == "embedding" and op.phase != "forward")


def starts_kernel(graph: Graph, op: Op) -> bool:
    """Is it by itself, or the first of its kernel?"""
    if not is_fused(graph, op):
        return True
    if graph.call(op).kind in VIEWS:
        return False
    return not any(_is_inside(graph, name, op) for name in op.inputs)


def is_written(graph: Graph, op: Op, name: str) -> bool:
    """Does something read a tensor that is not in the same kernel as the op that makes it?"""
    readers = graph.consumers(name)
    if name in graph.outputs or not readers or not is_fused(graph, op):
        return True
    kind = graph.call(op).kind
    cheap = kind in VIEWS or (kind == "elementwise" and len(op.inputs) == 1)
    own = levels(graph)[op.name]
    for reader in readers:
        if _part(reader) != _part(op):
            if not (cheap and is_fused(graph, reader)):
                return True
        elif not is_fused(graph, reader) or levels(graph)[reader.name] != own:
            return True
    return False


def levels(graph: Graph) -> dict[str, int]:
    """The most ops that cannot be fused on a way to each op, within its pass."""
    key = ("fusion levels", "")
    if key not in graph.memo:
        depth: dict[str, int] = {}
        for op in graph.ops:
            makers = [maker for maker in graph.predecessors(op) if _part(maker) == _part(op)]
            depth[op.name] = max(
                (depth[maker.name] + (not is_fused(graph, maker)) for maker in makers), default=0
            )
        graph.memo[key] = depth
    by_op: dict[str, int] = graph.memo[key]
    return by_op


def _is_inside(graph: Graph, name: str, reader: Op) -> bool:
    maker = graph.producer(name)
    if maker is None or not is_fused(graph, maker) or _part(maker) != _part(reader):
        return False
    return levels(graph)[maker.name] == levels(graph)[reader.name]


def _part(op: Op) -> str:
    return "forward" if op.phase == "forward" else "update" if op.phase == "update" else "backward"
