"""Dispatches to experts and their combines are found by the tokens that pass between them."""

from partita.graph import GraphBuilder, training_graph
from partita.graph.routing import routed_pairs
from partita.zoo import build


def names(graph):
    return [(dispatch.name, combine.name) for dispatch, combine in routed_pairs(graph)]


def routed(g, x, gates, name):
    return g.one("moe_dispatch", x, gates, name=f"{name}.dispatch", top_k=1)


def given_back(g, y, gates, name):
    return g.one("moe_combine", y, gates, name=f"{name}.combine", top_k=1)


def gated(g):
    x = g.input("x", (4, 6))
    return x, g.one("moe_router", x, g.parameter("gate.weight", (2, 6)), name="gate", top_k=1)


def test_every_layer_of_experts_is_a_pair():
    pairs = names(training_graph(build("moe@32", batch=4)))
    assert len(pairs) == 12
    assert all(d.removesuffix("dispatch") == c.removesuffix("combine") for d, c in pairs)


def test_a_model_without_experts_has_none():
    assert names(build("gpt2@32", batch=2)) == []


def test_layers_that_share_their_gates_are_told_apart_by_their_tokens():
    g = GraphBuilder("shared")
    x, gates = gated(g)
    first = given_back(g, g.relu(routed(g, x, gates, "a")), gates, "a")
    second = given_back(g, g.relu(routed(g, first, gates, "b"), name="r"), gates, "b")
    assert names(g.finish(second)) == [("a.dispatch", "a.combine"), ("b.dispatch", "b.combine")]


def test_a_combine_of_what_two_dispatches_sent_belongs_to_both():
    g = GraphBuilder("two")
    x, gates = gated(g)
    y = g.add(routed(g, x, gates, "a"), routed(g, x, gates, "b"))
    graph = g.finish(given_back(g, y, gates, "both"))
    assert names(graph) == [("a.dispatch", "both.combine"), ("b.dispatch", "both.combine")]


def test_places_that_the_model_is_given_belong_to_no_dispatch():
    g = GraphBuilder("given")
    _, gates = gated(g)
    graph = g.finish(given_back(g, g.input("y", (2, 2, 6)), gates, "one"))
    assert names(graph) == []
