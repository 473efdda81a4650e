"""Bounds of lines of stages and of virtual stages, against every cut and against real orders."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.schedules.named import NAMED
from partita.search.joint.order_bounds import (
    VirtualOrders,
    least_cuts_s,
    paths_of,
    range_costs,
    range_sums,
    refused,
)
from tests.search.joint.order_runs import chain, seconds_of, simulated

SECONDS = st.sampled_from([0.0, 1.0, 2.0, 5.0]) | st.floats(0, 6)


@st.composite
def segments(draw, least=2, most=7):
    n = draw(st.integers(least, most))
    column = st.lists(SECONDS, min_size=n, max_size=n)
    return seconds_of(draw(column), draw(column), draw(column))


@st.composite
def sources(draw, n):
    """Every segment reads from one before it, often from the last."""
    rows = [()]
    for k in range(1, n):
        first = draw(st.sampled_from([k - 1, k - 1, *range(k)]))
        more = draw(st.lists(st.integers(0, k - 1), max_size=1))
        rows.append(tuple(sorted({first, *more})))
    return tuple(rows)


@settings(max_examples=80, deadline=None)
@given(segments(), st.data())
def test_the_least_over_all_cuts_is_that_of_trying_each(seconds, data):
    n = len(seconds.total)
    reads = data.draw(sources(n))
    m, p = data.draw(st.integers(1, 4)), data.draw(st.integers(1, n))
    training = data.draw(st.booleans())
    paths = paths_of(seconds, reads, reads, training=training)
    costs = range_costs(paths, seconds, m, training=training)
    tried = []
    for inner in itertools.combinations(range(1, n), p - 1):
        ends = (0, *inner, n)
        tried.append(max(costs[i, j] for i, j in itertools.pairwise(ends)))
    assert least_cuts_s([costs] * p) == pytest.approx(min(tried))


@settings(max_examples=150, deadline=None)
@given(segments(), st.data())
def test_no_order_of_a_line_is_below_its_bound(seconds, data):
    n = len(seconds.total)
    reads = data.draw(sources(n))
    name = data.draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-h2"]))
    m, p = data.draw(st.integers(1, 5)), data.draw(st.integers(2, n))
    if NAMED[name].refuses(p, 1, m):
        return
    inner = data.draw(st.permutations(range(1, n)))[: p - 1]
    ends = (0, *sorted(inner), n)
    step = simulated(NAMED[name].order(p, 1, m), ends, seconds, reads, fused=not NAMED[name].split)
    paths = paths_of(seconds, reads, reads, training=True)
    costs = range_costs(paths, seconds, m, training=True)
    assert max(costs[i, j] for i, j in itertools.pairwise(ends)) <= step * (1 + 1e-9)
    assert least_cuts_s([costs] * p) <= step * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([("zb-v", 2), ("interleaved", 2), ("interleaved", 3)]), st.data())
def test_no_order_with_virtual_stages_is_below_its_bound(order, data):
    name, v = order
    p = data.draw(st.integers(2, 4))
    m = data.draw(st.sampled_from([p, 2 * p, 3 * p, p + 1]))
    if refused(name, p, v, m):
        return
    seconds = data.draw(segments(p * v, 2 * p * v))
    n = len(seconds.total)
    inner = data.draw(st.permutations(range(1, n)))[: p * v - 1]
    ends = (0, *sorted(inner), n)
    row = NAMED[name].order(p, v, m)
    send_s = data.draw(st.sampled_from([0.0, 0.5, 3.0]))
    step = simulated(row, ends, seconds, chain(n), fused=not NAMED[name].split, send_s=send_s)
    rounds = (v,) if name == "interleaved" else ()
    wave = (name,) if name == "zb-v" else ()
    orders = VirtualOrders(
        p, m, rounds, bool(wave), (2 * send_s,) * (n - 1), (0.25, 0.5, 0.75), True, wave
    )
    bound = orders.wave_s if wave else orders.looped_s
    other = replace(orders, is_chain=False)  # nothing is known of who waits for whom
    weak = other.wave_s if wave else other.looped_s
    assert weak(m * seconds.total, seconds) <= bound(m * seconds.total, seconds) * (1 + 1e-6)
    assert orders.least_s(m * seconds.total, seconds) <= step * (1 + 1e-9)
    assert bound(m * seconds.total, seconds) <= step * (1 + 1e-9)


@pytest.mark.parametrize(("name", "v"), [("zb-v", 2), ("interleaved", 2), ("interleaved", 4)])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_cuts_chosen_to_be_good_are_not_below_the_bound_of_virtual_stages(name, v, p):
    """Unevenly cut stages lose less to bubbles: a search for them must stay above the bound."""
    n, m, rng = 12 * p * v, p, random.Random(p)
    seconds = seconds_of([1.0] * n, [1.0] * n, [1.0] * n)
    row = NAMED[name].order(p, v, m)
    wave = name == "zb-v"
    orders = VirtualOrders(p, m, () if wave else (v,), wave, turn_parts=(0.25, 0.5, 0.75))
    bound = orders.least_s(m * seconds.total, seconds)
    sizes = [12] * (p * v)

    def step_of(sizes):
        ends = (0, *itertools.accumulate(sizes))
        return simulated(row, ends, seconds, chain(n), fused=not wave)

    best = step_of(sizes)
    for _ in range(60):
        other = list(sizes)
        one, two = rng.sample(range(p * v), 2)
        moved = min(rng.choice([1, 2, 4]), other[one] - 1)
        other[one], other[two] = other[one] - moved, other[two] + moved
        if step_of(other) <= best:
            best, sizes = step_of(other), other
    even = m * seconds.total.sum() / p
    assert even * 1.005 < bound <= best


def test_what_is_sent_between_many_rounds_raises_the_bound():
    seconds = seconds_of([1.0] * 96, [1.0] * 96, [1.0] * 96)
    work = 4 * seconds.total
    few, many, both = (
        VirtualOrders(4, 4, rounds, send_s=(0.0, *[0.2] * 94)).least_s(work, seconds)
        for rounds in ((2,), (24,), (2, 24))
    )
    free = VirtualOrders(4, 4, (24,)).least_s(work, seconds)
    assert both == min(few, many)
    # 95 sends there and back, half of them on average; longer steps let late groups have more.
    assert many > 1.015 * free


def test_a_line_of_two_with_one_micro_batch_waits_for_most_of_it():
    seconds = seconds_of([1.0] * 4, [1.0] * 4, [1.0] * 4)
    paths = paths_of(seconds, chain(4), chain(4), training=True)
    costs = range_costs(paths, seconds, 1, training=True)
    # One segment on the first: 1 + 3 forward, 3 + 1 back and its weights, or 1 + 3 x 3.
    assert costs[0, 1] == 9
    assert costs[1, 4] == 10
    assert least_cuts_s([costs, costs]) == 10


def test_sums_of_ranges_are_differences_of_prefixes():
    assert range_sums(np.array([1.0, 2.0, 4.0]))[1, 3] == 6.0
