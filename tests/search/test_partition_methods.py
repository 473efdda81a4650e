import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_partition_search import chain, rich_problems, tiny_problems

from partita.errors import MissingExtraError
from partita.problems import partition
from partita.problems.partition import PartitionEdge, PartitionNode, PartitionProblem
from partita.search.base import Run, Status, Stop
from partita.search.partition import SEARCHES
from partita.search.partition.anneal import rebuild, shift, start
from partita.search.partition.auto import AutoPartition
from partita.search.partition.bounds import communication_bound, device_time_bound_ms
from partita.search.partition.brute import BrutePartition
from partita.search.partition.coarsen import clusters, labels_of_clusters, levels
from partita.search.partition.exact import ExactPartition
from partita.search.partition.mpipe import longest_first
from partita.search.partition.network import contract, network
from partita.search.partition.orders import depth_first, reordered
from partita.search.partition.straight import _edges, windows
from partita.search.partition.walk import LabelWalk

DATA = Path(__file__).parent.parent / "data" / "partition"
RECORDED = json.loads((DATA / "recorded.json").read_bytes())


def random_labels(problem: PartitionProblem, seed: int) -> np.ndarray:
    net = network(problem)
    return np.random.default_rng(seed).integers(0, net.num_devices, net.num_nodes)


def true_times(problem: PartitionProblem, labels: np.ndarray) -> list[float]:
    ids = [node.id for node in problem.placed]
    times = partition.device_times_ms(problem, dict(zip(ids, labels.tolist(), strict=True)))
    return times[: network(problem).num_devices]


@settings(max_examples=40, deadline=None)
@given(tiny_problems())
def test_auto_and_exact_find_what_trying_everything_finds(problem: PartitionProblem) -> None:
    expected = BrutePartition()(problem).objective
    for search in (AutoPartition(), ExactPartition()):
        result = search(problem)
        assert result.status is Status.OPTIMAL
        assert result.objective == pytest.approx(expected)


def test_times_next_to_nothing_leave_room_for_themselves() -> None:
    """How often a device could take a node was counted in 64 bits: 1e300 times became never."""
    nodes = tuple(
        PartitionNode(id=number, type="OP", fwd_ms=work_ms, bwd_ms=0.0)
        for number, work_ms in enumerate((2.0, 2.0, 1e-300))
    )
    edges = (PartitionEdge(0, 2, 3_000, 10_000_000), PartitionEdge(0, 1, 10_000_000, 3_000),
             PartitionEdge(1, 2, 1_000, 1_000))  # fmt: skip
    problem = PartitionProblem(nodes, edges, num_devices=3, bandwidth_bytes_per_s=12e9)
    expected = BrutePartition()(problem).objective
    assert AutoPartition()(problem).objective == pytest.approx(expected)


def true_bytes(problem: PartitionProblem, labels: np.ndarray) -> list[int]:
    ids = [node.id for node in problem.placed]
    held = partition.device_bytes(problem, dict(zip(ids, labels.tolist(), strict=True)))
    return held[: network(problem).num_devices]


@settings(max_examples=60, deadline=None)
@given(tiny_problems() | rich_problems(), st.integers(0, 99))
def test_device_times_follow_every_move_exactly(problem: PartitionProblem, seed: int) -> None:
    net = network(problem)
    state = start(net, random_labels(problem, seed), seed)
    assert state.time_ms == pytest.approx(true_times(problem, state.device), abs=1e-6)
    rng = np.random.default_rng(seed)
    for _ in range(10):
        node, device = int(rng.integers(net.num_nodes)), int(rng.integers(net.num_devices))
        if state.device[node] != device:
            shift(net, state, node, device)
        assert state.time_ms == pytest.approx(true_times(problem, state.device), abs=1e-6)
        assert state.held_bytes == pytest.approx(true_bytes(problem, state.device), abs=1e-6)
    kept, held = state.fwd + state.bwd, state.held_bytes.copy()
    rebuild(net, state)
    assert state.fwd + state.bwd == pytest.approx(kept, abs=1e-6)
    assert state.held_bytes == pytest.approx(held, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(tiny_problems() | rich_problems(), st.integers(0, 99))
def test_a_contracted_network_costs_what_the_full_one_costs(
    problem: PartitionProblem, seed: int
) -> None:
    net = network(problem)
    cluster_of = clusters(net, np.inf, seed)
    coarse = contract(net, cluster_of)
    labels = np.random.default_rng(seed).integers(0, coarse.num_devices, coarse.num_nodes)
    state = start(coarse, labels, 0)
    full = true_times(problem, labels[cluster_of])
    assert state.time_ms == pytest.approx(full[: coarse.num_devices], abs=1e-6)
    assert not any(full[coarse.num_devices :])


@pytest.mark.parametrize("tiny", [1e-200, 5e-324])
def test_neighbours_are_clustered_however_short_they_are(tiny: float) -> None:
    net = network(chain(tiny, tiny, size=1))
    assert clusters(net, np.inf, 0).tolist() == [0, 0]


def test_levels_shrink_and_keep_labels_apart() -> None:
    problem = partition.read(DATA / "resnet50.json", num_devices=4)
    labels = random_labels(problem, 1)
    outcome = levels(network(problem), 20, np.inf, 0, labels)
    sizes = [level.num_nodes for level, _ in outcome]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]
    for _, cluster_of in outcome:
        assert (labels_of_clusters(cluster_of, labels)[cluster_of] == labels).all()
    for level, _ in levels(network(problem), 20, 70.0, 0):
        assert level.work_ms.max() <= 70.0


