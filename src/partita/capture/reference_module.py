"""A graph as a PyTorch module that computes it: the reference module of every model of the zoo.

Parameters carry the graph's names, nested in modules as the names are dotted; layers whose weights
are theirs alone are PyTorch's own (`nn.Conv2d`, `nn.Linear`...), everything else is functional.
A reference module is a model like a user's: it can be captured, cut, emitted, run and timed. Its
weights are random, drawn from the seed, scaled so that activations neither vanish nor overflow.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from partita.capture.eager import RULES, constant_ids
from partita.errors import GraphError
from partita.graph.build import EPSILON
from partita.graph.packed import PackedPart, read_source
from partita.graph.record import Call, Graph, Op, Tensor
from partita.graph.shapes import per_space

T = torch.Tensor

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i8": torch.int8, "bool": torch.bool,
}  # fmt: skip


def reference_module(graph: Graph, seed: int = 0, device: str = "cpu") -> nn.Module:
    """The module that computes a forward graph; its arguments are `graph.inputs`, in order."""
    unknown = sorted({op.kind for op in graph.ops} - RULES.keys() - {"constant"})
    if unknown:
        raise GraphError(
            f"{graph.name!r} has ops of the kind {', '.join(unknown)}",
            fix="a reference module can be made of forward graphs of the known kinds",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ReferenceModule(graph, torch.device(device))


def example_inputs(graph: Graph, seed: int = 0, device: str = "cpu") -> tuple[T, ...]:
    """Random inputs of the right shapes; ids stay within the table or classes they choose from."""
    generator = torch.Generator().manual_seed(seed)
    limits = id_limits(graph)
    return tuple(
        _example(tensor, limits.get(tensor.name, 2), generator).to(device)
        for tensor in graph.inputs
    )


class ReferenceModule(nn.Module):
    """Runs the ops of a graph one after the other."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        super().__init__()
        self.graph = graph
        self._limits = id_limits(graph)
        self._last = _last_uses(graph)
        readers = _readers(graph)
        for op in graph.ops:
            layer = _layer(graph, op, readers, device)
            if layer is not None:
                _attach(self, op.name, layer)
        held = {name for name, _ in self.named_parameters()}
        for tensor in map(_stored, graph.parameters):
            if tensor.name not in held:
                held.add(tensor.name)
                path, _, name = tensor.name.rpartition(".")
                _holder(self, path).register_parameter(name, _parameter(tensor, device))

    def forward(self, *inputs: T) -> Any:
        """The graph's outputs; one alone is not in a tuple."""
        values = dict(zip((t.name for t in self.graph.inputs), inputs, strict=True))
        for index, op in enumerate(self.graph.ops):
            written = self._run(op, values)
            values.update(zip(op.outputs, written, strict=True))
            for name in self._last.get(index, ()):
                values.pop(name, None)
        outputs = tuple(values[name] for name in self.graph.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _run(self, op: Op, values: dict[str, T]) -> tuple[T, ...]:
        if op.kind == "constant":
            return (self.constant(op.outputs[0]),)
        layer = _find(self, op.name)
        if isinstance(layer, _LAYERS):
            return (layer(values[op.inputs[0]]),)
        inputs = [values[name] if name in values else self._held(name) for name in op.inputs]
        call = self.graph.call(op)
        if op.attr("dropless"):  # room for all tokens, where the graph has it for the expected ones
            experts, _, width = call.outputs[0]
            tokens = math.prod(call.inputs[1][:-1])
            call = replace(call, outputs=((experts, tokens, width),))
        result = RULES[op.kind](self, call, *inputs)
        return result if isinstance(result, tuple) else (result,)

    def constant(self, name: str, shape: Sequence[int] | None = None) -> T:
        """Zeros; where ids are meant (positions, say), those of `constant_ids`.

        `shape` is another one than the graph's, where it is the graph for another batch.
        """
        tensor = self.graph.tensor(name)
        shape = tensor.shape if shape is None else shape
        dtype, device = DTYPES[tensor.dtype], next(self.parameters()).device
        if dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        op = self.graph.producer(name)
        assert op is not None
        ids = constant_ids(op, shape, self._limits.get(name, 2), device)
        return ids if ids.dtype == dtype else ids.to(dtype)

    def _held(self, name: str) -> T:
        """A parameter of the graph: one of the module, or a part of one."""
        tensor = self.graph.tensor(name)
        path, _, leaf = _stored(tensor).name.rpartition(".")
        value = cast(T, getattr(self.get_submodule(path), leaf))
        return _part(value, read_source(tensor.source), tensor.shape) if tensor.source else value

    def pack(self, parts: Mapping[str, T], into: dict[str, T]) -> None:
        """Put parameters of the graph that are parts of stored tensors into copies of these."""
        copied: set[str] = set()
        for tensor in self.graph.parameters:
            if not tensor.source or tensor.name not in parts:
                continue
            name = _stored(tensor).name
            if name not in copied:
                into[name] = into[name].clone()
                copied.add(name)
            packed = read_source(tensor.source)
            place = _part(into[name], packed, None)
            place.copy_(parts[tensor.name].reshape(place.shape))

    def parameter_of(self, tensor: Tensor) -> nn.Parameter:
        """A parameter of the graph as one of its own, with the numbers of the module's."""
        value = self._held(tensor.name)
        return value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach())


def _stored(tensor: Tensor) -> Tensor:
    """The tensor of the checkpoint that a parameter is, or is a part of."""
    if not tensor.source:
        return tensor
    packed = read_source(tensor.source)
    return replace(tensor, name=packed.name, shape=packed.shape, source="")


