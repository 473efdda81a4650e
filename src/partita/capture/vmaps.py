"""`torch.vmap` in an exported program, as the operations that it comes to.

`torch.export` notes what a mapped function does to one sample, between nodes that open and close
the map. A graph of such nodes says neither shapes nor costs, and cannot be cut. So everything from
the outermost opening to its closing is followed once more, below the map, where each operation is
on all samples; these take its place. They are what the map runs by itself, to rounding: a product
may take another of several ways.
"""

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from partita.capture import lines
from partita.errors import CaptureError

OPENS, CLOSES = "_vmap_increment_nesting", "_vmap_decrement_nesting"
PREPARES = "lazy_load_decompositions"


def inline_vmaps(graph_module: GraphModule) -> None:
    """Replace what is mapped, in the graph and in those within it."""
    for owner in graph_module.modules():
        if isinstance(owner, GraphModule):
            while (region := _first_region(owner.graph)) is not None:
                _replace(owner, region)
            for node in list(owner.graph.nodes):
                if getattr(node.target, "__name__", "") == PREPARES:
                    owner.graph.erase_node(node)


def _first_region(graph: Graph) -> list[Node] | None:
    """The nodes from the first opening to the closing that belongs to it."""
    region: list[Node] = []
    depth = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        depth += (name == OPENS) - (name == CLOSES)
        if depth or region:
            region.append(node)
        if region and not depth:
            return region
    return None


def _replace(owner: GraphModule, region: list[Node]) -> None:
    inside = set(region)
    given = list(dict.fromkeys(
        source
        for node in region
        for source in node.all_input_nodes
        if source not in inside and source.op != "get_attr"
    ))  # fmt: skip
    results = [node for node in region if any(user not in inside for user in node.users)]
    traced = _followed(owner, region, given, results)
    traced.graph.eliminate_dead_code()
    graph, like = owner.graph, region[0]
    known: dict[Node, Any] = dict(
        zip((node for node in traced.graph.nodes if node.op == "placeholder"), given, strict=True)
    )
    stack = next((n.meta for n in region if n.meta.get("stack_trace")), like.meta)
    values: Any = ()
    for node in traced.graph.nodes:
        if node.op == "output":
            values = node.args[0]
        elif node.op == "get_attr":
            raise _refusal(region, "it makes a tensor of its own")
        elif node.target is torch.ops.aten._to_copy.default and not node.all_input_nodes:
            known[node] = node.args[0]  # a number, which its reader casts
        elif node.op == "call_function":
            with graph.inserting_before(like):
                known[node] = graph.node_copy(node, known.__getitem__)
            own = {key: stack[key] for key in ("stack_trace", "nn_module_stack") if key in stack}
            known[node].meta = {**node.meta, **own}
    for old, new in zip(results, values, strict=True):
        old.replace_all_uses_with(known[new], lambda user: user not in inside)
    for node in reversed(region):
        graph.erase_node(node)


def _followed(
    owner: GraphModule, region: list[Node], given: list[Node], results: list[Node]
) -> GraphModule:
    """The region by itself, followed below the map."""
    graph = Graph()
    known: dict[Node, Node] = {}
    for source in given:
        known[source] = graph.placeholder(source.name)
    for source in (each for node in region for each in node.all_input_nodes):
        if (
            source.op == "get_attr" and source not in known
        ):  # of the owner: how arguments are nested
            known[source] = graph.node_copy(source)
    for node in region:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[node] for node in results))
    values = [source.meta.get("val") for source in given]
    modes = [m for m in (getattr(value, "fake_mode", None) for value in values) if m is not None]
    try:
        if not modes:  # made of nothing that is given: constants alone
            return make_fx(GraphModule(owner, graph), tracing_mode="fake")(*values)
        with modes[0]:
            return make_fx(GraphModule(owner, graph))(*values)
    except Exception as error:
        said = (str(error).strip().splitlines() or [repr(error)])[0]
        raise _refusal(region, said[:200]) from error


def _refusal(region: list[Node], said: str) -> CaptureError:
    line = lines.of_node(
        next((n.meta["stack_trace"] for n in region if "stack_trace" in n.meta), "")
    )
    return CaptureError(
        f"`{line.code}` maps a function over samples in a way that cannot be followed: {said}",
        fix="write what it does on the whole batch, without torch.vmap",
        file=line.place,
    )
