"""Opening a plan runs nothing: it carries its graph and the files of its machine."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from partita.cli import partita
from partita.cluster import resolve
from partita.errors import PlanError
from partita.graph import GraphBuilder
from partita.graph.files import write_graph
from partita.jobs.check_plan import check_plan
from partita.jobs.plan import plan
from partita.jobs.simulate import simulate
from partita.jobs.workload import code_of, load_cluster, load_model
from partita.plans import ModelRef, Plan, read_plan
from partita.search.base import Stop

QUICK = Stop(gap=0.9)  # no clock: a slow machine must not change the answer
CODE = """
from pathlib import Path

import torch

with Path(__file__).with_name("runs").open("a") as runs:
    runs.write("run ")


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).mean()


def make(batch=8):
    return Small(), (torch.randn(batch, 16),)
"""


@pytest.fixture
def own(tmp_path):
    """A plan of file.py:function in a folder, and the file."""
    code = tmp_path / "code" / "model.py"
    code.parent.mkdir()
    code.write_text(CODE)
    planned = plan(f"{code}:make", "2xA100", batch=8, stop=QUICK).plan
    assert planned is not None
    return planned, code


def saved(plan: Plan, folder: Path) -> Plan:
    folder.mkdir(exist_ok=True)
    path = folder / "plan.json"
    path.write_bytes(plan.to_json())
    return read_plan(path)


def test_a_plan_of_code_is_opened_without_the_code(own, tmp_path):
    planned, code = own
    runs = code.with_name("runs").read_text()
    assert runs  # planning ran it
    opened = saved(planned, tmp_path / "elsewhere")
    assert opened == planned
    assert check_plan(opened) == ()
    assert simulate(opened).step_s == pytest.approx(planned.prediction.step_s)
    assert code.with_name("runs").read_text() == runs
    code.unlink()
    assert check_plan(opened) == ()


def test_every_command_that_looks_at_a_plan_leaves_its_code_alone(own, tmp_path, monkeypatch):
    """PyTorch is not needed either: here it cannot be imported."""
    planned, code = own
    path = tmp_path / "plan.json"
    path.write_bytes(planned.to_json())
    code.with_name("runs").unlink()
    op = planned.stages[0].splits[0].op
    monkeypatch.setitem(sys.modules, "torch", None)
    for words in (
        ("verify", str(path)), ("report", str(path), "-o", str(tmp_path / "page.html")),
        ("explain", str(path)), ("explain", str(path), op), ("simulate", str(path)),
        ("diff", str(path), str(path)),
    ):  # fmt: skip
        assert CliRunner().invoke(partita, words).exit_code == 0, words
    assert not code.with_name("runs").exists()


def test_only_the_code_that_was_captured_is_run(own):
    planned, code = own
    assert code_of(planned.model) == f"{code}:make"
    code.write_text(CODE + "\n# changed\n")
    with pytest.raises(PlanError, match="is not the file that was captured: its content differs"):
        code_of(planned.model)
    assert code_of(planned.model, "other.py:make") == "other.py:make"
    assert code_of(ModelRef("gpt2", 8, "bf16", True, "adamw", "0")) == "gpt2"


def test_an_older_plan_of_code_is_refused_with_what_to_do(own, tmp_path):
    planned, _ = own
    value = json.loads(planned.to_json()) | {"format": "partita/plan@4"}
    del value["model"]["graph"], value["model"]["sha256"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(value))
    old = read_plan(path)
    said = "carries no graph of .*, and opening a plan runs no code; plan again with this version"
    with pytest.raises(PlanError, match=said):
        load_model(old)
    with pytest.raises(PlanError, match=r"not say which .*model\.py was captured; look at that"):
        code_of(old.model)


def test_a_graph_that_is_not_the_planned_one_is_refused(own):
    planned, _ = own
    lines = tuple(line.replace("relu", "gelu") for line in planned.model.graph)
    forged = replace(planned, model=replace(planned.model, graph=lines))
    with pytest.raises(PlanError, match="the plan is for another"):
        load_model(forged)
    broken = replace(planned, model=replace(planned.model, graph=("graph x", "what: is this")))
    with pytest.raises(PlanError, match="the graph that is carried"):
        load_model(broken)


def test_a_graph_made_in_python_is_carried(tmp_path):
    g = GraphBuilder("mine")
    graph = g.finish(g.linear(g.relu(g.linear(g.input("x", (8, 16)), 32, "up")), 16, "down"))
    planned = plan(graph, "2xA100", stop=QUICK).plan
    assert check_plan(saved(planned, tmp_path)) == ()


def test_a_zoo_model_and_a_preset_are_named_only():
    planned = plan("alexnet", "2xA100", batch=4, stop=QUICK).plan
    value = json.loads(planned.to_json())
    assert "graph" not in value["model"]
    assert "files" not in value["cluster"]


def test_a_machine_file_and_a_machine_made_in_python_are_carried(tmp_path):
    file = tmp_path / "machine.toml"
    file.write_text('name = "mine"\n[[nodes]]\ndevices = "2xA100"\n')
    planned = plan("alexnet", str(file), batch=4, stop=QUICK).plan
    assert [each.name for each in planned.cluster.files] == [str(file)]
    file.unlink()
    assert load_cluster(saved(planned, tmp_path / "other")).num_devices == 2
    made = replace(resolve("2xA100"), name="made")
    planned = plan("alexnet", made, batch=4, stop=QUICK).plan
    assert load_cluster(saved(planned, tmp_path / "other")) == made


def test_files_of_older_plans_are_opened_in_their_own_folder_only(tmp_path, monkeypatch):
    g = GraphBuilder("mine")
    graph = g.finish(g.linear(g.input("x", (8, 16)), 16, "fc"))
    write_graph(tmp_path / "graph.json", graph)
    monkeypatch.chdir(tmp_path)
    planned = plan("graph.json", "2xA100", stop=QUICK).plan
    old = replace(planned, model=replace(planned.model, graph=()))
    assert load_model(saved(old, tmp_path)).graph.fingerprint() == planned.model.fingerprint
    said = "names graph.json and does not carry it; only files in the plan's folder are opened"
    with pytest.raises(PlanError, match=said):
        load_model(saved(old, tmp_path / "other"))
    with pytest.raises(PlanError, match=said):
        load_model(old)
