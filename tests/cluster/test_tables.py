""" """

import copy
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_clusters import FUZZ, clusters

from partita.cluster import resolve
from partita.cluster.presets import catalogue
from partita.cluster.tables import Document, TomlTable, lines_of, nearest_line
from partita.cluster.toml import read_cluster, read_toml, write_toml
from partita.errors import ClusterError, FileError, InputError
from tests.quickness import least_cpu_s

DOCS = Path(__file__).parents[2] / "docs" / "clusters.md"
EXAMPLE = re.search(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[1]

MINE = """\
[[kinds]]
name = "mine"
type = "gpu"
TFLOPS = { f32 = 10, f16 = 40.5 }
memory_GiB = 8
memory_GB_per_s = 0.07
"""


def read(text):
    return read_toml(text, catalogue(), "f.toml")


def widths(machine):
    return [level.bytes_per_s for level in machine.levels()]


class TestTheExampleOfTheDocs:
    machine = read(EXAMPLE)

    def test_has_the_devices_it_says(self):
        names = [device.name for device in self.machine.devices]
        assert names[0] == "n0.gpu0"
        assert names[8] == "n1.gpu0"
        assert names[16:] == ["old.cpu0", "old.gpu0", "old.gpu1", "old.gpu2", "old.gpu3", "spare"]
        assert self.machine.name == "lab"

    def test_keeps_what_the_new_kind_does_not_change(self):
        kind = self.machine.kind_of(0)
        assert kind.name == "A100-at-250W"
        assert kind.peak("bf16") == 270e12
        assert kind.peak("f32") == 19.5e12
        assert kind.memory_bytes == 40 * 2**30
        assert kind.source == "measured in our lab, 2025"

    def test_shares_cards_and_joins_leaves(self):
        links = {(link.source, link.target): link for link in self.machine.links}
        assert ("n0.gpu1", "n0.nic0") in links
        assert ("n0.gpu2", "n0.nic1") in links
        assert links["leaf0", "spine"].bytes_per_s == 100e9
        assert links["old.host", "leaf1"].bytes_per_s == 12.5e9
        assert links["old.gpu0", "old.gpu1"].bytes_per_s == 56e9
        assert links["spare", "old.host"].lane == links["old.host", "spare"].lane != ""

    def test_shows_the_complaint_it_promises(self):
        text = EXAMPLE.replace("nics = { count = 4, link", "nics = { cuont = 4, link")
        with pytest.raises(ClusterError) as caught:
            read_toml(text, catalogue(), "lab.toml")
        assert f"    {caught.value}\n" in DOCS.read_text(encoding="utf-8")

    def test_shows_the_summary_it_promises(self):
        shown = "".join(f"    {line}\n" for line in resolve("2x8xH100").summary().splitlines())
        assert shown in DOCS.read_text(encoding="utf-8")


class TestWriting:
    @FUZZ
    @given(clusters())
    def test_and_reading_gives_the_same_cluster(self, machine):
        assert read(write_toml(machine)) == machine

    @pytest.mark.parametrize(
        "spec", ["2x8xH100", "4xV100+8xP100", "malvik", "dgx-1-v100", "8xTPUv4"]
    )
    def test_a_preset_and_reading_gives_the_same_cluster(self, spec):
        machine = resolve(spec)
        assert read(write_toml(machine)) == machine

    def test_does_not_confuse_a_kind_with_the_preset_of_its_name(self):
        text = write_toml(resolve("1xA100")).replace("num_units = 108", "num_units = 54")
        assert read(text).kind_of(0).num_units == 54


class TestReading:
    def test_one_line_of_nodes_is_a_cluster(self):
        machine = read('[[nodes]]\ncount = 2\ndevices = "8xH100"\n')
        assert machine.name == "f"
        assert machine.links == resolve("2x8xH100").links
        assert machine.devices == resolve("2x8xH100").devices

    def test_figures_are_the_decimals_that_were_written(self):
        kind = read(f'{MINE}\n[[nodes]]\ndevices = "1xmine"\n').kind_of(0)
        assert kind.memory_bytes_per_s == 70e6  # 0.07 * 1e9 is not, in binary
        assert kind.peak("f16") == 40.5e12
        assert kind.cache_bytes == 0
        assert kind.num_units == 1

    @pytest.mark.parametrize(
        ("inside", "num_links"),
        [
            ('"nvlink3"', 8),
            ('{ shape = "switch", bytes_per_s = 1e9, latency_s = 0 }', 8),
            ('{ shape = "all-to-all", Gb_per_s = 8, latency_us = 1 }', 12),
            ('{ shape = "ring", GB_per_s = 1, latency_us = 1 }', 8),
            ('{ shape = "torus", dims = [2, 2], GB_per_s = 1, latency_us = 1 }', 8),
            ('{ shape = "torus", GB_per_s = 1, latency_us = 1 }', 8),
            ('{ shape = "ring", link = "pcie4" }', 8),
            ('["pcie4", { link = "nvlink3-bridge", pairs = [[0, 1], [2, 3]] }]', 12),
        ],
    )
    def test_nodes_can_be_joined_in_many_ways(self, inside, num_links):
        machine = read(f'{MINE}[[nodes]]\ndevices = "4xmine"\ninside = {inside}\n')
        assert len(machine.links) == num_links

    def test_figures_beside_a_name_override_it(self):
        text = '[[nodes]]\ndevices = "2xA100"\ninside = { link = "nvlink3", GB_per_s = 200 }\n'
        assert widths(read(text)) == [200e9]
        assert read(text).links[0].latency_s == 0.6e-6

    def test_the_network_sets_what_the_nodes_do_not(self):
        text = '[[nodes]]\ncount = 2\ndevices = "2xA100"\n[network]\nlink = "ethernet-10"\n'
        assert widths(read(text)) == [300e9, 1.25e9]

    def test_single_parts_make_any_topology(self):
        text = """\
switches = ["s"]
[[devices]]
name = "a"
kind = "t4"
node = "left"
[[devices]]
name = "b"
kind = "T4"
[[links]]
source = "a"
target = "s"
GB_per_s = 1
latency_us = 2
lane = "bus"
[[links]]
source = "s"
target = "a"
GB_per_s = 2
latency_us = 2
lane = "bus"
[[links]]
between = ["s", "b"]
link = "pcie3"
"""
        machine = read(text)
        assert [device.kind for device in machine.devices] == ["T4", "T4"]
        assert [link.lane for link in machine.links] == ["bus", "bus", "", ""]
        assert widths(machine) == [1e9]
        assert read(text.replace('switches = ["s"]', "") + '[[switches]]\nname = "s"\n') == machine

    def test_of_a_big_file_takes_seconds_at_most(self):
        text = write_toml(resolve("32x8xH100"))
        assert least_cpu_s(lambda: read(text), 5) < 5


ONE = '[[devices]]\nname = "a"\nkind = "T4"\n'
NODE = '[[nodes]]\ncount = 1\ndevices = "2xA100"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.toml: has no devices; give it at least one"),
        ("a = ", "f.toml: is not TOML (Invalid value (at end of document)); correct that line"),
        ("[[nodes]]\ncount == 1", "f.toml: is not TOML (Invalid value (at line 2, column 8))"),
        ("x = " + "[" * 3000, "f.toml: is "),
        (f"x = {'9' * 5000}", "f.toml: is not TOML (Exceeds the limit"),
        (
            'format = "partita/graph@1"',
            'f.toml: format: found "partita/graph@1"; "partita/cluster@1"',
        ),
        ('format = "partita/cluster@9"', "written by a newer partita"),
        ("nodse = 1", "f.toml: line 1, nodse: unknown key 'nodse'; did you mean nodes"),
        (
            f"{NODE}cuont = 2",
            "f.toml: line 4, nodes[0].cuont: unknown key 'cuont'; did you mean count?",
        ),
        ("\nnodes = 3", "line 2, nodes: found 3; tables [[nodes]] are needed"),
        ("nodes = [\n1]", "line 2, nodes[0]: found 1; tables [[nodes]] are needed"),
        ("[[nodes]]\n", 'line 1, nodes[0]: has no devices; add devices = "8xA100"'),
        (NODE.replace("= 1", "= 0"), "line 2, nodes[0].count: found 0; a whole number from 1 to"),
        (NODE.replace("= 1", "= -3"), "line 2, nodes[0].count: found -3"),
        (NODE.replace("= 1", "= 1.5"), "line 2, nodes[0].count: found 1.5"),
        (NODE.replace("= 1", "= 90000"), "nodes[0]: makes 180,000 devices; at most 100,000"),
        (
            '[[nodes]]\ndevices = ["99999xA100",\n"99999xA100"]',
            "line 3, nodes[0].devices[1]: holds too many devices; at most 100,000 are read",
        ),
        (NODE.replace("2x", "0x"), "line 3, nodes[0].devices: found '0xA100'; write"),
        (
            NODE.replace("A100", "A10O"),
            "line 3, nodes[0].devices: unknown kind of device 'A10O'; did you mean A10",
        ),
        (
            '[[nodes]]\ndevices = [\n"1xA100",\n"2xQuux"]',
            "line 4, nodes[0].devices[1]: unknown kind of device 'Quux'",
        ),
        (
            '[[nodes]]\ndevices = ["1xA100", "1xT4"]',
            "line 1, nodes[0]: holds several kinds of devices, and does not say how they are",
        ),
        (f'{NODE}inside = "nvlnk3"', "unknown interconnect 'nvlnk3'; did you mean nvlink3"),
        (f"{NODE}inside = 3", "line 4, nodes[0].inside: found 3; write"),
        (
            f"{NODE}inside = {{ GB_per_s = nan, latency_us = 1 }}",
            "inside.GB_per_s: found nan; a finite",
        ),
        (
            f"{NODE}inside = {{ GB_per_s = -2, latency_us = 1 }}",
            "inside.GB_per_s: found -2; a finite",
        ),
        (f"{NODE}inside = {{ GB_per_s = inf, latency_us = 1 }}", "inside.GB_per_s: found inf"),
        (f"{NODE}inside = {{ GB_per_s = true, latency_us = 1 }}", "inside.GB_per_s: found true"),
        (
            f"{NODE}inside = {{ GB_per_s = 2 }}",
            "line 4, nodes[0].inside: the latency is missing; add",
        ),
        (
            f"{NODE}inside = {{ latency_us = 2 }}",
            "the bandwidth is missing; add GB_per_s, or a link",
        ),
        (f'{NODE}inside = {{ shape = "ring" }}', "says nothing about the links"),
        (
            f"{NODE}inside = {{ GB_per_s = 2, latency_us = 1, bytes_per_s = 3 }}",
            "inside.GB_per_s: bytes_per_s is given as GB_per_s too; give one of them",
        ),
        (f"{NODE}inside = {{ GB_per_s = 2, latency_us = 1 }}", "shape is missing; add it"),
        (
            f'{NODE}inside = {{ shape = "rnig", link = "nvlink3" }}',
            "line 4, nodes[0].inside.shape: unknown shape 'rnig'; did you mean ring?",
        ),
        (
            f'{NODE}inside = {{ shape = "torus", link = "ici-v4", dims = [3] }}',
            "inside.dims: found [3]; whole numbers with product 2",
        ),
        (
            f'{NODE}inside = {{ link = "nvlink2-one", pairs = [[0, 1],\n[0, 2]] }}',
            "line 5, nodes[0].inside.pairs[1]: found [0, 2]; two different devices from 0 to 1",
        ),
        (f'{NODE}inside = {{ link = "nvlink2-one" }}', "the pairs are missing"),
        (f'{NODE}inside = "none"', "device 'n0.gpu0' cannot reach device 'n0.gpu1'; add links"),
        (f"{NODE}nics = 4", "line 4, nodes[0].nics: found 4; write"),
        (f'{NODE}nics = {{ at = "cpu" }}', "nics.at: found 'cpu'; write"),
        (
            f"{NODE}[network]\nnodes_per_leaf = 2",
            "line 4, network: a tree needs nodes_per_leaf and",
        ),
        ("[[devices]]\nname = 3", "line 2, devices[0].name: found 3; text in quotes is needed"),
        ('[[devices]]\nname = "a"', "line 1, devices[0]: kind is missing; add it"),
        (
            ONE * 2,
            "line 4, devices[1]: the name 'a' is given twice; rename one",
        ),
        (
            f'{ONE}[[links]]\nsource = "a"\ntarget = "b"\nlink = "pcie3"',
            "line 6, links[0].target: there is no device or switch 'b'",
        ),
        (
            f'{ONE}[[links]]\nbetween = ["a"]\nlink = "pcie3"',
            "line 5, links[0].between: found ['a']; the names of two vertices are needed",
        ),
        (MINE.replace("f32 = 10, ", ""), "line 4, kinds[0].TFLOPS: has no rate for f32"),
        (
            MINE.replace("f32 = 10", "f33 = 10"),
            "kinds[0].TFLOPS.f33: unknown key 'f33'; did you mean f32",
        ),
        (MINE.replace("memory_GiB = 8", ""), "kinds[0]: memory_bytes is missing; add memory_GiB"),
        (
            MINE.replace("= 8", "= 1e12"),
            "line 5, kinds[0].memory_GiB: found 1000000000000.0; a size",
        ),
        (
            MINE.replace('"mine"', '""'),
            "line 1, kinds[0]: kinds: the name of a kind of device is empty",
        ),
        (f"{MINE}cache_MiB = 3", "kinds[0]: cache_bytes_per_s is missing; add cache_GB_per_s"),
        (MINE * 2, "line 8, kinds[1].name: the kind 'mine' is given twice"),
        (
            '[[kinds]]\nbased_on = "A1000"',
            "line 2, kinds[0].based_on: unknown kind of device 'A1000'",
        ),
        ('name = ""\n' + NODE, "line 1, name: the name of a cluster is empty"),
    ],
)
def test_what_is_wrong_is_answered_with_line_and_field(text, message):
    with pytest.raises(InputError) as caught:
        read(text)
    assert str(caught.value).startswith("f.toml: ")
    assert message in str(caught.value)


