"""Splits are legal: split over devices, every op gives what it gives on one.

Dispatches to experts and their combines are found by the tokens that pass between them.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import GraphError
from partita.graph import GraphBuilder, training_graph
from partita.graph.loops import loop_nest
from partita.graph.record import Call
from partita.graph.splits import (
    PARTIAL,
    REPLICATE,
    Exchange,
    TensorPlacement,
    check_split,
    communication,
    input_placement,
    output_placement,
    routed_pairs,
    splittable,
)
from partita.graph.work import flops
from partita.zoo import build
from tests.graph import reference
from tests.graph.calls import KINDS, calls, make_call
from tests.graph.executor import SPACE, run_gradient, run_split

torch = pytest.importorskip("torch")

tried = settings(max_examples=20, deadline=None)


def with_spelled_mask(call, inputs):
    """A causal attention with its mask as an input, so that a share has its part of it."""
    mask = reference.attention_mask(call) if call.kind == "attention" else None
    if mask is None:
        return call, inputs
    mask = mask if len(inputs) == 3 else mask + inputs[3]
    attrs = tuple(pair for pair in call.attrs if pair[0] not in ("causal", "window"))
    inputs = [*inputs[:3], mask]
    return Call(call.kind, attrs, tuple(tuple(x.shape) for x in inputs), call.outputs), inputs


def has_borders(call, dim):
    """Dims whose shares need borders of their neighbours; they have tests of their own."""
    adaptive = call.kind == "pool" and call.attr("output") is not None
    return call.kind in ("conv", "pool", "resize") and dim in SPACE and not adaptive


def crosses(call, dim, factor):
    """Elements that `communication` says cross, by collective."""
    sent = {"all_reduce": 0, "all_gather": 0}
    for exchange in communication(call, {dim: factor}):
        sent[exchange.collective] += exchange.elements
    return sent


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("constant", "optimizer")])
@tried
@given(data=st.data())
def test_a_split_op_computes_the_same_and_exchanges_what_it_says(kind, data):
    call = data.draw(calls(kind))
    factor = data.draw(st.sampled_from([2, 3]))
    call, inputs = with_spelled_mask(call, reference.make_inputs(call))
    expected = reference.run(call, inputs)
    for dim in splittable(call, factor):
        if has_borders(call, dim):
            continue
        if kind == "moe_dispatch" and dim not in ("e", "k"):
            continue  # shares of the batch route within themselves: same sizes, other tokens
        outputs, crossed = run_split(call, inputs, dim, factor)
        for output, right in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, right, msg=f"{dim} in {factor}")
        assert dict(crossed) == {k: n for k, n in crosses(call, dim, factor).items() if n}


DIFFERENTIABLE = [
    "linear", "matmul", "einsum", "conv", "pool", "batch_norm", "group_norm", "layer_norm",
    "rms_norm", "softmax", "attention", "embedding", "elementwise", "reduce", "concat", "split",
    "slice", "reshape", "transpose", "pad", "expand", "lstm", "gru", "moe_router", "moe_combine",
    "expert_linear", "cross_entropy", "mse_loss",
]  # fmt: skip


def backward_call(call, phase="dgrad", wrt=None):
    """The gradient of all floating inputs (or those named), reading everything."""
    ids = reference.WHOLE_INPUTS.get(call.kind)
    positions = tuple(i for i in range(len(call.inputs)) if i != ids) if wrt is None else wrt
    reads = [f"g{i}" for i in range(len(call.outputs))]
    reads += [f"i{i}" for i in range(len(call.inputs))]
    return Call(call.kind, call.attrs, call.inputs, call.outputs, phase, positions, tuple(reads))


@pytest.mark.parametrize("kind", DIFFERENTIABLE)
@tried
@given(data=st.data())
def test_a_split_gradient_is_that_of_autograd(kind, data):
    call = data.draw(calls(kind))
    factor = data.draw(st.sampled_from([2, 3]))
    call, inputs = with_spelled_mask(call, reference.make_inputs(call))
    backward = backward_call(call)
    leaves = [x.clone().requires_grad_(i in backward.wrt) for i, x in enumerate(inputs)]
    outputs = reference.run(call, leaves)
    gradients = [torch.rand_like(output) for output in outputs]
    wanted = [leaves[i] for i in backward.wrt]
    expected = torch.autograd.grad(outputs, wanted, gradients, materialize_grads=True)
    needs_sums = {stat.dim for stat in loop_nest(call).stats}  # each has a rule of its own
    for dim in splittable(backward, factor):
        if dim in needs_sums or has_borders(call, dim):
            continue
        outcome, crossed = run_gradient(backward, inputs, gradients, dim, factor)
        for gradient, right in zip(outcome, expected, strict=True):
            torch.testing.assert_close(gradient, right, msg=f"{dim} in {factor}")
        assert dict(crossed) == {k: n for k, n in crosses(backward, dim, factor).items() if n}


def rows_that_matter(values, position):
    """Which indices along a dim hold anything but zeros."""
    others = [i for i in range(values.ndim) if i != position]
    return set(torch.nonzero(values.abs().sum(others)).flatten().tolist())


def plain(call):
    """Averages instead of maxima: they depend on every element of a window."""
    attrs = tuple((k, "avg" if (k, v) == ("mode", "max") else v) for k, v in call.attrs)
    return Call(call.kind, attrs, call.inputs[:2], call.outputs)


@pytest.mark.parametrize("kind", ["conv", "pool", "resize"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_share_of_the_output_reads_its_share_of_the_input_and_a_halo(kind, data):
    call = plain(data.draw(calls(kind).filter(lambda c: not c.flag("transposed"))))
    factor = data.draw(st.sampled_from([2, 3]))
    x, *rest = reference.make_inputs(call)
    x.requires_grad_()
    (out,) = reference.run(call, [x, *rest])
    (access, *_) = loop_nest(call).inputs
    for dim in splittable(call, factor):
        at = access.position(dim)
        if dim not in SPACE or at is None or x.shape[at] % factor:
            continue
        own = x.shape[at] // factor
        for rank, share in enumerate(out.chunk(factor, at)):
            (touched,) = torch.autograd.grad(share, x, torch.rand_like(share), retain_graph=True)
            rows = rows_that_matter(touched, at)
            foreign = rows - set(range(rank * own, (rank + 1) * own))
            assert len(foreign) <= access.halo[at], f"device {rank} of {factor} along {dim}"


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_share_of_a_transposed_convolution_writes_its_share_and_a_halo(data):
    call = plain(data.draw(calls("conv").filter(lambda c: c.flag("transposed"))))
    factor = data.draw(st.sampled_from([2, 3]))
    x, w = reference.make_inputs(call)
    (access,) = loop_nest(call).outputs
    for dim in splittable(call, factor):
        at = access.position(dim)
        if dim not in SPACE or call.outputs[0][at] % factor:
            continue
        own = call.outputs[0][at] // factor
        for rank in range(factor):
            mine = torch.zeros_like(x)
            mine.chunk(factor, at)[rank].copy_(x.chunk(factor, at)[rank])
            rows = rows_that_matter(reference.run(call, [mine, w])[0], at)
            foreign = rows - set(range(rank * own, (rank + 1) * own))
            assert len(foreign) <= access.halo[at], f"device {rank} of {factor} along {dim}"


def test_a_share_of_the_keys_gives_summands_of_the_query_gradient():
    """Flash attention's backward: with the kept log-sum-exp, no statistic crosses again."""
    call = make_call("attention", [(2, 2, 3, 4), (2, 2, 6, 4), (2, 2, 6, 5)])
    q, k, v = (x.requires_grad_() for x in reference.make_inputs(call))
    (out,) = reference.run(call, [q, k, v])
    g = torch.rand_like(out)
    expected = torch.autograd.grad(out, (q, k, v), g)
    scale = 1 / math.sqrt(4)
    kept = torch.logsumexp(q @ k.mT * scale, -1, keepdim=True)
    parts = []
    for own_k, own_v in zip(k.chunk(3, 2), v.chunk(3, 2), strict=True):
        weights = (q @ own_k.mT * scale - kept).exp()
        scores = weights * (g @ own_v.mT - (g * out).sum(-1, keepdim=True)) * scale
        parts.append((scores @ own_k, scores.mT @ q, weights.mT @ g))
    nest = loop_nest(backward_call(call))
    assert [output_placement(nest, access, "t") for access in nest.outputs] == [
        PARTIAL, TensorPlacement("shard", 2), TensorPlacement("shard", 2),
    ]  # fmt: skip
    torch.testing.assert_close(sum(part[0] for part in parts), expected[0])
    torch.testing.assert_close(torch.cat([part[1] for part in parts], 2), expected[1])
    torch.testing.assert_close(torch.cat([part[2] for part in parts], 2), expected[2])
    sums = (Exchange("all_reduce", 2 * 2 * 3 * 4, 0),)
    assert communication(backward_call(call), {"t": 3}) == sums


