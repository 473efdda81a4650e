from collections.abc import Callable
from dataclasses import replace

import pytest

from partita.errors import InputError, ProblemError, VerificationError
from partita.jobs import schedule as job
from partita.jobs.baselines import compare, fits, run_order, uniform_model
from partita.jobs.schedule import schedule
from partita.problems import schedule as problems
from partita.problems.schedule import ScheduleSolution
from partita.schedules.named import NAMED
from partita.schedules.placement import Block, Placement
from partita.schedules.shapes import SHAPES, ShapeOptions, shape
from partita.search import searches
from partita.search.base import Result, Status, Stop
from partita.verify import verify_program, verify_timeline
from tests.quickness import least_cpu_s

SPLIT = ShapeOptions(backward_span=1, weight_span=1)


def alone(**changes: object) -> Placement:
    """One block of two steps that holds one unit and one that gives it back."""
    return Placement(1).chain([Block("F", 2, 1), Block("B", 2, -1, "backward")], [0, 0])


class TestSchedule:
    def test_a_pipeline_with_room_is_proven_best(self):
        result = schedule(shape("vshape", 4), memory=4, microbatches=8, method="greedy")
        assert result.status is Status.OPTIMAL
        assert result.makespan == result.objective == result.lower_bound == 44
        assert result.gap == 0
        assert result.period == 4
        assert result.num_microbatches == 8
        assert len(result.starts) == 64
        assert result.bubble_rates == pytest.approx([12 / 44] * 4)
        assert result.bubble_rate == pytest.approx(12 / 44)
        assert result.steady_bubble_rates == (0, 0, 0, 0)
        assert max(result.peak_memory) <= 4
        assert str(result).startswith("8 micro-batches in 44, period 4, 27.3% idle, at most 0.0%")

    def test_without_a_number_the_period_counts(self):
        result = schedule(shape("vshape", 4), memory=4, method="greedy")
        assert result.objective == result.period == 4
        assert result.num_microbatches >= 2

    def test_a_problem_may_be_given_instead_of_a_placement(self):
        problem = shape("vshape", 2).problem(memory=2, microbatches=3)
        assert schedule(problem).problem == problem
        assert schedule(problem, microbatches=5).num_microbatches == 5

    @pytest.mark.parametrize("name", SHAPES)
    def test_every_shape_is_scheduled_and_verified(self, name):
        result = schedule(shape(name, 3), memory=6, microbatches=4, method="greedy")
        timeline = result.timeline()
        assert verify_timeline(timeline.program, timeline) == ()
        assert verify_program(result.program()) == ()
        assert timeline.makespan == result.makespan
        assert problems.check(result.problem, result.outcome.solution) == ()

    def test_the_first_search_is_the_default(self):
        assert schedule(alone(), microbatches=1).outcome.method == next(iter(searches("schedule")))

    def test_the_same_seed_gives_the_same_schedule(self):
        first = schedule(shape("xshape", 3), memory=5, microbatches=3, method="greedy", seed=5)
        again = schedule(shape("xshape", 3), memory=5, microbatches=3, method="greedy", seed=5)
        assert first.starts == again.starts
        assert first.outcome.seed == 5

    def test_real_spans_are_scheduled_too(self):
        options = ShapeOptions(forward_span=0.3, backward_span=0.71, memory=0.5)
        result = schedule(shape("vshape", 3, options), memory=1.5, microbatches=5, method="greedy")
        assert result.makespan >= result.lower_bound
        assert max(result.peak_memory) <= 1.5 * (1 + 1e-9)


class TestPeriod:
    def test_it_is_known_even_where_the_best_makespan_does_not_repeat(self):
        result = schedule(shape("mshape", 4), memory=6, microbatches=6, method="greedy")
        assert result.outcome.solution.period is None
        assert result.period is not None
        assert result.period >= 6

    def test_nothing_repeats_where_memory_stays_behind(self):
        place = Placement(1).add(Block("keeps", 1, memory=1), 0)
        result = schedule(place, memory=3, microbatches=3, method="brute")
        assert result.makespan == 3
        assert result.period is None


class TestUnroll:
    def test_a_schedule_that_repeats_goes_on_for_any_number(self):
        result = schedule(shape("vshape", 4), memory=4, method="greedy")
        longer = result.unroll(100)
        assert longer.num_microbatches == 100
        assert longer.makespan == 100 * 4 + 12
        assert longer.status is Status.OPTIMAL
        assert problems.check(longer.problem, longer.outcome.solution) == ()

    def test_a_thousand_microbatches_on_sixteen_stages_take_less_than_a_second(self):
        result = schedule(shape("vshape", 16), memory=16, method="greedy")
        assert least_cpu_s(lambda: result.unroll(1024), 1) < 1

    def test_a_schedule_for_a_number_is_not_unrolled(self):
        with pytest.raises(InputError, match="the schedule is for 2 micro-batches; schedule"):
            schedule(alone(), microbatches=2).unroll(4)

    @pytest.mark.parametrize("count", [0, 2.5])
    def test_bad_numbers_are_refused(self, count):
        with pytest.raises(ProblemError, match="microbatches: found"):
            schedule(alone()).unroll(count)


