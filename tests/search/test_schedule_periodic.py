"""The periodic search proves the least period, and unrolls it for any number of micro-batches."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_schedule_search import problems

from partita.problems.schedule import ScheduleBlock, ScheduleProblem, blocks_per_device, check, read
from partita.schedules.shapes import SHAPES, shape
from partita.search.base import Run, Status, Stop
from partita.search.schedule.brute import BruteSchedule
from partita.search.schedule.cyclic import Repetition
from partita.search.schedule.grid import balanced, memory_on_grid, on_grid
from partita.search.schedule.line import LineProblem, line_of
from partita.search.schedule.pattern import Pattern
from partita.search.schedule.period_search import PeriodSearch
from partita.search.schedule.periodic import Periodic
from partita.search.schedule.solver import Allowance, SolverOutcome

DATA = Path(__file__).parent.parent / "data" / "schedule"
ORACLE = Stop(time_s=10)
PROVEN = [  # file, cap, least period with one micro-batch per repetition
    ("vshape.train.nd4", 2, 8),
    ("vshape.train.nd4", 4, 4),
    ("kshape.train.nd4", 2, 8),
    ("mshape.train.nd4", 4, 7),
    ("mshape.train.nd4", 6, 6),
    ("nnshape.train.nd4", 5, 9),
    ("xshape.train.nd4", 3, 9),
]


@pytest.mark.parametrize(("name", "cap", "period"), PROVEN)
def test_recorded_periods_are_found_and_shorter_ones_ruled_out(name, cap, period):
    problem = read(DATA / f"{name}.json", memory=cap)
    run = Run(Stop(time_s=30), "test", 0)
    known = PeriodSearch(problem, run, 1, lambda pattern: None)
    known.try_first_fit()
    known.go_on(1, 16.0, Allowance())
    assert known.period == period
    assert known.done()
    result = Periodic(max_unroll=1)(problem, Stop(time_s=30))
    assert result.objective == period
    assert check(problem, result.solution) == ()


def test_several_micro_batches_per_repetition_beat_one_where_memory_is_tight():
    problem = read(DATA / "vshape.train.nd4.json", memory=3)
    result = Periodic(max_unroll=3)(problem, Stop(time_s=30))
    assert result.objective == pytest.approx(16 / 3)


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_a_pattern_is_unrolled_for_any_number(count):
    problem = read(DATA / "mshape.train.nd4.json", memory=6, num_microbatches=count)
    result = Periodic()(problem, Stop(time_s=5))
    assert check(problem, result.solution) == ()
    assert result.lower_bound <= result.objective
    assert result.objective <= 18 * count


def test_a_cap_that_cannot_work_is_infeasible():
    problem = read(DATA / "kshape.train.nd4.json", memory=1)
    assert Periodic()(problem).status is Status.INFEASIBLE


@settings(max_examples=40, deadline=None)
@given(problem=problems(most_blocks=3, counts=st.none(), usual=True))
def test_one_and_two_micro_batches_per_repetition_meet_brute_force(problem):
    one, two = (
        BruteSchedule()(problem),
        BruteSchedule(microbatches_per_repetition=2)(problem, ORACLE),
    )
    result = Periodic(max_unroll=2)(problem)
    if one.objective is None:
        assert result.status is Status.INFEASIBLE
        return
    assume(two.objective is not None)  # else trying everything would take minutes
    assert result.objective == pytest.approx(min(one.objective, two.objective), rel=1e-9)
    assert result.lower_bound <= two.objective * (1 + 1e-9)
    assert check(problem, result.solution) == ()


@settings(max_examples=20, deadline=None)
@given(
    problem=problems(
        most_blocks=6,
        counts=st.none() | st.integers(1, 12),
        spans=st.sampled_from([0.1, 0.7, 1 / 3, 2.5]),
    )
)
def test_its_effort_is_bounded_without_a_time_limit(problem):
    settings_ = Periodic(effort=0.5, unroll_effort=0.5, ends_effort=0.5)
    begin = time.process_time()
    result = settings_(problem)
    assert time.process_time() - begin < 20  # a few tenths, on an idle machine
    if result.solution is not None:
        assert check(problem, result.solution) == ()


def test_an_allowance_is_spent_by_what_the_solver_did():
    problem = read(DATA / "xshape.train.nd4.json", memory=3)
    run, allowance = Run(Stop(), "test", 0), Allowance(1.0)
    known = PeriodSearch(problem, run, 1, lambda pattern: None)
    known.go_on(1, 0.5, allowance)
    assert 0 < allowance.left < 1
    asked = run.evaluations
    known.go_on(1, 0.5, Allowance(0))
    assert run.evaluations == asked


def test_times_that_floats_round_are_still_on_the_grid():
    one = ScheduleProblem(
        2, (ScheduleBlock(0.7, (0,)),), num_microbatches=4
    )  # 3 * 0.7 is below 2.1
    result = Periodic()(one)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(2.8)


@st.composite
def chains_along_a_line(draw: st.DrawFn) -> ScheduleProblem:
    """One or two walks along up to three devices, in which steps on all devices may come."""
    devices = draw(st.integers(1, 3))
    blocks: list[ScheduleBlock] = []
    deps: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, 2))):
        first, at = len(blocks), draw(st.integers(0, devices - 1))
        for _ in range(draw(st.integers(1, 5))):
            at = min(max(at + draw(st.integers(-1, 1)), 0), devices - 1)
            common = draw(st.integers(0, 4)) == 0
            on = tuple(range(devices)) if common else (at,)
            blocks.append(ScheduleBlock(draw(st.integers(1, 3)), on, 0, f"b{len(blocks)}"))
        deps += [(block, block + 1) for block in range(first, len(blocks) - 1)]
        for taker in range(first, len(blocks)):
            givers = [b for b in range(taker + 1, len(blocks)) if blocks[b].memory == 0]
            givers = [b for b in givers if blocks[b].devices == blocks[taker].devices]
            if givers and blocks[taker].memory == 0:
                amount, giver = draw(st.integers(0, 2)), draw(st.sampled_from(givers))
                blocks[taker] = replace(blocks[taker], memory=amount)
                blocks[giver] = replace(blocks[giver], memory=-amount)
    delays = tuple(draw(st.integers(0, 2)) for _ in deps) if draw(st.booleans()) else ()
    caps = draw(st.tuples(*[st.integers(1, 4)] * devices))
    return ScheduleProblem(devices, tuple(blocks), tuple(deps), delays, caps)


def line_and_memory(problem: ScheduleProblem) -> tuple[LineProblem | None, list]:
    grid, memory = on_grid(problem), balanced(problem, memory_on_grid(problem))
    return line_of(problem, grid, memory), memory


@settings(max_examples=60, deadline=None)
@given(problem=chains_along_a_line(), more=st.integers(0, 3))
def test_along_a_line_of_devices_the_answer_is_that_of_the_solver(problem, more):
    line, memory = line_and_memory(problem)
    if line is None:  # more than two numbers at a cut
        return
    grid, here = on_grid(problem), blocks_per_device(problem)
    work = max(sum(grid.spans[block] for block in blocks) for blocks in here)
    length, run = work + more, Run(Stop(), "test", 0)
    if line.effort(length) > 0.5:
        return
    solver_answer = line.decide(length, run)
    asked = Repetition(problem, grid, memory, 1, length).decide(run)
    assert (solver_answer.outcome is SolverOutcome.SOLVED) == (
        asked.outcome is SolverOutcome.SOLVED
    )
    assert (solver_answer.outcome is SolverOutcome.INFEASIBLE) == (
        asked.outcome is SolverOutcome.INFEASIBLE
    )
    if solver_answer.values is not None:
        starts = tuple(grid.time(steps) for steps in solver_answer.values)
        pattern = Pattern((starts,), grid.time(length))
        assert check(problem, pattern.solution(problem)) == ()


def test_all_shapes_but_rings_and_branches_are_lines():
    lines = {name for name in SHAPES if line_and_memory(shape(name, 6).problem(6, None))[0]}
    assert lines == SHAPES.keys() - {"kshape", "alphafold", "looped"}


@pytest.mark.parametrize(
    ("name", "devices", "cap", "period"),
    [("mshape", 16, 15, 10), ("wave", 4, 4, 13), ("interlace_mlm", 4, 6, 12), ("xshape", 4, 3, 9)],
)
def test_the_least_period_is_found_along_a_line_and_the_one_before_ruled_out(
    name, devices, cap, period
):
    line, _ = line_and_memory(shape(name, devices).problem(cap, None))
    assert line is not None
    assert line.decide(period - 1, Run(Stop(), "test", 0)).outcome is SolverOutcome.INFEASIBLE
    assert line.decide(period, Run(Stop(), "test", 0)).outcome is SolverOutcome.SOLVED


def test_a_line_ends_without_an_answer_when_time_is_up():
    line, _ = line_and_memory(shape("xshape", 16).problem(8, None))
    assert line is not None
    begin = time.monotonic()
    solver_answer = line.decide(13, Run(Stop(time_s=0.2), "test", 0))
    assert solver_answer.outcome is SolverOutcome.UNKNOWN
    assert time.monotonic() - begin < 5  # 17 s without a limit
