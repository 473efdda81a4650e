"""An op on a mesh gives what it gives in one piece, and does not where an exchange is missing."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import ProgramError
from partita.graph.backward import training_graph
from partita.graph.loops import loop_nest
from partita.graph.record import Graph, Op, Tensor
from partita.graph.splits import placements
from partita.plans import Axis
from tests.graph.calls import KINDS, calls, make_call

torch = pytest.importorskip("torch")
from partita.capture.eager import FOLDED, RULES, UNARY  # noqa: E402
from partita.run.local.ops import backward, forward, needs_exchange  # noqa: E402
from partita.run.local.shards import places, shard, whole  # noqa: E402
from tests.run.local.whole_ops import make_case, ops_of, run_on_mesh  # noqa: E402

COMPUTED = [kind for kind in KINDS if kind not in ("constant", "optimizer")]
AXES = [
    Axis("x", 2), Axis("x", 3), Axis("x", 2, (1, 2)), Axis("x", 2, (3, 1)), Axis("x", 3, (1, 2, 1)),
]  # fmt: skip
tried = settings(max_examples=25, deadline=None)


def legal_dims(call, axes):
    """Every way to give each axis a dim that it cuts into whole elements, or none."""
    dims = [dim for dim in loop_nest(call).dims if not dim.whole]
    ways = [()]
    for axis in axes:
        longer = [(*way, "") for way in ways]
        for way in ways:
            for dim in dims:
                cut = [a.parts for a, d in zip(axes, way, strict=False) if d == dim.name]
                if dim.extent % (math.prod(cut) * axis.parts) == 0:
                    longer.append((*way, dim.name))
        ways = longer
    return ways


def case_or_skip(call, dims, axes):
    """Values for a call; those without leading dims PyTorch's rules do not compute."""
    try:
        return make_case(call, dims, axes)
    except (ValueError, IndexError):
        return None


def check(call, dims, axes):
    case = case_or_skip(call, dims, axes)
    if case is None:
        return
    everywhere = tuple(range(len(axes)))
    for name in ops_of(case):
        values, error = run_on_mesh(case, name, dims, axes, everywhere)
        assert error < 1e-9, f"replicas of {name} differ along {dims}"
        for tensor, value in values.items():
            right = case.values[tensor]
            torch.testing.assert_close(value, right, msg=lambda m: f"{tensor} {dims}: {m}")  # noqa: B023


@pytest.mark.parametrize("kind", COMPUTED)
@tried
@given(data=st.data())
def test_an_op_on_one_axis_gives_what_the_whole_op_gives(kind, data):
    call = data.draw(calls(kind))
    axes = (data.draw(st.sampled_from(AXES)),)
    for dims in legal_dims(call, axes):
        check(call, dims, axes)


@pytest.mark.parametrize("kind", COMPUTED)
@tried
@given(data=st.data())
def test_an_op_on_two_axes_gives_what_the_whole_op_gives(kind, data):
    call = data.draw(calls(kind))
    first, second = data.draw(st.sampled_from(AXES)), data.draw(st.sampled_from(AXES))
    axes = (first, Axis("y", second.size, second.weights))
    ways = legal_dims(call, axes)
    busiest = max(sum(map(bool, way)) for way in ways)
    best = [way for way in ways if sum(map(bool, way)) == busiest]
    check(call, data.draw(st.sampled_from(best)), axes)


FUNCTIONS = [(name, 1) for name in sorted(UNARY)] + [(name, 2) for name in sorted(FOLDED)]


@pytest.mark.parametrize(("fn", "count"), FUNCTIONS)
def test_every_elementwise_function_is_split_along_every_dim(fn, count):
    call = make_call("elementwise", [(4, 6, 6)] * count, fn=fn)
    for axes in ((Axis("x", 2),), (Axis("x", 2), Axis("y", 3))):
        for dims in legal_dims(call, axes):
            check(call, dims, axes)


