import functools
from pathlib import Path
from typing import Any

import pytest
from contract import SearchContract
from hypothesis import strategies as st

from partita.problems import placement
from partita.problems.placement import (
    Channel,
    PlacementDevice,
    PlacementLayer,
    PlacementProblem,
    RecordConstraints,
)
from partita.search import searches
from partita.search.base import Search, Status, Stop
from partita.search.placement import SEARCHES
from partita.search.placement.single import Single

DATA = Path(__file__).parent.parent / "data" / "placement"

amounts = st.integers(0, 8).map(float)


@functools.cache  # made anew, a strategy is looked over anew: a third of the time of a draw
def layer_amounts(num_devices: int, num_channels: int) -> st.SearchStrategy[dict[str, Any]]:
    """What a layer takes, without where it stands."""
    times = st.tuples(*[amounts] * num_devices)
    return st.fixed_dictionaries(
        {
            "output_bytes": amounts,
            "weight_bytes": amounts,
            "fwd_ms": times,
            "bwd_ms": times,
            "transfer_ms": st.tuples(*[amounts] * num_channels),
        }
    )


@functools.cache
def some_parents(index: int) -> st.SearchStrategy[tuple[int, ...]]:
    """At most two of the layers before."""
    return st.sets(st.integers(0, index - 1), max_size=2).map(lambda layers: tuple(sorted(layers)))


@functools.cache
def routes(num_devices: int, num_channels: int) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    """The channel from every device to every other, or none."""
    channel = st.integers(-1, num_channels - 1)
    return st.tuples(*[st.tuples(*[channel] * num_devices)] * num_devices)


@functools.cache
def constraints(num_layers: int, num_devices: int) -> st.SearchStrategy[RecordConstraints]:
    """None, or some of every kind."""
    layer, device = st.integers(0, num_layers - 1), st.integers(0, num_devices - 1)
    pairs = st.lists(st.tuples(layer, device), max_size=2).map(tuple)
    groups = st.sets(layer, min_size=2, max_size=3).map(lambda group: (tuple(sorted(group)),))
    constrained = st.builds(
        RecordConstraints,
        colocated=groups if num_layers > 1 else st.just(()),
        pinned=pairs,
        forbidden=pairs,
        max_devices=st.none() | st.integers(1, 2),
    )
    return st.just(RecordConstraints()) | constrained


up_to = functools.cache(lambda most: st.integers(1, most))
capacities = st.integers(0, 40)


@st.composite
def tiny_problems(draw: st.DrawFn) -> PlacementProblem:
    """At most four layers on at most three devices, not all of them joined."""
    num_layers, num_devices, num_channels = draw(up_to(4)), draw(up_to(3)), draw(up_to(2))
    parents = [draw(some_parents(index)) if index else () for index in range(num_layers)]
    layers = tuple(
        PlacementLayer(
            name=f"l{index}",
            parents=parents[index],
            children=tuple(child for child in range(num_layers) if index in parents[child]),
            **draw(layer_amounts(num_devices, num_channels)),
        )
        for index in range(num_layers)
    )
    return PlacementProblem(
        name="tiny",
        devices=tuple(PlacementDevice(draw(capacities)) for _ in range(num_devices)),
        channels=(Channel(1.0),) * num_channels,
        route=draw(routes(num_devices, num_channels)),
        layers=layers,
        batches=draw(up_to(3)),
        pipeline_batches=draw(up_to(2)),
        constraints=draw(constraints(num_layers, num_devices)),
    )


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
class TestEverySearch(SearchContract):
    kind = placement
    oracle = SEARCHES["brute"]
    problems = tiny_problems()


def test_auto_is_the_default() -> None:
    assert next(iter(searches("placement").values())) is SEARCHES["auto"]


def test_brute_force_counts_every_placement() -> None:
    problem = placement.read(DATA / "alexnet-malvik.json")
    small = PlacementProblem(
        name="",
        devices=problem.devices,
        channels=problem.channels,
        route=problem.route,
        layers=tuple(_cut_off(layer, 4) for layer in problem.layers[:4]),
    )
    result = SEARCHES["brute"](small)
    assert result.status is Status.OPTIMAL
    assert result.evaluations == 3**4


def _cut_off(layer: PlacementLayer, size: int) -> PlacementLayer:
    fields: dict[str, Any] = {name: getattr(layer, name) for name in PlacementLayer.__slots__}
    return PlacementLayer(**fields | {"children": tuple(c for c in layer.children if c < size)})


@pytest.mark.parametrize(
    ("name", "at_most"),
    [
        ("alexnet-malvik", 43.5),  # the best known
        ("alexnet-malvik4-limited", 97.0),
        ("alexnet-malvik4-pipeline", 434.1),  # one device alone
        ("resnet50-malvik", 203.5),  # the best known
    ],
)
def test_the_baseline_on_real_networks(name: str, at_most: float) -> None:
    problem = placement.read(DATA / f"{name}.json")
    result = Single()(problem, Stop(evaluations=6000))
    assert result.objective is not None
    assert result.objective <= at_most


@pytest.mark.parametrize("cuts", [1, 3])
def test_few_cuts_still_give_an_answer(cuts: int) -> None:
    search: Search[Any, Any] = Single(cuts=cuts)
    result = search(placement.read(DATA / "alexnet-malvik.json"))
    assert result.solution is not None
