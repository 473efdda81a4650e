"""The text form goes both ways, and what is wrong in it is named by its line.

The JSON form goes both ways, and a reader refuses what contradicts itself.

Graphs in files: told apart by ending or content; garbage gets one clear sentence.
"""

import json
import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import FileError, GraphError, InputError
from partita.files import decode_json, encode_json
from partita.graph import Graph, GraphBuilder, Op, Tensor, training_graph
from partita.graph.files import from_json, from_text, read_graph, to_json, to_text, write_graph
from partita.graph.shapes import unknown_kinds
from partita.graph.splits import communication, splittable
from partita.graph.work import flops, traffic_bytes
from tests.graph.strategies import graphs
from tests.problems.json_mutations import mutated

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


def test_lines_in_any_order_are_sorted():
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


def net():
    g = GraphBuilder("net")
    with g.scope("block"):
        x = g.linear(g.input("x", (2, 3)), 4, "fc")
    return g.finish(g.one("mse_loss", x, g.input("y", (2, 4)), name="loss"))


@settings(max_examples=100, deadline=None)
@given(graph=graphs())
def test_json_goes_both_ways_through_bytes(graph):
    again = from_json(decode_json(encode_json(to_json(graph))))
    assert again == graph
    assert again.fingerprint() == graph.fingerprint()


def test_what_is_usual_is_left_out():
    assert to_json(net()) == {
        "format": "partita/graph@1",
        "name": "net",
        "tensors": [
            {"name": "x", "shape": [2, 3], "role": "input"},
            {"name": "block.fc.weight", "shape": [4, 3], "role": "parameter"},
            {"name": "block.fc.bias", "shape": [4], "role": "parameter"},
            {"name": "block.fc", "shape": [2, 4]},
            {"name": "y", "shape": [2, 4], "role": "input"},
            {"name": "loss", "shape": []},
        ],
        "ops": [
            {
                "name": "block.fc",
                "kind": "linear",
                "inputs": ["x", "block.fc.weight", "block.fc.bias"],
                "outputs": ["block.fc"],
                "scope": "block",
            },
            {
                "name": "loss",
                "kind": "mse_loss",
                "inputs": ["block.fc", "y"],
                "outputs": ["loss"],
            },
        ],
        "outputs": ["loss"],
    }


def test_ops_in_any_order_are_sorted():
    value = to_json(net())
    value["ops"].reverse()
    assert from_json(value) == net()


def _set(path, new):
    def change(value):
        *way, last = path
        for step in way:
            value = value[step]
        value[last] = new

    return change


