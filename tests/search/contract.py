"""The contract every listed search meets, weak ones included.

    @pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
    class TestEverySearch(SearchContract):
        kind = sharding               # the problems module: check, evaluate, lower_bound
        oracle = SEARCHES["brute"]   # tries every valid solution
        problems = tiny_problems()    # a Hypothesis strategy of problems the oracle can finish

A search is tested by being in its SEARCHES; nothing is to be added here for it.
"""

import dataclasses
import math
from types import ModuleType
from typing import Any, ClassVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.search.base import Improvement, Result, Search, Status, Stop

TOLERANCE = 1e-9  # sums in another order round differently
UNMEASURED = Improvement(0.0, None, None, 0)

tried = settings(
    max_examples=15,  # of each of a dozen tests of each search; `--random` draws fresh ones
    deadline=None,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class SearchContract:
    """What `partita.search.base` promises of every search, as tests."""

    kind: ModuleType
    oracle: ClassVar[Search[Any, Any]]
    problems: ClassVar[st.SearchStrategy[Any]]

    @tried
    @given(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def test_an_answer_is_valid_and_costs_what_it_says(
        self, search: Search[Any, Any], data: st.DataObject, seed: int
    ) -> None:
        problem = data.draw(self.problems)
        result = search(problem, seed=seed)
        self.assert_sound(problem, result)
        assert result.seed == seed
        assert result.method
        assert result.why
        assert result.status is not Status.STOPPED or result.lower_bound is not None

    @tried
    @given(data=st.data())
    def test_optimal_means_as_good_as_trying_every_solution(
        self, search: Search[Any, Any], data: st.DataObject
    ) -> None:
        problem = data.draw(self.problems)
        result, expected = search(problem), self.complete(problem)
        if expected.objective is None:
            assert result.solution is None
            return
        assert result.status is not Status.INFEASIBLE
        if result.status is Status.OPTIMAL:
            assert result.objective is not None
            assert close(result.objective, expected.objective)
            assert result.lower_bound == result.objective

    @tried
    @given(data=st.data(), evaluations=st.integers(0, 5))
    def test_no_bound_exceeds_the_optimum(
        self, search: Search[Any, Any], data: st.DataObject, evaluations: int
    ) -> None:
        problem = data.draw(self.problems)
        expected = self.complete(problem)
        if expected.objective is None:
            return
        assert not_above(self.kind.lower_bound(problem), expected.objective)
        stopped = search(problem, Stop(evaluations=evaluations))
        assert stopped.lower_bound is not None
        assert not_above(stopped.lower_bound, expected.objective)
        for step in stopped.history:
            assert step.lower_bound is None or not_above(step.lower_bound, expected.objective)

    @tried
    @given(data=st.data(), seed=st.integers(0, 3), evaluations=st.none() | st.integers(0, 5))
    def test_the_same_seed_gives_the_same_result(
        self,
        search: Search[Any, Any],
        data: st.DataObject,
        seed: int,
        evaluations: int | None,
    ) -> None:
        problem = data.draw(self.problems)
        stop = Stop(evaluations=evaluations)
        assert timeless(search(problem, stop, seed)) == timeless(search(problem, stop, seed))

    @tried
    @given(data=st.data(), evaluations=st.integers(0, 3))
    def test_evaluations_are_counted_and_limited(
        self, search: Search[Any, Any], data: st.DataObject, evaluations: int
    ) -> None:
        problem = data.draw(self.problems)
        result = search(problem, Stop(evaluations=evaluations))
        self.assert_sound(problem, result)
        assert result.evaluations <= evaluations
        free = search(problem)
        assert free.solution is None or free.evaluations >= 1

    @tried
    @given(data=st.data())
    def test_without_time_there_is_still_a_result(
        self, search: Search[Any, Any], data: st.DataObject
    ) -> None:
        problem = data.draw(self.problems)
        result = search(problem, Stop(time_s=0.0))
        self.assert_sound(problem, result)
        assert result.status is not Status.FEASIBLE  # it was cut short, or it proved something

    @tried
    @given(data=st.data())
    def test_an_interrupted_search_returns_what_it_has(
        self, search: Search[Any, Any], data: st.DataObject
    ) -> None:
        problem = data.draw(self.problems)
        result = search(problem, Stop(interrupted=lambda: True))
        self.assert_sound(problem, result)
        assert result.status is not Status.FEASIBLE

    @tried
    @given(data=st.data())
    def test_a_reached_target_ends_the_search(
        self, search: Search[Any, Any], data: st.DataObject
    ) -> None:
        problem = data.draw(self.problems)
        free = search(problem)
        if free.objective is None:
            return
        result = search(problem, Stop(target=free.objective))
        self.assert_sound(problem, result)
        assert result.objective is not None
        assert result.objective <= free.objective
        assert result.evaluations <= free.evaluations

    @tried
    @given(data=st.data())
    def test_the_history_only_gets_better_and_progress_hears_all_of_it(
        self, search: Search[Any, Any], data: st.DataObject
    ) -> None:
        problem = data.draw(self.problems)
        heard: list[Improvement] = []
        result = search(problem, Stop(progress=heard.append))
        assert tuple(heard) == result.history
        previous = UNMEASURED
        for step in result.history:
            assert step.seconds >= previous.seconds
            assert step.evaluations >= previous.evaluations
            if previous.objective is not None:
                assert step.objective is not None
                assert step.objective <= previous.objective
            if previous.lower_bound is not None:
                assert step.lower_bound is not None
                assert step.lower_bound >= previous.lower_bound
            previous = step
        assert previous.objective == result.objective
        assert previous.seconds <= result.seconds

    def complete(self, problem: Any) -> Result[Any]:
        """What the oracle proved; tiny problems are finished."""
        expected = self.oracle(problem)
        assert expected.status in (Status.OPTIMAL, Status.INFEASIBLE)
        return expected

    def assert_sound(self, problem: Any, result: Result[Any]) -> None:
        """Whatever a result says is so, by the problem's own check and objective."""
        assert (result.solution is None) == (result.objective is None)
        if result.status in (Status.OPTIMAL, Status.FEASIBLE):
            assert result.solution is not None
        if result.status is Status.INFEASIBLE:
            assert result.solution is None
        if result.solution is None or result.objective is None:
            return
        assert self.kind.check(problem, result.solution) == ()
        value = self.kind.evaluate(problem, result.solution)
        assert close(value, result.objective)
        assert math.isfinite(result.objective)
        if result.lower_bound is not None:
            assert not_above(result.lower_bound, result.objective)


def close(one: float, other: float) -> bool:
    """Are they equal, up to rounding?"""
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def not_above(bound: float, objective: float) -> bool:
    """Is `bound <= objective`, up to rounding?"""
    return bound <= objective or close(bound, objective)


def timeless(result: Result[Any]) -> Result[Any]:
    """The result without its clock times, to compare two runs."""
    history = tuple(dataclasses.replace(step, seconds=0.0) for step in result.history)
    return dataclasses.replace(result, seconds=0.0, history=history)
