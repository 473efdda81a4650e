"""Searches for the least makespan: all blocks at once, windows, published orders, all in turn."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule_search import problems

from partita.problems.schedule import ScheduleBlock, ScheduleProblem, check, read
from partita.schedules.shapes import ShapeOptions, shape
from partita.search.base import Run, Status, Stop
from partita.search.schedule.at_once import AtOnce
from partita.search.schedule.auto import AutoSchedule
from partita.search.schedule.bounds import objective_bound
from partita.search.schedule.brute import BruteSchedule
from partita.search.schedule.exact_makespan import ExactMakespan
from partita.search.schedule.greedy import GreedySchedule
from partita.search.schedule.periodic import Periodic
from partita.search.schedule.published import longest_span, offer_published, published
from partita.search.schedule.solver import Allowance
from partita.search.schedule.tessel import Tessel
from partita.search.schedule.windows import Windows

DATA = Path(__file__).parent.parent / "data" / "schedule"
SPLIT = ShapeOptions(backward_span=1, weight_span=1)


def run_from_greedy(problem, stop=Stop()):  # noqa: B008
    run = Run(stop, "test", 0)
    run.bound(objective_bound(problem))
    result = GreedySchedule()(problem)
    run.offer(result.solution, result.objective)
    return run


class TestExactMakespan:
    @settings(max_examples=60, deadline=None)
    @given(problem=problems(most_blocks=4, counts=st.integers(1, 3)))
    def test_it_proves_what_brute_force_finds(self, problem):
        expected = BruteSchedule()(problem, Stop(time_s=5))
        if expected.status not in (Status.OPTIMAL, Status.INFEASIBLE):
            return
        result = ExactMakespan()(problem)
        assert result.status is expected.status
        assert result.objective == expected.objective

    @pytest.mark.parametrize(("cap", "makespan"), [(4, 59), (8, 51)])
    def test_two_chunks_there_and_back_are_proven(self, cap, makespan):
        problem = shape("wave", 4, SPLIT).problem(cap, 8)
        result = ExactMakespan()(problem)
        assert result.status is Status.OPTIMAL
        assert result.objective == makespan

    def test_memory_that_no_order_fits_is_infeasible(self):
        # Each needs room that only the other one makes; delays keep them apart.
        blocks = (ScheduleBlock(1, (0,), 1), ScheduleBlock(1, (0,), 1), ScheduleBlock(1, (0,), -2))
        problem = ScheduleProblem(1, blocks, ((0, 1), (1, 2)), (), (1,), 2)
        assert ExactMakespan()(problem).status is Status.INFEASIBLE

    def test_too_many_fall_back_on_a_repetition_and_say_the_gap(self):
        problem = read(DATA / "mshape.train.nd4.json", memory=4, num_microbatches=80)
        quick = Periodic(effort=0.5, unroll_effort=0.1, ends_effort=0.5)
        result = ExactMakespan(most_tasks=500, otherwise=quick)(problem)
        assert result.solution.period == 7
        assert 0 <= result.gap < 0.02
        assert check(problem, result.solution) == ()


class TestWindows:
    def test_a_sweep_shortens_what_greedy_finds(self):
        problem = read(DATA / "xshape.train.nd4.json", memory=4, num_microbatches=8)
        run = run_from_greedy(problem)
        before, windows, allowance = run.objective, Windows(problem, run), Allowance(2.0)
        assert windows.sweep(32, 0.1, allowance)
        assert run.objective < before
        assert check(problem, run.solution) == ()
        assert 0 < allowance.left < 2.0

    @settings(max_examples=40, deadline=None)
    @given(problem=problems(most_blocks=4, counts=st.integers(2, 6)), size=st.integers(2, 8))
    def test_what_they_find_keeps_the_rules_and_the_bound(self, problem, size):
        result = GreedySchedule()(problem)
        if result.solution is None:
            return
        run = run_from_greedy(problem)
        Windows(problem, run).sweep(size, 0.05, Allowance(0.5))
        assert check(problem, run.solution) == ()
        assert run.objective <= result.objective
        assert run.objective >= run.lower_bound

    def test_a_window_of_everything_is_optimal(self):
        problem = read(DATA / "kshape.train.nd4.json", memory=3, num_microbatches=3)
        run = run_from_greedy(problem)
        Windows(problem, run).sweep(1000, 2.0, Allowance())
        assert run.objective == ExactMakespan()(problem).objective


class TestPublished:
    @pytest.mark.parametrize(("name", "count"), [("vshape", 3), ("wave", 2)])
    def test_a_pipeline_has_several(self, name, count):
        problem = shape(name, 4, SPLIT).problem(None, 8)
        assert len(list(published(problem, 8))) >= count
        run = Run(Stop(), "test", 0)
        offer_published(problem, run)
        assert check(problem, run.solution) == ()

    def test_what_holds_too_much_is_left_out(self):
        problem = shape("vshape", 4, SPLIT).problem(3, 8)
        run = Run(Stop(), "test", 0)
        offer_published(problem, run)
        assert run.solution is None

    @pytest.mark.parametrize(("cap", "span"), [(4, 27), (7, 24)])  # ZB-H1, ZB-H2 where it fits
    def test_of_equal_makespans_the_smallest_bubble_is_kept(self, cap, span):
        problem = shape("vshape", 4, SPLIT).problem(cap, 8)
        result = AutoSchedule()(problem)
        table = [[0] * len(problem.blocks) for _ in range(8)]
        for microbatch, block, start in result.solution.starts:
            table[microbatch][block] = start
        assert result.objective == 27
        assert longest_span(problem, table) == span

    def test_other_placements_have_none(self):
        problem = read(DATA / "mshape.train.nd4.json", memory=4, num_microbatches=4)
        assert list(published(problem, 4)) == []


class TestAuto:
    @pytest.mark.parametrize(
        ("name", "cap", "makespan"), [("mshape", 6, 48), ("kshape", 3, 40), ("vshape", 4, 36)]
    )
    def test_six_micro_batches_are_proven_at_once(self, name, cap, makespan):
        problem = read(DATA / f"{name}.train.nd4.json", memory=cap, num_microbatches=6)
        result = AutoSchedule()(problem)
        assert (result.status, result.objective) == (Status.OPTIMAL, makespan)

    @pytest.mark.parametrize(
        ("name", "cap", "count"),
        list(itertools.product(["xshape", "mshape", "kshape"], [3, 4], [4, 16])),
    )
    def test_it_is_never_worse_than_greedy_and_names_the_period(self, name, cap, count):
        problem = read(DATA / f"{name}.train.nd4.json", memory=cap, num_microbatches=count)
        result = AutoSchedule(effort=0.1)(problem)
        assert check(problem, result.solution) == ()
        assert result.objective <= GreedySchedule()(problem).objective
        assert result.status is Status.OPTIMAL or result.solution.period is not None

    def test_without_a_number_it_is_the_shortest_repetition(self):
        problem = read(DATA / "vshape.train.nd4.json", memory=3)
        assert AutoSchedule()(problem).objective == pytest.approx(16 / 3)

    def test_an_interruption_returns_the_best_so_far(self):
        problem = read(DATA / "nnshape.train.nd4.json", memory=3, num_microbatches=16)
        asked = itertools.count()
        result = AutoSchedule()(problem, Stop(interrupted=lambda: next(asked) > 40))
        assert result.status is Status.STOPPED
        assert result.why == "interrupted"
        assert check(problem, result.solution) == ()


class TestTessel:
    @pytest.mark.parametrize(
        ("name", "cap", "most", "period"),
        [
            ("vshape", 4, 4, 4),  # what the published search finds, with as many micro-batches
            ("vshape", 3, 4, 8),
            ("xshape", 4, 3, 8),
            ("xshape", 3, 3, 9),
            ("kshape", 2, 3, 8),
            ("mshape", 6, 6, 6),
            ("finetune", 6, 4, 5),
            ("alphafold", 4, 4, 6),
        ],
    )
    def test_repetends_are_as_short_as_the_published_ones(self, name, cap, most, period):
        result = Tessel(most)(shape(name, 4).problem(cap, None))
        assert result.objective == period

    def test_parts_do_not_overlap(self):
        problem = shape("vshape", 4).problem(4, 8)
        result = Tessel(4)(problem)
        assert check(problem, result.solution) == ()
        # Three forwards ahead take 7 by themselves (memory aside); then 5 repetends; then the rest.
        assert result.objective == 52
        assert result.solution.period == 4

    @pytest.mark.parametrize("name", ["vshape", "xshape", "kshape", "mshape"])
    @pytest.mark.parametrize("count", [4, 16])
    def test_without_barriers_it_is_never_longer(self, name, count):
        problem = shape(name, 4).problem(4, count)
        assert AutoSchedule(effort=0.1)(problem).objective <= Tessel(4)(problem).objective


def test_all_at_once_needs_nothing_to_begin_with():
    problem = read(DATA / "kshape.train.nd4.json", memory=3, num_microbatches=2)
    run = Run(Stop(), "test", 0)
    question = AtOnce(problem, run)
    question.go_on(5.0, Allowance())
    assert run.objective == run.lower_bound == BruteSchedule()(problem).objective
