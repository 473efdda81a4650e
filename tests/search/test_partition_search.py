import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import SearchContract
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.problems import partition
from partita.problems.partition import (
    PartitionEdge,
    PartitionLinks,
    PartitionNode,
    PartitionProblem,
    PartitionSolution,
    check,
    device_times_ms,
    evaluate,
    stages_from_devices,
)
from partita.search.base import Search, Status, Stop
from partita.search.partition import SEARCHES
from partita.search.partition.brute import BrutePartition, assignments
from partita.search.partition.chain import ChainPartition, block_times_ms, cut_places

DATA = Path(__file__).parent.parent / "data" / "partition"
RECORDED = json.loads((DATA / "recorded.json").read_bytes())


times = st.sampled_from([0.0, 1.0, 2.0, 5.0]) | st.floats(0, 10)
sizes = st.sampled_from([0, 1000, 3000, 10**7])
bandwidths = st.sampled_from([1e6, 12e9])
few_times = st.sampled_from([0.5, 1.0, 3.0])
param_bytes, activation_bytes = st.integers(0, 8), st.integers(0, 4)
rates = st.sampled_from([st.just(1e5), st.sampled_from([1e3, 1e5, 1e9])])
waits = st.sampled_from([st.just(0.0), st.just(1e-3), st.sampled_from([0.0, 1e-3])])
caps = st.sampled_from([4.0, 12.0, 30.0, 1e9])
num_stages = st.none() | st.integers(1, 4)


# Made anew in every example, a strategy is looked over anew: a third of the time of a draw.
up_to = functools.cache(lambda most: st.integers(1, most))
orders = functools.cache(lambda count: st.permutations(range(count)))
per_device = functools.cache(lambda each, count: st.just(()) | st.tuples(*[each] * count))
tables = functools.cache(lambda each, count: st.tuples(*[st.tuples(*[each] * count)] * count))


