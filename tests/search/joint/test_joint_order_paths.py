"""Longest paths of orders: against the engine of the orders, and against every cut."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from partita.schedules.named import NAMED
from partita.search.joint.order_bounds import (
    USUAL_PATHS,
    _longest,
    order_blocks,
    order_bound_s,
    path_weights,
)
from tests.search.joint.order_runs import chain, seconds_of, simulated


@pytest.mark.parametrize(
    ("name", "p", "v", "m"),
    [("zb-v", 2, 2, 4), ("zb-v", 3, 2, 6), ("zb-v", 4, 2, 4), ("hanayo", 2, 2, 2),
     ("interleaved", 2, 3, 4), ("1f1b", 3, 1, 5), ("zb-h1", 3, 1, 4)],
)  # fmt: skip
@pytest.mark.parametrize("send_s", [0.0, 0.7])
def test_the_longest_path_is_the_step_and_has_what_it_says(name, p, v, m, send_s):
    rng = np.random.default_rng(p + m)
    seconds = seconds_of(*rng.uniform(0.5, 2.0, (3, p * v)))
    step = simulated(
        NAMED[name].order(p, v, m), range(p * v + 1), seconds, chain(p * v),
        fused=not NAMED[name].split, send_s=send_s,
    )  # fmt: skip
    blocks = order_blocks(name, p, v, m)
    rows = np.array([seconds.forward, seconds.backward, seconds.weights]).T
    longest, times, sends = _longest(
        blocks.stage, blocks.columns, blocks.before, blocks.border, rows, send_s
    )
    if NAMED[name].layout == "wave" or v == 1:  # a looped order sends at every border
        assert longest == pytest.approx(step)
    assert float((times * rows).sum() + send_s * sends.sum()) == pytest.approx(longest)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 4), (2, 5), (3, 6)])
def test_no_cut_of_a_wave_is_below_its_weighted_paths(p, m):
    n = 2 * p + 3
    rng = np.random.default_rng(10 * p + m)
    seconds = seconds_of(*rng.choice([0.5, 1.0, 1.3], (3, n)))
    row = NAMED["zb-v"].order(p, 2, m)
    for send_s in (0.0, 0.4):
        cuts_s = np.full(n - 1, 2 * send_s)
        bound = order_bound_s(["zb-v"], p, 2, m, m * seconds.total, seconds, cuts_s)
        steps = [
            simulated(row, (0, *inner, n), seconds, chain(n), fused=False, send_s=send_s)
            for inner in itertools.combinations(range(1, n), 2 * p - 1)
        ]
        assert bound <= min(steps) * (1 + 1e-9)


def test_parts_of_a_segment_that_are_least_under_different_splits_do_not_add_up():
    """The least of all gradients may be more than the least of its parts together."""
    n, p, m = 12, 2, 4
    real = seconds_of([1.0] * n, [1.5] * n, [0.5] * n)
    known = replace(real, backward=np.full(n, 0.2), weights=np.full(n, 0.5))  # other splits' least
    step = simulated(NAMED["zb-v"].order(p, 2, m), range(0, n + 1, 3), real, chain(n), fused=False)
    bound = order_bound_s(["zb-v"], p, 2, m, m * real.total, known, np.zeros(n - 1))
    assert bound <= step


def test_uneven_phases_leave_a_wave_with_bubbles_that_no_cut_removes():
    n, p, m = 96, 4, 8
    seconds = seconds_of([1.0] * n, [1.3] * n, [0.7] * n)
    bound = order_bound_s(["zb-v"], p, 2, m, m * seconds.total, seconds, np.zeros(n - 1))
    even = m * float(seconds.total.sum()) / p
    step = simulated(
        NAMED["zb-v"].order(p, 2, m), range(0, n + 1, 12), seconds, chain(n), fused=False
    )
    assert 1.03 * even < bound <= step


def test_a_first_segment_without_gradients_may_be_a_stage_that_waits_for_none():
    n, p, m = 9, 2, 4
    seconds = seconds_of([0.0] + [1.0] * 8, [0.0] + [1.0] * 8, [0.0] + [1.0] * 8)
    bound = order_bound_s(["zb-v"], p, 2, m, m * seconds.total, seconds, np.zeros(n - 1), 1)
    free = order_blocks("zb-v", p, 2, m, 1)
    held = order_blocks("zb-v", p, 2, m)
    assert (free.before >= 0).sum() == (held.before >= 0).sum() - m
    assert bound <= order_bound_s(
        ["zb-v"], p, 2, m, m * seconds.total, seconds, np.zeros(n - 1)
    ) * (1 + USUAL_PATHS.close)


def test_orders_of_too_many_blocks_are_not_looked_at():
    times, sends = path_weights("zb-v", 32, 2, 1024, ((0.3, 0.3, 0.4),))
    assert not times.any()
    assert not sends.any()
