"""Searches for rTasks: the contract against brute force, and each policy's own promises."""

import pytest
from contract import SearchContract
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import InputError, ProblemError
from partita.problems import rtasks
from partita.problems.rtasks import (
    ROperator,
    RtasksProblem,
    RtasksSolution,
    TileEdge,
    Tiling,
    VDevice,
    evaluate,
    lower_bound,
    needed_tiles,
)
from partita.search.base import Status
from partita.search.rtasks import SEARCHES
from partita.search.rtasks.wavefront import selected, waves


@st.composite
def tiny_problems(draw: st.DrawFn) -> RtasksProblem:
    """Up to four tiles in up to three operators on up to three vEUs."""
    device = VDevice(
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        100,
        100,
        draw(st.sampled_from([0.0, 1.0])),
    )
    budget = draw(st.integers(1, 4))
    operators: list[ROperator] = []
    while budget > 0 and len(operators) < 3:
        tiles = draw(st.integers(1, min(2, budget)))
        times = st.sampled_from([1.0, 2.0, 5.5])
        tilings = [Tiling(tiles, draw(times), draw(st.sampled_from([0, 40, 100])))]
        if draw(st.booleans()):
            tilings.append(Tiling(1, draw(times), 0, draw(st.sampled_from([0, 60]))))
        operators.append(ROperator(f"op{len(operators)}", tuple(tilings)))
        budget -= tiles
    edges = [
        TileEdge(src, dst, draw(st.booleans()))
        for dst in range(len(operators))
        for src in range(dst)
        if draw(st.booleans())
    ]
    return RtasksProblem(device, tuple(operators), tuple(edges))


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
class TestEverySearch(SearchContract):
    kind = rtasks
    oracle = SEARCHES["brute"]
    problems = tiny_problems()


def lstm(layers: int, steps: int, tilings: tuple[Tiling, ...], device: VDevice) -> RtasksProblem:
    """Cells on a grid: each needs its own layer's step before and the layer below."""
    operators, edges = [], []
    for step in range(steps):
        for layer in range(layers):
            index = step * layers + layer
            operators.append(ROperator(f"cell {layer} {step}", tilings))
            if layer:
                edges.append(TileEdge(index - 1, index))
            if step:
                edges.append(TileEdge(index - layers, index))
    return RtasksProblem(device, tuple(operators), tuple(edges))


GRID = lstm(4, 12, (Tiling(8, 2.0), Tiling(16, 1.2), Tiling(4, 4.5)), VDevice(16, 2, signal_us=0.5))


def test_without_barriers_a_diagonal_grid_is_no_slower_than_in_waves():
    outcome = {name: SEARCHES[name](GRID).objective for name in ("wavefront", "list", "search")}
    assert outcome["search"] <= min(outcome.values())
    assert outcome["search"] >= lower_bound(GRID)


def test_the_search_finds_the_tiling_that_suits_the_whole():
    """By itself 32 tiles of 1 us are the fastest; with all layers at work, 8 of 2 us are."""
    device = VDevice(32, 1)
    problem = lstm(4, 12, (Tiling(32, 1.0), Tiling(8, 2.0)), device)
    alone = SEARCHES["list"](problem)
    result = SEARCHES["search"](problem)
    assert set(alone.solution.tilings) == {0}
    assert result.objective < alone.objective


def test_under_contention_rammer_takes_the_thrifty_kernel():
    both = (Tiling(8, 1.0), Tiling(2, 3.0))
    wide = RtasksProblem(VDevice(8), tuple(ROperator(str(i), both) for i in range(4)))
    alone = RtasksProblem(VDevice(8), (ROperator("a", both),))
    assert set(selected(wide)) == {1}
    assert selected(alone) == (0,)


def test_waves_are_levels():
    assert [len(wave) for wave in waves(lstm(3, 4, (Tiling(1, 1.0),), VDevice(4)))] == [
        1, 2, 3, 3, 2, 1,
    ]  # fmt: skip


def test_one_vcu_runs_everything_one_after_the_other():
    problem = lstm(2, 3, (Tiling(3, 2.0),), VDevice(1))
    for name in ("wavefront", "list", "search"):
        result = SEARCHES[name](problem)
        assert result.objective == 2 * 3 * 3 * 2.0
        assert result.status is Status.OPTIMAL


