"""Training graphs: every parameter gets one gradient, from what was kept of the forward."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from partita.errors import GraphError
from partita.graph import GraphBuilder, Op, Tensor, training_graph
from partita.graph.backward import OPTIMIZER_STATES, forward_part, saved_by
from partita.graph.files import check_graph
from partita.graph.record import Graph
from partita.graph.work import flops
from partita.zoo import build
from tests.graph.strategies import graphs


def mlp(layers=3, width=16, bias=True):
    g = GraphBuilder("mlp")
    x = g.input("x", (8, width))
    for i in range(layers):
        x = g.linear(x, width, f"fc{i}", bias=bias)
        x = g.relu(x, name=f"relu{i}") if i < layers - 1 else x
    return g.finish(g.one("mse_loss", x, g.input("y", (8, width)), name="loss"))


def total(graph, *phases, kind=None):
    ops = [op for op in graph.ops if op.phase in phases and kind in (None, op.kind)]
    return sum(flops(graph.call(op)) for op in ops)


@settings(max_examples=60, deadline=None)
@given(graph=graphs(hostile=False, training=True))
def test_every_parameter_gets_exactly_one_gradient(graph):
    check_graph(graph)
    for parameter in graph.parameters:
        gradient = graph.tensor(f"{parameter.name}.grad")
        assert gradient.role == "gradient"
        assert (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype)
        users = [op for op in graph.consumers(parameter.name) if op.phase == "update"]
        assert [op.inputs[1] for op in users] == [gradient.name] * len(users)
        assert len(users) <= 1


@settings(max_examples=60, deadline=None)
@given(graph=graphs(hostile=False, training=True))
def test_data_and_weight_gradients_are_apart(graph):
    for op in graph.ops:
        sources = [n.removesuffix(".grad") for n in op.outputs if n.endswith(".grad")]
        roles = {graph.tensor(name).role for name in sources}
        if op.phase == "wgrad":
            assert roles <= {"parameter"}
        if op.phase == "dgrad":
            assert "parameter" not in roles
        if op.forward:
            assert op.name == f"{op.forward}.{op.phase}"


def test_backward_costs_twice_the_forward_less_the_first_data_gradient():
    graph = training_graph(mlp(3))
    layer = 2 * 8 * 16 * 16
    assert total(graph, "forward", kind="linear") == 3 * layer
    assert total(graph, "wgrad", kind="linear") == 3 * layer
    assert total(graph, "dgrad", kind="linear") == 2 * layer


def test_the_first_layer_has_no_data_gradient():
    names = {op.name for op in training_graph(mlp(2)).ops}
    assert "fc0.wgrad" in names
    assert "fc0.dgrad" not in names
    assert "fc1.dgrad" in names


def test_gradients_read_what_their_kind_keeps():
    graph = training_graph(mlp(2))
    assert graph.op("loss.dgrad").inputs == ("loss.grad", "fc1", "y")
    assert graph.op("fc1.dgrad").inputs == ("fc1.grad", "fc1.weight")
    assert graph.op("fc1.wgrad").inputs == ("fc1.grad", "relu0")
    assert graph.op("fc1.wgrad").outputs == ("fc1.weight.grad", "fc1.bias.grad")
    assert graph.op("relu0.dgrad").inputs == ("relu0.grad", "relu0")


def test_the_gradient_starts_from_a_given_one():
    seed = training_graph(mlp(1)).tensor("loss.grad")
    assert (seed.role, seed.shape) == ("input", ())


def tied():
    g = GraphBuilder("tied")
    table = g.parameter("wte", (10, 4))
    x = g.lookup(g.input("ids", (2, 3), "i64"), table)
    logits = g.one("linear", g.relu(x), table, name="head")
    return g.finish(g.cross_entropy(logits, g.input("y", (2, 3), "i64")))


def test_a_tied_weight_sums_its_gradients_once():
    graph = training_graph(tied())
    add = graph.producer("wte.grad")
    assert add is not None
    assert (add.kind, add.phase, add.attr("fn")) == ("elementwise", "wgrad", "add")
    assert set(add.inputs) == {"wte.grad.head", "wte.grad.embedding"}
    assert [op.name for op in graph.ops if op.phase == "update"] == ["wte.update"]


def test_a_tensor_read_twice_sums_its_gradients():
    g = GraphBuilder("residual")
    x = g.linear(g.input("x", (2, 4)), 4, "a")
    out = g.add(x, g.relu(g.linear(x, 4, "b")))
    graph = training_graph(g.finish(g.one("mse_loss", out, g.input("y", (2, 4)))))
    assert set(graph.op("a.grad.sum").inputs) == {"a.grad.add", "a.grad.b"}
    assert graph.op("a.wgrad").inputs == ("a.grad", "x")


def test_a_reader_that_does_not_lead_to_the_loss_gives_no_gradient():
    g = GraphBuilder("side")
    x = g.linear(g.input("x", (2, 4)), 4, "a")
    side = g.relu(x, name="side")
    loss = g.one("mse_loss", x, g.input("y", (2, 4)), name="loss")
    graph = training_graph(g.finish(loss, side))
    assert graph.tensor("a.grad").role == "gradient"
    assert not [op for op in graph.ops if op.name.startswith(("side.d", "a.grad.sum"))]


def test_a_tensor_multiplied_with_itself_has_one_gradient():
    g = GraphBuilder("square")
    x = g.linear(g.input("x", (2, 4)), 4, "a")
    loss = g.one("mse_loss", g.mul(x, x), g.input("y", (2, 4)))
    graph = training_graph(g.finish(loss))
    assert graph.op("mul.dgrad").outputs == ("a.grad",)
    assert graph.op("mul.dgrad").inputs == ("mul.grad", "a")


def test_a_factor_reads_the_others():
    g = GraphBuilder("scale")
    scale = g.parameter("gamma", (4,))
    x = g.linear(g.input("x", (2, 4)), 4, "a")
    loss = g.one("mse_loss", g.mul(scale, x), g.input("y", (2, 4)))
    graph = training_graph(g.finish(loss))
    assert graph.op("mul.dgrad").inputs == ("mul.grad", "gamma")
    assert graph.op("mul.wgrad").inputs == ("mul.grad", "a")


def test_adding_and_moving_keep_nothing():
    g = GraphBuilder("positions")
    table = g.parameter("positions", (3, 4))
    x = g.linear(g.input("x", (2, 3, 4)), 4, "a")
    y = g.transpose(g.add(x, table), (0, 2, 1))
    loss = g.one("mse_loss", y, g.input("y", (2, 4, 3)))
    graph = training_graph(g.finish(loss))
    assert graph.op("add.wgrad").inputs == ("add.grad",)
    assert graph.op("add.dgrad").inputs == ("add.grad",)
    assert graph.op("transpose.dgrad").inputs == ("transpose.grad",)


@pytest.mark.parametrize(
    ("kind", "attrs", "phase", "inputs", "outputs"),
    [
        ("conv", {}, "dgrad", (1,), False),
        ("conv", {}, "wgrad", (0,), False),
        ("layer_norm", {}, "dgrad", (0, 1), False),
        ("softmax", {}, "dgrad", (), True),
        ("attention", {}, "dgrad", "all", True),
        ("pool", {"mode": "max"}, "dgrad", "all", False),
        ("pool", {"mode": "avg"}, "dgrad", (), False),
        ("reduce", {"fn": "mean"}, "dgrad", (), False),
        ("reduce", {"fn": "max"}, "dgrad", "all", True),
        ("embedding", {}, "wgrad", (0,), False),
        ("lstm", {}, "wgrad", "all", True),
        ("gru_cell", {}, "wgrad", "all", True),
        ("elementwise", {"fn": "gelu"}, "dgrad", "all", False),
        ("elementwise", {"fn": "tanh"}, "dgrad", (), True),
        ("elementwise", {"fn": "add"}, "dgrad", (), False),
        ("elementwise", {"fn": "nobody knows"}, "dgrad", "all", True),
        ("warp", {}, "dgrad", "all", True),
    ],
)
def test_what_is_kept_per_kind(kind, attrs, phase, inputs, outputs):
    saved = saved_by(Op("o", kind, ("x", "w"), ("o",), tuple(attrs.items())), phase)
    assert (saved.inputs, saved.outputs) == (inputs, outputs)


@pytest.mark.parametrize("rule", sorted(OPTIMIZER_STATES))
def test_an_optimizer_has_the_states_of_its_rule(rule):
    graph = training_graph(mlp(1, bias=False), rule)
    update = graph.op("fc0.weight.update")
    states = [f"fc0.weight.{rule}.{i}" for i in range(OPTIMIZER_STATES[rule])]
    assert update.inputs == ("fc0.weight", "fc0.weight.grad", *states)
    assert all(graph.tensor(name).role == "state" for name in states)
    assert (update.attr("rule"), update.phase) == (rule, "update")


def test_mixed_precision_keeps_the_weights_in_full():
    g = GraphBuilder("half", "bf16")
    x = g.linear(g.input("x", (2, 4)), 4, "a", bias=False)
    graph = training_graph(g.finish(g.one("mse_loss", x, g.input("y", (2, 4)))), "momentum")
    states = graph.op("a.weight.update").inputs[2:]
    assert states == ("a.weight.momentum.0", "a.weight.master")
    assert {graph.tensor(name).dtype for name in states} == {"f32"}
    assert graph.tensor("a.weight.grad").dtype == "bf16"


def test_without_an_optimizer_nothing_is_updated():
    graph = training_graph(mlp(2), None)
    assert not [op for op in graph.ops if op.phase == "update"]
    assert not [tensor for tensor in graph.tensors if tensor.role == "state"]


def test_an_op_with_several_outputs_names_the_gradients_it_has():
    g = GraphBuilder("parts")
    x = g.linear(g.input("x", (2, 4)), 4, "a")
    _, right = g.split(x, (1, 3))
    graph = training_graph(g.finish(g.one("mse_loss", right, g.input("y", (2, 3)))))
    backward = graph.op("split.dgrad")
    assert backward.attr("grads") == (1,)
    assert graph.call(backward).reads == ("g1",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: training_graph(training_graph(g)), "has a backward pass already"),
        (lambda g: training_graph(Graph(g.name, g.tensors, g.ops)), "no output to differentiate"),
        (lambda g: training_graph(g, "magic"), "unknown optimizer 'magic'; use one of sgd"),
        (lambda g: training_graph(g, "adam", "f31"), "unknown dtype 'f31'"),
    ],
)
def test_what_cannot_be_trained_is_refused(change, words):
    with pytest.raises(GraphError) as caught:
        change(mlp(1))
    assert words in str(caught.value)


def test_a_model_without_parameters_has_nothing_to_train():
    x = Tensor("x", (2,), role="input")
    op = Op("y", "elementwise", ("x",), ("y",), (("fn", "relu"),))
    with pytest.raises(GraphError, match="no parameter influences the output 'y'"):
        training_graph(Graph("still", (x, Tensor("y", (2,))), (op,), ("y",)))


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (("best", "fc0"), "'best' (i64) has none; return what is trained first, the loss or the "
         "logits: 'fc0', which is output 2 of 2"),
        (("best",), "'best' (i64) has none; return the loss, or the logits that it is made of"),
    ],
)  # fmt: skip
def test_whole_numbers_given_first_are_refused_with_what_to_return(outputs, says):
    graph = mlp(1)
    logits = next(op.outputs[0] for op in graph.ops if op.name == "fc0")
    best = Tensor("best", (8,), "i64")
    graph = replace(
        graph,
        tensors=(*graph.tensors, best),
        ops=(*graph.ops, Op("best", "argmax", (logits,), ("best",))),
        outputs=tuple(logits if name == "fc0" else name for name in outputs),
    )
    with pytest.raises(GraphError) as caught:
        training_graph(graph)
    assert says in str(caught.value).replace(repr(logits), "'fc0'")
    if len(outputs) > 1:
        assert training_graph(replace(graph, outputs=(logits, "best"))).is_training


def test_the_forward_part_of_a_training_graph_is_the_graph_it_was_made_from():
    graph = build("alexnet", batch=2)
    part = forward_part(training_graph(graph))
    assert [op.name for op in part.ops] == [op.name for op in graph.ops]
    assert {tensor.name for tensor in part.tensors} == {tensor.name for tensor in graph.tensors}
    assert part.outputs == graph.outputs
    assert forward_part(graph) is graph
