"""Layers that are the modules of a model: what is opened, what stays whole, what goes along."""

from partita.cluster import resolve
from partita.costs.module_layers import module_layers
from partita.costs.placement import placement_model
from partita.graph import GraphBuilder, training_graph
from partita.graph.record import Graph


def decoder(blocks: int, width: int = 64, head: int = 8) -> Graph:
    """An embedding-like layer, equal blocks of two linear layers with a residual, a head."""
    g = GraphBuilder("blocks")
    x = g.linear(g.input("x", (32, 8)), width, "embed")
    for number in range(blocks):
        with g.scope(f"h.{number}"):
            with g.scope("mlp"):
                y = g.linear(g.relu(g.linear(x, 4 * width, "up")), width, "down")
            x = g.add(x, y)
    return g.finish(g.linear(x, head, "head"))


def layers_of(graph: Graph, devices: int) -> tuple[tuple[str, ...], ...]:
    model = placement_model(training_graph(graph), resolve(f"{devices}xA100"))
    return module_layers(model, devices)


def test_blocks_stay_whole_and_the_list_of_them_is_opened() -> None:
    layers = layers_of(decoder(8), 4)
    blocks = [names for names in layers if names[0].startswith("h.")]
    assert [names[0] for names in blocks] == [f"h.{i}.mlp.up" for i in range(8)]
    assert all(len(names) >= 4 for names in blocks)


def test_a_block_too_large_for_a_device_is_opened() -> None:
    layers = layers_of(decoder(2), 8)
    assert ("h.0.mlp.down", "h.0.add") in layers


def test_layers_are_stretches_of_the_models_order() -> None:
    graph = decoder(5)
    names = [name for layer in layers_of(graph, 3) for name in layer]
    assert names == [op.name for op in graph.ops]


def test_a_block_that_only_holds_a_list_is_no_list() -> None:
    """As those of T5: the sublayers add to the stream themselves."""
    g = GraphBuilder("blocks")
    x = g.input("x", (32, 64))
    for number in range(6):
        for sublayer in range(2):
            with g.scope(f"block.{number}.layer.{sublayer}"):
                y = g.linear(g.relu(g.linear(x, 256, "up")), 64, "down")
                x = g.add(x, y)
    layers = layers_of(g.finish(x), 4)  # a block takes two thirds of a device's share
    assert [names[0] for names in layers] == [f"block.{i}.layer.0.up" for i in range(6)]
