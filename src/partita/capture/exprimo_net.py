"""Networks as Exprimo and Paleo write them (JSON) -> layers with shapes.

    {"name": ..., "layers": {"conv1": {"type": "Convolution", "parents": ["data"], ...}, ...}}

Tensors are [batch, height, width, channels] there. A `Block` is a sub-graph: its layers are called
`block/layer`, those without parents read the block's parents, and the block's own name means its
`endpoint`. Layers come in Exprimo's order, the reverse of the order in which a depth-first walk
leaves them. A list under `device` shares a layer's output channels out over those devices; here a
layer is whole, and its device is for the search to say.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.errors import ModelError
from partita.files import decode_json, read_bytes
from partita.graph.record import CycleError, dependencies_first
from partita.suggest import suggest

BATCH = 128  # what Exprimo puts in place of the batch that the file says
MAX_SIZE = 2**31
TYPES = (
    "Input", "Convolution", "Deconvolution", "Pooling", "AvgPool", "UpSampling2D", "Dropout",
    "Concatenate", "Reshape", "Elementwise", "Softmax", "Sigmoid", "InnerProduct", "Generic",
    "Block",
)  # fmt: skip

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NetLayer:
    """One layer: its type, who it reads, the shape it gives, and its own numbers."""

    name: str
    type: str
    parents: tuple[str, ...]
    inputs: tuple[Shape, ...]
    shape: Shape  # of its output, channels last
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))  # before, after
    axis: int = 0
    extras: tuple[str, ...] = ()  # norm, relu, ...

    @property
    def num_weights(self) -> int:
        """Weights with the bias."""
        if self.type in ("Convolution", "Deconvolution"):
            return (math.prod(self.kernel) * self.inputs[0][3] + 1) * self.shape[3]
        if self.type == "InnerProduct":
            return (math.prod(self.inputs[0][1:]) + 1) * self.shape[1]
        return 0


@dataclass(frozen=True, slots=True)
class ExprimoNetwork:
    """A network in Exprimo's order of layers."""

    name: str
    layers: tuple[NetLayer, ...]
    children: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # in the file's order


def is_network(value: Mapping[str, Any]) -> bool:
    """Does this JSON object look like a network of Exprimo or Paleo?"""
    layers = value.get("layers")
    return "format" not in value and isinstance(layers, dict)


def read_network(path: str | Path, batch: int | None = None) -> ExprimoNetwork:
    """The network in a file, at Exprimo's batch of 128 unless another is given."""
    return network_from_json(decode_json(read_bytes(path), str(path)), batch, str(path))


def network_from_json(
    value: Mapping[str, Any], batch: int | None = None, file: str = ""
) -> ExprimoNetwork:
    """The network in a decoded file."""
    return _ExprimoReader(file, BATCH if batch is None else batch).read(value)


def with_devices(value: Mapping[str, Any], devices: Mapping[str, int]) -> dict[str, Any]:
    """The network's JSON with a `device` in every layer that is named, inside blocks too."""
    layers = {}
    for name, layer in value["layers"].items():
        if layer.get("type") == "Block":
            inside = {
                part: {**content, "device": devices.get(f"{name}/{part}", content.get("device"))}
                for part, content in layer["layers"].items()
            }
            layers[name] = {**layer, "layers": inside}
        else:
            layers[name] = {**layer, "device": devices.get(name, layer.get("device"))}
    return {**value, "layers": layers}


