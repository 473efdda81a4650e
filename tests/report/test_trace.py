"""The trace for Perfetto and Chrome."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from partita.jobs.simulate import simulate
from partita.report.trace import chrome_trace
from tests.report.plans import line

GOLDEN = Path(__file__).parent / "golden"


def _indented(trace: bytes) -> str:
    return json.dumps(json.loads(trace), indent=1, ensure_ascii=False) + "\n"


def events(timeline, phase):
    return [e for e in json.loads(chrome_trace(timeline))["traceEvents"] if e["ph"] == phase]


def test_it_reads_as_it_should(overlapped, is_golden):
    is_golden(GOLDEN / "overlapped.trace.json", _indented(chrome_trace(overlapped)))


def test_every_task_is_a_slice_on_each_of_its_lanes(overlapped):
    slices = events(overlapped, "X")
    assert len(slices) == len(overlapped.program.lane_of)
    assert {e["name"] for e in events(overlapped, "i")} == {"X@done"}
    reduced = [e for e in slices if e["name"] == "C@grads"]
    assert [(e["tid"], e["ts"], e["dur"], e["cat"]) for e in reduced] == [
        (1, 10000.0, 2000.0, "collective"),
        (2, 10000.0, 2000.0, "collective"),
    ]


def test_slices_that_touch_still_do(pipeline):
    by_lane: dict[int, list[tuple[float, float]]] = {}
    for e in events(pipeline, "X"):
        by_lane.setdefault(e["tid"], []).append((e["ts"], round(e["ts"] + e["dur"], 3)))
    for spans in by_lane.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_a_step_is_a_millisecond(pipeline):
    assert max(e["ts"] + e["dur"] for e in events(pipeline, "X")) == 33_000.0


def test_lanes_are_threads_of_the_process_of_their_kind(overlapped):
    names = {
        (e["pid"], e["tid"]): e["args"].get("name")
        for e in events(overlapped, "M")
        if "name" in e["args"]
    }
    assert names == {
        (1, 0): "device",
        (2, 0): "link",
        (3, 0): "memory",
        (1, 1): "gpu0",
        (1, 2): "gpu1",
        (2, 3): "gpu0→gpu1",
    }


def test_memory_is_a_counter(overlapped):
    held = [(e["ts"], e["args"]["held"]) for e in events(overlapped, "C")]
    assert held[:3] == [(0.0, 0.0), (3500.0, 2.0**31), (4500.0, 0.0)]


def test_messages_are_arrows_from_send_to_receive(overlapped):
    begins, ends = events(overlapped, "s"), events(overlapped, "f")
    assert [e["id"] for e in begins] == [e["id"] for e in ends] == [0, 1, 2]
    assert (begins[0]["tid"], ends[0]["tid"]) == (3, 2)


@pytest.fixture(scope="module")
def outcome():
    """A plan of two stages and two micro-batches."""
    return simulate(line("squeezenet1_1@64", "2xA100", 2, batch=4)).timeline


class TestOfAPipeline:
    def test_slices_carry_what_their_tasks_are(self, outcome):
        program = outcome.program
        (first, *_) = (e for e in events(outcome, "X") if e["args"].get("purpose") == "send")
        work = program.work_of(first["args"]["task"])
        assert first["args"]["bytes"] == work.size_bytes > 0
        assert (first["args"]["stage"], first["args"]["peer"]) == (0, 1)
        assert first["args"]["ranks"] == 2
        assert first["args"]["first_group"] == [0, 1]
        assert first["args"]["reads"] == [str(program.values[v]) for v in work.reads]
        assert first["args"]["microbatch"] == 0

    def test_arrows_lead_from_sends_to_the_blocks_that_wait_for_them(self, outcome):
        begins, ends = events(outcome, "s"), events(outcome, "f")
        assert [e["id"] for e in begins] == [e["id"] for e in ends] == [0, 1, 2, 3]
        slices = [e for e in events(outcome, "X") if e["pid"] == 1 and e["args"]["task"]]
        for begin, end in zip(begins, ends, strict=True):
            assert begin["pid"] == 2  # links
            (reached,) = (e for e in slices if (e["tid"], e["ts"]) == (end["tid"], end["ts"]))
            assert reached["args"]["purpose"] == "compute"
            assert begin["ts"] < end["ts"]

    def test_blocks_are_shown_from_inside_as_processes_of_their_own(self, outcome):
        names = {
            e["pid"]: e["args"]["name"] for e in events(outcome, "M") if e["name"] == "process_name"
        }
        inside = {pid for pid, name in names.items() if name.startswith("inside stage")}
        assert len(inside) == 6  # devices, links and memory of two stages
        ops = {e["args"].get("op") for e in events(outcome, "X") if e["pid"] in inside}
        assert {"features.0", "classifier.1"} <= ops

    def test_what_is_too_much_inside_is_left_out(self, outcome, monkeypatch):
        monkeypatch.setattr("partita.report.trace.MOST_INSIDE", 0)
        assert max(e["pid"] for e in events(outcome, "M")) == 3


def test_hostile_names_stay_text(hostile):
    assert events(hostile, "X")[0]["name"] == "F0@<img src=x onerror=alert(1)>&\x00"


def test_nothing_is_an_empty_trace(nothing):
    assert json.loads(chrome_trace(nothing)) == {"displayTimeUnit": "ms", "traceEvents": []}
