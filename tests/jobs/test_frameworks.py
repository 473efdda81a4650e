"""The field: families of frameworks tuned over their degrees, and planners for mixed machines."""

import functools
import math

import pytest

from partita.cluster import resolve
from partita.engine import run
from partita.export.scope import ExportScope
from partita.export.targets import TARGETS
from partita.graph.chain import chain_of
from partita.jobs.compare import named_plans
from partita.jobs.frameworks import (
    FIELD,
    FieldSettings,
    FrameworkStrategy,
    field_plans,
    framework_plan,
    ranked_field,
    stack_sizes,
    whole_field,
)
from partita.jobs.plan import plan
from partita.jobs.simulate import simulate_stages
from partita.jobs.strategies import by_kind, cuts_by_speed, unequal
from partita.jobs.workload import load
from partita.lower import lower_plan
from partita.search.base import Stop
from tests.export.planned import LLAMA, workload

MACHINE = "2x4xA100"
BATCH = 16
SAID_BY = {"ddp": "fsdp2"}  # the export of a family where it is not of its name


@functools.cache
def field():
    return whole_field(workload(LLAMA, BATCH).graph, resolve(MACHINE), BATCH)


@pytest.mark.parametrize("family", [name for name in FIELD if name != "gpipe"])
def test_a_family_holds_only_what_its_framework_can_be_told(family):
    work = workload(LLAMA, BATCH)
    scope = ExportScope("tiny", work.graph, BATCH, work.dtype, work.optimizer, 8, 2)
    ranked = ranked_field(FIELD[family], work.graph, resolve(MACHINE), BATCH)
    assert ranked
    for one in ranked:
        assert TARGETS[SAID_BY.get(family, family)].refusal(one.strategy, scope) == ""
        assert one.strategy.world == 8
        assert one.strategy.batch == BATCH


@pytest.mark.parametrize("family", FIELD)
def test_plans_of_the_field_compute_the_model(family):
    work, machine = workload(LLAMA, BATCH), resolve(MACHINE)
    settings = FieldSettings(plans=1)
    for stages, schedule in field_plans(FIELD[family], work.graph, machine, BATCH, settings):
        simulate_stages(work, machine, stages, schedule)  # what it means is verified


@pytest.mark.parametrize("family", ["megatron", "torchtitan"])
def test_long_sequences_are_shared_out_and_short_ones_are_not(family):
    """One sample of 32,768 tokens for eight devices: replicas alone have nothing to do."""
    machine = resolve(MACHINE)
    graph = load(f"{LLAMA}@32768", batch=1).graph
    ranked = ranked_field(FIELD[family], graph, machine, 1)
    assert {one.strategy.cp for one in ranked} >= {2, 4}
    one = next(one for one in ranked if one.strategy.cp > 1)
    simulate_stages(load(graph), machine, *framework_plan(graph, one.strategy))
    short = workload(LLAMA, BATCH).graph
    assert {one.strategy.cp for one in ranked_field(FIELD[family], short, machine, BATCH)} == {1}


def test_sequences_shared_out_give_the_numbers_of_the_whole_model():
    pytest.importorskip("torch")
    from partita.run.local.execute import execute, relative_error
    from partita.run.local.reference import example, reference

    graph = load(f"{LLAMA}@16", batch=4, dtype="f32").graph
    strategy = FrameworkStrategy(tp=2, sp=True, cp=2, dp=2, zero=1, num_microbatches=2)
    stages, schedule = framework_plan(graph, strategy)
    lowered = lower_plan(stages, schedule, graph, resolve(MACHINE), run)
    along = [split.dims for split in stages[0].splits if split.op.endswith("attention")]
    assert {dims[1] for dims in along} == {"s"}
    given = example(graph)
    outcome = execute(lowered.program, graph, lowered.stages, 2, given)
    whole = reference(graph, given.inputs, given.parameters)
    assert relative_error(outcome.updated, whole.updated) < 1e-9


