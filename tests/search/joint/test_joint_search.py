"""Methods for joint problems meet the contract, brute force, and their own tables' formulas."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from partita.problems import joint
from partita.problems.joint import (
    Cell,
    JointSchedule,
    evaluate,
    stage_cost,
)
from partita.schedules.named import NAMED
from partita.search.base import Status
from partita.search.joint import SEARCHES
from partita.search.joint.auto import Auto
from partita.search.joint.brute import Brute, num_solutions, solutions
from partita.search.joint.candidates import Candidates, InterleavedSettings
from partita.search.joint.cells import LikelyCells, SpaceBound
from partita.search.joint.orders import in_flight
from tests.search.contract import SearchContract
from tests.search.joint.joint_problems import chain, tiny_problems

WEAK = Auto(
    likely=LikelyCells(per_stage=1), evaluated=1, promising=0, kept_interleaved=1, leaders=0,
    retries=1, slacks=(1.0,), interleaving=InterleavedSettings(multipliers=(0.0, 1.0)),
    exhaustive=0,
)  # fmt: skip
METHODS = {**SEARCHES, "weak": WEAK}


@pytest.mark.parametrize("search", METHODS.values(), ids=METHODS.keys())
class TestEverySearch(SearchContract):
    kind = joint
    oracle = Brute()
    problems = tiny_problems(3)


@settings(max_examples=60, deadline=None)
@given(tiny_problems())
def test_the_usual_method_finds_an_answer_where_there_is_one(problem):
    result, best = Auto()(problem), Brute()(problem)
    assert (result.solution is None) == (best.solution is None)
    assert (result.status is Status.INFEASIBLE) == (best.status is Status.INFEASIBLE)


@settings(max_examples=60, deadline=None)
@given(tiny_problems(), st.data())
def test_tables_of_layer_ranges_are_the_records_formulas(problem, data):
    cell = data.draw(st.sampled_from(problem.cells))
    group = data.draw(st.integers(0, problem.groupings[cell.grouping].num_groups - 1))
    table = Candidates(problem).table(cell, group)
    first = data.draw(st.integers(0, problem.num_segments - 1))
    end = data.draw(st.integers(first + 1, problem.num_segments))
    meshes = problem.meshes_of(cell, group)
    for number, option in enumerate(table.options):
        known = problem.strategies[problem.key(cell, group, meshes[option.mesh])]
        cost = stage_cost(problem, known[option.strategy], option.checkpointing, first, end)
        ranges = table.ranges
        read = (ranges.seconds, ranges.tail, ranges.static, ranges.saved, ranges.moment)
        assert [float(each[number][first, end]) for each in read] == pytest.approx(list(cost))


@settings(max_examples=40, deadline=None)
@given(tiny_problems())
def test_a_candidate_estimates_what_the_record_says(problem):
    candidates = Candidates(problem)
    for cell in problem.cells:
        for schedule in range(len(problem.schedules)):
            candidate = candidates.best(cell, schedule)
            if candidate is not None:
                assert candidate.estimate_s == pytest.approx(evaluate(problem, candidate.solution))


@settings(max_examples=40, deadline=None)
@given(tiny_problems(3))
def test_no_solution_of_a_cell_is_below_the_cells_bound(problem):
    for solution in solutions(problem):
        if not joint.check(problem, solution):
            bound = joint.cell_bound(problem, solution.cell)
            assert bound <= evaluate(problem, solution) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(tiny_problems(3))
def test_brute_force_tries_as_many_solutions_as_there_are(problem):
    assert len(list(solutions(problem))) == num_solutions(problem)


def test_a_pipeline_of_two_takes_its_bottleneck_and_the_fill():
    result = Auto()(chain(3.0, 3.0))
    assert result.solution.stages[0][:2] == (0, 1)
    assert result.objective == pytest.approx(4 * 3 + 3)  # m t + (p - 1) t


def test_the_fill_of_a_pipeline_is_shared_by_its_virtual_stages():
    problem = chain(2.0, 2.0, 2.0, 2.0)
    candidate = Candidates(problem).best(problem.cells[0], schedule=1)
    assert len(candidate.solution.stages) == 4
    assert candidate.ideal_s == pytest.approx(4 * 4)
    assert candidate.estimate_s == pytest.approx(4 * 4 + 8 / 2)


def test_a_small_budget_asks_for_full_checkpointing():
    free = Auto()(chain(3.0, 3.0, saved=4.0, checkpointing=("none", "full")))
    tight = Auto()(chain(3.0, 3.0, saved=4.0, budgets=(5.0, 5.0), checkpointing=("none", "full")))
    assert {stage.checkpointing for stage in free.solution.stages} == {"none"}
    assert tight.solution.stages[0].checkpointing == "full"
    assert tight.objective > free.objective


def test_where_nothing_fits_the_result_is_proven_infeasible():
    result = Auto()(chain(3.0, 3.0, saved=4.0, budgets=(1.0, 1.0)))
    assert result.status is Status.INFEASIBLE
    assert "solutions were tried" in result.why


class Levels:
    """Bounds by hand: level 0 and 1 of two cells."""

    num_levels = 2

    def __init__(self, values):
        self.values, self.asked = values, []

    def bound(self, cell, level, enough):
        self.asked.append((cell, level))
        return self.values[cell][level]


def test_only_cells_that_matter_are_bounded_at_higher_levels():
    one, two = Cell(0, 1), Cell(0, 2)
    levels = Levels({one: (1.0, 3.0), two: (2.5, 9.0)})
    assert SpaceBound((one, two), levels).least(10.0, lambda: False) == 3.0
    assert (two, 1) in levels.asked  # 2.5 was the least after the first was raised
    few = Levels({one: (1.0, 2.0), two: (2.5, 9.0)})
    assert SpaceBound((one, two), few).least(10.0, lambda: False) == 2.0
    assert (two, 1) not in few.asked


class Climbing:
    """A last level that climbs as far as is asked, up to what it can prove."""

    num_levels = 2

    def __init__(self, values):
        self.values, self.asked = values, []

    def bound(self, cell, level, enough):
        self.asked.append((cell, level, enough))
        low, high = self.values[cell]
        return min(high, enough) if level else low


def test_the_last_level_proves_no_more_than_the_next_cell_asks_for():
    one, two = Cell(0, 1), Cell(0, 2)
    levels = Climbing({one: (1.0, 9.0), two: (2.0, 2.5)})
    assert SpaceBound((one, two), levels).least(10.0, lambda: False) == 2.5
    assert max(enough for cell, level, enough in levels.asked if cell == one and level) < 3.0
    both = Climbing({one: (1.0, 9.0), two: (2.0, 12.0)})
    assert SpaceBound((one, two), both).least(10.0, lambda: False) == 9.0


class Growing:
    """Bounds that grow level by level; no more than is enough is proven at the last."""

    def __init__(self, rows):
        self.rows, self.num_levels, self.asked = rows, 3, 0

    def bound(self, cell, level, enough):
        self.asked += level == 2
        value = self.rows[cell][level]
        return min(value, enough * 1.01) if level == 2 else value


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=12), st.integers(1, 4))
@example([(1, 2, 8), (1, 1, 9)], 1)
def test_the_lowest_cells_are_those_of_all_bounds(rows, most):
    cells = [Cell(0, count) for count in range(1, len(rows) + 1)]
    grown = {c: [sum(row[: k + 1]) for k in range(3)] for c, row in zip(cells, rows, strict=True)}
    bounds, below = Growing(grown), 20.0
    space = SpaceBound(cells, bounds)
    lowest = space.lowest(cells, most, 2, below, lambda: False)
    ranked = sorted((grown[c][2], number) for number, c in enumerate(cells))
    assert lowest == [cells[k] for value, k in ranked if value < below][:most]
    assert bounds.asked <= len(cells)
    assert space.lowest(cells, most, 2, below, lambda: True) == []
    least = min(value for value, _ in ranked)  # what was not proven then is proven when asked for
    assert space.least(100.0, lambda: False) == least


def test_a_bound_of_a_space_needs_a_bound_of_every_cell():
    one, two = Cell(0, 1), Cell(0, 2)
    levels = Levels({one: (1.0, 3.0), two: (2.5, 9.0)})
    assert SpaceBound((one, two), levels).least(10.0, lambda: True) == 0.0


def test_a_cell_far_below_the_best_plan_is_not_ruled_out_by_dear_levels():
    cell = Cell(0, 1)
    levels = Levels({cell: (1.0, 2.0, 11.0)})
    levels.num_levels = 3
    assert not SpaceBound((cell,), levels).rules_out(cell, 10.0, 3, hardly=0.85)
    assert (cell, 2) not in levels.asked
    near = Levels({cell: (1.0, 9.0, 11.0)})
    near.num_levels = 3
    assert SpaceBound((cell,), near).rules_out(cell, 10.0, 3, hardly=0.85)


def test_layouts_say_which_group_has_a_stage():
    wave, looped = JointSchedule("zb-v", 2, "wave"), JointSchedule("interleaved", 2, "looped")
    assert [wave.group_of(k, 2) for k in range(4)] == [0, 1, 1, 0]
    assert [looped.group_of(k, 2) for k in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 2), (2, 3, 4), (4, 2, 4), (4, 6, 8), (3, 4, 9)])
def test_interleaved_orders_hold_what_is_read_off_them(p, v, m):
    peaks = []
    for row in NAMED["interleaved"].order(p, v, m):
        levels = itertools.accumulate(1 if action.kind == "F" else -1 for action in row)
        peaks.append(max(levels) / v)
    assert in_flight("interleaved", p, v, m) == tuple(peaks)
