"""Pins that no plan can meet are refused at once, and what contradicts what is named.

Pinned degrees: a plan that is found has them as its summary prints them.
"""

from types import SimpleNamespace

import pytest

from partita.cluster import resolve
from partita.degrees import axis_names, copied_bytes, stage_degrees
from partita.errors import InputError
from partita.graph import GraphBuilder
from partita.graph.chain import cut_blocks
from partita.jobs.check_plan import check_plan
from partita.jobs.constraints import (
    Computation,
    Constraints,
    check_constraints,
    computation,
    counted,
    keep_splits,
    keeps_degrees,
    parse_constraints,
    roles,
    settled,
    zero_levels,
)
from partita.jobs.plan import plan
from partita.jobs.plan_settings import PlanSettings
from partita.jobs.plan_simulator import Simulator
from partita.jobs.simulate import data_parallel
from partita.plans import Axis
from partita.schedules.named import NAMED
from partita.search.base import Stop
from partita.search.joint.model import ModelSettings
from partita.zoo.gpt import GptSizes, gpt
from partita.zoo.llama import DecoderSizes, Experts, decoder
from tests.shallow import GPT2

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
        return plan(f"{GPT2}@32", "2xA100", batch=8, pin=pins, stop=Stop(gap=0.5))

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


def eight_blocks(last=16, width=512, samples=64):
    """Eight blocks of two layers each; the last may be larger."""
    g = GraphBuilder("eight")
    x = g.input("x", (samples, width))
    for number in range(8):
        with g.scope(f"blocks.{number}"):
            x = g.linear(g.relu(g.linear(x, width, "up")), width, "down")
    return g.finish(g.linear(x, last, "head"))


def test_equal_blocks_stay_whole_unless_they_are_to_be_cut_anywhere():
    graph, stop = eight_blocks(), Stop(gap=0.0)
    pins = ["pp=4", "schedule=1f1b", "micro-batches=8"]
    answer = plan(graph, "4xA100", pin=pins, stop=stop)
    firsts = [stage.splits[0].op for stage in answer.plan.stages]
    assert firsts == [f"blocks.{number}.up" for number in (0, 2, 4, 6)]
    free = plan(graph, "4xA100", pin=[*pins, "cut=anywhere"], stop=stop)
    assert answer.best.objective_s <= free.best.objective_s * 1.005


def test_blocks_are_cut_where_whole_ones_cost_more_than_next_to_nothing():
    # 18 equal layers with the head: the even cut lies in the middle of the fifth block
    graph, stop = eight_blocks(last=8192, width=4096, samples=32768), Stop(gap=0.0)
    pins = ["pp=2", "schedule=zb-h1", "micro-batches=8"]  # no named strategy has it
    answer = plan(graph, "2xA100", pin=pins, stop=stop)
    firsts = [stage.splits[0].op for stage in answer.plan.stages]
    assert cut_blocks(graph, firsts) == {"blocks.4.down": "blocks.4"}
    assert answer.cut_otherwise.objective_s > answer.best.objective_s * 1.03
    never = PlanSettings(whole_blocks=-1.0)
    free = plan(graph, "2xA100", pin=pins, stop=stop, settings=never)
    asked = plan(graph, "2xA100", pin=[*pins, "cut=anywhere"], stop=stop)
    assert free.best.objective_s == asked.best.objective_s
    always = PlanSettings(whole_blocks=10.0)
    whole = plan(graph, "2xA100", pin=pins, stop=stop, settings=always)
    assert cut_blocks(graph, [stage.splits[0].op for stage in whole.plan.stages]) == {}
    assert free.best.objective_s <= answer.best.objective_s <= whole.best.objective_s
    assert free.best.objective_s < whole.best.objective_s  # what follows is of a slower one
    first = whole.plan.origin.alternatives[0]
    assert first.step_s < whole.best.step_s
    assert first.why == "stages begin inside of blocks"
    arrangement = whole.best.simulation.arrangement
    assert arrangement not in [one.simulation.arrangement for one in whole.others]


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
    assert cut_blocks(graph, firsts) == {}
    assert cut_blocks(graph, ["blocks.1.down", "blocks.2.up"]) == {"blocks.1.down": "blocks.1"}


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
        return plan(
            f"{GPT2}@32", "2xA100", batch=4, pin=["pp=2"], forbid=forbid, stop=Stop(gap=0.0)
        )

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


