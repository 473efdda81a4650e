"""An ONNX file as a Graph: `model.onnx`, or `model.onnx@128` with 128 for free sizes.

Shapes are worked out node by node, and what only computes shapes is computed here and leaves no
op; weights are never read, so data kept in other files need not be there. What a MODEL says of
sizes that the file leaves open is in `onnx_sizes.py`. Layers become ops by `onnx_kinds.py`; what
has no kind is carried as it is, with the shapes that ONNX's own inference gives. An input without
elements (keys and values before the first call) is known, so that what only moves it leaves no op.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from partita.capture.installed import need_onnx
from partita.capture.onnx_sizes import fix_sizes, parse_sizes
from partita.errors import FileError, InputError
from partita.graph.record import FLOATS, Graph, Op, Tensor

MAX_FOLDED = 4096  # elements of a tensor that may be part of a computation of shapes
DTYPES = {
    "FLOAT": "f32", "FLOAT16": "f16", "BFLOAT16": "bf16", "DOUBLE": "f64", "INT64": "i64",
    "INT32": "i32", "INT16": "i16", "INT8": "i8", "UINT8": "u8", "BOOL": "bool", "UINT16": "i16",
    "UINT32": "i32", "UINT64": "i64", "FLOAT8E4M3FN": "f8", "FLOAT8E5M2": "f8",
}  # fmt: skip


def is_onnx_spec(spec: str) -> bool:
    """Does a MODEL name an ONNX file?"""
    return spec.partition("@")[0].lower().endswith(".onnx")


def onnx_graph(spec: str, batch: int | None = None, dtype: str | None = None) -> Graph:
    """The graph in an ONNX file."""
    need_onnx(f"the model {spec}")
    name, at, size = spec.rpartition("@")
    path = Path(name if at else spec)
    given = parse_sizes(size if at else "", spec)
    with _named(path):
        model = _loaded(path)
        fix_sizes(model, batch, given)
        return _OnnxReader(_inferred(model), path.stem, dtype).graph()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors name the file; what a damaged one sets off anywhere is an error of its own."""
    try:
        yield
    except InputError as error:
        raise FileError(error.found, fix=error.fix, field=error.field, file=str(path)) from None
    except Exception as error:
        raise FileError(
            f"cannot be understood ({type(error).__name__}: {str(error).strip()[:100]})",
            fix="export the model again",
            file=str(path),
        ) from error


def _loaded(path: Path) -> Any:
    import onnx

    try:
        model = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError:
        raise FileError("there is no such file", fix="check the name") from None
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", fix="check the path") from None
    except Exception as error:  # protobuf's own errors have no common base
        raise FileError(
            f"is not an ONNX model ({str(error)[:100]})", fix="export the model again"
        ) from None
    if not model.graph.node:
        raise FileError("holds no nodes", fix="export the model again", field="graph")
    return model


def _inferred(model: Any) -> Any:
    """The model with the shapes that ONNX finds; large weights are left out first."""
    import onnx

    for tensor in model.graph.initializer:
        if _count(tensor.dims) > MAX_FOLDED:
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.ClearField("external_data")
    for value in model.graph.output:  # what is said there may name sizes that are fixed now
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:  # the bindings raise several kinds
        raise FileError(
            f"is not consistent: {str(error).strip()[:300]}", fix="export the model again"
        ) from None


def _count(dims: Any) -> int:
    total = 1
    for size in dims:
        total *= int(size)
    return total