class TestJson:
    def test_it_holds_what_solve_gives_and_more(self):
        data = schedule(shape("vshape", 2), memory=2, microbatches=3, method="greedy").to_json()
        assert data["format"] == "partita/result@1"
        assert data["kind"] == "schedule"
        assert data["problem"] == "vshape.train.nd2"
        assert ScheduleSolution.from_json(data["solution"]).makespan == data["makespan"]
        assert data["peak_memory"] == [2, 1]
        assert len(data["bubble_rates"]) == 2

    def test_without_a_schedule_there_is_nothing_to_tell(self):
        data = schedule(shape("kshape", 4), memory=1, microbatches=2).to_json()
        assert data["status"] == "infeasible"
        assert data["solution"] is data["bubble_rates"] is data["peak_memory"] is None


class TestInfeasible:
    def test_the_least_that_works_is_said_for_each_device(self):
        result = schedule(shape("kshape", 4), memory=[1, 2, 1, 2], microbatches=2)
        assert result.status is Status.INFEASIBLE
        assert "the least that works is 2 on devices 0, 2 (where the cap is 1)" in result.why
        assert (result.makespan, result.period, result.starts) == (None, None, ())
        assert str(result).startswith("no schedule (infeasible): one micro-batch by itself")

    def test_there_is_no_timeline_of_nothing(self):
        result = schedule(shape("kshape", 4), memory=1, microbatches=2)
        for ask in (result.timeline, result.program):
            with pytest.raises(InputError, match="there is no schedule: one micro-batch by itself"):
                ask()

    def test_stopped_before_anything_was_found(self):
        result = schedule(shape("vshape", 4), microbatches=8, method="greedy", stop=Stop(time_s=0))
        assert result.outcome.solution is None
        assert result.status is Status.STOPPED


class TestStopping:
    def test_interrupted_it_keeps_the_best(self):
        asked: list[int] = []

        def interrupted() -> bool:
            asked.append(1)
            return len(asked) > 2

        result = schedule(
            shape("mshape", 3), memory=3, microbatches=4, method="greedy",
            stop=Stop(interrupted=interrupted),
        )  # fmt: skip
        assert result.outcome.solution is not None
        assert result.why == "interrupted"
        assert result.makespan > 0


class TestBadInput:
    @pytest.mark.parametrize(
        ("ask", "message"),
        [
            ({"method": "gredy"}, "method: found 'gredy'; did you mean greedy? (there is "),
            ({"method": "zzzz"}, "method: found 'zzzz'; known are "),
            ({"microbatches": 0}, "microbatches: found 0; give a whole number from 1"),
            ({"microbatches": 2.5}, "microbatches: found 2.5; give a whole number"),
            ({"memory": "many"}, "memory: found 'm'; give a number"),
            ({"memory": [1, 2]}, "memory: has 2 entries; give one number, or one per device: 1"),
            ({"memory": float("nan")}, "memory: found nan; give a finite number"),
        ],
    )
    def test_it_is_refused_with_a_sentence(self, ask, message):
        with pytest.raises(InputError) as refused:
            schedule(alone(), **ask)
        assert str(refused.value).startswith(message)


class TestVerification:
    """What a search claims is not believed."""

    def claim(self, monkeypatch, **changes: object) -> Callable[[], object]:
        solution = ScheduleSolution(None, 4, ((0, 0, 0), (0, 1, 2)))
        claimed = {"solution": solution, "objective": 4, "lower_bound": 4} | changes
        result = Result("liar", Status.FEASIBLE, why="", seconds=0.0, seed=0, **claimed)
        monkeypatch.setattr(job, "searches", lambda kind: {"liar": lambda *asked: result})
        return lambda: schedule(alone(), microbatches=1)

    def test_what_is_true_is_taken(self, monkeypatch):
        assert self.claim(monkeypatch)().makespan == 4

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"objective": 3}, "the objective is 4, and 3 is claimed"),
            ({"lower_bound": 5}, "the lower bound 5 is above the objective 4"),
            (
                {"solution": ScheduleSolution(None, 3, ((0, 0, 0), (0, 1, 1)))},
                "B of micro-batch 0 starts at 1, and F lets it start at 2",
            ),
            ({"solution": ScheduleSolution(None, 2, ((0, 0, 0),))}, "B of micro-batch 0 is not"),
        ],
    )
    def test_what_is_not_is_refused(self, monkeypatch, changes, message):
        with pytest.raises(VerificationError) as refused:
            self.claim(monkeypatch, **changes)()
        assert message in str(refused.value)


