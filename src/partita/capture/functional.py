"""Operations in place become operations that give a new tensor: a graph can be cut anywhere.

`y.relu_()` becomes `relu(y)`, and whoever reads `y` later reads the result. Where a part of a
tensor is changed (`y[:, :3] = z`), the new part is put into a new whole by `slice_scatter` and the
like, and whatever else shares the memory is read off the new whole again. Only buffers are still
changed in place: that is how they keep what they learn. What shares memory is told by the exported
tensors themselves, which have storages though no data.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from partita.capture import lines
from partita.errors import CaptureError

aten = torch.ops.aten
log = logging.getLogger("partita")


def make_functional(program: ExportedProgram) -> None:
    """Rewrite an exported program's graph so that only buffers are changed in place."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    for node in list(program.graph.nodes):
        if _written(node) is not None:
            _Change(program.graph, node, kinds, names).apply()
    _rename_outputs(program)


def _rename_outputs(program: ExportedProgram) -> None:
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    for spec, value in zip(program.graph_signature.output_specs, output.args[0], strict=True):
        if isinstance(value, Node):
            spec.arg.name = value.name


def _written(node: Node) -> Node | None:
    """The tensor that an operation changes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = (
                node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            )
            return given if isinstance(given, Node) else None
    return None


class _Change:
    """One operation in place and what has to follow from it."""

    def __init__(
        self, graph: Graph, node: Node, kinds: dict[str, InputKind], names: dict[str, Any]
    ) -> None:
        written = _written(node)
        assert written is not None
        self.graph = graph
        self.node = node
        self.written = written
        self.root = _root(written)
        self.kind = kinds.get(self.root.name) if self.root.op == "placeholder" else None
        self.name = names.get(self.root.name) or self.root.name
        self.order = {other: i for i, other in enumerate(graph.nodes)}

    def apply(self) -> None:
        if self.kind is InputKind.PARAMETER:
            raise self._refused(f"changes the parameter {self.name} in place")
        stale = self._stale()
        if self.kind is InputKind.BUFFER and _same_place(self.written, self.root):
            whole = self.node  # stays in place: it gives the buffer itself
        else:
            if self.kind is InputKind.USER_INPUT:
                log.warning(
                    "the model changes its argument %s in place; captured, it leaves it as it was",
                    self.root.name,
                )
            self._make_functional()
            whole = self._put_back()
            if self.kind is InputKind.BUFFER:
                whole = self._append(aten.copy_.default, (self.root, whole), self.root)
        self._refresh(stale, whole)

    def _stale(self) -> list[Node]:
        """What shares the memory and is read later: it must not be read as it was."""
        storage = _storage(self.written)
        here = self.order[self.node]
        return [
            other
            for other in self.order
            if other is not self.node
            and self.order[other] < here
            and _storage(other) == storage
            and any(self.order[user] > here for user in other.users)
        ]

    def _make_functional(self) -> None:
        node, written = self.node, self.written
        value = written.meta["val"]
        name, overload = str(node.target).removeprefix("aten.").split(".")
        if name == "copy_":
            source = node.args[1]
            node.target, node.args, node.kwargs = (
                aten.expand.default,
                (source, list(value.shape)),
                {},
            )
            if isinstance(source, Node) and source.meta["val"].dtype != value.dtype:
                with self.graph.inserting_before(node):
                    cast = self.graph.call_function(aten.to.dtype, (source, value.dtype))
                cast.meta = {**node.meta, "val": source.meta["val"].to(value.dtype)}
                node.args = (cast, list(value.shape))
            return
        packet = getattr(aten, name.removesuffix("_"), None)
        target = getattr(packet, overload, None) if packet is not None else None
        if target is None or not name.endswith("_"):
            raise self._refused(f"changes a tensor in place by {name}")
        node.target = target
        self._keep_dtype(value.dtype)

    def _keep_dtype(self, dtype: torch.dtype) -> None:
        """In place, a result has the type of what is changed; else the types are promoted."""
        args, kwargs = torch.fx.map_arg((self.node.args, self.node.kwargs), _value)
        with _fake_mode(self.node), torch.no_grad():
            found = self.node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(found, torch.Tensor) and found.dtype != dtype:
            with self.graph.inserting_after(self.node):
                cast = self.graph.call_function(aten.to.dtype, (self.node, dtype))
            cast.meta = dict(self.node.meta)
            self.node.replace_all_uses_with(cast, lambda user: user is not cast)
            self.node.meta = {**self.node.meta, "val": found}
            self.order[cast] = self.order[self.node]
            self.node = cast

    def _put_back(self) -> Node:
        """The whole tensor with the changed part in it."""
        part, at = self.node, self.written
        while at is not self.root and not _same_place(at, self.root):
            source = at.args[0]
            assert isinstance(source, Node)
            rule = SCATTERS.get(_base_name(at))
            if rule is None:
                raise self._refused(f"changes part of a tensor in place, seen by {at.target}")
            target, args = rule(source, at, part)
            part = self._append(target, args, source)
            at = source
        return part

    def _refresh(self, stale: list[Node], whole: Node) -> None:
        """Let later readers of what was changed read the new whole, or a view of it."""
        here = self.order[self.node]
        for other in stale:
            if _same_place(other, self.written):
                fresh = self.node
            elif other is self.root or _same_place(other, self.root):
                fresh = whole
            elif _root(other) is self.root:
                fresh = self._view_again(other, whole)
            else:
                raise self._refused("changes a tensor in place that shares memory with another")
            other.replace_all_uses_with(fresh, lambda user: self.order.get(user, here) > here)

    def _view_again(self, view: Node, whole: Node) -> Node:
        source = view.args[0]
        assert isinstance(source, Node)
        below = whole if _same_place(source, self.root) else self._view_again(source, whole)
        return self._append(view.target, (below, *view.args[1:]), view, view.kwargs)

    def _append(
        self, target: Any, args: tuple[Any, ...], like: Node, kwargs: dict[str, Any] | None = None
    ) -> Node:
        """A node after all that have been added for this change, with the tensor of `like`."""
        last = getattr(self, "last", self.node)
        with self.graph.inserting_after(last):
            made = self.graph.call_function(target, args, kwargs)
        made.meta = {**self.node.meta, "val": like.meta["val"]}
        self.order[made] = self.order[self.node]
        self.last = made
        return made

    def _refused(self, found: str) -> CaptureError:
        line = lines.of_node(self.node.meta.get("stack_trace"))
        return CaptureError(
            f"`{line.code}` {found}, which cannot be captured",
            fix="write it so that it gives a new tensor (x = x + y instead of x += y)",
            file=line.place,
        )


def _value(node: Node) -> Any:
    return node.meta.get("val")


def _fake_mode(node: Node) -> Any:
    return next(
        value.fake_mode  # type: ignore[attr-defined]
        for given in node.all_input_nodes
        if isinstance(value := given.meta.get("val"), torch.Tensor)
    )


def _base_name(node: Node) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return int(value.untyped_storage()._cdata)


def _same_place(a: Node, b: Node) -> bool:
    """Do two tensors of one storage have the same elements in the same order?"""
    x, y = a.meta["val"], b.meta["val"]
    return bool(
        a is b
        or (
            _storage(a) == _storage(b)
            and x.dtype == y.dtype
            and x.shape == y.shape
            and x.stride() == y.stride()
            and x.storage_offset() == y.storage_offset()
        )
    )


def _root(node: Node) -> Node:
    """What a tensor is a view of, in the end."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        if _base_name(node) not in VIEWS or _storage(node) != _storage(node.args[0]):
            break
        node = node.args[0]
    return node


