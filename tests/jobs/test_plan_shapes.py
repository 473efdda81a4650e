"""Tessel's shapes: pinned, or beside a pipeline that has won."""

import pytest

from partita.errors import InputError
from partita.graph import GraphBuilder
from partita.jobs.check_plan import check_plan
from partita.jobs.plan import plan
from partita.plans import device_groups, shared_stages
from partita.search.base import Stop

QUICK = Stop(time_s=20.0, gap=0.01)


def heavy_start(depth=6, width=1024, batch=4096):
    """One op with half of all the arithmetic, which no cut makes smaller, then a chain."""
    g = GraphBuilder("heavy start")
    y = g.linear(g.input("x", (batch, width)), depth * width, "wide", bias=False)
    y = g.linear(g.elementwise("gelu", y, name="gelu"), width, "back", bias=False)
    for i in range(depth):
        y = g.linear(y, width, f"layer{i}", bias=False)
    return g.finish(y)


def towers(depths=(3, 3), width=1024, batch=1024):
    """Two chains that both read a cast of the input, and meet."""
    g = GraphBuilder("towers")
    start = g.elementwise("relu", g.input("x", (batch, width)), name="start")
    ends = []
    for name, depth in zip("ab", depths, strict=True):
        y = start
        for i in range(depth):
            y = g.linear(y, width, f"{name}{i}", bias=False)
        ends.append(y)
    return g.finish(g.elementwise("add", *ends, name="meet"))


def is_shared(answer):
    return bool(shared_stages(device_groups(answer.plan.stages)))


def test_a_pinned_shape_is_obeyed_and_its_plan_verifies():
    answer = plan(heavy_start(), "2xA100", pin=["shape=m", "micro-batches=4"], stop=QUICK)
    assert is_shared(answer)
    assert answer.plan.schedule.num_microbatches == 4
    assert answer.plan.schedule.name == "searched"
    assert check_plan(answer.plan) == ()
    assert "of the arithmetic on all devices, then a stage on each" in answer.space
    assert {other.name for other in answer.others} == {"m-shape"}
    named = plan(
        heavy_start(), "2xA100", pin=["shape=m", "schedule=1f1b", "micro-batches=4"], stop=QUICK
    )
    assert named.plan.schedule.name == "1f1b"
    assert named.best.step_s > answer.best.step_s


def test_a_line_has_no_shared_stage_and_other_shapes_are_refused():
    answer = plan(heavy_start(), "2xA100", pin=["shape=line", "pp=2"], stop=QUICK)
    assert not is_shared(answer)
    assert answer.plan.schedule.num_microbatches < 64  # of 4,096 samples: none is a single one
    with pytest.raises(InputError, match="write shape=m, shape=nn, shape=k or shape=line"):
        plan(heavy_start(), "2xA100", pin=["shape=x"])


def test_beside_a_pipeline_that_won_the_shape_is_tried():
    graph = heavy_start(depth=3, width=2048, batch=512)
    answer = plan(graph, "2xP100@links=0.01", stop=QUICK)
    assert len(device_groups(answer.plan.stages)) == 2
    assert "m-shape" in {other.name for other in answer.others}
    alone = plan(graph, "2xP100@links=0.01", pin=["pp=2"], stop=QUICK)
    assert "m-shape" not in {other.name for other in alone.others}  # a line was asked for


@pytest.mark.parametrize(
    ("shape", "graph", "groups"),
    [
        ("nn", heavy_start(), ((0, 1, 2), (0, 2, 3))),
        ("k", towers(), ((0, 2), (1, 2))),
    ],
)
def test_other_shapes_are_obeyed_searched_and_verified(shape, graph, groups):
    answer = plan(graph, "2xA100", pin=[f"shape={shape}", "micro-batches=4"], stop=QUICK)
    assert device_groups(answer.plan.stages) == groups
    assert answer.plan.schedule.name == "searched"
    assert {other.name for other in answer.others} == {f"{shape}-shape"}
    assert check_plan(answer.plan) == ()
    usual = plan(
        graph, "2xA100", pin=[f"shape={shape}", "schedule=1f1b", "micro-batches=4"], stop=QUICK
    )
    assert usual.plan.schedule.name == "1f1b"
    assert usual.best.step_s > answer.best.step_s
    assert check_plan(usual.plan) == ()


def test_branches_run_side_by_side_where_that_is_fastest():
    graph, machine = towers((4, 4), 2048, 512), "2xP100@links=0.01"
    answer = plan(graph, machine, max_memory=1.5e9, stop=QUICK)
    assert answer.best.name == "k-shape"  # no chain of segments has a cut between the branches
    assert check_plan(answer.plan) == ()
    line = plan(graph, machine, max_memory=1.5e9, pin=["shape=line"], stop=QUICK)
    assert not is_shared(line)
    assert line.best.step_s > 1.5 * answer.best.step_s


@pytest.mark.parametrize(
    ("shape", "cluster", "words"),
    [
        ("k", "2xA100", "shape=k: the model has no two branches with 10% of the arithmetic each"),
        ("nn", "8xA100", "shape=nn: the model has too few ops for 8 stages around shared ones"),
    ],
)
def test_a_shape_that_the_model_does_not_have_is_refused(shape, cluster, words):
    with pytest.raises(InputError, match=words):
        plan(heavy_start(depth=2), cluster, pin=[f"shape={shape}"], stop=QUICK)
