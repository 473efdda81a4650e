"""The exact search as a whole: against enumeration, with every way it can end, stopped anywhere."""

import itertools
import math
import time
from pathlib import Path

import numpy as np
import pytest
from contract import timeless
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_sharding_search import clique, path, tiny_problems

from partita.errors import ProblemError
from partita.problems import sharding
from partita.problems.sharding import Floats, ShardingProblem, evaluate
from partita.search.base import Status, Stop
from partita.search.sharding import branch, exact, network
from partita.search.sharding.brute import BruteSharding
from partita.search.sharding.dual import Keeper, View
from partita.search.sharding.exact import ExactSharding
from tests.quickness import least_cpu_s

DATA = Path(__file__).parent.parent / "data" / "sharding"
DENSE = DATA / "dense" / "densenet-6-12-24-16-dense_p4.npz"

patched = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def optimum(problem: ShardingProblem) -> float:
    """By adding everything up into one table, which is quicker than trying one by one."""
    counts = problem.num_choices
    total: Floats = np.zeros(counts)

    def spread(cells: Floats, *ops: int) -> Floats:
        shape = [count if op in ops else 1 for op, count in enumerate(counts)]
        return (cells if list(ops) == sorted(ops) else cells.T).reshape(shape)

    for op, cost in enumerate(problem.costs):
        total = total + spread(cost, op)
    for edge, index in zip(problem.edges, problem.matrix_of, strict=True):
        total = total + spread(problem.matrices[index], *edge)
    return float(total.min())


def random_problem(
    seed: int,
    *,
    num_ops: int,
    most_choices: int,
    density: float,
    forbidden: float = 0.0,
    num_handles: int = 0,
) -> ShardingProblem:
    """Costs without structure, so that bounds alone rarely prove anything.

    Handles are further ops that each join two of the others.
    """
    rng = np.random.default_rng(seed)
    counts = rng.integers(2, most_choices + 1, num_ops + num_handles)
    pairs = [p for p in itertools.combinations(range(num_ops), 2) if rng.random() < density]
    for handle in range(num_ops, num_ops + num_handles):
        pairs += [(int(op), handle) for op in rng.permutation(num_ops)[:2]]
    edges = tuple(pair if rng.random() < 0.5 else pair[::-1] for pair in pairs)

    def table(*shape: int) -> Floats:
        cells = rng.integers(0, 10, shape) + rng.choice([0.0, 0.25, 0.5])
        return np.where(rng.random(shape) < forbidden, math.inf, cells)

    return ShardingProblem(
        costs=tuple(rng.integers(0, 5, count).astype(float) for count in counts),
        edges=edges,
        matrix_of=tuple(range(len(edges))),
        matrices=tuple(table(counts[src], counts[dst]) for src, dst in edges),
    )


def assert_optimal(problem: ShardingProblem, search: ExactSharding) -> str:
    """The proven optimum is that of enumeration; returns why."""
    result, expected = search(problem), optimum(problem)
    if expected == math.inf:
        assert result.status is Status.INFEASIBLE
        return result.why
    assert result.status is Status.OPTIMAL
    assert result.solution is not None
    assert result.objective == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert evaluate(problem, result.solution) == result.objective
    assert result.lower_bound == result.objective
    for step in result.history:
        assert (
            step.lower_bound is None or step.lower_bound <= expected + 1e-9 * abs(expected) + 1e-9
        )
    return result.why


@settings(max_examples=300, deadline=None)
@given(tiny_problems())
def test_it_proves_what_brute_force_finds(problem: ShardingProblem) -> None:
    result, expected = ExactSharding()(problem), BruteSharding()(problem)
    assert result.status is expected.status
    if expected.objective is not None:
        assert result.objective == pytest.approx(expected.objective, rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 7), st.sampled_from([0.4, 0.7, 1.0]), st.booleans())
def test_it_proves_the_optimum_of_unstructured_costs(
    seed: int, num_ops: int, density: float, forbidding: bool
) -> None:
    problem = random_problem(
        seed, num_ops=num_ops, most_choices=5, density=density, forbidden=0.2 * forbidding
    )
    assert_optimal(problem, ExactSharding())