def _like(source: Node, view: Node, part: Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.reshape.default, (part, list(source.meta["val"].shape))


def _slice(source: Node, view: Node, part: Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.slice_scatter.default, (source, part, *view.args[1:])


def _select(source: Node, view: Node, part: Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.select_scatter.default, (source, part, *view.args[1:])


def _swap(source: Node, view: Node, part: Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.transpose.int, (part, *view.args[1:])


def _permute(source: Node, view: Node, part: Node) -> tuple[Any, tuple[Any, ...]]:
    order = [dim % len(view.args[1]) for dim in view.args[1]]  # type: ignore[arg-type,union-attr,operator]
    return aten.permute.default, (part, [order.index(i) for i in range(len(order))])


def _diagonal(source: Node, view: Node, part: Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.diagonal_scatter.default, (source, part, *view.args[1:])


def _itself(source: Node, view: Node, part: Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.alias.default, (part,)


def _flip(source: Node, view: Node, part: Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.t.default, (part,)


# How a changed view is put back into what it is a view of.
SCATTERS: dict[str, Callable[[Node, Node, Node], tuple[Any, tuple[Any, ...]]]] = {
    "slice": _slice,
    "select": _select,
    "diagonal": _diagonal,
    "transpose": _swap,
    "permute": _permute,
    "t": _flip,
    "detach": _itself,
    "alias": _itself,
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "to"),
        _like,
    ),
}
VIEWS = frozenset({*SCATTERS, "expand", "narrow", "unbind", "split", "as_strided"})
