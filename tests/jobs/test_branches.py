"""Branches of a model that meet are found, and nothing else is taken for one."""

import pytest

from partita.graph import GraphBuilder, training_graph
from partita.jobs.branches import branches
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
