"""Where nothing fits: what is said to be enough is, and not much less would be."""

import re

import pytest

from partita.jobs.plan import plan
from partita.jobs.plan_settings import AdviceSettings, PlanSettings
from partita.search.base import Status, Stop
from tests.shallow import GPT2

GIB = 2.0**30
SHORT = Stop(time_s=20.0, gap=0.5)


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "room"),
    [
        ("alexnet", "1xA100", 4, 1.75),
        (f"{GPT2}@64", "2xA100", 8, 1.2),  # next to nothing beside the workspace of 1 GiB
        (f"{GPT2}@64", "2xA100", 8, 0.5),  # less than nothing
    ],
)
def test_the_memory_that_is_said_to_be_enough_is(model, cluster, batch, room):
    planned = plan(model, cluster, batch=batch, max_memory=room * GIB, stop=SHORT)
    assert planned.status is Status.INFEASIBLE
    said = re.search(r"([0-9.]+) GiB per device would be enough", planned.why)
    assert said is not None, planned.why
    enough = float(said[1]) * GIB
    assert plan(model, cluster, batch=batch, max_memory=enough, stop=SHORT).plan is not None
    less = plan(model, cluster, batch=batch, max_memory=GIB + (enough - GIB) * 0.6, stop=SHORT)
    assert less.plan is None


def test_a_search_without_time_answers_what_fits_or_says_that_it_had_none():
    workload, stop, room = f"{GPT2}@64", Stop(time_s=1e-3), 1.6
    planned = plan(workload, "4xA100", batch=8, max_memory=room * GIB, stop=stop)
    assert planned.plan is not None
    assert planned.status is Status.STOPPED
    assert planned.best.simulation.fullest[0] <= room * GIB
    short = plan(workload, "4xA100", batch=8, max_memory=1.1 * GIB, stop=stop)
    assert short.plan is None
    assert "no plan that fits 1.10 GiB per device was found in the time limit of 0.001 s: give" in (
        short.why
    )


def test_the_number_of_devices_that_is_said_to_be_enough_is():
    planned = plan("gpt2-xl@128", "1xV100-16GB", batch=4, stop=SHORT)
    said = re.search(r"([0-9]+) such devices would be enough", planned.why)
    assert said is not None, planned.why
    assert plan("gpt2-xl@128", f"{said[1]}xV100-16GB", batch=4, stop=SHORT).plan is not None


def test_advice_that_takes_too_long_is_left_out():
    hurried = PlanSettings(advice=AdviceSettings(seconds=-1.0))
    planned = plan(
        f"{GPT2}@64", "2xA100", batch=8, max_memory=1.2 * GIB, stop=SHORT, settings=hurried
    )
    assert planned.status is Status.INFEASIBLE
    assert planned.why.endswith("use many more or larger devices, or a smaller batch")
