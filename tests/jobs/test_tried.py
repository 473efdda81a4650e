"""What was tried is remembered as sketches: small, and true to the timelines they are of.

What fails is one line, and the answer is shown all the same.
"""

import functools
import json
import logging

import numpy as np
import pytest

import partita
from partita.jobs import compare as compare_job
from partita.jobs import plan_simulator
from partita.jobs import shard as shard_job
from partita.jobs.plan import plan
from partita.jobs.shard import shard
from partita.jobs.simulate import MOST_DEVICES, Attempts, simulate, sketch
from partita.jobs.strategies import STRATEGIES, NamedStrategy
from partita.plans import plan_from_json
from partita.program import Kind, ProgramBuilder
from partita.search.base import Status, Stop
from partita.timeline import WHOLE, Timeline
from tests.report.plans import fully_sharded, line


@functools.cache
def planned():
    return partita.plan("squeezenet1_1@64", "2xA100", batch=4, pin=("pp=2",))


def lane_named(timeline, name):
    return [lane.name for lane in timeline.program.lanes].index(name)


@pytest.mark.parametrize("plan", [
    line("squeezenet1_1@64", "4xA100", 4, batch=8), fully_sharded("squeezenet1_1@64", "2xA100"),
], ids=["pipeline", "fully-sharded"])  # fmt: skip
def test_a_lane_is_as_busy_as_its_timeline(plan):
    timeline = simulate(plan).timeline
    used = timeline.utilisation()
    rows = sketch(timeline)
    assert rows
    for row in rows:
        busy = sum(span.end - span.begin for span in row.parts() if span.letter) / WHOLE
        assert busy == pytest.approx(used[lane_named(timeline, row.name)], abs=0.03)


def test_few_tasks_are_told_one_by_one_with_their_micro_batches():
    timeline = simulate(line("squeezenet1_1@64", "2xA100", 4, batch=8)).timeline
    told = [
        (span.letter, span.microbatch)
        for span in sketch(timeline)[0].parts()
        if span.letter in "FB"
    ]
    assert [one for one in told if one[0] == "F"] == [("F", i) for i in range(4)]
    assert [one for one in told if one[0] == "B"] == [("B", i) for i in range(4)]


def test_many_lanes_are_some_and_those_alike_are_one():
    b = ProgramBuilder()
    for lane in range(40):
        b.lane(f"gpu{lane}")
        b.add("a", lane, 1.0 + lane // 4, kind=Kind.FORWARD)
    program = b.build()
    rows = sketch(Timeline(program, np.zeros(40), program.duration))
    assert len(rows) == MOST_DEVICES
    assert [row.num_lanes for row in rows] == [4] * MOST_DEVICES
    assert (rows[0].name, rows[-1].name) == ("gpu0", "gpu36")


def test_nothing_is_drawn_of_nothing():
    program = ProgramBuilder().build()
    assert sketch(Timeline(program, np.zeros(0), np.zeros(0))) == ()


def test_a_plan_remembers_the_timelines_of_the_next_best_in_few_bytes():
    plan = planned().plan
    assert plan is not None
    others = plan.origin.alternatives
    assert len(others) > 2
    assert all(other.sketch for other in others)
    assert plan_from_json(json.loads(plan.to_json())) == plan
    text = json.dumps([[lane.spans for lane in other.sketch] for other in others])
    assert len(text) / len(others) < 5000


def test_a_file_without_sketches_is_read():
    plan = planned().plan
    assert plan is not None
    value = json.loads(plan.to_json())
    for other in value["origin"]["alternatives"]:
        del other["sketch"]
    assert all(not other.sketch for other in plan_from_json(value).origin.alternatives)


def test_a_broken_sketch_is_named_by_its_place():
    plan = planned().plan
    assert plan is not None
    value = json.loads(plan.to_json())
    value["origin"]["alternatives"][1]["sketch"][0]["spans"] = "F0:1"
    with pytest.raises(partita.InputError, match=r"add up to 1000") as caught:
        plan_from_json(value, "plan.json")
    assert "plan.json" in str(caught.value)


def test_a_sharding_remembers_what_it_was_chosen_from():
    plan = shard("alexnet", "2xA100", batch=8).plan
    assert plan is not None
    others = plan.origin.alternatives
    assert {"data", "fsdp"} <= {other.name for other in others}
    assert all(other.sketch and other.why for other in others)
    assert plan.origin.history


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
