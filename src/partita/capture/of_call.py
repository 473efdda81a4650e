"""What a tensor depends on while a model is followed: on the call, or on constants alone.

A tensor made of constants is the same in every call. What is changed in place is part of what it
depends on: `table = zeros(n); table[:] = x` is of the call.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node, map_arg
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

log = logging.getLogger("partita")
NUMBERS = ("__bool__", "__int__", "__float__", "__index__", "item")  # read off a tensor


def node_of(value: torch.Tensor) -> Node | None:
    """The node that gives a tensor in what is being followed; None if none does, or nobody does."""
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(value, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def is_of_call(value: torch.Tensor) -> bool:
    """Does a tensor depend on anything that may be another in the next call?"""
    if get_proxy_mode() is None:
        return True  # nobody follows the model: it cannot be told
    node = node_of(value)
    return node is not None and node in depending(node.graph)


def depending(graph: Graph) -> set[Node]:
    """The nodes that depend on arguments, parameters, buffers or chance, in place or not."""
    known: set[Node] = set()
    storages: set[int] = set()  # memory that such numbers were written to
    for node in graph.nodes:
        sources = node.all_input_nodes
        own = {_storage(node), *map(_storage, sources)} - {None}
        if (
            node.op == "placeholder"
            or _draws(node)
            or any(source in known for source in sources)
            or own & storages
        ):
            known.add(node)
            written = _written(node)
            if written is not None and (storage := _storage(written)) is not None:
                storages.add(storage)
    if storages:  # what was read before it was written shares the memory all the same
        known |= {node for node in graph.nodes if _storage(node) in storages}
    return known


def constant_of(node: Node, root: Any) -> torch.Tensor:
    """The numbers of a tensor that is made of constants alone, computed; `root` holds tensors."""
    of_call = depending(node.graph)
    values: dict[Node, Any] = {}
    with torch.no_grad():
        for each in node.graph.nodes:
            if each in of_call:
                continue
            if each.op == "get_attr":
                values[each] = getattr(root, str(each.target))
            elif isinstance(each.target, OpOverload) and all(
                source in values for source in each.all_input_nodes
            ):
                args, kwargs = map_arg((each.args, each.kwargs), values.__getitem__)
                values[each] = each.target(*args, **kwargs)
    made: torch.Tensor = values[node]
    return made


@contextlib.contextmanager
def decided_constants() -> Iterator[None]:
    """Let a model read numbers off tensors that are made of constants alone, while it is followed.

    They are the same in every call: `if mask.any()` of a mask that nobody gave has one answer.
    """

    def reading(read: Callable[..., Any]) -> Callable[..., Any]:
        def on_read(self: torch.Tensor) -> Any:
            known = _read_constant(self, read)
            return read(self) if known is None else known

        return on_read

    with contextlib.ExitStack() as stack:
        for name in NUMBERS:
            read = getattr(torch.Tensor, name)
            stack.callback(setattr, torch.Tensor, name, read)
            setattr(torch.Tensor, name, reading(read))
        yield


def _read_constant(tensor: torch.Tensor, read: Callable[..., Any]) -> Any:
    """What is read off a tensor that is made of constants; None if it is not, or not known."""
    mode = get_proxy_mode()
    if mode is None or tensor.numel() != 1:
        return None
    node = node_of(tensor)
    if node is None or is_of_call(tensor):
        return None
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return read(constant_of(node, getattr(mode.tracer, "root", None)))
    except Exception:  # it is refused where it is read, as if it were of the call
        log.debug("the value of %s is not known", node, exc_info=True)
        return None


def _written(node: Node) -> Node | None:
    """The first tensor that an operation changes."""
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else None
            return given if isinstance(given, Node) else None
    return None


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def _draws(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
