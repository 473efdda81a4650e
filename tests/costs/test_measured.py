"""The database of measurements: appending, crashes, merging, and what is refused."""

import subprocess
import sys
from dataclasses import replace

import pytest

from partita.costs.measured import (
    Database,
    Environment,
    Measurement,
    append,
    call_text,
    merge,
    open_database,
    read_database,
)
from partita.errors import FileError
from partita.graph import GraphBuilder

HERE = Environment("a cpu, 1 threads", "2.13.0", True)
ENTRY = Measurement("relu f32[2] -> f32[2]", HERE, 1e-3, 2e-3, 1e-5, 1e-5, 10, 8, 8, 0, 8, 8)


def test_what_is_appended_is_found(tmp_path):
    path = tmp_path / "db.jsonl"
    append(path, ENTRY)
    append(path, replace(ENTRY, call="gelu f32[2] -> f32[2]"))
    database = read_database(path)
    assert len(database.entries) == 2
    assert database.find(ENTRY.call, HERE) == ENTRY


def test_the_last_measurement_of_a_call_counts(tmp_path):
    path = tmp_path / "db.jsonl"
    append(path, ENTRY)
    append(path, replace(ENTRY, forward_s=5.0))
    entry = read_database(path).find(ENTRY.call, HERE)
    assert entry is not None
    assert entry.forward_s == 5.0


def test_another_environment_is_another_measurement():
    known = Database({(ENTRY.call, "", HERE): ENTRY})
    assert known.find(ENTRY.call, replace(HERE, torch="2.11.0")) is None


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_line_cut_off_by_a_crash_is_dropped_and_the_file_goes_on(tmp_path, cut):
    path = tmp_path / "db.jsonl"
    append(path, ENTRY)
    append(path, replace(ENTRY, call="lost"))
    path.write_bytes(path.read_bytes()[:-cut])
    assert set(read_database(path).entries) == {(ENTRY.call, "", HERE)}
    append(path, replace(ENTRY, call="next"))
    assert {call for call, _, _ in read_database(path).entries} == {ENTRY.call, "next"}


def test_a_file_that_is_not_there_yet_is_an_empty_database(tmp_path):
    path = tmp_path / "new.jsonl"
    assert not open_database(path).entries
    path.touch()
    assert not open_database(path).entries
    append(path, ENTRY)
    assert open_database(path).find(ENTRY.call, HERE) == ENTRY


def test_merging_keeps_the_later_file_and_overwrites_nothing_unasked(tmp_path):
    first, second, both = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "both.jsonl"))
    append(first, ENTRY)
    append(first, replace(ENTRY, call="only here"))
    append(second, replace(ENTRY, forward_s=7.0))
    merged = merge([first, second], both)
    assert read_database(both).entries == merged.entries
    assert merged.entries[(ENTRY.call, "", HERE)].forward_s == 7.0
    assert len(merged.entries) == 2
    with pytest.raises(FileError, match="exists"):
        merge([first], both)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"forward_s": 0.001', '"forward_s": -1'), "line 2.*forward_s.*at least 0"),
        (('"forward_s": 0.001', '"forward_s": "fast"'), "line 2.*forward_s"),
        (('"call"', '"cell"'), "line 2.*call"),
        (("{", "["), "line 1.*JSON"),
        (("profile-database", "plan"), "format"),
    ],
)
def test_a_malformed_file_names_the_line_and_the_field(tmp_path, change, said):
    path = tmp_path / "db.jsonl"
    append(path, ENTRY)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(FileError, match=said):
        read_database(path)


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "db.jsonl"
    path.write_text("")
    with pytest.raises(FileError, match="empty"):
        read_database(path)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (HERE, ""),
        (replace(HERE, torch="2.14.0"), "measured with torch 2.13.0, this is 2.14.0"),
        (replace(HERE, training=False), "measured for training only"),
        (replace(HERE, device="H200"), "measured on a cpu, 1 threads, this is H200"),
    ],
)
def test_it_says_how_the_environment_has_changed(wanted, said):
    assert Database({(ENTRY.call, "", HERE): ENTRY}).changed(wanted) == said


