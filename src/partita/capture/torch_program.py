"""An exported PyTorch program as a frozen record: the one reader of what `torch.export` gives.

    inputs    what is given, in order: arguments of the call, parameters, buffers, constants
    nodes     calls of operators, in order; arguments name what they read by `Ref`
    outputs   what is given back, in order: a Ref, or a constant; changed buffers are named here

Capture translates the record into a Graph, emit writes it as source, the profiler and the packages
for one GPU follow it. Passes that rewrite a program (`functional.py`, `regions.py`, `recurrent.py`)
work on PyTorch's own nodes before it is read. Values are described, not held: a `TensorSpec` has
shape, strides, element type, device, and which memory it is in, so that views can be told.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import Node

from partita.capture import lines

KINDS = {
    InputKind.USER_INPUT: "input",
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
NO_STORAGE = -1
# Operators that draw random numbers only with a rate above 0 (the argument that holds it), and, of
# those that have a flag for it, only in training.
RATES = {
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), "p"),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), "dropout"),
    "scaled_dot_product_attention": "dropout_p",
    "native_dropout": "p",
}
FLAGS = ("train", "training")


@dataclass(frozen=True, slots=True)
class Ref:
    """A value among arguments, by the name of the node or input that gives it."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a tensor without its numbers; sizes may be symbols."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    storage: int  # tensors with the same number share memory; NO_STORAGE shares with none


@dataclass(frozen=True, slots=True, eq=False)
class TorchInput:
    """Something given: an argument of the call, or what the module holds.

    `kind` is input, parameter, buffer or constant; another word is what `torch.export` calls it.
    """

    name: str
    kind: str
    target: str  # the name in the module; of an argument, the name that export gave it
    value: Any  # a TensorSpec, or what is no tensor
    data: torch.Tensor | None = None  # of what the module holds
    persistent: bool = False  # is it in the state dict?
    is_fixed: bool = False  # an argument that is no tensor; `value` is the one that was captured


@dataclass(frozen=True, eq=False)
class TorchNode:
    """One call of an operator.

    `value` is a TensorSpec, a number, None, or a tuple or list of these; `stack` has the calls of
    modules around the node, outermost first, as (call, path).
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any
    reads: tuple[str, ...]  # names of inputs and nodes, each once, as they stand in the arguments
    users: tuple[str, ...]  # names of nodes; `output` for who called
    stack: tuple[tuple[str, str], ...] = ()
    stack_trace: str = ""
    marks: Mapping[str, Any] | None = None  # what `torch.fx.traceback.annotate` left on it
    is_body: bool = False  # no call but a branch or a loop's body, held for a node that reads it

    @property
    def is_item(self) -> bool:
        """Does it only take one of several results?"""
        return self.target is operator.getitem

    @property
    def is_operator(self) -> bool:
        """Does it call an operator of PyTorch or of an extension, not control flow?"""
        return isinstance(self.target, torch._ops.OpOverload)

    @cached_property
    def operation(self) -> str:
        """What it calls: `linear` for `aten.linear.default`, `lib.op` for other libraries."""
        schema = getattr(self.target, "_schema", None)
        if schema is None:
            return getattr(self.target, "__name__", str(self.target))
        library, _, name = str(schema.name).partition("::")
        return name if library == "aten" else f"{library}.{name}"

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by their names in the operator's schema, defaults filled in."""
        schema = getattr(self.target, "_schema", None)
        named: dict[str, Any] = {}
        for position, argument in enumerate(schema.arguments if schema else ()):
            default = argument.default_value if argument.has_default_value() else None
            given = self.args[position] if position < len(self.args) else default
            named[argument.name] = self.kwargs.get(argument.name, given)
        return named

    @cached_property
    def is_random(self) -> bool:
        """Does it draw random numbers?"""
        if torch.Tag.nondeterministic_seeded not in getattr(self.target, "tags", ()):
            return False
        rate = RATES.get(self.operation)
        is_off = rate is not None and self.arguments[rate] == 0
        return not is_off and not any(self.arguments.get(flag) is False for flag in FLAGS)

    @property
    def results(self) -> list[Any]:
        """Its values, flat, without those that are None."""
        return [value for value in flat(self.value) if value is not None]

    @property
    def gives_several(self) -> bool:
        """Is its value a tuple or list?"""
        return isinstance(self.value, list | tuple)

    @cached_property
    def scope(self) -> str:
        """The module it belongs to, as the module's own names say it."""
        path = self.stack[-1][1] if self.stack else ""
        path = path.removeprefix("L['self']").removeprefix("_export_root").removeprefix(".")
        return re.sub(r"@\d+", "", path)

    @property
    def line(self) -> lines.SourceLine:
        """The line of the model that it comes from."""
        return lines.of_node(self.stack_trace)


@dataclass(frozen=True, slots=True)
class TorchOutput:
    """Something given back: `output`, or in words what else, with the name of what is changed."""

    kind: str
    value: Any  # a Ref, or a constant
    target: str = ""


