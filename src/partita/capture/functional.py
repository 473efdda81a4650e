"""Operations in place become operations that give a new tensor: a graph can be cut anywhere.

`y.relu_()` becomes `relu(y)`, and whoever reads `y` later reads the result. Where a part of a
tensor is changed (`y[:, :3] = z`), the new part is put into a new whole by `slice_scatter` and the
like, and whatever else shares the memory is read off the new whole again. Only buffers are still
changed in place: that is how they keep what they learn. What shares memory is told by the exported
tensors themselves, which have storages though no data.
"""

import logging
import operator
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
        if _base_name(node) == "detach":
            _read_through(node, kinds)
    for node in list(program.graph.nodes):
        if _is_inactive_dropout(node):  # it gives its input itself, which export does not see
            node.meta["val"] = node.args[0].meta["val"]
        elif _is_copy_of_itself(node):  # export assigns what a module has kept to its name again
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
        elif _written(node) is not None:
            _Change(program.graph, node, kinds, names).apply()
    _rename_outputs(program)


def _read_through(detached: Node, kinds: dict[str, InputKind]) -> None:
    """A buffer detached is the buffer, as it has no gradient: nor has what is written to it so.

    That is how `buffer.data.mul_(0.9).add_(x)` changes it.
    """
    (buffer,) = detached.all_input_nodes
    if kinds.get(buffer.name) is not InputKind.BUFFER or buffer.meta["val"].requires_grad:
        return
    graph = detached.graph
    writes = {node: at for node in graph.nodes if (at := _written(node)) and _root(at) is detached}
    after = list(graph.nodes)
    after = after[after.index(next(iter(writes))) :] if writes else []
    if any(_reads(node, detached) and not _is_view(node) for node in after if node not in writes):
        return  # there what was written has its gradient
    for node, written in writes.items():
        for source in node.all_input_nodes:
            if source is not written and source.meta["val"].is_floating_point():
                with graph.inserting_before(node):
                    plain = graph.call_function(aten.detach.default, (source,))
                plain.meta = {**source.meta, "val": source.meta["val"].detach()}
                node.replace_input_with(source, plain)
    detached.replace_all_uses_with(buffer)
    graph.erase_node(detached)


def _reads(node: Node, root: Node) -> bool:
    return any(_root(source) is root for source in node.all_input_nodes)


def _is_view(node: Node) -> bool:
    return _viewed(node) is not None


def _is_copy_of_itself(node: Node) -> bool:
    return node.target is aten.copy_.default and _same_place(*node.args[:2])  # type: ignore[arg-type]


