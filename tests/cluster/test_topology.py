import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_clusters import FUZZ, cables, cluster, clusters, ring

from partita.cluster import Link, resolve
from partita.cluster.record import ROUTE_BYTES
from partita.cluster.topology import Groups, join_ranks, strong_components
from tests.quickness import least_cpu_s


def walked(machine, a, b):
    """The vertices a route visits."""
    names = [machine.devices[a].name]
    for index in machine.route(a, b):
        assert machine.links[index].source == names[-1]
        names.append(machine.links[index].target)
    assert names[-1] == machine.devices[b].name
    return names


def seconds(machine, path):
    """What 1 MB takes over these links: devices store and forward, switches do not."""
    devices = {device.name for device in machine.devices}
    total, latency, width = 0.0, 0.0, float("inf")
    for link in path:
        latency += link.latency_s
        width = min(width, link.bytes_per_s)
        if link.target in devices:
            total += latency + ROUTE_BYTES / width
            latency, width = 0.0, float("inf")
    return total


def simple_paths(machine, a, b, seen=()):
    if a == b:
        yield ()
        return
    for link in machine.links:
        if link.source == a and link.target not in seen:
            for rest in simple_paths(machine, link.target, b, (*seen, a)):
                yield (link, *rest)


class TestRoutes:
    def test_lead_nowhere_from_a_device_to_itself(self):
        assert ring(3).route(1, 1) == ()

    def test_go_the_short_way_round_a_ring(self):
        assert walked(ring(6), 0, 2) == ["d0", "d1", "d2"]
        assert walked(ring(6), 0, 4) == ["d0", "d5", "d4"]

    def test_break_ties_by_name(self):
        assert walked(ring(6), 0, 3) == ["d0", "d1", "d2", "d3"]

    def test_do_not_depend_on_the_order_of_links(self):
        links = ring(6).links
        for order in itertools.islice(itertools.permutations(links), 0, 5000, 499):
            assert walked(cluster(6, order), 0, 3) == ["d0", "d1", "d2", "d3"]

    def test_take_the_wider_way_although_it_has_more_links(self):
        links = cables(("d0", "s", 1e-6, 1e11), ("s", "d1", 1e-6, 1e11), ("d0", "d1", 1e-6, 1e9))
        assert walked(cluster(2, links, ["s"]), 0, 1) == ["d0", "s", "d1"]

    def test_take_the_narrow_way_where_the_wide_one_is_far(self):
        links = cables(("d0", "s", 1e-2, 1e11), ("s", "d1", 1e-2, 1e11), ("d0", "d1", 1e-6, 1e9))
        assert walked(cluster(2, links, ["s"]), 0, 1) == ["d0", "d1"]

    def test_count_the_narrowest_link_once_between_devices(self):
        # two hops of 2 GB/s through a switch take 0.5 ms, one of 1.5 GB/s takes 0.67 ms
        links = cables(("d0", "s", 0, 2e9), ("s", "d1", 0, 2e9), ("d0", "d1", 0, 1.5e9))
        assert walked(cluster(2, links, ["s"]), 0, 1) == ["d0", "s", "d1"]

    def test_count_a_device_on_the_way_as_store_and_forward(self):
        # through a device the same two hops take 1 ms
        links = cables(("d0", "d2", 0, 2e9), ("d2", "d1", 0, 2e9), ("d0", "d1", 0, 1.5e9))
        assert walked(cluster(3, links), 0, 1) == ["d0", "d1"]

    def test_take_the_better_of_parallel_links(self):
        links = (
            *cables(("d0", "d1", 1e-6, 1e9)),
            Link("d0", "d1", 1e-6, 3e9),
            Link("d0", "d1", 5e-6, 3e9),
        )
        assert cluster(2, links).route(0, 1) == (2,)
        assert cluster(2, links).route(1, 0) == (1,)

    def test_may_differ_by_direction(self):
        links = (Link("d0", "d1", 0, 1e9), Link("d1", "d2", 0, 1e9), Link("d2", "d0", 0, 1e9))
        assert walked(cluster(3, links), 0, 1) == ["d0", "d1"]
        assert walked(cluster(3, links), 1, 0) == ["d1", "d2", "d0"]

    def test_cross_a_torus_by_the_shortest_way(self):
        torus = resolve("64xTPUv4")
        assert len(torus.route(0, 63)) == 3  # one step back along each of the three dims
        assert len(torus.route(0, 42)) == 6  # 2 + 2 + 2

    def test_go_up_and_down_a_fat_tree(self):
        leaf = [(f"d{i}", f"leaf{i // 2}", 1e-6, 1e10) for i in range(4)]
        spine = [(f"leaf{i}", "spine", 1e-6, 2e10) for i in range(2)]
        tree = cluster(4, cables(*leaf, *spine), ["leaf0", "leaf1", "spine"])
        assert walked(tree, 0, 1) == ["d0", "leaf0", "d1"]
        assert walked(tree, 0, 3) == ["d0", "leaf0", "spine", "leaf1", "d3"]

    def test_use_the_direct_nvlink_of_a_dgx_1_where_there_is_one(self):
        dgx = resolve("dgx-1-v100")
        assert walked(dgx, 0, 3) == ["n0.gpu0", "n0.gpu3"]
        assert walked(dgx, 0, 1) == ["n0.gpu0", "n0.gpu1"]
        assert len(dgx.route(0, 7)) == 2

    @settings(FUZZ, max_examples=150)
    @given(clusters())
    def test_are_as_quick_as_the_best_of_all_paths(self, machine):
        for a, b in itertools.permutations(range(machine.num_devices), 2):
            ends = machine.devices[a].name, machine.devices[b].name
            walked(machine, a, b)
            path = [machine.links[index] for index in machine.route(a, b)]
            best = min((seconds(machine, p), len(p)) for p in simple_paths(machine, *ends))
            assert seconds(machine, path) == pytest.approx(best[0], rel=1e-12)

    def test_between_extremely_slow_links_are_found(self):
        assert len(cluster(2, cables(("d0", "d1", 0, 5e-324))).route(0, 1)) == 1

    def test_of_a_thousand_devices_are_found_in_a_moment(self):
        def routes() -> list[tuple[int, ...]]:
            machine = resolve("128x8xH100")
            return [machine.route(i, (i + 1) % 1024) for i in range(1024)]

        neighbours = routes()
        assert least_cpu_s(routes, 0.6) < 0.6  # with making the cluster, which remembers routes
        assert {len(route) for route in neighbours} == {2}


