import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_mutations import JSON, attempt, mutated

from partita import files
from partita.errors import InputError, ProblemError
from partita.problems import partition
from partita.problems.partition import (
    PartitionEdge,
    PartitionNode,
    PartitionProblem,
    PartitionSolution,
    check,
    evaluate,
    lower_bound,
    stages_from_devices,
)

DATA = Path(__file__).parent.parent / "data" / "partition"


def node(id: int, ms: float = 1.0, type: str = "OP") -> PartitionNode:
    return PartitionNode(id, type, ms / 4, ms * 3 / 4)


def edge(src: int, dst: int, fwd: int = 1000, bwd: int = 1000) -> PartitionEdge:
    return PartitionEdge(src, dst, fwd, bwd)


def diamond(**fields: Any) -> PartitionProblem:
    """Input 0 feeds 1; 1 feeds 2 and 3; both feed 4. A thousand bytes take 1 ms."""
    settings: dict[str, Any] = {
        "nodes": (node(0, 9, "IN"), node(1, 4), node(2, 8), node(3, 12), node(4, 16)),
        "edges": (edge(0, 1), edge(1, 2), edge(1, 3), edge(2, 4), edge(3, 4)),
        "num_devices": 2,
        "bandwidth_bytes_per_s": 1e6,
    }
    return PartitionProblem(**(settings | fields))


def solution(stages: dict[int, int], devices: dict[int, int]) -> PartitionSolution:
    return PartitionSolution(tuple(stages.items()), tuple(devices.items()))


def test_one_device_has_nothing_to_send() -> None:
    alone = solution({1: 0, 2: 0, 3: 0, 4: 0}, {0: 0})
    assert evaluate(diamond(), alone) == 4 + 8 + 12 + 16


def test_a_producer_is_sent_once_to_each_other_device_and_a_gradient_comes_back() -> None:
    split = solution({1: 0, 2: 1, 3: 1, 4: 1}, {0: 0, 1: 1})
    assert evaluate(diamond(), split) == 8 + 12 + 16 + 2
    three = solution({1: 0, 2: 1, 3: 2, 4: 2}, {0: 0, 1: 1, 2: 2})
    times = {0: 4 + 2 + 2, 1: 8 + 2 + 2, 2: 12 + 16 + 2 + 2}
    assert evaluate(diamond(num_devices=3), three) == max(times.values())


def test_the_largest_gradient_comes_back_once() -> None:
    edges = (edge(1, 2, 1000, 5000), edge(1, 3, 1000, 7000), edge(2, 4, 0, 0), edge(3, 4, 0, 0))
    split = solution({1: 0, 2: 1, 3: 1, 4: 1}, {0: 0, 1: 1})
    assert evaluate(diamond(edges=edges), split) == 8 + 12 + 16 + 1 + 7


def test_inputs_are_free() -> None:
    heavy = diamond(edges=(*diamond().edges[1:], edge(0, 4, 10**9, 10**9)))
    split = solution({1: 0, 2: 1, 3: 1, 4: 1}, {0: 0, 1: 1})
    assert evaluate(heavy, split) == evaluate(diamond(), split)


def test_a_device_may_hold_several_stages() -> None:
    around = solution({1: 0, 2: 1, 3: 1, 4: 2}, {0: 0, 1: 1, 2: 0})
    assert check(diamond(), around) == ()
    assert evaluate(diamond(), around) == 8 + 12 + 2 + 4


@pytest.mark.parametrize(
    ("stages", "devices", "message"),
    [
        ({1: 0, 2: 0, 3: 0}, {0: 0}, "node 4 has no stage"),
        ({0: 0, 1: 0, 2: 0, 3: 0, 4: 0}, {0: 0}, "node 0 is an input and takes no stage"),
        ({1: 0, 2: 0, 3: 0, 4: 0, 9: 0}, {0: 0}, "there is no node 9"),
        ({1: 0, 2: 0, 3: 0, 4: 1}, {0: 0}, "stage 1 has no device"),
        ({1: 0, 2: 0, 3: 0, 4: 0}, {0: 2}, "stage 0 is on device 2 of 2"),
        ({1: 0, 2: 0, 3: 0, 4: 0}, {0: -1}, "stage 0 is on device -1 of 2"),
        (
            {1: 0, 2: 1, 3: 1, 4: 0},
            {0: 0, 1: 1},
            "the stages 0 -> 1 -> 0 form a cycle: each would wait for the other",
        ),
    ],
)
def test_wrong_solutions_are_told_in_words(
    stages: dict[int, int], devices: dict[int, int], message: str
) -> None:
    wrong = solution(stages, devices)
    assert check(diamond(), wrong) == (message,)
    with pytest.raises(ProblemError, match="give a valid solution"):
        evaluate(diamond(), wrong)


def test_a_node_given_twice_is_told() -> None:
    twice = PartitionSolution(((1, 0), (1, 0), (2, 0), (3, 0), (4, 0)), ((0, 0), (0, 1)))
    assert check(diamond(), twice) == ("node 1 is given 2 times", "stage 0 is given 2 times")


def test_the_bound_is_the_longest_node_or_the_share() -> None:
    assert lower_bound(diamond()) == 20
    assert lower_bound(diamond(num_devices=4)) == 16


def test_every_assignment_of_devices_has_stages_without_a_cycle() -> None:
    problem = diamond(num_devices=3)
    for devices in itertools.product(range(3), repeat=4):
        given = dict(zip((1, 2, 3, 4), devices, strict=True))
        staged = stages_from_devices(problem, given)
        assert check(problem, staged) == ()
        stage_of, device_of = dict(staged.stage_of), dict(staged.device_of)
        assert {each: device_of[stage_of[each]] for each in given} == given


