"""Plans as source: the model is built again, and the code runs it."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from partita.capture.reference_module import example_inputs, reference_module
from partita.cli import partita
from partita.emit.plans import capture_reference, emit_plan
from partita.emit.stages import emit
from partita.errors import ModelError, PlanError
from partita.graph import GraphBuilder
from partita.graph.files import write_graph
from partita.plans import read_plan
from partita.run.sequential import load_source
from partita.zoo import build
from tests.emit.plans import plan_in_parts
from tests.emit.test_emit_source import assert_only_expected_names
from tests.emit.transparency import assert_ruff_has_nothing_to_say, same
from tests.shallow import GPT2
from tests.zoo.hf_tiny import tiny

SMALL = {"batch": 2, "training": False}


def run(*words: str):
    return CliRunner().invoke(partita, ["emit", *words])


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(plan_in_parts("squeezenet1_1@64", 3, **SMALL).to_json())
    return path


def test_the_code_of_a_plan_gives_what_the_reference_module_gives(tmp_path):
    plan = plan_in_parts("squeezenet1_1@64", 3, **SMALL)
    emitted = emit_plan(plan)
    assert emitted.class_names == ("Stage0", "Stage1", "Stage2")
    loaded = load_source(emitted.source)
    graph = build("squeezenet1_1@64", batch=2, loss=False)
    module, args = reference_module(graph).eval(), example_inputs(graph)
    stages = loaded.build_stages(module.state_dict())
    assert same(loaded.run_stages(stages, *args), module(*args))
    (tmp_path / "stages.py").write_text(emitted.source)
    assert_ruff_has_nothing_to_say(tmp_path)


def test_ops_are_in_the_stages_of_the_plan():
    plan = plan_in_parts("squeezenet1_1@64", 3, **SMALL)
    loaded = load_source(emit_plan(plan).source)
    with torch.device("meta"):
        stages = [loaded.Stage0(), loaded.Stage1(), loaded.Stage2()]
    for stage, planned in zip(stages, plan.stages, strict=True):
        held = {name.rpartition(".")[0] for name in stage.state_dict()}
        assert held <= {split.op for split in planned.splits}


def test_the_modules_of_the_zoo_are_classes_and_its_inputs_have_names():
    source = emit_plan(plan_in_parts(f"{GPT2}@64", 2, batch=2, training=False)).source
    for text in ("class Attn(", "class Mlp(", "class HBlock(", "def run_stages(", "input_ids"):
        assert text in source
    assert source.count("F.scaled_dot_product_attention") <= 2  # once, and where a block is cut


def test_the_code_is_for_one_micro_batch():
    plan = plan_in_parts("squeezenet1_1@64", 2, microbatches=4, batch=8, training=False)
    source = emit_plan(plan).source
    assert "float32 (batch, 3, 64, 64), given to the model" in source
    assert "Planned for batch 2; it takes any." in source


def test_a_plan_of_a_file_is_emitted_from_the_module_in_it(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\n\n\ndef make(batch=4):\n"
        "    torch.manual_seed(0)\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), "
        "torch.nn.Linear(8, 3))\n"
        "    return net, (torch.ones(batch, 6),)\n"
    )
    spec = f"{tmp_path / 'net.py'}:make"
    source = emit_plan(plan_in_parts(spec, 2, batch=4, training=False)).source
    assert "nn.Linear(6, 8)" in source
    loaded = load_source(source)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    x = torch.ones(4, 6)
    assert same(loaded.run_stages(loaded.build_stages(net.state_dict()), x), net(x))


def test_a_micro_batch_of_one_sample_may_do_a_step_less(tmp_path):
    """As masks that are only expanded for several: what is left keeps its stage."""
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(8))\n\n"
        "    def forward(self, x):\n"
        "        mask = torch.arange(6.0).unsqueeze(0)\n"
        "        if len(x) > 1:\n            mask = mask.expand(len(x), -1)\n"
        "        for layer in self.layers:\n            x = torch.relu(layer(x + mask))\n"
        "        return x\n\n\n"
        "def make(batch=4):\n    torch.manual_seed(0)\n    return Net(), (torch.ones(batch, 6),)\n"
    )
    plan = plan_in_parts(f"{path}:make", 2, microbatches=4, batch=4, training=False)
    emitted = emit_plan(plan)
    assert len(emitted.class_names) == 2
    loaded, net = load_source(emitted.source), load_source(path.read_text()).make()[0]
    x = torch.randn(1, 6)
    assert same(loaded.run_stages(loaded.build_stages(net.state_dict()), x), net(x))
    path.write_text(path.read_text().replace("range(8)", "range(9)"))
    with pytest.raises(PlanError, match="its ops are not those of the graph"):
        emit_plan(plan, f"{path}:make")


def test_a_function_that_gives_no_micro_batch_is_refused(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\n\n\ndef make():\n    return torch.nn.Linear(6, 8), (torch.ones(4, 6),)\n"
    )
    plan = plan_in_parts(f"{tmp_path / 'net.py'}:make", 1, microbatches=2, training=False)
    with pytest.raises(ModelError, match="for a batch of 4, and the plan's micro-batches are of 2"):
        emit_plan(plan)


def test_a_graph_with_hostile_names_makes_harmless_code():
    g = GraphBuilder("x'''; import os")
    x = g.input('ids"""\nimport os', (2, 4))
    with g.scope("a; import os"):
        x = g.relu(g.linear(x, 4, name='b"]; import os'))
    graph = g.finish(g.linear(x, 3, name="class"))
    captured, op_of = capture_reference(graph, training=False)
    emitted = emit(
        captured,
        {node: int(op == "class") for node, op in op_of.items()},
        title=graph.name,
        scopes={node: graph.op(op).scope for node, op in op_of.items()},
        input_names=[tensor.name for tensor in graph.inputs],
    )
    assert_only_expected_names(emitted.source)
    loaded = load_source(emitted.source)
    module, args = reference_module(graph).eval(), example_inputs(graph)
    stages = loaded.build_stages(module.state_dict())
    assert same(loaded.run_stages(stages, *args), module(*args))


