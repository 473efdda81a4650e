"""Graph: a model as operators in topological order over named tensors.

Parameters are tensors like any other (role `parameter`), so a tied weight is simply one tensor
with two consumers. A training graph holds the backward as ops of their own: phase `dgrad` makes
gradients of activations, `wgrad` gradients of parameters, `update` the optimizer step; a backward
op names the forward op it belongs to, whose shapes and attributes its costs are computed from.

Ops are kept in a topological order as close to the order given as can be: depth first, what is
needed before. Problems, which are numbered, take the smallest number first instead
(`problems/dag.py`).

Linear layers may multiply in a narrower type than the model is in, as libraries for fp8 training do
it: the operands of a linear layer (of experts too) are cast right before each of its three
products, sums and results stay in the model's type. Attention, routers, norms and everything else
stay as they are.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from partita.errors import GraphError
from partita.graph.packed import read_source
from partita.showing import plot_of, repr_html, table_of

BYTES: dict[str, int] = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "f8": 1,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "bool": 1,
}
FLOATS = ("f64", "f32", "f16", "bf16", "f8")
Item = TypeVar("Item", bound=Hashable)
Shape = tuple[int, ...]
Attr = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
N = TypeVar("N", "Tensor", "Op")
ROLES = ("input", "parameter", "state", "activation", "gradient")
PHASES = ("forward", "dgrad", "wgrad", "update")
MAX_ELEMENTS = 2**62
MAX_NUMBER = 2**63 - 1  # of a whole-number attribute: what other readers of the files can hold
PRODUCT_DTYPE = "math"  # of an op: the type that its products are in
NARROWED = frozenset({"linear", "expert_linear", "grouped_mm"})


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element."""
    try:
        return BYTES[dtype]
    except KeyError:
        raise GraphError(
            f"unknown dtype {dtype!r}", fix=f"use one of {', '.join(BYTES)}", field="dtype"
        ) from None


class CycleError(Exception):
    """Items that need each other; `path` begins and ends with the same one."""

    def __init__(self, path: list[Hashable]) -> None:
        self.path = path
        super().__init__(" -> ".join(map(str, path)))


def dependencies_first(
    items: Iterable[Item], needs: Callable[[Item], Iterable[Item]]
) -> list[Item]:
    """The items and whatever they need, each once, after all that it needs."""
    done: dict[Item, None] = {}
    for root in items:
        stack: list[tuple[Item, Iterator[Item]]] = []
        waiting: dict[Item, None] = {}
        if root not in done:
            stack.append((root, iter(needs(root))))
            waiting[root] = None
        while stack:
            item, pending = stack[-1]
            needed = next((each for each in pending if each not in done), None)
            if needed is None:
                done[item] = None
                stack.pop()
                del waiting[item]
            elif needed in waiting:
                path = list(waiting)
                raise CycleError([*path[path.index(needed) :], needed])
            else:
                stack.append((needed, iter(needs(needed))))
                waiting[needed] = None
    return list(done)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named array. Role says where it comes from: given (input, parameter, state) or computed.

    `source` is of a parameter that is a part of a stored tensor (`packed.py`); empty if it is not.
    """

    name: str
    shape: Shape
    dtype: str = "f32"
    role: str = "activation"
    source: str = ""
    # How many numbers it holds (a scalar holds one), and bytes; asked for all the time.
    num_elements: int = field(init=False, repr=False, compare=False)
    size_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise GraphError("a tensor has no name", fix="name every tensor", field="tensors")
        where = f"tensor {self.name!r}"
        _check_text(self.name, where)
        for size in self.shape:
            if type(size) is not int or size < 1:
                raise GraphError(
                    f"shape {list(self.shape)} has the size {size!r}",
                    fix="sizes are whole numbers of at least 1",
                    field=where,
                )
        object.__setattr__(self, "num_elements", math.prod(self.shape))
        if self.num_elements > MAX_ELEMENTS:
            raise GraphError(f"shape {list(self.shape)} is beyond any memory", field=where)
        if self.role not in ROLES:
            raise GraphError(
                f"unknown role {self.role!r}", fix=f"use one of {', '.join(ROLES)}", field=where
            )
        try:
            size = self.num_elements * dtype_bytes(self.dtype)
        except GraphError as error:
            raise GraphError(error.found, fix=error.fix, field=f"{where} dtype") from None
        object.__setattr__(self, "size_bytes", size)
        if self.source:
            self._check_source(where)

    def _check_source(self, where: str) -> None:
        try:
            packed = read_source(self.source)
        except GraphError as error:
            raise GraphError(error.found, fix=error.fix, field=where) from None
        if self.role != "parameter" or packed.num_elements != self.num_elements:
            raise GraphError(
                f"source {self.source[:80]!r} has {packed.num_elements} elements",
                fix=f"a parameter of {self.num_elements} needs as many",
                field=where,
            )

    @property
    def is_given(self) -> bool:
        """True where no op computes it."""
        return self.role in ("input", "parameter", "state")


@dataclass(frozen=True, slots=True)
class Op:
    """One operator. `attrs` are sorted pairs; `forward` names the op a backward op belongs to."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    scope: str = ""
    phase: str = "forward"
    forward: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise GraphError("an op has no name", fix="name every op", field="ops")
        where = f"op {self.name!r}"
        if not self.kind:
            raise GraphError("has no kind", fix="say what it computes", field=where)
        if not self.outputs:
            raise GraphError("gives no tensor", fix="name its outputs or remove it", field=where)
        if self.phase not in PHASES:
            raise GraphError(
                f"unknown phase {self.phase!r}", fix=f"use one of {', '.join(PHASES)}", field=where
            )
        if self.forward and self.phase not in ("dgrad", "wgrad"):
            raise GraphError(
                f"of phase {self.phase} belongs to the forward op {self.forward!r}",
                fix="only dgrad and wgrad ops do",
                field=where,
            )
        for text in (self.name, self.kind, self.scope):
            _check_text(text, where)
        _check_attrs(self.attrs, where)

    def attr(self, name: str, default: Attr | None = None) -> Attr | None:
        """The attribute, or `default`."""
        for key, value in self.attrs:
            if key == name:
                return value
        return default


