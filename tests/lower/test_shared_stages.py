"""Stages that several groups of devices run together, beside others (M, NN and K shapes)."""

import functools
import json
from dataclasses import replace

import numpy as np
import pytest

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.costs.layouts import moved_parts, transfer_seconds
from partita.engine import run
from partita.errors import PlanError
from partita.export.job import fitting_targets
from partita.export.read_off import read_off
from partita.graph import GraphBuilder, training_graph
from partita.graph.splits import REPLICATE, TensorPlacement
from partita.jobs.check_plan import check_plan
from partita.jobs.explain import memory_account
from partita.jobs.explain_account import account_of
from partita.jobs.plan_settings import USUAL
from partita.jobs.shapes import m_shape, searched_schedule, shape_plan
from partita.jobs.simulate import simulate, simulate_stages
from partita.jobs.torch_schedule import schedule_of_plan
from partita.jobs.workload import load
from partita.lower import Memo, lower_plan
from partita.lower.orders import order_of, refusal
from partita.meaning import Purpose
from partita.plans import (
    Axis,
    Mesh,
    OpSplit,
    Schedule,
    Stage,
    device_groups,
    group_devices,
    plan_from_json,
    shared_stages,
)
from partita.program import Kind
from partita.search.base import Stop
from partita.verify import verify_meaning, verify_program, verify_timeline

CLUSTER = resolve("4xA100")
M = ((0, 1), (0, 2))  # a stage on both devices, then one on each
NN = ((0, 1, 3), (0, 2, 3))
K = ((0, 2), (1, 2))  # two branches that meet


def chain(depth=6, batch=16, width=64):
    g = GraphBuilder("chain")
    x = g.input("x", (batch, width))
    for i in range(depth):
        x = g.relu(g.linear(x, width, f"l{i}", bias=False), name=f"r{i}")
    return training_graph(g.finish(x))


def placed(graph, devices, dims=("b",)):
    """Stages of equally many ops on these devices, split along the batch on several."""
    ops = [op.name for op in graph.ops if op.phase == "forward"]
    count = len(devices)
    stages = []
    for i, own in enumerate(devices):
        axes = (Axis("x", len(own)),) if len(own) > 1 else ()
        mine = ops[len(ops) * i // count : len(ops) * (i + 1) // count]
        splits = tuple(OpSplit(op, dims if axes else ()) for op in mine)
        stages.append(Stage(f"stage{i}", Mesh(axes, own), splits))
    return tuple(stages)


@functools.cache
def m_lowered(name="1f1b", count=4):
    graph = chain()
    stages = placed(graph, ((0, 1), (0,), (1,)))
    return graph, lower_plan(stages, Schedule(name, count), graph, CLUSTER, run)


def wrong(program, graph, lowered):
    return verify_meaning(program, graph, lowered.stages, lowered.schedule)


def test_a_group_is_the_devices_that_hold_the_same_stages():
    stages = placed(chain(), ((0, 1, 2, 3), (0, 1), (2,), (3,)))
    assert device_groups(stages) == ((0, 1), (0, 2), (0, 3))
    assert group_devices(stages) == ((0, 1), (2,), (3,))
    assert shared_stages(device_groups(stages)) == {0}


def test_1f1b_runs_a_shared_forward_when_the_next_stage_has_nothing_else_to_do():
    rows = order_of(Schedule("1f1b", 3), M, training=True)
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2",
        "0F0 0F1 2F0 2B0 2F1 2B1 0B0 0F2 2F2 2B2 0B1 0B2",
    ]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("groups", [M, NN, K, ((0, 1), (0, 2), (0, 3), (0, 4), (0,))])
@pytest.mark.parametrize("training", [True, False])
def test_named_schedules_leave_a_place_for_shared_stages(name, groups, training):
    assert refusal(name, groups, 5) == ""
    rows = order_of(Schedule(name, 5), groups, training=training)
    for stage in shared_stages(groups):
        own = [
            [action for action in row if action.stage == stage]
            for row, members in zip(rows, groups, strict=True)
            if stage in members
        ]
        assert all(row == own[0] for row in own)