@pytest.mark.parametrize("max_cells", [1, 100])
def test_without_memory_for_tables_it_branches_to_the_same_optimum(max_cells: int) -> None:
    ends = [
        assert_optimal(
            random_problem(
                seed, num_ops=7, most_choices=4, density=0.9, forbidden=0.1 * (seed % 2)
            ),
            ExactSharding(max_cells=max_cells),
        )
        for seed in range(40)
    ]
    assert sum("branches" in why for why in ends) > 10


def test_folding_and_branching_lead_to_the_same_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "QUICK_CELLS", 500)
    monkeypatch.setattr(branch, "QUICK_CELLS", 100)
    sizes: list[tuple[int, int]] = []  # before and after
    solve = ExactSharding._solve

    def noted(search: ExactSharding, keeper: Keeper, view: View, *, may_fold: bool) -> str:
        num_ops = int((view.network.num_choices > 1).sum())
        sizes.append((len(keeper.problem.costs), num_ops))
        return solve(search, keeper, view, may_fold=may_fold)

    monkeypatch.setattr(ExactSharding, "_solve", noted)
    for seed in range(40):
        problem = random_problem(seed, num_ops=6, most_choices=4, density=1.0, num_handles=4)
        assert_optimal(problem, ExactSharding(max_joined=600))
    folded = [after for before, after in sizes if after <= before - 4]
    assert len(folded) > 5


@pytest.mark.parametrize("climb", [2, 4, 16])
def test_every_length_of_climb_leads_to_the_same_optimum(
    climb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "FIRST_CLIMB", climb)
    ends = [
        assert_optimal(
            random_problem(seed, num_ops=7, most_choices=4, density=0.6), ExactSharding()
        )
        for seed in range(30)
    ]
    assert any("elimination" in why for why in ends)


