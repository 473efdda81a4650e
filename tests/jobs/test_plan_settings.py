"""The settings of a plan say how much is tried and told beside the joint search."""

from partita.jobs.plan import plan
from partita.jobs.plan_settings import AdviceSettings, PlanSettings
from partita.search.base import Stop

SHORT = Stop(time_s=20.0, gap=0.5)


def test_as_many_other_plans_are_listed_as_asked_for():
    few, many = (
        plan("alexnet", "2xA100", batch=8, stop=SHORT, settings=PlanSettings(next_best=count))
        for count in (1, 4)
    )
    assert (len(few.others), len(many.others)) == (1, 4)


def test_advice_looks_only_as_far_as_asked_for():
    nowhere = AdviceSettings(more_memory=(), more_devices=(), batches=0)
    planned = plan(
        "alexnet", "1xA100", batch=4, max_memory=1.75 * 2**30, stop=SHORT,
        settings=PlanSettings(advice=nowhere),
    )  # fmt: skip
    assert planned.plan is None
    assert planned.why.endswith("use many more or larger devices, or a smaller batch")


def test_a_large_model_begins_with_the_strategies_that_are_named():
    for name in ("tensor", "data"):
        at_once = PlanSettings(small_ops=1, first=(name,))
        planned = plan("alexnet", "2xA100", batch=8, stop=Stop(time_s=0.0), settings=at_once)
        assert {c.name for c in (planned.best, *planned.others)} == {name}


def test_without_time_a_mixed_machine_has_samples_by_speed():
    planned = plan("alexnet", "2xV100+2xP100", batch=96, stop=Stop(time_s=0.0))
    assert planned.best is not None
    by_speed = [each for each in (planned.best, *planned.others) if each.name == "unequal"]
    assert by_speed
    assert planned.best.objective_s <= min(each.objective_s for each in by_speed)