class TestCompare:
    def test_a_split_pipeline_meets_them_all(self):
        baseline_runs = compare(shape("vshape", 4, SPLIT).problem(), 8)
        assert {baseline.name for baseline in baseline_runs.ran} == set(NAMED) - {"hanayo"}
        assert baseline_runs.left_out == (("Hanayo", "needs 4 micro-batches or fewer"),)
        spans = [baseline.makespan for baseline in baseline_runs.ran]
        assert spans == sorted(spans)

    def test_work_is_the_same_however_the_model_is_placed(self):
        for baseline in compare(shape("vshape", 4, SPLIT).problem(), 8).ran:
            assert baseline.timeline.busy().tolist() == [24] * 4
            assert baseline.num_microbatches == 8

    def test_a_whole_backward_leaves_out_what_needs_it_split(self):
        baseline_runs = compare(shape("vshape", 4).problem(), 8)
        names = {baseline.name for baseline in baseline_runs.ran}
        assert names == {"gpipe", "1f1b", "interleaved", "looped-bfs", "chimera"}
        assert dict(baseline_runs.left_out)["ZB-H1"].startswith(
            "needs the weight gradients as blocks"
        )

    def test_numbers_that_do_not_fit_are_left_out_with_the_reason(self):
        left_out = dict(compare(shape("vshape", 3, SPLIT).problem(), 4).left_out)
        assert left_out["Chimera (direct)"] == "needs an even number of devices"
        assert left_out["interleaved 1F1B"] == "needs a multiple of 3 micro-batches"
        assert left_out["DualPipeV"] == "needs 6 micro-batches or more"

    def test_two_directions_count_for_two(self):
        baseline_runs = compare(shape("xshape", 4).problem(), 4)
        assert baseline_runs.baselines == 2
        by_name = {baseline.name: baseline for baseline in baseline_runs.ran}
        assert by_name["chimera"].placement == "as given"
        assert {baseline.num_microbatches for baseline in baseline_runs.ran} == {8}
        same = compare(shape("vshape", 4).problem(), 8)
        makespans = {baseline.name: baseline.makespan for baseline in same.ran}
        assert {name: b.makespan for name, b in by_name.items()} == makespans

    @pytest.mark.parametrize("name", ["looped", "wave"])
    def test_chunks_are_compared_as_they_are_held(self, name):
        problem = shape(name, 4, replace(SPLIT, chunks=4)).problem()
        here = [b.name for b in compare(problem, 4).ran if b.placement == "as given"]
        assert sorted(here) == (["interleaved", "looped-bfs"] if name == "looped" else ["hanayo"])

    def test_stages_that_are_not_alike_are_compared_where_they_are(self):
        place = Placement(2).chain(
            [Block("F0", 1, 1), Block("F1", 2, 1), Block("B1", 4, -1, "backward"),
             Block("B0", 2, -1, "backward")], [0, 1, 1, 0],
        )  # fmt: skip
        baseline_runs = compare(place.problem(), 4)
        assert {baseline.name for baseline in baseline_runs.ran} == {"gpipe", "1f1b"}
        assert dict(baseline_runs.left_out)["Chimera (direct)"].startswith(
            "needs another placement"
        )
        assert uniform_model(place.problem()) is None

    def test_a_delay_goes_with_the_model(self):
        late = ShapeOptions(delay=2)
        model = uniform_model(shape("vshape", 3, late).problem())
        assert model.delay == 2
        by_name = {b.name: b for b in compare(shape("vshape", 3, late).problem(), 6).ran}
        assert by_name["gpipe"].makespan == (6 + 2) * 4 + 4 * 2

    @pytest.mark.parametrize("name", ["mshape", "kshape"])
    def test_what_is_no_pipeline_is_compared_with_nothing(self, name):
        baseline_runs = compare(shape(name, 4).problem(), 8)
        assert baseline_runs.ran == ()
        assert "this is no pipeline" in baseline_runs.left_out[0][1]

    def test_inference_neither(self):
        baseline_runs = compare(shape("vshape", 4, ShapeOptions(training=False)).problem(), 8)
        assert baseline_runs.left_out == (("published schedules", "it is inference"),)

    def test_caps_say_what_fits(self):
        problem = shape("vshape", 4).problem(memory=4)
        verdict = {b.name: b.fits(problem) for b in compare(problem, 8).ran}
        assert verdict["1f1b"]
        assert not verdict["gpipe"]
        assert fits((4, 4, 4, 4), problem)
        assert not fits((4, 4, 4, 5), problem)


def test_an_order_over_the_cap_is_refused():
    problem = shape("vshape", 2).problem(memory=1)
    with pytest.raises(VerificationError, match="memory device 0 holds 2 of 1"):
        run_order(problem, NAMED["gpipe"].order(2, 1, 2), 2)
