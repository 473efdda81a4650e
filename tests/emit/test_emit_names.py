"""Values in emitted code are called what the model's own code calls them."""

import re

import pytest
import torch
from torch import nn

import partita
from partita.emit.local_names import noun, sentence_at
from partita.emit.plans import emit_plan
from partita.emit.text import call, statement, without_parentheses
from tests.emit.plans import plan_in_parts
from tests.emit.test_emit_source import assert_only_expected_names
from tests.emit.transparency import assert_ruff_has_nothing_to_say
from tests.shallow import GPT2, T5


class Norm(nn.Module):
    """Casts to the type that it is given already, and reads the result itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, hidden_states):
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + 1e-6)


class Layer(nn.Module):
    """A residual kept aside under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.qkv = nn.Linear(8, 24)
        self.fc = nn.Linear(8, 8)

    def forward(self, hidden_states, bias):
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        query, key, value = self.qkv(hidden_states).chunk(3, dim=-1)
        scores = torch.softmax(query @ key.transpose(-2, -1) + bias, dim=-1)
        hidden_states = scores @ value
        return residual + self.fc(hidden_states)


class Net(nn.Module):
    """Layers that all read one table."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, given):
        distances = torch.arange(6).float()
        attention_bias = -(distances[:, None] - distances[None, :]).abs()
        output = given
        for layer in self.layers:
            output = layer(output, attention_bias)
        return output


def piped(module, *args):
    """The stages of a module, which give what it gives."""
    stages = partita.pipe(module, args=args, devices=2)
    assert torch.equal(stages(*args), module(*args))
    assert_only_expected_names(stages.source)
    return stages.source


def forward_of(source, name):
    """The lines of the forward of a class."""
    body = source.split(f"class {name}(nn.Module):")[1].split("\n\n\n")[0]
    return body.split('."""\n', 2)[2].splitlines()


def test_locals_are_those_of_the_model():
    source = piped(Net().eval(), torch.randn(2, 6, 8))
    assert forward_of(source, "Layer") == [
        "        residual = hidden_states",
        "        hidden_states = self.norm(hidden_states)",
        "        query, key, value = self.qkv(hidden_states).chunk(3, -1)",
        "        scores = (query @ key.transpose(-2, -1)) + attention_bias",
        "        scores = torch.softmax(scores, -1)",
        "        hidden_states = scores @ value",
        "        return residual + self.fc(hidden_states)",
    ]
    assert source.count("class Layer") == 1  # one class for the layers of both stages


def test_layers_that_all_read_one_table_are_a_loop():
    source = partita.pipe(Net().eval(), args=(torch.randn(2, 6, 8),), devices=1).source
    loop = """
        for block in self.layers:
            output = block(output, attention_bias)
        return output
"""
    assert loop in source


def test_a_cast_that_does_nothing_stays_in_its_module():
    source = piped(Net().eval(), torch.randn(2, 6, 8))
    assert "def forward(self, hidden_states: Tensor) -> Tensor:" in source.split("class Norm")[1]


def test_gradients_are_those_of_the_model_to_the_last_bit():
    module, given = Net(2), torch.randn(2, 6, 8)
    stages = partita.pipe(module, args=(given,), devices=1)
    gradients = []
    for run in (module, stages):
        run(given).sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters()])
        module.zero_grad()
    assert all(map(torch.equal, *gradients))


class Awkward(nn.Module):
    """Names that Python or the emitted code owns, and one value under two names."""

    def forward(self, x):
        F = torch.relu(x)  # noqa: N806
        list = F + 1
        self_ = list * F
        l = torch.tanh(self_)  # noqa: E741
        batch = x = l + list  # noqa: F841
        return torch.sin(x) * F + l


def test_names_never_shadow(tmp_path):
    source = piped(Awkward().eval(), torch.randn(2, 3))
    (tmp_path / "stages.py").write_text(source)
    assert_ruff_has_nothing_to_say(tmp_path)


