"""Layouts: which collectives lead from one to another, and how much they move."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.costs.layouts import conversion, conversion_seconds, num_shards
from partita.graph.splits import PARTIAL, REPLICATE, TensorPlacement

S0, S1 = TensorPlacement("shard", 0), TensorPlacement("shard", 1)
PLACEMENTS = (S0, S1, REPLICATE, PARTIAL)


@pytest.mark.parametrize(
    ("have", "need", "collective", "size"),
    [
        (S0, REPLICATE, "all_gather", 800),
        (S0, S1, "all_to_all", 200),
        (PARTIAL, REPLICATE, "all_reduce", 800),
        (PARTIAL, S1, "reduce_scatter", 800),
        (REPLICATE, S0, "", 0),
    ],
)
def test_each_pair_of_placements_has_its_collective(have, need, collective, size):
    (step,) = conversion(800, (4,), (have,), (need,))
    assert (step.collective, step.size_bytes) == (collective, size)
    assert step.layout == (need,)


def test_equal_layouts_need_nothing():
    for layout in itertools.product(PLACEMENTS, repeat=2):
        assert conversion(100, (2, 2), layout, layout) == ()


def test_summands_are_added_before_shares_are_gathered():
    steps = conversion(800, (2, 4), (S0, PARTIAL), (REPLICATE, REPLICATE))
    assert [step.collective for step in steps] == ["all_reduce", "all_gather"]
    assert steps[0].size_bytes == 400


@given(
    st.lists(st.sampled_from(PLACEMENTS), min_size=2, max_size=2).map(tuple),
    st.lists(st.sampled_from(PLACEMENTS[:3]), min_size=2, max_size=2).map(tuple),
)
def test_steps_lead_from_one_layout_to_the_other(have, need):
    steps = conversion(1000, (2, 2), have, need)
    assert (steps[-1].layout if steps else have) == need
    for step in steps:
        assert step.held_bytes == 1000 / num_shards(step.layout, (2, 2))
    cluster = resolve("4xA100")
    groups = (((0, 2), (1, 3)), ((0, 1), (2, 3)))
    seconds = conversion_seconds(1e6, (2, 2), groups, Collectives(cluster), have, need)
    assert (seconds > 0) == any(step.collective for step in steps)
