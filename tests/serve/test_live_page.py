"""The live page in a real browser: what is moved is answered, two browsers, dark, narrow, text."""

import re

import pytest
from live_server import HOSTILE

from partita.report.page_memory import WORDS
from partita.report.palette import PART_COLORS
from tests.report.browser import needs_chromium
from tests.report.contrast import poor_texts

pytestmark = needs_chromium
COMMAND = "document.querySelector('#command').textContent"
STATUS = "document.querySelector('#status').textContent"
VIEWED = "document.documentElement.dataset.viewed"


@pytest.fixture(scope="module")
def tab(browser, served):
    """A page that has shown its first answer: a small model, so that it is quick."""
    made = browser.open(served.address)
    made.until(VIEWED)
    return made


def move(tab, form, **values):
    """Set fields as their user does; wait until what follows is seen."""
    for name, value in values.items():
        code = (
            f"(() => {{ const field = document.querySelector('#{form}').elements.{name};"
            f" field.value = {value!r};"
            " field.dispatchEvent(new Event('input', { bubbles: true })); })()"
        )
        tab.run(code)


def test_what_is_moved_is_answered_with_its_command(tab):
    before = tab.run(VIEWED)
    move(tab, "whatif", how="strategy", pp=2, links=-1)
    shown = tab.until(f"{COMMAND}.includes('--pp 4') && {VIEWED} !== {before!r} && {COMMAND}")
    words = "partita simulate gpt2 --cluster 8xA100-80GB-SXM@links=0.5 --batch 64 --micro-batch 1"
    assert shown == f"{words} --pp 4"
    assert re.fullmatch(r"Answered in \d+\.\d\d s\.", tab.run(STATUS))
    bars = "Array.from(document.querySelectorAll('.bar span:first-child'), (e) => e.textContent)"
    assert tab.run(bars) == [f"stage {stage}" for stage in range(4)]
    cells = "document.querySelectorAll('#bars table tr').length"
    assert tab.run(cells) == 1 + 4  # the parts in numbers, not in colours alone
    lanes = "document.querySelector('iframe').contentWindow.partitaTimelines.length"
    assert tab.until(lanes) == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_of_every_tab_has_the_contrast_of_wcag_aa(tab, theme):
    tab.media(prefers_color_scheme=theme)
    for name in ("whatif", "plan", "schedule", "whatif"):
        tab.click(f"#tab-{name}")
        seen, poor = poor_texts(tab)
        assert poor == []
        assert seen > 15
    tab.media(prefers_color_scheme="light")
    tab.size(1160, 900)


def test_a_search_is_begun_and_stopped_without_scrolling(tab):
    tab.click("#tab-plan")
    tab.size(1160, 600)
    tab.frames()
    box = "document.querySelector('#plan [data-stop]').getBoundingClientRect()"
    assert tab.run(f"{box}.top >= 0 && {box}.bottom <= 600")
    tab.size(1160, 900)
    tab.click("#tab-whatif")


def test_parts_of_memory_have_the_colours_of_pages(tab):
    named = {WORDS[part].split(" of ")[0]: color for part, color in PART_COLORS.items()}
    shown = tab.run(
        "Array.from(document.querySelectorAll('#bars .legend li'), (e) => [e.textContent,"
        " getComputedStyle(e.querySelector('i')).backgroundColor])"
    )
    assert len(shown) > 3
    for part, color in shown:
        if part in named:
            red, green, blue = (int(named[part][i : i + 2], 16) for i in (1, 3, 5))
            assert color == f"rgb({red}, {green}, {blue})", part


def test_what_cannot_be_is_said_where_the_answer_stands(tab):
    move(tab, "whatif", tp=6)
    assert "64" in tab.until("document.querySelector('#status.bad') && " + STATUS)
    move(tab, "whatif", tp=0)
    tab.until("!document.querySelector('#status.bad')")