@dataclass(frozen=True, slots=True)
class Call:
    """What an op's tables need: its kind, attributes and shapes. Equal calls cost the same.

    For a backward op this is the call of its forward op with the phase, the inputs it
    differentiates (`wrt`), and what it reads: `g0` the gradient of output 0, `i1` input 1 and
    `o0` output 0 of the forward op. `alone` is a weight gradient whose op has no data gradient.
    """

    kind: str
    attrs: tuple[tuple[str, Attr], ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    phase: str = "forward"
    wrt: tuple[int, ...] = ()
    reads: tuple[str, ...] = ()
    alone: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shapes = (self.inputs, self.outputs)
        backward = (self.phase, self.wrt, self.reads, self.alone)
        object.__setattr__(self, "_hash", hash((self.kind, self.attrs, *shapes, *backward)))

    def __hash__(self) -> int:
        return self._hash  # a key of many tables: worked out once

    def attr(self, name: str, default: Attr | None = None) -> Attr | None:
        """The attribute, or `default`."""
        for key, value in self.attrs:
            if key == name:
                return value
        return default

    def number(self, name: str, default: float = 0) -> float:
        """A numeric attribute."""
        value = self.attr(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise GraphError(f"attribute {name} is {value!r}", fix="a number is needed")
        return value

    def whole(self, name: str, default: int = 0) -> int:
        """A whole-number attribute."""
        value = self.attr(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise GraphError(f"attribute {name} is {value!r}", fix="a whole number is needed")
        return value

    def ints(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """A list attribute of whole numbers; a single number counts as a list of one."""
        value = self.attr(name, default)
        values = value if isinstance(value, tuple) else (value,)
        if not all(type(item) is int for item in values):
            raise GraphError(f"attribute {name} is {value!r}", fix="whole numbers are needed")
        return tuple(item for item in values if isinstance(item, int))

    def flag(self, name: str, default: bool = False) -> bool:
        """A true/false attribute; 0 and 1 count as such."""
        value = self.attr(name, default)
        if value not in (False, True):
            raise GraphError(f"attribute {name} is {value!r}", fix="true or false is needed")
        return bool(value)

    def text(self, name: str, default: str = "") -> str:
        """A text attribute."""
        value = self.attr(name, default)
        if not isinstance(value, str):
            raise GraphError(f"attribute {name} is {value!r}", fix="text is needed")
        return value


@functools.lru_cache(maxsize=65536)
def _once(call: Call, attrs: str) -> Call:
    """One record for all equal calls, which makes them quick to compare.

    Attributes count as they are written: True is not 1.
    """
    return call


@dataclass(frozen=True, slots=True)
class Graph:
    """Ops in topological order over tensors; `outputs` names what the model returns."""

    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...] = ()
    # Is it of a captured model, whose code has numbers that the ops do not say (factors, say)?
    # Where a graph comes from is no part of what it is: such graphs may be equal to others.
    is_captured: bool = field(default=False, compare=False)
    _tensor: dict[str, Tensor] = field(init=False, repr=False, compare=False)
    _op: dict[str, Op] = field(init=False, repr=False, compare=False)
    _producer: dict[str, str] = field(init=False, repr=False, compare=False)
    _consumers: dict[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)
    _calls: dict[str, Call] = field(init=False, repr=False, compare=False)
    is_training: bool = field(init=False, repr=False, compare=False)  # is there a backward pass?
    memo: dict[tuple[str, str], Any] = field(init=False, repr=False, compare=False)

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    def __post_init__(self) -> None:
        put = object.__setattr__
        _check_text(self.name, "name")
        put(self, "_tensor", _by_name(self.tensors, "tensor"))
        put(self, "_op", _by_name(self.ops, "op"))
        put(self, "_calls", {})
        put(self, "is_training", any(op.phase != "forward" for op in self.ops))
        put(self, "memo", {})  # what tables have worked out: (table, op) -> value
        producer: dict[str, str] = {}
        consumers: dict[str, list[str]] = {}
        for op in self.ops:
            self._check_op(op, producer)
            for name in op.inputs:
                users = consumers.setdefault(name, [])
                if not users or users[-1] != op.name:
                    users.append(op.name)
        for tensor in self.tensors:
            if not tensor.is_given and tensor.name not in producer:
                raise GraphError(
                    "no op computes it",
                    fix="make it an input, parameter or state, or remove it",
                    field=f"tensor {tensor.name!r}",
                )
        for name in self.outputs:
            if name not in self._tensor:
                raise GraphError(
                    f"no tensor is called {name!r}", fix="name an existing one", field="outputs"
                )
        put(self, "_producer", producer)
        put(self, "_consumers", {name: tuple(users) for name, users in consumers.items()})

    def _check_op(self, op: Op, producer: dict[str, str]) -> None:
        where = f"op {op.name!r}"
        for name in op.inputs:
            tensor = self._tensor.get(name)
            if tensor is None:
                raise GraphError(
                    f"reads the tensor {name!r}, which does not exist",
                    fix="declare it or correct the name",
                    field=where,
                )
            if not tensor.is_given and name not in producer:
                raise GraphError(
                    f"reads {name!r} before it is computed",
                    fix="list ops in topological order; a graph has no cycles",
                    field=where,
                )
        for name in op.outputs:
            tensor = self._tensor.get(name)
            if tensor is None:
                raise GraphError(
                    f"writes the tensor {name!r}, which does not exist",
                    fix="declare it or correct the name",
                    field=where,
                )
            if tensor.is_given or name in producer:
                by = f"op {producer[name]!r}" if name in producer else f"the {tensor.role}s"
                raise GraphError(
                    f"writes {name!r}, which {by} gives already",
                    fix="a tensor has one source",
                    field=where,
                )
            producer[name] = op.name
        if op.forward and op.forward not in self._op:
            raise GraphError(
                f"belongs to the forward op {op.forward!r}, which does not exist",
                fix="keep forward and backward in one graph",
                field=where,
            )
        if op.forward and self._op[op.forward].phase != "forward":
            raise GraphError(
                f"belongs to {op.forward!r}, which is no forward op",
                fix="name the op whose gradients it computes",
                field=where,
            )

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name."""
        return _find(self._tensor, name, "tensor")

    def op(self, name: str) -> Op:
        """The op of that name."""
        return _find(self._op, name, "op")

    def producer(self, tensor: str) -> Op | None:
        """The op that computes a tensor; None for inputs, parameters and states."""
        name = self._producer.get(tensor)
        return None if name is None else self._op[name]

    def consumers(self, tensor: str) -> tuple[Op, ...]:
        """The ops that read a tensor, in order, each once."""
        return tuple(self._op[name] for name in self._consumers.get(tensor, ()))

    def predecessors(self, op: Op) -> tuple[Op, ...]:
        """The ops whose outputs an op reads, each once, in order of its inputs."""
        predecessors = dict.fromkeys(self._producer[t] for t in op.inputs if t in self._producer)
        return tuple(self._op[name] for name in predecessors)

    def edges(self) -> Iterator[tuple[Op, Op, Tensor]]:
        """Every (producer, consumer, tensor), in order of the consumers."""
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                if name in self._producer:
                    yield self._op[self._producer[name]], op, self._tensor[name]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the model is fed."""
        return tuple(tensor for tensor in self.tensors if tensor.role == "input")

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """What is learned; a tied weight stands once."""
        return tuple(tensor for tensor in self.tensors if tensor.role == "parameter")

    @property
    def num_parameters(self) -> int:
        """How many numbers are learned."""
        return sum(tensor.num_elements for tensor in self.parameters)

    def call(self, op: Op) -> Call:
        """What the tables need to know of an op; worked out once."""
        call = self._calls.get(op.name)
        if call is None:
            made = self._make_call(op)
            call = self._calls[op.name] = _once(made, repr(made.attrs))
        return call

    def _make_call(self, op: Op) -> Call:
        if not op.forward:
            return Call(
                op.kind,
                op.attrs,
                tuple(self._tensor[name].shape for name in op.inputs),
                tuple(self._tensor[name].shape for name in op.outputs),
                op.phase,
            )
        origin = self._op[op.forward]
        grads = _positions(op, "grads", len(origin.outputs))
        reads = [f"g{i}" for i in grads]
        if op.attr("reads") is not None:  # other tensors in place of the forward's
            reads.extend(_told(op, len(op.inputs) - len(grads), origin))
        for name in op.inputs[len(reads) :]:
            if name in origin.inputs:
                reads.append(f"i{origin.inputs.index(name)}")
            elif name in origin.outputs:
                reads.append(f"o{origin.outputs.index(name)}")
            else:
                raise GraphError(
                    f"reads {name!r}, which its forward op {origin.name!r} neither reads nor gives",
                    field=f"op {op.name!r}",
                )
        return Call(
            origin.kind,
            origin.attrs,
            tuple(self._tensor[name].shape for name in origin.inputs),
            tuple(self._tensor[name].shape for name in origin.outputs),
            op.phase,
            _positions(op, "wrt", len(origin.inputs)),
            tuple(reads),
            op.phase == "wgrad" and op.forward not in self._with_data_gradient(),
        )

    def _with_data_gradient(self) -> frozenset[str]:
        """The forward ops that have a data gradient."""
        key = ("data gradients", "")
        if key not in self.memo:
            self.memo[key] = frozenset(op.forward for op in self.ops if op.phase == "dgrad")
        known: frozenset[str] = self.memo[key]
        return known

    def dtype(self, op: Op) -> str:
        """The element type an op computes in: that of its widest floating tensor.

        A weight gradient that is added up in a wider type is not computed in it.
        """
        made = op.outputs
        if op.forward and op.phase == "wgrad":
            origin = self._op[op.forward]
            made = tuple(origin.inputs[i] for i in self.call(op).wrt)
        floats = [
            self._tensor[name].dtype
            for name in (*made, *op.inputs)
            if self._tensor[name].dtype in ("f64", "f32", "f16", "bf16", "f8")
        ]
        return max(floats, key=dtype_bytes) if floats else self._tensor[op.outputs[0]].dtype

    def fingerprint(self) -> str:
        """16 hex digits that change whenever the graph does."""
        content = (self.name, self.outputs, self.tensors, self.ops)
        text = json.dumps(content, default=_plain, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.ops)} ops, {len(self.tensors)} tensors, "
            f"{self.num_parameters:,} parameters"
        )


def topological(ops: Iterable[Op], given: Iterable[str]) -> tuple[Op, ...]:
    """The ops in topological order, as close to the order given as can be; a cycle is named."""
    by_name = _by_name(tuple(ops), "op")  # refuses a name that stands twice
    known = set(given)
    source: dict[str, str] = {}
    for op in by_name.values():
        for name in op.outputs:
            source.setdefault(name, op.name)

    def needs(name: str) -> Iterator[str]:
        inputs = by_name[name].inputs
        return (source[each] for each in inputs if each in source and each not in known)

    try:
        return tuple(by_name[name] for name in dependencies_first(by_name, needs))
    except CycleError as cycle:
        raise GraphError(
            "has a cycle: " + " -> ".join(_shorten([str(name) for name in cycle.path])),
            fix="remove one of these dependencies",
            field="ops",
        ) from None


def _shorten(names: list[str]) -> list[str]:
    return names if len(names) <= 8 else [*names[:4], "...", *names[-3:]]


def _positions(op: Op, attr: str, limit: int) -> tuple[int, ...]:
    """A backward op's list of positions in its forward op's tensors."""
    value = op.attr(attr, ())
    values = value if isinstance(value, tuple) else (value,)
    good = tuple(i for i in values if type(i) is int and 0 <= i < limit)
    if len(good) != len(values) or not good:
        raise GraphError(
            f"attribute {attr} is {value!r}",
            fix=f"positions below {limit} in the forward op {op.forward!r} are needed",
            field=f"op {op.name!r}",
        )
    return good


def _told(op: Op, count: int, origin: Op) -> tuple[str, ...]:
    """For what tensors of its forward op a backward op reads others, such as `i0` and `o1`."""
    value = op.attr("reads")
    places = {f"i{i}" for i in range(len(origin.inputs))}
    places |= {f"o{i}" for i in range(len(origin.outputs))}
    values = value if isinstance(value, tuple) else ()
    good = tuple(text for text in values if isinstance(text, str) and text in places)
    if len(good) != count or len(values) != count:
        raise GraphError(
            f"attribute reads is {value!r}",
            fix=f"{count} places such as i0 or o0 in the forward op {op.forward!r} are needed",
            field=f"op {op.name!r}",
        )
    return good


def _check_text(text: str, where: str) -> None:
    """Refuse half of a surrogate pair: no file could hold it."""
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise GraphError(
            f"the text {text!r} is not Unicode", fix="remove the lone surrogate", field=where
        )


def _check_attrs(attrs: tuple[tuple[str, Attr], ...], where: str) -> None:
    keys = [key for key, _ in attrs]
    if len(set(keys)) != len(keys) or keys != sorted(keys):
        raise GraphError(
            f"attributes {', '.join(keys)}", fix="name each once, in sorted order", field=where
        )
    for key, value in attrs:
        _check_text(key, where)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str):
                _check_text(item, where)
            elif not isinstance(item, int | float):
                raise GraphError(
                    f"attribute {key} is {value!r}",
                    fix="attributes are numbers, text, true/false or a tuple of these",
                    field=where,
                )
            elif abs(item) > MAX_NUMBER if isinstance(item, int) else not math.isfinite(item):
                raise GraphError(
                    f"attribute {key} is {value}",
                    fix="attributes are finite numbers of at most 64 bits",
                    field=where,
                )


