"""Training steps of Mamba-2 and CLIP on two ranks give the numbers of the whole model."""

import pytest

pytest.importorskip("torch")

from partita.cluster import resolve
from partita.engine import run
from partita.graph import training_graph
from partita.graph.loops import loop_nest
from partita.graph.splits import splittable
from partita.lower import lower_plan
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage
from partita.run.local.execute import execute, relative_error
from partita.run.local.reference import example, reference
from partita.verify import check_meaning
from partita.zoo.hf import build_config
from tests.zoo.hf_tiny import tiny

ONCE = Schedule()


def split_of(call, wanted):
    """The first of the wanted dims that the op can split in two."""
    nest, free = loop_nest(call), splittable(call)
    return next((dim for dim in wanted if dim in free and nest.extent(dim) % 2 == 0), "")


@pytest.mark.parametrize(
    ("family", "variant", "wanted"),
    [
        ("mamba2", -1, "b"),
        ("mamba2", -1, "gnkc"),  # groups of heads
        ("mamba2", 0, "rnkc"),  # one group: heads
        ("clip", -1, "b"),
        ("clip", 0, "hnkc"),
    ],
)
def test_two_ranks_compute_the_model(family, variant, wanted):
    config = tiny(family, variant)
    graph = training_graph(build_config(config, batch=4, seq=8, dtype="f32"))
    forward = [op for op in graph.ops if op.phase == "forward"]
    splits = tuple(OpSplit(op.name, (split_of(graph.call(op), wanted),)) for op in forward)
    stage = Stage("model", Mesh((Axis("x", 2),), (0, 1)), splits)
    lowered = lower_plan((stage,), ONCE, graph, resolve("2xA100"), run)
    check_meaning(lowered.program, graph, lowered.stages, ONCE)
    given = example(graph)
    outcome = execute(lowered.program, graph, lowered.stages, 1, given)
    whole = reference(graph, given.inputs, given.parameters)
    assert relative_error(outcome.updated, whole.updated) < 1e-9
    if family == "mamba2":
        dims = {split.dims for split in splits if split.op.endswith(".scan")}
        assert dims == {(wanted[0],)}
