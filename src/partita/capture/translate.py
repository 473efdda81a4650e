"""An exported program as a Graph: every node becomes an op of the kind that `kinds.py` says.

Parameters and buffers keep the names they have in the module, inputs those of the arguments. What
has no kind is carried as an op of its own name: it is never split and costs the bytes it moves. The
same happens where a kind would not give the shapes that the node has.
"""

import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from partita.capture import lines
from partita.errors import CaptureError, GraphError
from partita.graph.record import Attr, Call, Graph, Op, Tensor
from partita.graph.shapes import SHAPES, output_shapes

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "bool", torch.float8_e4m3fn: "f8", torch.float8_e5m2: "f8",
    torch.uint16: "i16", torch.uint32: "i32", torch.uint64: "i64",
    torch.complex64: "f64",  # as many bytes
}  # fmt: skip


class Unfit(Exception):  # noqa: N818
    """A rule does not cover this use of an operation: it is carried as it is."""


def translate(program: ExportedProgram, name: str) -> Graph:
    """The graph of an exported program."""
    work = _Translation(program)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            work.declare(node)
        elif node.op == "call_function":
            work.compute(node)
    outputs = []
    for node in program.graph.nodes:
        if node.op == "output":
            outputs = [work.named(value) for value in _flat(node.args[0])]
    tensors = tuple(work.tensors.values())
    return Graph(name, tensors, tuple(work.ops), tuple(text for text in outputs if text))


def operation(node: Node) -> str:
    """What a node calls: `linear` for `aten.linear.default`, `lib.op` for other libraries."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    library, _, name = str(schema.name).partition("::")
    return name if library == "aten" else f"{library}.{name}"


class _Translation:
    """Tensors and ops found so far, and which tensor each node gives."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.held: dict[int, str] = {}  # identity of a parameter or buffer -> its tensor
        self.place: dict[Node, Any] = {}  # node -> name of its tensor, or a tuple of them
        self.constant: set[str] = set()  # tensors that are the same in every call

    def declare(self, node: Node) -> None:
        """A parameter, a buffer, a constant or an input."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        spec = self.specs[node.name]
        role = "state"
        held = self.program.state_dict.get(str(spec.target))
        if held is not None:
            if id(held) in self.held:  # a tied weight: one tensor under its first name
                self.place[node] = self.held[id(held)]
                return
            if spec.kind is InputKind.PARAMETER:
                role = "parameter" if held.requires_grad else "state"
        elif spec.kind is InputKind.USER_INPUT:
            role = "input"
        name = str(spec.target) if spec.target else node.name
        free = name if name not in self.tensors else node.name
        self.place[node] = self.add(node, free, value, role)
        if held is not None:
            self.held[id(held)] = self.place[node]

    def add(self, node: Node, name: str, value: torch.Tensor, role: str = "activation") -> str:
        """Declare a tensor under a free name."""
        free = self.free(name)
        self.tensors[free] = Tensor(
            free, _shape(node, value.shape), _dtype(node, value.dtype), role
        )
        return free

    def free(self, name: str) -> str:
        """The name, or with a number after it where a tensor has it."""
        found, number = name, 0
        while found in self.tensors:
            found, number = f"{name}:{number}", number + 1
        return found

    def named(self, value: Any) -> str | None:
        """The tensor of an argument; None for what is no tensor."""
        found = self.place.get(value) if isinstance(value, Node) else None
        return found if isinstance(found, str) else None

    def compute(self, node: Node) -> None:
        """The op or ops of one node."""
        from partita.capture.kinds import RULES, rule_by_tag

        if node.target is operator.getitem:
            several = self.place.get(node.args[0])  # type: ignore[arg-type]
            if isinstance(several, tuple):
                self.place[node] = several[node.args[1]]  # type: ignore[index]
            return
        values = [value for value in _flat(node.meta.get("val")) if value is not None]
        if not values:
            return
        rule = RULES.get(operation(node)) or rule_by_tag(node)
        site = Site(self, node, values)
        if rule is not None:
            try:
                rule(site)
            except (Unfit, GraphError, TypeError, KeyError, IndexError):
                site = Site(self, node, values)
        if site.given is None:
            site.give(operation(node), site.all_tensors(), known=False)
        site.commit()


@dataclass
class _Pending:
    """An op that is not part of the graph yet, with its new tensors."""

    op: Op
    tensors: list[tuple[str, Any]]


class Site:
    """A node that a rule is at work on: its arguments, and the ops it becomes."""

    def __init__(self, work: _Translation, node: Node, values: list[Any]) -> None:
        self.node = node
        self.values = values
        self.given: tuple[str, ...] | None = None
        self._work = work
        self._pending: list[_Pending] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        schema = getattr(node.target, "_schema", None)
        self._arguments: dict[str, Any] = {}
        for position, argument in enumerate(schema.arguments if schema else ()):
            default = argument.default_value if argument.has_default_value() else None
            found = node.args[position] if position < len(node.args) else default
            self._arguments[argument.name] = node.kwargs.get(argument.name, found)

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the operation's schema."""
        return self._arguments[name]

    def has(self, name: str) -> bool:
        """Does the operation have an argument of that name?"""
        return name in self._arguments

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first output."""
        return _shape(self.node, self.values[0].shape)

    @property
    def operation(self) -> str:
        """The name of what is called."""
        return operation(self.node)

    def tensor(self, value: Any) -> str:
        """The name of an argument that must be a tensor."""
        found = self._work.named(value)
        if found is None:
            raise Unfit
        return found

    def tensors(self, *names: str) -> list[str]:
        """The arguments of these names that are tensors, in this order."""
        found = (self._work.named(self._arguments.get(name)) for name in names)
        return [name for name in found if name is not None]

    def all_tensors(self) -> list[str]:
        """Every tensor that the node reads."""
        found = (self._work.named(value) for value in self.node.all_input_nodes)
        return [name for name in found if name is not None]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the graph."""
        own = self._shapes.get(name)
        return self._work.tensors[name].shape if own is None else own

    def is_constant(self, name: str) -> bool:
        """Is a tensor made of constants alone?"""
        return name in self._work.constant

    def uses(self, position: int) -> bool:
        """Is an output read by anyone?"""
        return any(
            user.target is operator.getitem and user.args[1] == position and user.users
            for user in self.node.users
        )

    def part(self, part: str, kind: str, inputs: list[str], like: Any = None, **attrs: Attr) -> str:
        """An op in front of the main one, with one output; `like` gives the dtype."""
        name = f"{self.node.name}.{part}"
        shape = output_shapes(self._call(kind, inputs, attrs))[0] if kind in SHAPES else like.shape
        value = torch.empty(
            shape, dtype=(self.values[0] if like is None else like).dtype, device="meta"
        )
        given = self._work.free(name)
        self._shapes[given] = tuple(shape)
        op = self._op(name, kind, inputs, (given,), attrs)
        self._pending.append(_Pending(op, [(given, value)]))
        return given

    def give(
        self, kind: str, inputs: list[str], known: bool = True, outputs: int = 0, **attrs: Attr
    ) -> None:
        """The main op. `outputs` counts those it gives, 0 for all; `.more` gives what is left."""
        count = outputs or len(self.values)
        wanted = tuple(_shape(self.node, _of(value)) for value in self.values[:count])
        if known and output_shapes(self._call(kind, inputs, attrs)) != wanted:
            raise Unfit
        single = len(self.values) == 1 and not isinstance(self.node.meta["val"], list | tuple)
        names = tuple(
            self._work.free(self.node.name if single or count == 1 else f"{self.node.name}:{i}")
            for i in range(count)
        )
        pairs = [(name, value) for name, value in zip(names, self.values, strict=False)]
        self._pending.append(_Pending(self._op(self.node.name, kind, inputs, names, attrs), pairs))
        rest = [i for i in range(count, len(self.values)) if self.uses(i)]
        more = {i: self._work.free(f"{self.node.name}.more:{i}") for i in rest}
        if more:
            op = self._op(
                f"{self.node.name}.more", f"{kind}_more", [names[0]], tuple(more.values()), {}
            )
            self._pending.append(_Pending(op, [(more[i], self.values[i]) for i in rest]))
        self.given = (*names, *(more.get(i, "") for i in range(count, len(self.values))))

    def give_parts(self, names: list[str]) -> None:
        """The outputs are those of parts: there is no main op."""
        self.given = tuple(names)

    def commit(self) -> None:
        """Make what was found part of the graph."""
        assert self.given is not None
        for pending in self._pending:
            for name, value in pending.tensors:
                full = value if isinstance(value, torch.Tensor) else _scalar(value)
                self._work.add(self.node, name, full)
            op = pending.op
            self._work.ops.append(op)
            if op.kind == "constant" or (
                op.kind in ("slice", "reshape", "expand") and self.is_constant(op.inputs[0])
            ):
                self._work.constant.update(op.outputs)
        found = tuple(name or None for name in self.given)
        several = isinstance(self.node.meta["val"], list | tuple)
        self._work.place[self.node] = found if several else found[0]

    def _call(self, kind: str, inputs: list[str], attrs: dict[str, Attr]) -> Call:
        shapes = tuple(self.shape_of(name) for name in inputs)
        return Call(kind, tuple(sorted(attrs.items())), shapes, ())

    def _op(
        self,
        name: str,
        kind: str,
        inputs: list[str],
        outputs: tuple[str, ...],
        attrs: dict[str, Attr],
    ) -> Op:
        return Op(
            name, kind, tuple(inputs), outputs, tuple(sorted(attrs.items())), _scope(self.node)
        )


