"""What a compiler that fuses chains of cheap ops leaves to be read and written.

Ops without a product loop (elementwise functions, norms, softmax, losses, views) that follow each
other become one kernel: what one of them makes for the next stays in registers. A tensor is written
where something else reads it: a product, attention, the backward, or whoever gets the model's
outputs. What only elementwise functions made is not kept for the backward but made again there.
"""

from dataclasses import replace

from partita.graph.record import Graph, Op
from partita.graph.traffic import VIEWS, Elements, elements

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
    """Is something written by it, so that a kernel ends here?"""
    return any(is_written(graph, op, name) for name in op.outputs)


def is_written(graph: Graph, op: Op, name: str) -> bool:
    """Does something read a tensor that is not in the same kernel as the op that makes it?"""
    if not is_fused(graph, op):
        return True
    readers = graph.consumers(name)
    if name in graph.outputs or not readers:
        return True
    cheap = graph.call(op).kind in VIEWS or graph.call(op).kind == "elementwise"
    for reader in readers:
        if not is_fused(graph, reader):
            if not _is_again(op, reader, cheap):
                return True
        elif _part(reader) != _part(op) and not cheap:
            return True
    return False


def _is_again(op: Op, reader: Op, cheap: bool) -> bool:
    """Is the tensor made again for this reader?"""
    return cheap and _part(op) != _part(reader) and reader.phase == "dgrad"


def _is_inside(graph: Graph, name: str, reader: Op) -> bool:
    maker = graph.producer(name)
    if maker is None or not is_fused(graph, maker):
        return False
    return _part(maker) == _part(reader)


def _part(op: Op) -> str:
    return "forward" if op.phase == "forward" else "update" if op.phase == "update" else "backward"
