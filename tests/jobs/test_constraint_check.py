"""Pins that no plan can meet are refused at once, and what contradicts what is named."""

from types import SimpleNamespace

import pytest

from partita.cluster import resolve
from partita.degrees import copied_bytes
from partita.errors import InputError
from partita.graph import GraphBuilder
from partita.jobs.check_plan import check_plan
from partita.jobs.constraint_check import check_constraints
from partita.jobs.constraints import (
    Computation,
    Constraints,
    computation,
    counted,
    parse_constraints,
    settled,
    zero_levels,
)
from partita.jobs.plan import plan
from partita.jobs.plan_simulator import Simulator
from partita.schedules.named import NAMED
from partita.search.base import Stop
from partita.search.joint.model import ModelSettings

QUICK = Stop(gap=0.01)


def check(*pins, batch=32, cluster="4xA100", training=True, num_segments=29):
    constraints = parse_constraints(pins)
    check_constraints(
        constraints, batch=batch, cluster=resolve(cluster), num_segments=num_segments,
        inner_size=4, training=training,
        virtual_stages=ModelSettings().virtual_stages(constraints.pinned_to("schedule")),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pins", "options", "words"),
    [
        ([], {"training": False}, "shape=m is for training"),
        ([], {"cluster": "1xA100"}, "shape=m needs several devices"),
        (["micro-batches=16"], {}, "needs a sample for each of 4 devices in a micro-batch"),
        (["pp=2"], {}, "has a stage on each of 4 devices, and pp=2"),
        (["dp=2"], {}, "says how devices are used, and so does dp="),
    ],
)
def test_an_m_shape_that_cannot_be_is_refused(pins, options, words):
    with pytest.raises(InputError, match=words):
        check("shape=m", *pins, **options)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (["micro-batches=7"], "micro-batches=7 does not divide the batch of 32; give 4 or 8"),
        (["pp=64"], "pp=64, but the model can be cut into 29 parts"),
        (["pp=3"], "pp=3 cannot be made of 4 devices, each stage of as many; give 1, 2"),
        (["pp=2", "mesh=4"], "pp=2 and mesh=4 contradict each other"),
        (["mesh=2x2x2"], "mesh=2x2x2 cannot be made of 4 devices; give mesh=4, 2x2, 2 or 1"),
        (["pp=1", "schedule=gpipe"], "pp=1 and schedule=gpipe contradict each other"),
        (["pp=1", "schedule=1f1b"], "pp=1 and schedule=1f1b contradict each other"),
        (
            ["pp=4", "micro-batches=2", "schedule=interleaved"],
            "pp=4, micro-batches=2, schedule=interleaved and a batch of 32 contradict each other: "
            "needs a multiple of 4 micro-batches",
        ),
        (["schedule=dualpipe"], "schedule=dualpipe holds the model twice, which a plan does not"),
        (["schedule=chimera", "pp=2"], "schedule=chimera holds the model twice"),
        (["pp=4", "micro-batches=8", "schedule=hanayo"], "needs 4 micro-batches or fewer"),
        (["pp=4", "micro-batches=4", "schedule=dualpipe-v"], "needs 8 micro-batches or more"),
        (["vpp=4", "schedule=hanayo"], "that are tried with schedule=hanayo; give 2"),
        (["pp=4", "micro-batches=2", "schedule=looped-bfs"], "looped-bfs needs 4 micro-batches"),
        (["pp=2", "vpp=48", "schedule=interleaved"], "can be cut into 29 parts at most, not 96"),
    ],
)
def test_what_cannot_be_is_refused(pins, words):
    with pytest.raises(InputError) as error:
        check(*pins)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "pins",
    [
        ["micro-batches=8"],
        ["pp=4", "mesh=1"],
        ["mesh=2x2"],
        ["pp=2", "mesh=2", "schedule=zb-v", "micro-batches=4"],
        ["recompute=selective"],
    ],
)
def test_what_can_be_is_not(pins):
    check(*pins)


def test_inference_is_not_interleaved_and_one_device_orders_nothing():
    with pytest.raises(InputError, match="schedule=interleaved, but inference is not interleaved"):
        check("schedule=interleaved", training=False)
    with pytest.raises(InputError, match="schedule=gpipe on 1 device: one stage has nothing to"):
        check("schedule=gpipe", cluster="1xA100")


@pytest.mark.parametrize("name", NAMED)
def test_a_pinned_schedule_is_that_of_the_plan_or_refused(name):
    pins = ["pp=2", f"schedule={name}", *(["micro-batches=2"] if name == "hanayo" else [])]

    def planned():
        return plan("gpt2@32", "2xA100", batch=8, pin=pins, stop=Stop(gap=0.5))

    if NAMED[name].layout == "two-way":
        with pytest.raises(InputError, match="holds the model twice, which a plan does not"):
            planned()
        return
    answer = planned().plan
    assert answer.schedule.name == name
    assert len({stage.mesh.devices for stage in answer.stages}) == 2
    assert check_plan(answer) == ()


