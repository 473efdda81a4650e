"""A plan's schedule as a file of torch's, and the other way round."""

import pytest

from partita.errors import PlanError, VerificationError
from partita.jobs.plan import plan
from partita.jobs.simulate import simulate
from partita.jobs.torch_schedule import plan_with_schedule, schedule_of_plan
from partita.schedules.named import NAMED
from partita.schedules.torch_csv import parse_torch_csv, torch_schedule
from partita.search.base import Stop
from partita.verify.torch_schedules import torch_refusals


@pytest.fixture(scope="module")
def pipeline():
    pins = ("pp=2", "micro-batches=4", "schedule=1f1b")
    return plan("alexnet", "2xA100", batch=64, pin=pins, stop=Stop(time_s=10)).plan


def test_a_plan_is_written_and_read_as_it_was(pipeline):
    for comms in (False, True):
        schedule = schedule_of_plan(pipeline, comms=comms)
        assert torch_refusals(schedule, in_order=True) == ()
        again = plan_with_schedule(pipeline, parse_torch_csv(schedule.to_csv()), "mine.csv")
        assert again.schedule.name == "mine"
        assert simulate(again).step_s == pytest.approx(simulate(pipeline).step_s)


def test_another_order_takes_another_time(pipeline):
    gpipe = torch_schedule(NAMED["gpipe"].order(2, 1, 4))
    simulation = simulate(plan_with_schedule(pipeline, gpipe))
    assert simulation.peak_bytes > simulate(pipeline).peak_bytes
    assert simulation.schedule.num_microbatches == 4


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("0F0,1F0,1B0,0B0", PlanError, "f.csv: schedule: no rank holds stage 0 alone, and a group"),
        (
            "0F0,0B0\n1F0,1B0\n2F0,2B0",
            PlanError,
            "f.csv: schedule: a rank holds stage 2 alone, and the plan has 2 stages; leave it out",
        ),
        (
            "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2",
            PlanError,
            "f.csv: schedule: a batch of 64 in 3 micro-batches; give a number that divides",
        ),
        ("0F0,0B0\n1B0,1F0", VerificationError, "not verified: f.csv: row 2 (rank 1), cell 1"),
    ],
)
def test_a_file_for_other_stages_is_refused(pipeline, text, error, message):
    with pytest.raises(error) as refused:
        plan_with_schedule(pipeline, parse_torch_csv(text), "f.csv")
    assert str(refused.value).startswith(message)
