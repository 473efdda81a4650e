"""The joint search: valid, verified, never slower than a named strategy, honest about memory."""

import json

import pytest

from partita import read_plan
from partita.cluster import resolve
from partita.errors import InputError
from partita.graph import GraphBuilder
from partita.jobs.check_plan import check_plan
from partita.jobs.compare import compare
from partita.jobs.plan import plan
from partita.jobs.plan_simulator import order_bound_s
from partita.jobs.simulate import simulate, simulate_stages
from partita.plans import plan_from_json
from partita.search.base import Status, Stop
from tests.shallow import GPT2

QUICK = Stop(gap=0.01)  # no clock: a slow machine must not change the answer


@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [
        ("alexnet", "4xA100", 64),
        ("squeezenet1_1", "2xV100+2xP100", 32),
        ("rnnlm", "2x2xA100", 16),
    ],
)
def test_no_named_strategy_is_faster_than_the_plan(model, cluster, batch):
    comparison = compare(model, cluster, batch=batch, stop=QUICK)
    rows = {row.name: row for row in comparison.rows}
    ours = rows.pop("plan")
    assert ours.fits
    for row in rows.values():
        if row.fits:
            assert ours.step_s <= row.step_s * (1 + 1e-6), row.name
    assert comparison.lower_bound_s <= ours.step_s * (1 + 1e-9)


def test_a_plan_is_what_it_predicts_and_passes_the_checker(tmp_path):
    planned = plan(GPT2, "4xA100", batch=16, pin=["pp=2"], stop=QUICK)
    assert planned.plan is not None
    assert len({stage.mesh.devices for stage in planned.plan.stages}) == 2
    file = tmp_path / "plan.json"
    file.write_bytes(planned.plan.to_json())
    again = read_plan(file)
    assert again == planned.plan
    assert check_plan(again) == ()
    assert simulate(again).step_s == pytest.approx(planned.plan.prediction.step_s)
    assert planned.lower_bound_s <= planned.plan.prediction.step_s


@pytest.fixture(scope="module")
def free():
    """The plan that is found where nothing is pinned."""
    return plan("transformer-base@128", "2x2xH100", batch=32, stop=Stop(gap=0.0))


@pytest.mark.parametrize("pin", ["zero=0", "zero=3", "mesh=4", "pp=2"])
def test_no_pin_finds_what_a_free_search_does_not(pin, free):
    pinned = plan("transformer-base@128", "2x2xH100", batch=32, pin=[pin], stop=Stop(gap=0.0))
    assert free.best.step_s <= pinned.best.step_s * (1 + 1e-6)


def test_over_slow_links_a_free_search_finds_what_a_pinned_one_does():
    """Estimates add sends that ZB-V hides: by them alone it would never be simulated."""
    slow = (GPT2, "2xV100@links=0.01")
    free = plan(*slow, batch=8)
    pinned = plan(*slow, batch=8, pin=("pp=2",))
    assert free.best.step_s <= pinned.best.step_s * 1.001
    assert pinned.best.step_s < 0.95 * plan(*slow, batch=8, pin=("pp=1",)).best.step_s


def test_the_next_best_plans_are_kept_in_order():
    planned = plan("alexnet", "4xA100", batch=32, stop=QUICK)
    steps = [c.objective_s for c in (planned.best, *planned.others)]
    assert steps == sorted(steps)
    assert 3 <= len(planned.others) <= 10
    objectives = [step.objective for step in planned.history]
    assert objectives == sorted(objectives, reverse=True)


def test_the_same_input_gives_the_same_plan():
    first, second = (plan("alexnet", "2xA100", batch=8, stop=QUICK) for _ in range(2))
    assert first.plan.stages == second.plan.stages
    assert first.plan.schedule == second.plan.schedule


def test_memory_that_is_asked_for_is_kept():
    free = plan(GPT2, "2xA100", batch=16, stop=QUICK)
    cap = max(free.best.simulation.peak_bytes) * 0.6
    tight = plan(GPT2, "2xA100", batch=16, max_memory=cap, stop=QUICK)
    assert tight.best is not None
    assert max(tight.best.simulation.peak_bytes) <= cap
    assert tight.best.step_s >= free.best.step_s


def test_what_cannot_fit_says_what_would_help():
    planned = plan("gpt2-xl", "1xRTX-3090", batch=2, stop=QUICK)
    assert planned.status is Status.INFEASIBLE
    assert planned.plan is None
    assert "no plan fits 24.0 GiB per device" in planned.why
    assert "per device would be enough" in planned.why
    assert "2 such devices would be enough" in planned.why or "4 such devices" in planned.why


def test_a_cluster_without_free_memory_has_no_plan():
    planned = plan("alexnet", "2xA100", batch=4, max_memory=1e6, stop=QUICK)
    assert planned.status is Status.INFEASIBLE