def _by_name(items: tuple[N, ...], what: str) -> dict[str, N]:
    by_name: dict[str, N] = {}
    for item in items:
        if item.name in by_name:
            raise GraphError(
                "stands twice", fix="names are unique in a graph", field=f"{what} {item.name!r}"
            )
        by_name[item.name] = item
    return by_name


def _find(table: dict[str, N], name: str, what: str) -> N:
    try:
        return table[name]
    except KeyError:
        raise GraphError(f"there is no {what} called {name!r}", fix="check the name") from None


def _plain(item: object) -> object:
    if isinstance(item, Tensor):
        plain = (item.name, item.shape, item.dtype, item.role)
        return (*plain, item.source) if item.source else plain
    assert isinstance(item, Op)
    return (
        item.name,
        item.kind,
        item.inputs,
        item.outputs,
        item.attrs,
        item.scope,
        item.phase,
        item.forward,
    )


def multiplied_in(graph: Graph, dtype: str) -> Graph:
    """The forward graph with all linear layers multiplying in a type."""
    ops = tuple(_narrowed(op, dtype) if op.kind in NARROWED else op for op in graph.ops)
    return replace(graph, ops=ops)


def product_dtype(call: Call, dtype: str) -> str:
    """The type that an op computing in `dtype` multiplies in."""
    narrowed = call.attr(PRODUCT_DTYPE)
    return narrowed if isinstance(narrowed, str) else dtype


def _narrowed(op: Op, dtype: str) -> Op:
    attrs = [pair for pair in op.attrs if pair[0] != PRODUCT_DTYPE]
    return replace(op, attrs=tuple(sorted((*attrs, (PRODUCT_DTYPE, dtype)))))
