"""FLOPs are those that PyTorch's counter counts, forward and backward.

Bytes moved: each tensor once, with the exceptions of the table.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from partita.graph import GraphBuilder, training_graph
from partita.graph.record import Call
from partita.graph.work import attended_pairs, elements, flops, traffic, traffic_bytes
from tests.graph import reference
from tests.graph.calls import KINDS, calls, make_call
from tests.graph.strategies import graphs

torch = pytest.importorskip("torch")


tried = settings(max_examples=15, deadline=None)


def counted(call):
    """Forward and backward FLOPs by torch's counter, differentiating the first two inputs."""
    inputs = [x.requires_grad_() for x in reference.make_inputs(call, device="meta")]
    with FlopCounterMode(display=False) as forward:
        (out,) = reference.run(call, inputs)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)
    return forward.get_total_flops(), backward.get_total_flops()


def gradient(call, phase, *wrt):
    return Call(call.kind, call.attrs, call.inputs, call.outputs, phase, wrt, ("g0",))


@pytest.mark.parametrize("kind", ["linear", "matmul", "conv", "expert_linear"])
@tried
@given(data=st.data())
def test_contractions_count_what_torch_counts(kind, data):
    call = data.draw(calls(kind))
    forward, backward = counted(call)
    assert flops(call) == forward
    assert flops(gradient(call, "dgrad", 0)) == forward
    assert flops(gradient(call, "wgrad", 1)) == forward
    if call.whole("groups", 1) == 1:  # torch counts the weight gradient of groups as if of one
        assert flops(gradient(call, "dgrad", 0, 1)) == backward


@pytest.mark.parametrize("equation", ["ab,bc->ac", "bik,bkj->bij", "bhsd,bhtd->bhst", "ij,jk->k"])
@pytest.mark.parametrize("size", [2, 5])
def test_einsum_of_two_counts_two_per_point_of_its_nest(equation, size):
    left = equation.split("->")[0].split(",")
    call = make_call("einsum", [(size,) * len(term) for term in left], equation=equation)
    letters = set("".join(left))
    assert flops(call) == 2 * size ** len(letters)
    assert flops(gradient(call, "dgrad", 0, 1)) == 2 * flops(call)


def test_a_bias_gradient_alone_is_a_sum():
    call = make_call("linear", [(8, 4), (5, 4), (5,)])
    assert flops(gradient(call, "wgrad", 2)) == 8 * 5
    assert flops(gradient(call, "wgrad", 1, 2)) == flops(call)
    experts = make_call("expert_linear", [(2, 8, 4), (2, 5, 4), (2, 5)])
    assert flops(gradient(experts, "wgrad", 1, 2)) == flops(experts)


@tried
@given(data=st.data())
def test_attention_counts_two_contractions_forward_and_five_backward(data):
    b, h, s, t, d, e = (data.draw(st.integers(1, 6)) for _ in range(6))
    shapes = [(b, h, s, d), (b, h, t, d), (b, h, t, e)]
    call = make_call("attention", shapes)
    softmax = b * h * s * t
    assert flops(call) == sdpa_flop_count(*shapes) + 6 * softmax
    backward = sdpa_backward_flop_count((b, h, s, e), *shapes)
    assert flops(gradient(call, "dgrad", 0, 1, 2)) == backward + 12 * softmax


def test_both_layouts_of_attention_count_the_same():
    split = make_call("attention", [(2, 8, 16, 4), (2, 2, 16, 4), (2, 2, 16, 4)], causal=True)
    attrs = {"causal": True, "heads": 8, "kv_heads": 2}
    flat = make_call("attention", [(2, 16, 32), (2, 16, 8), (2, 16, 8)], **attrs)
    assert flops(split) == flops(flat)


@given(
    positions=st.integers(1, 12),
    keys=st.integers(1, 12),
    window=st.integers(0, 14),
)
def test_causal_pairs_are_those_one_can_count(positions, keys, window):
    pairs = 0
    for query in range(keys - positions, keys):
        for key in range(keys):
            pairs += key <= query and (not window or key > query - window)
    assert attended_pairs(positions, keys, causal=True, window=window) == pairs


def test_pairs_without_a_causal_mask_are_all_or_a_window_each():
    assert attended_pairs(4, 10, causal=False, window=0) == 40
    assert attended_pairs(4, 10, causal=False, window=3) == 12
    assert attended_pairs(4, 10, causal=False, window=30) == 40


@pytest.mark.parametrize(("kind", "gates"), [("lstm", 4), ("gru", 3)])
def test_recurrent_layers_count_their_products_and_gates(kind, gates):
    b, t, i, h = 3, 5, 7, 6
    call = make_call(kind, [(b, t, i), (gates * h, i), (gates * h, h)])
    inputs = reference.make_inputs(call)
    with FlopCounterMode(display=False) as counter:
        reference.run(call, inputs)
    assert flops(call) == counter.get_total_flops() + b * t * 8 * gates * h


def test_a_cell_counts_as_one_position_of_its_layer():
    layer = make_call("lstm", [(3, 1, 7), (24, 7), (24, 6)])
    cell = make_call("lstm_cell", [(3, 7), (3, 6), (3, 6), (24, 7), (24, 6)])
    assert flops(cell) == flops(layer)


