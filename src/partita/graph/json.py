"""The JSON form of a graph, `partita/graph@1`, both ways.

    {"format": "partita/graph@1", "name": "mlp",
     "tensors": [{"name": "x", "shape": [32, 784], "role": "input"}, ...],
     "ops": [{"name": "fc", "kind": "linear", "inputs": ["x", "w"], "outputs": ["fc"]}, ...],
     "outputs": ["fc"]}

Left out where usual: `dtype` f32, `role` activation, `phase` forward; `attrs`, `scope`, `forward`
and `source` (of a packed parameter, see `packed.py`) if empty; `captured` unless true. Ops may
stand in any order.
"""

from typing import Any

import msgspec

from partita.errors import FileError, GraphError
from partita.files import check_format, convert
from partita.graph.check import assemble
from partita.graph.record import Attr, Graph, Op, Tensor

VERSION = 1
_Scalar = bool | int | float | str


class _Tensor(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    shape: list[int]
    dtype: str = "f32"
    role: str = "activation"
    source: str = ""


class _Op(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    kind: str
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, _Scalar | list[_Scalar]] = {}
    scope: str = ""
    phase: str = "forward"
    forward: str = ""


class _Graph(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    name: str
    tensors: list[_Tensor]
    ops: list[_Op]
    outputs: list[str] = []
    captured: bool = False


def to_json(graph: Graph) -> dict[str, Any]:
    """The graph as plain values; `from_json` gives an equal graph back."""
    wire = _Graph(
        f"partita/graph@{VERSION}",
        graph.name,
        [_Tensor(t.name, list(t.shape), t.dtype, t.role, t.source) for t in graph.tensors],
        [_wire_op(op) for op in graph.ops],
        list(graph.outputs),
        graph.is_captured,
    )
    plain: dict[str, Any] = msgspec.to_builtins(wire)
    if not graph.is_captured:
        del plain["captured"]
    return plain


def from_json(value: object, file: str = "") -> Graph:
    """The graph that plain values describe; errors name the field."""
    if not isinstance(value, dict):
        raise FileError("is not a JSON object", fix="a graph file is one", file=file)
    check_format(value, "graph", VERSION, file)
    wire = convert(value, _Graph, file)
    try:
        return assemble(
            wire.name,
            [Tensor(t.name, tuple(t.shape), t.dtype, t.role, t.source) for t in wire.tensors],
            [_op(op) for op in wire.ops],
            wire.outputs,
            is_captured=wire.captured,
        )
    except GraphError as error:
        raise (error.within(file) if file else error) from None


def _wire_op(op: Op) -> _Op:
    attrs = {key: _wire_attr(value) for key, value in op.attrs}
    inputs, outputs = list(op.inputs), list(op.outputs)
    return _Op(op.name, op.kind, inputs, outputs, attrs, op.scope, op.phase, op.forward)


def _op(op: _Op) -> Op:
    attrs = tuple((key, _attr(value)) for key, value in sorted(op.attrs.items()))
    inputs, outputs = tuple(op.inputs), tuple(op.outputs)
    return Op(op.name, op.kind, inputs, outputs, attrs, op.scope, op.phase, op.forward)


def _wire_attr(value: Attr) -> _Scalar | list[_Scalar]:
    return [*value] if isinstance(value, tuple) else value


def _attr(value: _Scalar | list[_Scalar]) -> Attr:
    return tuple(value) if isinstance(value, list) else value  # type: ignore[return-value]


def schema_record() -> type:
    """The record that a graph file is read by: its JSON Schema is that of the file."""
    return _Graph
