import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_clusters import FUZZ

from partita.cluster.machines import (
    Cards,
    Fabric,
    Node,
    NodeNetwork,
    Parts,
    Wire,
    near_cube,
    wire_nodes,
)
from partita.errors import ClusterError

WIRE = Wire(1e-6, 1e9)
CARD = Wire(2e-6, 1e8)


def node(num, *fabrics, cards=None, name="n0"):
    return Node(name, (("gpu", "k"),) * num, fabrics, cards)


def built(*nodes, network=NodeNetwork()):  # noqa: B008  (frozen)
    parts = Parts()
    wire_nodes(parts, list(nodes), network)
    return parts


def ends(parts):
    """Undirected pairs with how often each is linked, each direction counted."""
    return Counter(tuple(sorted((link.source, link.target))) for link in parts.links)


def test_a_switch_has_a_cable_to_every_device():
    parts = built(node(3, Fabric("switch", WIRE)))
    assert parts.switches == ["n0.switch"]
    assert ends(parts) == {(f"n0.gpu{i}", "n0.switch"): 2 for i in range(3)}


def test_all_to_all_joins_every_pair_once():
    parts = built(node(4, Fabric("all-to-all", WIRE)))
    assert len(ends(parts)) == 6
    assert set(ends(parts).values()) == {2}
    assert parts.switches == []


@pytest.mark.parametrize(("num", "expected"), [(2, 1), (3, 3), (5, 5)])
def test_a_ring_of_two_is_one_cable(num, expected):
    assert len(built(node(num, Fabric("ring", WIRE))).links) == 2 * expected


@pytest.mark.parametrize(
    ("dims", "expected"), [((4,), 4), ((2, 2), 4), ((3, 3), 18), ((2, 3), 3 + 6), ((4, 4, 4), 192)]
)
def test_a_torus_joins_the_ends_of_lines_longer_than_two(dims, expected):
    parts = built(node(math.prod(dims), Fabric("torus", WIRE, dims)))
    assert len(parts.links) == 2 * expected
    assert set(ends(parts).values()) == {2}


def test_several_cables_of_a_pair_act_as_one():
    parts = built(node(2, Fabric("pairs", WIRE, pairs=((0, 1, 3),))))
    assert [link.bytes_per_s for link in parts.links] == [3e9, 3e9]


def test_half_duplex_cables_share_a_lane_of_their_own():
    parts = built(node(3, Fabric("ring", Wire(0, 1e9, half_duplex=True))))
    lanes = Counter(link.lane for link in parts.links)
    assert set(lanes.values()) == {2}
    assert "" not in lanes


def test_one_node_has_no_network():
    parts = built(node(2, Fabric("switch", WIRE), cards=Cards(CARD, 2)))
    assert parts.switches == ["n0.switch"]
    assert len(parts.links) == 4


def two(cards, *fabrics, num=4, network=NodeNetwork()):  # noqa: B008  (frozen)
    names = ("n0", "n1")
    return built(*(node(num, *fabrics, cards=cards, name=n) for n in names), network=network)


def test_a_card_per_device_is_a_rail():
    parts = two(Cards(CARD, 4), Fabric("switch", WIRE))
    assert ends(parts)["n0.gpu3", "network"] == 2
    assert parts.switches == ["network", "n0.switch", "n1.switch"]


def test_fewer_cards_than_devices_are_shared_evenly():
    parts = two(Cards(CARD, 2), Fabric("switch", WIRE))
    joined = ends(parts)
    shares = [
        [f"n0.gpu{i}" for i in range(4) if (f"n0.gpu{i}", f"n0.nic{k}") in joined] for k in (0, 1)
    ]
    assert shares == [["n0.gpu0", "n0.gpu1"], ["n0.gpu2", "n0.gpu3"]]
    assert joined["n0.nic0", "network"] == 2


def test_cards_at_the_host_act_as_one():
    parts = two(Cards(CARD, 2, "host"), Fabric("host", WIRE))
    uplinks = [link for link in parts.links if link.target == "network"]
    assert [(link.source, link.bytes_per_s) for link in uplinks] == [
        ("n0.host", 2e8),
        ("n1.host", 2e8),
    ]


def test_a_network_of_leaves_has_uplinks():
    nodes = [node(1, cards=Cards(CARD, 1), name=f"n{i}") for i in range(5)]
    parts = built(*nodes, network=NodeNetwork(2, WIRE))
    assert parts.switches == ["spine", "leaf0", "leaf1", "leaf2"]
    assert ends(parts)["leaf2", "n4.gpu0"] == 2
    assert ends(parts)["leaf2", "spine"] == 2


def test_devices_of_a_mixed_node_are_numbered_by_type():
    mixed = Node("n0", (("cpu", "a"), ("gpu", "b"), ("gpu", "c")), (Fabric("host", WIRE),))
    assert [device.name for device in built(mixed).devices] == ["n0.cpu0", "n0.gpu0", "n0.gpu1"]


def test_absurd_numbers_of_links_are_refused_before_they_are_made():
    with pytest.raises(ClusterError, match="nodes: would have up to 400,100,000 links; at most"):
        built(node(20_000, Fabric("all-to-all", WIRE)))


@FUZZ
@given(st.integers(1, 5000))
def test_near_cubes_have_the_right_volume(count):
    dims = near_cube(count)
    assert math.prod(dims) == count
    assert list(dims) == sorted(dims)


def test_cubes_are_cubes():
    assert near_cube(64) == (4, 4, 4)
    assert near_cube(4096) == (16, 16, 16)
    assert near_cube(12) == (2, 2, 3)
    assert near_cube(7) == (1, 1, 7)
