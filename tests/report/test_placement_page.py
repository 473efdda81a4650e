"""A placement in pictures: who has which ops, in the order of the model."""

import itertools
import re

from partita.report.placement_page import placement_strip

OPS = [("a", "gpu0"), ("b", "gpu0"), ("<c>", "gpu1"), ("d", "gpu0")]


def test_runs_of_ops_stand_in_the_row_of_their_device_and_cover_the_model():
    strip = placement_strip(["cpu", "gpu0", "gpu1"], OPS)
    drawn = re.findall(
        r'<rect x="([0-9.]+)" y="([0-9]+)" width="([0-9.]+)" height="20" rx="2"[^>]*>'
        r"<title>([^<]*)</title>",
        strip,
    )
    assert [title for *_, title in drawn] == ["gpu0: a … b (2 ops)", "gpu1: &lt;c&gt;", "gpu0: d"]
    rows = [y for _, y, _, _ in drawn]
    assert rows[0] == rows[2] != rows[1]
    edges = [(float(x), float(x) + float(wide)) for x, _, wide, _ in drawn]
    assert all(0 <= b[0] - a[1] < 1 for a, b in itertools.pairwise(edges))
    assert ">cpu<" not in strip  # it has nothing


def test_a_placement_of_nothing_has_no_strip():
    assert placement_strip(["gpu0"], []) == ""