NEEDY = [
    (make_call("conv", [(2, 2, 6, 6), (2, 2, 3, 3)], padding=[1, 1]), "h"),
    (make_call("conv", [(2, 2, 6, 6), (2, 2, 3, 3)], padding=[1, 1], transposed=True), "w"),
    (make_call("pool", [(2, 2, 6, 6)], kernel=[3, 3], stride=[1, 1], padding=[1, 1], mode="avg"),
     "h"),
    (make_call("pool", [(2, 2, 8, 6)], kernel=[3, 3], stride=[1, 1], padding=[1, 1], mode="max"),
     "h"),
    (make_call("resize", [(2, 2, 4, 4)], output=[8, 8]), "w"),
    (make_call("batch_norm", [(4, 2, 3, 4), (2,), (2,)], training=True), "b"),
    (make_call("batch_norm", [(4, 2, 3, 4), (2,), (2,)], training=True), "w"),
    (make_call("group_norm", [(2, 4, 3), (4,), (4,)], groups=1), "c"),
    (make_call("group_norm", [(2, 4, 4), (4,), (4,)], groups=2), "w"),
    (make_call("layer_norm", [(2, 3, 4), (4,), (4,)], dims=1), "c"),
    (make_call("rms_norm", [(2, 3, 4), (4,)], dims=1), "c"),
    (make_call("softmax", [(2, 3, 4)], axis=-1), "c"),
    (make_call("attention", [(2, 2, 4, 3), (2, 2, 4, 3), (2, 2, 4, 3)], causal=True), "t"),
    (make_call("attention", [(2, 4, 6), (2, 4, 6), (2, 4, 6)], heads=2, kv_heads=2), "t"),
    (make_call("reduce", [(2, 6)], fn="max", axes=[1]), "c"),
    (make_call("lstm", [(2, 3, 4), (16, 4), (16, 4), (16,), (16,)]), "h"),
    (make_call("gru", [(2, 3, 4), (12, 4), (12, 4), (12,), (12,)]), "h"),
    (make_call("lstm", [(2, 3, 4), (16, 4), (16, 4)]), "i"),
    (make_call("lstm_cell", [(2, 4), (2, 4), (2, 4), (16, 4), (16, 4)]), "i"),
    (make_call("lstm_cell", [(2, 4), (2, 4), (2, 4), (16, 4), (16, 4)]), "k"),
    (make_call("gru_cell", [(2, 4), (2, 4), (12, 4), (12, 4)]), "i"),
    (make_call("moe_router", [(2, 3, 4), (4, 4)]), "k"),
    (make_call("moe_router", [(2, 3, 4), (4, 4)]), "e"),
    (make_call("cross_entropy", [(2, 3, 4), (2, 3)]), "v"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "dim"), NEEDY, ids=lambda x: x if isinstance(x, str) else x.kind)
@pytest.mark.parametrize("axis", [Axis("x", 2), Axis("x", 2, (1, 1))], ids=["even", "weighted"])
def test_without_a_needed_exchange_the_numbers_are_wrong(call, dim, axis):
    case = make_case(call)
    needy = [n for n in ops_of(case) if needs_exchange(case.graph.call(case.graph.op(n)), dim)]
    assert "op" in needy
    for name in needy:
        outcome, error = run_on_mesh(case, name, (dim,), (axis,), ())
        apart = [not torch.allclose(v, case.values[n], atol=1e-6) for n, v in outcome.items()]
        assert any(apart) or error > 1e-6, name
        check(call, (dim,), (axis,))


def test_an_exchange_along_one_of_two_axes_does_not_do():
    call = make_call("softmax", [(2, 8)], axis=-1)
    case, axes = make_case(call), (Axis("x", 2), Axis("y", 2))
    for exchanged in ((), (0,), (1,)):
        outcome, _ = run_on_mesh(case, "op", ("c", "c"), axes, exchanged)
        assert not torch.allclose(outcome["y0"], case.values["y0"])
    outcome, _ = run_on_mesh(case, "op", ("c", "c"), axes, (0, 1))
    torch.testing.assert_close(outcome["y0"], case.values["y0"])


def test_a_split_reduction_leaves_partial_sums_with_the_bias_in_one_of_them():
    call = make_call("linear", [(3, 4), (2, 4), (2,)])
    case, axes = make_case(call), (Axis("x", 2),)
    x, w, b = (case.values[f"x{i}"] for i in range(3))
    halves = [(x[:, :2], w[:, :2], b), (x[:, 2:], w[:, 2:], b)]
    (first,), (second,) = forward(case.graph, case.graph.op("op"), ("k",), axes, halves)
    torch.testing.assert_close(first, x[:, :2] @ w[:, :2].T + b)
    torch.testing.assert_close(second, x[:, 2:] @ w[:, 2:].T)