class _OnnxReader:
    """Walks through the nodes of one model."""

    def __init__(self, model: Any, name: str, dtype: str | None) -> None:
        self.model = model
        self.opset = max(
            (item.version for item in model.opset_import if item.domain in ("", "ai.onnx")),
            default=1,
        )
        self.name = name
        self.dtype = dtype
        self.values: dict[str, Any] = {}  # name -> what it holds, where that is known
        self.place: dict[str, Tensor] = {}  # name in the file -> tensor of the graph
        self.tensors: dict[str, Tensor] = {}  # of the graph
        self.ops: list[Op] = []
        self.names: set[str] = set()  # of ops
        self.initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        outputs = [value.name for value in model.graph.output]
        self.read = {*outputs, *(name for node in model.graph.node for name in node.input)}
        known = (*model.graph.value_info, *model.graph.output, *model.graph.input)
        self.inferred = {value.name: value.type.tensor_type for value in known}

    def graph(self) -> Graph:
        """The whole graph."""
        from partita.capture.onnx_site import OnnxSite

        for value in self.model.graph.input:
            if value.name not in self.initializers:
                kind = value.type.tensor_type
                shape = [dim.dim_value for dim in kind.shape.dim]
                dtype = self.element_type(kind.elem_type, value.name)
                if 0 in shape:
                    self.values[value.name] = _empty(shape, kind.elem_type)
                    continue
                self._declare(value.name, Tensor(value.name, tuple(shape), dtype, "input"))
        for number, node in enumerate(self.model.graph.node):
            label = node.name or f"{node.op_type}_{number}"
            field = f"node {label!r} ({node.op_type})"
            try:
                if not self._folded(node):
                    path = [part for part in label.split("/") if part] or [label]
                    OnnxSite(self, node, ".".join(path), ".".join(path[:-1])).build()
            except InputError as error:
                raise FileError(error.found, fix=error.fix, field=field) from None
            except Exception as error:  # of numpy or protobuf, over what makes no sense
                raise FileError(
                    f"cannot be understood ({type(error).__name__}: {str(error).strip()[:100]})",
                    fix="check its inputs and attributes",
                    field=field,
                ) from error
        outputs = tuple(self.tensor(value.name).name for value in self.model.graph.output)
        tensors = tuple(self.tensors.values())
        return Graph(self.name, tensors, tuple(self.ops), outputs, is_captured=True)

    def free(self, name: str) -> str:
        """The name for an op, or with a number after it where it is taken."""
        free, number = name, 1
        while free in self.names or free in self.tensors:
            free, number = f"{name}_{number}", number + 1
        return free

    def add(self, op: Op, tensors: tuple[Tensor, ...]) -> None:
        """Make an op and what it gives part of the graph."""
        self.ops.append(op)
        self.names.add(op.name)
        self.tensors.update({tensor.name: tensor for tensor in tensors})

    def _declare(self, name: str, tensor: Tensor) -> Tensor:
        self.place[name] = self.tensors[tensor.name] = tensor
        return tensor

    def element_type(self, number: int, name: str) -> str:
        """The name of an element type."""
        import onnx

        text = onnx.TensorProto.DataType.Name(number)
        if text not in DTYPES:
            raise FileError(
                f"has the element type {text}", fix=f"use one of {', '.join(DTYPES)}", field=name
            )
        element_type = DTYPES[text]
        return self.dtype if self.dtype is not None and element_type in FLOATS else element_type

    def value(self, name: str) -> Any:
        """What a tensor holds, as a numpy array; None if that is not known."""
        if name in self.values:
            return self.values[name]
        tensor = self.initializers.get(name)
        if tensor is None or _count(tensor.dims) > MAX_FOLDED or tensor.external_data:
            return None
        from onnx import numpy_helper

        self.values[name] = numpy_helper.to_array(tensor)
        return self.values[name]

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; a weight is declared where it is first read."""
        if name in self.place:
            return self.place[name]
        held = self.initializers.get(name)
        if held is not None:
            dtype = self.element_type(held.data_type, name)
            shape = tuple(int(size) for size in held.dims)
            return self._weight(name, shape, dtype)
        if name in self.values:
            array = self.values[name]
            return self._constant(name, array.shape, _numpy_dtype(array))
        raise FileError(
            f"reads {name!r}, which nothing gives", fix="nodes must stand in topological order"
        )

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape that ONNX found for a tensor; None if it did not."""
        kind = self.inferred.get(name)
        if kind is None or not kind.HasField("shape"):
            return None
        sizes = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in kind.shape.dim]
        return tuple(sizes) if all(size > 0 for size in sizes) else None

    def _weight(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Numbers that could be learned are parameters; single ones and whole ones are not.

        Whole numbers of a byte with two dims and more are quantised weights, which are held.
        """
        if dtype in ("i8", "u8") and len(shape) > 1:
            return self._declare(name, Tensor(self.free(name), shape, dtype, "state"))
        if dtype not in FLOATS or _count(shape) == 1:
            return self._constant(name, shape, dtype)
        return self._declare(name, Tensor(self.free(name), shape, dtype, "parameter"))

    def _constant(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        made = Tensor(self.free(name), tuple(shape), dtype)
        op = Op(made.name, "constant", (), (made.name,), (("shape", tuple(shape)),))
        self.add(op, (made,))
        self.place[name] = made
        return made

    def _folded(self, node: Any) -> bool:
        """Compute what depends on nothing but known numbers, and what asks for shapes."""
        import numpy as np

        if node.op_type in ("Shape", "Size") and node.input[0] not in self.values:
            shape = self.tensor(node.input[0]).shape
            if node.op_type == "Size":
                self.values[node.output[0]] = np.array(_count(shape), dtype=np.int64)
                return True
            bounds = {item.name: item.i for item in node.attribute}
            part = slice(bounds.get("start"), bounds.get("end"))
            self.values[node.output[0]] = np.array(shape[part], dtype=np.int64)
            return True
        values = [self.value(name) for name in node.input if name]
        if any(value is None for value in values) or node.op_type in NOT_FOLDED:
            return False
        if node.op_type == "ConstantOfShape" and int(np.prod(values[0])) > MAX_FOLDED:
            return False
        computed = _computed(node, {n: self.value(n) for n in node.input if n}, self.opset)
        if computed is None:
            return False
        self.values.update(zip(node.output, computed, strict=False))
        return True


NOT_FOLDED = frozenset({
    "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial",
    "Bernoulli", "If", "Loop", "Scan", "DequantizeLinear",  # of weights, which are held as they are
})  # fmt: skip


def _computed(node: Any, values: dict[str, Any], opset: int) -> list[Any] | None:
    """The outputs of one node by ONNX's own reference, or None where it has no answer."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    if node.op_type == "Constant":
        return _constant_value(node)
    given = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in values]
    wanted = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output if name]
    graph = onnx.helper.make_graph([node], "one", given, wanted)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        computed: list[Any] = list(ReferenceEvaluator(model).run(None, values))
    except Exception:  # whatever it cannot do is carried as an op
        return None
    return None if any(getattr(item, "size", 0) > MAX_FOLDED for item in computed) else computed


def _constant_value(node: Any) -> list[Any] | None:
    import numpy as np
    from onnx import numpy_helper

    for item in node.attribute:
        if item.name == "value":
            return [numpy_helper.to_array(item.t)]
        if item.name in ("value_int", "value_ints"):
            return [np.array(item.i if item.name == "value_int" else list(item.ints), np.int64)]
        if item.name in ("value_float", "value_floats"):
            one = item.name == "value_float"
            return [np.array(item.f if one else list(item.floats), np.float32)]
    return None


def _empty(shape: list[int], elem_type: int) -> Any:
    import numpy as np
    import onnx

    return np.zeros(shape, onnx.helper.tensor_dtype_to_np_dtype(elem_type))


def _numpy_dtype(array: Any) -> str:
    names = {"float": "f", "int": "i", "uint": "i"}
    kind, bits = array.dtype.name.rstrip("0123456789"), array.dtype.itemsize * 8
    return "bool" if kind == "bool" else f"{names.get(kind, 'f')}{bits}"
