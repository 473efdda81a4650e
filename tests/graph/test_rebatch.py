"""A graph for another batch is the graph that would have been built for it."""

import pytest

from partita.errors import GraphError
from partita.graph import GraphBuilder, training_graph
from partita.graph.rebatch import MOST_KEPT, batch_of, rebatch
from partita.zoo import build

# Flattened images, class tokens made from nothing, tied and shared tensors, experts' places.
MODELS = ("alexnet", "vit-b16", "t5-small", "moe", "gpt2", "unet", "deepspeech2", "densenet121")


@pytest.mark.parametrize("name", MODELS)
def test_rebatching_is_building_anew(name):
    large = training_graph(build(name, batch=32))
    assert rebatch(large, 8) == training_graph(build(name, batch=8))


def test_a_state_of_zeros_follows_the_batch():
    assert rebatch(build("seq2seq", batch=8), 2) == build("seq2seq", batch=2)


def test_the_same_batch_is_the_same_graph():
    graph = build("alexnet", batch=4)
    assert rebatch(graph, 4) is graph
    assert batch_of(graph) == 4


def test_a_batch_below_one_is_refused():
    with pytest.raises(GraphError, match="a batch of 0; give at least 1"):
        rebatch(build("alexnet", batch=4), 0)


def test_samples_that_are_mixed_cannot_be_taken_apart():
    g = GraphBuilder("mixed")
    a, b = g.input("a", (4, 4)), g.input("b", (4, 4))
    g.finish(g.matmul(a, b))
    with pytest.raises(GraphError, match="mixes samples of the batch"):
        rebatch(g.finish(g.matmul(a, b)), 2)


def test_a_graph_remembers_few_graphs_of_other_batches():
    graph = build("alexnet", batch=64)
    half = rebatch(graph, 32)
    assert rebatch(graph, 32) is half
    for batch in range(1, 1 + MOST_KEPT):
        rebatch(graph, batch)
    assert len(graph.memo["rebatch", ""]) == MOST_KEPT
    again = rebatch(graph, 32)
    assert again == half
