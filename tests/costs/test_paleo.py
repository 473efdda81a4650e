"""Exprimo's files read, and Paleo's times equal to what Exprimo itself exported."""

import json
from pathlib import Path

import pytest

from partita.capture.exprimo_devices import (
    device_cluster,
    device_graph_from_json,
)
from partita.capture.exprimo_net import network_from_json, read_network
from partita.costs.paleo import exprimo_problem, work
from partita.problems.placement import read

DATA = Path(__file__).parents[1] / "data"
MALVIK = device_graph_from_json(json.loads((DATA / "exprimo" / "malvik.json").read_text()))


def conv(parent, kernel, channels, padding, stride=1):
    return {
        "type": "Convolution",
        "parents": [parent],
        "filter": [kernel, kernel, -1, channels],
        "strides": [1, stride, stride, 1],
        "padding": padding,
    }


def resnet50():
    """ResNet-50 as Exprimo's file has it: strides in the first convolution of a group."""
    layers = {
        "data": {"type": "Input", "parents": [], "tensor": [1, 224, 224, 3]},
        "conv1": conv("data", 7, 64, "SAME", 2),
        "pool1": {
            "type": "Pooling",
            "parents": ["conv1"],
            "ksize": [1, 3, 3, 1],
            "strides": [1, 2, 2, 1],
            "padding": "VALID",
        },
    }
    before = "pool1"
    for group, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 2):
        for letter in "abcdef"[:count]:
            name, first = f"res{group}{letter}", letter == "a"
            stride = 2 if first and group > 2 else 1
            if first:
                layers[f"{name}_branch1"] = conv(before, 1, 4 * width, "VALID", stride)
            layers[f"{name}_branch2a"] = conv(before, 1, width, "VALID", stride)
            layers[f"{name}_branch2b"] = conv(f"{name}_branch2a", 3, width, "SAME")
            layers[f"{name}_branch2c"] = conv(f"{name}_branch2b", 1, 4 * width, "VALID")
            skip = f"{name}_branch1" if first else before
            layers[name] = {"type": "Elementwise", "parents": [skip, f"{name}_branch2c"]}
            before = name
    layers["pool5"] = {
        "type": "Pooling",
        "parents": [before],
        "ksize": [1, 7, 7, 1],
        "strides": [1, 1, 1, 1],
        "padding": "VALID",
    }
    layers["fc1000"] = {"type": "InnerProduct", "parents": ["pool5"], "num_outputs": 1000}
    layers["prob"] = {"type": "Softmax", "parents": ["fc1000"]}
    return network_from_json({"name": "ResNet-50", "layers": layers})


@pytest.mark.parametrize(
    ("network", "file"),
    [
        (read_network(DATA / "exprimo" / "alexnet.json"), "alexnet-malvik.json"),
        (resnet50(), "resnet50-malvik.json"),
    ],
    ids=["alexnet", "resnet50"],
)
def test_the_problem_is_the_one_that_exprimo_exported(network, file):
    exported, ours = read(DATA / "placement" / file), exprimo_problem(network, MALVIK)
    assert (ours.devices, ours.channels, ours.route) == (
        exported.devices,
        exported.channels,
        exported.route,
    )
    for mine, theirs in zip(ours.layers, exported.layers, strict=True):
        assert mine.fwd_ms == pytest.approx(theirs.fwd_ms, rel=1e-12)
        assert mine.bwd_ms == pytest.approx(theirs.bwd_ms, rel=1e-12)
        assert mine.transfer_ms == pytest.approx(theirs.transfer_ms, rel=1e-12)
        same = ("name", "type", "parents", "children", "output_bytes", "weight_bytes")
        assert [getattr(mine, x) for x in same] == [getattr(theirs, x) for x in same]


def test_a_transposed_convolution_does_backward_what_a_convolution_does_forward():
    up = {
        "type": "Deconvolution",
        "parents": ["x"],
        "filter": [4, 4, 8, 16],
        "strides": [1, 2, 2, 1],
        "output_shape": [1, 32, 32, 8],
        "padding": "SAME",
    }
    down = {**conv("x", 4, 16, "SAME", 2)}
    small = {"type": "Input", "parents": [], "tensor": [1, 16, 16, 16]}
    large = {"type": "Input", "parents": [], "tensor": [1, 32, 32, 8]}
    one = network_from_json({"layers": {"x": small, "up": up}}, 1).layers[1]
    other = network_from_json({"layers": {"x": large, "down": down}}, 1).layers[1]
    assert one.shape == (1, 32, 32, 8)
    assert work(one) == work(other)[::-1]


class TestDeviceGraphs:
    def test_channels_become_media_that_links_share(self):
        cluster = device_cluster(MALVIK)
        assert cluster.num_devices == 3
        assert cluster.links[0].bytes_per_s == 16e9
        assert {link.lane for link in cluster.links} == {"channel 0 pcie3", "channel 1 pcie3"}
        assert [device.kind for device in cluster.devices[1:]] == ["NVIDIA Tesla V100"] * 2

    def test_devices_of_a_model_with_unlike_memory_are_unlike_kinds(self):
        raw = _machine()
        raw["devices"][1]["memory"] = 2.5
        kinds = [device.kind for device in device_cluster(device_graph_from_json(raw)).devices]
        assert kinds == ["V", "V (2)"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda raw: raw["comm_channels"][0].update(bandwidth=0),
             r"m.json: comm_channels\[0\].bandwidth: found 0; give a number above 0"),
            (lambda raw: raw["comm_channels"][0].update(bandwidth=-3),
             r"comm_channels\[0\].bandwidth: found -3"),
            (lambda raw: raw["devices"][0].pop("peak_gflops"),
             r"devices\[0\].peak_gflops: is missing"),
            (lambda raw: raw["devices"][1].update(neighbours=[]),
             r"devices\[1\].neighbours: sends to no other device: there is no route"),
            (lambda raw: raw["devices"][1]["neighbours"][0].update(device=7),
             r"devices\[1\].neighbours\[0\].device: found 7; there are 2, counted from 0"),
            (lambda raw: raw["devices"][0]["neighbours"][0].update(device=0),
             r"neighbours\[0\]: names the device itself"),
            (lambda raw: raw.update(devices=[]), "devices: has no devices"),
            (lambda raw: raw.update(comm_channels=None), "comm_channels: is missing"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_named(self, change, message):
        from partita.errors import ClusterError

        raw = _machine()
        change(raw)
        with pytest.raises(ClusterError, match=message):
            device_graph_from_json(raw, "m.json")


def _machine():
    device = {
        "model": "V", "type": "gpu", "clock": 1, "peak_gflops": 1, "memory": 1, "mem_bandwidth": 1
    }  # fmt: skip
    return {
        "comm_channels": [{"type": "pcie3", "bandwidth": 128}],
        "devices": [
            {**device, "neighbours": [{"device": 1, "comm_channel": 0}]},
            {**device, "neighbours": [{"device": 0, "comm_channel": 0}]},
        ],
    }
