"""Execution: what PyTorch starts op by op, what a compiler fuses, what each holds and the host."""

import pytest

from partita.cluster import resolve
from partita.costs.fusion import fused_elements, is_written, starts_kernel
from partita.costs.kernels import KERNELS, kernels
from partita.costs.memory import kept_bytes, temporary_bytes, workspace_bytes
from partita.costs.roofline import op_cost, rates_of
from partita.graph import GraphBuilder, training_graph
from partita.plans import EXECUTIONS
from partita.zoo import build

H200 = resolve("1xH200").kind_of(0)
A100 = resolve("1xA100").kind_of(0)


def block():
    """A residual block: norm, linear, gelu, linear, add; then another norm and linear."""
    g = GraphBuilder("block", "bf16")
    x = g.linear(g.input("x", (8, 512, 1024)), 1024, "first")
    h = g.norm(x, name="norm")
    h = g.linear(h, 4096, "up")
    h = g.elementwise("gelu", h, name="gelu")
    h = g.linear(h, 1024, "down")
    x = g.add(x, h, name="add")
    return g.finish(g.linear(g.norm(x, name="norm2"), 1024, "last"))


def written(graph, name):
    op = graph.op(name)
    return is_written(graph, op, op.outputs[0])


class TestFusion:
    def test_what_only_the_same_kernel_reads_is_not_written(self):
        g = GraphBuilder("chain", "bf16")
        x = g.linear(g.input("x", (64, 256)), 256, "a")
        x = g.relu(g.elementwise("scale", x, name="scale"), name="relu")
        graph = g.finish(g.linear(x, 256, "b"))
        assert not written(graph, "scale")
        assert written(graph, "relu")
        assert starts_kernel(graph, graph.op("scale"))
        assert not starts_kernel(graph, graph.op("relu"))
        reads, writes = fused_elements(graph, graph.op("relu"))
        assert [item.element_bytes for item in (*reads, *writes)] == [0, 2]

    def test_a_residual_that_a_product_lies_beside_is_written(self):
        graph = block()
        assert written(graph, "add") is False  # one kernel with the norm after it, read by no other
        assert written(graph, "norm")
        longer = training_graph(graph)
        assert written(longer, "add")  # the norm's gradient reads it

    def test_an_activation_is_made_again_for_its_gradient(self):
        g = GraphBuilder("mlp", "bf16")
        h = g.linear(g.input("x", (64, 256)), 256, "a")
        h = g.elementwise("gelu", g.elementwise("scale", h, name="scale"), name="gelu")
        graph = training_graph(g.finish(g.linear(h, 256, "b")))
        assert not written(graph, "scale")  # gelu's gradient reads it, and makes it again
        assert written(graph, "gelu")  # a product reads it

    @pytest.mark.parametrize("name", ["gpt2", "resnet50"])
    def test_a_compiled_step_moves_less_than_an_eager_one(self, name):
        graph = training_graph(build(name, batch=8, dtype="bf16"))
        moved = {
            execution: sum(
                op_cost(graph, op, H200, (), execution).traffic_bytes for op in graph.ops
            )
            for execution in EXECUTIONS
        }
        assert moved["compiled"] < 0.95 * moved["eager"]
        assert moved["eager"] == moved["graph"]


