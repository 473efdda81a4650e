"""The roofline: which part bounds an op, what splitting does, what quantisation costs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.cluster import list_kinds, resolve
from partita.costs.roofline import Product, as_products, op_cost, product_seconds
from partita.graph import GraphBuilder, training_graph
from partita.graph.loops import loop_nest
from partita.graph.splits import splittable
from partita.zoo import build

A100 = resolve("1xA100").kind_of(0)
KINDS = list_kinds()


def one_op(make, dtype="bf16"):
    g = GraphBuilder("test", dtype)
    graph = g.finish(make(g))
    return graph, graph.ops[-1]


def linear(m, n, k, dtype="bf16"):
    return one_op(lambda g: g.linear(g.input("x", (m, k)), n, bias=False), dtype)


class TestBounds:
    def test_a_large_product_is_bound_by_compute_near_the_peak(self):
        cost = op_cost(*linear(8192, 8192, 8192), A100)
        assert cost.bound == "compute"
        assert 0.6 < cost.flops / cost.seconds / A100.peak("bf16") < 0.9

    def test_a_product_of_one_row_is_bound_by_reading_the_weights(self):
        cost = op_cost(*linear(1, 8192, 8192), A100)
        assert cost.bound == "memory"
        assert cost.seconds > 8192 * 8192 * 2 / A100.memory_bytes_per_s

    def test_a_tiny_op_is_bound_by_its_launch(self):
        cost = op_cost(*one_op(lambda g: g.relu(g.input("x", (8, 8)))), A100)
        assert cost.bound == "launch"
        assert cost.seconds >= A100.launch_s

    def test_a_view_is_free(self):
        graph, op = one_op(lambda g: g.reshape(g.input("x", (8, 8)), (64,)))
        cost = op_cost(graph, op, A100)
        assert cost.seconds == 0.0
        assert cost.bound == "nothing"

    def test_what_fits_the_cache_moves_faster_than_memory(self):
        graph, op = one_op(lambda g: g.relu(g.input("x", (1024, 1024))))
        bare = op_cost(graph, op, A100)
        assert bare.traffic_bytes < A100.cache_bytes
        assert bare.memory_s < bare.traffic_bytes / A100.memory_bytes_per_s

    def test_an_unaligned_vocabulary_costs_more_than_a_padded_one(self):
        odd = op_cost(*linear(8192, 50257, 768), A100)
        padded = op_cost(*linear(8192, 50304, 768), A100)
        assert odd.seconds > 1.5 * padded.seconds

    def test_an_unknown_kind_is_costed_by_its_bytes(self):
        graph, op = one_op(
            lambda g: g.op("wavelet", g.input("x", (4096, 4096)), shapes=[(4096, 4096)])[0]
        )
        cost = op_cost(graph, op, A100)
        assert cost.flops == 0
        assert cost.traffic_bytes == 2 * 4096 * 4096 * 2
        assert cost.bound == "memory"

    def test_a_recurrent_layer_pays_a_launch_per_position(self):
        short = op_cost(*one_op(lambda g: g.recurrent(g.input("x", (1, 10, 256)), 256)), A100)
        long = op_cost(*one_op(lambda g: g.recurrent(g.input("x", (1, 100, 256)), 256)), A100)
        assert long.launch_s > 9 * short.launch_s


def products_of(graph, op):
    call = graph.call(op)
    return as_products(call, loop_nest(call), {})


def attention_scores():
    """Queries times keys, both of them computed: what spelled-out attention begins with."""
    g = GraphBuilder("scores", "bf16")
    q = g.linear(g.input("q", (8, 12, 512, 64)), 64, "q_proj", bias=False)
    k = g.linear(g.input("k", (8, 12, 512, 64)), 64, "k_proj", bias=False)
    (scores,) = g.op("matmul", q, k, name="scores", transpose_b=True)
    graph = training_graph(g.finish(scores))
    return graph, graph.op("scores")


class TestProducts:
    def test_a_linear_layer_is_its_matrix_product(self):
        graph, op = linear(64, 32, 16)
        assert products_of(graph, op) == (Product(1, 64, 32, 16),)

    def test_a_convolution_is_an_image_to_column_product(self):
        graph, op = one_op(
            lambda g: g.conv(g.input("x", (2, 3, 8, 8)), 5, 3, padding=1, bias=False)
        )
        assert products_of(graph, op) == (Product(1, 2 * 8 * 8, 5, 3 * 3 * 3),)

    def test_gradients_are_products_of_the_same_points(self):
        g = GraphBuilder("mlp")
        x = g.relu(g.linear(g.input("x", (64, 16)), 32, "a", bias=False))
        graph = training_graph(g.finish(g.linear(x, 8, "b", bias=False)))
        expected = {
            "b": Product(1, 64, 8, 32),
            "b.dgrad": Product(1, 64, 32, 8),
            "b.wgrad": Product(1, 8, 32, 64),
        }
        for name, product in expected.items():
            assert products_of(graph, graph.op(name)) == (product,)

    def test_the_gradients_of_a_product_of_activations_are_two_products(self):
        graph, op = attention_scores()
        gradient = graph.op(f"{op.name}.dgrad")
        assert products_of(graph, op) == (Product(8 * 12, 512, 512, 64),)
        assert products_of(graph, gradient) == (
            Product(8 * 12, 512, 64, 512),
            Product(8 * 12, 512, 64, 512),
        )

    def test_a_gradient_of_both_factors_takes_about_twice_the_forward(self):
        graph, op = attention_scores()
        forward = op_cost(graph, op, A100)
        gradient = op_cost(graph, graph.op(f"{op.name}.dgrad"), A100)
        assert gradient.flops == 2 * forward.flops
        assert gradient.compute_s < 4 * forward.compute_s

    def test_one_more_tile_than_a_wave_costs_a_second_wave(self):
        full = product_seconds(Product(1, 256 * 108, 128, 4096), 312e12, 108)
        more = product_seconds(Product(1, 256 * 108 + 1, 128, 4096), 312e12, 108)
        assert more > 1.2 * full

    @given(
        st.integers(1, 4), st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 4000),
        st.sampled_from(KINDS),
    )  # fmt: skip
    def test_nothing_is_faster_than_the_peak(self, batch, m, n, k, kind):
        seconds = product_seconds(Product(batch, m, n, k), kind.peak("f32"), kind.num_units)
        assert math.isfinite(seconds)
        assert seconds >= 2 * batch * m * n * k / kind.peak("f32")


class TestSplits:
    @pytest.mark.parametrize("name", ["gpt2", "resnet50", "moe", "rnnlm", "unet"])
    def test_a_share_is_never_slower_than_the_whole(self, name):
        graph = training_graph(build(name, batch=8))
        seen = set()
        for op in graph.ops:
            call = graph.call(op)
            if call in seen:
                continue
            seen.add(call)
            whole = op_cost(graph, op, A100)
            for dim in splittable(call, 2):
                part = op_cost(graph, op, A100, ((dim, 2),))
                assert part.seconds <= whole.seconds * 1.001, (op.name, dim)
                assert part.flops == pytest.approx(whole.flops / 2)
                assert part.traffic_bytes <= whole.traffic_bytes

    @pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
    def test_every_kind_of_device_gives_finite_positive_times(self, kind):
        graph = training_graph(build("squeezenet1_1", batch=2))
        times = [op_cost(graph, op, kind).seconds for op in graph.ops]
        assert all(math.isfinite(t) and t >= 0 for t in times)
        assert sum(times) > 0
