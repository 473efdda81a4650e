"""Ctrl-C during `partita solve`: the best so far is written, and the exit code is 130."""

import json
import signal
import subprocess
import sys
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"

# More plans than anyone could try.
ENDLESS = [str(DATA / "partition" / "resnet50.json"), "--devices", "4", "--method", "brute"]


def interrupt(*words: str) -> tuple[int, str, str]:
    """Start a search, press Ctrl-C once it has an answer; exit code, stdout, stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "partita", "solve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "best" not in (line := process.stderr.readline()):
        assert line, "the search ended by itself"
    process.send_signal(signal.SIGINT)
    answer, words_said = process.communicate(timeout=60)
    return process.returncode, answer, words_said


def test_the_best_so_far_is_the_answer_and_the_exit_code_130():
    code, answer, said = interrupt(*ENDLESS, "--json")
    data = json.loads(answer)
    assert code == 130
    assert data["status"] == "stopped"
    assert data["why"] == "interrupted"
    assert data["solution"]
    assert data["lower_bound"] <= data["objective"]
    assert "stopping with the best so far" in said
    assert "Traceback" not in said


def test_the_best_so_far_is_written(tmp_path):
    file = tmp_path / "result.json"
    code, answer, _ = interrupt(*ENDLESS, "-o", str(file))
    assert code == 130
    assert json.loads(file.read_bytes())["status"] == "stopped"
    assert "stopped early: interrupted" in answer
