"""Placing models: constraints kept, memory respected, Exprimo's answers, files both ways."""

import itertools
import json
import random
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from partita.cli.place import command
from partita.cluster import Cluster, Device, DeviceKind, Link
from partita.errors import ClusterError, InputError, PlanError, VerificationError
from partita.graph import GraphBuilder
from partita.jobs.experiment_file import experiment_from
from partita.jobs.place import place, place_again
from partita.jobs.place_program import simulate_placement
from partita.jobs.place_result import front, placement_from_json, read_placement
from partita.jobs.place_trace import exprimo_timeline
from partita.plans import read_plan
from partita.problems.placement import read, simulate_exprimo
from partita.search.base import Status, Stop
from partita.verify import check_timeline
from tests.quickness import least_cpu_s

DATA = Path(__file__).parents[1] / "data"
NET, MACHINE = (str(DATA / "exprimo" / name) for name in ("alexnet.json", "malvik.json"))
PAGE = (DATA.parents[1] / "docs" / "placement.md").read_text()
KIND = DeviceKind("gpu", "cpu", (("f32", 1e12),), 2**24, 1e11)


def pair(memory_bytes=2**24):
    kind = replace(KIND, memory_bytes=memory_bytes)
    links = (Link("a", "b", 1e-6, 1e10), Link("b", "a", 1e-6, 1e10))
    return Cluster("pair", (kind,), (Device("a", "gpu"), Device("b", "gpu")), (), links)


def towers(width=256):
    """Two towers of dense layers on one input, then their sum: 2 x 2 x 256 KiB of weights."""
    g = GraphBuilder("towers")
    x = g.input("x", (64, width))
    ends = []
    for side in ("left", "right"):
        with g.scope(side):
            y = g.relu(g.linear(x, width, "one"), "act")
            ends.append(g.linear(y, width, "two"))
    return g.finish(g.add(*ends, name="sum"))


def quick(*args, **options):
    """With a small search, so that a test takes no time."""
    stop = options.pop("stop", Stop(evaluations=400))
    return place(*args, **{"method": "hill-climbing", "stop": stop, **options})


class TestOwnRules:
    def test_two_towers_go_to_two_devices(self):
        placed = quick(towers(), pair(), training=False)
        assert placed.best.num_devices == 2
        assert placed.best.fits
        assert placed.lower_bound_s <= placed.best.step_s < placed.tried[-1].step_s
        devices = placed.devices()
        assert devices["left.one"] == devices["left.act"]

    @pytest.mark.parametrize(("batches", "training"), [(1, True), (1, False), (3, True)])
    def test_a_small_model_is_placed_as_well_as_by_trying_everything(self, batches, training):
        placed = quick(towers(512), pair(2**26), batches=batches, training=training)
        size = len(placed.model.layers)
        every = [
            simulate_placement(placed.model, placement, batches, min(batches, 2))[0].makespan
            for placement in itertools.product((0, 1), repeat=size)
        ]
        assert placed.best.step_s == pytest.approx(min(every), rel=1e-9)
        assert placed.lower_bound_s <= min(every)

    def test_the_timeline_is_that_of_the_answer_and_verified(self):
        placed = quick(towers(), pair())
        assert placed.timeline.makespan == pytest.approx(placed.best.step_s)
        check_timeline(placed.timeline.program, placed.timeline)

    def test_stopped_at_once_it_still_answers(self):
        at_once = Stop(interrupted=lambda: True)
        placed = place("alexnet", "malvik", stop=at_once)
        assert placed.status is Status.STOPPED
        assert placed.best.fits
        apart = [("features.*", 1), ("classifier.*", 2)]
        nothing = place("alexnet", "malvik", stop=at_once, pinned=apart)
        assert nothing.best is None
        assert nothing.why == "stopped before any placement was simulated"

    def test_the_time_limit_is_kept(self):
        stop = Stop(time_s=0.5)
        assert least_cpu_s(lambda: place("resnet50", "malvik", stop=stop), 3) < 3

    def test_the_same_seed_gives_the_same_placement(self):
        assert quick("alexnet", "malvik", seed=3).best == quick("alexnet", "malvik", seed=3).best

    @pytest.mark.parametrize("semantics", ["partita", "exprimo"])
    def test_one_device_takes_all_and_that_is_optimal(self, semantics):
        placed = place("alexnet", "1xV100", method="heft", semantics=semantics)
        assert set(placed.best.placement) == {0}
        assert placed.status is Status.OPTIMAL

    def test_it_is_never_worse_than_one_device(self):
        placed = quick("squeezenet1_1", "malvik", batch=8)
        alone = [item.step_s for item in placed.tried if item.name.startswith("all on")]
        assert placed.best.step_s <= min(alone)

    def test_what_one_device_cannot_hold_is_spread(self):
        need = 4 * 256 * 256 * 4 * 4  # weights, gradients and AdamW's two states
        placed = quick(towers(), pair(int(need * 0.8)))
        assert placed.best.num_devices == 2
        assert max(placed.best.peak_bytes) <= need * 0.8

    def test_batches_in_flight_are_faster_than_one_at_a_time(self):
        pinned = [("features.*", 1), ("classifier.*", 2)]
        one, many = (
            quick("alexnet", "malvik", batches=4, in_flight=n, method="heft", pinned=pinned)
            for n in (1, 4)
        )
        assert many.best.step_s < 0.99 * one.best.step_s

    def test_the_front_holds_what_nothing_beats(self):
        placed = quick("alexnet", "malvik", with_front=True)
        shown = placed.front()
        assert placed.best in shown
        costs = [(x.step_s, max(x.peak_bytes), x.num_devices) for x in shown]
        assert not any(
            a != b and all(x <= y for x, y in zip(a, b, strict=True)) for a in costs for b in costs
        )
        assert front(shown) == shown


