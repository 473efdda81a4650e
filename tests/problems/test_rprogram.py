"""rPrograms: the fewest waits, both ways through text, and every unsafe one refused by name."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import ProblemError
from partita.problems.rprogram import (
    ALL,
    Instruction,
    RProgram,
    check_rprogram,
    parse_rprogram,
    rprogram,
)
from partita.problems.rtasks import (
    ROperator,
    RtasksProblem,
    RtasksSolution,
    TileEdge,
    Tiling,
    VDevice,
)
from partita.search.rtasks import SEARCHES


def operators(*tiles: int) -> tuple[ROperator, ...]:
    return tuple(ROperator("abcdef"[i], (Tiling(n, 1.0),)) for i, n in enumerate(tiles))


PAIR = RtasksProblem(VDevice(2), operators(2, 2), (TileEdge(0, 1),))
SPREAD = RtasksSolution((0, 0), (((0, 0), (1, 0)), ((0, 1), (1, 1))))


def test_a_whole_operator_is_waited_for_once_and_each_tile_signalled():
    assert str(rprogram(PAIR, SPREAD)).splitlines() == [
        "veu 0", "  run a:0", "  signal a:0", "  wait a", "  run b:0",
        "veu 1", "  run a:1", "  signal a:1", "  wait a", "  run b:1",
    ]  # fmt: skip


def test_within_one_queue_nothing_is_said():
    alone = RtasksSolution((0, 0), (((0, 0), (0, 1), (1, 0), (1, 1)),))
    assert {step.action for step in rprogram(PAIR, alone).veus[0]} == {"run"}


def test_aligned_tiles_wait_for_their_own_part_only():
    problem = replace(PAIR, edges=(TileEdge(0, 1, aligned=True),))
    crossed = RtasksSolution((0, 0), (((0, 0), (1, 1)), ((0, 1), (1, 0))))
    assert "  wait a:1" in str(rprogram(problem, crossed)).splitlines()
    straight = rprogram(problem, SPREAD)
    assert {step.action for veu in straight.veus for step in veu} == {"run"}


@st.composite
def problems(draw: st.DrawFn) -> RtasksProblem:
    count = draw(st.integers(1, 6))
    return RtasksProblem(
        VDevice(draw(st.integers(1, 4)), signal_us=0.5),
        operators(*(draw(st.integers(1, 5)) for _ in range(count))),
        tuple(
            TileEdge(src, dst, draw(st.booleans()))
            for dst in range(count)
            for src in range(dst)
            if draw(st.integers(0, 2)) == 0
        ),
    )


@settings(deadline=None)
@given(problems(), st.sampled_from(["list", "wavefront", "search"]))
def test_programs_of_schedules_are_safe_and_go_both_ways_through_text(problem, method):
    solution = SEARCHES[method](problem).solution
    program = rprogram(problem, solution)
    assert check_rprogram(problem, program, len(program.veus)) == ()
    assert parse_rprogram(str(program), problem, program.num_tiles) == program


@settings(deadline=None)
@given(problems(), st.data())
def test_no_wait_can_be_left_out(problem, data):
    program = rprogram(problem, SEARCHES["list"](problem).solution)
    places = [
        (veu, at)
        for veu, steps in enumerate(program.veus)
        for at, step in enumerate(steps)
        if step.action == "wait"
    ]
    if places:
        veu, at = data.draw(st.sampled_from(places))
        assert check_rprogram(problem, without(program, veu, at), len(program.veus))


@settings(deadline=None)
@given(problems(), st.data())
def test_no_signal_can_be_left_out(problem, data):
    program = rprogram(problem, SEARCHES["list"](problem).solution)
    places = [
        (veu, at)
        for veu, steps in enumerate(program.veus)
        for at, step in enumerate(steps)
        if step.action == "signal"
    ]
    if places:
        veu, at = data.draw(st.sampled_from(places))
        (first, *_) = check_rprogram(problem, without(program, veu, at), len(program.veus))
        assert "waits for ever" in first


def without(program: RProgram, veu: int, at: int) -> RProgram:
    steps = program.veus[veu][:at] + program.veus[veu][at + 1 :]
    return replace(program, veus=(*program.veus[:veu], steps, *program.veus[veu + 1 :]))


def changed(veu: int, *steps: Instruction) -> RProgram:
    program = rprogram(PAIR, SPREAD)
    return replace(program, veus=(*program.veus[:veu], steps, *program.veus[veu + 1 :]))


RUN, SIGNAL, WAIT = (lambda o, t, a=a: Instruction(a, o, t) for a in ("run", "signal", "wait"))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (changed(0, RUN(0, 0), WAIT(0, ALL), RUN(1, 0)), "waits for ever at 'wait a'"),
        (changed(0, RUN(0, 0), SIGNAL(0, 0), RUN(1, 0)), "needs tile 1 of 'a' and does not wait"),
        (changed(0, SIGNAL(0, 0), RUN(0, 0), WAIT(0, ALL), RUN(1, 0)), "before it has run there"),
        (changed(0, RUN(0, 0), SIGNAL(0, 0), SIGNAL(0, 0), WAIT(0, ALL), RUN(1, 0)), "second time"),
        (changed(0, RUN(0, 0), SIGNAL(0, 0), WAIT(0, ALL), RUN(1, 0), RUN(1, 0)), "second time"),
        (changed(0, RUN(0, 0), SIGNAL(0, 0)), "tile 0 of 'b' never runs"),
        (changed(0, RUN(0, 9), SIGNAL(0, 0)), "names no tile"),
        (changed(0, Instruction("jump", 0, 0)), "names nothing"),
    ],
)
def test_an_unsafe_program_is_refused_by_name(program, said):
    assert said in " ".join(check_rprogram(PAIR, program, 2))


def test_a_grid_larger_than_what_is_resident_is_refused_with_numbers():
    (said,) = check_rprogram(PAIR, rprogram(PAIR, SPREAD), 1)
    assert "2 programs, but only 1 are resident" in said


def test_queues_that_wait_for_each_other_are_refused():
    problem = RtasksProblem(VDevice(2), operators(1, 1, 1, 1), (TileEdge(0, 3), TileEdge(1, 2)))
    crossed = RtasksSolution((0, 0, 0, 0), (((3, 0), (1, 0)), ((2, 0), (0, 0))))
    said = check_rprogram(problem, rprogram(problem, crossed), 2)
    assert said == ("veu 0 waits for ever at 'wait a'", "veu 1 waits for ever at 'wait b'")


@pytest.mark.parametrize("text", ["run a:0", "veu 0\n  leap a:0", "veu 0\n  run z:0", "veu 0\n  "])
def test_text_that_is_no_program_is_refused(text):
    with pytest.raises(ProblemError, match="no instruction"):
        parse_rprogram(text, PAIR, (2, 2))
