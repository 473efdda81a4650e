import json

import pytest

from partita.graph.files import read_graph
from partita.zoo import MODELS, build


def test_every_model_of_the_zoo_is_listed_with_its_size(run_json):
    answer = run_json("models")
    assert answer["format"] == "partita/models@1"
    assert [entry["name"] for entry in answer["models"]] == list(MODELS)
    assert all(entry["parameters"] > 0 for entry in answer["models"])
    assert all(entry["forward_flops"] > 0 for entry in answer["models"])


def test_people_see_parameters_and_flops(run):
    lines = run("models").stdout.splitlines()
    line = next(line for line in lines if line.startswith("gpt2 "))
    assert "124M" in line
    assert "GFLOP" in line
    assert "seq 1024" in line


def test_one_model_in_full(run):
    result = run("models", "gpt2@512", "--batch", "4", "--dtype", "bf16")
    assert result.exit_code == 0, result.output
    assert "124,439,808 (237 MiB)" in result.stdout
    assert "i64[4, 512]" in result.stdout
    assert "12 attention" in result.stdout


def test_one_model_as_json(run_json):
    answer = run_json("models", "resnet50", "--batch", "2")
    graph = build("resnet50", batch=2)
    assert answer["parameters"] == graph.num_parameters
    assert answer["num_ops"] == len(graph.ops) == sum(answer["kinds"].values())
    assert answer["inputs"][0]["shape"] == [2, 3, 224, 224]
    assert answer["fingerprint"] == graph.fingerprint()
    assert answer["graph"] is None


@pytest.mark.parametrize("ending", ["txt", "json"])
def test_a_dumped_graph_reads_back(run_json, tmp_path, ending):
    file = tmp_path / f"graph.{ending}"
    answer = run_json("models", "alexnet", "--dump-graph", str(file))
    assert answer["graph"] == str(file)
    assert read_graph(file) == build("alexnet")


@pytest.mark.parametrize(("ending", "opening"), [("dot", "digraph"), ("svg", "<svg")])
def test_a_graph_can_be_drawn(run, tmp_path, ending, opening):
    file = tmp_path / f"graph.{ending}"
    result = run("models", "alexnet", "--dump-graph", str(file))
    assert result.exit_code == 0, result.output
    assert f"graph in {file}" in result.stdout
    assert opening in file.read_text()[:400]


def test_a_saved_graph_can_be_shown(run, tmp_path):
    file = tmp_path / "graph.txt"
    file.write_text("graph tiny\ninput x: f32[4]\ny: f32[4] = mystery(x)\noutput y\n")
    result = run("models", str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("tiny\n")
    assert "unknown kind 'mystery'" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt-22"], "there is no model 'gpt-22'; did you mean gpt2"),
        (["gpt2@0"], "gpt2"),
        (["gpt2", "--batch", "0"], "'--batch'"),
        (["gpt2", "--dtype", "f7"], "'--dtype'"),
        (["gpt2", "--dump-graph", "x.png"], "x.png: has an ending that says nothing: .png"),
        (["no-such-file.json"], "no-such-file.json: no such file"),
        (["--batch", "4"], "--batch needs a MODEL"),
        (["--dump-graph", "x.txt"], "--dump-graph needs a MODEL"),
    ],
)
def test_what_cannot_be_is_refused(run, words, message):
    result = run("models", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


def test_an_existing_file_is_kept(run, tmp_path):
    file = tmp_path / "graph.txt"
    file.write_text("mine")
    result = run("models", "alexnet", "--dump-graph", str(file), "--json")
    assert result.exit_code == 2
    assert "exists already" in json.loads(result.stdout)["error"]
    assert file.read_text() == "mine"
