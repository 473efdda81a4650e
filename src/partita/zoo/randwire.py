"""RandWire-WS: Xie et al., "Exploring randomly wired neural networks for image recognition", 2019
(arXiv:1904.01569), wired by a Watts-Strogatz generator of our own.

WS(n, k, p): n nodes on a ring, each joined to its k/2 neighbours on either side; then, going round
k/2 times, each clockwise edge is moved with probability p to a node drawn evenly among those that
make neither a loop nor a double edge. Edges run from the lower to the higher number. A node adds
its inputs with learned weights in (0, 1), then ReLU, 3x3 depthwise, 1x1, norm. Nodes without inputs
read the stage's input with stride 2; the stage gives the mean of the nodes without outputs.

Stages by regime, with C channels and n nodes (table 1 of the paper):

    small     conv C/2, conv C,             wired (n, C), (n, 2C), (n, 4C), 1x1 to 1280
    regular   conv C/2, wired (n/2, C),     wired (n, 2C), (n, 4C), (n, 8C), 1x1 to 1280

The drawn graphs are not the authors' samples, so counts agree with the paper's (means over several
samples) to a few per cent, not exactly.
"""

import random

from partita.errors import ModelError
from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.parts import finish

NEIGHBOURS = 4
REWIRING = 0.75
HEAD = 1280

Edges = tuple[tuple[int, int], ...]


def watts_strogatz(nodes: int, neighbours: int, rewiring: float, seed: int) -> Edges:
    """Sorted edges (lower, higher) of one random graph; the same for the same arguments."""
    if not 0 < neighbours < nodes or neighbours % 2:
        raise ModelError(
            f"a ring of {nodes} nodes with {neighbours} neighbours each",
            fix="give an even number of neighbours below the number of nodes",
            field="nodes",
        )
    draw = random.Random(seed)
    edges = {
        _edge(node, (node + step) % nodes)
        for step in range(1, neighbours // 2 + 1)
        for node in range(nodes)
    }
    for step in range(1, neighbours // 2 + 1):
        for node in range(nodes):
            old = _edge(node, (node + step) % nodes)
            if draw.random() >= rewiring or old not in edges:
                continue
            free = [
                other for other in range(nodes) if other != node and _edge(node, other) not in edges
            ]
            if free:
                edges.remove(old)
                edges.add(_edge(node, free[int(draw.random() * len(free))]))
    return tuple(sorted(edges))


def _edge(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)


def randwire_small(
    batch: int = 32, size: int = 224, dtype: str = "f32", loss: bool = True,
    channels: int = 78, nodes: int = 32, seed: int = 0,
) -> Graph:  # fmt: skip
    """The small regime: three wired stages."""
    g = GraphBuilder("randwire_small", dtype)
    x = g.input("image", (batch, 3, size, size))
    x = _conv(g, x, channels // 2, "conv1", loss)
    x = _conv(g, g.relu(x), channels, "conv2", loss)
    stages = ((nodes, channels), (nodes, 2 * channels), (nodes, 4 * channels))
    return _wired(g, x, stages, 3, seed, loss)


def randwire(
    batch: int = 32, size: int = 224, dtype: str = "f32", loss: bool = True,
    channels: int = 109, nodes: int = 32, seed: int = 0,
) -> Graph:  # fmt: skip
    """The regular regime with 109 channels."""
    return _regular("randwire", batch, size, dtype, loss, channels, nodes, seed)


def randwire_large(
    batch: int = 32, size: int = 224, dtype: str = "f32", loss: bool = True,
    channels: int = 154, nodes: int = 32, seed: int = 0,
) -> Graph:  # fmt: skip
    """The regular regime with 154 channels."""
    return _regular("randwire_large", batch, size, dtype, loss, channels, nodes, seed)


def _regular(
    name: str, batch: int, size: int, dtype: str, loss: bool, channels: int, nodes: int, seed: int
) -> Graph:
    """Four wired stages, the first of half the nodes."""
    g = GraphBuilder(name, dtype)
    x = g.input("image", (batch, 3, size, size))
    x = _conv(g, x, channels // 2, "conv1", loss)
    stages = (
        (nodes // 2, channels),
        (nodes, 2 * channels),
        (nodes, 4 * channels),
        (nodes, 8 * channels),
    )
    return _wired(g, x, stages, 2, seed, loss)


def _wired(
    g: GraphBuilder, x: Tensor, stages: tuple[tuple[int, int], ...], first: int, seed: int,
    loss: bool,
) -> Graph:  # fmt: skip
    for number, (nodes, channels) in enumerate(stages, first):
        with g.scope(f"conv{number}"):
            edges = watts_strogatz(nodes, NEIGHBOURS, REWIRING, seed * 16 + number)
            x = _stage(g, x, nodes, edges, channels, loss)
    with g.scope("classifier"):
        x = g.conv(g.relu(x), HEAD, 1, bias=False)
        x = g.relu(g.norm(x, "batch_norm", "bn", training=loss), "relu_out")
        x = g.flatten(g.global_pool(x))
        x = g.linear(x, 1000, "fc")
    return finish(g, x, loss)


def _stage(
    g: GraphBuilder, x: Tensor, nodes: int, edges: Edges, channels: int, training: bool
) -> Tensor:
    made: list[Tensor] = []
    for node in range(nodes):
        sources = [made[a] for a, b in edges if b == node]
        with g.scope(f"node{node}"):
            inside = _weighted_sum(g, sources) if sources else x
            made.append(_node(g, inside, channels, 1 if sources else 2, training))
    ends = [made[node] for node in range(nodes) if all(a != node for a, _ in edges)]
    if len(ends) == 1:
        return ends[0]
    return g.elementwise("scale", g.add(*ends, name="sum"), name="mean")


def _weighted_sum(g: GraphBuilder, sources: list[Tensor]) -> Tensor:
    if len(sources) == 1:
        return sources[0]
    gates = g.elementwise("sigmoid", g.parameter("weight", (len(sources),)), name="gates")
    each = g.split(gates, (1,) * len(sources), name="gate")
    scaled = [g.mul(x, gate, "scaled") for x, gate in zip(sources, each, strict=True)]
    return g.add(*scaled, name="sum")


def _node(g: GraphBuilder, x: Tensor, channels: int, stride: int, training: bool) -> Tensor:
    width = x.shape[1]
    x = g.relu(x)
    x = g.conv(x, width, 3, stride=stride, padding=1, groups=width, bias=False, name="depthwise")
    x = g.conv(x, channels, 1, bias=False, name="pointwise")
    return g.norm(x, "batch_norm", "bn", training=training)


def _conv(g: GraphBuilder, x: Tensor, channels: int, name: str, training: bool) -> Tensor:
    with g.scope(name):
        x = g.conv(x, channels, 3, stride=2, padding=1, bias=False)
        return g.norm(x, "batch_norm", "bn", training=training)