def test_a_share_of_the_rows_gives_its_part_of_the_mean_loss():
    call = make_call("cross_entropy", [(4, 5), (4,)])
    case, axes = make_case(call), (Axis("x", 2, (1, 3)),)
    logits, targets = case.values["x0"], case.values["x1"]
    parts = [(logits[:1], targets[:1]), (logits[1:], targets[1:])]
    (first,), (second,) = forward(case.graph, case.graph.op("op"), ("b",), axes, parts)
    loss = torch.nn.functional.cross_entropy
    torch.testing.assert_close(first, loss(logits[:1], targets[:1]) / 4)
    torch.testing.assert_close(second, loss(logits[1:], targets[1:]) * 3 / 4)


def test_ranks_that_repeat_an_op_use_their_own_copies():
    """Copies that differ give results that differ: nothing is taken from another rank."""
    case = make_case(make_call("elementwise", [(3,)], fn="relu"))
    x = case.values["x0"]
    op = case.graph.op("op")
    (first,), (second,) = forward(case.graph, op, ("",), (Axis("x", 2),), [(x,), (x + 1,)])
    torch.testing.assert_close(first, x.relu())
    torch.testing.assert_close(second, (x + 1).relu())


def test_a_shard_of_another_layout_is_refused():
    case = make_case(make_call("linear", [(3, 4), (2, 4)]))
    x, w = case.values["x0"], case.values["x1"]
    wrong = [(x, w[:, :2]), (x, w[:, 2:])]
    with pytest.raises(ProgramError) as caught:
        forward(case.graph, case.graph.op("op"), ("k",), (Axis("x", 2),), wrong)
    assert str(caught.value) == (
        "op 'op': rank 0 reads 'x0' as a shard of [3, 4], and the split of the op asks for "
        "[3, 2]; convert the tensor to the layout that the op reads"
    )


def test_a_shard_of_one_element_is_not_stretched_to_many():
    case = make_case(make_call("elementwise", [(4,)], fn="relu"))
    one = case.values["x0"][:1]
    with pytest.raises(ProgramError, match=r"as a shard of \[1\]"):
        forward(case.graph, case.graph.op("op"), ("b",), (Axis("x", 2),), [(one,), (one,)])


def one_op(kind, shape, name="op", **attrs):
    """A training graph: parameter, op of a kind on it, a sum."""
    tensors = (Tensor("w", shape, "f32", "parameter"), Tensor("y", shape), Tensor("loss", ()))
    fixed = tuple(sorted(attrs.items()))
    ops = (Op(name, kind, ("w",), ("y",), fixed), Op("sum", "reduce", ("y",), ("loss",)))
    return training_graph(Graph("one", tensors, ops, ("loss",)), optimizer=None)


def test_all_ranks_and_the_backward_drop_the_same_numbers():
    graph, axes = one_op("elementwise", (4, 6), name="drop", fn="dropout"), (Axis("x", 2),)
    x = torch.rand(4, 6, dtype=torch.float64) + 1
    layout = placements(graph.call(graph.op("drop")), ("c",))[0][0]
    own = [(shard(x, layout, axes, place),) for place in places(axes)]
    (alone,) = forward(graph, graph.op("drop"), (), (), [(x,)], microbatch=3)[0]
    parts = forward(graph, graph.op("drop"), ("c",), axes, own, microbatch=3)
    joined = whole([p[0] for p in parts], (4, 6), layout, axes)
    torch.testing.assert_close(joined, alone)
    dropped = alone == 0
    assert 0 < int(dropped.sum()) < 12
    back = graph.op("drop.wgrad")
    (gradient,) = backward(graph, back, (), (), [(torch.ones_like(x), alone)], microbatch=3)[0]
    assert ((gradient == 0) == dropped).all()
    (other,) = forward(graph, graph.op("drop"), (), (), [(x,)], microbatch=4)[0]
    assert ((other == 0) != dropped).any()


def test_dropout_does_nothing_in_a_graph_that_does_not_train():
    tensors = (Tensor("x", (50,), "f32", "input"), Tensor("y", (50,)))
    graph = Graph("one", tensors, (Op("d", "elementwise", ("x",), ("y",), (("fn", "dropout"),)),))
    x = torch.rand(50, dtype=torch.float64)
    assert torch.equal(forward(graph, graph.op("d"), (), (), [(x,)])[0][0], x)


