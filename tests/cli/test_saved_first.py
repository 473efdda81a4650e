"""Work is never thrown away: outputs are checked before a search, and what fails loses no more."""

import os

import pytest

from partita.report import svg_timeline

VSHAPE = ("schedule", "vshape", "--devices", "2", "--microbatches", "2")


def test_a_folder_that_cannot_be_written_is_refused_before_the_search(run, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("partita.jobs.plan.plan", None)  # a search would fail otherwise
    result = run("plan", "alexnet", "-c", "2xA100", "-o", str(tmp_path / "plan.json"))
    assert result.exit_code == 2
    assert "plan.json: its folder cannot be written; choose another place" in result.stderr


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