def test_the_whole_field_has_each_strategy_once_and_the_shortest_forecast_first():
    strategies = [one.strategy for one in field()]
    assert len(set(strategies)) == len(strategies) > 50
    fitting = [one.step_s for one in field() if not one.is_over]
    assert fitting == sorted(fitting)


def test_megatron_takes_less_than_published_runs_of_gpt3_scale_to():
    work, machine = load("gpt3-175b", batch=1536), resolve("128x8xA100")
    first = ranked_field(FIELD["megatron"], work.graph, machine, 1536)[0]
    stages, schedule = framework_plan(work.graph, first.strategy)
    simulation = simulate_stages(work, machine, stages, schedule, most_devices=1, quick=True)
    assert simulation.fits
    assert simulation.step_s < 21.0


def test_a_plan_is_no_slower_than_the_field():
    work, machine = workload(LLAMA, BATCH), resolve(MACHINE)
    planned = plan(work.given, machine, stop=Stop(30.0, gap=1.0))
    best = math.inf
    for one in field()[:3]:
        stages, schedule = framework_plan(work.graph, one.strategy)
        best = min(best, simulate_stages(work, machine, stages, schedule).step_s)
    assert planned.best.step_s <= best * (1 + 1e-9)


def test_pins_leave_the_field_what_they_allow():
    work, machine = workload(LLAMA, BATCH), resolve(MACHINE)
    planned = plan(
        work.given, machine, pin=("tp=2", "pp=2", "schedule=1f1b"), stop=Stop(30.0, gap=1.0)
    )
    named = {other.name for other in (planned.best, *planned.others)}
    assert named & set(FIELD)
    for candidate in (planned.best, *planned.others):
        assert "pp=2" in candidate.simulation.arrangement
        assert "tp=2" in candidate.simulation.arrangement


def test_a_model_without_layers_has_no_field():
    work = workload("squeezenet1_1", 8)
    assert whole_field(work.graph, resolve(MACHINE), 8) == []
    assert not {name for name, _, _ in named_plans(work, resolve(MACHINE))} & {"fsdp2", "ddp"}


def test_sizes_are_read_off_the_graph():
    sizes = stack_sizes(workload(LLAMA, BATCH).graph)
    assert (sizes.num_layers, sizes.hidden, sizes.heads, sizes.kv_heads) == (4, 64, 4, 2)
    assert (sizes.ffn, sizes.vocab, sizes.seq, sizes.head_size) == (128, 128, 32, 16)
    assert sizes.gated
    assert sizes.rms_norm
    assert not sizes.tied
    mixtral = stack_sizes(load("mixtral-8x7b", batch=1).graph)
    assert (mixtral.experts, mixtral.top_k, mixtral.expert_ffn) == (8, 2, 14336)
    assert stack_sizes(workload("squeezenet1_1", 8).graph) is None


def test_on_mixed_machines_stages_are_of_one_kind_and_samples_go_by_speed():
    work, machine = workload(LLAMA, 96), resolve("2xV100+2xP100")
    plans = by_kind(work.graph, chain_of(work.graph), machine, 96)
    assert plans
    for stages, _ in plans:
        for stage in stages:
            assert len({machine.kind_of(device).name for device in stage.mesh.devices}) == 1
    simulate_stages(work, machine, *plans[0])
    (stage,), schedule = unequal(work.graph, machine, 96)[0]
    assert stage.mesh.axes[0].weights[0] >= stage.mesh.axes[0].weights[-1]
    simulate_stages(work, machine, (stage,), schedule)
    assert by_kind(work.graph, chain_of(work.graph), resolve("4xA100"), 96) == []
    assert unequal(work.graph, resolve("4xA100"), 96) == []


def test_cuts_give_fast_devices_more_of_the_work():
    chain = chain_of(workload("squeezenet1_1", 8).graph)
    even, fast = cuts_by_speed(chain, (1, 1)), cuts_by_speed(chain, (4, 1))
    assert len(even) == len(fast) == 1
    assert fast[0] > even[0]
    assert len(cuts_by_speed(chain, [1.0] * chain.num_segments)) == chain.num_segments - 1
