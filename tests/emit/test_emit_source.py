"""The emitted text: what it holds, what it loads, and that no name in a model becomes code."""

import ast
import keyword
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

from partita.capture import export_module
from partita.emit.names import class_name, is_attribute, variable
from partita.emit.stages import emit
from partita.emit.text import Bracket, call, docstring, literal, quoted, statement
from partita.errors import PlanError
from partita.run.sequential import SequentialStages, load_source
from tests.emit import models
from tests.emit.source import emit_stages
from tests.emit.transparency import Model, assert_ruff_has_nothing_to_say, same

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = [
    "x; import os", "a\nraise SystemExit", "b\"); raise SystemExit  # ", "'''", '"""', "class",
    "__class__", "__init__", "forward", "takes", "self", "None", "0", "\\", "é", "{x}", "%s", " ",
    "lambda: 0", "print('hello')",
]  # fmt: skip
T = torch.Tensor


def captured(module: nn.Module, *args: T):
    return export_module(module, args)


def halves(it, at: float = 0.5) -> dict[str, int]:
    ops = [op.name for op in it.graph.ops]
    return {op: int(i >= at * len(ops)) for i, op in enumerate(ops)}


# What no name can do.


class Hostile(nn.Module):
    """Children, parameters and buffers with names that mean something to Python."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.inner = nn.Module()
        for name in names:
            if not hasattr(self.inner, name):
                self.inner.add_module(name, nn.Linear(4, 4))
            free = f"{name} p"
            self.inner.register_parameter(free, nn.Parameter(torch.randn(4)))
            self.register_buffer(f"{name} b", torch.randn(4))
            self.add_module(f"{name} m", nn.Linear(4, 4))

    def forward(self, x: T) -> T:
        for name in self.names:
            if name in self.inner._modules:
                x = self.inner._modules[name](x)
            x = x * self.inner._parameters[f"{name} p"] + self._buffers[f"{name} b"]
            x = F.relu(self._modules[f"{name} m"](x))
        return x


@pytest.mark.parametrize("name", [n for n in HOSTILE if "." not in n])
def test_a_hostile_name_in_a_model_is_only_ever_text(name, tmp_path):
    torch.manual_seed(0)
    module = Hostile([name])
    it = export_module(module, (torch.randn(2, 4),), name="hostile")
    stage_of = halves(it)
    source = emit_stages(it, stage_of, title=name)
    assert_only_expected_names(source)
    (tmp_path / "stages.py").write_text(source)
    assert_ruff_has_nothing_to_say(tmp_path)
    Model(it, (torch.randn(2, 4),), {}).assert_same(stage_of)
    built = load_source(source).build_stages(module.state_dict())
    keys = {key for stage in built for key in stage.state_dict()}
    assert keys == set(module.state_dict())


def test_hostile_class_names_and_titles_are_made_harmless():
    made = type("Evil(object):\n    import os\nclass X", (nn.Module,), {
        "__init__": lambda self: (nn.Module.__init__(self), setattr(self, "a", nn.Linear(4, 4)))[0],
        "forward": lambda self, x: torch.relu(self.a(x)) + 1,
    })  # fmt: skip
    outer = nn.Sequential(nn.Linear(4, 4), made())
    it = captured(outer, torch.randn(2, 4))
    for title in HOSTILE:
        source = emit_stages(it, halves(it, 0.25), title=title)
        assert_only_expected_names(source)
        assert "class EvilObjectImportOsClassX(nn.Module):" in source


def assert_only_expected_names(source: str) -> None:
    """No import but torch's, no call of anything but torch's, stages and our own classes."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    known = own | {
        "torch", "nn", "F", "self", "super", "dict", "isinstance", "setattr", "str", "range",
        "float", "RuntimeError", "stages", "stage", "name", "known", "checkpoint", "contextlib",
        "create_selective_checkpoint_contexts",
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known_imports = ("torch", "threading", "contextlib")
            assert all(alias.name.split(".")[0] in known_imports for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.module in ("torch", "torch.utils.checkpoint", "collections.abc", "typing")
        if isinstance(node, ast.Call):
            root = node.func
            while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                root = root.func if isinstance(root, ast.Call) else root.value
            if isinstance(root, ast.BinOp | ast.UnaryOp | ast.Compare):
                continue  # `(x + y).view(4)`: what it is made of is looked at by itself
            assert isinstance(root, ast.Name)
            is_local = root.id.isidentifier() and isinstance(node.func, ast.Attribute)
            assert root.id in known or is_local
        assert not isinstance(node, ast.Global | ast.Lambda)
    raised = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    assert len(raised) == 1, "only the refusal of the other mode"
    assert raised[0].startswith("raise RuntimeError('these stages are the model in ")


@given(st.text())
def test_any_text_makes_an_identifier(text):
    for name in (variable(text), class_name(text)):
        assert name.isidentifier()
        assert not keyword.iskeyword(name)
        assert len(name) < 60
    assert not is_attribute(text) or text.isidentifier()


@given(st.text())
def test_a_quoted_text_is_that_text(text):
    assert ast.literal_eval(quoted(text)) == text


@given(st.lists(st.text(max_size=120), min_size=1, max_size=4))
def test_a_docstring_cannot_be_left(lines):
    source = "\n".join(["class X:", *docstring(lines, 4)])
    (stmt,) = ast.parse(source).body
    assert isinstance(stmt, ast.ClassDef)
    assert len(stmt.body) == 1
    assert all(len(line) <= 100 for line in source.splitlines())


# Layout.


@given(st.integers(0, 12), st.integers(1, 30), st.integers(0, 40))
def test_long_statements_are_broken_as_ruff_breaks_them(count, length, indent):
    items = tuple("n" * length + str(i) for i in range(count))
    for expr in (call("function", items), Bracket("[", items, "]", display=True)):
        lines = statement(expr, 4 * (indent // 4), before="x = ")
        joined = "".join(line.strip() for line in lines)
        assert joined.replace(",", "").replace(" ", "") == str(expr).join(["x=", ""]).replace(
            ",", ""
        ).replace(" ", "")
        if len(lines) > 1:
            assert len(" " * (4 * (indent // 4)) + f"x = {expr}") > 100


def test_numbers_are_written_so_that_they_are_read_back():
    for value in (1, -2, 0.1, 1e-5, 1e300, True, None, "a'b\"c", [1, [2.5]], (1,), ()):
        assert ast.literal_eval(str(literal(value))) == value
    assert literal(float("-inf")) == 'float("-inf")'
    assert literal(torch.bfloat16) == "torch.bfloat16"


# What is built.


def test_the_builder_loads_a_state_dict_and_ties_what_was_tied():
    torch.manual_seed(0)
    module = models.Gpt().eval()
    args = (models.ids(97, 2, 16), models.ids(97, 2, 16))
    it = captured(module, *args)
    loaded = load_source(emit_stages(it, halves(it)))
    stages = loaded.build_stages(module.state_dict())
    weights = [
        parameter
        for stage in stages
        for name, parameter in stage.named_parameters(remove_duplicate=False)
        if name in ("wte.weight", "head.weight")
    ]
    assert len(weights) == 2
    assert weights[0] is weights[1]
    assert loaded.TIED in ({"wte.weight": "head.weight"}, {"head.weight": "wte.weight"})
    outcome, wanted = loaded.run_stages(stages, *args), module(*args)
    assert outcome.keys() == wanted.keys()
    assert all(same(outcome[key], wanted[key]) for key in wanted)
    outcome["loss"].backward()
    wanted["loss"].backward()
    assert same(weights[0].grad, module.wte.weight.grad)


def test_stages_hold_the_names_of_the_original_and_together_all_of_them():
    module = models.ResNet()
    it = captured(module, torch.randn(2, 3, 32, 32))
    built = load_source(emit_stages(it, halves(it))).build_stages(module.state_dict())
    assert all(set(stage.state_dict()) <= set(module.state_dict()) for stage in built)
    assert {key for stage in built for key in stage.state_dict()} == set(module.state_dict())
    assert all(
        tuple(value.shape) == tuple(module.state_dict()[key].shape)
        for stage in built
        for key, value in stage.state_dict().items()
    )


def test_running_statistics_are_written_back():
    module = models.ResNet().train()
    x = torch.randn(2, 3, 32, 32)
    it = captured(module, x)
    before = module.bn1.running_mean.clone()
    SequentialStages(it, emit(it, halves(it)))(x)
    assert not torch.equal(module.bn1.running_mean, before)
    assert module.bn1.num_batches_tracked == 1


def test_frozen_parameters_stay_frozen():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[0].weight.requires_grad_(False)
    it = captured(module, torch.randn(2, 4))
    loaded = load_source(emit_stages(it, halves(it)))
    assert loaded.FROZEN == ("0.weight",)
    plain = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    learned = {
        name: parameter.requires_grad
        for stage in loaded.build_stages(plain)
        for name, parameter in stage.named_parameters()
    }
    assert learned == {n: p.requires_grad for n, p in module.named_parameters()}


def test_large_constants_that_no_source_can_say_are_asked_for():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", torch.randn(20, 20), persistent=False)
            self.register_buffer("mask", torch.ones(20, 20).triu(1), persistent=False)
            self.register_buffer("few", torch.tensor([1.5, 2.5, float("inf")]), persistent=False)

        def forward(self, x: T) -> T:
            return x @ self.noise * self.mask + self.few[0]

    module, x = Model(), torch.randn(20, 20)
    it = captured(module, x)
    emitted = emit(it, halves(it))
    assert emitted.constants == ("noise",)
    loaded = load_source(emitted.source)
    with pytest.raises(KeyError, match="noise"):
        loaded.build_stages(module.state_dict())
    stages = loaded.build_stages(module.state_dict(), {"noise": module.noise})
    assert same(loaded.run_stages(stages, x), module(x))


@pytest.mark.parametrize(("training", "mode"), [(True, "training"), (False, "eval")])
def test_stages_refuse_the_mode_that_they_were_not_made_for(training, mode):
    args = (models.ids(97, 2, 16), models.ids(97, 2, 16))
    it = captured(models.Gpt().train(training), *args)
    run = SequentialStages(it, emit(it, halves(it)))
    assert same(run(*args)["loss"], run(*args)["loss"]) is not training  # dropout
    for stage in run.stages:
        assert stage.train(training) is stage
        with pytest.raises(RuntimeError, match=f"these stages are the model in {mode} mode"):
            nn.Sequential(stage).train(not training)


def test_new_tensors_are_made_where_the_arguments_are():
    source = emit_stages(
        it := captured(models.Gpt(), models.ids(97, 2, 16), models.ids(97, 2, 16)), halves(it)
    )
    assert "torch.arange(16, device=ids.device)" in source


# Refusals.


def test_stages_in_a_circle_are_refused():
    it = captured(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.randn(2, 4))
    ops = [op.name for op in it.graph.ops]
    with pytest.raises(PlanError, match=r"stages 0, 1 wait for each other in a circle"):
        emit_stages(it, dict(zip(ops, (0, 1, 0), strict=True)))


def test_a_plan_of_another_model_is_refused():
    it = captured(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(PlanError, match="none of its ops is in the model; capture the model"):
        emit_stages(it, {"other": 0})


@pytest.mark.parametrize("label", [-1, "0", True, 0.5, None])
def test_stages_are_numbered_from_0(label):
    it = captured(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(PlanError, match="stages are numbered from 0 up"):
        emit_stages(it, {"linear": label})


# What it looks like.


def test_the_code_of_a_small_gpt_is_the_golden_one(is_golden):
    module = models.Gpt(vocab=61, width=16, layers=2, positions=8)
    it = captured(module, models.ids(61, 2, 8), models.ids(61, 2, 8))
    cut = next(i for i, op in enumerate(it.graph.ops) if op.scope.startswith("h.1"))
    stage_of = {op.name: int(i >= cut) for i, op in enumerate(it.graph.ops)}
    is_golden(GOLDEN / "gpt.py.txt", emit_stages(it, stage_of, title="A small GPT"))


@pytest.mark.parametrize("more", [[], ["", "Holds a very", "  hung line."]])
def test_a_docstring_that_is_wrapped_stays_as_it_is_formatted(tmp_path, more):
    sizes = " and ".join(f"(batch, {size}, length)" for size in range(8))
    lines = ['"""A file."""', "", "", "def f() -> None:", *docstring([f"{sizes} to it.", *more], 4)]
    (tmp_path / "wrapped.py").write_text("\n".join(lines) + "\n")
    assert_ruff_has_nothing_to_say(tmp_path)
