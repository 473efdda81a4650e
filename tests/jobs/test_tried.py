"""What was tried is remembered as sketches: small, and true to the timelines they are of."""

import functools
import json

import numpy as np
import pytest

import partita
from partita.jobs.shard import shard
from partita.jobs.simulate import MOST_DEVICES, simulate, sketch
from partita.plans import plan_from_json
from partita.program import Kind, ProgramBuilder
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
