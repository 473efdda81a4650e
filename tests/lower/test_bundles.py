"""Sharded parameters are gathered in bundles: what is in one, and what that is worth."""

from collections import Counter
from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.costs.layouts import stage_bundles
from partita.engine import run
from partita.errors import PlanError
from partita.jobs.simulate import data_splits
from partita.jobs.workload import load
from partita.lower import Lowered, Memo, lower_plan
from partita.meaning import Phase, Purpose
from partita.plans import Axis, Mesh, Overlap, Schedule, Stage

CLUSTER = resolve("8xA100")
MESH = Mesh((Axis("dp", 8),), tuple(range(8)))
ONCE = Schedule("1f1b", 1)
LAYERS = 12


def stage_of(name: str = "gpt2", **fields: object) -> tuple[object, Stage]:
    graph = load(name, batch=16).graph
    return graph, Stage("model", MESH, tuple(data_splits(graph, MESH, 3)), **fields)


def lowered(graph, stage: Stage, schedule: Schedule = ONCE, **options: bool) -> Lowered:
    memo = Memo(Collectives(CLUSTER))
    return lower_plan((stage,), schedule, graph, CLUSTER, run, memo, most_devices=1, **options)


def gathers(program) -> list[tuple[Phase, tuple[str, ...]]]:
    """Phase and tensors of every gather, each once."""
    works = [work for work in program.works if work.purpose is Purpose.PARAMETER_GATHER]
    return [(w.phase, tuple(program.values[v].tensor for v in w.reads)) for w in works]


def test_a_layer_is_one_gather_forward_and_one_backward():
    graph, stage = stage_of()
    made = gathers(lowered(graph, stage).program)
    forward = [names for phase, names in made if phase is Phase.FORWARD]
    layers = [names for names in forward if "h.5.mlp.c_fc.weight" in names]
    assert len(layers) == 1
    assert {name.split(".")[1] for name in layers[0]} == {"5"}
    assert len(forward) < 2 * LAYERS
    backward = [names for phase, names in made if phase is Phase.BACKWARD]
    assert Counter("h.5.mlp.c_fc.weight" in names for names in backward)[True] == 1


def test_bundles_are_in_the_decided_stage_and_read_back_the_same():
    graph, stage = stage_of()
    first = lowered(graph, stage)
    (decided,) = first.stages
    assert decided.bundles == stage_bundles(stage, graph, CLUSTER, Collectives(CLUSTER))
    assert run(lowered(graph, decided).program).makespan == run(first.program).makespan


def test_an_order_without_bundles_gathers_each_op_by_itself_as_it_did():
    graph, stage = stage_of()
    alone = lowered(graph, replace(stage, bundles=()))
    (decided,) = alone.stages
    assert decided.overlap is not None
    older = replace(decided, bundles=None)  # as files before bundles have it
    assert gathers(lowered(graph, older).program) == gathers(alone.program)
    assert run(lowered(graph, older).program).makespan == run(alone.program).makespan
    assert len(gathers(alone.program)) > 5 * LAYERS
    assert run(alone.program).makespan > 1.3 * run(lowered(graph, stage).program).makespan


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_short_stages_tell_what_deep_ones_take(checkpointing):
    graph, stage = stage_of(checkpointing=checkpointing)
    if checkpointing == "full":  # every layer is a segment
        firsts = [split.op for split in stage.splits if split.op.endswith(".ln_1")]
        stage = replace(stage, segments=tuple(firsts))
    two = Schedule("1f1b", 2)
    quick, full = (lowered(graph, stage, two, quick=way) for way in (True, False))
    assert run(quick.program).makespan == pytest.approx(run(full.program).makespan, rel=0.05)


def test_a_layer_that_runs_again_is_gathered_once_for_that_and_its_gradients():
    graph, stage = stage_of(checkpointing="full")
    firsts = tuple(split.op for split in stage.splits if split.op.endswith(".ln_1"))
    stage = replace(stage, segments=firsts)
    made = gathers(lowered(graph, stage).program)
    backward = [names for phase, names in made if phase is Phase.BACKWARD]
    assert sum("h.5.mlp.c_fc.weight" in names for names in backward) == 1
    apart = gathers(lowered(graph, replace(stage, bundles=())).program)
    backward = [names for phase, names in apart if phase is Phase.BACKWARD]
    assert sum("h.5.mlp.c_fc.weight" in names for names in backward) == 2


def test_a_bundle_begins_with_an_op_of_its_stage():
    with pytest.raises(PlanError, match=r"stage 'model' bundles: names op 'h.99', which is not"):
        stage_of(bundles=("h.99",), overlap=Overlap())
