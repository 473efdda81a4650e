"""Caps, heterogeneous devices, links, recompute and given stages, on problems solved by hand."""

import json
from dataclasses import replace
from typing import Any

import pytest

from partita.errors import ProblemError
from partita.problems import partition
from partita.problems.partition import (
    PartitionEdge,
    PartitionLinks,
    PartitionNode,
    PartitionProblem,
    PartitionSolution,
    check,
    device_bytes,
    device_times_ms,
    evaluate,
    infeasible,
    lower_bound,
    stages_from_devices,
)


def line(*times: float, **fields: Any) -> PartitionProblem:
    """A chain; the backward takes twice the forward, 1,000 bytes take 1 ms each way."""
    nodes = tuple(
        PartitionNode(id, "OP", ms / 3, ms * 2 / 3, param_bytes=10 * id, activation_bytes=100)
        for id, ms in enumerate(times)
    )
    edges = tuple(PartitionEdge(id, id + 1, 1000, 500) for id in range(len(times) - 1))
    settings = {"num_devices": 2, "bandwidth_bytes_per_s": 1e6} | fields
    return PartitionProblem(nodes, edges, **settings)


def split(problem: PartitionProblem, *devices: int) -> PartitionSolution:
    return stages_from_devices(problem, dict(enumerate(devices)))


def test_a_fast_device_needs_less_time() -> None:
    problem = line(3, 6, speeds=(1.0, 2.0))
    assert evaluate(problem, split(problem, 1, 1)) == pytest.approx(4.5)
    assert evaluate(problem, split(problem, 0, 1)) == pytest.approx(3 + 1.5)


def test_times_per_device_go_before_the_common_ones() -> None:
    problem = line(3, 6)
    nodes = (replace(problem.nodes[0], times_ms=((1, 1), (4, 5))), problem.nodes[1])
    problem = replace(problem, nodes=nodes)
    assert device_times_ms(problem, {0: 1, 1: 1}) == [0, 9 + 6]
    assert device_times_ms(problem, {0: 0, 1: 0}) == [2 + 6, 0]


def test_a_message_costs_both_ends_its_latency_and_its_time_in_its_direction() -> None:
    links = PartitionLinks(((1, 1e6), (5e5, 1)), ((0.0, 0.01), (0.02, 0.0)))
    problem = line(3, 6, links=links)
    comm = (10 + 1000 / 1e3) + (20 + 500 / 5e2)  # there: device 0 to 1; back: 1 to 0
    assert device_times_ms(problem, {0: 0, 1: 1}) == pytest.approx([3 + comm, 6 + comm])
    back = (20 + 1000 / 5e2) + (10 + 500 / 1e3)
    assert device_times_ms(problem, {0: 1, 1: 0}) == pytest.approx([6 + back, 3 + back])


def test_recompute_adds_the_forward_and_keeps_one_microbatch_and_what_came_in() -> None:
    plain = line(3, 6, in_flight=4)
    again = replace(plain, recompute=True)
    assert device_times_ms(again, {0: 0, 1: 0})[0] == pytest.approx(9 + 3)
    assert device_bytes(plain, {0: 0, 1: 1}) == [400, 410]
    assert device_bytes(again, {0: 0, 1: 1}) == [100, 110 + 4 * 1000]


def test_more_than_the_cap_is_refused_in_words() -> None:
    problem = line(3, 6, memory_bytes=(100.0, 109.0))
    assert check(problem, split(problem, 0, 1)) == ("device 1 holds 110 B and has 109 B",)
    assert check(problem, split(problem, 1, 0)) == ("device 0 holds 110 B and has 100 B",)
    assert check(replace(problem, memory_bytes=(100.0, 110.0)), split(problem, 0, 1)) == ()


def test_a_straight_pipeline_has_one_stage_on_a_device() -> None:
    problem = line(1, 1, 1, straight=True)
    around = PartitionSolution(((0, 0), (1, 1), (2, 2)), ((0, 0), (1, 1), (2, 0)))
    wrong = "device 0 has 2 stages, and a straight pipeline has one on each"
    assert check(problem, around) == (wrong,)
    assert check(replace(problem, straight=False), around) == ()
    assert check(problem, split(problem, 1, 0, 0)) == ()
    assert split(problem, 1, 0, 0).device_of == ((0, 1), (1, 0))


def test_a_number_of_stages_is_kept_to() -> None:
    problem = line(1, 1, 1, 1, num_stages=3)
    two = PartitionSolution(((0, 0), (1, 0), (2, 1), (3, 1)), ((0, 0), (1, 1)))
    assert check(problem, two) == ("there are 2 stages, and 3 are asked for",)
    cut = split(problem, 0, 0, 1, 1)
    assert len(cut.device_of) == 3
    assert check(problem, cut) == ()
    assert evaluate(problem, cut) == evaluate(replace(problem, num_stages=None), two)


