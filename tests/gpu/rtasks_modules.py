"""Small models with everything that lowering looks for, and how they run without a GPU."""

from dataclasses import replace

import torch
from streams_modules import MODULES, made
from torch import nn
from torch.nn import functional as nnf

from partita.cluster import resolve
from partita.gpu.flow.fold import fold
from partita.gpu.rtasks.execute import RegionPipeline
from partita.gpu.rtasks.interpret import interpret
from partita.gpu.rtasks.lower import captured, lower_flow
from partita.gpu.rtasks.planned import plan_regions
from partita.gpu.rtasks.reference import Tiles

SMALL = replace(resolve("H200").kinds[0], num_units=6)


def lower_module(module, inputs):
    """A module for inputs of these shapes, as regions and fallbacks in memory."""
    return lower_flow(fold(captured(module, inputs)), inputs[0].device)


class Mlp(nn.Module):
    """Norms of vectors, activations of every kind, odd widths, a softmax."""

    def __init__(self, dtype=None):
        super().__init__()
        self.one, self.norm = nn.Linear(24, 33, dtype=dtype), nn.BatchNorm1d(33, dtype=dtype)
        self.two, self.three = nn.Linear(33, 40, dtype=dtype), nn.Linear(40, 40, dtype=dtype)
        self.head = nn.Linear(40, 7, bias=False, dtype=dtype)

    def forward(self, x):
        x = nnf.relu(self.norm(self.one(x)))
        x = nnf.gelu(self.two(x), approximate="tanh")
        x = x + torch.tanh(self.three(x))
        x = nnf.hardswish(x) * torch.sigmoid(x) - 0.5
        return torch.softmax(self.head(x), -1)


class Block(nn.Module):
    """Pre-norm attention and MLP: the products are tiles, the attention a fallback."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.place = nn.Parameter(torch.randn(1, 11, width))

    def forward(self, x):
        x = x + self.place[:, : x.shape[1]]
        batch, steps, width = x.shape
        q, k, v = self.qkv(self.one(x)).split(width, -1)
        parts = [t.reshape(batch, steps, self.heads, -1).transpose(1, 2) for t in (q, k, v)]
        y = nnf.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(batch, steps, width)
        x = x + self.proj(y)
        return x + self.down(nnf.silu(self.up(self.two(x))))


class Cells(nn.Module):
    """Cells unrolled over three steps: the weights are the same in each."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(8, 20), nn.GRUCell(20, 8)

    def forward(self, x, h, c):
        for _ in range(3):
            h, c = self.lstm(x, (h, c))
            x = self.gru(h, x)
        return x, c


class Resnet(nn.Module):
    """A residual block with a projection, and a head over the mean of all pixels."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1)
        self.short, self.head = nn.Conv2d(3, 16, 1, 2), nn.Linear(16, 4)

    def forward(self, x):
        y = nnf.relu(self.b(nnf.relu(self.a(x))) + self.short(x))
        return self.head(y.mean((2, 3)))


class Nasnet(nn.Module):
    """A cell of pairs: separable convolutions, pools and shortcuts, added and concatenated."""

    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.depth = nn.ModuleList(
            nn.Conv2d(width, width, k, padding=k // 2, groups=width, bias=False)
            for k in (3, 5, 7)
        )  # fmt: skip
        self.point = nn.ModuleList(nn.Conv2d(width, width, 1, bias=False) for _ in range(3))
        self.norm = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))

    def separable(self, number, x):
        return self.norm[number](self.point[number](self.depth[number](nnf.relu(x))))

    def forward(self, x):
        x = self.stem(x)
        a = self.separable(0, x) + self.separable(1, x)
        b = nnf.avg_pool2d(x, 3, 1, 1, count_include_pad=False) + x
        c = self.separable(2, a) + nnf.max_pool2d(x, 3, 1, 1)
        return torch.cat([a, b, c, x], 1)


class Wide(nn.Module):
    """Wide groups, a cat of features, columns that are cut apart, channels last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 32, 3, padding=1, groups=2)
        self.norm, self.mix = nn.LayerNorm(32), nn.Linear(32, 16)
        self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 24)
        self.out = nn.Linear(24, 3)

    def forward(self, x):
        x = self.mix(self.norm(self.conv(x).permute(0, 2, 3, 1)))
        x = torch.cat([self.left(x), self.right(x)], -1)
        gate, value = x.split([8, 24], -1)
        return self.out(value) * gate.mean(-1, keepdim=True)


class Lenet(nn.Module):
    """Convolutions, then products with the whole image as one row."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 11, 3)
        self.size = nn.AdaptiveAvgPool2d((3, 2))
        self.three, self.four = nn.Linear(66, 20), nn.Linear(20, 5)

    def forward(self, x):
        x = self.two(nnf.max_pool2d(nnf.relu(self.one(x)), 2, 1))
        x = torch.flatten(self.size(nnf.max_pool2d(nnf.relu(x), (1, 2), 1)), 1)
        return self.four(nnf.relu(self.three(x)))


def examples():
    """Every model with inputs for it: name -> (module, inputs)."""
    torch.manual_seed(0)
    examples = {name: (made(name)[0], (made(name)[1],)) for name in MODULES}
    image = torch.randn(1, 3, 9, 8)
    examples |= {
        "mlp": (Mlp(), (torch.randn(1, 24),)),
        "mlp, 3 rows": (Mlp(), (torch.randn(3, 24),)),
        "mlp, 20 rows": (Mlp(), (torch.randn(20, 24),)),
        "block": (Block(), (torch.randn(1, 5, 16),)),
        "block, 11 rows": (Block(), (torch.randn(1, 11, 16),)),
        "cells": (Cells(), (torch.randn(1, 8), torch.randn(1, 20), torch.randn(1, 20))),
        "resnet": (Resnet(), (image,)),
        "nasnet": (Nasnet(), (image,)),
        "lenet": (Lenet(), (torch.randn(2, 3, 8, 8),)),
        "wide": (Wide(), (torch.randn(1, 16, 5, 4),)),
    }
    for module, _ in examples.values():
        for part in module.modules():
            if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
                nn.init.uniform_(part.running_mean, -0.5, 0.5)
                nn.init.uniform_(part.running_var, 0.5, 2.0)
        module.eval()
    return examples


def interpreted(lowered, plans, seed, change=lambda program: program):
    """The lowered flow, its regions tile by tile in random turns over NaN."""

    def launch(index):
        plan = plans[index]
        if plan is None:
            return (lambda: None) if lowered.pieces[index].fused else None
        tiles = Tiles(plan.region, plan.tiles, lowered.arena)

        def run():
            tiles.spoil()
            interpret(change(plan.program), tiles, seed)

        return run

    return RegionPipeline(lowered, [launch(index) for index in range(len(lowered.pieces))])


def planned(lowered, method="list"):
    """A plan for six units."""
    return plan_regions(lowered, SMALL, method=method, time_s=0.3)
