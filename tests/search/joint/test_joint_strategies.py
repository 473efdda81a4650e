"""What a pipeline's candidates think a stage holds is what lowering it finds."""

from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.costs.memory import kept_alike, later_readers
from partita.costs.sharding import SplitChoice
from partita.engine import run
from partita.jobs.workload import load
from partita.lower import lower_plan
from partita.problems.joint import Cell, TiedBytes, stage_cost, strategy_of
from partita.search.joint.bound_segments import Multipliers
from partita.search.joint.candidates import Candidates
from partita.search.joint.cells import mesh_of
from partita.search.joint.cuts import tied_ranges
from partita.search.joint.model import JointModel
from partita.search.joint.order_bounds import in_flight


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