CHANGES = {
    "format": (_set(["format"], "partita/plan@1"), 'format: found "partita/plan@1"'),
    "version": (_set(["format"], "partita/graph@2"), "written by a newer partita"),
    "no name": (lambda v: v.pop("name"), "missing required field `name`"),
    "field": (_set(["extra"], 1), "unknown field `extra`"),
    "op field": (_set(["ops", 0, "atrs"], {}), "ops[0]: Object contains unknown field `atrs`"),
    "shape": (_set(["tensors", 0, "shape"], "ten"), "tensors[0].shape: Expected `array`"),
    "size": (_set(["tensors", 0, "shape"], [1.5]), "Expected `int`, got `float`"),
    "negative": (_set(["tensors", 0, "shape"], [-2]), "tensor 'x': shape [-2] has the size -2"),
    "dtype": (_set(["tensors", 0, "dtype"], "q4"), "unknown dtype 'q4'"),
    "role": (_set(["tensors", 0, "role"], "cat"), "unknown role 'cat'"),
    "phase": (_set(["ops", 0, "phase"], "nap"), "op 'block.fc': unknown phase 'nap'"),
    "nested": (_set(["ops", 0, "attrs"], {"p": [[1]]}), "ops[0].attrs"),
    "null": (_set(["ops", 0, "attrs"], {"p": None}), "ops[0].attrs"),
    "huge": (_set(["ops", 0, "attrs"], {"p": 10**30}), "at most 64 bits"),
    "dangling": (_set(["ops", 0, "inputs", 0], "ghost"), "reads the tensor 'ghost'"),
    "cycle": (_set(["ops", 0, "inputs", 0], "loss"), "has a cycle: block.fc -> loss -> block.fc"),
    "twice": (_set(["ops", 1, "name"], "block.fc"), "op 'block.fc': stands twice"),
    "output": (_set(["outputs"], ["ghost"]), "outputs: no tensor is called 'ghost'"),
    "no outputs": (_set(["ops", 1, "outputs"], []), "op 'loss': gives no tensor"),
    "shapes": (
        _set(["tensors", 3, "shape"], [2, 5]),
        "op 'block.fc': gives 'block.fc' of [2, 5]; its linear gives [2, 4]",
    ),
    "inputs": (_set(["ops", 0, "inputs"], ["x"]), "op 'block.fc': linear cannot take inputs"),
    "attribute": (_set(["ops", 0, "kind"], "softmax"), "op 'block.fc': softmax cannot take"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES.values(), ids=CHANGES.keys())
def test_what_contradicts_itself_is_refused(case):
    change, words = case
    value = to_json(net())
    change(value)
    with pytest.raises(InputError) as caught:
        from_json(value, "net.json")
    assert str(caught.value).startswith("net.json: ")
    assert words in str(caught.value)


BACKWARD = {
    "kind": (_set(["kind"], "matmul"), "of kind 'matmul' is a gradient of 'block.fc' of kind"),
    "forward": (_set(["forward"], "ghost"), "forward op 'ghost', which does not exist"),
    "of a gradient": (_set(["forward"], "loss.dgrad"), "which is no forward op"),
    "no positions": (lambda v: v["attrs"].pop("wrt"), "attribute wrt is ()"),
    "positions": (_set(["attrs", "wrt"], [9, 1]), "positions below 3 in the forward op"),
    "twice": (_set(["attrs", "wrt"], [1, 1]), "attribute wrt is [1, 1]; name each position once"),
    "swapped": (_set(["attrs", "wrt"], [2, 1]), "gives 'block.fc.weight.grad' of [4, 3]"),
    "fewer": (_set(["attrs", "wrt"], [1]), "gives 2 tensors; what it differentiates"),
    "gradient": (_set(["inputs", 0], "x"), "reads 'x' of [2, 3]; a gradient of output 0 has"),
    "nothing": (_set(["inputs"], []), "reads 0 tensors; it needs 1 gradients first"),
    "stranger": (_set(["inputs", 1], "y"), "which its forward op 'block.fc' neither reads"),
}


@pytest.mark.parametrize("case", BACKWARD.values(), ids=BACKWARD.keys())
def test_a_gradient_that_does_not_fit_its_forward_is_refused(case):
    change, words = case
    value = to_json(training_graph(net(), None))
    (op,) = [op for op in value["ops"] if op["name"] == "block.fc.wgrad"]
    change(op)
    with pytest.raises(GraphError) as caught:
        from_json(value)
    assert words in str(caught.value)
    assert "block.fc.wgrad" in str(caught.value)


def mysterious():
    g = GraphBuilder("odd")
    x = g.input("x", (2, 3))
    for kind in ("warp", "weft", "warp"):
        (x,) = g.op(kind, x, shapes=[(2, 3)])
    return g.finish(g.relu(x))


def test_unknown_kinds_are_carried_with_one_warning_each(caplog):
    value = to_json(mysterious())
    with caplog.at_level(logging.WARNING, logger="partita"):
        graph = from_json(value)
    assert graph == mysterious()
    assert unknown_kinds(graph) == ("warp", "weft")
    assert [record.name for record in caplog.records] == ["partita", "partita"]
    assert caplog.messages[0] == (
        "odd has ops of the unknown kind 'warp': they are not split and cost the bytes they move"
    )
    assert "'weft'" in caplog.messages[1]


def test_known_kinds_give_no_warning(caplog):
    with caplog.at_level(logging.DEBUG, logger="partita"):
        from_json(to_json(training_graph(net())))
    assert not caplog.records
    assert unknown_kinds(net()) == ()


@st.composite
def damaged_values(draw):
    """A good value with anything in place of some of its parts, or without them."""
    value = draw(mutated(draw(st.sampled_from(GOOD))))
    return draw(mutated(value)) if draw(st.booleans()) else value


GOOD = [to_json(net()), to_json(training_graph(net(), "adamw", "bf16")), to_json(mysterious())]


@settings(max_examples=100, deadline=None)
@given(value=damaged_values())
def test_any_value_is_read_or_refused(value):
    try:
        graph = from_json(value)
    except InputError:
        return
    assert from_json(json.loads(json.dumps(to_json(graph)))) == graph
    for op in graph.ops:  # what was read can be costed and split
        call = graph.call(op)
        assert flops(call) >= 0
        assert traffic_bytes(graph, op) >= 0
        for dim in splittable(call, 2):
            communication(call, {dim: 2})


@pytest.mark.parametrize("value", [None, [], 3, "graph"])
def test_a_graph_is_a_json_object(value):
    with pytest.raises(FileError, match=r"net\.json: is not a JSON object"):
        from_json(value, "net.json")


def trained_net():
    g = GraphBuilder("net")
    x = g.linear(g.input("x", (2, 3)), 4, "fc")
    return training_graph(g.finish(g.one("mse_loss", x, g.input("y", (2, 4)), name="loss")))


@pytest.mark.parametrize("name", ["net.json", "net.txt", "NET.JSON"])
def test_a_written_graph_is_read_back(tmp_path, name):
    path = write_graph(tmp_path / name, trained_net())
    assert read_graph(path) == trained_net()


@pytest.mark.parametrize("name", ["net", "net.graph"])
@pytest.mark.parametrize("ending", [".json", ".txt"])
def test_without_a_known_ending_the_content_decides(tmp_path, name, ending):
    content = write_graph(tmp_path / f"written{ending}", trained_net()).read_bytes()
    (tmp_path / name).write_bytes(content)
    assert read_graph(tmp_path / name) == trained_net()


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "net.txt"
    path.write_text(to_text(trained_net()), encoding="utf-8-sig")
    assert read_graph(path) == trained_net()


@pytest.mark.parametrize(("name", "start"), [("net.dot", "digraph"), ("net.svg", "<svg")])
def test_pictures_are_written(tmp_path, name, start):
    assert write_graph(tmp_path / name, trained_net()).read_text().startswith(start)


def test_nothing_is_overwritten_unasked(tmp_path):
    path = write_graph(tmp_path / "net.txt", trained_net())
    with pytest.raises(FileError, match="exists already"):
        write_graph(path, trained_net())
    assert write_graph(path, trained_net(), overwrite=True) == path


def test_an_unknown_ending_is_refused_before_writing(tmp_path):
    path = tmp_path / "net.png"
    with pytest.raises(
        FileError, match=r"the ending '\.png' says no form of a graph; end the name in \.json"
    ):
        write_graph(path, trained_net())
    assert not path.exists()


def _deep():
    return b"[" * 100_000 + b"]" * 100_000


GARBAGE = {
    "missing": (None, "no such file"),
    "random": (random.Random(0).randbytes(1_000_000), "is not"),
    "random text": (bytes(random.Random(1).choices(range(32, 127), k=1_000_000)), "expected"),
    "one long line": (b"graph g\nx" + b"(" * 1_000_000, "line 2"),
    "zeros": (bytes(1_000_000), "expected `graph NAME`"),
    "deep": (b'{"format": "partita/graph@1", "name": ' + _deep() + b"}", "nested too deeply"),
    "cut off": (b'{"format": "partita/graph@1", "name": "n', "is not JSON"),
    "list": (b"{", "is not JSON"),
    "other format": (b'{"format": "partita/plan@1"}', '"partita/graph@1" is needed here'),
    "newer": (b'{"format": "partita/graph@7"}', "written by a newer partita"),
    "no format": (b'{"name": "net"}', 'format: is missing; needs "format": "partita/graph@1"'),
    "empty": (b"", "holds no graph"),
}  # fmt: skip


@pytest.mark.parametrize("case", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_gets_a_sentence_that_names_the_file(tmp_path, case):
    content, words = case
    path = tmp_path / "garbage"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_graph(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert len(message) < 400
    assert caught.value.exit_code == 2


def test_json_under_the_name_of_a_text_is_refused(tmp_path):
    path = tmp_path / "net.txt"
    path.write_text(str(to_json(trained_net())))
    with pytest.raises(InputError, match="expected `graph NAME`"):
        read_graph(path)


@pytest.mark.parametrize("name", ["a.json", "a.txt"])
@pytest.mark.parametrize("is_captured", [True, False])
def test_files_say_whether_a_graph_was_captured(name, is_captured, tmp_path):
    graph = Graph("a", (Tensor("x", (1,), role="input"),), (), ("x",), is_captured)
    path = write_graph(tmp_path / name, graph)
    assert read_graph(path).is_captured == is_captured
    assert ("captured" in path.read_text()) == is_captured
