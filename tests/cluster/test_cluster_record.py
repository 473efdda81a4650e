import copy
import json
import math
import pickle
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_clusters import FUZZ, KIND, cables, cluster, clusters, ring

from partita.cluster import Cluster, Device, DeviceKind, Link, resolve
from partita.errors import ClusterError, FileError, InputError


def kind(**changes):
    fields = {"name": "k", "type": "gpu", "flops_per_s": (("f32", 1e12),)}
    fields |= {"memory_bytes": 2**30, "memory_bytes_per_s": 1e11}
    return DeviceKind(**(fields | changes))


class TestPeak:
    @pytest.mark.parametrize(
        ("listed", "dtype", "expected"),
        [
            ({"f32": 10.0, "f16": 80.0}, "f16", 80.0),
            ({"f32": 10.0, "f16": 80.0}, "bf16", 80.0),
            ({"f32": 10.0, "bf16": 70.0}, "f16", 70.0),
            ({"f32": 10.0, "f16": 80.0, "bf16": 10.0}, "bf16", 10.0),
            ({"f32": 10.0}, "f16", 10.0),
            ({"f32": 10.0}, "tf32", 10.0),
            ({"f32": 10.0, "tf32": 40.0}, "tf32", 40.0),
            ({"f32": 10.0, "tf32": 40.0}, "f32", 10.0),
            ({"f32": 10.0, "f16": 80.0}, "f8", 80.0),
            ({"f32": 10.0, "f8": 160.0}, "f8", 160.0),
            ({"f32": 10.0}, "f64", 5.0),
            ({"f32": 10.0, "f64": 0.3}, "f64", 0.3),
            ({"f32": 10.0, "i8": 99.0}, "i8", 99.0),
            ({"f32": 10.0, "i8": 99.0}, "i32", 10.0),
            ({"f32": 10.0}, "bool", 10.0),
        ],
    )
    def test_an_unlisted_rate_is_that_of_what_the_hardware_uses_instead(
        self, listed, dtype, expected
    ):
        assert kind(flops_per_s=tuple(listed.items())).peak(dtype) == expected

    def test_an_unknown_dtype_is_refused(self):
        with pytest.raises(ClusterError, match="dtype: unknown dtype 'float32'; use one of f64"):
            KIND.peak("float32")

    def test_every_dtype_of_graphs_has_a_rate(self):
        from partita.graph.record import BYTES

        assert all(KIND.peak(dtype) > 0 for dtype in BYTES)


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"name": ""}, "kinds: the name of a kind of device is empty"),
            ({"name": "a\nb"}, r"kinds: 'a\\nb' has characters that a name cannot have"),
            ({"type": 3}, "kind 'k' type: found 3"),
            ({"flops_per_s": ()}, "kind 'k' flops_per_s: has no rate for f32"),
            ({"flops_per_s": (("f32", math.nan),)}, "kind 'k' flops_per_s f32: found nan"),
            ({"flops_per_s": (("f32", 1), ("f32", 2))}, "a rate for one dtype twice"),
            ({"flops_per_s": (("f33", 1),)}, "unknown dtype 'f33'; use f64, f32"),
            ({"flops_per_s": 3}, "is not a list of pairs"),
            ({"memory_bytes": 0}, "kind 'k' memory_bytes: found 0; a whole number of 1 or more"),
            ({"memory_bytes": 1.5}, "kind 'k' memory_bytes: found 1.5"),
            ({"memory_bytes_per_s": -1}, "memory_bytes_per_s: found -1; a finite number above 0"),
            ({"memory_bytes_per_s": True}, "memory_bytes_per_s: found true"),
            ({"cache_bytes": 1}, "kind 'k' cache_bytes_per_s: found 0.0"),
            ({"launch_s": math.inf}, "kind 'k' launch_s: found inf"),
            ({"launch_s": 10**5000}, "kind 'k' launch_s: found a number far too large"),
            ({"num_units": 0}, "kind 'k' num_units: found 0"),
            ({"source": "\ud800"}, "kind 'k' source: is not text"),
        ],
    )
    def test_kinds_that_cannot_exist(self, changes, message):
        with pytest.raises(ClusterError, match=message):
            kind(**changes)

    @pytest.mark.parametrize(
        ("link", "message"),
        [
            (("a", "b", math.nan, 1), "link 'a' -> 'b' latency_s: found nan"),
            (("a", "b", -1e-9, 1), "latency_s: found -1e-09; a finite number of 0 or more"),
            (("a", "b", 0, -5), "link 'a' -> 'b' bytes_per_s: found -5; a finite number above 0"),
            (("a", "b", 0, 0), "bytes_per_s: found 0"),
            (("a", "b", 0, math.inf), "bytes_per_s: found inf"),
            (("a", "a", 0, 1), "link 'a' -> 'a': leads back to where it starts"),
            (("a", None, 0, 1), "links target: found None"),
        ],
    )
    def test_links_that_cannot_exist(self, link, message):
        with pytest.raises(ClusterError, match=message):
            Link(*link)

    def test_a_cluster_without_devices(self):
        with pytest.raises(ClusterError, match="devices: has no devices; give it at least one"):
            Cluster("c", (KIND,), ())

    def test_two_devices_of_one_name(self):
        twice = (Device("a", "gpu"), Device("a", "gpu"))
        with pytest.raises(ClusterError, match=r"devices\[1\]: the name 'a' is given twice"):
            Cluster("c", (KIND,), twice)

    def test_a_switch_named_like_a_device(self):
        with pytest.raises(ClusterError, match=r"switches\[1\]: the name 'd0' is given twice"):
            cluster(1, (), switches=("s", "d0"))

    def test_two_kinds_of_one_name(self):
        with pytest.raises(ClusterError, match=r"kinds\[1\]: the name 'gpu' is given twice"):
            Cluster("c", (KIND, KIND), (Device("a", "gpu"),))

    def test_a_kind_nobody_has_described(self):
        with pytest.raises(ClusterError, match=r"devices\[0\].kind: 'a' is of the unknown kind"):
            Cluster("c", (KIND,), (Device("a", "tpu"),))

    def test_a_link_to_nowhere(self):
        with pytest.raises(ClusterError, match=r"links\[0\].target: there is no device or switch"):
            cluster(2, cables(("d0", "d9", 0, 1)))

    def test_devices_that_cannot_reach_each_other(self):
        apart = (*cables(("d0", "d1", 0, 1)), *cables(("d2", "d3", 0, 1)))
        with pytest.raises(ClusterError, match="links: device 'd0' cannot reach device 'd2'; add"):
            cluster(4, apart)

    def test_a_way_there_but_none_back(self):
        with pytest.raises(ClusterError, match="device 'd1' cannot reach device 'd0'"):
            cluster(2, (Link("d0", "d1", 0, 1),))