class TestWishes:
    def test_pins_and_bans_by_pattern_and_name_are_kept(self):
        devices = quick(
            towers(), pair(), pinned=[("left.*", "b")], forbidden=[("right.two", 1)]
        ).devices()
        assert {devices["left.one"], devices["left.act"], devices["left.two"]} == {1}
        assert devices["right.two"] == 0

    def test_colocated_ops_share_a_device(self):
        placed = quick(towers(), pair(), training=False, colocated=[["left.one", "right.*"]])
        devices = placed.devices()
        assert len({devices[name] for name in ("left.one", "right.one", "right.two")}) == 1

    def test_no_more_devices_than_allowed_are_used(self):
        assert quick(towers(), pair(), training=False, max_devices=1).best.num_devices == 1

    @pytest.mark.parametrize(
        ("constraint", "message"),
        [
            ({"pinned": [("left.onne", 0)]}, "no op is called 'left.onne'; did you mean left.one"),
            ({"pinned": [("left.one", 5)]}, "there is no device 5; devices are 0 to 1"),
            ({"pinned": [("left.*", 0), ("left.one", 1)]}, "is pinned to the devices 0 and 1"),
            ({"pinned": [("sum", 0)], "forbidden": [("sum", "a")]}, "which is forbidden for it"),
            ({"forbidden": [("sum", 0), ("sum", 1)]}, "every device is forbidden for op 'sum'"),
            ({"colocated": [["nothing*"]]}, "colocated: no op is called 'nothing"),
            ({"max_devices": 0}, "max_devices: found 0"),
            ({"batches": 0}, "batches: found 0; give at least 1"),
            ({"batches": 10**6}, "batches: found 1,000,000; so many batches of"),
            ({"semantics": "exprim"}, "did you mean exprimo"),
            ({"method": "map-elite"}, "unknown method 'map-elite'; did you mean map-elites"),
        ],
    )
    def test_what_cannot_be_is_refused(self, constraint, message):
        with pytest.raises(InputError, match=message):
            quick(towers(), pair(), **constraint)


class TestNeverFits:
    def test_a_layer_larger_than_every_device_is_named(self):
        placed = quick(towers(2048), pair())
        assert placed.status is Status.INFEASIBLE
        assert placed.best is None
        assert (
            "layer left.one alone holds 64.0 MiB, and the largest device has 16.0 MiB" in placed.why
        )

    def test_more_than_all_devices_together_have_is_said(self):
        placed = quick(towers(), pair(int(2**20 * 1.9)))
        assert placed.status is Status.INFEASIBLE
        assert "all layers together hold 4.02 MiB, and 2 devices have 3.80 MiB" in placed.why

    def test_by_exprimos_rules_too(self):
        placed = quick(towers(2048), pair(), semantics="exprimo")
        assert placed.status is Status.INFEASIBLE
        assert "alone holds 16.0 MiB" in placed.why


