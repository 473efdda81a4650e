"""A traced run as lanes: nothing that a rank did gets lost where records lie inside each other."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.jobs.measured_lanes import one_at_a_time

MOMENTS = st.integers(0, 30)


def test_a_block_that_waits_for_its_message_is_shown_before_and_after_it():
    block, receive = (1.0, 10.0), (2.0, 7.0)
    assert one_at_a_time([block, receive]) == [(0, 1.0, 2.0), (1, 2.0, 7.0), (0, 7.0, 10.0)]


def test_what_overlaps_its_follower_ends_where_that_begins():
    assert one_at_a_time([(0.0, 5.0), (3.0, 8.0)]) == [(0, 0.0, 3.0), (1, 3.0, 8.0)]
    assert one_at_a_time([]) == []
    assert one_at_a_time([(2.0, 2.0)]) == []


@given(st.lists(st.tuples(MOMENTS, MOMENTS).map(sorted).map(tuple), max_size=12))
def test_parts_cover_what_the_spans_cover_and_one_is_shown_at_a_time(spans):
    parts = one_at_a_time([(float(a), float(b)) for a, b in spans])
    for (_, _, end), (_, start, _) in itertools.pairwise(parts):
        assert end <= start
    covered, shown = np.zeros(31, bool), np.zeros(31, bool)
    for a, b in spans:
        covered[a:b] = True
    for place, a, b in parts:
        assert spans[place][0] <= a < b <= spans[place][1]
        shown[int(a) : int(b)] = True
    assert (covered == shown).all()
    assert sum(b - a for _, a, b in parts) == pytest.approx(int(covered.sum()))