@functools.cache
def some_pairs(count: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """At most seven edges between so many nodes, the same one several times or not."""
    pairs = list(itertools.combinations(range(count), 2))
    return st.lists(st.sampled_from(pairs), max_size=7) if pairs else st.just([])


@functools.cache
def capacities(count: int) -> st.SearchStrategy[tuple[float, ...]]:
    """None, one for each device, or one for all."""
    return per_device(caps, count) | caps.map(lambda cap: (cap,) * count)


def in_any_order(draw: st.DrawFn, items: list[Any]) -> tuple[Any, ...]:
    return tuple(items[index] for index in draw(orders(len(items))))


@st.composite
def tiny_problems(draw: st.DrawFn, most: int = 5) -> PartitionProblem:
    """Up to five nodes and three devices, ids and edges in any order."""
    count = draw(up_to(most))
    ids = draw(orders(10))[:count]
    nodes = [PartitionNode(id, "OP", draw(times), draw(times)) for id in ids]
    edges = [
        PartitionEdge(ids[source], ids[target], draw(sizes), draw(sizes))
        for source, target in draw(some_pairs(count))
    ]
    if draw(st.booleans()):
        nodes.append(PartitionNode(99, "IN", 50.0, 50.0))
        edges.append(PartitionEdge(99, ids[0], 10**9, 10**9))
    return PartitionProblem(
        in_any_order(draw, nodes),
        in_any_order(draw, edges),
        num_devices=draw(up_to(3)),
        bandwidth_bytes_per_s=draw(bandwidths),
    )


@st.composite
def rich_problems(draw: st.DrawFn, most: int = 4) -> PartitionProblem:
    """The same with caps, heterogeneous devices, links, recompute and stages to be kept to."""
    plain = draw(tiny_problems(most))
    count = plain.num_devices
    by_device = draw(st.booleans())
    nodes = tuple(
        replace(
            node,
            param_bytes=draw(param_bytes),
            activation_bytes=draw(activation_bytes),
            times_ms=tuple((draw(few_times), draw(few_times)) for _ in range(count))
            if by_device
            else (),
        )
        for node in plain.nodes
    )
    edges = tuple(replace(edge, fwd_bytes=edge.fwd_bytes // 1000) for edge in plain.edges)
    links = PartitionLinks(*(draw(tables(draw(each), count)) for each in (rates, waits)))
    return replace(
        plain,
        nodes=nodes,
        edges=edges,
        memory_bytes=draw(capacities(count)),
        speeds=() if by_device else draw(per_device(few_times, count)),
        links=links if draw(st.booleans()) else None,
        recompute=draw(st.booleans()),
        in_flight=draw(up_to(3)),
        num_stages=draw(num_stages),
        straight=draw(st.booleans()),
    )


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
class TestEverySearch(SearchContract):
    kind = partition
    oracle = BrutePartition()
    problems = tiny_problems()


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
class TestEverySearchOnEveryField(SearchContract):
    kind = partition
    oracle = BrutePartition()
    problems = rich_problems()


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
@settings(max_examples=30, deadline=None)
@given(problem=rich_problems())
def test_no_method_fails_where_an_answer_exists(
    search: Search[PartitionProblem, PartitionSolution], problem: PartitionProblem
) -> None:
    result, expected = search(problem), BrutePartition()(problem)
    assert (result.solution is None) == (expected.solution is None)
    assert (result.status is Status.INFEASIBLE) == (expected.status is Status.INFEASIBLE)


def chain(*times: float, num_devices: int = 2, size: int = 0) -> PartitionProblem:
    return PartitionProblem(
        tuple(PartitionNode(id, "OP", ms, 0.0) for id, ms in enumerate(times)),
        tuple(PartitionEdge(id, id + 1, size, 0) for id in range(len(times) - 1)),
        num_devices,
        bandwidth_bytes_per_s=1e6,
    )


def test_free_transfers_leave_only_balance() -> None:
    # 1 + 4 + 5 = 3 + 7: every other node on the same device
    problem = chain(1, 3, 4, 7, 5)
    assert BrutePartition()(problem).objective == 10
    assert ChainPartition()(problem).objective == 12  # contiguous blocks: 1 3 4 | 7 5


def test_dear_transfers_keep_a_chain_together() -> None:
    problem = chain(1, 3, 4, 7, 5, size=30_000)
    result = BrutePartition()(problem)
    assert result.objective == 20
    assert result.solution is not None
    assert len(result.solution.device_of) == 1
    assert ChainPartition()(problem).objective == 20


def test_a_transfer_costs_both_sides() -> None:
    # one cut anywhere costs 1 ms on both devices: 5 + 1 against 5 + 1
    problem = chain(2, 3, 4, 1, size=1000)
    for search in (BrutePartition(), ChainPartition()):
        assert search(problem).objective == 6


def test_a_fork_goes_to_two_devices_and_its_join_to_either() -> None:
    # 0 feeds 1 and 2, both feed 3; work 1 + 6 and 6 + 1, one tensor over, one back: 2 ms more each
    nodes = tuple(PartitionNode(id, "OP", ms, 0.0) for id, ms in enumerate((1, 6, 6, 1)))
    edges = tuple(PartitionEdge(*ends, 1000, 0) for ends in ((0, 1), (0, 2), (1, 3), (2, 3)))
    result = BrutePartition()(PartitionProblem(nodes, edges, 2, 1e6))
    assert result.status is Status.OPTIMAL
    assert result.objective == 1 + 6 + 2


@pytest.mark.parametrize(
    ("num_nodes", "num_devices", "count"),
    [(1, 1, 1), (1, 3, 1), (3, 1, 1), (3, 2, 4), (4, 3, 14), (4, 4, 15), (5, 9, 52)],
)
def test_assignments_are_the_ways_to_split_a_set(
    num_nodes: int, num_devices: int, count: int
) -> None:
    items = list(assignments(num_nodes, num_devices))
    assert len(items) == len(set(items)) == count
    every = itertools.product(range(num_devices), repeat=num_nodes)
    assert {as_sets(devices) for devices in items} == {as_sets(devices) for devices in every}


def as_sets(devices: tuple[int, ...]) -> frozenset[frozenset[int]]:
    """Which nodes are together, whatever their device is called."""
    return frozenset(
        frozenset(node for node, each in enumerate(devices) if each == device) for device in devices
    )


@settings(max_examples=30, deadline=None)
@given(tiny_problems(most=4))
def test_no_staging_whatsoever_beats_brute_force(problem: PartitionProblem) -> None:
    """Every stage for every node and every device for every stage: the definition itself."""
    problem = replace(problem, num_devices=min(2, problem.num_devices))
    best = BrutePartition()(problem).objective
    assert best is not None
    ids = [node.id for node in problem.placed]
    devices = range(problem.num_devices)
    for stages in itertools.product(range(len(ids)), repeat=len(ids)):
        for device_of in itertools.product(devices, repeat=len(ids)):
            solution = PartitionSolution(
                tuple(zip(ids, stages, strict=True)), tuple(enumerate(device_of))
            )
            if not check(problem, solution):
                assert evaluate(problem, solution) >= best * (1 - 1e-12)


@pytest.mark.parametrize("case", [case for case in RECORDED if case.split()[0] in ("mlp", "cnn")])
def test_chain_equals_the_recorded_chain_planner(case: str) -> None:
    reproduces_pipedream(case)


def test_chain_equals_the_recorded_chain_planner_on_resnet50() -> None:
    reproduces_pipedream("resnet50 devices=4")
    reproduces_pipedream("resnet50 devices=8")


def reproduces_pipedream(case: str) -> None:
    model, _, devices = case.partition(" devices=")
    problem = partition.read(DATA / f"{model}.json", num_devices=int(devices))
    result = ChainPartition()(problem)
    assert result.objective == pytest.approx(RECORDED[case]["pipedream"]["objective_ms"], abs=1e-4)
    assert result.lower_bound is not None
    assert result.lower_bound <= RECORDED[case]["prototype"]["objective_ms"]


@settings(max_examples=50, deadline=None)
@given(tiny_problems())
def test_block_times_are_exact_for_two_blocks(problem: PartitionProblem) -> None:
    ids = [node.id for node in problem.placed]
    cuts = cut_places(problem, 100)
    times = block_times_ms(problem, cuts)
    assert times.shape == (len(ids) + 1,) * 2
    problem = replace(problem, num_devices=max(2, problem.num_devices))
    for cut in range(1, len(ids)):
        devices = {id: int(place >= cut) for place, id in enumerate(ids)}
        actual = device_times_ms(problem, devices)
        assert [times[0, cut], times[cut, -1]] == pytest.approx(actual[:2])


@settings(max_examples=50, deadline=None)
@given(tiny_problems())
def test_block_times_never_exceed_the_true_device_time(problem: PartitionProblem) -> None:
    problem = replace(problem, num_devices=3)
    ids = [node.id for node in problem.placed]
    times = block_times_ms(problem, cut_places(problem, 100))
    for first, second in itertools.combinations(range(1, len(ids)), 2):
        devices = {id: int(at >= first) + int(at >= second) for at, id in enumerate(ids)}
        actual = device_times_ms(problem, devices)
        outcome = [times[0, first], times[first, second], times[second, -1]]
        assert all(np.array(outcome) <= np.array(actual) + 1e-9)
        assert outcome[2] == pytest.approx(actual[2])  # the last block sends nothing on


@settings(max_examples=50, deadline=None)
@given(tiny_problems())
def test_chain_is_the_best_cut_into_two(problem: PartitionProblem) -> None:
    problem = replace(problem, num_devices=2)
    ids = [node.id for node in problem.placed]
    cut = [
        evaluate(
            problem, stages_from_devices(problem, {id: int(at >= k) for at, id in enumerate(ids)})
        )
        for k in range(1, len(ids) + 1)
    ]
    assert ChainPartition()(problem).objective == pytest.approx(min(cut))


def test_few_cuts_are_spread_evenly_by_time() -> None:
    problem = chain(*[1.0] * 100, num_devices=4)
    assert cut_places(problem, 5).tolist() == [0, 25, 50, 75, 100]
    assert ChainPartition(max_cuts=5)(problem).objective == 25
    coarse = ChainPartition(max_cuts=3)(problem)
    assert coarse.objective == 50


def test_coarse_cuts_price_blocks_as_fine_ones_do() -> None:
    problem = partition.read(DATA / "resnet50.json", num_devices=4)
    every = block_times_ms(problem, cut_places(problem, 1000))
    some = cut_places(problem, 20)
    assert len(some) < 30
    coarse = block_times_ms(problem, some)
    assert coarse == pytest.approx(every[np.ix_(some, some)])


def test_chain_keeps_the_best_of_what_it_tried() -> None:
    problem = partition.read(DATA / "cnn.json", num_devices=4)
    first = ChainPartition()(problem, Stop(evaluations=1))
    assert first.status is Status.STOPPED
    assert first.objective == pytest.approx(sum(n.fwd_ms + n.bwd_ms for n in problem.placed))
    objectives = [step.objective for step in ChainPartition()(problem).history if step.objective]
    assert objectives == sorted(objectives, reverse=True)
    assert len(objectives) > 2


def test_one_device_is_optimal_at_once() -> None:
    result: Any = ChainPartition()(chain(1, 2, 3, num_devices=1))
    assert (result.status, result.objective) == (Status.OPTIMAL, 6)