def test_a_device_alone_needs_no_links():
    alone = cluster(1, ())
    assert alone.route(0, 0) == ()
    assert alone.levels()[-1].groups == ((0,),)
    assert alone.levels()[0].bytes_per_s == KIND.memory_bytes_per_s


def test_a_mix_of_kinds_is_not_homogeneous():
    other = kind(name="other")
    links = cables(("d0", "d1", 0, 1))
    mixed = Cluster("c", (KIND, other), (Device("d0", "gpu"), Device("d1", "other")), (), links)
    assert not mixed.is_homogeneous
    assert mixed.kind_of(1) is other
    assert mixed.num_devices == 2
    assert cluster(2, links).is_homogeneous


def test_whole_numbers_and_floats_make_equal_clusters():
    a = cluster(2, cables(("d0", "d1", 0, 10)))
    b = cluster(2, cables(("d0", "d1", 0.0, 10.0)))
    assert a == b
    assert a.fingerprint() == b.fingerprint()


class TestSubset:
    def test_keeps_the_order_asked_for_and_only_what_is_needed(self):
        whole = resolve("2xV100+2xP100")
        part = whole.subset([3, 2])
        assert [device.name for device in part.devices] == ["n1.gpu1", "n1.gpu0"]
        assert [kind.name for kind in part.kinds] == ["P100-SXM2"]
        assert part.switches == ("network", "n1.switch")
        assert part.is_homogeneous

    def test_of_everything_is_everything(self):
        whole = resolve("2x4xA100")
        assert whole.subset(range(8)) == whole

    def test_of_a_ring_passes_through_the_devices_left_out(self):
        part = ring(6).subset([0, 3])
        assert part.num_devices == 2
        assert len(part.route(0, 1)) == 3
        assert set(part.switches) == {"d1", "d2", "d4", "d5"}

    @pytest.mark.parametrize(
        ("chosen", "message"),
        [
            ([], "has no devices"),
            ([7], "there is no device 7; use 0 to 3"),
            ([-1], "there is no device -1"),
            (["d0"], "there is no device 'd0'"),
            ([1, 1], "a device is chosen twice"),
        ],
    )
    def test_of_what_is_not_there_is_refused(self, chosen, message):
        with pytest.raises(ClusterError, match=message):
            ring(4).subset(chosen)


