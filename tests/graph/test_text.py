"""The text form goes both ways, and what is wrong in it is named by its line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import GraphError, InputError
from partita.graph import Graph, GraphBuilder, Op, Tensor, training_graph
from partita.graph.text import from_text, to_text
from tests.graph.strategies import graphs

MLP = """\
graph mlp
input x: f32[32, 784]
param fc.weight: f32[10, 784]
param fc.bias: f32[10]
fc: f32[32, 10] = linear(x, fc.weight, fc.bias) @head
split:0: f32[16, 10], split:1: f32[16, 10] = split(fc) {axis=0, sizes=[16, 16]}
sum: f32[16, 10] = elementwise(split:0, split:1) as total {fn="add"}
output sum, fc
"""


def test_the_text_is_what_a_person_would_write():
    graph = from_text(MLP)
    assert to_text(graph) == MLP
    assert graph.op("fc").scope == "head"
    assert graph.op("split").outputs == ("split:0", "split:1")
    assert graph.op("total").outputs == ("sum",)
    assert graph.op("total").attrs == (("fn", "add"),)
    assert graph.tensor("fc.weight") == Tensor("fc.weight", (10, 784), "f32", "parameter")
    assert graph.outputs == ("sum", "fc")


def test_a_training_graph_names_the_forward_op_of_each_gradient():
    g = GraphBuilder("tiny")
    x = g.linear(g.input("x", (2, 3)), 4, "fc", bias=False)
    graph = training_graph(g.finish(g.one("mse_loss", x, g.input("y", (2, 4)), name="loss")), "sgd")
    text = to_text(graph)
    assert (
        text
        == """\
