"""Plans in the field's words: what an axis is called, and the line that names a plan."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.degrees import (
    MEANINGS,
    TITLES,
    axis_names,
    axis_use,
    meaning,
    num_tokens,
    summary,
)
from partita.graph import GraphBuilder
from partita.graph.loops import LOOPS, loop_nest
from partita.jobs.simulate import data_splits
from partita.jobs.strategies import STRATEGIES
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage
from partita.schedules.named import NAMED
from partita.zoo import build

ONCE = Schedule("1f1b", 1)


@pytest.fixture(scope="module")
def gpt2():
    return build("gpt2", batch=8)


def transformer(**dims):
    """A graph with one op of each sort, and a stage on four devices that splits it as told."""
    g = GraphBuilder("small")
    ids = g.input("ids", (8, 16), "i64")
    x = g.embedding(ids, 64, 32, "wte")
    x = g.norm(x, name="norm")
    x = g.relu(g.linear(x, 32, "fc"), "relu")
    graph = g.finish(g.linear(x, 64, "out"))
    names = [op.name for op in graph.ops]
    splits = tuple(OpSplit(name, (dims.get(name, ""),)) for name in names)
    return graph, Stage("model", Mesh((Axis("x", 4),), (0, 1, 2, 3)), splits)


def named(graph, stage):
    axes = zip(stage.mesh.axes, axis_names(graph, stage), strict=True)
    mesh = replace(stage.mesh, axes=tuple(replace(axis, name=name) for axis, name in axes))
    return replace(stage, mesh=mesh)


@pytest.mark.parametrize(
    ("dims", "name"),
    [
        ({"wte": "b", "norm": "b", "fc": "b", "relu": "b", "out": "b"}, "dp"),
        ({"fc": "b"}, "dp"),
        ({"wte": "v", "fc": "n", "relu": "c", "out": "k"}, "tp"),
        ({"wte": "s", "norm": "s", "fc": "n", "out": "k"}, "tp_sp"),
        ({"wte": "s", "norm": "s", "fc": "s", "out": "s"}, "cp"),
        ({"fc": "b", "out": "n"}, "x"),
        ({"fc": "s", "out": "n"}, "x"),
        ({"relu": "b"}, "x"),
        ({}, "x"),
    ],
)
def test_an_axis_is_named_where_all_ops_agree(dims, name):
    assert axis_names(*transformer(**dims)) == (name,)


def test_experts_are_expert_parallel_with_the_batch_or_features_beside_them():
    g = GraphBuilder("moe")
    x = g.input("x", (4, 8, 16))
    scores = g.one("moe_router", x, g.parameter("gate", (4, 16)), name="route", top_k=1)
    tokens = g.one("moe_dispatch", x, scores, name="dispatch", top_k=1)
    y = g.one("expert_linear", tokens, g.parameter("w", (4, 16, 16)), name="experts")
    graph = g.finish(y)
    assert axis_use(graph, [("route", "b"), ("experts", "e")]).name == "ep"
    assert axis_use(graph, [("route", "k"), ("experts", "e")]).name == "tp_ep"
    assert axis_use(graph, [("route", "b"), ("experts", "c")]).name == "dp"


def test_strategies_are_called_what_they_are(gpt2):
    (data,) = STRATEGIES["fsdp"].stages(gpt2, 8)
    assert summary([named(gpt2, data)], ONCE, gpt2) == "dp=8 zero=3"
    tensor = [named(gpt2, stage) for stage in STRATEGIES["tensor"].stages(gpt2, 8)]
    assert [summary([stage], ONCE) for stage in tensor] == ["dp=4 tp=2", "dp=2 tp=4", "tp=8"]


def test_batch_for_convolutions_and_features_for_linear_layers_is_told_as_a_mixture():
    graph = build("alexnet", batch=8)
    (stage,) = STRATEGIES["one-weird-trick"].stages(graph, 4)
    stage = named(graph, stage)
    assert [axis.name for axis in stage.mesh.axes] == ["x"]
    assert summary([stage], ONCE, graph) == "x=4 (batch in 9 ops, features in 4 ops)"
    assert summary([stage], ONCE).startswith("x=4 (b in ")


def test_images_by_rows_are_spatial():
    g = GraphBuilder("image")
    graph = g.finish(g.conv(g.input("x", (2, 3, 16, 16)), 4, 3, name="conv"))
    stage = Stage("s", Mesh((Axis("x", 2),), (0, 1)), (OpSplit("conv", ("h",)),))
    assert axis_names(graph, stage) == ("spatial",)


def test_two_axes_of_one_meaning_have_two_names_and_one_degree(gpt2):
    mesh = Mesh((Axis("x", 2), Axis("y", 4)), tuple(range(8)))
    stage = named(gpt2, Stage("s", mesh, data_splits(gpt2, mesh)))
    assert [axis.name for axis in stage.mesh.axes] == ["dp", "dp2"]
    assert summary([stage], ONCE) == "dp=8"


def stage(name, devices, axes, zero=0, **fields):
    splits = (OpSplit(f"{name}.fc", ("",) * len(axes), zero),)
    return Stage(name, Mesh(tuple(axes), tuple(devices)), splits, **fields)


def test_a_pipeline_is_told_by_degrees_schedule_and_microbatches():
    axes = (Axis("dp", 8), Axis("tp", 2))
    stages = [stage(f"s{i}", range(16 * i, 16 * i + 16), axes, 1) for i in range(4)]
    told = summary(stages, Schedule("1f1b", 16))
    assert told == "pp=4 dp=8 tp=2 zero=1, 1F1B, 16 micro-batches"


def test_several_stages_on_a_group_are_virtual_stages():
    stages = [stage(f"s{i}", [i % 2], (Axis("dp", 1),)) for i in range(6)]
    told = summary(stages, Schedule("interleaved", 4))
    assert told == "pp=2 vpp=3, interleaved 1F1B, 4 micro-batches"


def test_stages_that_differ_are_told_apart():
    wide = stage("a", (0, 1), (Axis("dp", 2),))
    deep = stage("b", (2, 3), (Axis("tp", 2),))
    last = stage("c", (4,), ())
    told = summary([wide, deep, last], Schedule("gpipe", 2))
    assert told == "pp=3 1 x [dp=2] + 1 x [tp=2] + 1 x [one device], GPipe, 2 micro-batches"


def test_ragged_shares_and_recompute_are_said():
    ragged = stage("a", (0, 1, 2), (Axis("dp", 3, (2, 2, 1)),), checkpointing="full")
    assert summary([ragged], ONCE) == "dp=3 (ragged 2:2:1), full recompute"
    light = stage(
        "b", (3, 4, 5), (Axis("dp", 3, (2, 2, 1)),), checkpointing="selective", recomputed=("b.fc",)
    )
    told = summary([ragged, light], Schedule("zb-h1", 1))
    assert told == (
        "pp=2 dp=3 (ragged 2:2:1), full recompute in 1 of 2 stages, "
        "selective recompute in 1 of 2 stages, ZB-H1, 1 micro-batch"
    )


def test_one_stage_with_microbatches_has_no_schedule():
    assert summary([stage("a", (0,), ())], Schedule("1f1b", 4)) == "one device, 4 micro-batches"
    assert summary([stage("a", (0,), ())], Schedule("1f1b", 1)) == "one device"


def test_sequence_and_expert_parallel_stand_beside_their_axis():
    told = summary([stage("a", range(8), (Axis("dp", 4), Axis("tp_sp", 2)))], ONCE)
    assert told == "dp=4 tp=2 sp"
    assert summary([stage("a", range(2), (Axis("tp_ep", 2),))], ONCE) == "tp=2 ep=2"


def test_zero_stages_that_differ_are_listed_with_those_of_parameters_only(gpt2):
    (told,) = STRATEGIES["zero1"].stages(gpt2, 2)
    splits = list(told.splits)
    first = next(i for i, split in enumerate(splits) if split.op.endswith("c_fc"))
    splits[first] = replace(splits[first], zero=0)
    mixed = named(gpt2, replace(told, splits=tuple(splits)))
    assert summary([mixed], ONCE, gpt2) == "dp=2 zero=0/1"
    assert summary([mixed], ONCE) == "dp=2 zero=1"


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    words=st.permutations(["dp", "tp", "cp", "x", "ep", "dp2"]),
)
def test_degrees_multiply_to_the_devices(sizes, words):
    axes = tuple(Axis(word, size) for word, size in zip(words, sizes, strict=False))
    devices = range(math.prod(sizes))
    told = summary([stage("a", devices, axes)], ONCE)
    product = 1
    for number in re.findall(r"=(\d+)", told):
        product *= int(number)
    assert product == len(devices)


def test_every_meaning_is_of_a_loop_dim_that_its_kind_can_have(gpt2):
    assert set(MEANINGS) <= set(LOOPS)
    for graph in (gpt2, build("resnet50", batch=2), build("rnnlm", batch=2)):
        for op in graph.ops:
            call = graph.call(op)
            if op.kind in MEANINGS and op.kind != "matmul":
                for dim in loop_nest(call).dims:
                    assert dim.whole or meaning(call, dim.name), f"{op.kind} {dim.name}"


def test_schedules_are_written_as_their_papers_do():
    assert set(TITLES) == set(NAMED)
    for name, title in TITLES.items():
        assert NAMED[name].title.startswith(title)


def test_a_language_model_has_tokens_and_an_image_model_none(gpt2):
    assert num_tokens(gpt2) == 8 * 1024
    assert num_tokens(build("alexnet", batch=8)) is None


def test_ids_that_are_seen_as_one_row_before_they_are_looked_up_are_tokens():
    """As GPT-2 of transformers does; positions that no input goes into are none."""
    g = GraphBuilder("model")
    ids = g.input("ids", (4, 16), "i64")
    row = g.reshape(ids, (4, 16), name="view")
    words = g.embedding(row, 100, 8, name="words")
    graph = g.finish(words)
    assert num_tokens(graph) == 64
    floats = GraphBuilder("image")
    x = floats.input("x", (4, 16))
    assert num_tokens(floats.finish(floats.relu(x))) is None
