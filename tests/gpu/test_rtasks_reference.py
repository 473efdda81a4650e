"""Tile ops in plain PyTorch against PyTorch's own operators, in every tile shape; kernels too."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from in_interpreter import in_interpreter  # noqa: E402
from rtasks_modules import examples, lower_module  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as nnf  # noqa: E402

from partita.gpu.reference_output import as_tuple, relative  # noqa: E402
from partita.gpu.rtasks.execute import RegionPipeline  # noqa: E402
from partita.gpu.rtasks.reference import FUNCTIONS, Tiles  # noqa: E402
from partita.gpu.rtasks.tileops import ACTS, num_tiles, tiles  # noqa: E402


def in_every_shape(lowered, *inputs):
    """The regions op by op, once in each tile shape of every op."""
    most = max(len(tiles(op)) for region in lowered.regions if region for op in region.ops)

    def launch(region, choice):
        chosen = [tiles(op)[min(choice, len(tiles(op)) - 1)] for op in region.ops]
        work = Tiles(region, chosen, lowered.arena)

        def run():
            work.spoil()
            for number, op in enumerate(region.ops):
                for tile in range(num_tiles(op, chosen[number])):
                    work(number, tile)

        return run

    for choice in range(most):
        launches = [
            None if region is None else launch(region, choice) for region in lowered.regions
        ]
        yield RegionPipeline(lowered, launches)(*inputs)


def check(module, *inputs, kinds=None):
    lowered = lower_module(module.eval(), inputs)
    with torch.no_grad():
        wanted = as_tuple(module(*inputs))
    for results in in_every_shape(lowered, *inputs):
        for mine, theirs in zip(results, wanted, strict=True):
            assert relative(mine, theirs.double()) < 2e-6
    if kinds is not None:
        regions = [region for region in lowered.regions if region is not None]
        assert [op.kind for region in regions for op in region.ops] == kinds


@settings(max_examples=5, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 11), st.integers(7, 9), st.integers(8, 10)),
    out=st.integers(1, 18),
    bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_convolutions_of_any_window(kernel, stride, dilation, shape, out, bias, seed):
    torch.manual_seed(seed)
    padding = (kernel[0] // 2, kernel[1] // 2)
    conv = nn.Conv2d(shape[1], out, kernel, stride, padding, dilation, bias=bias)
    check(conv, torch.randn(shape), kinds=["conv"])


@settings(max_examples=5, deadline=None)
@given(
    mode=st.sampled_from(["max", "ceil", "average", "inside", "depthwise"]),
    kernel=st.integers(2, 3),
    stride=st.integers(1, 2),
    channels=st.integers(1, 10),
    seed=st.integers(0, 9),
)
def test_windows_of_any_kind(mode, kernel, stride, channels, seed):
    torch.manual_seed(seed)
    pad = kernel // 2
    module = {
        "max": nn.MaxPool2d(kernel, stride, pad),
        "ceil": nn.MaxPool2d(kernel, stride, pad, ceil_mode=True),
        "average": nn.AvgPool2d(kernel, stride, pad),
        "inside": nn.AvgPool2d(kernel, stride, pad, count_include_pad=False),
        "depthwise": nn.Conv2d(channels, channels, kernel, stride, pad, groups=channels),
    }[mode]
    if mode == "depthwise" and channels == 1:
        return
    check(module, torch.randn(2, channels, 7, 6), kinds=["window"])


@settings(max_examples=5, deadline=None)
@given(
    rows=st.integers(1, 12),
    width=st.integers(1, 40),
    out=st.integers(1, 40),
    act=st.sampled_from(["ReLU", "GELU", "SiLU", "Sigmoid", "Tanh", "Hardtanh"]),
)
def test_products_of_any_size(rows, width, out, act):
    torch.manual_seed(rows)
    module = nn.Sequential(nn.Linear(width, out), getattr(nn, act)())
    check(module, torch.randn(rows, width), kinds=["gemv" if rows <= 8 else "conv"])


class Written(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


ELEMENTWISE = {
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "from below": lambda x: x.clamp(min=0.1),
    "relu6": nnf.relu6,
    "hard": lambda x: nnf.hardswish(x) + nnf.hardsigmoid(x),
    "leaky": lambda x: nnf.leaky_relu(x, 0.2),
    "powers": lambda x: (x**2 + 1) ** 0.5 + (x.abs() + 1) ** -0.5 + (x.abs() + 2) ** -1,
    "other way round": lambda x: 3.0 - 2.0 / (x.exp() + 1.0),
    "logs": lambda x: (x.square() + 1).log() * -x.abs().sqrt() + (x.abs() + 1).rsqrt(),
    "alpha": lambda x: torch.add(x, x.sigmoid(), alpha=0.3),
    "minimum": lambda x: torch.maximum(torch.minimum(x, x.tanh()), x.neg().reciprocal()),
    "gelus": lambda x: nnf.gelu(x) * nnf.gelu(x, approximate="tanh") * nnf.silu(x),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_ops_become_one_chain(name):
    torch.manual_seed(0)
    check(Written(ELEMENTWISE[name]), torch.randn(3, 21), kinds=["chain"])


def test_one_row_or_one_column_stands_for_all():
    torch.manual_seed(0)
    x, row, col = torch.randn(6, 10), torch.randn(1, 10), torch.randn(6, 1)
    check(Written(lambda x, r, c: x * r + c), x, row, col, kinds=["chain"])
    check(Written(lambda x, r: x * r), torch.randn(1, 6, 10), torch.randn(10), kinds=["chain"])


def test_a_constant_of_the_whole_shape_is_read_from_the_arena():
    torch.manual_seed(0)
    constant, vector = torch.randn(4, 10), torch.randn(10)
    check(Written(lambda x: (x + constant) * vector), torch.randn(4, 10), kinds=["chain"])
    per_channel = torch.randn(5, 1, 1)
    check(Written(lambda x: torch.tanh(x) * per_channel), torch.randn(1, 5, 3, 4))


@pytest.mark.parametrize("width", [7, 33])
def test_rows_of_any_width(width):
    torch.manual_seed(0)
    x = torch.randn(3, width)
    check(nn.Softmax(-1), x, kinds=["rows"])
    check(nn.LayerNorm(width), x, kinds=["rows"])
    check(nn.RMSNorm(width, eps=1e-5), x, kinds=["rows"])


def test_cells_begin_with_zeros_where_no_state_is_given():
    torch.manual_seed(0)
    lstm, gru = nn.LSTMCell(9, 12), nn.GRUCell(9, 12, bias=False)
    check(Written(lambda x: lstm(x)), torch.randn(1, 9), kinds=["lstm_cell"])
    check(Written(lambda x: gru(x)), torch.randn(1, 9), kinds=["gru_cell"])


def test_every_activation_has_a_reference():
    assert set(ACTS[1:]) <= set(FUNCTIONS)


KERNELS = """
import torch
from rtasks_modules import examples, lower_module, planned
from partita.gpu.rtasks.execute import RegionPipeline
from partita.gpu.rtasks.launches import compiled
from partita.gpu.reference_output import as_tuple, relative

for name in ("mlp, 3 rows", "cells", "resnet"):
    module, inputs = examples()[name]
    lowered = lower_module(module, inputs)
    launched = compiled(lowered, planned(lowered))
    assert not launched.refused, launched.refused
    with torch.no_grad():
        found = RegionPipeline(lowered, launched.launches)(*inputs)
        wanted = as_tuple(module(*inputs))
    error = max(relative(a, b.double()) for a, b in zip(found, wanted, strict=True))
    assert error < 2e-6, (name, error)
print("all agree")
"""


def test_the_kernels_agree_on_whole_models(tmp_path):
    pytest.importorskip("triton")
    said = in_interpreter(KERNELS, CUDA_VISIBLE_DEVICES="", XDG_CACHE_HOME=str(tmp_path))
    assert said == "all agree\n"


def test_the_examples_have_every_kind():
    outcome = set()
    known = examples()
    for name in ("mlp", "cells", "separable"):
        for region in lower_module(*known[name]).regions:
            outcome |= {op.kind for op in region.ops} if region is not None else set()
    assert outcome == {
        "gemv", "conv", "window", "combine", "chain", "rows", "lstm_cell", "gru_cell"
    }  # fmt: skip