SIZES = GptSizes(2, 256, 4, 128, 1024)
ROUGH = Stop(time_s=20.0, gap=0.2)


@pytest.fixture(scope="module")
def tiny():
    """A GPT of two layers."""
    return gpt("tiny", SIZES, 8, 128, "bf16", loss=True, fused_attention=True)


@pytest.fixture(scope="module")
def sparse():
    """A decoder of two layers with four experts each."""
    sizes = DecoderSizes(2, 256, 512, 4, vocab=1024, experts=Experts(4, 2, 512))
    return decoder("sparse", sizes, 8, 128, "bf16", loss=True)


def degrees_of(planned):
    """Those of every stage."""
    simulation = planned.best.simulation
    graph = simulation.workload.graph
    return [stage_degrees(stage, axis_names(graph, stage)) for stage in simulation.stages]


@pytest.mark.parametrize(
    "pins",
    [
        {"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}, {"tp": 2, "cp": 2},
        {"tp": 1, "cp": 1}, {"tp": 2, "sp": "yes"}, {"tp": 2, "sp": "no"},
        {"pp": 2, "tp": 2}, {"pp": 2, "vpp": 2},
    ],
    ids=str,
)  # fmt: skip
def test_plans_have_the_degrees_that_were_pinned(tiny, pins):
    planned = plan(tiny, "4xA100", pin=[f"{k}={v}" for k, v in pins.items()], stop=ROUGH)
    assert planned.best is not None, planned.why
    stages = planned.best.simulation.stages
    groups = len({stage.mesh.devices for stage in stages})
    for degrees in degrees_of(planned):
        for name, value in pins.items():
            wanted = {"yes": 1, "no": 0}.get(value, value)
            if name == "pp":
                assert groups == wanted
            elif name == "vpp":
                assert len(stages) == wanted * groups
            else:
                assert degrees[name] == wanted


@pytest.mark.parametrize("pins", [{"ep": 2}, {"ep": 4}, {"ep": 2, "tp": 2}], ids=str)
def test_experts_are_split_as_pinned(sparse, pins):
    planned = plan(sparse, "4xA100", pin=[f"{k}={v}" for k, v in pins.items()], stop=ROUGH)
    assert planned.best is not None, planned.why
    for degrees in degrees_of(planned):
        assert {name: degrees[name] for name in pins} == pins


def test_a_degree_that_is_ruled_out_is_not_taken(tiny):
    planned = plan(tiny, "4xA100", forbid=["dp=4"], stop=ROUGH)
    assert planned.best is not None
    assert all(degrees["dp"] != 4 for degrees in degrees_of(planned))


def test_the_bound_holds_with_pins(tiny):
    free = plan(tiny, "4xA100", stop=ROUGH)
    pinned = plan(tiny, "4xA100", pin=["tp=4"], stop=ROUGH)
    assert free.best.objective_s <= pinned.best.objective_s * 1.2
    assert pinned.lower_bound_s <= pinned.best.objective_s


@pytest.mark.parametrize(
    ("pins", "shape", "assigned"),
    [
        (["tp=8"], (16, 8), ("other", "tp")),
        (["tp=16"], (16, 8), ("tp", "other")),
        (["tp=8", "dp=16"], (16, 8), ("dp", "tp")),
        (["tp=8", "dp=8"], (8, 8), ("dp", "tp")),
        (["tp=8", "dp=4"], (8, 8), None),
        (["tp=64"], (8, 8), ("tp", "tp")),
        (["tp=1"], (8, 8), ("other", "other")),
        (["tp=8", "dp=8", "cp=1", "ep=1"], (64,), None),
        (["dp=64", "tp=1", "cp=1", "ep=1"], (64,), ("dp",)),
        ([], (4, 2), ("other", "other")),
    ],
)
def test_axes_get_the_names_of_their_sizes(pins, shape, assigned):
    assert roles(parse_constraints(pins), shape) == assigned


def test_without_degrees_all_splits_are_left():
    assert keep_splits(parse_constraints(["pp=2"]), (Axis("x", 4),)) == ()


def test_a_plan_of_other_degrees_is_told_apart(tiny):
    stage = data_parallel(tiny, resolve("4xA100"))
    assert keeps_degrees(parse_constraints(["dp=4"]), tiny, [stage])
    assert keeps_degrees(parse_constraints(["tp=1", "sp=no"]), tiny, [stage])
    assert not keeps_degrees(parse_constraints(["tp=4"]), tiny, [stage])
    assert not keeps_degrees(parse_constraints((), ["dp=4"]), tiny, [stage])


VIRTUAL = {"zb-v": (2,), "interleaved": (2, 3, 4)}


def check_degrees(*pins, cluster="4xA100", training=True, has_experts=True):
    check_constraints(
        parse_constraints(pins), batch=32, cluster=resolve(cluster), num_segments=29,
        inner_size=4, training=training, virtual_stages=VIRTUAL, has_experts=has_experts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (["dp=3"], "dp=3 cannot be made of 4 devices; choose degrees that are the sizes of one of "
         "these meshes: 4, 2x2, 2 or 1"),
        (["pp=2", "tp=4"], "pp=2 and tp=4 cannot be made of 4 devices"),
        (["mesh=2x2", "tp=3"], "mesh=2x2 and tp=3 cannot be made of 4 devices"),
        (["tp=2", "dp=2", "cp=2"], "dp=2, tp=2, cp=2 at once: a stage of a plan has two axes at "
         "the most; pin two of them; `partita simulate` forecasts any such strategy"),
        (["sp=yes"], "sp=yes splits what tensor parallelism repeats, and tp is not pinned to 2"),
        (["pp=1", "vpp=2"], "pp=1 and vpp=2 contradict each other: one group has nothing to"),
        (["vpp=5"], "vpp=5 is not among the numbers of stages on a group that are tried; give 1, "
         "2, 3 or 4"),
        (["schedule=1f1b", "vpp=2"], "schedule=1f1b and vpp=2 contradict each other"),
        (["schedule=zb-v", "vpp=1"], "schedule=zb-v and vpp=1 contradict each other"),
    ],
)  # fmt: skip
def test_degrees_that_cannot_be_are_refused(pins, words):
    with pytest.raises(InputError) as refusal:
        check_degrees(*pins)
    assert words in str(refusal.value)


