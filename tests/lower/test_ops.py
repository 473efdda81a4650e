"""Lowering: what each way of splitting turns into, in tasks, waits, bytes and collectives."""

import functools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.cluster import resolve
from partita.costs.sharding import dims_of
from partita.engine import run
from partita.errors import GraphError, PlanError
from partita.graph import GraphBuilder, training_graph
from partita.lower import representative_devices
from partita.lower.ops import lower_stage
from partita.meaning import Purpose
from partita.plans import Axis, Mesh, OpSplit, Stage
from partita.verify import verify_program, verify_timeline
from partita.zoo import build
from tests.shallow import T5

CLUSTER = resolve("4xA100")
GIB = 1024**3


def line(size):
    return Mesh((Axis("x", size),), tuple(range(size)))


def mlp(batch=8, width=64):
    g = GraphBuilder("mlp")
    x = g.relu(g.linear(g.input("x", (batch, width)), 4 * width, "up", bias=False))
    return training_graph(g.finish(g.linear(x, width, "down", bias=False)))


def stage(graph, splits, mesh, zero=0):
    ops = [op.name for op in graph.ops if op.phase == "forward"]
    stage = tuple(OpSplit(op, splits.get(op, ("",)), zero) for op in ops)
    return Stage("model", mesh, stage)


def collectives(program):
    """How often each collective runs."""
    works = (program.work_of(task) for task in range(program.num_tasks))
    return Counter(work.collective for work in works if work.collective)


def run_and_check(program):
    timeline = run(program)
    assert verify_program(program) == ()
    assert verify_timeline(program, timeline) == ()
    return timeline


BATCH = {"up": ("b",), "relu": ("b",), "down": ("b",)}
MEGATRON = {"up": ("n",), "relu": ("c",), "down": ("k",)}


class TestDataParallel:
    def test_gradients_are_summed_once_in_a_bucket(self):
        graph = mlp()
        lowered = lower_stage(stage(graph, BATCH, line(4)), graph, CLUSTER)
        assert collectives(lowered.program) == {"all_reduce": 1}
        run_and_check(lowered.program)

    def test_one_device_communicates_nothing(self):
        graph = mlp()
        program = lower_stage(stage(graph, {}, line(1)), graph, CLUSTER).program
        assert collectives(program) == {}
        ops = len([op for op in graph.ops if op.phase != "update"])
        assert program.num_tasks == ops + 2  # the start, and one fused update

    def test_sharded_states_scatter_gradients_and_gather_parameters(self):
        graph = mlp()
        lowered = lower_stage(stage(graph, BATCH, line(4), 1), graph, CLUSTER)
        assert collectives(lowered.program) == {"reduce_scatter": 1, "all_gather": 1}
        run_and_check(lowered.program)

    def test_sharded_parameters_are_gathered_forward_and_backward(self):
        graph = mlp()
        program = lower_stage(stage(graph, BATCH, line(4), 3), graph, CLUSTER).program
        # both weights forward; backward only `down`, since `up` has no data gradient to give
        assert collectives(program) == {"all_gather": 3, "reduce_scatter": 1}
        run_and_check(program)

    def test_each_level_of_sharding_holds_less(self):
        graph = training_graph(build("gpt2", batch=4))
        ops = [op for op in graph.ops if op.phase == "forward"]
        axes = line(4).axes
        splits = {op.name: ("b",) for op in ops if ("b",) in dims_of(graph.call(op), axes)}
        peaks = [
            run_and_check(
                lower_stage(stage(graph, splits, line(4), level), graph, CLUSTER).program
            ).peaks()[0]
            for level in (0, 1, 3)
        ]
        assert peaks[0] > 1.2 * peaks[1] > 1.2 * peaks[2]


