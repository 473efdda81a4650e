import pytest

from partita.cluster import resolve
from partita.costs.measured import Environment
from partita.costs.partition import PartitionConstraints, partition_model
from partita.costs.profiles import ModelProfile, OpTime
from partita.costs.roofline import op_cost
from partita.errors import ClusterError, InputError
from partita.graph import GraphBuilder, training_graph
from partita.graph.record import Graph
from partita.zoo import build


def gpt2(batch: int = 4) -> Graph:
    return training_graph(build("gpt2", batch=batch, loss=True))


def test_every_forward_op_is_in_one_layer_and_all_time_is_counted() -> None:
    graph, cluster = gpt2(), resolve("4xA100")
    model = partition_model(graph, cluster)
    forward = [op for op in graph.ops if op.phase == "forward"]
    assert sorted(name for names in model.layers for name in names) == sorted(
        op.name for op in forward
    )
    kind = cluster.kind_of(0)
    seconds = sum(op_cost(graph, op, kind).seconds for op in forward)
    assert sum(node.fwd_ms for node in model.problem.nodes) == pytest.approx(seconds * 1e3)
    assert all(node.bwd_ms >= 0 for node in model.problem.nodes)
    assert model.problem.alike


def test_parameters_gradients_and_states_are_held_once_and_tied_ones_again() -> None:
    graph = gpt2()
    model = partition_model(graph, resolve("4xA100"))
    assert [name for name, _ in model.tied] == ["wte.weight"]
    updated = [op for op in graph.ops if op.phase == "update"]
    once = sum(
        graph.tensor(name).size_bytes for op in updated for name in (op.inputs[0], *op.inputs[1:])
    )
    copy = 2 * graph.tensor("wte.weight").size_bytes
    assert sum(node.param_bytes for node in model.problem.nodes) == once + copy


def test_edges_carry_the_tensors_between_layers_and_their_gradients() -> None:
    build = GraphBuilder("two")
    x = build.input("x", (8, 16), dtype="f32")
    hidden = build.linear(x, 32, name="first")
    forward = build.finish(build.linear(hidden, 4, name="second"))
    edge = partition_model(training_graph(forward), resolve("2xA100")).problem.edges[0]
    assert (edge.fwd_bytes, edge.bwd_bytes) == (8 * 32 * 4, 8 * 32 * 4)
    inference = partition_model(forward, resolve("2xA100")).problem
    assert inference.edges[0].bwd_bytes == 0
    assert all(node.activation_bytes == 0 for node in inference.nodes)


def test_unlike_devices_have_times_and_links_of_their_own() -> None:
    problem = partition_model(gpt2(), resolve("2xH100+2xA100")).problem
    node = max(problem.nodes, key=lambda node: node.fwd_ms)
    assert len(node.times_ms) == 4
    assert node.times_ms[0] < node.times_ms[3]
    assert problem.links is not None
    assert not problem.alike


def test_only_the_devices_asked_for_are_used() -> None:
    cluster = resolve("8xA100")
    assert partition_model(gpt2(), cluster, 3).problem.num_devices == 3
    with pytest.raises(ClusterError, match="9 devices are asked for"):
        partition_model(gpt2(), cluster, 9)


def test_a_cap_never_exceeds_what_a_device_has() -> None:
    cluster = resolve("2xA100")
    room = partition_model(gpt2(), cluster).problem.memory_bytes
    less = partition_model(gpt2(), cluster, None, PartitionConstraints(memory_bytes=1e9)).problem
    more = partition_model(gpt2(), cluster, None, PartitionConstraints(memory_bytes=1e15)).problem
    assert less.memory_bytes == (1e9, 1e9)
    assert more.memory_bytes == room
    assert max(room) < cluster.kind_of(0).memory_bytes


def profile_of(graph: Graph, seconds: float) -> ModelProfile:
    return ModelProfile(
        graph.name,
        graph.fingerprint(),
        Environment("cpu", "2.13", True),
        tuple(
            OpTime(op.name, op.kind, "", seconds, 2 * seconds, 0.0, 0.0, 0, 0, 0, 0, 0)
            for op in graph.ops
        ),
    )


def test_measured_times_replace_the_model() -> None:
    forward = build("alexnet", batch=2, loss=True)
    model = partition_model(
        training_graph(forward), resolve("2xA100"), profile=profile_of(forward, 1e-3)
    )
    for node, names in zip(model.problem.nodes, model.layers, strict=True):
        assert (node.fwd_ms, node.bwd_ms) == pytest.approx((len(names), 2 * len(names)))


def test_a_profile_of_another_model_or_for_unlike_devices_is_refused() -> None:
    forward = build("alexnet", batch=2, loss=True)
    with pytest.raises(InputError, match="profile: has no time for the op"):
        partition_model(gpt2(), resolve("2xA100"), profile=profile_of(forward, 1e-3))
    with pytest.raises(InputError, match="profile: is of one device"):
        partition_model(
            training_graph(forward), resolve("H100+A100"), profile=profile_of(forward, 1e-3)
        )
