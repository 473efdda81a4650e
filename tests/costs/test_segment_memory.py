"""What a pipeline's drafts think a stage holds is what lowering it finds."""

from dataclasses import replace

import numpy as np
import pytest

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.costs.least import Prices
from partita.costs.sharding import Choice
from partita.costs.tied import Tied, kept_alike, later_readers, tied_stretches
from partita.engine import run
from partita.jobs.workload import load
from partita.lower import lower_plan
from partita.search.joint.cuts import stretch_sums
from partita.search.joint.drafts import Drafting, in_flight
from partita.search.joint.meshes import arrangements, mesh_of


def drafted(model, spec, batch, count, **options):
    """Blocks of a draft of two groups, each with its row of the table the draft was made from."""
    work, cluster = load(model, batch=batch), resolve(spec)
    drafting = Drafting(work.graph, "adamw", cluster, Collectives(cluster), lambda *_: True)
    arrangement = next(a for a in arrangements(cluster, 8) if a.num_stages == 2)
    draft = drafting.draft(arrangement, count, **options)
    lowered = lower_plan(draft.stages, draft.schedule, work.graph, cluster, run)
    order = [op for segment in drafting.chain.segments for op in segment.ops]
    at = {op: k for k, segment in enumerate(drafting.chain.segments) for op in segment.ops}
    assert [s.op for stage in draft.stages for s in stage.splits] == order
    for stage, blocks in zip(draft.stages, lowered.blocks, strict=True):
        ways = drafting.ways(stage.mesh, count, 2).ways
        (way,) = [
            w for w in ways
            if w.splits([s.op for s in stage.splits], drafting.fold) == stage.splits
        ][:1]  # fmt: skip
        yield stage, blocks, way, at[stage.splits[0].op], at[stage.splits[-1].op] + 1


@pytest.mark.parametrize(
    ("model", "spec", "batch"), [("gpt2", "2x2xA100", 16), ("gpt2-medium", "2x4xV100", 32)]
)
def test_a_stage_holds_what_its_draft_says(model, spec, batch):
    for stage, blocks, way, a, b in drafted(model, spec, batch, 4):
        static = stretch_sums(way.static) + tied_stretches(way.tied, len(way.static))
        assert static[a, b] == pytest.approx(blocks.static_bytes[0], rel=0.02)
        if not stage.recompute:
            saved = float(np.sum(way.saved[a:b]))
            assert saved == pytest.approx(blocks.forward.held_bytes[0], rel=0.1)


def test_a_tied_weight_counts_to_every_stage_that_has_a_reader_without_the_first():
    found = tied_stretches([Tied(0, 3, 7.0)], 4)
    assert found[0, 4] == 0  # with the first reader
    assert found[1, 4] == found[3, 4] == 7
    assert found[1, 3] == 0  # without the second


def test_the_second_reader_of_a_weight_is_found_and_keeps_states_as_the_first():
    graph = load("gpt2", batch=4).graph
    (reader,) = later_readers(graph)
    assert (reader.op, reader.parameter, reader.alone) == ("lm_head", "wte.weight", True)
    kept = kept_alike(
        {reader.owner: Choice(("b",), "parameters"), "lm_head": Choice(("b",))}, [reader]
    )
    assert kept["lm_head"].sharded == "states"
    same = kept_alike({reader.owner: Choice(("b",)), "lm_head": Choice(("b",))}, [reader])
    assert same["lm_head"].sharded == "none"


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


def ways_of(model, spec, batch, shape):
    """The ways of one micro-batch on all devices of a cluster."""
    work, cluster = load(model, batch=batch), resolve(spec)
    drafting = Drafting(work.graph, "adamw", cluster, Collectives(cluster), lambda *_: True)
    return drafting.ways(mesh_of(shape, range(cluster.num_devices)), 1, 1)


def test_bytes_have_a_price_where_light_recompute_keeps_them():
    """Norms split along channels exchange statistics, so that no device makes theirs again alone.

    At a price they are split along the sequence, though if all is kept that takes no less room.
    """
    ways = ways_of("gpt3-175b", "8x8xA100", 96, (32, 2))
    light, all_kept = (
        min(float(way.light_saved.sum()) for way in priced.ways)
        for priced in (ways, replace(ways, light=False))
    )
    assert light < 0.8 * all_kept


@pytest.fixture(scope="module")
def of_gpt2():
    return ways_of("gpt2", "2x4xA100", 32, (2, 4))


def test_what_cheap_ops_make_is_held_at_no_price_where_each_device_makes_it_again(of_gpt2):
    model = of_gpt2.model
    held = {}
    for name, choices, table in zip(model.ops, model.choices, model.tables, strict=True):
        both = zip(table.activations, table.lightly, strict=True)
        held[name.rsplit(".", 1)[-1]] = dict(zip((c.dims for c in choices), both, strict=True))
    kept, lightly = held["gelu"]["b", "c"]
    assert kept > 0 == lightly
    kept, lightly = held["ln_1"]["b", "c"]  # exchanges statistics
    assert kept == lightly > 0
    kept, lightly = held["ln_1"]["b", "s"]
    assert kept > 0 == lightly
    kept, lightly = held["c_fc"]["b", "n"]  # a product
    assert kept == lightly > 0


def test_computing_alone_is_below_all_that_is_counted(of_gpt2):
    counted = of_gpt2.least.priced(Prices())
    assert (of_gpt2.least_compute <= counted * (1 + 1e-9)).all()
    assert of_gpt2.least_compute.sum() > 0.8 * counted.sum()
