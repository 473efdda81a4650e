"""What a pipeline's drafts think a stage holds is what lowering it finds."""

import numpy as np
import pytest

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.costs.sharding import Choice
from partita.costs.tied import Tied, kept_alike, later_readers, tied_stretches
from partita.engine import run
from partita.jobs.workload import load
from partita.lower import lower_plan
from partita.search.joint.cuts import stretch_sums
from partita.search.joint.drafts import Drafting, in_flight
from partita.search.joint.meshes import arrangements


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
