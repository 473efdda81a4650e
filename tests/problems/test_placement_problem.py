import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_mutations import JSON, attempt, mutated

from partita.errors import FileError, InputError, ProblemError
from partita.problems import placement
from partita.problems.placement import (
    Channel,
    PlacementDevice,
    PlacementLayer,
    PlacementProblem,
    PlacementSolution,
    check,
    evaluate,
    lower_bound,
    simulate_exprimo,
)

DATA = Path(__file__).parent.parent / "data" / "placement"
FILES = sorted(DATA.glob("*.json"))


def layer(
    name: str,
    parents: tuple[int, ...] = (),
    children: tuple[int, ...] = (),
    **changes: Any,
) -> PlacementLayer:
    """1 ms forward and 2 ms backward on device 0, twice as long on device 1; 10 bytes out."""
    fields: dict[str, Any] = {
        "output_bytes": 10,
        "weight_bytes": 100,
        "fwd_ms": (1.0, 2.0),
        "bwd_ms": (2.0, 4.0),
        "transfer_ms": (0.5,),
    }
    return PlacementLayer(name=name, parents=parents, children=children, **(fields | changes))


def chain(**changes: Any) -> PlacementProblem:
    """Layer a feeds layer b; two devices, one channel both ways."""
    fields: dict[str, Any] = {
        "name": "chain",
        "devices": (PlacementDevice(1000), PlacementDevice(1000)),
        "channels": (Channel(16.0),),
        "route": ((-1, 0), (0, -1)),
        "layers": (layer("a", (), (1,)), layer("b", (0,))),
    }
    return PlacementProblem(**(fields | changes))


def fork(**changes: Any) -> PlacementProblem:
    """Layer a feeds b and c, both feed d."""
    layers = (
        layer("a", (), (1, 2)),
        layer("b", (0,), (3,)),
        layer("c", (0,), (3,)),
        layer("d", (1, 2)),
    )
    return chain(layers=layers, **changes)


class TestReferenceEvaluations:
    """What Exprimo itself computed, to be met bit for bit."""

    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
    def test_every_recorded_evaluation_is_reproduced_exactly(self, file: Path) -> None:
        problem = placement.read(file)
        recorded = json.loads(file.read_bytes())["reference_evaluations"]
        assert len(recorded) >= 15
        for entry in recorded:
            evaluation = simulate_exprimo(problem, entry["placement"])
            assert evaluation.makespan_ms == entry["makespan_ms"]
            assert list(evaluation.peak_memory_bytes) == entry["peak_memory_bytes"]
            assert evaluation.score_ms == entry["score_ms"]
            assert evaluation.events == entry["events"]
            assert check(problem, PlacementSolution(tuple(entry["placement"]))) == ()
            assert lower_bound(problem) <= evaluation.score_ms

    def test_the_records_cover_pipelines_limits_and_branches(self) -> None:
        problems = [placement.read(file) for file in FILES]
        assert any(problem.pipeline_batches > 1 for problem in problems)
        assert any(len(layer.parents) > 1 for problem in problems for layer in problem.layers)
        penalised = [
            entry["score_ms"] > entry["makespan_ms"]
            for file in FILES
            for entry in json.loads(file.read_bytes())["reference_evaluations"]
        ]
        assert any(penalised)
        assert not all(penalised)