def test_routing_counts_its_product_and_a_softmax():
    call = make_call("moe_router", [(4, 6, 8), (3, 8)])
    assert flops(call) == 24 * (2 * 8 * 3 + 8 * 3)


@pytest.mark.parametrize("kind", ["reshape", "transpose", "concat", "split", "slice", "pad"])
@tried
@given(data=st.data())
def test_moving_data_counts_nothing(kind, data):
    assert flops(data.draw(calls(kind))) == 0


def test_small_ops_count_per_element():
    assert flops(make_call("elementwise", [(4, 8)], fn="relu")) == 32
    assert flops(make_call("elementwise", [(4, 8)] * 3, fn="add")) == 64
    assert flops(make_call("pool", [(2, 3, 8, 8)], kernel=[2, 2])) == 2 * 3 * 16 * 4
    assert flops(make_call("optimizer", [(10,)] * 4, rule="adamw")) == 160
    assert flops(Call("warp", (), ((4,),), ((4,),))) == 0


@pytest.mark.parametrize("kind", KINDS)
@tried
@given(data=st.data())
def test_every_count_is_finite_and_not_negative(kind, data):
    call = data.draw(calls(kind))
    back = Call(call.kind, call.attrs, call.inputs, call.outputs, "dgrad", (0,), ("g0",))
    for each in (call, back) if call.inputs else (call,):
        assert 0 <= flops(each) < math.inf


def net(*steps):
    """A training graph of a linear layer and what `steps` makes of it, with a loss."""
    g = GraphBuilder("net")
    x = g.linear(g.input("x", (4, 8)), 8, "fc", bias=False)
    for step in steps:
        x = step(g, x)
    return training_graph(g.finish(g.one("mse_loss", x, g.input("y", x.shape), name="loss")))


def moved(graph, name, **factors):
    op = graph.op(name)
    return traffic(graph.call(op), *elements(graph, op), factors).total


def test_a_layer_moves_its_tensors_once_and_its_share_when_split():
    graph = net()
    x, w, y = 4 * 8 * 4, 8 * 8 * 4, 4 * 8 * 4
    assert moved(graph, "fc") == x + w + y
    assert moved(graph, "fc", b=2) == x / 2 + w + y / 2
    assert moved(graph, "fc", n=4) == x + w / 4 + y / 4
    assert moved(graph, "fc", k=4) == x / 4 + w / 4 + y
    assert traffic_bytes(graph, graph.op("fc.wgrad")) == y + x + w


def test_weights_come_from_memory_and_activations_may_not():
    graph = net()
    op = graph.op("fc")
    parts = traffic(graph.call(op), *elements(graph, op), {})
    assert (parts.given, parts.computed) == (8 * 8 * 4, 2 * 4 * 8 * 4)


def test_views_are_free_forward():
    graph = net(lambda g, x: g.reshape(x, (2, 2, 8)), lambda g, x: g.split(x, (3, 5))[0])
    assert moved(graph, "reshape") == moved(graph, "split") == 0
    assert moved(graph, "reshape.dgrad") == 0
    assert moved(graph, "split.dgrad") == (4 * 3 + 4 * 8) * 4


def test_a_sum_hands_its_gradient_on_but_a_sum_of_gradients_moves_bytes():
    graph = net(lambda g, x: g.add(x, g.relu(x)))
    assert moved(graph, "add") == 3 * 4 * 8 * 4
    assert moved(graph, "add.dgrad") == 0
    assert moved(graph, "fc.grad.sum") == 3 * 4 * 8 * 4


def test_a_lookup_moves_only_its_rows():
    g = GraphBuilder("lookup")
    rows = g.embedding(g.input("ids", (3,), "i64"), 1000, 8)
    graph = training_graph(g.finish(g.one("mse_loss", rows, g.input("y", (3, 8)), name="loss")))
    assert moved(graph, "embedding") == 3 * 8 + 2 * 3 * 8 * 4
    assert moved(graph, "embedding.wgrad") == 3 * 8 + 3 * 3 * 8 * 4


def test_an_optimizer_reads_and_writes_its_states():
    graph = net()
    w = 8 * 8 * 4
    assert moved(graph, "fc.weight.update") >= 7 * w  # read w, g, m, v; write w, m, v


@settings(max_examples=60, deadline=None)
@given(graph=graphs())
def test_an_op_of_any_kind_moves_some_bytes_or_none(graph):
    for op in graph.ops:
        assert traffic_bytes(graph, op) >= 0


def test_an_unknown_kind_is_costed_by_its_bytes():
    g = GraphBuilder("odd")
    (y,) = g.op("warp", g.input("x", (2, 3)), shapes=[(5,)])
    graph = g.finish(y)
    assert traffic_bytes(graph, graph.op("warp")) == (6 + 5) * 4


@pytest.mark.parametrize("positions", [1, 7])
def test_a_recurrent_layer_reads_the_weights_of_its_state_at_every_position(positions):
    g = GraphBuilder("rnn")
    y = g.recurrent(g.input("x", (2, positions, 3)), 5, bias=False)
    graph = g.finish(y)
    weights = (20 * 3 + positions * 20 * 5) * 4  # all inputs are multiplied at once
    assert moved(graph, "lstm") == weights + (2 * positions * (3 + 5)) * 4