def _of(value: Any) -> tuple[Any, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _scalar(value: Any) -> torch.Tensor:
    """A number that is read off a tensor, as the tensor of one element that it is."""
    whole = isinstance(value, int | torch.SymInt)
    return torch.empty((), dtype=torch.int64 if whole else torch.float64, device="meta")


def _scope(node: Node) -> str:
    """The module that a node belongs to, as the module's own names say it."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    path = path.removeprefix("L['self']").removeprefix("_export_root").removeprefix(".")
    return re.sub(r"@\d+", "", path)


def _shape(node: Node, shape: Any) -> tuple[int, ...]:
    if all(type(size) is int and size > 0 for size in shape):
        return tuple(shape)
    line = lines.of_node(node.meta.get("stack_trace"))
    if all(type(size) is int for size in shape):
        found, fix = f"gives an empty tensor {list(shape)}", "leave it out of the model"
    else:
        found = f"gives a tensor whose size depends on the data, {[str(size) for size in shape]}"
        fix = "mask instead of choosing elements, so that sizes are known"
    raise CaptureError(f"`{line.code}` {found}", fix=fix, file=line.place, field=node.name)


def _dtype(node: Node, dtype: torch.dtype) -> str:
    found = DTYPES.get(dtype)
    if found is None:
        raise CaptureError(
            f"has the element type {dtype}", fix=f"use one of {', '.join(map(str, DTYPES))}",
            field=node.name,
        )  # fmt: skip
    return found


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [item for part in value for item in _flat(part)]
    return [value]
