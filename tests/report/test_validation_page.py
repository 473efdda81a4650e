"""The page of a validation: every name as text, every run a point, nothing from elsewhere."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from partita.jobs.published import PublishedRun, read_rows
from partita.jobs.validate import Validation, validate
from partita.report.scatter import Cloud, CloudPoint, error_chart, ratio_chart, scatter_chart
from partita.report.validation_page import validation_page
from tests.report.browser import needs_chromium, quiet

GOLDEN = Path(__file__).parent / "golden"
FILE = Path(__file__).parents[1] / "data" / "validate" / "rows.json"


@pytest.fixture(scope="module")
def rows() -> dict[str, PublishedRun]:
    return {row.id: row for row in read_rows(FILE)[0]}


@pytest.fixture(scope="module")
def validation() -> Validation:
    return validate(*read_rows(FILE))


def test_the_page_escapes_names_and_needs_nothing_from_elsewhere(rows):
    row = replace(rows["vtrain-single-000"], id="<b>x</b>", group="<i>g")
    page = validation_page(validate([row]), "<u>.json", 1)
    assert "<b>x" not in page
    assert "<i>g" not in page
    assert "<u>" not in page
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page
    assert page.count("<svg") == page.count("</svg>") == 3


def test_the_page_has_a_point_for_every_time_in_both_plots(validation):
    page = validation_page(validation, "rows.json", 1)
    assert page.count('class="mark"') == 2 * validation.total.both.n + len(validation.memory.points)


def test_charts_of_nothing_and_of_one_point_are_drawn():
    one = [Cloud("a", (CloudPoint("p", 1.0, 1.0),))]
    for chart in (scatter_chart, ratio_chart):
        assert "nothing to draw" in chart("t", [], "x", "y")
        assert chart("t", one, "x", "y", band=1.1).count('class="mark"') == 1
    assert "<rect" in error_chart("t", [("a", [0.0, -99.0, 99.0])], "x")
    assert "below -35 %" in error_chart("t", [("a", [-99.0])], "x")
    assert "+35 % and more" in error_chart("t", [("a", [99.0])], "x")


def test_a_point_outside_its_interval_is_hollow(rows):
    row = rows["vtrain-single-000"]
    far = validation_page(validate([replace(row, measured_s=1e-3)]), "rows.json", 1)
    exact = replace(row, measured_s=validate([row]).checked[0].predicted_s)
    near = validation_page(validate([exact]), "rows.json", 1)
    assert far.count('fill="#fff" fill-opacity') == 2
    assert near.count('fill="#fff" fill-opacity') == 0


@needs_chromium
def test_a_click_hides_a_group_in_all_charts(validation, browser):
    tab = browser.open(validation_page(validation, "rows.json", 1))
    tab.click(".groups button")
    document = tab.run("document.documentElement.outerHTML")
    assert quiet(tab)
    tab.close()
    hidden = re.findall(r'<g data-group="(\d+)"[^>]* style="display: none;">', document)
    assert hidden == ["0"] * 4


def test_charts_are_as_they_were(is_golden):
    clouds = [
        Cloud("first", (CloudPoint("a & b", 0.1, 0.12), CloudPoint("c", 3.0, 2.5, far=True))),
        Cloud("second", (CloudPoint("d", 20.0, 21.0),)),
    ]
    texts = (
        scatter_chart("scatter", clouds, "measured, s", "predicted, s", band=1.2),
        ratio_chart("ratio", clouds, "measured, s", "ratio", band=1.2),
        error_chart("errors", [("first", [20.0, -16.7]), ("second", [5.0, 99.0])], "per cent"),
    )
    is_golden(GOLDEN / "scatter.html", "".join(texts))
