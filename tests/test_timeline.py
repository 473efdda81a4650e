"""Timelines: what follows from starts and ends.

A lane in thousandths of a step, as text that goes both ways.
"""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import InputError, PlanError, ProgramError
from partita.program import Kind, Program, ProgramBuilder
from partita.timeline import WHOLE, LaneSketch, Span, Timeline, read_timeline


def two_lanes() -> Timeline:
    """Drawn: lane a runs x 0-2 and z 5-6, lane b runs y 3-5; y waits for x, 1 later; z for y."""
    b = ProgramBuilder(time_unit="")
    a, c, m = b.lane("a"), b.lane("b"), b.memory("m", 10.0)
    x = b.add("x", a, 2, (), [(m, 3.0, 0.0)], Kind.FORWARD, 0)
    y = b.add("y", c, 2, [(x, 1.0)], [(m, 4.0, -4.0)], Kind.FORWARD, 0)
    b.add("z", a, 1, [y], [(m, 2.0, -5.0)], Kind.BACKWARD, 0)
    return Timeline(b.build(), np.array([0.0, 3.0, 5.0]), np.array([2.0, 5.0, 6.0]))


def test_the_makespan_is_the_last_end():
    assert two_lanes().makespan == 6.0


def test_lanes_are_busy_while_tasks_run():
    assert two_lanes().busy().tolist() == [3.0, 2.0]
    assert two_lanes().utilisation().tolist() == [0.5, 1 / 3]


def test_tasks_of_a_lane_come_in_the_order_they_run():
    assert two_lanes().lane_tasks(0).tolist() == [0, 2]


def test_nothing_takes_no_time():
    empty = Timeline(ProgramBuilder().build(), np.empty(0), np.empty(0))
    assert empty.makespan == 0.0
    assert empty.critical_path() == ()
    assert empty.busy().tolist() == []
    assert empty.peaks().tolist() == []
    assert str(empty) == "timeline of 0 tasks over 0 s"


def test_what_is_given_back_and_taken_at_one_instant_is_netted():
    # At 5, y gives back 4 and z takes 2: never 3 + 4 + 2.
    times, held = two_lanes().memory_steps(0)
    assert times.tolist() == [0.0, 3.0, 5.0, 6.0]
    assert held.tolist() == [3.0, 7.0, 5.0, 0.0]
    assert two_lanes().peaks().tolist() == [7.0]


def test_an_untouched_memory_holds_nothing():
    b = ProgramBuilder()
    b.memory("m")
    steps = Timeline(b.build(), np.empty(0), np.empty(0)).memory_steps(0)
    assert [part.tolist() for part in steps] == [[0.0], [0.0]]


def test_columns_of_memory_show_the_most_held_in_each():
    assert two_lanes().memory_columns(0, 6).tolist() == [3, 3, 3, 7, 7, 5]
    assert two_lanes().memory_columns(0, 2).tolist() == [3, 7]


def test_the_critical_path_goes_back_through_waits_and_their_delays():
    assert two_lanes().critical_path() == (0, 1, 2)


def test_the_critical_path_goes_back_along_a_lane():
    b = ProgramBuilder()
    a, c = b.lane("a"), b.lane("b")
    for lane, duration in ((a, 1), (a, 2), (c, 1), (a, 3)):
        b.add(f"on{lane}", lane, duration)
    timeline = Timeline(b.build(), np.array([0.0, 1, 0, 3]), np.array([1.0, 3, 1, 6]))
    assert timeline.critical_path() == (0, 1, 3)


def test_the_critical_path_ends_at_a_gap_nobody_caused():
    b = ProgramBuilder()
    a = b.lane("a")
    first = b.add("x", a, 1)
    b.add("y", a, 1, [first])
    assert Timeline(b.build(), np.array([0.0, 5.0]), np.array([1.0, 6.0])).critical_path() == (1,)


def test_tasks_of_no_length_that_point_at_each_other_do_not_trap_the_walk():
    b = ProgramBuilder()
    a = b.lane("a")
    b.add("x", a, 0, [1])
    b.add("y", a, 0)
    path = Timeline(b.build(), np.array([2.0, 2.0]), np.array([2.0, 2.0])).critical_path()
    assert sorted(path) == [0, 1]


# --- against plain sums -------------------------------------------------------------------------


@st.composite
def timelines(draw):
    """Any starts and durations: a timeline is only a claim."""
    b = ProgramBuilder(time_unit="")
    lanes = [b.lane(f"lane{i}") for i in range(draw(st.integers(1, 3)))]
    memories = [b.memory(f"m{i}") for i in range(draw(st.integers(1, 3)))]
    starts = []
    for i in range(draw(st.integers(1, 8))):
        effect = st.tuples(st.sampled_from(memories), st.integers(-3, 3), st.integers(-3, 3))
        b.add(
            f"t{i}",
            sorted(draw(st.sets(st.sampled_from(lanes), min_size=1))),
            draw(st.integers(0, 5)),
            (),
            draw(st.lists(effect, max_size=3)),
            draw(st.sampled_from(Kind)),
        )
        starts.append(float(draw(st.integers(0, 10))))
    program = b.build()
    return Timeline(program, np.array(starts), np.array(starts) + program.duration)