VALID = tomllib.loads(EXAMPLE)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["none", "pcie4", "torus", "host", "2xA100", "T4", "n0.gpu0"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=5,
)


def check_read_or_refused(reading):
    machine, refusal = None, "f.toml: "
    try:
        machine = reading()
    except InputError as error:
        refusal = str(error)
    assert refusal.startswith("f.toml: ")
    if machine is not None:
        assert machine.levels()[-1].groups == (tuple(range(machine.num_devices)),)


@settings(FUZZ, max_examples=300)
@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused(data):
    values = copy.deepcopy(VALID)
    place = values
    while True:
        key = data.draw(
            st.sampled_from(list(place) if isinstance(place, dict) else range(len(place)))
        )
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.integers(0, 3)) == 0:
            break
        place = inner
    if data.draw(st.booleans()):
        place[key] = data.draw(VALUES)
    else:
        del place[key]
    check_read_or_refused(
        lambda: read_cluster(TomlTable(values, Document(EXAMPLE, "f.toml")), catalogue())
    )


@settings(FUZZ, max_examples=200)
@given(st.text() | st.lists(st.sampled_from(EXAMPLE.splitlines()), max_size=12).map("\n".join))
@example("\x00")
@example("[nodes]\n[[nodes]]")
def test_any_text_is_read_or_refused(text):
    check_read_or_refused(lambda: read(text))


