import json
from pathlib import Path
from typing import Any

import pytest

import partita
from partita.errors import InputError
from partita.graph.files import write_graph
from partita.jobs.partition import Partitioned, partition
from partita.plans import read_plan
from partita.problems.partition import check, evaluate
from partita.search.base import Status, Stop
from partita.search.partition import SEARCHES
from partita.zoo import build
from tests.costs.test_module_layers import decoder

QUICK = Stop(evaluations=30_000, gap=0.05)


def assert_whole(partitioned: Partitioned) -> None:
    """Stages, plan and simulation say the same, and values flow one way."""
    assert partitioned.plan is not None
    assert partitioned.prediction is not None
    graph = partitioned.workload.graph
    forward = [op for op in graph.ops if op.phase == "forward"]
    assert set(partitioned.stage_of) == {op.name for op in forward}
    assert set(partitioned.device_of) == set(range(len(partitioned.plan.stages)))
    for op in forward:
        for before in graph.predecessors(op):
            assert partitioned.stage_of[before.name] <= partitioned.stage_of[op.name]
    for index, stage in enumerate(partitioned.plan.stages):
        assert stage.mesh.devices == (partitioned.device_of[index],)
        assert {partitioned.stage_of[split.op] for split in stage.splits} == {index}
    assert partitioned.result.solution is not None
    assert not check(partitioned.problem, partitioned.result.solution)
    assert max(partitioned.device_times_ms()) == pytest.approx(
        evaluate(partitioned.problem, partitioned.result.solution)
    )
    assert partitioned.lower_bound_ms is not None
    assert partitioned.bottleneck_ms is not None
    assert partitioned.lower_bound_ms <= partitioned.bottleneck_ms * (1 + 1e-9)
    assert sum(report.num_ops for report in partitioned.reports) == len(forward)


def test_a_decoder_is_cut_planned_and_simulated(tmp_path: Path) -> None:
    partitioned = partita.partition("gpt2", devices=4, batch=8, offer=True)
    assert_whole(partitioned)
    assert partitioned.plan is not None
    assert partitioned.tied == ("wte.weight",)  # the embedding and the head are far apart
    assert partitioned.gap is not None
    assert partitioned.gap < 0.01
    path = tmp_path / "plan.json"
    path.write_bytes(partitioned.plan.to_json())
    assert partita.check_plan(read_plan(path)) is not None


@pytest.mark.parametrize("method", [name for name in SEARCHES if name not in ("brute", "exact")])
@pytest.mark.parametrize("model", ["resnet50", "t5-small"])
def test_every_method_cuts_models_with_branches(model: str, method: str) -> None:
    partitioned = partition(model, "4xA100", batch=4, method=method, stop=QUICK)
    assert_whole(partitioned)


@pytest.mark.parametrize("method", ["auto", "acyclic", "chain", "metis", "mpipe"])
def test_wishes_are_kept_by_every_method(method: str) -> None:
    partitioned = partition(
        "inception_v3", "4xA100", batch=4, microbatches=2, method=method, stages=3, straight=True,
        recompute=True, stop=QUICK,
    )  # fmt: skip
    assert_whole(partitioned)
    assert partitioned.plan is not None
    assert len(partitioned.plan.stages) == 3
    assert len(set(partitioned.device_of.values())) == 3
    assert all((stage.checkpointing == "full") for stage in partitioned.plan.stages)
    assert partitioned.plan.schedule.num_microbatches == 2


def test_a_large_decoder_is_cut_in_seconds() -> None:
    partitioned = partition("gpt2-xl", devices=8, batch=8, stop=Stop(evaluations=200_000, gap=0.05))
    assert_whole(partitioned)
    assert partitioned.result.seconds < 60  # some 2 s of CPU


def test_inference_has_no_backward() -> None:
    partitioned = partition("gpt2", devices=2, batch=2, training=False, stop=QUICK)
    assert_whole(partitioned)
    assert all(report.backward_ms == 0 for report in partitioned.reports)


def test_more_devices_than_nodes_leaves_some_idle() -> None:
    partitioned = partition("alexnet", "64xA100", batch=4, stop=QUICK)
    assert_whole(partitioned)
    assert len(set(partitioned.device_of.values())) <= len(partitioned.model.layers)