class TestExprimo:
    def test_its_files_give_its_answer(self):
        placed = place(NET, MACHINE, semantics="exprimo", method="single")
        assert placed.best.step_s * 1e3 == pytest.approx(43.407329867080456, rel=1e-9)
        assert placed.status is Status.OPTIMAL

    def test_a_pin_on_the_input_moves_the_data(self):
        placed = quick(NET, MACHINE, semantics="exprimo", pinned=[("data", 0)])
        assert placed.devices()["data"] == 0
        assert placed.best.step_s * 1e3 > 43.4

    def test_its_network_runs_by_our_rules_too(self):
        placed = quick(NET, "malvik", batch=16)
        assert placed.best.fits
        assert placed.subject.workload.batch == 16

    def test_a_zoo_model_runs_by_its_rules(self):
        placed = quick("alexnet", MACHINE, semantics="exprimo", batches=2, in_flight=2)
        score = simulate_exprimo(placed.problem, placed.best.placement)
        assert placed.best.step_s == pytest.approx(score.makespan_ms / 1e3)

    @pytest.mark.parametrize(
        "file", ["alexnet-malvik", "alexnet-malvik4-pipeline", "resnet50-malvik4-limited"]
    )
    def test_the_watched_run_is_the_referees_run(self, file):
        problem = read(DATA / "placement" / f"{file}.json")
        dice = random.Random(5)
        placement = [dice.randrange(len(problem.devices)) for _ in problem.layers]
        timeline = exprimo_timeline(problem, placement)
        score = simulate_exprimo(problem, placement)
        assert timeline.makespan * 1e3 == pytest.approx(score.makespan_ms, rel=1e-12)
        check_timeline(timeline.program, timeline)

    def test_devices_without_a_direct_route_never_exchange_anything(self, tmp_path):
        raw = json.loads(Path(MACHINE).read_text())
        raw["devices"][1]["neighbours"] = raw["devices"][1]["neighbours"][:1]  # to the CPU only
        raw["devices"][2]["neighbours"] = raw["devices"][2]["neighbours"][:1]
        path = tmp_path / "star.json"
        path.write_text(json.dumps(raw))
        pins = [("conv1", 1), ("fc8", 2)]
        placed = quick(NET, str(path), semantics="exprimo", pinned=pins)
        assert placed.problem.route[1][2] == -1
        assert placed.best.num_devices == 3  # through the CPU
        own = quick(NET, str(path), pinned=pins, method="heft")  # by our rules data is passed on
        assert {own.devices()["conv1"], own.devices()["fc8"]} == {1, 2}

    def test_the_front_trades_time_for_memory(self):
        placed = quick(NET, MACHINE, semantics="exprimo", with_front=True)
        shown = placed.front()
        assert shown[0] == placed.best
        assert len(shown) >= 3
        assert max(shown[-1].peak_bytes) < max(placed.best.peak_bytes)

    def test_a_device_without_a_route_is_refused(self, tmp_path):
        raw = json.loads(Path(MACHINE).read_text())
        raw["devices"][2]["neighbours"] = []
        path = tmp_path / "alone.json"
        path.write_text(json.dumps(raw))
        with pytest.raises(ClusterError, match=r"devices\[2\].neighbours: sends to no other"):
            place(NET, str(path), semantics="exprimo")


class TestDocuments:
    def test_the_python_in_the_page_runs(self, capsys):
        blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
        exec(compile("\n".join(blocks), "placement.md", "exec"), {})
        assert capsys.readouterr().out.strip().endswith(" 1")

    def test_the_experiment_in_the_page_is_a_good_file(self):
        (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
        assert experiment_from(tomllib.loads(text)).name == "optimisers"

    def test_every_option_in_the_page_is_one(self):
        known = {option for param in command.params for option in param.opts}
        shown = set(re.findall(r"(--[a-z][a-z-]*)", PAGE.split("From Python")[0]))
        assert shown <= known


class TestFiles:
    @pytest.mark.parametrize("semantics", ["partita", "exprimo"])
    def test_a_placement_is_read_as_it_was_written_and_runs_again(self, semantics, tmp_path):
        placed = quick(NET, MACHINE, semantics=semantics, batches=2, pinned=[("conv1", 2)])
        path = tmp_path / "p.json"
        path.write_bytes(placed.saved.to_json())
        saved = read_placement(path)
        assert saved == placed.saved
        again = place_again(saved)
        assert again.best.step_s == pytest.approx(placed.best.step_s)
        assert again.devices() == placed.devices()

    def test_a_false_claim_is_refused(self):
        placed = quick("alexnet", "malvik", method="heft")
        plan = placed.plan
        claim = replace(plan, prediction=replace(plan.prediction, step_s=1e-6))
        with pytest.raises(VerificationError, match=r"the file predicts 1e-06 s, it takes"):
            place_again(replace(placed.saved, plan=claim))

    def test_another_model_under_the_name_is_refused(self):
        placed = quick("alexnet", "malvik", method="heft")
        plan = placed.plan
        other = replace(plan, model=replace(plan.model, fingerprint="0" * 16))
        with pytest.raises(PlanError, match="the plan is for another alexnet"):
            place_again(replace(placed.saved, plan=other))

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("semantics", "own", "semantics: found 'own'; use one of partita, exprimo"),
            ("batches", 0, "batches: found 0; give at least 1"),
            ("in_flight", "2", "p.json: in_flight: Expected `int`"),
            ("format", "partita/plan@1", '"partita/placement@1" is needed here'),
        ],
    )
    def test_a_wrong_field_is_named(self, field, value, message):
        raw = json.loads(quick(towers(), pair(), method="heft").saved.to_json())
        with pytest.raises(InputError, match=message):
            placement_from_json({**raw, field: value}, "p.json")

    def test_the_plan_inside_has_a_stage_per_device(self, tmp_path):
        placed = quick(towers(), pair(), pinned=[("left.*", 0), ("right.*", 1)])
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(json.loads(placed.saved.to_json())["plan"]))
        plan = read_plan(path)
        assert [stage.mesh.devices for stage in plan.stages] == [(0,), (1,)]
        assert [stage.name for stage in plan.stages] == ["a", "b"]
