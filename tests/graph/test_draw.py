"""Pictures hold every op and name, whatever the names are, and large graphs are folded."""

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings

from partita.graph import GraphBuilder, training_graph
from partita.graph.draw import to_dot, to_svg
from tests.graph.strategies import graphs

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg):
    return [g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.get("class") == "n"]


def arrows(svg):
    return [g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.get("class") == "e"]


def block(layers=2):
    g = GraphBuilder("blocks")
    x = g.input("x", (8, 16))
    for i in range(layers):
        with g.scope(f"layers.{i}"):
            x = g.add(x, g.relu(g.linear(x, 16, "fc")))
    return g.finish(g.one("mse_loss", x, g.input("y", (8, 16)), name="loss"))


def test_every_op_input_and_output_is_a_box():
    svg = to_svg(block())
    texts = [[t.text for t in box.iter(f"{SVG}text")] for box in boxes(svg)]
    assert [lines[0] for lines in texts] == [
        "x", "y", "layers.0.fc", "layers.0.relu", "layers.0.add",
        "layers.1.fc", "layers.1.relu", "layers.1.add", "loss", "loss",
    ]  # fmt: skip
    assert texts[2][1] == "linear 8×16"
    assert texts[3][1] == "relu 8×16"
    assert len(arrows(svg)) == 11


def test_hovering_tells_kind_shapes_loops_and_flops():
    (box,) = [b for b in boxes(to_svg(block(1))) if "layers.0.fc" in b.find(f"{SVG}text").text]
    title = box.find(f"{SVG}title").text
    assert "linear" in title
    assert "reads layers.0.fc.weight: f32[16, 16], 1,024 bytes" in title
    assert "loops b k, n k, n -> b n | b=8 n=16 k=16" in title
    assert "4,096 FLOPs" in title


def test_gradients_are_dashed_and_their_kept_tensors_not_drawn():
    graph = training_graph(block(1), None)
    svg = to_svg(graph)
    dashed = [b for b in boxes(svg) if "dashed" in b.find(f"{SVG}rect").get("class")]
    assert len(dashed) == len([op for op in graph.ops if op.phase != "forward"])
    tips = "".join(a.find(f"{SVG}title").text for a in arrows(svg))
    relu = graph.op("layers.0.relu.dgrad")
    assert "layers.0.relu" in relu.inputs
    assert tips.count("layers.0.relu: ") == 1  # to the sum, not to its gradient


@settings(max_examples=60, deadline=None)
@given(graph=graphs())
def test_pictures_of_any_graph_are_well_formed(graph):
    svg = to_svg(graph)
    assert len(boxes(svg)) <= len(graph.ops) + len(graph.inputs) + len(graph.outputs)
    assert to_svg(graph) == svg
    dot = to_dot(graph)
    assert dot == to_dot(graph)
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', dot)  # without its quoted strings
    assert re.fullmatch(r"[\w\s\[\]{};=,.>\"-]*", bare)
    assert bare.count("{") == bare.count("}") == 1 + len(re.findall("subgraph", bare))
    assert len(re.findall(r"^ *n\d+ \[", dot, re.M)) == len(graph.ops)


HOSTILE = "<script>alert('&\"')</script>\\N\n\x07]]>"


@pytest.mark.parametrize("draw", [to_svg, to_dot])
def test_hostile_names_stay_text(draw):
    g = GraphBuilder(HOSTILE)
    with g.scope(HOSTILE):
        (y,) = g.op(HOSTILE, g.input("x", (1,)), name=HOSTILE, shapes=[(1,)], note=HOSTILE)
    text = draw(g.finish(y), {f"{HOSTILE}.{HOSTILE}": HOSTILE}, {f"{HOSTILE}.{HOSTILE}": HOSTILE})
    assert "\x07" not in text
    if draw is to_svg:
        assert "<script" not in text
        assert "alert" in "".join(ET.fromstring(text).itertext())
    else:
        assert "\\\\N\\n" in text  # Graphviz shows a backslash, and a line ends where ours did