def test_an_order_is_of_several_stages():
    g = GraphBuilder("small")
    x = g.input("x", (8, 16))
    for name in ("a", "b", "c"):
        x = g.relu(g.linear(x, 16, name))
    graph = g.finish(x)

    def planned(pin=(), forbid=(), devices=2):
        stop = Stop(gap=0.9)
        answer = plan(graph, f"{devices}xA100", pin=pin, forbid=forbid, stop=stop).plan
        return len({stage.mesh.devices for stage in answer.stages}), answer.schedule.name

    assert planned(pin=["schedule=1f1b"]) == (2, "1f1b")  # slower than one device, and asked for
    assert planned(forbid=["schedule=1f1b"]) == (1, "1f1b")  # nothing is ordered there
    assert planned(forbid=["schedule=1f1b"], devices=1) == (1, "1f1b")
    groups, name = planned(pin=["pp=2"], forbid=["schedule=1f1b"])
    assert groups == 2
    assert name != "1f1b"


@pytest.mark.parametrize("asked", [{"pin": ["cut=modules"]}, {"forbid": ["cut=anywhere"]}])
def test_stages_hold_whole_blocks_where_that_is_asked_for(asked):
    g = GraphBuilder("blocks")
    x = g.input("x", (8, 16))
    for number in range(3):
        with g.scope(f"blocks.{number}"):
            x = g.linear(g.relu(g.linear(x, 16, "up")), 16, "down")
    graph = g.finish(x)
    pins = ["pp=2", *asked.pop("pin", ())]
    answer = plan(graph, "2xA100", pin=pins, stop=Stop(gap=0.9), **asked).plan
    firsts = [stage.splits[0].op for stage in answer.stages]
    assert len(firsts) > 1
    assert all(name.endswith(".up") for name in firsts)


def test_zero_stages_are_those_that_are_left():
    assert zero_levels(parse_constraints()) == (0, 1, 3)
    assert zero_levels(parse_constraints(["zero=2"])) == (2,)
    assert zero_levels(parse_constraints([], ["zero=1"])) == (0, 3)
    assert zero_levels(parse_constraints([], ["zero=0", "zero=1", "zero=3"])) == (2,)
    with pytest.raises(InputError, match="forbid: every ZeRO stage is ruled out; allow one"):
        zero_levels(parse_constraints([], [f"zero={level}" for level in range(4)]))


@pytest.mark.parametrize(
    ("pins", "bans", "found", "kept"),
    [
        (["recompute=selective"], [], ["selective", "none"], True),  # nothing is cheap in one stage
        (["recompute=selective"], [], ["none", "none"], False),
        (["recompute=selective"], [], ["selective", "full"], False),
        (["recompute=full"], [], ["full", "none"], False),
        ([], ["recompute=none"], ["none"], False),
        ([], ["recompute=none"], ["selective", "full", "none"], True),
        ([], ["recompute=full"], ["none"], True),
    ],
)
def test_checkpointing_is_as_asked_or_has_nothing_to_run_again(pins, bans, found, kept):
    asked = SimpleNamespace(constraints=parse_constraints(pins, bans))
    stages = [SimpleNamespace(checkpointing=kind) for kind in found]
    assert Simulator._keeps_checkpointing(asked, stages) == kept


def test_a_pinned_zero_stage_is_that_of_all_that_has_copies():
    g = GraphBuilder("tied")
    table = g.parameter("table", (16, 16))
    x = g.linear(g.lookup(g.input("ids", (8, 4), "i64"), table, "words"), 16, "between")
    graph = g.finish(g.one("linear", x, table, name="head"))
    for pins, bans in ((["zero=3"], []), (["zero=1"], []), ([], ["zero=1"]), ([], ["zero=3"])):
        answer = plan(graph, "4xA100", pin=["pp=2", *pins], forbid=bans, stop=Stop(gap=0.9))
        levels = {
            split.zero for stage in answer.plan.stages for split in stage.splits
            if copied_bytes(graph, stage, split)
        }  # fmt: skip
        assert all(f"zero={level}" in pins or not pins for level in levels)
        assert not any(f"zero={level}" in bans for level in levels)
        assert check_plan(answer.plan) == ()


def test_a_searched_order_is_ruled_out_but_never_asked_for():
    def planned(*forbid):
        return plan("gpt2@32", "2xA100", batch=4, pin=["pp=2"], forbid=forbid, stop=Stop(gap=0.0))

    for forbid in ((), ("schedule=searched",)):
        answer = planned(*forbid)
        orders = {one.simulation.schedule.name for one in (answer.best, *answer.others)}
        assert ("searched" in orders) == (not forbid)
    with pytest.raises(InputError, match="an order is searched only where it beats the named ones"):
        parse_constraints(["schedule=searched"])


