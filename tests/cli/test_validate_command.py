"""partita validate, as a user would call it."""

import json
from pathlib import Path

FILE = str(Path(__file__).parents[1] / "data" / "validate" / "rows.json")


def test_a_row_file_gives_errors_by_group(run):
    result = run("validate", FILE)
    assert result.exit_code == 0, result.output
    assert "zero-bubble-t4" in result.stdout
    assert "Regret" in result.stdout
    assert "hidden is 'large', a number above 0 is needed" in result.stdout


def test_json_is_one_object(run_json):
    answer = run_json("validate", FILE)
    assert answer["format"] == "partita/validation@1"
    assert answer["groups"]["megatron-2020"]["skipped"] == 1
    assert answer["seconds"] < 60
    assert answer["page"] is None
    assert len(answer["worst"]["zero-bubble-t4"]) == 2


def test_worst_says_how_many_rows_are_shown(run, run_json):
    assert "Largest errors" not in run("validate", FILE, "--worst", "0").stdout
    assert len(run_json("validate", FILE, "--worst", "3")["worst"]["zero-bubble-t4"]) == 3


def test_without_a_file_it_says_what_to_give(run):
    result = run("validate")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: ROWS: no file with measured runs is given and none comes with partita; name one: "
        "partita validate ROWS.json (format partita/measured-runs@1, see docs/validate.md)\n"
    )


def test_a_file_that_is_no_row_file_is_refused(run, tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    result = run("validate", str(path))
    assert result.exit_code == 2
    assert "has no list of rows" in result.stderr


def test_a_file_of_which_nothing_can_be_compared_ends_with_1_and_the_reasons(run, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"id": "a"}, 3]))
    result = run("validate", str(path))
    assert result.exit_code == 1
    assert "has no model" in result.stdout
    assert "is not a table" in result.stdout


def test_groups_can_be_chosen(run, run_json):
    answer = run_json("validate", FILE, "--group", "simumax-b200", "--group", "own")
    assert list(answer["groups"]) == ["simumax-b200", "own"]
    assert answer["all"]["n"] == 3
    wrong = run("validate", FILE, "--group", "simumax-b300")
    assert wrong.exit_code == 2
    assert "did you mean simumax-b200?" in wrong.stderr


def test_a_page_is_written_and_never_replaced_unasked(run, run_json, tmp_path):
    path = tmp_path / "page.html"
    assert run_json("validate", FILE, "--page", str(path))["page"] == str(path)
    assert path.read_text().startswith("<!doctype html>")
    again = run("validate", FILE, "--page", str(path))
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    forced = run("validate", FILE, "--page", str(path), "--force")
    assert forced.exit_code == 0
    assert f"page in {path}" in forced.stdout
