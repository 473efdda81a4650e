"""The page of a plan, used: zoom, hover, keys, find, links, dark, narrow, paper, files."""

import csv
import functools
import io
import json
import pickle
import re
from xml.etree import ElementTree

import pytest

from partita.graph import GraphBuilder
from partita.graph.files import write_graph
from partita.jobs.simulate import simulate
from partita.report.page import plan_page
from tests.report.browser import needs_chromium, quiet
from tests.report.plans import line

pytestmark = needs_chromium

VIEW = "partitaTimelines[0]"
SPAN = f"[{VIEW}.from, {VIEW}.to]"


@functools.cache
def small_page() -> str:
    plan = line("squeezenet1_1@64", "4xA100", 4, batch=8)
    return plan_page(plan, simulate(plan))


@pytest.fixture
def tab(browser):
    shown = browser.open(small_page())
    shown.frames()
    yield shown
    shown.close()


def middle(tab, lane: int, part: float) -> tuple[float, float]:
    """A point of a lane on the screen, at a part of the time that is shown."""
    box = tab.run(
        f"(() => {{ {VIEW}.root.scrollIntoView(); const b = {VIEW}.canvas.getBoundingClientRect();"
        f" return [b.left, b.top, {VIEW}.labels, {VIEW}.width, {VIEW}.top({lane})]; }})()"
    )
    left, top, labels, width, row = box
    return left + labels + part * (width - labels - 8), top + row + 10


def test_the_wheel_zooms_to_the_mouse_and_the_address_leads_back(browser, tab):
    x, y = middle(tab, 0, 0.5)
    whole = tab.run(SPAN)
    for _ in range(5):
        tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    tab.frames()
    start, end = tab.run(SPAN)
    assert end - start == pytest.approx((whole[1] - whole[0]) / 1.2**5)
    tab.click("[data-critical]")
    tab.run("new Promise((done) => setTimeout(done, 200))")  # the address follows after 0.12 s
    fragment = tab.run("location.hash")
    again = browser.open(small_page(), fragment=fragment)
    assert again.run(SPAN) == [start, end]
    assert again.run(f"{VIEW}.showPath") is True
    assert quiet(again)
    again.close()
    assert quiet(tab)


@pytest.mark.parametrize("fragment", ["#view=99", "#view=0&t=5,1&hide=x,77&find=%00", "#t=NaN"])
def test_a_broken_address_shows_the_whole_step(browser, fragment):
    tab = browser.open(small_page(), fragment=fragment)
    assert tab.run(f"{VIEW}.from === 0 && {VIEW}.to === {VIEW}.data.makespan")
    assert quiet(tab)
    tab.close()


def test_hovering_tells_of_tasks_and_of_idle_time(tab):
    tab.mouse("mouseMoved", *middle(tab, 0, 0.01))
    tab.frames()
    text = tab.run(f"{VIEW}.tip.innerText")
    assert "stage0" in text
    assert "forward, micro-batch 0" in text
    tab.mouse("mouseMoved", *middle(tab, 3, 0.01))  # the last stage waits for the first
    tab.frames()
    assert "idle: dependency" in tab.run(f"{VIEW}.tip.innerText")


def test_hovering_a_message_draws_an_arrow_between_its_blocks(tab):
    arrows = tab.run(
        f"(() => {{ const v = {VIEW}, drawn = [];"
        " v.arrow = (a, from, b, to) => drawn.push([from, to]);"
        " v.hovered = v.data.messages[0]; v.paint(); return drawn; })()"
    )
    assert arrows == [[0, 1]]  # the first send is from the first stage to the second
    assert quiet(tab)


def test_keys_alone_lead_from_task_to_task(tab):
    tab.run(f"{VIEW}.canvas.focus()")
    for key in ("ArrowDown", "n", "n"):
        tab.press(key)
    tab.frames()
    assert "micro-batch 2" in tab.run(f"{VIEW}.tip.innerText")
    tab.press("ArrowDown")
    assert tab.run(f"{VIEW}.row") == 1
    tab.press("+")
    tab.frames()
    assert tab.run(f"{VIEW}.to - {VIEW}.from < {VIEW}.data.makespan")
    tab.press("0")
    assert tab.run(f"{VIEW}.to === {VIEW}.data.makespan")
    tab.press("Escape")
    assert tab.run(f"{VIEW}.tip.hidden")


def test_finding_counts_tasks_and_hiding_leaves_others(tab):
    tab.run(
        "(() => { const box = document.querySelector('[data-find]'); box.value = 'stage1';"
        " box.dispatchEvent(new Event('input')); })()"
    )
    told = tab.run("document.querySelector('[data-count]').textContent")
    count = tab.run(
        f"Array.from({VIEW}.data.slot_task)"
        f".filter((t) => {VIEW}.data.blocks[{VIEW}.data.block[t]].includes('stage1')).length"
    )
    assert told == f"{count} tasks"
    assert count > 8
    tab.click("[data-kind='0']")
    assert tab.run("document.querySelector('[data-kind]').getAttribute('aria-pressed')") == "false"
    assert tab.run(f"{VIEW}.hidden.has(0)")


