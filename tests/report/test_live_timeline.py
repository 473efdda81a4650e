"""The timeline of a page: what is packed beside it, and that a real browser shows it."""

import base64
import json
import re
from html import unescape
from itertools import pairwise

import numpy as np
import pytest

import partita.report.live_timeline as module
from partita.engine import run
from partita.jobs.idle import idle_account
from partita.jobs.measured_lanes import MeasuredLane
from partita.program import Kind, ProgramBuilder
from partita.report.live_timeline import TimelineExtras, live_timeline, timeline_script
from tests.report.browser import needs_chromium, quiet

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"


def packed(text: str) -> dict:
    (packed,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)
    return json.loads(packed)


def column(data: dict, name: str) -> np.ndarray:
    dtype, _, text = data[name].partition(":")
    return np.frombuffer(base64.b64decode(text), f"<{dtype}")


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
    tasks, places = column(data, "slot_task"), column(data, "slot_from")
    assert len(data["lanes"]) == len(pipeline.program.lanes)
    assert sorted(tasks) == list(range(pipeline.program.num_tasks))
    starts = column(data, "start")[tasks]
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


def test_idle_time_is_packed_lane_by_lane_in_order_and_adds_up(pipeline):
    account = idle_account(pipeline)
    data = packed(live_timeline(pipeline, TimelineExtras(account)))
    begin, end = column(data, "idle_begin"), column(data, "idle_end")
    for lane, (a, b) in enumerate(pairwise(column(data, "idle_from"))):
        assert (begin[a:b] < end[a:b]).all()
        assert (end[a : b - 1] <= begin[a + 1 : b]).all()
        assert (end - begin)[a:b].sum() == pytest.approx(account.lanes[lane].idle_s)


def test_a_timeline_with_nothing_in_it_is_packed(nothing):
    data = packed(live_timeline(nothing, TimelineExtras(idle_account(nothing))))
    assert data["lanes"] == []
    assert data["makespan"] == 0


def test_of_too_many_tasks_shares_of_columns_are_told(crowd, monkeypatch):
    monkeypatch.setattr(module, "MOST_TASKS", 1000)
    monkeypatch.setattr(module, "MOST_SHARES", 100 * 2 * 50)
    text = live_timeline(crowd, TimelineExtras(idle_account(crowd)))
    data = packed(text)
    assert (data["columns"], data["present"]) == (50, [0, 1])
    shares = column(data, "shares").reshape(100, 50, 2) / 255
    busy = shares.sum(axis=(1, 2)) / 50 * crowd.makespan
    assert busy == pytest.approx(crowd.busy(), rel=0.01)
    assert len(column(data, "start")) == 0
    assert "10,000 tasks are shown as shares" in text
    assert 'data-save="csv"' not in text


def test_measured_lanes_stand_under_those_that_predicted_them(pipeline):
    run_of = MeasuredLane("measured: rank 1", 1, np.array([0.0, 40.0]), np.array([2.0, 44.0]),
                          (0, 1), (0, 0), ("stage1", "something else"))  # fmt: skip
    data = packed(live_timeline(pipeline, TimelineExtras(measured=(run_of,))))
    assert data["lanes"] == ["gpu0", "gpu1", "measured: rank 1", "gpu2", "gpu3"]
    assert data["measured"] == [False, False, True, False, False]
    assert data["makespan"] == 44.0
    places = column(data, "slot_from")
    tasks = column(data, "slot_task")[places[2] : places[3]]
    assert column(data, "end")[tasks].tolist() == [2.0, 44.0]
    assert [data["blocks"][n] for n in column(data, "block")[tasks]] == list(run_of.names)


def test_hostile_names_cannot_end_the_data():
    text = live_timeline(pipeline_of(1, 2, HOSTILE))
    assert text.count("</script>") == 1
    assert HOSTILE + "0" in packed(text)["lanes"]


@needs_chromium
class TestInABrowser:
    """What Chromium says of a page: its document after the scripts, its console, its requests."""

    def test_fifty_thousand_tasks_are_ready_in_two_seconds_and_nothing_is_fetched(self, browser):
        tab = browser.open(page(live_timeline(pipeline_of(6250))))
        assert int(tab.run("document.documentElement.dataset.ready")) < 2000
        assert quiet(tab)
        tab.close()

    def test_shares_of_columns_are_drawn_and_told(self, browser, crowd, monkeypatch):
        monkeypatch.setattr(module, "MOST_TASKS", 1000)
        tab = browser.open(page(live_timeline(crowd)))
        tab.frames()
        lines = tab.run("partitaTimelines[0].words(partitaTimelines[0].labels + 5, 30)[1]")
        assert lines[0] == "unit0"
        assert any(line.startswith("forward") for line in lines)
        tab.run("partitaTimelines[0].zoom(0.01)")
        tab.frames()
        assert quiet(tab)
        tab.close()

    def test_an_empty_timeline_is_no_mistake(self, browser, nothing):
        tab = browser.open(page(live_timeline(nothing, TimelineExtras(idle_account(nothing)))))
        tab.frames()
        tab.run("partitaTimelines[0].canvas.focus()")
        tab.press("n")
        tab.press("+")
        assert quiet(tab)
        tab.close()

    def test_hostile_names_show_as_text(self, browser):
        tab = browser.open(page(live_timeline(pipeline_of(2, 2, HOSTILE))))
        document = tab.run("document.documentElement.outerHTML")
        assert "<title>fine</title>" in document
        assert "onerror=alert" not in unescape(document).split("<body>")[1].split("<script")[0]
        assert "data-ready" in document
        assert quiet(tab)
        tab.close()


def test_a_message_leads_from_the_block_that_makes_it_to_the_one_that_waits():
    b = ProgramBuilder()
    gpu0, gpu1, link = b.lane("gpu0"), b.lane("gpu1"), b.lane("0>1", "link")
    made = b.add("a", gpu0, 1.0, kind=Kind.FORWARD)
    send = b.add("s", link, 1.0, [made], kind=Kind.SEND)
    receive = b.add("s receive", link, 0.0, [send], kind=Kind.RECEIVE)
    b.pair(send, receive)
    lonely = b.add("t", link, 1.0, kind=Kind.SEND)
    unread = b.add("t receive", link, 0.0, [lonely], kind=Kind.RECEIVE)
    b.pair(lonely, unread)
    reader = b.add("b", gpu1, 1.0, [receive], kind=Kind.FORWARD)
    program = b.build()
    assert module.messages(program) == [(send, made, reader), (lonely, lonely, unread)]
    data = packed(live_timeline(run(program)))
    assert column(data, "messages").tolist() == [send, made, reader, lonely, lonely, unread]
