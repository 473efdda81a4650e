"""Lower bounds never exceed what a placement costs, and are good where that is known."""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement_search import tiny_problems

from partita.problems import placement
from partita.problems.placement import PlacementDevice, PlacementProblem, RecordConstraints
from partita.search.placement import SEARCHES
from partita.search.placement.auto import AutoPlacement
from partita.search.placement.bounds import lower_bound
from partita.search.placement.fastsim import PlacementSimulator
from partita.search.placement.labels import LabelBound
from partita.search.placement.segments import chain_of, least, undominated
from partita.search.placement.tables import tables

DATA = Path(__file__).parent.parent / "data" / "placement"
FILES = sorted(path.stem for path in DATA.glob("*malvik*.json"))
ROOM = 1 + 1e-9


@given(
    problem=tiny_problems(),
    width=st.integers(1, 20),
    batches=st.integers(1, 9),
    in_flight=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_no_bound_is_above_the_best_placement(
    problem: PlacementProblem, width: int, batches: int, in_flight: int
) -> None:
    problem = dataclasses.replace(problem, batches=batches, pipeline_batches=in_flight)
    expected = SEARCHES["brute"](problem)
    if expected.objective is None:
        return
    net = tables(problem)
    bound = LabelBound(net)
    assert lower_bound(problem, net) <= expected.objective * ROOM
    assert bound.root() <= expected.objective * ROOM
    assert bound.search(width, np.inf) <= expected.objective * ROOM
    assert bound.search(width, expected.objective * 1.5) <= expected.objective * ROOM


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("tight", [False, True])
def test_a_placement_given_by_pins_costs_at_least_its_bound(name: str, tight: bool) -> None:
    problem = placement.read(DATA / f"{name}.json")
    generator = np.random.default_rng(len(name))
    if tight:
        devices = tuple(PlacementDevice(1e9 * generator.random()) for _ in problem.devices)
        problem = dataclasses.replace(
            problem, devices=devices, memory_penalization_ms_per_byte=1e-6
        )
    simulator, size = PlacementSimulator(problem), len(problem.layers)
    for scattered in (0.0, 0.05, 0.5):
        cuts = np.sort(generator.integers(0, size, 4))
        devices_of = generator.integers(0, len(problem.devices), 5)
        chosen = devices_of[np.searchsorted(cuts, np.arange(size), side="right")]
        moved = generator.random(size) < scattered
        chosen = np.where(moved, generator.integers(0, len(problem.devices), size), chosen)
        pinned = RecordConstraints(pinned=tuple(enumerate(chosen.tolist())))
        net = tables(dataclasses.replace(problem, constraints=pinned))
        score = simulator.evaluate(chosen.tolist()).score_ms
        label_bound = LabelBound(net)
        assert 0 < label_bound.root() <= score * ROOM
        assert label_bound.root() <= label_bound.search(5, np.inf) * ROOM <= score * ROOM * ROOM


@pytest.mark.parametrize(
    ("name", "best_ms", "gap"),
    [
        ("alexnet-malvik", 43.40733, 1e-4),
        ("resnet50-malvik", 203.40465, 1e-4),
        ("alexnet-malvik4-limited", 56.22472, 1e-4),  # memory forces transfers
        ("alexnet-malvik4-pipeline", 199.07857, 0.05),
        ("resnet50-malvik4-limited", 738.84942, 0.25),
    ],
)
def test_the_bound_on_real_networks(name: str, best_ms: float, gap: float) -> None:
    label_bound = LabelBound(tables(placement.read(DATA / f"{name}.json")))
    assert best_ms * (1 - gap) <= label_bound.search(300, best_ms) <= best_ms


def test_the_bound_of_many_batches_counts_waits_and_branches() -> None:
    alone = placement.read(DATA / "resnet50-malvik4-limited.json")
    roomy = tuple(PlacementDevice(1e12) for _ in alone.devices)
    problem = dataclasses.replace(alone, devices=roomy, batches=10, pipeline_batches=4)
    best_ms = 1173.3182  # the best known
    assert best_ms * 0.88 <= LabelBound(tables(problem)).search(300, best_ms) <= best_ms


def test_auto_proves_what_memory_forces() -> None:
    result = AutoPlacement()(placement.read(DATA / "alexnet-malvik4-limited.json"))
    assert result.status == "optimal"
    assert result.objective == pytest.approx(56.22471, rel=1e-6)


def test_layers_beside_the_longest_paths_are_left_out() -> None:
    problem = placement.read(DATA / "alexnet-malvik.json")
    layers = list(problem.layers)
    # A second input that only the last layer reads.
    extra = dataclasses.replace(layers[0], parents=(), children=(len(layers),), name="targets")
    last = dataclasses.replace(layers[-1], parents=(*layers[-1].parents, len(layers) - 1))
    before = [
        dataclasses.replace(
            layer, children=tuple(c + (c == len(layers) - 1) for c in layer.children)
        )
        for layer in layers[:-1]
    ]
    wider = dataclasses.replace(problem, layers=(*before, extra, last))
    chain = chain_of(tables(wider))
    assert not chain.kept[-2]
    assert len(chain.cuts) == len(layers)
    assert LabelBound(tables(wider)).root() == pytest.approx(43.40733, rel=1e-5)


def test_a_branch_without_a_route_leaves_no_option() -> None:
    assert least(np.empty((0, 3)), 4).shape == (0, 3)
    assert undominated(np.empty((0, 3))).shape == (0, 3)


@given(rows=st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=40))
def test_fewer_rows_undercut_all_the_others(rows: list[tuple[int, ...]]) -> None:
    given_rows = np.array(rows, np.float64)
    for kept in (undominated(given_rows), least(given_rows, 4)):
        assert all((kept <= row).all(axis=1).any() for row in given_rows)
    assert len(least(given_rows, 4)) <= 4
    exact = {tuple(row) for row in undominated(given_rows).tolist()}
    assert exact <= {tuple(map(float, row)) for row in rows}


def test_bounds_of_several_batches_against_all_placements() -> None:
    """Blocks of branches, up to ten batches: a term of the bounds that counts too much shows."""
    file = Path(__file__).parents[2] / "benchmarks" / "placement_search.py"
    spec = importlib.util.spec_from_file_location("placement_search", file)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert "none above the best" in script.bounds_of_random_problems(40)
