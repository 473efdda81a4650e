import json

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.cli import partita
from partita.engine import run as simulate
from partita.program import Kind, Lane, Memory, Program


def program(capacity=10.0, waits=(0,), lane_of=(0, 0)):
    """Two tasks on one lane, the second after the first, each holding 6 while it runs."""
    return Program(
        lanes=(Lane("gpu"),),
        duration=[1.0, 2.0],
        lane_start=[0, 1, 2],
        lane_of=list(lane_of),
        wait_start=[0, 0, len(waits)],
        wait_on=list(waits),
        memories=(Memory("gpu", capacity),),
        effect_start=[0, 1, 2],
        effect_memory=[0, 0],
        effect_at_start=[6.0, 6.0],
        effect_at_end=[-6.0, -6.0],
        blocks=("a",),
        kind=[Kind.FORWARD, Kind.BACKWARD],
        microbatch=[0, 0],
    )


@pytest.fixture
def saved(tmp_path):
    def saved(record):
        path = tmp_path / "record.json"
        path.write_bytes(record if isinstance(record, bytes) else record.to_json())
        return str(path)

    return saved


def test_a_program_that_can_run_is_verified(run, saved):
    result = run("verify", saved(program()))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("verified: program of 2 tasks")


def test_a_true_timeline_is_verified(run_json, saved):
    file = saved(simulate(program()))
    assert run_json("verify", file) == {
        "format": "partita/verification@1",
        "file": file,
        "kind": "timeline",
        "verified": True,
        "violations": [],
    }


def test_a_program_beyond_its_memory_is_not_verified(run, saved):
    result = run("verify", saved(program(capacity=5.0)))
    assert result.exit_code == 1
    assert result.stdout.startswith("not verified: program of 2 tasks")
    assert "memory gpu holds 6 of 5" in result.stdout


def test_a_program_that_deadlocks_is_not_verified(run_json, saved):
    plain = program().to_plain()
    plain["order"] = [1, 0]
    answer = run_json("verify", saved(json.dumps(plain).encode()), code=1)
    assert not answer["verified"]
    assert answer["violations"][0].startswith("deadlock: ")


def test_a_timeline_with_two_tasks_at_once_is_not_verified(run_json, saved):
    plain = simulate(program()).to_plain()
    plain["start"], plain["end"] = [0.0, 0.5], [1.0, 2.5]
    answer = run_json("verify", saved(json.dumps(plain).encode()), code=1)
    assert any("lane gpu runs" in line for line in answer["violations"])


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """AlexNet on two devices, planned by the command line."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    words = ["shard", "alexnet", "--cluster", "2xA100", "--batch", "64", "-o", str(file), "-q"]
    result = CliRunner().invoke(partita, words)
    assert result.exit_code == 0, result.output
    return json.loads(file.read_bytes())


def test_a_plan_that_was_just_made_is_verified(run_json, saved, plan):
    answer = run_json("verify", saved(json.dumps(plan).encode()))
    assert answer["kind"] == "plan"
    assert answer["verified"]


def test_a_plan_that_predicts_too_much_is_not_verified(run, saved, plan):
    prediction = {**plan["prediction"], "step_s": plan["prediction"]["step_s"] / 2}
    result = run("verify", saved(json.dumps({**plan, "prediction": prediction}).encode()))
    assert result.exit_code == 1
    assert "the plan predicts" in result.stdout
    assert "predicted with other costs: simulate it, or plan again" in " ".join(
        result.stdout.split()
    )


def test_a_plan_of_another_model_is_not_verified(run, saved, plan):
    model = {**plan["model"], "spec": "vgg16"}
    result = run("verify", saved(json.dumps({**plan, "model": model}).encode()))
    assert result.exit_code == 1
    assert "the plan is for another vgg16" in result.stdout


def fields(value, path=()):
    """The paths to every value inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inside:
        yield (*path, key)
        if isinstance(part, dict | list):
            yield from fields(part, (*path, key))


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5), st.just([]), st.just({}), st.just([[]]),
)  # fmt: skip


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data())
def test_a_plan_with_any_field_replaced_is_judged_or_refused(run, plan, saved, choice):
    broken = json.loads(json.dumps(plan))
    *path, last = choice.draw(st.sampled_from(sorted(fields(broken), key=str)))
    inside = broken
    for key in path:
        inside = inside[key]
    inside[last] = choice.draw(JUNK)
    result = run("verify", saved(json.dumps(broken).encode()))
    assert result.exit_code in (0, 1, 2), result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"[1]", "holds a JSON list; a JSON object is needed"),
        (b"{}", 'format: is missing; needs "format"'),
        (
            b'{"format": "partita/sharding@1"}',
            "format: found partita/sharding; one of partita/plan, partita/program",
        ),
        (b'{"format": "partita/program@9"}', "written by a newer partita"),
        (b'{"format": "partita/program@1"}', "lanes"),
    ],
)
def test_what_is_neither_is_refused(run, saved, content, message):
    result = run("verify", saved(content))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert "record.json" in result.stderr


def test_a_missing_file_is_refused(run):
    result = run("verify", "no-such-file.json")
    assert result.exit_code == 2
    assert result.stderr == "error: no-such-file.json: no such file; check the path\n"
