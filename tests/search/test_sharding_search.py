import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from contract import SearchContract
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import ProblemError
from partita.problems import sharding
from partita.problems.sharding import ShardingProblem, ShardingSolution, evaluate
from partita.search.base import Result, Search, Status, Stop
from partita.search.sharding import SEARCHES
from partita.search.sharding.brute import BruteSharding
from partita.search.sharding.exact import ExactSharding
from partita.search.sharding.pase import Pase, generate_sequence

DATA = Path(__file__).parent.parent / "data" / "sharding"
FILES = sorted(DATA.glob("*.npz"))

COSTS = st.sampled_from([0.0, 1.0, 2.0, 3.0, 0.5, -1.0, 7.25, 1e9]) | st.floats(-100, 100)
COSTS_OR_FORBIDDEN = st.integers(0, 5).flatmap(lambda n: COSTS if n else st.just(math.inf))


@st.composite
def tiny_problems(draw: st.DrawFn) -> ShardingProblem:
    """Up to five ops: disconnected, cyclic, with parallel edges, forbidden and single choices."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    ops = st.integers(0, len(counts) - 1)
    pairs = st.tuples(ops, ops).filter(lambda pair: pair[0] != pair[1])
    edges = draw(st.lists(pairs, max_size=8)) if len(counts) > 1 else []
    cost = COSTS_OR_FORBIDDEN if draw(st.booleans()) else COSTS

    def table(*shape: int) -> sharding.Floats:
        size = math.prod(shape)
        return np.array(draw(st.lists(cost, min_size=size, max_size=size))).reshape(shape)

    return ShardingProblem(
        costs=tuple(table(count) for count in counts),
        edges=tuple(edges),
        matrix_of=tuple(range(len(edges))),
        matrices=tuple(table(counts[src], counts[dst]) for src, dst in edges),
    )


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
class TestEverySearch(SearchContract):
    kind = sharding
    oracle = BruteSharding()
    problems = tiny_problems()


def path(num_ops: int, num_choices: int) -> ShardingProblem:
    rng = np.random.default_rng(0)
    pairs = tuple(itertools.pairwise(range(num_ops)))
    return ShardingProblem(
        costs=tuple(rng.integers(0, 100, num_choices).astype(float) for _ in range(num_ops)),
        edges=pairs,
        matrix_of=tuple(range(len(pairs))),
        matrices=tuple(rng.integers(0, 100, (num_choices,) * 2).astype(float) for _ in pairs),
    )


def clique(num_ops: int, num_choices: int) -> ShardingProblem:
    pairs = tuple(itertools.combinations(range(num_ops), 2))
    return ShardingProblem(
        costs=(np.zeros(num_choices),) * num_ops,
        edges=pairs,
        matrix_of=(0,) * len(pairs),
        matrices=(np.eye(num_choices),),  # every two ops would rather differ
    )


@settings(max_examples=200, deadline=None)
@given(tiny_problems())
def test_pase_proves_what_brute_force_finds(problem: ShardingProblem) -> None:
    result, expected = Pase()(problem), BruteSharding()(problem)
    assert result.status is expected.status
    if expected.objective is not None:
        assert result.objective == pytest.approx(expected.objective, rel=1e-9, abs=1e-9)


def test_the_exact_search_is_the_default() -> None:
    assert next(iter(SEARCHES)) == "exact"


@pytest.mark.parametrize("search", [ExactSharding(), Pase()], ids=["exact", "pase"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_recorded_optimum_is_reached(
    file: Path, search: Search[ShardingProblem, ShardingSolution]
) -> None:
    problem = sharding.read(file)
    result = search(problem)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(problem.known_cost, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "cells"),  # the rows of the largest table that PaSE itself makes
    [("alexnet_p16", 2520), ("rnnlm_p8", 1080), ("transformer_p4", 10_000)],
)
def test_the_largest_table_is_as_large_as_pases(name: str, cells: int) -> None:
    result = Pase()(sharding.read(DATA / f"{name}.npz"))
    assert f"the largest table had {cells:,} cells" in result.why


def test_a_star_is_eliminated_from_its_tips() -> None:
    star = ShardingProblem(
        costs=(np.zeros(2),) * 4,
        edges=((0, 1), (2, 0), (0, 3)),
        matrix_of=(0,) * 3,
        matrices=(np.zeros((2, 2)),),
    )
    assert list(generate_sequence(star)) == [(1, (0,)), (2, (0,)), (0, (3,)), (3, ())]


def test_neighbours_of_an_eliminated_op_become_neighbours() -> None:
    square = ShardingProblem(
        costs=(np.zeros(2),) * 4,
        edges=((0, 1), (1, 2), (2, 3), (3, 0)),
        matrix_of=(0,) * 4,
        matrices=(np.zeros((2, 2)),),
    )
    assert list(generate_sequence(square))[:2] == [(0, (1, 3)), (1, (2, 3))]


def test_a_table_beyond_the_cap_stops_with_its_op_its_size_and_a_bound() -> None:
    problem = clique(12, 4)
    result = Pase(max_cells=1000)(problem)
    assert result.status is Status.STOPPED
    assert result.why.startswith(
        "the table of op 0 would have 16,777,216 cells (11 other ops depend on its choice), more "
        "than max_cells = 1,000"
    )
    assert result.lower_bound is not None
    assert result.objective is not None
    assert result.lower_bound <= result.objective


def test_a_huge_clique_is_given_up_at_once() -> None:
    result = Pase()(clique(300, 3))
    assert result.status is Status.STOPPED
    assert result.seconds < 5
    assert "e+143 cells" in result.why


def test_back_pointers_count_as_well() -> None:
    result = Pase(max_cells=20)(path(30, 4))
    assert result.status is Status.STOPPED
    assert "the back-pointers up to op" in result.why


def test_ops_with_one_choice_cost_no_dims() -> None:
    """More ops depend on each other than an array can have dims, but only three choose."""
    pairs = tuple(itertools.combinations(range(100), 2))
    tables = {(2, 2): 0, (2, 1): 1, (1, 1): 2}
    counts = [2, 2, 2] + [1] * 97
    problem = ShardingProblem(
        costs=tuple(np.zeros(count) for count in counts),
        edges=pairs,
        matrix_of=tuple(tables[counts[src], counts[dst]] for src, dst in pairs),
        matrices=(np.eye(2), np.array([[1.0], [1.5]]), np.array([[0.25]])),
    )
    result = Pase(max_cells=200)(problem)
    assert result.status is Status.OPTIMAL
    assert result.evaluations == 2  # the first guess, then the proof
    assert result.objective == 3 + 3 * 97 + 97 * 96 / 2 * 0.25


def test_a_long_path_is_solved_exactly() -> None:
    problem = path(2000, 4)
    result = Pase()(problem)
    assert result.status is Status.OPTIMAL
    table = problem.costs[0]  # the plain shortest path, forwards
    for cost, matrix in zip(problem.costs[1:], problem.matrices, strict=True):
        table = (table[:, None] + matrix).min(axis=0) + cost
    assert result.objective == table.min()


def test_tables_are_minimised_in_blocks_to_the_same_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = sharding.read(DATA / "rnnlm_p8.npz")
    whole = Pase()(problem)
    monkeypatch.setattr("partita.search.sharding.pase.BLOCK_CELLS", 100)
    assert Pase()(problem).solution == whole.solution


def test_time_that_runs_out_between_tables_leaves_the_first_answer() -> None:
    asked = itertools.count()
    result = Pase()(path(50, 4), Stop(interrupted=lambda: next(asked) > 70))
    assert result.status is Status.STOPPED
    assert result.why == "interrupted"
    assert result.solution is not None


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_a_problem_without_a_valid_choice_is_infeasible(
    search: Search[ShardingProblem, ShardingSolution],
) -> None:
    forbidden = np.full((2, 2), math.inf)
    problem = ShardingProblem((np.zeros(2),) * 2, ((0, 1),), (0,), (forbidden,))
    result: Result[ShardingSolution] = search(problem)
    assert result.status is Status.INFEASIBLE
    assert result.solution is None
    assert "forbidden" in result.why


def test_a_contradiction_around_a_triangle_is_infeasible() -> None:
    differ = np.array([[math.inf, 0.0], [0.0, math.inf]])
    triangle = ShardingProblem((np.zeros(2),) * 3, ((0, 1), (1, 2), (2, 0)), (0, 0, 0), (differ,))
    assert sharding.lower_bound(triangle) == 0
    for search in SEARCHES.values():
        assert search(triangle).status is Status.INFEASIBLE


def test_brute_force_tries_every_combination() -> None:
    problem = path(4, 3)
    result = BruteSharding()(problem)
    assert result.evaluations == 3**4
    every = (ShardingSolution(x) for x in itertools.product(range(3), repeat=4))
    assert result.objective == min(evaluate(problem, each) for each in every)


@pytest.mark.parametrize("cells", [0, -1, 2**41])
def test_an_impossible_cap_is_refused(cells: int) -> None:
    with pytest.raises(ProblemError, match="max_cells: is"):
        Pase(max_cells=cells)
