"""Fronts of placements: nobody on one is worse than another in everything."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.problems import placement
from partita.search.base import Stop
from partita.search.placement.annealing import Annealing
from partita.search.placement.front import FrontPoint, front, front_of_archive, sweep
from partita.search.placement.map_elites import MapElites

DATA = Path(__file__).parent.parent / "data" / "placement"

choices = st.builds(
    FrontPoint,
    st.integers(0, 5).map(float),
    st.integers(0, 5).map(float),
    st.integers(1, 4),
    st.tuples(st.integers(0, 3)),
)


def no_worse(one: FrontPoint, other: FrontPoint) -> bool:
    return all(a <= b for a, b in zip(one.aims, other.aims, strict=True))


@given(given_choices=st.lists(choices, max_size=30))
def test_the_front_covers_all_and_nobody_on_it_covers_another(
    given_choices: list[FrontPoint],
) -> None:
    front_points = front(given_choices)
    assert all(any(no_worse(kept, choice) for kept in front_points) for choice in given_choices)
    for one in front_points:
        assert not any(no_worse(other, one) for other in front_points if other is not one)
    assert list(front_points) == sorted(front_points, key=lambda choice: choice.makespan_ms)


def test_an_archive_gives_a_front() -> None:
    problem = placement.read(DATA / "alexnet-malvik4-pipeline.json")
    archive = MapElites(rounds=10).archive(problem)
    front_points = front_of_archive(archive)
    assert front_points[0].makespan_ms == min(elite.makespan_ms for elite in archive.elites)
    assert 1 in {choice.devices_used for choice in front_points}


def test_a_sweep_gives_up_time_for_fewer_devices() -> None:
    problem = placement.read(DATA / "alexnet-malvik4-pipeline.json")
    front_points = sweep(problem, Annealing(rounds=2), Stop(evaluations=4000), memory_steps=0)
    assert front_points[0].makespan_ms == pytest.approx(199.08, rel=0.05)
    alone = [choice for choice in front_points if choice.devices_used == 1]
    assert alone[0].makespan_ms == pytest.approx(434.07, rel=1e-3)
    assert len({choice.devices_used for choice in front_points}) >= 3


def test_a_sweep_gives_up_time_for_memory() -> None:
    problem = placement.read(DATA / "alexnet-malvik.json")
    front_points = sweep(problem, Annealing(rounds=2), Stop(evaluations=4000))
    fastest, last = front_points[0], front_points[-1]
    assert fastest.makespan_ms == pytest.approx(43.4073, rel=1e-4)
    assert fastest.devices_used == 1
    assert last.peak_memory_bytes < 0.8 * fastest.peak_memory_bytes


def test_an_interrupted_sweep_gives_what_it_has() -> None:
    problem = placement.read(DATA / "alexnet-malvik.json")
    assert sweep(problem, Annealing(), Stop(interrupted=lambda: True)) == ()