@settings(max_examples=40, deadline=None)
@given(tiny_problems() | rich_problems())
def test_no_device_with_a_node_beats_the_bound_of_that_node(problem: PartitionProblem) -> None:
    net = network(problem)
    for node in range(net.num_nodes):
        bound = device_time_bound_ms(net, node)
        assert bound >= net.work_ms[node].min() - 1e-9
        for labels in itertools.product(range(net.num_devices), repeat=net.num_nodes):
            times = true_times(problem, np.array(labels))
            assert times[labels[node]] >= bound * (1 - 1e-9) - 1e-9


def test_a_long_node_must_pay_for_its_cheapest_neighbours() -> None:
    # 100 ms between two of 60 ms: it gets and sends 1,000 bytes each, 2 ms in all
    nodes = tuple(PartitionNode(id, "OP", ms, 0.0) for id, ms in enumerate((60, 100, 60)))
    edges = (PartitionEdge(0, 1, 1000, 0), PartitionEdge(1, 2, 1000, 0))
    problem = PartitionProblem(nodes, edges, 3, 1e6)
    assert partition.lower_bound(problem) == 100
    assert communication_bound(problem) == pytest.approx(102)


def test_a_model_with_one_long_node_is_proven_optimal_by_the_bound() -> None:
    times = [1.0] * 30 + [100.0]
    nodes = tuple(PartitionNode(id, "OP", ms, 0.0) for id, ms in enumerate(times))
    edges = tuple(PartitionEdge(id, id + 1, 500, 0) for id in range(30))
    result = AutoPartition()(PartitionProblem(nodes, edges, 4, 1e6))
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(100.5)


@pytest.mark.parametrize("method", ["auto", "mpipe", "multilevel"])
def test_mixed_stages_beat_the_recorded_straight_pipelines(method: str) -> None:
    problem = partition.read(DATA / "resnet50.json", num_devices=4)
    result = SEARCHES[method](problem, Stop(evaluations=300_000))
    assert result.solution is not None
    assert result.objective is not None
    assert partition.check(problem, result.solution) == ()
    assert result.objective <= RECORDED["resnet50 devices=4"]["acyclic"]["objective_ms"]


def test_the_time_limit_is_kept() -> None:
    problem = partition.read(DATA / "resnet50.json", num_devices=8)
    AutoPartition()(problem, Stop(evaluations=1000))  # compiled now
    result = AutoPartition()(problem, Stop(time_s=0.3))
    assert result.status is Status.STOPPED
    assert result.solution is not None
    assert "time limit" in result.why


@settings(max_examples=30, deadline=None)
@given(tiny_problems(), st.integers(0, 99))
def test_every_order_puts_producers_first(problem: PartitionProblem, seed: int) -> None:
    order = depth_first(problem, seed)
    assert sorted(order) == sorted(node.id for node in problem.nodes)
    place = {node: index for index, node in enumerate(order)}
    assert all(place[edge.src] < place[edge.dst] for edge in problem.edges)
    assert reordered(problem, seed).order == tuple(order)


def test_the_longest_block_goes_first_to_the_freest_device() -> None:
    assert longest_first(np.array([1.0, 5.0, 3.0, 3.0]), 2).tolist() == [0, 0, 1, 1]


def test_more_devices_than_nodes_are_no_trouble() -> None:
    nodes = tuple(PartitionNode(id, "OP", 1.0, 0.0) for id in range(3))
    for search in SEARCHES.values():
        result = search(PartitionProblem(nodes, (), 50))
        assert result.objective == 1


@pytest.mark.parametrize(
    ("model", "devices", "optimum_ms"),
    [("mlp", 4, 50.706222), ("cnn", 4, 8.177739), ("resnet50", 4, 275.101283)],
)
def test_the_compute_of_a_straight_pipeline_is_proven(
    model: str, devices: int, optimum_ms: float
) -> None:
    problem = partition.read(
        DATA / f"{model}.json", num_devices=devices, bandwidth=1e99, straight=True
    )
    result = AutoPartition()(problem)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(optimum_ms)


def test_a_straight_pipeline_is_bounded_by_its_proven_compute() -> None:
    problem = partition.read(DATA / "resnet50.json", num_devices=8, straight=True)
    result = AutoPartition()(problem, Stop(evaluations=100_000))
    assert result.lower_bound == pytest.approx(144.06176)
    assert result.objective == pytest.approx(144.209216)