def test_pins_are_kept_and_bans_are_not_found():
    planned = plan(
        GPT2, "4xA100", batch=16, stop=QUICK,
        pin=["pp=4", "micro-batches=16"], forbid=["schedule=zb-h1", "schedule=zb-h2"],
    )  # fmt: skip
    for candidate in (planned.best, *planned.others):
        simulation = candidate.simulation
        assert len({s.mesh.devices for s in simulation.stages}) == 4
        assert simulation.schedule.num_microbatches == 16
        assert simulation.schedule.name not in ("zb-h1", "zb-h2")


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-h2"])
def test_a_pinned_schedule_is_that_of_every_plan(name):
    pins = [f"schedule={name}", "pp=2"]
    planned = plan(f"{GPT2}@128", "2xA100", batch=8, pin=pins, stop=QUICK)
    for candidate in (planned.best, *planned.others):
        assert candidate.simulation.schedule.name == name


def test_a_pinned_recompute_is_in_every_stage():
    planned = plan(GPT2, "2xA100", batch=8, pin=["recompute=full", "pp=2"], stop=QUICK)
    assert all((stage.checkpointing == "full") for stage in planned.plan.stages)
    assert check_plan(planned.plan) == ()


def test_a_pinned_light_recompute_is_in_every_stage_with_something_cheap():
    planned = plan(GPT2, "2xA100", batch=8, pin=["recompute=selective", "pp=2"], stop=QUICK)
    kinds = {op.name: op.kind for op in planned.best.simulation.workload.graph.ops}
    for stage in planned.plan.stages:
        cheap = not {"layer_norm", "elementwise"}.isdisjoint(kinds[s.op] for s in stage.splits)
        assert stage.checkpointing == ("selective" if cheap else "none")
    again = [op for stage in planned.plan.stages for op in stage.recomputed]
    assert {kinds[op] for op in again} == {"layer_norm", "elementwise"}
    assert check_plan(planned.plan) == ()
    assert plan_from_json(json.loads(planned.plan.to_json())) == planned.plan
    assert "selective recompute" in planned.best.simulation.arrangement


def test_where_nothing_is_cheap_enough_a_pinned_selective_recompute_is_refused():
    planned = plan("rnnlm", "2xA100", batch=8, pin=["recompute=selective", "pp=1"], stop=QUICK)
    assert planned.plan is None
    assert "where selective needs ops that are cheap to run again; drop one" in planned.why


def test_light_recompute_makes_room_for_less_than_recomputing_all():
    room = {"batch": 32, "max_memory": 5.6e9, "stop": QUICK}
    light = plan("gpt2", "2xA100-80GB-PCIe", **room)
    without = plan("gpt2", "2xA100-80GB-PCIe", **room, forbid=["recompute=selective"])
    assert any(stage.recomputed for stage in light.plan.stages)
    assert light.best.step_s < without.best.step_s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pin": ["pp=2", "pp=4"]}, "pp=2 and pp=4 contradict each other"),
        (
            {"pin": ["schedule=1f1b"], "forbid": ["schedule=1f1b"]},
            "--pin schedule=1f1b and --forbid schedule=1f1b contradict",
        ),
        ({"pin": ["stages=2"]}, "write pp=2"),
        ({"pin": ["pp"]}, "write one of pp"),
        ({"pin": ["pp=two"]}, "a whole number from 1 on"),
        ({"pin": ["recompute=maybe"]}, "known are full, none, selective"),
        ({"forbid": ["schedule=2f2b"]}, "schedule=2f2b"),
        ({"pin": ["mesh=axb"]}, "write sizes such as 16x8"),
        ({"objective": "beauty"}, "use one of throughput, latency"),
        ({"max_memory": 0}, "give more than 0"),
    ],
)
def test_constraints_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        plan("alexnet", "2xA100", batch=4, **options)


def test_a_constraint_that_nothing_fulfils_is_named():
    pins = ["pp=2", "micro-batches=2"]
    planned = plan("alexnet", "2xA100", batch=4, pin=pins, max_memory=5e8, stop=QUICK)
    assert planned.status is Status.INFEASIBLE
    assert "pp=2, micro-batches=2" in planned.why


def test_a_batch_of_one_on_many_devices_is_planned():
    planned = plan("alexnet", "64xA100", batch=1, stop=QUICK)
    assert planned.best is not None
    assert check_plan(planned.plan) == ()


def test_a_model_of_one_op_is_planned():
    g = GraphBuilder("one")
    graph = g.finish(g.linear(g.input("x", (8, 64)), 64, "only"))
    planned = plan(graph, "2xA100", training=False, stop=QUICK)
    assert planned.best is not None
    assert planned.best.simulation.step_s > 0