class TestSimulation:
    """By hand."""

    def test_one_device_runs_forward_then_backward(self) -> None:
        evaluation = simulate_exprimo(chain(), (0, 0))
        assert evaluation.makespan_ms == 1 + 1 + 2 + 2
        assert evaluation.events == 1 + 4  # a wakeup and four ops

    def test_a_cut_adds_a_transfer_there_and_back(self) -> None:
        evaluation = simulate_exprimo(chain(), (0, 1))
        assert evaluation.makespan_ms == 1 + 0.5 + 2 + 4 + 0.5 + 2

    def test_weights_and_the_output_that_is_used_count_as_memory(self) -> None:
        # a's output is held until b's backward is done, which makes a gradient of a's output.
        assert simulate_exprimo(chain(), (0, 0)).peak_memory_bytes == (2 * 100 + 10, 0)

    def test_a_sent_output_leaves_the_sender_and_stays_with_the_receiver(self) -> None:
        assert simulate_exprimo(chain(), (0, 1)).peak_memory_bytes == (110, 110)

    def test_memory_over_the_limit_is_penalised_per_byte(self) -> None:
        small = chain(
            devices=(PlacementDevice(205), PlacementDevice(1000)),
            memory_penalization_ms_per_byte=3.0,
        )
        assert evaluate(small, PlacementSolution((0, 0))) == 6 + 3.0 * 5

    def test_one_transfer_serves_all_children_on_a_device(self) -> None:
        together = simulate_exprimo(fork(), (0, 1, 1, 1))
        forward = 1 + 0.5 + 2 + 2 + 2
        # The two gradients of a are made one after the other, each is sent when it is there.
        assert together.makespan_ms == forward + 4 + 4 + 4 + 0.5 + 2

    def test_gradients_for_one_device_travel_as_one_transfer_that_takes_the_sum(self) -> None:
        apart = simulate_exprimo(fork(), (0, 0, 0, 1))
        forward = 1 + 1 + 1 + 0.5 + 2
        assert apart.makespan_ms == forward + 4 + (0.5 + 0.5) + 2 + 2 + 2

    def test_batches_follow_one_another_or_overlap(self) -> None:
        one = simulate_exprimo(chain(), (0, 1)).makespan_ms
        assert simulate_exprimo(chain(batches=3), (0, 1)).makespan_ms == 3 * one
        overlapped = simulate_exprimo(chain(batches=3, pipeline_batches=3), (0, 1)).makespan_ms
        assert one < overlapped < 3 * one

    def test_a_layer_alone_is_simulated_too(self) -> None:
        assert simulate_exprimo(chain(layers=(layer("a"),)), (1,)).makespan_ms == 2 + 4

    @settings(max_examples=60, deadline=None)
    @given(devices=st.tuples(*[st.integers(0, 1)] * 4), batches=st.integers(1, 4))
    def test_no_score_is_below_the_bound(self, devices: tuple[int, ...], batches: int) -> None:
        for in_flight in (1, 2):
            problem = fork(batches=batches, pipeline_batches=in_flight)
            assert lower_bound(problem) <= simulate_exprimo(problem, devices).score_ms


class TestBound:
    def test_it_is_the_longest_path_on_the_fastest_devices(self) -> None:
        assert lower_bound(fork()) == pytest.approx(3 * (1 + 2))

    def test_it_is_all_work_on_all_devices_where_that_is_more(self) -> None:
        busy = fork(batches=10, pipeline_batches=10)
        assert lower_bound(busy) == pytest.approx(10 * 4 * 3 / 2)

    def test_it_counts_batches_that_cannot_overlap(self) -> None:
        assert lower_bound(chain(batches=3, pipeline_batches=2)) == pytest.approx(2 * 6)

    def test_it_counts_weights_that_fit_nowhere(self) -> None:
        tiny = chain(devices=(PlacementDevice(50), PlacementDevice(50)))
        assert lower_bound(tiny) == pytest.approx(6 + 100)


class TestCheck:
    def test_a_placement_has_a_device_for_every_layer(self) -> None:
        assert check(chain(), PlacementSolution((0,))) == (
            "the placement has 1 devices for 2 layers",
        )

    def test_devices_must_exist(self) -> None:
        assert check(chain(), PlacementSolution((0, 2))) == (
            "layer 1 (b) is on device 2, and devices are 0 to 1",
        )
        assert check(chain(), PlacementSolution((-1, 0)))

    def test_neighbours_on_two_devices_need_a_route_both_ways(self) -> None:
        one_way = chain(route=((-1, 0), (-1, -1)))
        assert check(one_way, PlacementSolution((1, 1))) == ()
        assert check(one_way, PlacementSolution((0, 1))) == (
            "layers 0 (a) and 1 are on devices 0 and 1, and there is no route from 1 to 0",
        )
        with pytest.raises(ProblemError, match="no route from 1 to 0; give a valid placement"):
            evaluate(one_way, PlacementSolution((0, 1)))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"devices": ()}, "devices: is empty; give at least one device"),
    ({"layers": ()}, "layers: is empty; give at least one layer"),
    ({"batches": 0}, "settings.batches: found 0; give a whole number from 1 to 1,000,000"),
    ({"batches": 10**9}, "settings.batches: found 1000000000;"),
    ({"pipeline_batches": -1}, "settings.pipeline_batches: found -1;"),
    (
        {"memory_penalization_ms_per_byte": float("nan")},
        "settings.memory_penalization_ms_per_byte: found nan; give a number from 0 to 1e+30",
    ),
    (
        {"devices": (PlacementDevice(-1), PlacementDevice(1))},
        "devices[0].memory_limit_bytes: found -1;",
    ),
    ({"channels": (Channel(0),)}, "channels[0].bandwidth_Gbps: found 0; give a bandwidth above"),
    ({"channels": (Channel(float("inf")),)}, "channels[0].bandwidth_Gbps: found inf;"),
    ({"route": ((-1, 0),)}, "route: has 1 entries; give one row per device: 2"),
    ({"route": ((-1,), (0,))}, "route[0]: has 1 entries; give one channel per device: 2"),
    (
        {"route": ((-1, 0), (5, -1))},
        "route[1][0]: found channel 5; channels are 0 to 0, -1 for none",
    ),
    (
        {"layers": (layer("a", fwd_ms=(1.0,)),)},
        "layers[0].fwd_ms: has 1 entries; give one number per device: 2",
    ),
    (
        {"layers": (layer("a", transfer_ms=()),)},
        "layers[0].transfer_ms: has 0 entries; give one number per channel: 1",
    ),
    ({"layers": (layer("a", bwd_ms=(1, -1)),)}, "layers[0].bwd_ms[1]: found -1;"),
    ({"layers": (layer("a", output_bytes=float("nan")),)}, "layers[0].output_bytes: found nan;"),
    ({"layers": (layer("a", weight_bytes=-5),)}, "layers[0].weight_bytes: found -5;"),
    (
        {"layers": (layer("a", (), (1,)), layer("b", (7,)))},
        "layers[1].parents[0]: found layer 7; a parent comes before its child: 0 to 0 here",
    ),
    ({"layers": (layer("a", (0,)),)}, "layers[0].parents[0]: found layer 0; the first layer has"),
    (
        {"layers": (layer("a", (), (1,)), layer("b", (0, 0)))},
        "layers[1].parents: names a layer twice; name each layer once",
    ),
    (
        {"layers": (layer("a"), layer("b", (0,)))},
        "layers[0].children: disagrees with the parents of layer 1; list exactly the layers",
    ),
]


