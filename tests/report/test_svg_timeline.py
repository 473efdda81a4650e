"""The picture of a timeline."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from partita.cluster import resolve
from partita.jobs.simulate import data_parallel
from partita.plans import Schedule
from partita.program import Kind, ProgramBuilder
from partita.report.axis import memory_text, tick_text, ticks, time_text
from partita.report.svg_timeline import MOST_TASKS, timeline_svg
from partita.timeline import Timeline
from tests.report.plans import plan_of, simulated, tiny_gpt

SVG = "{http://www.w3.org/2000/svg}"


def tasks(svg: str) -> list[ET.Element]:
    return [e for e in ET.fromstring(svg).iter(f"{SVG}rect") if e.get("class", "").startswith("t ")]


def texts(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ET.fromstring(svg).iter(f"{SVG}text")]


def test_every_task_is_a_rectangle_in_its_row_and_place(pipeline):
    drawn = tasks(timeline_svg(pipeline))
    assert len(drawn) == 64
    first, last = drawn[0], drawn[15]  # gpu0: the first forward, the last backward
    assert first[0].text == "F0@stage0: forward, 0 steps to 1 step (1 step)"
    assert last[0].text == "B7@stage0: backward, 31 steps to 33 steps (2 steps)"
    width = float(first.get("width", 0))
    assert float(last.get("width", 0)) == pytest.approx(2 * width, abs=0.02)
    assert float(last.get("x", 0)) - float(first.get("x", 0)) == pytest.approx(31 * width, rel=1e-3)
    assert len({e.get("y") for e in drawn}) == 4


def test_hover_tells_what_a_task_is():
    workload = tiny_gpt()
    stage = data_parallel(workload.graph, resolve("2xA100"), 3)
    plan = plan_of(workload, "2xA100", (stage,), Schedule())
    svg = timeline_svg(simulated(plan, workload).timeline)
    titles = [drawn[0].text for drawn in tasks(svg)]
    (gather,) = {title for title in titles if title.startswith("C@wpe.weight and 19 more ")}
    assert ": parameter gather, 0 s to " in gather
    assert "; all-gather of 134 KiB among 2 ranks; reads wpe.weight [R] in parts" in gather
    assert "gradient reduction" in texts(svg)


def test_microbatches_are_written_where_they_fit(pipeline):
    assert texts(timeline_svg(pipeline)).count("7") == 8
    assert texts(timeline_svg(pipeline, width=300)).count("7") == 0


def test_lanes_memory_legend_and_title_are_named(overlapped):
    words = texts(timeline_svg(overlapped, title="A & B"))
    for text in (
        "A & B",
        "gpu0→gpu1",
        "gpu1 memory",
        "2.00 GiB of 8.00 GiB",
        "weight gradient",
        "0 ms",
    ):
        assert text in words
    assert "gpu1 memory" not in texts(timeline_svg(overlapped, memory=False))


def test_rows_can_be_chosen(pipeline):
    assert len(tasks(timeline_svg(pipeline, lanes=[1, 3]))) == 32


def test_hostile_names_show_as_text(hostile):
    svg = timeline_svg(hostile, title="<script>alert(2)</script>")
    assert "<script" not in svg
    assert "<img" not in svg
    assert "\x1b" not in svg
    root = ET.fromstring(svg)
    assert {e.tag.removeprefix(SVG) for e in root.iter()} <= {
        "svg", "style", "rect", "text", "title", "line", "path"
    }  # fmt: skip
    assert "<script>alert(2)</script>" in texts(svg)


def test_it_needs_nothing_from_elsewhere(pipeline):
    svg = timeline_svg(pipeline, title="x")
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"]
    assert "prefers-color-scheme:dark" in svg


def test_a_lane_with_too_many_tasks_shows_shares_of_time():
    b = ProgramBuilder()
    a, count = b.lane("a"), MOST_TASKS + 1
    for i in range(count):
        b.add("x", a, 1.0, kind=Kind.FORWARD if i % 2 else Kind.BACKWARD, microbatch=i)
    timeline = Timeline(b.build(), np.arange(count, dtype=float), np.arange(count) + 1.0)
    svg = timeline_svg(timeline)
    assert not tasks(svg)
    assert [e.get("class") for e in ET.fromstring(svg).iter(f"{SVG}path")] == ["k0", "k1"]
    assert len(svg) < 60_000


def test_many_lanes_with_many_tasks_are_no_picture_of_many_megabytes():
    b, per_lane = ProgramBuilder(), 150
    for lane in [b.lane(f"lane{i}") for i in range(150)]:
        for _ in range(per_lane):
            b.add("x", lane, 1.0, kind=Kind.FORWARD)
    start = np.tile(np.arange(per_lane, dtype=float), 150)
    svg = timeline_svg(Timeline(b.build(), start, start + 1.0))
    assert not tasks(svg)  # 22,500 rectangles would be drawn
    assert len(svg) < 200_000


def test_lanes_left_out_are_counted():
    b = ProgramBuilder()
    for i in range(250):
        b.add("x", b.lane(f"lane{i}"), 1.0)
    svg = timeline_svg(Timeline(b.build(), np.zeros(250), np.ones(250)))
    assert "50 more lanes are not drawn" in texts(svg)


def test_nothing_is_still_a_picture(nothing):
    assert ET.fromstring(timeline_svg(nothing)).tag == f"{SVG}svg"


# --- the axis -----------------------------------------------------------------------------------


def test_ticks_are_round_and_within():
    assert ticks(33.0, 8) == [0, 5, 10, 15, 20, 25, 30]
    assert ticks(1.0, 3) == [0, 0.5, 1.0]
    assert [tick_text(t) for t in ticks(0.7, 8)] == [
        "0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7"
    ]  # fmt: skip
    assert ticks(0.0, 5) == [0.0]


@pytest.mark.parametrize(
    ("moment", "text"),
    [(0, "0 s"), (2.5e-8, "25.0 ns"), (3.14159e-4, "314 us"), (0.5, "500 ms"), (90, "90.0 s")],
)
def test_times_have_the_unit_that_suits_them(moment, text):
    assert time_text(ProgramBuilder().build(), moment) == text


def test_steps_and_plain_amounts_have_no_unit():
    steps = ProgramBuilder(time_unit="").build()
    assert time_text(steps, 33.0) == "33 steps"
    assert memory_text(steps, 6.0) == "6"
    assert memory_text(ProgramBuilder().build(), 1536.0) == "1.50 KiB"
