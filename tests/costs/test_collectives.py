"""Collectives follow the links: formulas on a switch, contention on shared links, hierarchy."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.cluster import Cluster, Device, Link, resolve
from partita.costs.collectives import COLLECTIVES, EFFICIENCY, Collectives
from partita.costs.physics import physics_of

ONE_NODE = resolve("4xA100")
TWO_NODES = resolve("2x8xA100")
KIND = replace(resolve("1xA100").kinds[0], name="plain")  # of which nobody knows what it reaches
ALL4 = ((0, 1, 2, 3),)


def star(count, bytes_per_s=1e9, latency_s=1e-6, lane=""):
    """Devices around one switch."""
    names = [f"d{i}" for i in range(count)]
    links = []
    for name in names:
        links.append(Link(name, "switch", latency_s / 2, bytes_per_s, lane))
        links.append(Link("switch", name, latency_s / 2, bytes_per_s, lane))
    devices = tuple(Device(name, KIND.name) for name in names)
    return Cluster("star", (KIND,), devices, ("switch",), tuple(links))


class TestWhatKindsReach:
    """A kind that was compared with real runs pays for every collective and reaches a part."""

    PHYSICS = physics_of("A100-80GB-SXM").physics

    def test_a_tiny_collective_costs_the_fixed_price_of_its_span(self):
        inside = Collectives(ONE_NODE).seconds("all_gather", 1.0, ALL4)
        assert inside == pytest.approx(self.PHYSICS.inside_s, rel=0.1)
        every = (tuple(range(16)),)
        across = Collectives(TWO_NODES).seconds("all_gather", 1.0, every)
        least = self.PHYSICS.across_s + 15 * self.PHYSICS.hop_s
        assert least <= across < 1.3 * least

    def test_a_large_one_reaches_its_part_of_the_bandwidth(self):
        seconds = Collectives(ONE_NODE).seconds("all_gather", 4e10, ALL4)
        assert seconds == pytest.approx(3e10 / (300e9 * self.PHYSICS.inside), rel=0.01)

    def test_kinds_that_differ_pay_as_the_slowest_of_them(self):
        mixed = Collectives(resolve("2xA100+2xH100")).reached
        both = [physics_of(kind).physics for kind in ("A100-80GB-SXM", "H100-SXM")]
        assert mixed.across_s == max(physics.across_s for physics in both)
        assert mixed.interference == max(physics.interference for physics in both)

    def test_beside_a_kind_that_nobody_measured_there_is_no_fixed_price(self):
        assert Collectives(resolve("2xA100+2xP100")).fixed_s(ALL4) == 0.0


class TestFormulas:
    def test_ring_all_gather_on_a_switch(self):
        seconds = Collectives(star(4)).seconds("all_gather", 4e6, ALL4)
        assert seconds == pytest.approx(3 * (1e-6 + 1e6 / (1e9 * EFFICIENCY)))

    def test_reduce_scatter_costs_what_all_gather_does(self):
        times = Collectives(star(4))
        gather = times.seconds("all_gather", 4e6, ALL4)
        assert times.seconds("reduce_scatter", 4e6, ALL4) == gather

    def test_all_reduce_is_the_fastest_of_its_algorithms(self):
        times = Collectives(star(4))
        assert times.algorithm(100.0, ALL4) == "tree"
        assert times.algorithm(1e9, ALL4) == "ring"
        ring = 2 * 3 * (1e-6 + 2.5e8 / (1e9 * EFFICIENCY))
        assert times.seconds("all_reduce", 1e9, ALL4) == pytest.approx(ring)

    def test_all_to_all_sends_a_share_to_each(self):
        seconds = Collectives(star(4)).seconds("all_to_all", 4e6, ALL4)
        assert seconds == pytest.approx(3 * 1e-6 + 3 * 1e6 / (1e9 * EFFICIENCY))

    def test_a_message_takes_latency_and_bandwidth(self):
        send = Collectives(star(2)).send(1e6, 0, 1)
        assert send == pytest.approx(1e-6 + 1e6 / (1e9 * EFFICIENCY))
        assert Collectives(star(2)).send(1e6, 1, 1) == 0.0

    @pytest.mark.parametrize("name", COLLECTIVES)
    def test_one_device_has_nothing_to_exchange(self, name):
        assert Collectives(ONE_NODE).seconds(name, 1e9, ((0,), (1,))) == 0.0

    def test_no_bytes_take_no_time(self):
        assert Collectives(ONE_NODE).seconds("all_reduce", 0, ALL4) == 0.0

    def test_an_unknown_collective_is_our_mistake(self):
        with pytest.raises(ValueError, match="no collective 'gossip'"):
            Collectives(ONE_NODE).seconds("gossip", 1.0, ALL4)


class TestTopology:
    def test_half_duplex_links_take_turns(self):
        both = Collectives(star(2)).seconds("all_gather", 1e9, ((0, 1),))
        names = ("d0", "d1")
        bus = Cluster(
            "bus",
            (KIND,),
            tuple(Device(name, KIND.name) for name in names),
            (),
            (Link("d0", "d1", 1e-6, 1e9, "bus"), Link("d1", "d0", 1e-6, 1e9, "bus")),
        )
        shared = Collectives(bus).seconds("all_gather", 1e9, ((0, 1),))
        assert shared == pytest.approx(2 * both, rel=1e-3)

    def test_groups_that_share_a_link_slow_each_other_down(self):
        uplink = tuple(
            Link(*pair, 1e-6, 1e9)
            for pair in (("a", "x"), ("b", "x"), ("x", "y"), ("y", "c"), ("y", "d"))
        )
        back = tuple(Link(link.target, link.source, 1e-6, 1e9) for link in uplink)
        devices = tuple(Device(name, KIND.name) for name in "abcd")
        times = Collectives(Cluster("h", (KIND,), devices, ("x", "y"), uplink + back))
        alone = times.seconds("all_gather", 1e9, ((0, 2),))
        together = times.seconds("all_gather", 1e9, ((0, 2), (1, 3)))
        assert together == pytest.approx(2 * alone, rel=1e-3)

    def test_rails_of_their_own_do_not(self):
        times = Collectives(TWO_NODES)
        alone = times.seconds("all_gather", 1e9, ((0, 8),))
        rails = tuple((i, i + 8) for i in range(8))
        assert times.seconds("all_gather", 1e9, rails) == pytest.approx(alone)

    def test_hierarchy_wins_across_nodes(self):
        everyone = (tuple(range(16)),)
        times = Collectives(TWO_NODES)
        assert times.algorithm(1e9, everyone) == "hierarchical"
        assert times.algorithm(1e9, (tuple(range(8)),)) == "ring"

    def test_inside_a_node_is_faster_than_across(self):
        times = Collectives(TWO_NODES)
        inside = times.seconds("all_reduce", 1e8, ((0, 1),))
        across = times.seconds("all_reduce", 1e8, ((0, 8),))
        assert across > 5 * inside

    @given(
        st.sampled_from(COLLECTIVES), st.floats(1, 1e10), st.floats(1, 8),
        st.sampled_from([(0, 1), (0, 8), tuple(range(8)), tuple(range(16)), (1, 5, 9, 13)]),
    )  # fmt: skip
    def test_more_bytes_never_take_less_time(self, name, size, factor, group):
        times = Collectives(TWO_NODES)
        small = times.seconds(name, size, (group,))
        assert 0 < small <= times.seconds(name, size * factor, (group,)) * (1 + 1e-12)

    def test_large_groups_estimate_all_to_all_near_the_enumerated_one(self, monkeypatch):
        import partita.costs.collectives as module

        group = (tuple(range(16)),)
        exact = Collectives(TWO_NODES).seconds("all_to_all", 1e9, group)
        monkeypatch.setattr(module, "ALL_PAIRS_LIMIT", 60)
        estimate = Collectives(TWO_NODES).seconds("all_to_all", 1e9, group)
        assert estimate == pytest.approx(exact, rel=0.25)