def test_a_node_heavier_than_the_cap_is_named() -> None:
    partitioned = partition("gpt2", devices=4, batch=8, memory=1e8, stop=QUICK)
    assert partitioned.status is Status.INFEASIBLE
    assert partitioned.plan is None
    assert partitioned.stage_of == {}
    assert "(lm_head) alone needs" in partitioned.result.why
    assert "or the node must be cut up" in partitioned.result.why


def test_recompute_saves_memory_where_many_are_in_flight() -> None:
    constraints: dict[str, Any] = {
        "devices": 4,
        "batch": 32,
        "microbatches": 8,
        "straight": True,
        "stop": QUICK,
    }
    plain = partition("gpt2", recompute=False, **constraints)
    again = partition("gpt2", recompute=True, **constraints)
    assert max(again.device_bytes()) < max(plain.device_bytes())
    assert again.bottleneck_ms is not None
    assert plain.bottleneck_ms is not None
    assert again.bottleneck_ms > plain.bottleneck_ms
    assert plain.simulation is not None
    assert again.simulation is not None
    assert max(again.simulation.peak_bytes) < max(plain.simulation.peak_bytes)


def test_the_same_seed_gives_the_same_plan() -> None:
    one, two = (
        partition("resnet50", devices=4, batch=4, stop=Stop(evaluations=50_000)) for _ in range(2)
    )
    assert one.stage_of == two.stage_of
    assert one.device_of == two.device_of


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "devices: is missing; say how many devices, or name a cluster"),
        ({"devices": 0}, "devices: is 0; at least 1 is needed"),
        ({"cluster": "2xA100", "devices": 3}, "devices: 3 devices are asked for; .* has 2"),
        ({"devices": 2, "method": "metiss"}, "method: found 'metiss'; did you mean metis"),
        ({"devices": 2, "batch": 4, "microbatches": 3}, "microbatches: a batch of 4 in 3"),
        ({"devices": 2, "stages": 0}, "num_stages: is 0"),
        ({"devices": 2, "cut": "module"}, "cut: found 'module'; use one of modules, anywhere"),
    ],
)
def test_bad_input_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition("alexnet", **given)


def test_a_graph_file_edited_into_a_cycle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    write_graph(path, build("alexnet", batch=2))
    value = json.loads(path.read_bytes())
    ops = value["ops"]
    ops[0]["inputs"][0] = ops[-1]["outputs"][0]  # the first op now reads the last one's output
    path.write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"model.json: ops: has a cycle: .* -> features.0"):
        partition(str(path), devices=2)


class TestCuts:
    """Where a model may be cut: at the borders of its modules, or anywhere."""

    def test_equal_blocks_are_dealt_out_evenly(self) -> None:
        graph = decoder(8)
        partitioned = partition(graph, devices=4)
        assert_whole(partitioned)
        assert partitioned.cut == "modules"
        first: dict[int, set[str]] = {}
        for op, stage in partitioned.stage_of.items():
            if op.startswith("h."):
                first.setdefault(stage, set()).add(op.split(".")[1])
        assert [len(blocks) for blocks in first.values()] == [2, 2, 2, 2]
        assert len(partitioned.device_of) == 4

    def test_no_module_is_in_two_stages(self) -> None:
        partitioned = partition("resnet50", devices=4, batch=4)
        block_stages: dict[str, set[int]] = {}
        for op in partitioned.workload.graph.ops:
            if op.phase == "forward" and op.scope.startswith("layer"):
                block = ".".join(op.scope.split(".")[:2])
                block_stages.setdefault(block, set()).add(partitioned.stage_of[op.name])
        assert {len(stages) for stages in block_stages.values()} == {1}

    def test_a_free_cut_is_offered_with_its_gain(self) -> None:
        at_modules = partition("resnet50", devices=4, batch=4, offer=True, stop=QUICK)
        free = at_modules.free
        assert free is not None
        assert at_modules.bottleneck_ms is not None
        assert free.bottleneck_ms == pytest.approx(at_modules.bottleneck_ms * (1 - free.gain))
        anywhere = partition("resnet50", devices=4, batch=4, cut="anywhere", stop=QUICK)
        assert anywhere.cut == "anywhere"
        assert anywhere.bottleneck_ms == free.bottleneck_ms

    def test_what_borders_do_not_allow_is_cut_anywhere(self) -> None:
        partitioned = partition(decoder(1), devices=2, stages=5, stop=QUICK)
        assert_whole(partitioned)
        assert partitioned.cut == "anywhere"
        assert len(partitioned.device_of) == 5
