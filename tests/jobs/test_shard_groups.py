"""HSDP: parameters sharded over groups of replicas, as a decision of a plan."""

import functools
import json
import random
from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.degrees import shard_group, summary
from partita.engine import run
from partita.graph import training_graph
from partita.jobs.constraints import parse_constraints, settled
from partita.jobs.explain import parameter_placements
from partita.jobs.frameworks import FrameworkStrategy, framework_plan
from partita.jobs.plan import joint_model, plan
from partita.jobs.simulate import data_splits, simulate_plan, simulate_stages
from partita.jobs.workload import load
from partita.lower import lower_plan
from partita.meaning import Phase, Purpose
from partita.plans import Axis, Mesh, Schedule, Stage, plan_from_json
from partita.search.base import Stop
from partita.verify import verify_meaning
from partita.zoo.gpt import GptSizes, gpt
from tests.lower.mutants import MUTATIONS

SIZES = GptSizes(2, 64, 2, 32, 96)
QUICK = Stop(time_s=20.0, gap=0.2)
MESH = Mesh((Axis("dp", 2, (), True), Axis("dp2", 2)), (0, 1, 2, 3))
CLUSTER = resolve("2x2xA100")


@functools.cache
def tiny(batch=8):
    """A GPT of two layers that trains."""
    return training_graph(gpt("tiny", SIZES, batch, 16, "bf16", loss=True, fused_attention=True))


def grouped(zero, graph=None):
    """One stage of two shard groups of two."""
    graph = graph or tiny()
    return Stage("model", MESH, data_splits(graph, MESH, zero))


@functools.cache
def lowered(zero, count=1):
    """Its program, whole or in micro-batches."""
    return lower_plan((grouped(zero),), Schedule("1f1b", count), tiny(), CLUSTER, run)


def reductions(program, phase=None):
    """(collective, axis) of gradient reductions."""
    return {
        (work.collective, work.axis)
        for work in program.works
        if work.purpose is Purpose.GRADIENT_REDUCTION
        and work.collective
        and (phase is None or work.phase is phase)
    }


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_are_scattered_in_the_group_and_summed_across_groups(zero):
    program = lowered(zero).program
    assert reductions(program) == {("reduce_scatter", 1), ("all_reduce", 0)}
    gathers = {w.axis for w in program.works if w.purpose is Purpose.PARAMETER_GATHER}
    assert gathers == {1}


def test_replicas_sum_the_parts_that_the_group_keeps():
    program = lowered(3).program
    sizes = {}
    for work in program.works:
        if work.purpose is Purpose.GRADIENT_REDUCTION:
            sizes[work.collective] = sizes.get(work.collective, 0.0) + work.size_bytes
    assert sizes["all_reduce"] == pytest.approx(sizes["reduce_scatter"] / 2)


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_sum_once_a_step_and_groups_in_every_micro_batch(zero):
    bodies = {work.purpose: work.body for work in lowered(zero, 2).program.works if work.body >= 0}
    program = lowered(zero, 2).program
    steady = program.bodies[bodies[Purpose.COMPUTE]].program
    ending = program.bodies[bodies[Purpose.UPDATE]].program
    assert reductions(steady) == {("reduce_scatter", 1)}
    assert reductions(ending, Phase.REDUCE) == {("all_reduce", 0)}


def test_without_a_sharded_stage_replicas_and_groups_are_alike():
    assert reductions(lowered(0).program) == {("all_reduce", 0), ("all_reduce", 1)}


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["remove", "axis", "kind"])
def test_a_wrong_sum_across_replicas_is_refused(zero, count, kind):
    whole = lowered(zero, count)
    graph, stages, schedule = tiny(), whole.stages, Schedule("1f1b", count)
    assert not verify_meaning(whole.program, graph, stages, schedule)
    place = next((k for k, body in enumerate(whole.program.bodies) if _across(body.program)), None)
    inside = whole.program if place is None else whole.program.bodies[place].program
    wrong = MUTATIONS[kind](random.Random(0), inside, _across(inside)[0])
    assert wrong is not None
    if place is not None:
        bodies = list(whole.program.bodies)
        bodies[place] = replace(bodies[place], program=wrong)
        wrong = replace(whole.program, bodies=tuple(bodies))
    assert verify_meaning(wrong, graph, stages, schedule)


