"""`partita diff`: two plans side by side."""

import pytest

from partita.jobs.diff import diff
from partita.jobs.shard import shard


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    made = {
        "two": shard("squeezenet1_1", "2xA100", batch=8),
        "four": shard("squeezenet1_1", "4xA100", batch=8),
        "other": shard("alexnet", "2xA100", batch=8),
    }
    paths = {}
    for name, sharding in made.items():
        paths[name] = folder / f"{name}.json"
        paths[name].write_bytes(sharding.plan.to_json())
    return made, paths


def test_a_plan_differs_in_nothing_from_itself(run_json, plans):
    _, paths = plans
    answer = run_json("diff", str(paths["two"]), str(paths["two"]))
    assert answer["decisions"] == []
    assert answer["changes"] == []
    assert answer["same_ops"] == answer["num_ops"] > 0
    assert all(figure["first"] == figure["second"] for figure in answer["figures"])


def test_figures_decisions_and_ops_of_two_machines_are_told(run, plans):
    _, paths = plans
    result = run("diff", str(paths["two"]), str(paths["four"]))
    assert result.exit_code == 0, result.output
    assert "machine" in result.stdout
    assert "2xA100" in result.stdout
    assert "4xA100" in result.stdout
    assert "ops are split alike" in result.stdout


def test_the_step_is_the_one_that_was_simulated(plans):
    made, _ = plans
    difference = diff(made["two"].plan, made["four"].plan)
    step = next(figure for figure in difference.figures if figure.name == "step")
    assert step.first == pytest.approx(made["two"].best.step_s)
    assert step.second == pytest.approx(made["four"].best.step_s)
    assert step.ratio == pytest.approx(step.second / step.first)
    assert (
        difference.same_ops + sum(change.count for change in difference.changes)
        == difference.num_ops
    )


def test_where_the_step_of_each_goes_adds_up_to_it(plans, run):
    made, paths = plans
    difference = diff(made["two"].plan, made["four"].plan)
    assert sum(part.first for part in difference.parts) == pytest.approx(made["two"].best.step_s)
    assert sum(part.second for part in difference.parts) == pytest.approx(made["four"].best.step_s)
    assert {"forward", "data gradient", "optimizer update"} <= {
        part.name for part in difference.parts
    }
    text = run("diff", str(paths["two"]), str(paths["four"])).stdout
    for words in ("where the step goes", "MFU", "global batch", "exposed communication", "bubble"):
        assert words in text


def test_plans_of_two_models_are_not_compared(run, plans):
    _, paths = plans
    result = run("diff", str(paths["two"]), str(paths["other"]))
    assert result.exit_code == 2
    assert "one plan is for squeezenet1_1, the other for alexnet" in result.stderr
