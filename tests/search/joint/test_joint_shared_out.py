"""How evenly segments can be shared out, against trying every way; and rounds of real orders."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.schedules.named import NAMED
from partita.search.joint.order_bounds import Rounds, least_cap, loads_of

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
