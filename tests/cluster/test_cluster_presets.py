""" """

import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_clusters import FUZZ

from partita.cluster import Cluster, list_kinds, list_presets, resolve
from partita.cluster.machines import SHAPES, plain
from partita.cluster.presets import catalogue, list_interconnects
from partita.cluster.toml import write_toml
from partita.errors import ClusterError, FileError, InputError
from tests.quickness import least_cpu_s

KINDS = {kind.name: kind for kind in list_kinds()}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
class TestEveryKind:
    def test_says_where_its_figures_come_from(self, kind):
        assert any(f"({year})" in kind.source for year in range(2015, 2027))

    def test_says_what_is_not_from_a_datasheet(self, kind):
        assert "typical" in kind.source.lower() or "estimated" in kind.source

    def test_is_found_by_its_name_in_any_case(self, kind):
        assert resolve(f"1x{kind.name.upper()}").kind_of(0) == kind
        assert resolve(f"1x{kind.name.lower().replace('-', '')}").kind_of(0) == kind

    def test_has_figures_of_the_right_size(self, kind):
        if kind.type == "gpu":
            assert 4e12 < kind.peak("f32") < 2e14
            assert 2e11 < kind.memory_bytes_per_s < 1e13
            assert kind.cache_bytes_per_s > kind.memory_bytes_per_s
            assert 2**33 < kind.memory_bytes < 3e11
            assert kind.registers_per_unit in (65536, 131072)
            assert kind.shared_bytes_per_unit in {
                size * 1024 for size in (64, 96, 100, 112, 164, 228)
            }
        assert kind.peak("f16") >= kind.peak("f32")
        assert kind.peak("f8") >= kind.peak("f16")
        assert kind.peak("f64") <= kind.peak("f32")
        assert 0 < kind.launch_s < 1e-5

    def test_comes_in_nodes_that_are_joined(self, kind):
        machine = resolve(f"2x3x{kind.name}")
        inner = machine.levels()[0]
        assert inner.groups == ((0, 1, 2), (3, 4, 5))
        assert machine.levels()[-1].bytes_per_s < inner.bytes_per_s or kind.type == "cpu"


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [  # the vendors' dense figures
        ("A100", "bf16", 312),
        ("A100", "tf32", 156),
        ("H100", "bf16", 989.4),
        ("H100", "f8", 1978.9),
        ("H100-PCIe", "bf16", 756),
        ("H200", "f16", 989.4),
        ("B200", "bf16", 2250),
        ("V100", "f16", 125),
        ("V100", "bf16", 15.7),
        ("P100", "f16", 21.2),
        ("T4", "f16", 65),
        ("GTX-1080-Ti", "f32", 11.3),
        ("GTX-1080-Ti", "f16", 11.3),
        ("RTX-4090", "f16", 165.2),
        ("L4", "f16", 121),
        ("MI300X", "bf16", 1307.4),
        ("TPUv4", "bf16", 275),
    ],
)
def test_rates_are_dense_peaks(name, dtype, tera):
    assert resolve(f"1x{name}").kind_of(0).peak(dtype) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("A100", "A100-80GB-SXM"),
        ("h100", "H100-SXM"),
        ("V100", "V100-32GB-SXM2"),
        ("cpu", "EPYC-7763"),
    ],
)
def test_short_names_mean_the_usual_variant(name, expected):
    assert resolve(f"2x{name}").kind_of(0).name == expected


def test_the_same_silicon_has_the_same_rates():
    for a, b in (("A100-40GB-SXM", "A100-80GB-SXM"), ("H100-SXM", "H200-SXM")):
        assert KINDS[a].flops_per_s == KINDS[b].flops_per_s
        assert KINDS[a].num_units == KINDS[b].num_units


@pytest.mark.parametrize("cable", list_interconnects(), ids=lambda cable: cable.name)
def test_every_interconnect_has_a_source_and_a_shape(cable):
    assert cable.source
    assert cable.shape in SHAPES
    assert 0 < cable.wire.latency_s < 1e-4


@pytest.mark.parametrize(
    ("name", "giga"),
    [
        ("nvlink2", 150),
        ("nvlink3", 300),
        ("nvlink4", 450),
        ("nvlink5", 900),
        ("pcie3", 15.75),
        ("pcie4", 31.5),
        ("pcie5", 63),
        ("ethernet-25", 3.125),
        ("infiniband-100", 12.5),
        ("infiniband-200", 25),
        ("infiniband-400", 50),
    ],
)
def test_interconnects_are_given_per_direction(name, giga):
    assert catalogue().interconnect(name).wire.bytes_per_s == giga * 1e9