def test_a_named_schedule_needs_stages_that_are_not_shared():
    assert "here all are shared" in refusal("1f1b", ((0, 2), (0, 1), (1, 2)), 4)


def test_halves_of_a_backward_are_the_same_on_all_devices():
    rows = ("0F0 1F0 1B0 0B0", "0F0 2F0 2B0 0I0 0W0")
    with pytest.raises(PlanError, match="0I0 is whole on some devices of its stage and in halves"):
        order_of(Schedule("mine", 1, rows), M, training=True)


def test_rows_that_run_a_shared_stage_in_different_orders_are_refused_with_the_circle():
    graph = chain()
    rows = ("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", "0F1 0F0 2F0 2F1 2B0 2B1 0B0 0B1")
    with pytest.raises(PlanError) as caught:
        lower_plan(
            placed(graph, ((0, 1), (0,), (1,))), Schedule("mine", 2, rows), graph, CLUSTER, run
        )
    assert (
        "cannot go on: 0F0 waits for n0.gpu1, which runs 0F1 first; "
        "0F1 waits for n0.gpu0, which runs 0F0 first; correct"
    ) in str(caught.value)


def test_a_shared_block_takes_the_lanes_and_memories_of_all_its_devices():
    graph, lowered = m_lowered()
    program = lowered.program
    assert [lane.name for lane in program.lanes[:2]] == ["n0.gpu0", "n0.gpu1"]
    for task in program.tasks_of(Purpose.COMPUTE):
        work = program.work_of(task)
        lanes = {0: (0, 1), 1: (0,), 2: (1,)}[work.stage]
        part = slice(program.effect_start[task], program.effect_start[task + 1])
        assert program.lanes_of(task) == lanes
        assert tuple(program.effect_memory[part].tolist()) == lanes
    assert wrong(program, graph, lowered) == ()
    assert verify_program(program) == ()
    assert verify_timeline(program, run(program)) == ()


def test_half_of_what_a_shared_stage_makes_is_there_already():
    shard = (TensorPlacement("shard", 0),)
    both, one = Mesh((Axis("x", 2),), (0, 1)), Mesh((), (0,))
    assert moved_parts(both, shard, one, ()) == ((1, 0, 0.5),)
    assert moved_parts(one, (), both, shard) == ((0, 1, 0.5),)
    assert moved_parts(both, (REPLICATE,), one, ()) == ()
    uneven = Mesh((Axis("x", 2, (3, 1)),), (0, 1))
    assert moved_parts(uneven, shard, one, ()) == ((1, 0, 0.25),)
    times = Collectives(CLUSTER)
    half = transfer_seconds(1e9, both, shard, one, (), times)
    assert half == pytest.approx(times.exchange(0.5e9, ((1, 0),)))
    assert transfer_seconds(1e9, both, (REPLICATE,), one, (), times) == 0.0


def test_messages_between_meshes_that_have_devices_in_common_take_the_links_that_they_cross():
    _, lowered = m_lowered()
    program = lowered.program
    lanes = {
        (work.stage, work.peer): {program.lanes[k].name for k in program.lanes_of(task)}
        for task in program.tasks_of(Purpose.SEND)
        if (work := program.work_of(task)) is not None
    }
    assert lanes[0, 1] == {"n0.gpu1 > n0.gpu0"}
    assert lanes[1, 0] == {"n0.gpu0 > n0.gpu1"}
    assert lanes[1, 2] == {"n0.gpu0 > n0.gpu1"}


def without_lane(program, task):
    """A block that takes the lane of its first device only."""
    starts, lanes = program.lane_start.copy(), list(program.lane_of)
    del lanes[starts[task] + 1]
    starts[task + 1 :] -= 1
    return replace(program, lane_start=starts, lane_of=np.array(lanes, dtype=program.lane_of.dtype))


def without_effect(program, task):
    """A block that takes memory on its first device only."""
    at = program.effect_start[task] + 1
    starts = program.effect_start.copy()
    starts[task + 1 :] -= 1
    keep = np.arange(len(program.effect_memory)) != at
    return replace(
        program, effect_start=starts, effect_memory=program.effect_memory[keep],
        effect_at_start=program.effect_at_start[keep], effect_at_end=program.effect_at_end[keep],
    )  # fmt: skip


