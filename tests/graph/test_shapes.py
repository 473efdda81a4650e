"""Output shapes are those of PyTorch, and what does not fit is refused in words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import GraphError
from partita.graph.loops import LOOPS, loop_nest
from partita.graph.record import Call
from partita.graph.shapes import CARRIED, SHAPES, broadcast, output_shapes
from partita.graph.splits import communication, splittable
from partita.graph.work import FLOPS, flops
from tests.graph.calls import KINDS, calls, make_call
from tests.graph.strategies import ATTRS

torch = pytest.importorskip("torch")
from tests.graph import reference  # noqa: E402


def test_the_tables_know_the_same_kinds():
    assert set(SHAPES) == set(LOOPS)
    assert set(FLOPS) <= set(SHAPES) | CARRIED


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_output_shapes_are_those_of_torch(kind, data):
    call = data.draw(calls(kind))
    outputs = reference.run(call, reference.make_inputs(call, device="meta"))
    assert call.outputs == tuple(tuple(output.shape) for output in outputs)


@st.composite
def damaged_calls(draw):
    """A call with an input more, less or changed, or an attribute that is anything."""
    call = draw(calls(draw(st.sampled_from(KINDS))))
    inputs, attrs = list(call.inputs), dict(call.attrs)
    for _ in range(draw(st.integers(1, 2))):
        step = draw(st.sampled_from(["attribute", "drop", "add", "resize"]))
        if step == "attribute":
            known = ["axis", "groups", "heads", "window", "top_k", "fn", "output", "stride", "axes"]
            attrs[draw(st.sampled_from([*attrs, *known]))] = draw(ATTRS)
        elif step == "drop" and inputs:
            inputs.pop(draw(st.integers(0, len(inputs) - 1)))
        elif step == "add":
            inputs.append(tuple(draw(st.lists(st.integers(1, 4), max_size=7))))
        elif inputs:
            at = draw(st.integers(0, len(inputs) - 1))
            inputs[at] = tuple(draw(st.lists(st.integers(1, 4), max_size=9)))
    return Call(call.kind, tuple(sorted(attrs.items())), tuple(inputs), ())


@settings(max_examples=200, deadline=None)
@given(call=damaged_calls())
def test_what_has_shapes_has_loops_and_flops_and_the_rest_is_refused(call):
    try:
        outputs = output_shapes(call)
    except GraphError:
        return
    good = Call(call.kind, call.attrs, call.inputs, outputs)
    nest = loop_nest(good)
    assert [len(access.dims) for access in nest.inputs] == [len(shape) for shape in call.inputs]
    assert [len(access.dims) for access in nest.outputs] == [len(shape) for shape in outputs]
    assert flops(good) >= 0
    for dim in splittable(good, 2):
        communication(good, {dim: 2})


REFUSED = {
    "linear of other widths": ("linear", [(8, 3), (5, 4)], {}, "it needs [..., k] and [n, k]"),
    "linear with two biases": ("linear", [(8, 4), (5, 4), (5,), (5,)], {}, "at most a bias of [n]"),
    "linear without weights": ("linear", [(8, 4)], {}, "cannot take inputs of shapes [8, 4]"),
    "matmul": ("matmul", [(2, 3), (4, 5)], {}, "with the same k"),
    "vectors": ("matmul", [(3,), (3,)], {}, "at least two dims each"),
    "einsum without arrow": ("einsum", [(2,)], {"equation": "a"}, "an equation like"),
    "einsum letters": ("einsum", [(2, 3)], {"equation": "a->a"}, "an equation that fits"),
    "einsum sizes": ("einsum", [(2,), (3,)], {"equation": "a,a->a"}, "one size for 'a'"),
    "conv rank": ("conv", [(1, 2, 3, 3, 3, 3), (1, 2)], {}, "[b, c, *space]"),
    "conv channels": ("conv", [(1, 3, 8), (4, 2, 3)], {}, "matching channels"),
    "conv groups": ("conv", [(1, 3, 8), (4, 1, 3)], {"groups": 2}, "divisible by 2 groups"),
    "conv too small": ("conv", [(1, 1, 2), (1, 1, 3)], {}, "the input is too small"),
    "conv stride": ("conv", [(1, 1, 8), (1, 1, 3)], {"stride": 0}, "each at least 1"),
    "conv strides": ("conv", [(1, 1, 8), (1, 1, 3)], {"stride": (1, 1)}, "one number or 1"),
    "conv text": ("conv", [(1, 1, 8), (1, 1, 3)], {"stride": "two"}, "whole numbers are needed"),
    "pool of a matrix": ("pool", [(2, 3)], {"kernel": 2}, "one to three spatial dims"),
    "norm weights": ("layer_norm", [(2, 3), (2,)], {}, "weights of the normalised shape"),
    "norm channels": ("batch_norm", [(2, 3), (2,)], {}, "[c] weights"),
    "group norm": ("group_norm", [(2, 3)], {"groups": 2}, "divisible by 2 groups"),
    "softmax axis": ("softmax", [(2, 3)], {"axis": 2}, "axis 2 of a tensor with 2 dims"),
    "attention heads": (
        "attention", [(1, 2, 6), (1, 2, 6), (1, 2, 6)], {"heads": 4}, "4 query heads",
    ),
    "attention keys": (
        "attention", [(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4)], {}, "[b, h, s, d]",
    ),
    "attention mask": (
        "attention", [(1, 2, 3, 4)] * 3 + [(7, 3)], {}, "do not broadcast",
    ),
    "attention window": (
        "attention", [(1, 2, 3, 4)] * 3, {"window": -1}, "a window of at least 0",
    ),
    "broadcast": ("elementwise", [(2, 3), (2, 4)], {"fn": "add"}, "do not broadcast"),
    "nothing": ("elementwise", [], {"fn": "add"}, "at least one input"),
    "function": ("elementwise", [(2,)], {"fn": 3}, "text is needed"),
    "rope": ("elementwise", [(2, 6)], {"fn": "rope", "heads": 4}, "4 heads divide"),
    "reduce": ("reduce", [(2, 3)], {"axes": (5,)}, "axes it has, not [5]"),
    "concat": ("concat", [(2, 3), (3, 3)], {"axis": 1}, "equal sizes except along axis 1"),
    "split": ("split", [(5,)], {"axis": 0, "sizes": (2, 2)}, "add up to 5, not [2, 2]"),
    "empty slice": ("slice", [(5,)], {"axis": 0, "start": 3, "stop": 3}, "would give [0]"),
    "reshape": ("reshape", [(2, 3)], {"shape": (4, 2)}, "as many elements as [4, 2]"),
    "reshape twice": ("reshape", [(2, 3)], {"shape": (-1, -1)}, "as many elements as"),
    "transpose": ("transpose", [(2, 3)], {"perm": (0, 0)}, "a permutation of 2 dims"),
    "pad": ("pad", [(2, 3)], {"before": (1,), "after": (1,)}, "one padding per dim"),
    "expand": ("expand", [(2,)], {"shape": (3,)}, "do not broadcast"),
    "shrink": ("expand", [(2, 3)], {"shape": (3,)}, "something that expands to [3]"),
    "lstm": ("lstm", [(1, 2, 3), (8, 3), (6, 2)], {}, "[4h, i] and [4h, h] weights"),
    "cell": ("gru_cell", [(1, 3), (1, 2), (6, 4), (6, 2)], {}, "gate weights"),
    "router": ("moe_router", [(2, 3), (4, 2)], {}, "[experts, k]"),
    "too many experts": ("moe_dispatch", [(2, 3), (2, 4)], {"top_k": 5}, "1 <= top_k <= experts"),
    "loss": ("cross_entropy", [(2, 3), (3,)], {}, "logits [..., classes]"),
    "pair": ("mse_loss", [(2,), (3,)], {}, "two tensors of the same shape"),
    "states": ("optimizer", [(2,), (2,), (3,)], {}, "of one shape"),
    "unknown": ("warp", [(2,)], {}, "unknown kind 'warp'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused_with_the_rule(case):
    kind, inputs, attrs, words = case
    with pytest.raises(GraphError) as caught:
        make_call(kind, inputs, **attrs)
    assert words in str(caught.value)


@given(st.lists(st.lists(st.integers(1, 3), max_size=4).map(tuple), min_size=1, max_size=3))
def test_broadcasting_is_that_of_torch(shapes):
    try:
        expected = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        with pytest.raises(GraphError):
            broadcast(*shapes)
    else:
        assert broadcast(*shapes) == expected


def test_a_capacity_factor_makes_room_for_uneven_experts():
    shapes = [(4, 6, 8), (4, 6, 3)]
    assert make_call("moe_dispatch", shapes, top_k=2).outputs == ((3, 16, 8),)
    assert make_call("moe_dispatch", shapes, top_k=2, capacity_factor=1.25).outputs == ((3, 20, 8),)
    assert make_call("moe_dispatch", shapes, capacity_factor=0.01).outputs == ((3, 1, 8),)