class TestMachines:
    @pytest.mark.parametrize("name", list_presets())
    def test_every_one_is_whole_and_described(self, name):
        machine = resolve(name)
        assert machine.name == name
        assert resolve(name.upper()) == machine
        assert machine.levels()[-1].groups == (tuple(range(machine.num_devices)),)
        assert "\n" not in list_presets()[name]

    def test_a_dgx_1_has_six_nvlinks_per_gpu(self):
        dgx = resolve("dgx-1-v100")
        for device in dgx.devices:
            direct = [link for link in dgx.links if link.source == device.name]
            nvlinks = [link for link in direct if not link.target.endswith("host1")]
            assert sum(link.bytes_per_s for link in nvlinks) == 6 * 25e9

    def test_malvik_is_a_cpu_with_two_gpus_on_buses_of_their_own(self):
        malvik = resolve("malvik")
        assert [malvik.kind_of(i).type for i in range(3)] == ["cpu", "gpu", "gpu"]
        assert len({link.lane for link in malvik.links}) == 2
        assert len(malvik.route(1, 2)) == 2

    def test_can_be_multiplied(self):
        machine = resolve("2xdgx-a100+1xdgx-h100")
        assert machine.num_devices == 24
        assert [level.bytes_per_s for level in machine.levels()] == [450e9, 300e9, 25e9]
        assert resolve("1xdgx-a100").links == resolve("dgx-a100").links

    def test_of_p4d_share_four_cards(self):
        machine = resolve("2xp4d.24xlarge")
        assert sum(link.target == "network" for link in machine.links) == 8
        assert machine.levels()[-1].bytes_per_s == 12.5e9

    def test_made_of_single_parts_cannot_be_multiplied(self):
        with pytest.raises(ClusterError, match="malvik in '2xmalvik' is one machine and cannot be"):
            resolve("2xmalvik")


class TestShorthand:
    def sizes(self, spec):
        nodes = {}
        for device in resolve(spec).devices:
            nodes[device.node] = nodes.get(device.node, 0) + 1
        return list(nodes.values())

    @pytest.mark.parametrize(
        ("spec", "sizes"),
        [
            ("A100", [1]),
            ("4xA100", [4]),
            ("8xA100", [8]),
            ("12xA100", [8, 4]),
            ("2x8xH100", [8, 8]),
            ("3x2xH100", [2, 2, 2]),
            ("1x16xV100", [16]),
            ("4xV100+8xP100", [4, 8]),
            (" 4xv100 + 8 x p100 ".replace(" x ", "x"), [4, 8]),
            ("2×4×A100", [4, 4]),
            ("72xGB200", [72]),
            ("64xTPUv4", [64]),
            ("1xCPU", [1]),
        ],
    )
    def test_groups_are_cut_into_nodes(self, spec, sizes):
        assert self.sizes(spec) == sizes

    def test_data_centre_gpus_have_a_card_each(self):
        machine = resolve("2x8xH100")
        assert sum(link.target == "network" for link in machine.links) == 16
        assert [level.bytes_per_s for level in machine.levels()] == [450e9, 50e9]

    def test_consumer_gpus_share_the_card_of_their_host(self):
        machine = resolve("2x4xRTX-3090")
        into = [link.source for link in machine.links if link.target == "network"]
        assert into == ["n0.host", "n1.host"]
        assert [level.bytes_per_s for level in machine.levels()] == [31.5e9, 3.125e9]

    def test_one_node_has_no_network(self):
        assert resolve("8xH100").switches == ("n0.switch",)

    def test_spelling_does_not_change_the_cluster(self):
        assert resolve("8XGTX1080ti") == resolve("8xGTX-1080-Ti")
        assert resolve("4xa100").fingerprint() == resolve("4xA100-80GB-SXM").fingerprint()

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("0xA100", "cluster: found the count 0 in '0xA100'; counts go from 1 to 100,000"),
            ("-4xA100", "found the count -4 in"),
            ("2x0xA100", "found the count 0 in"),
            ("100001xA100", "found the count 100001"),
            (f"{'9' * 5000}xA100", "found the count 99999999999999999999 in"),
            ("50000x8xH100", "'50000x8xH100' has 400,000 devices; at most 100,000"),
            ("99999xA100+99999xH100", "has 199,998 devices"),
            ("1x100000xMI300X", "nodes: would have up to"),
            ("4xA10O", "unknown device or machine 'A10O' in '4xA10O'; did you mean A10"),
            ("4xH1000", "did you mean H100"),
            ("dgx-a1000", "did you mean dgx-a100"),
            ("quux", "known are "),
            ("", "found '' where a cluster belongs; name one, such as 4xA100"),
            ("4xA100+", "found '4xA100\\+'; write a preset, a .toml or .json file, or a shorthand"),
            ("4xA\x00", "write a preset"),
        ],
    )
    def test_nonsense_is_refused(self, spec, message):
        with pytest.raises(ClusterError, match=message):
            resolve(spec)

    def test_what_is_not_text_is_refused(self):
        with pytest.raises(ClusterError, match="found 4 where a cluster belongs"):
            resolve(4)

    WORDS = ("A100", "h100", "dgx-a100", "malvik", "CPU", "9999999999", "nvlink3")
    TOKENS = st.sampled_from((*"1280-+x×X.ü² \0", *WORDS))

    @settings(FUZZ, max_examples=300)
    @given(st.lists(TOKENS, max_size=7).map("".join) | st.text(max_size=12))
    @example("\ud800")
    @example("x" * 100_000)
    @example("+" * 1000)
    def test_any_text_is_a_cluster_or_refused(self, spec):
        try:
            machine = resolve(spec)
        except InputError:
            return
        assert machine.num_devices >= 1

    def test_of_a_thousand_devices_takes_a_moment(self):
        resolve("1xA100")  # reads the presets
        assert resolve("128x8xH100").num_devices == 1024
        assert least_cpu_s(lambda: resolve("128x8xH100"), 0.3) < 0.3


