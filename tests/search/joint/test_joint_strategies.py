"""Which ops selective checkpointing runs again, and that candidates know what that takes.

What a pipeline's candidates think a stage holds is what lowering it finds.
"""

from dataclasses import replace

import numpy as np
import pytest

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.costs.memory import SavedReads, kept_alike, later_readers
from partita.costs.sharding import SplitChoice
from partita.engine import run
from partita.graph import GraphBuilder, training_graph
from partita.jobs.workload import load
from partita.lower import lower_plan
from partita.plans import Axis, Mesh
from partita.problems.joint import Cell, TiedBytes, stage_cost, strategy_of
from partita.search.joint.bound_segments import Freed, Multipliers
from partita.search.joint.candidates import Candidates
from partita.search.joint.cells import mesh_of
from partita.search.joint.cuts import tied_ranges
from partita.search.joint.model import JointModel
from partita.search.joint.orders import in_flight
from partita.search.joint.strategies import Again, Selective

CLUSTER = resolve("8xA100")
MESH = Mesh((Axis("x", 8),), tuple(range(8)))


def chosen(graph, choices=None, second=1e-5, machine=CLUSTER):
    """What is run again on eight devices, with `choices` other than to split the batch."""
    forward = [op.name for op in graph.ops if op.phase == "forward"]
    choice_of = {op: SplitChoice(("b",)) for op in forward} | (choices or {})
    saved = SavedReads(graph, dict.fromkeys(forward, 0), 1)
    times = dict.fromkeys(forward, second)
    again = Selective(
        saved, CLUSTER.kinds[0], MESH.axes, [MESH.groups(0)], Collectives(machine), choice_of, times
    ).chosen()
    dims_of = {op: choice.dims for op, choice in choice_of.items()}
    before, after = (float(saved.bytes_of(dims_of, [8.0], a).sum()) for a in ((), again.ops))
    return again, before - after


def block(batch=8192, width=4096):
    g = GraphBuilder("block")
    x = g.linear(g.input("x", (batch, width)), width, "first", bias=False)
    y = g.linear(g.norm(x, "layer_norm", name="norm"), width, "up", bias=False)
    y = g.linear(g.elementwise("gelu", y, name="gelu"), width, "down", bias=False)
    return training_graph(g.finish(g.linear(g.add(x, y, name="sum"), 8, "last", bias=False)))


WHOLE = 8192 * 4096 * 4  # bytes of an activation of the block


def test_what_is_made_from_what_is_kept_anyway_runs_again():
    outcome, freed = chosen(block())
    assert outcome == Again(frozenset({"norm", "gelu"}))  # for a sum two others would be kept
    assert freed == 2 * WHOLE / 8


def test_what_takes_long_for_what_it_frees_does_not():
    assert chosen(block(), second=1.0)[0] == Again()


def test_an_op_between_two_that_are_kept_runs_again_with_the_next():
    g = GraphBuilder("convs")
    x = g.conv(g.input("x", (8, 3, 64, 64)), 64, 3, padding=1, name="a")
    x = g.relu(g.norm(x, "group_norm", name="norm", groups=8), name="relu")
    graph = training_graph(g.finish(g.conv(x, 64, 3, padding=1, name="b")))
    outcome, freed = chosen(graph, second=1e-7)
    assert outcome.ops == {"norm", "relu"}
    assert freed == graph.tensor("relu").size_bytes / 8


def test_views_go_along():
    g = GraphBuilder("views")
    x = g.linear(g.input("x", (64, 32, 256)), 256, "a", bias=False)
    x = g.reshape(g.elementwise("gelu", x, name="gelu"), (64 * 32, 256), name="flat")
    graph = training_graph(g.finish(g.linear(x, 256, "b", bias=False)))
    choices = {
        "b": SplitChoice(("",)),
        "flat": SplitChoice(("",)),
        "gelu": SplitChoice(("",)),
        "a": SplitChoice(("",)),
    }
    outcome, freed = chosen(graph, choices, second=1e-8)
    assert outcome.ops == {"gelu", "flat"}
    assert freed == graph.tensor("gelu").size_bytes


def test_what_has_to_agree_with_other_devices_does_not_run_again():
    outcome, _ = chosen(block(), {"norm": SplitChoice(("c",)), "gelu": SplitChoice(("c",))})
    assert "norm" not in outcome.ops  # its sums would be exchanged once more


