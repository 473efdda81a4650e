"""Networks of Exprimo and Paleo: blocks, shapes, order, and what is wrong with one."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings

from partita.capture.exprimo_devices import device_cluster, device_graph_from_json
from partita.capture.exprimo_graph import layer_ops, network_graph
from partita.capture.exprimo_net import is_network, network_from_json, with_devices
from partita.errors import InputError, ModelError
from partita.graph import training_graph
from tests.problems.json_mutations import mutated

MACHINE = Path(__file__).parents[1] / "data" / "exprimo" / "malvik.json"

INPUT = {"type": "Input", "parents": [], "tensor": [32, 8, 8, 3]}


def conv(parents, filters, **more):
    return {"type": "Convolution", "parents": parents, "filter": filters, "padding": "SAME", **more}


def net(**layers):
    return {"name": "small", "layers": {"data": INPUT, **layers}}


def branched():
    block = {
        "type": "Block",
        "parents": ["data"],
        "endpoint": "join",
        "layers": {
            "left": conv([], [1, 1, 3, 4], activation_fn="relu", normalizer_fn="batch_norm"),
            "right": conv([], [2, 2, -1, 6]),
            "join": {"type": "Concatenate", "parents": ["left", "right"], "dim": 3},
        },
    }
    pool = {"type": "AvgPool", "parents": ["mix"], "ksize": [1, 8, 8, 1]}
    dense = {"type": "InnerProduct", "parents": ["pool"], "num_outputs": 5}
    return net(
        mix=block, pool=pool, dense=dense, odd={"type": "Mystery", "parents": ["dense"]},
        end={"type": "Softmax", "parents": ["odd"]},
    )  # fmt: skip


class TestReading:
    def test_blocks_are_opened_and_their_name_means_their_endpoint(self):
        exprimo_network = network_from_json(branched(), 4)
        layers = {layer.name: layer for layer in exprimo_network.layers}
        assert layers["mix/left"].parents == ("data",)
        assert layers["mix/join"].parents == ("mix/left", "mix/right")
        assert layers["pool"].parents == ("mix/join",)
        assert layers["mix/join"].shape == (4, 8, 8, 10)
        assert layers["end"].shape == (4, 5)

    def test_the_batch_is_128_unless_said(self):
        assert network_from_json(branched()).layers[0].shape[0] == 128
        assert network_from_json(branched(), 7).layers[0].shape[0] == 7

    def test_layers_are_in_the_reverse_of_the_order_a_walk_leaves_them(self):
        names = [layer.name for layer in network_from_json(branched()).layers]
        assert names[:4] == ["data", "mix/right", "mix/left", "mix/join"]

    def test_devices_are_filled_in_inside_blocks_too(self):
        filled = with_devices(branched(), {"data": 1, "mix/left": 2})["layers"]
        assert filled["data"]["device"] == 1
        assert filled["mix"]["layers"]["left"]["device"] == 2
        assert "device" not in branched()["layers"]["data"]
        assert network_from_json({"layers": filled}).layers == network_from_json(branched()).layers

    def test_weights_have_a_bias(self):
        layers = {layer.name: layer for layer in network_from_json(branched()).layers}
        assert layers["mix/right"].num_weights == 2 * 2 * 3 * 6 + 6
        assert layers["dense"].num_weights == 10 * 5 + 5

    def test_a_network_is_told_from_a_file_of_ours(self):
        assert is_network(branched())
        assert not is_network({"format": "partita/graph@1", "layers": {}})
        assert not is_network({"devices": []})

    @pytest.mark.parametrize(
        ("layers", "message"),
        [
            ({"a": conv(["dat"], [1, 1, 3, 4])},
             "layers.a.parents: no layer is called 'dat'; did you mean data"),
            ({"a": conv(["data"], [1, 1, 5, 4])},
             "layers.a.filter: expects 5 channels, and its input has 3"),
            ({"a": conv(["data"], [1, 1, 3])}, r"layers.a.filter: found \[1, 1, 3\]"),
            ({"a": conv(["data"], [9, 9, 3, 1]) | {"padding": "VALID"}},
             r"layers.a: its output would be \[128, 0, 0, 1\]"),
            ({"a": conv(["data"], [1, 1, 3, 1]) | {"padding": "NEAR"}},
             "layers.a.padding: found 'NEAR'"),
            ({"a": conv(["data"], [1, 1, 3, 1]) | {"strides": [1, 0, 1, 1]}},
             r"layers.a.strides: found \[1, 0, 1, 1\]"),
            ({"a": {"type": "InnerProduct", "parents": ["data"]}},
             "layers.a.num_outputs: is missing; give a whole number"),
            ({"a": {"parents": ["data"]}}, "layers.a.type: has no type; use one of Input"),
            ({"a": {"type": "Dropout", "parents": []}},
             "layers.a.parents: has no parents; only an Input has none"),
            ({"a": {"type": "Dropout", "parents": "data"}},
             "layers.a.parents: is no list of names"),
            ({"a": {"type": "Dropout", "parents": ["b"]},
              "b": {"type": "Dropout", "parents": ["a"]}},
             "layers.a: no input leads to it"),
            ({"a": {"type": "Elementwise", "parents": ["data", "b"]},
              "b": conv(["data"], [1, 1, 3, 4])}, "layers.a: its inputs are"),
            ({"a": 3}, "layers.a: is no object"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_named(self, layers, message):
        with pytest.raises(ModelError, match=f"net.json: {message}"):
            network_from_json(net(**layers), file="net.json")

    def test_a_cycle_behind_the_input_is_named(self):
        layers = {
            "a": {"type": "Concatenate", "parents": ["data", "b"], "dim": 3},
            "b": {"type": "Dropout", "parents": ["a"]},
        }
        with pytest.raises(ModelError, match="depends on itself"):
            network_from_json(net(**layers))


class TestAnything:
    """Whatever is put in a file, what comes out is a network or a machine, or one sentence."""

    @settings(max_examples=150, deadline=None)
    @given(value=mutated(branched()))
    def test_a_changed_network_is_read_or_refused(self, value):
        try:
            graph = network_graph(network_from_json(value, 2, "net.json"))
        except InputError as error:
            assert str(error)
        else:
            assert graph.ops

    @settings(max_examples=150, deadline=None)
    @given(value=mutated(json.loads(MACHINE.read_text())))
    def test_a_changed_machine_is_read_or_refused(self, value):
        try:
            cluster = device_cluster(device_graph_from_json(value, "machine.json"))
        except InputError as error:
            assert str(error)
        else:
            assert cluster.num_devices >= 1


class TestGraph:
    def test_every_layer_has_its_ops_and_shapes_agree(self):
        network = network_from_json(branched(), 4)
        graph = network_graph(network)
        ops = dict(zip((x.name for x in network.layers), layer_ops(network, graph), strict=True))
        assert ops["mix/left"] == ("mix/left", "mix/left.norm", "mix/left.relu")
        assert ops["mix/right"] == ("mix/right.pad", "mix/right")  # two wide: padded on one side
        for layer in network.layers:
            last = graph.op(ops[layer.name][-1]).outputs[0]
            assert graph.tensor(last).num_elements == _product(layer.shape), layer.name

    def test_it_has_the_same_weights_and_can_be_trained(self):
        network = network_from_json(branched(), 4)
        graph = network_graph(network)
        own = {x.name for x in graph.parameters if ".norm" not in x.name}
        total = sum(graph.tensor(name).num_elements for name in own)
        assert total == sum(layer.num_weights for layer in network.layers)
        assert training_graph(graph).is_training

    def test_all_layer_types_become_ops(self):
        layers = {
            "up": {"type": "UpSampling2D", "parents": ["data"], "size": [2, 2]},
            "wide": {
                "type": "Deconvolution", "parents": ["up"], "filter": [3, 3, 4, 3],
                "strides": [1, 2, 2, 1], "output_shape": [1, 32, 32, 4],
            },
            "max": {"type": "Pooling", "parents": ["wide"], "ksize": [1, 3, 3, 1],
                    "strides": [1, 2, 2, 1], "padding": "SAME"},
            "flat": {"type": "Reshape", "parents": ["max"], "output_shape": [1, 1024]},
            "drop": {"type": "Dropout", "parents": ["flat"]},
            "squash": {"type": "Sigmoid", "parents": ["drop"]},
        }  # fmt: skip
        network = network_from_json(net(**layers), 2)
        graph = network_graph(network)
        shapes = {op.name: graph.tensor(op.outputs[0]).shape for op in graph.ops}
        assert shapes["up"] == (2, 3, 16, 16)
        assert shapes["wide"] == (2, 4, 32, 32)
        assert shapes["max"] == (2, 4, 16, 16)
        assert shapes["squash"] == (2, 1024)


def _product(shape):
    total = 1
    for size in shape:
        total *= size
    return total
