"""What an export knows of the plan it is made from: model, devices, sizes read off the graph."""

from dataclasses import dataclass

from partita.graph.loops import loop_nest
from partita.graph.record import Graph, Op
from partita.jobs.framework_plan import LayerStack, layer_stack


@dataclass(frozen=True)
class ExportedSizes:
    """The sizes of a stack of equal transformer layers, as frameworks are told them."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    seq: int
    rms_norm: bool
    gated: bool
    biases: bool
    tied: bool
    learned_positions: bool


@dataclass(frozen=True)
class ExportScope:
    """A model on devices: what all targets need beside the strategy."""

    spec: str
    graph: Graph
    batch: int
    dtype: str
    optimizer: str
    num_devices: int
    num_nodes: int
    training: bool = True

    @property
    def stack(self) -> LayerStack | None:
        """Its repeated layers."""
        return layer_stack(self.graph)

    @property
    def sizes(self) -> ExportedSizes | None:
        """Its sizes; None where it is not a stack of transformer layers."""
        return _sizes(self.graph, self.stack)

    def launcher(self) -> str:
        """The beginning of a command that starts a process on every device."""
        each = self.num_devices // self.num_nodes
        if self.num_nodes == 1:
            return f"torchrun --standalone --nproc-per-node {each}"
        return (
            f"torchrun --nnodes {self.num_nodes} --nproc-per-node {each} "
            "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
        )


def _sizes(graph: Graph, stack: LayerStack | None) -> ExportedSizes | None:
    if stack is None:
        return None
    unit_of = dict(stack.units)
    ops = [graph.op(name) for name, _ in stack.units]
    attention = [op for op in ops if op.kind == "attention"]
    tables = [op for op in ops if op.kind == "embedding" and unit_of[op.name] == 0]
    products = [op for op in ops if op.kind == "linear" and unit_of[op.name] == 1]
    norms = [op for op in ops if op.kind in ("layer_norm", "rms_norm")]
    words = [op for op in tables if any(t.name == op.inputs[0] for t in graph.inputs)]
    if len(attention) != stack.num_layers or not words or not products or not norms:
        return None
    if any(op.kind == "expert_linear" for op in ops):
        return None
    core, table = _extents(graph, attention[0]), _extents(graph, words[0])
    groups = core.get("g", 1)
    fed = [_extents(graph, op)["n"] for op in products]
    return ExportedSizes(
        num_layers=stack.num_layers,
        hidden=table["e"],
        heads=core["h"] * groups,
        kv_heads=core["h"],
        head_size=core["d"],
        ffn=max(fed[-3:]),  # the layers of the feed-forward part come last
        vocab=table["v"],
        seq=table["s"],
        rms_norm=norms[0].kind == "rms_norm",
        gated=_is_gated(graph, ops),
        biases=any(len(op.inputs) > 2 for op in products),
        tied=len([op for op in graph.consumers(words[0].inputs[1]) if op.phase == "forward"]) > 1,
        learned_positions=len(tables) > len(words),
    )


def _extents(graph: Graph, op: Op) -> dict[str, int]:
    return {dim.name: dim.extent for dim in loop_nest(graph.call(op)).dims}


def _is_gated(graph: Graph, ops: list[Op]) -> bool:
    """Does an activation read two products?"""
    for op in ops:
        makers = [graph.producer(name) for name in op.inputs]
        products = [maker for maker in makers if maker is not None and maker.kind == "linear"]
        if op.kind == "elementwise" and len(makers) == len(products) == 2:
            return True
    return False
