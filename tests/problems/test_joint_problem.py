"""The joint record: its files, its space in words, and what it refuses."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from partita import files, problems
from partita.errors import InputError
from partita.problems import joint
from partita.problems.joint import Cell, JointSolution, StageChoice

sys.path.insert(0, str(Path(__file__).parent.parent / "search"))
from tests.search.joint.joint_problems import chain, tiny_problems


@settings(max_examples=25, deadline=None)
@given(tiny_problems())
def test_a_file_holds_the_whole_problem(problem):
    data = files.encode_json(problem.to_json())
    again = joint.from_json(files.decode_json(data))
    assert again == problem.made()
    assert problems.kind_of(again) == "joint"
    assert again.cells == problem.cells


def test_a_problem_is_read_by_its_format(tmp_path):
    file = tmp_path / "joint.json"
    file.write_bytes(files.encode_json(chain(1.0, 2.0).to_json()))
    assert problems.load(file) == chain(1.0, 2.0)


def test_a_space_says_which_plans_it_has():
    text = chain(1.0, 2.0).space()
    assert "2 stages" in text
    assert "4 micro-batches" in text
    assert "meshes of one axis" in text
    assert "interleaved with 2 virtual stages" in text
    asked = replace(chain(1.0, 2.0), constraints="pp=2")
    assert asked.space().endswith("with pp=2")


def solution(*stages, cell=(0, 4), schedule=0):
    return JointSolution(Cell(*cell), schedule, tuple(StageChoice(*stage) for stage in stages))


GOOD = (0, 1, 0, 0, "none"), (1, 2, 0, 0, "none")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (solution(*GOOD, cell=(0, 3)), "no cell"),
        (solution(*GOOD, schedule=7), "there is no schedule 7"),
        (solution(GOOD[0]), "there are 1 stages, and 2 are needed"),
        (solution(GOOD[0], (0, 2, 0, 0, "none")), "layer range 0 to 2, after 1"),
        (solution(GOOD[0], (1, 1, 0, 0, "none")), "layer range 1 to 1, after 1"),
        (solution(GOOD[0], (1, 2, 0, 5, "none")), "no strategy 5 on its mesh 0"),
        (solution(GOOD[0], (1, 2, 3, 0, "none")), "no strategy 0 on its mesh 3"),
        (solution(GOOD[0], (1, 2, 0, 0, "full")), "may not have checkpointing 'full'"),
    ],
)
def test_wrong_solutions_are_told(wrong, message):
    assert any(message in line for line in joint.check(chain(3.0, 3.0), wrong))


def test_a_solution_is_read_back():
    value = json.loads(files.encode_json(solution(*GOOD).to_json()))
    assert JointSolution.from_json(value) == solution(*GOOD)
    with pytest.raises(InputError, match="stages"):
        JointSolution.from_json(value | {"stages": [{"first": 0}]})


def test_a_full_budget_is_told_with_both_sizes():
    problem = chain(3.0, 3.0, saved=4.0, budgets=(5.0, 5.0))
    assert "group 0 holds" in joint.check(problem, solution(*GOOD))[0]
    with pytest.raises(InputError, match="group 0 holds"):
        joint.evaluate(problem, solution(*GOOD))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment_kind": []}, "names no segments"),
        ({"crossing_bytes": [1.0]}, "has 1 entries for 2 segments"),
        ({"cells": [[3, 4]]}, r"holds \(3, 4\)"),
        ({"cells": [[0, 2]]}, None),
        ({"checkpointing": ["some"]}, "use none, selective, full"),
        ({"schedules": [{"name": "1f1b", "layout": "ring"}]}, "has the layout 'ring'"),
        ({"tables": []}, None),
        ({"batch": "four"}, "batch"),
    ],
)
def test_a_file_that_does_not_hang_together_is_refused(change, message):
    value = json.loads(files.encode_json(chain(3.0, 3.0).to_json())) | change
    if message is None:  # a cell without meshes has no solutions, which is no mistake
        assert joint.lower_bound(joint.from_json(value, "joint.json")) == float("inf")
        return
    with pytest.raises(InputError, match=message):
        joint.from_json(value, "joint.json")


def test_a_table_with_a_short_column_is_refused():
    value = json.loads(files.encode_json(chain(3.0, 3.0).to_json()))
    value["tables"][0]["strategies"][0]["compute"] = [1.0]
    with pytest.raises(InputError, match="a column is short, or below 0"):
        joint.from_json(value, "joint.json")


def test_a_cell_without_its_table_is_refused():
    value = json.loads(files.encode_json(chain(3.0, 3.0).to_json()))
    value["tables"][0]["in_flight"] = 1
    with pytest.raises(InputError, match="lacks 1 of grouping 0 x 4"):
        joint.from_json(value, "joint.json")
