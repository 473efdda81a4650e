"""Recurrent layers inside a model: persistent kernels between fused regions, in the interpreter."""

import time

import pytest

torch = pytest.importorskip("torch")

from in_interpreter import in_interpreter  # noqa: E402
from rtasks_modules import lower_module  # noqa: E402
from torch import nn  # noqa: E402

from partita.gpu.rtasks import recurrent_steps  # noqa: E402
from partita.gpu.rtasks.execute import RegionPipeline  # noqa: E402
from partita.gpu.rtasks.job import Job  # noqa: E402

CODE = """
import torch
from torch import nn
from partita.cluster import resolve
from partita.gpu.rtasks.execute import RegionPipeline
from partita.gpu.rtasks.recurrent_steps import recurrent_kernels
from partita.gpu.rtasks.launches import interpreted
from partita.gpu.rtasks.lower import captured, lower_flow
from partita.gpu.rtasks.planned import plan_regions
from partita.gpu.flow.fold import fold


class Layers(nn.Module):
    def __init__(self, layers):
        super().__init__()
        width = layers.hidden_size * (2 if layers.bidirectional else 1)
        self.one, self.layers, self.two = nn.Linear(8, 16), layers, nn.Linear(width, 4)

    def forward(self, x):
        return self.two(self.layers(torch.relu(self.one(x)))[0])


class Translate(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.write, self.head = nn.LSTM(8, 16, 2), nn.LSTM(8, 16, 2), nn.Linear(16, 5)

    def forward(self, x, y):
        _, state = self.read(x)
        return self.head(self.write(y, state)[0])


torch.manual_seed(0)
for module, shapes in (
    (Layers(nn.LSTM(16, 16, 2, bidirectional=True)), [(5, 1, 8)]),
    (Layers(nn.GRU(16, 16, batch_first=True)), [(1, 5, 8)]),
    (Layers(nn.RNN(16, 16)), [(5, 1, 8)]),
    (Translate(), [(4, 1, 8), (3, 1, 8)]),
):
    module.eval()
    inputs = tuple(torch.randn(shape) for shape in shapes)
    with torch.no_grad():
        lowered = lower_flow(fold(captured(module, inputs)), inputs[0].device)
        plans = plan_regions(lowered, resolve("H200").kinds[0], time_s=0.2)
        found, refused = recurrent_kernels(lowered, torch.device("cpu"))
        assert not refused and len(found) == len(shapes)
        outputs = RegionPipeline(lowered, interpreted(lowered, plans).launches, found)(*inputs)
        torch.testing.assert_close(outputs[0], module(*inputs))
print("all right")
"""


def test_layers_between_regions_give_what_the_model_gives():
    pytest.importorskip("triton")
    assert in_interpreter(CODE) == "all right\n"


def test_what_the_compiler_does_not_take_stays_with_pytorch(monkeypatch):
    def fails(*args):
        raise RuntimeError("out of registers\nand a long story")

    monkeypatch.setattr(recurrent_steps, "_layers", fails)
    with torch.no_grad():
        lowered = lower_module(nn.LSTM(8, 8).eval(), (torch.randn(3, 1, 8),))
    outcome, refused = recurrent_steps.recurrent_kernels(lowered, torch.device("cpu"))
    assert not outcome
    assert list(refused.values()) == ["cannot be compiled: RuntimeError: out of registers"]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.mix, self.two = nn.LSTM(8, 8), nn.Linear(8, 8), nn.GRU(8, 8)

    def forward(self, x):
        return self.two(torch.relu(self.mix(self.one(x)[0])))[0]


def test_each_layer_is_timed_by_itself_and_a_slow_kernel_is_not_used():
    module, x = Two().eval(), torch.randn(3, 1, 8)
    job = Job([module], [(x,)], torch.device("cpu"), lambda text: None)
    job.lower()

    def late(values):
        time.sleep(0.003)
        return module.one(values["x"])

    def early(values):  # the same every time, without its loop
        return known

    with torch.no_grad():
        known = module.two(torch.relu(module.mix(module.one(x)[0])))
        kept = job.faster_kernels([None] * len(job.lowered.pieces), {"lstm": late, "gru": early})
        outputs = RegionPipeline(job.lowered, [None] * len(job.lowered.pieces), kept)(x)
    assert list(kept) == ["gru"]
    assert job.persistent == {"gru": "a persistent kernel of its own"}
    assert job.notes[0].startswith("lstm stays with PyTorch: ")
    torch.testing.assert_close(outputs[0], known[0])
