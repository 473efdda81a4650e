"""Bytes moved: each tensor once, with the exceptions of the table."""

import pytest
from hypothesis import given, settings

from partita.graph import GraphBuilder, training_graph
from partita.graph.traffic import elements, traffic, traffic_bytes
from tests.graph.strategies import graphs


def net(*steps):
    """A training graph of a linear layer and what `steps` makes of it, with a loss."""
    g = GraphBuilder("net")
    x = g.linear(g.input("x", (4, 8)), 8, "fc", bias=False)
    for step in steps:
        x = step(g, x)
    return training_graph(g.finish(g.one("mse_loss", x, g.input("y", x.shape), name="loss")))


def moved(graph, name, **factors):
    op = graph.op(name)
    return traffic(graph.call(op), *elements(graph, op), factors).total


def test_a_layer_moves_its_tensors_once_and_its_share_when_split():
    graph = net()
    x, w, y = 4 * 8 * 4, 8 * 8 * 4, 4 * 8 * 4
    assert moved(graph, "fc") == x + w + y
    assert moved(graph, "fc", b=2) == x / 2 + w + y / 2
    assert moved(graph, "fc", n=4) == x + w / 4 + y / 4
    assert moved(graph, "fc", k=4) == x / 4 + w / 4 + y
    assert traffic_bytes(graph, graph.op("fc.wgrad")) == y + x + w


def test_weights_come_from_memory_and_activations_may_not():
    graph = net()
    op = graph.op("fc")
    parts = traffic(graph.call(op), *elements(graph, op), {})
    assert (parts.given, parts.computed) == (8 * 8 * 4, 2 * 4 * 8 * 4)


def test_views_are_free_forward():
    graph = net(lambda g, x: g.reshape(x, (2, 2, 8)), lambda g, x: g.split(x, (3, 5))[0])
    assert moved(graph, "reshape") == moved(graph, "split") == 0
    assert moved(graph, "reshape.dgrad") == 0
    assert moved(graph, "split.dgrad") == (4 * 3 + 4 * 8) * 4


def test_a_sum_hands_its_gradient_on_but_a_sum_of_gradients_moves_bytes():
    graph = net(lambda g, x: g.add(x, g.relu(x)))
    assert moved(graph, "add") == 3 * 4 * 8 * 4
    assert moved(graph, "add.dgrad") == 0
    assert moved(graph, "fc.grad.sum") == 3 * 4 * 8 * 4


def test_a_lookup_moves_only_its_rows():
    g = GraphBuilder("lookup")
    rows = g.embedding(g.input("ids", (3,), "i64"), 1000, 8)
    graph = training_graph(g.finish(g.one("mse_loss", rows, g.input("y", (3, 8)), name="loss")))
    assert moved(graph, "embedding") == 3 * 8 + 2 * 3 * 8 * 4
    assert moved(graph, "embedding.wgrad") == 3 * 8 + 3 * 3 * 8 * 4


def test_an_optimizer_reads_and_writes_its_states():
    graph = net()
    w = 8 * 8 * 4
    assert moved(graph, "fc.weight.update") >= 7 * w  # read w, g, m, v; write w, m, v


@settings(max_examples=60, deadline=None)
@given(graph=graphs())
def test_an_op_of_any_kind_moves_some_bytes_or_none(graph):
    for op in graph.ops:
        assert traffic_bytes(graph, op) >= 0


def test_an_unknown_kind_is_costed_by_its_bytes():
    g = GraphBuilder("odd")
    (y,) = g.op("warp", g.input("x", (2, 3)), shapes=[(5,)])
    graph = g.finish(y)
    assert traffic_bytes(graph, graph.op("warp")) == (6 + 5) * 4


@pytest.mark.parametrize("positions", [1, 7])
def test_a_recurrent_layer_reads_the_weights_of_its_state_at_every_position(positions):
    g = GraphBuilder("rnn")
    y = g.recurrent(g.input("x", (2, positions, 3)), 5, bias=False)
    graph = g.finish(y)
    weights = (20 * 3 + positions * 20 * 5) * 4  # all inputs are multiplied at once
    assert moved(graph, "lstm") == weights + (2 * positions * (3 + 5)) * 4
