"""What fails is one line, and the answer is shown all the same."""

import logging

import pytest

from partita.jobs import compare as compare_job
from partita.jobs import plan_simulator
from partita.jobs import shard as shard_job
from partita.jobs.attempts import Attempts
from partita.jobs.plan import plan
from partita.jobs.strategies import STRATEGIES, NamedStrategy
from partita.search.base import Status, Stop

QUICK = Stop(gap=0.5)  # no clock: a slow machine must not change the answer


def broken(*args, **options):
    raise IndexError("tuple index out of range")


def test_a_failed_attempt_is_one_line_and_nothing(caplog, left_out):
    attempt = Attempts()
    with caplog.at_level(logging.WARNING, "partita"):
        assert attempt("a picture", broken) is None
        assert attempt("another", lambda: 3) == 3
    assert caplog.messages == ["a picture is left out: IndexError: tuple index out of range"]
    attempt.refuse_if_all_failed([3])
    with pytest.raises(IndexError):
        attempt.refuse_if_all_failed([])


def test_compare_shows_all_other_strategies(monkeypatch, left_out):
    monkeypatch.setitem(STRATEGIES, "data", NamedStrategy("data", "", broken))
    comparison = compare_job.compare("alexnet", "2xA100", batch=4, stop=QUICK)
    rows = {row.name: row for row in comparison.rows}
    assert rows["data"].note == "IndexError: tuple index out of range"
    assert rows["fsdp"].simulation is not None
    assert rows["plan"].fits
    assert rows["shard"].fits


@pytest.mark.parametrize("search", ["shard", "plan"])
def test_compare_outlives_its_searches(monkeypatch, search, left_out):
    monkeypatch.setattr(compare_job, search, broken)
    comparison = compare_job.compare("alexnet", "2xA100", batch=4, stop=QUICK)
    rows = {row.name: row for row in comparison.rows}
    assert "IndexError" in rows[search].note
    assert comparison.best is not None


def test_a_sharding_is_found_without_the_candidates_that_fail(monkeypatch, left_out):
    whole = shard_job.simulate_stage

    def some(workload, cluster, stage, *rest):
        return broken() if stage.mesh.axes[0].name == "data" else whole(workload, cluster, stage)

    monkeypatch.setattr(shard_job, "simulate_stage", some)
    sharding = shard_job.shard("alexnet", "2xA100", batch=4)
    assert sharding.best is not None
    assert left_out
    assert not {"data", "zero1", "fsdp"} & {candidate.name for candidate in sharding.tried}


def test_a_plan_is_found_without_the_candidates_that_fail(monkeypatch, left_out):
    whole = plan_simulator.simulate_stages

    def some(workload, cluster, stages, *rest, **options):
        named = stages[0].mesh.axes[0].name == "data"
        return broken() if named else whole(workload, cluster, stages, *rest, **options)

    monkeypatch.setattr(plan_simulator, "simulate_stages", some)
    planned = plan("alexnet", "2xA100", batch=4, stop=QUICK)
    assert planned.best is not None
    assert left_out


@pytest.mark.parametrize("job", [shard_job.shard, plan])
def test_where_everything_fails_the_first_error_is_the_answer(monkeypatch, job, left_out):
    monkeypatch.setattr(shard_job, "simulate_stage", broken)
    monkeypatch.setattr(plan_simulator, "simulate_stages", broken)
    with pytest.raises(IndexError):
        job("alexnet", "2xA100", batch=4, stop=QUICK)


def test_shard_gives_the_advice_that_plan_gives():
    """It counted devices on which a split alone would fit: 1,024 where a plan needs 16."""
    sharding = shard_job.shard("gpt2-xl@128", "1xV100-16GB", batch=4)
    planned = plan("gpt2-xl@128", "1xV100-16GB", batch=4, stop=QUICK)
    assert sharding.status is planned.status is Status.INFEASIBLE
    assert "such devices would be enough" in planned.why
    assert sharding.why.endswith(planned.why)


def test_shard_names_plan_where_that_would_fit():
    """Micro-batches hold less than a whole batch."""
    sharding = shard_job.shard("gpt2@128", "2xGTX-1080-Ti", batch=1024)
    assert sharding.status is Status.INFEASIBLE
    assert sharding.why.endswith("it should fit: partita plan says how")


def test_a_number_of_devices_that_no_strategy_divides_is_no_mistake():
    """Advice met 127 devices on its way, and compare ended without a table."""
    sharding = shard_job.shard("gpt2@128", "127xGTX-1080-Ti", batch=8)
    assert sharding.tried