def test_more_shared_memory_per_tile_leaves_fewer_places():
    device = VDevice(2, 4, shared_bytes_per_unit=100)
    problem = RtasksProblem(device, (ROperator("a", (Tiling(8, 1.0, 20), Tiling(8, 1.0, 50))),))
    assert problem.num_veus((0,)) == 8
    assert problem.num_veus((1,)) == 4


def test_a_deadlock_is_named():
    problem = RtasksProblem(
        VDevice(2),
        tuple(ROperator(name, (Tiling(1, 1.0),)) for name in "abcd"),
        (TileEdge(0, 3), TileEdge(1, 2)),
    )
    crossed = RtasksSolution((0, 0, 0, 0), (((3, 0), (1, 0)), ((2, 0), (0, 0))))
    (said,) = rtasks.check(problem, crossed)
    assert "wait for each other for ever" in said
    assert "'d'" in said
    assert "'c'" in said


@pytest.mark.parametrize(
    ("solution", "said"),
    [
        (RtasksSolution((0,), ()), "never runs"),
        (RtasksSolution((1,), ()), "no tiling 1"),
        (RtasksSolution((), ()), "0 tilings for 1"),
        (RtasksSolution((0,), (((0, 0),), ((0, 1),), ())), "3 queues, but only 2"),
        (RtasksSolution((0,), (((0, 0), (0, 0)), ((0, 1),))), "twice"),
        (RtasksSolution((0,), (((0, 0), (0, 7)), ((0, 1),))), "no tile 7"),
    ],
)
def test_wrong_solutions_are_named(solution, said):
    problem = RtasksProblem(VDevice(2), (ROperator("a", (Tiling(2, 1.0),)),))
    assert said in " ".join(rtasks.check(problem, solution))


def test_a_signal_between_units_takes_time_and_within_one_does_not():
    pair = (ROperator("a", (Tiling(1, 1.0),)), ROperator("b", (Tiling(1, 1.0),)))
    problem = RtasksProblem(VDevice(2, signal_us=0.5), pair, (TileEdge(0, 1),))
    assert evaluate(problem, RtasksSolution((0, 0), (((0, 0), (1, 0)),))) == 2.0
    assert evaluate(problem, RtasksSolution((0, 0), (((0, 0),), ((1, 0),)))) == 2.5


@given(st.integers(1, 9), st.integers(1, 9))
def test_aligned_tiles_cover_everything_and_always_need_something(src, dst):
    edge = TileEdge(0, 1, aligned=True)
    needed = [set(needed_tiles(edge, src, dst, tile)) for tile in range(dst)]
    assert all(needed)
    assert set().union(*needed) == set(range(src))


def of_tiling(**tiling):
    return {"operators": [{"name": "a", "tilings": [tiling]}]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": {"num_units": 0}}, "num_units"),
        ({"operators": []}, "operators"),
        ({"operators": [{"name": "a", "tilings": []}]}, "no tilings"),
        ({"operators": [{"name": "a", "tilings": [{"num_tiles": 0, "tile_us": 1}]}]}, "0 tiles"),
        (
            {"operators": [{"name": "a", "tilings": [{"num_tiles": 1, "tile_us": 0}]}]},
            "more than 0",
        ),
        ({"edges": [{"src": 1, "dst": 0}]}, "after everything they need"),
        ({"edges": [{"src": 0, "dst": 9}]}, "operators are 0 to 1"),
        ({"format": "partita/plan@1"}, "format"),
        ({"device": {"num_units": "many"}}, "device"),
    ],
)
def test_a_malformed_file_names_the_field(change, said):
    content = {**GOOD.to_json(), **change}
    with pytest.raises(InputError, match=said) as caught:
        rtasks.from_json(content, "p.json")
    assert caught.value.file == "p.json"


GOOD = RtasksProblem(
    VDevice(2, 2, 100, 100, 0.5),
    (ROperator("a", (Tiling(2, 1.0, 10, 10),)), ROperator("b", (Tiling(1, 2.5),))),
    (TileEdge(0, 1, True),),
    "good",
)


def test_a_problem_and_a_solution_go_both_ways_through_json():
    assert rtasks.from_json(GOOD.to_json()) == GOOD
    solution = SEARCHES["search"](GOOD).solution
    assert RtasksSolution.from_json(solution.to_json()) == solution


def test_an_operator_that_can_never_be_resident_is_refused_with_numbers():
    with pytest.raises(ProblemError, match=r"needs 200 bytes .* a unit has 100"):
        RtasksProblem(VDevice(2, 1, 100), (ROperator("big", (Tiling(1, 1.0, 200),)),))
