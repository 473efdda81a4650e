"""Sweeps: the answers of one process, resumable, and a process that dies costs its task alone."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partita.errors import FileError
from partita.jobs.sweep import Sweeper, SweepOutcome, task_key
from tests.jobs.sweep_work import Square, hears, square


def test_processes_give_the_answers_of_one():
    tasks = [Square(number) for number in range(5)]
    alone, beside = Sweeper(1)(square, tasks), Sweeper(2)(square, tasks)
    assert alone == beside
    assert [outcome.answer for outcome in alone] == [{"square": n * n} for n in range(5)]


def test_a_process_that_dies_costs_its_task_alone():
    tasks = [Square(0), Square(1, dies=True), Square(2), Square(3)]
    outcomes = Sweeper(2)(square, tasks)
    assert [outcome.answer for outcome in outcomes] == [
        {"square": 0}, None, {"square": 4}, {"square": 9},
    ]  # fmt: skip
    assert outcomes[1].why == "its process died, twice"


def test_a_refusal_is_the_outcome_of_its_task():
    outcomes = Sweeper(1)(square, [Square(3, refused=True), Square(4)])
    assert outcomes[0] == SweepOutcome(None, "found 3; give another")
    assert outcomes[1].answer == {"square": 16}


def test_a_sweep_goes_on_from_its_file(tmp_path):
    results = tmp_path / "results.jsonl"
    tasks = [Square(number, str(tmp_path)) for number in range(4)]
    Sweeper(1, results)(square, tasks[:2])
    with results.open("a") as file:
        file.write('{"format": "partita/sweep@1", "ke')  # as if it had been killed while writing
    outcomes = Sweeper(1, results)(square, tasks[:3])
    assert [outcome.is_known for outcome in outcomes] == [True, True, False]
    assert (tmp_path / "calls").read_text().split() == ["0", "1", "2"]


def test_a_file_that_no_sweep_has_written_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("something\nelse\n")
    with pytest.raises(FileError, match="line 1 is no answer of a sweep"):
        Sweeper(1, path)(square, [Square(1)])


def test_what_an_interruption_leaves_out_is_said():
    told = []
    sweeper = Sweeper(1, None, lambda: len(told) == 2, lambda place, outcome: told.append(place))
    outcomes = sweeper(square, [Square(n) for n in range(4)])
    assert told == [0, 1]
    assert [outcome.why for outcome in outcomes] == ["", "", "not reached", "not reached"]


def test_ctrl_c_is_heard_by_one_process_alone():
    answers = [outcome.answer for outcome in Sweeper(2)(hears, [Square(1), Square(2)])]
    assert answers == [
        {"hears": False},
        {"hears": False},
    ]  # they are ended, with no stack of frames
    assert hears(None) == {"hears": True}


def test_tasks_are_known_by_all_that_decides_them():
    assert task_key(square, Square(1)) != task_key(square, Square(2))
    assert task_key(square, Square(1)) == task_key(square, Square(1))


KILLED = """
import sys
from partita.jobs.sweep import Sweeper
from tests.jobs.sweep_work import Square, wait_for_ever

if __name__ == "__main__":
    Sweeper(2)(wait_for_ever, [Square(n, sys.argv[1]) for n in range(3)])
"""


def test_no_process_of_a_sweep_outlives_one_that_is_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    sweep = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], env={**os.environ, "PYTHONPATH": path}
    )
    calls = tmp_path / "calls"
    _until(lambda: calls.exists() and len(calls.read_text().split()) == 2)
    sweep.kill()
    sweep.wait()
    _until(lambda: not any(_is_there(int(number)) for number in calls.read_text().split()))


def _until(holds, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "in time"
        time.sleep(0.05)


def _is_there(number):
    """Does a process still run? One that has ended may wait for somebody to read its exit code."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{number}/stat")
    return not stat.exists() or ") Z " not in stat.read_text()
