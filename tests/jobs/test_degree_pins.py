"""Pinned degrees: a plan that is found has them as its summary prints them."""

import pytest

from partita.cluster import resolve
from partita.degrees import axis_names, stage_degrees
from partita.errors import InputError
from partita.jobs.constraints import (
    check_constraints,
    keep_splits,
    keeps_degrees,
    parse_constraints,
    roles,
)
from partita.jobs.plan import plan
from partita.jobs.simulate import data_parallel
from partita.plans import Axis
from partita.search.base import Stop
from partita.zoo.gpt import GptSizes, gpt
from partita.zoo.llama import DecoderSizes, Experts, decoder

SIZES = GptSizes(2, 256, 4, 128, 1024)
QUICK = Stop(time_s=20.0, gap=0.2)


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
    planned = plan(tiny, "4xA100", pin=[f"{k}={v}" for k, v in pins.items()], stop=QUICK)
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
    planned = plan(sparse, "4xA100", pin=[f"{k}={v}" for k, v in pins.items()], stop=QUICK)
    assert planned.best is not None, planned.why
    for degrees in degrees_of(planned):
        assert {name: degrees[name] for name in pins} == pins


def test_a_degree_that_is_ruled_out_is_not_taken(tiny):
    planned = plan(tiny, "4xA100", forbid=["dp=4"], stop=QUICK)
    assert planned.best is not None
    assert all(degrees["dp"] != 4 for degrees in degrees_of(planned))


def test_the_bound_holds_with_pins(tiny):
    free = plan(tiny, "4xA100", stop=QUICK)
    pinned = plan(tiny, "4xA100", pin=["tp=4"], stop=QUICK)
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


def check(*pins, cluster="4xA100", training=True, has_experts=True):
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
        check(*pins)
    assert words in str(refusal.value)


def test_experts_and_interleaving_are_not_everywhere():
    with pytest.raises(InputError, match="ep=2, but the model has no experts; leave it out"):
        check("ep=2", has_experts=False)
    with pytest.raises(InputError, match="vpp=2, but inference is not interleaved"):
        check("vpp=2", training=False)
    check("ep=1", has_experts=False)
    check("vpp=1", training=False)


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
