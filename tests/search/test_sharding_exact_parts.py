"""The parts of the exact search, each by itself."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_sharding_exact import optimum, random_problem
from test_sharding_search import clique, path, tiny_problems

from partita.problems.sharding import Floats, Ints, ShardingProblem, ShardingSolution, evaluate
from partita.search.sharding import eliminate
from partita.search.sharding.dual import dual_of, improve, resumed, sweep
from partita.search.sharding.eliminate import (
    Elimination,
    Order,
    best_order,
    narrow_order,
    quick_order,
)
from partita.search.sharding.network import (
    Pairwise,
    SearchStopped,
    ShardingNetwork,
    network_of,
    restricted,
)

PLENTY = 10**9
seeds = st.integers(0, 2**32)


def never() -> bool:
    return False


def always() -> bool:
    return True


def network(problem: ShardingProblem) -> ShardingNetwork:
    parts = Pairwise(problem.costs, problem.edges, problem.matrix_of, problem.matrices)
    sharding_network = network_of(parts, never)
    assert sharding_network is not None
    return sharding_network


def cost(network: ShardingNetwork, labels: Ints) -> float:
    """By the tables of the network."""
    total = float(network.costs[network.first[:-1] + labels].sum())
    for edge, (src, dst) in enumerate(network.op_at.reshape(-1, 2)):
        total += float(network.table(edge)[labels[src], labels[dst]])
    return total


def real(problem: ShardingProblem, network: ShardingNetwork, labels: Ints) -> float:
    """By the problem."""
    return evaluate(problem, ShardingSolution(network.assignment(labels)))


def any_labels(network: ShardingNetwork, seed: int) -> Ints:
    return np.random.default_rng(seed).integers(0, network.num_choices)


class TestNetwork:
    @settings(max_examples=60, deadline=None)
    @given(seeds)
    def test_it_costs_what_the_problem_costs(self, seed: int) -> None:
        problem = random_problem(seed, num_ops=6, most_choices=4, density=0.7)
        whole = network(problem)
        labels = any_labels(whole, seed)
        assert cost(whole, labels) == pytest.approx(real(problem, whole, labels))

    def test_edges_between_the_same_ops_are_added_whichever_way_they_point(self) -> None:
        one, two = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[10.0, 20.0], [30.0, 50.0]])
        edges, matrix_of = ((0, 1), (1, 0), (0, 1)), (0, 1, 0)
        problem = ShardingProblem((np.zeros(2),) * 2, edges, matrix_of, (one, two))
        whole = network(problem)
        assert len(whole.op_at) == 2
        assert whole.table(0).tolist() == (2 * one + two.T).tolist()

    def test_equal_rows_and_columns_are_stored_once(self) -> None:
        layouts = np.array([[1.0, 2.0, 5.0], [3.0, 4.0, 6.0]])
        rows, columns = [0, 1, 0, 1, 1], [2, 0, 0, 1]
        matrix = layouts[np.ix_(rows, columns)]
        costs = (np.arange(5.0), np.arange(4.0))  # all different, or they would be dropped
        pairs = ((0, 1), (0, 2), (1, 2))
        more = (matrix, np.arange(10.0).reshape(5, 2), np.arange(8.0).reshape(4, 2))
        whole = network(ShardingProblem((*costs, np.zeros(2)), pairs, (0, 1, 2), more))
        assert whole.tables.num_classes[:2].tolist() == [2, 3]
        assert whole.table(0).tolist() == matrix.tolist()

    def test_equal_edges_share_their_table(self) -> None:
        whole = network(clique(6, 3))
        assert len(whole.op_at) == 2 * 15
        assert len(set(whole.table_keys())) == 1
        assert len(whole.tables.cells) == 9

    def test_of_equal_choices_the_cheapest_is_kept(self) -> None:
        matrix = np.array([[1.0, 2.0], [1.0, 2.0], [0.0, 9.0], [1.0, 2.0]])
        costs = (np.array([5.0, 4.0, 3.0, 4.0]), np.zeros(2))
        whole = network(ShardingProblem(costs, ((0, 1),), (0,), (matrix,)))
        assert whole.choices.tolist() == [1, 2, 0, 1]

    def test_forbidden_choices_are_left_out_and_single_ones_joined_to_their_neighbours(
        self,
    ) -> None:
        costs = (np.array([1.0, math.inf]), np.array([1.0, 2.0]), np.array([0.0, 0.0]))
        matrix = np.array([[10.0, 20.0], [30.0, 40.0]])
        two = np.array([[0.0, 1.0], [1.0, 0.0]])
        problem = ShardingProblem(costs, ((1, 0), (1, 2)), (0, 1), (matrix, two))
        whole = network(problem)
        assert whole.num_choices.tolist() == [1, 2, 2]
        assert whole.costs.tolist() == [1.0, 11.0, 32.0, 0.0, 0.0]
        assert whole.op_at.tolist() == [1, 2]

    def test_an_op_with_forbidden_choices_only_has_no_network(self) -> None:
        assert network_of(Pairwise([np.full(2, math.inf)], [], [], []), never) is None

    def test_it_stops_when_asked(self) -> None:
        matrices = [np.zeros((2, 2))]
        with pytest.raises(SearchStopped):
            network_of(Pairwise([np.zeros(2)] * 2, [(0, 1)], [0], matrices), always)

    def test_tables_made_in_groups_are_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        problem = random_problem(0, num_ops=7, most_choices=4, density=1.0)
        whole = network(problem)
        monkeypatch.setattr("partita.search.sharding.network.GROUP_TABLES", 2)
        for one, other in zip(whole.tables, network(problem).tables, strict=True):
            assert one.tolist() == other.tolist()


class TestRestriction:
    @settings(max_examples=60, deadline=None)
    @given(seeds)
    def test_what_remains_costs_what_it_did(self, seed: int) -> None:
        problem = random_problem(seed, num_ops=6, most_choices=4, density=0.7)
        whole = network(problem)
        rng = np.random.default_rng(seed)
        alive = rng.random(len(whole.costs)) < 0.6
        alive[whole.first[:-1]] = True  # one at least
        sent = rng.random(whole.sent_at[-1])
        smaller, carried = restricted(whole, alive, sent)
        assert smaller.choices.tolist() == whole.choices[alive].tolist()
        assert len(carried) == smaller.sent_at[-1]
        assert (smaller.num_choices[smaller.op_at] > 1).all()
        labels = any_labels(smaller, seed)
        assert cost(smaller, labels) == pytest.approx(real(problem, smaller, labels))

    def test_messages_stay_with_their_choices(self) -> None:
        whole = network(random_problem(1, num_ops=3, most_choices=5, density=1.0))
        of_choice = np.concatenate(
            [whole.choices[whole.first[op] : whole.first[op + 1]] for op in whole.op_at]
        ).astype(float)
        alive = whole.choices != 1
        smaller, carried = restricted(whole, alive, of_choice)
        expected = [
            smaller.choices[smaller.first[op] : smaller.first[op + 1]] for op in smaller.op_at
        ]
        assert carried.tolist() == np.concatenate(expected).tolist()

    def test_nothing_ruled_out_is_nothing_done(self) -> None:
        whole = network(clique(5, 3))
        sent = np.zeros(whole.sent_at[-1])
        assert restricted(whole, np.ones(len(whole.costs), np.bool_), sent)[0] is whole


class TestSweeps:
    @settings(max_examples=60, deadline=None)
    @given(seeds, st.booleans())
    def test_the_bound_never_falls_and_never_passes_the_optimum(
        self, seed: int, dense: bool
    ) -> None:
        problem = random_problem(seed, num_ops=6, most_choices=4, density=1.0 if dense else 0.4)
        whole, expected = network(problem), optimum(problem)
        dual = dual_of(whole)
        bound = -math.inf
        for index in range(10):
            assert sweep(whole, dual, index % 2 == 0, 0, PLENTY, math.inf) == whole.num_ops
            assert bound - 1e-9 <= dual.least.sum() <= expected + 1e-9
            bound = dual.least.sum()

    @settings(max_examples=60, deadline=None)
    @given(seeds)
    def test_no_choice_of_an_optimum_is_ruled_out(self, seed: int) -> None:
        problem = random_problem(seed, num_ops=6, most_choices=4, density=0.6)
        whole, expected = network(problem), optimum(problem)
        dual = dual_of(whole)
        sweep(whole, dual, True, 0, PLENTY, math.inf)
        for index in range(9):
            sweep(whole, dual, index % 2 == 1, 0, PLENTY, expected + 1e-9)
        alive, choices = dual.alive, whole.choices
        left = [
            choices[begin:end][alive[begin:end]] for begin, end in itertools.pairwise(whole.first)
        ]
        left = [np.array(own) for own in left]
        within = (
            evaluate(problem, ShardingSolution(tuple(int(x) for x in each)))
            for each in itertools.product(*left)
        )
        assert min(within) == pytest.approx(expected)

    def test_on_a_path_one_sweep_gives_the_optimum(self) -> None:
        problem = path(6, 4)
        dual = dual_of(network(problem))
        sweep(network(problem), dual, True, 0, PLENTY, math.inf)
        assert dual.least.sum() == pytest.approx(optimum(problem))

    def test_a_sweep_in_parts_is_the_same_sweep(self) -> None:
        whole = network(random_problem(2, num_ops=8, most_choices=5, density=0.6))
        once, parts = dual_of(whole), dual_of(whole)
        sweep(whole, once, True, 0, PLENTY, math.inf)
        done = num_parts = 0
        while done < whole.num_ops:
            done = sweep(whole, parts, True, done, 1, math.inf)
            num_parts += 1
        assert num_parts == whole.num_ops
        assert parts.sent.tolist() == once.sent.tolist()
        assert parts.labels.tolist() == once.labels.tolist()

    def test_a_contradiction_leaves_an_op_without_choice(self) -> None:
        forbidden = np.array([[math.inf, 0.0], [0.0, math.inf]])
        edges = ((0, 1), (1, 2), (0, 2))
        problem = ShardingProblem((np.array([0.0, 9.0]),) * 3, edges, (0,) * 3, (forbidden,))
        whole = network(problem)
        alive = np.array([True, False, True, True, True, True])  # the first op takes its first
        smaller, sent = restricted(whole, alive, np.zeros(whole.sent_at[-1]))
        dual = resumed(smaller, sent, np.zeros(3))
        assert sweep(smaller, dual, True, 0, PLENTY, math.inf) == -1

    @settings(max_examples=60, deadline=None)
    @given(seeds)
    def test_the_bound_stays_when_dead_choices_are_left_out(self, seed: int) -> None:
        problem = random_problem(seed, num_ops=6, most_choices=4, density=0.6)
        whole, expected = network(problem), optimum(problem)
        dual = dual_of(whole)
        sweep(whole, dual, True, 0, PLENTY, math.inf)
        sweep(whole, dual, False, 0, PLENTY, expected + 1e-9)
        before = dual.least.sum()
        smaller, sent = restricted(whole, dual.alive, dual.sent)
        after = resumed(smaller, sent, dual.grain).least.sum()
        assert before - 1e-9 <= after <= expected + 1e-9

    @settings(max_examples=60, deadline=None)
    @given(seeds)
    def test_improving_an_answer_never_makes_it_worse(self, seed: int) -> None:
        problem = random_problem(seed, num_ops=6, most_choices=4, density=0.8)
        whole = network(problem)
        labels = any_labels(whole, seed)
        before = cost(whole, labels)
        after = improve(whole, labels, 50, np.empty(4))
        assert after == pytest.approx(real(problem, whole, labels))
        assert after <= before + 1e-9
        for op in range(whole.num_ops):  # and nobody would rather have chosen something else
            for choice in range(whole.num_choices[op]):
                other = labels.copy()
                other[op] = choice
                assert cost(whole, other) >= after - 1e-9


class TestOrders:
    def test_the_tips_of_a_star_come_first(self) -> None:
        edges = ((0, 1), (0, 2), (0, 3))
        star = ShardingProblem((np.arange(2.0),) * 4, edges, (0,) * 3, (np.eye(2),))
        order = quick_order(network(star), PLENTY, PLENTY, never)
        assert order.steps[:2] == ((1, (0,)), (2, (0,)))
        assert order.core == ()
        assert order.width == 2

    def test_an_op_with_few_choices_goes_before_one_with_many(self) -> None:
        counts = (9, 2, 9, 9)
        pairs = ((0, 1), (1, 2), (2, 3), (3, 0))
        ring = ShardingProblem(
            costs=tuple(np.arange(float(count)) for count in counts),
            edges=pairs,
            matrix_of=tuple(range(4)),
            matrices=tuple(
                np.arange(counts[a] * counts[b], dtype=float).reshape(counts[a], counts[b]) ** 2
                for a, b in pairs
            ),
        )
        order = quick_order(network(ring), PLENTY, PLENTY, never)
        assert order.steps[0] in ((0, (1, 3)), (1, (0, 2)), (2, (1, 3)))
        assert order.largest_cells == 2 * 9 * 9

    @pytest.mark.parametrize("find", [best_order, quick_order])
    def test_what_does_not_fit_is_the_core(self, find: Callable[..., Order]) -> None:
        whole = network(clique(8, 3))
        assert find(whole, 3**8 * 2, PLENTY, never).core == ()
        assert len(find(whole, 3**8 - 1, PLENTY, never).core) == 8
        assert len(find(whole, PLENTY, 8, never).core) == 8  # the matrix alone has nine cells

    def test_only_ops_of_two_neighbours_are_folded(self) -> None:
        problem = random_problem(0, num_ops=6, most_choices=3, density=1.0, num_handles=5)
        order = narrow_order(network(problem), PLENTY, PLENTY, never)
        assert sorted(op for op, _ in order.steps) == [6, 7, 8, 9, 10]
        assert order.core == (0, 1, 2, 3, 4, 5)

    def test_more_neighbours_than_a_table_can_have_dims_are_put_off(self) -> None:
        pairs = tuple((0, op) for op in range(1, 100))
        pairs += tuple(itertools.pairwise(range(1, 100)))
        fan = ShardingProblem((np.arange(2.0),) * 100, pairs, (0,) * len(pairs), (np.eye(2),))
        order = best_order(network(fan), PLENTY, PLENTY, never)
        assert order.core == ()
        assert order.width == 3

    def test_it_stops_when_asked(self) -> None:
        with pytest.raises(SearchStopped):
            best_order(network(clique(5, 3)), PLENTY, PLENTY, always)


class TestElimination:
    @settings(max_examples=60, deadline=None)
    @given(seeds, st.sampled_from([0.3, 0.6, 1.0]))
    def test_it_finds_the_optimum(self, seed: int, density: float) -> None:
        problem = random_problem(seed, num_ops=6, most_choices=4, density=density, forbidden=0.1)
        self.assert_optimal(problem)

    def assert_optimal(self, problem: ShardingProblem) -> None:
        whole, expected = network(problem), optimum(problem)
        elimination = Elimination(whole, never)
        elimination.run(best_order(whole, PLENTY, PLENTY, never).steps)
        assert elimination.constant == pytest.approx(expected)
        if expected < math.inf:
            assert real(problem, whole, elimination.labels()) == pytest.approx(expected)

    @pytest.mark.parametrize(("summed", "block", "tile"), [(1, 1, 1), (7, 5, 2), (100, 30, 3)])
    def test_small_blocks_give_the_same(
        self, summed: int, block: int, tile: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(eliminate, "SUMMED_CELLS", summed)
        monkeypatch.setattr(eliminate, "BLOCK_CELLS", block)
        monkeypatch.setattr(eliminate, "TILE", tile)
        for seed in range(15):
            self.assert_optimal(random_problem(seed, num_ops=7, most_choices=4, density=0.7))

    @settings(max_examples=40, deadline=None)
    @given(seeds)
    def test_what_is_left_after_folding_has_the_same_optimum(self, seed: int) -> None:
        problem = random_problem(seed, num_ops=5, most_choices=3, density=1.0, num_handles=3)
        whole = network(problem)
        elimination = Elimination(whole, never)
        elimination.run(narrow_order(whole, PLENTY, PLENTY, never).steps)
        rest, ops = elimination.rest()
        folded = ShardingProblem(
            tuple(rest.costs), tuple(rest.edges), tuple(rest.matrix_of), tuple(rest.matrices)
        )
        assert ops == (0, 1, 2, 3, 4)
        assert optimum(folded) + elimination.constant == pytest.approx(optimum(problem))
        labels = elimination.labels(dict.fromkeys(ops, 0))
        assert labels[:5].tolist() == [0] * 5
        value = evaluate(folded, ShardingSolution((0,) * 5)) + elimination.constant
        assert real(problem, whole, labels) == pytest.approx(value)

    def test_repeated_blocks_are_contracted_once(self) -> None:
        rng = np.random.default_rng(0)
        block: list[Floats] = [rng.random((3, 3)) for _ in range(4)]
        edges, matrix_of = [], []
        for at in range(0, 200, 4):  # fifty rings of four in a row
            for matrix, (src, dst) in enumerate(((0, 1), (1, 2), (0, 3), (3, 4))):
                edges.append((at + src, at + dst))
                matrix_of.append(matrix)
            edges.append((at + 2, at + 4))
            matrix_of.append(0)
        own = rng.random(3)
        problem = ShardingProblem((own,) * 201, tuple(edges), tuple(matrix_of), tuple(block))
        whole = network(problem)
        elimination = Elimination(whole, never)
        elimination.run(quick_order(whole, PLENTY, PLENTY, never).steps)
        assert len(elimination.trail) == 201
        assert elimination.num_contracted < 60

    def test_it_stops_when_asked(self) -> None:
        whole = network(clique(6, 3))
        elimination = Elimination(whole, always)
        with pytest.raises(SearchStopped):
            elimination.run(quick_order(whole, PLENTY, PLENTY, never).steps)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tiny_problems())
def test_a_network_keeps_the_optimum_of_any_problem(problem: ShardingProblem) -> None:
    parts = Pairwise(problem.costs, problem.edges, problem.matrix_of, problem.matrices)
    whole = network_of(parts, never)
    if whole is None:
        assert optimum(problem) == math.inf
        return
    every = itertools.product(*map(range, whole.num_choices))
    least = min(cost(whole, np.array(labels)) for labels in every)
    assert least == pytest.approx(optimum(problem), rel=1e-9, abs=1e-9)