def test_a_schedule_follows_its_spans(tab):
    tab.run("document.querySelector('#tab-schedule').click()")
    tab.until(f"{STATUS} === 'Done.' && {COMMAND}.includes('--backward-span 2')")
    move(tab, "schedule", placement="zb-h1", weight_span=1, backward_span=1)
    shown = tab.until(f"{STATUS} === 'Done.' && {COMMAND}.includes('--weight-span') && {COMMAND}")
    assert shown.startswith("partita schedule zb-h1 --devices 4 --microbatches 8")
    cards = tab.run("document.querySelector('#cards').textContent")
    assert cards.startswith("makespan")


def test_tabs_are_reached_by_keys_and_fields_have_names(tab):
    tab.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
    tab.press("ArrowLeft")
    assert tab.run("document.activeElement.id") == "tab-plan"
    assert tab.run("!document.querySelector('#plan').hidden && location.hash") == "#plan"
    nameless = (
        "Array.from(document.querySelectorAll('input, select, button, iframe')).filter((e) =>"
        " !(e.labels && e.labels.length) && !e.textContent.trim() && !e.title).length"
    )
    assert tab.run(nameless) == 0


def test_a_search_ends_in_the_page_of_its_plan_and_a_file_to_keep(tab):
    tab.run("document.querySelector('#tab-plan').click()")
    move(tab, "plan", model="alexnet", per_node=1, batch=2)
    assert tab.run(STATUS) == "Choose, then search."
    tab.run("document.querySelector('#plan [type=submit]').click()")
    tab.until(f"{STATUS} === 'Done.'")
    assert tab.run(COMMAND).startswith("partita plan alexnet --cluster 2xA100-80GB-SXM --batch 4 ")
    title = "document.querySelector('iframe:not(.next)').contentDocument.title"
    tab.until(f"{title}.startsWith('alexnet on 2xA100')")
    plan = tab.run("fetch(document.querySelector('#keep').href).then((answer) => answer.json())")
    assert plan["model"]["spec"] == "alexnet"
    assert tab.run("document.querySelector('#plan [data-stop]').disabled")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(tab, scheme):
    tab.media(prefers_color_scheme=scheme)
    pairs = tab.run(
        "(() => { const style = getComputedStyle(document.documentElement);"
        " return ['--ink', '--soft', '--accent', '--bad'].flatMap((ink) =>"
        " ['--page', '--card'].map((paper) =>"
        " [style.getPropertyValue(ink), style.getPropertyValue(paper)])); })()"
    )
    for ink, paper in pairs:
        assert contrast(ink.strip(), paper.strip()) >= 4.5, (scheme, ink, paper)
    tab.media(prefers_color_scheme="light")


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours."""
    lights = sorted((luminance(one), luminance(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    digits = colour.removeprefix("#")
    digits = "".join(2 * c for c in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_page_fits_400_pixels(tab):
    tab.run("document.querySelector('#tab-whatif').click()")
    tab.size(400, 900)
    assert tab.run("document.documentElement.scrollWidth") <= 400
    tab.size(1200, 900)


def test_a_second_browser_has_a_page_of_its_own(tab, browser, served):
    other = browser.open(served.address + "#schedule")
    other.until(f"{STATUS} === 'Done.'")
    mine = tab.run(COMMAND)
    move(other, "schedule", devices=3)
    other.until(f"{COMMAND}.includes('--devices 3') && {STATUS} === 'Done.'")
    assert tab.run(COMMAND) == mine
    assert not other.console


def test_a_hostile_name_is_shown_as_text(tab):
    options = "Array.from(document.querySelector('#whatif').elements.model.options, (e) => e.value)"
    assert HOSTILE in tab.run(options)
    move(tab, "whatif", model=HOSTILE)
    shown = tab.until(f"document.querySelector('#status.bad') && {COMMAND}")
    assert "onerror" in shown
    assert tab.run("document.querySelectorAll('img').length") == 0


def test_nothing_was_asked_elsewhere_and_nothing_went_wrong(tab, served):
    assert tab.requests
    for address in tab.requests:
        assert address.startswith(served.address)
    assert not tab.console