def test_a_tensor_that_stands_twice_gets_both_gradients():
    tensors = (Tensor("w", (3,), "f32", "parameter"), Tensor("y", (3,)), Tensor("loss", ()))
    ops = (
        Op("square", "elementwise", ("w", "w"), ("y",), (("fn", "mul"),)),
        Op("sum", "reduce", ("y",), ("loss",)),
    )
    graph = training_graph(Graph("square", tensors, ops, ("loss",)), optimizer=None)
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    back = graph.op("square.wgrad")
    assert graph.call(back).reads == ("g0", "i0")
    (gradient,) = backward(graph, back, (), (), [(torch.ones(3).double(), w)])[0]
    torch.testing.assert_close(gradient, 2 * w)


def test_a_gradient_of_something_that_is_not_read_is_no_number():
    """A linear layer with computed weights: its data gradient would have to read the input."""
    case = make_case(make_call("linear", [(3, 4), (2, 4)]))
    back = replace(case.graph.op("op.dgrad"), attrs=(("grads", (0,)), ("wrt", (0, 1))))
    outputs = ("x0.grad", "w.grad")
    tensors = (*(t for t in case.graph.tensors if t.name != "x1.grad"), Tensor("w.grad", (2, 4)))
    ops = tuple(op for op in case.graph.ops if op.phase == "forward")
    given = tuple(t if t.name != "y0.grad" else replace(t, role="input") for t in tensors)
    used = {n for op in ops for n in (*op.inputs, *op.outputs)} | {"y0.grad", *outputs}
    graph = Graph(
        "unread",
        tuple(t for t in given if t.name in used),
        (*ops, replace(back, outputs=outputs)),
        ("loss",),
    )
    values = [(case.values["y0.grad"], case.values["x1"])]
    (x_grad, w_grad), *_ = backward(graph, graph.op("op.dgrad"), (), (), values)
    torch.testing.assert_close(x_grad, case.values["x0.grad"])
    assert w_grad.isnan().all()


def test_a_sum_of_gradients_adds_shards_as_they_lie():
    tensors = (Tensor("w", (4,), "f32", "parameter"), Tensor("a", (4,)), Tensor("b", (4,)),
               Tensor("y", (4,)), Tensor("loss", ()))  # fmt: skip
    ops = (
        Op("a", "elementwise", ("w",), ("a",), (("fn", "relu"),)),
        Op("b", "elementwise", ("w",), ("b",), (("fn", "tanh"),)),
        Op("y", "elementwise", ("a", "b"), ("y",), (("fn", "add"),)),
        Op("sum", "reduce", ("y",), ("loss",)),
    )
    graph = training_graph(Graph("two", tensors, ops, ("loss",)), optimizer=None)
    parts = [(torch.full((2,), 1.0), torch.full((2,), 2.0)), (torch.zeros(2), torch.ones(2))]
    outcome = backward(graph, graph.op("w.grad.sum"), ("",), (Axis("x", 2),), parts)
    assert [f[0].tolist() for f in outcome] == [[3.0, 3.0], [1.0, 1.0]]


def test_each_rank_has_its_share_of_a_constant():
    tensors = (
        Tensor("table", (5, 2), "f32", "parameter"), Tensor("ids", (6,), "i64"), Tensor("y", (6, 2))
    )  # fmt: skip
    ops = (
        Op("ids", "constant", (), ("ids",), (("shape", (6,)),)),
        Op("look", "embedding", ("ids", "table"), ("y",)),
    )
    graph = Graph("positions", tensors, ops, ("y",))
    outcome = forward(graph, graph.op("ids"), ("b",), (Axis("x", 2, (1, 2)),), [(), ()])
    assert [f[0].tolist() for f in outcome] == [[0, 1], [2, 3, 4, 0]]


def test_a_share_of_the_batch_routes_its_own_tokens():
    call = make_call("moe_dispatch", [(4, 3), (4, 2)], top_k=1)
    x, gates = torch.arange(12.0).double().reshape(4, 3), torch.zeros(4, 2).double()
    gates[:, 0] = torch.tensor([0.9, 0.8, 0.1, 0.2])  # the whole batch would choose rows 0 and 1
    gates[:, 1] = torch.tensor([0.3, 0.4, 0.6, 0.5])
    case = make_case(call)
    parts = [(x[:2], gates[:2]), (x[2:], gates[2:])]
    outcome = forward(case.graph, case.graph.op("op"), ("b",), (Axis("x", 2),), parts)
    assert [f[0][:, 0].tolist() for f in outcome] == [
        [x[0].tolist(), x[1].tolist()], [x[3].tolist(), x[2].tolist()],
    ]  # fmt: skip


def test_rules_cover_every_kind_that_is_computed():
    assert set(COMPUTED) == set(RULES)
