"""Branches of a model that meet are found, and nothing else is taken for one.

Tessel's shapes: pinned, or beside a pipeline that has won.
"""

import pytest

from partita.cluster import resolve
from partita.errors import InputError
from partita.graph import GraphBuilder, training_graph
from partita.jobs.check_plan import check_plan
from partita.jobs.plan import plan
from partita.jobs.shapes import branches, k_shape, shape_plan
from partita.jobs.workload import load
from partita.plans import device_groups, shared_stages
from partita.search.base import Stop


def tower(g, x, name, depth, width=64):
    """Layers with a residual around each."""
    for i in range(depth):
        y = g.linear(x, width, f"{name}{i}", bias=False)
        x = g.elementwise("add", x, g.relu(y, name=f"{name}{i}.relu"), name=f"{name}{i}.add")
    return x


def towers(depths, *, stem=False):
    """Towers that read what costs nothing, or behind a stem with arithmetic."""
    g = GraphBuilder("towers")
    x = g.relu(g.input("x", (16, 64)), name="start")
    x = tower(g, x, "stem", 2) if stem else x
    y, *ends = [tower(g, x, "abcd"[k], depth) for k, depth in enumerate(depths)]
    for k, end in enumerate(ends):
        y = g.elementwise("add", y, end, name=f"meet{k}")
    return training_graph(g.finish(g.linear(y, 64, "head", bias=False)))


def kinds(ops):
    return {op[0] for op in ops}


def test_two_towers_are_branches_and_the_rest_is_behind_them():
    found = branches(towers((20, 20)))
    left, right = found.sides
    assert kinds(left) == {"a", "s"}  # what both read is in the first
    assert kinds(right) == {"b"}
    assert found.meeting == ("meet0", "head")


def test_what_both_read_comes_first_wherever_it_is_made():
    g = GraphBuilder("late mask")
    x, y = g.input("x", (16, 64)), g.input("y", (16, 64))
    one = tower(g, x, "a", 4)
    mask = g.relu(y, name="mask")
    two = tower(g, g.elementwise("add", x, mask, name="b.masked"), "b", 4)
    one = g.elementwise("add", one, mask, name="a.masked")
    graph = training_graph(g.finish(g.elementwise("add", one, two, name="meet")))
    left, right = branches(graph).sides
    assert left[0] == "mask"
    assert right[0] == "b.masked"
    stages = k_shape(load(graph), 2, 0.3)
    assert "mask" in {split.op for split in stages[0].splits}
    plan = shape_plan("k", load(graph), resolve("2xA100"), 2, shared=0.3, schedule="1f1b")
    assert check_plan(plan) == ()


def test_of_four_towers_each_side_gets_as_much():
    left, right = branches(towers((5, 2, 3, 4))).sides
    assert kinds(left) - {"s"} == {"a", "b"}
    assert kinds(right) == {"c", "d"}


@pytest.mark.parametrize(
    "graph",
    [towers((20,)), towers((20, 1)), towers((5, 5), stem=True)],
    ids=["a chain with residuals", "a branch with next to nothing", "a stem before both"],
)
def test_what_is_no_pair_of_branches(graph):
    assert branches(graph) is None


@pytest.mark.parametrize("name", ["gpt2@64", "resnet50@64", "t5-small@32", "inception_v3@96"])
def test_models_that_are_one_line_have_none(name):
    assert branches(load(name, batch=2).graph) is None


QUICK = Stop(time_s=20.0, gap=0.01)


def heavy_start(depth=6, width=1024, batch=4096):
    """One op with half of all the arithmetic, which no cut makes smaller, then a chain."""
    g = GraphBuilder("heavy start")
    y = g.linear(g.input("x", (batch, width)), depth * width, "wide", bias=False)
    y = g.linear(g.elementwise("gelu", y, name="gelu"), width, "back", bias=False)
    for i in range(depth):
        y = g.linear(y, width, f"layer{i}", bias=False)
    return g.finish(y)


def cast_towers(depths=(3, 3), width=1024, batch=1024):
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
        ("k", cast_towers(), ((0, 2), (1, 2))),
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
    graph, machine = cast_towers((4, 4), 2048, 512), "2xP100@links=0.01"
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