B, S, K, N = 8, 128, 512, 2048
LINEAR = make_call("linear", [(B, S, K), (N, K), (N,)])
DGRAD = Call("linear", (), LINEAR.inputs, LINEAR.outputs, "dgrad", (0,), ("g0", "i1"))
WGRAD = Call("linear", (), LINEAR.inputs, LINEAR.outputs, "wgrad", (1, 2), ("g0", "i0"))


def test_column_parallel_layers_sum_only_the_input_gradient():
    assert communication(LINEAR, {"n": 4}) == ()
    assert communication(DGRAD, {"n": 4}) == (Exchange("all_reduce", B * S * K, 0),)
    assert communication(WGRAD, {"n": 4}) == ()


def test_row_parallel_layers_sum_only_the_output():
    assert communication(LINEAR, {"k": 4}) == (Exchange("all_reduce", B * S * N, 0),)
    assert communication(DGRAD, {"k": 4}) == ()
    assert communication(WGRAD, {"k": 4}) == ()  # every device has the whole bias gradient


def test_data_parallel_layers_sum_only_the_weight_gradients():
    assert communication(LINEAR, {"b": 4}) == ()
    assert communication(DGRAD, {"b": 4}) == ()
    assert communication(WGRAD, {"b": 4}) == (
        Exchange("all_reduce", N * K, 0),
        Exchange("all_reduce", N, 1),
    )


