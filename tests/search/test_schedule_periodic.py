"""The periodic search proves the least period, and unrolls it for any number of micro-batches."""

from pathlib import Path

import pytest

from partita.problems.schedule import check, read
from partita.search.base import Run, Status, Stop
from partita.search.schedule.period_search import PeriodSearch
from partita.search.schedule.periodic import Periodic

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
    known.go_on(1, 16.0)
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
