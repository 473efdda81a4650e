"""Layers of a graph, their times, the two records, and a bound that holds."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.cluster import Cluster, Device, DeviceKind, Link, resolve
from partita.costs.placement import placement_model, segments
from partita.costs.roofline import op_cost
from partita.graph import GraphBuilder, training_graph
from partita.jobs.place_program import lower_placement, simulate_placement
from partita.problems.placement import RecordConstraints
from partita.zoo import build

FAST = DeviceKind("fast", "cpu", (("f32", 1e12),), 2**30, 1e11)
SLOW = DeviceKind("slow", "cpu", (("f32", 1e11),), 2**30, 1e10)


def two_devices(lane=""):
    """A fast and a slow device, joined by a cable of 1 GB/s and 1 ms."""
    links = (Link("a", "b", 1e-3, 1e9, lane), Link("b", "a", 1e-3, 1e9, lane))
    return Cluster("two", (FAST, SLOW), (Device("a", "fast"), Device("b", "slow")), (), links)


def branches():
    """conv + relu, two convs of its output, and their sum."""
    g = GraphBuilder("branches")
    x = g.relu(g.conv(g.input("x", (4, 8, 16, 16)), 8, 3, padding=1, name="stem"), "stem.relu")
    left = g.relu(g.conv(x, 8, 3, padding=1, name="left"), "left.relu")
    right = g.conv(x, 8, 1, name="right")
    return g.finish(g.add(left, right, name="sum"))


class TestLayers:
    def test_every_forward_op_is_in_one_layer(self):
        graph = training_graph(build("inception_v3", batch=2))
        model = placement_model(graph, resolve("malvik"))
        names = [name for layer in model.layers for name in layer]
        assert sorted(names) == sorted(op.name for op in graph.ops if op.phase == "forward")
        assert set(model.layer_of) == {op.name for op in graph.ops}

    def test_an_activation_joins_what_it_alone_reads_and_a_sum_stays_alone(self):
        model = placement_model(branches(), two_devices())
        assert model.layers == (("stem", "stem.relu"), ("left", "left.relu"), ("right",), ("sum",))
        assert model.parents == ((), (0,), (0,), (1, 2))
        assert model.children == ((1, 2), (3,), (3,), ())

    def test_ops_that_are_wished_apart_do_not_join(self):
        model = placement_model(branches(), two_devices(), {"left.relu": "elsewhere"})
        assert ("left",) in model.layers
        assert ("left.relu",) in model.layers

    def test_layers_come_after_those_they_read(self):
        model = placement_model(build("t5", batch=1), resolve("2xV100"))
        assert all(p < layer for layer, before in enumerate(model.parents) for p in before)

    def test_backward_ops_belong_to_their_forward_and_updates_to_the_first_reader(self):
        graph = training_graph(build("gpt2", batch=1))
        model = placement_model(graph, resolve("2xV100"))
        assert model.layer_of["h.3.mlp.c_fc.wgrad"] == model.layer_of["h.3.mlp.c_fc"]
        assert model.layer_of["wte.weight.update"] == model.layer_of["wte"]


class TestRecords:
    def test_all_work_of_a_layer_is_in_the_own_record(self):
        graph = training_graph(branches())
        model = placement_model(graph, two_devices())
        record = model.problem("partita", batches=4, in_flight=2)
        for device, kind in enumerate((FAST, SLOW)):
            once = sum(op_cost(graph, op, kind).seconds for op in graph.ops if op.phase != "update")
            update = sum(
                op_cost(graph, op, kind).seconds for op in graph.ops if op.phase == "update"
            )
            told = sum(layer.fwd_ms[device] + layer.bwd_ms[device] for layer in record.layers)
            assert told == pytest.approx((once + update / 4) * 1e3)

    def test_the_exprimo_record_leaves_weight_gradients_and_states_out(self):
        graph = training_graph(branches())
        model = placement_model(graph, two_devices())
        own, theirs = model.problem("partita"), model.problem("exprimo")
        assert sum(x.weight_bytes for x in theirs.layers) == sum(
            tensor.size_bytes for tensor in graph.parameters
        )
        # AdamW: the parameters, their gradients and two states; relu's output is sent, not saved
        assert sum(x.weight_bytes for x in own.layers) == 4 * sum(
            x.weight_bytes for x in theirs.layers
        )
        assert all(
            a.bwd_ms[0] >= b.bwd_ms[0] for a, b in zip(own.layers, theirs.layers, strict=True)
        )

    def test_directions_are_two_channels_of_ours_and_one_of_exprimo(self):
        model = placement_model(branches(), two_devices())
        assert model.problem("partita").route == ((-1, 0), (1, -1))
        assert model.problem("exprimo").route == ((-1, 0), (0, -1))

    def test_links_of_one_medium_are_one_channel_in_both(self):
        model = placement_model(branches(), two_devices(lane="bus"))
        assert model.problem("partita").route == model.problem("exprimo").route

    def test_latency_counts_in_ours_only(self):
        graph = training_graph(branches())
        model = placement_model(graph, two_devices())
        size = 4 * 8 * 16 * 16 * 4
        assert model.problem("partita").layers[0].transfer_ms[0] == pytest.approx(1 + size / 1e6)
        assert model.problem("exprimo").layers[0].transfer_ms[0] == pytest.approx(size / 1e6)

    def test_a_route_through_a_device_takes_the_time_of_both_pieces(self):
        ends = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")]
        links = tuple(Link(x, y, 1e-6, 1e9) for x, y in ends)
        names = tuple(Device(name, "fast") for name in "abc")
        chain = Cluster("chain", (FAST,), names, (), links)
        assert len(segments(chain, 0, 2)) == 2
        record = placement_model(training_graph(branches()), chain).problem("exprimo")
        near, far = (record.layers[0].transfer_ms[record.route[0][to]] for to in (1, 2))
        assert far == pytest.approx(2 * near)


class TestBound:
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_no_placement_is_faster_than_the_bound(self, data):
        graph = training_graph(branches())
        model = placement_model(graph, two_devices())
        layers = len(model.layers)
        placement = data.draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
        batches = data.draw(st.integers(1, 3))
        in_flight = data.draw(st.integers(1, batches))
        timeline, _ = simulate_placement(model, placement, batches, in_flight)
        assert model.bound_s(RecordConstraints(), batches, in_flight) <= timeline.makespan * (
            1 + 1e-9
        )
        pinned = RecordConstraints(pinned=tuple(enumerate(placement)))
        assert model.bound_s(pinned, batches, in_flight) <= timeline.makespan * (1 + 1e-9)

    def test_pins_to_the_slow_device_raise_it(self):
        model = placement_model(training_graph(branches()), two_devices())
        slow = RecordConstraints(pinned=tuple((layer, 1) for layer in range(len(model.layers))))
        alone = simulate_placement(model, [1] * len(model.layers))[0].makespan
        assert model.bound_s(slow) == pytest.approx(alone, rel=0.4)
        assert model.bound_s(slow) > 3 * model.bound_s(RecordConstraints())

    def test_one_device_alone_is_its_work(self):
        model = placement_model(training_graph(branches()), resolve("1xV100"))
        alone = simulate_placement(model, [0] * len(model.layers))[0].makespan
        assert model.bound_s(RecordConstraints()) == pytest.approx(alone, rel=1e-6)


class TestPrograms:
    def test_on_one_device_all_ops_follow_one_another(self):
        graph = training_graph(branches())
        model = placement_model(graph, two_devices())
        timeline, _ = simulate_placement(model, [0] * len(model.layers))
        assert timeline.makespan == pytest.approx(float(model.seconds[:, 0].sum()))

    def test_a_tensor_is_sent_once_to_a_device_that_reads_it_twice(self):
        model = placement_model(branches(), two_devices())
        program = lower_placement(model, [0, 1, 1, 1])
        sends = [
            name for name in map(program.task_name, range(program.num_tasks)) if name[0] == "S"
        ]
        assert sends == ["S0@stem.relu to b"]

    def test_both_directions_of_a_cable_carry_data_at_once(self):
        g = GraphBuilder("crossing")
        left = g.conv(g.input("x", (1, 64, 64, 64)), 64, 1, name="left")
        right = g.conv(g.input("y", (1, 64, 64, 64)), 64, 1, name="right")
        a, b = g.conv(right, 64, 1, name="a"), g.conv(left, 64, 1, name="b")
        graph = g.finish(a, b)

        def makespan(lane):
            devices = (Device("a", "fast"), Device("b", "fast"))
            links = (Link("a", "b", 0.0, 1e8, lane), Link("b", "a", 0.0, 1e8, lane))
            model = placement_model(graph, Cluster("two", (FAST,), devices, (), links))
            return simulate_placement(model, [0, 1, 0, 1])[0].makespan

        transfer = 64**3 * 4 / 1e8
        assert makespan("bus") - makespan("") == pytest.approx(transfer, rel=0.05)

    def test_latency_is_waited_for_but_blocks_no_link(self):
        model = placement_model(branches(), two_devices())
        timeline, _ = simulate_placement(model, [0, 0, 1, 0])
        busy = dict(zip((x.name for x in timeline.program.lanes), timeline.busy(), strict=True))
        assert busy["a → b"] == pytest.approx(4 * 8 * 16 * 16 * 4 / 1e9)
        alone = simulate_placement(model, [0] * 4)[0].makespan
        assert timeline.makespan > alone + 2e-3

    def test_a_shared_weight_is_updated_once_and_sent_to_its_other_readers(self):
        graph = training_graph(build("gpt2", batch=1))
        model = placement_model(graph, resolve("2xV100"))
        placement = [0] * len(model.layers)
        placement[model.layer_of["lm_head"]] = 1
        program = lower_placement(model, placement)
        names = [program.task_name(task) for task in range(program.num_tasks)]
        assert sum(name.startswith("U@update of wte") for name in names) == 1
        assert "S@wte.weight to n0.gpu1" in names
        assert "S0@wte.weight.grad.lm_head to n0.gpu0" in names

    def test_what_is_taken_beyond_outputs_is_given_back(self):
        model = placement_model(training_graph(branches()), two_devices())
        for batches in (1, 3):
            timeline, _ = simulate_placement(model, [0, 1, 0, 1], batches, 2)
            for memory in range(len(timeline.program.memories)):
                held = timeline.memory_steps(memory)[1]
                assert held[-1] <= held[0] + batches * 4 * 8 * 16 * 16 * 4

    def test_no_more_batches_than_asked_for_are_in_flight(self):
        model = placement_model(training_graph(branches()), two_devices())
        timeline, _ = simulate_placement(model, [0, 1, 0, 1], 4, 2)
        batch = timeline.program.microbatch
        spans = [
            (timeline.start[batch == k].min(), timeline.end[batch == k].max()) for k in range(4)
        ]
        assert all(
            later[0] >= earlier[1] - 1e-12 for earlier, later in zip(spans, spans[2:], strict=False)
        )
        assert any(b[0] < a[1] for a, b in pairwise(spans))

    def test_stages_in_a_row_fill_up_like_a_pipeline(self):
        g = GraphBuilder("chain")
        x = g.input("x", (64, 512))
        for number in range(4):
            x = g.linear(x, 512, f"stage{number}")
        model = placement_model(g.finish(x), resolve("4xV100"))
        one = float(model.seconds[0, 0])
        timeline, _ = simulate_placement(model, [0, 1, 2, 3], 12, 12)
        sent = timeline.makespan - (12 + 3) * one  # three transfers on the way of the first batch
        assert 0 <= sent < 0.5 * one

    def test_a_pipeline_that_trains_keeps_its_devices_busy(self):
        g = GraphBuilder("chain")
        x = g.input("x", (256, 1024))
        for number in range(4):
            x = g.linear(x, 1024, f"stage{number}")
        model = placement_model(training_graph(g.finish(x)), resolve("2xA100"))
        timeline, _ = simulate_placement(model, [0, 0, 1, 1], 16, 4)
        work = float(model.phase_total(16)[:2, 0].sum())
        assert timeline.makespan < 1.25 * work

    def test_gradients_of_several_batches_are_updated_once(self):
        model = placement_model(training_graph(branches()), two_devices())
        one, three = (lower_placement(model, [0] * 4, n, n) for n in (1, 3))
        kinds = [np.bincount(program.kind, minlength=9) for program in (one, three)]
        assert kinds[1][0] == 3 * kinds[0][0]
        assert kinds[1][4] == kinds[0][4]
