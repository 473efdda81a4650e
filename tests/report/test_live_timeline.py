"""The timeline of a page: what is packed beside it, and that a real browser shows it."""

import base64
import json
import re
from html import unescape
from itertools import pairwise

import numpy as np

from partita.engine import run
from partita.program import Kind, ProgramBuilder
from partita.report.live_timeline import live_timeline, timeline_script
from tests.report.browser import needs_chromium, opened

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"


def packed(text: str) -> dict:
    (packed,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)
    return json.loads(packed)


def column(data: dict, name: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data[name]), dtype)


def page(body: str) -> str:
    return (
        '<!doctype html><html><head><meta charset="utf-8"><title>fine</title></head>'
        f"<body>{body}{timeline_script()}</body></html>"
    )


def pipeline_of(num_microbatches: int, num_stages: int = 8, name: str = "stage"):
    b = ProgramBuilder(time_unit="s")
    lanes = [b.lane(f"{name}{stage}") for stage in range(num_stages)]
    memory = b.memory(name, 2.0**30)
    for i in range(num_microbatches):
        before: list[int] = []
        for stage, lane in enumerate(lanes):
            effect = [(memory, 2.0**10, -(2.0**10))]
            before = [b.add(f"{name}{stage}", lane, 1e-3, before, effect, Kind.FORWARD, i)]
    return run(b.build())


def test_every_task_of_every_lane_is_packed_in_the_order_it_runs(pipeline):
    data = packed(live_timeline(pipeline))
    tasks, places = column(data, "slot_task", "<i4"), column(data, "slot_from", "<i4")
    assert len(data["lanes"]) == len(pipeline.program.lanes)
    assert sorted(tasks) == list(range(pipeline.program.num_tasks))
    starts = column(data, "start", "<f8")[tasks]
    for begin, end in pairwise(places):
        assert list(starts[begin:end]) == sorted(starts[begin:end])
    assert data["makespan"] == pipeline.makespan


def test_memory_curves_and_caps_are_packed(pipeline):
    memories = packed(live_timeline(pipeline))["memories"]
    assert [memory["capacity"] for memory in memories] == [4.0] * 4
    assert [memory["peak"] for memory in memories] == list(pipeline.peaks())


def test_only_kinds_that_occur_have_a_button(pipeline):
    text = live_timeline(pipeline)
    assert ">forward</button>" in text
    assert "collective" not in text.split("<script")[0]


def test_fifty_thousand_tasks_stay_under_eight_megabytes():
    assert len(page(live_timeline(pipeline_of(6250)))) < 8e6


def test_hostile_names_cannot_end_the_data():
    text = live_timeline(pipeline_of(1, 2, HOSTILE))
    assert text.count("</script>") == 1
    assert HOSTILE + "0" in packed(text)["lanes"]


@needs_chromium
class TestInABrowser:
    """What Chromium says of a page: its document after the scripts, its console, its requests."""

    def test_fifty_thousand_tasks_are_ready_in_two_seconds_and_nothing_is_fetched(self, tmp_path):
        document, console, network = opened(page(live_timeline(pipeline_of(6250))), tmp_path)
        ready = re.search(r'data-ready="(\d+)"', document)
        assert ready is not None
        assert int(ready[1]) < 2000
        assert "CONSOLE" not in console
        asked = set(re.findall(r'"url":"(https?://[^"]*)"', network))
        assert not {url for url in asked if "google" not in url}  # the browser's own

    def test_hostile_names_show_as_text(self, tmp_path):
        document, console, _ = opened(page(live_timeline(pipeline_of(2, 2, HOSTILE))), tmp_path)
        assert "<title>fine</title>" in document
        assert "onerror=alert" not in unescape(document).split("<body>")[1].split("<script")[0]
        assert "data-ready" in document
        assert "CONSOLE" not in console