def test_a_shared_block_that_leaves_a_device_out_is_refused():
    graph, lowered = m_lowered()
    program = lowered.program
    shared = [t for t in program.tasks_of(Purpose.COMPUTE) if program.work_of(t).stage == 0]
    (first, *_) = wrong(without_lane(program, shared[0]), graph, lowered)
    assert "runs on other lanes than stage0 does" in first
    alone = program
    for task in (*shared, *(t for t in program.tasks_of(Purpose.UPDATE)
                            if program.work_of(t).stage == 0)):  # fmt: skip
        alone = without_lane(alone, task)
    (first, *_) = wrong(alone, graph, lowered)
    assert first == "device 1 runs stage0 and stage2, and no lane has just these"
    (first, *_) = wrong(without_effect(program, shared[0]), graph, lowered)
    assert "takes memory on 1 of its groups of devices only" in first


def test_stages_that_share_nothing_do_not_share_a_lane():
    graph, lowered = m_lowered()
    program = lowered.program
    lanes = program.lane_of.copy()
    for task in range(program.num_tasks):
        work = program.work_of(task)
        if work is not None and work.stage == 2 and work.purpose in (
            Purpose.COMPUTE, Purpose.UPDATE
        ):  # fmt: skip
            lanes[program.lane_start[task]] = 0
    (first, *_) = wrong(replace(program, lane_of=lanes), graph, lowered)
    assert first == "device 0 runs stage0 and stage1, and no lane has just these"


def test_a_searched_order_has_shared_blocks_and_is_faster():
    workload = load(chain(batch=4096, width=1024), optimizer="adamw")
    stages = placed(workload.graph, ((0, 1), (0,), (1,)))
    plain = simulate_stages(workload, CLUSTER, stages, Schedule("1f1b", 4))
    memo = Memo(Collectives(CLUSTER))
    order = searched_schedule(plain, memo, Stop(time_s=10), 0, USUAL)
    assert order is not None
    searched = simulate_stages(workload, CLUSTER, stages, order)
    assert searched.step_s < plain.step_s
    told = account_of(searched)
    assert [group.name for group in told.groups] == ["n0.gpu0", "n0.gpu1"]
    assert memory_account(searched).peak_bytes == max(searched.peak_bytes)
    blocks = [t for t in searched.timeline.program.tasks_of(Purpose.COMPUTE)
              if searched.timeline.program.kind[t] == Kind.FORWARD]  # fmt: skip
    assert len(blocks) == 3 * 4


def test_an_m_shape_is_planned_saved_read_named_verified_and_not_for_torch():
    workload = load(chain(batch=4096, width=1024))
    plan = shape_plan("m", workload, resolve("2xA100"), 4, shared=0.3, stop=Stop(time_s=10))
    usual = shape_plan("m", workload, resolve("2xA100"), 4, shared=0.3, schedule="1f1b")
    assert plan.schedule.name == "searched"
    assert plan.prediction.step_s < usual.prediction.step_s
    assert plan_from_json(json.loads(plan.to_json())) == plan
    assert str(usual).endswith("pp=2 shared 1 x [dp=2], 1F1B, 4 micro-batches")
    assert check_plan(plan) == ()
    with pytest.raises(PlanError, match="torch's pipelining has every stage on one rank"):
        schedule_of_plan(plan)
    assert all(fitting_targets(plan, workload).values())
    with pytest.raises(PlanError, match="shared runs on several groups of devices together"):
        read_off(plan, workload.graph)
    account = account_of(simulate(usual))
    assert [group.name for group in account.groups] == ["n0.gpu0", "n0.gpu1"]


@pytest.mark.parametrize(
    ("devices", "shared", "words"),
    [(1, 0.5, "0.5 of the work is shared by 1 devices"), (2, 1.0, "between 0 and 1"),
     (8, 0.3, "too few ops for 8 stages behind shared ones")],
)  # fmt: skip
def test_a_shape_that_cannot_be_is_refused(devices, shared, words):
    with pytest.raises(PlanError, match=words):
        m_shape(load(chain(depth=3)), devices, shared)
