"""A captured model as a straight line of steps over values, read off its exported program.

A value is something given (an input, a parameter, a buffer, a constant) or computed; a step is one
operator. The items of a result are values of their own, small constants stand in the arguments, and
steps nobody needs are left out, except those that change buffers or draw random numbers.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from partita.emit.plain import without_examples
from partita.errors import CaptureError

MOST_WRITTEN_OUT = 64  # elements of a constant that is written into the source
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async")
_SAME = ("alias", "detach_")  # gives its argument; only new constants are detached in place
LEARNING = ("batch_norm", "instance_norm")  # they change buffers though their schema hides it


@dataclass(eq=False)
class Value:
    """A tensor with an identity of its own.

    `names` are the names a parameter or buffer has in the model, several where it is tied.
    """

    label: str
    meta: Any
    kind: str = "computed"  # or input, parameter, buffer, constant
    names: tuple[str, ...] = ()
    persistent: bool = True
    data: torch.Tensor | None = None
    scope: str = ""

    @property
    def is_state(self) -> bool:
        """True for what the model holds."""
        return self.kind in ("parameter", "buffer", "constant")


@dataclass(eq=False)
class Step:
    """One operator: arguments hold values, `outs` are what it gives (None where nobody asks)."""

    node: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Value | None, ...]
    is_list: bool = False
    changes: bool = False  # a buffer
    stack: tuple[tuple[str, str], ...] = ()  # (call, path) of modules around it, outermost first
    index: int = 0
    again: bool = False  # marked to run again in the backward (`recompute.py`)

    @property
    def is_random(self) -> bool:
        """Does it draw random numbers?"""
        return torch.Tag.nondeterministic_seeded in self.target.tags

    @property
    def operator(self) -> str:
        """The operator's name without overload: `conv2d`."""
        return str(self.target.overloadpacket.__name__)

    def reads(self) -> Iterator[Value]:
        """Every value in the arguments, as often as it stands there."""
        yield from values_in((self.args, self.kwargs))


@dataclass
class Steps:
    """The whole model: what it is given, what it does, what it returns (flat)."""

    inputs: list[Value | ConstantArgument] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


def values_in(found: Any) -> Iterator[Value]:
    """The values in nested arguments."""
    if isinstance(found, Value):
        yield found
    elif isinstance(found, list | tuple):
        for item in found:
            yield from values_in(item)
    elif isinstance(found, dict):
        yield from values_in(list(found.values()))


def read_steps(
    program: ExportedProgram, module: nn.Module, scopes: Mapping[str, str] | None = None
) -> Steps:
    """The steps of an exported program; the module says which names its tensors have.

    `scopes` puts nodes into modules that were not called but might have been: those that only hold
    others, as in the twin of a graph.
    """
    return _Reader(program, module, scopes or {}).read()