class TestKernels:
    def test_a_norm_of_batches_is_several_kernels_in_training_and_fewer_in_inference(self):
        g = GraphBuilder("bn", "bf16")
        graph = g.finish(g.norm(g.conv(g.input("x", (8, 8, 16, 16)), 8, 3), "batch_norm"))
        call = graph.call(graph.ops[-1])
        assert kernels(call, "bf16", True).count > kernels(call, "bf16", False).count > 1

    def test_attention_with_an_added_bias_is_computed_step_by_step(self):
        graph = build("t5-base", batch=4, dtype="bf16")
        attentions = [op for op in graph.ops if op.kind == "attention"]
        biased, plain = (
            next(op for op in attentions if (len(op.inputs) > 3) == wanted)
            for wanted in (True, False)
        )
        eager = op_cost(graph, biased, H200, (), "eager")
        fused = op_cost(graph, biased, H200, (), "graph")
        assert eager.seconds > 5 * fused.seconds
        assert eager.host_s > 3 * op_cost(graph, plain, H200, (), "eager").host_s

    def test_every_kind_of_the_zoo_has_host_time_when_it_starts_kernels(self):
        for name in ("gpt2", "unet", "rnnlm", "densenet121"):
            graph = training_graph(build(name, batch=2, dtype="bf16"))
            for op in graph.ops:
                call = graph.call(op)
                assert call.kind in KERNELS, call.kind
                started = kernels(call, "bf16", True)
                assert started.share > 0
                if started.count >= 1 and op.phase in ("forward", "dgrad"):
                    assert started.host_s > 0, (call.kind, call.phase)

    @pytest.mark.parametrize("execution", EXECUTIONS)
    @pytest.mark.parametrize("name", ["gpt2", "unet", "rnnlm", "lstm@2", "t5-base"])
    def test_costs_are_finite_and_positive_in_every_execution(self, name, execution):
        graph = training_graph(build(name, batch=2, dtype="bf16"))
        for op in graph.ops:
            cost = op_cost(graph, op, H200, (), execution)
            assert 0 <= cost.seconds < 1
            assert (cost.host_s == 0) or execution != "graph"

    def test_a_compiler_pads_what_does_not_lie_on_sixteen_bytes(self):
        g = GraphBuilder("head", "bf16")
        graph = g.finish(g.linear(g.input("x", (8192, 768)), 50257, bias=False))
        eager, compiled = (
            op_cost(graph, graph.ops[-1], H200, (), execution).seconds
            for execution in ("eager", "compiled")
        )
        assert compiled < eager / 3


class TestHeld:
    def call(self, kind, model="t5-base"):
        graph = build(model, batch=2, dtype="bf16", loss=True)
        return next(graph.call(op) for op in graph.ops if op.kind == kind)

    def test_a_cuda_graph_holds_what_the_graph_says(self):
        for kind, model in (("attention", "t5-base"), ("cross_entropy", "gpt2"), ("pool", "vgg16")):
            call = self.call(kind, model)
            assert kept_bytes(call, "bf16", "graph") == 0
            assert temporary_bytes(call, "bf16", "graph") == 0

    def test_unfused_attention_keeps_its_scores_in_full_precision(self):
        call = self.call("attention")
        scores = 2 * 12 * 512 * 512
        assert kept_bytes(call, "bf16", "eager") >= 4 * scores
        assert kept_bytes(call, "bf16", "compiled") >= 4 * scores

    def test_a_loss_needs_the_logits_once_more_unless_it_is_fused(self):
        call = self.call("cross_entropy", "gpt2")
        logits = 2 * 1024 * 50257 * 2
        assert temporary_bytes(call, "bf16", "eager") == logits
        assert temporary_bytes(call, "bf16", "compiled") == 0

    def test_a_pooling_keeps_the_positions_of_the_largest(self):
        call = self.call("pool", "vgg16")
        elements = 2 * 64 * 112 * 112
        assert kept_bytes(call, "bf16", "eager") == 8 * elements
        assert kept_bytes(call, "bf16", "compiled") == 0


class TestRates:
    def test_a_measured_kind_has_its_own_rates(self):
        assert rates_of("H200-SXM").products == pytest.approx(0.76, abs=0.02)
        assert rates_of("H200-SXM").fine_tiles
        assert not rates_of("A100-80GB-SXM").fine_tiles

    def test_a_kind_without_a_set_has_what_is_typical(self):
        assert rates_of("a kind of ours").products == 0.82
        assert rates_of("a kind of ours").memory == 0.88

    def test_a_measured_workspace_is_less_than_a_gibibyte(self):
        assert 0.6e9 < workspace_bytes(H200) < 1e9
        assert workspace_bytes(A100) == 1024**3

    def test_large_products_of_an_h200_take_what_was_measured(self):
        g = GraphBuilder("product", "bf16")
        graph = g.finish(g.linear(g.input("x", (8192, 4096)), 11008, bias=False))
        seconds = op_cost(graph, graph.ops[-1], H200).seconds
        assert seconds == pytest.approx(982e-6, rel=0.08)
