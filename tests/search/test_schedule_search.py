import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contract import SearchContract
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from partita.problems import schedule
from partita.problems.schedule import (
    ScheduleBlock,
    ScheduleProblem,
    check,
    lower_bound,
    solution_of,
)
from partita.search import searches
from partita.search.base import Status, Stop
from partita.search.schedule import SEARCHES, lightest
from partita.search.schedule.brute import BruteSchedule
from partita.search.schedule.greedy import GreedySchedule
from partita.search.schedule.lightest import lightest_order, why_infeasible
from partita.search.schedule.modulo import fit

DATA = Path(__file__).parent.parent / "data" / "schedule"
PERIODS = json.loads((DATA / "periods.json").read_bytes())

greedy, brute = SEARCHES["greedy"], SEARCHES["brute"]
slow = settings(max_examples=40, deadline=None)


# Made anew in every example, a strategy is looked over anew: a third of the time of a draw.
integers = functools.cache(st.integers)
several = functools.cache(lambda each, count: st.tuples(*[each] * count))
some_devices = st.sampled_from([(0,), (1,), (0, 1)])
caps = st.none() | several(integers(0, 4), 2)


@st.composite
def problems(
    draw: st.DrawFn,
    most_blocks: int = 3,
    counts: st.SearchStrategy[int | None] = st.integers(1, 2),  # noqa: B008
    spans: st.SearchStrategy[float] = st.integers(1, 3),  # noqa: B008
    usual: bool = False,
) -> ScheduleProblem:
    """Few blocks on two devices, with or without dependencies, delays, caps.

    `usual`: what the first block takes the last one gives back, as in training.
    """
    size = draw(integers(2 if usual else 1, most_blocks))
    memory = draw(several(integers(-2, 2), size))
    devices = draw(several(some_devices, size))
    pairs = list(itertools.combinations(range(size), 2))
    deps = tuple(pair for pair in pairs if draw(st.booleans()))
    if usual:
        amount = draw(integers(1, 2))
        memory = (amount, *(0,) * (size - 2), -amount)
        devices = (*devices[:-1], devices[0])
        deps = tuple(sorted({*deps, (0, size - 1)}))
    return ScheduleProblem(
        num_devices=2,
        blocks=tuple(
            ScheduleBlock(draw(spans), devices[index], memory[index], f"b{index}")
            for index in range(size)
        ),
        deps=deps,
        delays=draw(several(integers(0, 2), len(deps))) if draw(st.booleans()) else (),
        memory_capacity=draw(caps),
        num_microbatches=draw(counts),
    )


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
class TestEverySearch(SearchContract):
    kind = schedule
    oracle = brute
    problems = problems()


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
class TestEverySearchWithRealSpans(SearchContract):
    kind = schedule
    oracle = brute
    problems = problems(spans=st.sampled_from([0.1, 0.7, 1 / 3, 2.5]))


def test_the_one_that_does_everything_in_turn_is_the_default() -> None:
    assert next(iter(searches("schedule"))) == "auto"


def least_makespan(problem: ScheduleProblem, horizon: int) -> int | None:
    """By trying every start of every block up to the horizon."""
    assert problem.num_microbatches is not None
    size = len(problem.blocks)
    ends = []
    for starts in itertools.product(range(horizon), repeat=size * problem.num_microbatches):
        table = [starts[at : at + size] for at in range(0, len(starts), size)]
        solution = solution_of(problem, table)
        if not check(problem, solution):
            ends.append(int(solution.makespan))
    return min(ends, default=None)


