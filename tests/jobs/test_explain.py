"""Explaining a plan: the prices of alternatives are those of the problem, the layouts DTensor's."""

import math
from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.errors import PlanError
from partita.graph.splits import routed_pairs
from partita.jobs.check_plan import check_plan
from partita.jobs.explain import describe, explain, op_layouts, parameter_placements
from partita.jobs.shard import shard
from partita.jobs.simulate import data_parallel
from partita.jobs.workload import load, load_ref
from partita.plans import (
    Axis,
    ClusterRef,
    Mesh,
    OpSplit,
    Origin,
    Plan,
    Prediction,
    Stage,
)


@pytest.fixture(scope="module")
def alexnet():
    plan = shard("alexnet", "4xV100", batch=64).plan
    return plan, load_ref(plan.model).graph, resolve("4xV100")


def test_alternatives_are_all_other_choices_best_first(alexnet):
    told = explain(*alexnet, "classifier.1")
    prices = [a.alone_s if a.together_s is None else a.together_s for a in told.alternatives]
    assert prices == sorted(prices)
    assert told.choice not in [other.choice for other in told.alternatives]
    assert len({other.choice for other in told.alternatives}) == len(told.alternatives)


def test_others_free_to_follow_never_cost_more_than_others_left_alone(alexnet):
    told = explain(*alexnet, "classifier.4")
    followed = [a for a in told.alternatives if a.together_s is not None]
    assert followed
    slack = 0.03 * alexnet[0].prediction.step_s  # the plan need not be the estimate's optimum
    assert all(a.together_s <= a.alone_s + slack for a in followed)


def test_the_reason_is_a_sentence(alexnet):
    told = explain(*alexnet, "features.0")
    assert told.why()
    assert describe(told.choice).split(", ")[0].count("x") == len(told.choice.dims) - 1


def test_layouts_are_those_of_the_split(alexnet):
    plan, graph, _ = alexnet
    told = explain(*alexnet, "classifier.1")
    layouts = dict(told.layouts)
    expected = dict(op_layouts(graph, graph.op("classifier.1"), told.choice))
    assert layouts == {name: " ".join(map(str, layout)) for name, layout in expected.items()}
    assert len(plan.stages[0].mesh.axes) == len(layouts["classifier.1"].split())


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (0, ["all_reduce"]),
        (1, ["reduce_scatter", "all_gather"]),
        (2, ["reduce_scatter", "all_gather"]),
        (3, ["reduce_scatter", "all_gather", "all_gather"]),
    ],
)
def test_how_a_gradient_is_summed_follows_from_how_its_parameter_is_kept(alexnet, zero, expected):
    plan, graph, cluster = alexnet
    stage = data_parallel(graph, cluster, zero)
    told = explain(replace(plan, stages=(stage,)), graph, cluster, "classifier.1")
    weight = [sent for sent in told.sent if "classifier.1.weight" in sent.what]
    assert [sent.collective for sent in weight] == expected
    assert {sent.size_bytes for sent in weight} == {graph.tensor("classifier.1.weight").size_bytes}


def test_an_unknown_op_is_answered_with_the_nearest(alexnet):
    with pytest.raises(PlanError, match=r"splits no op 'clasifier\.1'; did you mean classifier\.1"):
        explain(*alexnet, "clasifier.1")


def test_parameters_in_shares_are_sharded_where_they_would_be_copied(alexnet):
    _, graph, _ = alexnet
    mesh = Mesh((Axis("x", 2), Axis("y", 2)), (0, 1, 2, 3))
    names = [op.name for op in graph.ops if op.phase == "forward"]
    splits = {
        "features.0": OpSplit("features.0", ("b", "n"), 3),
        "classifier.1": OpSplit("classifier.1", ("n", "k")),
    }
    stage = Stage("m", mesh, tuple(splits.get(n, OpSplit(n, ("", ""))) for n in names))
    placements = parameter_placements(stage, graph)
    assert placements["features.0.weight"] == ("Shard(0)", "Shard(0)")
    assert placements["classifier.1.weight"] == ("Shard(0)", "Shard(1)")
    assert placements["classifier.1.bias"] == ("Shard(0)", "Replicate()")
    assert placements["features.3.weight"] == ("Replicate()", "Replicate()")
    assert set(placements) == {parameter.name for parameter in graph.parameters}


@pytest.fixture(scope="module")
def experts():
    """A data-parallel plan of a model with experts, its graph and machine."""
    machine, work = resolve("2xA100"), load("moe@16", batch=4)
    stage = data_parallel(work.graph, machine)
    plan = Plan(
        work.ref(),
        ClusterRef("2xA100", 2, machine.fingerprint()),
        (stage,),
        Prediction(1.0, 0.0, 1.0, 0.0, (1.0, 1.0), (1.0, 1.0)),
        Origin("data", "feasible", "as said", 0, 0.0, "0"),
    )
    return plan, work.graph, machine


def test_a_dispatch_to_experts_changes_together_with_its_combine(experts):
    dispatch, combine = routed_pairs(experts[1])[0]
    for op in (dispatch.name, combine.name):
        told = explain(*experts, op)
        assert {other.choice.dims for other in told.alternatives} == {("e",), ("k",), ("",)}
        assert all(math.isfinite(other.alone_s) for other in told.alternatives)
        # The tokens are cut: every other split asks the other op to follow.
        assert all(o.together_s == pytest.approx(o.alone_s) for o in told.alternatives)


def test_verifying_a_plan_names_the_dispatch_and_combine_that_are_split_unlike(experts):
    plan, graph, _ = experts
    dispatch, combine = routed_pairs(graph)[0]
    (stage,) = plan.stages
    splits = tuple(replace(s, dims=("",)) if s.op == combine.name else s for s in stage.splits)
    wrong = replace(plan, stages=(replace(stage, splits=splits),))
    assert check_plan(wrong) == (
        f"{dispatch.name} routes tokens in 2 groups and {combine.name} gives them back in one "
        "group; split both along 'b' into the same shares",
    )
