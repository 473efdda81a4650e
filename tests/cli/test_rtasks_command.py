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
    answer = run_json("solve", str(path), "--method", "wavefront")
    assert answer["kind"] == "rtasks"
    assert json.loads(path.read_text())["format"] == "partita/rtasks-problem@1"


def test_unknown_methods_and_endings_are_refused(run, tmp_path):
    assert "did you mean" in run("rtasks", "lstm@2", "--method", "lists").stderr
    result = run("rtasks", "lstm@2", "-o", str(tmp_path / "x.docx"))
    assert result.exit_code == 2
    assert "end the name in one of" in result.stderr


class TestRunning:
    """`--interpret` and `--run`: the model itself."""

    SOURCE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    layers = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8), nn.Softmax(-1)
    return nn.Sequential(*layers), (torch.randn(1, 16),)
"""

    @pytest.fixture
    def spec(self, tmp_path):
        pytest.importorskip("torch")
        path = tmp_path / "small.py"
        path.write_text(self.SOURCE)
        return f"{path}:model"

    def test_a_users_model_runs_tile_by_tile(self, run, spec, tmp_path):
        path = tmp_path / "programs.txt"
        result = run("rtasks", spec, "--interpret", "--method", "list", "-o", str(path))
        assert result.exit_code == 0, result.output
        assert "1 fused region, 0 fallbacks; run tile by tile without a GPU" in result.stdout
        assert path.read_text().startswith("veu 0\n  run ")

    def test_the_report_is_json(self, run_json, spec):
        answer = run_json("rtasks", spec, "--interpret", "--method", "list")
        assert answer["format"] == "partita/rtasks-report@1"
        assert answer["regions"][0]["num_ops"] == 3
        assert answer["error"] < 1e-6

    def test_two_models_share_a_program(self, run, spec):
        result = run("rtasks", spec, "--with", spec, "--interpret", "--method", "list")
        assert "one after the other" in result.stdout

    def test_a_zoo_model_runs_through_its_reference_module(self, run_json):
        pytest.importorskip("torch")
        answer = run_json("rtasks", "lstm@2", "--interpret", "--method", "list")
        assert answer["regions"][0]["num_ops"] == 20
        assert answer["fallbacks"] == []

    def test_without_a_gpu_it_says_what_to_do(self, run, spec):
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        result = run("rtasks", spec, "--run")
        assert result.exit_code == 2
        assert "leave --run out to plan, or use --interpret" in result.stderr

    def test_an_ending_that_says_nothing_is_refused(self, run, spec, tmp_path):
        result = run("rtasks", spec, "--interpret", "-o", str(tmp_path / "x.pdf"))
        assert result.exit_code == 2
        assert "end the name in one of .json, .txt, .svg, .trace.json" in result.stderr

    @pytest.mark.parametrize(("ending", "start"), [(".svg", "<svg"), (".trace.json", "{")])
    def test_the_planned_timeline_is_drawn(self, run, spec, tmp_path, ending, start):
        path = tmp_path / f"x{ending}"
        assert run("rtasks", spec, "--interpret", "-o", str(path)).exit_code == 0
        assert path.read_text().startswith(start)
