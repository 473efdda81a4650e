"""`partita rtasks` as people and programs see it."""

import json

import pytest


@pytest.mark.parametrize(
    ("ending", "start"), [(".txt", "veu 0"), (".svg", "<svg"), (".trace.json", "{")]
)
def test_the_command_writes_programs_and_pictures(run, tmp_path, ending, start):
    path = tmp_path / f"out{ending}"
    result = run("rtasks", "lstm@3", "--method", "list", "-o", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_text().startswith(start)
    assert "proven safe" in result.stdout


def test_the_problem_can_be_saved_and_solved(run, run_json, tmp_path):
    path = tmp_path / "lstm.problem.json"
    assert run("rtasks", "lstm@2", "--method", "list", "-o", str(path)).exit_code == 0
    found = run_json("solve", str(path), "--method", "wavefront")
    assert found["kind"] == "rtasks"
    assert json.loads(path.read_text())["format"] == "partita/rtasks-problem@1"


def test_unknown_methods_and_endings_are_refused(run, tmp_path):
    assert "did you mean" in run("rtasks", "lstm@2", "--method", "lists").stderr
    result = run("rtasks", "lstm@2", "-o", str(tmp_path / "x.docx"))
    assert result.exit_code == 2
    assert "end the name in one of" in result.stderr
