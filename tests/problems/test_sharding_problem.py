import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_mutations import attempt, mutated

from partita import files
from partita.errors import InputError, ProblemError
from partita.problems import sharding
from partita.problems.sharding import (
    ShardingProblem,
    ShardingSolution,
    check,
    evaluate,
    lower_bound,
)

DATA = Path(__file__).parent.parent / "data" / "sharding"
FILES = sorted(DATA.glob("*.npz"))


def two_ops(matrix: Any = ((0, 7), (3, 1)), **fields: Any) -> ShardingProblem:
    """Costs 10 or 20 for the first op, 5 or 6 for the second; a matrix between them."""
    settings: dict[str, Any] = {
        "costs": (np.array([10.0, 20.0]), np.array([5.0, 6.0])),
        "edges": ((0, 1),),
        "matrix_of": (0,),
        "matrices": (np.array(matrix, dtype=float),),
    }
    return ShardingProblem(**(settings | fields))


def test_the_objective_adds_ops_and_edges() -> None:
    problem = two_ops()
    values = {x: evaluate(problem, ShardingSolution(x)) for x in ((0, 0), (0, 1), (1, 0), (1, 1))}
    assert values == {(0, 0): 15, (0, 1): 23, (1, 0): 28, (1, 1): 27}


def test_parallel_edges_are_added_up_and_direction_is_rows_by_columns() -> None:
    problem = two_ops(edges=((0, 1), (0, 1), (1, 0)), matrix_of=(0, 0, 0))
    assert evaluate(problem, ShardingSolution((0, 1))) == 10 + 6 + 7 + 7 + 3


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recorded_optimum_costs_what_its_file_says(file: Path) -> None:
    problem = sharding.read(file)
    assert problem.known is not None
    assert problem.known_cost is not None
    assert evaluate(problem, problem.known) == pytest.approx(problem.known_cost, rel=1e-12)
    assert lower_bound(problem) <= problem.known_cost
    assert problem.num_ops == len(problem.names)


def test_there_are_files_to_read() -> None:
    assert len(FILES) == 8


def test_wrong_solutions_are_told_in_words() -> None:
    problem = two_ops(matrix=((0, math.inf), (0, 0)), names=("conv", "fc"))
    assert check(problem, ShardingSolution((0, 0))) == ()
    assert check(problem, ShardingSolution((0,))) == ("the assignment has 1 entries for 2 ops",)
    assert check(problem, ShardingSolution((2, -1))) == (
        "op 0 (conv) is given choice 2 of 2",
        "op 1 (fc) is given choice -1 of 2",
    )
    assert check(problem, ShardingSolution((0, 1))) == (
        "op 0 (conv) with choice 0 and op 1 (fc) with choice 1 are forbidden together",
    )
    forbidden = two_ops(costs=(np.array([math.inf, 1]), np.array([1.0, 1.0])))
    assert check(forbidden, ShardingSolution((0, 0))) == ("op 0 takes the forbidden choice 0",)
    with pytest.raises(ProblemError, match="forbidden choice 0; give a valid solution"):
        evaluate(forbidden, ShardingSolution((0, 0)))