@settings(max_examples=40, deadline=None)
@given(tiny_problems(), st.integers(1, 3))
def test_no_answer_has_a_node_outside_its_window(problem: PartitionProblem, count: int) -> None:
    walk = LabelWalk(problem, Run(Stop(), "test", 0))
    work, edges = walk.net.work_ms[:, 0], _edges(walk)
    answers = [
        stages
        for stages in itertools.product(range(count), repeat=len(work))
        if all(stages[src] <= stages[dst] for src, dst in edges)
    ]
    times = [np.bincount(stages, weights=work).max() for stages in answers]
    most_ms = float(np.median(times))
    low, high = windows(work, edges, count, most_ms)
    for stages, ms in zip(answers, times, strict=True):
        if ms <= most_ms:
            assert all(low <= stages)
            assert all(stages <= high)


def test_small_models_are_proven_by_trees() -> None:
    problem = partition.read(DATA / "cnn.json", num_devices=4)
    result = AutoPartition()(problem)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(8.1282666667)
    assert result.objective < RECORDED["cnn devices=4"]["prototype"]["objective_ms"]


def test_a_tree_that_is_cut_short_still_raises_the_bound() -> None:
    problem = partition.read(DATA / "cnn.json", num_devices=4)
    result = ExactPartition(most_tree_nodes=500_000)(problem)
    assert result.status is not Status.OPTIMAL
    assert result.lower_bound is not None
    assert result.lower_bound > communication_bound(problem) * 1.005


def test_metis_balances_and_makes_stages_without_a_cycle() -> None:
    problem = partition.read(DATA / "resnet50.json", num_devices=8)
    result = SEARCHES["metis"](problem)
    assert result.solution is not None
    assert result.objective is not None
    assert partition.check(problem, result.solution) == ()
    assert result.objective <= RECORDED["resnet50 devices=8"]["metis"]["objective_ms"]


def test_without_pymetis_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    problem = partition.read(DATA / "cnn.json", num_devices=4)
    with pytest.raises(MissingExtraError, match=r"pip install 'partita\[metis\]'"):
        SEARCHES["metis"](problem)


def test_acyclic_does_no_worse_than_the_recorded_one() -> None:
    recorded = RECORDED["resnet50 devices=4"]["acyclic"]["objective_ms"]
    problem = partition.read(DATA / "resnet50.json", num_devices=4)
    result = SEARCHES["acyclic"](problem, Stop(evaluations=200_000, target=recorded))
    assert result.objective is not None
    assert result.objective <= recorded


def test_caps_that_fit_only_one_way_are_found_by_every_method() -> None:
    # 12 nodes of two sizes in three devices without a byte to spare: 70 = 30 + 4 * 10
    sizes = [30, 30, 30] + [10] * 12
    nodes = tuple(
        PartitionNode(id, "OP", 1.0 + id, 0.0, param_bytes=size) for id, size in enumerate(sizes)
    )
    edges = tuple(PartitionEdge(id, id + 1, 10, 10) for id in range(len(sizes) - 1))
    problem = PartitionProblem(nodes, edges, 3, memory_bytes=(70.0,) * 3)
    for name, search in SEARCHES.items():
        if name != "brute":
            result = search(problem, Stop(evaluations=200_000))
            assert result.solution is not None, name
            assert partition.check(problem, result.solution) == ()


def test_one_node_heavier_than_every_cap_is_named_by_every_method() -> None:
    nodes = tuple(PartitionNode(id, "OP", 1.0, 0.0, "block.3", param_bytes=50) for id in range(2))
    problem = PartitionProblem(nodes, (), 2, memory_bytes=(40.0, 30.0))
    for search in SEARCHES.values():
        result = search(problem)
        assert result.status is Status.INFEASIBLE
        assert "node 0 (block.3) alone needs 50 B" in result.why


@pytest.mark.parametrize("seed", range(6))
def test_all_methods_agree_whether_random_graphs_can_be_cut(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, devices = int(rng.integers(10, 30)), int(rng.integers(2, 5))
    nodes = tuple(
        PartitionNode(id, "OP", rng.random(), rng.random(), param_bytes=int(rng.integers(1, 50)))
        for id in range(count)
    )
    edges = tuple(
        PartitionEdge(int(rng.integers(max(0, dst - 5), dst)), dst, int(rng.integers(10**6)), 0)
        for dst in range(1, count)
        for _ in range(2)
    )
    share = sum(node.param_bytes for node in nodes) / devices
    problem = PartitionProblem(
        nodes, edges, devices, 1e9, memory_bytes=(share * (1.02, 1.1, 1.4)[seed % 3],) * devices,
        straight=seed % 2 == 1,
    )  # fmt: skip
    outcome = {}
    for name, search in SEARCHES.items():
        if name != "brute":
            result = search(problem, Stop(evaluations=20_000))
            outcome[name] = result.solution is not None
            if result.solution is not None:
                assert partition.check(problem, result.solution) == ()
    assert len(set(outcome.values())) == 1, outcome