def _is_inactive_dropout(node: Node) -> bool:
    if _base_name(node) not in DROPOUTS or _written(node) is not None:
        return False
    _, p, train = node.args
    return bool(not train or p == 0)


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
        self.kinds, self.names = kinds, names
        self.kind = kinds.get(self.root.name)
        self.part: Node | None = None  # the changed part, seen in the new whole
        self.last: Node | None = None  # of the nodes added
        self.order = {other: i for i, other in enumerate(graph.nodes)}

    def apply(self) -> None:
        behind = _root(self.written, through_detach=True)
        if self.kinds.get(behind.name) is InputKind.PARAMETER:
            raise self._refused(f"changes the parameter {self.names[behind.name]} in place")
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
            if not _same_place(self.written, self.root) and self._is_read(stale):
                self._see_through(whole)
        self._refresh(stale, whole)

    def _is_read(self, stale: list[Node]) -> bool:
        """Does anyone read the changed part itself later?"""
        here = self.order[self.node]
        return any(self.order.get(user, here) > here for user in self.node.users) or any(
            _same_place(other, self.written) for other in stale
        )

    def _see_through(self, whole: Node) -> None:
        """Let later readers of the changed part see it in the whole, strides included."""
        here = self.order[self.node]
        part = self._view_again(self.written, whole)
        self.node.replace_all_uses_with(part, lambda user: self.order.get(user, here) > here)
        self.part = part

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
        name, overload = OTHER_NAMES.get((name, overload), (name, overload))
        packet = getattr(aten, name.removesuffix("_"), None)
        target = getattr(packet, overload, None) if packet is not None else None
        if target is None or not name.endswith("_"):
            raise self._refused(f"changes a tensor in place by {name}")
        if name == "bernoulli_" and not value.is_contiguous():
            raise self._refused("draws into a tensor whose elements are not in order in memory")
        given = node.target._schema.arguments  # type: ignore[union-attr]
        for own, other in list(zip(given, target._schema.arguments, strict=False))[
            len(node.args) :
        ]:
            if own.has_default_value() and not other.has_default_value():
                node.args = (*node.args, own.default_value)
        node.target = target
        self._keep_dtype(value.dtype)

    def _keep_dtype(self, dtype: torch.dtype) -> None:
        """In place, a result has the type of what is changed; else the types are promoted."""
        args, kwargs = torch.fx.map_arg((self.node.args, self.node.kwargs), _value)
        with _fake_mode(self.node), torch.no_grad():
            target = self.node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(target, torch.Tensor) and target.dtype != dtype:
            with self.graph.inserting_after(self.node):
                cast = self.graph.call_function(aten.to.dtype, (self.node, dtype))
            cast.meta = dict(self.node.meta)
            self.node.replace_all_uses_with(cast, lambda user: user is not cast)
            self.node.meta = {**self.node.meta, "val": target}
            self.order[cast] = self.order[self.node]
            self.node = cast

    def _put_back(self) -> Node:
        """The whole tensor with the changed part in it."""
        part, at = self.node, self.written
        while at is not self.root and not _same_place(at, self.root):
            source = _viewed(at)
            assert source is not None
            if at.target is operator.getitem:
                name, place = _piece(at, source)
                target = getattr(aten, f"{name}_scatter").default
                part = self._append(target, (source, part, *place), source)
            else:
                target, args = SCATTERS[_base_name(at)](source, at, part)
                part = self._append(target, args, source)
            at = source
        return part

    def _refresh(self, stale: list[Node], whole: Node) -> None:
        """Let later readers of what was changed read the new whole, or a view of it."""
        here = self.order[self.node]
        for other in stale:
            fresh = self._fresh(other, whole)
            other.replace_all_uses_with(fresh, lambda user: self.order.get(user, here) > here)

    def _fresh(self, other: Node, whole: Node) -> Node:
        if _root(other, through_detach=True) is self.root:
            return self._changed(other) or self._view_again(other, whole)
        if "detach" in (_base_name(self.root), _base_name(_root(other))):
            raise self._refused("changes a tensor in place behind the back of its gradient")
        if not _same_place(other, self.written):
            raise self._refused("changes a tensor in place that shares memory with another")
        return self.part or self.node

    def _changed(self, other: Node) -> Node | None:
        """The changed part itself, where that is what is read."""
        if self.part is None and _same_place(other, self.written) and _root(other) is self.root:
            return self.node
        return None

    def _view_again(self, view: Node, whole: Node) -> Node:
        if _same_place(view, self.root) and _root(view) is self.root:
            return whole
        if self.part is not None and _same_place(view, self.written) and _root(view) is self.root:
            return self.part
        source = _viewed(view, through_detach=True)
        assert source is not None
        below = whole if source is self.root else self._view_again(source, whole)
        if view.target is operator.getitem:
            name, place = _piece(view, source)
            target = aten.select.int if name == "select" else aten.slice.Tensor
            return self._append(target, (below, *place), view)
        return self._append(view.target, (below, *view.args[1:]), view, view.kwargs)

    def _append(
        self, target: Any, args: tuple[Any, ...], like: Node, kwargs: dict[str, Any] | None = None
    ) -> Node:
        """A node after all that have been added for this change, with the tensor of `like`."""
        with self.graph.inserting_after(self.last or self.node):
            made = self.graph.call_function(target, args, kwargs)
        made.meta = {**self.node.meta, "val": like.meta["val"]}
        self.order[made] = self.order[self.node]
        self.last = made
        return made

    def _refused(self, wrong: str) -> CaptureError:
        line = lines.of_node(self.node.meta.get("stack_trace"))
        return CaptureError(
            f"`{line.code}` {wrong}, which cannot be captured",
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


def _root(node: Node, through_detach: bool = False) -> Node:
    """What a tensor is a view of, in the end."""
    while (source := _viewed(node, through_detach)) is not None:
        node = source
    return node


def _viewed(node: Node, through_detach: bool = False) -> Node | None:
    """What a tensor is a view of; None if it is none that can be put back."""
    if (written := _written(node)) is not None:
        return written  # a buffer, changed in place before
    if _base_name(node) == "detach" and not through_detach:
        return None
    source = node.args[0] if node.op == "call_function" and node.args else None
    if node.target is operator.getitem:  # a piece of several: a view of what was cut up
        pieces = source
        assert isinstance(pieces, Node)
        source = pieces.args[0] if _base_name(pieces) in PIECES else None
    elif _base_name(node) not in SCATTERS:
        return None
    if isinstance(source, Node) and _storage(node) == _storage(source):
        return source
    return None


def _piece(piece: Node, source: Node) -> tuple[str, tuple[int, ...]]:
    """Which slice (or which row) of what was cut up a piece is."""
    pieces, number = piece.args
    assert isinstance(pieces, Node)
    assert isinstance(number, int)
    values = pieces.meta["val"]
    rank = source.meta["val"].dim()
    given = pieces.args[PIECES[_base_name(pieces)] :]
    dim = int(pieces.kwargs.get("dim", given[0] if given else 0)) % rank  # type: ignore[arg-type]
    number %= len(values)
    if _base_name(pieces) == "unbind":
        return "select", (dim, number)
    start = sum(int(value.shape[dim]) for value in values[:number])
    return "slice", (dim, start, start + int(values[number].shape[dim]))


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


# Operations in place whose functional form has another name, written as if it were in place.
OTHER_NAMES = {
    ("bernoulli_", "float"): ("bernoulli_", "p"),
    ("normal_", "default"): ("normal_functional_", "default"),
}
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
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
    **dict.fromkeys(DROPOUTS, _itself),
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "to"),
        _like,
    ),
}
# Operations that cut a tensor up, and where in their arguments the dim stands.
PIECES = {"unbind": 1, "split": 2, "split_with_sizes": 2, "chunk": 2, "tensor_split": 2}
