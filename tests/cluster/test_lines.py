import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_clusters import FUZZ

from partita.cluster.tables import lines_of, nearest_line

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