def test_devices_that_take_turns_make_few_stages() -> None:
    # two chains cross over: by levels 4 stages; but one device can wait for the other: 3
    nodes = tuple(PartitionNode(id, "OP", 1.0, 0.0) for id in range(4))
    edges = (PartitionEdge(0, 1, 8, 8), PartitionEdge(2, 3, 8, 8))
    problem = PartitionProblem(nodes, edges, 2)
    devices = {0: 0, 1: 1, 2: 1, 3: 0}
    solution = stages_from_devices(problem, devices)
    assert check(problem, solution) == ()
    assert len(solution.device_of) == 3


def test_the_bound_of_unlike_devices_is_their_common_share() -> None:
    problem = line(4, 4, 4, 4, 4, 4, speeds=(1.0, 2.0))
    assert lower_bound(problem) == pytest.approx(24 / 3)
    slow = line(3, 3, speeds=(1.0, 1e-3))
    assert lower_bound(slow) == pytest.approx(6 / 1.001)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"memory_bytes": (100.0, 105.0)},
            "node 2 alone needs 120 B and no device has more than 105 B; "
            "a device needs at least 120 B, or the node must be cut up",
        ),
        (
            {"memory_bytes": (120.0, 130.0)},
            "all nodes need 330 B and the 2 devices have 250 B; at least 165 B each, or "
            "3 devices of 130 B, would be needed",
        ),
        ({"num_stages": 4}, "3 nodes cannot form 4 stages; ask for at most 3"),
        (
            {"num_stages": 3, "straight": True},
            "a straight pipeline of 3 stages needs as many devices, and there are 2; "
            "ask for at most 2 stages",
        ),
        ({"memory_bytes": (200.0, 210.0)}, ""),
    ],
)
def test_what_cannot_be_is_told_with_what_would_fit(fields: dict[str, Any], sentence: str) -> None:
    assert infeasible(line(1, 1, 1, **fields)) == sentence


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_bytes": (1.0,)}, "memory: has 1 entries; one entry per device is needed: 2"),
        ({"memory_bytes": (1.0, -1.0)}, r"memory\[1\]: is -1.0; a number from 0"),
        ({"speeds": (1.0, 0.0)}, r"speeds\[1\]: is 0.0; a positive factor"),
        ({"speeds": (1.0, 1.0, 1.0)}, "speeds: has 3 entries"),
        ({"links": PartitionLinks(())}, "links.bandwidth: has 0 entries"),
        ({"links": PartitionLinks(((1, 2), (3,)))}, r"links.bandwidth\[1\]: has 1 entries"),
        (
            {"links": PartitionLinks(((1, 2), (0, 1)))},
            r"links.bandwidth\[1\]\[0\]: is 0; a positive number of bytes",
        ),
        (
            {"links": PartitionLinks(((1, 2), (3, 4)), ((0, -1), (0, 0)))},
            r"links.latency_s\[0\]\[1\]: is -1",
        ),
        ({"in_flight": 0}, "in_flight: is 0; a whole number from 1"),
        ({"num_stages": 1.5}, "num_stages: is 1.5"),
    ],
)
def test_fields_that_make_no_sense_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        line(1, 1, **fields)


def test_times_and_speeds_together_are_refused() -> None:
    problem = line(1, 1)
    nodes = (replace(problem.nodes[0], times_ms=((1, 1), (1, 1))), problem.nodes[1])
    with pytest.raises(ProblemError, match=r"nodes\[0\].times_ms: are there as well as speeds"):
        replace(problem, nodes=nodes, speeds=(1.0, 1.0))
    few = (replace(problem.nodes[0], times_ms=((1, 1),)), problem.nodes[1])
    with pytest.raises(ProblemError, match=r"nodes\[0\].times_ms: has 1 entries"):
        replace(problem, nodes=few)


def test_every_field_goes_to_a_file_and_back() -> None:
    problem = line(
        1, 2, 3,
        memory_bytes=(1e9, 2e9), links=PartitionLinks(((1.0, 2.0), (3.0, 4.0))),
        speeds=(1.0, 2.0), recompute=True, in_flight=3, num_stages=2, straight=True,
    )  # fmt: skip
    value = json.loads(json.dumps(problem.to_json()))
    assert partition.from_json(value) == problem
    plain = json.loads(json.dumps(line(1, 2).to_json()))
    assert not {"memory", "speeds", "links", "recompute", "straight", "num_stages"} & set(plain)


def test_what_is_given_goes_before_the_file() -> None:
    value = json.loads(json.dumps(line(1, 2, memory_bytes=(5.0, 6.0)).to_json()))
    read = partition.from_json(value, memory=7.0, straight=True, num_stages=2, recompute=True)
    assert read.memory_bytes == (7.0, 7.0)
    assert (read.straight, read.num_stages, read.recompute) == (True, 2, True)