graph tiny
input x: f32[2, 3]
param fc.weight: f32[4, 3]
fc: f32[2, 4] = linear(x, fc.weight)
input y: f32[2, 4]
loss: f32[] = mse_loss(fc, y)
input loss.grad: f32[]
fc.grad: f32[2, 4] = mse_loss.dgrad[loss](loss.grad, fc, y) {grads=[0], wrt=[0]}
fc.weight.grad: f32[4, 3] = linear.wgrad[fc](fc.grad, x) {grads=[0], wrt=[1]}
fc.weight.next: f32[4, 3] = optimizer.update(fc.weight, fc.weight.grad) as fc.weight.update \
{rule="sgd"}
output loss
"""
    )
    assert from_text(text) == graph


@settings(max_examples=100, deadline=None)
@given(graph=graphs())
def test_text_goes_both_ways(graph):
    again = from_text(to_text(graph))
    assert again == graph
    assert again.fingerprint() == graph.fingerprint()


def test_every_type_of_attribute_keeps_its_type():
    attrs = (
        ("big", 2**63 - 1), ("empty", ()), ("flag", True), ("half", 0.5), ("list", (1, -2)),
        ("small", 1e-300), ("text", 'say "no"\n'), ("texts", ("a", "b,c")), ("whole", 2.0),
    )  # fmt: skip
    graph = Graph("g", (Tensor("y", ()),), (Op("y", "mine", (), ("y",), attrs),))
    again = from_text(to_text(graph)).op("y")
    assert [(k, v, type(v)) for k, v in again.attrs] == [(k, v, type(v)) for k, v in attrs]


STRANGE = ["a b", 'q"q', "two\nlines", "\t", "é", "图", "", "output", "a->b", "\u2028", "\x00", "="]


@pytest.mark.parametrize("name", STRANGE)
def test_strange_names_are_quoted(name):
    tensor = Tensor(name or "y", (1,), role="input")
    op = Op(f"{name}!", f"{name}kind", (tensor.name,), (f"{name}out",), scope=name)
    graph = Graph(name, (tensor, Tensor(f"{name}out", (1,))), (op,), (tensor.name,))
    text = to_text(graph)
    assert from_text(text) == graph
    assert len(text.split("\n")) == 5  # a name never breaks its line


def test_a_kind_that_ends_like_a_phase_is_quoted():
    graph = Graph("g", (Tensor("y", ()),), (Op("y", "my.dgrad", (), ("y",), phase="wgrad"),))
    text = to_text(graph)
    assert '"my.dgrad".wgrad()' in text
    assert from_text(text) == graph


def test_tensors_out_of_order_are_declared_before_their_ops():
    a, x = Tensor("a", (1,), role="gradient"), Tensor("x", (1,), role="input")
    ops = (Op("a", "k", ("x",), ("a",)), Op("b", "k", ("a",), ("b",)))
    graph = Graph("g", (Tensor("b", (1,)), a, x), ops)
    text = to_text(graph)
    assert "activation b: f32[1]\ngradient a: f32[1]\na = k(x)" in text
    assert from_text(text) == graph


def test_comments_spaces_and_windows_lines_do_not_matter():
    loose = MLP.replace("\n", "  \r\n\r\n# a comment\r\n").replace(" = ", "   =  ")
    assert from_text(loose) == from_text(MLP)


def test_ops_in_any_order_are_sorted():
    text = "graph g\nb: f32[2] = elementwise(a)\na: f32[2] = elementwise(x)\ninput x: f32[2]\n"
    assert [op.name for op in from_text(text).ops] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("input x", "line 2, column 8: the line ends; expected ':' and a type like f32[8, 16]"),
        ("input x: f32", "line 2, column 13: the line ends; expected a type like f32[8, 16]"),
        ("input x: 32[2]", "line 2, column 10: found '32[2]'; expected a type like"),
        ("input x: f32[2", "expected ',' or ']' after a size"),
        ("input x: f32[a]", "found 'a]'; expected a whole number as size"),
        ("input x: f32[-1]", "line 2: tensor 'x': shape [-1] has the size -1"),
        ("input x: f32[2] y", "found 'y'; expected the end of the line"),
        ("input x: f99[2]", "line 2: tensor 'x' dtype: unknown dtype 'f99'"),
        ("input x: f32[" + "9" * 50 + "]", "expected a whole number as size"),
        ('input "x: f32[2]', "expected the tensor's name (in quotes if it is not plain)"),
        ("= relu(x)", "expected input, param, state, output or the name of a tensor"),
        (r'input "\q": f32[2]', "expected text in quotes with the escapes of JSON"),
        ("graph again", "expected one graph in a file, and this is a second"),
        ("y: f32[2] linear(x)", "expected ',' or '=' after an output"),
        ("y: f32[2] = (x)", "expected the kind of the op"),
        ("y: f32[2] = relu", "the line ends; expected '(' and the inputs"),
        ("y: f32[2] = relu(x", "the line ends; expected ',' or ')' after the name of an input"),
        ("y: f32[2] = relu(x y)", "found 'y)'; expected ',' or ')'"),
        ("y: f32[2] = relu[f(x)", "found '(x)'; expected ']' after the forward op"),
        ("y: f32[2] = relu() as", "the line ends; expected the name of the op"),
        ("y: f32[2] = relu() @", "expected a module scope"),
        ("y: f32[2] = relu() {p}", "found '}'; expected '=' and the attribute's value"),
        ("y: f32[2] = relu() {p=}", "expected a number, a text in quotes, true, false or a list"),
        ("y: f32[2] = relu() {p=nan}", "found 'nan}'; expected a number"),
        ("y: f32[2] = relu() {p=1e999}", "line 2: op 'y': attribute p is inf"),
        ("y: f32[2] = relu() {p=[1, [2]]}", "found '[2]]}'; expected a number"),
        ("y: f32[2] = relu() {p=1 q=2}", "expected ',' or '}' after an attribute"),
        ("y: f32[2] = relu() {p=1, p=2}", "expected attribute p once"),
        ("y: f32[2] = relu() {3=1}", "expected the name of an attribute"),
        ("a: f32[1], b: f32[1] = relu()", "expected `as NAME` for an op with several outputs"),
        ("y: f32[2] = elementwise(x)", "line 2: op 'y': reads the tensor 'x', which does not"),
        ("y = constant() {shape=[2]}", "writes the tensor 'y', which does not exist"),
        ("y: f32[2] = elementwise(y)", "ops: has a cycle: y -> y"),
        ("input x: f32[2]\ninput x: f32[2]", "tensor 'x': stands twice"),
        ("output y", "outputs: no tensor is called 'y'"),
        ("y: f32[2] = relu[f](y)", "only dgrad and wgrad ops do"),
        ("input x: f32[2]\ny: f32[3] = elementwise(x)", "line 3: op 'y': gives 'y' of [3]; its"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_line_and_by_what_was_expected(line, words):
    with pytest.raises(GraphError) as caught:
        from_text(f"graph g\n{line}\n", "net.txt")
    assert str(caught.value).startswith("net.txt: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_an_empty_text_holds_no_graph(text):
    with pytest.raises(GraphError, match="holds no graph; its first line is `graph NAME`"):
        from_text(text)


@pytest.mark.parametrize("text", ["hello\n", "input x: f32[2]\n", "{}", "graph"])
def test_a_text_begins_with_the_graph_s_name(text):
    with pytest.raises(GraphError, match=r"line 1, column 1: .*expected `graph NAME`"):
        from_text(text)


@st.composite
def damaged_texts(draw):
    """A good text with a few letters changed, lines dropped, doubled or exchanged."""
    text = draw(st.one_of(st.just(MLP), graphs().map(to_text)))
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            at = draw(st.integers(0, len(text)))
            cut = draw(st.integers(0, 3))
            piece = draw(
                st.one_of(st.text(max_size=3), st.sampled_from(list(' :=,()[]{}@"\\#.\n-1')))
            )
            text = text[:at] + piece + text[at + cut :]
        else:
            lines = text.split("\n")
            a, b = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
            lines[a : a + draw(st.integers(0, 2))] = [lines[b]]
            text = "\n".join(lines)
    return text


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(damaged_texts(), st.text(max_size=60)))
def test_any_text_is_read_or_refused(text):
    try:
        graph = from_text(text)
    except InputError:
        return
    assert from_text(to_text(graph)) == graph
