"""Bounds of lines of stages and of virtual stages, against every cut and against real orders.

Longest paths of orders: against the engine of the orders, and against every cut.

How evenly segments can be shared out, against trying every way; and rounds of real orders.
"""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.schedules.named import NAMED
from partita.search.joint.orders import (
    USUAL_PATHS,
    Rounds,
    VirtualOrders,
    _longest,
    least_cap,
    least_cuts_s,
    loads_of,
    order_blocks,
    order_bound_s,
    path_weights,
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
        blocks.stage, blocks.columns, blocks.before, blocks.border, rows,
        np.full(2 * p * v, send_s),
    )  # fmt: skip
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
    times, sends = path_weights("zb-v", 32, 2, 1024, (((0.3, 0.3, 0.4),),))
    assert not times.any()
    assert not sends.any()


WORK = st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.5]), min_size=2, max_size=7)


def every_load(work, num_groups):
    for groups in itertools.product(range(num_groups), repeat=len(work)):
        yield np.bincount(groups, weights=work, minlength=num_groups)


@settings(max_examples=60, deadline=None)
@given(WORK, st.integers(2, 3), st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=3, max_size=3))
@pytest.mark.parametrize("most", [3, 40_000])
def test_no_way_to_share_segments_out_is_below_the_least_cap(most, work, num_groups, waits):
    work, waits = np.array(work), np.array(waits[:num_groups])
    bound = least_cap(loads_of(work, most), waits, float(work.sum() + waits.sum()) / num_groups)
    least = min(float((load + waits).max()) for load in every_load(work, num_groups))
    assert bound <= least * (1 + 1e-6)


def test_equal_segments_that_groups_cannot_share_evenly_raise_the_bound():
    loads = loads_of(np.array([1.0] * 7))
    assert least_cap(loads, np.zeros(3), 7 / 3) == pytest.approx(3.0, rel=1e-6)
    # A quarter more is no help to groups of two.
    assert least_cap(loads_of(np.array([*[1.0] * 7, 0.25])), np.zeros(3), 2.5) == pytest.approx(3.0)


@settings(max_examples=60, deadline=None)
@given(WORK, st.integers(2, 3), st.integers(1, 3), st.sampled_from([0.0, 0.3]))
def test_no_way_to_share_rounds_out_is_below_the_least_cap(work, num_groups, rounds, sent_s):
    work = np.array(work)
    own = Rounds(num_groups, 2 * num_groups, rounds, sent_s)
    bound = least_cap(loads_of(work), np.zeros(num_groups), own.even_s(work.sum()), own)
    steps = [
        max(float(load.max()), own.least_s(float(load.sum()), load))
        for load in every_load(work, num_groups)
    ]
    assert own.even_s(work.sum()) * (1 - 1e-6) <= bound <= min(steps) * (1 + 1e-6)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 2), (2, 3, 4), (3, 4, 9), (4, 2, 4), (4, 6, 8)])
def test_interleaved_groups_run_p_forwards_of_every_earlier_round_before_a_stage(p, v, m):
    """What the bound of rounds rests on, read off the order itself."""
    for rank, row in enumerate(NAMED["interleaved"].order(p, v, m)):
        for c in range(v):
            stage = c * p + rank
            first = next(i for i, a in enumerate(row) if (a.kind, a.stage) == ("F", stage))
            assert [a.kind for a in row[:first]] == ["F"] * (c * p)
            assert sorted((a.stage, a.microbatch) for a in row[:first]) == [
                (k * p + rank, i) for k in range(c) for i in range(p)
            ]
            last = max(
                i for i, a in enumerate(row) if (a.kind, a.stage) == ("B", stage)
            )  # fmt: skip
            assert row[last].microbatch == m - 1
            assert sorted((a.kind, a.stage, a.microbatch) for a in row[last + 1 :]) == [
                ("B", k * p + rank, i) for k in range(c) for i in range(m - p, m)
            ]