class TestBrute:
    @settings(max_examples=60, deadline=None)
    @given(problem=problems(most_blocks=2, spans=st.integers(1, 2)))
    def test_nothing_beats_it_among_all_starts(self, problem: ScheduleProblem) -> None:
        result = brute(problem)
        longest = sum(block.span for block in problem.blocks) + sum(problem.delays)
        horizon = longest * problem.num_microbatches
        assume((horizon + 1) ** (len(problem.blocks) * problem.num_microbatches) < 30_000)
        assert result.objective == least_makespan(problem, horizon)

    @settings(max_examples=30, deadline=None)
    @given(problem=problems(most_blocks=3, counts=st.just(1), spans=st.integers(1, 2)))
    def test_nothing_beats_it_for_three_blocks(self, problem: ScheduleProblem) -> None:
        longest = sum(block.span for block in problem.blocks) + sum(problem.delays)
        assert brute(problem).objective == least_makespan(problem, longest)

    def test_a_block_waits_for_memory_that_a_later_start_gives_back(self) -> None:
        # c is ready at 0 and fits only after b, which is ready at 5.
        blocks = (
            ScheduleBlock(1, (0,), 1, "a"),
            ScheduleBlock(1, (0,), 1, "c"),
            ScheduleBlock(1, (0,), -1, "b"),
        )
        waiting = ScheduleProblem(1, blocks, ((0, 2),), (4,), (1,), 1)
        result = brute(waiting)
        assert result.objective == 7
        assert result.solution is not None
        assert result.solution.starts == ((0, 0, 0), (0, 1, 6), (0, 2, 5))

    def test_infeasible_says_what_the_least_is(self) -> None:
        problem = schedule.read(DATA / "kshape.train.nd4.json", memory=1, num_microbatches=1)
        for search in SEARCHES.values():
            result = search(problem)
            assert result.status is Status.INFEASIBLE
            assert result.why == (
                "one micro-batch by itself does not fit; the least that works is "
                "2 on devices 0, 1, 2, 3 (where the cap is 1)"
            )

    def test_depth_is_no_problem(self) -> None:
        long = schedule.read(DATA / "vshape.infer.nd4.json", num_microbatches=2000)
        result = brute(long, Stop(evaluations=1))
        assert result.objective == 2003

    def test_one_forward_one_backward_is_optimal_for_four_stages(self) -> None:
        problem = schedule.read(DATA / "vshape.train.nd4.json", memory=4, num_microbatches=2)
        assert brute(problem, Stop(time_s=20)).status is Status.OPTIMAL


def periods_up_to(problem: ScheduleProblem, longest: int, horizon: int) -> list[int]:
    """Periods that work, by trying every start of every block up to the horizon."""
    return [
        period
        for period in range(1, longest + 1)
        if any(
            not check(problem, schedule.periodic(problem, [starts], period))
            for starts in itertools.product(range(horizon + 1), repeat=len(problem.blocks))
        )
    ]


class TestBrutePeriod:
    @slow
    @given(problem=problems(most_blocks=3, counts=st.none(), spans=st.integers(1, 2), usual=True))
    def test_no_smaller_period_works_with_any_starts(self, problem: ScheduleProblem) -> None:
        result = brute(problem)
        if result.solution is None:
            assert result.status is Status.INFEASIBLE
            return
        assert check(problem, result.solution) == ()
        assert result.objective is not None
        assert periods_up_to(problem, int(result.objective) - 1, horizon=7) == []

    @pytest.mark.parametrize(
        ("name", "cap"),
        [
            *((name, None) for name in PERIODS if ".infer.nd4" in name and "eager" not in name),
            *(("vshape.train.nd4", cap) for cap in (4, 5, 8, 20)),
            *(("kshape.train.nd4", cap) for cap in (1, 2, 3, 4, 6, 20)),
            *(("mshape.train.nd4", cap) for cap in (4, 5, 6, 20)),
            *(("nnshape.train.nd4", cap) for cap in (6, 20)),
            *(("xshape.train.nd4", cap) for cap in (4, 5, 20)),
        ],
    )
    def test_it_meets_the_periods_that_are_known(self, name: str, cap: int | None) -> None:
        problem = schedule.read(DATA / f"{name}.json", memory=cap)
        result = brute(problem)
        assert result.objective == PERIODS[name][str(cap)]
        if result.solution is not None:
            assert check(problem, result.solution) == ()

    @slow
    @given(problem=problems(most_blocks=2, counts=st.none(), spans=st.integers(1, 2), usual=True))
    def test_two_per_repetition_are_never_slower_than_one(self, problem: ScheduleProblem) -> None:
        one, two = BruteSchedule()(problem), BruteSchedule(microbatches_per_repetition=2)(problem)
        if one.objective is None:
            assert two.status is Status.INFEASIBLE
            return
        assert two.objective is not None
        assert two.solution is not None
        assert two.objective <= one.objective
        assert check(problem, two.solution) == ()

    def test_it_does_not_claim_more_than_it_tried(self) -> None:
        problem = schedule.read(DATA / "kshape.train.nd4.json", memory=2)
        result = brute(problem)
        assert result.status is Status.FEASIBLE
        assert result.why == (
            "no shorter repetition of one micro-batch works; more might be faster"
        )

    def test_spans_need_not_be_whole(self) -> None:
        halves = ScheduleProblem(
            1, (ScheduleBlock(0.5, (0,)), ScheduleBlock(0.75, (0,))), ((0, 1),)
        )
        result = brute(halves)
        assert result.objective == 1.25
        assert result.status is Status.OPTIMAL

    def test_memory_that_grows_for_ever_is_infeasible(self) -> None:
        growing = ScheduleProblem(1, (ScheduleBlock(1, (0,), 1),), memory_capacity=(100,))
        for search in SEARCHES.values():
            assert search(growing).status is Status.INFEASIBLE
            assert "device 0 keeps 1 of every micro-batch" in search(growing).why

    @pytest.mark.parametrize("limit", [{"time_s": 0.05}, {"evaluations": 0}])
    def test_it_stops_when_told_to(self, limit: dict[str, Any]) -> None:
        problem = schedule.read(DATA / "mshape.train.nd4.json", memory=1)
        result = brute(problem, Stop(**limit))
        assert result.status is Status.STOPPED
        assert result.lower_bound == 13
        assert result.seconds < 2


