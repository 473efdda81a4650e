"""`torch.no_grad()` and `torch.autocast` regions of an exported program, as plain nodes.

`torch.export` keeps such a region as one node that runs a sub-graph. A pipeline could not be cut in
it, and its cost would be hidden, so the sub-graph's nodes are put in its place:

- without gradients: what leaves the region is detached. If something in it is changed in place,
  what enters is detached instead, so that no history reaches what is changed.
- autocast: every operation is asked, on tensors without data, which of its inputs it would cast,
  and these casts become nodes. The numbers are the same; a weight is cast once per region, as
  autocast's cache does.
"""

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
DONE = "partita_autocast"  # marks nodes whose casts are there


def inline_regions(graph_module: GraphModule, buffers: Collection[str] = ()) -> None:
    """Replace every such region by its nodes, inner ones first; `buffers` names placeholders."""
    for node in list(graph_module.graph.nodes):
        kind = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if kind == "wrap_with_set_grad_enabled":
            _inline_grad_mode(graph_module, node, buffers)
        elif kind == "wrap_with_autocast":
            _inline_autocast(graph_module, node, buffers)
    for node in list(graph_module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph_module.graph.erase_node(node)
    graph_module.delete_all_unused_submodules()


def _inline_grad_mode(graph_module: GraphModule, node: Node, buffers: Collection[str]) -> None:
    enabled, submodule, *operands = node.args
    body = _body(graph_module, submodule, operands, buffers)
    if enabled:
        _replace(graph_module, node, body, operands)
    elif any(_changes_in_place(inner) for inner in body.graph.nodes):
        with graph_module.graph.inserting_before(node):
            entering = [
                operand
                if isinstance(operand, Node) and operand.name in buffers
                else _detached(graph_module, operand, node)
                for operand in operands
            ]
        _replace(graph_module, node, body, entering)
    else:
        leave = _Leaving(graph_module, node)
        _replace(graph_module, node, body, operands, leaving=leave)


class _Leaving:
    """Detaches a tensor on its way out of a region."""

    def __init__(self, graph_module: GraphModule, node: Node) -> None:
        self.graph_module = graph_module
        self.node = node

    def __call__(self, value: Any) -> Any:
        return _detached(self.graph_module, value, self.node)


def _inline_autocast(graph_module: GraphModule, node: Node, buffers: Collection[str]) -> None:
    device, dtype, enabled, _, submodule, *operands = node.args
    body = _body(graph_module, submodule, operands, buffers)
    casts: dict[tuple[Node, torch.dtype], Node] = {}

    def cast(copied: Node, inner: Node) -> None:
        if copied.meta.get(DONE):
            return  # a region within this one has its own rules
        copied.meta[DONE] = True
        region = torch.autocast(str(device), dtype, enabled=bool(enabled), cache_enabled=False)  # type: ignore[arg-type]
        for position, wanted in _casts(inner, region).items():
            source = copied.all_input_nodes[position]
            made = casts.get((source, wanted))
            if made is None:
                with graph_module.graph.inserting_before(copied):
                    made = graph_module.graph.call_function(aten.to.dtype, (source, wanted))
                made.meta = {**copied.meta, "val": source.meta["val"].to(wanted)}
            if source.op == "placeholder" and source.meta["val"].requires_grad:
                casts[source, wanted] = made  # other tensors are cast anew by each operation
            copied.replace_input_with(source, made)

    _replace(graph_module, node, body, operands, after=cast)


def _casts(node: Node, region: Any) -> dict[int, torch.dtype]:
    """The inputs that an operation casts within the region, by position, and to what."""
    values = [given.meta.get("val") for given in node.all_input_nodes]
    seen: dict[int, torch.dtype] = {}
    inside: set[torch.dtype] = set()  # casts of what the operation itself has made

    class CastRecorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            wanted = (kwargs or {}).get("dtype")
            if func is aten._to_copy.default and wanted is not None:
                positions = [i for i, value in enumerate(values) if args[0] is value]
                seen.update(dict.fromkeys(positions, wanted))
                if not positions:
                    inside.add(wanted)
            return func(*args, **(kwargs or {}))

    def given(other: Node) -> Any:
        return other.meta.get("val")

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), given)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors or not callable(node.target):
        return {}
    if node.target in (aten.to.dtype, operator.getitem):
        return {}  # its own cast, not autocast's
    recorder = CastRecorder()  # type: ignore[no-untyped-call]
    with torch.no_grad(), tensors[0].fake_mode, recorder, region:  # type: ignore[attr-defined]
        out = node.target(*args, **kwargs)
    if isinstance(out, torch.Tensor) and inside == {out.dtype}:
        # It moves its inputs' elements about before they are cast: casting first is the same.
        for position, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                seen.setdefault(position, out.dtype)
    return {i: dtype for i, dtype in seen.items() if getattr(values[i], "dtype", None) != dtype}


def _replace(
    graph_module: GraphModule,
    node: Node,
    body: GraphModule,
    operands: Any,
    leaving: Callable[[Any], Any] = lambda value: value,
    after: Callable[[Node, Node], None] | None = None,
) -> None:
    """Copy a sub-graph in front of the node that runs it, and use what it gives instead."""
    graph = graph_module.graph
    known: dict[Node, Any] = {}
    placeholders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
    known.update(zip(placeholders, operands, strict=True))
    results: Any = ()
    for inner in body.graph.nodes:
        if inner.op == "output":
            results = torch.fx.map_arg(inner.args[0], known.__getitem__)
        elif inner.op == "get_attr":
            _adopt(graph_module, body, inner)
        if inner.op in ("call_function", "get_attr"):
            with graph.inserting_before(node):
                copied = graph.node_copy(inner, known.__getitem__)
            known[inner] = copied
            if after is not None and inner.op == "call_function":
                after(copied, inner)
    results = results if isinstance(results, list | tuple) else (results,)
    for user in list(node.users):
        position = user.args[1]
        assert user.target is operator.getitem
        assert isinstance(position, int)
        with graph.inserting_before(user):
            value = leaving(results[position])
        user.replace_all_uses_with(value)
        graph.erase_node(user)
    graph.erase_node(node)


def _adopt(graph_module: GraphModule, body: GraphModule, inner: Node) -> None:
    """Make what a sub-graph holds an attribute of the whole, under a name that is free."""
    name = str(inner.target)
    value = getattr(body, name)
    free, number = name, 0
    while hasattr(graph_module, free) and getattr(graph_module, free) is not value:
        number += 1
        free = f"{name}_{number}"
    setattr(graph_module, free, value)
    inner.target = free


def _body(
    graph_module: GraphModule, submodule: Any, operands: Any, buffers: Collection[str]
) -> GraphModule:
    """The sub-graph of a region, with the regions in it inlined."""
    assert isinstance(submodule, Node)
    body = getattr(graph_module, str(submodule.target))
    assert isinstance(body, GraphModule)
    inner = [node for node in body.graph.nodes if node.op == "placeholder"]
    pairs = zip(inner, operands, strict=True)
    inline_regions(body, {p.name for p, o in pairs if isinstance(o, Node) and o.name in buffers})
    return body


def _detached(graph_module: GraphModule, value: Any, like: Node) -> Any:
    fake = value.meta.get("val") if isinstance(value, Node) else None
    if not isinstance(fake, torch.Tensor) or not fake.is_floating_point():
        return value
    made = graph_module.graph.call_function(aten.detach.default, (value,))
    made.meta = {**like.meta, "val": fake.detach()}
    return made


def _changes_in_place(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in schema.arguments
    )