def test_the_bound_gives_each_op_half_of_its_edges() -> None:
    assert lower_bound(two_ops(matrix=((8, 9), (2, 3)))) == (10 + 4) + (5 + 1)
    assert lower_bound(two_ops(matrix=((math.inf,) * 2,) * 2)) == math.inf


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"costs": ()}, "costs: has no ops; give at least one op"),
        ({"costs": (np.array([]), np.array([1.0]))}, "costs[0]: has no choices"),
        ({"costs": (np.array([math.nan, 1]), np.array([1.0, 1]))}, "costs[0]: holds NaN"),
        ({"costs": (np.array([-math.inf, 1]), np.array([1.0, 1]))}, "costs[0]: holds -inf"),
        ({"costs": (np.array([1e200, 1]), np.array([1.0, 1]))}, "costs[0]: holds 1e+200"),
        ({"costs": (np.zeros((2, 2)), np.zeros(2))}, "costs[0]: has the shape (2, 2)"),
        ({"matrix": ((math.nan, 0), (0, 0))}, "matrices[0]: holds NaN"),
        ({"matrix": ((0, 0, 0), (0, 0, 0))}, "edges[0]: joins ops 0 and 1 of 2 and 2 choices by"),
        ({"edges": ((0, 2),)}, "edges[0]: names op 2; ops are 0 to 1"),
        ({"edges": ((1, 1),)}, "edges[0]: joins op 1 to itself"),
        ({"edges": ()}, "matrix_of: has 1 entries for 0 edges"),
        ({"matrix_of": (1,)}, "matrix_of[0]: names matrix 1; there are 1"),
        ({"meta": "not JSON"}, "meta: is not JSON"),
        ({"names": ("a",)}, "names: has 1 entries for 2 ops"),
        ({"splits": (np.ones((2, 1)),)}, "splits: has 1 entries for 2 ops"),
        ({"splits": (np.ones((2, 1)), np.ones((3, 1)))}, "splits[1]: has 3 rows for 2 choices"),
        ({"splits": (np.ones((2, 1)), np.zeros((2, 1)))}, "splits[1]: holds 0; split factors"),
        ({"known": ShardingSolution((0, 5))}, "known: op 1 is given choice 5 of 2"),
        ({"known_cost": math.nan}, "known_cost: is nan"),
        (
            {"known": ShardingSolution((0, 0)), "known_cost": 14.0},
            "known_cost: is 14 where the recorded assignment costs 15",
        ),
    ],
)
def test_numbers_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        two_ops(**fields)
    assert message in str(caught.value)


def test_a_problem_cannot_be_changed_through_its_arrays() -> None:
    given = np.array([10.0, 20.0])
    problem = two_ops(costs=(given, np.array([5.0, 6.0])))
    given[0] = 0.0
    assert problem.costs[0][0] == 10.0
    with pytest.raises(ValueError, match="read-only"):
        problem.costs[0][0] = 0.0


def test_a_problem_prints_in_one_line_and_equals_its_like() -> None:
    assert repr(two_ops()) == "ShardingProblem(2 ops of 2 to 2 choices, 1 edges)"
    assert two_ops() == two_ops()
    assert hash(two_ops()) == hash(two_ops())
    assert two_ops() != two_ops(matrix=((0, 7), (3, 2)))
    assert two_ops() != "two ops"


def test_json_goes_both_ways_and_null_is_forbidden() -> None:
    problem = two_ops(
        matrix=((0, math.inf), (3, 1)),
        names=("a", "b"),
        splits=(np.array([[1, 1], [2, 1]]), np.array([[1], [2]])),
        known=ShardingSolution((0, 0)),
        known_cost=15.0,
        known_source="by hand",
        meta='{"source": "here"}',
    )
    text = files.encode_json(problem.to_json())
    assert b"null" in text
    assert sharding.from_json(files.decode_json(text)) == problem


@settings(max_examples=300, deadline=None)
@given(mutated(two_ops(names=("a", "b"), known=ShardingSolution((0, 0))).to_json()))
def test_any_json_is_read_or_refused(value: dict[str, Any]) -> None:
    problem = attempt(sharding.from_json, value, "f.json")
    if isinstance(problem, InputError):
        assert problem.file == "f.json"
        return
    assert not math.isnan(lower_bound(problem))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "partita/sharding-problem@2", "written by a newer partita"),
        ("costs", [[1, "x"]], "costs[0][1]: Expected"),
        ("matrices", [[[1], [1, 2]]], "matrices[0]: has rows of 1 and of 2 entries"),
        ("splits", [[[1], [1, 2]]], "splits[0]: has rows of 1 and of 2 entries"),
        ("splits", [[[10**30]]], "splits[0]: holds no split factor"),
    ],
)
def test_wrong_json_is_refused_with_its_field(field: str, value: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        sharding.from_json(two_ops().to_json() | {field: value}, "f.json")
    assert str(caught.value).startswith("f.json: ")
    assert message in str(caught.value)


def test_a_solution_is_written_as_the_format_says() -> None:
    solution = ShardingSolution((1, 0))
    assert solution.to_json() == {"assignment": [1, 0]}
    assert ShardingSolution.from_json({"assignment": [1, 0]}) == solution


@given(st.dictionaries(st.sampled_from(["assignment", "x"]), st.lists(st.none() | st.integers())))
def test_any_solution_is_read_or_refused(value: dict[str, Any]) -> None:
    try:
        solution = ShardingSolution.from_json(value, "s.json")
    except InputError:
        return
    assert isinstance(check(two_ops(), solution), tuple)
