"""Pictures inside of pages: cells with units and nodes, names that keep clear of marks."""

import re

import pytest

from partita.report.charts import ChartLine, line_chart
from partita.report.figures import Mark, interval_bars, linear_axes, matrix, scatter, short_size


@pytest.mark.parametrize(
    ("size", "short", "whole"),
    [(0, "0", "0"), (2048, "2.0K", "2.0 KiB"), (1.3 * 2**30, "1.3G", "1.3 GiB"),
     (100 * 2**20, "100M", "100 MiB")],
)  # fmt: skip
def test_a_cell_says_its_unit_where_it_has_room(size, short, whole):
    assert short_size(size) == short
    assert short_size(size, True) == whole


def test_lines_of_a_matrix_lie_between_nodes_only():
    values = [[0.0, 2.0**20, 0.0], [0.0, 0.0, 2.0**30], [0.0] * 3]
    names = ["n0.gpu0", "n0.gpu1", "n1.gpu0"]
    texts = [["x"] * 3] * 3
    together = matrix("bytes", values, names, names, texts, ["n0"] * 3)
    apart = matrix("bytes", values, names, names, texts, ["n0", "n0", "n1"])
    assert together.count('stroke-width="1.6"') == 0
    assert apart.count('stroke-width="1.6"') == 1
    assert ">1.0 GiB</text>" in apart


def test_names_of_marks_keep_clear_of_marks_and_of_each_other():
    marks = [
        Mark(1.0 + n / 50, 5.0, "#123456", "", 6.0, label=f"name number {n}") for n in range(8)
    ]
    marks.append(Mark(9.0, 9.0, "#123456", "", 6.0, label="alone"))
    axes = linear_axes([0.1, 10.0], [0.1, 10.0])
    picture = scatter("marks", marks, "x", "y", (), axes)
    told = re.findall(
        r'<text x="([0-9.]+)" y="([0-9.]+)" textLength="([0-9]+)"[^>]*>([^<]+)', picture
    )
    assert "alone" in [text for *_, text in told]
    assert len(told) < 9  # the rest has no room
    boxes = [
        (float(x), float(y) - 10, float(x) + float(wide), float(y) + 2) for x, y, wide, _ in told
    ]
    boxes += [
        (axes[0].at(m.x) - 6, axes[1].at(m.y) - 6, axes[0].at(m.x) + 6, axes[1].at(m.y) + 6)
        for m in marks[:1]
    ]
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_bars_are_as_wide_as_the_window_and_say_their_figures_first():
    rows = [("a", 5.0, 4.0, 6.0, "5 ms"), ("<b>", 10.0, 8.0, 20.0, "10 ms")]
    picture = interval_bars("steps", rows, "step, ms", bound=4.5)
    assert "viewBox" not in picture  # letters keep their size
    wide = [float(part) for part in re.findall(r'<rect x="0"[^>]*width="([0-9.]+)%"', picture)]
    assert wide[1] == pytest.approx(2 * wide[0], rel=1e-2)
    places = [float(part) for part in re.findall(r'x[12]?="([0-9.]+)%"', picture)]
    assert max(places) <= 100
    assert picture.index(">5 ms<") < picture.index(">a<")
    assert "<b>" not in picture
    assert picture.count("lower bound") == 1


def test_lines_of_a_chart_are_told_apart_without_colour():
    lines = [ChartLine(f"way {n}", ((1.0, 5.0 + n), (10.0, 2.0 + n))) for n in range(4)]
    picture = line_chart("best so far", lines, "evaluations", "step, ms")
    drawn = re.findall(r'<path d="[^"]*" fill="none" stroke="#[0-9a-f]+"[^>]*?>', picture)
    broken = [re.search(r'dasharray="([^"]+)"', path) for path in drawn[-4:]]
    assert len({match[1] if match else "" for match in broken}) == 4
    named = re.findall(r'<path d="M[0-9.]+ [0-9.]+h18"[^>]*>', picture)
    assert len({path.split("stroke-width")[1] for path in named}) == 4  # the legend has the same
