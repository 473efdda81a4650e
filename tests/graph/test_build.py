"""The builder names, scopes and shapes what it is told to write down."""

import pytest

from partita.errors import GraphError
from partita.graph import GraphBuilder
from partita.graph.files import check_graph
from partita.graph.work import flops


def total(graph, kinds):
    return sum(flops(graph.call(op)) for op in graph.ops if op.kind in kinds)


def test_layers_are_named_as_modules_and_in_their_scope():
    g = GraphBuilder("net")
    x = g.input("x", (2, 8))
    with g.scope("layers.0"):
        with g.scope("mlp"):
            x = g.linear(x, 4, "fc")
        x = g.relu(x)
    graph = g.finish(x)
    assert [op.name for op in graph.ops] == ["layers.0.mlp.fc", "layers.0.relu"]
    assert [op.scope for op in graph.ops] == ["layers.0.mlp", "layers.0"]
    assert [p.name for p in graph.parameters] == ["layers.0.mlp.fc.weight", "layers.0.mlp.fc.bias"]


def test_a_name_that_is_taken_gets_a_number():
    g = GraphBuilder("net")
    x = g.relu(g.relu(g.relu(g.input("relu", (2,)))))
    assert [op.name for op in g.finish(x).ops] == ["relu_1", "relu_2", "relu_3"]


def test_several_outputs_are_numbered():
    g = GraphBuilder("net")
    parts = g.split(g.input("x", (2, 6)), (1, 2, 3))
    assert [(t.name, t.shape) for t in parts] == [
        ("split:0", (2, 1)), ("split:1", (2, 2)), ("split:2", (2, 3)),
    ]  # fmt: skip


def test_a_parameter_named_twice_is_refused():
    g = GraphBuilder("net")
    x = g.linear(g.input("x", (2, 4)), 4, "fc")
    with pytest.raises(GraphError, match=r"tensor 'fc\.weight': stands twice; give the layer"):
        g.linear(x, 4, "fc")


def test_a_layer_that_does_not_fit_names_its_op():
    g = GraphBuilder("net")
    with pytest.raises(GraphError, match="op 'matmul': matmul of shapes"):
        g.matmul(g.input("a", (2, 3)), g.input("b", (4, 5)))


def test_an_unknown_kind_needs_its_shapes():
    g = GraphBuilder("net")
    x = g.input("x", (2, 3))
    with pytest.raises(GraphError, match="give the shapes of its outputs"):
        g.op("warp", x)
    (y,) = g.op("warp", x, shapes=[(5,)], dtype="i32", speed=2.5)
    assert (y.shape, y.dtype) == ((5,), "i32")
    assert g.finish(y).op("warp").attr("speed") == 2.5


def test_results_have_the_type_of_the_first_floating_input():
    g = GraphBuilder("net", "bf16")
    x = g.input("x", (2, 3))
    chosen = g.elementwise("where", g.input("mask", (2, 3), "bool"), x, x)
    assert chosen.dtype == "bf16"
    assert g.embedding(g.input("ids", (4,), "i64"), 10, 3).dtype == "bf16"
    assert g.reshape(g.input("more", (4,), "i64"), (2, 2)).dtype == "i64"


@pytest.mark.parametrize("layout", ["heads first", "features last"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention_spelled_out_has_the_shape_and_products_of_the_fused(layout, kv_heads):
    made = []
    for fused in (True, False):
        g = GraphBuilder("attention")
        if layout == "heads first":
            q = g.input("q", (2, 8, 16, 4))
            k, v = (g.input(name, (2, kv_heads, 16, 4)) for name in "kv")
            y = g.attention(q, k, v, fused=fused)
        else:
            q = g.input("q", (2, 16, 32))
            k, v = (g.input(name, (2, 16, kv_heads * 4)) for name in "kv")
            y = g.attention(q, k, v, 8, kv_heads=kv_heads, fused=fused)
        made.append((y.shape, g.finish(y)))
        check_graph(made[-1][1])
    (fused_shape, fused), (spelled_shape, spelled) = made
    assert fused_shape == spelled_shape
    softmax = 2 * 8 * 16 * 16 * 6
    assert total(fused, {"attention"}) - softmax == total(spelled, {"matmul"})


def test_a_mask_is_spelled_out_where_there_is_one():
    g = GraphBuilder("attention")
    q, k, v = (g.input(name, (1, 2, 4, 4)) for name in "qkv")
    graph = g.finish(g.attention(q, k, v, causal=True, fused=False))
    assert [op.attr("fn", op.kind) for op in graph.ops] == [
        "matmul", "scale", "mask", "softmax", "matmul",
    ]  # fmt: skip


def test_convolutions_pools_and_norms_have_the_weights_of_their_settings():
    g = GraphBuilder("images")
    x = g.input("x", (2, 6, 9, 9))
    y = g.conv(x, 12, 3, stride=2, padding=1, groups=3, name="grouped")
    up = g.conv(y, 4, (2, 2), stride=2, transposed=True, bias=False, name="up")
    z = g.global_pool(g.pool(g.norm(up, "group_norm", groups=2), 2), 1)
    flat = g.linear(g.flatten(z), 3, "head")
    graph = g.finish(flat)
    assert {p.name: p.shape for p in graph.parameters} == {
        "grouped.weight": (12, 2, 3, 3), "grouped.bias": (12,), "up.weight": (12, 4, 2, 2),
        "norm.weight": (4,), "norm.bias": (4,), "head.weight": (3, 4), "head.bias": (3,),
    }  # fmt: skip
    assert (y.shape, up.shape, z.shape) == ((2, 12, 5, 5), (2, 4, 10, 10), (2, 4, 1, 1))
    check_graph(graph)


def test_recurrent_layers_have_the_weights_of_torch():
    g = GraphBuilder("rnn")
    y = g.recurrent(g.input("x", (2, 5, 3)), 4, "gru", bidirectional=True)
    assert y.shape == (2, 5, 8)
    assert [(p.name, p.shape) for p in g.finish(y).parameters] == [
        ("gru.weight_ih", (24, 3)), ("gru.weight_hh", (24, 4)),
        ("gru.bias_ih", (24,)), ("gru.bias_hh", (24,)),
    ]  # fmt: skip
