"""Pins that no plan can meet are refused at once, and what contradicts what is named."""

import pytest

from partita.cluster import resolve
from partita.errors import InputError
from partita.jobs.constraint_check import check_constraints
from partita.jobs.constraints import parse_constraints
from partita.jobs.plan import plan
from partita.search.base import Stop


def check(*pins, batch=32, cluster="4xA100", training=True, num_segments=29):
    check_constraints(
        parse_constraints(pins), batch=batch, cluster=resolve(cluster), num_segments=num_segments,
        inner_size=4, training=training,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (["micro-batches=7"], "micro-batches=7 does not divide the batch of 32; give 4 or 8"),
        (["pp=64"], "pp=64, but the model can be cut into 29 parts"),
        (["pp=3"], "pp=3 cannot be made of 4 devices, each stage of as many; give 1, 2"),
        (["pp=2", "mesh=4"], "pp=2 and mesh=4 contradict each other"),
        (["mesh=2x2x2"], "mesh=2x2x2 cannot be made of 4 devices; give mesh=4, 2x2, 2 or 1"),
        (["pp=1", "schedule=gpipe"], "pp=1 and schedule=gpipe contradict each other"),
        (
            ["pp=4", "micro-batches=2", "schedule=interleaved"],
            "pp=4, micro-batches=2 and schedule=interleaved contradict each other",
        ),
    ],
)
def test_what_cannot_be_is_refused(pins, words):
    with pytest.raises(InputError) as error:
        check(*pins)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "pins",
    [
        ["micro-batches=8"],
        ["pp=4", "mesh=1"],
        ["mesh=2x2"],
        ["pp=2", "mesh=2", "schedule=zb-v", "micro-batches=4"],
        ["pp=1", "schedule=1f1b"],
        ["recompute=selective"],
    ],
)
def test_what_can_be_is_not(pins):
    check(*pins)


def test_inference_recomputes_nothing():
    with pytest.raises(InputError, match="inference has no backward"):
        check("recompute=full", training=False)
    check("recompute=none", training=False)


def test_stages_of_unlike_devices_need_not_be_of_as_many():
    check("pp=3", cluster="2xA100+4xV100")


def test_planning_asks_first():
    with pytest.raises(InputError, match="does not divide"):
        plan("alexnet", "2xA100", batch=8, pin=["micro-batches=3"])


def test_the_bound_rises_while_a_search_goes_on():
    planned = plan("gpt2", "4xA100", batch=32, stop=Stop(gap=1e-9))
    bounds = [step.lower_bound for step in planned.history]
    assert bounds[-1] == pytest.approx(planned.lower_bound_s)
    assert bounds == sorted(bounds)
    assert bounds[0] < 0.9 * bounds[-1]
    for step in planned.history:
        assert step.lower_bound <= step.objective * (1 + 1e-9)