class TestGreedy:
    @settings(max_examples=150, deadline=None)
    @given(
        problem=problems(
            most_blocks=6, counts=st.none() | st.integers(1, 12), spans=st.integers(1, 9)
        )
    )
    def test_it_keeps_the_rules_and_the_bound(self, problem: ScheduleProblem) -> None:
        self.assert_sound(problem)

    @settings(max_examples=100, deadline=None)
    @given(
        problem=problems(
            most_blocks=6,
            counts=st.none() | st.integers(1, 12),
            spans=st.floats(1e-3, 1e3),
            usual=True,
        )
    )
    def test_it_always_answers_where_one_microbatch_fits(self, problem: ScheduleProblem) -> None:
        fits = not lightest_order(problem).excess
        assert (self.assert_sound(problem) is Status.INFEASIBLE) == (not fits)

    def assert_sound(self, problem: ScheduleProblem) -> Status:
        result = greedy(problem)
        if result.solution is not None:
            assert check(problem, result.solution) == ()
            assert result.objective is not None
            assert result.objective >= lower_bound(problem)
        else:
            assert result.status in (Status.INFEASIBLE, Status.STOPPED)
        return result.status

    @pytest.mark.parametrize("name", ["vshape", "xshape", "kshape", "mshape", "nnshape"])
    @pytest.mark.parametrize("cap", [2, 3, 4, 8, None])
    @pytest.mark.parametrize("count", [1, 7, 100, None])
    def test_it_gets_stuck_nowhere(self, name: str, cap: int | None, count: int | None) -> None:
        file = DATA / f"{name}.train.nd4.json"
        problem = schedule.read(file, memory=cap, num_microbatches=count)
        result = greedy(problem)
        assert result.solution is not None
        assert check(problem, result.solution) == ()

    @pytest.mark.parametrize("count", [4, 32, 1000])
    def test_it_finds_one_forward_one_backward(self, count: int) -> None:
        file = DATA / "vshape.train.nd4.json"
        result = greedy(schedule.read(file, memory=4, num_microbatches=count))
        assert result.objective == (4 + 3) * 4 - 16 + 4 * count
        assert result.status is Status.OPTIMAL

    def test_thousands_of_microbatches_take_about_a_second(self) -> None:
        file = DATA / "xshape.train.nd4.json"
        result = greedy(schedule.read(file, memory=8, num_microbatches=5000))
        assert result.objective is not None
        assert result.seconds < 10  # about 1 s on an idle machine

    def test_two_branches_that_hold_what_the_other_needs_do_not_lock_up(self) -> None:
        file = DATA / "xshape.train.nd4.json"
        problem = schedule.read(file, memory=1, num_microbatches=3)
        result = greedy(problem)
        assert result.solution is not None
        assert check(problem, result.solution) == ()

    def test_one_branch_after_the_other_fits_a_cap_of_one(self) -> None:
        # periods.json knows none here; this one is checked moment by moment like any other.
        problem = schedule.read(DATA / "xshape.train.nd4.json", memory=1)
        result = greedy(problem)
        assert result.solution is not None
        assert check(problem, result.solution) == ()
        assert result.objective == 29


