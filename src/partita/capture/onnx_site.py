"""A node of an ONNX graph on its way to becoming ops: what rules read, and where they write.

A rule of `onnx_kinds.py` asks for inputs, attributes and known numbers, and gives the main op after
the parts it needs. If it gives up, what it has begun is dropped and the node is carried as it is.
"""

from collections.abc import Sequence
from typing import Any

from partita.errors import FileError, GraphError
from partita.graph.record import FLOATS, Call, Op, Tensor
from partita.graph.shapes import SHAPES, output_shapes

LOOPS = ("Loop", "Scan")
LIKE_FIRST = ("ScatterND", "ScatterElements", "Scatter", "CumSum", "ReverseSequence")  # in shape


class OnnxUnfit(Exception):  # noqa: N818
    """A rule does not cover this use of an operator."""


class OnnxSite:
    """A node that a rule is at work on, and the ops it becomes."""

    def __init__(self, reader: Any, node: Any, name: str, scope: str) -> None:
        self.reader = reader
        self.node = node
        self.name = reader.free(name)
        self.scope = scope
        self.kind: str = node.op_type
        self.opset: int = reader.opset
        self.inputs: list[str] = list(node.input)  # a rule may choose among them for another
        self.attributes = {item.name: _attribute(item) for item in node.attribute}
        self._ops: list[tuple[Op, tuple[Tensor, ...]]] = []
        self._given: dict[str, Tensor] = {}

    def build(self) -> None:
        """The ops of this node, by its rule or as it is."""
        names = [name for name in self.node.output if name]
        from partita.capture.onnx_contrib import CONTRIB
        from partita.capture.onnx_kinds import RULES
        from partita.capture.onnx_quantized import QUANTIZED_CONTRIB

        self._refuse_loops()
        microsoft = {**RULES, **CONTRIB, **QUANTIZED_CONTRIB}
        rules = {"": RULES, "ai.onnx": RULES, "com.microsoft": microsoft}
        rule = rules.get(self.node.domain, {}).get(self.kind)
        if rule is not None:
            try:
                rule(self)
            except (OnnxUnfit, GraphError, IndexError, KeyError, TypeError, ValueError) as error:
                self._ops, self._given = [], {}
                if isinstance(error, GraphError) and self.reader.shape(names[0]) is None:
                    raise
        if names[0] not in self._given:
            self._carry(names)
        for name in names[1:]:
            if name not in self._given and name in self.reader.read:
                self._more(names[0], name)
        for op, tensors in self._ops:
            self.reader.add(op, tensors)
        self.reader.place.update(self._given)

    def _refuse_loops(self) -> None:
        if self.kind in LOOPS and self.node.domain in ("", "ai.onnx"):
            raise FileError(
                f"is a {self.kind}, whose body runs as often as the data say",
                fix="export with the loop unrolled to a fixed number of steps, or with layers of "
                "the kinds LSTM and GRU",
            )

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def has(self, position: int) -> bool:
        """Is there an input at this position?"""
        return position < len(self.inputs) and bool(self.inputs[position])

    def holds(self, position: int) -> bool:
        """Is there an input at this position that has elements?"""
        if not self.has(position):
            return False
        value = self.reader.value(self.inputs[position])
        return value is None or value.size > 0

    def tensor(self, position: int) -> Tensor:
        """The input at this position."""
        if not self.has(position):
            raise OnnxUnfit
        tensor: Tensor = self.reader.tensor(self.inputs[position])
        return tensor

    def tensors(self) -> list[Tensor]:
        """All inputs; numbers that are known and single are left out, as Python's would be."""
        tensors = []
        for name in self.inputs:
            value = self.reader.value(name) if name else None
            if name and (value is None or value.size > 1):
                tensors.append(self.reader.tensor(name))
        return tensors

    def numbers(self, position: int, attribute: str = "") -> list[int] | None:
        """A list of whole numbers that older versions have as an attribute, newer as an input."""
        if attribute and attribute in self.attributes:
            value = self.attributes[attribute]
            return [value] if isinstance(value, int) else list(value)
        if not self.has(position):
            return None
        value = self.reader.value(self.inputs[position])
        if value is None:
            raise OnnxUnfit
        return [int(item) for item in value.reshape(-1)]

    def part(self, part: str, kind: str, *inputs: Tensor, **attrs: Any) -> Tensor:
        """An op on the way to the main one; `dtype` is that of what it gives."""
        dtype = attrs.pop("dtype", None)
        return self._op(f"{self.name}.{part}", kind, inputs, attrs, dtype)[0]

    def give(self, kind: str, *inputs: Tensor, **attrs: Any) -> None:
        """The main op; its outputs are the node's first ones. `dtype` is that of the outputs."""
        dtype = attrs.pop("dtype", None)
        made = self._op(self.name, kind, inputs, attrs, dtype)
        for name, tensor in zip(self.node.output, made, strict=False):
            known = self.reader.shape(name)
            if known is not None and known != tensor.shape:
                raise OnnxUnfit
            self._given[name] = tensor

    def main(self) -> Tensor:
        """What the main op gives."""
        return self._given[self.node.output[0]]

    def also(self, position: int, tensor: Tensor) -> None:
        """One of the node's further outputs, if it is asked for."""
        if position < len(self.node.output) and self.node.output[position]:
            self._given[self.node.output[position]] = tensor

    def same(self, tensor: Tensor) -> None:
        """The node gives its input as it is."""
        self._given[self.node.output[0]] = tensor

    def out_shape(self) -> tuple[int, ...]:
        """The shape of the first output as ONNX found it."""
        out_shape = self.reader.shape(self.node.output[0])
        if out_shape is None:
            raise OnnxUnfit
        return tuple(out_shape)

    def out_dtype(self) -> str | None:
        """The element type of the first output as ONNX found it."""
        return self._dtype(self.node.output[0])

    def opaque(
        self, part: str, kind: str, inputs: tuple[Tensor, ...], shape: tuple[int, ...],
        dtype: str | None = None,
    ) -> Tensor:  # fmt: skip
        """An op of a kind that no table knows."""
        return self._op(f"{self.name}.{part}", kind, inputs, {}, dtype, [shape])[0]

    def _op(
        self,
        name: str,
        kind: str,
        inputs: tuple[Tensor, ...],
        attrs: dict[str, Any],
        dtype: str | None = None,
        shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> tuple[Tensor, ...]:
        fixed = tuple(sorted(attrs.items()))
        if shapes is None:
            shapes = output_shapes(Call(kind, fixed, tuple(t.shape for t in inputs), ()))
        floats = [tensor.dtype for tensor in inputs if tensor.dtype in FLOATS]
        out = dtype or next(iter(floats), inputs[0].dtype if inputs else "f32")
        names = [name if len(shapes) == 1 else f"{name}:{i}" for i in range(len(shapes))]
        made = tuple(Tensor(n, s, out) for n, s in zip(names, shapes, strict=True))
        read = tuple(tensor.name for tensor in inputs)
        self._ops.append((Op(name, kind, read, tuple(names), fixed, self.scope), made))
        return made

    def _carry(self, names: list[str]) -> None:
        shapes = [self.reader.shape(name) for name in names]
        if self.kind in LIKE_FIRST:
            shapes[0] = self.reader.tensor(self.node.input[0]).shape
        if any(shape is None for shape in shapes):
            lost = names[shapes.index(None)]
            raise FileError(
                f"gives {lost!r}, whose shape cannot be worked out",
                fix="export with fixed sizes, or run onnx.shape_inference on the file first",
            )
        inputs = tuple(self.reader.tensor(name) for name in self.node.input if name)
        kind = self.kind.lower()
        kind = f"onnx_{kind}" if kind in SHAPES else kind
        made = self._op(self.name, kind, inputs, {}, self._dtype(names[0]), shapes)
        self._given.update(zip(names, made, strict=True))

    def _more(self, first: str, name: str) -> None:
        """What a kind does not give besides its main output: states, indices."""
        shape = self.reader.shape(name)
        if shape is None:
            raise FileError(
                f"gives {name!r}, whose shape cannot be worked out", fix="export with fixed sizes"
            )
        number = list(self.node.output).index(name)
        kind = f"{self.kind.lower()}_more"
        inputs = (self._given[first],)
        made = self._op(f"{self.name}.more{number}", kind, inputs, {}, self._dtype(name), [shape])
        self._given[name] = made[0]

    def _dtype(self, name: str) -> str | None:
        kind = self.reader.inferred.get(name)
        return self.reader.element_type(kind.elem_type, name) if kind is not None else None


def _attribute(item: Any) -> Any:
    import onnx

    value = onnx.helper.get_attribute_value(item)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
