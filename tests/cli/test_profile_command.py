"""`partita profile` as people and programs see it."""

import json

import pytest

from partita.costs.profiles import read_profile

pytest.importorskip("torch")

MODEL = """
import torch

def build(batch: int = 4):
    body = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    return body, (torch.randn(batch, 32),)
"""


@pytest.fixture
def words(tmp_path):
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    return ["profile", f"{model}:build", "--database", str(tmp_path / "db.jsonl"), "--repeats", "2"]


def test_a_table_of_ops_and_where_it_is_kept(run, words, tmp_path):
    result = run(*words, "-o", str(tmp_path / "profile.json"))
    assert result.exit_code == 0, result.output
    assert "3 ops one after the other" in result.stdout
    assert "gelu" in result.stdout
    assert "2 of 2" in result.stderr or "3 of 3" in result.stderr
    assert json.loads((tmp_path / "profile.json").read_text())["format"] == "partita/profile@1"


def test_the_second_time_nothing_is_measured(run, words):
    run(*words)
    again = run(*words)
    assert again.exit_code == 0
    assert again.stderr == f"runs {words[1].partition(':')[0]}\n"


def test_modules_at_a_depth_for_programs(run_json, words):
    answer = run_json(*words, "--depth", "1", "--infer")
    assert [module["scope"] for module in answer["modules"]] == ["0", "1", "2"]
    assert answer["backward_s"] == 0
    assert answer["forward_s"] > 0


def test_measurements_of_another_file_are_merged(run, words, tmp_path):
    run(*words)
    (tmp_path / "db.jsonl").rename(tmp_path / "other.jsonl")
    result = run(*words, "--merge", str(tmp_path / "other.jsonl"))
    assert result.exit_code == 0, result.output
    assert result.stderr == f"runs {words[1].partition(':')[0]}\n"


def test_a_broken_database_is_named(run, words, tmp_path):
    (tmp_path / "db.jsonl").write_text("not a database\n")
    result = run(*words)
    assert result.exit_code == 2
    assert "db.jsonl line 1" in result.stderr


def test_the_profile_of_a_zoo_model_names_its_ops_and_cuts_it(run, run_json, tmp_path):
    path = tmp_path / "profile.json"
    model = ["squeezenet1_1", "--batch", "1", "--dtype", "f32"]
    words = ["--repeats", "1", "--warmup", "0", "--database", str(tmp_path / "db.jsonl")]
    assert run("profile", *model, *words, "-o", str(path), "-q").exit_code == 0
    profile = read_profile(path)
    assert {op.op for op in profile.ops} >= {"features.0", "features.3.squeeze"}
    answer = run_json("partition", *model, "--devices", "2", "--profile", str(path))
    whole = (profile.forward_s + profile.backward_s) * 1e3
    assert whole / 2 <= answer["objective"] * 1.01
    assert answer["objective"] < whole


def test_a_profile_from_another_torch_is_used_with_a_word(run, words, tmp_path):
    path = tmp_path / "profile.json"
    run(*words, "-o", str(path), "-q")
    path.write_text(path.read_text().replace('"torch": "2.', '"torch": "1.'))
    model = words[1]
    result = run("partition", model, "--devices", "2", "--profile", str(path))
    assert result.exit_code == 0, result.output
    assert "the profile was measured with torch 1." in result.stderr
