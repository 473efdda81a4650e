"""Costs, verifier and runtime each work out the groups of tokens by themselves, and agree."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.costs.layouts import token_groups
from partita.costs.sharding import dims_of
from partita.graph import GraphBuilder
from partita.graph.splits import routed_pairs
from partita.plans import Axis, Mesh, OpSplit, Stage
from partita.verify.pipelines import unlike_routings

torch = pytest.importorskip("torch")
from partita.run.local.compute import routing_groups  # noqa: E402


def experts():
    """As many tokens and places as all shares divide."""
    g = GraphBuilder("experts")
    x = g.input("x", (96, 4, 4))
    gates = g.one("moe_router", x, g.parameter("gate.weight", (8, 4)), name="gate", top_k=8)
    tokens = g.one("moe_dispatch", x, gates, name="dispatch", top_k=8)
    return g.finish(g.one("moe_combine", g.relu(tokens), gates, name="combine", top_k=8))


GRAPH = experts()
AXES = st.lists(
    st.sampled_from([(2, ()), (4, ()), (3, ()), (1, ()), (2, (1, 3)), (2, (1, 1)), (3, (1, 2, 1))]),
    min_size=1,
    max_size=3,
).map(lambda shape: tuple(Axis("xyz"[i], size, w) for i, (size, w) in enumerate(shape)))


@st.composite
def sides(draw):
    """A mesh and a split of an op on it, for the dispatch and for the combine."""
    chosen = []
    for op in ("dispatch", "combine"):
        axes = draw(AXES)
        dims = draw(st.sampled_from(dims_of(GRAPH.call(GRAPH.op(op)), axes)))
        chosen.append((op, axes, dims))
    return chosen


@settings(max_examples=300, deadline=None)
@given(sides())
def test_who_works_out_groups_of_tokens_agrees_on_whether_they_are_equal(sides):
    stages, costs, numbers = [], [], []
    for op, axes, dims in sides:
        devices = tuple(range(math.prod(axis.size for axis in axes)))
        stages.append(Stage(op, Mesh(axes, devices), (OpSplit(op, dims),)))
        call = GRAPH.call(GRAPH.op(op))
        costs.append(token_groups(call, dims, axes))
        groups = routing_groups(call, dims, axes)
        numbers.append([start for (start, _), _ in groups] or [0])
    alike = unlike_routings(GRAPH, stages) == []
    assert (costs[0] == costs[1]) is alike
    assert (numbers[0] == numbers[1]) is alike


def test_what_no_stage_runs_is_not_compared():
    stage = Stage("one", Mesh((Axis("x", 2),), (0, 1)), (OpSplit("dispatch", ("b",)),))
    assert len(routed_pairs(GRAPH)) == 1
    assert unlike_routings(GRAPH, [stage]) == []
