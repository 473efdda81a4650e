"""Simulating a model or plan: the answers agree with each other and with simple arithmetic."""

import logging

import pytest

from partita.cluster import resolve
from partita.errors import ModelError, PlanError
from partita.graph import GraphBuilder
from partita.jobs.simulate import NUMBERS, data_splits, simulate, slowest_groups
from partita.jobs.workload import load
from partita.plans import Axis, Mesh


@pytest.fixture(scope="module")
def gpt2():
    return simulate("gpt2", "4xA100", batch=8)


class TestAnswers:
    def test_a_step_is_compute_plus_what_is_waited_for(self, gpt2):
        assert gpt2.step_s == pytest.approx(gpt2.compute_s + gpt2.exposed_s)
        assert gpt2.exposed_s >= -1e-12

    def test_bounds_add_up_to_the_step(self, gpt2):
        assert sum(gpt2.bounds().values()) == pytest.approx(gpt2.step_s, rel=0.02)

    def test_utilisation_is_flops_over_peak_times_time(self, gpt2):
        peak = 4 * resolve("1xA100").kind_of(0).peak("bf16")
        assert gpt2.mfu == pytest.approx(gpt2.flops / peak / gpt2.step_s)
        assert 0.05 < gpt2.mfu < 1

    def test_flops_are_six_per_parameter_and_token_and_attention(self, gpt2):
        tokens = 8 * 1024
        assert gpt2.flops == pytest.approx(6 * 124e6 * tokens, rel=0.15)

    def test_it_fits(self, gpt2):
        assert gpt2.fits
        assert max(gpt2.peak_bytes) > gpt2.memory.parameters + gpt2.memory.states

    def test_repeated_layers_are_told_together(self, gpt2):
        groups = {group.name: group.count for group in slowest_groups(gpt2.ops, 1000)}
        assert groups["h.*.mlp.c_fc"] == 12
        assert sum(groups.values()) == len(gpt2.ops)


def test_numbers_are_whole_parts_of_a_name():
    assert NUMBERS.sub("*", "h.10.attn.q2.grad_1.3") == "h.*.attn.q2.grad_*.*"


def test_more_devices_are_faster_and_communicate_more():
    one, four = (simulate("resnet50", f"{n}xV100", batch=64) for n in (1, 4))
    assert four.step_s < 0.4 * one.step_s
    assert four.communication_s > one.communication_s == 0


def test_inference_has_no_backward_and_takes_less():
    train = simulate("squeezenet1_1", "1xA100", batch=8)
    infer = simulate("squeezenet1_1", "1xA100", batch=8, training=False)
    assert {op.phase for op in infer.ops} == {"forward"}
    assert infer.step_s < train.step_s
    assert infer.memory.states == 0


def test_too_much_memory_is_an_answer():
    simulation = simulate("llama-7b", "1xGTX-1080-Ti", batch=1)
    assert not simulation.fits
    assert simulation.step_s > 0


def test_a_batch_that_does_not_divide_is_repeated():
    simulation = simulate("squeezenet1_1", "4xA100", batch=3)
    assert simulation.stage.dims()["features.0"] == ("",)


def test_data_parallelism_splits_nothing_but_the_batch():
    graph = load("bert-base@64", batch=8).graph
    for count, expected in ((8, "b"), (3, "")):
        mesh = Mesh((Axis("x", count),), tuple(range(count)))
        assert {dim for split in data_splits(graph, mesh) for dim in split.dims} == {expected}


def test_a_graph_can_be_given():
    g = GraphBuilder("mine")
    x = g.linear(g.input("x", (8, 16)), 4)
    simulation = simulate(g.finish(g.cross_entropy(x, g.input("y", (8,), "i64"))), "2xA100")
    assert simulation.workload.spec == "mine"
    assert simulation.workload.training


def test_an_unknown_kind_is_carried_with_a_warning_that_names_it(caplog):
    g = GraphBuilder("mine")
    (x,) = g.op("wavelet", g.linear(g.input("x", (8, 16)), 16), shapes=[(8, 16)])
    graph = g.finish(g.linear(x, 4, "head"))
    with caplog.at_level(logging.WARNING, logger="partita"):
        simulation = simulate(graph, "2xA100")
    assert "'wavelet'" in caplog.text
    assert simulation.step_s > 0
    assert simulation.stage.dims()["wavelet"] == ("",)


def test_a_model_needs_a_machine():
    with pytest.raises(PlanError, match="no cluster is given; name one, for example 4xA100"):
        simulate("gpt2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch: a batch of 0; give at least 1"),
        ({"optimizer": "magic"}, "optimizer: unknown optimizer 'magic'; use one of sgd"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ModelError) as caught:
        load("gpt2", **options)
    assert message in str(caught.value)
