"""`partita plan` ends with the command that runs the plan, and `partita run` runs it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from distributed_ranks import run_on_ranks  # noqa: E402

from partita.cli import partita  # noqa: E402

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt2_two_ranks.py"


def run(*words):
    return CliRunner().invoke(partita, list(words))


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan of the example with small sizes, and what people read."""
    path = tmp_path_factory.mktemp("run") / "plan.json"
    words = ["plan", f"{EXAMPLE}:make_tiny", "--cluster", "2xA100", "--pin", "pp=2"]
    result = run(*words, "--pin", "micro-batches=2", "-o", str(path), "--quiet")
    assert result.exit_code == 0, result.output
    return path, result.stdout


def test_plan_ends_with_the_command_that_runs_it(planned):
    path, text = planned
    line = f"torchrun --standalone --nproc-per-node 2 -m partita run {path}"
    run_it, launch, *nearest = text.splitlines()[text.splitlines().index(f"run it with: {line}") :]
    assert run_it.endswith(line)
    assert launch.startswith(f"to launch: partita export {path} --to ")
    assert all(each.startswith("for ") for each in nearest)


def test_without_torchrun_it_says_how_to_start(planned, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    result = run("run", str(planned[0]), "--device", "cpu")
    assert result.exit_code == 2
    assert "start it with: torchrun --nproc-per-node 2" in result.stderr


def test_checkpoints_need_a_folder(planned):
    result = run("run", str(planned[0]), "--checkpoint-every", "2")
    assert result.exit_code == 2
    assert "add --checkpoint FOLDER" in result.stderr


def test_a_plan_for_inference_has_no_command_that_trains(tmp_path):
    path = tmp_path / "plan.json"
    words = ["plan", "squeezenet1_1", "--cluster", "2xA100", "--batch", "4", "-o", str(path)]
    text = run(*words, "--infer", "--quiet").stdout
    assert path.exists()
    assert "torchrun" not in text


def run_twice(rank, path, folder):
    """What rank 0 prints of a run that is ended after four steps and started again, and of one."""
    words = ["run", str(path), "--device", "cpu", "--data", f"{EXAMPLE}:text_tiny"]
    saved = ["--checkpoint", str(folder / "saved"), "--checkpoint-every", "2"]
    outputs, notes = [], []
    for more in (["--steps", "4", *saved], ["--steps", "6", *saved], ["--steps", "6"]):
        result = run(*words, *more)
        assert result.exit_code == 0, result.output
        outputs.append(result.stdout)
        notes.append([line for line in result.stderr.splitlines() if line.startswith("runs ")])
    return outputs, notes


def test_a_run_that_is_started_again_goes_on_from_its_last_checkpoint(planned, tmp_path):
    ends = run_on_ranks(2, run_twice, planned[0], tmp_path, folder=tmp_path)
    assert [end.code for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    first, second, whole = (
        [line.partition(",")[0] for line in text.splitlines()] for text in ends[0].result[0]
    )
    assert second[0] == "goes on after step 4"
    assert first + second[1:] == whole
    assert ends[1].result == (["", "", ""], [[], [], []])  # one rank speaks
    assert ends[0].result[1] == [[f"runs {EXAMPLE}"]] * 3  # of model and data, in the same file
