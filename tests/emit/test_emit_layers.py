"""Layers of PyTorch: which stay calls, and that each gives what it gave."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from partita.capture import export_module
from partita.emit.modules import constructor
from partita.emit.stages import emit
from partita.run.sequential import SequentialStages
from tests.emit.transparency import Model

T = torch.Tensor
LINE, IMAGE, CUBE = (2, 4, 8), (2, 4, 8, 8), (1, 2, 4, 4, 4)

# layer -> shape it is fed; all stay calls
CALLED = {
    nn.Linear(8, 3): LINE, nn.Linear(8, 3, bias=False): LINE,
    nn.Conv1d(4, 6, 3, padding=1, dilation=2): LINE, nn.Conv2d(4, 6, (1, 3), stride=(2, 1)): IMAGE,
    nn.Conv2d(4, 8, 3, groups=2, padding="same", bias=False): IMAGE, nn.Conv3d(2, 3, 2): CUBE,
    nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1): IMAGE,
    nn.BatchNorm1d(4): LINE, nn.BatchNorm2d(4, eps=1e-3, momentum=0.2): IMAGE,
    nn.BatchNorm2d(4, affine=False): IMAGE, nn.BatchNorm2d(4, track_running_stats=False): IMAGE,
    nn.LayerNorm(8): LINE, nn.LayerNorm((8, 8), elementwise_affine=False): IMAGE,
    nn.GroupNorm(2, 4): IMAGE, nn.InstanceNorm2d(4): IMAGE, nn.RMSNorm(8): LINE,
    nn.ReLU(inplace=True): LINE, nn.ReLU6(): LINE, nn.GELU(approximate="tanh"): LINE,
    nn.LeakyReLU(0.3): LINE, nn.ELU(0.5): LINE, nn.PReLU(4): IMAGE, nn.Hardtanh(-2, 1): LINE,
    nn.SiLU(inplace=True): LINE, nn.Softplus(2, 10): LINE, nn.Softmax(dim=1): LINE,
    nn.LogSoftmax(-1): LINE, nn.GLU(): LINE, nn.Mish(): LINE, nn.Sigmoid(): LINE, nn.Tanh(): LINE,
    nn.Dropout(0.3): LINE, nn.Flatten(): IMAGE, nn.Unflatten(1, (2, 2)): LINE,
    nn.MaxPool2d(2): IMAGE, nn.MaxPool2d(3, 2, 1, ceil_mode=True): IMAGE, nn.AvgPool2d(2): IMAGE,
    nn.AdaptiveAvgPool2d((1, None)): IMAGE, nn.AdaptiveAvgPool2d(2): IMAGE,
    nn.AdaptiveMaxPool2d(2): IMAGE, nn.Upsample(scale_factor=2): IMAGE, nn.PixelShuffle(2): IMAGE,
    nn.Upsample(size=(5, 7), mode="bilinear", align_corners=True): IMAGE, nn.ZeroPad2d(1): IMAGE,
    nn.ReflectionPad2d((1, 2, 0, 1)): IMAGE, nn.AvgPool1d(2): LINE, nn.Hardswish(): LINE,
}  # fmt: skip
# layers whose call is several operators, or in whose call more is done: written out
WRITTEN_OUT = {
    nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"): IMAGE,
    nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)): LINE,
    nn.LPPool2d(2, 2): IMAGE,
}


class Around(nn.Module):
    """A layer between two others, so that it has a name and its input needs gradients."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: T) -> T:
        x = x * self.scale
        return self.layer(x) + x.sum()


def model(layer: nn.Module, shape: tuple[int, ...]) -> Model:
    torch.manual_seed(0)
    x = torch.randn(shape)
    return Model(export_module(Around(layer), (x,)), (x,), {})


@pytest.mark.parametrize("layer", CALLED, ids=str)
def test_a_layer_stays_a_call_and_gives_the_same(layer):
    it = model(layer, CALLED[layer])
    it.assert_same(dict.fromkeys(it.ops, 0))
    source = emit(it.captured, dict.fromkeys(it.ops, 0)).source
    assert "self.layer(" in source
    assert f"self.layer = {constructor(layer)}" in source.replace("\n", "")


@pytest.mark.parametrize("layer", WRITTEN_OUT, ids=str)
def test_a_layer_that_does_more_is_written_out_and_gives_the_same(layer):
    it = model(layer, WRITTEN_OUT[layer])
    it.assert_same(dict.fromkeys(it.ops, 0))
    assert f"= nn.{type(layer).__name__}(" not in emit(it.captured, {}).source