def test_a_text_beyond_any_cluster_is_refused_unread(monkeypatch):
    monkeypatch.setattr("partita.cluster.tables.MAX_CHARACTERS", 10)
    with pytest.raises(
        FileError, match="has 11 characters; at most 10 are read as TOML; save it as"
    ):
        read("# 123456789")


TEXT = '''\
# a comment with [brackets] and = signs
name = "a # b"

[[nodes]]
count = 2
devices = [
  "1xA100",   # ]
  "2xV100",
]
inside = { shape = "switch", GB_per_s = 1 }
[nodes.nics]
"at" = 'x'

[[nodes]]
text = """
count = 9
[[nodes]]
"""
a.b.c = 1
[network.deep]
links = [
  { source = "a", target = "b" },
  { source = "c",
    target = "d" }, [1, [2,
      3]],
]
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("name",), 2),
        (("nodes",), 4),
        (("nodes", 0), 4),
        (("nodes", 0, "count"), 5),
        (("nodes", 0, "devices"), 6),
        (("nodes", 0, "devices", 0), 7),
        (("nodes", 0, "devices", 1), 8),
        (("nodes", 0, "inside", "GB_per_s"), 10),
        (("nodes", 0, "nics"), 11),
        (("nodes", 0, "nics", "at"), 12),
        (("nodes", 1), 14),
        (("nodes", 1, "text"), 15),
        (("nodes", 1, "a"), 19),
        (("nodes", 1, "a", "b", "c"), 19),
        (("network", "deep"), 20),
        (("network", "deep", "links", 0, "target"), 22),
        (("network", "deep", "links", 1, "source"), 23),
        (("network", "deep", "links", 1, "target"), 24),
        (("network", "deep", "links", 2, 1, 1), 25),
    ],
)
def test_every_key_and_element_has_its_line(path, line):
    assert lines_of(TEXT)[path] == line


def test_what_is_missing_has_the_line_of_what_is_around_it():
    lines = lines_of(TEXT)
    assert nearest_line(lines, ("nodes", 1, "count")) == 14
    assert nearest_line(lines, ("nodes", 0, "nics", "at", "x", 3)) == 12
    assert nearest_line(lines, ("nothing",)) == 0
    assert nearest_line({}, ()) == 0


def test_text_that_tomllib_refuses_gives_what_was_found():
    assert lines_of("a = 1\nb = [1,\n")["a",] == 1
    assert lines_of('a = "x\n') == {("a",): 1}
    assert lines_of("a = 1\nx = " + "[" * 5000)["a",] == 1


def paths_in(value, here=()):
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        yield (*here, key)
        if isinstance(item, dict | list):
            yield from paths_in(item, (*here, key))


PIECES = st.sampled_from(
    [
        "a",
        "b",
        ".",
        " = ",
        "1",
        '"x"',
        "'''y\n'''",
        "[",
        "]",
        "[[a]]",
        "[b]",
        "{ ",
        " }",
        ", ",
        "\n",
        "#",
    ]
)


@FUZZ
@given(st.lists(PIECES, max_size=14).map("".join))
def test_all_paths_of_a_text_that_tomllib_accepts_are_found(text):
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        lines_of(text)
        return
    lines = lines_of(text)
    for path in paths_in(value):
        assert 1 <= lines[path] <= text.count("\n") + 1
