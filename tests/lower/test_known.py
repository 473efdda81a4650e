"""Stages that differ in names alone are written once, and have the bodies that they should."""

from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.engine import run
from partita.graph import GraphBuilder, training_graph
from partita.jobs.simulate import data_splits
from partita.lower import Memo, blocks, pipeline
from partita.lower.known import microbatch_graph, structure
from partita.lower.pieces import homes, piece
from partita.lower.pipeline import lower_pipeline
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage

CLUSTER = resolve("8xA100")
ROUNDS, GROUPS = 4, 2


def mixer(batch=16, width=64, depth=8):
    """Blocks of norm, linear, GELU, linear and a residual."""
    g = GraphBuilder("mixer")
    x = g.linear(g.input("x", (batch, width)), width, "first", bias=False)
    for i in range(depth):
        y = g.norm(x, "layer_norm", name=f"norm{i}")
        y = g.linear(y, width, f"up{i}")
        y = g.elementwise("gelu", y, name=f"gelu{i}")
        x = g.add(x, g.linear(y, width, f"down{i}"), name=f"sum{i}")
    return training_graph(g.finish(x))


def staged(graph, zero=0, checkpointing="none", split_weights=False):
    """A block for each stage, in rounds over two groups of two devices."""
    ops = [op.name for op in graph.ops if op.phase == "forward"]
    stages = []
    for i in range(ROUNDS * GROUPS):
        mine = [op for op in ops if op.endswith(str(i)) or (not i and op == "first")]
        mesh = Mesh((Axis("x", 2),), (2 * (i % GROUPS), 2 * (i % GROUPS) + 1))
        splits = {split.op: split for split in data_splits(graph, mesh, zero)}
        if split_weights:
            splits |= {f"up{i}": OpSplit(f"up{i}", ("n",)), f"down{i}": OpSplit(f"down{i}", ("k",))}
        again = tuple(op for op in mine if op.startswith(("norm", "gelu")))
        stages.append(
            Stage(
                f"stage{i}",
                mesh,
                tuple(splits[op] for op in mine),
                checkpointing,
                (mine[2],) if checkpointing == "full" else (),
                again if checkpointing == "selective" else (),
            )
        )
    return tuple(stages)


@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"zero": 1, "checkpointing": "selective"},
        {"zero": 3, "checkpointing": "full"},
        {"split_weights": True, "checkpointing": "selective"},
    ],
)
def test_bodies_with_other_names_are_those_that_would_be_written(monkeypatch, how, schedule):
    graph = mixer()
    stages, order = staged(graph, **how), Schedule(schedule, 4)
    written = []
    monkeypatch.setattr(
        pipeline,
        "stage_bodies",
        lambda part, stage, number, *others, **more: (
            written.append(number) or blocks.stage_bodies(part, stage, number, *others, **more)
        ),
    )
    memo = Memo(Collectives(CLUSTER))
    shared = lower_pipeline(stages, order, graph, CLUSTER, run, memo)
    assert len(written) == 4  # the ends of the model, and one for each group
    monkeypatch.setattr(pipeline, "structure", lambda part, stage: (stage.name,))
    written.clear()
    apart = lower_pipeline(stages, order, graph, CLUSTER, run, memo)
    assert len(written) == len(stages)
    assert shared.program == apart.program
    assert shared.program.bodies == apart.program.bodies
    assert shared.blocks == apart.blocks
    assert shared.stages == apart.stages


def key_of(graph, stages, number):
    micro = microbatch_graph(graph, 4, Memo(Collectives(CLUSTER)))
    return structure(piece(micro, stages[number], number, homes(micro, stages)), stages[number])


def test_stages_are_alike_only_on_the_same_devices_with_the_same_decisions():
    graph = mixer()
    stages = staged(graph)
    assert key_of(graph, stages, 2) == key_of(graph, stages, 4)
    assert key_of(graph, stages, 2) != key_of(graph, stages, 3)  # other devices
    assert key_of(graph, stages, 2) != key_of(graph, stages, 0)  # it has the first op, too
    split = replace(stages[4].splits[1], dims=("n",))
    for other in (
        replace(stages[4], prefetch=stages[4].prefetch + 1),
        replace(stages[4], bucket_bytes=1.0),
        replace(stages[4], splits=(stages[4].splits[0], split, *stages[4].splits[2:])),
        replace(stages[4], checkpointing="selective", recomputed=("norm4",)),
    ):
        assert key_of(graph, (*stages[:4], other, *stages[5:]), 4) != key_of(graph, stages, 2)
