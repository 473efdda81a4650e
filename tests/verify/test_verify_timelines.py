"""The verifier: true runs pass, and every kind of violation is caught and named."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import VerificationError
from partita.program import Kind, Program, ProgramBuilder
from partita.timeline import Timeline
from partita.verify import check_timeline, verify_program, verify_timeline
from partita.verify.timelines import MOST_LISTED

# Two microbatches through two stages, by hand:
#
#   gpu0   F0 F0 F1 F1  .  .  .  .
#   link    .  . S0  . S1  .  .  .
#   gpu1    .  .  . R0 F0 F0 R1 F1 F1
#
# F takes 2, S and R take 1; a forward on gpu0 holds 1 of 2 until it is sent.


def good_program() -> Program:
    b = ProgramBuilder(time_unit="")
    gpu0, link, gpu1 = b.lane("gpu0"), b.lane("link", "link"), b.lane("gpu1")
    memory = b.memory("gpu0", 2.0)
    for i in range(2):
        f = b.add("stage0", gpu0, 2, (), [(memory, 1.0, 0.0)], Kind.FORWARD, i)
        s = b.add("act", link, 1, [f], [(memory, 0.0, -1.0)], Kind.SEND, i)
        r = b.add("act", gpu1, 1, [s], (), Kind.RECEIVE, i)
        b.add("stage1", gpu1, 2, [(r, 0.0)], (), Kind.FORWARD, i)
        b.pair(s, r)
    return b.build()


STARTS = [0.0, 2.0, 3.0, 4.0, 2.0, 4.0, 6.0, 7.0]
F0, S0, R0, G0, F1, S1, R1, G1 = range(8)


def good_timeline(program: Program | None = None) -> Timeline:
    program = program or good_program()
    return Timeline(program, np.array(STARTS), np.array(STARTS) + program.duration)


def moved(**moments: float) -> Timeline:
    """The good timeline with some tasks at other moments, by the names above."""
    start = np.array(STARTS)
    for name, moment in moments.items():
        start[globals()[name]] = moment
    program = good_program()
    return Timeline(program, start, start + program.duration)


def changed(**columns: object) -> Program:
    return dataclasses.replace(good_program(), **columns)


def column(name: str, index: object, value: float) -> dict[str, np.ndarray]:
    values = getattr(good_program(), name).copy()
    values[index] = value
    return {name: values}


def test_a_true_run_passes():
    assert verify_timeline(good_program(), good_timeline()) == ()
    assert verify_program(good_program()) == ()
    check_timeline(good_program(), good_timeline())


def test_a_slow_run_is_still_true():
    late = Timeline(
        good_program(), np.array(STARTS) * 3, np.array(STARTS) * 3 + np.tile([2, 1, 1, 2], 2)
    )
    assert verify_timeline(good_program(), late) == ()


def test_nothing_runs_truly():
    nothing = ProgramBuilder().build()
    assert verify_timeline(nothing, Timeline(nothing, np.empty(0), np.empty(0))) == ()
    assert verify_program(nothing) == ()


# --- every violation ----------------------------------------------------------------------------


def test_a_task_before_time_began():
    assert verify_timeline(good_program(), moved(F0=-1.0)) == (
        "F0@stage0 starts at -1, before time 0",
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_task_without_a_time(value):
    start = np.array(STARTS)
    start[R1] = value
    timeline = Timeline(good_program(), start, np.array(STARTS) + good_program().duration)
    assert verify_timeline(good_program(), timeline) == (
        f"R1@act has no time: it starts at {value:g} and ends at 7",
    )


def test_an_end_that_is_not_the_duration_later():
    end = good_timeline().end.copy()
    end[G1] = 8.5
    assert verify_timeline(good_program(), Timeline(good_program(), np.array(STARTS), end)) == (
        "F1@stage1 runs from 7 to 8.5, which is not its duration of 2",
    )


def test_a_task_before_what_it_waits_for():
    assert verify_timeline(good_program(), moved(S0=1.5)) == (
        "S0@act starts at 1.5, before F0@stage0 has ended at 2",
    )


def test_a_task_before_its_delay_is_over():
    program = changed(**column("wait_delay", 2, 0.5))
    assert verify_timeline(program, good_timeline(program)) == (
        "F0@stage1 starts at 4, before R0@act has ended at 4 and 0.5 have passed",
    )


def test_two_tasks_on_one_lane():
    assert verify_timeline(good_program(), moved(F1=1.0)) == (
        "lane gpu0 runs F1@stage0 from 1 while F0@stage0 runs until 2",
    )


def test_a_short_task_does_not_hide_that_two_others_overlap():
    b = ProgramBuilder(time_unit="")
    a = b.lane("a")
    for name, duration in (("long", 10), ("point", 0), ("late", 1)):
        b.add(name, a, duration)
    start = np.array([0.0, 0.0, 5.0])
    timeline = Timeline(b.build(), start, start + b.build().duration)
    assert verify_timeline(b.build(), timeline) == (
        "lane a runs X@late from 5 while X@long runs until 10",
    )


def test_more_memory_than_there_is():
    program = changed(**column("effect_at_start", 2, 1.5))
    assert verify_timeline(program, good_timeline(program)) == (
        "memory gpu0 holds 2.5 of 2 from 2 on, when F1@stage0 takes 1.5",
    )


def test_memory_is_netted_per_instant():
    # F1 takes 1 at 2 while S0 still holds 1; were F0's given back at 2 exactly, 1 would do.
    tight = dataclasses.replace(
        good_program(),
        memories=(dataclasses.replace(good_program().memories[0], capacity=1.0),),
        effect_start=[0, 1, 1, 1, 1, 2, 2, 2, 2],
        effect_memory=[0, 0],
        effect_at_start=[1.0, 1.0],
        effect_at_end=[-1.0, -1.0],
    )
    assert verify_timeline(tight, good_timeline(tight)) == ()
    assert verify_timeline(tight, moved(F1=1.0))[-1] == (
        "memory gpu0 holds 2 of 1 from 1 on, when F1@stage0 takes 1"
    )


def test_a_receive_before_its_send():
    swapped = changed(pairs=[[S0, R1], [S1, R0]])
    assert verify_timeline(swapped, good_timeline(swapped)) == (
        "R0@act ends at 4, before its S1@act has ended at 5",
    )


def test_a_send_without_a_receive():
    program = changed(pairs=[[S0, R0]])
    assert verify_timeline(program, good_timeline(program)) == (
        "S1@act has 0 receives, and one is needed",
        "R1@act has 0 sends, and one is needed",
    )
    assert verify_program(program) == verify_timeline(program, good_timeline(program))


def test_a_send_with_two_receives():
    program = changed(pairs=[[S0, R0], [S0, R1]])
    assert "S0@act has 2 receives, and one is needed" in verify_timeline(
        program, good_timeline(program)
    )


def test_a_pair_that_is_no_message():
    program = changed(pairs=[[S0, R0], [S1, R1], [F0, G1]])
    assert verify_timeline(program, good_timeline(program)) == (
        "F0@stage0 is paired as a send but is none",
        "F1@stage1 is paired as a receive but is none",
    )


def test_a_microbatch_that_runs_twice_and_one_that_does_not():
    program = changed(**column("microbatch", F1, 0))
    assert verify_timeline(program, good_timeline(program)) == (
        "F0@stage0 runs 2 times, and once is needed",
    )
    program = changed(kind=[0, 6, 7, 0, 1, 6, 7, 0])  # gpu0 runs F of 0 and B of 1
    assert verify_timeline(program, good_timeline(program)) == (
        "F1@stage0 does not run, and once is needed",
        "B0@stage0 does not run, and once is needed",
    )


def test_tasks_of_no_microbatch_may_run_any_number_of_times():
    program = changed(microbatch=[-1] * 8)
    assert verify_timeline(program, good_timeline(program)) == ()


def test_a_timeline_of_another_program():
    one = ProgramBuilder()
    one.add("x", one.lane("a"), 1)
    timeline = Timeline(one.build(), np.zeros(1), np.ones(1))
    assert verify_timeline(good_program(), timeline) == ("the timeline has 1 tasks, the program 8",)


def backwards(*blocks):
    """Backwards of one block, one after the other: (kind, micro-batch)."""
    b = ProgramBuilder()
    lane = b.lane("a")
    for kind, microbatch in blocks:
        b.add("x", lane, 1.0, kind=kind, microbatch=microbatch)
    program = b.build()
    moments = np.arange(len(blocks) + 1.0)
    return verify_timeline(program, Timeline(program, moments[:-1], moments[1:]))


def test_the_backward_of_one_microbatch_may_be_taken_apart_and_that_of_another_not():
    whole, data, weights = Kind.BACKWARD, Kind.DGRAD, Kind.WGRAD
    assert backwards((whole, 0), (data, 1), (weights, 1)) == ()
    assert backwards((whole, 0), (data, 1), (weights, 1), (weights, 0)) == (
        "W0@x runs 2 times, and once is needed",
    )
    assert backwards((whole, 0), (data, 1)) == ()  # as of a stage without weights
    assert backwards((data, 0), (weights, 0), (data, 1)) == (
        "W1@x does not run, and once is needed",
    )


def test_violations_are_counted_where_they_are_many():
    b = ProgramBuilder()
    a = b.lane("a")
    for i in range(100):
        b.add("x", a, 1.0, kind=Kind.FORWARD, microbatch=i)
    program = b.build()
    violations = verify_timeline(program, Timeline(program, np.zeros(100), np.ones(100)))
    assert len(violations) == MOST_LISTED + 1
    assert violations[-1] == "and 79 more"
    with pytest.raises(VerificationError, match=r"not verified: lane a runs .* \(and 18 more\)"):
        check_timeline(program, Timeline(program, np.zeros(100), np.ones(100)))


def test_rounding_is_not_held_against_a_timeline():
    b = ProgramBuilder()
    a, c, m = b.lane("a"), b.lane("b"), b.memory("m", 1.0)
    x = b.add("x", a, 0.3, (), [(m, 1.0, -1.0)])
    b.add("y", c, 0.3, [x], [(m, 1.0, -1.0)])
    program = b.build()
    start = np.array([0.0, 0.1 + 0.2 - 1e-16])
    assert verify_timeline(program, Timeline(program, start, start + 0.3)) == ()
    start = np.array([0.0, 0.29999])
    assert len(verify_timeline(program, Timeline(program, start, start + 0.3))) == 2


# --- against plain definitions ------------------------------------------------------------------


@st.composite
def claims(draw):
    """Tasks on lanes at any moments, with memory; whole numbers, so that moments meet."""
    b = ProgramBuilder(time_unit="")
    lanes = [b.lane(f"lane{i}") for i in range(2)]
    memories = [b.memory(f"m{i}", float(draw(st.integers(0, 4)))) for i in range(2)]
    starts = []
    for i in range(draw(st.integers(1, 6))):
        effect = st.tuples(st.sampled_from(memories), st.integers(-2, 3), st.integers(-2, 2))
        on = draw(st.sets(st.sampled_from(lanes), min_size=1))
        waits = [
            (j, float(draw(st.integers(0, 2)))) for j in range(i) if draw(st.integers(0, 5)) == 0
        ]
        effects = draw(st.lists(effect, max_size=2))
        b.add(f"t{i}", sorted(on), draw(st.integers(0, 3)), waits, effects)
        starts.append(float(draw(st.integers(0, 8))))
    program = b.build()
    return Timeline(program, np.array(starts), np.array(starts) + program.duration)


def overlaps(timeline: Timeline, i: int, j: int) -> bool:
    """Do two tasks on a common lane run at once? A point inside another task does."""
    program, start, end = timeline.program, timeline.start, timeline.end
    if not set(program.lanes_of(i)) & set(program.lanes_of(j)):
        return False
    if start[i] == end[i] or start[j] == end[j]:
        return bool(start[i] < start[j] < end[i] or start[j] < start[i] < end[j])
    return bool(start[i] < end[j] and start[j] < end[i])


def overflows(timeline: Timeline, memory: int) -> bool:
    _, held = timeline.memory_steps(memory)
    return bool(held.max() > timeline.program.memories[memory].capacity)


@settings(max_examples=200)
@given(claims())
def test_a_claim_passes_exactly_if_every_rule_holds(timeline):
    program = timeline.program
    tasks = range(program.num_tasks)
    violations = verify_timeline(program, timeline)
    broken_waits = sum(
        timeline.start[i] < timeline.end[j] + delay
        for i in tasks
        for j, delay in program.waits_of(i)
    )
    assert sum("before" in line for line in violations) == broken_waits
    assert any(line.startswith("lane") for line in violations) == any(
        overlaps(timeline, i, j) for i in tasks for j in tasks if i < j
    )
    full = sum(overflows(timeline, m) for m in range(len(program.memories)))
    assert sum(line.startswith("memory") for line in violations) == full


# --- programs that cannot run -------------------------------------------------------------------


def test_both_sides_sending_first_is_a_deadlock_between_real_machines():
    b = ProgramBuilder()
    gpu0, gpu1 = b.lane("gpu0"), b.lane("gpu1")
    there = b.add("there", gpu0, 1, kind=Kind.SEND, microbatch=0)
    back_received = b.add("back", gpu0, 1, [2], kind=Kind.RECEIVE, microbatch=0)
    back = b.add("back", gpu1, 1, kind=Kind.SEND, microbatch=0)
    there_received = b.add("there", gpu1, 1, [there], kind=Kind.RECEIVE, microbatch=0)
    b.pair(there, there_received)
    b.pair(back, back_received)
    assert verify_program(b.build()) == (
        "deadlock: R0@there comes after S0@back on lane gpu1 (S0@back meets R0@back), "
        "R0@back comes after S0@there on lane gpu0 (S0@there meets R0@there)",
    )
    b.order = [there, back_received, there_received, back]  # gpu1 receives first
    assert verify_program(b.build()) == ()


def test_a_cycle_of_waits_and_lane_order_is_named():
    b = ProgramBuilder()
    gpu0, gpu1 = b.lane("gpu0"), b.lane("gpu1")
    b.add("a", gpu0, 1, [3])
    b.add("b", gpu0, 1)
    b.add("c", gpu1, 1, [1])
    b.add("d", gpu1, 1)
    assert verify_program(b.build()) == (
        "deadlock: X@a waits for X@d, X@d comes after X@c on lane gpu1, X@c waits for X@b, "
        "X@b comes after X@a on lane gpu0",
    )


def test_waiting_for_a_later_task_is_fine_where_no_cycle_closes():
    b = ProgramBuilder()
    gpu0, gpu1 = b.lane("gpu0"), b.lane("gpu1")
    b.add("a", gpu0, 1, [2])
    b.add("b", gpu0, 1)
    b.add("c", gpu1, 1)
    assert verify_program(b.build()) == ()


@given(data=st.data())
def test_a_program_can_run_exactly_if_some_order_of_all_its_tasks_does(data):
    b = ProgramBuilder()
    lanes = [b.lane("a"), b.lane("b")]
    size = data.draw(st.integers(1, 6))
    for i in range(size):
        others = [j for j in range(size) if j != i]
        waits = data.draw(st.lists(st.sampled_from(others), max_size=2)) if others else []
        b.add(f"t{i}", data.draw(st.sampled_from(lanes)), 1, waits)
    b.order = data.draw(st.permutations(range(size)))
    program = b.build()
    done: list[int] = []
    while True:  # run what has all it waits for, and all before it on its lane, behind it
        ready = [
            i
            for place, i in enumerate(b.order)
            if i not in done
            and {j for j, _ in program.waits_of(i)} <= set(done)
            and {j for j in b.order[:place] if program.lanes_of(j) == program.lanes_of(i)}
            <= set(done)
        ]
        if not ready:
            break
        done += ready
    assert (verify_program(program) == ()) == (len(done) == size)
