"""The named strategies: each is what its name says, on models that have what it needs."""

from collections import Counter

import pytest

from partita.cluster import resolve
from partita.jobs.simulate import simulate_stage
from partita.jobs.strategies import STRATEGIES
from partita.jobs.workload import load
from partita.program import Kind
from partita.verify.pipelines import unlike_routings

CLUSTER = resolve("4xA100")


def dims(stage, op):
    return stage.dims()[op]


@pytest.fixture(scope="module")
def bert():
    return load("bert-base@64", batch=8).graph


def tensor_stage(graph, size=4):
    stages = STRATEGIES["tensor"].stages(graph, size)
    return next(s for s in stages if [a.size for a in s.mesh.axes] == [size])


def test_megatron_cuts_columns_then_rows(bert):
    stage = tensor_stage(bert)
    layer = "bert.encoder.layer.0."
    assert dims(stage, f"{layer}attention.self.query") == ("n",)
    assert dims(stage, f"{layer}attention.self.attention") == ("h",)
    assert dims(stage, f"{layer}attention.output.dense") == ("k",)
    assert dims(stage, f"{layer}intermediate.dense") == ("n",)
    assert dims(stage, f"{layer}output.dense") == ("k",)


def test_megatron_sums_twice_per_layer_forward(bert):
    forward = load("bert-base@64", batch=8, training=False)
    stage = tensor_stage(forward.graph)
    program = simulate_stage(forward, CLUSTER, stage, 1).timeline.program
    sums = Counter(
        program.blocks[block].split(".")[3]
        for block, kind in zip(program.block, program.kind, strict=True)
        if kind == Kind.COLLECTIVE and "encoder.layer" in program.blocks[block]
    )
    assert set(sums.values()) == {2}


def test_every_inner_axis_is_offered(bert):
    sizes = {
        tuple(axis.size for axis in stage.mesh.axes)
        for stage in STRATEGIES["tensor"].stages(bert, 4)
    }
    assert sizes == {(2, 2), (4,)}


def test_experts_are_spread_by_tensor_parallelism():
    graph = load("moe@32", batch=8).graph
    stage = tensor_stage(graph)
    kinds = {op.name: op.kind for op in graph.ops if op.phase == "forward"}
    experts = [n for n, kind in kinds.items() if kind in ("expert_linear", "moe_dispatch")]
    assert experts
    assert {dims(stage, name) for name in experts} == {("e",)}


def test_one_weird_trick_cuts_convolutions_by_batch_and_dense_layers_by_features():
    graph = load("alexnet", batch=64).graph
    (stage,) = STRATEGIES["one-weird-trick"].stages(graph, 4)
    assert dims(stage, "features.0") == ("b",)
    assert dims(stage, "features.10") == ("b",)
    assert dims(stage, "classifier.1")[0] in ("n", "k")
    assert dims(stage, "classifier.4")[0] in ("n", "k")


def test_spatial_cuts_images_by_rows():
    graph = load("unet", batch=1).graph
    (stage,) = STRATEGIES["spatial"].stages(graph, 2)
    kinds = Counter(
        dims(stage, op.name)[0] for op in graph.ops if op.phase == "forward" and op.kind == "conv"
    )
    assert kinds["h"] > 0.8 * sum(kinds.values())


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("model", ["alexnet", "bert-base@32", "rnnlm", "moe@32"])
def test_every_strategy_runs_on_every_kind_of_model(name, model):
    workload = load(model, batch=8)
    stage = STRATEGIES[name].stages(workload.graph, 4)[0]
    assert simulate_stage(workload, CLUSTER, stage, 1).step_s > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("batch", "size"), [(8, 4), (2, 4), (6, 4), (4, 8)])
def test_dispatches_and_combines_of_every_strategy_route_the_same_groups(strategy, batch, size):
    graph = load("moe@32", batch=batch).graph
    stages = STRATEGIES[strategy].stages(graph, size)
    assert stages
    for stage in stages:
        assert unlike_routings(graph, [stage]) == []
