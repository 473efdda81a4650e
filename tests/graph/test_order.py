"""A topological order: everything after what it needs, as near to the order given as can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.graph.order import CycleError, dependencies_first


@st.composite
def graphs(draw):
    """What each of some numbers needs, without a cycle, in any order."""
    count = draw(st.integers(0, 8))
    rank = draw(st.permutations(range(count)))
    needs = {
        item: [o for o in range(count) if rank[o] < rank[item] and draw(st.booleans())]
        for item in range(count)
    }
    return draw(st.permutations(range(count))), needs


@given(graphs())
def test_each_comes_once_and_after_all_that_it_needs(graph):
    items, needs = graph
    order = dependencies_first(items, needs.__getitem__)
    assert sorted(order) == sorted(items)
    place = {item: at for at, item in enumerate(order)}
    assert all(place[need] < place[item] for item in items for need in needs[item])


@given(graphs())
def test_an_order_that_is_one_already_stays_as_it_is(graph):
    items, needs = graph
    order = dependencies_first(items, needs.__getitem__)
    assert dependencies_first(order, needs.__getitem__) == order


def test_what_is_needed_but_not_listed_comes_too():
    assert dependencies_first(["c"], {"a": "", "b": "a", "c": "b"}.__getitem__) == ["a", "b", "c"]


def test_a_cycle_is_named_from_one_item_to_itself():
    needs = {"a": "b", "b": "c", "c": "b"}
    with pytest.raises(CycleError, match="b -> c -> b") as error:
        dependencies_first("a", needs.__getitem__)
    assert error.value.path == ["b", "c", "b"]


def test_an_item_that_needs_itself_is_a_cycle():
    with pytest.raises(CycleError, match="a -> a"):
        dependencies_first("a", lambda item: item)


def test_a_long_chain_needs_no_deep_stack():
    order = dependencies_first([5000], lambda item: [item - 1] if item else [])
    assert order == list(range(5001))