def test_equal_calls_have_equal_texts_and_others_do_not():
    g = GraphBuilder("two")
    x = g.input("x", (8, 64))
    first = g.linear(x, 32, name="a")
    g.linear(x, 32, name="b")
    g.linear(first, 32, name="c")
    graph = g.finish(first)
    a, b, c = (call_text(graph, graph.op(name)) for name in "abc")
    assert a == b == "linear f32[8,64] f32[32,64] f32[32] -> f32[8,32]"
    assert a != c


STEP = Measurement(
    "conv 3x3", Environment("H200", "2.11.0", False, "triton 3.6.0 cudnn 91002 tf32 True"), 3.25e-6,
    way="conv 16x32x64 w4 s4 k2",
)  # fmt: skip
OLD = (
    '{"on": "NVIDIA H200 torch 2.11.0 triton 3.6.0 cudnn 91002 tf32 True", "key": "conv 3x3", '
    '"way": "eager", "us": 3.25}\n'
    '{"on": "cpu torch 2.13.0", "key": "conv 3x3", "way": "eager", "us": -1.0}\n'
)


class TestWays:
    def test_a_call_run_in_another_way_is_another_measurement(self, tmp_path):
        path = tmp_path / "db.jsonl"
        other = replace(STEP, way="eager", forward_s=9e-6)
        append(path, STEP, other, ENTRY)
        known = read_database(path)
        assert known.find(STEP.call, STEP.environment, STEP.way) == STEP
        assert known.find(STEP.call, STEP.environment, "eager") == other
        assert known.find(STEP.call, STEP.environment) is None
        assert known.find(ENTRY.call, HERE) == ENTRY

    def test_times_of_kernels_do_not_count_as_another_environment_of_ops(self):
        known = Database({STEP.key: STEP})
        assert known.changed(HERE) == ""
        moved = replace(STEP.environment, device="A100")
        assert known.changed(moved) == "measured on H200, this is A100"


class TestOlderFiles:
    def test_a_file_of_version_1_is_read_and_added_to(self, tmp_path):
        path = tmp_path / "db.jsonl"
        append(path, ENTRY)
        text = path.read_text().replace("database@2", "database@1")
        path.write_text(
            text.replace(', "way": "", "runs": true', "").replace(', "kernels": ""', "")
        )
        append(path, STEP)
        assert read_database(path).entries == {ENTRY.key: ENTRY, STEP.key: STEP}

    def test_a_file_of_streams_without_a_version_is_read(self, tmp_path):
        path = tmp_path / "times.jsonl"
        path.write_text(OLD + "{cut off by a crash\n")
        one, two = read_database(path).entries.values()
        assert one.forward_s == pytest.approx(3.25e-6)
        assert one.environment == Environment(
            "NVIDIA H200", "2.11.0", False, "triton 3.6.0 cudnn 91002 tf32 True"
        )
        assert one.runs
        assert not two.runs

    def test_it_is_written_anew_when_something_is_added(self, tmp_path):
        path = tmp_path / "times.jsonl"
        path.write_text(OLD)
        before = read_database(path).entries
        append(path, ENTRY)
        assert path.read_text().startswith('{"format": "partita/profile-database@2"}\n')
        assert read_database(path).entries == {**before, ENTRY.key: ENTRY}

    def test_a_file_of_a_later_version_is_refused(self, tmp_path):
        path = tmp_path / "db.jsonl"
        path.write_text('{"format": "partita/profile-database@3"}\n')
        with pytest.raises(FileError, match="written by a newer partita"):
            read_database(path)


def test_several_processes_add_to_one_file(tmp_path):
    path = tmp_path / "db.jsonl"
    code = (
        "import sys\nfrom partita.costs.measured import *\n"
        "here = Environment('cpu', '1', False)\n"
        "for number in range(20):\n"
        "    append(sys.argv[1], Measurement(f'{sys.argv[2]} {number}', here, 1.0))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, path, name]) for name in "abc"]
    assert [each.wait(timeout=120) for each in running] == [0, 0, 0]
    assert len(read_database(path).entries) == 60
