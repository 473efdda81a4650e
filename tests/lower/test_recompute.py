"""Selective recompute: single ops run again for the gradients that read what they make."""

from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.costs.roofline import op_cost
from partita.engine import run
from partita.graph import GraphBuilder, training_graph
from partita.jobs.simulate import data_parallel, data_splits, simulate_stages
from partita.jobs.workload import load
from partita.lower import Memo
from partita.lower.pieces import homes, piece
from partita.lower.pipeline import lower_pipeline
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage
from partita.verify import verify_program, verify_timeline

CLUSTER = resolve("8xA100")
ALONE = Mesh((Axis("x", 1),), (0,))


def mixer(batch=2048, width=1024, depth=3):
    """Blocks of norm, linear, GELU, linear and a residual."""
    g = GraphBuilder("mixer")
    x = g.linear(g.input("x", (batch, width)), width, "first", bias=False)
    for i in range(depth):
        y = g.norm(x, "layer_norm", name=f"norm{i}")
        y = g.linear(y, width, f"up{i}", bias=False)
        y = g.elementwise("gelu", y, name=f"gelu{i}")
        x = g.add(x, g.linear(y, width, f"down{i}", bias=False), name=f"sum{i}")
    return training_graph(g.finish(x))


def staged(graph, count=1, again=(), mesh=ALONE):
    """Stages of equally many ops, with those of their ops to run again whose names begin so."""
    ops = [op.name for op in graph.ops if op.phase == "forward"]
    stages = []
    for i in range(count):
        mine = ops[len(ops) * i // count : len(ops) * (i + 1) // count]
        here = replace(mesh, devices=tuple(d + i * len(mesh.devices) for d in mesh.devices))
        splits = {split.op: split for split in data_splits(graph, here)}
        light = tuple(op for op in mine if op.startswith(again)) if again else ()
        stages.append(
            Stage(
                f"s{i}",
                here,
                tuple(splits[op] for op in mine),
                checkpointing="selective" if light else "none",
                recomputed=light,
            )
        )
    return tuple(stages)


def lowered(graph, stages, name="1f1b", count=4, quick=False):
    memo = Memo(Collectives(CLUSTER))
    lowered = lower_pipeline(stages, Schedule(name, count), graph, CLUSTER, run, memo, quick=quick)
    timeline = run(lowered.program)
    assert verify_program(lowered.program) == ()
    assert verify_timeline(lowered.program, timeline) == ()
    return lowered, timeline


def seconds(graph, prefix):
    """Of the ops whose names begin so, one after the other on a device alone."""
    mine = (op for op in graph.ops if op.phase == "forward" and op.name.startswith(prefix))
    return sum(op_cost(graph, op, CLUSTER.kinds[0]).seconds for op in mine)


def size(graph, prefix):
    mine = (op for op in graph.ops if op.phase == "forward" and op.name.startswith(prefix))
    return sum(graph.tensor(name).size_bytes for op in mine for name in op.outputs)


@pytest.mark.parametrize("again", [("gelu",), ("norm", "gelu")])
def test_what_runs_again_is_not_held_and_takes_its_time_once_more(again):
    graph = mixer()
    (plain,) = lowered(graph, staged(graph), count=1)[0].blocks
    (light,) = lowered(graph, staged(graph, again=again), count=1)[0].blocks
    freed = plain.forward.held_bytes[0] - light.forward.held_bytes[0]
    assert freed == size(graph, again)
    assert light.forward.seconds == plain.forward.seconds
    extra = light.backward.seconds - plain.backward.seconds
    assert extra == pytest.approx(seconds(graph, again), rel=1e-9)
    assert light.backward.held_bytes == plain.backward.held_bytes
    assert light.backward.peak_bytes[0] < plain.backward.peak_bytes[0]


def test_the_second_run_stands_right_before_the_gradients_that_need_it():
    graph = mixer(depth=1)
    stages = staged(graph, again=("norm", "gelu"))
    stage_graph = piece(graph, stages[0], 0, homes(graph, stages))
    names = [op.name for op in stage_graph.graph.ops]
    assert names[names.index("gelu0.again") + 1] == "down0.dgrad"
    assert names[names.index("norm0.again") + 1] == "up0.dgrad"
    assert stage_graph.recomputed == stage_graph.single == {"gelu0.again", "norm0.again"}
    reads = {op.name: op.inputs for op in stage_graph.graph.ops}
    assert "gelu0.again" in reads["down0.wgrad"]
    assert reads["gelu0.again"] == ("up0",)  # what a kept op made
    assert {split.op for split in stage_graph.splits} == {
        *(op.name for op in graph.ops if op.phase == "forward"), "norm0.again", "gelu0.again"
    }  # fmt: skip


def test_what_runs_again_reads_what_ran_again():
    g = GraphBuilder("two")
    x = g.linear(g.input("x", (64, 64)), 64, "a", bias=False)
    x = g.relu(g.norm(x, "layer_norm", name="norm"), name="relu")
    graph = training_graph(g.finish(g.linear(x, 64, "b", bias=False)))
    stages = staged(graph, again=("norm", "relu"))
    ops = {op.name: op for op in piece(graph, stages[0], 0, homes(graph, stages)).graph.ops}
    assert ops["relu.again"].inputs == ("norm.again",)
    assert ops["norm.again"].inputs[0] == "a"


def test_to_run_again_what_no_gradient_reads_changes_nothing():
    graph = mixer()
    plain, one = lowered(graph, staged(graph, 2))
    light, two = lowered(graph, staged(graph, 2, again=("sum2", "down")))
    assert light.blocks == plain.blocks
    assert one.makespan == two.makespan


def test_a_pipeline_holds_less_and_takes_a_little_longer():
    graph = mixer(depth=6)
    plain, one = lowered(graph, staged(graph, 2), count=8)
    light, two = lowered(graph, staged(graph, 2, again=("norm", "gelu")), count=8)
    assert max(two.peaks()) < max(one.peaks())
    assert one.makespan < two.makespan < 1.25 * one.makespan
    assert all(
        a.static_bytes == b.static_bytes for a, b in zip(plain.blocks, light.blocks, strict=True)
    )


def test_what_only_weight_gradients_need_waits_for_them():
    graph = mixer(depth=4)
    plain, _ = lowered(graph, staged(graph, 2), "zb-h1", 4)
    light, _ = lowered(graph, staged(graph, 2, again=("norm", "gelu")), "zb-h1", 4)
    for before, after in zip(plain.blocks, light.blocks, strict=True):
        assert after.forward.held_bytes < before.forward.held_bytes
        assert after.backward.seconds == pytest.approx(before.backward.seconds, rel=1e-9)
        assert after.weight.seconds > before.weight.seconds


def test_a_copy_that_was_gathered_is_gathered_again_beside_the_data_gradient():
    """A norm split along the rows, a layer along its columns: the layer needs all rows."""
    graph = mixer(depth=1, batch=8192, width=4096)
    mesh = Mesh((Axis("x", 8),), tuple(range(8)))
    (stage,) = staged(graph, mesh=mesh)
    columns = {"up0": "n", "gelu0": "c", "down0": "k"}
    splits = tuple(OpSplit(s.op, (columns[s.op],)) if s.op in columns else s for s in stage.splits)
    stage = replace(stage, splits=splits)
    (plain,) = lowered(graph, (stage,), count=1)[0].blocks
    (light,) = lowered(
        graph, (replace(stage, checkpointing="selective", recomputed=("norm0",)),), count=1
    )[0].blocks
    whole = graph.tensor("norm0").size_bytes
    assert plain.forward.held_bytes[0] - light.forward.held_bytes[0] == whole
    extra = light.backward.seconds - plain.backward.seconds
    norm = op_cost(graph, graph.op("norm0"), CLUSTER.kinds[0], (("b", 8),)).seconds
    assert extra == pytest.approx(norm, rel=0.05)


def test_parameters_in_shares_are_gathered_again_ahead_of_their_use():
    graph = mixer(depth=2)
    mesh = Mesh((Axis("x", 4),), tuple(range(4)))
    (stage,) = staged(graph, mesh=mesh)
    shares = tuple(replace(s, zero=3) for s in stage.splits)
    (plain,) = lowered(graph, (replace(stage, splits=shares),), count=2)[0].blocks
    light = replace(stage, splits=shares, checkpointing="selective", recomputed=("norm0", "norm1"))
    (outcome,) = lowered(graph, (light,), count=2)[0].blocks
    assert outcome.forward.held_bytes[0] < plain.forward.held_bytes[0]
    # What is gathered once more slows computing down, and does not hold it up.
    assert outcome.backward.seconds < 1.5 * plain.backward.seconds


def test_a_deep_stage_is_estimated_by_shorter_ones():
    work = load("gpt2", batch=16)
    stage = data_parallel(work.graph, resolve("2xA100"))
    again = tuple(op for op in stage.dims() if op.endswith(("ln_1", "ln_2", "gelu")))
    stages = (replace(stage, checkpointing="selective" if again else "none", recomputed=again),)
    short, quick = lowered(work.graph, stages, quick=True)
    whole, exact = lowered(work.graph, stages)
    assert short.blocks != whole.blocks
    assert quick.makespan == pytest.approx(exact.makespan, rel=0.02)
    assert quick.peaks() == pytest.approx(exact.peaks(), rel=1e-3)
    odd = (
        replace(
            stage,
            checkpointing="selective" if again[::2][:5] else "none",
            recomputed=again[::2][:5],
        ),
    )  # does not repeat: lowered in full
    assert lowered(work.graph, odd)[1].makespan > 0


def test_one_stage_that_runs_once_may_run_ops_again():
    work, machine = load("gpt2", batch=8), resolve("2xA100")
    stage = data_parallel(work.graph, machine)
    again = tuple(op for op in stage.dims() if op.endswith("gelu"))
    plain = simulate_stages(work, machine, (stage,), Schedule())
    light = simulate_stages(
        work,
        machine,
        (replace(stage, checkpointing="selective" if again else "none", recomputed=again),),
        Schedule(),
    )
    assert max(light.peak_bytes) < max(plain.peak_bytes)
    assert plain.step_s < light.step_s < 1.05 * plain.step_s
    assert light.compute_s > plain.compute_s