def test_a_gathered_copy_is_gathered_again_where_the_data_gradient_is_longer():
    columns = {"up": SplitChoice(("n",)), "gelu": SplitChoice(("c",)), "down": SplitChoice(("k",))}
    outcome, freed = chosen(block(), columns)
    assert outcome.ops == {"norm", "gelu"}
    assert set(outcome.sent_s) == {"up"}
    assert freed == WHOLE + WHOLE / 8
    far, freed = chosen(block(), columns, machine=resolve("8x1xA100"))
    assert far == Again(frozenset({"gelu"}))
    assert freed == WHOLE / 8


def joint_of(model, spec, batch, allow=lambda *_: True, **options):
    """A model with the cell of two groups and four micro-batches."""
    cluster = resolve(spec)
    graph = load(model, batch=batch).graph
    joint = JointModel(graph, "adamw", cluster, Collectives(cluster), allow, **options)
    (number,) = [k for k, g in enumerate(joint.problem.groupings) if g.num_groups == 2]
    return joint, Cell(number, 4)


@pytest.mark.parametrize(
    ("model", "spec", "batch"), [("gpt2", "2x2xA100", 16), ("t5-small", "2xV100", 8)]
)
def test_a_selective_stage_holds_what_its_candidate_says(model, spec, batch):
    def allow(what, value):
        return what != "recompute" or value == "selective"

    joint, cell = joint_of(model, spec, batch, allow)
    solution = Candidates(joint.problem).best(cell, 0).solution
    stages, schedule = joint.stages(solution), joint.schedule(solution)
    lowered = lower_plan(stages, schedule, joint.graph, joint.cluster, run)
    for k, (stage, blocks) in enumerate(zip(stages, lowered.blocks, strict=True)):
        assert stage.checkpointing == "selective"
        own, (a, b) = strategy_of(joint.problem, solution, k), solution.stages[k][:2]
        some, all_kept = (stage_cost(joint.problem, own, c, a, b) for c in ("selective", "none"))
        held = blocks.forward.held_bytes[0]
        assert some.saved == pytest.approx(held, rel=0.1)
        assert held < all_kept.saved
        kinds = list(joint.problem.segment_kind[a:b])
        assert 0 < own.again[kinds].sum() < 0.1 * own.compute[kinds].sum()


def test_a_candidate_may_leave_selective_checkpointing_out():
    joint, cell = joint_of("gpt2", "2xA100", 32, max_memory=6e9)
    candidates = Candidates(joint.problem)
    some, other = (candidates.best(cell, 0, selective=selective) for selective in (True, False))
    assert "selective" in {stage.checkpointing for stage in some.solution.stages}
    assert "selective" not in {stage.checkpointing for stage in other.solution.stages}
    assert some.estimate_s < other.estimate_s
    assert (some.selective, other.selective) == (True, False)


def test_stages_name_only_what_their_own_gradients_read():
    joint, _ = joint_of("gpt2", "2xA100", 8)
    (split, *_) = joint.on_mesh(Mesh((Axis("x", 1),), (0,)), 1, 1).strategies
    norm, reads = "h.0.ln_1", ("h.0.attn.q", "h.0.attn.c_attn")
    after = next(op for op in reads if op in joint.fold.op_like)
    assert joint._again(split, [norm, after]) == (norm,)
    assert joint._again(split, [norm]) == ()


def test_the_less_of_keeping_and_making_again_counts():
    freed = Freed(
        np.array([0, 0, 2]), np.array([10.0, 10.0, 4.0]), np.array([1.0, 100.0, 1.0]),
        np.array([0.0, 0.0, 2.0]),
    )  # fmt: skip
    assert freed.less(3, 1.0, 1.0).tolist() == [9.0, 0.0, 1.0]
    assert freed.less(3, 1.0, 0.0).tolist() == [0.0, 0.0, 0.0]


def candidate_of(model, batch, cluster, count, allow=lambda *_: True, **options):
    """The model and the best candidate of two groups."""
    work = load(model, batch=batch)
    joint = JointModel(work.graph, "adamw", cluster, Collectives(cluster), allow, **options)
    (number,) = [k for k, g in enumerate(joint.problem.groupings) if g.num_groups == 2]
    return work, joint, Candidates(joint.problem).best(Cell(number, count), 0).solution


@pytest.mark.parametrize(
    ("model", "spec", "batch"), [("gpt2", "2x2xA100", 16), ("gpt2-medium", "2x4xV100", 32)]
)
def test_a_stage_holds_what_its_candidate_says(model, spec, batch):
    cluster = resolve(spec)
    work, joint, solution = candidate_of(model, batch, cluster, 4)
    stages, schedule = joint.stages(solution), joint.schedule(solution)
    lowered = lower_plan(stages, schedule, work.graph, cluster, run)
    order = [op for segment in joint.chain.segments for op in segment.ops]
    assert [split.op for stage in stages for split in stage.splits] == order
    for k, (stage, blocks) in enumerate(zip(stages, lowered.blocks, strict=True)):
        own, choice = strategy_of(joint.problem, solution, k), solution.stages[k]
        cost = stage_cost(joint.problem, own, choice.checkpointing, choice.first, choice.end)
        assert cost.static == pytest.approx(blocks.static_bytes[0], rel=0.02)
        if stage.checkpointing != "full":
            assert cost.saved == pytest.approx(blocks.forward.held_bytes[0], rel=0.1)


