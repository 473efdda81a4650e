"""The picture of a strategy by name agrees with its forecast."""

import pytest

from partita.forecast.inputs import SCHEDULES
from partita.jobs.forecast import forecast_model
from partita.jobs.forecast_timeline import forecast_timeline
from partita.verify import check_timeline


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_blocks_of_a_schedule_end_when_the_forecast_says(schedule):
    vpp = 2 if schedule == "interleaved" else 1
    forecast = forecast_model(
        "gpt2-medium", "8xA100", batch=64, micro_batch=1, pp=4, vpp=vpp, schedule=schedule
    )
    timeline = forecast_timeline(forecast)
    assert timeline is not None
    check_timeline(timeline.program, timeline)
    assert timeline.makespan == pytest.approx(forecast.step_s, rel=0.1)
    assert len(timeline.program.lanes) == 4


def test_a_rank_holds_at_its_peak_what_the_forecast_says():
    forecast = forecast_model("gpt2", "8xA100", batch=64, micro_batch=2, pp=4)
    timeline = forecast_timeline(forecast)
    assert timeline is not None
    peaks = timeline.peaks().tolist()
    assert peaks == pytest.approx([parts.total for parts in forecast.memory_of_stages])


def test_one_stage_is_a_step_of_gradient_accumulation():
    forecast = forecast_model("gpt2", "2xA100", batch=16, micro_batch=2)
    timeline = forecast_timeline(forecast)
    assert timeline is not None
    assert timeline.makespan == pytest.approx(forecast.step_s)
    assert timeline.program.num_tasks == 1 + 4 * 2 + 1  # what is held, blocks, the rest


def test_too_many_blocks_to_draw_are_not_drawn():
    forecast = forecast_model("gpt2", "8xA100", batch=4096, micro_batch=1, pp=8)
    assert forecast_timeline(forecast) is None