def test_a_plan_of_another_version_of_the_model_is_refused():
    plan = plan_in_parts("squeezenet1_1@64", 2, **SMALL)
    stale = replace(plan, model=replace(plan.model, fingerprint="0" * 16))
    with pytest.raises(PlanError, match="the plan is for another squeezenet1_1@64"):
        emit_plan(stale)


def test_emit_writes_a_module_and_says_how_to_use_it(plan_file, tmp_path):
    target = tmp_path / "stages.py"
    outcome = run(str(plan_file), "-o", str(target))
    assert outcome.exit_code == 0, outcome.output
    assert "3 stages of squeezenet1_1@64" in outcome.output
    assert "build_stages(model.state_dict())" in outcome.output
    assert "class Stage2(EvalStage):" in target.read_text()
    again = run(str(plan_file), "-o", str(target))
    assert again.exit_code == 2
    assert "exists already" in again.output


def test_emit_as_json_holds_the_source_unless_it_is_written(plan_file, tmp_path):
    value = json.loads(run(str(plan_file), "--json").stdout)
    assert value["format"] == "partita/emitted@1"
    assert value["stages"] == ["Stage0", "Stage1", "Stage2"]
    assert value["source"].startswith('"""squeezenet1_1')
    written = run(str(plan_file), "--json", "-o", str(tmp_path / "s.py"))
    assert json.loads(written.stdout)["source"] is None


def test_emit_refuses_what_is_no_plan(tmp_path):
    path = tmp_path / "no.json"
    path.write_text('{"format": "partita/graph@1"}')
    outcome = run(str(path))
    assert outcome.exit_code == 2
    assert '"partita/plan@6" is needed here' in outcome.output


@pytest.mark.parametrize("ending", [".json", ".txt"])
def test_a_plan_of_a_saved_graph_is_emitted_for_one_micro_batch(tmp_path, ending):
    spec = tmp_path / f"net{ending}"
    write_graph(spec, build("squeezenet1_1@64", batch=8, loss=False))
    source = emit_plan(plan_in_parts(str(spec), 2, microbatches=4, training=False)).source
    assert "float32 (batch, 3, 64, 64), given to the model" in source
    assert "Planned for batch 2; it takes any." in source


@pytest.mark.parametrize("inside", [True, False])
def test_a_configuration_outside_of_the_plans_folder_is_not_opened(tmp_path, inside):
    home = tmp_path / "home"
    home.mkdir()
    config = (home if inside else tmp_path) / "tiny.json"
    config.write_text(json.dumps(tiny("llama")))
    plan = plan_in_parts(f"{config}@8", 2, **SMALL)
    (home / "plan.json").write_bytes(plan.to_json())
    config.write_text("{" if not inside else config.read_text())  # whoever opens it fails
    source = emit_plan(read_plan(home / "plan.json")).source
    assert ("length = " in source) is inside
    assert "batch = " in source
