"""Two hundred command lines: no mistake of ours, no lost result, JSON as its schema says."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_lines import BAD, GOOD, NEEDS_MORE, wrong

from partita import errors
from partita.cli import COMMANDS, OUR_MISTAKE, partita
from partita.cluster import resolve
from partita.graph import GraphBuilder
from partita.graph.files import write_graph
from partita.jobs.plan import plan
from partita.jobs.schemas import ANSWERS, FILES, schema_of
from partita.search.base import Stop

DATA = Path(__file__).parents[1] / "data"
SRC = Path(errors.__file__).parent
EXPERIMENT = """
name = "small"
[[networks]]
model = "alexnet"
batch = 4
[[clusters]]
cluster = "malvik"
[[optimisers]]
method = "heft"
"""
QUICK = Stop(time_s=2.0, gap=0.9)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the lines name: two plans, a graph, a machine, files that are broken."""
    folder = tmp_path_factory.mktemp("files")
    g = GraphBuilder("small")
    graph = g.finish(g.linear(g.relu(g.linear(g.input("x", (8, 16)), 32, "fc")), 16, "down"))
    write_graph(folder / "graph.json", graph)
    write_graph(folder / "graph.txt", graph)
    (folder / "machine.toml").write_text('name = "mine"\n[[nodes]]\ndevices = "2xA100"\n')
    (folder / "experiment.toml").write_text(EXPERIMENT)
    (folder / "broken.json").write_text('{"format": "partita/plan@6", "stages": 3')
    (folder / "empty.json").write_text("{}")
    for name, config in (
        ("mystery-field", {"model_type": "llama", "mystery": 3}),
        ("other-family", {"model_type": "mystery"}),
        ("half-t5", {"model_type": "t5", "is_encoder_decoder": False}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(config))
    one = plan(graph, str(folder / "machine.toml"), stop=QUICK).plan
    two = plan("gpt2@16", "2xA100", batch=4, pin=["pp=2", "schedule=1f1b"], stop=QUICK).plan
    for name, made in (("one.json", one), ("two.json", two)):
        (folder / name).write_bytes(made.to_json())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def typed(files, tmp_path):
    """Runs a line in a fresh folder that has all files; the result, and the file it promises."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)

    def typed(line):
        words, _, promised = line.partition(" -> ")
        named = words.replace("{folder}", str(tmp_path)).replace("{data}", str(DATA))
        result = CliRunner().invoke(partita, shlex.split(named))
        assert result.exit_code != OUR_MISTAKE, result.output
        return result, tmp_path / promised if promised else None

    return typed


def check_json(text):
    """Is it JSON, and as the schema of its kind says, if there is one?"""
    value = json.loads(text)
    kind = value.get("format", "").removeprefix("partita/").partition("@")[0]
    if kind in (*ANSWERS, *FILES):
        schema = schema_of(kind)
        assert wrong(value, schema, schema) == []
    return kind


@pytest.mark.parametrize("line", GOOD)
def test_what_can_be_done_is_done(typed, line):
    result, promised = typed(line)
    assert result.exit_code == 0, result.output
    if "--json" in line:
        assert check_json(result.stdout) in ANSWERS
    if promised is not None:
        assert promised.stat().st_size > 0
        if promised.name.endswith(".json"):
            check_json(promised.read_text())


@pytest.mark.parametrize("line", BAD)
def test_a_mistake_is_told_in_one_line(typed, line):
    result, _ = typed(line)
    assert result.exit_code in (1, 2)
    assert sum("error: " in text for text in result.stderr.splitlines()) == 1


def test_every_command_is_typed_with_and_without_mistakes():
    assert len(GOOD) + len(BAD) >= 200
    known = {name for section in COMMANDS.values() for name in section}
    assert known <= {line.split()[0] for line in GOOD}
    with_json = {line.split()[0] for line in GOOD if "--json" in line.split()}
    assert known - with_json == NEEDS_MORE


def test_every_format_that_is_printed_or_drawn_has_a_schema():
    source = "".join(path.read_text() for path in (SRC / "cli").glob("*.py"))
    source += "".join(path.read_text() for path in (SRC / "report").glob("*.py"))
    printed = set(re.findall(r'"partita/([a-z-]+)@\d+"', source))
    assert len(printed) > 15
    assert printed <= {*ANSWERS, *FILES}


def test_files_have_the_schemas_that_are_published(files):
    for name in ("one.json", "two.json", "graph.json"):
        check_json(files[name])
    assert check_json(resolve("2xA100").to_json()) == "cluster"
    broken = json.loads(files["one.json"]) | {"stages": 3}
    assert wrong(broken, schema_of("plan"), schema_of("plan")) == ["$.stages is 3, not array"]
