"""Sharding a model: never worse than the plain ways, honest when nothing fits, deterministic."""

import json
from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.errors import InputError, PlanError
from partita.graph import GraphBuilder
from partita.jobs.check_plan import check_plan
from partita.jobs.shard import ShardSettings, meshes, shard
from partita.jobs.simulate import simulate
from partita.jobs.workload import load
from partita.plans import plan_from_json
from partita.search.base import Status, Stop

SMALL = [
    ("alexnet", "4xV100", 64),
    ("squeezenet1_1", "2xA100", 8),
    ("bert-base@64", "4xA100", 8),
    ("moe@32", "4xH100", 8),
    ("rnnlm", "4xP100", 64),
    ("inception_v3", "2xV100+2xP100", 8),
]


@pytest.mark.parametrize(("model", "cluster", "batch"), SMALL, ids=lambda value: str(value))
def test_the_winner_is_no_slower_than_any_strategy_and_above_the_bound(model, cluster, batch):
    sharding = shard(model, cluster, batch=batch)
    assert sharding.best is not None
    fitting = [c for c in sharding.tried if c.simulation.fits]
    assert sharding.best.step_s == min(c.step_s for c in fitting)
    assert sharding.best.step_s <= simulate(model, cluster, batch=batch).step_s * (1 + 1e-9)
    assert sharding.lower_bound_s <= sharding.best.step_s * (1 + 1e-9)
    assert sharding.plan is not None
    assert check_plan(sharding.plan) == ()


def test_alexnet_splits_its_dense_layers_otherwise_than_its_convolutions():
    """One weird trick: convolutions by batch, the large dense layers by features."""
    sharding = shard("alexnet", "8xV100", batch=128)
    assert sharding.plan is not None
    splits = sharding.plan.stages[0].dims()
    assert set(splits["features.3"]) == {"b"}
    assert set(splits["classifier.1"]) & {"n", "k"}
    assert sharding.best is not None
    plain = simulate("alexnet", "8xV100", batch=128)
    assert sharding.best.step_s < 0.8 * plain.step_s


def test_one_device_has_one_way():
    sharding = shard("squeezenet1_1", "1xA100", batch=4)
    assert sharding.best is not None
    assert sharding.best.simulation.communication_s == 0


def test_a_prime_number_of_devices_still_gives_a_plan():
    sharding = shard("alexnet", "7xA100", batch=14)
    assert sharding.best is not None
    assert set(sharding.plan.stages[0].dims()["features.0"]) == {"b"}


def test_the_same_request_gives_the_same_plan():
    first, second = (shard("bert-base@64", "4xA100", batch=8).plan for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.stages == second.stages
    assert first.prediction == second.prediction


def test_what_cannot_fit_says_how_much_is_missing():
    sharding = shard("llama-7b", "2xGTX-1080-Ti", batch=2)
    assert sharding.status is Status.INFEASIBLE
    assert sharding.plan is None
    assert "such devices would be enough" in sharding.why


def test_being_stopped_keeps_the_best_so_far():
    sharding = shard("alexnet", "4xA100", batch=64, stop=Stop(interrupted=lambda: True))
    assert sharding.status in (Status.STOPPED, Status.OPTIMAL)
    assert sharding.best is not None


def test_improvements_are_reported_as_they_come():
    heard = []
    sharding = shard("alexnet", "4xA100", batch=64, stop=Stop(progress=heard.append))
    assert heard == list(sharding.history)
    assert heard[-1].objective == pytest.approx(sharding.best.step_s)


def test_an_unknown_method_is_refused_with_those_there_are():
    with pytest.raises(InputError, match="unknown method 'luck'; use one of"):
        shard("alexnet", "4xA100", method="luck")


def test_meshes_are_all_rectangles():
    graph = load("squeezenet1_1", batch=8).graph
    named = {n: [str(m) for m in meshes(resolve(f"{n}xA100"), graph)] for n in (7, 8)}
    assert named == {7: ["x=7"], 8: ["x=8", "x=2 x y=4", "x=4 x y=2"]}


def test_unlike_devices_also_get_shares_by_their_speed():
    graph = load("squeezenet1_1", batch=8).graph
    outcome = [mesh.axes[0].weights for mesh in meshes(resolve("2xV100+2xP100"), graph)]
    weighted = [weights for weights in outcome if weights]
    assert weighted
    assert all(w[0] == w[1] > w[2] == w[3] for w in weighted)
    best = shard("squeezenet1_1", "2xV100+2xP100", batch=80).best
    assert best.simulation.stage.mesh.axes[0].weights


@pytest.fixture(scope="module")
def plan():
    return shard("alexnet", "4xA100", batch=64).plan


class TestChecking:
    def test_a_plan_survives_its_file_and_simulates_to_its_prediction(self, plan):
        again = plan_from_json(json.loads(plan.to_json()))
        assert simulate(again).step_s == pytest.approx(plan.prediction.step_s)

    def test_a_false_prediction_is_found(self, plan):
        false = replace(plan, prediction=replace(plan.prediction, step_s=1e-9))
        assert any("predicts" in violation for violation in check_plan(false))

    def test_an_illegal_split_is_found(self, plan):
        stage = plan.stages[0]
        first, *rest = stage.splits
        bad = replace(stage, splits=(replace(first, dims=("z",) * len(first.dims)), *rest))
        assert check_plan(replace(plan, stages=(bad,))) == (
            f"op {first.op!r} cannot be split along 'z'",
        )

    def test_a_missing_and_a_foreign_op_are_found(self, plan):
        stage = plan.stages[0]
        first, *rest = stage.splits
        bad = replace(stage, splits=(*rest, replace(first, op="ghost")))
        violations = check_plan(replace(plan, stages=(bad,)))
        assert violations == (
            f"op {first.op!r} has no split",
            "op 'ghost' is not in the model",
        )

    def test_a_plan_for_another_model_is_refused(self, plan):
        other = replace(plan, model=replace(plan.model, batch=32))
        assert "the plan is for another alexnet" in check_plan(other)[0]
        with pytest.raises(PlanError, match="plan again with this version of the model"):
            simulate(other)

    def test_a_plan_for_another_machine_is_refused(self, plan):
        with pytest.raises(PlanError, match=r"not for .*; plan again for this machine"):
            simulate(plan, "4xH100")
        moved = replace(plan, cluster=replace(plan.cluster, spec="4xH100"))
        assert "is not the one the plan was made for" in check_plan(moved)[0]


def test_settings_say_how_much_is_tried():
    g = GraphBuilder("layers")
    y = g.relu(g.linear(g.input("x", (64, 512)), 2048, "up"))
    graph = g.finish(g.linear(y, 512, "down"))
    none = ShardSettings(looked_at_closely=0, strategy_stages=0)
    named = shard(graph, "2xA100", settings=none)
    assert {candidate.name for candidate in named.tried} <= {"data", "zero1", "fsdp"}
    one = shard(graph, "2xA100", settings=ShardSettings(closer=()))
    assert "exact" in {candidate.name for candidate in one.tried}
    assert one.best.step_s <= named.best.step_s