def test_experts_and_interleaving_are_not_everywhere():
    with pytest.raises(InputError, match="ep=2, but the model has no experts; leave it out"):
        check_degrees("ep=2", has_experts=False)
    with pytest.raises(InputError, match="vpp=2, but inference is not interleaved"):
        check_degrees("vpp=2", training=False)
    check_degrees("ep=1", has_experts=False)
    check_degrees("vpp=1", training=False)


@pytest.mark.parametrize(
    ("pins", "bans", "words"),
    [
        (["tp=0"], [], "found 'tp=0'; give a whole number from 1 on"),
        (["dp=x"], [], "found 'dp=x'; give a whole number from 1 on"),
        (["sp=maybe"], [], "found 'sp=maybe'; write sp=yes or sp=no"),
        (["sp=yes", "sp=off"], [], "sp=yes and sp=no contradict each other"),
        (
            [],
            ["tp=1"],
            "found 'tp=1', which leaves all other degrees; pin the degree that is wanted",
        ),
        (["tp=2"], ["tp=2"], "--pin tp=2 and --forbid tp=2 contradict each other"),
        (["xp=2"], [], "known are cp, cut, dp, ep, execution"),
    ],
)
def test_values_that_make_no_sense_are_refused(pins, bans, words):
    with pytest.raises(InputError) as refusal:
        parse_constraints(pins, bans)
    assert words in str(refusal.value)