class TestLightestOrder:
    @slow
    @given(problem=problems(most_blocks=5))
    def test_no_order_exceeds_the_caps_less(self, problem: ScheduleProblem) -> None:
        problem = replace(problem, memory_capacity=problem.memory_capacity or (1, 1))
        lightest = lightest_order(problem)
        assert lightest.proven
        assert lightest.excess == min(
            self.excess(problem, order)
            for order in itertools.permutations(range(len(problem.blocks)))
            if all(order.index(first) < order.index(second) for first, second in problem.deps)
        )
        assert lightest.excess == self.excess(problem, lightest.order)

    def excess(self, problem: ScheduleProblem, order: tuple[int, ...]) -> float:
        held, worst = [0.0] * problem.num_devices, 0.0
        assert problem.memory_capacity is not None
        for index in order:
            for device in problem.blocks[index].devices:
                held[device] += problem.blocks[index].memory
                worst = max(worst, held[device] - problem.memory_capacity[device])
        return worst

    def test_too_many_orders_end_in_a_guess(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lightest, "MAX_SETS", 100)
        takes = tuple(ScheduleBlock(1, (0,), index + 1) for index in range(20))
        gives = tuple(ScheduleBlock(1, (0,), -index - 1) for index in range(20))
        deps = tuple((index, 20 + index) for index in range(20))
        wide = ScheduleProblem(1, (*takes, *gives), deps, memory_capacity=(0,))
        this_lightest = lightest_order(wide)
        assert not this_lightest.proven
        assert sorted(this_lightest.order) == list(range(40))
        assert this_lightest.excess == self.excess(wide, this_lightest.order)
        assert why_infeasible(wide, this_lightest) is None

    def test_each_device_is_told_what_it_needs(self) -> None:
        blocks = (
            ScheduleBlock(1, (0, 1), 2),
            ScheduleBlock(1, (1,), 1),
            ScheduleBlock(1, (1,), -1),
            ScheduleBlock(1, (0, 1), -2),
        )
        deps = ((0, 1), (1, 2), (2, 3))
        problem = ScheduleProblem(2, blocks, deps, memory_capacity=(1, 2), num_microbatches=4)
        assert why_infeasible(problem, lightest_order(problem)) == (
            "one micro-batch by itself does not fit; the least that works is "
            "2 on device 0 (where the cap is 1), 3 on device 1 (where the cap is 2)"
        )

    def test_what_is_kept_of_each_microbatch_must_fit_in_the_end(self) -> None:
        keeping = ScheduleProblem(
            1, (ScheduleBlock(1, (0,), 1),), memory_capacity=(3,), num_microbatches=4
        )
        assert why_infeasible(keeping, lightest_order(keeping)) == (
            "device 0 keeps 1 of every micro-batch, more than its cap of 3 holds in the end"
        )
        fewer = replace(keeping, num_microbatches=3)
        assert why_infeasible(fewer, lightest_order(fewer)) is None


class TestModulo:
    def test_a_block_goes_to_the_first_free_moment(self) -> None:
        blocks = (ScheduleBlock(1, (0,)), ScheduleBlock(1, (1,)), ScheduleBlock(1, (0,)))
        chain = ScheduleProblem(2, blocks, ((0, 1), (1, 2)))
        assert fit(chain, (0, 1, 2), 3) == [0, 1, 2]
        assert fit(chain, (0, 1, 2), 2) == [0, 1, 3]
        assert fit(chain, (0, 1, 2), 1) is None

    @slow
    @given(
        problem=problems(most_blocks=5, counts=st.none(), spans=st.floats(0.01, 5)),
        period=st.floats(0.5, 20),
    )
    def test_what_it_finds_repeats_without_overlap(
        self, problem: ScheduleProblem, period: float
    ) -> None:
        free = replace(problem, memory_capacity=None)
        starts = fit(free, tuple(range(len(free.blocks))), period)
        if starts is not None:
            assert check(free, schedule.periodic(free, [starts], period)) == ()


def test_more_periods_never_hurt() -> None:
    problem = schedule.read(DATA / "xshape.train.nd4.json", memory=3)
    few, many = GreedySchedule(periods=3)(problem), GreedySchedule(periods=100)(problem)
    assert few.objective is not None
    assert many.objective is not None
    assert many.objective <= few.objective
