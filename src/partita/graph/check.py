"""What a graph from a file must satisfy beyond being one: shapes and gradients that fit together.

A graph made by `GraphBuilder` satisfies it by construction; readers call `assemble`.
"""

import logging
from collections.abc import Iterable

from partita.errors import GraphError
from partita.graph.record import Call, Graph, Op, Shape, Tensor, topological
from partita.graph.shapes import SHAPES, output_shapes, unknown_kinds

log = logging.getLogger("partita")


def assemble(
    name: str, tensors: Iterable[Tensor], ops: Iterable[Op], outputs: Iterable[str], *,
    is_captured: bool = False,
) -> Graph:  # fmt: skip
    """A graph from parts in any order: sorted, checked, and with a warning per unknown kind."""
    known = tuple(tensors)
    given = [tensor.name for tensor in known if tensor.is_given]
    graph = Graph(name, known, topological(ops, given), tuple(outputs), is_captured)
    check_graph(graph)
    for kind in unknown_kinds(graph):
        log.warning(
            "%s has ops of the unknown kind %r: they are not split and cost the bytes they move",
            graph.name or "the graph",
            kind,
        )
    return graph


def check_graph(graph: Graph) -> None:
    """Refuse ops whose tensors do not have the shapes that their kind gives."""
    for op in graph.ops:
        try:
            call = graph.call(op)
            if op.forward:
                _check_gradient(graph, op, call)
            elif op.kind in SHAPES:
                _check_outputs(op, call.outputs, output_shapes(call), f"its {op.kind} gives")
        except GraphError as error:
            raise GraphError(error.found, fix=error.fix, field=f"op {op.name!r}") from None


def _check_gradient(graph: Graph, op: Op, call: Call) -> None:
    if op.kind != call.kind:
        raise GraphError(
            f"of kind {op.kind!r} is a gradient of {op.forward!r} of kind {call.kind!r}",
            fix="give both one kind",
        )
    for name in ("grads", "wrt"):
        positions = op.attr(name)
        if isinstance(positions, tuple) and len(set(positions)) != len(positions):
            raise GraphError(
                f"attribute {name} is {list(positions)}", fix="name each position once"
            )
    needed = tuple(call.inputs[i] for i in call.wrt)
    shapes = tuple(graph.tensor(name).shape for name in op.outputs)
    _check_outputs(op, shapes, needed, f"what it differentiates of {op.forward!r} has")
    gradients = [int(code[1:]) for code in call.reads if code.startswith("g")]
    if len(op.inputs) < len(gradients):
        raise GraphError(
            f"reads {len(op.inputs)} tensors", fix=f"it needs {len(gradients)} gradients first"
        )
    for name, position in zip(op.inputs, gradients, strict=False):
        if graph.tensor(name).shape != call.outputs[position]:
            raise GraphError(
                f"reads {name!r} of {list(graph.tensor(name).shape)}",
                fix=f"a gradient of output {position} has {list(call.outputs[position])}",
            )


def _check_outputs(
    op: Op, shapes: tuple[Shape, ...], needed: tuple[Shape, ...], reason: str
) -> None:
    if len(shapes) != len(needed):
        raise GraphError(
            f"gives {len(shapes)} tensors",
            fix=f"{reason} {len(needed)}: {', '.join(str(list(shape)) for shape in needed)}",
        )
    for name, shape, right in zip(op.outputs, shapes, needed, strict=True):
        if shape != right:
            raise GraphError(f"gives {name!r} of {list(shape)}", fix=f"{reason} {list(right)}")