class TestLevels:
    def test_of_a_ring_are_one(self):
        (level,) = ring(5).levels()
        assert level.groups == ((0, 1, 2, 3, 4),)
        assert level.bytes_per_s == 1e9

    def test_of_two_nodes_are_two(self):
        inner, outer = resolve("2x4xA100").levels()
        assert inner.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
        assert (inner.bytes_per_s, outer.bytes_per_s) == (300e9, 25e9)
        assert inner.latency_s == pytest.approx(1.2e-6)
        assert outer.latency_s == pytest.approx(3e-6)
        assert outer.groups == (tuple(range(8)),)

    def test_of_different_machines_start_with_the_widest(self):
        levels = resolve("2xV100+3xP100").levels()
        assert [level.groups for level in levels] == [
            ((0, 1), (2,), (3,), (4,)),
            ((0, 1), (2, 3, 4)),
            ((0, 1, 2, 3, 4),),
        ]

    def test_of_a_torus_with_one_faster_dim_follow_that_dim(self):
        rows = [
            (f"d{3 * r + c}", f"d{3 * r + (c + 1) % 3}", 0, 2e9) for r in (0, 1) for c in range(3)
        ]
        columns = [(f"d{c}", f"d{c + 3}", 0, 1e9) for c in range(3)]
        levels = cluster(6, cables(*rows, *columns)).levels()
        assert [level.groups for level in levels] == [((0, 1, 2), (3, 4, 5)), (tuple(range(6)),)]

    def test_of_a_fat_tree_with_narrow_uplinks_are_its_leaves_and_the_whole(self):
        leaf = [(f"d{i}", f"leaf{i // 2}", 1e-6, 1e10) for i in range(4)]
        spine = [(f"leaf{i}", "spine", 2e-6, 5e9) for i in range(2)]
        levels = cluster(4, cables(*leaf, *spine), ["leaf0", "leaf1", "spine"]).levels()
        assert [level.groups for level in levels] == [((0, 1), (2, 3)), ((0, 1, 2, 3),)]
        assert levels[1].latency_s == pytest.approx(6e-6)

    def test_of_a_cable_with_a_slow_way_back_are_those_of_the_slow_way(self):
        links = (Link("d0", "d1", 0, 9e9), Link("d1", "d0", 0, 1e9))
        assert [level.bytes_per_s for level in cluster(2, links).levels()] == [1e9]

    def test_of_a_one_way_ring_are_one(self):
        links = [Link(f"d{i}", f"d{(i + 1) % 4}", 0, 1e9) for i in range(4)]
        assert [level.groups for level in cluster(4, links).levels()] == [((0, 1, 2, 3),)]

    @settings(FUZZ, max_examples=150)
    @given(clusters())
    def test_join_exactly_the_devices_that_reach_each_other_at_that_bandwidth(self, machine):
        names = [device.name for device in machine.devices] + list(machine.switches)
        widest = {(a, b): 0.0 for a in names for b in names}
        for link in machine.links:
            ends = link.source, link.target
            widest[ends] = max(widest[ends], link.bytes_per_s)
        for via, a, b in itertools.product(names, repeat=3):
            widest[a, b] = max(widest[a, b], min(widest[a, via], widest[via, b]))
        levels = machine.levels()
        assert levels[-1].groups == (tuple(range(machine.num_devices)),)
        for level in levels if machine.num_devices > 1 else ():
            group_of = {i: group for group in level.groups for i in group}
            for i, j in itertools.combinations(range(machine.num_devices), 2):
                a, b = machine.devices[i].name, machine.devices[j].name
                both_ways = min(widest[a, b], widest[b, a])
                assert (group_of[i] == group_of[j]) == (both_ways >= level.bytes_per_s)
        widths = [level.bytes_per_s for level in levels]
        assert widths == sorted(set(widths), reverse=True)


EDGES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 7)), max_size=16)


@FUZZ
@given(EDGES)
def test_joins_up_to_a_rank_are_the_strong_components_of_that_rank(edges):
    joins = join_ranks(edges, 8)
    for rank in range(8):
        joined = Groups(6)
        for when, a, b in joins:
            if when <= rank:
                joined.join(a, b)
        reach = {(a, a) for a in range(6)} | {(u, v) for u, v, own in edges if own <= rank}
        for via, a, b in itertools.product(range(6), repeat=3):
            if (a, via) in reach and (via, b) in reach:
                reach.add((a, b))
        for a, b in itertools.combinations(range(6), 2):
            together = (a, b) in reach and (b, a) in reach
            assert (joined.find(a) == joined.find(b)) == together


def test_vertices_without_edges_have_no_component():
    assert strong_components([]) == {}
    assert set(strong_components([(0, 1)]).values()) == {0, 1}
