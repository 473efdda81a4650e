"""Layouts: nothing overlaps, arrows run down, and simple pictures are drawn simply."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.graph.layout import GAP_Y, layered
from tests.quickness import least_cpu_s


@st.composite
def pictures(draw):
    count = draw(st.integers(0, 14))
    sizes = [(draw(st.floats(20, 200)), draw(st.floats(10, 40))) for _ in range(count)]
    pairs = st.tuples(*[st.integers(0, max(0, count - 1))] * 2)
    return sizes, draw(st.lists(pairs, max_size=25)) if count else []


@settings(max_examples=100, deadline=None)
@given(picture=pictures())
def test_boxes_stay_inside_and_do_not_touch(picture):
    sizes, edges = picture
    layout = layered(sizes, edges)
    boxes = [
        (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
        for x, y, (w, h) in zip(layout.x, layout.y, sizes, strict=True)
    ]
    for left, top, right, bottom in boxes:
        assert left >= -1e-6
        assert top >= -1e-6
        assert right <= layout.width + 1e-6
        assert bottom <= layout.height + 1e-6
    for a, b in itertools.combinations(boxes, 2):
        apart = a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]
        assert apart


@settings(max_examples=100, deadline=None)
@given(picture=pictures())
def test_edges_run_down_from_box_to_box(picture):
    sizes, edges = picture
    layout = layered(sizes, edges)
    assert len(layout.edges) == len(edges)
    for edge, points in zip(edges, layout.edges, strict=True):
        if edge[0] == edge[1]:
            assert points == ()
            continue
        a, b = sorted(edge)
        assert points[0] == pytest.approx((layout.x[a], layout.y[a] + sizes[a][1] / 2))
        assert points[-1] == pytest.approx((layout.x[b], layout.y[b] - sizes[b][1] / 2))
        for (_, upper), (_, lower) in itertools.pairwise(points):
            assert lower >= upper - 1e-6


def crosses_a_box(points, layout, sizes, ends):
    """Does an edge run through a box where it is straight?"""
    for (x, top), (right, bottom) in itertools.pairwise(points):
        for i, (w, h) in enumerate(sizes):
            beside = x != right or i in ends or abs(x - layout.x[i]) >= w / 2
            above = bottom <= layout.y[i] - h / 2 + 1e-6
            if not (beside or above or top >= layout.y[i] + h / 2 - 1e-6):
                return True
    return False


@settings(max_examples=100, deadline=None)
@given(picture=pictures())
def test_long_edges_run_beside_the_boxes(picture):
    sizes, edges = picture
    layout = layered(sizes, edges)
    for edge, points in zip(edges, layout.edges, strict=True):
        assert not crosses_a_box(points, layout, sizes, edge)


def test_a_chain_is_one_straight_line():
    layout = layered([(50, 20), (120, 20), (80, 20)], [(0, 1), (1, 2)])
    assert len(set(layout.x)) == 1
    assert layout.height == 60 + 2 * GAP_Y


def test_a_diamond_is_symmetric_and_has_no_crossing():
    layout = layered([(60, 20)] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    top, left, right, bottom = layout.x
    assert left < top < right
    assert top == bottom == (left + right) / 2


def test_a_skip_runs_straight_beside_its_block():
    layout = layered([(60, 20)] * 5, [(0, 1), (1, 2), (2, 3), (0, 3), (3, 4)])
    skip = layout.edges[3]
    assert len({x for x, _ in skip[1:-1]}) == 1
    assert layout.x[1] == layout.x[2]


def test_two_crossed_pairs_are_uncrossed():
    layout = layered([(60, 20)] * 4, [(0, 3), (1, 2)])
    (a, b, c, d) = layout.x
    assert (a < b) == (d < c)


def test_a_source_stands_just_above_its_reader():
    layout = layered([(60, 20)] * 5, [(0, 1), (1, 2), (3, 4), (2, 4)])
    assert layout.y[3] == layout.y[2]


def test_layouts_are_the_same_every_time():
    edges = [(i, j) for i in range(20) for j in range(i + 1, 20) if (i * j) % 5 == 1]
    assert layered([(50, 20)] * 20, edges) == layered([(50, 20)] * 20, edges)


def test_hundreds_of_boxes_are_placed_in_a_moment():
    edges = [(i, i + 1) for i in range(299)] + [(i, i + 40) for i in range(0, 260, 3)]
    assert least_cpu_s(lambda: layered([(80, 30)] * 300, edges), 5) < 5