class _ExprimoReader:
    def __init__(self, file: str, batch: int) -> None:
        self.file, self.batch = file, batch
        self.raw: dict[str, Mapping[str, Any]] = {}
        self.endpoints: dict[str, str] = {}

    def fail(self, wrong: str, fix: str, field_name: str) -> ModelError:
        return ModelError(wrong, fix=fix, field=field_name, file=self.file)

    def read(self, value: Mapping[str, Any]) -> ExprimoNetwork:
        layers = value.get("layers")
        if not isinstance(layers, dict) or not layers:
            raise self.fail("there are no layers", "give an object of layers by name", "layers")
        for name, layer in layers.items():
            self._flatten(name, layer)
        parents = {name: self._parents(name, layer) for name, layer in self.raw.items()}
        children: dict[str, list[str]] = {name: [] for name in self.raw}
        for name, before in parents.items():
            for parent in before:
                children[parent].append(name)
        made: dict[str, NetLayer] = {}
        for name in self._order(parents, children):
            shapes = tuple(made[parent].shape for parent in parents[name])
            made[name] = self._layer(name, self.raw[name], parents[name], shapes)
        text = value.get("name")
        return ExprimoNetwork(
            text if isinstance(text, str) and text else Path(self.file).stem or "network",
            tuple(made.values()),
            {name: tuple(after) for name, after in children.items()},
        )

    def _flatten(self, name: str, layer: Any) -> None:
        """Layers by their full names, blocks opened; parents by full names as well."""
        where = f"layers.{name}"
        if not isinstance(layer, dict):
            raise self.fail("is no object", "give its type and parents", where)
        before = _texts(layer.get("parents", []))
        if before is None:
            raise self.fail("is no list of names", "list names of layers", f"{where}.parents")
        if layer.get("type") != "Block":
            self.raw[name] = {**layer, "parents": before}
            return
        inner = layer.get("layers")
        if not isinstance(inner, dict) or not inner:
            raise self.fail("the block has no layers", "give it some", f"{where}.layers")
        for part, content in inner.items():
            if not isinstance(content, dict):
                raise self.fail("is no object", "give its type and parents", f"{where}.layers")
            own = _texts(content.get("parents", []))
            if own is None:
                raise self.fail("is no list of names", "list names of layers", f"{where}.{part}")
            parents = [f"{name}/{parent}" for parent in own] or before
            self.raw[f"{name}/{part}"] = {**content, "parents": parents}
        endpoint = layer.get("endpoint")
        if endpoint is not None:
            if not isinstance(endpoint, str) or endpoint not in inner:
                raise self.fail(
                    f"found {endpoint!r}", suggest(str(endpoint), inner), f"{where}.endpoint"
                )
            self.endpoints[name] = f"{name}/{endpoint}"

    def _parents(self, name: str, layer: Mapping[str, Any]) -> tuple[str, ...]:
        parents = [self.endpoints.get(parent, parent) for parent in layer["parents"]]
        for parent in parents:
            if parent not in self.raw:
                known = suggest(parent, self.raw)
                raise self.fail(f"no layer is called {parent!r}", known, f"layers.{name}.parents")
        return tuple(dict.fromkeys(parents))

    def _order(
        self, parents: Mapping[str, Sequence[str]], children: Mapping[str, Sequence[str]]
    ) -> list[str]:
        roots = [name for name in parents if not parents[name]]
        try:
            order = dependencies_first(roots, children.__getitem__)
        except CycleError as cycle:
            raise self.fail(
                f"depends on itself through {cycle.path[-2]!r}",
                "a network has no cycles",
                f"layers.{cycle.path[-1]}",
            ) from None
        reached = set(order)
        unreached = [name for name in parents if name not in reached]
        if unreached:
            raise self.fail(
                "no input leads to it", "a network has no cycles", f"layers.{unreached[0]}"
            )
        return order[::-1]

    # One layer.

    def _layer(
        self, name: str, raw: Mapping[str, Any], parents: tuple[str, ...], inputs: tuple[Shape, ...]
    ) -> NetLayer:
        kind = raw.get("type")
        where = f"layers.{name}"
        if not isinstance(kind, str):
            raise self.fail("has no type", f"use one of {', '.join(TYPES)}", f"{where}.type")
        if not inputs and kind != "Input":
            raise self.fail("has no parents", "only an Input has none", f"{where}.parents")
        read: Callable[..., dict[str, Any]] = _READERS.get(kind, _ExprimoReader._passing)
        fields = read(self, name, raw, inputs)
        layer = NetLayer(name, kind, parents, inputs, **fields)
        if min(layer.shape) < 1 or max(layer.shape) > MAX_SIZE:
            raise self.fail(
                f"its output would be {list(layer.shape)}",
                "change its sizes, strides or padding",
                where,
            )
        return layer

    def _input(self, name: str, raw: Mapping[str, Any], inputs: tuple[Shape, ...]) -> Any:
        shape = self._sizes(raw, "tensor", name)
        return {"shape": (self.batch, *shape[1:])}

    def _passing(self, name: str, raw: Mapping[str, Any], inputs: tuple[Shape, ...]) -> Any:
        return {"shape": inputs[0]}

    def _elementwise(self, name: str, raw: Mapping[str, Any], inputs: tuple[Shape, ...]) -> Any:
        for shape in inputs[1:]:
            if shape != inputs[0]:
                raise self.fail(
                    f"its inputs are {list(inputs[0])} and {list(shape)}",
                    "they must be equal",
                    f"layers.{name}",
                )
        return {"shape": inputs[0]}

    def _window(self, name: str, raw: Mapping[str, Any], inputs: tuple[Shape, ...]) -> Any:
        kernel = self._pair(raw, "ksize", name)
        return self._windowed(name, raw, inputs, kernel, self._image(name, inputs)[3])

    def _conv(self, name: str, raw: Mapping[str, Any], inputs: tuple[Shape, ...]) -> Any:
        height, width, given, channels = self._filter(raw, name)
        have = self._image(name, inputs)[3]
        if given not in (-1, have):
            raise self.fail(
                f"expects {given} channels, and its input has {have}",
                "correct the third number, or write -1",
                f"layers.{name}.filter",
            )
        windowed = self._windowed(name, raw, inputs, (height, width), channels)
        return {**windowed, "extras": _extras(raw)}

    def _deconv(self, name: str, raw: Mapping[str, Any], inputs: tuple[Shape, ...]) -> Any:
        """A transposed convolution: its filter lists the output channels third."""
        height, width, channels, _ = self._filter(raw, name)
        shape = raw.get("output_shape")
        stride = self._pair(raw, "strides", name, (1, 1))
        image = self._image(name, inputs)
        if shape is None:
            shape = (0, image[1] * stride[0], image[2] * stride[1], channels)
        sizes = _numbers(shape)
        if sizes is None or len(sizes) != 4:
            raise self.fail(f"found {shape!r}", "give four sizes", f"layers.{name}.output_shape")
        pads = tuple(
            _same(out, kernel, step)[1] if raw.get("padding", "SAME") == "SAME" else (0, 0)
            for out, kernel, step in zip(sizes[1:3], (height, width), stride, strict=True)
        )
        return {
            "shape": (self.batch, *sizes[1:]),
            "kernel": (height, width),
            "stride": stride,
            "padding": pads,
            "extras": _extras(raw),
        }

    def _windowed(
        self, name: str, raw: Mapping[str, Any], inputs: tuple[Shape, ...],
        kernel: tuple[int, int], channels: int,
    ) -> Any:  # fmt: skip
        image = self._image(name, inputs)
        stride = self._pair(raw, "strides", name, (1, 1))
        padding = raw.get("padding", "VALID")
        rule = _PADDINGS.get(padding) if isinstance(padding, str) else None
        sizes = _numbers(padding)
        if rule is None and sizes is not None and len(sizes) == 2 and min(sizes) >= 0:
            around = iter(sizes)

            def rule(size: int, window: int, step: int) -> tuple[int, tuple[int, int]]:
                pad = next(around)
                return (size + 2 * pad - window) // step + 1, (pad, pad)

        if rule is None:
            raise self.fail(
                f"found {padding!r}", "use SAME, VALID or two numbers", f"layers.{name}.padding"
            )
        windowed = [rule(image[1 + i], kernel[i], stride[i]) for i in range(2)]
        return {
            "shape": (image[0], windowed[0][0], windowed[1][0], channels),
            "kernel": kernel,
            "stride": stride,
            "padding": (windowed[0][1], windowed[1][1]),
        }

    def _dense(self, name: str, raw: Mapping[str, Any], inputs: tuple[Shape, ...]) -> Any:
        width = self._whole(raw.get("num_outputs"), f"layers.{name}.num_outputs")
        return {"shape": (inputs[0][0], width), "extras": _extras(raw)}

    def _softmax(self, name: str, raw: Mapping[str, Any], inputs: tuple[Shape, ...]) -> Any:
        return {"shape": (inputs[0][0], math.prod(inputs[0][1:]))}

    def _concat(self, name: str, raw: Mapping[str, Any], inputs: tuple[Shape, ...]) -> Any:
        axis = raw.get("dim", 3)
        if type(axis) is not int or not 0 < axis < len(inputs[0]):
            raise self.fail(f"found {axis!r}", "name a dimension", f"layers.{name}.dim")
        for shape in inputs[1:]:
            if len(shape) != len(inputs[0]) or any(
                a != b for i, (a, b) in enumerate(zip(shape, inputs[0], strict=True)) if i != axis
            ):
                raise self.fail(
                    f"cannot join {list(inputs[0])} and {list(shape)} along dimension {axis}",
                    "all other sizes must be equal",
                    f"layers.{name}",
                )
        joined = sum(shape[axis] for shape in inputs)
        return {"shape": (*inputs[0][:axis], joined, *inputs[0][axis + 1 :]), "axis": axis}

    def _reshape(self, name: str, raw: Mapping[str, Any], inputs: tuple[Shape, ...]) -> Any:
        key = "output_shape" if "output_shape" in raw else "tensor"
        shape = (inputs[0][0], *self._sizes(raw, key, name)[1:])
        if math.prod(shape) != math.prod(inputs[0]):
            raise self.fail(
                f"cannot turn {list(inputs[0])} into {list(shape)}",
                "both must hold as many numbers",
                f"layers.{name}.{key}",
            )
        return {"shape": shape}

    def _upsample(self, name: str, raw: Mapping[str, Any], inputs: tuple[Shape, ...]) -> Any:
        image = self._image(name, inputs)
        rows, columns = self._pair(raw, "ksize" if "ksize" in raw else "size", name, (2, 2))
        return {"shape": (image[0], image[1] * rows, image[2] * columns, image[3])}

    # Fields.

    def _image(self, name: str, inputs: tuple[Shape, ...]) -> Shape:
        if len(inputs) != 1 or len(inputs[0]) != 4:
            raise self.fail(
                f"reads {[list(shape) for shape in inputs]}",
                "one tensor of [batch, height, width, channels] is needed",
                f"layers.{name}",
            )
        return inputs[0]

    def _whole(self, value: Any, where: str, least: int = 1) -> int:
        if type(value) is not int or not least <= value <= MAX_SIZE:
            needed = f"a whole number of at least {least}"
            raise self.fail(
                "is missing" if value is None else f"found {value!r}", f"give {needed}", where
            )
        return value

    def _sizes(self, raw: Mapping[str, Any], key: str, name: str) -> Shape:
        values = _numbers(raw.get(key))
        if not values or min(values) < 1:
            raise self.fail(
                f"found {raw.get(key)!r}", "give a list of sizes of at least 1",
                f"layers.{name}.{key}",
            )  # fmt: skip
        return values

    def _filter(self, raw: Mapping[str, Any], name: str) -> tuple[int, int, int, int]:
        values = _numbers(raw.get("filter"))
        if values is None or len(values) != 4 or min(values[0], values[1], values[3]) < 1:
            raise self.fail(
                f"found {raw.get('filter')!r}",
                "give [height, width, channels in or -1, channels out]",
                f"layers.{name}.filter",
            )
        return values[0], values[1], values[2], values[3]

    def _pair(
        self, raw: Mapping[str, Any], key: str, name: str, default: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Height and width out of [1, height, width, 1], or of two numbers."""
        value = raw.get(key)
        if value is None and default is not None:
            return default
        values = _numbers(value) or ()
        middle = values[1:3] if len(values) == 4 else values
        if len(middle) != 2 or min(middle) < 1:
            raise self.fail(
                f"found {value!r}", "give [1, height, width, 1]", f"layers.{name}.{key}"
            )
        return middle[0], middle[1]


def _texts(value: Any) -> list[str] | None:
    good = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return value if good else None


def _numbers(value: Any) -> Shape | None:
    good = isinstance(value, list | tuple) and all(type(item) is int for item in value)
    return tuple(value) if good else None


def _same(size: int, window: int, step: int) -> tuple[int, tuple[int, int]]:
    """TensorFlow's SAME: ceil(size / step) windows, what is missing added half before."""
    count = -(-size // step)
    missing = (count - 1) * step + window - size
    return count, (missing // 2, missing - missing // 2)


def _valid(size: int, window: int, step: int) -> tuple[int, tuple[int, int]]:
    return -(-(size - window + 1) // step), (0, 0)


_PADDINGS: dict[str, Callable[[int, int, int], tuple[int, tuple[int, int]]]] = {
    "SAME": _same,
    "VALID": _valid,
}


def _extras(raw: Mapping[str, Any]) -> tuple[str, ...]:
    norm = ("norm",) if raw.get("normalizer_fn") else ()
    activation = raw.get("activation_fn")
    return (*norm, activation) if isinstance(activation, str) and activation else norm


_READERS: dict[str, Callable[..., Any]] = {
    "Input": _ExprimoReader._input,
    "Convolution": _ExprimoReader._conv,
    "Deconvolution": _ExprimoReader._deconv,
    "Pooling": _ExprimoReader._window,
    "AvgPool": _ExprimoReader._window,
    "UpSampling2D": _ExprimoReader._upsample,
    "Concatenate": _ExprimoReader._concat,
    "Reshape": _ExprimoReader._reshape,
    "Elementwise": _ExprimoReader._elementwise,
    "Softmax": _ExprimoReader._softmax,
    "InnerProduct": _ExprimoReader._dense,
}
