"""The contract every search builds on: stop rules, history, status."""

import gc
import itertools
import math

import pytest

from partita.search import KINDS, searches
from partita.search.base import Run, Status, Stop, fewer_collections, relative_gap


def run(**rules):
    return Run[str](Stop(**rules), "test", 7)


class TestGap:
    def test_a_missing_side_has_no_gap(self):
        assert relative_gap(None, 1.0) is None
        assert relative_gap(1.0, None) is None

    def test_it_is_relative_to_the_objective(self):
        assert relative_gap(10.0, 9.0) == pytest.approx(0.1)

    def test_a_met_bound_leaves_nothing(self):
        assert relative_gap(3.0, 3.0) == 0.0
        assert relative_gap(0.0, 0.0) == 0.0

    def test_an_objective_of_zero_above_its_bound_is_infinitely_far(self):
        assert relative_gap(0.0, -1.0) == math.inf


class TestRun:
    def test_only_better_answers_are_kept(self):
        state = run()
        assert state.offer("a", 5.0)
        assert not state.offer("b", 5.0)
        assert state.offer("c", 4.0)
        assert state.result().solution == "c"
        assert [step.objective for step in state.result().history] == [5.0, 4.0]

    def test_bounds_only_rise(self):
        state = run()
        state.bound(2.0)
        state.bound(1.0)
        assert state.lower_bound == 2.0

    def test_meeting_the_bound_is_optimal(self):
        state = run()
        state.bound(4.0)
        state.offer("a", 4.0)
        assert state.done()
        assert state.result().status is Status.OPTIMAL

    def test_a_bound_that_differs_by_rounding_alone_is_reached(self):
        state = run()
        state.bound(4.0 * (1 - 1e-12))
        state.offer("a", 4.0)
        assert state.reason() == "the lower bound is reached"
        assert state.result().status is Status.OPTIMAL

    def test_without_a_rule_a_search_goes_on_and_ends_feasible(self):
        state = run()
        state.offer("a", 4.0)
        assert not state.done()
        assert state.result().status is Status.FEASIBLE

    @pytest.mark.parametrize(
        ("rules", "reason"),
        [
            ({"time_s": 0.0}, "the time limit of 0 s is used up"),
            ({"evaluations": 3}, "3 evaluations are used up"),
            ({"target": 4.0}, "the target of 4 is reached"),
            ({"gap": 0.5}, "within the asked gap of 50.00%"),
            ({"interrupted": lambda: True}, "interrupted"),
        ],
    )
    def test_each_rule_stops_and_says_so(self, rules, reason):
        state = run(**rules)
        state.evaluations = 3
        state.bound(3.0)
        state.offer("a", 4.0)
        assert state.reason() == reason
        assert state.result().why == reason
        assert state.result().status is Status.STOPPED

    def test_progress_hears_every_step(self):
        heard = []
        state = Run[str](Stop(progress=heard.append), "test", 0)
        state.bound(1.0)
        state.offer("a", 2.0)
        assert [(step.objective, step.lower_bound) for step in heard] == [(None, 1.0), (2.0, 1.0)]
        assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(heard))


class TestNames:
    def test_every_kind_has_searches(self):
        assert all(searches(kind) for kind in KINDS)

    def test_an_unknown_kind_is_refused(self):
        with pytest.raises(KeyError, match="no searches for 'chess'"):
            searches("chess")


def test_garbage_is_looked_for_more_seldom_while_a_search_goes_on_and_then_as_before():
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        with fewer_collections():
            assert gc.get_threshold()[0] > 100_000
            with fewer_collections():  # one search inside another
                pass
            assert gc.get_threshold()[0] > 100_000
        assert gc.get_threshold() == (700, 10, 10)
        with pytest.raises(ZeroDivisionError), fewer_collections():
            _ = 1 / 0
        assert gc.get_threshold() == (700, 10, 10)
        gc.set_threshold(0, 10, 10)  # turned off: stays so
        with fewer_collections():
            assert gc.get_threshold() == (0, 10, 10)
    finally:
        gc.set_threshold(*before)