def test_groups_share_a_colour_and_are_in_the_legend():
    graph = block(2)
    device = {op.name: f"gpu {i // 3}" for i, op in enumerate(graph.ops)}
    svg = to_svg(graph, color_by=device)
    fills = [box.find(f"{SVG}rect").get("fill") for box in boxes(svg)][2:-1]
    assert fills[:3] == [fills[0]] * 3
    assert fills[3:6] == [fills[3]] * 3
    assert len(set(fills)) == 3
    for name in ("gpu 0", "gpu 1", "gpu 2"):
        assert f">{name}</text>" in svg
    assert to_dot(graph, color_by=device).count(fills[0]) == 3


def test_labels_are_a_line_of_their_box():
    svg = to_svg(block(1), labels={"layers.0.fc": "b=2 n=4"})
    assert ">b=2 n=4</text>" in svg
    assert "b=2 n=4" in to_dot(block(1), labels={"layers.0.fc": "b=2 n=4"})


def test_large_graphs_are_folded_to_the_depth_that_fits():
    graph = block(40)
    folded = [[t.text for t in b.iter(f"{SVG}text")] for b in boxes(to_svg(graph, max_nodes=50))]
    assert ["layers.7", "3 ops"] in folded
    assert len(folded) == 40 + 1 + 3  # modules, the loss, and what goes in and out
    deeper = boxes(to_svg(graph, max_nodes=5))
    assert [[t.text for t in b.iter(f"{SVG}text")] for b in deeper][2] == ["layers", "120 ops"]


def test_a_folded_module_tells_what_is_in_it():
    box = boxes(to_svg(block(40), max_nodes=5))[2]
    title = box.find(f"{SVG}title").text
    assert "120 ops" in title
    assert "80 elementwise, 40 linear" in title


def test_ops_above_the_folded_modules_stay_by_themselves():
    g = GraphBuilder("cells")
    x = g.input("x", (4,))
    for i in range(60):
        with g.scope(f"cell.{i}"):
            for part in "ab":
                with g.scope(part):
                    x = g.relu(g.relu(x))
                x = g.add(x, x)
    svg = to_svg(g.finish(x), max_nodes=250)
    texts = [[t.text for t in b.iter(f"{SVG}text")] for b in boxes(svg)]
    assert ["cell.3.a", "2 ops"] in texts
    assert ["cell.3.add", "add 4"] in texts
    assert "marker-start" not in svg  # no arrow runs upwards


def test_many_inputs_of_one_op_are_one_box():
    g = GraphBuilder("many")
    x = g.concat([g.input(f"x{i}", (2, 3)) for i in range(30)], name="all")
    svg = to_svg(g.finish(*g.split(x, (3,) * 30)))
    texts = [[t.text for t in b.iter(f"{SVG}text")] for b in boxes(svg)]
    assert texts == [
        ["x0 … x29", "30 inputs"], ["all", "concat 2×90"], ["split", "split 2×3"],
        ["split:0 … split:29", "30 outputs"],
    ]  # fmt: skip
    assert "and 10 more" in svg


def test_without_scopes_runs_of_ops_are_folded():
    g = GraphBuilder("long")
    x = g.input("x", (4,))
    for _ in range(1000):
        x = g.relu(x)
    svg = to_svg(g.finish(x))
    assert len(boxes(svg)) <= 300 + 2
    assert "relu … relu_3" in svg


def test_the_forward_and_backward_of_a_module_are_two_boxes():
    svg = to_svg(training_graph(block(100)), max_nodes=250)
    names = {b.find(f"{SVG}text").text for b in boxes(svg)}
    assert {"layers.5", "layers.5 backward", "optimizer"} <= names


def test_modules_are_framed_in_dot_unless_not_wanted():
    framed = to_dot(block(2))
    assert framed.count("subgraph cluster_") == 3  # layers, layers.0, layers.1
    assert 'label="layers.1"' in framed
    assert "subgraph" not in to_dot(block(2), clusters=False)


def test_an_empty_graph_is_an_empty_picture():
    graph = GraphBuilder("nothing").finish()
    assert boxes(to_svg(graph)) == []
    assert to_dot(graph).startswith('digraph "nothing" {')
