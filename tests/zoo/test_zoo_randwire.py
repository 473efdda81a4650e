"""The random graphs that RandWire is wired by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import ModelError
from partita.zoo import build
from partita.zoo.randwire import watts_strogatz

nodes_and_neighbours = st.integers(1, 4).flatmap(
    lambda half: st.tuples(st.integers(2 * half + 1, 40), st.just(2 * half))
)


@given(nodes_and_neighbours, st.floats(0, 1), st.integers(0, 2**32))
def test_rewiring_keeps_the_number_of_edges_and_makes_no_loop_or_double(sizes, rewiring, seed):
    nodes, neighbours = sizes
    edges = watts_strogatz(nodes, neighbours, rewiring, seed)
    assert len(set(edges)) == len(edges) == nodes * neighbours // 2
    assert all(0 <= a < b < nodes for a, b in edges)
    assert list(edges) == sorted(edges)


@given(nodes_and_neighbours)
def test_without_rewiring_it_is_the_ring(sizes):
    nodes, neighbours = sizes
    reach = neighbours // 2
    for a, b in watts_strogatz(nodes, neighbours, 0.0, 0):
        assert min(b - a, nodes - b + a) <= reach


def test_the_seed_decides_the_wiring():
    assert watts_strogatz(32, 4, 0.75, 1) == watts_strogatz(32, 4, 0.75, 1)
    assert watts_strogatz(32, 4, 0.75, 1) != watts_strogatz(32, 4, 0.75, 2)


def test_the_wiring_is_the_same_on_every_machine():
    assert watts_strogatz(8, 4, 0.75, 7) == (
        (0, 1), (0, 3), (0, 4), (0, 5), (0, 6), (0, 7), (1, 4), (1, 5), (2, 4), (2, 5), (2, 7),
        (3, 5), (3, 6), (3, 7), (5, 6), (5, 7),
    )  # fmt: skip


@pytest.mark.parametrize(("nodes", "neighbours"), [(4, 4), (8, 3), (8, 0)])
def test_a_ring_that_cannot_be_is_refused(nodes, neighbours):
    with pytest.raises(ModelError, match="even number of neighbours"):
        watts_strogatz(nodes, neighbours, 0.5, 0)


def test_another_seed_is_another_network_of_the_same_size():
    one, two = (build("randwire_small", batch=1, seed=seed) for seed in (1, 2))
    assert one.fingerprint() != two.fingerprint()
    assert one.num_parameters == pytest.approx(two.num_parameters, rel=0.03)


def test_nodes_without_inputs_halve_the_image():
    graph = build("randwire_small", batch=1, loss=False)
    strides = [
        op.attr("stride")
        for op in graph.ops
        if op.scope.startswith("conv3.") and op.name.endswith("depthwise")
    ]
    assert strides[0] == (2, 2)
    assert strides.count((1, 1)) > 20
