"""Plans of several stages and micro-batches: time, memory, what is sent, what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.engine import run
from partita.errors import PlanError
from partita.graph import GraphBuilder, training_graph
from partita.jobs.simulate import data_splits, simulate_stage, simulate_stages
from partita.jobs.workload import load
from partita.lower import Memo, lower_plan
from partita.lower.orders import order_of, order_text, refusal
from partita.lower.pipeline import lower_pipeline
from partita.meaning import Purpose
from partita.plans import Axis, Mesh, Schedule, Stage
from partita.program import Kind
from partita.verify import verify_program, verify_timeline

CLUSTER = resolve("8xA100")


def chain(batch=32, width=256, depth=8):
    g = GraphBuilder("chain")
    x = g.input("x", (batch, width))
    for i in range(depth):
        x = g.relu(g.linear(x, width, f"l{i}", bias=False), name=f"r{i}")
    return training_graph(g.finish(x))


def mesh_at(first, size):
    return Mesh((Axis("data", size),), tuple(range(first, first + size)))


def staged(graph, count, *, groups=None, size=1, recompute=False, zero=0):
    """Stages of equally many ops, one after the other on groups of devices."""
    ops = [op.name for op in graph.ops if op.phase == "forward"]
    groups = groups or count
    stages = []
    for i in range(count):
        mine = ops[len(ops) * i // count : len(ops) * (i + 1) // count]
        mesh = mesh_at(i % groups * size, size)
        splits = {split.op: split for split in data_splits(graph, mesh, zero)}
        kept = tuple(mine[::4]) if recompute else ()
        stages.append(
            Stage(
                f"stage{i}",
                mesh,
                tuple(splits[o] for o in mine),
                "full" if recompute else "none",
                kept,
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


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", ["gpt2", "inception_v3", "t5-small"])
def test_one_stage_that_runs_once_takes_what_it_takes_op_by_op(name, zero):
    work = load(name, batch=8)
    (stage,) = staged(work.graph, 1, size=8, zero=zero)
    _, timeline = lowered(work.graph, (stage,), count=1)
    plain = simulate_stage(work, CLUSTER, stage)
    # Parameters sharded may be gathered for the backward before the forward has ended.
    tolerance = 0.02 if zero == 3 else 1e-9
    assert timeline.makespan == pytest.approx(plain.step_s, rel=tolerance)


def test_a_pipeline_takes_at_least_the_busiest_stage_and_the_way_there():
    graph = chain()
    outcome, timeline = lowered(graph, staged(graph, 4), count=8)
    busy = [blocks.busy_s for blocks in outcome.blocks]
    assert timeline.makespan >= 8 * max(busy)
    assert timeline.makespan >= sum(busy)
    assert timeline.makespan <= 8 * sum(busy) + 1


def test_stages_that_are_alike_are_costed_alike():
    graph = chain()
    outcome, _ = lowered(graph, staged(graph, 4))
    assert outcome.blocks[1].forward == outcome.blocks[2].forward


def held_beyond(name, count):
    """What the first stage holds at its peak with so many micro-batches of 8."""
    graph = chain(batch=8 * count)
    _, timeline = lowered(graph, staged(graph, 4), name, count)
    return timeline.peaks()[0]


def test_gpipe_holds_every_micro_batch_and_1f1b_as_many_as_there_are_stages():
    graph = chain(batch=64)
    outcome, _ = lowered(graph, staged(graph, 4), count=8)
    each = outcome.blocks[0].forward.held_bytes[0]
    assert each > 0
    assert held_beyond("gpipe", 12) - held_beyond("gpipe", 8) == pytest.approx(4 * each, rel=0.5)
    assert held_beyond("1f1b", 12) == held_beyond("1f1b", 8)


def test_weight_gradients_put_off_fill_the_bubble():
    graph = chain(batch=4096, width=4096)
    stages = staged(graph, 4)
    _, plain = lowered(graph, stages, "1f1b", 8)
    outcome, apart = lowered(graph, stages, "zb-h1", 8)
    assert outcome.blocks[0].weight is not None
    assert apart.makespan < plain.makespan


def test_interleaved_stages_alternate_on_their_devices():
    graph = chain(batch=4096, width=4096, depth=16)
    _, line = lowered(graph, staged(graph, 4), "1f1b", 8)
    outcome, looped = lowered(graph, staged(graph, 8, groups=4), "interleaved", 8)
    assert sum(lane.kind == "device" for lane in outcome.program.lanes) == 4
    assert looped.makespan < line.makespan


def test_gradients_that_are_complete_first_are_synchronised_first():
    graph = chain(batch=32, width=2048, depth=16)
    outcome, timeline = lowered(
        graph, staged(graph, 8, groups=2, size=4), name="interleaved", count=4
    )
    program = outcome.program
    reduced = {
        program.work_of(task).stage: float(timeline.start[task])
        for task in program.tasks_of(Purpose.GRADIENT_REDUCTION)
    }
    # The last stage of a group is the first to have all its gradients.
    for group in (0, 1):
        starts = [reduced[k] for k in range(group, 8, 2)]
        assert starts == sorted(starts, reverse=True)
    assert reduced[7] < float(timeline.end[program.microbatch >= 0].max())


def test_recomputing_holds_less_and_runs_the_forward_twice():
    graph = chain(batch=1024, width=1024)
    plain, _ = lowered(graph, staged(graph, 2))
    again, _ = lowered(graph, staged(graph, 2, recompute=True))
    for before, after in zip(plain.blocks, again.blocks, strict=True):
        assert after.forward.held_bytes[0] < before.forward.held_bytes[0]
        assert after.forward.seconds == pytest.approx(before.forward.seconds)
        extra = after.backward.seconds - before.backward.seconds
        assert extra == pytest.approx(before.forward.seconds, rel=0.3)


def test_a_tensor_that_two_later_stages_read_is_sent_to_both_and_comes_back_from_both():
    g = GraphBuilder("skip")
    x = g.linear(g.input("x", (16, 64)), 64, "a", bias=False)
    y = g.linear(x, 64, "b", bias=False)
    z = g.add(g.linear(y, 64, "c", bias=False), x)
    graph = training_graph(g.finish(z))
    ops = [op.name for op in graph.ops if op.phase == "forward"]
    splits = {split.op: split for split in data_splits(graph, mesh_at(0, 1))}
    parts = (ops[:1], ops[1:2], ops[2:])
    stages = tuple(
        Stage(f"s{i}", mesh_at(i, 1), tuple(splits[op] for op in part))
        for i, part in enumerate(parts)
    )
    outcome, _ = lowered(graph, stages, count=2)
    assert set(outcome.sends.forward) == {(0, 1), (1, 2), (0, 2)}
    assert set(outcome.sends.backward) == {(1, 0), (2, 1), (2, 0)}
    size = 16 * 64 * 4 / 2
    assert all(sent.target_bytes == size for sent in outcome.sends.forward.values())


def test_a_weight_that_two_stages_read_is_held_and_exchanged_by_both():
    work = load("gpt2", batch=8)
    outcome, _ = lowered(work.graph, staged(work.graph, 2), count=2)
    between = [work for work in outcome.program.works if work.collective and work.peer >= 0]
    assert [(work.stage, work.peer, work.collective) for work in between] == [(0, 1, "all_reduce")]
    assert [outcome.program.values[v].tensor for v in between[0].reads] == ["wte.weight"]
    weight = work.graph.tensor("wte.weight").size_bytes
    assert outcome.blocks[1].static_bytes[0] > weight


def test_inference_runs_the_forwards_only():
    work = load("gpt2", batch=8, training=False)
    outcome, timeline = lowered(work.graph, staged(work.graph, 2), count=4)
    assert set(np.unique(outcome.program.kind)) <= {
        Kind.FORWARD,
        Kind.SEND,
        Kind.RECEIVE,
        Kind.OTHER,
    }
    one, _ = lowered(work.graph, staged(work.graph, 2), count=1)
    assert timeline.makespan > max(b.forward.seconds for b in one.blocks)


def test_a_pipeline_is_simulated_and_verified_like_any_plan():
    work = load("t5-small", batch=16)
    simulation = simulate_stages(work, CLUSTER, staged(work.graph, 4, size=2), Schedule("1f1b", 4))
    assert simulation.num_devices == 8
    assert 0 < simulation.bubble < 1
    assert simulation.fits
    assert sum(simulation.bounds().values()) == pytest.approx(simulation.step_s)


class TestOrders:
    LINE = ((0,), (1,))
    LOOPED = ((0, 2), (1, 3))

    def test_a_listed_order_is_what_runs(self):
        rows = order_text(order_of(Schedule("gpipe", 2), self.LINE, training=True))
        assert rows == ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
        listed = Schedule("mine", 2, rows)
        assert order_text(order_of(listed, self.LINE, training=True)) == rows

    def test_an_unknown_name_is_refused(self):
        with pytest.raises(PlanError, match="unknown schedule '1f2b'"):
            order_of(Schedule("1f2b", 2), self.LINE, training=True)

    def test_a_schedule_for_another_layout_is_refused(self):
        assert "manner of a line" in refusal("1f1b", self.LOOPED, 4)
        assert "model twice" in refusal("chimera", self.LINE, 4)
        with pytest.raises(PlanError, match="interleaved needs a multiple of 2 micro-batches"):
            order_of(Schedule("interleaved", 3), self.LOOPED, training=True)

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (("0F0 0B0",), "1 rows for 2 groups of devices"),
            (("0F0 0B0", "1F0"), "1B0 is missing"),
            (("0F0 0B0", "1F0 1F0 1B0"), "1F0 stands twice"),
            (("1F0 0F0 0B0", "1F0 1B0"), "1F0 stands twice or on devices"),
            (("0F0 0I0", "1F0 1B0"), "0W0 does not belong"),
            (("0F0 0X0", "1F0 1B0"), "'0X0' is no action"),
        ],
    )
    def test_an_order_that_is_none_is_refused(self, rows, message):
        with pytest.raises(PlanError, match=message):
            order_of(Schedule("mine", 1, rows), self.LINE, training=True)

    def test_an_order_that_waits_for_itself_is_refused(self):
        graph = chain()
        stages = staged(graph, 2)
        stuck = Schedule("mine", 1, ("0F0 0B0", "1B0 1F0"))
        with pytest.raises(PlanError, match="go on: 1B0 waits for 1F0, which comes after 1B0"):
            lower_plan(stages, stuck, graph, CLUSTER, run)


def test_micro_batches_divide_the_batch():
    graph = chain(batch=32)
    with pytest.raises(PlanError, match="a batch of 32 in 5 micro-batches"):
        lower_plan(staged(graph, 2), Schedule("1f1b", 5), graph, CLUSTER, run)


def test_a_deep_stage_is_estimated_by_two_shorter_ones():
    work = load("gpt2", batch=16)
    (stage,) = staged(work.graph, 1, size=2)
    kept = tuple(op for op in stage.dims() if op.endswith("ln_1"))
    for stages in ((stage,), (replace(stage, checkpointing="full", segments=kept),)):
        short, quick = lowered(work.graph, stages, count=4, quick=True)
        whole, exact = lowered(work.graph, stages, count=4)
        assert short.blocks != whole.blocks
        # Gradients are synchronised in buckets of a size, not layer by layer: the end of the step
        # is no exact line.
        assert quick.makespan == pytest.approx(exact.makespan, rel=0.02)
        assert quick.peaks() == pytest.approx(exact.peaks(), rel=1e-3)
        for a, b in zip(short.blocks, whole.blocks, strict=True):
            assert a.busy_s == pytest.approx(b.busy_s, rel=1e-3)
        # The order of all its collectives, which a plan has, is none of the shorter stages'.
        decided, again = lowered(work.graph, whole.stages, count=4, quick=True)
        assert decided.stages[0].overlap is not None
        assert again.makespan == quick.makespan


def test_checkpoints_that_do_not_repeat_are_lowered_in_full():
    work = load("gpt2", batch=16)
    (stage,) = staged(work.graph, 1, size=2)
    odd = tuple(stage.dims())[::5]
    stages = (replace(stage, checkpointing="full", segments=odd),)
    _, outcome = lowered(work.graph, stages, count=4, quick=True)
    _, exact = lowered(work.graph, stages, count=4)
    assert outcome.makespan == exact.makespan


def test_a_deep_stage_of_unlike_devices_is_timed_as_a_whole():
    """With two layers the one is the last to be done (by its part of the head), with 48 the other:
    a line through short stages would be that of the wrong device."""
    cluster = resolve("1xA100+1xH100")
    work = load("gpt2-xl@128", batch=16, dtype="f16")
    mesh = Mesh((Axis("x", 2, (3, 5)),), (0, 1))
    stage = Stage("stage0", mesh, data_splits(work.graph, mesh))
    step_s = [simulate_stages(work, cluster, (stage,), Schedule("1f1b", m)).step_s for m in (1, 2)]
    assert step_s[1] >= step_s[0]  # smaller shares are no quicker