def test_a_tied_weight_counts_to_every_stage_that_has_a_reader_without_the_first():
    array = tied_ranges([TiedBytes(0, 3, 7.0)], 4)
    assert array[0, 4] == 0  # with the first reader
    assert array[1, 4] == array[3, 4] == 7
    assert array[1, 3] == 0  # without the second


def test_the_second_reader_of_a_weight_is_found_and_keeps_states_as_the_first():
    graph = load("gpt2", batch=4).graph
    (reader,) = later_readers(graph)
    assert (reader.op, reader.parameter, reader.alone) == ("lm_head", "wte.weight", True)
    kept = kept_alike(
        {reader.owner: SplitChoice(("b",), 3), "lm_head": SplitChoice(("b",))}, [reader]
    )
    assert kept["lm_head"].zero == 1
    choices = {reader.owner: SplitChoice(("b",), 3), "lm_head": SplitChoice(("b",))}
    assert kept_alike(choices, [reader], (3,))["lm_head"].zero == 3  # where nothing else may be
    assert kept_alike(choices, [reader], (0, 3))["lm_head"].zero == 3
    same = kept_alike({reader.owner: SplitChoice(("b",)), "lm_head": SplitChoice(("b",))}, [reader])
    assert same["lm_head"].zero == 0


@pytest.mark.parametrize(
    ("schedule", "chunks", "held"),
    [
        ("1f1b", 1, (4, 3, 2, 1)),
        ("gpipe", 1, (8, 8, 8, 8)),
        ("interleaved", 2, (5.5, 4.5, 3.5, 2.5)),
    ],
)
def test_activations_in_flight_are_read_off_the_order(schedule, chunks, held):
    assert in_flight(schedule, 4, chunks, 8) == held


def test_activations_wait_for_weight_gradients():
    assert min(in_flight("zb-h1", 4, 1, 16)) >= 3
    assert max(in_flight("zb-h2", 4, 1, 16)) > max(in_flight("zb-h1", 4, 1, 16))


def on_all_devices(model, spec, batch, shape):
    """What is known of one mesh of all devices, for one micro-batch."""
    work, cluster = load(model, batch=batch), resolve(spec)
    joint = JointModel(work.graph, "adamw", cluster, Collectives(cluster))
    return joint.on_mesh(mesh_of(shape, range(cluster.num_devices)), 1, 1)


def test_bytes_count_where_selective_checkpointing_keeps_them():
    """Norms split along channels exchange statistics, so that no device makes theirs again alone.

    With a large multiplier they are split along the sequence, though if all is kept that takes no
    less.
    """
    mesh = on_all_devices("gpt3-175b", "8x8xV100", 64, (8, 8))
    selective, all_kept = (
        float(known.strategies[-1].figures.again_saved[list(mesh.fold.like)].sum())
        for known in (mesh, replace(mesh, selective=False))
    )
    assert selective < 0.8 * all_kept


@pytest.fixture(scope="module")
def of_gpt2():
    return on_all_devices("gpt2", "2x4xA100", 32, (2, 4))


def test_what_cheap_ops_make_is_held_at_no_price_where_each_device_makes_it_again(of_gpt2):
    model = of_gpt2.model
    held = {}
    for name, choices, table in zip(model.ops, model.choices, model.tables, strict=True):
        both = zip(table.activations, table.selectively, strict=True)
        held[name.rsplit(".", 1)[-1]] = dict(zip((c.dims for c in choices), both, strict=True))
    kept, selectively = held["gelu"]["b", "c"]
    assert kept > 0 == selectively
    kept, selectively = held["ln_1"]["b", "c"]  # exchanges statistics
    assert kept == selectively > 0
    kept, selectively = held["ln_1"]["b", "s"]
    assert kept > 0 == selectively
    kept, selectively = held["c_fc"]["b", "n"]  # a product
    assert kept == selectively > 0


def test_computing_alone_is_below_all_that_is_counted(of_gpt2):
    counted = of_gpt2.bounds.least(Multipliers())
    assert (of_gpt2.compute_bound <= counted * (1 + 1e-9)).all()
    assert of_gpt2.compute_bound.sum() > 0.8 * counted.sum()
