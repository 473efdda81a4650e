"""Work is never thrown away: outputs are checked before a search, and what fails loses no more."""

import errno
from pathlib import Path

import pytest

from partita import files
from partita.errors import FileError, InputError
from partita.report import svg_timeline

VSHAPE = ("schedule", "vshape", "--devices", "2", "--microbatches", "2")


def test_a_folder_that_cannot_be_written_is_refused_before_the_search(run, tmp_path, monkeypatch):
    def refused(**options):
        raise PermissionError

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refused)
    monkeypatch.setattr("partita.jobs.plan.plan", None)  # a search would fail otherwise
    result = run("plan", "alexnet", "-c", "2xA100", "-o", str(tmp_path / "plan.json"))
    assert result.exit_code == 2
    assert "plan.json: its folder cannot be written; choose another place" in result.stderr


def full_disk(handle):
    raise OSError(errno.ENOSPC, "No space left on device")


MLP = Path(__file__).parents[1] / "data" / "partition" / "mlp.json"
QUICK = ("-q", "--time-limit", "1")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("plan", "alexnet", "-c", "2xA100", "-b", "4", *QUICK, "-o"), "step "),
        (("plan", "alexnet", "-c", "2xA100", "-b", "4", *QUICK, "--save"), "step "),
        (("plan", "alexnet", "-c", "1xA100", "-b", "4", *QUICK, "--devices", "1", "--workers", "1",
          "-o"), "speed-up"),
        (("shard", "alexnet", "-c", "2xA100", "-b", "4", *QUICK, "-o"), "step "),
        (("shard", "--graph", "alexnet", "-p", "2", *QUICK, "-o"), "fc"),
        (("partition", "alexnet", "-c", "2xA100", "-b", "4", *QUICK, "-o"), "stage"),
        (("place", "alexnet", "-c", "malvik", "--method", "heft", *QUICK, "-o"), "step "),
        ((*VSHAPE, *QUICK, "-o"), "2 micro-batches"),
        ((*VSHAPE, *QUICK, "--save"), "2 micro-batches"),
        (("solve", str(MLP), "--devices", "2", *QUICK, "-o"), "slowest"),
        (("simulate", "alexnet", "-c", "2xA100", "-q", "--dump-graph"), "step "),
        (("models", "alexnet", "--dump-graph"), "parameters"),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}" if isinstance(words, tuple) else "",
)  # fmt: skip
def test_a_full_disk_loses_the_file_and_nothing_else(run, tmp_path, monkeypatch, words, shown):
    monkeypatch.setattr(files.os, "fsync", full_disk)
    path = tmp_path / "out.json"
    result = run(*words, str(path))
    assert result.exit_code == 2
    no_room = f"error: {path} is not written: cannot be written (No space left on device)"
    assert no_room in result.stderr
    assert shown in result.stdout
    assert str(path) not in result.stdout
    assert not list(tmp_path.iterdir())


def test_points_that_cannot_be_kept_are_shown(run, tmp_path, monkeypatch):
    def full(path, key, answer):
        full_disk(0)

    monkeypatch.setattr("partita.jobs.sweep.append_result", full)
    words = ("plan", "alexnet", "-c", "1xA100", "-b", "4", "--time-limit", "1")
    more = ("--devices", "1", "--workers", "1", "--results", str(tmp_path / "points.jsonl"))
    result = run(*words, *more)
    assert result.exit_code == 0
    assert "points.jsonl: a point is not kept: No space left on device" in result.stderr
    assert "speed-up" in result.stdout


@pytest.mark.parametrize("command", ["plan", "compare"])
@pytest.mark.parametrize(("name", "why"), [("no/r.jsonl", "does not exist"), ("", "is a folder")])
def test_a_file_for_points_is_refused_before_the_search(run, tmp_path, command, name, why):
    words = ("-c", "2xA100", "--devices", "1,2", "--results", str(tmp_path / name))
    result = run(command, "alexnet", *words)
    assert result.exit_code == 2
    assert why in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "alexnet", "-c", "2xA100", "-o", "{}", "--save", "{}"),
        ("place", "alexnet", "-c", "malvik", "--page", "{}", "-o", "{}"),
        ("shard", "alexnet", "-c", "2xA100", "--dump-graph", "{}.json", "-o", "{}.json"),
        ("simulate", "alexnet", "-c", "2xA100", "--dump-graph", "{}.json", "--trace", "{}.json"),
        (*VSHAPE, "--svg", "{}", "--page", "{}"),
    ],
    ids=lambda words: words[0],
)
def test_two_outputs_of_one_name_are_refused_before_the_search(run, tmp_path, words):
    result = run(*(word.replace("{}", str(tmp_path / "out")) for word in words))
    assert result.exit_code == 2
    assert "is named for two outputs; give each its own" in result.stderr
    assert not result.stdout


def test_the_plan_is_written_before_the_search_without_a_node(run, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise InputError("another search fails")

    monkeypatch.setattr("partita.jobs.vanish.vanished", fails)
    path = tmp_path / "plan.json"
    words = ("plan", "alexnet", "-c", "2x1xA100", "-b", "4", *QUICK, "--without", "n1")
    assert "another search fails" in run(*words, "-o", str(path)).stderr
    assert path.exists()


def test_files_are_written_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def no_links(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(files.os, "link", no_links)
    path = tmp_path / "a.json"
    assert files.write_atomically(path, "one").read_text() == "one"
    with pytest.raises(FileError, match="exists already"):
        files.write_atomically(path, "two")
    assert path.read_text() == "one"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "words",
    [
        ("rtasks", "alexnet", "-o", "kernel.png"),
        ("streams", "alexnet", "--device", "analytic", "-o", "st.png"),
        ("shard", "alexnet", "-c", "2xA100", "--dump-graph", "graph.png"),
        ("simulate", "alexnet", "-c", "2xA100", "--dump-graph", "graph.png"),
    ],
    ids=lambda words: words[0],
)
def test_an_ending_that_says_nothing_is_refused_before_the_search(run, words, tmp_path):
    result = run(*words[:-1], str(tmp_path / words[-1]))
    assert result.exit_code == 2
    assert "has an ending that says nothing: .png; end the name in one of" in result.stderr
    assert not result.stdout


def test_a_picture_that_cannot_be_drawn_loses_nothing_else(run, tmp_path, monkeypatch):
    def broken(*args, **options):
        raise IndexError("too large")

    monkeypatch.setattr(svg_timeline, "timeline_svg", broken)
    svg, csv, json = tmp_path / "a.svg", tmp_path / "a.csv", tmp_path / "a.json"
    result = run(*VSHAPE, "--svg", str(svg), "--csv", str(csv), "-o", str(json))
    assert result.exit_code == 2
    assert f"error: {svg} is not written: too large" in result.stderr
    assert csv.exists()
    assert json.exists()
    assert not svg.exists()
    assert "2 micro-batches" in result.stdout


@pytest.mark.parametrize(("name", "begins"), [("a.svg", "<svg"), ("a.trace.json", "{")])
def test_streams_writes_the_picture_that_its_name_asks_for(run, tmp_path, name, begins):
    path = tmp_path / name
    words = ("streams", "squeezenet1_1", "--device", "analytic", "--method", "greedy", "-q")
    result = run(*words, "-o", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_text().startswith(begins)
