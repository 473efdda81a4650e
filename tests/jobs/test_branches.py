"""Branches of a model that meet are found, and nothing else is taken for one."""

import pytest

from partita.cluster import resolve
from partita.graph import GraphBuilder, training_graph
from partita.jobs.check_plan import check_plan
from partita.jobs.shapes import branches, k_shape, shape_plan
from partita.jobs.workload import load


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
