"""Calibrations: what they change of a machine, and what they leave."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.cluster import Cluster, resolve
from partita.cluster.calibration import (
    FIXED_ACROSS,
    FIXED_INSIDE,
    ISSUE,
    MESSAGE,
    OP_BY_OP,
    PER_BYTE,
    PER_FLOP,
    Calibration,
    KindCalibration,
    LinkCalibration,
    OpScale,
    calibrated,
    read_calibration,
)
from partita.costs.collectives import Collectives
from partita.costs.roofline import op_cost, op_lower_bound_s
from partita.engine import run
from partita.errors import ClusterError, FileError
from partita.graph import GraphBuilder, training_graph
from partita.lower import lower_plan
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage


def small_graph():
    g = GraphBuilder("small")
    hidden = g.relu(g.linear(g.input("x", (8, 64)), 64, "up"))
    return training_graph(g.finish(g.linear(hidden, 64, "down")))


def of_a100(*ops, links=()):
    name = resolve("2xA100").kinds[0].name
    return Calibration("a test", (KindCalibration(name, ops),), links)


def test_a_factor_and_a_launch_replace_those_of_the_op():
    graph, plain = small_graph(), resolve("2xA100")
    measured = calibrated(plain, of_a100(OpScale("forward product", 3.0, 1e-3)))
    for op in graph.ops:
        before = op_cost(graph, op, plain.kinds[0])
        after = op_cost(graph, op, measured.kinds[0])
        if op.kind == "linear" and op.phase == "forward":
            roofline = before.seconds - before.launch_s
            assert after.seconds == pytest.approx(3.0 * roofline + 1e-3)
            assert after.launch_s == 1e-3
        else:
            assert after == before


def test_messages_and_collectives_have_costs_and_bandwidths_of_their_own():
    plain, size, pair = resolve("2xA100"), 1e9, ((0, 1),)
    fixed = (OpScale(FIXED_INSIDE, 0.25, 1e-3), OpScale(FIXED_ACROSS, 1.0, 2e-3))
    shared = Collectives(calibrated(plain, of_a100(*fixed)))
    apart = Collectives(calibrated(plain, of_a100(*fixed, OpScale(MESSAGE, 1.0, 1e-5))))
    free = Collectives(calibrated(plain, of_a100(*fixed, OpScale(MESSAGE, 1.0, 0.0))))
    for name in ("all_reduce", "all_gather"):
        moving = Collectives(plain).by_bandwidth(name, size, pair)
        assert apart.by_bandwidth(name, size, pair) == pytest.approx(4 * moving, rel=1e-3)
        assert apart.fixed_s(pair) == 1e-3
        assert apart.seconds(name, size, pair) == shared.seconds(name, size, pair)
    # A message goes at the whole bandwidth; without a cost of its own it has that of a collective.
    assert apart.send(size, 0, 1) - free.send(size, 0, 1) == pytest.approx(1e-5)
    assert shared.send(size, 0, 1) - free.send(size, 0, 1) == pytest.approx(1e-3)
    assert apart.exchange(size, ((0, 1), (1, 0))) < apart.by_bandwidth("all_gather", size, pair)


def test_flops_bytes_and_starts_cost_what_was_measured():
    graph, plain = small_graph(), resolve("2xA100")
    measured = calibrated(
        plain,
        of_a100(
            OpScale(f"forward product {PER_FLOP}", 1.0, 1e-9),
            OpScale(f"forward product {PER_BYTE}", 1.0, 1e-8),
            OpScale(f"forward {OP_BY_OP}", 1.0, 0.5),
            OpScale(ISSUE, 1.0, 2.0),
        ),
    )
    op = next(op for op in graph.ops if op.kind == "linear")
    before, after = (op_cost(graph, op, machine.kinds[0]) for machine in (plain, measured))
    more = 1e-9 * before.flops + 1e-8 * before.traffic_bytes
    assert after.seconds == pytest.approx(before.seconds + more)
    # Op by op, behind a collective: where features are split, and not where the batch is.
    for dims, beside in (("n", 0.5), ("b", 0.0)):
        mesh = Mesh((Axis("x", 2),), (0, 1))
        splits = tuple(
            OpSplit(each.name, (dims if each.kind == "linear" else "",))
            for each in graph.ops
            if each.phase == "forward"
        )
        stage = Stage("stage", mesh, splits)
        programs = [
            lower_plan((stage,), Schedule(), graph, machine, run).program
            for machine in (plain, measured)
        ]
        slower = [
            float(b - a)
            for a, b, work in zip(
                programs[0].duration, programs[1].duration, programs[1].work, strict=True
            )
            if work >= 0 and programs[1].works[work].op == "relu"
        ]
        assert slower == pytest.approx([beside + 2.0] * len(slower))


@given(factor=st.floats(0.01, 100), launch=st.floats(0, 1e-3))
def test_no_calibrated_op_is_below_its_lower_bound(factor, launch):
    graph = small_graph()
    scales = [
        OpScale(f"{phase} {each}", factor, launch)
        for phase in ("forward", "dgrad", "wgrad", "update")
        for each in ("product", "attention", "elementwise")
    ]
    kind = calibrated(resolve("2xA100"), of_a100(*scales)).kinds[0]
    for op in graph.ops:
        assert op_lower_bound_s(graph, op, kind) <= op_cost(graph, op, kind).seconds * (1 + 1e-9)


def test_links_of_the_same_figures_are_changed_in_machines_of_any_size():
    plain = resolve("8xA100")
    link = plain.links[0]
    slow = LinkCalibration(link.latency_s, link.bytes_per_s, 1e-3, 1e6)
    measured = calibrated(plain, of_a100(links=(slow,)))
    assert measured.links[0].latency_s == 1e-3
    assert measured.links[0].bytes_per_s == 1e6
    assert Collectives(measured).send(1e6, 0, 1) > Collectives(plain).send(1e6, 0, 1)


def test_what_was_measured_is_part_of_the_fingerprint_and_of_the_file():
    plain = resolve("2xA100")
    measured = calibrated(plain, of_a100(OpScale("forward product", 3.0, 0.0)))
    assert measured.fingerprint() != plain.fingerprint()
    assert Cluster.from_json(measured.to_json()) == measured
    assert "measured" not in json.loads(plain.to_json())["kinds"][0]


def test_a_calibration_is_read_as_it_was_written_and_named_after_a_plus(tmp_path):
    own = of_a100(OpScale("forward product", 3.0, 1e-6))
    file = tmp_path / "measured.json"
    file.write_bytes(own.to_json())
    assert read_calibration(file) == own
    assert resolve(f"2xA100+{file}") == calibrated(resolve("2xA100"), own)


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ClusterError, match=r"ops 'x': has factor 0 .* a factor is above 0"):
        OpScale("x", 0.0, 0.0)
    with pytest.raises(ClusterError, match="links: measured -1 s"):
        LinkCalibration(0.0, 1.0, -1.0, 1.0)
    with pytest.raises(ClusterError, match="calibrate on a device of this kind"):
        calibrated(resolve("2xH100"), of_a100())
    with pytest.raises(FileError, match=r"none\.json: no such file"):
        resolve(f"2xA100+{tmp_path}/none.json")
    file = tmp_path / "broken.json"
    file.write_text('{"format": "partita/plan@1"}')
    with pytest.raises(FileError, match='"partita/calibration@1" is needed here'):
        read_calibration(file)
