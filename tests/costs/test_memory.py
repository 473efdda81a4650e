"""Memory: what a model holds, by the arithmetic everyone knows."""

import pytest

from partita.cluster import resolve
from partita.costs.memory import model_memory, workspace_bytes
from partita.graph import GraphBuilder, training_graph
from partita.zoo import build


def test_adam_in_mixed_precision_holds_sixteen_bytes_per_parameter():
    memory = model_memory(training_graph(build("gpt2", batch=1), "adam"))
    n = build("gpt2", batch=1).num_parameters
    assert memory.parameters == 2 * n
    assert memory.gradients == 2 * n
    assert memory.states == 12 * n


@pytest.mark.parametrize(
    ("optimizer", "dtype", "each"),
    [("sgd", "f32", 0), ("momentum", "f32", 4), ("adamw", "f32", 8), ("sgd", "bf16", 4)],
)
def test_states_by_optimizer_and_precision(optimizer, dtype, each):
    g = GraphBuilder("layer", dtype=dtype)
    layer = g.finish(g.linear(g.input("x", (4, 5)), 2, "a", bias=False))
    assert model_memory(training_graph(layer, optimizer)).states == 10 * each


def test_saved_activations_are_what_the_backward_reads():
    g = GraphBuilder("mlp")
    x = g.input("x", (4, 8))
    hidden = g.relu(g.linear(x, 16, "a", bias=False))
    graph = training_graph(g.finish(g.linear(hidden, 2, "b", bias=False)))
    # x for a's weights; relu's output for its own gradient and for b's weights
    assert model_memory(graph).saved_activations == (4 * 8 + 4 * 16) * 4


def test_a_forward_graph_holds_parameters_only():
    memory = model_memory(build("squeezenet1_1", batch=1, loss=False))
    assert memory.total == memory.parameters > 0


def test_a_gpu_keeps_some_memory_for_itself_and_a_cpu_does_not():
    assert workspace_bytes(resolve("1xA100").kind_of(0)) == 1024**3
    assert workspace_bytes(resolve("1xCPU").kind_of(0)) == 0