class _Reader:
    def __init__(
        self, program: ExportedProgram, module: nn.Module, scopes: Mapping[str, str]
    ) -> None:
        self.program = program
        self.scopes = scopes
        self.holders = _holders(module) if scopes else set()
        self.names = _names_of(module)
        self.known: dict[fx.Node, Any] = {}
        self.found = Steps()

    def read(self) -> Steps:
        signature = self.program.graph_signature
        nodes = list(self.program.graph.nodes)
        places = [node for node in nodes if node.op == "placeholder"]
        for node, spec in zip(places, signature.input_specs, strict=True):
            self._given(node, spec)
        for node in nodes:
            if node.op == "call_function":
                self._call(node)
        (output,) = (node for node in nodes if node.op == "output")
        for given, item in zip(signature.output_specs, output.args[0], strict=True):
            if given.kind is not OutputKind.USER_OUTPUT:
                raise CaptureError(
                    f"the program gives back a {given.kind.name.lower().replace('_', ' ')}",
                    fix="emit what partita.capture gives, before run_decompositions",
                )
            self.found.outputs.append(self._known(item))
        self.found.steps = _needed(self.found.steps, self.found.outputs)
        for index, step in enumerate(self.found.steps):
            step.index = index
        return self.found

    def _given(self, node: fx.Node, spec: Any) -> None:
        if spec.kind is not InputKind.USER_INPUT:
            self.known[node] = self._state(node, spec)
            return
        constant = isinstance(spec.arg, ConstantArgument)
        value = Value(node.name, node.meta.get("val"), "input")
        self.found.inputs.append(spec.arg if constant else value)
        self.found.input_names.append(str(node.target))
        self.known[node] = spec.arg.value if constant else value

    def _state(self, node: fx.Node, spec: Any) -> Value:
        kinds = {
            InputKind.PARAMETER: "parameter",
            InputKind.BUFFER: "buffer",
            InputKind.CONSTANT_TENSOR: "constant",
        }
        if spec.kind not in kinds:
            raise CaptureError(
                f"the model holds {spec.target!r}, a {spec.kind.name.lower().replace('_', ' ')}",
                fix="keep parameters, buffers and plain tensors in it",
            )
        kind = kinds[spec.kind]
        others = self.names.get(spec.target, ())
        return Value(
            node.name, node.meta.get("val"), kind,
            names=(spec.target, *(name for name in others if name != spec.target)),
            persistent=kind == "parameter" or (kind == "buffer" and spec.persistent is not False),
            data=self.program.constants.get(spec.target, self.program.state_dict.get(spec.target)),
        )  # fmt: skip

    def _known(self, item: Any) -> Any:
        if isinstance(item, fx.Node):
            return self.known[item]
        if isinstance(item, list | tuple):
            return type(item)(self._known(part) for part in item)
        if isinstance(item, dict):
            return {key: self._known(part) for key, part in item.items()}
        return item

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        if target is operator.getitem:
            source, index = node.args
            value = self.known[source][index]  # type: ignore[index]
            value.label = node.name
            self.known[node] = value
        elif not isinstance(target, torch._ops.OpOverload):
            raise CaptureError(
                f"node {node.name!r} calls {getattr(target, '__name__', target)}, "
                "which has no Python source of its own",
                fix="write this part of the model with plain operators",
            )
        elif target.overloadpacket.__name__ in _SAME:
            self.known[node] = self._known(node.args[0])
        elif target.overloadpacket.__name__ not in _CHECKS:
            self._step(node, target)

    def _step(self, node: fx.Node, target: Any) -> None:
        args = tuple(self._known(arg) for arg in node.args)
        kwargs = {key: self._known(arg) for key, arg in node.kwargs.items()}
        meta = node.meta.get("val")
        target, args, kwargs = without_examples(target, args, kwargs, meta)
        stack = (*self._around(node), *_stack(node))
        scope = stack[-1][1] if stack else ""
        is_list = isinstance(meta, list | tuple)
        results = list(meta) if isinstance(meta, list | tuple) else [meta]
        outs = [Value(node.name, item, scope=scope) for item in results]
        self.known[node] = outs if is_list else outs[0]
        if target.overloadpacket.__name__ == "lift_fresh_copy" and _is_small(args[0]):
            args = (args[0].data,)
        step = Step(node.name, target, args, kwargs, tuple(outs), is_list, stack=stack)
        step.changes = step.operator in LEARNING or any(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in target._schema.arguments
        )
        self.found.steps.append(step)

    def _around(self, node: fx.Node) -> tuple[tuple[str, str], ...]:
        """The holders a node is said to be in, outermost first."""
        parts = self.scopes.get(node.name, "").split(".")
        paths = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        return tuple((path, path) for path in paths if path in self.holders)


def _names_of(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of the parameter or buffer that has a name."""
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    by_id: dict[int, list[str]] = {}
    for name, tensor in named:
        by_id.setdefault(id(tensor), []).append(name)
    return {name: tuple(by_id[id(tensor)]) for name, tensor in named}


def _holders(module: nn.Module) -> set[str]:
    """The modules that only hold others, by name rather than by number."""
    return {
        path
        for path, child in module.named_modules()
        if path and type(child) is nn.Module and not all(map(str.isdigit, child._modules))
    }


def _is_small(value: Any) -> bool:
    data = value.data if isinstance(value, Value) else None
    if data is None or type(data) is not torch.Tensor or data.device.type == "meta":
        return False
    return data.numel() <= MOST_WRITTEN_OUT and not data.is_complex()


def _stack(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """The calls of modules a node was traced in, without the model itself."""
    found = node.meta.get("nn_module_stack") or {}
    return tuple((key, path) for key, (path, _) in found.items() if path)


def _needed(steps: list[Step], outputs: list[Any]) -> list[Step]:
    needed = set(values_in(outputs))
    kept = []
    for step in reversed(steps):
        if step.changes or step.is_random or any(out in needed for out in step.outs):
            needed.update(step.reads())
            kept.append(replace(step, outs=tuple(o if o in needed else None for o in step.outs)))
    return kept[::-1]