TWO_LAYERS = nn.LSTM(8, 5, 2, dropout=0.3)
RECURRENT = [
    nn.LSTM(8, 5), nn.LSTM(8, 5, 2, bidirectional=True, batch_first=True), nn.GRU(8, 5, 3),
    nn.LSTM(8, 5, proj_size=3), nn.RNN(8, 5, 2), nn.RNN(8, 5, nonlinearity="relu"),
    nn.LSTM(8, 5, bias=False), TWO_LAYERS,
]  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "taken"),
    [
        (TWO_LAYERS, "outputs"),
        (TWO_LAYERS, "states"),
        (RECURRENT[2], "states"),
        *((layer, "both") for layer in RECURRENT),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_recurrent_layers_give_the_same_whatever_is_taken_of_them(layer, taken):
    class Use(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: T) -> Any:
            outputs, states = self.layer(x)
            return {"outputs": outputs, "states": states, "both": (outputs, states)}[taken]

    x = torch.randn(4, 2, 8)
    it = Model(export_module(Use(), (x,)), (x,), {})
    for place in range(0, len(it.ops) + 1, 2):
        it.assert_same({op: int(i >= place) for i, op in enumerate(it.ops)})


def test_a_layer_under_autocast_is_not_mistaken_for_the_layer_alone():
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: T) -> T:
            with torch.autocast("cpu", torch.bfloat16):
                return self.a(x)

    x = torch.randn(2, 8)
    it = Model(export_module(Cast(), (x,)), (x,), {})
    it.assert_same({})
    assert "nn.Linear(" not in emit(it.captured, {}).source


def test_a_layer_in_another_mode_than_the_model_keeps_its_own():
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    module.train()
    module[1].eval()
    module[2].eval()
    x = torch.randn(4, 8)
    it = Model(export_module(module, (x,)), (x,), {})
    it.assert_same({})
    source = emit(it.captured, {}).source
    assert "training=False" in source


def test_a_hook_of_a_layer_is_not_lost():
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    module[0].register_forward_hook(lambda layer, args, out: out * 2)
    x = torch.randn(4, 8)
    Model(export_module(module, (x,)), (x,), {}).assert_same({})


def test_one_module_under_two_names_is_one_set_of_weights():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = self.a
            self.c = nn.Sequential(self.a, nn.Tanh())

        def forward(self, x: T) -> T:
            return self.c(F.relu(self.b(self.a(x))))

    x = torch.randn(4, 8)
    it = Model(export_module(Shared(), (x,)), (x,), {})
    for place in range(len(it.ops) + 1):
        it.assert_same({op: int(i >= place) for i, op in enumerate(it.ops)})


def test_a_module_called_in_two_ways_is_written_out_where_it_is_called():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: T) -> T:
            return self.inner(self.inner(x, False), True)

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: T, wide: bool) -> T:
            return torch.tanh(self.a(x)) if wide else self.a(x) + 1

    x = torch.randn(4, 8)
    it = Model(export_module(Twice(), (x,)), (x,), {})
    it.assert_same({})
    assert "class Inner(" not in emit(it.captured, {}).source


def test_a_buffer_that_the_model_writes_is_written():
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: T) -> T:
            y = self.a(x)
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            self.steps += 1
            return y - self.mean

    x = torch.randn(4, 8)
    it = Model(export_module(Average(), (x,)), (x,), {})
    for place in range(len(it.ops) + 1):
        it.assert_same({op: int(i >= place) for i, op in enumerate(it.ops)})


def test_inputs_and_parameters_may_be_returned_as_they_are():
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.randn(3))

        def forward(self, x: T) -> dict[str, Any]:
            return {"x": x, "p": self.p, "n": None, "s": "text", "twice": [x + 1] * 2, "two": 2}

    x = torch.randn(4, 8)
    it = Model(export_module(Given(), (x,)), (x,), {})
    it.assert_same({})


class Pair(NamedTuple):
    left: T
    right: T


def test_results_of_types_of_their_own_are_given_back_as_such():
    class Named(nn.Module):
        def forward(self, x: T) -> Pair:
            return Pair(x + 1, right=x * 2)

    x = torch.randn(4, 8)
    it = export_module(Named(), (x,))
    emitted = emit(it, {})
    pair = SequentialStages(it, emitted)(x)
    assert isinstance(pair, Pair)
    assert torch.equal(pair.right, x * 2)
    assert '"""What the model gives, flat."""' in emitted.source


def test_a_number_read_off_a_tensor_may_pass_between_stages():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: T) -> T:
            y = self.a(x)
            return y * y.sum().item()

    x = torch.randn(4, 8)
    it = Model(export_module(Scaled(), (x,)), (x,), {})
    for place in range(len(it.ops) + 1):
        it.assert_same({op: int(i >= place) for i, op in enumerate(it.ops)})
    source = emit(it.captured, {op: i for i, op in enumerate(it.ops)}).source
    assert ".item()" in source
    assert "item: float" in source
