"""A lane in thousandths of a step, as text that goes both ways."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import PlanError
from partita.timeline import WHOLE, LaneSketch, Span


@st.composite
def spans(draw):
    cuts = sorted(draw(st.sets(st.integers(1, WHOLE - 1), max_size=12)))
    borders = [0, *cuts, WHOLE]
    kinds = st.tuples(st.sampled_from("FBDWUCSRX"), st.integers(-1, 10**9 - 1))
    return [
        Span(begin, end, *draw(st.one_of(st.just(("", -1)), kinds)))
        for begin, end in itertools.pairwise(borders)
    ]


@given(spans())
def test_spans_are_read_as_they_were_written(lane):
    assert list(LaneSketch("gpu", " ".join(map(str, lane))).parts()) == lane


@pytest.mark.parametrize("text", [
    "", "F0:999", "F0:1001", "F0:500 B0:501", "Q0:1000", "F0", "-3:1000", "F-1:1000", "F0:10000",
    "<b>:1000", "F0:1000,", "F٣:1000",
])  # fmt: skip
def test_what_tells_no_lane_is_refused_with_how_to_write_it(text):
    with pytest.raises(PlanError, match=r"write spans like F0:12 -:3 that add up to 1000"):
        LaneSketch("gpu", text)


def test_a_sketch_of_no_lane_is_refused():
    with pytest.raises(PlanError, match="does not tell"):
        LaneSketch("gpu", "-:1000", 0)
