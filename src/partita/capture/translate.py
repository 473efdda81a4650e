"""A torch program as a Graph: every node becomes an op of the kind that `kinds.py` says.

Parameters and buffers keep the names they have in the module, inputs those of the arguments. What
has no kind is carried as an op of its own name: it is never split and costs the bytes it moves. The
same happens where a kind would not give the shapes that the node has.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as DataDependent

from partita.capture import lines
from partita.capture.torch_program import (
    NO_STORAGE,
    Ref,
    TensorSpec,
    TorchInput,
    TorchNode,
    TorchProgram,
    flat,
)
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


class TorchUnfit(Exception):  # noqa: N818
    """A rule does not cover this use of an operation: it is carried as it is."""


def translate(program: TorchProgram, name: str) -> Graph:
    """The graph of a torch program."""
    return translate_with_places(program, name)[0]


def translate_with_places(program: TorchProgram, name: str) -> tuple[Graph, dict[str, Any]]:
    """The graph of a torch program, and the tensor (or tensors) that each input and node gives."""
    work = _Translation(program)
    for given in program.inputs:
        work.declare(given)
    for node in program.nodes:
        if not node.is_body:
            work.compute(node)
    returned = [work.named(value) for output in program.outputs for value in flat(output.value)]
    tensors = tuple(work.tensors.values())
    outputs = tuple(text for text in returned if text)
    return Graph(name, tensors, tuple(work.ops), outputs, is_captured=True), work.place


class _Translation:
    """Tensors and ops found so far, and which tensor each node gives."""

    def __init__(self, program: TorchProgram) -> None:
        self.program = program
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.held: dict[int, str] = {}  # identity of a parameter or buffer -> its tensor
        self.place: dict[str, Any] = {}  # node -> name of its tensor, or a tuple of them
        self.constant: set[str] = set()  # tensors that are the same in every call

    def declare(self, given: TorchInput) -> None:
        """A parameter, a buffer, a constant or an input."""
        if not isinstance(given.value, TensorSpec) or _is_empty(given.value):
            return
        role = "state"
        held = given.data if given.persistent else None
        if held is not None:
            if id(held) in self.held:  # a tied weight: one tensor under its first name
                self.place[given.name] = self.held[id(held)]
                return
            if given.kind == "parameter":
                role = "parameter" if held.requires_grad else "state"
        elif given.kind == "input":
            role = "input"
        name = given.name if given.kind == "input" else given.target or given.name
        free = name if name not in self.tensors else given.name
        self.place[given.name] = self.add(given, free, given.value, role)
        if held is not None:
            self.held[id(held)] = self.place[given.name]

    def add(
        self, owner: TorchInput | TorchNode, name: str, value: TensorSpec, role: str = "activation"
    ) -> str:
        """Declare a tensor under a free name."""
        free = self.free(name)
        self.tensors[free] = Tensor(
            free, _shape(owner, value.shape), _dtype(owner, value.dtype), role
        )
        return free

    def free(self, name: str) -> str:
        """The name, or with a number after it where a tensor has it."""
        candidate, number = name, 0
        while candidate in self.tensors:
            candidate, number = f"{name}:{number}", number + 1
        return candidate

    def named(self, value: Any) -> str | None:
        """The tensor of an argument; None for what is no tensor."""
        tensor = self.place.get(value.name) if isinstance(value, Ref) else None
        return tensor if isinstance(tensor, str) else None

    def compute(self, node: TorchNode) -> None:
        """The op or ops of one node."""
        from partita.capture.kinds import RULES, rule_by_tag

        if node.is_item:
            source, position = node.args
            several = self.place.get(source.name)
            if isinstance(several, tuple):
                self.place[node.name] = several[position]
            return
        if all(map(_is_empty, node.results)):
            return  # there is nothing to plan; what reads it does without
        rule = RULES.get(node.operation) or rule_by_tag(node)
        site = TorchSite(self, node)
        if rule is not None:
            try:
                rule(site)
            except (TorchUnfit, GraphError, TypeError, KeyError, IndexError, DataDependent):
                site = TorchSite(self, node)
        if site.given is None:
            # It is not what the kind of that name is: a recurrent layer with a projection, say.
            kind = f"own_{node.operation}" if node.operation in SHAPES else node.operation
            site.give(kind, site.all_tensors(), known=False)
        site.commit()


@dataclass
class _Pending:
    """An op that is not part of the graph yet, with its new tensors."""

    op: Op
    tensors: list[tuple[str, Any]]


class TorchSite:
    """A node that a rule is at work on: its arguments, and the ops it becomes."""

    def __init__(self, work: _Translation, node: TorchNode) -> None:
        self.node = node
        self.values = node.results
        self.given: tuple[str, ...] | None = None
        self._work = work
        self._pending: list[_Pending] = []
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the operation's schema."""
        return self.node.arguments[name]

    def has(self, name: str) -> bool:
        """Does the operation have an argument of that name?"""
        return name in self.node.arguments

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first output."""
        return _shape(self.node, self.values[0].shape)

    @property
    def operation(self) -> str:
        """The name of what is called."""
        return self.node.operation

    def tensor(self, value: Any) -> str:
        """The name of an argument that must be a tensor."""
        tensor = self._work.named(value)
        if tensor is None:
            raise TorchUnfit
        return tensor

    def tensors(self, *names: str) -> list[str]:
        """The arguments of these names that are tensors, in this order."""
        generator = (self._work.named(self.node.arguments.get(name)) for name in names)
        return [name for name in generator if name is not None]

    def all_tensors(self) -> list[str]:
        """Every tensor that the node reads."""
        generator = (self._work.named(Ref(name)) for name in self.node.reads)
        return [name for name in generator if name is not None]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the graph."""
        own = self._shapes.get(name)
        return self._work.tensors[name].shape if own is None else own

    def is_constant(self, name: str) -> bool:
        """Is a tensor made of constants alone?"""
        return name in self._work.constant

    def uses(self, position: int) -> bool:
        """Is an output read by anyone?"""
        items = self._work.program.items(self.node)
        return any(number == position and item.users for number, item in items)

    def spec_of(self, name: str) -> Any:
        """What is known of a value that another node or input gives."""
        return self._work.program.values[name]

    def part(self, part: str, kind: str, inputs: list[str], like: Any = None, **attrs: Attr) -> str:
        """An op in front of the main one, with one output; `like` gives the dtype."""
        name = f"{self.node.name}.{part}"
        shape = output_shapes(self._call(kind, inputs, attrs))[0] if kind in SHAPES else like.shape
        value = _made(tuple(shape), (self.values[0] if like is None else like).dtype)
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
            raise TorchUnfit
        single = len(self.values) == 1 and not self.node.gives_several
        names = tuple(
            self._work.free(self.node.name if single or count == 1 else f"{self.node.name}:{i}")
            for i in range(count)
        )
        pairs = [(name, value) for name, value in zip(names, self.values, strict=False)]
        self._pending.append(_Pending(self._op(self.node.name, kind, inputs, names, attrs), pairs))
        rest = [
            i
            for i in range(count, len(self.values))
            if self.uses(i) and not _is_empty(self.values[i])
        ]
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
                full = value if isinstance(value, TensorSpec) else _scalar(value)
                self._work.add(self.node, name, full)
            op = pending.op
            self._work.ops.append(op)
            if op.kind == "constant" or (
                op.kind in ("slice", "reshape", "expand") and self.is_constant(op.inputs[0])
            ):
                self._work.constant.update(op.outputs)
        names = tuple(name or None for name in self.given)
        self._work.place[self.node.name] = names if self.node.gives_several else names[0]

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
        return Op(name, kind, tuple(inputs), outputs, tuple(sorted(attrs.items())), self.node.scope)


