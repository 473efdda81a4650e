"""An M shape: pinned, or beside a pipeline that has won."""

import pytest

from partita.errors import InputError
from partita.graph import GraphBuilder
from partita.jobs.check_plan import check_plan
from partita.jobs.plan import plan
from partita.plans import device_groups, shared_stages
from partita.search.base import Stop

QUICK = Stop(time_s=20.0, gap=0.01)


def heavy_start(depth=6, width=1024, batch=4096):
    """One op with half of all the arithmetic, which no cut makes smaller, then a chain."""
    g = GraphBuilder("heavy start")
    y = g.linear(g.input("x", (batch, width)), depth * width, "wide", bias=False)
    y = g.linear(g.elementwise("gelu", y, name="gelu"), width, "back", bias=False)
    for i in range(depth):
        y = g.linear(y, width, f"layer{i}", bias=False)
    return g.finish(y)


def is_shared(answer):
    return bool(shared_stages(device_groups(answer.plan.stages)))


def test_a_pinned_shape_is_obeyed_and_its_plan_verifies():
    answer = plan(heavy_start(), "2xA100", pin=["shape=m", "micro-batches=4"], stop=QUICK)
    assert is_shared(answer)
    assert answer.plan.schedule.num_microbatches == 4
    assert answer.plan.schedule.name == "searched"
    assert check_plan(answer.plan) == ()
    assert "of the arithmetic on all devices, then a stage on each" in answer.space
    assert {other.name for other in answer.others} == {"m-shape"}
    named = plan(
        heavy_start(), "2xA100", pin=["shape=m", "schedule=1f1b", "micro-batches=4"], stop=QUICK
    )
    assert named.plan.schedule.name == "1f1b"
    assert named.best.step_s > answer.best.step_s


def test_a_line_has_no_shared_stage_and_other_shapes_are_refused():
    answer = plan(heavy_start(), "2xA100", pin=["shape=line", "pp=2"], stop=QUICK)
    assert not is_shared(answer)
    assert answer.plan.schedule.num_microbatches < 64  # of 4,096 samples: none is a single one
    with pytest.raises(InputError, match="write shape=m or shape=line"):
        plan(heavy_start(), "2xA100", pin=["shape=k"])


def test_beside_a_pipeline_that_won_the_shape_is_tried():
    graph = heavy_start(depth=3, width=2048, batch=512)
    answer = plan(graph, "2xP100@links=0.01", stop=QUICK)
    assert len(device_groups(answer.plan.stages)) == 2
    assert "m-shape" in {other.name for other in answer.others}
    alone = plan(graph, "2xP100@links=0.01", pin=["pp=2"], stop=QUICK)
    assert "m-shape" not in {other.name for other in alone.others}  # a line was asked for