def test_inference_has_no_backward_and_latency_is_the_time_of_a_batch():
    quick = plan(GPT2, "2xA100", batch=8, training=False, objective="latency", stop=QUICK)
    assert quick.best.objective_s == quick.best.step_s
    many = plan(GPT2, "2xA100", batch=8, training=False, stop=QUICK)
    assert many.best.objective_s <= many.best.step_s * (1 + 1e-9)
    assert many.best.objective_s <= quick.best.objective_s * (1 + 1e-9)


def test_a_stopped_search_gives_the_best_so_far():
    asked = iter(range(10**6))
    planned = plan(
        GPT2, "4xA100", batch=16,
        stop=Stop(interrupted=lambda: next(asked) > 6),
    )  # fmt: skip
    assert planned.status is Status.STOPPED
    assert planned.why == "interrupted"
    assert planned.best is not None


def test_unlike_devices_get_unlike_stages():
    cluster = resolve("1xV100+1xP100")
    planned = plan(GPT2, cluster, batch=12, dtype="f16", stop=QUICK)
    alike = simulate(GPT2, cluster, batch=12, dtype="f16")
    assert planned.best.step_s < 0.85 * alike.step_s


def test_plain_pipelines_get_orders_without_bubbles_behind_others_that_are_ahead():
    planned = plan(
        "gpt2-medium", "4xV100+8xP100", batch=96, dtype="f16",
        pin=["pp=2", "micro-batches=6"], stop=QUICK,
    )  # fmt: skip
    step = {
        (len(c.simulation.stages), c.simulation.schedule.name): c.step_s
        for c in (planned.best, *planned.others)
    }
    in_turns = min(seconds for (stages, _), seconds in step.items() if stages > 2)
    assert in_turns < step[2, "1f1b"]  # so that the plain pipeline was not the leader
    assert step[2, "zb-h2"] < 0.97 * step[2, "zb-h1"] < step[2, "1f1b"]
    assert planned.best.step_s <= step[2, "zb-h2"] < 0.68


def test_a_searched_order_is_a_plan_like_any_other():
    planned = plan(GPT2, "2xA100", batch=8, pin=["pp=2", "micro-batches=4"], stop=QUICK)
    orders = [
        candidate.simulation
        for candidate in (planned.best, *planned.others)
        if candidate.simulation.schedule.name == "searched"
    ]
    assert orders
    for simulation in orders:
        assert len(simulation.schedule.order) == 2
        assert simulation.fits


def test_a_plan_from_a_newer_version_or_for_another_model_is_refused():
    planned = plan("squeezenet1_1", "2xA100", batch=4, stop=QUICK)
    value = json.loads(planned.plan.to_json())
    with pytest.raises(InputError, match="newer partita"):
        plan_from_json(value | {"format": "partita/plan@9"})
    other = plan_from_json(value | {"model": value["model"] | {"fingerprint": "0" * 16}})
    assert "another squeezenet1_1" in check_plan(other)[0]


def test_a_checker_does_not_believe_a_plan():
    planned = plan(GPT2, "2xA100", batch=8, pin=["pp=2"], stop=QUICK)
    value = json.loads(planned.plan.to_json())
    value["stages"] = value["stages"][::-1]
    complaints = check_plan(plan_from_json(value))
    assert any("reads what" in line for line in complaints)
    value["stages"] = value["stages"][::-1]
    value["prediction"]["step_s"] /= 2
    assert "the plan predicts" in check_plan(plan_from_json(value))[0]
    value["stages"][0]["splits"] = value["stages"][0]["splits"][1:]
    assert "has no split" in check_plan(plan_from_json(value))[0]


def test_no_order_is_quicker_than_its_first_forward_and_its_work():
    planned = plan(GPT2, "4xA100", batch=16, pin=["pp=4", "micro-batches=8"], stop=QUICK)
    plain = [c for c in (planned.best, *planned.others) if len(c.simulation.stages) == 4]
    by_stages = {}
    for candidate in plain:
        by_stages.setdefault(candidate.simulation.stages, []).append(candidate)
    same = max(by_stages.values(), key=len)
    assert len({c.simulation.schedule.name for c in same}) > 2
    quickest = min(c.step_s for c in same)
    whole = [c for c in same if c.simulation.schedule.name == "1f1b"]
    for candidate in whole:
        assert 0 < order_bound_s(candidate.simulation.timeline) <= quickest * (1 + 1e-9)


def test_simulating_the_stages_gives_the_candidates_time():
    planned = plan(GPT2, "2xA100", batch=8, pin=["pp=2"], stop=QUICK)
    best = planned.best.simulation
    again = simulate_stages(best.workload, best.cluster, best.stages, best.schedule)
    assert again.step_s == pytest.approx(best.step_s)