class TestBadInput:
    @pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m for _, m in REFUSED])
    def test_a_wrong_field_is_named_with_what_to_do(
        self, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ProblemError) as refused:
            chain(**changes)
        assert str(refused.value).startswith(message)

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (("settings", "include_backward"), False, "settings.include_backward: found false;"),
            (
                ("settings", "device_memory_utilization"),
                0.5,
                "settings.device_memory_utilization: found 0.5; set it to 1.0 and lower",
            ),
            (("settings", "batchs"), 2, "settings: Object contains unknown field `batchs`;"),
            (("devices", 1, "id"), 0, "devices[1].id: found 0; ids count from 0"),
            (("layers", 0, "name"), 3, "layers[0].name: Expected `str`, got `int`;"),
            (("route",), None, "route: Expected `array`, got `null`;"),
        ],
    )
    def test_a_wrong_part_of_a_file_is_named_with_the_file(
        self, path: tuple[Any, ...], value: object, message: str
    ) -> None:
        content = chain().to_json()
        parent: Any = content
        for step in path[:-1]:
            parent = parent[step]
        parent[path[-1]] = value
        with pytest.raises(ProblemError) as refused:
            placement.from_json(content, "net.json")
        assert str(refused.value).startswith(f"net.json: {message}")

    def test_another_format_is_refused(self) -> None:
        with pytest.raises(FileError, match="partita/placement-problem@1"):
            placement.from_json(chain().to_json() | {"format": "partita/graph@1"})

    @settings(max_examples=300, deadline=None)
    @given(content=mutated(fork().to_json()))
    def test_whatever_is_in_a_file_it_is_read_or_refused(self, content: dict[str, Any]) -> None:
        input_error = attempt(placement.from_json, content, "f")
        if isinstance(input_error, InputError):
            assert input_error.file == "f"
        else:
            assert placement.from_json(input_error.to_json()) == input_error

    @given(value=JSON | st.fixed_dictionaries({"placement": JSON}))
    def test_whatever_is_given_as_a_solution_is_read_or_refused(self, value: object) -> None:
        solution = attempt(PlacementSolution.from_json, value)
        if isinstance(solution, InputError):
            return
        assert isinstance(check(fork(), solution), tuple)


class TestFiles:
    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
    def test_what_is_written_is_read_back(self, file: Path) -> None:
        problem = placement.read(file)
        assert placement.from_json(json.loads(json.dumps(problem.to_json()))) == problem
        assert problem.name == file.stem

    def test_a_solution_is_written_as_the_format_says(self) -> None:
        solution = PlacementSolution((0, 1))
        assert solution.to_json() == {"placement": [0, 1]}
        assert PlacementSolution.from_json(solution.to_json()) == solution