def _is_empty(value: Any) -> bool:
    """A tensor without elements: the graph has none of these."""
    return isinstance(value, TensorSpec) and 0 in [x for x in value.shape if type(x) is int]


def _of(value: Any) -> tuple[Any, ...]:
    return value.shape if isinstance(value, TensorSpec) else ()


def _made(shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    """A tensor that no node gives, in memory of its own."""
    return TensorSpec(shape, (), dtype, torch.device("meta"), NO_STORAGE)


def _scalar(value: Any) -> TensorSpec:
    """A number that is read off a tensor, as the tensor of one element that it is."""
    whole = isinstance(value, int | torch.SymInt)
    return _made((), torch.int64 if whole else torch.float64)


def _shape(owner: TorchInput | TorchNode, shape: Any) -> tuple[int, ...]:
    if all(type(size) is int and size > 0 for size in shape):
        return tuple(shape)
    line = owner.line if isinstance(owner, TorchNode) else lines.SourceLine()
    if all(type(size) is int for size in shape):
        wrong, fix = f"gives an empty tensor {list(shape)}", "leave it out of the model"
    else:
        wrong = f"gives a tensor whose size depends on the data, {[str(size) for size in shape]}"
        fix = "mask instead of choosing elements, so that sizes are known"
    raise CaptureError(f"`{line.code}` {wrong}", fix=fix, file=line.place, field=owner.name)


def _dtype(owner: TorchInput | TorchNode, dtype: torch.dtype) -> str:
    name = DTYPES.get(dtype)
    if name is None:
        line = owner.line if isinstance(owner, TorchNode) else lines.SourceLine()
        raise CaptureError(
            f"`{line.code}` has the element type {dtype}" if line.file else
            f"has the element type {dtype}",
            fix=f"use one of {', '.join(map(str, DTYPES))}", file=line.place, field=owner.name,
        )  # fmt: skip
    return name