@patched
@given(problem=tiny_problems())
def test_tables_that_may_not_be_copied_change_nothing(
    problem: ShardingProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = timeless(ExactSharding()(problem))
    monkeypatch.setattr(network, "COPIED_CELLS", -(10**9))
    assert timeless(ExactSharding()(problem)) == before


@patched
@given(problem=tiny_problems(), after=st.integers(0, 40), max_cells=st.sampled_from([1, 10**6]))
def test_interrupted_anywhere_it_returns_a_valid_answer_and_bound(
    problem: ShardingProblem, after: int, max_cells: int
) -> None:
    asked = itertools.count()
    result = ExactSharding(max_cells=max_cells)(
        problem, Stop(interrupted=lambda: next(asked) >= after)
    )
    expected = optimum(problem)
    assert result.status is not Status.FEASIBLE
    if result.status is Status.INFEASIBLE:
        assert expected == math.inf
    else:
        assert result.lower_bound is not None
        assert result.lower_bound <= expected + 1e-9 * abs(expected) + 1e-9
    if result.solution is not None:
        assert evaluate(problem, result.solution) == result.objective


def test_the_bound_rises_while_it_branches() -> None:
    problem = random_problem(1, num_ops=9, most_choices=5, density=1.0)
    result = ExactSharding(max_cells=1)(problem)
    assert "branches" in result.why
    bounds = [step.lower_bound for step in result.history if step.lower_bound is not None]
    assert bounds == sorted(bounds)
    assert len(set(bounds)) > 5


def test_branching_is_the_same_every_time() -> None:
    problem = random_problem(2, num_ops=9, most_choices=4, density=1.0)
    search = ExactSharding(max_cells=1)
    assert timeless(search(problem, seed=3)) == timeless(search(problem, seed=3))


def test_an_asked_gap_ends_the_search() -> None:
    problem = random_problem(3, num_ops=10, most_choices=6, density=1.0)
    result = ExactSharding()(problem, Stop(gap=0.5))
    assert result.status is Status.STOPPED
    assert result.why == "within the asked gap of 50.00%"
    assert result.gap is not None
    assert 0 < result.gap <= 0.5


def test_dense_connections_are_solved_where_no_table_would_fit() -> None:
    problem = sharding.read(DENSE)
    result = ExactSharding()(problem)
    assert least_cpu_s(lambda: ExactSharding()(problem), 2) < 2  # it takes about 0.01 s
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(problem.known_cost, rel=1e-12)


def test_a_path_of_thousands_of_ops_is_proven_by_two_sweeps() -> None:
    problem = path(5000, 6)
    result = ExactSharding()(problem)
    assert result.status is Status.OPTIMAL
    table = problem.costs[0]  # the plain shortest path, forwards
    for cost, matrix in zip(problem.costs[1:], problem.matrices, strict=True):
        table = (table[:, None] + matrix).min(axis=0) + cost
    assert result.objective == table.min()
    assert result.why == "2 sweeps of message passing proved it"


def test_a_thousand_choices_with_a_shared_matrix_are_no_trouble() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.random((1000, 1000))
    problem = ShardingProblem(
        costs=tuple(rng.random(1000) for _ in range(30)),
        edges=tuple(itertools.pairwise(range(30))),
        matrix_of=(0,) * 29,
        matrices=(matrix,),
    )
    result = ExactSharding()(problem)
    assert result.status is Status.OPTIMAL
    table = problem.costs[0]
    for cost in problem.costs[1:]:
        table = (table[:, None] + matrix).min(axis=0) + cost
    assert result.objective == pytest.approx(table.min())


@pytest.mark.parametrize(
    ("problem", "cost"),
    [
        (ShardingProblem((np.array([3.0, 2.0]),)), 2.0),
        (ShardingProblem((np.array([3.0]), np.array([1.0, math.inf]))), 4.0),
        (clique(9, 3), 9.0),
    ],
    ids=["one op", "no edges", "ties everywhere"],
)
def test_small_and_symmetric_problems_are_proven(problem: ShardingProblem, cost: float) -> None:
    result = ExactSharding()(problem)
    assert result.status is Status.OPTIMAL
    assert result.objective == cost


def test_parts_without_connection_are_solved_together() -> None:
    one = random_problem(1, num_ops=5, most_choices=4, density=1.0)
    two = random_problem(2, num_ops=5, most_choices=4, density=1.0)
    both = ShardingProblem(
        costs=(*one.costs, *two.costs),
        edges=(*one.edges, *((src + 5, dst + 5) for src, dst in two.edges)),
        matrix_of=tuple(range(len(one.edges) + len(two.edges))),
        matrices=(*one.matrices, *two.matrices),
    )
    assert ExactSharding()(both).objective == pytest.approx(optimum(one) + optimum(two))


def test_large_costs_that_cancel_each_other_do_not_mislead() -> None:
    """Moving a million from ops to edges changes no answer, only what sums lose by rounding."""
    rng = np.random.default_rng(0)
    for seed in range(20):
        plain = random_problem(seed, num_ops=7, most_choices=3, density=0.8)
        costs = [cost.copy() for cost in plain.costs]
        matrices = []
        for (src, dst), matrix in zip(plain.edges, plain.matrices, strict=True):
            here, there = rng.normal(size=len(matrix)) * 1e6, rng.normal(size=matrix.shape[1]) * 1e6
            costs[src] -= here
            costs[dst] -= there
            matrices.append(matrix + here[:, None] + there)
        shifted = ShardingProblem(tuple(costs), plain.edges, plain.matrix_of, tuple(matrices))
        result = ExactSharding()(shifted)
        assert result.status is Status.OPTIMAL
        assert result.objective == pytest.approx(optimum(plain), abs=1e-6)


@pytest.mark.parametrize("limit_s", [0.0, 0.05, 0.3])
def test_a_hopeless_problem_stops_in_time_with_an_answer_between_its_bounds(
    limit_s: float,
) -> None:
    problem = random_problem(4, num_ops=60, most_choices=6, density=0.5)
    ExactSharding()(problem, Stop(evaluations=3))  # compiles
    began = time.process_time()
    result = ExactSharding()(problem, Stop(time_s=limit_s))
    assert time.process_time() - began < limit_s + 2
    assert result.status is Status.STOPPED
    assert result.lower_bound is not None
    if result.objective is not None:
        assert result.lower_bound < result.objective


def test_memory_that_runs_out_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(exact, "network_of", full)
    result = ExactSharding()(random_problem(5, num_ops=6, most_choices=3, density=1.0))
    assert result.status is Status.STOPPED
    assert result.why == "the tables do not fit in memory"
    assert result.solution is not None


@pytest.mark.parametrize("field", ["max_cells", "max_joined"])
@pytest.mark.parametrize("cells", [0, -1, 2**41])
def test_impossible_settings_are_refused(field: str, cells: int) -> None:
    with pytest.raises(ProblemError, match=f"{field}: is {cells}"):
        ExactSharding(**{field: cells})