class TestFiles:
    def test_of_both_formats_give_the_cluster_back(self, tmp_path):
        machine = resolve("2x2xA100+3xT4")
        (tmp_path / "m.toml").write_text(write_toml(machine), encoding="utf-8")
        (tmp_path / "m.json").write_bytes(machine.to_json())
        assert resolve(tmp_path / "m.toml") == machine
        assert resolve(str(tmp_path / "m.json")) == machine

    def test_may_begin_with_a_byte_order_mark(self, tmp_path):
        file = tmp_path / "m.toml"
        file.write_bytes(b'\xef\xbb\xbf[[nodes]]\ndevices = "1xT4"\n')
        assert resolve(file).num_devices == 1

    def test_that_are_missing_or_strange_are_refused(self, tmp_path):
        with pytest.raises(FileError, match=r"nothing.toml: no such file; check the path"):
            resolve("nothing.toml")
        with pytest.raises(FileError, match=r"m.yaml: ends in '.yaml'; a cluster file ends in"):
            resolve(Path("m.yaml"))
        (tmp_path / "d.toml").mkdir()
        with pytest.raises(FileError, match="is a folder"):
            resolve(tmp_path / "d.toml")

    @pytest.mark.parametrize("suffix", [".toml", ".json"])
    def test_of_ten_megabytes_of_noise_are_refused_at_once(self, tmp_path, suffix):
        file = tmp_path / f"noise{suffix}"
        file.write_bytes(b"# fine\n" + random.Random(0).randbytes(10_000_000))

        def refused() -> None:
            with pytest.raises(FileError, match=rf"noise{suffix}: is not (TOML \(line 2 has|JSON)"):
                resolve(file)

        assert least_cpu_s(refused, 2) < 2

    def test_that_hold_bad_figures_are_named(self, tmp_path):
        file = tmp_path / "m.json"
        file.write_bytes(resolve("2xA100").to_json().replace(b"6e-07", b"-6e-07"))
        with pytest.raises(ClusterError, match=r"m.json: link 'n0.gpu0' -> 'n0.switch' latency_s"):
            resolve(file)


def test_plain_names_are_letters_and_digits():
    assert plain("GTX-1080 Ti") == plain("gtx1080ti") == "gtx1080ti"


def test_a_cluster_is_a_value():
    assert resolve("4xA100") == resolve("4xA100")
    assert isinstance(resolve("4xA100"), Cluster)
    assert len({resolve("4xA100"), resolve("4xA100"), resolve("2xA100")}) == 2


def test_a_machine_with_other_memory_and_links_is_the_same_in_all_else():
    usual, other = resolve("2x2xA100"), resolve("2x2xA100@memory=24GB,links=0.5")
    assert {kind.memory_bytes for kind in other.kinds} == {24_000_000_000}
    links = zip(usual.links, other.links, strict=True)
    assert {after.bytes_per_s / before.bytes_per_s for before, after in links} == {0.5}
    assert other.devices == usual.devices
    assert other.name.endswith("@memory=24GB,links=0.5")
    assert other.fingerprint() != usual.fingerprint()


def test_a_file_may_be_changed_too(tmp_path):
    file = tmp_path / "lab.toml"
    file.write_text('[[nodes]]\ndevices = "2xA100"\n')
    assert resolve(f"{file}@memory=1GiB").kinds[0].memory_bytes == 2**30


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("4xA100@memory=lots", "memory: found 'lots'; write a size such as 40GB or 16GiB"),
        ("4xA100@links=0", "links: found '0'; give a factor of 0.001 to 1000: links=0.5"),
        ("4xA100@links=nan", "links: found 'nan'; give a factor"),
        ("4xA100@link=1", "cluster: found 'link'; did you mean links"),
        ("4xNO@links=1", "unknown device or machine 'NO'"),
    ],
)
def test_a_change_that_cannot_be_is_refused(spec, message):
    with pytest.raises(InputError) as error:
        resolve(spec)
    assert message in str(error.value)