@dataclass(frozen=True, eq=False)
class TorchProgram:
    """Everything a program is given, does and gives back."""

    inputs: tuple[TorchInput, ...]
    nodes: tuple[TorchNode, ...]
    outputs: tuple[TorchOutput, ...]
    out_spec: Any  # how the outputs of kind `output` are nested, as a pytree

    @cached_property
    def node(self) -> dict[str, TorchNode]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def values(self) -> dict[str, Any]:
        """The value of every input and node, by name."""
        given = {each.name: each.value for each in self.inputs}
        return given | {node.name: node.value for node in self.nodes}

    def items(self, node: TorchNode) -> Iterator[tuple[int, TorchNode]]:
        """Which of a node's several results are taken, and by what."""
        for name in node.users:
            user = self.node.get(name)
            if user is not None and user.is_item:
                yield user.args[1], user

    def changed(self) -> tuple[str, ...]:
        """The names of buffers and arguments that a call changes, by what is given back."""
        return tuple(out.target for out in self.outputs if out.kind.endswith("mutation"))


def read_torch_program(program: ExportedProgram) -> TorchProgram:
    """The record of an exported program."""
    nodes = list(program.graph.nodes)
    storages: dict[int, int] = {}
    around = lines.calls_under_way()
    given = [node for node in nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    (output,) = (node for node in nodes if node.op == "output")
    return TorchProgram(
        tuple(
            _input(program, node, spec, storages) for node, spec in zip(given, specs, strict=True)
        ),
        tuple(
            _node(node, storages, around)
            for node in nodes
            if node.op in ("call_function", "get_attr")
        ),
        tuple(
            TorchOutput(_words(spec.kind, "USER_OUTPUT"), _named(value), str(spec.target or ""))
            for spec, value in zip(
                program.graph_signature.output_specs, output.args[0], strict=True
            )
        ),
        program.call_spec.out_spec,
    )


def _input(program: ExportedProgram, node: Node, spec: Any, storages: dict[int, int]) -> TorchInput:
    kind = KINDS.get(spec.kind) or _words(spec.kind)
    if isinstance(spec.arg, ConstantArgument):
        return TorchInput(node.name, kind, str(node.target), spec.arg.value, is_fixed=True)
    value = _described(node.meta.get("val"), storages)
    if kind == "input":
        return TorchInput(node.name, kind, str(node.target), value)
    data = program.state_dict.get(spec.target)
    if data is None:
        data = program.constants.get(spec.target)
    kept = kind == "parameter" or (kind == "buffer" and spec.persistent is not False)
    return TorchInput(node.name, kind, str(spec.target or ""), value, data, kept)


def _node(node: Node, storages: dict[int, int], around: frozenset[tuple[str, int]]) -> TorchNode:
    stack = node.meta.get("nn_module_stack") or {}
    return TorchNode(
        node.name,
        node.target,
        replaced(node.args, Node, _named),
        {key: replaced(value, Node, _named) for key, value in node.kwargs.items()},
        _described(node.meta.get("val"), storages),
        tuple(source.name for source in node.all_input_nodes),
        tuple(user.name for user in node.users),
        tuple((str(key), str(entry[0])) for key, entry in stack.items()),
        lines.without(node.meta.get("stack_trace") or "", around),
        node.meta.get("custom"),
        node.op == "get_attr",
    )


def _words(kind: Any, plain: str = "") -> str:
    """`BUFFER_MUTATION` as `buffer mutation`, and the plain kind as `output`."""
    return "output" if kind.name == plain else str(kind.name).lower().replace("_", " ")


def _named(value: Any) -> Any:
    return Ref(value.name) if isinstance(value, Node) else value


def _described(value: Any, storages: dict[int, int]) -> Any:
    """A value without its numbers; storages are counted as they come."""
    if isinstance(value, torch.Tensor):
        stride: tuple[Any, ...] = ()
        storage = NO_STORAGE
        if value.layout is torch.strided:  # others have neither
            stride = tuple(value.stride())
            storage = storages.setdefault(int(value.untyped_storage()._cdata), len(storages))
        return TensorSpec(tuple(value.shape), stride, value.dtype, value.device, storage)
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return kind(_described(each, storages) for each in value)
    return value


def replaced(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Nested arguments with everything of a kind changed: Refs by the values they stand for, say.

    Lists stay the kind of list they are: PyTorch's can be hashed, which plain ones cannot.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(replaced(each, kind, change) for each in value)
    if isinstance(value, dict):
        return {key: replaced(each, kind, change) for key, each in value.items()}
    if isinstance(value, slice):
        ends = (replaced(each, kind, change) for each in (value.start, value.stop, value.step))
        return slice(*ends)
    return value


def refs_in(value: Any) -> Iterator[Ref]:
    """The Refs in nested arguments, as often as they stand there."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from refs_in(each)
    elif isinstance(value, dict):
        yield from refs_in(list(value.values()))


def flat(value: Any) -> list[Any]:
    """The leaves of nested lists and tuples."""
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in flat(each)]
    return [value]
