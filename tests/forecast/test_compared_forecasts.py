"""Equal forecasts, what would fit, and what a forecast hangs on."""

from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.forecast import Strategy, check_strategy, equal, forecast, machine_of, ranked
from partita.forecast.compare import (
    SHIFTS,
    composition_difference,
    difference_spread,
    neighbours,
    sensitivity,
    shortages,
    ways_to_fit,
    worse,
)
from partita.forecast.models import transformer_of

GPT3 = transformer_of("gpt3")
MACHINE = machine_of(resolve("128x8xA100"))
GOOD = Strategy(batch=1536, tp=8, pp=8, dp=16, sp=True, recompute="selective")


def test_a_forecast_is_equal_to_itself_and_equality_goes_both_ways():
    a = forecast(GPT3, MACHINE, GOOD)
    b = forecast(GPT3, MACHINE, replace(GOOD, zero=1))
    assert equal(a, a)
    assert difference_spread(a, a) == 0
    assert equal(a, b) == equal(b, a)


def test_steps_composed_alike_share_most_of_their_error():
    a = forecast(GPT3, MACHINE, GOOD)
    alike = forecast(GPT3, MACHINE, replace(GOOD, zero=1))
    unlike = forecast(GPT3, MACHINE, Strategy(batch=1536, dp=1024 // 8, tp=8, zero=3))
    assert composition_difference(a, alike) < composition_difference(a, unlike)
    assert difference_spread(a, alike) < difference_spread(a, unlike)
    assert not equal(a, unlike)


def test_other_models_and_machines_have_errors_of_their_own():
    a = forecast(GPT3, MACHINE, GOOD)
    other = forecast(replace(GPT3, layers=88), MACHINE, GOOD)
    assert difference_spread(a, other) == pytest.approx((a.spread**2 + other.spread**2) ** 0.5)


def test_the_fastest_comes_first_and_is_equal_to_itself():
    every = [forecast(GPT3, MACHINE, one) for _, one in neighbours(GPT3, GOOD, 1024)]
    listed = ranked(every)
    steps = [one.forecast.step_s for one in listed]
    assert steps == sorted(steps)
    assert listed[0].equal_to_first
    assert not listed[-1].equal_to_first


def test_neighbours_are_legal_different_and_keep_devices_and_batch():
    near = neighbours(GPT3, GOOD, 1024)
    assert len({strategy for _, strategy in near}) == len(near) > 10
    for words, strategy in near:
        check_strategy(GPT3, strategy, 1024)
        assert strategy.batch == GOOD.batch, words
        assert strategy != GOOD


def test_what_fits_lacks_nothing():
    assert shortages(forecast(GPT3, MACHINE, GOOD)) == ()


def test_what_does_not_fit_says_by_how_much_where_and_what_would():
    strategy = Strategy(batch=1536, tp=8, pp=2, dp=64)
    tight = forecast(GPT3, MACHINE, strategy)
    lacking = shortages(tight)
    assert [(one.stage, one.first_rank, one.last_rank) for one in lacking] == [
        (0, 0, 511),
        (1, 512, 1023),
    ]
    fullest = max(one.missing_bytes for one in lacking)
    assert fullest == pytest.approx(tight.memory.total - tight.capacity_bytes)
    ways = ways_to_fit(tight)
    assert ways
    assert all(way.ranked.forecast.fits for way in ways)
    steps = [way.ranked.forecast.step_s for way in ways]
    assert steps == sorted(steps)
    assert all(way.change for way in ways)


def test_two_changes_are_tried_where_one_is_not_enough():
    tight = forecast(GPT3, MACHINE, Strategy(batch=1024, dp=1024))
    ways = ways_to_fit(tight)
    assert ways
    assert any("," in way.change for way in ways) or all(way.ranked.forecast.fits for way in ways)


def test_where_nothing_fits_nothing_is_listed():
    machine = machine_of(resolve("1xA100"))
    assert ways_to_fit(forecast(GPT3, machine, Strategy(batch=1))) == ()


def test_worse_parameters_never_make_a_step_faster():
    report = sensitivity(forecast(GPT3, MACHINE, GOOD))
    assert [shift.name for shift in report.shifts] == [name for name, *_ in SHIFTS]
    for shift in report.shifts:
        assert shift.step_s >= report.forecast.step_s
        assert shift.winner_s <= shift.step_s
        assert shift.factor >= 1
    assert report.winner.step_s == min(one.step_s for one in report.compared)


def test_rivals_may_be_given_and_the_winner_is_among_them():
    slow = replace(GOOD, tp=2, dp=64)
    report = sensitivity(forecast(GPT3, MACHINE, GOOD), [slow])
    assert {one.strategy for one in report.compared} == {GOOD, slow}
    assert all(shift.winner in (GOOD, slow) for shift in report.shifts)


def test_another_strategy_wins_where_links_are_worse():
    """Tensor parallelism across nodes hangs on links; data parallelism of a small model less so."""
    model, machine = transformer_of("gpt2-xl"), machine_of(resolve("2x8xA100"))
    far = Strategy(batch=64, tp=1, dp=16)
    report = sensitivity(forecast(model, machine, replace(far, zero=3)), [far])
    links = next(shift for shift in report.shifts if shift.name == "links")
    assert links.step_s / report.forecast.step_s > 1
    assert links.winner in (far, replace(far, zero=3))


def test_interference_stops_at_one_after_the_other():
    moved, factor = worse(MACHINE, ("interference",), ())
    assert moved.physics.interference <= max(1.0, MACHINE.physics.interference)
    assert factor >= 1


def test_shares_shrink_and_times_grow_by_their_standard_error():
    sure = dict(MACHINE.physics_set.parameters)
    moved, factor = worse(MACHINE, ("host_s",), ("products",))
    assert moved.physics.host_s == pytest.approx(MACHINE.physics.host_s * (1 + sure["host_s"].sure))
    assert moved.physics.products == pytest.approx(
        MACHINE.physics.products / (1 + sure["products"].sure)
    )
    assert factor == pytest.approx(1 + max(sure["host_s"].sure, sure["products"].sure))