def test_a_model_without_source_gets_nouns():
    scope = {"nn": nn, "torch": torch}
    text = """
class Typed(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        a = self.q_proj(x)
        b = self.k_proj(x)
        return torch.softmax(a @ b.transpose(-2, -1), -1)
"""
    exec(text, scope)
    source = piped(scope["Typed"]().eval(), torch.randn(2, 3, 8))
    assert "query = self.q_proj(x)" in source
    assert "key = self.k_proj(x)" in source


class Tables(nn.Module):
    """Two tables that begin alike, of which one is made of what the other is made of first."""

    def forward(self, x):
        places = torch.arange(4)
        rows = (places + 0).unsqueeze(1)
        x = x * (rows >= 0).expand(4, 4)
        again = torch.arange(4)
        columns = (again + 0).unsqueeze(1)
        x = x + (columns >= 0).expand(4, 4).to(x.dtype)
        return x - (columns.unsqueeze(0) <= rows).to(x.dtype)


def test_equal_tables_are_made_once_and_in_order():
    source = piped(Tables().eval(), torch.randn(4, 4))
    assert source.count("torch.arange") == 1


class Precedence(nn.Module):
    """Operators within operators, some of which end like a subscript."""

    def forward(self, x):
        y = (x + x[0]) * 2
        z = -((x - y[1]) ** 2)
        return (y - z[0]) / (z @ (x + y[0])[0].T + 3) - (x - (y - z)).sum()


def test_expressions_mean_what_they_meant():
    piped(Precedence().eval(), torch.randn(3, 3))


@pytest.mark.parametrize(
    "model", [f"{GPT2}@16", f"{T5}@16", "resnet50@32"], ids=["gpt2", "t5", "resnet50"]
)
def test_code_of_the_zoo_has_no_letters_with_numbers(model):
    source = emit_plan(plan_in_parts(model, 2)).source
    names = re.findall(r"^ +(\w+(?:, \w+)*) = ", source, re.MULTILINE)
    told = {name for line in names for name in line.split(", ")}
    assert len(told) > 3
    assert not [name for name in told if re.fullmatch(r"[yzuvw]|[xyz]_\d+|mul_\d+|add_\d+", name)]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("h.3.attn.q_proj", "query"), ("layers.0.self_attn", "attn_out"), ("h.11", "hidden"),
        ("mlp.gate_proj", "gate"), ("decoder.block.0.layer.1.layer_norm", "normed"),
        ("lm_head", "logits"), ("class", "class_"), ("cross_entropy_loss", "loss"),
    ],
)  # fmt: skip
def test_layers_say_what_they_make(name, word):
    assert noun(name) == word


def test_a_file_that_is_no_python_says_nothing(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("def forward(:")
    assert sentence_at(str(path), 1) is None
    assert sentence_at(str(tmp_path / "missing.py"), 1) is None


def test_expressions_keep_the_parentheses_they_need():
    inner = call("f", ["(a + b)", "(a).b", "(a, b)", "((a + b) * c)"])
    assert str(without_parentheses(inner)) == "f(a + b, (a).b, (a, b), (a + b) * c)"
    long = f"{'a' * 50} + {'b' * 50}"
    assert statement(long, 4, before="x = ") == ["    x = (", f"        {long}", "    )"]


class Crossed(nn.Module):
    """Makes the second of its results first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden, others):
        second = self.layer(others)
        return self.layer(hidden), second


class TwoStreams(nn.Module):
    """Residuals under one name, of streams whose names are crossed where they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.crossed, self.fc = nn.LayerNorm(8), Crossed(), nn.Linear(8, 8)

    def forward(self, hidden):
        other = 2 * hidden
        residual = hidden
        hidden = self.norm(hidden)
        hidden, streamed = self.crossed(hidden, other)
        hidden = torch.tanh(hidden)
        hidden = residual + hidden
        streamed = torch.tanh(streamed)
        streamed = other + streamed
        residual = hidden
        hidden = self.fc(hidden)
        return residual + hidden + streamed


def test_a_name_that_is_still_read_is_not_given_to_another_value():
    piped(nn.Sequential(TwoStreams(), TwoStreams()), torch.randn(2, 8))
