"""The periodic search proves the least period, and unrolls it for any number of micro-batches."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule_search import problems

from partita.problems.schedule import Block, ScheduleProblem, check, read
from partita.search.base import Run, Status, Stop
from partita.search.schedule.brute import Brute
from partita.search.schedule.period_search import PeriodSearch
from partita.search.schedule.periodic import Periodic
from partita.search.schedule.solver import Allowance

DATA = Path(__file__).parent.parent / "data" / "schedule"
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
    found = Periodic(max_unroll=1)(problem, Stop(time_s=30))
    assert found.objective == period
    assert check(problem, found.solution) == ()


def test_several_micro_batches_per_repetition_beat_one_where_memory_is_tight():
    problem = read(DATA / "vshape.train.nd4.json", memory=3)
    found = Periodic(max_unroll=3)(problem, Stop(time_s=30))
    assert found.objective == pytest.approx(16 / 3)


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_a_pattern_is_unrolled_for_any_number(count):
    problem = read(DATA / "mshape.train.nd4.json", memory=6, num_microbatches=count)
    found = Periodic()(problem, Stop(time_s=5))
    assert check(problem, found.solution) == ()
    assert found.lower_bound <= found.objective
    assert found.objective <= 18 * count


def test_a_cap_that_cannot_work_is_infeasible():
    problem = read(DATA / "kshape.train.nd4.json", memory=1)
    assert Periodic()(problem).status is Status.INFEASIBLE


@settings(max_examples=40, deadline=None)
@given(problem=problems(most_blocks=3, counts=st.none(), usual=True))
def test_one_and_two_micro_batches_per_repetition_meet_brute_force(problem):
    one, two = Brute()(problem), Brute(microbatches_per_repetition=2)(problem)
    found = Periodic(max_unroll=2)(problem)
    if one.objective is None:
        assert found.status is Status.INFEASIBLE
        return
    assert found.objective == pytest.approx(min(one.objective, two.objective), rel=1e-9)
    assert found.lower_bound <= two.objective * (1 + 1e-9)
    assert check(problem, found.solution) == ()


@settings(max_examples=30, deadline=None)
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
    found = settings_(problem)
    assert time.process_time() - begin < 20  # a few tenths, on an idle machine
    if found.solution is not None:
        assert check(problem, found.solution) == ()


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
    one = ScheduleProblem(2, (Block(0.7, (0,)),), num_microbatches=4)  # 3 * 0.7 is below 2.1
    found = Periodic()(one)
    assert found.status is Status.OPTIMAL
    assert found.objective == pytest.approx(2.8)
