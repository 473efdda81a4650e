"""The host: a device's kernels begin when they have been started, and hosts run ahead."""

from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.costs.roofline import op_cost
from partita.errors import ModelError
from partita.jobs.simulate import data_splits, simulate, simulate_stages
from partita.jobs.workload import load
from partita.plans import Axis, Mesh, Schedule, Stage
from partita.report.summary import simulation_text

H200 = resolve("1xH200")


def by_hand(simulation):
    """Each op begins when the one before has ended and the host has started it."""
    ended = started = 0.0
    for report in simulation.ops:
        started += report.cost.host_s
        ended = max(ended, started) + report.cost.seconds
    return ended


@pytest.mark.parametrize("execution", ["eager", "compiled"])
@pytest.mark.parametrize("name", ["resnet50", "gpt2", "squeezenet"])
def test_a_step_is_a_scan_over_ops_and_their_launches(name, execution):
    simulation = simulate(name, H200, batch=4, dtype="bf16", training=False, execution=execution)
    assert simulation.step_s == pytest.approx(by_hand(simulation), rel=1e-9)


def test_a_small_batch_waits_for_the_host_and_a_large_one_does_not():
    small, large = (
        simulate("gpt2", H200, batch=batch, dtype="bf16", execution="eager") for batch in (1, 32)
    )
    assert small.exposed_s > 0.5 * small.step_s
    assert large.exposed_s < 0.05 * large.step_s


def test_a_cuda_graph_waits_for_nothing():
    simulation = simulate("gpt2", H200, batch=1, dtype="bf16")
    assert simulation.exposed_s == pytest.approx(0.0, abs=1e-9)
    assert all(report.cost.host_s == 0 for report in simulation.ops)


def test_executions_are_ordered():
    steps = {
        execution: simulate("resnet50", H200, batch=16, dtype="bf16", execution=execution).step_s
        for execution in ("eager", "compiled", "graph")
    }
    assert steps["graph"] < steps["compiled"] <= steps["eager"] * 1.1


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("quick", [False, True])
def test_blocks_of_a_pipeline_wait_for_their_hosts(quick, recompute):
    workload = load("gpt2", batch=8, dtype="bf16")
    cluster = resolve("2xH200")
    ops = [op.name for op in workload.graph.ops if op.phase == "forward"]
    half = len(ops) // 2
    stages = []
    for number, mine in enumerate((ops[:half], ops[half:])):
        mesh = Mesh((Axis("data", 1),), (number,))
        splits = {split.op: split for split in data_splits(workload.graph, mesh)}
        own = tuple(splits[name] for name in mine)
        kept = ("full", tuple(mine[::40])) if recompute else ("none", ())
        stages.append(Stage(f"stage{number}", mesh, own, *kept))
    steps = {
        execution: simulate_stages(
            replace(workload, execution=execution), cluster, tuple(stages), Schedule("1f1b", 4),
            quick=quick,
        ).step_s
        for execution in ("graph", "eager")
    }  # fmt: skip
    host_s = sum(
        op_cost(workload.graph, op, cluster.kind_of(0), (), "eager").host_s
        for op in workload.graph.ops
        if op.phase != "update"
    )
    assert steps["eager"] > steps["graph"]
    assert steps["eager"] > 4 * host_s / 2  # four micro-batches of two stages side by side


def test_several_devices_each_have_a_host():
    one, four = (
        simulate("resnet50", cluster, batch=batch, dtype="bf16", execution="eager")
        for cluster, batch in (("1xH200", 8), ("4xH200", 32))
    )
    assert four.step_s == pytest.approx(one.step_s, rel=0.25)


def test_the_report_says_who_waits_for_whom():
    simulation = simulate("resnet50", H200, batch=4, dtype="bf16", execution="eager")
    text = simulation_text(simulation)
    assert "(eager)" in text
    assert "waiting for the host" in text


def test_an_unknown_execution_is_refused():
    with pytest.raises(ModelError, match="unknown execution 'lazy'; use one of eager, compiled"):
        simulate("gpt2", H200, execution="lazy")