def _part(value: T, packed: PackedPart, shape: Sequence[int] | None) -> T:
    """What a parameter is of a stored tensor; without a shape a view of it."""
    value = value.view(packed.view) if packed.view else value
    value = value[(slice(None),) * packed.axis + (packed.index,)]
    value = value.mT if packed.transposed else value
    return value if shape is None else value.reshape(shape)


_LAYERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.LayerNorm,
)  # fmt: skip


def _readers(graph: Graph) -> dict[str, int]:
    readers: dict[str, int] = {}
    for op in graph.ops:
        for name in op.inputs:
            readers[name] = readers.get(name, 0) + 1
    return readers


def _last_uses(graph: Graph) -> dict[int, list[str]]:
    last = {name: index for index, op in enumerate(graph.ops) for name in op.inputs}
    kept = set(graph.outputs)
    last_used: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in kept:
            last_used.setdefault(index, []).append(name)
    return last_used


def _layer(graph: Graph, op: Op, readers: dict[str, int], device: torch.device) -> nn.Module | None:
    """PyTorch's own layer for an op, if its weights are its alone and named as the layer's."""
    own = [name for name in op.inputs if graph.tensor(name).role == "parameter"]
    names = [name.removeprefix(f"{op.name}.") for name in own]
    alone = all(readers[name] == 1 and not graph.tensor(name).source for name in own)
    if not own or names != ["weight", "bias"][: len(own)] or not alone or op.kind not in _MAKERS:
        return None
    weight = graph.tensor(own[0])
    made = _MAKERS[op.kind](graph.call(op), weight.shape, len(own) == 2)
    if made is None:
        return None
    made.to_empty(device=device).to(DTYPES[weight.dtype])
    cast(Any, made).reset_parameters()
    return made


def _make_linear(call: Call, weight: Sequence[int], bias: bool) -> nn.Module | None:
    return nn.Linear(weight[1], weight[0], bias=bias, device="meta")


def _make_conv(call: Call, weight: Sequence[int], bias: bool) -> nn.Module | None:
    rank, groups = len(weight) - 2, call.whole("groups", 1)
    if call.flag("transposed"):
        return None
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    settings = {
        "stride": per_space(call, "stride", rank, 1),
        "padding": per_space(call, "padding", rank, 0, least=0),
        "dilation": per_space(call, "dilation", rank, 1),
    }
    made = kind(
        weight[1] * groups, weight[0], tuple(weight[2:]), groups=groups, bias=bias, device="meta",
        **settings,
    )  # fmt: skip
    return cast(nn.Module, made)


def _make_batch_norm(call: Call, weight: Sequence[int], bias: bool) -> nn.Module | None:
    rank = len(call.inputs[0]) - 2
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank]
    return kind(weight[0], device="meta") if bias else None


def _make_layer_norm(call: Call, weight: Sequence[int], bias: bool) -> nn.Module | None:
    return nn.LayerNorm(tuple(weight), call.number("eps", EPSILON), bias=bias, device="meta")


_MAKERS: dict[str, Callable[[Call, Sequence[int], bool], nn.Module | None]] = {
    "linear": _make_linear,
    "conv": _make_conv,
    "batch_norm": _make_batch_norm,
    "layer_norm": _make_layer_norm,
}


def _holder(root: nn.Module, path: str) -> nn.Module:
    """The module at a path; plain ones are put where there is none."""
    module = root
    for name in path.split(".") if path else ():
        child = module._modules.get(name)
        if child is None:
            child = nn.Module()
            module.add_module(name, child)
        module = child
    return module


def _attach(root: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    _holder(root, parent).add_module(name, layer)


def _find(root: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = root
    for name in path.split("."):
        module = module._modules.get(name) if module is not None else None
    return module


def _parameter(tensor: Tensor, device: torch.device) -> nn.Parameter:
    """Ones for scales, zeros for shifts, else normal numbers over the square root of the inputs."""
    dtype, shape = DTYPES[tensor.dtype], tensor.shape
    if len(shape) < 2:
        fill = torch.ones if tensor.name.endswith("weight") else torch.zeros
        return nn.Parameter(fill(shape, dtype=dtype, device=device))
    inputs = math.prod(shape[1:]) if len(shape) > 2 else shape[-1]
    values = torch.empty(shape, dtype=dtype, device=device)
    return nn.Parameter(nn.init.normal_(values, std=inputs**-0.5))


_ONLY_MOVED = frozenset({"reshape", "transpose", "slice", "expand"})


def id_limits(graph: Graph) -> dict[str, int]:
    """For tensors that hold ids: how many things there are to choose from."""
    limits: dict[str, int] = {}
    for op in reversed(graph.ops):
        if op.kind == "embedding":
            limits[op.inputs[0]] = graph.tensor(op.inputs[1]).shape[0]
        elif op.kind == "cross_entropy":
            limits[op.inputs[1]] = graph.tensor(op.inputs[0]).shape[-1]
        elif op.kind in _ONLY_MOVED and op.outputs[0] in limits:
            limits.setdefault(op.inputs[0], limits[op.outputs[0]])
    return limits


def _example(tensor: Tensor, limit: int, generator: torch.Generator) -> T:
    dtype = DTYPES[tensor.dtype]
    if dtype.is_floating_point:
        return torch.randn(tensor.shape, generator=generator).to(dtype)
    return torch.randint(limit, tensor.shape, generator=generator).to(dtype)
