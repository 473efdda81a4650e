"""The JSON form goes both ways, and a reader refuses what contradicts itself."""

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import FileError, GraphError, InputError
from partita.files import decode_json, encode_json
from partita.graph import GraphBuilder, training_graph
from partita.graph.flops import flops
from partita.graph.json import from_json, to_json
from partita.graph.shapes import unknown_kinds
from partita.graph.splits import communication, splittable
from partita.graph.traffic import traffic_bytes
from tests.graph.strategies import graphs
from tests.problems.json_mutations import mutated


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