def test_two_dims_split_leave_a_smaller_sum():
    assert communication(LINEAR, {"b": 2, "k": 4}) == (Exchange("all_reduce", B * S * N // 2, 0),)
    assert communication(LINEAR, {"n": 8, "k": 4}) == (Exchange("all_reduce", B * S * N // 8, 0),)
    assert communication(LINEAR, {"b": 2, "k": 4}, along="b") == ()


def test_one_part_exchanges_nothing():
    assert communication(LINEAR, {"k": 1, "b": 1}) == ()


def test_a_3x3_convolution_exchanges_two_rows():
    call = make_call("conv", [(8, 64, 56, 56), (32, 64, 3, 3)], padding=[1, 1])
    assert communication(call, {"h": 4}) == (Exchange("halo", 8 * 64 * 2 * 56),)
    assert communication(call, {"h": 4, "w": 2}) == (
        Exchange("halo", 8 * 64 * 2 * 28),
        Exchange("halo", 8 * 64 * 14 * 2),
    )
    pointwise = make_call("conv", [(8, 64, 56, 56), (32, 64, 1, 1)])
    assert communication(pointwise, {"h": 4}) == ()


def test_the_gradient_of_a_3x3_convolution_adds_two_rows_to_its_neighbours():
    call = make_call("conv", [(8, 64, 56, 56), (32, 64, 3, 3)], padding=[1, 1])
    backward = Call("conv", call.attrs, call.inputs, call.outputs, "dgrad", (0,), ("g0", "i1"))
    assert communication(backward, {"h": 4}) == (Exchange("halo", 8 * 64 * 2 * 56),)


def test_batch_norm_over_split_batches_synchronises_two_numbers_per_channel():
    call = make_call("batch_norm", [(8, 64, 7, 7), (64,), (64,)], training=True)
    assert communication(call, {"b": 4}) == (Exchange("all_reduce", 128),)
    assert communication(call, {"c": 4}) == ()
    frozen = make_call("batch_norm", [(8, 64, 7, 7), (64,), (64,)], training=False)
    assert communication(frozen, {"b": 4}) == ()


def test_weight_gradients_of_norms_are_summed_over_what_is_split():
    call = make_call("group_norm", [(8, 64, 7, 7), (64,), (64,)], groups=4)
    wgrad = Call(call.kind, call.attrs, call.inputs, call.outputs, "wgrad", (1, 2), ("g0", "i0"))
    sums = (Exchange("all_reduce", 64, 0), Exchange("all_reduce", 64, 1))
    assert communication(wgrad, {"b": 4}) == sums
    assert communication(wgrad, {"h": 7}) == sums


def test_vocabulary_parallel_loss_exchanges_three_numbers_per_position():
    call = make_call("cross_entropy", [(8, 128, 50000), (8, 128)])
    assert communication(call, {"v": 4}) == (Exchange("all_reduce", 3 * 8 * 128),)
    assert communication(call, {"b": 4}) == (Exchange("all_reduce", 1, 0),)
    backward = backward_call(call)
    assert communication(backward, {"v": 4}) == ()


def test_vocabulary_parallel_lookup_sums_its_rows():
    call = make_call("embedding", [(8, 128), (50000, 512)])
    assert communication(call, {"v": 4}) == (Exchange("all_reduce", 8 * 128 * 512, 0),)


def test_experts_apart_sum_what_each_token_gets():
    call = make_call("moe_combine", [(8, 64, 16), (4, 32, 8)])
    assert communication(call, {"e": 8}) == (Exchange("all_reduce", 4 * 32 * 16, 0),)


def test_splitting_the_units_of_an_lstm_gathers_its_state_at_every_position():
    call = make_call("lstm", [(8, 10, 16), (128, 16), (128, 32)])
    assert communication(call, {"h": 4}) == (Exchange("all_gather", 8 * 10 * 32),)


def test_the_gradient_of_a_cell_depends_only_on_its_own_products():
    call = make_call("lstm_cell", [(4, 6), (4, 8), (4, 8), (32, 6), (32, 8)])
    nest = loop_nest(backward_call(call, wrt=(0, 1, 2)))
    shard = TensorPlacement("shard", 1)
    assert [output_placement(nest, a, "h") for a in nest.outputs] == [PARTIAL, PARTIAL, shard]
    assert [output_placement(nest, a, "i") for a in nest.outputs] == [shard, REPLICATE, REPLICATE]


def test_grouped_queries_split_by_key_heads():
    call = make_call("attention", [(2, 16, 32, 8), (2, 4, 32, 8), (2, 4, 32, 8)], causal=True)
    nest = loop_nest(call)
    assert (
        str(nest) == "b (h g) s d, b h t d, b h t e -> b (h g) s e | b=2 h=4 g=4 s=32 t=32 d=8 e=8"
    )
    assert splittable(call, 2) == ("b", "h", "s", "t")
    assert splittable(call, 8) == ("s", "t")  # beyond the key heads, heads do not split
    multi_query = make_call("attention", [(2, 16, 32, 8), (2, 1, 32, 8), (2, 1, 32, 8)])
    assert splittable(multi_query, 16) == ("g", "s", "t")


def test_placements_are_read_off_the_nest():
    nest = loop_nest(LINEAR)
    x, w, bias = nest.inputs
    assert [str(input_placement(a, "k")) for a in (x, w, bias)] == ["S(2)", "S(1)", "R"]
    assert [str(input_placement(a, "n")) for a in (x, w, bias)] == ["R", "S(0)", "S(0)"]
    (out,) = nest.outputs
    assert [str(output_placement(nest, out, d)) for d in ("b", "n", "k", "")] == [
        "S(0)", "S(2)", "P", "R",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["S(0)", "S(12)", "R", "P"])
def test_placements_go_to_text_and_back(text):
    assert str(TensorPlacement.parse(text)) == text


@pytest.mark.parametrize("text", ["", "S", "S()", "S(-1)", "S(x)", "S(1", "r", "S(²)"])
def test_other_texts_are_no_placement(text):
    with pytest.raises(GraphError, match=r"write S\(dim\), R or P"):
        TensorPlacement.parse(text)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ({"z": 2}, "cannot be split along 'z'; its dims are b, s, n, k"),
        ({"b": 3}, "dim 'b' of 8 cannot be split 3 ways; choose a divisor"),
        ({"b": 0}, "cannot be split 0 ways"),
    ],
)
def test_a_split_that_the_op_does_not_have_is_refused(split, words):
    with pytest.raises(GraphError) as caught:
        check_split(LINEAR, split)
    assert words in str(caught.value)


def test_kernel_positions_and_inner_dims_are_not_split():
    call = make_call("conv", [(8, 6, 9, 9), (6, 2, 3, 3)], groups=3)
    with pytest.raises(GraphError, match="cannot be split along 'r'"):
        check_split(call, {"r": 3})
    with pytest.raises(GraphError, match="cannot be split along 'n'"):
        check_split(call, {"n": 2})
    check_split(call, {"g": 3, "b": 8})


def test_an_unknown_kind_has_nothing_to_split():
    call = Call("warp", (), ((4, 4),), ((4, 4),))
    assert splittable(call) == ()
    with pytest.raises(GraphError, match="its dims are none"):
        check_split(call, {"b": 2})


def lstm_gradients(*, reads_data):
    """The calls of an LSTM's gradients, right after the input or behind a linear layer."""
    g = GraphBuilder("recurrent")
    x = g.input("x", (4, 3, 8))
    weights = [g.parameter(f"{name}.weight", (32, 8)) for name in ("in", "state")]
    y = g.one("lstm", g.linear(x, 8, "first") if reads_data else x, *weights, name="lstm")
    graph = training_graph(g.finish(y))
    return {op.phase: graph.call(op) for op in graph.ops if op.forward == "lstm"}


def test_one_of_the_gradients_of_a_recurrent_layer_exchanges_its_states():
    both, alone = lstm_gradients(reads_data=True), lstm_gradients(reads_data=False)
    gathered = (Exchange("all_gather", 4 * 3 * 8),)
    assert communication(both["dgrad"], {"h": 2})[:1] == gathered
    assert communication(both["wgrad"], {"h": 2}) == ()
    assert alone.keys() == {"wgrad"}
    assert communication(alone["wgrad"], {"h": 2}) == gathered


def test_a_weight_gradient_that_goes_back_through_the_steps_itself_computes_more():
    both, alone = lstm_gradients(reads_data=True), lstm_gradients(reads_data=False)
    assert flops(alone["wgrad"]) - flops(both["wgrad"]) == 4 * 3 * 2 * 32 * 8


def names(graph):
    return [(dispatch.name, combine.name) for dispatch, combine in routed_pairs(graph)]


def routed(g, x, gates, name):
    return g.one("moe_dispatch", x, gates, name=f"{name}.dispatch", top_k=1)


def given_back(g, y, gates, name):
    return g.one("moe_combine", y, gates, name=f"{name}.combine", top_k=1)


def gated(g):
    x = g.input("x", (4, 6))
    return x, g.one("moe_router", x, g.parameter("gate.weight", (2, 6)), name="gate", top_k=1)


def test_every_layer_of_experts_is_a_pair():
    pairs = names(training_graph(build("moe@32", batch=4)))
    assert len(pairs) == 12
    assert all(d.removesuffix("dispatch") == c.removesuffix("combine") for d, c in pairs)


def test_a_model_without_experts_has_none():
    assert names(build("gpt2@32", batch=2)) == []


def test_layers_that_share_their_gates_are_told_apart_by_their_tokens():
    g = GraphBuilder("shared")
    x, gates = gated(g)
    first = given_back(g, g.relu(routed(g, x, gates, "a")), gates, "a")
    second = given_back(g, g.relu(routed(g, first, gates, "b"), name="r"), gates, "b")
    assert names(g.finish(second)) == [("a.dispatch", "a.combine"), ("b.dispatch", "b.combine")]


def test_a_combine_of_what_two_dispatches_sent_belongs_to_both():
    g = GraphBuilder("two")
    x, gates = gated(g)
    y = g.add(routed(g, x, gates, "a"), routed(g, x, gates, "b"))
    graph = g.finish(given_back(g, y, gates, "both"))
    assert names(graph) == [("a.dispatch", "both.combine"), ("b.dispatch", "both.combine")]


def test_places_that_the_model_is_given_belong_to_no_dispatch():
    g = GraphBuilder("given")
    _, gates = gated(g)
    graph = g.finish(given_back(g, g.input("y", (2, 2, 6)), gates, "one"))
    assert names(graph) == []
