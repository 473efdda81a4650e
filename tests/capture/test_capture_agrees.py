"""Captured models have the FLOPs and parameters of the zoo's, forward and in training."""

import resource
import time

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from partita.capture import capture, export_module  # noqa: E402
from partita.capture.reference_module import example_inputs, reference_module  # noqa: E402
from partita.graph import training_graph  # noqa: E402
from partita.graph.files import check_graph  # noqa: E402
from partita.graph.work import flops  # noqa: E402
from partita.zoo import build  # noqa: E402

# One of each family, small enough to be captured in a moment.
MODELS = [
    "alexnet", "resnext50", "inception_v3", "squeezenet1_0", "unet", "vit-b16", "rnnlm@8", "lstm@6",
    "deepspeech2@51", "transformer-base@64", "bert-base@64", "gpt2@64", "t5-small@64",
]  # fmt: skip


def total(graph) -> float:
    return sum(flops(graph.call(op)) for op in graph.ops)


def assert_agreement(captured, wanted):
    check_graph(captured)
    assert captured.num_parameters == wanted.num_parameters
    assert total(captured) == pytest.approx(total(wanted), rel=0.01)
    trained, other = training_graph(captured), training_graph(wanted)
    assert total(trained) == pytest.approx(total(other), rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_reference_module_agrees_with_its_graph(name):
    graph = build(name, batch=2)
    this_graph = capture(
        reference_module(graph, device="meta"), example_inputs(graph, device="meta")
    )
    assert_agreement(this_graph, graph)
    assert {t.name for t in this_graph.parameters} == {t.name for t in graph.parameters}


class Bottleneck(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or before != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet50(nn.Module):
    """As it is usually written: in-place activations, additions in place, a flatten."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        before = 64
        for stage, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
            blocks = []
            for block in range(count):
                blocks.append(Bottleneck(before, width, 2 if stage > 1 and block == 0 else 1))
                before = 4 * width
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(2048, 1000)

    def forward(self, x, targets):
        x = self.maxpool(F.relu_(self.bn1(self.conv1(x))))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        return F.cross_entropy(self.fc(torch.flatten(self.avgpool(x), 1)), targets)


class Block(nn.Module):
    def __init__(self, width, heads, conv1d):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.conv1d = conv1d
        sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.weights = nn.ParameterList([torch.empty(i, o) for i, o in sizes])
        self.biases = nn.ParameterList([torch.empty(o) for _, o in sizes])

    def _project(self, x, i):
        """A product with an untransposed weight, as the released GPT-2 has it, or a linear."""
        if self.conv1d:
            flat = torch.addmm(self.biases[i], x.reshape(-1, x.size(-1)), self.weights[i])
            return flat.view(*x.shape[:-1], -1)
        return F.linear(x, self.weights[i].T, self.biases[i])

    def forward(self, x):
        b, s, d = x.shape
        qkv = self._project(self.ln_1(x), 0).split(d, dim=2)
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._project(y.transpose(1, 2).reshape(b, s, d), 1)
        return x + self._project(F.gelu(self._project(self.ln_2(x), 2), approximate="tanh"), 3)


class GPT2(nn.Module):
    """GPT-2 with one projection for queries, keys and values, and a tied output layer."""

    def __init__(self, layers=12, width=768, heads=12, vocab=50257, conv1d=True):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(1024, width)
        self.h = nn.ModuleList([Block(width, heads, conv1d) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, labels=None):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(places)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100_000, 2048)
        self.lstm = nn.LSTM(2048, 2048, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(2048, 100_000)

    def forward(self, ids, targets):
        y, _ = self.lstm(self.embedding(ids))
        return F.cross_entropy(self.decoder(y).transpose(1, 2), targets)


def on_meta(model, *shapes):
    with torch.device("meta"):
        inputs = [torch.empty(s, dtype=torch.long if len(s) < 4 else None) for s in shapes]
        return model(), tuple(inputs)


def test_resnet50_as_usually_written_agrees_with_the_zoo():
    graph = capture(*on_meta(ResNet50, (4, 3, 224, 224), (4,)))
    assert_agreement(graph, build("resnet50", batch=4))
    assert {op.scope for op in graph.ops if op.kind == "conv"} >= {"layer4.0.downsample.0"}


@pytest.mark.parametrize("conv1d", [True, False], ids=["addmm", "linear"])
def test_gpt2_as_usually_written_agrees_with_the_zoo(conv1d):
    module, inputs = on_meta(lambda: GPT2(conv1d=conv1d), (2, 512), (2, 512))
    assert_agreement(capture(module, inputs), build("gpt2@512", batch=2))


def test_an_lstm_language_model_agrees_with_the_zoo():
    graph = capture(*on_meta(LanguageModel, (2, 16), (2, 16)))
    assert_agreement(graph, build("rnnlm@16", batch=2))


def test_gpt2_xl_is_captured_on_meta_tensors_in_seconds_and_little_memory():
    module, inputs = on_meta(lambda: GPT2(48, 1600, 25), (4, 1024), (4, 1024))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    captured = export_module(module, inputs)
    assert time.process_time() - start < 20
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 1000  # MB
    assert captured.graph.num_parameters == 1_557_611_200
    assert total(captured.graph) == pytest.approx(total(build("gpt2-xl", batch=4)), rel=0.01)