class TestFingerprint:
    def test_is_sixteen_hex_digits_and_stays_the_same(self):
        fingerprint = ring(4).fingerprint()
        assert fingerprint == ring(4).fingerprint() == "5b1f9c5b9d078c79"
        assert len(fingerprint) == 16

    def test_differs_where_any_figure_does(self):
        prints = {ring(4).fingerprint(), ring(5).fingerprint(), ring(4, 2e-6).fingerprint()}
        assert len(prints) == 3

    @FUZZ
    @given(clusters())
    def test_survives_saving_and_copying(self, machine):
        machine.levels()
        for copied in (Cluster.from_json(machine.to_json()), copy.deepcopy(machine)):
            assert copied == machine
            assert hash(copied) == hash(machine)
            assert copied.fingerprint() == machine.fingerprint()


def test_clusters_can_be_pickled():
    machine = resolve("2x4xA100")
    machine.route(0, 7)
    assert pickle.loads(pickle.dumps(machine)) == machine


def test_what_is_derived_is_not_saved():
    machine = ring(4)
    machine.levels()
    plain = msgspec.to_builtins(machine)
    assert set(plain) == {"name", "kinds", "devices", "switches", "links"}


class TestJson:
    def saved(self):
        return json.loads(resolve("2xV100+1xT4").to_json())

    @FUZZ
    @given(clusters())
    def test_gives_back_what_was_saved(self, machine):
        assert Cluster.from_json(machine.to_json()) == machine
        assert Cluster.from_json(machine.to_json().decode()) == machine

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ("", "f: is not JSON"),
            ("[]", "f: holds a JSON list; a JSON object is needed"),
            ("{}", 'f: format: is missing; needs "format": "partita/cluster@1"'),
            ('{"format": "partita/graph@1"}', "f: format: found .*graph.* is needed here"),
            ('{"format": "partita/cluster@2"}', "newer partita .*; upgrade with: pip install"),
            ('{"format": "partita/cluster@1"}', "f: Object missing required field `name`"),
            ("\ud800", "f: is not Unicode text"),
        ],
    )
    def test_what_is_not_a_cluster_file_is_refused(self, data, message):
        with pytest.raises(InputError, match=message):
            Cluster.from_json(data, "f")

    def test_a_wrong_type_names_the_field(self):
        saved = self.saved()
        saved["links"][3]["latency_s"] = "fast"
        with pytest.raises(FileError, match=r"f: links\[3\].latency_s: Expected `float`"):
            Cluster.from_json(json.dumps(saved), "f")

    def test_a_wrong_value_names_the_link(self):
        saved = self.saved()
        saved["links"][0]["bytes_per_s"] = -1
        with pytest.raises(ClusterError, match=r"f: link 'n0.gpu0' -> 'n0.switch' bytes_per_s"):
            Cluster.from_json(json.dumps(saved), "f")

    @settings(FUZZ, max_examples=200)
    @given(data=st.data())
    def test_any_value_anywhere_is_read_or_refused(self, data):
        saved = self.saved()
        place = saved
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            if (
                not isinstance(place[key], dict | list)
                or not place[key]
                or data.draw(st.booleans())
            ):
                break
            place = place[key]
        leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
        place[key] = data.draw(leaves | st.lists(leaves, max_size=3) | st.just({}))
        machine, refusal = None, "f: "
        try:
            machine = Cluster.from_json(json.dumps(saved), "f")
        except InputError as error:
            refusal = str(error)
        assert refusal.startswith("f: ")
        if machine is not None:
            assert machine.levels()[-1].groups == (tuple(range(machine.num_devices)),)


def test_the_summary_tells_kinds_and_levels():
    assert resolve("4xV100+8xP100").summary().splitlines() == [
        "4xV100-32GB-SXM2+8xP100-SXM2: 12 devices in 2 nodes",
        "  4 x V100-32GB-SXM2 (gpu): 15.7 TFLOP/s f32, 125 f16; 32 GiB at 900 GB/s",
        "  8 x P100-SXM2 (gpu): 10.6 TFLOP/s f32, 21.2 f16; 16 GiB at 732 GB/s",
        "  9 groups of 4 or 1: 150 GB/s, 1.4 us",
        "  2 groups of 8 or 4: 80 GB/s, 1.4 us",
        "  1 group of 12: 12.5 GB/s, 3 us",
    ]


def test_importing_the_records_reads_no_files_and_no_heavy_packages():
    code = "import sys, partita.cluster; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    unwanted = {"numba", "torch", "numpy", "msgspec", "tomllib", "partita.cluster.presets"}
    assert "partita.cluster.record" in loaded
    assert not loaded & unwanted