def held_at(timeline: Timeline, memory: int, moment: float) -> float:
    """What is held right after a moment, summed task by task."""
    program, total = timeline.program, 0.0
    for i in range(program.num_tasks):
        for e in range(program.effect_start[i], program.effect_start[i + 1]):
            if program.effect_memory[e] == memory:
                total += program.effect_at_start[e] * (timeline.start[i] <= moment)
                total += program.effect_at_end[e] * (timeline.end[i] <= moment)
    return total


@given(timelines())
def test_memory_is_what_was_taken_less_what_was_given_back(timeline):
    for memory in range(len(timeline.program.memories)):
        times, held = timeline.memory_steps(memory)
        assert times[0] == 0.0
        assert (np.diff(times) > 0).all()
        assert held.tolist() == [held_at(timeline, memory, moment) for moment in times.tolist()]
        moments = {*timeline.start.tolist(), *timeline.end.tolist()}
        peak = max(0.0, *(held_at(timeline, memory, moment) for moment in sorted(moments)))
        assert timeline.peaks()[memory] == peak


@given(timelines(), st.integers(1, 20))
def test_shares_of_a_lane_that_does_one_thing_at_a_time_add_up(timeline, num_columns):
    program = timeline.program
    shares = timeline.shares(num_columns, range(len(program.lanes)))
    assert shares.shape == (len(program.lanes), num_columns, len(Kind))
    for lane in range(len(program.lanes)):
        tasks = timeline.lane_tasks(lane)
        if (timeline.start[tasks][1:] < timeline.end[tasks][:-1]).any():
            continue  # it claims to run two at once
        for kind in Kind:
            spent = program.duration[tasks[program.kind[tasks] == kind]].sum()
            column = timeline.makespan / num_columns
            assert shares[lane, :, kind].sum() * column == pytest.approx(spent)


# --- files and refusals -------------------------------------------------------------------------


@given(timelines())
def test_a_timeline_is_the_same_after_a_file(timeline):
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_a_timeline_is_read_from_disk(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(two_lanes().to_json())
    assert read_timeline(path) == two_lanes()
    path.write_text(json.dumps({**two_lanes().to_plain(), "end": [1.0]}))
    with pytest.raises(ProgramError, match=r"t.json: end: has shape \(1,\) for 3 tasks; one time"):
        read_timeline(path)


def test_times_cannot_be_written_and_are_not_shared():
    start = np.array([0.0])
    b = ProgramBuilder()
    b.add("x", b.lane("a"), 1)
    timeline = Timeline(b.build(), start, start + 1)
    start[0] = 7
    assert timeline.start[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        timeline.start[0] = 1


def test_what_is_no_list_of_times_is_refused():
    program = ProgramBuilder().build()
    with pytest.raises(ProgramError, match="start: cannot be read as times"):
        Timeline(program, "soon", [])  # type: ignore[arg-type]


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@given(field=st.sampled_from(["format", "program", "start", "end"]), value=JUNK)
def test_any_value_in_any_field_is_read_or_refused(field, value):
    data = json.dumps({**two_lanes().to_plain(), field: value}).encode()
    try:
        timeline = Timeline.from_json(data, "t.json")
    except InputError as refusal:
        assert str(refusal).startswith("t.json: ")
    else:
        assert isinstance(timeline.program, Program)


@st.composite
def spans(draw):
    cuts = sorted(draw(st.sets(st.integers(1, WHOLE - 1), max_size=12)))
    borders = [0, *cuts, WHOLE]
    kinds = st.tuples(st.sampled_from("FBDWUCSRX"), st.integers(-1, 10**9 - 1))
    return [
        Span(begin, end, *draw(st.one_of(st.just(("", -1)), kinds)))
        for begin, end in itertools.pairwise(borders)
    ]


@given(spans())
def test_spans_are_read_as_they_were_written(lane):
    assert list(LaneSketch("gpu", " ".join(map(str, lane))).parts()) == lane


@pytest.mark.parametrize("text", [
    "", "F0:999", "F0:1001", "F0:500 B0:501", "Q0:1000", "F0", "-3:1000", "F-1:1000", "F0:10000",
    "<b>:1000", "F0:1000,", "F٣:1000",
])  # fmt: skip
def test_what_tells_no_lane_is_refused_with_how_to_write_it(text):
    with pytest.raises(PlanError, match=r"write spans like F0:12 -:3 that add up to 1000"):
        LaneSketch("gpu", text)


def test_a_sketch_of_no_lane_is_refused():
    with pytest.raises(PlanError, match="does not tell"):
        LaneSketch("gpu", "-:1000", 0)
