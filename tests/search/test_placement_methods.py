"""Single methods of placement: what they find, what they keep to, what they say."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from contract import SearchContract
from hypothesis import given, settings
from test_placement_search import tiny_problems

from partita.errors import ProblemError
from partita.problems import placement
from partita.problems.placement import (
    Channel,
    PlacementDevice,
    PlacementLayer,
    PlacementProblem,
    RecordConstraints,
    check,
    evaluate,
)
from partita.search.base import Status, Stop
from partita.search.placement import SEARCHES
from partita.search.placement.attempt import Attempt
from partita.search.placement.auto import AutoPlacement, _Races
from partita.search.placement.bounds import latency_bound, lower_bound, surely_over, symmetry_of
from partita.search.placement.cp_sat import CpSat
from partita.search.placement.episodes import make_episodes
from partita.search.placement.fastsim import PlacementSimulator, Pool, workspace
from partita.search.placement.feasible import valid_placement
from partita.search.placement.map_elites import Archive, MapElites
from partita.search.placement.moves import ALL_MOVES, BLOCKS, line_of
from partita.search.placement.tables import tables
from partita.search.placement.walk import begin_episode, walker

DATA = Path(__file__).parent.parent / "data" / "placement"
QUICK = Stop(evaluations=3000)

# The best known scores, each found by several independent programs.
BEST_MS = {
    "alexnet-malvik": 43.4073,
    "alexnet-malvik4-limited": 56.2247,
    "alexnet-malvik4-pipeline": 199.0786,
    "resnet50-malvik": 203.4046,
    "resnet50-malvik4-limited": 738.8494,
}


def chain(num_layers: int, num_devices: int = 2, **fields: object) -> PlacementProblem:
    """Layers of 1 ms there and 2 ms back, one after the other; devices joined by one channel."""
    layers = tuple(
        PlacementLayer(
            name=f"l{index}",
            parents=(index - 1,) if index else (),
            children=(index + 1,) if index + 1 < num_layers else (),
            output_bytes=10.0,
            weight_bytes=5.0,
            fwd_ms=(1.0,) * num_devices,
            bwd_ms=(2.0,) * num_devices,
            transfer_ms=(0.5,),
        )
        for index in range(num_layers)
    )
    given: dict[str, object] = {
        "name": "chain",
        "devices": (PlacementDevice(1e6),) * num_devices,
        "channels": (Channel(1.0),),
        "route": ((0,) * num_devices,) * num_devices,
        "layers": layers,
    }
    return PlacementProblem(**(given | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "search", [AutoPlacement(most_tried=0, effort_s=1e-3, runners=4, first_steps=50)], ids=["races"]
)
class TestRaces(SearchContract):
    """Tiny problems are solved by trying all; here the races must meet the contract on them."""

    kind = placement
    oracle = SEARCHES["brute"]
    problems = tiny_problems()


@given(problem=tiny_problems())
@settings(max_examples=25, deadline=None)
def test_what_cp_sat_calls_optimal_is(problem: PlacementProblem) -> None:
    expected = SEARCHES["brute"](problem)
    result = CpSat(most_tried=0)(problem)
    if expected.objective is None:
        assert result.status is Status.INFEASIBLE
        return
    assert result.objective is not None
    assert result.lower_bound is not None
    assert result.lower_bound <= expected.objective * (1 + 1e-9)
    if result.status is Status.OPTIMAL:
        assert result.objective == pytest.approx(expected.objective, rel=1e-7)


def test_cp_sat_proves_a_small_network() -> None:
    result = CpSat()(placement.read(DATA / "alexnet-malvik.json"))
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(43.4073, rel=1e-4)


def test_cp_sat_leaves_large_networks_alone() -> None:
    result = CpSat(most_choices=10)(placement.read(DATA / "alexnet-malvik4-pipeline.json"))
    assert result.status is Status.FEASIBLE
    assert "75 choices are too many to model" in result.why


@pytest.mark.parametrize("name", BEST_MS)
def test_auto_reaches_the_best_known_score(name: str) -> None:
    problem = placement.read(DATA / f"{name}.json")
    best = BEST_MS[name]
    result = AutoPlacement()(problem, Stop(target=best * 1.0001, evaluations=300_000))
    assert result.objective is not None
    assert result.objective <= best * 1.01
    assert result.objective == evaluate(problem, result.solution)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", sorted(set(SEARCHES) - {"brute", "cp-sat"}))
def test_no_method_is_worse_than_the_first_valid_placement(method: str) -> None:
    problem = placement.read(DATA / "alexnet-malvik4-pipeline.json")
    simulator = PlacementSimulator(problem)
    opening = valid_placement(problem, simulator.net).placement
    assert opening is not None
    result = SEARCHES[method](problem, QUICK)
    assert result.objective is not None
    assert result.objective <= simulator.evaluate(opening.tolist()).score_ms
    assert result.lower_bound is not None
    assert result.lower_bound <= 199.0786


@pytest.mark.parametrize("method", ["annealing", "genetic", "map-elites", "auto"])
def test_good_methods_solve_alexnet(method: str) -> None:
    problem = placement.read(DATA / "alexnet-malvik4-limited.json")
    result = SEARCHES[method](problem, Stop(evaluations=20_000))
    assert result.objective == pytest.approx(56.2247, rel=1e-4)


@pytest.mark.parametrize("method", sorted(set(SEARCHES) - {"brute"}))
def test_constraints_are_kept_on_a_real_network(method: str) -> None:
    problem = placement.read(DATA / "resnet50-malvik.json")
    constraints = RecordConstraints(
        colocated=((3, 4, 5), (5, 20)),
        pinned=((10, 2),),
        forbidden=((0, 2), (40, 1)),
        max_devices=2,
    )
    bound = dataclasses.replace(problem, constraints=constraints)
    result = SEARCHES[method](bound, QUICK)
    assert result.solution is not None
    assert check(bound, result.solution) == ()
    assert result.solution.placement[10] == 2


def test_constraints_that_cannot_be_met_are_said_so() -> None:
    problem = chain(3, constraints=RecordConstraints(pinned=((0, 0), (0, 1))))
    result = AutoPlacement()(problem)
    assert result.status is Status.INFEASIBLE
    assert "no device is left for layer 0 (l0)" in result.why


def test_pins_across_a_missing_route_are_infeasible() -> None:
    apart = ((-1, -1), (-1, -1))
    problem = chain(3, route=apart, constraints=RecordConstraints(pinned=((0, 0), (2, 1))))
    result = AutoPlacement()(problem)
    assert result.status is Status.INFEASIBLE
    assert "route" in result.why


def test_a_device_that_nothing_reaches_is_named() -> None:
    route = ((-1, 0, -1), (0, -1, -1), (0, -1, -1))  # from 2 to 0, and not back
    result = AutoPlacement()(chain(4, num_devices=3, route=route))
    assert result.status is Status.OPTIMAL
    assert result.why.endswith("; device 2 has no route to any other and back")


def test_memory_that_never_suffices_is_penalised_and_said() -> None:
    problem = chain(12, devices=(PlacementDevice(20.0), PlacementDevice(20.0)))
    result = AutoPlacement(effort_s=0.01)(problem)
    assert result.objective is not None
    assert "memory does not suffice: device" in result.why
    over = 12 * 5 + 11 * 10 - 40
    assert surely_over(tables(problem)) == over
    assert result.lower_bound is not None
    assert result.lower_bound >= over


@given(problem=tiny_problems())
@settings(max_examples=60, deadline=None)
def test_the_opening_is_valid_or_there_is_none(problem: PlacementProblem) -> None:
    opening = valid_placement(problem, tables(problem))
    expected = SEARCHES["brute"](problem)
    if expected.solution is None:
        assert opening.placement is None
        assert opening.proven
    else:
        assert opening.placement is not None
        assert check(problem, placement.PlacementSolution(tuple(opening.placement.tolist()))) == ()


def test_one_core_and_many_walk_the_same_way() -> None:
    problem = placement.read(DATA / "alexnet-malvik4-pipeline.json")
    outcome = []
    for num_threads in (1, 3):
        with Attempt(problem, Stop(), "walks", 0) as attempt:
            attempt.pool = Pool(attempt.net, num_threads)
            line = line_of(problem, attempt.net)
            walkers = [walker(attempt.net, 7, number) for number in range(3)]
            for walk in walkers:
                begin_episode(walk, attempt.best, 500, hot=9.0, cold=0.1, price=1e-6)
            make_episodes(attempt, line, walkers)
            outcome.append([walk.current.tolist() for walk in walkers])
            outcome[-1].append(attempt.best.tolist())
    assert outcome[0] == outcome[1]


@pytest.mark.parametrize("kind", range(8))
def test_every_kind_of_move_finds_its_way(kind: int) -> None:
    problem = placement.read(DATA / "alexnet-malvik4-pipeline.json")
    with Attempt(problem, Stop(), "walks", 0) as attempt:
        walk = walker(attempt.net, 1, 0)
        begin = attempt.best
        begin[: len(begin) // 2] = 1
        begin_episode(walk, begin, 300, hot=0.0, cold=0.0, price=1e-6, kinds=1 << kind)
        make_episodes(attempt, line_of(problem, attempt.net), [walk])
        assert (walk.current != begin).any()
        assert math.isfinite(walk.floats[-1])
    assert 1 << kind & ALL_MOVES


def test_the_line_holds_every_gene_once() -> None:
    problem = placement.read(DATA / "resnet50-malvik.json")
    grouped = dataclasses.replace(
        problem, constraints=RecordConstraints(colocated=((1, 50), (2, 3)))
    )
    net = tables(grouped)
    assert sorted(line_of(grouped, net)) == list(range(len(problem.layers) - 2))


def test_alike_devices_are_found() -> None:
    problem = placement.read(DATA / "resnet50-malvik4-limited.json")
    assert symmetry_of(tables(problem)).first.tolist() == [0, 1, 1, 1, 1]
    pinned = dataclasses.replace(problem, constraints=RecordConstraints(pinned=((0, 2),)))
    assert symmetry_of(tables(pinned)).first.tolist() == [0, 1, 2, 1, 1]


def test_a_chain_takes_its_latency_on_one_device() -> None:
    net = tables(chain(5))
    assert latency_bound(net) == 15.0


def test_pins_apart_force_transfers_into_the_bound() -> None:
    problem = chain(5, constraints=RecordConstraints(pinned=((0, 0), (4, 1))))
    assert latency_bound(tables(problem)) == 16.0
    assert lower_bound(problem, tables(problem)) == pytest.approx(16.0)


def test_unlike_devices_share_the_work() -> None:
    layers = chain(8).layers
    problem = chain(
        8,
        batches=16,
        pipeline_batches=16,
        layers=tuple(
            dataclasses.replace(layer, fwd_ms=(1.0, 2.0), bwd_ms=(2.0, 4.0)) for layer in layers
        ),
    )
    # Two thirds of the work on the fast device, a third on the one half as fast.
    assert lower_bound(problem, tables(problem)) == pytest.approx(16 * 24 * 2 / 3, rel=1e-2)


def test_an_archive_keeps_the_best_of_every_kind() -> None:
    problem = placement.read(DATA / "alexnet-malvik4-pipeline.json")
    told: list[Archive] = []
    search = MapElites(rounds=10, watch=told.append)
    archive = search.archive(problem)
    assert archive.result is not None
    assert archive.result.objective == min(elite.score_ms for elite in archive.elites)
    assert len(told) == 10
    assert told[-1].elites == archive.elites
    for elite in archive.elites:
        assert len(set(elite.placement)) == elite.devices_used
        assert elite.score_ms == placement.simulate_exprimo(problem, elite.placement).score_ms
        assert elite.communication_bytes <= archive.class_bytes[elite.communication_class] * 1.01
    grid = archive.scores_ms()
    assert len(grid) == 5
    assert sum(score is not None for row in grid for score in row) == len(archive.elites)
    assert grid[0][0] == pytest.approx(434.07, rel=1e-4)  # one device, nothing sent


def test_too_many_batches_in_flight_are_refused() -> None:
    problem = chain(5, batches=10**6, pipeline_batches=10**6)
    with pytest.raises(ProblemError, match="let fewer batches be in flight"):
        workspace(tables(problem)._replace(limit_bytes=np.zeros(1000)))


def test_details_hold_the_peak_of_every_device() -> None:
    problem = placement.read(DATA / "alexnet-malvik4-limited.json")
    simulator = PlacementSimulator(problem)
    row = simulator.details(np.zeros((1, len(problem.layers)), np.int64))[0]
    expected = placement.simulate_exprimo(problem, [0] * len(problem.layers))
    assert tuple(row[4:]) == expected.peak_memory_bytes
    assert row[0] == expected.score_ms


def test_placements_that_differ_in_names_or_little_are_alike() -> None:
    problem = placement.read(DATA / "resnet50-malvik4-limited.json")
    with Attempt(problem, QUICK, "auto", 0) as attempt:
        races = _Races(AutoPlacement(), attempt, line_of(problem, attempt.net), 0)
        halves = np.repeat([1, 2], 37)
        renamed = np.repeat([3, 4], 37)
        shifted = np.repeat([1, 2], [36, 38])
        other = np.repeat([1, 2], [20, 54])
        assert races.unlike([halves, renamed, shifted, other]) == [0, 3]


def test_joined_elites_take_each_side_of_a_cut_from_one_of_them() -> None:
    problem = placement.read(DATA / "resnet50-malvik4-limited.json")
    with Attempt(problem, QUICK, "auto", 0) as attempt:
        races = _Races(AutoPlacement(), attempt, line_of(problem, attempt.net), 0)
        assert len(races.joined_elites(5)) == 0  # of less than two
        one, other = np.repeat([1, 2], [20, 54]), np.repeat([3, 4], [50, 24])
        races.elites = [(1.0, one.tobytes()), (2.0, other.tobytes())]
        joined = races.joined_elites(200)
        borders = {tuple(np.flatnonzero(np.diff(row)).tolist()) for row in joined}
        # Behind a cut in the middle goes on what is on the device there: no third device.
        assert borders == {(), (19,), (49,), (19, 49)}
        assert all(len(set(row.tolist())) <= 3 for row in joined)


def test_blocks_move_from_cut_layer_to_cut_layer() -> None:
    problem = placement.read(DATA / "resnet50-malvik.json")
    with Attempt(problem, Stop(), "walks", 0) as attempt:
        net, begin = attempt.net, np.repeat([0, 1, 2], [20, 30, 24])
        walk, changes = walker(net, 1, 0), 0
        for _ in range(40):  # so hot that the one move is taken, whatever it costs
            begin_episode(walk, begin, 2, hot=1e12, cold=1e12, price=0.0, kinds=1 << BLOCKS)
            make_episodes(attempt, line_of(problem, net), [walk])
            changed = np.flatnonzero(walk.current != begin)
            if len(changed):
                assert {int(changed[0]), int(changed[-1]) + 1} <= {*net.cut.tolist(), 20, 50, 74}
                changes += 1
        assert changes > 10