def test_inference_recomputes_nothing():
    with pytest.raises(InputError, match="inference has no backward"):
        check("recompute=full", training=False)
    check("recompute=none", training=False)


def test_stages_of_unlike_devices_need_not_be_of_as_many():
    check("pp=3", cluster="2xA100+4xV100")


def test_planning_asks_first():
    with pytest.raises(InputError, match="does not divide"):
        plan("alexnet", "2xA100", batch=8, pin=["micro-batches=3"])


def test_the_bound_rises_while_a_search_goes_on():
    planned = plan("gpt2", "4xA100", batch=32, stop=Stop(gap=1e-9))
    bounds = [step.lower_bound for step in planned.history]
    assert bounds[-1] == pytest.approx(planned.lower_bound_s)
    assert bounds == sorted(bounds)
    assert bounds[0] < 0.9 * bounds[-1]
    for step in planned.history:
        assert step.lower_bound <= step.objective * (1 + 1e-9)


def test_the_size_of_a_micro_batch_is_their_number_once_replicas_are_known():
    size = counted(parse_constraints(["micro-batch=2", "dp=4"], ["micro-batch=1"]), 32)
    assert size.pinned_to("micro-batches") == "4"
    assert size.pinned_to("micro-batch") is None
    assert size.banned == (("micro-batches", "8"),)
    planned = plan("gpt2@64", "4xA100", batch=8, pin=["dp=2", "pp=2", "micro-batch=2"], stop=QUICK)
    assert planned.plan is not None
    assert planned.plan.schedule.num_microbatches == 2


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (["micro-batch=2"], "not how many replicas there are; add --pin dp=N, or write"),
        (["micro-batch=3", "dp=4"], "micro-batch=3 times dp=4 does not divide the batch of 32"),
        (["micro-batch=16", "dp=4"], "does not divide the batch of 32"),
        (["micro-batch=2", "dp=4", "micro-batches=8"], "contradicts micro-batches=8"),
    ],
)
def test_a_size_that_does_not_go_with_the_rest_is_refused(pins, words):
    with pytest.raises(InputError) as caught:
        counted(parse_constraints(pins), 32)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (["hsdp=4", "zero=0"], "zero=0 shards nothing; pin zero=1, 2 or 3"),
        (["hsdp=1"], "one replica shards nothing"),
        (["hsdp=3", "dp=8"], "hsdp=3 does not divide dp=8; choose a divisor"),
    ],
)
def test_shard_groups_that_shard_nothing_are_refused(pins, words):
    with pytest.raises(InputError) as error:
        settled(parse_constraints(pins))
    assert words in str(error.value)


def test_a_shard_group_is_with_zero_3_unless_another_stage_is_pinned():
    assert settled(parse_constraints(["hsdp=4"])).pinned_to("zero") == "3"
    assert settled(parse_constraints(["hsdp=4", "zero=1"])).pinned_to("zero") == "1"
    with pytest.raises(InputError, match="zero=3 is forbidden; pin zero=1"):
        settled(parse_constraints(["hsdp=4"], ["zero=3"]))


def test_shard_groups_that_the_devices_cannot_make_are_refused():
    with pytest.raises(InputError, match="hsdp=3 cannot be made of 4 devices; pin hsdp=2 or 4"):
        check("hsdp=3")
    check("hsdp=2")


def test_how_a_model_is_computed_is_pinned_or_what_is_left():
    own = computation(parse_constraints(["grad-dtype=bf16", "execution=graph"]), "bf16")
    assert own == Computation()
    pins = ["grad-dtype=fp32", "matmul-dtype=fp8", "execution=eager"]
    assert computation(parse_constraints(pins), "bf16") == Computation("f32", "f8", "eager")
    bans = ["grad-dtype=bf16", "execution=graph"]
    assert computation(parse_constraints((), bans), "bf16") == Computation("f32", "", "compiled")
    every = ["execution=graph", "execution=eager", "execution=compiled"]
    with pytest.raises(InputError, match="are ruled out, and nothing else is left"):
        computation(parse_constraints((), every), "bf16")
    assert settled(parse_constraints([*pins, "pp=2"], bans)) == Constraints((("pp", "2"),))


@pytest.mark.parametrize("key", ["layers=3,4", "attention=flash", "dropout=yes", "dtype=bf16"])
def test_keys_of_a_forecast_that_are_no_decision_say_what_there_is_instead(key):
    with pytest.raises(InputError, match=r"partita simulate --|write --dtype"):
        parse_constraints([key])