def test_replicas_that_sum_one_micro_batch_instead_of_all_are_refused():
    mesh = Mesh((Axis("dp", 2, (), True),), (0, 1))
    stages, schedule = (Stage("model", mesh, data_splits(tiny(), mesh, 3)),), Schedule("1f1b", 2)
    whole = lower_plan(stages, schedule, tiny(), CLUSTER, run).program
    place, body = next((k, b) for k, b in enumerate(whole.bodies) if _across(b.program))
    number = _across(body.program)[0]
    works = list(body.program.works)
    reads = tuple(body.program.values[value].of for value in works[number].reads)
    assert min(reads) >= 0
    works[number] = replace(works[number], reads=reads)
    bodies = list(whole.bodies)
    bodies[place] = replace(body, program=replace(body.program, works=tuple(works)))
    wrong = verify_meaning(replace(whole, bodies=tuple(bodies)), tiny(), stages, schedule)
    assert any("of one micro-batch, not the sum of all" in text for text in wrong)


def _across(program):
    return [
        number
        for number, work in enumerate(program.works)
        if work.purpose is Purpose.GRADIENT_REDUCTION and work.collective == "all_reduce"
    ]


def test_a_part_of_the_states_lies_on_each_device_of_a_group():
    workload = load(gpt("tiny", SIZES, 8, 16, "bf16", loss=True, fused_attention=True))

    def held(mesh):
        stage = Stage("model", mesh, data_splits(workload.graph, mesh, 3))
        answer = simulate_stages(workload, CLUSTER, (stage,), Schedule())
        return float(answer.timeline.program.effect_at_start[0])

    plain = Mesh((Axis("dp", 4),), (0, 1, 2, 3))
    whole = held(Mesh((Axis("dp", 1),), (0,)))
    spread = {"all": whole - held(plain), "groups": whole - held(MESH)}
    assert spread["groups"] / spread["all"] == pytest.approx((1 / 2) / (3 / 4), rel=0.02)


def test_a_summary_says_how_many_replicas_share_a_copy():
    assert summary((grouped(3),), Schedule()) == "dp=4 zero=3 hsdp=2"
    assert summary((grouped(0),), Schedule()) == "dp=4"
    assert shard_group(grouped(3), ("dp", "dp2")) == 2


def test_parameters_lie_replicated_along_the_axis_that_replicates():
    placements = parameter_placements(grouped(3), tiny())
    assert set(placements.values()) == {("Replicate()", "Shard(0)")}


def test_a_framework_strategy_has_shard_groups_outside_of_tensor_parallelism():
    strategy = FrameworkStrategy(tp=2, dp=4, zero=3, hsdp=2, micro_batch=1, num_microbatches=2)
    (stage,), _ = framework_plan(tiny(), strategy)
    assert [str(axis) for axis in stage.mesh.axes] == ["dp=2 (replicas)", "dp2=2", "tp=2"]
    assert str(strategy).startswith("dp=4 tp=2 zero=3 hsdp=2")


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (["hsdp=2", "dp=4"], "dp=4 zero=3 hsdp=2"),
        (["hsdp=2", "dp=4", "zero=1"], "dp=4 zero=1 hsdp=2"),
        (["hsdp=4", "dp=4"], "dp=4 zero=3"),
    ],
    ids=str,
)
def test_a_pinned_shard_group_is_what_is_planned(pins, words):
    forward = gpt("tiny", SIZES, 8, 16, "bf16", loss=True, fused_attention=True)
    planned = plan(forward, "2x2xA100", pin=[*pins, "micro-batches=1"], stop=QUICK)
    assert planned.plan is not None
    told = summary(planned.plan.stages, planned.plan.schedule).replace("zero=1/3", "zero=3")
    assert told == words
    again = plan_from_json(json.loads(planned.plan.to_json()))
    assert again == planned.plan
    assert simulate_plan(again, CLUSTER).step_s == pytest.approx(planned.best.step_s)
    assert planned.lower_bound_s <= planned.best.step_s


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ([], "ZeRO over all replicas (no HSDP)"),
        (["hsdp=2"], "ZeRO over pinned shard groups of replicas (HSDP)"),
    ],
    ids=str,
)
def test_the_space_says_whether_shard_groups_are_in_it(pins, words):
    forward = gpt("tiny", SIZES, 8, 16, "bf16", loss=True, fused_attention=True)
    model = joint_model(load(forward), CLUSTER, settled(parse_constraints(pins)))
    assert words in model.problem.space()


def test_a_forbidden_shard_group_is_not_planned():
    forward = gpt("tiny", SIZES, 8, 16, "bf16", loss=True, fused_attention=True)
    planned = plan(forward, "2x2xA100", forbid=["hsdp=2"], stop=QUICK)
    for candidate in (planned.best, *planned.others):
        assert "hsdp=2" not in candidate.simulation.arrangement
