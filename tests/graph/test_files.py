"""Graphs in files: told apart by ending or content; garbage gets one clear sentence."""

import random

import pytest

from partita.errors import FileError, InputError
from partita.graph import GraphBuilder, training_graph
from partita.graph.files import read_graph, write_graph
from partita.graph.json import to_json
from partita.graph.record import Graph, Tensor
from partita.graph.text import to_text


def net():
    g = GraphBuilder("net")
    x = g.linear(g.input("x", (2, 3)), 4, "fc")
    return training_graph(g.finish(g.one("mse_loss", x, g.input("y", (2, 4)), name="loss")))


@pytest.mark.parametrize("name", ["net.json", "net.txt", "NET.JSON"])
def test_a_written_graph_is_read_back(tmp_path, name):
    path = write_graph(tmp_path / name, net())
    assert read_graph(path) == net()


@pytest.mark.parametrize("name", ["net", "net.graph"])
@pytest.mark.parametrize("ending", [".json", ".txt"])
def test_without_a_known_ending_the_content_decides(tmp_path, name, ending):
    content = write_graph(tmp_path / f"written{ending}", net()).read_bytes()
    (tmp_path / name).write_bytes(content)
    assert read_graph(tmp_path / name) == net()


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "net.txt"
    path.write_text(to_text(net()), encoding="utf-8-sig")
    assert read_graph(path) == net()


@pytest.mark.parametrize(("name", "start"), [("net.dot", "digraph"), ("net.svg", "<svg")])
def test_pictures_are_written(tmp_path, name, start):
    assert write_graph(tmp_path / name, net()).read_text().startswith(start)


def test_nothing_is_overwritten_unasked(tmp_path):
    path = write_graph(tmp_path / "net.txt", net())
    with pytest.raises(FileError, match="exists already"):
        write_graph(path, net())
    assert write_graph(path, net(), overwrite=True) == path


def test_an_unknown_ending_is_refused_before_writing(tmp_path):
    path = tmp_path / "net.png"
    with pytest.raises(
        FileError, match=r"the ending '\.png' says no form of a graph; end the name in \.json"
    ):
        write_graph(path, net())
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
    path.write_text(str(to_json(net())))
    with pytest.raises(InputError, match="expected `graph NAME`"):
        read_graph(path)


@pytest.mark.parametrize("name", ["a.json", "a.txt"])
@pytest.mark.parametrize("is_captured", [True, False])
def test_files_say_whether_a_graph_was_captured(name, is_captured, tmp_path):
    graph = Graph("a", (Tensor("x", (1,), role="input"),), (), ("x",), is_captured)
    path = write_graph(tmp_path / name, graph)
    assert read_graph(path).is_captured == is_captured
    assert ("captured" in path.read_text()) == is_captured
