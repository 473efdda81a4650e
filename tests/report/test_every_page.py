"""Every kind of page alike: readable in both themes, narrow, on paper, by keys, without a sound."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from partita.cli import partita
from partita.jobs.published import read_rows
from partita.jobs.simulate import simulate
from partita.jobs.validate import validate
from partita.report.page import plan_page
from partita.report.validation_page import validation_page
from tests.report.browser import needs_chromium, quiet
from tests.report.contrast import poor_texts
from tests.report.plans import fully_sharded, line

pytestmark = needs_chromium
ROWS = Path(__file__).parents[1] / "data" / "validate" / "rows.json"
# Lines of figures that lie over each other: a number then seems to belong to another line.
OVERLAPS = """
(() => {
  const lines = Array.from(document.querySelectorAll(".tree .line, .card, .legend li"))
    .filter((e) => e.checkVisibility({contentVisibilityAuto: true}))
    .map((e) => [e.textContent, e.getBoundingClientRect()]).filter(([, b]) => b.width && b.height);
  return lines.filter(([, a], i) => lines.slice(i + 1).some(([, b]) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1))
    .map(([text]) => text);
})()
"""
UNREACHED = """
Array.from(document.querySelectorAll("button, input, select, canvas, summary, a[href],"
    + "[role=button], svg[role=img]"))
  .filter((e) => !((e.getAttribute("aria-label") || "") + e.textContent).trim()
    || (e.tagName !== "svg" && e.tabIndex < 0))
  .map((e) => e.outerHTML.slice(0, 90))
"""
EXPERIMENT = """
name = "two"
evaluations = 300
[[networks]]
model = "alexnet"
[[clusters]]
cluster = "malvik"
[[optimisers]]
method = "map-elites"
parameters = { rounds = 6, brood = 50 }
[[optimisers]]
method = "annealing"
"""


def pipelined(folder: Path) -> str:
    plan = line("squeezenet1_1@64", "2x2xA100", 4, batch=8)
    return plan_page(plan, simulate(plan))


def sharded(folder: Path) -> str:
    plan = fully_sharded("squeezenet1_1@64", "2xA100+1xV100", batch=12)
    return plan_page(plan, simulate(plan))


def validated(folder: Path) -> str:
    rows, left_out = read_rows(ROWS)
    return validation_page(validate(rows, left_out), "rows.json", len(rows))


def written(folder: Path, *words: str, name: str = "page.html") -> str:
    """What a command writes; its last word is the name."""
    answer = CliRunner().invoke(partita, [*words, str(folder / name)])
    assert answer.exit_code == 0, answer.output
    return (folder / name).read_text()


def timeline(folder: Path) -> str:
    plan = line("squeezenet1_1@64", "2xA100", 4, batch=8)
    (folder / "run.json").write_bytes(simulate(plan).timeline.to_json())
    return written(folder, "report", str(folder / "run.json"), "--quiet", "-o")


def experimented(folder: Path, name: str = "index.html") -> str:
    (folder / "two.toml").write_text(EXPERIMENT)
    out = folder / "out"
    answer = CliRunner().invoke(partita, ["experiment", str(folder / "two.toml"), "-o", str(out)])
    assert answer.exit_code == 0, answer.output
    return (out / name).read_text()


def drawn(folder: Path) -> str:
    """The charts of an experiment by themselves: its page holds them as pictures."""
    experimented(folder)
    charts = sorted((folder / "out" / "charts").glob("*.svg"))
    assert len(charts) > 2
    dark = "@media screen and (prefers-color-scheme:dark){body{background:#0d1117}}"
    head = f"<!doctype html><title>c</title><style>body{{background:#fff}}{dark}</style>"
    return head + "".join(chart.read_text() for chart in charts)


def answer(*words: str) -> Callable[[Path], str]:
    return lambda folder: written(folder, *words)


PAGES: dict[str, Callable[[Path], str]] = {
    "plan of a pipeline": pipelined,
    "plan of one stage": sharded,
    "timeline": timeline,
    "schedule": answer(
        "schedule", "vshape", "--devices", "2", "--microbatches", "4", "--compare", "--page"
    ),
    "streams": answer(
        "streams", "squeezenet1_1@64", "--device", "analytic", "--method", "greedy", "-o"
    ),
    "rtasks": answer("rtasks", "lstm@2", "--method", "list", "-o"),
    "placement": answer(
        "place", "alexnet", "--cluster", "malvik", "--method", "map-elites", "--time-limit", "0.3",
        "--page",
    ),
    "validation": validated,
    "experiment": experimented,
    "animation": lambda folder: experimented(folder, "animation.html"),
}  # fmt: skip


@pytest.fixture(scope="module", params=PAGES.values(), ids=list(PAGES))
def tab(request, tmp_path_factory, browser):
    """Each page once; every test says itself how wide and in which colours it is shown."""
    shown = browser.open(request.param(tmp_path_factory.mktemp("page")))
    yield shown
    shown.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_the_contrast_of_wcag_aa(tab, theme):
    tab.media(prefers_color_scheme=theme)
    seen, poor = poor_texts(tab)
    assert poor == []
    assert seen > 20
    assert quiet(tab)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_charts_that_a_page_holds_as_pictures_have_it_too(browser, tmp_path, dark):
    tab = browser.open(drawn(tmp_path), dark=dark)
    assert poor_texts(tab)[1] == []
    tab.close()


def test_a_window_of_400_pixels_shows_it_without_moving_sideways(tab):
    tab.ask("Emulation.setEmulatedMedia", media="")
    tab.size(400, 900)
    tab.frames()
    assert tab.run("document.documentElement.scrollWidth") <= 400
    assert tab.run(OVERLAPS) == []


def test_it_prints_on_a4_without_losing_its_right_side(tab):
    tab.ask("Emulation.setEmulatedMedia", media="")
    boxes = set(re.findall(rb"/MediaBox \[\s*0 0 ([0-9.]+) ([0-9.]+)\]", tab.printed()))
    assert {(round(float(w)), round(float(h))) for w, h in boxes} <= {(595, 842), (594, 842)}
    tab.ask("Emulation.setEmulatedMedia", media="print")
    tab.size(688, 1000)  # what A4 leaves between its margins
    tab.frames()
    assert tab.run("document.documentElement.scrollWidth") <= 688


def test_everything_that_answers_is_reached_and_named_by_keys(tab):
    assert tab.run(UNREACHED) == []