def test_modules_are_found_and_marks_chosen(tab):
    tab.run(
        "(() => { const box = document.querySelector('[data-filter]'); box.value = 'expand3x3';"
        " box.dispatchEvent(new Event('input')); })()"
    )
    shown = tab.run(
        "Array.from(document.querySelectorAll('.tree p[data-name]'))"
        ".filter((p) => !p.hidden).map((p) => p.dataset.name)"
    )
    assert shown
    assert all("expand3x3" in name for name in shown)
    tab.click("[data-pick='1']") if tab.run("!!document.querySelector('[data-pick]').click") else (
        tab.run(
            "document.querySelector(\"[data-pick='1']\")"
            ".dispatchEvent(new MouseEvent('click', {bubbles: true}))"
        )
    )
    assert tab.run("document.querySelector(\"[data-picked='1']\").hidden") is False
    assert tab.run("document.querySelector(\"[data-picked='0']\").hidden") is True


@pytest.mark.parametrize(("width", "dark"), [(400, False), (1160, True)])
def test_narrow_and_dark_pages_stay_within_the_window(browser, width, dark):
    tab = browser.open(small_page(), width=width, dark=dark)
    tab.frames()
    assert tab.run("document.documentElement.scrollWidth") <= width
    ground = tab.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert quiet(tab)
    tab.close()


def test_the_page_prints_on_a4(tab):
    paper = tab.printed()
    assert paper.startswith(b"%PDF")
    boxes = set(re.findall(rb"/MediaBox \[\s*0 0 ([0-9.]+) ([0-9.]+)\]", paper))
    assert {(round(float(w)), round(float(h))) for w, h in boxes} <= {(595, 842), (594, 842)}


def test_a_dark_timeline_is_painted_light_for_paper_and_dark_again(browser):
    tab = browser.open(small_page(), dark=True)
    tab.frames()
    under = f"Array.from({VIEW}.screen.getImageData({VIEW}.labels + 2, 30, 1, 1).data)"
    tab.run(f"{VIEW}.showIdle = false; {VIEW}.data.slot_from.fill(0); {VIEW}.paint()")  # no tasks
    dark = tab.run(under)
    tab.run("window.dispatchEvent(new Event('beforeprint'))")
    assert tab.run(under) == [246, 248, 250, 255]
    tab.run("window.dispatchEvent(new Event('afterprint'))")
    assert tab.run(under) == dark == [22, 27, 34, 255]
    tab.close()


def test_every_button_and_picture_has_a_name(tab):
    nameless = tab.run(
        "Array.from(document.querySelectorAll('button, input, canvas, svg[role=img], summary'))"
        ".filter((e) => !(e.innerText || e.getAttribute('aria-label') || e.textContent).trim())"
        ".map((e) => e.outerHTML.slice(0, 80))"
    )
    assert nameless == []


class TestFiles:
    """What the page saves is what it shows."""

    def made(self, tab, name: str):
        code = f"(() => {{ const [c] = partitaFile({VIEW}, '{name}'); return "
        return tab.run(code + "typeof c === 'string' ? c : Array.from(c); })()")

    def test_the_table_has_a_row_for_every_task_of_a_lane(self, tab):
        rows = list(csv.DictReader(io.StringIO(self.made(tab, "csv"))))
        assert len(rows) == tab.run(f"{VIEW}.data.slot_task.length")
        first = rows[0]
        assert (first["task"], first["kind"], first["microbatch"]) == ("stage0", "forward", "0")
        assert max(float(row["end"]) for row in rows) == tab.run(f"{VIEW}.data.makespan")

    def test_the_trace_is_one_for_perfetto(self, tab):
        trace = json.loads(self.made(tab, "trace"))
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert len(spans) == tab.run(f"{VIEW}.data.slot_task.length")
        names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
        assert names == set(tab.run(f"{VIEW}.data.lanes"))

    def test_the_picture_is_one(self, tab):
        root = ElementTree.fromstring(self.made(tab, "svg"))
        assert root.tag.endswith("svg")
        assert len(root.findall(".//{http://www.w3.org/2000/svg}rect")) > 40

    def test_the_memory_viewer_of_pytorch_reads_the_snapshot(self, tab):
        snapshot = pickle.loads(bytes(self.made(tab, "memory")))
        assert len(snapshot["device_traces"]) == 4
        for memory, events in enumerate(snapshot["device_traces"]):
            held = peak = 0
            for event in events:
                held += event["size"] * {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
                peak = max(peak, held)
            assert peak == pytest.approx(tab.run(f"{VIEW}.data.memories[{memory}].peak"), rel=1e-3)
        viewer = pytest.importorskip("torch.cuda._memory_viz")
        assert "Active Memory Timeline" in viewer.trace_plot(snapshot)
        names = {e["frames"][0]["name"] for events in snapshot["device_traces"] for e in events}
        assert {"parameters", "states", "activations"} <= names


HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\n\u202eكود\U0001f680"


def test_names_with_markup_quotes_lines_right_to_left_and_emoji_are_text(browser, tmp_path):
    g = GraphBuilder("net")
    x = g.relu(g.linear(g.input("x", (4, 8)), 8, name=HOSTILE), name=HOSTILE + "2")
    write_graph(tmp_path / "net.json", g.finish(x))
    plan = line(str(tmp_path / "net.json"), "2xA100", 2, HOSTILE, training=False)
    tab = browser.open(plan_page(plan, simulate(plan)))
    tab.frames()
    tab.mouse("mouseMoved", *middle(tab, 0, 0.001))
    tab.frames()
    assert tab.run("document.images.length") == tab.run(
        "Array.from(document.images).filter((i) => i.src.startsWith('data:')).length"
    )
    assert HOSTILE.split("\n")[0] in tab.run(f"{VIEW}.tip.textContent")
    for name in ("csv", "trace", "svg", "memory"):
        tab.run(f"(() => {{ partitaFile({VIEW}, '{name}'); }})()")
    assert quiet(tab)
    tab.close()
