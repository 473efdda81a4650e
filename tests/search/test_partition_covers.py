import itertools

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_partition_search import rich_problems, tiny_problems

from partita.problems.partition import PartitionEdge, PartitionNode, PartitionProblem
from partita.search.base import Stop
from partita.search.partition import SEARCHES
from partita.search.partition.brute import BrutePartition
from partita.search.partition.cover_program import fill, late_orders
from partita.search.partition.covers import CoverBound, CoverProof
from partita.search.partition.network import network

FINE = CoverBound(steps=500, price_steps=12)


def never() -> bool:
    return False


def chain(times: list[float], sent: list[int], num_devices: int) -> PartitionProblem:
    nodes = tuple(PartitionNode(id, "OP", ms, 0.0) for id, ms in enumerate(times))
    edges = tuple(PartitionEdge(id, id + 1, size, 0) for id, size in enumerate(sent))
    return PartitionProblem(nodes, edges, num_devices, bandwidth_bytes_per_s=1e6)


@settings(max_examples=40)
@given(problem=tiny_problems() | rich_problems(), below=st.floats(0, 0.3))
def test_no_answer_is_excluded(problem: PartitionProblem, below: float) -> None:
    best = BrutePartition()(problem).objective
    net = network(problem)
    if best is None or net.num_devices == 1 or not net.work_ms.min(axis=1).any():
        return
    proof = CoverProof(net, FINE, best)
    proof.excludes(best * (1 - below) + 1e-9, never)  # prices that suit another time
    assert not proof.excludes(best * (1 + 1e-9) + 1e-9, never)
    assert proof.proven_ms <= best * (1 + 1e-9) + 1e-9


@settings(max_examples=40)
@given(problem=tiny_problems() | rich_problems(), seed=st.integers(0, 99), keys=st.integers(4, 256))
def test_whatever_prices_and_tolls_the_best_answer_is_affordable(
    problem: PartitionProblem, seed: int, keys: int
) -> None:
    """Every message is sent once and received once, so tolls cancel out."""
    best = BrutePartition()(problem).objective
    net = network(problem)
    if best is None or net.num_devices == 1 or not net.work_ms.min(axis=1).any():
        return
    proof = CoverProof(net, CoverBound(steps=200, most_keys=keys), best)
    random = np.random.default_rng(seed)
    within_ms = best * (1 + 1e-9) + 1e-9
    for _ in range(4):
        point = proof.bundle.point + random.normal(size=len(proof.bundle.point)) * 3
        excess, _, _ = proof.excess(point, within_ms)
        assert excess >= -1e-9 * np.abs(proof.prices(point)[0]).sum()
        assert proof.proven_ms <= within_ms


def cut_dearer_than_all() -> PartitionProblem:
    """A node without work behind a cut that takes longer than all the work."""
    nodes = (PartitionNode(0, "OP", 0.0, 1.0), PartitionNode(1, "OP", 0.0, 0.0))
    return PartitionProblem(nodes, (PartitionEdge(0, 1, 0, 3000),), 2, bandwidth_bytes_per_s=1e6)


@settings(max_examples=30)
@example(problem=cut_dearer_than_all(), seed=16, share=1.0)
@given(problem=tiny_problems(), seed=st.integers(0, 99), share=st.floats(0.1, 1.2))
def test_the_dearest_set_is_that_of_trying_all(
    problem: PartitionProblem, seed: int, share: float
) -> None:
    """Rounding may let a set in that takes a few steps more, never keep one out."""
    net = network(problem)
    if net.num_devices == 1:
        return
    prices = np.random.default_rng(seed).normal(size=net.num_nodes)
    within_ms = share * float(net.work_ms[:, 0].sum()) + 0.1
    proof = CoverProof(net, FINE, within_ms)
    ((_, program),) = proof.programs
    tolls = np.zeros(len(proof.messages))
    state = (proof.origin, proof.member, proof.messages, proof.most)
    dearest = fill(program, prices, tolls, within_ms, proof.steps, *state)
    sets = [np.array(each) for each in itertools.product((0, 1), repeat=net.num_nodes)]
    priced = [(set_time_ms(problem, each), float(prices @ each)) for each in sets]
    rounded_ms = within_ms * (1 + (3 + 4 * net.num_nodes) / proof.steps)
    assert dearest >= max(price for ms, price in priced if ms <= within_ms) - 1e-9
    assert dearest <= max(price for ms, price in priced if ms <= rounded_ms) + 1e-9
    assert dearest == float(prices @ proof.member) or abs(dearest - prices @ proof.member) < 1e-9


