"""A graph is refused, in words, for everything that would make it none.

A topological order: everything after what it needs, as near to the order given as can be.
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import GraphError
from partita.graph import Call, Graph, GraphBuilder, Op, Tensor
from partita.graph.record import BYTES, CycleError, dependencies_first, dtype_bytes, topological
from tests.graph.strategies import graphs

X = Tensor("x", (2, 3), role="input")
W = Tensor("w", (4, 3), role="parameter")
Y = Tensor("y", (2, 4))
FC = Op("fc", "linear", ("x", "w"), ("y",))


def test_a_small_graph_knows_who_makes_and_reads_what():
    z = Tensor("z", (2, 4))
    relu = Op("relu", "elementwise", ("y",), ("z",), (("fn", "relu"),), scope="block")
    graph = Graph("net", (X, W, Y, z), (FC, relu), ("z",))
    assert graph.producer("y") is FC
    assert graph.producer("x") is None
    assert graph.consumers("y") == (relu,)
    assert graph.consumers("z") == ()
    assert graph.predecessors(relu) == (FC,)
    assert [(a.name, b.name, t.name) for a, b, t in graph.edges()] == [("fc", "relu", "y")]
    assert graph.inputs == (X,)
    assert (graph.parameters, graph.num_parameters) == ((W,), 12)
    assert not graph.is_training
    assert graph.call(FC) == Call("linear", (), ((2, 3), (4, 3)), ((2, 4),))
    assert str(graph) == "net: 2 ops, 4 tensors, 12 parameters"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tensor("", (1,)), "tensors: a tensor has no name"),
        (lambda: Tensor("x", (0,)), "tensor 'x': shape [0] has the size 0"),
        (lambda: Tensor("x", (2, -3)), "has the size -3; sizes are whole numbers of at least 1"),
        (lambda: Tensor("x", (2.0,)), "has the size 2.0"),
        (lambda: Tensor("x", (True,)), "has the size True"),
        (lambda: Tensor("x", (2**40, 2**40)), "is beyond any memory"),
        (lambda: Tensor("x", (1,), "f33"), "tensor 'x' dtype: unknown dtype 'f33'; use one of f64"),
        (lambda: Tensor("x", (1,), role="weight"), "unknown role 'weight'; use one of input"),
        (lambda: Tensor("\ud800", (1,)), "is not Unicode; remove the lone surrogate"),
        (lambda: Op("", "relu", (), ("y",)), "ops: an op has no name"),
        (lambda: Op("o", "", (), ("y",)), "op 'o': has no kind"),
        (lambda: Op("o", "relu", ("x",), ()), "op 'o': gives no tensor"),
        (lambda: Op("o", "k", (), ("y",), phase="sideways"), "unknown phase 'sideways'"),
        (lambda: Op("o", "k", (), ("y",), forward="p"), "only dgrad and wgrad ops do"),
        (lambda: Op("o", "k", (), ("y",), (("p", float("nan")),)), "attribute p is nan"),
        (lambda: Op("o", "k", (), ("y",), (("p", (1.0, float("inf"))),)), "finite numbers"),
        (lambda: Op("o", "k", (), ("y",), (("p", 2**63),)), "at most 64 bits"),
        (lambda: Op("o", "k", (), ("y",), (("p", 10**400),)), "at most 64 bits"),
        (lambda: Op("o", "k", (), ("y",), (("p", None),)), "attribute p is None; attributes are"),
        (lambda: Op("o", "k", (), ("y",), (("p", ((1,),)),)), "a tuple of these"),
        (lambda: Op("o", "k", (), ("y",), (("b", 1), ("a", 1))), "in sorted order"),
        (lambda: Op("o", "k", (), ("y",), (("a", 1), ("a", 2))), "name each once"),
        (lambda: Op("o", "k", (), ("y",), (("a", "\udfff"),)), "is not Unicode"),
        (lambda: Op("o", "k", (), ("y",), scope="\udfff"), "is not Unicode"),
        (lambda: Graph("\udfff", (), ()), "is not Unicode"),
        (lambda: Graph("g", (X, X), ()), "tensor 'x': stands twice"),
        (lambda: Graph("g", (X, W, Y), (FC, FC), ()), "op 'fc': stands twice"),
        (lambda: Graph("g", (X, Y), (FC,)), "reads the tensor 'w', which does not exist"),
        (lambda: Graph("g", (X, W), (FC,)), "writes the tensor 'y', which does not exist"),
        (lambda: Graph("g", (Y,), ()), "tensor 'y': no op computes it; make it an input"),
        (
            lambda: Graph("g", (X, W, Y), (FC, dataclasses.replace(FC, name="fd"))),
            "op 'fd': writes 'y', which op 'fc' gives already; a tensor has one source",
        ),
        (
            lambda: Graph("g", (X, W), (dataclasses.replace(FC, outputs=("w",)),)),
            "writes 'w', which the parameters gives already",
        ),
        (
            lambda: Graph("g", (X, W, Y), (dataclasses.replace(FC, inputs=("y", "w")),)),
            "op 'fc': reads 'y' before it is computed; list ops in topological order",
        ),
        (lambda: Graph("g", (X,), (), ("loss",)), "outputs: no tensor is called 'loss'"),
        (
            lambda: Graph("g", (X, W, Y), (dataclasses.replace(FC, phase="dgrad", forward="f"),)),
            "belongs to the forward op 'f', which does not exist",
        ),
        (
            lambda: Graph("g", (X, W, Y), (dataclasses.replace(FC, phase="dgrad", forward="fc"),)),
            "belongs to 'fc', which is no forward op",
        ),
        (lambda: Graph("g", (X,), ()).tensor("q"), "there is no tensor called 'q'"),
        (lambda: Graph("g", (X,), ()).op("q"), "there is no op called 'q'"),
        (lambda: dtype_bytes("int4"), "unknown dtype 'int4'"),
    ],
)
def test_what_is_no_graph_is_refused(make, words):
    with pytest.raises(GraphError) as caught:
        make()
    assert words in str(caught.value)


def test_ops_in_any_order_are_sorted_and_sorted_ones_stay():
    a = Op("a", "k", ("x",), ("p",))
    b = Op("b", "k", ("p",), ("q",))
    c = Op("c", "k", ("q", "p"), ("r",))
    assert topological([c, a, b], ["x"]) == (a, b, c)
    assert topological([a, b, c], ["x"]) == (a, b, c)


def test_a_cycle_is_named():
    ops = [
        Op("a", "k", ("r",), ("p",)),
        Op("b", "k", ("p",), ("q",)),
        Op("c", "k", ("q",), ("r",)),
    ]
    with pytest.raises(GraphError) as caught:
        topological(ops, [])
    assert "has a cycle: a -> c -> b -> a; remove one" in str(caught.value)


def test_an_op_that_reads_itself_is_a_cycle():
    with pytest.raises(GraphError, match="has a cycle: a -> a"):
        topological([Op("a", "k", ("p",), ("p",))], [])


def test_a_long_cycle_is_shortened():
    ops = [Op(f"o{i}", "k", (f"t{i}",), (f"t{(i + 1) % 100}",)) for i in range(100)]
    with pytest.raises(GraphError) as caught:
        topological(ops, [])
    assert "..." in str(caught.value)
    assert len(str(caught.value)) < 200


def test_sorting_does_not_lose_an_op_of_a_name_that_stands_twice():
    with pytest.raises(GraphError, match="op 'a': stands twice"):
        topological([Op("a", "k", (), ("p",)), Op("a", "k", (), ("q",))], [])


def test_a_chain_of_many_ops_is_sorted_without_recursion():
    ops = [Op(f"o{i}", "k", (f"t{i}",), (f"t{i + 1}",)) for i in range(5000)]
    assert topological(reversed(ops), ["t0"]) == tuple(ops)


@given(graph=graphs(), other=graphs())
def test_fingerprints_tell_graphs_apart(graph, other):
    assert (graph.fingerprint() == other.fingerprint()) == (
        repr((graph.name, graph.tensors, graph.ops, graph.outputs))
        == repr((other.name, other.tensors, other.ops, other.outputs))
    )


def test_a_fingerprint_sees_what_equality_does_not():
    whole = Graph("g", (Y,), (Op("o", "k", (), ("y",), (("p", 1),)),))
    flag = Graph("g", (Y,), (Op("o", "k", (), ("y",), (("p", True),)),))
    assert whole == flag
    assert whole.fingerprint() != flag.fingerprint()


def test_an_op_computes_in_its_widest_float():
    g = GraphBuilder("g", "bf16")
    x = g.input("x", (2, 3))
    graph = g.finish(g.linear(x, 4, "fc"), *g.op("compare", x, x, shapes=[(2, 3)], dtype="bool"))
    assert graph.dtype(graph.op("fc")) == "bf16"
    assert graph.dtype(graph.op("compare")) == "bf16"
    ids = Graph("ids", (Tensor("i", (2,), "i64"),), (Op("o", "range", (), ("i",)),))
    assert ids.dtype(ids.op("o")) == "i64"


@pytest.mark.parametrize(
    ("attrs", "words"),
    [
        ((("wrt", (0,)),), "attribute grads is ()"),
        ((("grads", (0,)), ("wrt", (5,))), "attribute wrt is (5,); positions below 2"),
        ((("grads", ("a",)), ("wrt", (0,))), "attribute grads is ('a',)"),
    ],
)
def test_a_backward_op_must_say_what_it_differentiates(attrs, words):
    g = Tensor("g", (2, 4), role="input")
    back = Op("b", "linear", ("g", "w"), ("d",), attrs, phase="dgrad", forward="fc")
    graph = Graph("g", (X, W, Y, g, Tensor("d", (2, 3))), (FC, back))
    with pytest.raises(GraphError) as caught:
        graph.call(back)
    assert words in str(caught.value)


def test_a_backward_op_reads_only_what_its_forward_has():
    g = Tensor("g", (2, 4), role="input")
    attrs = (("grads", (0,)), ("wrt", (0,)))
    back = Op("b", "linear", ("g", "w"), ("d",), attrs, phase="dgrad", forward="fc")
    tensors = (X, W, Y, g, Tensor("d", (2, 3)))
    call = Graph("g", tensors, (FC, back)).call(back)
    assert (call.phase, call.wrt, call.reads) == ("dgrad", (0,), ("g0", "i1"))
    stray = dataclasses.replace(back, inputs=("g", "g"))
    with pytest.raises(GraphError, match="which its forward op 'fc' neither reads nor gives"):
        Graph("g", tensors, (FC, stray)).call(stray)


@pytest.mark.parametrize("told", [("i1",), ("i2",), "i1", ("i1", "i0"), (1,)])
def test_a_backward_op_may_say_for_what_it_reads_another_tensor(told):
    attrs = (("grads", (0,)), ("reads", told), ("wrt", (0,)))
    back = Op("b", "linear", ("g", "v"), ("d",), attrs, phase="dgrad", forward="fc")
    tensors = (X, W, Y, Tensor("g", (2, 4), role="input"), Tensor("d", (2, 3)))
    graph = Graph("g", (*tensors, dataclasses.replace(W, name="v")), (FC, back))
    if told == ("i1",):
        assert graph.call(back).reads == ("g0", "i1")
    else:
        with pytest.raises(GraphError, match=r"attribute reads is .*; 1 places such as i0 or o0"):
            graph.call(back)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda c: c.number("p"), "attribute p is 'text'; a number is needed"),
        (lambda c: c.number("yes"), "attribute yes is True; a number is needed"),
        (lambda c: c.whole("half"), "attribute half is 0.5; a whole number is needed"),
        (lambda c: c.whole("yes"), "a whole number is needed"),
        (lambda c: c.ints("halves"), "whole numbers are needed"),
        (lambda c: c.flag("p"), "attribute p is 'text'; true or false is needed"),
        (lambda c: c.text("half"), "attribute half is 0.5; text is needed"),
    ],
)
def test_attributes_of_another_type_are_refused(read, words):
    attrs = (("half", 0.5), ("halves", (0.5,)), ("p", "text"), ("yes", True))
    with pytest.raises(GraphError) as caught:
        read(Call("k", attrs, (), ()))
    assert words in str(caught.value)


def test_attributes_have_defaults():
    call = Call("k", (("n", 3),), (), ())
    assert (call.whole("n"), call.ints("n"), call.number("n"), call.flag("m")) == (
        3,
        (3,),
        3,
        False,
    )
    assert (call.text("m", "x"), call.attr("m"), call.ints("m", (1,))) == ("x", None, (1,))


@given(st.sampled_from(sorted(BYTES)))
def test_bytes_are_elements_times_their_size(dtype):
    assert Tensor("x", (3, 5), dtype).size_bytes == 15 * dtype_bytes(dtype)
    assert Tensor("x", (), dtype).num_elements == 1


@st.composite
def graphs(draw):
    """What each of some numbers needs, without a cycle, in any order."""
    count = draw(st.integers(0, 8))
    rank = draw(st.permutations(range(count)))
    needs = {
        item: [o for o in range(count) if rank[o] < rank[item] and draw(st.booleans())]
        for item in range(count)
    }
    return draw(st.permutations(range(count))), needs


@given(graphs())
def test_each_comes_once_and_after_all_that_it_needs(graph):
    items, needs = graph
    order = dependencies_first(items, needs.__getitem__)
    assert sorted(order) == sorted(items)
    place = {item: at for at, item in enumerate(order)}
    assert all(place[need] < place[item] for item in items for need in needs[item])


@given(graphs())
def test_an_order_that_is_one_already_stays_as_it_is(graph):
    items, needs = graph
    order = dependencies_first(items, needs.__getitem__)
    assert dependencies_first(order, needs.__getitem__) == order


def test_what_is_needed_but_not_listed_comes_too():
    assert dependencies_first(["c"], {"a": "", "b": "a", "c": "b"}.__getitem__) == ["a", "b", "c"]


def test_a_cycle_is_named_from_one_item_to_itself():
    needs = {"a": "b", "b": "c", "c": "b"}
    with pytest.raises(CycleError, match="b -> c -> b") as error:
        dependencies_first("a", needs.__getitem__)
    assert error.value.path == ["b", "c", "b"]


def test_an_item_that_needs_itself_is_a_cycle():
    with pytest.raises(CycleError, match="a -> a"):
        dependencies_first("a", lambda item: item)


def test_a_long_chain_needs_no_deep_stack():
    order = dependencies_first([5000], lambda item: [item - 1] if item else [])
    assert order == list(range(5001))