class TestTensorParallel:
    def test_megatron_needs_no_communication_between_the_two_layers(self):
        graph = mlp()
        lowered = lower_stage(stage(graph, MEGATRON, line(4)), graph, CLUSTER)
        # what the model returns is added up; the gradient of x is not wanted
        assert collectives(lowered.program) == {"all_reduce": 1}
        (task,) = lowered.program.tasks_of(Purpose.CONVERSION)
        work = lowered.program.work_of(task)
        assert [lowered.program.values[v].tensor for v in work.reads] == list(graph.outputs)
        run_and_check(lowered.program)

    def test_a_sum_is_made_once_for_all_who_read_it(self):
        g = GraphBuilder("net")
        y = g.linear(g.input("x", (8, 64)), 64, "a", bias=False)
        graph = g.finish(g.add(g.relu(y, "r1"), g.relu(y, "r2")))
        program = lower_stage(stage(graph, {"a": ("k",)}, line(4)), graph, CLUSTER).program
        assert collectives(program) == {"all_reduce": 1}

    def test_shares_along_another_dim_are_exchanged(self):
        g = GraphBuilder("net")
        y = g.relu(g.input("x", (8, 64)), "r1")
        graph = g.finish(g.relu(y, "r2"))
        splits = {"r1": ("b",), "r2": ("c",)}
        program = lower_stage(stage(graph, splits, line(4)), graph, CLUSTER).program
        assert collectives(program) == {"all_to_all": 1}

    def test_a_normalised_dim_exchanges_its_statistics(self):
        g = GraphBuilder("net")
        graph = g.finish(g.norm(g.input("x", (8, 64))))
        program = lower_stage(stage(graph, {"norm": ("c",)}, line(4)), graph, CLUSTER).program
        assert collectives(program) == {"all_reduce": 1}

    def test_a_split_image_fetches_its_borders_first(self):
        g = GraphBuilder("net")
        graph = g.finish(g.conv(g.input("x", (1, 8, 64, 64)), 8, 3, padding=1))
        program = lower_stage(stage(graph, {"conv": ("h",)}, line(4)), graph, CLUSTER).program
        assert collectives(program) == {"halo": 1}
        (conv,) = [t for t in range(program.num_tasks) if program.task_name(t) == "F@conv"][:1]
        (halo,) = program.tasks_of(Purpose.EXCHANGE)
        assert halo in {wait for wait, _ in program.waits_of(conv)}


class TestMemory:
    def test_static_bytes_are_parameters_states_and_workspace(self):
        graph = mlp()
        program = lower_stage(stage(graph, {}, line(1)), graph, CLUSTER).program
        weights = 2 * 64 * 256
        assert program.effect_at_start[0] == 4 * weights + 8 * weights + GIB

    def test_everything_taken_is_given_back_but_what_stays(self):
        graph = mlp()
        program = lower_stage(stage(graph, BATCH, line(4)), graph, CLUSTER).program
        timeline = run_and_check(program)
        _, amounts = timeline.memory_steps(0)
        stays = program.effect_at_start[0] + 8 * 64 * 4 / 4  # the output is returned
        assert amounts[-1] == pytest.approx(stays)

    @pytest.mark.parametrize("zero", [0, 1, 3])
    def test_what_lies_in_one_share_is_never_given_back(self, zero):
        """Weights that their split divides over all devices need not be gathered."""
        graph = mlp()
        program = lower_stage(stage(graph, MEGATRON, line(4), zero), graph, CLUSTER).program
        assert "all_gather" not in collectives(program)
        _, amounts = run_and_check(program).memory_steps(0)
        assert min(amounts[1:]) >= program.effect_at_start[0]

    def test_views_occupy_nothing(self):
        def peak(with_views):
            g = GraphBuilder("net")
            y = g.relu(g.input("x", (1024, 1024)), "r1")
            for i in range(3 if with_views else 0):
                y = g.reshape(y, (1024 * 1024,) if i % 2 == 0 else (1024, 1024), f"v{i}")
            graph = g.finish(g.relu(y, "r2"))
            program = lower_stage(stage(graph, {}, line(1)), graph, CLUSTER).program
            return run_and_check(program).peaks()[0]

        assert peak(True) == peak(False)