def set_time_ms(problem: PartitionProblem, member: np.ndarray) -> float:
    """Work of the set and one message for every net that it cuts, by the problem's own fields."""
    inside = {node.id for node, flag in zip(problem.placed, member, strict=True) if flag}
    total = sum(problem.node_ms(node, 0) for node in problem.placed if node.id in inside)
    for src in {edge.src for edge in problem.inner_edges}:
        beyond = [
            edge
            for edge in problem.inner_edges
            if edge.src == src and (edge.dst in inside) != (src in inside)
        ]
        size = max((e.fwd_bytes for e in beyond), default=0)
        size += max((e.bwd_bytes for e in beyond), default=0)
        total += 1e3 * size / problem.bandwidth_bytes_per_s
    return total


def test_a_chain_with_slow_links_pays_for_its_cheapest_cuts() -> None:
    # Mean work 10 ms; a cut costs 3 ms, and two devices of three have at least one, one has two.
    problem = chain([1.0] * 30, [3000] * 29, 3)
    result = SEARCHES["auto"](problem, Stop(evaluations=2_000))
    assert result.lower_bound is not None
    assert result.objective is not None
    assert result.lower_bound > 13.0
    assert result.lower_bound <= result.objective


def test_work_between_dear_cuts_costs_more_than_the_mean() -> None:
    """Prices rise where cuts are dear: the bound is above mean and cheapest cut together."""
    problem = chain([1.0] * 24, [9000] * 11 + [100] + [500] * 11, 4)
    proof = CoverProof(network(problem), CoverBound(price_steps=80), 12.0)
    assert proof.excludes(11.0, never)
    assert not np.allclose(proof.prices(proof.bundle.point)[0], 1.0, rtol=0.01)


def star(readers: int, num_devices: int) -> PartitionProblem:
    """One node of 1 ms that all others read; a message takes 10 ms, every reader 30 ms."""
    nodes = (
        PartitionNode(0, "OP", 1.0, 0.0),
        *(PartitionNode(1 + each, "OP", 30.0, 0.0) for each in range(readers)),
    )
    edges = tuple(PartitionEdge(0, 1 + each, 10_000, 0) for each in range(readers))
    return PartitionProblem(nodes, edges, num_devices, bandwidth_bytes_per_s=1e6)


def test_a_producer_pays_for_every_device_that_reads_it() -> None:
    # Six readers alone take 40 ms each; the producer sends six messages.
    problem = star(6, 7)
    best = BrutePartition()(problem).objective
    assert best == 61.0
    proven = []
    for most_shared in (0, 8):
        proof = CoverProof(network(problem), CoverBound(most_shared=most_shared), best)
        for within_ms in (38.0, 50.0, 60.0):
            proof.excludes(within_ms, never)
        proven.append(proof.proven_ms)
    assert proven[0] <= 41.0
    assert 59.5 < proven[1] <= best


def test_a_late_order_keeps_few_nets_open() -> None:
    """Ops that only later ones need come after what is needed at once, and after their inputs."""
    count = 12
    nodes = tuple(PartitionNode(id, "OP", 1.0, 0.0) for id in range(1 + 2 * count))
    edges = [PartitionEdge(0, 1 + each, 8, 0) for each in range(count)]  # all made at once
    for each in range(count):
        edges.append(PartitionEdge(1 + each, 1 + count + each, 8, 0))
        if each:
            edges.append(PartitionEdge(count + each, 1 + count + each, 8, 0))
    net = network(PartitionProblem(nodes, tuple(edges), 2))
    _, deepest_first = late_orders(net)
    for order in late_orders(net):
        place = {node: at for at, node in enumerate(order)}
        assert sorted(order) == list(range(net.num_nodes))
        assert all(place[edge.src] < place[edge.dst] for edge in edges)
    place = {node: at for at, node in enumerate(deepest_first)}
    assert all(place[1 + count + each] == place[1 + each] + 1 for each in range(1, count))
