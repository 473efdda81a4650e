"""Curves over numbers of devices, prices, fronts, deadlines and budgets."""

from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.errors import InputError
from partita.jobs.curve import (
    Curve,
    CurvePoint,
    CurveTask,
    cluster_of,
    curve,
    device_numbers,
    pareto_front,
)
from partita.jobs.prices import Prices, read_prices
from partita.jobs.sweep import Sweeper
from partita.report.curve import choice_text, curve_json, curve_text

POINT = CurvePoint(8, "8xA100", "dp=8", "ddp", 1.0, (0.9, 1.1), 1.0, 40e9, 16.0, True)
WIDE = replace(POINT, num_devices=16, cluster="16xA100", objective_s=0.6, price_per_hour=32.0)
THIN = replace(POINT, objective_s=1.2, peak_memory_bytes=10e9, is_best=False)
WORSE = replace(POINT, objective_s=1.3, is_best=False)
CURVE = Curve((POINT, THIN, WORSE, WIDE), ((32, "nothing fits"),), {}, {8: 0.9})


def test_a_point_is_on_the_front_unless_another_beats_it():
    assert pareto_front((POINT, THIN, WORSE, WIDE)) == (POINT, THIN, WIDE)
    assert pareto_front((POINT, POINT)) == (POINT,)


def test_a_deadline_takes_the_cheapest_and_a_budget_the_fastest():
    assert CURVE.choice(3600, 3600.0, None) == POINT
    assert CURVE.choice(3600, 3000.0, None) == WIDE
    assert CURVE.choice(3600, None, 17.0) == POINT
    assert CURVE.choice(3600, None, 20.0) == WIDE
    assert CURVE.choice(3600, 3000.0, 17.0) is None
    assert CURVE.choice(1, None, None) == WIDE


def test_curves_are_told_with_what_is_missing():
    prices = Prices((("", 2.0),), "EUR")
    text = curve_text(CURVE, None, prices)
    assert "32 devices: nothing fits" in text
    assert "16.00 EUR" in text
    assert "x1.67" in text
    assert "no point keeps that" in choice_text(None, 10, 5.0, None, prices)
    assert "for 16.00 EUR" in choice_text(POINT, 3600, None, 20.0, prices)
    answer = curve_json(CURVE, "gpt2", "8xA100", POINT)
    assert [point["on_front"] for point in answer["points"]] == [True, True, False, True]


def test_numbers_of_devices_double_or_are_listed():
    assert device_numbers("8..64") == (8, 16, 32, 64)
    assert device_numbers("8..100") == (8, 16, 32, 64, 100)
    assert device_numbers("12,4,4") == (4, 12)
    for wrong in ("8..4", "8...9", "x", "0", "4,,5"):
        with pytest.raises(InputError, match="--devices"):
            device_numbers(wrong)


def test_clusters_are_made_of_like_nodes():
    assert cluster_of("8xH100", 4) == "4xH100"
    assert cluster_of("8xH100", 32) == "4x8xH100"
    assert cluster_of("2x4xA100", 16) == "4x4xA100"
    with pytest.raises(InputError, match="no whole number of nodes of 8"):
        cluster_of("8xH100", 12)
    for wrong in ("4xV100+8xP100", "malvik", "machine.toml"):
        with pytest.raises(InputError, match="other numbers of devices"):
            cluster_of(wrong, 8)


def test_a_price_list_must_have_every_kind(tmp_path):
    machine = resolve("2xV100+2xP100")
    path = tmp_path / "prices.toml"
    path.write_text('currency = "USD"\n[per_hour]\nV100 = 2\n')
    with pytest.raises(InputError, match="has no price of P100"):
        read_prices(str(path), machine)
    path.write_text('currency = "USD"\n[per_hour]\nV100 = 2\nP100 = 0.5\n')
    prices = read_prices(str(path), machine)
    assert prices.of_devices(machine, range(4)) == 5.0
    assert prices.words(0.01234) == "0.0123 USD"
    assert read_prices("2.5", machine).of_devices(machine, [0, 3]) == 5.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("V100 = 2", "has no table"),
        ("[per_hour]\nV100 = 'much'", "found 'much'"),
        ("[per_hour", "is no TOML"),
        ("[per_hour]\nV100 = -1", "found -1"),
    ],
)
def test_price_lists_that_say_nothing_are_refused(tmp_path, text, message):
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_prices(str(path), resolve("2xV100"))
    with pytest.raises(InputError, match="--price"):
        read_prices("cheap", resolve("2xV100"))


def test_a_curve_plans_each_number_of_devices():
    task = CurveTask("squeezenet1_1", "1xV100", 1, batch=8, time_s=2.0, gap=1.0, price="2")
    tasks = [task, replace(task, cluster="2xV100", num_devices=2)]
    answer = curve(tasks, Sweeper(1))
    assert [point.num_devices for point in answer.best] == [1, 2]
    assert answer.best[1].objective_s < answer.best[0].objective_s
    assert answer.best[1].price_per_hour == 4.0
    assert answer.plans["2xV100"]["cluster"]["spec"] == "2xV100"
    wrong = curve([replace(task, pin=("pp=7",))], Sweeper(1))
    assert wrong.missing[0][0] == 1
    assert "pp" in wrong.missing[0][1]