def test_a_device_on_its_own_is_one_stage() -> None:
    assert stages_from_devices(diamond(), dict.fromkeys((1, 2, 3, 4), 1)).device_of == ((0, 1),)
    around = stages_from_devices(diamond(), {1: 0, 2: 1, 3: 1, 4: 0})
    assert around.device_of == ((0, 0), (1, 1), (2, 0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_devices": 0}, "num_devices: is 0; 1 to 1,000,000 devices"),
        ({"num_devices": 1.5}, "num_devices: is 1.5"),
        ({"bandwidth_bytes_per_s": 0.0}, "bandwidth: is 0.0; a positive number"),
        ({"bandwidth_bytes_per_s": math.nan}, "bandwidth: is nan"),
        ({"bandwidth_bytes_per_s": math.inf}, "bandwidth: is inf"),
        ({"nodes": ()}, "nodes: hold nothing to place"),
        ({"nodes": (node(0, 1, "IN"),), "edges": ()}, "nodes: hold nothing to place"),
        ({"nodes": (node(1), node(1))}, "nodes[1].id: 1 is there twice"),
        ({"nodes": (node(1, -1.0),)}, "nodes[0].fwd_ms: is -0.25"),
        ({"nodes": (node(1, math.nan),)}, "nodes[0].fwd_ms: is nan"),
        ({"nodes": (node(1, math.inf),)}, "nodes[0].fwd_ms: is inf"),
        (
            {"nodes": (dataclasses.replace(node(1), params=-1),)},
            "nodes[0].params: is -1; a number from 0",
        ),
        ({"edges": (edge(1, 7),)}, "edges[0].dst: there is no node 7; name the id of a node"),
        ({"edges": (edge(7, 1),)}, "edges[0].src: there is no node 7"),
        ({"edges": (edge(1, 0),)}, "edges[0].dst: 0 is an input"),
        ({"edges": (edge(1, 2, -1),)}, "edges[0].fwd_bytes: is -1"),
        ({"edges": (edge(1, 2, 0, -1),)}, "edges[0].bwd_bytes: is -1"),
        ({"edges": (edge(2, 2),)}, "edges: the nodes 2 -> 2 form a cycle"),
        (
            {"edges": (edge(1, 2), edge(2, 3), edge(3, 4), edge(4, 2))},
            "edges: the nodes 2 -> 3 -> 4 -> 2 form a cycle; remove an edge of it",
        ),
        ({"outputs": (4, 8)}, "outputs[1]: there is no node 8"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError) as caught:
        diamond(**fields)
    assert message in str(caught.value)


def test_nodes_may_come_in_any_order() -> None:
    problem = diamond(nodes=tuple(reversed(diamond().nodes)))
    assert [each.id for each in problem.placed] == [1, 3, 2, 4]


def test_files_are_read_with_devices_and_bandwidth() -> None:
    problem = partition.read(DATA / "cnn.json", num_devices=4)
    assert (len(problem.nodes), len(problem.edges), problem.num_devices) == (45, 49, 4)
    assert problem.bandwidth_bytes_per_s == 12e9
    slow = partition.read(DATA / "cnn.json", num_devices=4, bandwidth=1e9)
    assert slow.bandwidth_bytes_per_s == 1e9


def test_a_file_does_not_say_how_many_devices_there_are() -> None:
    with pytest.raises(ProblemError, match=r"mlp\.json: num_devices: is missing; say how many"):
        partition.read(DATA / "mlp.json")


def test_json_goes_both_ways() -> None:
    problem = diamond(outputs=(4,), name="diamond")
    text = files.encode_json(problem.to_json())
    assert partition.from_json(files.decode_json(text)) == problem
    assert partition.from_json(files.decode_json(text), num_devices=7).num_devices == 7


def test_a_solution_is_written_as_the_format_says() -> None:
    written = {"stage_of": {"1": 0, "2": 1}, "device_of": {"0": 0, "1": 1}}
    given = solution({1: 0, 2: 1}, {0: 0, 1: 1})
    assert given.to_json() == written
    assert PartitionSolution.from_json(written) == given
    with pytest.raises(InputError, match="stage_of: has the key 'x'; whole numbers are needed"):
        PartitionSolution.from_json({"stage_of": {"x": 0}, "device_of": {}})


@settings(max_examples=300, deadline=None)
@given(mutated(diamond(outputs=(4,), name="d").to_json()))
def test_any_json_is_read_or_refused(value: dict[str, Any]) -> None:
    problem = attempt(partition.from_json, value, "f.json")
    if isinstance(problem, InputError):
        assert problem.file == "f.json"
        return
    ids = [each.id for each in problem.placed]
    spread = stages_from_devices(problem, {id: n % problem.num_devices for n, id in enumerate(ids)})
    assert lower_bound(problem) <= evaluate(problem, spread) * (1 + 1e-9)
    assert math.isfinite(evaluate(problem, spread))


KEYS = st.sampled_from(["0", "1", "2", "3", "4", "-1", "x"])
MAPS = st.dictionaries(KEYS, st.integers(-1, 4)) | JSON


@given(MAPS, MAPS)
def test_any_solution_is_read_or_refused(stages: Any, devices: Any) -> None:
    try:
        given = PartitionSolution.from_json({"stage_of": stages, "device_of": devices})
    except InputError:
        return
    if not check(diamond(), given):
        assert evaluate(diamond(), given) >= lower_bound(diamond())
