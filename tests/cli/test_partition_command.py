"""partita partition, as a user would call it."""

from pathlib import Path

import pytest

from partita.cli.sizes import size_bytes
from partita.errors import InputError
from partita.files import encode_json
from partita.problems.partition import PartitionEdge, PartitionNode, PartitionProblem

QUICK = ("--time-limit", "5", "--gap", "0.2", "--quiet")


def test_people_read_the_stages_the_bound_and_the_step(run):
    text = run("partition", "alexnet", "--devices", "2", "--batch", "4", *QUICK).stdout
    for word in ("busiest device", "lower bound", "simulated step", "forward", "sends", "holds"):
        assert word in text
    (step,) = [line for line in text.split("\n") if line.startswith("simulated step")]
    assert "predicted; 80 % interval" in step


def test_programs_get_the_stage_of_every_op_and_the_device_of_every_stage(run_json, tmp_path):
    path = tmp_path / "plan.json"
    answer = run_json("partition", "alexnet", "-c", "4xA100", "-p", "2", *QUICK, "-o", str(path))
    assert {"method", "status", "seconds", "seed", "gap", "why", "stages"} <= set(answer)
    assert answer["objective"] >= answer["lower_bound"] > 0
    low, high = answer["step_interval_s"]
    assert low < answer["step_s"] < high
    stages = set(answer["solution"]["stage_of"].values())
    assert {str(stage) for stage in stages} == set(answer["solution"]["device_of"])
    assert set(answer["solution"]["device_of"].values()) <= {0, 1}
    assert Path(answer["plan"]).exists()


def test_a_written_plan_is_verified(run, tmp_path):
    path = tmp_path / "plan.json"
    wrote = run("partition", "alexnet", "-p", "3", "--straight", *QUICK, "-o", str(path))
    assert f"partita report {path}" in wrote.stdout
    assert run("verify", str(path)).exit_code == 0


def test_what_does_not_fit_ends_with_code_1_and_says_what_would(run):
    result = run("partition", "alexnet", "-p", "2", "--memory", "10MB", *QUICK)
    assert result.exit_code == 1
    assert "a device needs at least" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --cluster or --devices"),
        (("-p", "2", "--memory", "lots"), "--memory: found 'lots'; write a size such as 40GB"),
        (("-p", "2", "--method", "acylic"), "did you mean acyclic?"),
        (("-p", "2", "--profile", "none.json"), "none.json: no such file"),
        (("-c", "2xA100", "-p", "5"), "5 devices are asked for"),
    ],
)
def test_mistakes_are_answered_in_words(run, words, message):
    result = run("partition", "alexnet", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_saved_problem_is_solved_under_a_cap(run, run_json, tmp_path):
    path = tmp_path / "problem.json"
    nodes = (PartitionNode(id, "OP", 1.0, 1.0, param_bytes=10) for id in range(4))
    edges = (PartitionEdge(id, id + 1, 10**9, 10**9) for id in range(3))
    problem = PartitionProblem(tuple(nodes), tuple(edges), 2)
    path.write_bytes(encode_json(problem.to_json()))
    free = run_json("solve", str(path), "--quiet")
    assert len(set(free["solution"]["device_of"].values())) == 1  # links are slow
    capped = run_json("solve", str(path), "--memory", "20", "--quiet")
    assert len(set(capped["solution"]["device_of"].values())) == 2
    little = run("solve", str(path), "--memory", "5", "--quiet")
    assert little.exit_code == 1
    assert "node 0 alone needs 10 B" in little.stdout


@pytest.mark.parametrize(
    ("text", "value"),
    [("40GB", 40e9), ("16GiB", 16 * 2**30), ("1.5 mb", 1.5e6), ("100", 100.0), ("3KiB", 3072.0)],
)
def test_sizes_are_read_as_people_write_them(text, value):
    assert size_bytes(text, "--memory") == value


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "4XB", "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="write a size"):
        size_bytes(text, "--memory")