class TestDrawing:
    def test_few_devices_are_all_drawn(self):
        graph = mlp()
        program = lower_stage(stage(graph, BATCH, line(4)), graph, CLUSTER).program
        assert [lane.kind for lane in program.lanes] == ["device"] * 4 + ["link"] * 4

    def test_many_devices_are_drawn_once_per_kind(self):
        mixed = resolve("16xV100+16xP100")
        mesh = Mesh((Axis("x", 32),), tuple(range(32)))
        assert representative_devices(Stage("model", mesh, ()), mixed) == (0, 16)

    @pytest.mark.parametrize("splits", [BATCH, MEGATRON, {}], ids=["data", "tensor", "none"])
    def test_one_device_tells_the_time_of_all(self, splits):
        graph = mlp(1024, 1024)
        plan = stage(graph, splits, line(4), 1)
        whole = run(lower_stage(plan, graph, CLUSTER).program).makespan
        assert run(lower_stage(plan, graph, CLUSTER, 1).program).makespan == pytest.approx(whole)

    def test_slower_devices_take_longer(self):
        mixed = resolve("2xV100+2xP100")
        graph = mlp(4096, 1024)
        lowered = lower_stage(stage(graph, BATCH, line(4)), graph, mixed)
        busy = run(lowered.program).busy()
        assert busy[2] > 1.2 * busy[0]


class TestUnlikeShares:
    def test_a_weighted_axis_gives_faster_devices_more(self):
        mixed = resolve("2xV100+2xP100")
        graph = mlp(4096, 1024)
        even = run(lower_stage(stage(graph, BATCH, line(4)), graph, mixed).program)
        mesh = Mesh((Axis("x", 4, (5, 5, 3, 3)),), (0, 1, 2, 3))
        assert 4096 % 16 == 0
        uneven = run_and_check(lower_stage(stage(graph, BATCH, mesh), graph, mixed).program)
        assert uneven.makespan < even.makespan
        assert uneven.busy()[0] == pytest.approx(uneven.busy()[2], rel=0.35)

    def test_parts_must_be_whole(self):
        graph = mlp()
        mesh = Mesh((Axis("x", 4, (2, 1, 1, 1)),), (0, 1, 2, 3))
        with pytest.raises(GraphError, match="dim 'b' of 8 cannot be split 5 ways"):
            lower_stage(stage(graph, BATCH, mesh), graph, CLUSTER)


class TestRefusals:
    def test_an_op_without_a_split_means_another_model(self):
        graph = mlp()
        with pytest.raises(PlanError, match="op 'up' has no split; the plan was made for another"):
            lower_stage(Stage("model", line(4), ()), graph, CLUSTER)

    def test_an_illegal_split_is_named(self):
        graph = mlp()
        with pytest.raises(
            GraphError, match="linear cannot be split along 'z'; its dims are b, n, k"
        ):
            lower_stage(stage(graph, {"up": ("z",)}, line(4)), graph, CLUSTER)


@functools.cache
def transformer():
    return training_graph(build(f"{T5}@16", batch=4))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_legal_splits_of_a_transformer_run_and_verify(data):
    """Whatever is chosen op by op, the program has no deadlock and the verifier is content."""
    graph = transformer()
    mesh = Mesh((Axis("x", 2), Axis("y", 2)), (0, 1, 2, 3))
    splits = []
    for op in graph.ops:
        if op.phase == "forward":
            dims = data.draw(st.sampled_from(dims_of(graph.call(op), mesh.axes)))
            level = data.draw(st.sampled_from([0, 1, 2, 3]))
            splits.append(OpSplit(op.name, dims, level))
    lowered = lower_stage(Stage("model", mesh, tuple(splits)), graph, CLUSTER)
    timeline = run_and_check(lowered.program)
    assert set(lowered.costs) == {op.name for op in graph.ops}
    _, amounts = timeline.memory_steps(0)
    assert min(amounts[1:]) >= lowered.program.effect_at_start[0] * (
        1 - 1e-9
    )  # it always lies there
